//! The balloon behind a transport; the device itself is the `balloon` crate's.

use super::{Driver, Line, VirtioDevice};
use crate::Result;
use crate::state::Incoming;
use ::balloon::{Balloon, Config, Dialect, Discard, QUEUE_MAX_SIZE, QueueConfig, SharedBalloon};
use machine::Section;
use memory::{DeviceMemory, GuestMemory};
use pages::{Layout, PageRange};
use std::sync::Arc;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

/// The name of the device's section.
const NAME: &str = "balloon";

/// Guest RAM is where discarded pages go.
struct Ram(Arc<GuestMemory>);

impl Discard for Ram {
    fn discard(&self, range: PageRange) -> machine::Result<()> {
        Ok(self.0.discard(range)?)
    }

    fn discard_all(&self, ranges: &[PageRange], done: &mut dyn FnMut(PageRange, machine::Result<()>)) {
        self.0
            .discard_all(ranges, &mut |range, result| done(range, result.map_err(Into::into)));
    }

    fn granule_pages(&self) -> u64 {
        self.0.discard_granule_pages()
    }
}

/// The device.
pub(crate) struct VirtioBalloon {
    shared: SharedBalloon<DeviceMemory>,
    features: u64,
    dialect: Dialect,
    config_len: usize,
    queue_sizes: Vec<u16>,
}

impl VirtioBalloon {
    /// A balloon of `config` over `memory`.
    pub(crate) fn new(config: Config, layout: &Arc<Layout>, memory: &DeviceMemory, line: Arc<Line>) -> Result<Self> {
        let discard = Arc::new(Ram(Arc::clone(memory.owner())));
        let balloon = Balloon::new(config, Arc::clone(layout), memory.clone(), line, discard)?;
        Ok(VirtioBalloon {
            features: balloon.device_features(),
            dialect: config.dialect,
            config_len: balloon.config_len(),
            queue_sizes: vec![QUEUE_MAX_SIZE; balloon.queue_count()],
            shared: SharedBalloon::new(balloon),
        })
    }

    /// The device, for the host's side of it.
    pub(crate) fn shared(&self) -> SharedBalloon<DeviceMemory> {
        self.shared.clone()
    }
}

impl VirtioDevice for VirtioBalloon {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    /// The `bitmap` drivers reuse one buffer for all their answers and do not wait for it to be read.
    fn serves_on_vcpu(&self) -> bool {
        self.dialect != Dialect::Standard
    }

    fn ack_features(&self, features: u64) -> ::balloon::Result<()> {
        self.shared.lock().ack_features(features)
    }

    fn activate(&self, queues: &[QueueConfig]) -> ::balloon::Result<()> {
        self.shared.lock().activate(queues)
    }

    fn kick(&self, queue: u16) {
        self.shared.lock().notify(queue);
    }

    fn reset(&self) {
        self.shared.lock().reset();
    }

    fn config_len(&self) -> usize {
        self.config_len
    }

    fn read_config(&self, offset: u64, into: &mut [u8]) {
        self.shared.lock().read_config(offset, into);
    }

    fn write_config(&self, offset: u64, data: &[u8]) {
        self.shared.lock().write_config(offset, data);
    }

    fn driver(&self) -> Driver {
        let balloon = self.shared.lock();
        Driver {
            active: balloon.is_active(),
            needs_reset: balloon.needs_reset(),
            features: balloon.driver_features(),
        }
    }

    fn queue_config(&self, index: usize) -> Option<QueueConfig> {
        self.shared.lock().queue_config(index)
    }

    fn pause(&self) {
        self.shared.lock().park();
    }

    fn resume(&self) {
        self.shared.lock().resume();
    }

    fn save(&self) -> Result<Section> {
        Ok(self.shared.lock().save())
    }

    fn restore(&self, incoming: &mut Incoming<'_>) -> Result<()> {
        Ok(self.shared.lock().restore(incoming.take_raw(NAME)?)?)
    }
}
