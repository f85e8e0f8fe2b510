//! The VM on this machine's own KVM.

use super::*;
use kvm_bindings::{KVM_IRQCHIP_PIC_MASTER, kvm_irqchip};
use machine::MachineState;
use memory::Backing;
use pages::{Layout, PAGE_BYTES, Pfn};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

fn kvm(test: &str) -> bool {
    match Host::open(Path::new(DEVICE)) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("SKIPPED: {test}: {error}");
            false
        }
    }
}

fn ram() -> Arc<GuestMemory> {
    let layout = Arc::new(Layout::pc(64).unwrap());
    Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap())
}

#[test]
fn another_device_than_kvm_makes_no_vm() {
    let error = Vm::at(Path::new("/dev/null"), 1, &ram(), Tracking::Auto).unwrap_err();
    assert!(matches!(error, Error::KvmLacks(_)), "{error}");
}

#[test]
fn more_vcpus_than_kvm_has_are_refused() {
    if !kvm("more_vcpus_than_kvm_has_are_refused") {
        return;
    }
    let error = Vm::new(u32::MAX, &ram(), Tracking::Auto).unwrap_err().to_string();
    assert!(error.contains("4294967295 vCPUs"), "{error}");
}

#[test]
fn each_way_of_tracking_gives_its_tracker() {
    if !kvm("each_way_of_tracking_gives_its_tracker") {
        return;
    }
    for tracking in [
        Tracking::Auto,
        Tracking::Log,
        Tracking::ManualProtect,
        Tracking::Ring,
        Tracking::Userfault,
    ] {
        let ram = ram();
        let made = Vm::new(1, &ram, tracking).and_then(|vm| Ok((vm.tracker()?, vm)));
        let (mut tracker, vm) = match made {
            Ok(made) => made,
            // A host may lack it, and then says which.
            Err(error) => {
                eprintln!("SKIPPED: each_way_of_tracking_gives_its_tracker: {tracking:?}: {error}");
                continue;
            }
        };
        assert_eq!(vm.ring().is_some(), tracking == Tracking::Ring);
        tracker.start().unwrap();
        tracker.harvest().unwrap();
        ram.write(9 * PAGE_BYTES, &[1]).unwrap();
        let dirty = tracker.harvest().unwrap();
        assert!(dirty.contains(Pfn(9)), "{tracking:?} missed a write");
        tracker.stop().unwrap();
    }
}

#[test]
fn cpuid_offers_no_nested_virtualization() {
    if !kvm("cpuid_offers_no_nested_virtualization") {
        return;
    }
    let cpuid = Vm::new(1, &ram(), Tracking::Auto).unwrap().host_cpuid().unwrap();
    let [_, _, ecx, _] = leaf(&cpuid, 1, 0).unwrap();
    assert_eq!(ecx & 1 << 5, 0, "VMX");
    let [_, _, ecx, _] = leaf(&cpuid, 0x8000_0001, 0).unwrap();
    assert_eq!(ecx & 1 << 2, 0, "SVM");
}

/// What a booted guest is given, its own host must be able to give again, or it could move nowhere.
#[test]
fn a_booted_guests_cpuid_is_covered_by_its_host() {
    if !kvm("a_booted_guests_cpuid_is_covered_by_its_host") {
        return;
    }
    let host = Host::open(Path::new(DEVICE)).unwrap().cpuid().unwrap();
    for vcpus in [1, 2, 3, 64] {
        for vcpu in [0, vcpus - 1] {
            let guest = crate::boot::cpuid(&host, vcpu, vcpus).unwrap();
            let lacking = lacking(|number, index| leaf(&guest, number, index), &host);
            assert!(lacking.is_empty(), "vCPU {vcpu} of {vcpus}: {lacking:?}");
        }
    }
}

fn pic(vm: &Vm) -> Vec<u8> {
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_PIC_MASTER,
        ..Default::default()
    };
    vm.fd().get_irqchip(&mut chip).unwrap();
    chip.as_bytes()[8..].to_vec()
}

/// `kvm_pic_state`: the byte of requests comes second.
const IRR: usize = 1;

#[test]
fn an_interrupt_and_the_timer_survive_in_a_fresh_vm() {
    if !kvm("an_interrupt_and_the_timer_survive_in_a_fresh_vm") {
        return;
    }
    let vm = Vm::new(1, &ram(), Tracking::Auto).unwrap();
    let irq = vm.irq(4).unwrap();
    assert_eq!(pic(&vm)[IRR] & 1 << 4, 0);
    irq.write(1).unwrap();
    let started = Instant::now();
    while pic(&vm)[IRR] & 1 << 4 == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "the interrupt never came");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut pit = vm.fd().get_pit2().unwrap();
    pit.channels[2].count = 0x1234;
    pit.channels[2].mode = 3;
    vm.fd().set_pit2(&pit).unwrap();

    let state = MachineState {
        sections: vm.save().unwrap(),
    };
    let there = Vm::new(1, &ram(), Tracking::Auto).unwrap();
    let mut incoming = Incoming::new(&state);
    there.restore(&mut incoming).unwrap();
    incoming.finish().unwrap();
    assert_ne!(pic(&there)[IRR] & 1 << 4, 0, "the pending interrupt");
    let pit = there.fd().get_pit2().unwrap();
    assert_eq!((pit.channels[2].count, pit.channels[2].mode), (0x1234, 3));
}

#[test]
fn a_doorbell_twice_in_one_place_is_refused_by_name() {
    if !kvm("a_doorbell_twice_in_one_place_is_refused_by_name") {
        return;
    }
    let vm = Vm::new(1, &ram(), Tracking::Auto).unwrap();
    let bell = EventFd::new(EFD_NONBLOCK).unwrap();
    vm.doorbell(&bell, 0xd000_0050, 0).unwrap();
    vm.doorbell(&bell, 0xd000_0050, 1).unwrap();
    let error = vm.doorbell(&bell, 0xd000_0050, 1).unwrap_err().to_string();
    assert!(error.contains("0xd0000050"), "{error}");
}
