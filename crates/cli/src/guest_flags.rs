//! The flags that describe a guest, and what they mean together.
//!
//! In two steps: clap reads plain values; [`GuestFlags::plan`] turns them into a [`GuestPlan`], or says which flag does
//! not fit which. Nothing is allocated or opened before the whole plan makes sense.

use crate::Error;
use crate::balloon_flags::{self, BalloonChoice, DiscardChoice};
use crate::linux_flags::{self, DEFAULT_CMDLINE, DirtyTrackerChoice, LinuxPlan};
use crate::units::{Size, parse_share};
use clap::{Args, ValueEnum};
use pages::{Layout, PAGE_BYTES};
use softguest::{MAX_VCPUS, Workload};
use std::path::PathBuf;

/// What runs the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GuestKind {
    /// The built-in guest; needs no KVM
    #[default]
    Soft,
    /// A Linux kernel under KVM
    Linux,
    /// A paused guest's RAM, lying in a file
    File,
}

/// The flags that describe a guest. Those without a default belong to some kinds of guest only.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Guest")]
pub struct GuestFlags {
    /// What runs the guest (default: soft)
    #[arg(long, value_enum, value_name = "KIND")]
    pub guest: Option<GuestKind>,
    /// Guest RAM, any whole number of 4 KiB pages (soft, linux; default: 8G)
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Virtual CPUs (soft, linux; default: 1)
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u32>,
    /// The balloon's dialect (soft, linux; default: standard)
    #[arg(long, value_enum, value_name = "DIALECT")]
    pub balloon: Option<BalloonChoice>,
    /// What becomes of the memory of pages that go into the balloon: mark = it stays, and a migration may leave it out;
    /// at-once = the host has it back (soft, linux; default: mark with --balloon bitmap and bitmap-rfc, whose drivers name
    /// pages again that they use; else at-once)
    #[arg(long, value_enum, value_name = "WHEN")]
    pub balloon_discard: Option<DiscardChoice>,

    /// Memory that the guest uses (soft; default: 300M, or a quarter of a small guest's RAM)
    #[arg(long, value_name = "SIZE", help_heading = "Built-in guest")]
    pub used: Option<Size>,
    /// How scattered it is: 0 in one piece, 1 in single pages (soft; default: 0)
    #[arg(long, value_name = "0..1", value_parser = parse_share, help_heading = "Built-in guest")]
    pub scatter: Option<f64>,
    /// Memory that was touched, then freed, before the migration (soft; default: 0)
    #[arg(long, value_name = "SIZE", help_heading = "Built-in guest")]
    pub aged: Option<Size>,
    /// Memory that it has put into its balloon before the migration (soft; default: 0)
    #[arg(long, value_name = "SIZE", help_heading = "Built-in guest")]
    pub ballooned: Option<Size>,
    /// What it does: idle, churn:RATE (pages a second) or compile (soft; default: idle)
    #[arg(long, value_name = "LOAD", help_heading = "Built-in guest")]
    pub workload: Option<Workload>,
    /// Where its randomness starts (soft; default: 1)
    #[arg(long, value_name = "N", help_heading = "Built-in guest")]
    pub guest_seed: Option<u64>,
    /// It zeroes memory when it allocates it, as Linux with init_on_alloc=1 (soft)
    #[arg(long, help_heading = "Built-in guest")]
    pub init_on_alloc: bool,

    /// The guest's RAM (file)
    #[arg(long, value_name = "FILE", help_heading = "Guest in a file")]
    pub ram: Option<PathBuf>,
    /// Where its RAM lies in guest-physical space (JSON) (file; default: one region from address 0)
    #[arg(long, value_name = "FILE", help_heading = "Guest in a file")]
    pub layout: Option<PathBuf>,
    /// Its free pages: a bitmap, one bit a 4 KiB page, least significant first (file)
    #[arg(long, value_name = "FILE", help_heading = "Guest in a file")]
    pub free_map: Option<PathBuf>,

    /// The kernel to boot: a bzImage, or an ELF vmlinux (linux)
    #[arg(long, value_name = "FILE", help_heading = "Linux guest")]
    pub kernel: Option<PathBuf>,
    /// Its initial RAM disk (linux)
    #[arg(long, value_name = "FILE", help_heading = "Linux guest")]
    pub initrd: Option<PathBuf>,
    /// Its command line (linux; default: console=ttyS0)
    #[arg(long, value_name = "STR", help_heading = "Linux guest")]
    pub cmdline: Option<String>,
    /// It gives free memory back to the host all the time, not only when it is asked (linux)
    #[arg(long, help_heading = "Linux guest")]
    pub free_page_reporting: bool,
    /// How its writes are tracked during a migration (linux; default: auto)
    #[arg(long, value_enum, value_name = "WAY", help_heading = "Linux guest")]
    pub dirty_tracker: Option<DirtyTrackerChoice>,
    /// Write what its console prints to this file, and let it take no input (linux; default: the console is this terminal,
    /// or stdin and stdout: Ctrl-A x ends the command then, Ctrl-A Ctrl-A sends a Ctrl-A)
    #[arg(long, value_name = "FILE", help_heading = "Linux guest")]
    pub console: Option<PathBuf>,
    /// For tests: its state refuses to be saved
    #[arg(long, hide = true)]
    pub refuse_save: bool,
}

/// A guest to be started here.
#[derive(Clone, Debug, PartialEq)]
pub enum GuestPlan {
    /// The built-in one.
    Soft(SoftPlan),
    /// One in a file.
    File(FilePlan),
    /// A Linux kernel under KVM.
    Linux(LinuxPlan),
}

/// The built-in guest.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftPlan {
    /// Guest RAM, a whole number of pages.
    pub memory_bytes: u64,
    /// Used memory, rounded up to whole pages.
    pub used_bytes: u64,
    /// Touched, then freed; rounded up to whole pages.
    pub aged_bytes: u64,
    /// In the balloon before the migration; rounded up to whole pages.
    pub ballooned_bytes: u64,
    /// 0 in one piece, 1 in single pages.
    pub scatter: f64,
    /// What it does.
    pub workload: Workload,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Where its randomness starts.
    pub seed: u64,
    /// Zeroes what it allocates.
    pub init_on_alloc: bool,
    /// Its balloon.
    pub balloon: Option<balloon::Config>,
}

/// A guest in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct FilePlan {
    /// Its RAM.
    pub ram: PathBuf,
    /// Where RAM lies.
    pub layout: Option<PathBuf>,
    /// Its free pages.
    pub free_map: Option<PathBuf>,
}

const DEFAULT_MEMORY_BYTES: u64 = 8 << 30;
const DEFAULT_USED_BYTES: u64 = 300 << 20;

/// A kind's name on the command line.
fn name(kind: GuestKind) -> String {
    kind.to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

impl GuestFlags {
    /// What the flags mean.
    ///
    /// # Errors
    /// [`Error::Usage`] names the flag that is missing, out of range, or does not belong to this kind of guest.
    pub fn plan(&self) -> Result<GuestPlan, Error> {
        self.check_kind()?;
        Ok(match self.kind() {
            GuestKind::Linux => GuestPlan::Linux(self.plan_linux()?),
            GuestKind::Soft => GuestPlan::Soft(self.plan_soft()?),
            GuestKind::File => {
                let ram = self.ram.clone();
                GuestPlan::File(FilePlan {
                    ram: ram.ok_or_else(|| Error::Usage("--guest file needs --ram FILE".to_owned()))?,
                    layout: self.layout.clone(),
                    free_map: self.free_map.clone(),
                })
            }
        })
    }

    /// What runs the guest.
    pub fn kind(&self) -> GuestKind {
        self.guest.unwrap_or_default()
    }

    /// A flag of these that was given, if any was: for commands that start no guest.
    pub fn first_given(&self) -> Option<&'static str> {
        let guest = self.guest.map(|_| "--guest");
        let others = self.given().into_iter().find(|(_, is_given, _)| *is_given);
        guest.or(others.map(|(flag, ..)| flag))
    }

    /// Every flag beside --guest: whether it was given, and the kinds of guest that it belongs to.
    fn given(&self) -> [(&'static str, bool, &'static [GuestKind]); 21] {
        use GuestKind::{File, Linux, Soft};
        [
            ("--memory", self.memory.is_some(), &[Soft, Linux]),
            ("--vcpus", self.vcpus.is_some(), &[Soft, Linux]),
            ("--balloon", self.balloon.is_some(), &[Soft, Linux]),
            ("--balloon-discard", self.balloon_discard.is_some(), &[Soft, Linux]),
            ("--used", self.used.is_some(), &[Soft]),
            ("--scatter", self.scatter.is_some(), &[Soft]),
            ("--aged", self.aged.is_some(), &[Soft]),
            ("--ballooned", self.ballooned.is_some(), &[Soft]),
            ("--workload", self.workload.is_some(), &[Soft]),
            ("--guest-seed", self.guest_seed.is_some(), &[Soft]),
            ("--init-on-alloc", self.init_on_alloc, &[Soft]),
            ("--ram", self.ram.is_some(), &[File]),
            ("--layout", self.layout.is_some(), &[File]),
            ("--free-map", self.free_map.is_some(), &[File]),
            ("--kernel", self.kernel.is_some(), &[Linux]),
            ("--initrd", self.initrd.is_some(), &[Linux]),
            ("--cmdline", self.cmdline.is_some(), &[Linux]),
            ("--free-page-reporting", self.free_page_reporting, &[Linux]),
            ("--dirty-tracker", self.dirty_tracker.is_some(), &[Linux]),
            ("--console", self.console.is_some(), &[Linux]),
            ("--refuse-save", self.refuse_save, &[Linux]),
        ]
    }

    /// Refuses flags that belong to another kind of guest: to drop them in silence would be to migrate something else
    /// than was asked for.
    fn check_kind(&self) -> Result<(), Error> {
        for (flag, is_given, kinds) in self.given() {
            if is_given && !kinds.contains(&self.kind()) {
                let kinds: Vec<String> = kinds.iter().map(|&kind| name(kind)).collect();
                return Err(Error::Usage(format!(
                    "{flag} goes with --guest {}, not with --guest {}",
                    kinds.join(" or "),
                    name(self.kind())
                )));
            }
        }
        Ok(())
    }

    fn memory_bytes(&self) -> Result<u64, Error> {
        let memory_bytes = self.memory.map_or(DEFAULT_MEMORY_BYTES, |s| s.0);
        if memory_bytes == 0 || !memory_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Error::Usage(format!(
                "--memory: {memory_bytes} bytes are not a whole number of 4 KiB pages above 0"
            )));
        }
        Ok(memory_bytes)
    }

    /// Neither kind of guest has more.
    fn vcpu_count(&self) -> Result<u32, Error> {
        let vcpus = self.vcpus.unwrap_or(1);
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(Error::Usage(format!("--vcpus {vcpus}: give 1 to {MAX_VCPUS}")));
        }
        Ok(vcpus)
    }

    /// The balloon of a guest with RAM of `layout`.
    fn balloon_config(&self, layout: &Layout) -> Result<Option<balloon::Config>, Error> {
        balloon_flags::config(self.balloon.unwrap_or_default(), self.balloon_discard, layout)
    }

    fn plan_linux(&self) -> Result<LinuxPlan, Error> {
        let kernel = self.kernel.clone();
        let memory_bytes = self.memory_bytes()?;
        let layout = Layout::pc(memory_bytes / PAGE_BYTES).map_err(|e| Error::Usage(format!("--memory: {e}")))?;
        let mut balloon = self.balloon_config(&layout)?;
        linux_flags::add_reporting(balloon.as_mut(), self.free_page_reporting)?;
        Ok(LinuxPlan {
            memory_bytes,
            vcpus: self.vcpu_count()?,
            balloon,
            kernel: kernel.ok_or_else(|| Error::Usage("--guest linux needs --kernel FILE".to_owned()))?,
            initrd: self.initrd.clone(),
            cmdline: self.cmdline.clone().unwrap_or_else(|| DEFAULT_CMDLINE.to_owned()),
            tracking: self.dirty_tracker.unwrap_or_default().tracking(),
            console: self.console.clone(),
            refuse_save: self.refuse_save,
        })
    }

    fn plan_soft(&self) -> Result<SoftPlan, Error> {
        let memory_bytes = self.memory_bytes()?;
        let default_used = DEFAULT_USED_BYTES.min(memory_bytes / 4);
        let used_bytes = whole_pages("--used", self.used.map_or(default_used, |s| s.0))?;
        let aged_bytes = whole_pages("--aged", self.aged.map_or(0, |s| s.0))?;
        let ballooned_bytes = whole_pages("--ballooned", self.ballooned.map_or(0, |s| s.0))?;
        // What was in use before is free, so it can go into the balloon; what is in use cannot.
        for (flag, bytes) in [("--aged", aged_bytes), ("--ballooned", ballooned_bytes)] {
            if used_bytes.checked_add(bytes).is_none_or(|sum| sum > memory_bytes) {
                return Err(Error::Usage(format!(
                    "--used and {flag} take {used_bytes} and {bytes} bytes, together more than --memory {memory_bytes}"
                )));
            }
        }
        let layout = Layout::flat(memory_bytes / PAGE_BYTES).map_err(|e| Error::Usage(format!("--memory: {e}")))?;
        let balloon = self.balloon_config(&layout)?;
        if self.ballooned.is_some() && balloon.is_none() {
            return Err(Error::Usage(
                "--ballooned needs a balloon, and there is none with --balloon off".to_owned(),
            ));
        }
        Ok(SoftPlan {
            memory_bytes,
            used_bytes,
            aged_bytes,
            ballooned_bytes,
            scatter: self.scatter.unwrap_or(0.0),
            workload: self.workload.unwrap_or_default(),
            vcpus: self.vcpu_count()?,
            seed: self.guest_seed.unwrap_or(1),
            init_on_alloc: self.init_on_alloc,
            balloon,
        })
    }
}

/// Rounds up to whole pages.
fn whole_pages(flag: &str, bytes: u64) -> Result<u64, Error> {
    bytes
        .checked_next_multiple_of(PAGE_BYTES)
        .ok_or_else(|| Error::Usage(format!("{flag}: {bytes} bytes are more than any guest has")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use balloon::{Dialect, DiscardPolicy};
    use clap::Parser;
    use vmm::Tracking;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        guest: GuestFlags,
    }

    fn plan(line: &str) -> Result<GuestPlan, Error> {
        let words = std::iter::once("test").chain(line.split_whitespace());
        match Line::try_parse_from(words) {
            Ok(line) => line.guest.plan(),
            Err(error) => Err(Error::Usage(error.to_string())),
        }
    }

    fn soft(line: &str) -> SoftPlan {
        match plan(line) {
            Ok(GuestPlan::Soft(plan)) => plan,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_soft_guest_by_default() {
        let plan = soft("");
        assert_eq!(
            (plan.memory_bytes, plan.used_bytes, plan.aged_bytes),
            (8 << 30, 300 << 20, 0)
        );
        assert_eq!(
            (plan.workload, plan.vcpus, plan.ballooned_bytes),
            (Workload::Idle, 1, 0)
        );
        assert_eq!(plan.balloon.unwrap().dialect, Dialect::Standard);
    }

    #[test]
    fn all_flags_of_a_soft_guest() {
        let plan = soft(
            "--guest soft --memory 1G --used 100M --scatter 0.5 --aged 512M --workload churn:500 --vcpus 2 --guest-seed 7 \
             --init-on-alloc --balloon bitmap --balloon-discard at-once --ballooned 700M",
        );
        assert_eq!(
            plan,
            SoftPlan {
                memory_bytes: 1 << 30,
                used_bytes: 100 << 20,
                aged_bytes: 512 << 20,
                ballooned_bytes: 700 << 20,
                scatter: 0.5,
                workload: Workload::Churn { pages_per_s: 500 },
                vcpus: 2,
                seed: 7,
                init_on_alloc: true,
                balloon: Some(balloon::Config {
                    dialect: Dialect::Bitmap,
                    features: 0x1f,
                    discard: DiscardPolicy::AtOnce,
                }),
            }
        );
    }

    #[test]
    fn all_flags_of_a_linux_guest() {
        let linux = |line: &str| match plan(line) {
            Ok(GuestPlan::Linux(plan)) => plan,
            other => panic!("{line}: {other:?}"),
        };
        let least = linux("--guest linux --kernel vmlinuz");
        assert_eq!((least.memory_bytes, least.vcpus), (8 << 30, 1));
        assert_eq!(
            (least.cmdline.as_str(), least.tracking),
            ("console=ttyS0", Tracking::Auto)
        );
        assert!(least.initrd.is_none() && least.console.is_none() && least.balloon.is_some());
        let words = "--guest linux --kernel k --initrd i --cmdline quiet --memory 1G --vcpus 2 --balloon off \
                     --dirty-tracker manual-protect --console c";
        assert_eq!(
            linux(words),
            LinuxPlan {
                memory_bytes: 1 << 30,
                vcpus: 2,
                balloon: None,
                kernel: "k".into(),
                initrd: Some("i".into()),
                cmdline: "quiet".to_owned(),
                tracking: Tracking::ManualProtect,
                console: Some("c".into()),
                refuse_save: false,
            }
        );
    }

    #[test]
    fn a_flag_that_was_given_is_known_by_name() {
        let first = |words: &str| {
            let words = std::iter::once("test").chain(words.split_whitespace());
            Line::try_parse_from(words).unwrap().guest.first_given()
        };
        assert_eq!(first(""), None);
        assert_eq!(first("--guest soft"), Some("--guest"));
        assert_eq!(first("--init-on-alloc"), Some("--init-on-alloc"));
        assert_eq!(first("--vcpus 2"), Some("--vcpus"));
    }

    #[test]
    fn any_whole_number_of_pages_will_do() {
        assert_eq!(soft("--memory 1073754112").memory_bytes, (1 << 30) + 3 * 4096);
        assert_eq!(soft("--used 1").used_bytes, 4096);
        assert!(
            plan("--memory 1073754113")
                .unwrap_err()
                .to_string()
                .contains("1073754113")
        );
        assert!(plan("--memory 0").is_err());
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (line, word) in [
            ("--guest linux", "--guest linux needs --kernel FILE"),
            ("--guest linux --kernel k --used 1M", "--used goes with --guest soft"),
            ("--guest linux --kernel k --vcpus 0", "--vcpus 0"),
            ("--guest linux --kernel k --memory 5000", "5000 bytes"),
            ("--guest linux --kernel k --dirty-tracker magic", "magic"),
            (
                "--guest linux --kernel k --ballooned 1M",
                "--ballooned goes with --guest soft",
            ),
            ("--balloon off --ballooned 1M", "--ballooned needs a balloon"),
            ("--memory 1G --used 600M --ballooned 600M", "more than --memory"),
            (
                "--balloon off --balloon-discard mark",
                "--balloon-discard needs a balloon",
            ),
            ("--balloon-discard never", "never"),
            (
                "--guest file --ram r --balloon-discard mark",
                "--balloon-discard goes with --guest soft or linux",
            ),
            (
                "--guest linux --kernel k --balloon off --free-page-reporting",
                "--free-page-reporting goes with --balloon standard",
            ),
            (
                "--dirty-tracker log",
                "--dirty-tracker goes with --guest linux, not with --guest soft",
            ),
            ("--console f", "--console goes with --guest linux"),
            ("--free-page-reporting", "--free-page-reporting goes with --guest linux"),
            ("--guest file", "--ram"),
            (
                "--guest file --ram r --used 1M",
                "--used goes with --guest soft, not with --guest file",
            ),
            ("--guest soft --free-map f", "--free-map goes with --guest file"),
            ("--memory 1G --used 600M --aged 600M", "more than --memory"),
            ("--used 16777215T --memory 1G", "more than --memory"),
            ("--vcpus 0", "--vcpus 0"),
            ("--workload busy", "busy"),
            ("--scatter 2", "'2' is not a share"),
            ("--memory 8X", "8X"),
        ] {
            let error = plan(line).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(word), "{line}: {error}");
        }
    }
}
