//! The board: everything that a vCPU reaches by ports, by addresses that are not RAM, and by doorbells.

use crate::platform::VirtioPlace;
use crate::state::Incoming;
use crate::wiring::{Ending, Exits, Wiring};
use crate::{Console, Error, Result};
use balloon::SharedBalloon;
use machine::Section;
use memory::DeviceMemory;
use pages::Layout;
use std::sync::Arc;

/// The board of one machine. Dropping it ends its threads.
pub(crate) struct Board {}

impl Board {
    /// A board that no driver has touched, its threads parked.
    pub(crate) fn new(
        wiring: &dyn Wiring,
        memory: &DeviceMemory,
        layout: &Arc<Layout>,
        balloon: Option<balloon::Config>,
        console: Console,
        ending: Ending,
    ) -> Result<Board> {
        drop((wiring, memory, layout, balloon, console, ending));
        Err(Error::Condition("not built yet".to_owned()))
    }

    /// Who answers the vCPUs' accesses.
    pub(crate) fn exits(&self) -> Arc<dyn Exits> {
        unreachable!("not built yet")
    }

    /// Where the virtio-mmio devices lie, in order.
    pub(crate) fn virtio_places(&self) -> Vec<VirtioPlace> {
        Vec::new()
    }

    /// The balloon device, where there is one.
    pub(crate) fn balloon(&self) -> Option<SharedBalloon<DeviceMemory>> {
        None
    }

    /// Lets the device threads run: the same as [`Board::resume`].
    pub(crate) fn start(&self) -> Result<()> {
        self.resume()
    }

    /// Serves the doorbells that were rung and parks the device threads. vCPUs have to be paused before.
    pub(crate) fn pause(&self) -> Result<()> {
        Ok(())
    }

    /// Catches up, and lets the device threads run. vCPUs follow after.
    pub(crate) fn resume(&self) -> Result<()> {
        Ok(())
    }

    /// The state of a paused board.
    pub(crate) fn save(&self) -> Result<Vec<Section>> {
        Ok(Vec::new())
    }

    /// Takes over the state of another board like this one, while paused.
    pub(crate) fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        let _ = incoming;
        Ok(())
    }
}
