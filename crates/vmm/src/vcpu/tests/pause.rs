//! Pause and resume.

use super::*;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;

#[test]
fn case_15_a_thousand_pauses_of_two_vcpus_and_none_hangs() {
    on_kvm("case_15_a_thousand_pauses_of_two_vcpus_and_none_hangs", || {
        let guest = Guest::new(2, &COUNT, |_, _| {});
        for cycle in 0..1000 {
            guest.vcpus.resume().unwrap();
            assert!(guest.vcpus.is_running());
            if cycle % 100 == 0 {
                guest.until_it_counts(0);
                guest.until_it_counts(1);
            }
            guest.vcpus.pause().unwrap();
            assert!(!guest.vcpus.is_running());
            let (counts, ecx) = ([guest.count(0), guest.count(1)], guest.regs(0).rcx);
            if cycle % 50 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            assert_eq!([guest.count(0), guest.count(1)], counts, "a paused vCPU wrote");
            assert_eq!(guest.regs(0).rcx, ecx);
        }
        assert!(guest.count(0) > 0 && guest.count(1) > 0);
    });
}

/// A kick comes wherever the thread is just then: as it is let go, about to run, in the guest, in an exit.
#[test]
fn case_15_pauses_right_after_resumes_while_the_guest_exits_all_the_time() {
    on_kvm(
        "case_15_pauses_right_after_resumes_while_the_guest_exits_all_the_time",
        || {
            // in eax, 0x10; inc dword [bx]; jmp back
            let code = [0x66, 0xe5, 0x10, 0x66, 0xff, 0x07, 0xeb, 0xf8];
            let guest = Guest::new(2, &code, |_, _| {});
            for _ in 0..2000 {
                guest.vcpus.resume().unwrap();
                guest.vcpus.pause().unwrap();
            }
            guest.vcpus.resume().unwrap();
            guest.until_it_counts(0);
            guest.until_it_counts(1);
            // Twice each is fine.
            guest.vcpus.resume().unwrap();
            guest.vcpus.pause().unwrap();
            guest.vcpus.pause().unwrap();
        },
    );
}

#[test]
fn several_callers_at_once_do_no_harm() {
    on_kvm("several_callers_at_once_do_no_harm", || {
        let guest = Guest::new(2, &COUNT, |_, _| {});
        thread::scope(|scope| {
            for number in 0..4 {
                let vcpus = &guest.vcpus;
                scope.spawn(move || {
                    for _ in 0..200 {
                        if number % 2 == 0 {
                            vcpus.resume().unwrap();
                        } else {
                            vcpus.pause().unwrap();
                        }
                    }
                });
            }
        });
        guest.vcpus.pause().unwrap();
        guest.vcpus.save().unwrap();
    });
}

#[test]
fn vcpus_that_wait_for_their_start_pause_too() {
    on_kvm("vcpus_that_wait_for_their_start_pause_too", || {
        let guest = Guest::empty(3);
        guest.ram.write(CODE, &COUNT).unwrap();
        let first = |sregs: &mut kvm_sregs, regs: &mut kvm_regs| {
            real_mode(0, sregs, regs);
            Ok(())
        };
        guest.vcpus.set_first_state(first).unwrap();
        for _ in 0..50 {
            guest.vcpus.resume().unwrap();
            guest.until_it_counts(0);
            guest.vcpus.pause().unwrap();
        }
        let there = guest.moved();
        there.vcpus.resume().unwrap();
        there.until_it_counts(0);
        there.vcpus.pause().unwrap();
        assert_eq!(there.count(1), 0);
    });
}

#[test]
fn what_needs_a_pause_is_refused_while_they_run() {
    on_kvm("what_needs_a_pause_is_refused_while_they_run", || {
        let guest = Guest::new(1, &COUNT, |_, _| {});
        let state = guest.save();
        guest.vcpus.resume().unwrap();
        for error in [
            guest.vcpus.save().unwrap_err(),
            guest.vcpus.restore(&mut Incoming::new(&state)).unwrap_err(),
            guest.vcpus.set_first_state(|_, _| Ok(())).unwrap_err(),
        ] {
            assert!(error.to_string().contains("pause them first"), "{error}");
        }
        guest.vcpus.pause().unwrap();
        let error = guest.vcpus.restore(&mut Incoming::new(&state)).unwrap_err();
        assert!(error.to_string().contains("ran before"), "{error}");
        // None of it did harm.
        guest.vcpus.resume().unwrap();
        guest.until_it_counts(0);
    });
}

/// Pauses `guest` while read `number` is being served.
fn pause_in_read(guest: &Guest, number: u32) {
    let (told, hear) = mpsc::channel();
    let release = Arc::new(AtomicBool::new(false));
    let released = Arc::clone(&release);
    *guest.exits.on_read.lock().unwrap() = Some(Box::new(move |read| {
        if read == number {
            told.send(()).unwrap();
            let started = Instant::now();
            while !released.load(Ordering::SeqCst) && started.elapsed() < PATIENCE {
                thread::yield_now();
            }
        }
    }));
    guest.vcpus.resume().unwrap();
    hear.recv_timeout(PATIENCE).unwrap();
    thread::scope(|scope| {
        let pause = scope.spawn(|| guest.vcpus.pause());
        guest.until(|| !guest.vcpus.is_running());
        release.store(true, Ordering::SeqCst);
        pause.join().unwrap().unwrap();
    });
    *guest.exits.on_read.lock().unwrap() = None;
}

/// Reads give 1, 2, 3, ..., and the guest adds them up in EDX: it has to have the sum of all that were served, wherever it
/// goes on. `read` reads into EAX; EAX counts too if it is not added yet.
fn no_read_is_lost(read: &[u8]) {
    // read; add edx, eax; inc ecx; jmp back
    let mut code = read.to_vec();
    code.extend([0x66, 0x01, 0xc2, 0x66, 0x41, 0xeb]);
    let back = -i8::try_from(code.len() + 1).unwrap();
    code.push(back.to_ne_bytes()[0]);
    let after_read = CODE + read.len() as u64;

    // Addresses of data are devices'.
    let mut guest = Guest::new(1, &code, |sregs, regs| {
        sregs.ds.base = RAM_END;
        (regs.rax, regs.rcx, regs.rdx) = (0, 0, 0);
    });
    for number in [1, 2, 50] {
        let served = guest.exits.reads.load(Ordering::SeqCst);
        pause_in_read(&guest, served + number);
        let served = served + number;
        let regs = guest.regs(0);
        assert_eq!(regs.rip, after_read, "the pause came while a read was served");
        assert_eq!(regs.rax & 0xffff_ffff, u64::from(served));
        let sum = u64::from(served) * u64::from(served + 1) / 2;
        assert_eq!(regs.rdx + regs.rax, sum);
        assert_eq!(regs.rcx, u64::from(served - 1));

        let there = guest.moved();
        assert_eq!(there.regs(0), regs);
        there.exits.reads.store(served, Ordering::SeqCst);
        guest = there;
    }
}

#[test]
fn case_29_a_memory_read_pending_at_a_pause_is_not_lost() {
    on_kvm("case_29_a_memory_read_pending_at_a_pause_is_not_lost", || {
        // mov eax, [0]
        no_read_is_lost(&[0x66, 0xa1, 0, 0]);
    });
}

#[test]
fn case_29_a_port_read_pending_at_a_pause_is_not_lost() {
    on_kvm("case_29_a_port_read_pending_at_a_pause_is_not_lost", || {
        // in eax, 0x10
        no_read_is_lost(&[0x66, 0xe5, 0x10]);
    });
}

/// Whatever they are doing, vCPUs end when nobody wants them any more.
#[test]
fn dropped_in_any_state_they_end() {
    on_kvm("dropped_in_any_state_they_end", || {
        drop(Guest::empty(2));
        drop(Guest::new(2, &COUNT, |_, _| {}));
        let guest = Guest::new(2, &COUNT, |_, _| {});
        guest.vcpus.resume().unwrap();
        drop(guest);
        let guest = Guest::new(2, &COUNT, |_, _| {});
        guest.vcpus.resume().unwrap();
        guest.vcpus.pause().unwrap();
        drop(guest);
        // cli; hlt: it never runs again, but for a kick.
        let guest = Guest::new(1, &[0xfa, 0xf4], |_, _| {});
        guest.vcpus.resume().unwrap();
        thread::sleep(Duration::from_millis(20));
        drop(guest);
    });
}
