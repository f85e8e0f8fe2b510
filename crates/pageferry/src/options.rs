//! A guest as the library takes it, and the settings of both sides.

use crate::data::Totals;
use crate::{Error, Security};
use engine::{DestinationConfig, SourceConfig};
use machine::{DirtyTracker, FreePages, GuestRam, Machine, MachineConfig};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// A guest: the four traits of the `machine` crate. A migration owns it while it lasts and hands it back at its end.
pub struct Guest {
    /// Its memory.
    pub ram: Arc<dyn GuestRam>,
    /// Which of its pages are written.
    pub tracker: Box<dyn DirtyTracker>,
    /// Its own word on which pages are free; [`machine::NoBalloon`] where there is none.
    pub free_pages: Box<dyn FreePages>,
    /// Its vCPUs and devices.
    pub machine: Box<dyn Machine>,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest")
            .field("config", &self.machine.config())
            .field("running", &self.machine.is_running())
            .finish_non_exhaustive()
    }
}

/// How a source packs the pages of its batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Compress {
    /// By what pays, where the link is slower than the processors pack.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// By LZ4.
    Lz4,
    /// By Zstandard at this level, 1 to 19.
    Zstd(u8),
}

impl std::str::FromStr for Compress {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let wrong = || {
            let most = codec::MAX_ZSTD_LEVEL;
            format!("'{word}' is no way to compress: give auto, none, lz4, or zstd[:LEVEL] with a level of 1 to {most}")
        };
        match word {
            "auto" => return Ok(Compress::Auto),
            "none" => return Ok(Compress::None),
            "lz4" => return Ok(Compress::Lz4),
            "zstd" => return Ok(Compress::Zstd(codec::ZSTD_LEVEL)),
            _ => {}
        }
        let level = word.strip_prefix("zstd:").and_then(|level| level.parse().ok());
        let level = level.filter(|level| (1..=codec::MAX_ZSTD_LEVEL).contains(level));
        level.map(Compress::Zstd).ok_or_else(wrong)
    }
}

impl std::fmt::Display for Compress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Compress::Auto => f.write_str("auto"),
            Compress::None => f.write_str("none"),
            Compress::Lz4 => f.write_str("lz4"),
            Compress::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl From<Compress> for String {
    fn from(compress: Compress) -> String {
        compress.to_string()
    }
}

impl TryFrom<String> for Compress {
    type Error = String;

    fn try_from(word: String) -> Result<Self, String> {
        word.parse()
    }
}

/// A source's settings.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// What the engine decides by.
    pub source: SourceConfig,
    /// How long connecting, and the receiver's first answer, may take.
    pub connect_timeout: Duration,
    /// The most bytes a second that all streams together send; `None`: as fast as the link takes them.
    pub max_bandwidth: Option<u64>,
    /// Bytes of kernel buffer a data socket asks for; 4 MiB is best on fast links.
    pub socket_buffer_bytes: usize,
    /// Whether, and by what, pages are packed.
    pub compress: Compress,
    /// Whether each batch has a checksum over its pages as they are sent, which the receiver compares before it uses any.
    /// Costs a copy.
    pub checksum: bool,
    /// How connections are protected: the receiver has to be told the same.
    pub security: Security,
}

impl Default for SendOptions {
    fn default() -> Self {
        SendOptions {
            source: SourceConfig::default(),
            connect_timeout: Duration::from_secs(10),
            max_bandwidth: None,
            socket_buffer_bytes: 4 << 20,
            compress: Compress::default(),
            checksum: false,
            security: Security::default(),
        }
    }
}

impl SendOptions {
    /// Whether the receiver, as far as it has said what it takes, takes what is asked for; else a sentence.
    pub(crate) fn check_receiver(&self, totals: &Totals) -> Result<(), String> {
        totals.check(self.compress)?;
        if self.checksum { totals.check_sums() } else { Ok(()) }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let streams = self.source.streams;
        if streams == 0 || streams > MAX_STREAMS {
            return Err(Error::Options(format!(
                "{streams} data streams were asked for; use 1 to {MAX_STREAMS}"
            )));
        }
        if let Compress::Zstd(level) = self.compress
            && !(1..=codec::MAX_ZSTD_LEVEL).contains(&level)
        {
            return Err(Error::Options(format!(
                "level {level} of zstd was asked for; use 1 to {}",
                codec::MAX_ZSTD_LEVEL
            )));
        }
        if self.max_bandwidth == Some(0) {
            return Err(Error::Options(
                "a bandwidth of 0 would never send a page; leave it out for no limit".to_owned(),
            ));
        }
        Ok(())
    }
}

/// The most data streams a migration has.
pub(crate) const MAX_STREAMS: u16 = 64;

/// What a source asks a destination for. It comes from a peer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Incoming {
    /// The machine that is to be made.
    pub config: MachineConfig,
    /// The source only asks whether the machine could be made; it is thrown away as soon as it was. Nothing that lies
    /// here, as the content of a RAM file, may be lost to that.
    pub dry_run: bool,
}

/// A destination's settings.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// What the engine decides by.
    pub destination: DestinationConfig,
    /// The most bytes of guest RAM that are taken; a larger guest is refused. `None`: what `prepare` can make.
    pub max_memory: Option<u64>,
    /// Bytes of the host's memory that are left to others: a guest that would take them fails, and goes on at its source.
    /// Not looked at where [`machine::GuestRam::is_populated`]; 0: never.
    pub host_reserve_bytes: u64,
    /// How long a new connection may take to say who it is, and a source to open all its streams.
    pub handshake_timeout: Duration,
    /// Bytes of kernel buffer a data socket asks for.
    pub socket_buffer_bytes: usize,
    /// How connections are protected, and which are taken.
    pub security: Security,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        ReceiveOptions {
            destination: DestinationConfig::default(),
            max_memory: None,
            host_reserve_bytes: 256 << 20,
            handshake_timeout: Duration::from_secs(10),
            socket_buffer_bytes: 4 << 20,
            security: Security::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_compress_are_read_and_written() {
        for (word, compress) in [
            ("auto", Compress::Auto),
            ("none", Compress::None),
            ("lz4", Compress::Lz4),
            ("zstd:1", Compress::Zstd(1)),
            ("zstd:19", Compress::Zstd(19)),
        ] {
            assert_eq!(word.parse(), Ok(compress));
            assert_eq!(compress.to_string(), word);
        }
        assert_eq!("zstd".parse(), Ok(Compress::Zstd(1)));
        for word in ["", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "lz4:2", "gzip", "ZSTD"] {
            let error = word.parse::<Compress>().unwrap_err();
            assert!(error.contains("lz4, or zstd[:LEVEL]"), "{error}");
        }
        let options = SendOptions {
            compress: Compress::Zstd(20),
            ..SendOptions::default()
        };
        assert!(options.check().unwrap_err().to_string().contains("level 20"));
    }
}
