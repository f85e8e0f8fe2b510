//! A guest that a host serves: asked about, or sent by it, and reported on as if it had been started here.

use crate::Arguments;
use cli::{Error, ReportOut, Request, Role, Signals, say_stderr};
use pageferry::control_socket::{ControlClient, Heard, MigrateParams, MigrationEnd, ProgressData};
use pageferry::{Address, Ending, Progress, SendOptions};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// After a host said that there is nothing to cancel, and before the migration was heard of.
const CANCEL_AGAIN: Duration = Duration::from_millis(50);

/// Asks a host for one thing, and prints its answer as a line of JSON.
pub(crate) fn request(socket: &Path, request: &Request) -> Result<u8, Error> {
    cli::block_on(async {
        let mut host = connect(socket).await?;
        let said = host.call(request.method, &request.params).await;
        let result = said.map_err(failed)?.map_err(Error::Refused)?;
        let printed = cli::print_line(&result.to_string());
        if matches!(request.method, "status" | "progress" | "set" | "balloon-stats") {
            // What was asked for is the words.
            printed?;
        } else {
            cli::or_warn(printed);
        }
        Ok(0)
    })
}

/// Has a host send its guest.
pub(crate) fn send(
    arguments: &Arguments,
    out: &ReportOut,
    socket: &Path,
    to: &Address,
    options: &SendOptions,
) -> Result<u8, Error> {
    let params = serde_json::to_value(MigrateParams::of(to.to_string(), options))
        .map_err(|error| Error::Failed(format!("writing the request: {error}")))?;
    cli::block_on(async {
        let early = |error| cli::report_early(out, Role::Source, error);
        let mut signals = Signals::catch().map_err(early)?;
        let connected = tokio::select! {
            connected = connect(socket) => connected,
            () = signals.again() => Err(Error::Cancelled),
        };
        let mut host = connected.map_err(early)?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let shown = Arc::clone(&progress);
        let bar = cli::show_progress(arguments.output.log.quiet, move || *lock(&shown));
        let end = watch(&mut host, &params, &progress, &mut signals).await;
        drop(bar);
        let end = end.map_err(|ended| match ended {
            Ended::NotBegun(error) => early(error),
            Ended::Lost(error) => unknown(out, &format!("{error}; the host is gone")),
            Ended::Left => unknown(
                out,
                "a second signal came before the host's answer: the migration may go on there",
            ),
        })?;
        if let Some(error) = &end.error {
            say_stderr(format_args!("migrate-send: {}: {error}", end.ending));
        }
        cli::or_warn(out.write_file(&end.report, None));
        cli::or_warn(out.conclude(&end.report, None));
        let dry_run = options.source.dry_run;
        if end.ending != Ending::Completed || dry_run {
            let whose = match end.ending {
                Ending::Unknown => "the guest stays paused at its host",
                _ => "the guest is still its host's",
            };
            let host_now = match serves_on(&mut host, &mut signals).await {
                true => "which serves on",
                false => "which does not answer any more",
            };
            cli::or_warn(out.say(&format!("{whose}, {host_now}")));
        }
        Ok(out.code(end.ending.exit_code()))
    })
}

/// Why there is no end to report.
enum Ended {
    /// The host did not begin.
    NotBegun(Error),
    /// It was not heard of again.
    Lost(String),
    /// It was not waited for any longer.
    Left,
}

/// Whether the host is still there: it may have been told to end, and ended the migration for that.
async fn serves_on(host: &mut ControlClient, signals: &mut Signals) -> bool {
    tokio::select! {
        status = host.call("status", &Value::Null) => matches!(status, Ok(Ok(status)) if status["state"] != "ended"),
        () = signals.again() => false,
    }
}

fn lock(progress: &Mutex<Progress>) -> std::sync::MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn connect(socket: &Path) -> Result<ControlClient, Error> {
    ControlClient::connect(socket).await.map_err(failed)
}

fn failed(error: pageferry::Error) -> Error {
    Error::Failed(error.to_string())
}

/// Follows a migration to its end. A signal asks the host to cancel it; a second one is for a host that does not.
async fn watch(
    host: &mut ControlClient,
    params: &Value,
    progress: &Mutex<Progress>,
    signals: &mut Signals,
) -> Result<MigrationEnd, Ended> {
    let not_begun = |error: Error| Ended::NotBegun(error);
    let follow = json!({"follow": true});
    let followed = tokio::select! {
        followed = host.call("progress", &follow) => followed,
        () = signals.again() => return Err(not_begun(Error::Cancelled)),
    };
    let followed = followed.map_err(|error| not_begun(failed(error)))?;
    followed.map_err(|error| not_begun(Error::Refused(error)))?;
    let sent = host.send("migrate", params).await;
    let migrate = sent.map_err(|error| not_begun(failed(error)))?;
    let mut cancel = None;
    loop {
        let heard = tokio::select! {
            biased;
            heard = host.next() => heard.map_err(|error| Ended::Lost(error.to_string()))?,
            () = signals.again() => {
                if cancel.is_some() {
                    return Err(Ended::Left);
                }
                say_stderr("migrate-send: asking the host to cancel; a second signal ends this command without an answer");
                cancel = Some(ask_to_cancel(host).await?);
                continue;
            }
        };
        match heard {
            Heard::Event { name, data } if name == "progress" => {
                if let Ok(data) = serde_json::from_value::<ProgressData>(data) {
                    *lock(progress) = data.to_progress();
                }
            }
            Heard::Answer { id, result } if id == Some(migrate) => {
                let end = result.map_err(|error| not_begun(Error::Refused(error)))?;
                return serde_json::from_value(end)
                    .map_err(|error| Ended::Lost(format!("the host's report makes no sense: {error}")));
            }
            // It came before the migration.
            Heard::Answer { id, result: Err(_) } if id.is_some() && id == cancel => {
                tokio::time::sleep(CANCEL_AGAIN).await;
                cancel = Some(ask_to_cancel(host).await?);
            }
            // What was done about a cancel, or an event of no interest here.
            Heard::Answer { .. } | Heard::Event { .. } => {}
        }
    }
}

async fn ask_to_cancel(host: &mut ControlClient) -> Result<u64, Ended> {
    let sent = host.send("cancel", &Value::Null).await;
    sent.map_err(|error| Ended::Lost(error.to_string()))
}

/// No answer came: nobody here knows where the guest is.
fn unknown(out: &ReportOut, why: &str) -> Error {
    let error = format!("{why}; nobody here knows whether the guest was handed over: ask its host, or the receiver");
    cli::report_early(out, Role::Source, Error::Unknown(error))
}
