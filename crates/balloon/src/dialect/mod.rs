//! The three dialects: which features each has, which queue does what, and how each asks for free pages.
//!
//! | | file |
//! |---|---|
//! | `standard`: features, queue numbers | [`standard`] |
//! | `standard`: asking (FREE_PAGE_HINT) | [`hinting`] |
//! | `standard`: free page reporting | [`reporting`] |
//! | `bitmap`: features, queue numbers | [`bitmap`] |
//! | `bitmap`: asking (MISC_VQ) | [`misc`] |
//!
//! `bitmap-rfc` is known by name and refused by the device.

pub(crate) mod bitmap;
pub(crate) mod hinting;
pub(crate) mod misc;
pub(crate) mod reporting;
pub(crate) mod standard;

use crate::Error;
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

    /// The bits that a device of this dialect may offer; `None` where the dialect is not served.
    pub(crate) fn offerable(self) -> Option<u64> {
        match self {
            Dialect::Standard => Some(standard::OFFERABLE),
            Dialect::Bitmap => Some(bitmap::OFFERABLE),
            Dialect::BitmapRfc => None,
        }
    }

    /// The most queues that a device of this dialect has.
    pub(crate) fn queue_count(self) -> usize {
        match self {
            Dialect::Standard => standard::QUEUES,
            Dialect::Bitmap => bitmap::QUEUES,
            Dialect::BitmapRfc => 2,
        }
    }

    /// What each queue is for, by its number on the transport, given the features in use.
    pub(crate) fn roles(self, features: u64) -> Vec<Option<Role>> {
        match self {
            Dialect::Standard => standard::roles(features),
            Dialect::Bitmap => bitmap::roles(features),
            Dialect::BitmapRfc => vec![Some(Role::Inflate), Some(Role::Deflate)],
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
