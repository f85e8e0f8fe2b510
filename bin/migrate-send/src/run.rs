//! What `migrate-send` does: start a guest, send it, report; and if it could not be handed over, show that it is unharmed.

use crate::Arguments;
use cli::{Error, ReportOut, Role, Signals, SoftSlot, Started};
use pageferry::{Address, Ending, Finished, Migration, SendOptions};
use std::time::Duration;

/// How long a guest that stayed here is watched running on.
const GOES_ON: Duration = Duration::from_millis(200);

/// Runs the command; gives its exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Error> {
    let out = ReportOut::new(&arguments.output);
    let to: Address = arguments
        .send
        .to
        .parse()
        .map_err(|error| Error::Usage(format!("--to: {error}")))?;
    let options = SendOptions {
        source: arguments.send.plan(is_local(&to))?,
        connect_timeout: arguments.send.connect_timeout,
        max_bandwidth: Some(arguments.send.max_bandwidth).filter(|&rate| rate > 0),
        ..SendOptions::default()
    };
    let plan = arguments.guest.plan()?;
    out.check()?;
    cli::block_on(async {
        let early = |error| cli::report_early(&out, Role::Source, error);
        let mut signals = Signals::catch().map_err(early)?;
        let Started { guest, soft } = signals.or(move || cli::start(&plan)).await.map_err(early)?;
        let handle = Migration::send(guest, &to, options);
        let line = cli::show_progress(arguments.output.log.quiet, handle.observer());
        let cancel = handle.canceller();
        let finished = signals.watch(handle.finish(), cancel).await;
        drop(line);
        conclude(&out, finished, &soft, &mut signals).await
    })
}

/// Reports. A guest that stayed here goes on; that it is unharmed, it says itself. The exit code tells where the guest is:
/// a report that cannot be written must not make 4, "still the source's", of a guest that was handed over.
async fn conclude(out: &ReportOut, finished: Finished, soft: &SoftSlot, signals: &mut Signals) -> Result<u8, Error> {
    let Finished { outcome, guest } = finished;
    if let Some(error) = &outcome.error {
        cli::say_stderr(format_args!("migrate-send: {}: {error}", outcome.ending));
    }
    let stayed = !matches!(outcome.ending, Ending::Completed | Ending::Unknown);
    let mut word = None;
    let mut harm = None;
    if stayed && guest.as_ref().is_some_and(|guest| guest.machine.is_running()) {
        let ticks = soft.run(Some(GOES_ON), signals).await?;
        if let Some(checked) = soft.self_check() {
            word = Some(checked.report(ticks));
            harm = checked.passed().err();
        }
    }
    cli::or_warn(out.write_file(&outcome.report, word));
    cli::or_warn(out.conclude(&outcome.report, word));
    if let Some(error) = harm {
        return Err(Error::Failed(format!("the guest came to harm: {error}")));
    }
    if let Some(word) = word {
        let checked = word.pages_checked;
        cli::or_warn(out.say(&format!("the guest is unharmed: self-check of {checked} pages passed")));
    }
    Ok(outcome.ending.exit_code())
}

/// Whether the receiver is on this machine: nothing but memory lies between.
fn is_local(to: &Address) -> bool {
    match to {
        Address::Unix(_) => true,
        Address::Tcp { host, .. } => {
            host == "localhost"
                || host
                    .parse::<std::net::IpAddr>()
                    .is_ok_and(|address| address.is_loopback())
        }
        Address::Vsock { .. } => false,
    }
}
