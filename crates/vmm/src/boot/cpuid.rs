//! What a vCPU says of itself: what this host's KVM can give, without what would tie a guest to one host or one core of
//! it.
//!
//! - The topology is ours: one package, a core a vCPU, one thread a core, local APIC id = the vCPU's number. KVM passes on
//!   what the core says that happens to run us.
//! - Offered is what we know, and save and restore: [`offered`].
//! - KVM's own leaves (0x4000_0000 and on) stay as they are: the guest takes its clock from them.
//!
//! `supported` is what `KVM_GET_SUPPORTED_CPUID` gave, with the TSC deadline bit set where `KVM_CAP_TSC_DEADLINE_TIMER`
//! says so (KVM itself reports it by the capability alone): that bit stays as it comes.

use super::offered;
use crate::platform::MAX_VCPUS;
use crate::{Error, Result};
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

// Leaf 1.
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HYPERTHREADS: u32 = 1 << 28;
// Leaf 0x8000_0001.
const ECX_COMPATIBILITY_LEGACY: u32 = 1 << 1;

const BASIC: u32 = 0;
const EXTENDED_TOPOLOGY: u32 = 0xb;
const EXTENDED_TOPOLOGY_2: u32 = 0x1f;
const EXTENDED_TOPOLOGY_AMD: u32 = 0x8000_0026;
// Kinds of level in the extended topology leaves.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Where a vCPU stands among the others.
#[derive(Clone, Copy)]
struct Place {
    vcpu: u32,
    vcpus: u32,
}

impl Place {
    /// Bits of a local APIC id that number the cores of the package.
    fn id_bits(self) -> u32 {
        self.vcpus.next_power_of_two().trailing_zeros()
    }

    /// Local APIC ids that the package has room for, less one.
    fn ids_less_one(self) -> u32 {
        self.vcpus.next_power_of_two() - 1
    }
}

/// The CPUID of vCPU `vcpu` of `vcpus`, made of what this host's KVM supports.
///
/// # Errors
/// A vCPU that there is not, more entries than KVM takes, a KVM without leaf 0 or 1.
pub(crate) fn cpuid(supported: &CpuId, vcpu: u32, vcpus: u32) -> Result<CpuId> {
    if vcpus == 0 || vcpus > MAX_VCPUS || vcpu >= vcpus {
        return Err(Error::Config(format!(
            "CPUID of vCPU {vcpu} of {vcpus}: a machine has 1 to {MAX_VCPUS}"
        )));
    }
    let place = Place { vcpu, vcpus };
    let host = supported.as_slice();
    let leaf = |function| host.iter().find(|entry| entry.function == function && entry.index == 0);
    let basic = leaf(BASIC).ok_or_else(|| Error::KvmLacks("CPUID leaf 0".to_owned()))?;
    leaf(1).ok_or_else(|| Error::KvmLacks("CPUID leaf 1".to_owned()))?;
    let amd = matches!(&vendor(basic), b"AuthenticAMD" | b"HygonGenuine");

    let topology = |entry: &&kvm_cpuid_entry2| {
        matches!(
            entry.function,
            EXTENDED_TOPOLOGY | EXTENDED_TOPOLOGY_2 | EXTENDED_TOPOLOGY_AMD
        )
    };
    let mut entries: Vec<kvm_cpuid_entry2> = host.iter().filter(|entry| !topology(entry)).copied().collect();
    let left_out = offered::limit(&mut entries);
    if vcpu == 0 {
        for left in left_out {
            let [eax, ebx, ecx, edx] = left.bits;
            tracing::debug!(
                "CPUID leaf {:#x}.{:#x}: the guest is not told of EAX {eax:#x}, EBX {ebx:#x}, ECX {ecx:#x}, EDX {edx:#x}",
                left.function,
                left.index
            );
        }
    }
    for entry in &mut entries {
        adapt(entry, place, amd);
    }
    if basic.eax >= EXTENDED_TOPOLOGY {
        entries.extend(extended_topology(EXTENDED_TOPOLOGY, place));
    }
    if leaf(EXTENDED_TOPOLOGY_2).is_some() {
        entries.extend(extended_topology(EXTENDED_TOPOLOGY_2, place));
    }
    let count = entries.len();
    CpuId::from_entries(&entries).map_err(|_| Error::KvmLacks(format!("room for {count} CPUID entries")))
}

/// The vendor's twelve letters.
fn vendor(basic: &kvm_cpuid_entry2) -> [u8; 12] {
    let mut name = [0; 12];
    let registers = [basic.ebx, basic.edx, basic.ecx];
    for (to, register) in name.chunks_exact_mut(4).zip(registers) {
        to.copy_from_slice(&register.to_le_bytes());
    }
    name
}

/// Puts `value` into `count` bits of `register` from bit `from` on.
fn put(register: &mut u32, from: u32, count: u32, value: u32) {
    let mask = ((1 << count) - 1) << from;
    *register = (*register & !mask) | ((value << from) & mask);
}

fn put_bit(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

fn adapt(entry: &mut kvm_cpuid_entry2, place: Place, amd: bool) {
    let several = place.vcpus > 1;
    match entry.function {
        1 => {
            put(&mut entry.ebx, 24, 8, place.vcpu);
            put(&mut entry.ebx, 16, 8, place.vcpus);
            put_bit(&mut entry.ecx, ECX_HYPERVISOR, true);
            put_bit(&mut entry.edx, EDX_HYPERTHREADS, several);
        }
        4 => {
            cache_sharing(entry, place);
            if entry.eax & 0x1f != 0 {
                put(&mut entry.eax, 26, 6, place.ids_less_one());
            }
        }
        0x8000_0001 if amd => put_bit(&mut entry.ecx, ECX_COMPATIBILITY_LEGACY, several),
        0x8000_0008 if amd => {
            put(&mut entry.ecx, 0, 8, place.vcpus - 1);
            put(&mut entry.ecx, 12, 4, place.id_bits());
        }
        0x8000_001d if amd => cache_sharing(entry, place),
        0x8000_001e if amd => {
            // Extended APIC id; core id, one thread a core; node 0 of one.
            entry.eax = place.vcpu;
            entry.ebx = place.vcpu;
            entry.ecx = 0;
            entry.edx = 0;
        }
        _ => {}
    }
}

/// How many local APIC ids share a cache: levels 1 and 2 are a core's, level 3 is the package's. The same bits on Intel
/// (leaf 4) and AMD (leaf 0x8000_001d).
fn cache_sharing(entry: &mut kvm_cpuid_entry2, place: Place) {
    let (kind, level) = (entry.eax & 0x1f, (entry.eax >> 5) & 7);
    if kind != 0 {
        put(
            &mut entry.eax,
            14,
            12,
            if level >= 3 { place.ids_less_one() } else { 0 },
        );
    }
}

/// Threads of a core (one), cores of the package, and the end of the list.
fn extended_topology(function: u32, place: Place) -> [kvm_cpuid_entry2; 3] {
    let levels = [
        (0, 1, LEVEL_THREAD),
        (place.id_bits(), place.vcpus, LEVEL_CORE),
        (0, 0, 0),
    ];
    let mut index = 0;
    levels.map(|(shift, processors, kind)| {
        let entry = kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: processors,
            ecx: kind << 8 | index,
            edx: place.vcpu,
            ..Default::default()
        };
        index += 1;
        entry
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    type Registers = (u32, u32, u32, u32);

    fn entry(function: u32, index: u32, (eax, ebx, ecx, edx): Registers) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            flags: if matches!(function, 4 | 7 | 0xb | 0xd | 0x1f | 0x8000_001d | 0x8000_0026) {
                KVM_CPUID_FLAG_SIGNIFCANT_INDEX
            } else {
                0
            },
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn name(vendor: &[u8; 12]) -> (u32, u32, u32) {
        let word = |at: usize| u32::from_le_bytes([vendor[at], vendor[at + 1], vendor[at + 2], vendor[at + 3]]);
        (word(0), word(8), word(4))
    }

    /// A host of two packages, read on its thread with local APIC id 0xab; what is not topology has all bits set.
    fn host(vendor: &[u8; 12]) -> CpuId {
        const ALL: Registers = (!0, !0, !0, !0);
        let (ebx, ecx, edx) = name(vendor);
        let mut entries = vec![
            entry(0, 0, (0x1f, ebx, ecx, edx)),
            entry(1, 0, (0x0008_06f8, 0xab40_0800, !0, !0)),
            entry(2, 0, ALL),
            entry(4, 0, (0xfc01_c121, 1, 2, 3)),
            entry(4, 1, (0xfc1f_c163, 1, 2, 3)),
            entry(4, 2, (0, 0, 0, 0)),
            entry(5, 0, ALL),
            entry(7, 0, ALL),
            entry(7, 1, ALL),
            entry(0xa, 0, ALL),
            entry(0xd, 1, ALL),
            entry(0x24, 0, ALL),
            entry(0x4000_0000, 0, (0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d)),
            entry(0x4000_0001, 0, (0x0100_7efb, 0, 0, 0)),
            entry(0x8000_0001, 0, ALL),
            entry(0x8000_0008, 0, (0x3934, !0, 0xffff_ffff, 0)),
            entry(0x8000_000a, 0, ALL),
            entry(0x8000_001d, 0, (0x0000_4121, 1, 2, 3)),
            entry(0x8000_001d, 3, (0x0003_c163, 1, 2, 3)),
            entry(0x8000_001e, 0, (0xab, 0x155, 0x101, 0)),
            entry(0x8000_0022, 0, ALL),
            entry(0x8000_0026, 0, (1, 2, 0x100, 0xab)),
        ];
        for function in [0xb, 0x1f] {
            entries.push(entry(function, 0, (1, 2, 0x100, 0xab)));
            entries.push(entry(function, 1, (7, 0x70, 0x201, 0xab)));
        }
        CpuId::from_entries(&entries).unwrap()
    }

    fn of(vendor: &[u8; 12], vcpu: u32, vcpus: u32) -> BTreeMap<(u32, u32), Registers> {
        let made = cpuid(&host(vendor), vcpu, vcpus).unwrap();
        let map: BTreeMap<_, _> = made
            .as_slice()
            .iter()
            .map(|e| ((e.function, e.index), (e.eax, e.ebx, e.ecx, e.edx)))
            .collect();
        assert_eq!(map.len(), made.as_slice().len(), "an entry twice");
        map
    }

    const INTEL: &[u8; 12] = b"GenuineIntel";
    const AMD: &[u8; 12] = b"AuthenticAMD";

    #[test]
    fn what_has_state_that_is_not_moved_is_not_offered() {
        let map = of(INTEL, 0, 1);
        let (_, _, ecx, edx) = map[&(7, 0)];
        // Shadow stacks, branch tracking.
        assert_eq!((ecx >> 7 & 1, edx >> 20 & 1), (0, 0));
        assert_eq!(map[&(0xd, 1)].2, 0);
        assert_eq!(map[&(0x24, 0)], (0, 0, 0, 0));
    }

    #[test]
    fn every_leaf_knows_the_vcpu_by_its_number_for_all_counts() {
        for vcpus in 1..=MAX_VCPUS {
            for vcpu in 0..vcpus {
                for vendor in [INTEL, AMD] {
                    let map = of(vendor, vcpu, vcpus);
                    let (_, ebx, _, edx) = map[&(1, 0)];
                    assert_eq!((ebx >> 24, (ebx >> 16) & 0xff, ebx & 0xffff), (vcpu, vcpus, 0x0800));
                    assert_eq!(edx & EDX_HYPERTHREADS != 0, vcpus > 1);
                    for leaf in [0xb, 0x1f] {
                        let level = |index| map[&(leaf, index)];
                        assert_eq!(level(0), (0, 1, 0x100, vcpu));
                        let (shift, count, kind, id) = level(1);
                        assert_eq!((count, kind, id), (vcpus, 0x201, vcpu));
                        assert!(
                            vcpus <= 1 << shift && (shift == 0 || vcpus > 1 << (shift - 1)),
                            "{vcpus}: {shift}"
                        );
                        assert_eq!(level(2), (0, 0, 2, vcpu));
                        assert!(!map.contains_key(&(leaf, 3)));
                    }
                }
                let amd = of(AMD, vcpu, vcpus);
                assert_eq!(amd[&(0x8000_001e, 0)], (vcpu, vcpu, 0, 0));
                let (_, _, size, _) = amd[&(0x8000_0008, 0)];
                assert_eq!(size & 0xff, vcpus - 1);
                assert!(vcpus <= 1 << ((size >> 12) & 0xf));
            }
        }
    }

    #[test]
    fn nothing_of_the_hosts_topology_is_left() {
        for vendor in [INTEL, AMD] {
            let made = of(vendor, 2, 4);
            assert!(!made.contains_key(&(0x8000_0026, 0)));
            // Leaf 4: level 1 is a core's, level 3 the package's; four cores.
            let (kind, low) = ((made[&(4, 0)].0 & 0x3ff), made[&(4, 0)].0);
            assert_eq!((kind, low >> 14 & 0xfff, low >> 26), (0x121, 0, 3));
            let high = made[&(4, 1)].0;
            assert_eq!((high & 0x3ff, high >> 14 & 0xfff, high >> 26), (0x163, 3, 3));
            assert_eq!(made[&(4, 2)], (0, 0, 0, 0), "the end of the list");
        }
        let amd = of(AMD, 2, 4);
        assert_eq!(amd[&(0x8000_001d, 0)].0 >> 14, 0);
        assert_eq!(amd[&(0x8000_001d, 3)].0 >> 14, 3);
    }

    #[test]
    fn what_is_not_offered_is_off_and_what_kvm_gives_is_kept() {
        for vendor in [INTEL, AMD] {
            let map = of(vendor, 0, 2);
            let (_, _, ecx, _) = map[&(1, 0)];
            // MONITOR, VMX.
            assert_eq!(ecx & (1 << 3 | 1 << 5), 0);
            assert_eq!(ecx & ECX_HYPERVISOR, ECX_HYPERVISOR);
            for leaf in [5, 0xa, 0x8000_000a, 0x8000_0022] {
                assert_eq!(map[&(leaf, 0)], (0, 0, 0, 0), "{leaf:#x}");
            }
            let host = host(vendor);
            for kept in host.as_slice() {
                if matches!(kept.function, 0 | 2 | 0x4000_0000 | 0x4000_0001) {
                    let registers = (kept.eax, kept.ebx, kept.ecx, kept.edx);
                    assert_eq!(map[&(kept.function, kept.index)], registers, "{:#x}", kept.function);
                }
            }
        }
        // SVM, MONITORX.
        assert_eq!(of(AMD, 0, 2)[&(0x8000_0001, 0)].2 & (1 << 2 | 1 << 29), 0);
    }

    #[test]
    fn the_tsc_deadline_timer_is_there_if_kvm_has_it() {
        const DEADLINE: u32 = 1 << 24;
        for (given, wanted) in [(0, 0), (DEADLINE, DEADLINE)] {
            let (ebx, ecx, edx) = name(INTEL);
            let entries = [entry(0, 0, (1, ebx, ecx, edx)), entry(1, 0, (0, 0, given, 0))];
            let made = cpuid(&CpuId::from_entries(&entries).unwrap(), 0, 1).unwrap();
            assert_eq!(made.as_slice()[1].ecx & DEADLINE, wanted);
            // A CPU that ends at leaf 1 gets no leaf 0xb.
            assert_eq!(made.as_slice().len(), 2);
        }
    }

    #[test]
    fn vcpus_and_hosts_that_are_not_are_refused() {
        let host = host(INTEL);
        for (vcpu, vcpus) in [(0, 0), (1, 1), (64, 64), (0, 65), (u32::MAX, u32::MAX)] {
            assert!(cpuid(&host, vcpu, vcpus).is_err(), "{vcpu} of {vcpus}");
        }
        let nothing = CpuId::new(0).unwrap();
        assert!(cpuid(&nothing, 0, 1).unwrap_err().to_string().contains("leaf 0"));
        let full = vec![entry(0, 0, (0xb, 0, 0, 0)); 255];
        let full = [full, vec![entry(1, 0, (0, 0, 0, 0))]].concat();
        let error = cpuid(&CpuId::from_entries(&full).unwrap(), 0, 1).unwrap_err();
        assert!(error.to_string().contains("259"), "{error}");
    }
}
