//! A receiver's host that runs out of room: the file system of its RAM file, the memory limit of its control group. The guest
//! goes on at the source, which says why.
#![allow(clippy::unwrap_used)]

#[path = "../../migrate-send/tests/support/mod.rs"]
mod support;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::Running;

/// A file system of a few MiB, for as long as this lives.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    /// `None`, loudly, where none can be mounted.
    fn mount(at: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let size = format!("size={bytes}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "pageferry-test"])
            .arg(at)
            .output();
        if mounted.is_ok_and(|mounted| mounted.status.success()) {
            return Some(SmallFileSystem(at.to_owned()));
        }
        println!("SKIPPED: a disk that is full: no file system can be mounted here");
        None
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let gone = Command::new("umount").arg("-l").arg(&self.0).status().unwrap();
        assert!(gone.success());
    }
}

/// Writes until there is no room left.
fn fill(path: &str) {
    let mut file = fs::File::create(path).unwrap();
    let page = [1; 4096];
    while file.write_all(&page).is_ok() {}
}

const SLOWLY: [&str; 10] = [
    "--memory",
    "32M",
    "--used",
    "24M",
    "--skip",
    "none",
    "--max-bandwidth",
    "16Mbit",
    "--compress",
    "none",
];

#[test]
fn a_file_system_that_could_not_hold_the_ram_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some(small) = SmallFileSystem::mount(&folder.path().join("small"), 16 << 20) else {
        return;
    };
    let receiver = Running::receiver(folder.path(), &["--ram", &small.path("ram")]);
    let sent = Running::source(folder.path(), &receiver.address.clone(), &SLOWLY).end();
    sent.expect(3).unharmed().says("its file system has");
    receiver.end().expect(3);
}

#[test]
fn a_disk_that_others_fill_meanwhile_ends_the_migration_and_nobody() {
    for packed in ["none", "lz4"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(small) = SmallFileSystem::mount(&folder.path().join("small"), 40 << 20) else {
            return;
        };
        let ram = small.path("ram");
        let receiver = Running::receiver(folder.path(), &["--ram", &ram]);
        let arguments = [&SLOWLY[..8], &["--compress", packed]].concat();
        let source = Running::source(folder.path(), &receiver.address.clone(), &arguments);
        // Pages cross, and there is no more room for the next ones.
        while fs::metadata(&ram).map_or(0, |meta| std::os::unix::fs::MetadataExt::blocks(&meta)) == 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        fill(&small.path("others"));
        let sent = source.end();
        sent.expect(4).unharmed();
        // Not by a signal: SIGBUS is what a mapping without room ends a process by.
        receiver.end().expect(4);
        let error = sent.report()["error"].as_str().unwrap().to_owned();
        assert!(
            error.contains("receiver") && error.contains("full"),
            "packed {packed}: {error}"
        );
    }
}

/// A control group with a memory limit, for as long as this lives.
struct Group(PathBuf);

impl Group {
    /// `None`, loudly, where none can be made.
    fn with_limit(bytes: u64) -> Option<Self> {
        let name = format!("pageferry-test-{}", std::process::id());
        for (root, limit) in [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ] {
            let group = Group(Path::new(root).join(&name));
            if fs::create_dir(&group.0).is_ok() {
                // A folder of a file system that is no control group's has no such file, and gets none: it is not made.
                let file = fs::File::options().write(true).open(group.0.join(limit));
                if file
                    .and_then(|mut file| file.write_all(bytes.to_string().as_bytes()))
                    .is_ok()
                {
                    return Some(group);
                }
            }
        }
        println!("SKIPPED: a memory limit: no control group can be made here");
        None
    }

    fn take(&self, pid: rustix::process::Pid) {
        fs::write(self.0.join("cgroup.procs"), pid.as_raw_nonzero().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has just ended is in it for a moment more.
        for _ in 0..1000 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

#[test]
fn a_memory_limit_is_kept_to_and_named_in_place_of_a_death() {
    let Some(group) = Group::with_limit(400 << 20) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let receiver = Running::receiver(folder.path(), &[]);
    group.take(receiver.pid());
    let guest = [
        "--memory",
        "1G",
        "--used",
        "700M",
        "--streams",
        "1",
        "--compress",
        "none",
    ];
    let sent = Running::source(folder.path(), &receiver.address.clone(), &guest).end();
    sent.expect(4).unharmed().says("memory limit of its control group");
    receiver.end().expect(4);
}
