//! Guest RAM as KVM's user memory slots: one a region, numbered from 0 in layout order.
//!
//! Invariant: as long as a slot is registered, its memory stays mapped. Slots are deleted before the memory goes; where KVM
//! would not delete one, the memory is never unmapped.

use crate::error::{Error, Result};
use crate::ram::GuestMemory;
use crate::sys::{kvm, size};
use kvm_ioctls::VmFd;
use pages::{BitmapError, PageRange, PageSet};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages whose log is cleared by one call: 64 MiB. KVM holds its MMU lock for all of it, and vCPUs wait for that.
const CLEAR_PAGES: usize = 1 << 14;

/// Guest RAM that was given to a VM. Keeps both alive; when it goes, the VM has no RAM any more.
#[derive(Debug)]
pub struct KvmSlots {
    vm: Arc<VmFd>,
    /// Dropped by our own drop, if no slot needs it any more.
    memory: ManuallyDrop<Arc<GuestMemory>>,
    /// How many slots KVM has taken, from the first on.
    registered: u32,
    /// Whether a tracker has the log now.
    taken: AtomicBool,
}

impl KvmSlots {
    /// Registers all of `memory` with `vm`: region `i` of its layout becomes slot `i`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] for memory that cannot be written; [`Error::Sys`] where KVM refuses a slot: too many of them, or
    /// one over another.
    pub fn register(vm: &Arc<VmFd>, memory: &Arc<GuestMemory>) -> Result<Arc<KvmSlots>> {
        for region in memory.layout().regions() {
            memory.check_writable(*region)?;
        }
        // From here on every early return deletes what was registered.
        let mut slots = KvmSlots {
            vm: Arc::clone(vm),
            memory: ManuallyDrop::new(Arc::clone(memory)),
            registered: 0,
            taken: AtomicBool::new(false),
        };
        for (slot, pages) in (0..).zip(memory.layout().regions().iter().copied()) {
            slots.set(slot, pages, false).map_err(|e| {
                let doing = format!("giving pages {pages} of guest RAM to KVM as memory slot {slot}");
                Error::sys(doing, e)
            })?;
            slots.registered += 1;
        }
        Ok(Arc::new(slots))
    }

    /// The VM.
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// How many slots there are; the numbers from here on are free.
    pub fn count(&self) -> u32 {
        // A layout has at most 512 regions.
        u32::try_from(self.memory.layout().regions().len()).unwrap_or(u32::MAX)
    }

    /// Every slot with its pages.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, PageRange)> + '_ {
        (0..).zip(self.memory.layout().regions().iter().copied())
    }

    /// The pages of slot `slot`, if it is one of ours.
    pub(crate) fn pages_of(&self, slot: u32) -> Option<PageRange> {
        let index = usize::try_from(slot).ok()?;
        self.memory.layout().regions().get(index).copied()
    }

    fn set(&self, slot: u32, pages: PageRange, log: bool) -> std::io::Result<()> {
        let place = self.memory.place(pages).map_err(Error::into_io)?;
        // SAFETY: all of a region lies there, mapped for as long as we hold `memory`: see drop.
        unsafe { kvm::set_slot(&self.vm, slot, pages, place.addr, log) }
    }

    /// Takes the log for one tracker; false if another has it.
    pub(crate) fn take_log(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Lets another tracker take the log.
    pub(crate) fn release_log(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// Switches the log of every slot on, or leaves all off.
    pub(crate) fn start_logging(&self) -> Result<()> {
        for (slot, pages) in self.all() {
            if let Err(e) = self.set(slot, pages, true) {
                let error = Error::sys(
                    format!("switching on the dirty log of memory slot {slot} (pages {pages})"),
                    e,
                );
                if let Err(also) = self.stop_logging() {
                    tracing::warn!(error = %also, "after a dirty log could not be switched on");
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Switches the log of every slot off, also after one that KVM would not; the first error.
    pub(crate) fn stop_logging(&self) -> Result<()> {
        let mut result = Ok(());
        for (slot, pages) in self.all() {
            if let Err(e) = self.set(slot, pages, false) {
                let error = Error::sys(
                    format!("switching off the dirty log of memory slot {slot} (pages {pages})"),
                    e,
                );
                result = result.and(Err(error));
            }
        }
        result
    }

    /// Reads the dirty log of a slot, and puts its pages into `dirty`.
    pub(crate) fn read_log(&self, slot: u32, pages: PageRange, dirty: &mut PageSet) -> Result<Vec<u64>> {
        let words = kvm::get_dirty_log(&self.vm, slot, pages.count()).map_err(|e| {
            Error::sys(
                format!("reading the dirty log of memory slot {slot} (pages {pages})"),
                e,
            )
        })?;
        add_bits(slot, pages, &words, dirty)?;
        Ok(words)
    }

    /// Clears in the dirty log of a slot what `words` has, a bit a page from the slot's first on, and nothing else.
    pub(crate) fn clear_log(&self, slot: u32, pages: PageRange, words: &[u64]) -> Result<()> {
        check_words(slot, pages, words)?;
        let mut first = 0u64;
        for chunk in words.chunks(CLEAR_PAGES / 64) {
            // Ends in the middle of a word only where the slot does, as KVM asks for.
            let count = (chunk.len() as u64 * 64).min(pages.count() - first);
            if chunk.iter().any(|word| *word != 0) {
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                kvm::clear_dirty_log(&self.vm, slot, first, count, chunk).map_err(|e| {
                    let doing = format!("clearing {count} pages from page {first} on in the dirty log of slot {slot}");
                    Error::sys(doing, e)
                })?;
            }
            first += count;
        }
        Ok(())
    }
}

impl Drop for KvmSlots {
    fn drop(&mut self) {
        let mut keep = false;
        for (slot, pages) in self.all().take(size(self.registered.into())) {
            let none = PageRange::between(pages.start(), pages.start());
            // SAFETY: a slot without a page needs no memory.
            if let Err(e) = unsafe { kvm::set_slot(&self.vm, slot, none, 0, false) } {
                tracing::warn!(error = %e, slot, "deleting a memory slot: guest RAM stays mapped");
                keep = true;
            }
        }
        if !keep {
            // SAFETY: not used again: this is the end of drop.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// Refuses a bitmap that does not have a bit for every page of the slot.
fn check_words(slot: u32, pages: PageRange, words: &[u64]) -> Result<()> {
    let (expected, got) = (pages.count().div_ceil(64) * 8, words.len() as u64 * 8);
    if got == expected {
        return Ok(());
    }
    let source = BitmapError {
        pages: pages.count(),
        expected,
        got,
    };
    Err(Error::SlotBitmap { slot, source })
}

/// Puts the pages whose bits are set into `dirty`. Bits past the slot's last page name none, and least of all a page of the
/// next slot.
fn add_bits(slot: u32, pages: PageRange, words: &[u64], dirty: &mut PageSet) -> Result<()> {
    check_words(slot, pages, words)?;
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(size(pages.count().div_ceil(8)));
    let odd = pages.count() % 8;
    if let (Some(last), 1..) = (bytes.last_mut(), odd) {
        *last &= (1 << odd) - 1;
    }
    dirty.insert_bitmap(pages.start(), &bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;
    use crate::kvm::capabilities;
    use pages::{Layout, Pfn};

    fn r(start: u64, count: u64) -> PageRange {
        PageRange::new(Pfn(start), count).unwrap()
    }

    fn layout() -> Arc<Layout> {
        Arc::new(Layout::new(vec![r(0, 131), r(131, 67), r(1000, 16_384 + 67)]).unwrap())
    }

    #[test]
    fn case_23_clearing_parts_of_a_slot_clears_only_those_bits() {
        let vm = match kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()) {
            Ok(vm) => Arc::new(vm),
            Err(e) => return eprintln!("\n*** SKIPPED: case_23: /dev/kvm: {e} ***\n"),
        };
        if !capabilities(&vm).initially_set {
            return eprintln!("\n*** SKIPPED: case_23: this host's KVM has no log that is initially all set ***\n");
        }
        let memory = Arc::new(GuestMemory::new(layout(), &Backing::Anonymous).unwrap());
        let slots = KvmSlots::register(&vm, &memory).unwrap();
        kvm::set_manual_protect(&vm, 3).unwrap();
        slots.start_logging().unwrap();
        let mut expected = PageSet::full(memory.layout());
        let check = |expected: &PageSet| {
            let mut got = PageSet::empty(memory.layout());
            for (slot, pages) in slots.all() {
                slots.read_log(slot, pages, &mut got).unwrap();
            }
            assert_eq!(got, *expected);
        };
        check(&expected);
        // In the middle; at the end, in a word that the slot does not fill; past the first chunk; and again.
        for (slot, word, bits, cleared) in [
            (0, 1, 0b1010u64, vec![65, 67]),
            (0, 2, 0b100 | !0b111, vec![130]),
            (0, 0, 1 << 63, vec![63]),
            (2, 0, 1, vec![1000]),
            (2, 256, 1, vec![1000 + 16_384]),
            (2, 257, !0b11, vec![1000 + 16_384 + 66]),
            (0, 1, 0b1010, vec![]),
        ] {
            let pages = slots.pages_of(slot).unwrap();
            let mut words = vec![0; size(pages.count().div_ceil(64))];
            words[word] = bits;
            slots.clear_log(slot, pages, &words).unwrap();
            for pfn in cleared {
                assert!(expected.remove(Pfn(pfn)));
            }
            check(&expected);
        }
        slots.stop_logging().unwrap();
    }

    #[test]
    fn case_28_a_bitmap_of_another_length_is_refused_and_bits_past_the_end_name_nothing() {
        let layout = layout();
        let mut dirty = PageSet::empty(&layout);
        for wrong in [0, 2, 4] {
            let text = add_bits(0, r(0, 131), &vec![u64::MAX; wrong], &mut dirty)
                .unwrap_err()
                .to_string();
            assert!(
                text.contains(" 24 bytes") && text.contains(&format!("has {}", wrong * 8)),
                "{text}"
            );
        }
        assert!(dirty.is_empty());
        // Pages 131 and on are the next slot's.
        add_bits(0, r(0, 131), &[1, 0, !0b11], &mut dirty).unwrap();
        assert_eq!(dirty.runs().collect::<Vec<_>>(), [r(0, 1), r(130, 1)]);
        let vm = match kvm_ioctls::Kvm::new().and_then(|kvm| kvm.create_vm()) {
            Ok(vm) => Arc::new(vm),
            Err(e) => return eprintln!("\n*** SKIPPED: case_28, its second half: /dev/kvm: {e} ***\n"),
        };
        let memory = Arc::new(GuestMemory::new(layout, &Backing::Anonymous).unwrap());
        let slots = KvmSlots::register(&vm, &memory).unwrap();
        for wrong in [2, 4] {
            let error = slots.clear_log(0, r(0, 131), &vec![0; wrong]).unwrap_err();
            assert!(matches!(error, Error::SlotBitmap { slot: 0, .. }), "{error}");
            let error = kvm::clear_dirty_log(&vm, 0, 0, 131, &vec![0; wrong]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}
