//! The three dialects: which features each has, which queue does what, and how each asks for free pages.
//!
//! | | file |
//! |---|---|
//! | `standard`: features, queue numbers | [`standard`] |
//! | `standard`: asking (FREE_PAGE_HINT) | [`hinting`] |
//! | `standard`: free page reporting | [`reporting`] |
//! | `bitmap`: features, queue numbers, buffers | [`bitmap`] |
//! | `bitmap`: asking (MISC_VQ) | [`misc`] |
//! | `bitmap-rfc`: features, queue numbers, buffers | [`bitmap_rfc`] |
//!
//! What the dialects share is above: arrays of page frame numbers and the balloon's pages (`inflate`), buffers that carry
//! a bitmap (`window`), statistics (`stats`).

pub(crate) mod bitmap;
pub(crate) mod bitmap_rfc;
pub(crate) mod hinting;
pub(crate) mod misc;
pub(crate) mod reporting;
pub(crate) mod standard;

use crate::window::Form;
use crate::{Error, feature};
use pages::Layout;
use std::fmt;
use std::str::FromStr;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Page frame numbers that the guest gives up.
    Inflate,
    /// Page frame numbers that it takes back.
    Deflate,
    /// One buffer of statistics, held by the device.
    Stats,
    /// `standard`: commands and free blocks of a hinting session.
    Hint,
    /// `standard`: free blocks, all the time.
    Report,
    /// `bitmap`: requests and answers.
    Misc,
}

/// How guest and device speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Mainline Linux and virtio 1.3, section 5.5.
    Standard,
    /// The 2016 v2 patch set: page bitmaps and a queue for requests.
    Bitmap,
    /// The May 2016 RFC: page bitmaps for inflate and deflate alone.
    BitmapRfc,
}

impl Dialect {
    /// The dialect's name, as in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Standard => "standard",
            Dialect::Bitmap => "bitmap",
            Dialect::BitmapRfc => "bitmap-rfc",
        }
    }

    /// The bits that a device of this dialect may offer.
    pub(crate) fn offerable(self) -> u64 {
        match self {
            Dialect::Standard => standard::OFFERABLE,
            Dialect::Bitmap => bitmap::OFFERABLE,
            Dialect::BitmapRfc => bitmap_rfc::OFFERABLE,
        }
    }

    /// How inflate and deflate buffers carry bitmaps, given the features in use; `None` where they carry arrays.
    pub(crate) fn form(self, features: u64, layout: &Layout) -> Option<Form> {
        let bitmaps = features & feature::PAGE_BITMAP != 0;
        match self {
            Dialect::Bitmap if bitmaps => Some(bitmap::form()),
            Dialect::BitmapRfc if bitmaps => Some(bitmap_rfc::form(layout)),
            _ => None,
        }
    }

    /// The most queues that a device of this dialect has.
    pub(crate) fn queue_count(self) -> usize {
        match self {
            Dialect::Standard => standard::QUEUES,
            Dialect::Bitmap => bitmap::QUEUES,
            Dialect::BitmapRfc => bitmap_rfc::QUEUES,
        }
    }

    /// What each queue is for, by its number on the transport, given the features in use.
    pub(crate) fn roles(self, features: u64) -> Vec<Option<Role>> {
        match self {
            Dialect::Standard => standard::roles(features),
            Dialect::Bitmap => bitmap::roles(features),
            Dialect::BitmapRfc => bitmap_rfc::roles(features),
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dialect {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Dialect::Standard, Dialect::Bitmap, Dialect::BitmapRfc]
            .into_iter()
            .find(|d| d.name() == name)
            .ok_or_else(|| Error::UnknownDialect(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for dialect in [Dialect::Standard, Dialect::Bitmap, Dialect::BitmapRfc] {
            assert_eq!(dialect.to_string().parse::<Dialect>().unwrap(), dialect);
        }
        let refused = "Standard".parse::<Dialect>().unwrap_err().to_string();
        assert!(
            refused.contains("\"Standard\"") && refused.contains("bitmap-rfc"),
            "{refused}"
        );
    }
}
