//! Trackers of written pages, a file each: [`machine::DirtyTracker`] says what they owe.
//!
//! | tracker | sees | for |
//! |---|---|---|
//! | [`KvmManualTracker`] | what vCPUs write, and the VMM's own writes | KVM: the first choice |
//! | [`KvmLogTracker`] | the same | an old KVM |
//! | [`KvmRingTracker`] | the same | large guests that write little |
//! | [`UffdTracker`] | every write through our mapping, whoever makes it | guests in this process, with or without KVM |
//! | [`BitmapTracker`] | what the VMM marks | VMMs that make every write themselves |
//! | [`NullTracker`] | nothing | guests that do not run |

mod bitmap;
mod kvm_log;
mod kvm_manual;
mod kvm_ring;
mod null;
mod uffd;

pub use bitmap::{BitmapTracker, DirtyMarker};
pub use kvm_log::KvmLogTracker;
pub use kvm_manual::KvmManualTracker;
pub use kvm_ring::KvmRingTracker;
pub use null::NullTracker;
pub use uffd::{UffdTracker, Unpopulated};

use crate::kvm::Watch;
use machine::Error;
use pages::{Layout, PageSet};

/// Sets of another layout must not be put back here: their pages are not ours.
pub(crate) fn check_layout(pages: &PageSet, ours: &Layout) -> machine::Result<()> {
    if **pages.layout() == *ours {
        return Ok(());
    }
    Err(Error::Refused(
        "giving pages back to the dirty log: they are of another RAM layout".to_owned(),
    ))
}

/// Turns a watch off that could not be started in whole.
fn end_after_error(watch: &mut Watch) {
    if let Err(also) = watch.end() {
        tracing::warn!(error = %also, "after tracking could not be started");
    }
}
