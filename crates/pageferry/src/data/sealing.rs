//! Batches over a connection that encrypts: by way of buffers that are small enough to stay in a core's own cache.

use super::Broken;
use super::packing::PAGE;
use super::sender::{Sender, failed, write_out};
use crate::transport::Encrypted;
use machine::GuestRam;
use pages::PageRange;
use socket2::Socket;
use std::io::{self, Write};
use std::time::Duration;

/// What a source writes into such a connection.
pub(super) struct Sealing<'a> {
    encrypted: Encrypted<'a>,
    sender: &'a Sender,
    /// What is done, for an error.
    doing: &'static str,
}

impl<'a> Sealing<'a> {
    pub(super) fn new(encrypted: Encrypted<'a>, sender: &'a Sender, doing: &'static str) -> Self {
        Sealing {
            encrypted,
            sender,
            doing,
        }
    }

    /// Encrypts `bytes` behind what came before.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let patience = self.sender.peer_timeout;
        let written = self
            .encrypted
            .write(bytes, &mut |socket, bytes| write_all(socket, bytes, patience));
        // What they are without what encryption adds, as everywhere.
        self.sender.totals.wrote(bytes.len());
        written.map_err(|e| self.sender.broken_off(self.doing, &e))
    }

    /// Encrypts the pages of `ranges`, a full record after the other: so they come out by whole pages.
    pub(super) fn put_pages(
        &mut self,
        ranges: &[PageRange],
        copy_out: impl Fn(PageRange, &mut Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Broken> {
        let mut record = Vec::with_capacity(Encrypted::RECORD_BYTES);
        for range in ranges {
            let mut rest = *range;
            while !rest.is_empty() {
                let room = (Encrypted::RECORD_BYTES - record.len()) / PAGE;
                let (part, behind) = rest.split_at(room as u64);
                copy_out(part, &mut record).map_err(failed)?;
                rest = behind;
                if record.len() == Encrypted::RECORD_BYTES {
                    self.put(&record)?;
                    record.clear();
                }
            }
        }
        self.put(&record)
    }

    /// Lets all of it leave.
    pub(super) fn end(mut self) -> Result<(), Broken> {
        let patience = self.sender.peer_timeout;
        let written = self
            .encrypted
            .flush(&mut |socket, bytes| write_all(socket, bytes, patience));
        written.map_err(|e| self.sender.broken_off(self.doing, &e))
    }
}

fn write_all(mut socket: &Socket, bytes: &[u8], patience: Duration) -> io::Result<()> {
    write_out(bytes.len(), patience, |done| {
        socket.write(bytes.get(done..).unwrap_or_default())
    })
}

/// Puts the pages of a batch, which come in pieces, to their places in guest memory.
pub(super) struct Placing<'a> {
    ram: &'a dyn GuestRam,
    /// Those without content yet.
    ranges: &'a [PageRange],
    /// Of the first of them: pages that have it.
    done: u64,
    /// The beginning of a page that came in parts.
    part: Vec<u8>,
}

impl<'a> Placing<'a> {
    pub(super) fn new(ram: &'a dyn GuestRam, ranges: &'a [PageRange]) -> Self {
        Placing {
            ram,
            ranges,
            done: 0,
            part: Vec::new(),
        }
    }

    /// The next bytes. An error is a clause.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            if self.part.is_empty() && bytes.len() >= PAGE {
                bytes = self.put(bytes)?;
                continue;
            }
            let (piece, rest) = bytes.split_at(bytes.len().min(PAGE - self.part.len()));
            self.part.extend_from_slice(piece);
            bytes = rest;
            if self.part.len() == PAGE {
                let mut page = std::mem::take(&mut self.part);
                self.put(&page)?;
                page.clear();
                self.part = page;
            }
        }
        Ok(())
    }

    /// Whole pages of `bytes`, as many as the next range takes; returns the rest.
    fn put<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], String> {
        let Some((range, behind)) = self.ranges.split_first() else {
            return Err("a batch has more pages than its runs".to_owned());
        };
        let (_, left) = range.split_at(self.done);
        let came = bytes.len() / PAGE;
        let fits = usize::try_from(left.count()).map_or(came, |left| left.min(came));
        let (now, later) = left.split_at(fits as u64);
        let (pages, rest) = bytes.split_at(fits * PAGE);
        self.ram
            .copy_in(now, pages)
            .map_err(|e| format!("writing pages {now}: {e}"))?;
        self.done += now.count();
        if later.is_empty() {
            (self.ranges, self.done) = (behind, 0);
        }
        Ok(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::{Backing, GuestMemory};
    use pages::{Layout, Pfn};
    use std::sync::Arc;

    /// Pieces of any size come to the places that the ranges name, in order.
    #[test]
    fn pages_that_come_in_pieces_come_to_their_places() {
        let layout = Arc::new(Layout::flat(64).unwrap());
        let ranges = [(3, 5), (9, 10), (20, 33)].map(|(from, to)| PageRange::between(Pfn(from), Pfn(to)));
        let pages: u64 = ranges.iter().map(|range| range.count()).sum();
        let bytes: Vec<u8> = (0..pages)
            .flat_map(|page| (0..PAGE as u64).map(move |at| (page * 7 + at).to_le_bytes()[0]))
            .collect();
        for piece in [1, 100, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE, 5 * PAGE + 3, bytes.len()] {
            let ram = GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).unwrap();
            let mut placing = Placing::new(&ram, &ranges);
            for piece in bytes.chunks(piece) {
                placing.take(piece).unwrap();
            }
            let mut at = 0;
            for pfn in 0..64 {
                let mut page = [0; PAGE];
                ram.read_page(Pfn(pfn), &mut page).unwrap();
                if ranges.iter().any(|range| range.contains(Pfn(pfn))) {
                    assert_eq!(page, bytes[at..at + PAGE], "page {pfn} of pieces of {piece}");
                    at += PAGE;
                } else {
                    assert_eq!(page, [0; PAGE], "page {pfn} of pieces of {piece}");
                }
            }
            assert!(placing.take(&[0; PAGE]).unwrap_err().contains("more pages"));
        }
    }
}
