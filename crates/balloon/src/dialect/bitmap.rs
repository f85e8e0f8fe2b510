//! The `bitmap` dialect: the June 2016 v2 patch set.
//!
//! Queues have fixed numbers: 2 is the statistics queue, which exists and stays silent even where STATS_VQ was not
//! negotiated, and 3 the misc queue. PAGE_BITMAP is not offered, so inflate and deflate carry arrays of page frame
//! numbers, as in the `standard` dialect.

use super::Role;
use crate::feature;

/// The bits that may be offered.
pub(crate) const OFFERABLE: u64 =
    feature::MUST_TELL_HOST | feature::STATS_VQ | feature::DEFLATE_ON_OOM | feature::MISC_VQ;

/// The most queues: inflate, deflate, statistics, misc.
pub(crate) const QUEUES: usize = 4;

/// What each queue is for, by fixed number; `None` for one whose feature is not in use.
pub(crate) fn roles(features: u64) -> Vec<Option<Role>> {
    let used = |bit: u64, role| (features & bit != 0).then_some(role);
    vec![
        Some(Role::Inflate),
        Some(Role::Deflate),
        used(feature::STATS_VQ, Role::Stats),
        used(feature::MISC_VQ, Role::Misc),
    ]
}
