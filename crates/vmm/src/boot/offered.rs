//! What a guest may be told that its CPU has: features whose state we save and restore, and no others.
//!
//! A list of what is known, not of what is to be left out: a CPU that comes after us has features with state of their own,
//! KVM passes them on, and a guest that used them would lose that state on its way. State is what `KVM_GET_XSAVE2` gives for
//! the components of [`XCR0`], the registers of `KVM_GET_SREGS` and its like, and the MSRs that KVM lists; a feature is here if
//! it rests on nothing else.
//!
//! Not here, although KVM may give them: MONITOR and MWAIT, performance counters, nested virtualization, shadow stacks and
//! branch tracking, SGX (its pages), processor trace, user interrupts, bus lock detection and AMD's breakpoint masks (MSRs
//! that KVM does not list), PASID, AVX10, APX, FRED.
//!
//! Intel's and AMD's manuals for CPUID; `Documentation/virt/kvm/x86/cpuid.rst` for leaf 0x4000_0001.

use kvm_bindings::kvm_cpuid_entry2;

/// Everything of a register: it holds a number, or what describes the CPU.
const ALL: u32 = !0;

/// Bits of a register.
const fn bits(list: &[u8]) -> u32 {
    let (mut mask, mut at) = (0, 0);
    while at < list.len() {
        mask |= 1 << list[at];
        at += 1;
    }
    mask
}

/// Extended state: x87, SSE, AVX, MPX, AVX-512, protection keys, AMX. None of the supervisor's.
const XCR0: u32 = bits(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 17, 18]);
/// The legacy area and its header: what an area has that holds nothing more.
const LEAST_STATE_BYTES: u32 = 576;

const LEAF_1_ECX: u32 = bits(&[0, 1, 9, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]);
const LEAF_1_EDX: u32 = bits(&[
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26, 27, 28,
]);
const LEAF_7_EBX: u32 = bits(&[
    0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16, 17, 18, 19, 20, 21, 23, 24, 26, 27, 28, 29, 30, 31,
]);
const LEAF_7_ECX: u32 = bits(&[1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 22, 25, 27, 28]);
const LEAF_7_EDX: u32 = bits(&[2, 3, 4, 8, 9, 10, 11, 13, 14, 16, 22, 23, 24, 25, 26, 27, 28, 29, 31]);
const LEAF_7_1_EAX: u32 = bits(&[0, 1, 2, 4, 5, 7, 10, 11, 12, 21, 23, 26]);
const LEAF_7_1_EDX: u32 = bits(&[4, 5, 8, 10, 14]);
/// Mitigations, all in SPEC_CTRL.
const LEAF_7_2_EDX: u32 = bits(&[0, 1, 2, 3, 4, 5]);
/// XSAVEOPT, XSAVEC, XGETBV, XSAVES, XFD.
const LEAF_D_1_EAX: u32 = bits(&[0, 1, 2, 3, 4]);
const LEAF_80000001_ECX: u32 = bits(&[0, 1, 4, 5, 6, 7, 8, 9, 11, 16, 21, 22]);
/// The lower ones are leaf 1's once more.
const LEAF_80000001_EDX: u32 = bits(&[
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 20, 22, 23, 24, 25, 26, 27, 29, 30, 31,
]);
const LEAF_80000008_EBX: u32 = bits(&[0, 2, 9, 12, 13, 14, 15, 16, 17, 18, 19, 24, 25, 26, 28, 29, 30]);
const LEAF_80000021_EAX: u32 = bits(&[0, 2, 5, 6, 8, 27, 28, 29, 30]);
const LEAF_80000021_ECX: u32 = bits(&[1, 2]);
const KVM_FEATURES: u32 = bits(&[0, 1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17, 24]);

/// What of a leaf's registers (EAX, EBX, ECX, EDX) may be told; `None`: there is no such leaf.
fn known(function: u32, index: u32) -> Option<[u32; 4]> {
    Some(match (function, index) {
        // The CPU's name and kind, its caches and TLBs, the topology, frequencies; KVM's name.
        (0 | 2 | 4 | 0xb | 0x15 | 0x16 | 0x1f | 0x4000_0000, _) => [ALL; 4],
        (0x8000_0000 | 0x8000_0002..=0x8000_0006 | 0x8000_0019..=0x8000_001a | 0x8000_001d..=0x8000_001e, _) => {
            [ALL; 4]
        }
        (1, _) => [ALL, ALL, LEAF_1_ECX, LEAF_1_EDX],
        // MONITOR and MWAIT; counters; AVX10; nested virtualization; AMD's counters: there, and empty.
        (5 | 0xa | 0x24 | 0x8000_000a | 0x8000_0022, _) => [0; 4],
        // The local APIC's timer does not stop.
        (6, _) => [bits(&[2]), 0, 0, 0],
        (7, 0) => [ALL, LEAF_7_EBX, LEAF_7_ECX, LEAF_7_EDX],
        (7, 1) => [LEAF_7_1_EAX, 0, 0, LEAF_7_1_EDX],
        (7, 2) => [0, 0, 0, LEAF_7_2_EDX],
        (0xd, 0) => [XCR0, ALL, ALL, 0],
        (0xd, 1) => [LEAF_D_1_EAX, ALL, 0, 0],
        (0xd, 2..=31) if XCR0 >> index & 1 != 0 => [ALL; 4],
        // How AMX's tiles are cut.
        (0x1d | 0x1e, _) => [ALL; 4],
        (0x4000_0001, _) => [KVM_FEATURES, 0, 0, bits(&[0])],
        (0x8000_0001, _) => [ALL, ALL, LEAF_80000001_ECX, LEAF_80000001_EDX],
        (0x8000_0007, _) => [0, 0, 0, bits(&[8])],
        (0x8000_0008, _) => [ALL, LEAF_80000008_EBX, ALL, 0],
        (0x8000_0021, _) => [LEAF_80000021_EAX, 0, LEAF_80000021_ECX, 0],
        _ => return None,
    })
}

/// Bits that a guest is not told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub(super) function: u32,
    pub(super) index: u32,
    /// Of EAX, EBX, ECX, EDX.
    pub(super) bits: [u32; 4],
}

/// Leaves what is [`known`], and gives what that was not.
pub(super) fn limit(entries: &mut Vec<kvm_cpuid_entry2>) -> Vec<LeftOut> {
    let mut left_out = Vec::new();
    entries.retain_mut(|entry| {
        let known = known(entry.function, entry.index);
        let registers = [&mut entry.eax, &mut entry.ebx, &mut entry.ecx, &mut entry.edx];
        let mut bits = [0; 4];
        for ((register, mask), out) in registers.into_iter().zip(known.unwrap_or([0; 4])).zip(&mut bits) {
            *out = *register & !mask;
            *register &= mask;
        }
        if bits != [0; 4] {
            left_out.push(LeftOut {
                function: entry.function,
                index: entry.index,
                bits,
            });
        }
        known.is_some()
    });
    shrink_state(entries);
    left_out
}

/// The size of the area that all of the extended state takes, without the components that are gone.
fn shrink_state(entries: &mut [kvm_cpuid_entry2]) {
    let parts = entries.iter().filter(|entry| entry.function == 0xd && entry.index >= 2);
    let ends = parts.map(|part| part.ebx.saturating_add(part.eax));
    let bytes = ends.fold(LEAST_STATE_BYTES, u32::max);
    for entry in entries
        .iter_mut()
        .filter(|entry| entry.function == 0xd && entry.index == 0)
    {
        entry.ecx = entry.ecx.min(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
    use std::collections::BTreeMap;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    /// A CPU that has every leaf, with every bit.
    fn future() -> Vec<kvm_cpuid_entry2> {
        let ranges = [
            0..=0x40,
            0x4000_0000..=0x4000_0010,
            0x8000_0000..=0x8000_0040,
            0xc000_0000..=0xc000_0004,
        ];
        let leaves = ranges.into_iter().flatten();
        let all = |function| (0..64).map(move |index| entry(function, index, [!0; 4]));
        // The areas of its state: one a component, each of 64 bytes.
        let sized = |mut entry: kvm_cpuid_entry2| {
            if entry.function == 0xd && entry.index >= 2 {
                (entry.eax, entry.ebx) = (64, 576 + 64 * entry.index);
            }
            entry
        };
        leaves.flat_map(all).map(sized).collect()
    }

    /// By function and index.
    type Told = BTreeMap<(u32, u32), [u32; 4]>;

    fn limited() -> (Told, Vec<LeftOut>) {
        let mut entries = future();
        let left_out = limit(&mut entries);
        let row = |e: &kvm_cpuid_entry2| ((e.function, e.index), [e.eax, e.ebx, e.ecx, e.edx]);
        (entries.iter().map(row).collect(), left_out)
    }

    #[test]
    fn of_a_future_cpu_only_what_is_known_is_told() {
        let (map, left_out) = limited();
        for unknown in [
            3,
            0x12,
            0x14,
            0x19,
            0x20,
            0x29,
            0x40,
            0x4000_0010,
            0x8000_001f,
            0x8000_0040,
            0xc000_0001,
        ] {
            assert!(!map.contains_key(&(unknown, 0)), "{unknown:#x}");
            assert!(
                left_out.iter().any(|left| left.function == unknown),
                "{unknown:#x} is told to nobody"
            );
        }
        assert!(!map.contains_key(&(7, 3)));
        // Leaf, register, bit.
        for (name, leaf, register, bit) in [
            ("monitor", (1, 0), 2, 3),
            ("vmx", (1, 0), 2, 5),
            ("sgx", (7, 0), 1, 2),
            ("pt", (7, 0), 1, 25),
            ("shadow stacks", (7, 0), 2, 7),
            ("key locker", (7, 0), 2, 23),
            ("bus locks", (7, 0), 2, 24),
            ("pasid", (7, 0), 2, 29),
            ("user interrupts", (7, 0), 3, 5),
            ("architectural lbr", (7, 0), 3, 19),
            ("branch tracking", (7, 0), 3, 20),
            ("fred", (7, 1), 0, 17),
            ("avx10", (7, 1), 3, 19),
            ("apx", (7, 1), 3, 21),
            ("svm", (0x8000_0001, 0), 2, 2),
            ("apx's registers", (0xd, 0), 0, 19),
            ("a state to come", (0xd, 0), 3, 0),
            ("supervisor state", (0xd, 1), 2, 12),
        ] {
            assert_eq!(map[&leaf][register] >> bit & 1, 0, "{name}");
        }
        for (name, leaf, register, bit) in [
            ("avx", (1, 0), 2, 28),
            ("avx2", (7, 0), 1, 5),
            ("protection keys", (7, 0), 2, 3),
            ("amx", (7, 0), 3, 24),
            ("long mode", (0x8000_0001, 0), 3, 29),
            ("invariant tsc", (0x8000_0007, 0), 3, 8),
            ("kvm's clock", (0x4000_0001, 0), 0, 3),
        ] {
            assert_eq!(map[&leaf][register] >> bit & 1, 1, "{name}");
        }
    }

    #[test]
    fn state_is_that_of_known_components_and_as_large() {
        let (map, _) = limited();
        let components: Vec<u32> = map
            .keys()
            .filter(|(leaf, _)| *leaf == 0xd)
            .map(|(_, index)| *index)
            .collect();
        assert_eq!(components, [0, 1, 2, 3, 4, 5, 6, 7, 9, 17, 18]);
        let [xcr0, _, bytes, high] = map[&(0xd, 0)];
        assert_eq!((xcr0, high), (XCR0, 0));
        assert_eq!(bytes, 576 + 64 * 18 + 64);
        let mut small = vec![entry(0xd, 0, [3, 576, 576, 0])];
        assert!(limit(&mut small).is_empty());
        assert_eq!(small[0].ecx, 576);
    }

    #[test]
    fn what_is_left_out_is_told_bit_by_bit() {
        let mut entries = vec![entry(7, 1, [1 << 17 | 1 << 4, 0, 0, 0]), entry(0x29, 0, [0; 4])];
        let left_out = limit(&mut entries);
        let fred = LeftOut {
            function: 7,
            index: 1,
            bits: [1 << 17, 0, 0, 0],
        };
        assert_eq!(left_out, [fred]);
        assert_eq!((entries.len(), entries[0].eax), (1, 1 << 4));
    }
}
