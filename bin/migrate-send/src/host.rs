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
        cli::print_line(&result.to_string())?;
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
        let mut host = connect(socket).await.map_err(early)?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let shown = Arc::clone(&progress);
        let bar = cli::show_progress(arguments.output.log.quiet, move || *lock(&shown));
        let end = watch(&mut host, &params, &progress, &mut signals).await;
        drop(bar);
        let end = end.map_err(|ended| match ended {
            Ended::NotBegun(error) => early(error),
            Ended::Lost(error) => lost(out, &error),
        })?;
        if let Some(error) = &end.error {
            say_stderr(format_args!("migrate-send: {}: {error}", end.ending));
        }
        cli::or_warn(out.write_file(&end.report, None));
        cli::or_warn(out.conclude(&end.report, None));
        let dry_run = options.source.dry_run;
        match end.ending {
            Ending::Completed if !dry_run => {}
            Ending::Unknown => cli::or_warn(out.say("the guest stays paused at its host, which serves on")),
            _ => cli::or_warn(out.say("the guest is still its host's, which serves on")),
        }
        Ok(end.ending.exit_code())
    })
}

/// Why there is no end to report.
enum Ended {
    /// The host did not begin.
    NotBegun(Error),
    /// It was not heard of again.
    Lost(String),
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

/// Follows a migration to its end; a signal asks the host to cancel it.
async fn watch(
    host: &mut ControlClient,
    params: &Value,
    progress: &Mutex<Progress>,
    signals: &mut Signals,
) -> Result<MigrationEnd, Ended> {
    let not_begun = |error: Error| Ended::NotBegun(error);
    let followed = host.call("progress", &json!({"follow": true})).await;
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
                say_stderr("migrate-send: asking the host to cancel");
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

/// A host that went away in the middle: nobody here knows where its guest is.
fn lost(out: &ReportOut, error: &str) -> Error {
    let error = format!("{error}; the host is gone, and nobody here knows whether its guest was handed over");
    cli::report_early(out, Role::Source, Error::Unknown(error))
}
