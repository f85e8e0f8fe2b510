//! A guest of a few instructions under the host's own KVM, whose vCPUs write what they are told to.
#![allow(dead_code, clippy::unwrap_used)]

use super::skipped;
use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use memory::kvm::{KvmRing, KvmSlots, capabilities};
use memory::{Backing, GuestMemory};
use pages::{Layout, PageRange, Pfn};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// Where the guest's code lies: past the RAM of every test, in a slot of its own whose writes nobody logs.
const CODE_PFN: u64 = 1 << 18;

/// 32-bit code. One write of eight bytes; the same word into many pages, with a pause after each.
const CODE: [u8; 23] = [
    0x89, 0x37, // 0: mov [edi], esi
    0x89, 0x57, 0x04, // mov [edi + 4], edx
    0xf4, // hlt
    0x89, 0x37, // 6: mov [edi], esi
    0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
    0x89, 0xd8, // mov eax, ebx
    0x48, // 16: dec eax
    0x75, 0xfd, // jnz 16
    0x49, // dec ecx
    0x75, 0xf0, // jnz 6
    0xf4, // hlt
];
/// Turns of the pause of a guest with rings. A KVM that emulates instructions may run a thousand of them before it looks
/// whether a ring is full, and has room for 64 pages by then.
const RING_PAUSE: u64 = 16;
const ONE: u64 = 0;
const MANY: u64 = 6;

/// A VM with the RAM of a test, and vCPUs that stand still until they are told to write.
pub(crate) struct Guest {
    pub(crate) slots: Arc<KvmSlots>,
    pub(crate) ring: Option<Arc<KvmRing>>,
    pub(crate) vcpus: Vec<Mutex<VcpuFd>>,
    /// Times that a ring was full.
    pub(crate) full: AtomicU64,
    code: GuestMemory,
}

/// A new VM; `None`, after saying so, where the host has no KVM.
pub(crate) fn vm(test: &str) -> Option<Arc<VmFd>> {
    match Kvm::new().and_then(|kvm| kvm.create_vm()) {
        Ok(vm) => Some(Arc::new(vm)),
        Err(e) => {
            skipped(&format!("{test}: /dev/kvm: {e}"));
            None
        }
    }
}

/// The smallest ring that this host's KVM gives a new VM.
fn smallest_ring(vm: &Arc<VmFd>) -> Arc<KvmRing> {
    let sizes = (8..=16).map(|bits| 1 << bits);
    sizes
        .map(|entries| KvmRing::enable(vm, entries))
        .find_map(Result::ok)
        .unwrap()
}

impl Guest {
    /// A guest with `memory` as its RAM; `None`, after saying so, where the host has no KVM, or no rings if one is wanted.
    pub(crate) fn new(test: &str, memory: &Arc<GuestMemory>, vcpus: u64, ring: bool) -> Option<Arc<Guest>> {
        let vm = vm(test)?;
        if ring && capabilities(&vm).ring_entries == 0 {
            skipped(&format!("{test}: this host's KVM has no dirty ring"));
            return None;
        }
        let slots = KvmSlots::register(&vm, memory).unwrap();
        let ring = ring.then(|| smallest_ring(&vm));
        let layout = Layout::new(vec![PageRange::new(Pfn(CODE_PFN), 1).unwrap()]).unwrap();
        let code = GuestMemory::new(Arc::new(layout), &Backing::Anonymous).unwrap();
        code.write(CODE_PFN * 4096, &CODE).unwrap();
        let region = kvm_userspace_memory_region {
            slot: slots.count(),
            guest_phys_addr: CODE_PFN * 4096,
            memory_size: 4096,
            userspace_addr: code
                .vm_memory()
                .get_host_address(GuestAddress(CODE_PFN * 4096))
                .unwrap() as u64,
            flags: 0,
        };
        // SAFETY: `code` lives as long as the vCPUs, which are all that reaches it.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        let vcpus = (0..vcpus).map(|index| {
            let vcpu = vm.create_vcpu(index).unwrap();
            if let Some(ring) = &ring {
                ring.add_vcpu(index.try_into().unwrap(), &vcpu).unwrap();
            }
            flat(&vcpu);
            Mutex::new(vcpu)
        });
        Some(Arc::new(Guest {
            vcpus: vcpus.collect(),
            slots,
            ring,
            full: AtomicU64::new(0),
            code,
        }))
    }

    /// Has a vCPU write eight bytes.
    pub(crate) fn write(&self, vcpu: usize, address: u64, value: u64) {
        self.run(vcpu, ONE, address, value, 0);
    }

    /// Has a vCPU write a word at `address` and at the same place of the next pages, `count` in all, in one go.
    pub(crate) fn write_all(&self, vcpu: usize, address: u64, count: u64, value: u32) {
        self.run(vcpu, MANY, address, value.into(), count);
    }

    fn run(&self, vcpu: usize, entry: u64, address: u64, value: u64, count: u64) {
        let mut vcpu = self.vcpus[vcpu].lock().unwrap();
        let regs = kvm_regs {
            rip: CODE_PFN * 4096 + entry,
            rflags: 2,
            rdi: address,
            rsi: value & 0xffff_ffff,
            rdx: value >> 32,
            rcx: count,
            rbx: if self.ring.is_some() { RING_PAUSE } else { 1 },
            ..Default::default()
        };
        vcpu.set_regs(&regs).unwrap();
        self.until_halt(&mut vcpu);
    }

    fn until_halt(&self, vcpu: &mut MutexGuard<'_, VcpuFd>) {
        loop {
            match vcpu.run() {
                Ok(VcpuExit::Hlt) => return,
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    self.full.fetch_add(1, Ordering::Relaxed);
                    self.ring.as_ref().unwrap().on_full().unwrap();
                }
                Ok(VcpuExit::Intr) => {}
                Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
                other => panic!("the guest came out with {other:?}"),
            }
        }
    }
}

/// Protected mode, flat segments, no paging: a guest that writes nothing but what it is told to.
fn flat(vcpu: &VcpuFd) {
    let segment = |type_: u8, selector: u16| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs = segment(11, 8);
    let data = segment(3, 16);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs).unwrap();
}
