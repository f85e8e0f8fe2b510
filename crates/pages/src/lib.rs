//! Page numbers, page ranges, guest RAM layout, and sets of pages.
//!
//! This crate is arithmetic alone: no I/O, no unsafe code. Everything that a migration decides, it decides in the
//! types of this crate.
//!
//! Invariants that the rest of the house leans on:
//!
//! - a [`PageRange`] never wraps: `start + count` fits in a `u64`;
//! - a [`Layout`] has at least one region; its regions are sorted, do not overlap, and are not empty;
//! - a [`PageSet`] holds pages of its layout only; what is put in from outside is clipped to it.
#![forbid(unsafe_code)]

mod layout;
mod page;
mod set;

pub use layout::{Layout, LayoutError, MAX_PAGES, MAX_REGIONS, Region};
pub use page::{PAGE_BYTES, PAGE_SHIFT, PageRange, Pfn};
pub use set::{BitmapError, PageSet, Runs};
