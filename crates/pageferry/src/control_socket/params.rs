//! What `migrate` takes: the settings of a source, each with its unit in its name.

use crate::{
    Address, Ask, Compress, OnTimeout, Security, SendOptions, SkipSet, SourceConfig, Tls, TlsPem, Token, Tuning,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// The longest time that is taken, milliseconds: 30 years.
const MAX_MS: f64 = 1e12;

/// A reason to leave a page behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SkipWord {
    /// What the guest calls free, and what its balloon holds.
    Free,
    /// Pages that read as zero.
    Zero,
    /// Pages that were never touched.
    Hole,
}

/// When to ask the balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AskWord {
    /// When it can pay.
    #[default]
    Auto,
    /// Whenever the guest can be asked; refused where it cannot.
    Always,
    /// Never.
    Never,
}

/// What to do when the time-out passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnTimeoutWord {
    /// Give up; the guest goes on here.
    #[default]
    Cancel,
    /// Pause the guest and finish.
    Stop,
}

/// The parameters of `migrate`. All but `to` have the defaults of [`SendOptions`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MigrateParams {
    /// Where the receiver listens: `tcp:HOST:PORT`, `unix:PATH` or `vsock:CID:PORT`.
    pub to: String,
    /// What to leave behind; an empty list: nothing.
    pub skip: Vec<SkipWord>,
    /// When to ask the balloon.
    pub ask: AskWord,
    /// How long the guest's answers may take.
    pub hint_timeout_ms: f64,
    /// Data streams.
    pub streams: u16,
    /// The most bytes a second; 0: no limit.
    pub max_bandwidth_bytes_per_s: u64,
    /// How pages are packed: `auto`, `none`, `lz4`, or `zstd:LEVEL`.
    pub compress: Compress,
    /// The downtime to aim at.
    pub downtime_limit_ms: f64,
    /// The most time before the guest is paused; 0: no limit.
    pub timeout_ms: f64,
    /// What to do then.
    pub on_timeout: OnTimeoutWord,
    /// How long connecting may take.
    pub connect_timeout_ms: f64,
    /// Silence after which the receiver is dead.
    pub peer_timeout_ms: f64,
    /// How long to try to reach the receiver again after the connection was lost; 0: not at all.
    pub resume_window_ms: f64,
    /// Digest RAM on both sides and compare.
    pub verify: bool,
    /// Checks only.
    pub dry_run: bool,
    /// Checksums over the pages of each batch.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub checksum: bool,
    /// TLS, by what the files hold: a host may have no way to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsPem>,
    /// The token, its bytes in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<Token>,
    /// Allows plain TCP beyond loopback.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// The parameters of `set`: those that are left out stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SetParams {
    /// The most bytes a second; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bandwidth_bytes_per_s: Option<u64>,
    /// The downtime to aim at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_limit_ms: Option<f64>,
    /// Refused: the connections are opened at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<u16>,
}

impl SetParams {
    /// What the library takes; else a sentence.
    pub fn tuning(&self) -> Result<Tuning, String> {
        if self.streams.is_some() {
            return Err(
                "set: \"streams\" cannot change while a migration runs, whose connections were opened at its start: cancel it, and \
                 migrate with others"
                    .to_owned(),
            );
        }
        let tuning = Tuning {
            downtime_limit: self
                .downtime_limit_ms
                .map(|ms| duration("downtime_limit_ms", ms))
                .transpose()?,
            max_bandwidth: self.max_bandwidth_bytes_per_s,
        };
        if tuning == Tuning::default() {
            return Err("set needs \"max_bandwidth_bytes_per_s\" or \"downtime_limit_ms\"".to_owned());
        }
        Ok(tuning)
    }
}

impl Default for MigrateParams {
    fn default() -> Self {
        MigrateParams::of(String::new(), &SendOptions::default())
    }
}

impl MigrateParams {
    /// What says `options` to a host.
    pub fn of(to: String, options: &SendOptions) -> Self {
        let source = &options.source;
        let reasons = [
            (source.skip.free, SkipWord::Free),
            (source.skip.zero, SkipWord::Zero),
            (source.skip.hole, SkipWord::Hole),
        ];
        MigrateParams {
            to,
            skip: reasons
                .iter()
                .filter(|(given, _)| *given)
                .map(|(_, word)| *word)
                .collect(),
            ask: match source.ask {
                Ask::Auto => AskWord::Auto,
                Ask::Always => AskWord::Always,
                Ask::Never => AskWord::Never,
            },
            hint_timeout_ms: ms(source.hint_timeout),
            streams: source.streams,
            max_bandwidth_bytes_per_s: options.max_bandwidth.unwrap_or(0),
            compress: options.compress,
            downtime_limit_ms: ms(source.downtime_limit),
            timeout_ms: ms(source.timeout),
            on_timeout: match source.on_timeout {
                OnTimeout::Cancel => OnTimeoutWord::Cancel,
                OnTimeout::Stop => OnTimeoutWord::Stop,
            },
            connect_timeout_ms: ms(options.connect_timeout),
            peer_timeout_ms: ms(source.peer_timeout),
            resume_window_ms: ms(source.resume_window),
            verify: source.verify,
            dry_run: source.dry_run,
            checksum: options.checksum,
            tls: options.security.tls.as_ref().map(|tls| tls.pem().clone()),
            token: options.security.token.clone(),
            insecure: options.security.insecure,
        }
    }

    /// What they mean, or which of them makes no sense.
    pub(crate) fn plan(&self) -> Result<(Address, SendOptions), String> {
        if self.to.is_empty() {
            return Err("migrate needs \"to\", as tcp:HOST:PORT".to_owned());
        }
        let to = self.to.parse().map_err(|error| format!("\"to\": {error}"))?;
        for (name, value) in [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("peer_timeout_ms", self.peer_timeout_ms),
        ] {
            if value == 0.0 {
                return Err(format!("\"{name}\" 0: give some time, as 10000"));
            }
        }
        let options = SendOptions {
            source: SourceConfig {
                skip: SkipSet {
                    free: self.skip.contains(&SkipWord::Free),
                    zero: self.skip.contains(&SkipWord::Zero),
                    hole: self.skip.contains(&SkipWord::Hole),
                },
                ask: match self.ask {
                    AskWord::Auto => Ask::Auto,
                    AskWord::Always => Ask::Always,
                    AskWord::Never => Ask::Never,
                },
                hint_timeout: duration("hint_timeout_ms", self.hint_timeout_ms)?,
                streams: self.streams,
                downtime_limit: duration("downtime_limit_ms", self.downtime_limit_ms)?,
                timeout: duration("timeout_ms", self.timeout_ms)?,
                on_timeout: match self.on_timeout {
                    OnTimeoutWord::Cancel => OnTimeout::Cancel,
                    OnTimeoutWord::Stop => OnTimeout::Stop,
                },
                peer_timeout: duration("peer_timeout_ms", self.peer_timeout_ms)?,
                resume_window: duration("resume_window_ms", self.resume_window_ms)?,
                verify: self.verify,
                dry_run: self.dry_run,
                ..SourceConfig::default()
            },
            connect_timeout: duration("connect_timeout_ms", self.connect_timeout_ms)?,
            max_bandwidth: Some(self.max_bandwidth_bytes_per_s).filter(|&rate| rate > 0),
            compress: self.compress,
            checksum: self.checksum,
            security: self.security()?,
            ..SendOptions::default()
        };
        options.check().map_err(|error| error.to_string())?;
        Ok((to, options))
    }

    fn security(&self) -> Result<Security, String> {
        let tls = self.tls.clone().map(Tls::from_pem).transpose();
        Ok(Security {
            tls: tls.map_err(|error| format!("\"tls\": {error}"))?.map(Arc::new),
            token: self.token.clone(),
            insecure: self.insecure,
        })
    }
}

/// A time in milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Reads a time.
pub(crate) fn duration(name: &str, ms: f64) -> Result<Duration, String> {
    if !(0.0..=MAX_MS).contains(&ms) {
        return Err(format!("\"{name}\" {ms}: give 0 to {MAX_MS:.0} milliseconds"));
    }
    Duration::try_from_secs_f64(ms / 1000.0).map_err(|error| format!("\"{name}\" {ms}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plan(value: serde_json::Value) -> Result<(Address, SendOptions), String> {
        let params: MigrateParams = serde_json::from_value(value).map_err(|e| e.to_string())?;
        params.plan()
    }

    #[test]
    fn what_is_left_out_has_the_librarys_defaults() {
        let (to, options) = plan(json!({"to": "tcp:there:1"})).unwrap();
        assert_eq!(to.to_string(), "tcp:there:1");
        assert_eq!(format!("{options:?}"), format!("{:?}", SendOptions::default()));
    }

    #[test]
    fn every_setting_goes_there_and_comes_back() {
        let options = SendOptions {
            source: SourceConfig {
                skip: SkipSet {
                    zero: false,
                    ..SkipSet::ALL
                },
                ask: Ask::Never,
                hint_timeout: Duration::from_micros(1500),
                streams: 7,
                downtime_limit: Duration::from_millis(42),
                timeout: Duration::from_secs(9),
                on_timeout: OnTimeout::Stop,
                peer_timeout: Duration::from_secs(3),
                resume_window: Duration::from_secs(7),
                verify: true,
                dry_run: true,
                ..SourceConfig::default()
            },
            connect_timeout: Duration::from_secs(4),
            max_bandwidth: Some(1 << 40),
            compress: Compress::Zstd(3),
            checksum: true,
            security: Security {
                token: Some(Token::new(b"0123456789abcdef\x00\xff").unwrap()),
                ..Security::insecure()
            },
            ..SendOptions::default()
        };
        let params = MigrateParams::of("unix:/x".to_owned(), &options);
        assert!(!format!("{params:?}").contains("3031"), "a token is not printed");
        let (_, back) = plan(serde_json::to_value(params).unwrap()).unwrap();
        assert_eq!(back.security.token, options.security.token);
        assert_eq!(format!("{back:?}"), format!("{options:?}"));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (params, word) in [
            (json!({}), "\"to\""),
            (json!({"to": "there"}), "tcp:HOST:PORT"),
            (json!({"to": "tcp:h:1", "streams": 0}), "0 data streams"),
            (json!({"to": "tcp:h:1", "streams": 65}), "65 data streams"),
            (json!({"to": "tcp:h:1", "timeout_ms": -1}), "timeout_ms"),
            (json!({"to": "tcp:h:1", "hint_timeout_ms": 1e300}), "hint_timeout_ms"),
            (json!({"to": "tcp:h:1", "peer_timeout_ms": 0}), "peer_timeout_ms"),
            (json!({"to": "tcp:h:1", "skip": ["all"]}), "all"),
            (json!({"to": "tcp:h:1", "ask": "maybe"}), "maybe"),
            (json!({"to": "tcp:h:1", "compress": "gzip"}), "gzip"),
            (json!({"to": "tcp:h:1", "speed": 1}), "speed"),
            (json!({"to": "tcp:h:1", "token": "00ff"}), "2 bytes"),
            (json!({"to": "tcp:h:1", "token": "0g"}), "hexadecimal"),
            (
                json!({"to": "tcp:h:1", "tls": {"cert": "", "key": "", "ca": ""}}),
                "certificate",
            ),
        ] {
            let error = plan(params).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
