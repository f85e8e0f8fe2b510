//! What the drivers of the `bitmap` dialects do that a device must stand, each to be switched by itself.
//!
//! The default is what the posts of 2016 have: the patch set of June for `bitmap`, the RFC of May for `bitmap-rfc` (whose
//! post quotes only how a buffer is laid out: how pages get into it is taken from the patch set). Numbers are those of
//! the list of quirks in the project's description of the dialects. The `standard` driver has none of them.

use pages::PageRange;
use serde::{Deserialize, Serialize};

/// How a `bitmap` or `bitmap-rfc` driver behaves. Travels with the guest: the driver goes on as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quirks {
    /// Quirk 1: an interrupt of the misc queue takes one completion; else all that there are.
    pub takes_one_completion: bool,
    /// Quirk 1: interrupts that are raised before the first is taken are one interrupt, as on a line; else each is taken.
    pub interrupts_merge: bool,
    /// Quirk 4: all windows of an answer are written into the one buffer before the device looks. Else the device has
    /// looked before the next is written, as where a kick leaves the guest.
    pub tears_windows: bool,
    /// Quirk 6: bits past the last whole byte of an answer are dropped.
    pub drops_partial_byte: bool,
    /// Quirk 7: memory is added while a request is answered, so no window is the last.
    pub memory_grows: bool,
    /// Quirk 8: a last page at a multiple of 64 is left out of an inflate or deflate bitmap, and not told at all alone.
    pub drops_last_page: bool,
    /// Quirk 11: a window without a page of those that are told clears the bitmap all the same, and sends nothing: compaction
    /// then sends an all-clear one, from a page past the window on. Else what was sent last stays.
    pub clears_for_empty_windows: bool,
    /// The flag of the last answer is still in the header of inflate and deflate bitmaps.
    pub leaves_flag_stale: bool,
    /// Quirk 10: an inflate bitmap has every page of the balloon from the lowest new one on; else the new ones.
    pub reports_all_again: bool,
    /// Quirk 12: there was no memory for the bitmap, so the driver forgets features that it acknowledged: arrays of page
    /// numbers come, and nothing on the misc queue.
    pub has_no_bitmap: bool,
    /// Quirk 13: the guest is big-endian: it echoes a request's id unconverted, and its bitmaps are words of its own.
    pub big_endian: bool,
    /// Quirk 14: the first request buffer is queued before DRIVER_OK; else after.
    pub queues_before_driver_ok: bool,
    /// Quirk 15: the driver goes away after this many windows of an answer.
    pub vanishes_after_windows: Option<u32>,
    /// Pages that answers and inflate bitmaps name as well, whatever they hold: a guest that lies.
    pub lies_about: Option<PageRange>,
}

impl Default for Quirks {
    fn default() -> Self {
        Quirks {
            takes_one_completion: true,
            interrupts_merge: false,
            tears_windows: false,
            drops_partial_byte: true,
            memory_grows: false,
            drops_last_page: true,
            clears_for_empty_windows: true,
            leaves_flag_stale: true,
            reports_all_again: true,
            has_no_bitmap: false,
            big_endian: false,
            queues_before_driver_ok: true,
            vanishes_after_windows: None,
            lies_about: None,
        }
    }
}

impl Quirks {
    /// A driver without any of them: what one would write today.
    pub fn none() -> Self {
        Quirks {
            takes_one_completion: false,
            drops_partial_byte: false,
            drops_last_page: false,
            clears_for_empty_windows: false,
            leaves_flag_stale: false,
            reports_all_again: false,
            queues_before_driver_ok: false,
            ..Quirks::default()
        }
    }
}
