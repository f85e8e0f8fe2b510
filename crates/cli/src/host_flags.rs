//! What an operator asks a host that serves a guest, beside to send it.

use crate::Error;
use crate::units::Size;
use clap::Args;
use pages::PAGE_BYTES;
use serde_json::{Value, json};

/// The flags. At most one of them, and it needs --control.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "With --control, in place of --to; the answer is a line of JSON")]
#[group(multiple = true)]
pub struct HostFlags {
    /// Say what the guest does
    #[arg(long)]
    pub status: bool,
    /// Say how far the migration under way is
    #[arg(long)]
    pub progress: bool,
    /// Cancel the migration under way: the guest goes on there
    #[arg(long)]
    pub cancel: bool,
    /// Pause the guest
    #[arg(long)]
    pub pause: bool,
    /// Let the guest go on
    #[arg(long)]
    pub resume: bool,
    /// With --resume: also after a migration whose end is unknown. Make sure first that the guest does not run elsewhere
    #[arg(long)]
    pub force: bool,
    /// Ask the guest for a balloon of this size
    #[arg(long, value_name = "SIZE")]
    pub balloon_target: Option<Size>,
    /// Ask the guest for fresh statistics on its memory
    #[arg(long)]
    pub balloon_stats: bool,
    /// End the guest and its host
    #[arg(long)]
    pub quit: bool,
}

/// A request to a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which.
    pub method: &'static str,
    /// Its parameters.
    pub params: Value,
}

impl HostFlags {
    /// The request that was asked for, if any, and by which flag.
    pub(crate) fn request(&self) -> Result<Option<(&'static str, Request)>, Error> {
        let request = |method, params| Request { method, params };
        let mut given = Vec::new();
        for (is_given, flag, method) in [
            (self.status, "--status", "status"),
            (self.progress, "--progress", "progress"),
            (self.cancel, "--cancel", "cancel"),
            (self.pause, "--pause", "pause"),
            (self.balloon_stats, "--balloon-stats", "balloon-stats"),
            (self.quit, "--quit", "quit"),
        ] {
            if is_given {
                given.push((flag, request(method, Value::Null)));
            }
        }
        if self.resume {
            given.push(("--resume", request("resume", json!({"force": self.force}))));
        } else if self.force {
            return Err(Error::Usage("--force goes with --resume".to_owned()));
        }
        if let Some(Size(bytes)) = self.balloon_target {
            if !bytes.is_multiple_of(PAGE_BYTES) {
                return Err(Error::Usage(format!(
                    "--balloon-target: {bytes} bytes are not a whole number of 4 KiB pages"
                )));
            }
            given.push(("--balloon-target", request("balloon", json!({"bytes": bytes}))));
        }
        let second = given.get(1).map(|(flag, _)| *flag);
        if let (Some((first, _)), Some(second)) = (given.first(), second) {
            return Err(Error::Usage(format!(
                "{first} and {second}: ask for one thing at a time"
            )));
        }
        Ok(given.pop())
    }
}
