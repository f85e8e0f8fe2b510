//! Inflating and deflating to the host's target, by arrays of page numbers (virtio 1.3, section 5.5.6.1).
//!
//! As in Linux: 256 pages a buffer, one buffer at a time, and pages come out of the balloon only once the device has used
//! the buffer that names them.

use super::virtqueue::{Buffer, Virtqueue};
use super::{ACTUAL, Later, NUM_PAGES, Ports};
use crate::mm::Mm;
use crate::{Error, Result};
use pages::Pfn;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Page numbers in a buffer (`VIRTIO_BALLOON_ARRAY_PFNS_MAX`).
const ARRAY: u64 = 256;

/// How long Linux waits where it found no page for the balloon.
const RETRY: Duration = Duration::from_millis(200);

/// What the device has of ours.
#[derive(Debug, Serialize, Deserialize)]
enum Busy {
    Inflating,
    /// These frames, which are on no list.
    Deflating(Vec<u64>),
}

/// Inflate and deflate queues.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Transfer {
    inflate: Virtqueue,
    deflate: Virtqueue,
    target: u32,
    busy: Option<Busy>,
    #[serde(skip)]
    retry_at: Option<Instant>,
}

impl Transfer {
    pub(crate) fn new() -> Self {
        Transfer {
            inflate: Virtqueue::new(0),
            deflate: Virtqueue::new(1),
            target: 0,
            busy: None,
            retry_at: None,
        }
    }

    /// The host may want another size.
    pub(crate) fn configured(&mut self, ports: &Ports) {
        self.target = ports.config(NUM_PAGES);
        self.retry_at = None;
    }

    pub(crate) fn step(&mut self, mm: &mut Mm, ports: &Ports) -> Result<Later> {
        if !self.settle(mm, ports)? {
            return Ok(None);
        }
        let (target, have) = (u64::from(self.target), mm.balloon_pages);
        if target > have {
            self.fill(mm, ports, (target - have).min(ARRAY))
        } else {
            if target < have {
                self.leak(mm, ports, (have - target).min(ARRAY))?;
            }
            Ok(None)
        }
    }

    /// Whether the device has nothing of ours any more.
    fn settle(&mut self, mm: &mut Mm, ports: &Ports) -> Result<bool> {
        match &self.busy {
            None => return Ok(true),
            Some(Busy::Inflating) => {
                if self.inflate.take_used(mm)?.is_none() {
                    return Ok(false);
                }
            }
            Some(Busy::Deflating(frames)) => {
                if self.deflate.take_used(mm)?.is_none() {
                    return Ok(false);
                }
                for frame in frames {
                    mm.free(*frame, 0)?;
                }
            }
        }
        self.busy = None;
        ports.set_config(ACTUAL, u32::try_from(mm.balloon_pages).unwrap_or(u32::MAX));
        Ok(true)
    }

    fn fill(&mut self, mm: &mut Mm, ports: &Ports, count: u64) -> Result<Later> {
        if let Some(wait) = self.retry_at.and_then(|at| at.checked_duration_since(Instant::now())) {
            return Ok(Some(wait));
        }
        let mut array = Vec::new();
        for _ in 0..count {
            let Some(frame) = mm.alloc_noretry(0)? else {
                break;
            };
            mm.enter_balloon(frame)?;
            push(&mut array, mm, frame)?;
        }
        if array.is_empty() {
            self.retry_at = Some(Instant::now() + RETRY);
            return Ok(Some(RETRY));
        }
        tell(&mut self.inflate, mm, ports, mm.places.inflate, &array)?;
        self.busy = Some(Busy::Inflating);
        Ok(None)
    }

    fn leak(&mut self, mm: &mut Mm, ports: &Ports, count: u64) -> Result<()> {
        let (mut array, mut frames) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let Some(frame) = mm.leave_balloon()? else {
                break;
            };
            push(&mut array, mm, frame)?;
            frames.push(frame);
        }
        tell(&mut self.deflate, mm, ports, mm.places.deflate, &array)?;
        self.busy = Some(Busy::Deflating(frames));
        Ok(())
    }

    pub(crate) fn in_flight(&self) -> Vec<(u64, u32)> {
        match &self.busy {
            Some(Busy::Deflating(frames)) => frames.iter().map(|frame| (*frame, 0)).collect(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn check(&mut self, mm: &Mm) -> Result<()> {
        if (self.inflate.index(), self.deflate.index()) != (0, 1) {
            return Err(Error::State(
                "inflate and deflate queues are not queues 0 and 1".to_owned(),
            ));
        }
        self.inflate.check()?;
        self.deflate.check()?;
        let Some(Busy::Deflating(frames)) = &self.busy else {
            return Ok(());
        };
        let outside = frames.iter().any(|frame| mm.frames.pfn(*frame).is_none());
        if outside || frames.len() as u64 > ARRAY {
            return Err(Error::State(
                "the pages on their way out of the balloon are too many or not RAM".to_owned(),
            ));
        }
        Ok(())
    }
}

fn push(array: &mut Vec<u8>, mm: &Mm, frame: u64) -> Result<()> {
    let pfn = Pfn::of_address(mm.frames.address(frame)?);
    let pfn = u32::try_from(pfn.0).map_err(|_| Error::Corrupt(format!("page {pfn} does not fit 32 bits")))?;
    array.extend(pfn.to_le_bytes());
    Ok(())
}

fn tell(queue: &mut Virtqueue, mm: &Mm, ports: &Ports, address: u64, array: &[u8]) -> Result<()> {
    mm.ram.write(address, array)?;
    let len = u32::try_from(array.len()).unwrap_or(0);
    let buffer = Buffer {
        address,
        len,
        writable: false,
    };
    if !queue.add(mm, &[buffer])? {
        return Err(Error::Corrupt(format!(
            "balloon queue {} is full where it should be empty",
            queue.index()
        )));
    }
    ports.kick(queue.index());
    Ok(())
}
