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
    since_bytes: u64,
}

impl Headroom {
    /// Keeps `reserve_bytes` free; 0: never looks.
    pub(crate) fn new(reserve_bytes: u64) -> Self {
        Headroom {
            reserve_bytes,
            since_bytes: 0,
        }
    }

    /// `bytes` of guest memory are about to be written. An error once the host, which `available` asks, has too little
    /// left.
    pub(crate) fn take(&mut self, bytes: u64, available: impl FnOnce() -> Option<u64>) -> Result<(), String> {
        self.since_bytes = self.since_bytes.saturating_add(bytes);
        if self.reserve_bytes == 0 || self.since_bytes < EVERY_BYTES {
            return Ok(());
        }
        self.since_bytes = 0;
        match available().filter(|&left| left < self.reserve_bytes) {
            None => Ok(()),
            Some(left) => Err(format!(
                "the receiver's host, or the memory limit of its control group, has too little memory for this guest: {} MiB are \
                 left, and {} MiB are kept for the rest of the host",
                left >> 20,
                self.reserve_bytes >> 20
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_runs_out_is_noticed_in_time() {
        let mut room = Headroom::new(101 << 20);
        assert_eq!(room.take(EVERY_BYTES - 1, || unreachable!()), Ok(()), "no look yet");
        let error = room.take(1, || Some(100 << 20)).unwrap_err();
        assert!(error.contains("100 MiB are left, and 101 MiB"), "{error}");
        assert_eq!(room.take(EVERY_BYTES, || Some(101 << 20)), Ok(()));
        assert_eq!(room.take(EVERY_BYTES, || None), Ok(()));
        assert_eq!(Headroom::new(0).take(EVERY_BYTES, || Some(0)), Ok(()));
    }
}
