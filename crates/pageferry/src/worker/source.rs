//! The source's guest.

use super::{Failure, at, digest, guarded};
use crate::Guest;
use crate::answers::Answers;
use engine::{Peeked, Rechecked, Scanned, SourceAction, SourceEvent, Step};
use machine::BalloonCounts;
use pages::PageSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// The thread that owns a source's guest.
pub(crate) struct SourceWorker {
    actions: blocking::Sender<SourceAction>,
    thread: JoinHandle<Option<Guest>>,
}

impl SourceWorker {
    /// Starts it. With `look_for_holes` off, all of RAM counts as present. Where no thread can be had, the guest comes
    /// back with the reason.
    pub(crate) fn start(
        guest: Guest,
        look_for_holes: bool,
        answers: Arc<Answers>,
        events: mpsc::Sender<SourceEvent>,
    ) -> Result<Self, (io::Error, Option<Guest>)> {
        let (actions, queue) = blocking::channel();
        // The guest crosses over by a channel, so that it is not lost with a thread that cannot be started.
        let (hand, over) = blocking::channel();
        let thread = std::thread::Builder::new()
            .name("ferry-guest".to_owned())
            .spawn(move || {
                let guest = over.recv().ok()?;
                let mut source = Source {
                    guest,
                    look_for_holes,
                    answers,
                };
                for action in queue {
                    let event = source.carry_out(action);
                    if events.blocking_send(event).is_err() {
                        tracing::trace!("an action was carried out after the migration was over");
                    }
                }
                Some(source.guest)
            });
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => return Err((error, Some(guest))),
        };
        match hand.send(guest) {
            Ok(()) => Ok(SourceWorker { actions, thread }),
            Err(blocking::SendError(guest)) => Err((io::Error::other("the thread died at once"), Some(guest))),
        }
    }

    /// Queues an action. `false` if the thread died.
    pub(crate) fn carry_out(&self, action: SourceAction) -> bool {
        self.actions.send(action).is_ok()
    }

    /// Waits for what was queued, and gives the guest back. Blocks.
    pub(crate) fn finish(self) -> Option<Guest> {
        drop(self.actions);
        self.thread.join().ok().flatten()
    }
}

struct Source {
    guest: Guest,
    look_for_holes: bool,
    answers: Arc<Answers>,
}

impl Source {
    fn carry_out(&mut self, action: SourceAction) -> SourceEvent {
        let step = action.step();
        match guarded(step, || self.call(action)) {
            Ok(event) => event,
            Err((step, error)) => SourceEvent::Failed { step, error },
        }
    }

    fn call(&mut self, action: SourceAction) -> Result<SourceEvent, Failure> {
        let step = action.step();
        let guest = &mut self.guest;
        Ok(match action {
            SourceAction::StartTracking => {
                at(step, guest.tracker.start())?;
                SourceEvent::TrackingStarted
            }
            SourceAction::Scan => SourceEvent::Scanned(Box::new(self.scan()?)),
            SourceAction::BeginHints { session } => {
                let sink = self.answers.open(session);
                at(step, guest.free_pages.begin(session, sink))?;
                SourceEvent::HintsBegun
            }
            SourceAction::Peek(range) => SourceEvent::Peeked(Peeked {
                range,
                written: at(step, guest.tracker.peek(range))?,
            }),
            SourceAction::EndHints { session, hold } => {
                let ended = match hold {
                    true => guest.free_pages.hold(session),
                    false => guest.free_pages.end(session),
                };
                self.answers.close();
                at(step, ended)?;
                SourceEvent::HintsEnded(self.counts())
            }
            SourceAction::Recheck => SourceEvent::Rechecked(Box::new(Rechecked {
                ballooned: guest.free_pages.ballooned(),
                counts: self.counts(),
            })),
            SourceAction::Harvest => SourceEvent::Harvested(at(step, guest.tracker.harvest())?),
            SourceAction::Pause => {
                at(step, guest.machine.pause())?;
                SourceEvent::Paused
            }
            SourceAction::Save => SourceEvent::Saved(at(step, guest.machine.save())?),
            SourceAction::Digest {
                excluded,
                chunk_pages,
                only,
            } => {
                let sums = digest::digest(&*guest.ram, &excluded, chunk_pages, &only);
                SourceEvent::Digested(sums.map_err(|error| (step, error))?)
            }
            SourceAction::GiveBack(pages) => {
                at(step, guest.tracker.give_back(&pages))?;
                SourceEvent::GivenBack
            }
            SourceAction::StopTracking => {
                at(step, guest.tracker.stop())?;
                SourceEvent::TrackingStopped
            }
            SourceAction::Resume => {
                at(step, guest.machine.resume())?;
                SourceEvent::Resumed
            }
            SourceAction::Transmit(_)
            | SourceAction::Send { .. }
            | SourceAction::EndRound { .. }
            | SourceAction::Reconnect
            | SourceAction::Finished(_) => return Err((step, "this is no action on the guest".to_owned())),
        })
    }

    fn scan(&mut self) -> Result<Scanned, Failure> {
        let guest = &mut self.guest;
        // What is absent may be left out only where it reads as zero on both sides.
        let present = if self.look_for_holes && guest.ram.absent_reads_zero() {
            at(Step::Scan, guest.ram.present())?
        } else {
            PageSet::full(guest.ram.layout())
        };
        Ok(Scanned {
            present,
            ballooned: guest.free_pages.ballooned(),
            stats: guest.free_pages.stats(),
            dialect: guest.free_pages.dialect(),
            can_ask: guest.free_pages.can_ask(),
            allocates: guest.free_pages.allocates(),
            poison: guest.free_pages.poison(),
            counts: self.counts(),
        })
    }

    /// What the balloon counted over its life, and this migration's sink.
    fn counts(&self) -> BalloonCounts {
        let counts = self.guest.free_pages.counts();
        BalloonCounts {
            late: counts.late.saturating_add(self.answers.late()),
            ..counts
        }
    }
}
