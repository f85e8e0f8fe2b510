//! The `standard` dialect: mainline Linux, virtio 1.3, section 5.5.
//!
//! The specification's text reads as if queues had fixed numbers. Linux and QEMU count only the queues of features in
//! use, and guests that exist do as Linux does, so this device does too.

use super::Role;
use crate::feature;

/// The bits that may be offered.
pub(crate) const OFFERABLE: u64 = feature::MUST_TELL_HOST
    | feature::STATS_VQ
    | feature::DEFLATE_ON_OOM
    | feature::FREE_PAGE_HINT
    | feature::PAGE_POISON
    | feature::REPORTING;

/// The most queues: inflate, deflate, statistics, hints, reporting.
pub(crate) const QUEUES: usize = 5;

/// What each queue is for: numbers without gaps over the features in use.
pub(crate) fn roles(features: u64) -> Vec<Option<Role>> {
    let optional = [
        (feature::STATS_VQ, Role::Stats),
        (feature::FREE_PAGE_HINT, Role::Hint),
        (feature::REPORTING, Role::Report),
    ];
    let in_use = optional.into_iter().filter(|(bit, _)| features & bit != 0);
    [Role::Inflate, Role::Deflate]
        .into_iter()
        .chain(in_use.map(|(_, role)| role))
        .map(Some)
        .collect()
}
