//! How guests end.

use super::*;
use crate::Ended;

/// Runs a guest to its end.
fn end_of(guest: &Guest) -> Ended {
    guest.vcpus.resume().unwrap();
    let ended = guest.ending.wait(PATIENCE).expect("it goes on and on");
    assert!(!guest.vcpus.is_running());
    ended
}

/// Of a guest that has ended: it can be paused, resumed and dropped, and nobody hangs.
fn rests(guest: &Guest) {
    for _ in 0..3 {
        guest.vcpus.pause().unwrap();
        guest.vcpus.resume().unwrap();
        assert!(!guest.vcpus.is_running());
    }
    guest.vcpus.pause().unwrap();
}

fn failure(ended: Ended) -> Arc<Error> {
    match ended {
        Ended::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_instruction_that_cannot_be_emulated_is_named() {
    let test = "an_instruction_that_cannot_be_emulated_is_named";
    on_kvm(test, move || {
        // nop; popcnt eax, eax; out 0x10, al; jmp $
        let code = [0x90, 0xf3, 0x0f, 0xb8, 0xc0, 0xe6, 0x10, 0xeb, 0xfe];
        let guest = Guest::new(2, &code, |_, _| {});
        // The other vCPU counts on its own.
        guest.ram.write(0x6000, &COUNT).unwrap();
        {
            let fd = lock(&guest.vcpus.fds[1]);
            let mut regs = fd.get_regs().unwrap();
            regs.rip = 0x6000;
            fd.set_regs(&regs).unwrap();
        }
        guest.vcpus.resume().unwrap();
        let started = Instant::now();
        let ended = loop {
            if let Some(ended) = guest.ending.wait(Duration::from_millis(10)) {
                break ended;
            }
            if !guest.exits.written.lock().unwrap().is_empty() {
                eprintln!("SKIPPED: {test}: this host's KVM can run popcnt");
                return;
            }
            assert!(started.elapsed() < PATIENCE);
        };
        let error = failure(ended);
        let Error::Emulation { vcpu, rip, bytes } = &*error else {
            panic!("{error}");
        };
        assert_eq!((*vcpu, *rip), (0, CODE + 1));
        assert!(bytes.starts_with("f30fb8c0"), "{bytes}");
        let text = error.to_string();
        assert!(
            text.contains("cannot run this kernel") && text.contains("0x1001"),
            "{text}"
        );
        // The other vCPU was stopped with it.
        guest.vcpus.pause().unwrap();
        let count = guest.count(1);
        rests(&guest);
        assert_eq!(guest.count(1), count);
    });
}

/// The bytes are read from guest memory where KVM does not say them.
#[test]
fn the_bytes_of_an_instruction_are_found_in_memory() {
    on_kvm("the_bytes_of_an_instruction_are_found_in_memory", || {
        let guest = Guest::new(1, &[1, 2, 3], |sregs, regs| {
            sregs.cs.base = 0x300;
            regs.rip = CODE - 0x300;
        });
        let fd = lock(&guest.vcpus.fds[0]);
        let bytes = exits::instruction_at(&fd, &guest.ram);
        assert_eq!(bytes[..4], [1, 2, 3, 0]);
        assert_eq!(bytes.len(), 15);
        // Over the end of RAM: what there is.
        let mut regs = fd.get_regs().unwrap();
        regs.rip = RAM_END - 4 - 0x300;
        fd.set_regs(&regs).unwrap();
        assert_eq!(exits::instruction_at(&fd, &guest.ram).len(), 4);
    });
}

#[test]
fn a_triple_fault_ends_the_guest_and_says_where() {
    on_kvm("a_triple_fault_ends_the_guest_and_says_where", || {
        // nop; ud2 in protected mode, and no interrupt table to find a handler in.
        let guest = Guest::new(1, &[0x90, 0x0f, 0x0b], |sregs, _| flat(sregs));
        let error = failure(end_of(&guest));
        assert!(matches!(&*error, Error::Vcpu { vcpu: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("triple fault") && text.contains("0x"), "{text}");
        rests(&guest);
    });
}

/// What a device says ends the guest: the vCPU that it was asked by, and the others.
#[test]
fn a_device_ends_the_guest() {
    on_kvm("a_device_ends_the_guest", || {
        // out 0x10, al for vCPU 0, which reads on; the other counts.
        let guest = Guest::new(2, &COUNT, |_, regs| regs.rip = 0x6000);
        guest.ram.write(0x6000, &[0x66, 0xe5, 0x10, 0xeb, 0xfb]).unwrap();
        let ending = guest.ending.clone();
        *guest.exits.on_read.lock().unwrap() = Some(Box::new(move |read| {
            if read == 10 {
                ending.tell(Ended::PowerOff);
            }
        }));
        assert!(matches!(end_of(&guest), Ended::PowerOff));
        rests(&guest);
        assert_eq!(guest.exits.reads.load(Ordering::SeqCst), 10, "it read on");
        assert_eq!(guest.regs(0).rax & 0xffff_ffff, 10, "the last access is complete");
    });
}

#[test]
fn a_panic_in_a_vcpu_thread_ends_the_guest() {
    on_kvm("a_panic_in_a_vcpu_thread_ends_the_guest", || {
        let guest = Guest::new(2, &COUNT, |_, regs| regs.rip = 0x6000);
        guest.ram.write(0x6000, &[0x66, 0xe5, 0x10, 0xeb, 0xfb]).unwrap();
        *guest.exits.on_read.lock().unwrap() = Some(Box::new(|read| assert!(read != 3, "on purpose")));
        let error = failure(end_of(&guest)).to_string();
        assert!(error.contains("vCPU 0") && error.contains("on purpose"), "{error}");
        guest.vcpus.pause().unwrap();
        // The thread that is gone is not waited for, nor does the guest go on without it.
        let count = guest.count(1);
        let error = guest.vcpus.resume().unwrap_err().to_string();
        assert!(error.contains("vCPU 0"), "{error}");
        guest.vcpus.pause().unwrap();
        assert_eq!(guest.count(1), count);
        assert!(guest.vcpus.save().is_err());
    });
}

#[test]
fn memory_that_is_a_rams_end_reads_as_a_device() {
    on_kvm("memory_that_is_a_rams_end_reads_as_a_device", || {
        // mov eax, [0]; jmp back
        let guest = Guest::new(1, &[0x66, 0xa1, 0, 0, 0xeb, 0xfa], |sregs, _| {
            sregs.ds.base = RAM_END - 2;
        });
        // Half of it in RAM, half not: whatever KVM makes of it, no panic and no hang.
        guest.vcpus.resume().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        guest.vcpus.pause().unwrap();
    });
}
