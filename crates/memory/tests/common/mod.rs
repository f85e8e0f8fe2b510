//! What the tests of this crate share.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

pub(crate) mod kvm;

use memory::{Backing, GuestMemory};
use pages::{Layout, PageRange, Pfn};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// The kinds of backing that every host has.
pub(crate) const KINDS: [Kind; 4] = [Kind::Anonymous, Kind::Memfd, Kind::Tmpfs, Kind::Disk];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Anonymous,
    Memfd,
    /// A file on /dev/shm.
    Tmpfs,
    /// A file on a tmpfs mounted `huge=always`.
    TmpfsHuge,
    /// A file beside the build's own temporary files.
    Disk,
}

/// Memory and what has to live as long.
pub(crate) struct Ram {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) place: Place,
}

pub(crate) struct Place {
    dir: Option<TempDir>,
    mounted: bool,
}

impl Place {
    pub(crate) fn path(&self) -> &Path {
        self.dir.as_ref().unwrap().path()
    }

    pub(crate) fn ram_file(&self) -> std::path::PathBuf {
        self.path().join("ram")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.mounted {
            // A lazy unmount: the mapping may still be there. Nothing can be done about a failure here.
            let _ = Command::new("umount").arg("-l").arg(self.path()).status();
        }
    }
}

/// RAM of this kind; `None`, after saying so, where the host has not got it.
pub(crate) fn ram(kind: Kind, layout: &Arc<Layout>) -> Option<Ram> {
    let (place, backing) = match kind {
        Kind::Anonymous => (
            Place {
                dir: None,
                mounted: false,
            },
            Backing::Anonymous,
        ),
        Kind::Memfd => (
            Place {
                dir: None,
                mounted: false,
            },
            Backing::Memfd,
        ),
        Kind::Tmpfs => file_in(TempDir::new_in("/dev/shm").unwrap(), false),
        Kind::Disk => file_in(TempDir::new().unwrap(), false),
        Kind::TmpfsHuge => {
            let dir = TempDir::new().unwrap();
            let mount = Command::new("mount")
                .args(["-t", "tmpfs", "-o", "huge=always,size=1g", "tmpfs"])
                .arg(dir.path())
                .status();
            if !mount.is_ok_and(|status| status.success()) {
                skipped("a tmpfs with huge=always could not be mounted");
                return None;
            }
            file_in(dir, true)
        }
    };
    let memory = Arc::new(GuestMemory::new(Arc::clone(layout), &backing).unwrap());
    Some(Ram { memory, place })
}

fn file_in(dir: TempDir, mounted: bool) -> (Place, Backing) {
    let place = Place {
        dir: Some(dir),
        mounted,
    };
    let backing = Backing::create_file(place.ram_file());
    (place, backing)
}

pub(crate) fn skipped(why: &str) {
    eprintln!("\n*** SKIPPED: {why} ***\n");
}

pub(crate) fn r(start: u64, count: u64) -> PageRange {
    PageRange::new(Pfn(start), count).unwrap()
}

pub(crate) fn page(pfn: u64) -> PageRange {
    r(pfn, 1)
}

/// Two regions of odd sizes, both over a huge page long, with a hole between them.
pub(crate) fn odd() -> Arc<Layout> {
    Arc::new(Layout::new(vec![r(0, 1027), r(5000, 1541)]).unwrap())
}

/// A small generator of numbers: xorshift64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn pfn(&mut self, layout: &Layout) -> Pfn {
        layout.pfn_at(self.below(layout.total_pages())).unwrap()
    }
}

pub(crate) fn all_pages(memory: &GuestMemory) -> Vec<[u8; 4096]> {
    use machine::GuestRam;
    let layout = memory.layout();
    (0..layout.total_pages())
        .map(|i| {
            let mut into = [0; 4096];
            memory.read_page(layout.pfn_at(i).unwrap(), &mut into).unwrap();
            into
        })
        .collect()
}
