//! A guest whose RAM lies in a file: paused for good. Its RAM is rebuilt elsewhere, and nothing runs.

use machine::{BalloonConfig, Error, Machine, MachineConfig, MachineState, Result};
use pages::Layout;
use std::collections::BTreeMap;

/// The machine kind of such a guest.
pub(crate) const KIND: &str = "file";

/// A machine without vCPUs and devices.
#[derive(Clone, Debug)]
pub struct FileMachine {
    layout: Layout,
}

impl FileMachine {
    /// A machine with this RAM and nothing else.
    pub fn new(layout: Layout) -> Self {
        FileMachine { layout }
    }
}

impl Machine for FileMachine {
    fn config(&self) -> MachineConfig {
        MachineConfig {
            kind: KIND.to_owned(),
            layout: self.layout.clone(),
            vcpus: 0,
            balloon: BalloonConfig {
                dialect: "off".to_owned(),
                features: 0,
            },
            extra: BTreeMap::new(),
        }
    }

    fn is_running(&self) -> bool {
        false
    }

    fn pause(&mut self) -> Result<()> {
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        Ok(())
    }

    fn save(&mut self) -> Result<MachineState> {
        Ok(MachineState::default())
    }

    fn restore(&mut self, state: &MachineState) -> Result<()> {
        match state.sections.first() {
            None => Ok(()),
            Some(section) => Err(Error::Refused(format!(
                "a guest in a file has no devices, and cannot take the state of '{}'",
                section.name
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::Section;

    #[test]
    fn nothing_runs_and_nothing_is_saved() {
        let mut machine = FileMachine::new(Layout::flat(16).unwrap());
        machine.resume().unwrap();
        assert!(!machine.is_running());
        let state = machine.save().unwrap();
        assert!(state.sections.is_empty());
        machine.restore(&state).unwrap();
        let section = Section {
            name: "vcpu0".to_owned(),
            version: 1,
            data: vec![],
        };
        let error = machine
            .restore(&MachineState {
                sections: vec![section],
            })
            .unwrap_err();
        assert!(error.to_string().contains("vcpu0"));
    }
}
