//! What a machine needs of a host, and whether this host has it.
//!
//! A source puts its [`Needs`] ([`crate::vcpu::Vcpus::needs`]) into [`MachineConfig::extra`]:
//!
//! | name | value |
//! |---|---|
//! | `machine` | the machine's version, [`MACHINE_VERSION`] |
//! | `cpu-vendor` | of CPUID leaf 0 |
//! | `cpuid-LEAF.INDEX` | EAX, EBX, ECX and EDX of a leaf with features, as the guest has it; one entry a leaf |
//! | `tsc-khz` | the TSC's frequency, where the host knows it |
//! | `xsave-bytes` | how large the extended register state is |
//! | `msrs-N` | the MSRs in the state, in hexadecimal, spread over entries that fit into a message |
//!
//! A destination calls [`preflight()`] with what came, and puts what that returns into the `extra` of the configuration that
//! it reports. Entries that it did not understand are not among them, and so show up as mismatches. KVM's capabilities are
//! not in there: [`super::Host`] wants the same of both hosts.

use super::features::{lacking, leaf, words};
use super::tsc::{Fit, Tsc, invariant_tsc};
use super::{DEVICE, Host};
use crate::platform::{MACHINE_VERSION, MAX_VCPUS};
use crate::{Error, Result};
use kvm_bindings::{CpuId, KVM_MAX_MSR_ENTRIES};
use machine::MachineConfig;
use std::collections::BTreeMap;
use std::path::Path;

const MACHINE: &str = "machine";
const VENDOR: &str = "cpu-vendor";
const TSC: &str = "tsc-khz";
const XSAVE: &str = "xsave-bytes";
const MSRS: &str = "msrs-";
/// MSRs an entry: at most 9 characters each, and an entry's value has at most 1024.
const MSRS_AN_ENTRY: usize = 100;

/// What vCPUs need of a host.
#[derive(Clone, Debug)]
pub(crate) struct Needs<'a> {
    /// Their CPUID.
    pub(crate) cpuid: &'a CpuId,
    /// Their TSC's frequency, if it is known.
    pub(crate) tsc_khz: Option<u32>,
    /// Bytes of extended register state.
    pub(crate) xsave_bytes: usize,
    /// The MSRs in their state.
    pub(crate) msrs: &'a [u32],
}

impl Needs<'_> {
    /// The same as entries of [`MachineConfig::extra`].
    pub(crate) fn entries(&self) -> BTreeMap<String, String> {
        let mut entries = BTreeMap::new();
        let mut add = |name: String, value: String| entries.insert(name, value);
        add(MACHINE.to_owned(), MACHINE_VERSION.to_string());
        add(VENDOR.to_owned(), vendor(self.cpuid));
        for (number, index) in words() {
            if let Some([eax, ebx, ecx, edx]) = leaf(self.cpuid, number, index) {
                add(
                    leaf_name(number, index),
                    format!("{eax:08x} {ebx:08x} {ecx:08x} {edx:08x}"),
                );
            }
        }
        if let Some(khz) = self.tsc_khz {
            add(TSC.to_owned(), khz.to_string());
        }
        add(XSAVE.to_owned(), self.xsave_bytes.to_string());
        for (at, some) in self.msrs.chunks(MSRS_AN_ENTRY).enumerate() {
            let list: Vec<String> = some.iter().map(|msr| format!("{msr:x}")).collect();
            add(format!("{MSRS}{at}"), list.join(" "));
        }
        entries
    }
}

/// What this host can give.
struct Offer {
    cpuid: CpuId,
    tsc_khz: Option<u32>,
    scales_tsc: bool,
    xsave_bytes: usize,
    msrs: Vec<u32>,
    max_vcpus: usize,
}

/// Checks that this host can run the machine that `config` describes. Returns what of its `extra` was looked at, and is
/// covered.
///
/// # Errors
/// Every reason why it cannot, each by name.
pub(crate) fn preflight(config: &MachineConfig) -> std::result::Result<BTreeMap<String, String>, Vec<String>> {
    let offer = Offer::of_host(Path::new(DEVICE)).map_err(|error| vec![error.to_string()])?;
    offer.check(config)
}

impl Offer {
    fn of_host(path: &Path) -> Result<Offer> {
        let host = Host::open(path)?;
        // The frequency is a vCPU's, so one has to be made for a moment.
        let vcpu = host
            .create_vm()?
            .create_vcpu(0)
            .map_err(|e| Error::kvm("making a vCPU", e))?;
        Ok(Offer {
            cpuid: host.cpuid()?,
            tsc_khz: vcpu.get_tsc_khz().ok().filter(|khz| *khz != 0),
            scales_tsc: host.scales_tsc(),
            xsave_bytes: host.xsave_bytes(),
            msrs: host.msrs()?,
            max_vcpus: host.max_vcpus(),
        })
    }

    fn check(&self, config: &MachineConfig) -> std::result::Result<BTreeMap<String, String>, Vec<String>> {
        let mut reading = Reading {
            extra: &config.extra,
            known: BTreeMap::new(),
            reasons: Vec::new(),
        };
        if config.vcpus == 0 || config.vcpus > MAX_VCPUS || config.vcpus as usize > self.max_vcpus {
            let most = self.max_vcpus.min(MAX_VCPUS as usize);
            let vcpus = config.vcpus;
            reading.no(format!("{vcpus} vCPUs: this host can run 1 to {most}"));
        }
        reading.needed(MACHINE, |version| {
            let ours = MACHINE_VERSION.to_string();
            let differs = || format!("machine version {version:?}: this program makes version {ours}");
            if version == ours { Ok(()) } else { Err(differs()) }
        });
        reading.needed(VENDOR, |theirs| {
            let ours = vendor(&self.cpuid);
            let differs = || format!("the guest runs on processors of {theirs:?}, this host's is of {ours:?}");
            if theirs == ours { Ok(()) } else { Err(differs()) }
        });
        reading.needed(XSAVE, |text| {
            let ours = self.xsave_bytes;
            let theirs: usize = number(XSAVE, text)?;
            let larger = || format!("{theirs} bytes of extended register state: this host has room for {ours}");
            if theirs <= ours { Ok(()) } else { Err(larger()) }
        });
        self.check_cpuid(&mut reading);
        self.check_msrs(&mut reading);
        if reading.reasons.is_empty() {
            Ok(reading.known)
        } else {
            Err(reading.reasons)
        }
    }

    fn check_cpuid(&self, reading: &mut Reading<'_>) {
        let mut leaves = BTreeMap::new();
        for (number, index) in words() {
            let name = leaf_name(number, index);
            let read = |text: &str| {
                leaves.insert((number, index), registers(&name, text)?);
                Ok(())
            };
            // No guest of ours is without the first.
            if number == 1 {
                reading.needed(&name, read);
            } else {
                reading.optional(&name, read);
            }
        }
        for reason in lacking(|number, index| leaves.get(&(number, index)).copied(), &self.cpuid) {
            reading.no(reason);
        }
        let invariant = invariant_tsc(leaves.get(&(0x8000_0007, 0)).copied());
        reading.optional(TSC, |text| {
            let khz = number(TSC, text)?;
            let Some(ours) = self.tsc_khz else {
                return Err(format!("TSC frequency {khz} kHz: this host does not know its own"));
            };
            match (Tsc { khz, invariant }).fit(ours, self.scales_tsc) {
                Fit::Refuse(why) => Err(why),
                Fit::AsIs | Fit::Scale => Ok(()),
            }
        });
    }

    fn check_msrs(&self, reading: &mut Reading<'_>) {
        let mut missing = Vec::new();
        for at in 0..KVM_MAX_MSR_ENTRIES.div_ceil(MSRS_AN_ENTRY) {
            let name = format!("{MSRS}{at}");
            reading.optional(&name, |text| {
                for msr in text.split(' ').take(MSRS_AN_ENTRY + 1) {
                    let msr = hexadecimal(msr).ok_or_else(|| format!("{name}: {msr:?} is no MSR"))?;
                    if !self.msrs.contains(&msr) {
                        missing.push(format!("{msr:#x}"));
                    }
                }
                Ok(())
            });
        }
        if !missing.is_empty() {
            reading.no(format!(
                "MSRs that this host's KVM does not have: {}",
                missing.join(", ")
            ));
        }
    }
}

/// Entries being read.
struct Reading<'a> {
    extra: &'a BTreeMap<String, String>,
    known: BTreeMap<String, String>,
    reasons: Vec<String>,
}

impl Reading<'_> {
    fn no(&mut self, reason: String) {
        self.reasons.push(reason);
    }

    fn optional(&mut self, name: &str, check: impl FnOnce(&str) -> std::result::Result<(), String>) {
        let Some(value) = self.extra.get(name) else { return };
        match check(value) {
            Ok(()) => {
                self.known.insert(name.to_owned(), value.clone());
            }
            Err(reason) => self.no(reason),
        }
    }

    fn needed(&mut self, name: &str, check: impl FnOnce(&str) -> std::result::Result<(), String>) {
        if self.extra.contains_key(name) {
            self.optional(name, check);
        } else {
            self.no(format!("the source does not say the machine's {name}"));
        }
    }
}

fn leaf_name(number: u32, index: u32) -> String {
    format!("cpuid-{number:#x}.{index}")
}

fn vendor(cpuid: &CpuId) -> String {
    let [_, ebx, ecx, edx] = leaf(cpuid, 0, 0).unwrap_or_default();
    let bytes = [ebx, edx, ecx].into_iter().flat_map(u32::to_le_bytes);
    bytes
        .map(|byte| if byte.is_ascii_graphic() { char::from(byte) } else { '?' })
        .collect()
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> std::result::Result<T, String> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let parsed = text.parse().ok().filter(|_| digits);
    parsed.ok_or_else(|| format!("{name}: {text:?} is no number"))
}

/// As [`Needs::entries`] writes it: digits only.
fn hexadecimal(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|b| b.is_ascii_hexdigit());
    u32::from_str_radix(text, 16).ok().filter(|_| digits)
}

fn registers(name: &str, text: &str) -> std::result::Result<[u32; 4], String> {
    let wrong = || format!("{name}: {text:?} is not four registers");
    let mut words = text.split(' ');
    let mut next = || hexadecimal(words.next().filter(|word| word.len() == 8)?);
    let registers = [next(), next(), next(), next()];
    let [Some(eax), Some(ebx), Some(ecx), Some(edx)] = registers else {
        return Err(wrong());
    };
    if words.next().is_some() {
        return Err(wrong());
    }
    Ok([eax, ebx, ecx, edx])
}

#[cfg(test)]
#[path = "preflight_tests.rs"]
mod tests;
