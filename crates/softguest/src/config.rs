//! What a guest is made of, and how that travels: a destination builds its guest from the source's
//! [`MachineConfig`] alone.

use crate::quirks::Quirks;
use crate::{Error, Result};
use balloon::{Dialect, feature};
use machine::MachineConfig;
use pages::Layout;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The least RAM of a guest, bytes.
pub const MIN_BYTES: u64 = 16 << 20;

/// The most vCPUs of a guest: each is a thread.
pub const MAX_VCPUS: u32 = 64;

/// The most pages a second that a workload may write.
const MAX_RATE: u64 = 1 << 32;

/// The most RAM, pages: a PFN of the balloon interface has 32 bits.
const MAX_PFN: u64 = 1 << 32;

/// What the guest does all day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// A few hundred page writes a second, as an idle distribution has.
    #[default]
    Idle,
    /// Rewrites pages all over what it uses.
    Churn {
        /// Pages written a second.
        pages_per_s: u64,
    },
    /// Allocates, writes and frees, as a compiler run does.
    Compile,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workload::Idle => f.write_str("idle"),
            Workload::Churn { pages_per_s } => write!(f, "churn:{pages_per_s}"),
            Workload::Compile => f.write_str("compile"),
        }
    }
}

impl FromStr for Workload {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let bad = || {
            Error::Config(format!(
                "workload {s:?} is unknown; choose idle, churn:PAGES_PER_SECOND (up to {MAX_RATE}) or compile"
            ))
        };
        match s {
            "idle" => Ok(Workload::Idle),
            "compile" => Ok(Workload::Compile),
            _ => {
                let rate = s.strip_prefix("churn:").ok_or_else(bad)?;
                let pages_per_s = rate.parse().map_err(|_| bad())?;
                if pages_per_s > MAX_RATE {
                    return Err(bad());
                }
                Ok(Workload::Churn { pages_per_s })
            }
        }
    }
}

/// One past the last page that a `bitmap` balloon can name in its inflate and deflate bitmaps, whose windows of 32 GiB its
/// driver gets wrong after the first (quirk 9).
const BITMAP_END: u64 = 32 << (30 - 12);

/// The balloon that a guest of dialect `dialect` with RAM of `layout` has unless told otherwise. Reporting is left out: it
/// empties an aged guest by itself, and hosts leave it off too.
pub fn default_balloon(dialect: Dialect, layout: &Layout) -> balloon::Config {
    let common = feature::MUST_TELL_HOST | feature::STATS_VQ | feature::DEFLATE_ON_OOM;
    let features = match dialect {
        Dialect::Standard => common | feature::FREE_PAGE_HINT | feature::PAGE_POISON,
        Dialect::Bitmap if layout.end().0 <= BITMAP_END => common | feature::MISC_VQ | feature::PAGE_BITMAP,
        Dialect::Bitmap => common | feature::MISC_VQ,
        Dialect::BitmapRfc => common | feature::PAGE_BITMAP,
    };
    balloon::Config::new(dialect, features)
}

/// What a guest is made of.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// Where its RAM lies; any whole number of pages from [`MIN_BYTES`] on.
    pub layout: Arc<Layout>,
    /// Memory that it uses, bytes; what the kernel needs for itself comes on top.
    pub used_bytes: u64,
    /// The share of the used pages that lie singly, anywhere in RAM, 0 to 1; the rest is contiguous.
    pub scatter: f64,
    /// Memory that was in use once and is free now, bytes: its content is still there.
    pub aged_bytes: u64,
    /// What it does.
    pub workload: Workload,
    /// Virtual CPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u32,
    /// Seed of its contents and of what it does.
    pub seed: u64,
    /// Its balloon device; `None` for no balloon.
    pub balloon: Option<balloon::Config>,
    /// Whether pages are zeroed when they are allocated (`init_on_alloc=1`).
    pub init_on_alloc: bool,
    /// What free pages are filled with (`page_poison=on`, 0xaa in Linux).
    pub poison: Option<u8>,
    /// Whether the balloon driver is there from boot on; else it comes with [`crate::SoftGuest::load_driver`].
    pub driver: bool,
    /// How the balloon driver behaves, in the `bitmap` dialects.
    pub quirks: Quirks,
    /// How long the guest waits between reports of free blocks (REPORTING).
    pub report_interval: Duration,
}

impl GuestConfig {
    /// An idle guest of one vCPU with a standard balloon; it uses 1/32 of RAM.
    pub fn new(layout: Arc<Layout>) -> Self {
        GuestConfig {
            used_bytes: layout.total_bytes() / 32,
            balloon: Some(default_balloon(Dialect::Standard, &layout)),
            layout,
            scatter: 0.0,
            aged_bytes: 0,
            workload: Workload::Idle,
            vcpus: 1,
            seed: 1,
            init_on_alloc: false,
            poison: None,
            driver: true,
            quirks: Quirks::default(),
            report_interval: Duration::from_secs(2),
        }
    }

    /// The same with the balloon that a guest of `dialect` has unless told otherwise.
    #[must_use]
    pub fn with_balloon(self, dialect: Dialect) -> Self {
        GuestConfig {
            balloon: Some(default_balloon(dialect, &self.layout)),
            ..self
        }
    }

    /// Refuses what makes no guest.
    pub(crate) fn check(&self) -> Result<()> {
        let bytes = self.layout.total_bytes();
        if bytes < MIN_BYTES {
            return Err(Error::Config(format!(
                "a guest of {bytes} bytes is too small; give it at least {MIN_BYTES}"
            )));
        }
        if self.layout.end().0 > MAX_PFN {
            return Err(Error::Config(format!(
                "guest RAM ends at page {}, past {MAX_PFN:#x}: a balloon's page numbers have 32 bits",
                self.layout.end()
            )));
        }
        if self.vcpus == 0 || self.vcpus > MAX_VCPUS {
            return Err(Error::Config(format!(
                "a guest has 1 to {MAX_VCPUS} vCPUs, not {}",
                self.vcpus
            )));
        }
        if !(0.0..=1.0).contains(&self.scatter) {
            return Err(Error::Config(format!(
                "scatter is a share from 0 to 1, not {}",
                self.scatter
            )));
        }
        for (what, wanted) in [("used", self.used_bytes), ("aged", self.aged_bytes)] {
            if wanted > bytes {
                return Err(Error::Config(format!(
                    "{wanted} bytes {what} do not fit a guest of {bytes} bytes"
                )));
            }
        }
        Ok(())
    }

    /// What a migration compares, and all that a destination needs.
    pub(crate) fn machine_config(&self) -> MachineConfig {
        let extra = BTreeMap::from([
            ("workload".to_owned(), self.workload.to_string()),
            ("seed".to_owned(), self.seed.to_string()),
            ("init_on_alloc".to_owned(), self.init_on_alloc.to_string()),
            (
                "poison".to_owned(),
                self.poison.map_or("none".to_owned(), |p| p.to_string()),
            ),
            (
                "report_interval_ms".to_owned(),
                self.report_interval.as_millis().to_string(),
            ),
        ]);
        MachineConfig {
            kind: "soft".to_owned(),
            layout: (*self.layout).clone(),
            vcpus: self.vcpus,
            balloon: balloon::Config::describe(self.balloon.as_ref()),
            extra,
        }
    }

    /// The guest that `machine` describes. It comes from a peer: everything is checked.
    pub(crate) fn from_machine_config(machine: &MachineConfig) -> Result<Self> {
        if machine.kind != "soft" {
            return Err(Error::Config(format!(
                "a soft guest cannot be made of a machine of kind {:?}",
                machine.kind
            )));
        }
        let field = |name: &str| {
            let value = machine.extra.get(name);
            value.ok_or_else(|| Error::Config(format!("the machine's configuration lacks {name:?}")))
        };
        let bad = |name: &str, value: &str| Error::Config(format!("the machine's {name} is {value:?}: not understood"));
        let number = |name: &str| -> Result<u64> {
            let value = field(name)?;
            value.parse().map_err(|_| bad(name, value))
        };
        let init = field("init_on_alloc")?;
        let poison = field("poison")?;
        let balloon = balloon::Config::from_description(&machine.balloon)?;
        let config = GuestConfig {
            used_bytes: 0,
            workload: field("workload")?.parse()?,
            vcpus: machine.vcpus,
            seed: number("seed")?,
            balloon,
            init_on_alloc: init.parse().map_err(|_| bad("init_on_alloc", init))?,
            poison: match poison.as_str() {
                "none" => None,
                value => Some(value.parse().map_err(|_| bad("poison", value))?),
            },
            report_interval: Duration::from_millis(number("report_interval_ms")?),
            driver: false,
            ..GuestConfig::new(Arc::new(machine.layout.clone()))
        };
        config.check()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_survives_the_way_to_the_destination() {
        let config = GuestConfig {
            workload: Workload::Churn { pages_per_s: 1234 },
            vcpus: 3,
            seed: u64::MAX,
            init_on_alloc: true,
            poison: Some(0xaa),
            ..GuestConfig::new(Arc::new(Layout::pc(5 << 18).unwrap()))
        };
        let there = GuestConfig::from_machine_config(&config.machine_config()).unwrap();
        assert_eq!(there.machine_config(), config.machine_config());
        assert!(config.machine_config().mismatches(&there.machine_config()).is_empty());
    }

    #[test]
    fn configurations_that_make_no_guest_are_refused_by_name() {
        let good = GuestConfig::new(Arc::new(Layout::flat(4096).unwrap()));
        assert!(good.check().is_ok());
        let refused = |config: GuestConfig| config.check().unwrap_err().to_string();
        let small = GuestConfig::new(Arc::new(Layout::flat(4095).unwrap()));
        assert!(refused(small).contains("too small"));
        let vcpus = GuestConfig {
            vcpus: 65,
            ..good.clone()
        };
        assert!(refused(vcpus).contains("vCPUs"));
        let scatter = GuestConfig {
            scatter: f64::NAN,
            ..good.clone()
        };
        assert!(refused(scatter).contains("scatter"));
        let used = GuestConfig {
            used_bytes: 1 << 30,
            ..good
        };
        assert!(refused(used).contains("1073741824 bytes used"));
        for text in ["", "churn", "churn:", "churn:-1", "churn:99999999999999", "Idle"] {
            assert!(text.parse::<Workload>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_hostile_description_makes_no_guest() {
        let good = GuestConfig::new(Arc::new(Layout::flat(4096).unwrap())).machine_config();
        for (name, value) in [
            ("workload", "fork-bomb"),
            ("seed", "x"),
            ("init_on_alloc", "2"),
            ("poison", "256"),
        ] {
            let mut bad = good.clone();
            bad.extra.insert(name.to_owned(), value.to_owned());
            assert!(GuestConfig::from_machine_config(&bad).is_err(), "{name}");
            bad.extra.remove(name);
            assert!(GuestConfig::from_machine_config(&bad).is_err(), "{name} missing");
        }
        let vcpus = MachineConfig {
            vcpus: u32::MAX,
            ..good
        };
        assert!(GuestConfig::from_machine_config(&vcpus).is_err());
    }
}
