//! vCPUs on this machine's own KVM, with guests of a few bytes in real mode.

mod ends;
mod garbage;
mod pause;
mod restore;

use super::*;
use crate::Tracking;
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state};
use machine::MachineState;
use memory::Backing;
use memory::GuestMemory;
use pages::Layout;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// RAM ends here; behind it are devices.
const RAM_END: u64 = 0x8_0000;
/// Where code starts.
const CODE: u64 = 0x1000;
/// Where vCPU n counts: a page each.
const COUNTERS: u64 = 0x2000;

/// `inc dword [bx]; inc ecx; jmp` back.
const COUNT: [u8; 7] = [0x66, 0xff, 0x07, 0x66, 0x41, 0xeb, 0xf9];

/// Runs `test` if there is a KVM, and says loudly if not. It runs in a thread of its own: a hang is a failure, not a wait
/// without end.
fn on_kvm(name: &str, test: impl FnOnce() + Send + 'static) {
    if let Err(error) = Host::open(std::path::Path::new(crate::kvm::DEVICE)) {
        eprintln!("SKIPPED: {name}: {error}");
        return;
    }
    let test = std::thread::spawn(test);
    let started = Instant::now();
    while !test.is_finished() {
        assert!(started.elapsed() < PATIENCE * 5, "it hangs");
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
    }
}

type OnRead = Box<dyn Fn(u32) + Send>;

/// Reads of anything give 1, 2, 3, ...; writes are noted.
#[derive(Default)]
struct Counting {
    reads: AtomicU32,
    written: Mutex<Vec<(u64, Vec<u8>)>>,
    /// Called with the number of a read, before it is answered.
    on_read: Mutex<Option<OnRead>>,
}

impl Counting {
    fn read(&self, data: &mut [u8]) {
        let number = self.reads.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(call) = &*self.on_read.lock().unwrap() {
            call(number);
        }
        for (to, from) in data.iter_mut().zip(number.to_le_bytes()) {
            *to = from;
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        self.written.lock().unwrap().push((address, data.to_vec()));
    }
}

impl Exits for Counting {
    fn port_read(&self, _: u16, data: &mut [u8]) {
        self.read(data);
    }
    fn port_write(&self, port: u16, data: &[u8]) {
        self.write(port.into(), data);
    }
    fn memory_read(&self, _: u64, data: &mut [u8]) {
        self.read(data);
    }
    fn memory_write(&self, address: u64, data: &[u8]) {
        self.write(address, data);
    }
}

/// A VM with its vCPUs. The order of the fields is that in which they have to go.
struct Guest {
    vcpus: Vcpus,
    vm: Vm,
    ram: Arc<GuestMemory>,
    exits: Arc<Counting>,
    ending: Ending,
}

impl Guest {
    /// Nothing in it.
    fn empty(vcpus: u32) -> Guest {
        Guest::with(vcpus, RAM_END, Tracking::Auto)
    }

    fn with(vcpus: u32, ram_bytes: u64, tracking: Tracking) -> Guest {
        let layout = Arc::new(Layout::pc(ram_bytes / pages::PAGE_BYTES).unwrap());
        let ram = Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap());
        let vm = Vm::new(vcpus, &ram, tracking).unwrap();
        let cpuids = vec![vm.host_cpuid().unwrap(); vcpus as usize];
        let exits = Arc::new(Counting::default());
        let ending = Ending::default();
        let as_exits: Arc<dyn Exits> = Arc::clone(&exits) as Arc<dyn Exits>;
        let vcpus = Vcpus::start(&vm, cpuids, as_exits, ending.clone()).unwrap();
        Guest {
            vcpus,
            vm,
            ram,
            exits,
            ending,
        }
    }

    /// `code` for all vCPUs, at [`CODE`]; vCPU n has the address of its counter in EBX. `change` may set more of vCPU 0.
    fn new(vcpus: u32, code: &[u8], change: impl Fn(&mut kvm_sregs, &mut kvm_regs)) -> Guest {
        let guest = Guest::empty(vcpus);
        guest.load(code, change);
        guest
    }

    fn load(&self, code: &[u8], change: impl Fn(&mut kvm_sregs, &mut kvm_regs)) {
        self.ram.write(CODE, code).unwrap();
        for index in 1..self.vcpus.fds.len() {
            let fd = lock(&self.vcpus.fds[index]);
            let (mut sregs, mut regs) = (fd.get_sregs().unwrap(), fd.get_regs().unwrap());
            real_mode(index, &mut sregs, &mut regs);
            fd.set_sregs(&sregs).unwrap();
            fd.set_regs(&regs).unwrap();
            let runs = kvm_mp_state {
                mp_state: KVM_MP_STATE_RUNNABLE,
            };
            fd.set_mp_state(runs).unwrap();
        }
        let first = |sregs: &mut kvm_sregs, regs: &mut kvm_regs| {
            real_mode(0, sregs, regs);
            change(sregs, regs);
            Ok(())
        };
        self.vcpus.set_first_state(first).unwrap();
    }

    fn count(&self, vcpu: u64) -> u32 {
        let mut bytes = [0; 4];
        self.ram.read(COUNTERS + vcpu * 0x1000, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn regs(&self, vcpu: usize) -> kvm_regs {
        lock(&self.vcpus.fds[vcpu]).get_regs().unwrap()
    }

    /// All sections, in the order of a machine.
    fn save(&self) -> MachineState {
        let mut sections = self.vcpus.save().unwrap();
        sections.extend(self.vm.save().unwrap());
        MachineState { sections }
    }

    fn try_restore(&self, state: &MachineState) -> Result<()> {
        let mut incoming = Incoming::new(state);
        self.vcpus.restore(&mut incoming)?;
        self.vm.restore(&mut incoming)?;
        incoming.finish()
    }

    /// The same guest on another VM, as a migration would have it there.
    fn moved(&self) -> Guest {
        let vcpus = u32::try_from(self.vcpus.fds.len()).unwrap();
        let there = Guest::empty(vcpus);
        let mut all = vec![0; usize::try_from(RAM_END).unwrap()];
        self.ram.read(0, &mut all).unwrap();
        there.ram.write(0, &all).unwrap();
        there.try_restore(&self.save()).unwrap();
        there
    }

    /// Waits until `what`.
    fn until(&self, what: impl Fn() -> bool) {
        let started = Instant::now();
        while !what() {
            assert!(self.ending.get().is_none(), "{:?}", self.ending.get());
            assert!(started.elapsed() < PATIENCE, "in vain");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until vCPU `vcpu` has counted on.
    fn until_it_counts(&self, vcpu: u64) {
        let before = self.count(vcpu);
        self.until(|| self.count(vcpu) != before);
    }
}

fn real_mode(index: usize, sregs: &mut kvm_sregs, regs: &mut kvm_regs) {
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    regs.rip = CODE;
    regs.rflags = 2;
    regs.rsp = 0x7000;
    regs.rbx = COUNTERS + index as u64 * 0x1000;
}

/// 32-bit protected mode with flat segments and no interrupt table.
fn flat(sregs: &mut kvm_sregs) {
    sregs.cr0 |= 1;
    sregs.idt.limit = 0;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.limit, segment.type_) = (0, 0xffff_ffff, 3);
        (segment.s, segment.db, segment.g, segment.present) = (1, 1, 1, 1);
    }
    sregs.cs.type_ = 0xb;
}
