//! The guest's kernel: memory management, the workload and the balloon driver, run by the vCPUs.

use crate::boot;
use crate::check::{self, SelfCheck};
use crate::config::GuestConfig;
use crate::content::mix;
use crate::driver::{Alive, Driver, Ports};
use crate::mm::{Mm, MmState, Rng};
use crate::platform::Irqs;
use crate::quirks::Quirks;
use crate::ram::Ram;
use crate::workload::Share;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

/// How long a guest that has stopped for good sleeps between looks at nothing.
const HALTED: Duration = Duration::from_secs(1);

/// The most bytes of saved state that are looked at.
const MAX_STATE_BYTES: usize = 1 << 20;

/// What of the guest is not in its RAM.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    mm: MmState,
    rng: Rng,
    base_pages: u64,
    ticks: u64,
    driver: Option<Driver>,
    irqs: Irqs,
}

/// What the kernel is told to do with its balloon driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Load it, if it is not there.
    Load,
    /// Take it away, if it is there.
    Unload,
    /// Move a page of the balloon elsewhere.
    Compact,
}

/// The kernel.
pub(crate) struct Kernel {
    pub(crate) mm: Mm,
    driver: Option<Driver>,
    shares: Vec<Share>,
    rng: Rng,
    /// Pages in use when the workload began.
    base_pages: u64,
    ticks: u64,
    report_interval: Duration,
    /// For a driver that is loaded later.
    quirks: Quirks,
    /// Somebody waits for this to be done.
    order: Option<(Order, SyncSender<Result<()>>)>,
    /// Why the guest has stopped for good.
    panic: Option<String>,
}

impl Kernel {
    pub(crate) fn boot(config: &GuestConfig, ram: Ram, ports: Option<&Ports>) -> Result<Self> {
        let mut mm = boot::boot(config, ram)?;
        let driver = match ports.filter(|_| config.driver) {
            Some(ports) => Some(Driver::probe(&mut mm, ports, &config.quirks)?),
            None => None,
        };
        let base_pages = mm.used_pages;
        Ok(Kernel {
            mm,
            driver,
            shares: shares(config),
            rng: Rng(mix(config.seed ^ 0x776f_726b)),
            base_pages,
            ticks: 0,
            report_interval: config.report_interval,
            quirks: config.quirks.clone(),
            order: None,
            panic: None,
        })
    }

    /// One slice of vCPU `vcpu`: interrupts, driver, workload. How long it may sleep then.
    pub(crate) fn run(&mut self, vcpu: u32, irqs: &Irqs, elapsed: Duration, ports: Option<&Ports>) -> Duration {
        if self.panic.is_some() {
            return HALTED;
        }
        match self.slice(vcpu, irqs, elapsed, ports) {
            Ok(sleep) => sleep,
            Err(error) => {
                tracing::error!(%error, "the guest has stopped");
                self.panic = Some(error.to_string());
                HALTED
            }
        }
    }

    fn slice(&mut self, vcpu: u32, irqs: &Irqs, elapsed: Duration, ports: Option<&Ports>) -> Result<Duration> {
        self.ticks += 1;
        let mut sleep = HALTED;
        if let Some(share) = self.shares.get_mut(vcpu as usize) {
            sleep = share.tick();
            share.run(&mut self.mm, &mut self.rng, self.base_pages, elapsed)?;
        }
        let Some(ports) = ports.filter(|_| vcpu == 0) else {
            return Ok(sleep);
        };
        if let Some((order, waiting)) = self.order.take() {
            let done = self.obey(order, ports);
            // Whoever asked may have given up waiting.
            let _ = waiting.send(done);
        }
        let Some(driver) = &mut self.driver else {
            return Ok(sleep);
        };
        if driver.interrupt(&mut self.mm, irqs, ports)? == Alive::Gone {
            self.unload(ports)?;
            return Ok(sleep);
        }
        let later = driver.step(&mut self.mm, ports, self.report_interval)?;
        Ok(later.map_or(sleep, |later| later.min(sleep)))
    }

    fn obey(&mut self, order: Order, ports: &Ports) -> Result<()> {
        match (order, &mut self.driver) {
            (Order::Load, None) => {
                self.driver = Some(Driver::probe(&mut self.mm, ports, &self.quirks)?);
                Ok(())
            }
            (Order::Load, Some(_)) => Ok(()),
            (Order::Unload, _) => self.unload(ports),
            (Order::Compact, Some(driver)) => driver.compact(&mut self.mm, ports),
            (Order::Compact, None) => Err(Error::Config("the guest has no balloon driver".to_owned())),
        }
    }

    fn unload(&mut self, ports: &Ports) -> Result<()> {
        match self.driver.take() {
            Some(driver) => driver.gone(&mut self.mm, ports),
            None => Ok(()),
        }
    }

    /// Does `order` with the next slice of vCPU 0, and says so.
    pub(crate) fn order(&mut self, order: Order, done: SyncSender<Result<()>>) {
        self.order = Some((order, done));
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Why the guest has stopped for good, if it has.
    pub(crate) fn panicked(&self) -> Result<()> {
        match &self.panic {
            Some(why) => Err(Error::Corrupt(format!("the guest stopped: {why}"))),
            None => Ok(()),
        }
    }

    pub(crate) fn self_check(&self) -> Result<SelfCheck> {
        self.panicked()?;
        let in_flight = self.driver.as_ref().map_or(Vec::new(), Driver::in_flight);
        Ok(SelfCheck {
            pages_checked: check::check(&self.mm, &in_flight)?,
            free_pages: self.mm.buddy.free_pages(),
            ticks: self.ticks,
        })
    }

    /// What of the guest is not in its RAM.
    pub(crate) fn save(&self, irqs: Irqs) -> Result<Vec<u8>> {
        self.panicked()?;
        let state = StateRef {
            mm: self.mm.state(),
            rng: &self.rng,
            base_pages: self.base_pages,
            ticks: self.ticks,
            driver: self.driver.as_ref(),
            irqs,
        };
        serde_json::to_vec(&state).map_err(|e| Error::State(format!("writing it down: {e}")))
    }

    /// The guest whose RAM is here and whose state is `data`.
    pub(crate) fn restore(config: &GuestConfig, ram: Ram, data: &[u8]) -> Result<(Self, Irqs)> {
        if data.len() > MAX_STATE_BYTES {
            return Err(Error::State(format!(
                "{} bytes are more than the {MAX_STATE_BYTES} it may have",
                data.len()
            )));
        }
        let state: State =
            serde_json::from_slice(data).map_err(|e| Error::State(format!("it is not readable: {e}")))?;
        let mm = Mm::new(config, ram, &state.mm)?;
        let mut driver = state.driver;
        match (&mut driver, &config.balloon) {
            (Some(driver), Some(balloon)) => driver.check(balloon, &mm)?,
            (Some(_), None) => {
                return Err(Error::State(
                    "it has a balloon driver, the guest has no balloon".to_owned(),
                ));
            }
            (None, _) => {}
        }
        let base_pages = state.base_pages.min(config.layout.total_pages());
        let kernel = Kernel {
            mm,
            driver,
            shares: shares(config),
            rng: state.rng,
            base_pages,
            ticks: state.ticks,
            report_interval: config.report_interval,
            quirks: config.quirks.clone(),
            order: None,
            panic: None,
        };
        Ok((kernel, state.irqs))
    }
}

/// [`State`], borrowed.
#[derive(Serialize)]
struct StateRef<'a> {
    mm: MmState,
    rng: &'a Rng,
    base_pages: u64,
    ticks: u64,
    driver: Option<&'a Driver>,
    irqs: Irqs,
}

fn shares(config: &GuestConfig) -> Vec<Share> {
    (0..config.vcpus)
        .map(|_| Share::new(config.workload, config.vcpus))
        .collect()
}
