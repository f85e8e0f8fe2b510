//! A guest under KVM, moved whole over a socket: a payload of 64 bytes that checks its own memory, on this machine's KVM.
//!
//! It keeps a generation number in a register and writes it to 64 pages, one after the other, over and over. Before each
//! write it looks whether the page holds the generation before: `X` on the console says that it did not, `.` that a whole
//! sweep is done. So a page that is lost, or older than the registers, is told by the guest itself.
#![allow(clippy::unwrap_used)]

mod common;

use balloon::{Dialect, feature};
use common::{block_on, verified};
use memory::{Backing, GuestMemory};
use pageferry::{Ending, Guest, Listener, Migration, ReceiveOptions};
use pages::Layout;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmm::{BootFiles, Console, LinuxGuest, StateFault, Tracking, VmConfig};

/// Where the ELF's one segment lies, and is entered.
const ENTRY: u64 = 1 << 20;

#[rustfmt::skip]
const SWEEPS: [u8; 64] = [
    0xbb, 0x00, 0x00, 0x40, 0x00,             // mov ebx, 0x400000
    0xb9, 0x01, 0x00, 0x00, 0x00,             // mov ecx, 1
    0x48, 0x89, 0xdf,                         // sweep: mov rdi, rbx
    0xbe, 0x40, 0x00, 0x00, 0x00,             // mov esi, 64
    0x48, 0x89, 0xc8,                         // page: mov rax, rcx
    0x48, 0xff, 0xc8,                         // dec rax
    0x48, 0x39, 0x07,                         // cmp [rdi], rax
    0x74, 0x08,                               // je ok
    0xba, 0xf8, 0x03, 0x00, 0x00,             // mov edx, 0x3f8
    0xb0, 0x58,                               // mov al, 'X'
    0xee,                                     // out dx, al
    0x48, 0x89, 0x0f,                         // ok: mov [rdi], rcx
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0xff, 0xce,                               // dec esi
    0x75, 0xdf,                               // jnz page
    0x48, 0xff, 0xc1,                         // inc rcx
    0xba, 0xf8, 0x03, 0x00, 0x00,             // mov edx, 0x3f8
    0xb0, 0x2e,                               // mov al, '.'
    0xee,                                     // out dx, al
    0xeb, 0xca,                               // jmp sweep
];

/// An ELF kernel of one segment.
fn elf(code: &[u8]) -> Vec<u8> {
    let mut image = vec![0u8; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &[2, 0, 62, 0, 1]);
    put(24, &ENTRY.to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 1, 0]);
    put(64, &1u32.to_le_bytes());
    let len = code.len() as u64;
    for (at, value) in [
        (72, 0x1000),
        (80, ENTRY),
        (88, ENTRY),
        (96, len),
        (104, len),
        (112, 0x1000),
    ] {
        put(at, &u64::to_le_bytes(value));
    }
    image.extend_from_slice(code);
    image
}

/// What a guest printed.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Printed {
    fn console(&self) -> Console {
        Console {
            input: None,
            output: Box::new(self.clone()),
        }
    }

    fn sweeps(&self) -> usize {
        let printed = self.0.lock().unwrap();
        assert!(!printed.contains(&b'X'), "a page does not hold what the guest wrote");
        printed.iter().filter(|byte| **byte == b'.').count()
    }

    /// Waits until the guest has done `more` sweeps.
    #[track_caller]
    fn advance(&self, guest: &LinuxGuest, more: usize) {
        let (from, began) = (self.sweeps(), Instant::now());
        while self.sweeps() < from + more {
            let ended = guest.ended(Duration::from_millis(5));
            assert!(ended.is_none(), "{}", ended.unwrap());
            assert!(began.elapsed() < Duration::from_secs(60), "the guest stands still");
        }
    }
}

/// Whether guests can be run here; says so, loudly, where they cannot.
fn no_kvm(test: &str) -> bool {
    let missing = !Path::new("/dev/kvm").exists();
    if missing {
        eprintln!("SKIPPED: {test}: there is no /dev/kvm");
    }
    missing
}

fn config(tracking: Tracking) -> VmConfig {
    VmConfig {
        layout: Arc::new(Layout::pc(64 << 8).unwrap()),
        vcpus: 1,
        balloon: Some(balloon::Config::new(
            Dialect::Standard,
            feature::STATS_VQ | feature::FREE_PAGE_HINT,
        )),
        tracking,
    }
}

/// Boots `code`, and waits until it runs.
fn boot(code: &[u8], tracking: Tracking) -> (LinuxGuest, Printed) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), elf(code)).unwrap();
    let files = BootFiles {
        kernel: file.path().to_owned(),
        ..BootFiles::default()
    };
    let printed = Printed::default();
    let guest = LinuxGuest::boot(config(tracking), &files, printed.console()).unwrap();
    (guest, printed)
}

fn as_guest(guest: &LinuxGuest) -> Guest {
    let parts = guest.parts().unwrap();
    Guest {
        ram: parts.ram,
        tracker: parts.tracker,
        free_pages: parts.free_pages,
        machine: parts.machine,
    }
}

/// Moves a guest; gives both outcomes, the source's guest, and the one that arrived.
fn migrate(
    source: &LinuxGuest,
    tracking: Tracking,
    printed: &Printed,
    fault: Option<StateFault>,
) -> (pageferry::Finished, pageferry::Finished, Option<LinuxGuest>) {
    let made = Arc::new(Mutex::new(None));
    let (keep, printed) = (Arc::clone(&made), printed.clone());
    let (there, here) = block_on(async {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_address().clone();
        let receiving = Migration::receive(listener, ReceiveOptions::default(), move |incoming| {
            let layout = Arc::new(incoming.config.layout.clone());
            let ram = Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap());
            let guest = LinuxGuest::new_for_restore(&incoming.config, ram, tracking, printed.console())?;
            guest.set_state_fault(fault);
            let parts = as_guest(&guest);
            *keep.lock().unwrap() = Some(guest);
            Ok(parts)
        });
        // Slow enough that the guest writes everything again meanwhile.
        let mut options = verified();
        options.max_bandwidth = Some(4 << 20);
        options.compress = pageferry::Compress::None;
        let sending = Migration::send(as_guest(source), &address, options);
        tokio::join!(receiving.finish(), sending.finish())
    });
    let made = made.lock().unwrap().take();
    (here, there, made)
}

#[test]
fn a_guest_under_kvm_is_moved_whole_by_every_way_of_tracking() {
    if no_kvm("a_guest_under_kvm_is_moved_whole_by_every_way_of_tracking") {
        return;
    }
    for tracking in [
        Tracking::Log,
        Tracking::ManualProtect,
        Tracking::Ring,
        Tracking::Userfault,
    ] {
        let (source, printed) = boot(&SWEEPS, tracking);
        printed.advance(&source, 3);
        let arrived = Printed::default();
        let (here, there, made) = migrate(&source, tracking, &arrived, None);
        assert_eq!(
            here.outcome.ending,
            Ending::Completed,
            "{tracking:?}: {:?}",
            here.outcome.error
        );
        assert_eq!(
            there.outcome.ending,
            Ending::Completed,
            "{tracking:?}: {:?}",
            there.outcome.error
        );
        let report = &here.outcome.report;
        assert_eq!(report.verified, Some(true), "{tracking:?}");
        assert!(report.pages.hole > 10_000, "{tracking:?}: {:?}", report.pages);
        // Written again while it was copied, or this has tested nothing.
        assert!(
            report.rounds.iter().any(|round| round.dirty_pages_after >= 64),
            "{tracking:?}: {:?}",
            report.rounds
        );
        assert!(!source.is_running(), "{tracking:?}");
        let made = made.unwrap();
        assert!(made.is_running(), "{tracking:?}");
        arrived.advance(&made, 3);
        printed.sweeps();
    }
}

#[test]
fn a_received_guest_is_sent_on() {
    if no_kvm("a_received_guest_is_sent_on") {
        return;
    }
    let (mut guest, mut printed) = boot(&SWEEPS, Tracking::Auto);
    for hop in 0..3 {
        printed.advance(&guest, 2);
        let arrived = Printed::default();
        let (here, there, made) = migrate(&guest, Tracking::Auto, &arrived, None);
        assert_eq!(
            here.outcome.ending,
            Ending::Completed,
            "hop {hop}: {:?}",
            here.outcome.error
        );
        drop((here, there));
        (guest, printed) = (made.unwrap(), arrived);
    }
    printed.advance(&guest, 2);
}

#[test]
fn a_device_that_refuses_to_export_or_import_leaves_the_guest_running_here_and_a_second_try_succeeds() {
    if no_kvm("a_device_that_refuses_to_export_or_import_leaves_the_guest_running_here_and_a_second_try_succeeds") {
        return;
    }
    let (source, printed) = boot(&SWEEPS, Tracking::Auto);
    for fault in [StateFault::Save, StateFault::Restore] {
        printed.advance(&source, 2);
        source.set_state_fault(Some(fault));
        let (here, there, made) = migrate(&source, Tracking::Auto, &Printed::default(), Some(fault));
        assert_eq!(here.outcome.ending, Ending::Failed, "{fault:?}");
        assert_ne!(there.outcome.ending, Ending::Completed, "{fault:?}");
        let word = here.outcome.error.unwrap();
        assert!(word.contains("refuses to be"), "{fault:?}: {word}");
        assert!(here.guest.unwrap().machine.is_running(), "{fault:?}");
        assert!(there.guest.is_none(), "{fault:?}");
        // What could not be restored does not run, whoever asks.
        if let Some(made) = made {
            assert!(!made.is_running());
            let mut machine = made.parts().unwrap().machine;
            assert!(machine.resume().is_err(), "{fault:?}");
        }
        printed.advance(&source, 2);
    }
    source.set_state_fault(None);
    let arrived = Printed::default();
    let (here, _there, made) = migrate(&source, Tracking::Auto, &arrived, None);
    assert_eq!(here.outcome.ending, Ending::Completed, "{:?}", here.outcome.error);
    arrived.advance(&made.unwrap(), 2);
}

#[test]
fn an_instruction_that_kvm_cannot_emulate_ends_the_guest_with_its_address_and_bytes() {
    if no_kvm("an_instruction_that_kvm_cannot_emulate_ends_the_guest_with_its_address_and_bytes") {
        return;
    }
    // popcnt eax, ecx; hlt; jmp hlt. A KVM with hardware behind it runs that: then there is nothing to see.
    let (guest, _) = boot(&[0xf3, 0x0f, 0xb8, 0xc1, 0xf4, 0xeb, 0xfd], Tracking::Auto);
    let Some(ended) = guest.ended(Duration::from_secs(5)) else {
        eprintln!("SKIPPED: an_instruction_that_kvm_cannot_emulate: this host's KVM runs it");
        return;
    };
    let sentence = ended.to_string();
    assert!(
        sentence.contains("this host's KVM cannot run this kernel"),
        "{sentence}"
    );
    assert!(
        sentence.contains("0x100000") && sentence.contains("f30fb8c1"),
        "{sentence}"
    );
    // It is paused and let go like any other.
    let mut machine = guest.parts().unwrap().machine;
    machine.pause().unwrap();
}

#[test]
fn a_guest_that_has_ended_is_not_sent_as_one_that_lives() {
    if no_kvm("a_guest_that_has_ended_is_not_sent_as_one_that_lives") {
        return;
    }
    // mov edx, 0x600; mov al, 0x34; out dx, al: the sleep register, S5. Then jmp to itself.
    let (guest, _) = boot(&[0xba, 0, 6, 0, 0, 0xb0, 0x34, 0xee, 0xeb, 0xfe], Tracking::Auto);
    let ended = guest.ended(Duration::from_secs(30)).unwrap();
    assert!(matches!(ended, vmm::Ended::PowerOff), "{ended}");
    assert!(!guest.is_running());
    let (here, there, made) = migrate(&guest, Tracking::Auto, &Printed::default(), None);
    assert_eq!(here.outcome.ending, Ending::Failed);
    let word = here.outcome.error.unwrap();
    assert!(
        word.contains("the guest has ended: it switched its power off"),
        "{word}"
    );
    assert!(there.guest.is_none());
    assert!(made.is_none_or(|made| !made.is_running()));
}
