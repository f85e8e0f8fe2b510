//! vCPUs and devices.

use serde::{Deserialize, Serialize};

/// The saved state of one vCPU or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Whose state: `balloon`, `vcpu0`, ... No two sections of a machine have the same name.
    pub name: String,
    /// The version of its form, counted from 1 by whoever wrote it.
    pub version: u32,
    /// The state, in a form that only its owner reads. Untrusted when it comes back.
    pub data: Vec<u8>,
}

/// The saved state of a machine, RAM left out: one section a vCPU or device, in the order they are restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineState {
    /// The sections.
    pub sections: Vec<Section>,
}
