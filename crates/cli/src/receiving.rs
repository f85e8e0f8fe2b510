//! What a receiver makes ready for the guest that comes: memory and a machine like the source's.
//!
//! The source's configuration comes from a peer: its kind, its size and all else is checked before memory is mapped, and
//! what does not fit is refused with a reason that the source prints. A RAM file that lies there is emptied only for a
//! guest that was accepted: its description is tried out on anonymous memory first, which stays untouched and so takes
//! none, and a source that only asks gets no further.

use crate::guest::{available_bytes, flat, refused};
use crate::linux_flags::DirtyTrackerChoice;
use crate::slot::GuestSlot;
use crate::tamper::{TamperedMachine, TamperedRam};
use crate::{ConsoleLine, Corrupt, Error, FileMachine, PreallocFor, RecvFlags, RefuseState, file_guest, human_bytes};
use machine::{GuestRam, MachineConfig, NoBalloon};
use memory::trackers::NullTracker;
use memory::{Backing, GuestMemory};
use pageferry::Guest;
use pages::{Layout, PAGE_BYTES};
use softguest::SoftGuest;
use std::fs::{OpenOptions, TryLockError};
use std::path::PathBuf;
use std::sync::Arc;
use vmm::{LinuxGuest, StateFault};

/// The kinds of machine, as their descriptions call them.
const SOFT: &str = "soft";
const LINUX: &str = "linux";

/// What `--prealloc` populates without `--max-memory`: the RAM of a guest that `migrate-send` starts unless told otherwise.
const PREALLOC_BYTES: u64 = 8 << 30;

/// Makes guests like those that come.
#[derive(Debug)]
pub struct Receiving {
    ram_file: RamFile,
    pool: Option<Arc<GuestMemory>>,
    corrupt: Option<Corrupt>,
    refuse_state: Option<RefuseState>,
    dirty_tracker: Option<DirtyTrackerChoice>,
    console: ConsoleLine,
    slot: GuestSlot,
}

/// The RAM file of a receiver, if it has one.
#[derive(Clone, Debug)]
pub struct RamFile {
    path: Option<PathBuf>,
    was_there: bool,
}

impl RamFile {
    /// Removes a RAM file that this receiver made, when no guest came into it.
    pub fn remove_if_ours(&self) {
        if let Some(path) = self.path.as_deref().filter(|_| !self.was_there) {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!("the unfinished RAM file {} stays: {error}", path.display());
                }
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Finds out whether RAM could be rebuilt in the file, and leaves it as it is.
    fn check(&self) -> Result<(), String> {
        let Some(path) = self.path.as_deref() else {
            return Ok(());
        };
        let shown = path.display();
        let failed = |error: std::io::Error| format!("opening RAM file {shown} to write: {error}");
        let is_new = match std::fs::metadata(path) {
            Ok(meta) if !meta.is_file() => {
                return Err(format!("{shown} is not a regular file: RAM cannot be rebuilt in it"));
            }
            Ok(_) => false,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
            Err(error) => return Err(failed(error)),
        };
        let mut how = OpenOptions::new();
        let file = how
            .read(true)
            .write(true)
            .create_new(is_new)
            .open(path)
            .map_err(failed)?;
        if is_new {
            return std::fs::remove_file(path).map_err(failed);
        }
        match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(format!("RAM file {shown} is in use by another process")),
            Err(TryLockError::Error(error)) => Err(format!("locking RAM file {shown}: {error}")),
        }
    }

    fn backing(&self) -> Backing {
        self.path.as_ref().map_or(Backing::Anonymous, Backing::create_file)
    }
}

impl Receiving {
    /// Makes ready what can be made ready before a source comes: populates memory, if that was asked for.
    ///
    /// # Errors
    /// [`Error::Refused`] where the host has too little memory, or the RAM file cannot be had.
    pub fn new(flags: &RecvFlags, console: ConsoleLine) -> Result<Self, Error> {
        let path = flags.ram.clone();
        let was_there = path.as_ref().is_some_and(|path| path.exists());
        let ram_file = RamFile { path, was_there };
        let pool = match flags.prealloc {
            Some(kind) => {
                let bytes = flags.max_memory.map_or(PREALLOC_BYTES, |size| size.0);
                let layout = match kind {
                    PreallocFor::Soft => flat(bytes)?,
                    PreallocFor::Linux => Layout::pc(bytes / PAGE_BYTES).map_err(refused)?,
                };
                let memory = GuestMemory::new(Arc::new(layout), &ram_file.backing());
                let populated = memory.and_then(|memory| memory.populate_all().map(|()| memory));
                Some(Arc::new(populated.map_err(|error| {
                    ram_file.remove_if_ours();
                    Error::Refused(format!("--prealloc: {error}"))
                })?))
            }
            None => None,
        };
        Ok(Receiving {
            ram_file,
            pool,
            corrupt: flags.corrupt_page,
            refuse_state: flags.refuse_state,
            dirty_tracker: flags.dirty_tracker,
            console,
            slot: GuestSlot::default(),
        })
    }

    /// Where the guest that comes can be found.
    pub fn slot(&self) -> GuestSlot {
        self.slot.clone()
    }

    /// The file that RAM is rebuilt in.
    pub fn ram_file(&self) -> RamFile {
        self.ram_file.clone()
    }

    /// Makes a paused guest like `config` says, or gives the reasons why not, each a sentence that the source prints. For
    /// a `dry_run` it is one that can be looked at, and all that lies here stays as it is.
    ///
    /// # Errors
    /// The reasons.
    pub fn prepare(&mut self, config: &MachineConfig, dry_run: bool) -> Result<Guest, Vec<String>> {
        // A source that came before, and only asked, may have left one: its RAM file would be in use.
        self.slot.clear();
        if dry_run {
            // The file of a pool is locked already, by this process.
            if self.pool.is_none() {
                self.ram_file.check().map_err(|reason| vec![reason])?;
            }
            return self.try_out(config);
        }
        if self.ram_file.path.is_some() {
            drop(self.try_out(config)?);
            self.slot.clear();
        }
        self.make(config)
    }

    /// Makes a guest like `config` says in memory that costs nothing, or says what cannot be made like that.
    fn try_out(&mut self, config: &MachineConfig) -> Result<Guest, Vec<String>> {
        let one = |reason| vec![reason];
        self.check_kind(config).map_err(one)?;
        let memory = new_memory(&config.layout, &Backing::Anonymous).map_err(one)?;
        let guest = self.guest_in(memory, config, ConsoleLine::nowhere())?;
        let made = config.mismatches(&guest.machine.config());
        if made.is_empty() {
            return Ok(guest);
        }
        drop(guest);
        self.slot.clear();
        Err(made.iter().map(ToString::to_string).collect())
    }

    fn make(&mut self, config: &MachineConfig) -> Result<Guest, Vec<String>> {
        let one = |reason| vec![reason];
        self.check_kind(config).map_err(one)?;
        let ram = self.memory(&config.layout).map_err(one)?;
        let console = match config.kind.as_str() {
            LINUX => self
                .console
                .guest_end()
                .map_err(|error| vec![format!("the console of the receiver's guest: {error}")])?,
            _ => ConsoleLine::nowhere(),
        };
        let mut guest = self.guest_in(Arc::clone(&ram), config, console)?;
        match self.corrupt {
            None => {}
            Some(Corrupt::BeforeVerify) => guest.ram = Arc::new(TamperedRam::new(ram)),
            Some(Corrupt::AfterVerify) => {
                let slot = self.slot.clone();
                let then = move || slot.flip_bytes();
                guest.machine = Box::new(TamperedMachine {
                    inner: guest.machine,
                    then: Box::new(then),
                });
            }
        }
        Ok(guest)
    }

    fn guest_in(
        &self,
        ram: Arc<GuestMemory>,
        config: &MachineConfig,
        console: vmm::Console,
    ) -> Result<Guest, Vec<String>> {
        if config.kind == SOFT {
            let soft = SoftGuest::new_for_restore(config, ram).map_err(|error| vec![error.to_string()])?;
            return self.slot.put_soft(soft).map_err(|error| vec![error.to_string()]);
        }
        if config.kind == LINUX {
            let tracking = self.dirty_tracker.unwrap_or_default().tracking();
            let linux = LinuxGuest::new_for_restore(config, ram, tracking, console)?;
            linux.set_state_fault(self.refuse_state.map(|what| match what {
                RefuseState::Restore => StateFault::Restore,
                RefuseState::Save => StateFault::Save,
            }));
            return self.slot.put_linux(linux).map_err(|error| vec![error.to_string()]);
        }
        Ok(Guest {
            tracker: Box::new(NullTracker::new(ram.layout())),
            ram: ram as Arc<dyn GuestRam>,
            free_pages: Box::new(NoBalloon),
            machine: Box::new(FileMachine::new(config.layout.clone())),
        })
    }

    fn check_kind(&self, config: &MachineConfig) -> Result<(), String> {
        let kind = config.kind.as_str();
        if ![SOFT, LINUX, file_guest::KIND].contains(&kind) {
            return Err(format!(
                "this receiver runs guests of the kinds soft, linux and file, not {kind:?}"
            ));
        }
        if kind != LINUX && self.dirty_tracker.is_some_and(|way| way != DirtyTrackerChoice::Auto) {
            return Err(format!(
                "the receiver was started with --dirty-tracker, which is for a Linux guest, and the guest is of the kind {kind}"
            ));
        }
        Ok(())
    }

    /// Memory of this layout: what was populated ahead, if it fits, else new.
    fn memory(&mut self, layout: &Layout) -> Result<Arc<GuestMemory>, String> {
        if let Some(pool) = &self.pool {
            if **pool.layout() == *layout {
                return Ok(Arc::clone(pool));
            }
            tracing::warn!(
                "the guest's RAM is laid out unlike what --prealloc populated ({} bytes in {} pieces): its memory is \
                 populated as it comes",
                pool.layout().total_bytes(),
                pool.layout().regions().len()
            );
            // Dropped first: the new memory may need the room, or the same file.
            self.pool = None;
        }
        let needed = layout.total_bytes();
        // Most of it may stay untouched, so this is no reason to refuse; the library watches the host while pages come.
        if let Some(available) = available_bytes().filter(|&available| available < needed) {
            tracing::warn!(
                "the guest has {} of RAM and this host has {} available: it will fit only if enough of it stays untouched",
                human_bytes(needed),
                human_bytes(available)
            );
        }
        new_memory(layout, &self.ram_file.backing())
    }
}

fn new_memory(layout: &Layout, backing: &Backing) -> Result<Arc<GuestMemory>, String> {
    let memory = GuestMemory::new(Arc::new(layout.clone()), backing);
    memory.map(Arc::new).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use machine::{BalloonConfig, Machine};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        recv: RecvFlags,
    }

    fn receiving(line: &str) -> Result<Receiving, Error> {
        let words = ["test", "--listen", "tcp:127.0.0.1:0"]
            .into_iter()
            .chain(line.split_whitespace());
        let flags = Line::try_parse_from(words).unwrap().recv;
        Receiving::new(&flags, ConsoleLine::new(None, None).unwrap())
    }

    fn file_config(pages: u64) -> MachineConfig {
        FileMachine::new(Layout::flat(pages).unwrap()).config()
    }

    #[test]
    fn case_11_a_kind_that_nobody_knows_is_refused_by_name() {
        let config = MachineConfig {
            kind: "toaster".to_owned(),
            balloon: BalloonConfig {
                dialect: "off".to_owned(),
                features: 0,
            },
            ..file_config(16)
        };
        let reasons = receiving("").unwrap().prepare(&config, false).unwrap_err();
        assert!(reasons[0].contains("toaster"), "{reasons:?}");
    }

    #[test]
    fn more_ram_than_the_host_has_is_no_reason_to_refuse() {
        let guest = receiving("").unwrap().prepare(&file_config(1 << 30), false).unwrap();
        assert_eq!(guest.ram.present().unwrap().count(), 0);
    }

    #[test]
    fn memory_that_was_populated_ahead_is_used_if_it_fits() {
        let mut receiving = receiving("--prealloc --max-memory 4M").unwrap();
        assert!(receiving.pool.is_some());
        let guest = receiving.prepare(&file_config(1024), false).unwrap();
        assert_eq!(guest.ram.present().unwrap().count(), 1024, "all populated");
        let guest = receiving.prepare(&file_config(512), false).unwrap();
        assert_eq!(guest.ram.layout().total_pages(), 512);
        assert_eq!(guest.ram.present().unwrap().count(), 0);
        assert!(receiving.pool.is_none());
    }

    #[test]
    fn memory_for_a_linux_guest_is_populated_around_the_gap() {
        let receiving = receiving("--prealloc=linux --max-memory 4M").unwrap();
        assert_eq!(
            receiving.pool.unwrap().layout().regions().len(),
            1,
            "below 3 GiB there is none"
        );
        // Not populated here: 4 GiB are too much for a test.
        assert_eq!(Layout::pc(1 << 20).unwrap().regions().len(), 2);
    }

    #[test]
    fn a_tracker_for_a_linux_guest_is_refused_for_another_by_name() {
        let reasons = receiving("--dirty-tracker ring")
            .unwrap()
            .prepare(&file_config(16), false);
        let reasons = reasons.unwrap_err();
        assert!(
            reasons[0].contains("--dirty-tracker") && reasons[0].contains("file"),
            "{reasons:?}"
        );
        assert!(
            receiving("--dirty-tracker auto")
                .unwrap()
                .prepare(&file_config(16), false)
                .is_ok()
        );
    }

    #[test]
    fn a_ram_file_of_ours_goes_when_no_guest_came() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
        std::fs::write(&theirs, [1; 4096]).unwrap();
        for path in [&ours, &theirs] {
            let mut receiving = receiving(&format!("--ram {}", path.display())).unwrap();
            let file = receiving.ram_file();
            let guest = receiving.prepare(&file_config(16), false).unwrap();
            // The same file again: the guest before has let go of it.
            drop(guest);
            drop(receiving.prepare(&file_config(16), false).unwrap());
            assert_eq!(std::fs::metadata(path).unwrap().len(), 16 * 4096);
            file.remove_if_ours();
        }
        assert!(!ours.exists() && theirs.exists());
    }

    #[test]
    fn a_ram_file_that_lies_there_outlives_questions_and_refusals() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram");
        let content: Vec<u8> = (0..1 << 20).map(|n: u32| n.to_le_bytes()[1] | 1).collect();
        std::fs::write(&path, &content).unwrap();
        let mut receiving = receiving(&format!("--ram {}", path.display())).unwrap();
        let good = file_config(16);
        let toaster = MachineConfig {
            kind: "toaster".to_owned(),
            ..good.clone()
        };
        // The built-in guest has settings of its own, which these lack.
        let no_soft_guest = MachineConfig {
            kind: "soft".to_owned(),
            ..good.clone()
        };
        let more_vcpus = MachineConfig {
            vcpus: 3,
            ..good.clone()
        };
        for bad in [&toaster, &no_soft_guest, &more_vcpus] {
            for dry_run in [true, false] {
                assert!(!receiving.prepare(bad, dry_run).unwrap_err().is_empty(), "{bad:?}");
            }
        }
        drop(receiving.prepare(&good, true).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), content);
        drop(receiving.prepare(&good, false).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), [0; 16 * 4096]);
    }

    #[test]
    fn a_question_says_what_is_wrong_with_the_ram_file() {
        let folder = tempfile::tempdir().unwrap();
        let ask = |path: &std::path::Path| {
            let mut receiving = receiving(&format!("--ram {}", path.display())).unwrap();
            receiving
                .prepare(&file_config(16), true)
                .map(drop)
                .map_err(|mut reasons| reasons.remove(0))
        };
        assert!(ask(folder.path()).unwrap_err().contains("not a regular file"));
        assert!(ask(&folder.path().join("no/ram")).unwrap_err().contains("no/ram"));
        let held = folder.path().join("held");
        let file = std::fs::File::create(&held).unwrap();
        file.lock().unwrap();
        assert!(ask(&held).unwrap_err().contains("in use"));
        let new = folder.path().join("new");
        ask(&new).unwrap();
        assert!(!new.exists(), "asking leaves nothing");
    }

    #[test]
    fn too_much_to_populate_is_refused() {
        let error = receiving("--prealloc --max-memory 4T").unwrap_err();
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains("--prealloc"), "{error}");
    }
}
