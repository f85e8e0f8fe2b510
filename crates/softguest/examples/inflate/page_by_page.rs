//! The base line: a device that looks up each page number by itself and gives each page back by itself, as hosts did in
//! 2016. It keeps no account of the pages, and does nothing at all on deflation beyond looking pages up, so it is faster
//! than they were.

use crate::Stages;
use balloon::queue::{Fate, VirtQueue};
use balloon::{Interrupts, QUEUE_MAX_SIZE, SharedBalloon};
use memory::VmMemory;
use rustix::mm::{Advice, madvise};
use softguest::Ram;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{GuestAddress, GuestMemoryBackend};

const PAGE: usize = 4096;

/// The most bytes of a buffer that are looked at.
const MOST: usize = 1 << 18;

pub(crate) struct PageByPage {
    map: Arc<VmMemory>,
    /// Inflate and deflate, once the driver has set them up.
    queues: [Option<VirtQueue>; 2],
    bytes: Vec<u8>,
    /// Where the pages of one buffer lie in our address space.
    places: Vec<*mut u8>,
}

// SAFETY: the pointers are the addresses of guest memory, which any thread may use; they are gone after each buffer.
unsafe impl Send for PageByPage {}

impl PageByPage {
    pub(crate) fn new(map: Arc<VmMemory>) -> Self {
        PageByPage {
            map,
            queues: [None, None],
            bytes: Vec::new(),
            places: Vec::new(),
        }
    }

    /// Serves a kick in the device's place.
    pub(crate) fn serve(
        &mut self,
        stages: &Stages,
        device: &SharedBalloon<Ram>,
        interrupts: &dyn Interrupts,
        queue: u16,
    ) {
        let index = usize::from(queue);
        let PageByPage {
            map,
            queues,
            bytes,
            places,
        } = self;
        let began = Instant::now();
        if queues[index].is_none() {
            let config = device.lock().queue_config(index).unwrap();
            queues[index] = Some(VirtQueue::new(&**map, index, QUEUE_MAX_SIZE, &config).unwrap());
        }
        let ring = queues[index].as_mut().unwrap();
        let mut used = 0;
        ring.drain(
            map,
            |mem, _, chain| {
                chain.gather(mem, 0, MOST, bytes).unwrap();
                places.clear();
                for entry in bytes.chunks_exact(4) {
                    let pfn = u32::from_le_bytes(entry.try_into().unwrap());
                    let address = GuestAddress(u64::from(pfn) * PAGE as u64);
                    places.extend(mem.get_host_address(address).ok());
                }
                if index == 0 {
                    stages.discarding(places.len() as u64, || {
                        places.iter().for_each(|place| give_back(*place))
                    });
                } else {
                    std::hint::black_box(&places);
                }
                places.clear();
                Ok(Fate::Used(0))
            },
            || used += 1,
        )
        .unwrap();
        let busy: Duration = began.elapsed();
        stages.device.add(busy);
        if used > 0 {
            interrupts.queue(queue);
        }
    }
}

fn give_back(place: *mut u8) {
    // SAFETY: a page of guest memory, mapped privately, of which no reference exists.
    unsafe { madvise(place.cast(), PAGE, Advice::LinuxDontNeed) }.unwrap();
}
