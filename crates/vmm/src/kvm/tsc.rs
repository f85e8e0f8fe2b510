//! The time-stamp counter's frequency: whether a guest's fits this host's.

/// A TSC as a guest has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tsc {
    /// Its frequency.
    pub(crate) khz: u32,
    /// Whether CPUID says that it always runs at that (leaf 0x80000007). Linux then keeps time by it; else it keeps time by
    /// KVM's clock, and the TSC is for short delays only.
    pub(crate) invariant: bool,
}

/// Whether registers `[eax, ebx, ecx, edx]` of leaf 0x80000007 say that the TSC always runs at its frequency.
pub(crate) fn invariant_tsc(leaf: Option<[u32; 4]>) -> bool {
    leaf.is_some_and(|[_, _, _, edx]| edx & 1 << 8 != 0)
}

/// Parts per million that KVM itself does not mend: NTP evens out more.
const TOLERANCE_PPM: u64 = 250;
/// The same where nobody keeps time by the TSC.
const LOOSE_TOLERANCE_PPM: u64 = 10_000;

/// What to do about a guest's TSC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Nothing: it is near enough.
    AsIs,
    /// Have the processor scale it.
    Scale,
    /// It cannot be had here.
    Refuse(String),
}

impl Tsc {
    /// How it fits a host whose TSC has `host_khz`, and can be scaled or not.
    pub(crate) fn fit(self, host_khz: u32, scales: bool) -> Fit {
        let (khz, host) = (u64::from(self.khz), u64::from(host_khz));
        let apart = khz.abs_diff(host) * 1_000_000;
        if apart <= host * TOLERANCE_PPM && self.khz != 0 {
            Fit::AsIs
        } else if scales && self.khz != 0 {
            Fit::Scale
        } else if !self.invariant && apart <= host * LOOSE_TOLERANCE_PPM {
            tracing::warn!(
                guest_khz = khz,
                host_khz = host,
                "the guest's TSC changes its frequency a little"
            );
            Fit::AsIs
        } else {
            Fit::Refuse(format!(
                "TSC frequency: the guest's is {khz} kHz, this host's {host} kHz, and its processor cannot scale it"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(khz: u32, invariant: bool, host_khz: u32, scales: bool) -> Fit {
        Tsc { khz, invariant }.fit(host_khz, scales)
    }

    #[test]
    fn a_frequency_near_enough_is_left_alone() {
        for khz in [2_300_000, 2_300_575, 2_299_425] {
            assert_eq!(fit(khz, true, 2_300_000, false), Fit::AsIs);
        }
    }

    #[test]
    fn another_frequency_is_scaled_or_refused_by_name() {
        assert_eq!(fit(2_300_576, true, 2_300_000, true), Fit::Scale);
        let Fit::Refuse(why) = fit(2_300_576, true, 2_300_000, false) else {
            panic!("taken");
        };
        assert!(why.contains("2300576 kHz") && why.contains("2300000 kHz"), "{why}");
        assert!(matches!(fit(2_000_000, false, 2_300_000, false), Fit::Refuse(_)));
    }

    #[test]
    fn who_keeps_time_by_kvm_may_differ_by_a_percent() {
        assert_eq!(fit(2_310_000, false, 2_300_000, false), Fit::AsIs);
        assert!(matches!(fit(2_310_000, true, 2_300_000, false), Fit::Refuse(_)));
        assert!(matches!(fit(2_330_000, false, 2_300_000, false), Fit::Refuse(_)));
    }

    #[test]
    fn extremes_do_not_overflow() {
        assert!(matches!(fit(0, false, 0, true), Fit::AsIs | Fit::Refuse(_)));
        assert!(matches!(fit(u32::MAX, true, 1, false), Fit::Refuse(_)));
        assert!(matches!(fit(0, false, u32::MAX, true), Fit::Refuse(_)));
    }
}
