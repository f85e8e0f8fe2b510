//! The `bitmap-rfc` dialect: the May 2016 RFC, which brings page bitmaps to inflate and deflate and nothing else. Its
//! guest cannot be asked for free pages.
//!
//! Queues are numbered as mainline Linux of that time does: inflate, deflate, then statistics where STATS_VQ is in use.
//!
//! With PAGE_BITMAP, the bytes of an inflate or deflate buffer, gathered in order whatever the descriptors' boundaries
//! (the driver uses one for each field), are, without padding:
//!
//! | offset | field | |
//! |---|---|---|
//! | 0 | flags u64 | 0 |
//! | 8 | start_pfn u64 | a multiple of 64; the page of the bitmap's bit 0 |
//! | 16 | page_shift u32 | 12 |
//! | 20 | bmap_len u64 | bytes after the header |
//! | 28 | bitmap | |
//!
//! The RFC's driver sends its native words. What is served is a 64-bit little-endian guest; one of 32 bits sends a
//! shorter header and one of the other byte order a swapped one, and both fail the check, as do arrays of page frame
//! numbers. Such a buffer is counted and nothing is done.

use super::Role;
use crate::feature;
use crate::window::{Form, MOST_WINDOW, long, word};
use pages::{Layout, PAGE_SHIFT, Pfn};

/// The bits that may be offered.
pub(crate) const OFFERABLE: u64 =
    feature::MUST_TELL_HOST | feature::STATS_VQ | feature::DEFLATE_ON_OOM | feature::PAGE_BITMAP;

/// The most queues: inflate, deflate, statistics.
pub(crate) const QUEUES: usize = 3;

/// Bytes in front of the bitmap.
const HEADER: usize = 28;

/// What each queue is for.
pub(crate) fn roles(features: u64) -> Vec<Option<Role>> {
    let mut roles = vec![Some(Role::Inflate), Some(Role::Deflate)];
    if features & feature::STATS_VQ != 0 {
        roles.push(Some(Role::Stats));
    }
    roles
}

/// What inflate and deflate buffers are, with PAGE_BITMAP. The driver has no windows: one bitmap may span all of
/// guest-physical space.
pub(crate) fn form(layout: &Layout) -> Form {
    let spanning = usize::try_from(layout.end().0.div_ceil(64)).unwrap_or(usize::MAX);
    Form {
        header: HEADER,
        most: MOST_WINDOW.max(spanning.saturating_mul(8)),
        parse,
    }
}

fn parse(bytes: &[u8], present: u64) -> Result<Pfn, &'static str> {
    let fields = (long(bytes, 0), long(bytes, 8), word(bytes, 16), long(bytes, 20));
    let (Some(flags), Some(start_pfn), Some(page_shift), Some(bmap_len)) = fields else {
        return Err("it is shorter than its header");
    };
    if flags != 0 || page_shift != PAGE_SHIFT {
        Err("its flags or page shift are not what they must be")
    } else if bmap_len != present {
        Err("its bitmap length is not that of the buffer")
    } else if !start_pfn.is_multiple_of(64) {
        Err("its first page is not at a multiple of 64")
    } else {
        Ok(Pfn(start_pfn))
    }
}
