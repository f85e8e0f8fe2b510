//! RAM in a named file: what can be wrong with it before and while it is used.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Kind, Ram, odd, r, ram};
use machine::GuestRam;
use memory::{Backing, Error, GuestMemory, Presence};
use pages::{Layout, PageSet, Pfn};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

#[test]
fn a_file_cut_short_is_an_error_and_no_signal() {
    for kind in [Kind::Tmpfs, Kind::Disk] {
        let Ram { memory, place } = ram(kind, &odd()).unwrap();
        for range in [r(0, 1027), r(5000, 1541)] {
            memory.fill(range, 1).unwrap();
        }
        OpenOptions::new()
            .write(true)
            .open(place.ram_file())
            .unwrap()
            .set_len(4096 * 100)
            .unwrap();
        let range = r(90, 20);
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&[1; 65536]).unwrap();
        let mut page = [0; 4096];
        let texts = [
            memory.classify(range, &mut |_, _| {}).unwrap_err().to_string(),
            memory.digest(range).unwrap_err().to_string(),
            memory.read_page(Pfn(100), &mut page).unwrap_err().to_string(),
            memory.write(100 * 4096, &[1]).unwrap_err().to_string(),
            memory.fill(range, 2).unwrap_err().to_string(),
            memory.zero(range).unwrap_err().to_string(),
            memory.populate(range).unwrap_err().to_string(),
            memory.present().unwrap_err().to_string(),
            memory.write_to(near.as_fd(), &[], &[range], 0).unwrap_err().to_string(),
            memory.read_from(near.as_fd(), &[range], 0).unwrap_err().to_string(),
        ];
        for text in texts {
            assert!(text.contains("shrank to 409600 bytes"), "{kind:?}: {text}");
        }
        // What is left is still readable.
        assert_ne!(memory.digest(r(0, 100)).unwrap(), 0);
    }
}

#[test]
fn files_that_will_not_do_are_refused_by_name() {
    let layout = odd();
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("ram");
    let new = |backing: &Backing| GuestMemory::new(Arc::clone(&layout), backing).map(drop);

    let gone = new(&Backing::read_file(&path)).unwrap_err().to_string();
    assert!(gone.contains("ram") && gone.contains("No such file"), "{gone}");
    assert!(matches!(
        new(&Backing::create_file(dir.path())),
        Err(Error::NotRegular(_))
    ));
    assert!(matches!(
        new(&Backing::read_file("/dev/zero")),
        Err(Error::NotRegular(_))
    ));

    for wrong in [0, 4096 * 2567, 4096 * 2569] {
        std::fs::write(&path, vec![0; wrong]).unwrap();
        let Err(Error::FileLength { expected, got, .. }) = new(&Backing::open_file(&path)) else {
            panic!("{wrong} bytes were taken");
        };
        assert_eq!((expected, got), (4096 * 2568, wrong as u64));
    }

    let (huge, kept) = (Arc::new(Layout::flat(1 << 32).unwrap()), dir.path().join("huge"));
    std::fs::write(&kept, "what it had").unwrap();
    let full = GuestMemory::new(huge, &Backing::create_file(&kept));
    assert!(matches!(full, Err(Error::NoSpace { .. })), "{full:?}");
    assert_eq!(std::fs::read(&kept).unwrap(), b"what it had");
}

#[test]
fn a_file_in_use_is_left_alone() {
    let layout = odd();
    let Ram { memory, place } = ram(Kind::Tmpfs, &layout).unwrap();
    memory.write(0, &[1]).unwrap();
    for backing in [
        Backing::create_file(place.ram_file()),
        Backing::open_file(place.ram_file()),
        Backing::read_file(place.ram_file()),
    ] {
        let error = GuestMemory::new(Arc::clone(&layout), &backing).unwrap_err();
        assert!(matches!(error, Error::InUse(_)), "{error}");
        assert!(error.to_string().contains("in use by another process"));
    }
    let mut byte = [0];
    memory.read(0, &mut byte).unwrap();
    assert_eq!(byte, [1], "a receiver that is refused must not have emptied the file");
    drop(memory);
    let source = GuestMemory::new(Arc::clone(&layout), &Backing::read_file(place.ram_file())).unwrap();
    assert!(GuestMemory::new(Arc::clone(&layout), &Backing::open_file(place.ram_file())).is_err());
    drop(source);
    GuestMemory::new(layout, &Backing::open_file(place.ram_file())).unwrap();
}

/// Whoever reads a guest's file later meets no page faults, and its holes are still holes.
#[test]
fn what_a_file_holds_is_mapped_and_its_holes_are_not_filled() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("ram");
    let file = File::create(&path).unwrap();
    file.set_len(1024 * 4096).unwrap();
    let free = 700u64;
    for pfn in [3, 4, 5, 512, free] {
        file.write_all_at(&[7; 4096], pfn * 4096).unwrap();
    }
    let before = file.metadata().unwrap().blocks();
    let layout = Arc::new(Layout::flat(1024).unwrap());
    let ram = GuestMemory::new(Arc::clone(&layout), &Backing::read_file(&path)).unwrap();
    let mut unread = PageSet::empty(&layout);
    unread.insert(Pfn(free));
    ram.map_present(&unread).unwrap();
    let mapped = ram.present_by(Presence::PagemapFile).unwrap();
    for pfn in [3, 4, 5, 512] {
        assert!(mapped.contains(Pfn(pfn)), "{pfn}");
    }
    assert_eq!(file.metadata().unwrap().blocks(), before);
}

/// A VMM's memfd, sealed, as another process finds it: what it holds was never in our page table.
#[test]
fn a_sealed_memfd_is_looked_at_and_sent_where_it_lies() {
    let layout = Arc::new(Layout::flat(2000).unwrap());
    let memfd = memfd_create("ram", MemfdFlags::ALLOW_SEALING).unwrap();
    let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
    let theirs = File::from(memfd);
    theirs.set_len(2000 * 4096).unwrap();
    for pfn in [3u64, 4, 700, 1999] {
        theirs.write_all_at(&[7; 4096], pfn * 4096).unwrap();
    }
    theirs.write_all_at(&[0; 4096], 5 * 4096).unwrap();
    fcntl_add_seals(&theirs, SealFlags::SHRINK).unwrap();
    let blocks = theirs.metadata().unwrap().blocks();
    for mapped in [false, true] {
        let memory = GuestMemory::new(layout.clone(), &Backing::read_file(&path)).unwrap();
        if mapped {
            memory.map_present(&PageSet::empty(&layout)).unwrap();
        }
        let mut data = Vec::new();
        let mut note = |run, kind| data.extend(Some(run).filter(|_| kind == machine::PageKind::Data));
        memory.classify(r(0, 2000), &mut note).unwrap();
        assert_eq!(data, [r(3, 2), r(700, 1), r(1999, 1)]);
        let (near, mut far) = UnixStream::pair().unwrap();
        let sent = [r(2, 4), r(699, 2)];
        let total = 6 * 4096;
        let sender = std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let mut done = 0;
                while done < total {
                    done += memory.write_to(near.as_fd(), &[], &sent, done).unwrap();
                }
            });
            let mut got = vec![9; total];
            far.read_exact(&mut got).unwrap();
            sending.join().unwrap();
            got
        });
        let first: Vec<u8> = sender.chunks(4096).map(|page| page[4095]).collect();
        assert_eq!(first, [0, 7, 7, 0, 0, 7]);
        // What their program writes meanwhile is there.
        theirs.write_all_at(&[1; 4096], 4096).unwrap();
        let mut page = [0; 4096];
        memory.read_page(Pfn(1), &mut page).unwrap();
        assert_eq!(page, [1; 4096]);
        theirs.write_all_at(&[0; 4096], 4096).unwrap();
    }
    assert_eq!(theirs.metadata().unwrap().blocks(), blocks + 8);
    assert!(theirs.set_len(4096).is_err());
}
