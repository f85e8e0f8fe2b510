//! A seed's run: setup and mishaps are drawn from it, and after a migration that failed another one has to succeed.

use crate::Guest;
use crate::mishaps::Mishaps;
use crate::pair::Pair;
use crate::rng::Rng;
use crate::setup::{Fault, Setup};
use engine::{Ending, Step};

/// More steps than any run takes.
const MOST_STEPS: usize = 200_000;

/// What a seed's run came to.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// How both sides ended.
    pub source: Option<Ending>,
    pub destination: Option<Ending>,
    /// How often the links were replaced.
    pub resumed: usize,
    /// Whether the guest was migrated again afterwards.
    pub again: bool,
    pub steps: usize,
}

/// Runs a seed, with a fault planted or none; the law that was broken, with how to see it again.
pub fn run_seed(seed: u64, fault: Option<Fault>, trace: bool) -> Result<Told, String> {
    let planted = fault.map_or_else(String::new, |fault| format!(" --planted {fault:?}"));
    let features = if fault.is_some() { " --features planted" } else { "" };
    run(seed, fault, trace)
        .map_err(|law| format!("{law}\n  see it: cargo run -p faults{features} -- --seed {seed}{planted} --trace"))
}

fn run(seed: u64, fault: Option<Fault>, trace: bool) -> Result<Told, String> {
    let mut setup = Setup::random(seed);
    setup.fault = fault;
    if seed % 4 == 1 {
        // A guest that writes a lot, to a link that is slow to it.
        (setup.guest.writes, setup.writes_weight) = (600, 3);
    }
    let mishaps = Mishaps::random(&mut Rng::new(seed ^ 0xfa17));
    let guest = Guest::new(setup.guest.clone(), &mut Rng::new(seed));
    let clean = mishaps.is_harmless() && setup.source.timeout.is_zero();
    let mut pair = Pair::with_guest(setup, guest, mishaps.clone());
    pair.trace = trace;
    pair.say(|| format!("{:?}", pair.setup));
    pair.say(|| format!("{:?}", pair.mishaps));
    pair.run(MOST_STEPS);
    pair.verdict()?;
    let (source, destination) = pair.ends();
    if clean && source != Some(Ending::Completed) {
        return Err(format!(
            "nothing went wrong, and it ended as {source:?}: {}",
            pair.source_error()
        ));
    }
    if had_to_complete(&pair, &mishaps) && source != Some(Ending::Completed) {
        return Err(format!(
            "connections broke and nothing else went wrong, and it ended as {source:?}: {}",
            pair.source_error()
        ));
    }
    let again = again(&pair, trace)?;
    Ok(Told {
        source,
        destination,
        resumed: pair.links.len() - 1,
        again,
        steps: pair.steps,
    })
}

/// Whether nothing went wrong but that connections broke which could be replaced in time: the receiver had accepted, and was
/// not restoring the machine.
fn had_to_complete(pair: &Pair, mishaps: &Mishaps) -> bool {
    let (source, destination) = (&pair.setup.source, &pair.setup.destination);
    let window = source.resume_window.min(destination.resume_window);
    let longest = mishaps.outages.iter().max().copied().unwrap_or_default();
    mishaps.only_breaks_links()
        && pair.setup.version >= wire::RESUMING_SINCE
        && longest + source.peer_timeout < window
        && source.timeout.is_zero()
        && pair.done.contains(&Step::StartTracking)
        && !pair.restoring
}

/// After a failure that left the guest at the source as it was: another migration, in which nothing goes wrong.
fn again(pair: &Pair, trace: bool) -> Result<bool, String> {
    let kept = matches!(
        pair.ends().0,
        Some(Ending::Failed | Ending::Cancelled | Ending::TimedOut)
    );
    let undone = |step: &Step| {
        !matches!(
            step,
            Step::EndHints | Step::GiveBack | Step::StopTracking | Step::Resume
        )
    };
    if !kept || !pair.failed_steps.iter().all(undone) {
        return Ok(false);
    }
    let mut setup = Setup::plain(pair.setup.seed, 1);
    setup.guest = pair.guest.make.clone();
    setup.guest.layout = pair.setup.guest.layout.clone();
    let mut guest = pair.guest.clone();
    guest.new_sink();
    let mut second = Pair::with_guest(setup, guest, Mishaps::default());
    second.trace = trace;
    second.run(MOST_STEPS);
    second
        .verdict()
        .map_err(|law| format!("the migration after the failed one: {law}"))?;
    match second.ends() {
        (Some(Ending::Completed), Some(Ending::Completed)) => Ok(true),
        ends => Err(format!(
            "the migration after the failed one ended as {ends:?}: {}",
            second.source_error()
        )),
    }
}

/// Seeds within which every planted fault is caught.
#[cfg(feature = "planted")]
pub const SEEDS: u64 = 2000;

/// The first of [`SEEDS`] seeds that catches a planted fault, and the law that it breaks.
#[cfg(feature = "planted")]
pub fn caught(fault: Fault) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| {
        let broken = run(seed, Some(fault), false).err()?;
        let law = broken.lines().next().unwrap_or_default();
        let law = law.split_once(", step ").map_or(law, |(_, law)| law);
        let law = law.split_once(": ").map_or(law, |(_, law)| law);
        Some((seed, law.chars().take(110).collect()))
    })
}
