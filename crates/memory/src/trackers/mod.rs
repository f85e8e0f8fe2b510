//! Trackers of written pages, a file each: [`machine::DirtyTracker`] says what they owe.
//!
//! | tracker | sees | for |
//! |---|---|---|
//! | [`UffdTracker`] | every write through our mapping, whoever makes it | guests in this process, with or without KVM |
//! | [`BitmapTracker`] | what the VMM marks | VMMs that make every write themselves |
//! | [`NullTracker`] | nothing | guests that do not run |

mod bitmap;
mod null;
mod uffd;

pub use bitmap::{BitmapTracker, DirtyMarker};
pub use null::NullTracker;
pub use uffd::{UffdTracker, Unpopulated};

use machine::Error;
use pages::{Layout, PageSet};

/// Sets of another layout must not be put back here: their pages are not ours.
fn check_layout(pages: &PageSet, ours: &Layout) -> machine::Result<()> {
    if **pages.layout() == *ours {
        return Ok(());
    }
    Err(Error::Refused(
        "giving pages back to the dirty log: they are of another RAM layout".to_owned(),
    ))
}
