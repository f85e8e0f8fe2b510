//! What of CPUID a guest may rest on: which feature bits, and what they are called.
//!
//! A guest looked at its CPUID when it booted. Where it goes, each feature that it saw has to be there. Bits that follow a
//! control register, and those that we set ourselves, are left out.
//!
//! Intel's and AMD's manuals for CPUID; `Documentation/virt/kvm/x86/cpuid.rst` for leaf 0x40000001.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX};

/// A register of a leaf: its place in `[eax, ebx, ecx, edx]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax = 0,
    Ebx = 1,
    Ecx = 2,
    Edx = 3,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// 32 feature bits.
#[derive(Debug)]
struct Word {
    leaf: u32,
    index: u32,
    register: Register,
    /// Bits that need not be there.
    ignored: u32,
    names: &'static [(u8, &'static str)],
}

const fn word(leaf: u32, index: u32, register: Register, names: &'static [(u8, &'static str)]) -> Word {
    Word {
        leaf,
        index,
        register,
        ignored: 0,
        names,
    }
}

impl Word {
    const fn ignoring(mut self, bits: u32) -> Word {
        self.ignored = bits;
        self
    }
}

/// OSXSAVE follows CR4; the hypervisor bit is ours.
const IGNORED_1_ECX: u32 = 1 << 27 | 1 << 31;
/// HTT says that there are several logical processors, which is ours to say.
const IGNORED_1_EDX: u32 = 1 << 28;
/// OSPKE follows CR4.
const IGNORED_7_ECX: u32 = 1 << 4;

static WORDS: [Word; 20] = [
    word(1, 0, Ecx, &LEAF_1_ECX).ignoring(IGNORED_1_ECX),
    word(1, 0, Edx, &LEAF_1_EDX).ignoring(IGNORED_1_EDX),
    word(6, 0, Eax, &[(2, "arat")]),
    word(7, 0, Ebx, &LEAF_7_EBX),
    word(7, 0, Ecx, &LEAF_7_ECX).ignoring(IGNORED_7_ECX),
    word(7, 0, Edx, &LEAF_7_EDX),
    word(
        7,
        1,
        Eax,
        &[
            (4, "avx_vnni"),
            (5, "avx512_bf16"),
            (10, "fzrm"),
            (11, "fsrs"),
            (12, "fsrc"),
        ],
    ),
    word(7, 1, Edx, &[(4, "avx_vnni_int8"), (5, "avx_ne_convert"), (19, "avx10")]),
    word(
        7,
        2,
        Edx,
        &[(0, "psfd"), (1, "ipred_ctrl"), (2, "rrsba_ctrl"), (4, "bhi_ctrl")],
    ),
    word(0xd, 0, Eax, &XCR0),
    word(0xd, 0, Edx, &[]),
    word(
        0xd,
        1,
        Eax,
        &[
            (0, "xsaveopt"),
            (1, "xsavec"),
            (2, "xgetbv1"),
            (3, "xsaves"),
            (4, "xfd"),
        ],
    ),
    word(
        0xd,
        1,
        Ecx,
        &[(8, "pt state"), (11, "cet_u state"), (12, "cet_s state")],
    ),
    word(0xd, 1, Edx, &[]),
    word(0x8000_0001, 0, Ecx, &LEAF_80000001_ECX),
    word(0x8000_0001, 0, Edx, &LEAF_80000001_EDX),
    word(0x8000_0007, 0, Edx, &[(8, "invariant tsc")]),
    word(0x8000_0008, 0, Ebx, &LEAF_80000008_EBX),
    word(
        0x8000_0021,
        0,
        Eax,
        &[
            (0, "no_nested_data_bp"),
            (2, "lfence_rdtsc"),
            (6, "null_sel_clr_base"),
            (8, "autoibrs"),
        ],
    ),
    word(0x4000_0001, 0, Eax, &KVM),
];

#[rustfmt::skip]
static LEAF_1_ECX: [(u8, &str); 20] = [
    (0, "sse3"), (1, "pclmulqdq"), (3, "monitor"), (5, "vmx"), (9, "ssse3"), (12, "fma"), (13, "cx16"), (15, "pdcm"),
    (17, "pcid"), (19, "sse4.1"), (20, "sse4.2"), (21, "x2apic"), (22, "movbe"), (23, "popcnt"), (24, "tsc_deadline"),
    (25, "aes"), (26, "xsave"), (28, "avx"), (29, "f16c"), (30, "rdrand"),
];

#[rustfmt::skip]
static LEAF_1_EDX: [(u8, &str); 23] = [
    (0, "fpu"), (1, "vme"), (2, "de"), (3, "pse"), (4, "tsc"), (5, "msr"), (6, "pae"), (7, "mce"), (8, "cx8"), (9, "apic"),
    (11, "sep"), (12, "mtrr"), (13, "pge"), (14, "mca"), (15, "cmov"), (16, "pat"), (17, "pse36"), (19, "clflush"),
    (23, "mmx"), (24, "fxsr"), (25, "sse"), (26, "sse2"), (27, "ss"),
];

#[rustfmt::skip]
static LEAF_7_EBX: [(u8, &str); 29] = [
    (0, "fsgsbase"), (1, "tsc_adjust"), (2, "sgx"), (3, "bmi1"), (4, "hle"), (5, "avx2"), (6, "fdp_excptn_only"), (7, "smep"),
    (8, "bmi2"), (9, "erms"), (10, "invpcid"), (11, "rtm"), (13, "zero_fcs_fds"), (14, "mpx"), (16, "avx512f"),
    (17, "avx512dq"), (18, "rdseed"), (19, "adx"), (20, "smap"), (21, "avx512ifma"), (23, "clflushopt"), (24, "clwb"),
    (25, "intel_pt"), (26, "avx512pf"), (27, "avx512er"), (28, "avx512cd"), (29, "sha_ni"), (30, "avx512bw"),
    (31, "avx512vl"),
];

#[rustfmt::skip]
static LEAF_7_ECX: [(u8, &str); 17] = [
    (1, "avx512vbmi"), (2, "umip"), (3, "pku"), (5, "waitpkg"), (6, "avx512_vbmi2"), (7, "shstk"), (8, "gfni"), (9, "vaes"),
    (10, "vpclmulqdq"), (11, "avx512_vnni"), (12, "avx512_bitalg"), (14, "avx512_vpopcntdq"), (16, "la57"), (22, "rdpid"),
    (24, "bus_lock_detect"), (25, "cldemote"), (27, "movdiri"),
];

#[rustfmt::skip]
static LEAF_7_EDX: [(u8, &str); 17] = [
    (2, "avx512_4vnniw"), (3, "avx512_4fmaps"), (4, "fsrm"), (8, "avx512_vp2intersect"), (10, "md_clear"),
    (14, "serialize"), (16, "tsxldtrk"), (20, "ibt"), (22, "amx_bf16"), (23, "avx512_fp16"), (24, "amx_tile"),
    (25, "amx_int8"), (26, "spec_ctrl"), (27, "stibp"), (28, "flush_l1d"), (29, "arch_capabilities"), (31, "ssbd"),
];

#[rustfmt::skip]
static XCR0: [(u8, &str); 11] = [
    (0, "x87 state"), (1, "sse state"), (2, "avx state"), (3, "bndregs state"), (4, "bndcsr state"), (5, "opmask state"),
    (6, "zmm_hi256 state"), (7, "hi16_zmm state"), (9, "pkru state"), (17, "amx tilecfg state"), (18, "amx tiledata state"),
];

#[rustfmt::skip]
static LEAF_80000001_ECX: [(u8, &str); 17] = [
    (0, "lahf_lm"), (1, "cmp_legacy"), (2, "svm"), (4, "cr8_legacy"), (5, "abm"), (6, "sse4a"), (7, "misalignsse"),
    (8, "3dnowprefetch"), (9, "osvw"), (11, "xop"), (16, "fma4"), (21, "tbm"), (22, "topoext"), (23, "perfctr_core"),
    (26, "bpext"), (28, "perfctr_llc"), (29, "mwaitx"),
];

#[rustfmt::skip]
static LEAF_80000001_EDX: [(u8, &str); 9] = [
    (11, "syscall"), (20, "nx"), (22, "mmxext"), (25, "fxsr_opt"), (26, "pdpe1gb"), (27, "rdtscp"), (29, "lm"),
    (30, "3dnowext"), (31, "3dnow"),
];

#[rustfmt::skip]
static LEAF_80000008_EBX: [(u8, &str); 12] = [
    (0, "clzero"), (2, "xsaveerptr"), (9, "wbnoinvd"), (12, "ibpb"), (14, "ibrs"), (15, "stibp"), (17, "stibp_always_on"),
    (24, "ssbd"), (25, "virt_ssbd"), (26, "ssb_no"), (27, "cppc"), (28, "psfd"),
];

#[rustfmt::skip]
static KVM: [(u8, &str); 16] = [
    (0, "kvm clocksource"), (1, "kvm nop_io_delay"), (3, "kvm clocksource2"), (4, "kvm async_pf"), (5, "kvm steal_time"),
    (6, "kvm pv_eoi"), (7, "kvm pv_unhalt"), (9, "kvm pv_tlb_flush"), (10, "kvm async_pf_vmexit"), (11, "kvm pv_send_ipi"),
    (12, "kvm poll_control"), (13, "kvm pv_sched_yield"), (14, "kvm async_pf_int"), (15, "kvm msi_ext_dest_id"),
    (17, "kvm migration_control"), (24, "kvm clocksource_stable"),
];

/// Where AMD and Intel say how many bits an address has: EAX, lowest byte the guest-physical ones.
const ADDRESS_BITS: (u32, u32) = (0x8000_0008, 0);

/// `[eax, ebx, ecx, edx]` of a leaf, if `cpuid` has it.
pub(crate) fn leaf(cpuid: &CpuId, leaf: u32, index: u32) -> Option<[u32; 4]> {
    let is = |e: &&kvm_bindings::kvm_cpuid_entry2| {
        let at = if e.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0 {
            0
        } else {
            e.index
        };
        (e.function, at) == (leaf, index)
    };
    let entry = cpuid.as_slice().iter().find(is)?;
    Some([entry.eax, entry.ebx, entry.ecx, entry.edx])
}

/// The leaves that a guest's features are in.
pub(crate) fn words() -> impl Iterator<Item = (u32, u32)> {
    let mut last = None;
    WORDS
        .iter()
        .map(|word| (word.leaf, word.index))
        .filter(move |this| last.replace(*this) != Some(*this))
}

/// Every feature that `guest`'s leaves have and `host` cannot give, each by name.
pub(crate) fn lacking(guest: impl Fn(u32, u32) -> Option<[u32; 4]>, host: &CpuId) -> Vec<String> {
    let mut found = Vec::new();
    for word in &WORDS {
        let of = |leaves: Option<[u32; 4]>| leaves.map_or(0, |leaf| leaf[word.register as usize]);
        let wanted = of(guest(word.leaf, word.index)) & !word.ignored;
        let missing = wanted & !of(leaf(host, word.leaf, word.index));
        let bits = (0..32u8).filter(|bit| missing >> bit & 1 != 0);
        found.extend(bits.map(|bit| {
            let name = word.names.iter().find(|(named, _)| *named == bit);
            let name = name.map_or(String::new(), |(_, name)| format!(" ({name})"));
            let (leaf, index) = (word.leaf, word.index);
            let register = format!("{:?}", word.register).to_uppercase();
            format!(
                "CPUID leaf {leaf:#x}.{index}, {register} bit {bit}{name}: the guest has it, this host cannot give it"
            )
        }));
    }
    let bits = |leaf: Option<[u32; 4]>| leaf.map_or(0, |leaf| leaf[0] & 0xff);
    let theirs = bits(guest(ADDRESS_BITS.0, ADDRESS_BITS.1));
    let ours = bits(leaf(host, ADDRESS_BITS.0, ADDRESS_BITS.1));
    if theirs > ours {
        found.push(format!(
            "CPUID leaf 0x80000008.0, EAX: the guest has {theirs} bits of guest-physical address, this host {ours}"
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_cpuid_entry2;

    fn cpuid(leaves: &[(u32, u32, [u32; 4])]) -> CpuId {
        let entries: Vec<kvm_cpuid_entry2> = leaves
            .iter()
            .map(|(function, index, [eax, ebx, ecx, edx])| kvm_cpuid_entry2 {
                function: *function,
                index: *index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax: *eax,
                ebx: *ebx,
                ecx: *ecx,
                edx: *edx,
                ..Default::default()
            })
            .collect();
        CpuId::from_entries(&entries).unwrap()
    }

    fn compare(guest: &CpuId, host: &CpuId) -> Vec<String> {
        lacking(|l, i| leaf(guest, l, i), host)
    }

    #[test]
    fn a_host_covers_itself_and_whoever_has_less() {
        let all: Vec<_> = words().map(|(leaf, index)| (leaf, index, [!0; 4])).collect();
        let host = cpuid(&all);
        assert!(compare(&host, &host).is_empty());
        assert!(compare(&cpuid(&[]), &host).is_empty());
        assert!(compare(&cpuid(&[(1, 0, [0, 0, 1, 1])]), &host).is_empty());
    }

    #[test]
    fn every_bit_that_is_missing_is_named_once() {
        let host: Vec<_> = words().map(|(leaf, index)| (leaf, index, [!0; 4])).collect();
        for (at, word) in WORDS.iter().enumerate() {
            for bit in 0..32 {
                let mut host = host.clone();
                let of_word = host.iter_mut().find(|(l, i, _)| (*l, *i) == (word.leaf, word.index));
                let (_, _, registers) = of_word.unwrap();
                registers[word.register as usize] &= !(1 << bit);
                let mut guest = [0; 4];
                guest[word.register as usize] = 1 << bit;
                let found = compare(&cpuid(&[(word.leaf, word.index, guest)]), &cpuid(&host));
                if word.ignored >> bit & 1 != 0 {
                    assert!(found.is_empty(), "{found:?}");
                } else {
                    let [reason] = &found[..] else {
                        panic!("word {at}, bit {bit}: {found:?}")
                    };
                    assert!(reason.contains(&format!("bit {bit}")), "{reason}");
                    assert!(
                        reason.contains(&format!("leaf {:#x}.{}", word.leaf, word.index)),
                        "{reason}"
                    );
                }
            }
        }
    }

    #[test]
    fn well_known_features_have_their_names() {
        let guest = cpuid(&[(7, 0, [0, 1 << 16, 0, 0]), (0x4000_0001, 0, [1 << 3, 0, 0, 0])]);
        let found = compare(&guest, &cpuid(&[]));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("leaf 0x7.0, EBX bit 16 (avx512f)"), "{found:?}");
        assert!(
            found[1].contains("leaf 0x40000001.0, EAX bit 3 (kvm clocksource2)"),
            "{found:?}"
        );
    }

    #[test]
    fn names_are_of_bits_and_no_bit_has_two() {
        for word in &WORDS {
            let mut seen = 0u32;
            for (bit, name) in word.names {
                assert!(*bit < 32 && !name.is_empty() && seen >> bit & 1 == 0, "{name}");
                seen |= 1 << bit;
            }
        }
    }

    #[test]
    fn more_address_bits_than_the_host_has_are_refused() {
        let guest = cpuid(&[(0x8000_0008, 0, [0x3034, 0, 0, 0])]);
        assert_eq!(compare(&guest, &cpuid(&[(0x8000_0008, 0, [0x3930, 0, 0, 0])])).len(), 1);
        assert!(compare(&guest, &cpuid(&[(0x8000_0008, 0, [0x3934, 0, 0, 0])])).is_empty());
    }
}
