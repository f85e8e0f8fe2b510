//! The only unsafe code of this crate: a vCPU's run page, and its extended register state.
//!
//! A vCPU's run page is shared with the kernel. `kvm-ioctls` has a mapping of its own for the thread that runs the vCPU;
//! here is a second one, so that another thread can set `immediate_exit` while the vCPU runs, and no Rust reference to the
//! page is ever written behind.

use crate::{Error, Result};
use kvm_bindings::{
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, Xsave, kvm_run, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};
use vmm_sys_util::fam::FamStruct;

/// A second mapping of a vCPU's run page.
#[derive(Debug)]
pub(super) struct RunPage {
    page: NonNull<kvm_run>,
}

// SAFETY: the page is reached by an atomic and by volatile reads only, and stays mapped as long as this lives.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

/// Why KVM gave up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InternalError {
    pub(super) suberror: u32,
    pub(super) data: Vec<u64>,
    /// The bytes of the instruction that could not be emulated, where KVM says them.
    pub(super) instruction: Option<Vec<u8>>,
}

impl RunPage {
    pub(super) fn map(vcpu: &VcpuFd) -> io::Result<RunPage> {
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_of::<kvm_run>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(page).filter(|page| page.as_ptr() != libc::MAP_FAILED) {
            Some(page) => Ok(RunPage { page: page.cast() }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Whether `KVM_RUN` is to return at once, having completed the exit before. From any thread.
    pub(super) fn set_immediate_exit(&self, exit: bool) {
        // SAFETY: the field lies within the mapping, which lives as long as self; in this process it is reached by this
        // atomic alone, and the kernel reads it as a whole.
        let flag = unsafe { AtomicU8::from_ptr(&raw mut (*self.page.as_ptr()).immediate_exit) };
        flag.store(u8::from(exit), Ordering::Release);
    }

    /// Bytes an access to a port, after an exit for one: `data` of it may hold several.
    pub(super) fn port_access_bytes(&self) -> usize {
        // SAFETY: within the mapping; any bytes are a number. The kernel writes it in KVM_RUN, which has returned.
        let size = unsafe { (&raw const (*self.page.as_ptr()).__bindgen_anon_1.io.size).read_volatile() };
        usize::from(size)
    }

    /// Why KVM gave up, after such an exit.
    pub(super) fn internal_error(&self) -> InternalError {
        // SAFETY: both lie within the mapping and hold plain numbers; whatever of the union the kernel used, its bytes are
        // there. It writes them in KVM_RUN, which has returned.
        let (internal, emulation) = unsafe {
            let exit = &raw const (*self.page.as_ptr()).__bindgen_anon_1;
            (
                (&raw const (*exit).internal).read_volatile(),
                (&raw const (*exit).emulation_failure).read_volatile(),
            )
        };
        let has_flags = internal.suberror == KVM_INTERNAL_ERROR_EMULATION && internal.ndata > 0;
        let has_bytes = u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
        let instruction = (has_flags && emulation.flags & has_bytes != 0).then(|| {
            // SAFETY: the union has one member, all of it bytes.
            let bytes = unsafe { emulation.__bindgen_anon_1.__bindgen_anon_1 };
            let len = usize::from(bytes.insn_size).min(bytes.insn_bytes.len());
            bytes.insn_bytes[..len].to_vec()
        });
        InternalError {
            suberror: internal.suberror,
            data: internal.data.iter().copied().take(internal.ndata as usize).collect(),
            instruction: instruction.filter(|bytes| !bytes.is_empty()),
        }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody reaches any more.
        let result = unsafe { libc::munmap(self.page.as_ptr().cast(), size_of::<kvm_run>()) };
        debug_assert_eq!(result, 0);
    }
}

/// Room for `bytes` of extended register state.
fn room(bytes: usize) -> Result<Xsave> {
    let more = bytes.saturating_sub(size_of::<kvm_xsave>());
    Xsave::new(more.div_ceil(size_of::<u32>()))
        .map_err(|e| Error::Condition(format!("{bytes} bytes of extended register state: {e:?}")))
}

/// A vCPU's extended register state, `bytes` of it: what KVM says it has.
pub(super) fn get_xsave(vcpu: &VcpuFd, bytes: usize, xsave2: bool) -> Result<Vec<u8>> {
    let mut xsave = room(bytes)?;
    let doing = "reading the extended register state";
    if xsave2 {
        // SAFETY: KVM writes as many bytes as its capability XSAVE2 says, and `bytes` is at least that. This process asks
        // for no features that would make it more.
        unsafe { vcpu.get_xsave2(&mut xsave) }.map_err(|e| Error::kvm(doing, e))?;
    } else {
        let old = vcpu.get_xsave().map_err(|e| Error::kvm(doing, e))?;
        // SAFETY: the length of the flexible part stays as it is.
        unsafe { xsave.as_mut_fam_struct() }.xsave.region = old.region;
    }
    let whole = xsave.as_fam_struct_ref();
    let words = whole.xsave.region.iter().chain(whole.as_slice());
    Ok(words.flat_map(|word| word.to_le_bytes()).take(bytes).collect())
}

/// Sets a vCPU's extended register state. `state` has at most `bytes`, which is what KVM says it has; the rest is zero.
pub(super) fn set_xsave(vcpu: &VcpuFd, state: &[u8], bytes: usize) -> std::result::Result<(), String> {
    if state.len() > bytes {
        return Err(format!("{} bytes came, this host has room for {bytes}", state.len()));
    }
    let mut xsave = room(bytes).map_err(|e| e.to_string())?;
    let word = |at: usize| {
        let at = at * 4;
        let mut word = [0; 4];
        for (to, from) in word.iter_mut().zip(state.iter().skip(at)) {
            *to = *from;
        }
        u32::from_le_bytes(word)
    };
    // SAFETY: the length of the flexible part stays as it is.
    let whole = unsafe { xsave.as_mut_fam_struct() };
    let region = whole.xsave.region.len();
    for (at, to) in whole.xsave.region.iter_mut().enumerate() {
        *to = word(at);
    }
    for (at, to) in whole.as_mut_slice().iter_mut().enumerate() {
        *to = word(region + at);
    }
    // SAFETY: KVM reads as many bytes as its capability XSAVE2 says, and there is room for that.
    unsafe { vcpu.set_xsave2(&xsave) }.map_err(|e| e.to_string())
}
