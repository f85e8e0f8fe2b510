//! A device of the bitmap dialects, and the driver that its tests play.

use super::{Rig, flat};
use balloon::Dialect::{self, Bitmap, BitmapRfc};
use balloon::DiscardPolicy::MarkOnly;
use balloon::{Config, DiscardPolicy, feature::*};
use pages::Layout;
use std::sync::Arc;

pub(crate) const BOTH: [Dialect; 2] = [Bitmap, BitmapRfc];
pub(crate) const FEATURES: u64 = PAGE_BITMAP | MUST_TELL_HOST | STATS_VQ;

/// A driver that took PAGE_BITMAP, MUST_TELL_HOST and STATS_VQ, and MISC_VQ where the dialect has it.
pub(crate) fn rig_with(dialect: Dialect, discard: DiscardPolicy, layout: Arc<Layout>, granule: u64) -> Rig {
    let features = if dialect == Bitmap {
        FEATURES | MISC_VQ
    } else {
        FEATURES
    };
    let config = Config {
        discard,
        ..Config::new(dialect, features)
    };
    let rig = Rig::configured(config, layout, granule);
    rig.drive(features);
    rig
}

/// As [`rig_with`]: pages are only marked, RAM is flat.
pub(crate) fn rig(dialect: Dialect) -> Rig {
    rig_with(dialect, MarkOnly, flat(), 1)
}

/// What was malformed, and what of it had a bad header.
pub(crate) fn malformed(rig: &Rig) -> (u64, u64) {
    let counters = rig.device.lock().counters();
    (counters.malformed, counters.bad_headers)
}
