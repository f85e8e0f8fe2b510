//! The device calls that are used: an `ioctl` is as many system calls as there are devices.
//!
//! A request is told by its type and number, the lower 16 bits. The upper ones hold the size of its argument, which grows
//! with the kernel's headers, and say nothing that a device would not check.

/// The bits of a request that tell which it is.
pub(crate) const WHICH: u64 = 0xffff;

/// Terminals and pipes: their settings and size, what waits in them, whether they block. Not what types into a terminal
/// (TIOCSTI), or selects in it (TIOCLINUX).
const TERMINAL: [u64; 12] = [
    0x5401, // TCGETS
    0x5402, // TCSETS
    0x5403, // TCSETSW
    0x5404, // TCSETSF
    0x540f, // TIOCGPGRP
    0x5411, // TIOCOUTQ, SIOCOUTQ
    0x5413, // TIOCGWINSZ
    0x541b, // FIONREAD
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
    0x542a, // TCGETS2
    0x542b, // TCSETS2
];

/// TCSETSW2 and TCSETSF2.
const TERMINAL_TOO: [u64; 2] = [0x542c, 0x542d];

/// SIOCOUTQNSD: what a socket has not sent yet.
const SOCKET: [u64; 1] = [0x894b];

/// Type 0xaa: what userfaultfd does for a tracker. No pages are made or moved.
const USERFAULT: [u64; 4] = [
    0xaa3f, // UFFDIO_API
    0xaa00, // UFFDIO_REGISTER
    0xaa01, // UFFDIO_UNREGISTER
    0xaa06, // UFFDIO_WRITEPROTECT
];

/// PAGEMAP_SCAN, of type 'f'.
const PAGEMAP: [u64; 1] = [0x6610];

/// Numbers of type 0xae, KVM: of the device, of a VM and of a vCPU.
const KVM: [u64; 45] = [
    0x00, // GET_API_VERSION
    0x01, // CREATE_VM
    0x02, // GET_MSR_INDEX_LIST
    0x03, // CHECK_EXTENSION
    0x04, // GET_VCPU_MMAP_SIZE
    0x05, // GET_SUPPORTED_CPUID
    0x41, // CREATE_VCPU
    0x42, // GET_DIRTY_LOG
    0x46, // SET_USER_MEMORY_REGION
    0x47, // SET_TSS_ADDR
    0x48, // SET_IDENTITY_MAP_ADDR
    0x60, // CREATE_IRQCHIP
    0x62, // GET_IRQCHIP
    0x63, // SET_IRQCHIP
    0x76, // IRQFD
    0x77, // CREATE_PIT2
    0x79, // IOEVENTFD
    0x7b, // SET_CLOCK
    0x7c, // GET_CLOCK
    0x80, // RUN
    0x81, // GET_REGS
    0x82, // SET_REGS
    0x83, // GET_SREGS
    0x84, // SET_SREGS
    0x85, // TRANSLATE
    0x88, // GET_MSRS
    0x89, // SET_MSRS
    0x8e, // GET_LAPIC
    0x8f, // SET_LAPIC
    0x90, // SET_CPUID2
    0x98, // GET_MP_STATE
    0x99, // SET_MP_STATE
    0x9f, // GET_PIT2, GET_VCPU_EVENTS
    0xa0, // SET_PIT2, SET_VCPU_EVENTS
    0xa1, // GET_DEBUGREGS
    0xa2, // SET_DEBUGREGS, SET_TSC_KHZ
    0xa3, // ENABLE_CAP, GET_TSC_KHZ
    0xa4, // GET_XSAVE
    0xa5, // SET_XSAVE
    0xa6, // GET_XCRS
    0xa7, // SET_XCRS
    0xad, // KVMCLOCK_CTRL
    0xc0, // CLEAR_DIRTY_LOG
    0xc7, // RESET_DIRTY_RINGS
    0xcf, // GET_XSAVE2
];

/// All of them.
pub(crate) fn used() -> impl Iterator<Item = u64> {
    // KVM's first: a vCPU's RUN is the call that is made most.
    let kvm = KVM.into_iter().map(|number| 0xae00 | number);
    kvm.chain(PAGEMAP)
        .chain(USERFAULT)
        .chain(SOCKET)
        .chain(TERMINAL)
        .chain(TERMINAL_TOO)
}
