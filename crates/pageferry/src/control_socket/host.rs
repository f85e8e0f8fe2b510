//! The host's side: owns the guest while no migration does, and does to it what clients ask for, one thing at a time.

use super::connection::{self, Service};
use super::params::ms;
use super::protocol::{self, MigrationEnd, Operation, ProgressData, shortened};
use super::{ControlListener, GuestControls, MigrateParams};
use crate::{Address, Ending, Guest, Handle, Migration, Outcome, Progress, SendOptions, Tuning};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Operations that wait for the one under way: two a client.
const WAITING: usize = 2 * super::MAX_CLIENTS;

/// Events that a client may be behind before it misses some.
const EVENTS: usize = 64;

/// How often clients that follow hear of a migration's progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// How long the last answers may take to leave.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long what is being done to the guest may go on once the VMM wants to stop.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// Why a guest is no longer served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// It was handed over, to this address.
    HandedOver(Address),
    /// A client said `quit`.
    Quit,
    /// The VMM stopped it: [`Serving::stop`].
    Stopped,
    /// A thread of the VMM died with it, or one of the library: what was being done.
    Lost(String),
}

/// The end of a guest's time at a control socket.
#[derive(Debug)]
pub struct Served {
    /// Why.
    pub how: How,
    /// The guest: paused if it was handed over, else as it was last. `None` if it was lost, or if pausing or
    /// resuming it did not end by the time that the VMM wanted to stop.
    pub guest: Option<Guest>,
    /// How the last migration ended, if there was one.
    pub outcome: Option<Outcome>,
}

/// A guest that is served at a control socket. Dropping it lets that go on unwatched.
#[derive(Debug)]
pub struct Serving {
    task: JoinHandle<Served>,
    stop: Arc<Stop>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Stop {
    why: Mutex<String>,
    asked: Notify,
}

impl Serving {
    /// Asks for an end, with the reason that clients are told: a migration under way is cancelled, unless the guest was
    /// handed over already. [`Serving::finish`] tells which.
    pub fn stop(&self, why: &str) {
        why.clone_into(&mut lock(&self.stop.why));
        self.stop.asked.notify_one();
    }

    /// What the guest does: the `state` of the control socket's `status`.
    pub fn state(&self) -> &'static str {
        lock(&self.shared.view).state()
    }

    /// Waits for the end. Cancel-safe; not to be called again after it has returned.
    pub async fn finish(&mut self) -> Served {
        match (&mut self.task).await {
            Ok(served) => served,
            Err(died) => Served {
                how: How::Lost(format!("the control socket's task died: {died}")),
                guest: None,
                outcome: None,
            },
        }
    }
}

/// Serves `guest` to the clients of `listener`.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub fn serve(listener: ControlListener, guest: Guest, controls: Arc<dyn GuestControls>) -> Serving {
    let stop = Arc::new(Stop::default());
    let config = guest.machine.config();
    let (commands, waiting) = mpsc::channel(WAITING);
    let (events, _) = broadcast::channel(EVENTS);
    let shared = Arc::new(Shared {
        about: About {
            kind: config.kind,
            vcpus: config.vcpus,
            memory_bytes: config.layout.total_bytes(),
        },
        controls,
        view: Mutex::new(View {
            running: guest.machine.is_running(),
            now: Now::Here,
            unknown: None,
            last: None,
        }),
        events,
    });
    let host = Host {
        guest: Some(guest),
        shared: Arc::clone(&shared),
        commands: waiting,
        stop: Arc::clone(&stop),
        outcome: None,
    };
    let seen = Arc::clone(&shared);
    let task = tokio::spawn(async move {
        let (over, is_over) = watch::channel(false);
        let ControlListener { socket, file } = listener;
        let service = Service { shared, commands };
        let connections = tokio::spawn(connection::accept(socket, service, is_over));
        let served = host.run().await;
        // Nobody new; those who are here get their last answers.
        drop(file);
        over.send_replace(true);
        if tokio::time::timeout(FAREWELL, connections).await.is_err() {
            tracing::debug!("a control client does not read its last answers");
        }
        served
    });
    Serving {
        task,
        stop,
        shared: seen,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is done under these locks that can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the guest is made of.
struct About {
    kind: String,
    vcpus: u32,
    memory_bytes: u64,
}

/// What connections see of the guest, whatever is being done to it.
pub(super) struct Shared {
    about: About,
    controls: Arc<dyn GuestControls>,
    view: Mutex<View>,
    events: broadcast::Sender<Arc<str>>,
}

struct View {
    running: bool,
    now: Now,
    /// Where the guest went, or not.
    unknown: Option<Address>,
    last: Option<Value>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Shared").field(&lock(&self.view).state()).finish()
    }
}

enum Now {
    Here,
    Migrating {
        to: Address,
        progress: Box<dyn Fn() -> Progress + Send>,
        cancel: Box<dyn Fn() + Send>,
        tune: Box<dyn Fn(Tuning) + Send>,
        /// The settings that can change, as they are.
        tuning: Tuning,
    },
    Gone,
}

impl View {
    fn state(&self) -> &'static str {
        match (&self.now, &self.unknown, self.running) {
            (Now::Migrating { .. }, ..) => "migrating",
            (Now::Gone, ..) => "ended",
            (_, Some(_), _) => "unknown",
            (_, _, true) => "running",
            (_, _, false) => "paused",
        }
    }
}

impl Shared {
    /// What the guest does.
    pub(super) fn status(&self) -> Value {
        let view = lock(&self.view);
        let migrating = matches!(view.now, Now::Migrating { .. });
        let state = view.state();
        let to = match &view.now {
            Now::Migrating { to, .. } => Some(to.to_string()),
            _ => view.unknown.as_ref().map(Address::to_string),
        };
        // A guest that is being migrated may be paused by now: nobody knows it at this moment.
        let running = (!migrating).then_some(view.running);
        let last = view.last.clone();
        drop(view);
        json!({
            "state": state,
            "running": running,
            "to": to,
            "kind": self.about.kind,
            "vcpus": self.about.vcpus,
            "memory_bytes": self.about.memory_bytes,
            "balloon": self.controls.balloon(),
            "last_migration": last,
        })
    }

    /// How far the migration under way is.
    pub(super) fn progress(&self) -> Value {
        match &lock(&self.view).now {
            Now::Migrating { progress, .. } => json!({
                "migrating": true,
                "progress": ProgressData::from(&progress()),
            }),
            Now::Here | Now::Gone => json!({"migrating": false, "progress": null}),
        }
    }

    /// Cancels the migration under way.
    pub(super) fn cancel(&self) -> Result<Value, String> {
        match &lock(&self.view).now {
            Now::Migrating { to, cancel, .. } => {
                cancel();
                Ok(json!({"cancelling": to.to_string()}))
            }
            Now::Here | Now::Gone => Err("no migration is under way".to_owned()),
        }
    }

    /// Changes settings of the migration under way; all that can change come back as they are now.
    pub(super) fn set(&self, change: Tuning) -> Result<Value, String> {
        let mut view = lock(&self.view);
        let Now::Migrating { tune, tuning, .. } = &mut view.now else {
            return Err("no migration is under way: give its settings to migrate".to_owned());
        };
        tune(change);
        *tuning = tuning.then(change);
        let now = json!({
            "max_bandwidth_bytes_per_s": tuning.max_bandwidth.unwrap_or(0),
            "downtime_limit_ms": tuning.downtime_limit.map(ms),
        });
        drop(view);
        self.tell("set", &now);
        Ok(now)
    }

    /// Asks the guest for statistics.
    async fn balloon_stats(&self, within: Duration) -> Result<Value, String> {
        let running = lock(&self.view).running;
        let within = if running { within } else { Duration::ZERO };
        let controls = Arc::clone(&self.controls);
        let mut stats = blocking(move || controls.balloon_stats(within)).await?;
        if !stats.fresh && !running {
            stats.why = Some("the guest is paused and cannot answer".to_owned());
        }
        serde_json::to_value(stats).map_err(|error| format!("writing the statistics: {error}"))
    }

    /// Events from now on.
    pub(super) fn follow(&self) -> broadcast::Receiver<Arc<str>> {
        self.events.subscribe()
    }

    fn tell(&self, name: &str, data: &Value) {
        // Without a client that follows it has no receiver, and that is fine.
        let _ = self.events.send(protocol::event(name, data).into());
    }
}

/// An operation, and where its answer goes.
pub(super) struct Command {
    pub(super) operation: Operation,
    pub(super) reply: oneshot::Sender<Result<Value, String>>,
}

/// Owns the guest.
struct Host {
    guest: Option<Guest>,
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    stop: Arc<Stop>,
    outcome: Option<Outcome>,
}

impl Host {
    async fn run(mut self) -> Served {
        let how = loop {
            let command = tokio::select! {
                biased;
                () = self.stop.asked.notified() => break How::Stopped,
                command = self.commands.recv() => command,
            };
            // The accepting task holds a sender until it is told that all is over.
            let Some(Command { operation, reply }) = command else {
                break How::Lost("the control socket's accepting task died".to_owned());
            };
            let end = if matches!(operation, Operation::Migrate(_)) {
                self.carry_out(operation, reply).await
            } else {
                self.carry_out_or_stop(operation, reply).await
            };
            if let Some(how) = end.or_else(|| self.lost()) {
                break how;
            }
        };
        lock(&self.shared.view).now = Now::Gone;
        let why = match &how {
            How::HandedOver(to) => format!("the guest was handed over to {to}"),
            How::Quit => "a client said quit".to_owned(),
            How::Stopped => lock(&self.stop.why).clone(),
            How::Lost(why) => why.clone(),
        };
        tracing::info!(why, "the guest is no longer served");
        self.shared.tell("ended", &json!({"why": why}));
        self.commands.close();
        while let Some(command) = self.commands.recv().await {
            answer(command.reply, Err(format!("the guest is no longer here: {why}")));
        }
        Served {
            how,
            guest: self.guest,
            outcome: self.outcome,
        }
    }

    fn lost(&self) -> Option<How> {
        let lost = self.guest.is_none();
        lost.then(|| How::Lost("the guest was lost: a thread died with it".to_owned()))
    }

    /// Does something that may hang in the VMM, and does not hang with it when the VMM wants to stop. Not for a migration,
    /// which has an end of its own.
    async fn carry_out_or_stop(
        &mut self,
        operation: Operation,
        reply: oneshot::Sender<Result<Value, String>>,
    ) -> Option<How> {
        let stop = Arc::clone(&self.stop);
        let doing = self.carry_out(operation, reply);
        tokio::pin!(doing);
        tokio::select! {
            biased;
            end = &mut doing => return end,
            () = stop.asked.notified() => {}
        }
        if tokio::time::timeout(STOP_WITHIN, doing).await.is_err() {
            tracing::warn!("what a client asked for is still being done to the guest: it is not waited for");
        }
        Some(How::Stopped)
    }

    async fn carry_out(&mut self, operation: Operation, reply: oneshot::Sender<Result<Value, String>>) -> Option<How> {
        let result = match operation {
            Operation::Migrate(params) => return self.migrate(&params, reply).await,
            Operation::Quit => {
                answer(reply, Ok(json!({})));
                return Some(How::Quit);
            }
            Operation::Pause => self.pause().await,
            Operation::Resume { force } => self.resume(force).await,
            Operation::Balloon { pages } => {
                let controls = Arc::clone(&self.shared.controls);
                let set = blocking(move || controls.set_balloon_target(pages)).await;
                set.map(|()| json!({"target_pages": pages}))
            }
            Operation::BalloonStats { within } => {
                // The guest may not answer, and nobody else has to wait for that.
                let shared = Arc::clone(&self.shared);
                tokio::spawn(async move { answer(reply, shared.balloon_stats(within).await) });
                return None;
            }
        };
        answer(reply, result);
        None
    }

    async fn pause(&mut self) -> Result<Value, String> {
        self.on_machine("pausing the guest", |guest| guest.machine.pause())
            .await?;
        self.shared.tell("paused", &json!({}));
        Ok(json!({"running": false}))
    }

    async fn resume(&mut self, force: bool) -> Result<Value, String> {
        let unknown = lock(&self.shared.view).unknown.clone();
        if let Some(to) = unknown.filter(|_| !force) {
            return Err(format!(
                "the guest was handed over to {to} without an answer: make sure that it does not run there, then resume with \
                 \"force\": true"
            ));
        }
        self.on_machine("resuming the guest", |guest| guest.machine.resume())
            .await?;
        lock(&self.shared.view).unknown = None;
        self.shared.tell("resumed", &json!({}));
        Ok(json!({"running": true}))
    }

    /// Does something to the guest's machine, on a thread that may block.
    async fn on_machine(
        &mut self,
        doing: &str,
        act: impl FnOnce(&mut Guest) -> machine::Result<()> + Send + 'static,
    ) -> Result<(), String> {
        let Some(mut guest) = self.guest.take() else {
            return Err("the guest is not here".to_owned());
        };
        let done = tokio::task::spawn_blocking(move || {
            // A panic of the VMM's side must not take the guest with it.
            let result = catch_unwind(AssertUnwindSafe(|| act(&mut guest)));
            (guest, result)
        });
        let (guest, result) = done.await.map_err(|died| format!("{doing}: its thread died: {died}"))?;
        lock(&self.shared.view).running = guest.machine.is_running();
        self.guest = Some(guest);
        match result {
            Ok(result) => result.map_err(|error| format!("{doing}: {error}")),
            Err(_) => Err(format!("{doing}: the VMM's side panicked")),
        }
    }

    /// Sends the guest away, and meanwhile refuses what else would be done to it.
    async fn migrate(&mut self, params: &MigrateParams, reply: oneshot::Sender<Result<Value, String>>) -> Option<How> {
        let (to, options) = match self.may_migrate(params) {
            Ok(plan) => plan,
            Err(error) => {
                answer(reply, Err(error));
                return None;
            }
        };
        let guest = self.guest.take()?;
        let dry_run = options.source.dry_run;
        let tuning = Tuning {
            downtime_limit: Some(options.source.downtime_limit),
            max_bandwidth: options.max_bandwidth,
        };
        let handle = Migration::send(guest, &to, options);
        lock(&self.shared.view).now = Now::Migrating {
            to: to.clone(),
            progress: Box::new(handle.observer()),
            cancel: Box::new(handle.canceller()),
            tune: Box::new(handle.tuner()),
            tuning,
        };
        self.shared.tell("migration-started", &json!({"to": to.to_string()}));
        let stopped = self.accompany(handle, &to).await;
        let outcome = self.outcome.as_ref()?;
        let end = MigrationEnd::from(outcome);
        let ending = end.ending;
        answer(
            reply,
            serde_json::to_value(&end).map_err(|error| format!("writing the report: {error}")),
        );
        match ending {
            Ending::Completed if !dry_run => Some(How::HandedOver(to)),
            _ => stopped.then_some(How::Stopped),
        }
    }

    fn may_migrate(&self, params: &MigrateParams) -> Result<(Address, SendOptions), String> {
        if let Some(to) = &lock(&self.shared.view).unknown {
            return Err(format!(
                "the guest was handed over to {to} without an answer: make sure that it does not run there, and resume it \
                 first"
            ));
        }
        params.plan()
    }

    /// Stays with a migration to its end. Whether the VMM wants to stop.
    async fn accompany(&mut self, handle: Handle, to: &Address) -> bool {
        let cancel = handle.canceller();
        let mut stopped = false;
        let mut tick = tokio::time::interval(PROGRESS_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let end = handle.finish();
        tokio::pin!(end);
        let finished = loop {
            tokio::select! {
                biased;
                finished = &mut end => break finished,
                () = self.stop.asked.notified() => {
                    stopped = true;
                    cancel();
                }
                Some(command) = self.commands.recv() => answer(command.reply, Err(refusal(&command.operation, to))),
                _ = tick.tick() => self.shared.tell("progress", &self.shared.progress()["progress"]),
            }
        };
        let outcome = finished.outcome;
        let last = json!({
            "to": to.to_string(),
            "ending": outcome.ending,
            "exit_code": outcome.ending.exit_code(),
            "error": outcome.error,
        });
        let mut view = lock(&self.shared.view);
        view.now = Now::Here;
        view.running = finished.guest.as_ref().is_some_and(|guest| guest.machine.is_running());
        view.unknown = (outcome.ending == Ending::Unknown).then(|| to.clone());
        view.last = Some(last.clone());
        drop(view);
        self.shared.tell("migration-ended", &last);
        self.guest = finished.guest;
        self.outcome = Some(outcome);
        stopped
    }
}

/// Why something cannot be done to a guest that is on its way.
fn refusal(operation: &Operation, to: &Address) -> String {
    let what = match operation {
        Operation::Migrate(_) => "a second one cannot begin",
        Operation::Pause => "the guest cannot be paused",
        Operation::Resume { .. } => "the guest cannot be resumed",
        Operation::Balloon { .. } => "the balloon's target cannot change",
        Operation::BalloonStats { .. } => "the guest cannot be asked for statistics",
        Operation::Quit => "the host cannot quit",
    };
    format!("a migration to {to} is under way: {what}; wait for its end, or cancel it")
}

/// Calls the VMM's side on a thread that may block.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => result,
        Err(_) => Err("the VMM's side panicked".to_owned()),
    }
}

/// Answers a client, which may be gone.
fn answer(reply: oneshot::Sender<Result<Value, String>>, result: Result<Value, String>) {
    if reply.send(result.map_err(|error| shortened(&error))).is_err() {
        tracing::debug!("a control client went away before its answer");
    }
}
