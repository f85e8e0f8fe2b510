//! State that is not what a guest saved.

use super::*;

/// A small generator: the tests have to be the same each time.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

/// Restores `state` into a fresh machine. If it is refused, it cannot be resumed; if not, it runs whatever it is for a
/// moment, and can be stopped.
fn try_it(state: &MachineState, what: &str) -> bool {
    let there = Guest::empty(2);
    there.ram.write(CODE, &COUNT).unwrap();
    let mut incoming = Incoming::new(state);
    if let Err(error) = there.vcpus.restore(&mut incoming) {
        assert!(!error.to_string().is_empty());
        assert!(there.vcpus.resume().is_err(), "{what}: resumed after {error}");
        assert!(!there.vcpus.is_running());
        return false;
    }
    if there.vm.restore(&mut incoming).is_err() {
        return false;
    }
    there.vcpus.resume().unwrap();
    std::thread::sleep(Duration::from_micros(500));
    there.vcpus.pause().unwrap();
    true
}

fn state() -> MachineState {
    let guest = Guest::new(2, &COUNT, |_, _| {});
    guest.vcpus.resume().unwrap();
    guest.until_it_counts(0);
    guest.vcpus.pause().unwrap();
    guest.save()
}

#[test]
fn sections_cut_short_are_refused() {
    on_kvm("sections_cut_short_are_refused", || {
        let state = state();
        assert!(try_it(&state, "as it was"));
        for at in 0..state.sections.len() {
            let len = state.sections[at].data.len();
            let name = &state.sections[at].name;
            for keep in (0..len).step_by(len.div_ceil(12)).chain([len - 1]) {
                let mut cut = state.clone();
                cut.sections[at].data.truncate(keep);
                assert!(!try_it(&cut, name), "{name} cut to {keep} bytes was taken");
            }
            for version in [0, 2, u32::MAX] {
                let mut other = state.clone();
                other.sections[at].version = version;
                assert!(!try_it(&other, name), "version {version} of {name} was taken");
            }
        }
    });
}

/// Any bit of the text.
#[test]
fn flipped_bits_do_no_harm() {
    on_kvm("flipped_bits_do_no_harm", || {
        let state = state();
        let mut rng = Rng(0x5eed_0001);
        for round in 0..300 {
            let mut bad = state.clone();
            for _ in 0..=rng.below(3) {
                let at = rng.below(bad.sections.len());
                let data = &mut bad.sections[at].data;
                let byte = rng.below(data.len());
                data[byte] ^= 1 << rng.below(8);
            }
            try_it(&bad, &format!("round {round}"));
        }
    });
}

/// Digits only, so that the text stays well formed and the values go to KVM.
#[test]
fn changed_values_do_no_harm() {
    on_kvm("changed_values_do_no_harm", || {
        let state = state();
        let mut rng = Rng(0x5eed_0002);
        let mut taken = 0;
        for round in 0..300 {
            let mut bad = state.clone();
            for _ in 0..=rng.below(4) {
                let at = rng.below(bad.sections.len());
                let data = &mut bad.sections[at].data;
                let digits: Vec<usize> = (0..data.len()).filter(|at| data[*at].is_ascii_digit()).collect();
                let digit = digits[rng.below(digits.len())];
                data[digit] = b'1' + u8::try_from(rng.below(9)).unwrap();
            }
            taken += u32::from(try_it(&bad, &format!("round {round}")));
        }
        assert!(taken > 0, "nothing got as far as KVM");
    });
}

#[test]
fn numbers_without_measure_are_refused() {
    on_kvm("numbers_without_measure_are_refused", || {
        let state = state();
        let with = |section: &str, from: &str, to: &str| {
            let mut bad = state.clone();
            let found = bad.sections.iter_mut().find(|s| s.name == section).unwrap();
            let text = String::from_utf8(found.data.clone()).unwrap();
            assert!(text.contains(from), "{section} has no {from}");
            found.data = text.replacen(from, to, 1).into_bytes();
            bad
        };
        let rows = "[0,0,0,0,0,0,0],".repeat(300);
        let msrs = "[16,0],".repeat(300);
        for (what, bad) in [
            ("leaves", with("vcpu0", "\"cpuid\":[", &format!("\"cpuid\":[{rows}"))),
            ("MSRs", with("vcpu1", "\"msrs\":[", &format!("\"msrs\":[{msrs}"))),
            (
                "an MSR of none",
                with("vcpu1", "\"msrs\":[", "\"msrs\":[[4294967295,0],"),
            ),
            (
                "a field of nobody's",
                with("vcpu0", "\"cpuid\"", "\"more\":1,\"cpuid\""),
            ),
            (
                "registers too many",
                with(
                    "vcpu0",
                    "\"xsave\":\"",
                    &format!("\"xsave\":\"{}", "00".repeat(1 << 16)),
                ),
            ),
            ("registers too few", with("vcpu0", "\"sregs\":\"", "\"sregs\":\"00")),
            (
                "a clock before all time",
                with("vcpus", "\"clock_ns\":", "\"clock_ns\":1844674407370955161"),
            ),
            ("vCPUs", with("vcpus", "\"vcpus\":2", "\"vcpus\":18446744073709551615")),
            ("a TSC of another world", with("vcpu0", "\"tsc_khz\":", "\"tsc_khz\":1")),
            (
                "an I/O APIC elsewhere",
                with("irqchip", "\"ioapic\":\"0000c0fe", "\"ioapic\":\"0000c0fd"),
            ),
        ] {
            assert!(!try_it(&bad, what), "{what}: taken");
        }
    });
}

/// What the guest has and this host has not is refused here too, whatever the preflight was told.
#[test]
fn cpuid_that_this_host_cannot_give_is_refused() {
    on_kvm("cpuid_that_this_host_cannot_give_is_refused", || {
        let guest = Guest::new(1, &COUNT, |_, _| {});
        let mut bad = guest.save();
        let section = bad.sections.iter_mut().find(|s| s.name == "vcpu0").unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&section.data).unwrap();
        let leaf = value["cpuid"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .find(|leaf| leaf[0] == 1)
            .unwrap();
        // VMX, which is not offered anywhere.
        leaf[5] = (leaf[5].as_u64().unwrap() | 1 << 5).into();
        section.data = serde_json::to_vec(&value).unwrap();
        let there = Guest::empty(1);
        let error = there.try_restore(&bad).unwrap_err().to_string();
        assert!(error.contains("vcpu0") && error.contains("ECX bit 5 (vmx)"), "{error}");
        assert!(there.vcpus.resume().is_err());
    });
}
