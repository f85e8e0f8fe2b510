//! The destination's guest: made on a source's word, thrown away unless it was handed over.

use super::{Failure, at, digest, guarded};
use crate::{Guest, Incoming};
use engine::{DestinationAction, DestinationEvent, Step};
use machine::GuestRam;
use std::io;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Makes a machine like a source's, or says why not.
pub(crate) type Prepare = Box<dyn FnMut(&Incoming) -> Result<Guest, Vec<String>> + Send>;

/// What the thread says to the loop.
pub(crate) enum Said {
    /// An event for the engine.
    Event(DestinationEvent),
    /// A machine stands ready, with this RAM: what remains is for its data streams to come.
    Made(Arc<dyn GuestRam>),
    /// A `Discard` was carried out, and all that was queued before it.
    Discarded,
}

/// The thread that owns a destination's guest.
pub(crate) struct DestinationWorker {
    actions: blocking::Sender<DestinationAction>,
    said: mpsc::Receiver<Said>,
    thread: JoinHandle<Option<Guest>>,
    /// Discards that were not heard of yet.
    discards: usize,
}

impl DestinationWorker {
    /// Starts it.
    pub(crate) fn start(prepare: Prepare, max_memory: Option<u64>) -> io::Result<Self> {
        let (actions, queue) = blocking::channel();
        let (out, said) = mpsc::channel(16);
        let mut destination = Destination {
            prepare,
            max_memory,
            guest: None,
        };
        let thread = std::thread::Builder::new()
            .name("ferry-guest".to_owned())
            .spawn(move || {
                for action in queue {
                    if let Some(word) = destination.carry_out(action)
                        && out.blocking_send(word).is_err()
                    {
                        tracing::trace!("an action was carried out after the migration was over");
                    }
                }
                destination.guest
            })?;
        Ok(DestinationWorker {
            actions,
            said,
            thread,
            discards: 0,
        })
    }

    /// Queues an action. `false` if the thread died.
    pub(crate) fn carry_out(&mut self, action: DestinationAction) -> bool {
        self.discards += usize::from(matches!(action, DestinationAction::Discard));
        self.actions.send(action).is_ok()
    }

    /// What the thread says next; waits for ever once it is gone.
    pub(crate) async fn next(&mut self) -> Said {
        match self.said.recv().await {
            Some(said) => {
                self.discards -= usize::from(matches!(said, Said::Discarded)).min(self.discards);
                said
            }
            None => std::future::pending().await,
        }
    }

    /// Throws away what a source left behind, also an answer that it did not wait for: the next one starts afresh.
    pub(crate) async fn settle(&mut self) {
        if self.carry_out(DestinationAction::Discard) {
            while self.discards > 0 {
                self.next().await;
            }
        }
    }

    /// Waits for what was queued, and returns the guest, if there is one still. Blocks.
    pub(crate) fn finish(self) -> Option<Guest> {
        let DestinationWorker {
            actions, said, thread, ..
        } = self;
        drop((actions, said));
        thread.join().ok().flatten()
    }
}

struct Destination {
    prepare: Prepare,
    max_memory: Option<u64>,
    guest: Option<Guest>,
}

impl Destination {
    fn carry_out(&mut self, action: DestinationAction) -> Option<Said> {
        let step = action.step();
        let (step, mut error) = match guarded(step, || self.call(action)) {
            Ok(said) => return said,
            Err(failure) => failure,
        };
        if step == Step::Resume
            && let Err((_, then)) = guarded(step, || self.stop())
        {
            error.push_str(&format!("; then stopping what was started failed: {then}"));
        }
        Some(Said::Event(DestinationEvent::Failed { step, error }))
    }

    /// A resume that failed may have started vCPUs: they stop before the guest is thrown away.
    fn stop(&mut self) -> Result<(), Failure> {
        at(Step::Pause, self.guest(Step::Pause)?.machine.pause())
    }

    fn call(&mut self, action: DestinationAction) -> Result<Option<Said>, Failure> {
        let step = action.step();
        let event = match action {
            DestinationAction::Prepare(hello) => {
                let (config, dry_run) = (hello.config, hello.dry_run);
                return self.prepare(&Incoming { config, dry_run }).map(Some);
            }
            DestinationAction::Discard => {
                self.guest = None;
                return Ok(Some(Said::Discarded));
            }
            DestinationAction::Zero(ranges) => {
                let guest = self.guest(step)?;
                for range in ranges {
                    at(step, guest.ram.zero(range))?;
                }
                DestinationEvent::Zeroed
            }
            DestinationAction::Digest {
                excluded,
                chunk_pages,
                only,
            } => {
                let sums = digest::digest(&*self.guest(step)?.ram, &excluded, chunk_pages, &only);
                DestinationEvent::Digested(sums.map_err(|error| (step, error))?)
            }
            DestinationAction::Restore(state) => {
                at(step, self.guest(step)?.machine.restore(&state))?;
                DestinationEvent::Restored
            }
            DestinationAction::Resume => {
                at(step, self.guest(step)?.machine.resume())?;
                DestinationEvent::Resumed
            }
            DestinationAction::Transmit(_) | DestinationAction::Disconnect | DestinationAction::Finished(_) => {
                return Err((step, "this is no action on the guest".to_owned()));
            }
        };
        Ok(Some(Said::Event(event)))
    }

    fn guest(&mut self, step: Step) -> Result<&mut Guest, Failure> {
        self.guest
            .as_mut()
            .ok_or_else(|| (step, "there is no guest here".to_owned()))
    }

    fn prepare(&mut self, incoming: &Incoming) -> Result<Said, Failure> {
        let refused = |reasons| Ok(Said::Event(DestinationEvent::Refused(reasons)));
        let config = &incoming.config;
        let (asked, most) = (config.layout.total_bytes(), self.max_memory.unwrap_or(u64::MAX));
        if asked > most {
            return refused(vec![format!(
                "the guest has {asked} bytes of RAM, more than the {most} that this receiver takes"
            )]);
        }
        let guest = match (self.prepare)(incoming) {
            Ok(guest) => guest,
            Err(reasons) if reasons.is_empty() => {
                return refused(vec!["the receiver cannot make such a machine".to_owned()]);
            }
            Err(reasons) => return refused(reasons),
        };
        let made = guest.machine.config();
        let mut reasons: Vec<String> = config.mismatches(&made).iter().map(ToString::to_string).collect();
        if reasons.is_empty() && **guest.ram.layout() != config.layout {
            reasons.push("the receiver's memory is not laid out as its machine says".to_owned());
        }
        if !reasons.is_empty() {
            return refused(reasons);
        }
        if guest.machine.is_running() {
            return Err((Step::Prepare, "the machine that was made runs already".to_owned()));
        }
        let ram = Arc::clone(&guest.ram);
        self.guest = Some(guest);
        Ok(Said::Made(ram))
    }
}
