//! Keeps a receiver from taking the memory that the rest of its host needs.
//!
//! A guest's RAM may be larger than what its host has free, as long as much of it stays untouched; nobody knows how much
//! before it has come. So the host's own account is looked at while pages come, and a guest that does not fit fails
//! before the kernel has to end somebody: the guest goes on at the source.

/// Bytes between looks: one costs about as much as receiving 100 KiB.
const EVERY_BYTES: u64 = 64 << 20;

/// What is kept free on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headroom {
    reserve_bytes: u64,
    available: fn() -> Option<u64>,
    since_bytes: u64,
}

impl Headroom {
    /// Keeps `reserve_bytes` free; 0: never looks.
    pub(crate) fn new(reserve_bytes: u64) -> Self {
        Headroom { reserve_bytes, available: available_bytes, since_bytes: 0 }
    }

    /// `bytes` of guest memory are about to be written. An error once the host has too little left.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<(), String> {
        self.since_bytes = self.since_bytes.saturating_add(bytes);
        if self.reserve_bytes == 0 || self.since_bytes < EVERY_BYTES {
            return Ok(());
        }
        self.since_bytes = 0;
        match (self.available)().filter(|&left| left < self.reserve_bytes) {
            None => Ok(()),
            Some(left) => Err(format!(
                "the receiver's host has too little memory for this guest: {} MiB are left, and {} MiB are kept for the \
                 rest of the host",
                left >> 20,
                self.reserve_bytes >> 20
            )),
        }
    }
}

/// The memory that the host could give without swapping (`MemAvailable`), bytes; `None` where it does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_runs_out_is_noticed_in_time() {
        let mut room = Headroom { available: || Some(100 << 20), ..Headroom::new(101 << 20) };
        assert_eq!(room.take(EVERY_BYTES - 1), Ok(()), "no look yet");
        assert!(room.take(1).unwrap_err().contains("100 MiB are left, and 101 MiB"));
        let mut enough = Headroom { available: || Some(100 << 20), ..Headroom::new(100 << 20) };
        assert_eq!(enough.take(EVERY_BYTES), Ok(()));
        let mut unasked = Headroom { available: || Some(0), ..Headroom::new(0) };
        assert_eq!(unasked.take(EVERY_BYTES), Ok(()));
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
