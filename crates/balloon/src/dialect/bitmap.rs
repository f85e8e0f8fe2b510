//! The `bitmap` dialect: the June 2016 v2 patch set.
//!
//! Queues have fixed numbers: 2 is the statistics queue, which exists and stays silent even where STATS_VQ was not
//! negotiated, and 3 the misc queue (see [`super::misc`]).
//!
//! With PAGE_BITMAP, inflate and deflate buffers are a header of 32 bytes and a bitmap; without it, arrays of page frame
//! numbers, as in the `standard` dialect. All integers are little-endian:
//!
//! | offset | field | on the inflate and deflate queues |
//! |---|---|---|
//! | 0 | cmd u16 | 0 |
//! | 2 | page_shift u16 | 12 |
//! | 4 | flag u16 | stale: whatever the last answer on the misc queue left there |
//! | 6 | reserved u16 | 0 |
//! | 8 | req_id u64 | 0 |
//! | 16 | start_pfn u64 | a multiple of 64; the page of the bitmap's bit 0 |
//! | 24 | bmap_len u64 | bytes after the header |
//!
//! A header is believed only if all of that holds. A driver that could not allocate its bitmap sends arrays although it
//! acknowledged PAGE_BITMAP, which fail the check. Such a buffer is counted, and empties the balloon. It is not served as an array of page frame numbers either: a bitmap that was cut or
//! overwritten would then name pages that nobody gave up.
//!
//! A big-endian guest of virtio 1 writes a header that is right, and a bitmap whose words are its own: other pages of the
//! same 64 are named, and nothing shows it. So PAGE_BITMAP is not offered where such a guest can run; see
//! [`check_byte_order`]. Answers of the misc queue are another matter: that guest echoes the request's id swapped, and an
//! id is below 2^32, so that no id of ours is another one swapped.

use super::Role;
use crate::window::{Form, MOST_WINDOW, half, long};
use crate::{Error, Result, feature};
use pages::{Layout, PAGE_BYTES, PAGE_SHIFT, Pfn};

/// The bits that may be offered; see [`check_space`].
pub(crate) const OFFERABLE: u64 =
    feature::MUST_TELL_HOST | feature::STATS_VQ | feature::DEFLATE_ON_OOM | feature::PAGE_BITMAP | feature::MISC_VQ;

/// The most queues: inflate, deflate, statistics, misc.
pub(crate) const QUEUES: usize = 4;

/// Bytes of a bitmap header.
pub(crate) const HEADER: usize = 32;

/// GET_FREE_PAGES, the only request. Inflate and deflate headers say the same.
const GET_FREE_PAGES: u16 = 0;

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

/// Refuses PAGE_BITMAP where guest-physical space is longer than one window. The driver counts bits from the window's
/// start, but its header tells the lowest page: over several windows wrong pages would be named, and nothing shows it.
pub(crate) fn check_space(features: u64, layout: &Layout) -> Result<()> {
    let end = layout.end().0;
    if features & feature::PAGE_BITMAP != 0 && end > MOST_WINDOW as u64 * 8 {
        return Err(Error::Space {
            end_bytes: end.saturating_mul(PAGE_BYTES),
        });
    }
    Ok(())
}

/// Whether a host of this architecture can run a guest whose byte order is not ours.
pub(crate) const RUNS_BIG_ENDIAN: bool = cfg!(not(target_arch = "x86_64"));

/// Refuses PAGE_BITMAP where a big-endian guest can run: its headers are right and its bitmaps name wrong pages.
pub(crate) fn check_byte_order(features: u64, runs_big_endian: bool) -> Result<()> {
    if features & feature::PAGE_BITMAP != 0 && runs_big_endian {
        return Err(Error::ByteOrder);
    }
    Ok(())
}

/// What inflate and deflate buffers are, with PAGE_BITMAP.
pub(crate) fn form() -> Form {
    Form {
        header: HEADER,
        most: MOST_WINDOW,
        parse: |bytes, present| {
            let header = Header::parse(bytes).ok_or("it is shorter than its header")?;
            match header.fault(present) {
                Some(why) => Err(why),
                None if header.req_id != 0 => Err("its request id is not 0, as if it were an answer"),
                None => Ok(Pfn(header.start_pfn)),
            }
        },
    }
}

/// What stands in front of a bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) cmd: u16,
    pub(crate) page_shift: u16,
    pub(crate) flag: u16,
    pub(crate) reserved: u16,
    pub(crate) req_id: u64,
    pub(crate) start_pfn: u64,
    pub(crate) bmap_len: u64,
}

impl Header {
    /// Reads the fields; `None` where there are not enough bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Header {
            cmd: half(bytes, 0)?,
            page_shift: half(bytes, 2)?,
            flag: half(bytes, 4)?,
            reserved: half(bytes, 6)?,
            req_id: long(bytes, 8)?,
            start_pfn: long(bytes, 16)?,
            bmap_len: long(bytes, 24)?,
        })
    }

    /// What makes it unbelievable, whatever the queue, in a buffer with `present` bytes after the header.
    pub(crate) fn fault(&self, present: u64) -> Option<&'static str> {
        if self.cmd != GET_FREE_PAGES || self.reserved != 0 || u32::from(self.page_shift) != PAGE_SHIFT {
            Some("its cmd, page shift or reserved field is not what it must be")
        } else if self.bmap_len != present {
            Some("its bitmap length is not that of the buffer")
        } else if self.bmap_len > MOST_WINDOW as u64 {
            Some("its window is longer than 32 GiB")
        } else if !self.start_pfn.is_multiple_of(64) {
            Some("its first page is not at a multiple of 64")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quirk_13_page_bitmap_is_not_offered_where_a_big_endian_guest_can_run() {
        let refused = check_byte_order(feature::PAGE_BITMAP | feature::MISC_VQ, true).unwrap_err();
        let why = refused.to_string();
        assert!(why.contains("PAGE_BITMAP") && why.contains("big-endian"), "{why}");
        assert!(
            check_byte_order(feature::MISC_VQ, true).is_ok(),
            "answers are refused by their id"
        );
        assert!(check_byte_order(feature::PAGE_BITMAP, false).is_ok());
        assert_eq!(RUNS_BIG_ENDIAN, std::env::consts::ARCH != "x86_64");
    }
}
