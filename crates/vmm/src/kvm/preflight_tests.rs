//! Preflight against hosts that are made up.

use super::*;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use machine::BalloonConfig;
use pages::Layout;

fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        flags: if function == 7 || function == 0xd {
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

fn intel(more: &[kvm_cpuid_entry2]) -> CpuId {
    let mut entries = vec![entry(0, 0, [0x1c, 0x756e_6547, 0x6c65_746e, 0x4965_6e69])];
    entries.extend_from_slice(more);
    CpuId::from_entries(&entries).unwrap()
}

fn features() -> [kvm_cpuid_entry2; 4] {
    [
        entry(1, 0, [0xc_06f2, 0x800, 0x8120_2001, 0x0f8b_fbff]),
        entry(7, 0, [0, 0x0180_2852, 0x1_0104, 0x2000_0000]),
        entry(0x8000_0007, 0, [0, 0, 0, 0x100]),
        entry(0x8000_0008, 0, [0x3930, 0, 0, 0]),
    ]
}

fn offer() -> Offer {
    Offer {
        cpuid: intel(&features()),
        tsc_khz: Some(2_300_000),
        scales_tsc: false,
        xsave_bytes: 4096,
        msrs: (0..250).map(|i| 0xc001_0000 + i).collect(),
        max_vcpus: 8,
    }
}

fn config(offer: &Offer) -> MachineConfig {
    let needs = Needs {
        cpuid: &offer.cpuid,
        tsc_khz: offer.tsc_khz,
        xsave_bytes: offer.xsave_bytes,
        msrs: &offer.msrs,
    };
    MachineConfig {
        kind: "linux".to_owned(),
        layout: Layout::pc(0x10000).unwrap(),
        vcpus: 2,
        balloon: BalloonConfig {
            dialect: "off".to_owned(),
            features: 0,
        },
        extra: needs.entries(),
    }
}

fn reasons(offer: &Offer, config: &MachineConfig) -> Vec<String> {
    offer.check(config).unwrap_err()
}

#[test]
fn a_host_takes_its_own_machine_and_says_the_same_back() {
    let offer = offer();
    let config = config(&offer);
    assert_eq!(offer.check(&config).unwrap(), config.extra);
}

#[test]
fn what_is_told_fits_into_a_message() {
    // The limits of crates/wire, which this crate does not depend on.
    let extra = config(&offer()).extra;
    assert!(extra.len() <= 64, "{}", extra.len());
    for (name, value) in &extra {
        assert!(name.len() <= 64 && value.len() <= 1024, "{name}: {value}");
        assert!(
            !name.chars().chain(value.chars()).any(char::is_control),
            "{name}: {value}"
        );
    }
    assert_eq!(extra.keys().filter(|name| name.starts_with(MSRS)).count(), 3);
}

#[test]
fn what_was_not_understood_is_not_said_back() {
    let offer = offer();
    let mut config = config(&offer);
    let known = config.extra.clone();
    config.extra.insert("cpuid-0x99.0".to_owned(), "0".to_owned());
    config.extra.insert("msrs-9".to_owned(), "10".to_owned());
    assert_eq!(offer.check(&config).unwrap(), known);
}

#[test]
fn each_mismatch_is_named() {
    let source = offer();
    let config = config(&source);

    let mut here = offer();
    let mut less = features();
    less[0].ecx &= !1;
    less[1].ebx &= !(1 << 11);
    here.cpuid = intel(&less);
    here.xsave_bytes = 2048;
    here.tsc_khz = Some(2_000_000);
    here.max_vcpus = 1;
    here.msrs.retain(|msr| *msr != 0xc001_0007 && *msr != 0xc001_00c8);
    let found = reasons(&here, &config);
    let all = found.join("\n");
    for name in [
        "2 vCPUs: this host can run 1 to 1",
        "ECX bit 0 (sse3)",
        "EBX bit 11 (rtm)",
        "2048",
        "2300000 kHz",
        "0xc0010007, 0xc00100c8",
    ] {
        assert!(all.contains(name), "{name}: {all}");
    }
    assert_eq!(found.len(), 6, "{all}");

    here = offer();
    here.cpuid = CpuId::from_entries(&features()).unwrap();
    let found = reasons(&here, &config);
    assert!(found.len() == 1 && found[0].contains("GenuineIntel"), "{found:?}");
}

#[test]
fn a_host_that_scales_takes_another_frequency() {
    let mut here = offer();
    let config = config(&here);
    here.tsc_khz = Some(2_000_000);
    here.scales_tsc = true;
    here.check(&config).unwrap();
    here.tsc_khz = None;
    assert!(reasons(&here, &config)[0].contains("does not know"));
}

#[test]
fn another_machine_version_and_missing_entries_are_refused() {
    let offer = offer();
    let mut config = config(&offer);
    config.extra.insert(MACHINE.to_owned(), "2".to_owned());
    assert!(reasons(&offer, &config)[0].contains("machine version \"2\""));
    config.extra.clear();
    let found = reasons(&offer, &config);
    assert_eq!(found.len(), 4, "{found:?}");
}

/// Entries from a peer: whatever is in there is a reason, never a panic.
#[test]
fn garbage_is_refused() {
    let offer = offer();
    let good = config(&offer);
    let garbage = [
        "",
        " ",
        "\u{e9}",
        "-1",
        "+1",
        "0x10",
        "99999999999999999999",
        "1 2 3 4",
        "zz",
        "00000000 00000000 00000000",
    ];
    let long = "ffffffff ".repeat(10_000);
    for name in good.extra.keys() {
        for value in garbage.iter().copied().chain([long.as_str()]) {
            let mut bad = good.clone();
            bad.extra.insert(name.clone(), value.to_owned());
            assert!(offer.check(&bad).is_err(), "{name} = {value:?}");
        }
    }
    for vcpus in [0, 9, 65, u32::MAX] {
        let mut bad = good.clone();
        bad.vcpus = vcpus;
        assert_eq!(reasons(&offer, &bad).len(), 1);
    }
}
