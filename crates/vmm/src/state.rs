//! Sections of saved state: written by their owners, read once, with nothing left over.

use crate::{Error, Result};
use machine::{MachineState, Section};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Makes a section of `data`.
pub(crate) fn section<T: Serialize>(name: impl Into<String>, version: u32, data: &T) -> Result<Section> {
    let name = name.into();
    let data = serde_json::to_vec(data).map_err(|e| Error::state(&name, format!("it cannot be written: {e}")))?;
    Ok(Section { name, version, data })
}

/// The sections of a machine that comes in. Each is taken once, by name and version; [`Incoming::finish`] refuses what
/// nobody took.
#[derive(Debug)]
pub(crate) struct Incoming<'a> {
    left: Vec<&'a Section>,
}

impl<'a> Incoming<'a> {
    pub(crate) fn new(state: &'a MachineState) -> Self {
        Incoming {
            left: state.sections.iter().collect(),
        }
    }

    /// Takes a section as it is, for an owner that reads it itself.
    pub(crate) fn take_raw(&mut self, name: &str) -> Result<&'a Section> {
        let at = self.left.iter().position(|section| section.name == name);
        at.map(|at| self.left.remove(at))
            .ok_or_else(|| Error::state(name, "the source sent none"))
    }

    /// Takes a section and reads it. `T` should deny unknown fields; its values are still untrusted.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str, version: u32) -> Result<T> {
        let section = self.take_raw(name)?;
        if section.version != version {
            let why = format!("version {} came, this program reads version {version}", section.version);
            return Err(Error::state(name, why));
        }
        serde_json::from_slice(&section.data).map_err(|e| Error::state(name, e.to_string()))
    }

    /// Ends it: a section that is left belongs to a device that this machine does not have.
    pub(crate) fn finish(self) -> Result<()> {
        match self.left.first() {
            None => Ok(()),
            Some(section) => Err(Error::state(&section.name, "this machine has no such device")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(names: &[&str]) -> MachineState {
        MachineState {
            sections: names.iter().map(|name| section(*name, 2, &7u32).unwrap()).collect(),
        }
    }

    #[test]
    fn each_section_is_taken_once_and_none_is_left() {
        let state = state(&["a", "b"]);
        let mut incoming = Incoming::new(&state);
        assert_eq!(incoming.take::<u32>("a", 2).unwrap(), 7);
        assert!(incoming.take::<u32>("a", 2).is_err(), "twice");
        assert!(incoming.finish().unwrap_err().to_string().contains('b'));
    }

    #[test]
    fn another_version_or_form_is_refused_by_name() {
        let state = state(&["a", "b"]);
        let mut incoming = Incoming::new(&state);
        let error = incoming.take::<u32>("a", 3).unwrap_err().to_string();
        assert!(error.contains("version 2") && error.contains("version 3"), "{error}");
        assert!(incoming.take::<String>("b", 2).is_err());
    }
}
