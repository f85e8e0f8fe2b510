//! From a plan to a guest that is started here.

use crate::linux_flags::{LinuxPlan, vmm_error};
use crate::slot::GuestSlot;
use crate::{ConsoleLine, Error, FileMachine, FilePlan, GuestPlan, SoftPlan, human_bytes};
use machine::{FreePages, NoBalloon};
use memory::trackers::NullTracker;
use memory::{Backing, FreeMap, GuestMemory, layout_file};
use pageferry::Guest;
use pages::{Layout, PAGE_BYTES, PageSet};
use softguest::{GuestConfig, SoftGuest};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm::{BootFiles, LinuxGuest, StateFault, VmConfig};

/// How long a guest may take to inflate its balloon before it is sent.
const INFLATE_PATIENCE: Duration = Duration::from_secs(300);

/// A guest that was started here.
#[derive(Debug)]
pub struct Started {
    /// As the library takes it.
    pub guest: Guest,
    /// The guest's own side; empty for a guest in a file.
    pub slot: GuestSlot,
}

/// Starts a guest. Takes as long as the built-in guest needs to touch the memory that it is to use. `console`: where the
/// console of a Linux guest leads.
///
/// # Errors
/// [`Error::Refused`] says what the host or a file lacks; nothing was sent then.
pub fn start(plan: &GuestPlan, console: Option<&ConsoleLine>) -> Result<Started, Error> {
    match plan {
        GuestPlan::Soft(plan) => start_soft(plan),
        GuestPlan::File(plan) => open_file(plan),
        GuestPlan::Linux(plan) => boot_linux(plan, console),
    }
}

fn boot_linux(plan: &LinuxPlan, console: Option<&ConsoleLine>) -> Result<Started, Error> {
    let config = VmConfig {
        layout: Arc::new(Layout::pc(plan.memory_bytes / PAGE_BYTES).map_err(refused)?),
        vcpus: plan.vcpus,
        balloon: plan.balloon,
        tracking: plan.tracking,
    };
    let files = BootFiles {
        kernel: plan.kernel.clone(),
        initrd: plan.initrd.clone(),
        cmdline: plan.cmdline.clone(),
    };
    let console = match console {
        Some(line) => line.guest_end().map_err(refused)?,
        None => ConsoleLine::nowhere(),
    };
    let linux = LinuxGuest::boot(config, &files, console).map_err(|error| vmm_error(&error))?;
    if plan.refuse_save {
        linux.set_state_fault(Some(StateFault::Save));
    }
    let slot = GuestSlot::default();
    let guest = slot.put_linux(linux).map_err(|error| vmm_error(&error))?;
    Ok(Started { guest, slot })
}

fn start_soft(plan: &SoftPlan) -> Result<Started, Error> {
    let layout = Arc::new(flat(plan.memory_bytes)?);
    // Short of memory, the kernel would end the process in the middle of the guest's first touch.
    let touched = plan.used_bytes.saturating_add(plan.aged_bytes);
    if let Some(available) = available_bytes().filter(|&available| available < touched) {
        return Err(Error::Refused(format!(
            "the guest is to touch {} of memory, and the host has {} available: lower --used or --aged",
            human_bytes(touched),
            human_bytes(available)
        )));
    }
    let ram = Arc::new(GuestMemory::new(Arc::clone(&layout), &Backing::Anonymous).map_err(refused)?);
    let config = GuestConfig {
        used_bytes: plan.used_bytes,
        scatter: plan.scatter,
        aged_bytes: plan.aged_bytes,
        workload: plan.workload,
        vcpus: plan.vcpus,
        seed: plan.seed,
        balloon: plan.balloon,
        init_on_alloc: plan.init_on_alloc,
        ..GuestConfig::new(layout)
    };
    let soft = SoftGuest::boot(config, ram).map_err(refused)?;
    inflate(&soft, plan.ballooned_bytes / PAGE_BYTES)?;
    let slot = GuestSlot::default();
    let guest = slot.put_soft(soft)?;
    Ok(Started { guest, slot })
}

/// Has the guest put `pages` pages into its balloon, and waits until they are there.
fn inflate(soft: &SoftGuest, pages: u64) -> Result<(), Error> {
    let Some(device) = soft.balloon().filter(|_| pages > 0) else {
        return Ok(());
    };
    let free = soft.self_check().map_err(refused)?.free_pages;
    if pages > free {
        return Err(Error::Refused(format!(
            "the guest is to have {} in its balloon, and {} of its memory are free: lower --ballooned or --used",
            human_bytes(pages * PAGE_BYTES),
            human_bytes(free * PAGE_BYTES)
        )));
    }
    device.lock().set_target(pages).map_err(refused)?;
    let end = Instant::now() + INFLATE_PATIENCE;
    while device.lock().actual() != pages {
        if Instant::now() > end {
            return Err(Error::Refused(format!(
                "the guest has not put {} into its balloon within {} s: lower --ballooned",
                human_bytes(pages * PAGE_BYTES),
                INFLATE_PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn open_file(plan: &FilePlan) -> Result<Started, Error> {
    let layout = Arc::new(match &plan.layout {
        Some(file) => layout_file::load(file).map_err(refused)?,
        None => layout_of_file(&plan.ram)?,
    });
    let ram = GuestMemory::new(Arc::clone(&layout), &Backing::read_file(&plan.ram)).map_err(refused)?;
    let map = plan.free_map.as_ref().map(|file| FreeMap::load(file, &layout));
    let map = map.transpose().map_err(refused)?;
    // A guest that is up has its memory mapped.
    let none = PageSet::empty(&layout);
    ram.map_present(map.as_ref().map_or(&none, FreeMap::free))
        .map_err(refused)?;
    let free_pages: Box<dyn FreePages> = match map {
        Some(map) => Box::new(map),
        None => Box::new(NoBalloon),
    };
    let guest = Guest {
        ram: Arc::new(ram),
        tracker: Box::new(NullTracker::new(&layout)),
        free_pages,
        machine: Box::new(FileMachine::new((*layout).clone())),
    };
    Ok(Started {
        guest,
        slot: GuestSlot::default(),
    })
}

/// Without a layout file, a RAM file is one region from address 0.
fn layout_of_file(file: &Path) -> Result<Layout, Error> {
    let failed = |error| Error::Refused(format!("looking at RAM file {}: {error}", file.display()));
    let bytes = std::fs::metadata(file).map_err(failed)?.len();
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(Error::Refused(format!(
            "RAM file {} has {bytes} bytes, which is not a whole number of 4 KiB pages above 0",
            file.display()
        )));
    }
    flat(bytes)
}

/// One region from address 0.
pub(crate) fn flat(bytes: u64) -> Result<Layout, Error> {
    Layout::flat(bytes / PAGE_BYTES).map_err(refused)
}

/// A check's error as the command's.
pub(crate) fn refused(error: impl std::error::Error) -> Error {
    Error::Refused(error.to_string())
}

/// The memory that the host could give without swapping, bytes; `None` where it does not say.
pub(crate) fn available_bytes() -> Option<u64> {
    memory::available_bytes().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_plan(folder: &Path, ram_bytes: u64) -> FilePlan {
        let ram = folder.join("ram");
        std::fs::File::create(&ram).unwrap().set_len(ram_bytes).unwrap();
        FilePlan {
            ram,
            layout: None,
            free_map: None,
        }
    }

    #[test]
    fn a_guest_in_a_file_is_one_region_unless_told() {
        let folder = tempfile::tempdir().unwrap();
        let mut plan = file_plan(folder.path(), 5 * 4096);
        let started = start(&GuestPlan::File(plan.clone()), None).unwrap();
        assert_eq!(started.guest.ram.layout().regions().len(), 1);
        assert_eq!(started.guest.machine.config().kind, "file");
        assert!(started.slot.self_check().is_none());
        drop(started);
        let layout = folder.path().join("layout.json");
        std::fs::write(
            &layout,
            r#"{"page_size":4096,"regions":[{"start":0,"bytes":8192},{"start":65536,"bytes":12288}]}"#,
        )
        .unwrap();
        plan.layout = Some(layout);
        let started = start(&GuestPlan::File(plan), None).unwrap();
        assert_eq!(started.guest.ram.layout().regions().len(), 2);
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |plan: FilePlan| {
            let error = start(&GuestPlan::File(plan), None).unwrap_err();
            assert_eq!(error.exit_code(), 3);
            error.to_string()
        };
        assert!(refusal(file_plan(folder.path(), 4097)).contains("4097 bytes"));
        assert!(refusal(file_plan(folder.path(), 0)).contains("0 bytes"));
        let gone = FilePlan {
            ram: folder.path().join("gone"),
            layout: None,
            free_map: None,
        };
        assert!(refusal(gone).contains("gone"));
        let mut plan = file_plan(folder.path(), 64 * 4096);
        let map = folder.path().join("map");
        std::fs::write(&map, [0; 7]).unwrap();
        plan.free_map = Some(map);
        let text = refusal(plan);
        assert!(text.contains('7') && text.contains('8'), "{text}");
    }

    #[test]
    fn the_host_says_what_it_has() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
