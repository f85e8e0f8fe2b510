//! What a machine is made of: compared before a migration starts.

use pages::Layout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The balloon that a machine has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonConfig {
    /// `standard`, `bitmap`, `bitmap-rfc` or `off`.
    pub dialect: String,
    /// The feature bits that the device offers.
    pub features: u64,
}

/// A machine's make-up: what the source tells, and what the destination compares with what it can offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineConfig {
    /// What runs it: `soft`, `linux`, `file`, or an embedding VMM's own name.
    pub kind: String,
    /// Where RAM lies.
    pub layout: Layout,
    /// How many virtual CPUs.
    pub vcpus: u32,
    /// The balloon.
    pub balloon: BalloonConfig,
    /// Whatever else must be equal on both sides, by name.
    pub extra: BTreeMap<String, String>,
}

/// Something in which two machines differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What differs.
    pub what: String,
    /// The source's value.
    pub source: String,
    /// The destination's value.
    pub destination: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: the source has {}, the destination {}",
            self.what, self.source, self.destination
        )
    }
}

impl MachineConfig {
    /// Everything in which `destination` differs from this source, each by name.
    pub fn mismatches(&self, destination: &MachineConfig) -> Vec<Mismatch> {
        let mut found = Vec::new();
        let mut compare = |what: &str, source: String, destination: String| {
            if source != destination {
                found.push(Mismatch {
                    what: what.to_owned(),
                    source,
                    destination,
                });
            }
        };
        let regions = |l: &Layout| {
            let list: Vec<String> = l.regions().iter().map(|r| format!("{r}")).collect();
            format!("{} pages in [{}]", l.total_pages(), list.join(", "))
        };
        compare("machine kind", self.kind.clone(), destination.kind.clone());
        compare("RAM layout", regions(&self.layout), regions(&destination.layout));
        compare("vCPUs", self.vcpus.to_string(), destination.vcpus.to_string());
        compare(
            "balloon dialect",
            self.balloon.dialect.clone(),
            destination.balloon.dialect.clone(),
        );
        let features = |b: &BalloonConfig| format!("{:#x}", b.features);
        compare(
            "balloon features",
            features(&self.balloon),
            features(&destination.balloon),
        );
        let absent = || "nothing".to_owned();
        let names: std::collections::BTreeSet<&String> = self.extra.keys().chain(destination.extra.keys()).collect();
        for name in names {
            let of = |m: &MachineConfig| m.extra.get(name).cloned().unwrap_or_else(absent);
            compare(name, of(self), of(destination));
        }
        found
    }
}
