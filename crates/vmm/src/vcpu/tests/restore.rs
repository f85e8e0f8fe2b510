//! State: saved, and restored into another VM.

use super::*;
use crate::kvm::preflight;
use crate::wiring::Wiring;
use machine::{BalloonConfig, MachineConfig};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// MSRs that any KVM has, and values that they take.
const MARKS: [(u32, u64); 4] = [
    (0xc000_0081, 0x0023_0010_0000_0000), // STAR
    (0xc000_0102, 0xffff_8000_1234_5678), // KERNEL_GS_BASE
    (0x174, 0x10),                        // SYSENTER_CS
    (0x176, 0xffff_ffff_8100_0000),       // SYSENTER_EIP
];

/// Marks the registers that `COUNT` does not use, the FPU and SSE ones among them.
fn mark(guest: &Guest) {
    let fd = lock(&guest.vcpus.fds[0]);
    let mut regs = fd.get_regs().unwrap();
    (regs.rsi, regs.r8, regs.r15) = (0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00, 0x0123_4567_89ab_cdef);
    fd.set_regs(&regs).unwrap();
    let host = guest.vm.host();
    let mut xsave = sys::get_xsave(&fd, host.xsave_bytes(), host.has_xsave2()).unwrap();
    // The legacy area: control word, MXCSR, ST0..7 from byte 32, XMM0..15 from byte 160; the header says that both are there.
    xsave[0..2].copy_from_slice(&0x027fu16.to_le_bytes());
    xsave[24..28].copy_from_slice(&0x1fa0u32.to_le_bytes());
    for (at, byte) in xsave[160..416].iter_mut().enumerate() {
        *byte = u8::try_from(at % 251).unwrap();
    }
    for register in 0..8 {
        let at = 32 + register * 16;
        xsave[at..at + 10].copy_from_slice(&[u8::try_from(register).unwrap() + 1; 10]);
    }
    xsave[512] |= 3;
    sys::set_xsave(&fd, &xsave, host.xsave_bytes()).unwrap();
    let mut debug = fd.get_debug_regs().unwrap();
    debug.db[0] = 0xdead_0000;
    fd.set_debug_regs(&debug).unwrap();
    msrs::write(&fd, &MARKS).unwrap();
    let mut lapic = fd.get_lapic().unwrap();
    for (register, value) in LAPIC_MARKS {
        lapic.regs[register] = value;
    }
    // Enabled; the timer masked.
    (lapic.regs[0xf1], lapic.regs[0x322]) = (1, 1);
    fd.set_lapic(&lapic).unwrap();
}

/// Registers of the local APIC, and what is put into their lowest bytes: spurious interrupts, the timer.
const LAPIC_MARKS: [(usize, std::os::raw::c_char); 2] = [(0xf0, 0x7f), (0x320, 0x31)];

fn xsave(guest: &Guest) -> Vec<u8> {
    let host = guest.vm.host();
    sys::get_xsave(&lock(&guest.vcpus.fds[0]), host.xsave_bytes(), host.has_xsave2()).unwrap()
}

#[test]
fn registers_fpu_and_a_counter_survive_in_a_fresh_vm() {
    on_kvm("registers_fpu_and_a_counter_survive_in_a_fresh_vm", || {
        let guest = Guest::new(2, &COUNT, |_, _| {});
        mark(&guest);
        guest.vcpus.resume().unwrap();
        guest.until_it_counts(0);
        guest.until_it_counts(1);
        guest.vcpus.pause().unwrap();

        let there = guest.moved();
        assert_eq!(there.regs(0), guest.regs(0));
        assert_eq!(there.regs(1), guest.regs(1));
        assert_eq!(there.regs(0).r8, 0x99aa_bbcc_ddee_ff00);
        let (ours, theirs) = (xsave(&guest), xsave(&there));
        assert_eq!(theirs[160..416], ours[160..416], "SSE registers");
        assert_eq!(theirs[160 + 250], 250);
        assert_eq!((theirs[0], theirs[1]), (0x7f, 0x02), "FPU control word");
        assert_eq!(theirs[24..28], 0x1fa0u32.to_le_bytes(), "MXCSR");
        assert_eq!(theirs[32..42], [1; 10], "ST0");
        {
            let (a, b) = (lock(&guest.vcpus.fds[0]), lock(&there.vcpus.fds[0]));
            assert_eq!(a.get_sregs().unwrap(), b.get_sregs().unwrap());
            assert_eq!(b.get_debug_regs().unwrap().db[0], 0xdead_0000);
            let numbers: Vec<u32> = MARKS.iter().map(|(number, _)| *number).collect();
            assert_eq!(msrs::read(&b, &numbers).unwrap(), MARKS);
            let (theirs, ours) = (b.get_lapic().unwrap().regs, a.get_lapic().unwrap().regs);
            for (register, value) in LAPIC_MARKS {
                assert_eq!(theirs[register], value);
                assert_eq!(theirs[register..register + 4], ours[register..register + 4]);
            }
        }

        // The guest counts on from where it was, in memory and in a register.
        let (count, ecx) = (there.count(0), there.regs(0).rcx);
        assert!(u64::from(count).abs_diff(ecx) <= 1);
        there.vcpus.resume().unwrap();
        there.until_it_counts(0);
        there.until_it_counts(1);
        there.vcpus.pause().unwrap();
        assert!(there.count(0) > count && there.regs(0).rcx > ecx);
        assert!(u64::from(there.count(0)).abs_diff(there.regs(0).rcx) <= 1);
        assert_eq!(xsave(&there)[160..416], ours[160..416]);
        assert_eq!(guest.count(0), count, "the source stood still");

        // And on: what was restored can be saved, as often as one likes.
        let back = there.moved();
        assert_eq!(back.regs(0), there.regs(0));
        back.vcpus.resume().unwrap();
        back.until_it_counts(1);
    });
}

#[test]
fn a_save_changes_nothing() {
    on_kvm("a_save_changes_nothing", || {
        let guest = Guest::new(2, &COUNT, |_, _| {});
        mark(&guest);
        guest.vcpus.resume().unwrap();
        guest.until_it_counts(0);
        guest.vcpus.pause().unwrap();
        let (before, regs) = (guest.save(), guest.regs(0));
        let after = guest.save();
        assert_eq!(guest.regs(0), regs);
        let names = |state: &MachineState| state.sections.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&before), ["vcpus", "vcpu0", "vcpu1", "irqchip", "pit"]);
        assert_eq!(names(&after), names(&before));
        for section in &before.sections {
            assert!(
                section.data.len() < 100_000,
                "{}: {} bytes",
                section.name,
                section.data.len()
            );
        }
        guest.vcpus.resume().unwrap();
        guest.until_it_counts(0);
    });
}

/// Pending exceptions, an NMI, and whether a vCPU halts are state too.
#[test]
fn what_is_pending_comes_along() {
    on_kvm("what_is_pending_comes_along", || {
        // hlt; then count: an NMI wakes it, whose handler at 0x5000 writes to a port.
        let mut code = vec![0xf4];
        code.extend(COUNT);
        let guest = Guest::new(1, &code, |_, _| {});
        // mov al, 0x55; out 0x77, al; iret
        guest.ram.write(0x5000, &[0xb0, 0x55, 0xe6, 0x77, 0xcf]).unwrap();
        guest.ram.write(2 * 4, &[0x00, 0x50, 0x00, 0x00]).unwrap();
        guest.vcpus.resume().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        guest.vcpus.pause().unwrap();
        assert_eq!(guest.count(0), 0, "it halts");
        {
            let fd = lock(&guest.vcpus.fds[0]);
            let mut events = fd.get_vcpu_events().unwrap();
            events.nmi.pending = 1;
            fd.set_vcpu_events(&events).unwrap();
        }
        let there = guest.moved();
        assert!(there.exits.written.lock().unwrap().is_empty());
        there.vcpus.resume().unwrap();
        there.until(|| !there.exits.written.lock().unwrap().is_empty());
        assert_eq!(there.exits.written.lock().unwrap()[0], (0x77, vec![0x55]));
        there.until_it_counts(0);
    });
}

/// The guest's clock goes on from where it was: not from the new VM's own, nor by the time that has passed.
#[test]
fn the_clock_goes_on_from_where_it_was() {
    on_kvm("the_clock_goes_on_from_where_it_was", || {
        const DAY_NS: u64 = 86_400 * 1_000_000_000;
        let guest = Guest::new(1, &COUNT, |_, _| {});
        let clock = kvm_clock_data {
            clock: 100 * DAY_NS,
            ..Default::default()
        };
        guest.vm.fd().set_clock(&clock).unwrap();
        let there = guest.moved();
        let now = there.vm.fd().get_clock().unwrap().clock;
        assert!((100 * DAY_NS..101 * DAY_NS).contains(&now), "{now}");
    });
}

/// And so does the time-stamp counter: the new VM's own is younger than the guest.
#[test]
fn the_tsc_goes_on_from_where_it_was() {
    let test = "the_tsc_goes_on_from_where_it_was";
    on_kvm(test, move || {
        let tsc = |guest: &Guest| msrs::read(&lock(&guest.vcpus.fds[0]), &[msrs::TSC]).unwrap()[0].1;
        let guest = Guest::new(1, &COUNT, |_, _| {});
        msrs::write(&lock(&guest.vcpus.fds[0]), &[(msrs::TSC, 1 << 60)]).unwrap();
        if tsc(&guest) < 1 << 60 {
            eprintln!("SKIPPED: {test}: this host's KVM gives a guest its own TSC, whatever is written there");
            return;
        }
        let now = tsc(&guest.moved());
        assert!((1 << 60..(1 << 60) + (1 << 50)).contains(&now), "{now:#x}");
    });
}

#[test]
fn another_count_of_vcpus_is_refused() {
    on_kvm("another_count_of_vcpus_is_refused", || {
        let state = Guest::new(2, &COUNT, |_, _| {}).save();
        for vcpus in [1, 3] {
            let there = Guest::empty(vcpus);
            let error = there.try_restore(&state).unwrap_err().to_string();
            assert!(
                error.contains("2 vCPUs came") && error.contains(&format!("has {vcpus}")),
                "{error}"
            );
            assert!(there.vcpus.resume().is_err());
        }
        // The same if the count says otherwise than what came.
        for (name, vcpus) in [("vcpu1", 2), ("vcpu0", 2)] {
            let mut less = state.clone();
            less.sections.retain(|section| section.name != name);
            let there = Guest::empty(vcpus);
            let error = there.try_restore(&less).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            assert!(there.vcpus.resume().is_err() && there.vcpus.save().is_err());
        }
        let mut more = state.clone();
        let extra = more.sections[2].clone();
        more.sections.push(Section {
            name: "vcpu2".to_owned(),
            ..extra
        });
        let error = Guest::empty(2).try_restore(&more).unwrap_err().to_string();
        assert!(error.contains("vcpu2"), "{error}");
    });
}

#[test]
fn a_machine_may_run_on_the_host_that_it_runs_on() {
    on_kvm("a_machine_may_run_on_the_host_that_it_runs_on", || {
        let guest = Guest::new(2, &COUNT, |_, _| {});
        let config = MachineConfig {
            kind: "linux".to_owned(),
            layout: (**guest.ram.layout()).clone(),
            vcpus: 2,
            balloon: BalloonConfig {
                dialect: "off".to_owned(),
                features: 0,
            },
            extra: guest.vcpus.needs(),
        };
        assert_eq!(preflight(&config).unwrap(), config.extra);
        let many = MachineConfig { vcpus: 65, ..config };
        assert!(preflight(&many).unwrap_err()[0].contains("65 vCPUs"));
    });
}

#[test]
fn a_doorbell_rings_without_an_exit() {
    on_kvm("a_doorbell_rings_without_an_exit", || {
        // mov dword [0], 1; mov dword [0], 2; inc dword [bx]: DS is a device's, BX goes by way of SS.
        let code = [
            0x66, 0xc7, 0x06, 0, 0, 1, 0, 0, 0, 0x66, 0xc7, 0x06, 0, 0, 2, 0, 0, 0, 0xeb, 0xfe,
        ];
        let guest = Guest::new(1, &code, |sregs, _| sregs.ds.base = RAM_END);
        let bell = EventFd::new(EFD_NONBLOCK).unwrap();
        guest.vm.doorbell(&bell, RAM_END, 1).unwrap();
        guest.vcpus.resume().unwrap();
        guest.until(|| !guest.exits.written.lock().unwrap().is_empty());
        guest.vcpus.pause().unwrap();
        assert_eq!(bell.read().unwrap(), 1);
        // The other value is nobody's doorbell.
        assert_eq!(*guest.exits.written.lock().unwrap(), [(RAM_END, vec![2, 0, 0, 0])]);
    });
}

/// A string instruction's accesses come one by one.
#[test]
fn string_output_arrives_in_pieces() {
    on_kvm("string_output_arrives_in_pieces", || {
        // mov dx, 0x10; mov si, 0x3000; mov cx, 3; rep outsw; jmp $
        let code = [0xba, 0x10, 0, 0xbe, 0, 0x30, 0xb9, 3, 0, 0xf3, 0x6f, 0xeb, 0xfe];
        let guest = Guest::new(1, &code, |_, _| {});
        guest.ram.write(0x3000, &[1, 2, 3, 4, 5, 6]).unwrap();
        guest.vcpus.resume().unwrap();
        guest.until(|| guest.exits.written.lock().unwrap().len() >= 3);
        let written = guest.exits.written.lock().unwrap().clone();
        assert_eq!(written, [(0x10, vec![1, 2]), (0x10, vec![3, 4]), (0x10, vec![5, 6])]);
    });
}

/// The guest writes more pages than its dirty ring has room for, with nobody reading them.
#[test]
fn case_27_a_full_dirty_ring_stops_nobody_and_loses_nothing() {
    let test = "case_27_a_full_dirty_ring_stops_nobody_and_loses_nothing";
    on_kvm(test, move || {
        const FROM: u64 = 16 << 20;
        const PAGES: u64 = 20_000;
        let vm = Vm::new(1, Guest::empty(1).vm.ram(), Tracking::Ring);
        if let Err(error) = vm {
            eprintln!("SKIPPED: {test}: {error}");
            return;
        }
        let guest = Guest::with(1, 128 << 20, Tracking::Ring);
        // mov [edi], eax; out 0x10, al; add edi, 0x1000; dec ecx; jnz back; out 0x11, al; jmp $
        // With an exit a page: a KVM that emulates instructions looks at the ring only when it is entered, and overruns it.
        let code = [
            0x89, 0x07, 0xe6, 0x10, 0x81, 0xc7, 0, 0x10, 0, 0, 0x49, 0x75, 0xf3, 0xe6, 0x11, 0xeb, 0xfe,
        ];
        guest.load(&code, |sregs, regs| {
            flat(sregs);
            (regs.rdi, regs.rcx) = (FROM, PAGES);
        });
        let mut tracker = guest.vm.tracker().unwrap();
        tracker.start().unwrap();
        guest.vcpus.resume().unwrap();
        let last = || guest.exits.written.lock().unwrap().last().map(|(port, _)| *port);
        guest.until(|| last() == Some(0x11));
        guest.vcpus.pause().unwrap();
        let dirty = tracker.harvest().unwrap();
        let first = FROM / pages::PAGE_BYTES;
        let missing = (first..first + PAGES).filter(|pfn| !dirty.contains(pages::Pfn(*pfn)));
        assert_eq!(missing.count(), 0, "of {PAGES} pages");
        tracker.stop().unwrap();
    });
}
