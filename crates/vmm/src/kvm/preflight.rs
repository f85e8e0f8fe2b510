//! What a machine needs of a host, and whether this host has it.
//!
//! A source puts [`crate::vcpu::Vcpus::needs`] into [`MachineConfig::extra`]. A destination calls [`preflight`] with what
//! came, and puts what that returns into the `extra` of the configuration that it reports. What it does not return
//! was not understood, and so shows up as a mismatch.

use machine::MachineConfig;
use std::collections::BTreeMap;

/// Checks that this host can run the machine that `config` describes.
///
/// # Errors
/// Every reason why it cannot, each by name.
pub(crate) fn preflight(config: &MachineConfig) -> Result<BTreeMap<String, String>, Vec<String>> {
    let _ = config;
    Err(vec!["not built yet".to_owned()])
}
