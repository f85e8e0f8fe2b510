//! Which pages a guest's buffers name: read from the rings anew, bit by bit, and believing more than the device does.
//!
//! Every chain whose head stands anywhere in an available ring counts, as does every descriptor that can be reached. So
//! this names more pages than the device may take, and never fewer.

use super::rig::RING_ENTRIES;
use ::balloon::{Dialect, QueueConfig};
use pages::{PAGE_BYTES, Pfn};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// No page that the fuzzed guest has lies beyond.
pub(super) const MOST_PAGES: usize = 1024;

/// Bytes of a request of the `bitmap` dialect.
const REQUEST_BYTES: u64 = 16;

/// A set of pages.
#[derive(Clone)]
pub(super) struct Named([bool; MOST_PAGES]);

impl Named {
    pub(super) fn none() -> Self {
        Named([false; MOST_PAGES])
    }

    pub(super) fn holds(&self, page: Pfn) -> bool {
        usize::try_from(page.0).is_ok_and(|page| self.0.get(page) == Some(&true))
    }

    fn add_all(&mut self) {
        self.0 = [true; MOST_PAGES];
    }

    fn add(&mut self, page: u64) {
        if let Some(there) = usize::try_from(page).ok().and_then(|page| self.0.get_mut(page)) {
            *there = true;
        }
    }
}

/// A descriptor as it lies in the table.
struct Descriptor {
    address: u64,
    len: u32,
    writable: bool,
}

impl Descriptor {
    fn end(&self) -> u64 {
        self.address.saturating_add(u64::from(self.len))
    }
}

/// What a queue's buffers are read as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// Inflate and deflate of arrays: numbers of 32 bits.
    Numbers,
    /// A bitmap behind the dialect's header.
    Bitmap(Dialect),
    /// Hints and reports: the memory that descriptors lie over.
    Blocks,
}

/// Adds the pages that any chain in the queue's ring names. Of a buffer that lies where the device itself writes, in
/// `written`, nobody can say beforehand what it names: it may be anything.
pub(super) fn name_pages(
    mem: &GuestMemoryMmap,
    queue: &QueueConfig,
    reading: Reading,
    written: &[(u64, u64)],
    named: &mut Named,
) {
    for chain in chains(mem, queue) {
        let moves = |d: &Descriptor| written.iter().any(|(from, to)| d.address < *to && *from < d.end());
        if reading != Reading::Blocks && chain.iter().any(|d| !d.writable && moves(d)) {
            named.add_all();
            continue;
        }
        match reading {
            Reading::Blocks => chain.iter().for_each(|block| name_block(block, named)),
            Reading::Numbers => {
                let bytes = readable(mem, &chain, 4 << 16);
                for number in bytes.chunks_exact(4) {
                    named.add(u64::from(u32::from_le_bytes([
                        number[0], number[1], number[2], number[3],
                    ])));
                }
            }
            Reading::Bitmap(dialect) => {
                let (at, header) = if dialect == Dialect::Bitmap { (16, 32) } else { (8, 28) };
                let bytes = readable(mem, &chain, (1 << 20) + header);
                name_bits(&bytes, at, header, named);
            }
        }
    }
}

/// Where the device may write besides used rings: the first bytes that a chain of the misc queue lets it.
pub(super) fn requests(mem: &GuestMemoryMmap, queue: &QueueConfig) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for chain in chains(mem, queue) {
        let mut left = REQUEST_BYTES;
        for descriptor in chain.iter().filter(|descriptor| descriptor.writable) {
            let len = left.min(u64::from(descriptor.len));
            all.push((descriptor.address, descriptor.address.saturating_add(len)));
            left -= len;
        }
    }
    all
}

fn chains(mem: &GuestMemoryMmap, queue: &QueueConfig) -> Vec<Vec<Descriptor>> {
    let heads = (0..u64::from(RING_ENTRIES)).filter_map(|slot| half(mem, queue.avail + 4 + slot * 2));
    let mut heads: Vec<u16> = heads.collect();
    heads.sort_unstable();
    heads.dedup();
    heads.into_iter().map(|head| chain(mem, queue, head)).collect()
}

fn chain(mem: &GuestMemoryMmap, queue: &QueueConfig, head: u16) -> Vec<Descriptor> {
    let (mut all, mut next) = (Vec::new(), Some(head));
    while let Some(index) = next.filter(|index| *index < RING_ENTRIES && all.len() < usize::from(RING_ENTRIES)) {
        let at = queue.desc + u64::from(index) * 16;
        let (Ok(address), Ok(len), Some(flags)) = (
            mem.read_obj(GuestAddress(at)),
            mem.read_obj(GuestAddress(at + 8)),
            half(mem, at + 12),
        ) else {
            break;
        };
        all.push(Descriptor {
            address,
            len,
            writable: flags & 2 != 0,
        });
        next = half(mem, at + 14).filter(|_| flags & 1 != 0);
    }
    all
}

fn half(mem: &GuestMemoryMmap, at: u64) -> Option<u16> {
    mem.read_obj::<u16>(GuestAddress(at)).ok()
}

fn readable(mem: &GuestMemoryMmap, chain: &[Descriptor], limit: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for descriptor in chain.iter().filter(|d| !d.writable) {
        let len = usize::try_from(descriptor.len).map_or(limit, |len| len.min(limit - bytes.len()));
        let start = bytes.len();
        bytes.resize(start + len, 0);
        if mem
            .read_slice(&mut bytes[start..], GuestAddress(descriptor.address))
            .is_err()
        {
            bytes.truncate(start);
            break;
        }
    }
    bytes
}

fn name_block(block: &Descriptor, named: &mut Named) {
    let last = block.end() / PAGE_BYTES;
    let first = block.address.div_ceil(PAGE_BYTES);
    (first..last.min(MOST_PAGES as u64)).for_each(|page| named.add(page));
}

fn name_bits(bytes: &[u8], at: usize, header: usize, named: &mut Named) {
    let Some(start) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) else {
        return;
    };
    let start = u64::from_le_bytes(*start);
    for (i, byte) in bytes.iter().skip(header).enumerate().filter(|(_, byte)| **byte != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            if let Some(page) = start.checked_add(i as u64 * 8 + bit) {
                named.add(page);
            }
        }
    }
}
