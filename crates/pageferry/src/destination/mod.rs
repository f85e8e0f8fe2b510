//! A destination: waits for a source at the [`desk`], and takes its guest in a [`session`].

mod desk;
mod door;
mod session;

use crate::handle::{Finished, Watch};
use crate::worker::{DestinationWorker, Prepare};
use crate::{Listener, ReceiveOptions, report};
use desk::{Arrival, Desk, turn_away};
use engine::{Ending, Outcome, Role};
use session::Session;
use std::time::Instant;
use tracing::{Instrument, info_span};
use wire::Message;

/// Waits on `listener` for a guest, and takes it.
pub(crate) async fn run(listener: Listener, options: ReceiveOptions, prepare: Prepare, watch: Watch) -> Finished {
    let span = info_span!("receive", at = %listener.local_address());
    let waiting = Instant::now();
    let receiving = async move {
        let failed = |ending, error: String| Finished {
            outcome: report::ended(Role::Receiver, ending, error, waiting.elapsed().as_secs_f64() * 1000.0),
            guest: None,
        };
        let mut desk = match Desk::open(&listener, &options) {
            Ok(desk) => desk,
            Err(error) if error.is_refusal() => return failed(Ending::Refused, error.to_string()),
            Err(error) => return failed(Ending::Failed, error.to_string()),
        };
        let mut worker = match DestinationWorker::start(prepare, options.max_memory) {
            Ok(worker) => worker,
            Err(error) => return failed(Ending::Failed, format!("starting the guest's thread: {error}")),
        };
        let outcome = receive(&mut desk, &mut worker, &options, &watch).await;
        desk.close();
        let finish = move || worker.finish().inspect(|guest| guest.ram.settle());
        let guest = tokio::task::spawn_blocking(finish).await.ok().flatten();
        match outcome {
            Some(outcome) => {
                tracing::info!(ending = %outcome.ending, error = outcome.error, "finished");
                let guest = guest.filter(|_| outcome.ending == Ending::Completed);
                Finished { outcome, guest }
            }
            None => failed(Ending::Cancelled, "cancelled while waiting for a source".to_owned()),
        }
    };
    receiving.instrument(span).await
}

/// Serves one source, and before it any number that only ask. `None`: cancelled before one came.
async fn receive(
    desk: &mut Desk,
    worker: &mut DestinationWorker,
    options: &ReceiveOptions,
    watch: &Watch,
) -> Option<Outcome> {
    loop {
        let arrival = tokio::select! {
            biased;
            () = watch.cancelled() => return None,
            arrival = desk.next() => arrival,
        };
        let guest = match arrival {
            Arrival::Control(lost) if matches!(lost.first, Message::Resume(_)) => {
                turn_away(
                    lost,
                    "this receiver knows nothing of that migration, or has given it up",
                );
                continue;
            }
            Arrival::Control(guest) => guest,
            Arrival::Data(data) => {
                desk.keep(data);
                continue;
            }
        };
        let dry_run = guest.only_asks();
        let outcome = Session::new(guest, options, watch, worker, desk).run().await;
        if !dry_run || outcome.ending == Ending::Cancelled {
            return Some(outcome);
        }
        tracing::info!(ending = %outcome.ending, error = outcome.error, "a source asked only; waiting for the next one");
        worker.settle().await;
    }
}
