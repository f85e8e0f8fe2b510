//! What the control groups of this process leave it: past their limit the kernel ends a process, however much the host has.
//!
//! Both versions, as they are mounted by default; `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`. What
//! cannot be read limits nothing.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The names of a version's files, beside `memory.stat`.
#[derive(Clone, Copy, Debug)]
struct Version {
    limit: &'static str,
    usage: &'static str,
    /// What of its use is file pages that can be dropped: a line of `memory.stat`.
    droppable: &'static str,
}

const VERSION_1: Version = Version {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file ",
};
const VERSION_2: Version = Version {
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file ",
};

/// A limit of this size is none: version 1 has no other word for it.
const NO_LIMIT: u64 = 1 << 60;

/// A group that has a limit.
#[derive(Debug)]
struct Limited {
    folder: PathBuf,
    version: Version,
}

/// The bytes that the group with the least left has left, not counting file pages that can be dropped; `None` without a limit.
/// Which groups have one is looked up once.
pub(crate) fn available_bytes() -> Option<u64> {
    static LIMITED: OnceLock<Vec<Limited>> = OnceLock::new();
    let limited = LIMITED.get_or_init(|| match read_to_string("/proc/self/cgroup") {
        Ok(groups) => limited(&groups, Path::new("/sys/fs/cgroup")),
        Err(_) => Vec::new(),
    });
    limited.iter().filter_map(Limited::available_bytes).min()
}

/// The groups with a limit that `groups` (the text of `/proc/PID/cgroup`) names, and those above them.
fn limited(groups: &str, root: &Path) -> Vec<Limited> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (root, version) = if controllers.is_empty() {
            (root.to_owned(), VERSION_2)
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("memory"), VERSION_1)
        } else {
            continue;
        };
        let inside = root.join(path.trim_start_matches('/'));
        let folders = inside.ancestors().take_while(|folder| folder.starts_with(&root));
        let all = folders.map(|folder| Limited {
            folder: folder.to_owned(),
            version,
        });
        found.extend(all.filter(|group| group.limit_bytes().is_some()));
    }
    found
}

impl Limited {
    fn number(&self, file: &str) -> Option<u64> {
        read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.number(self.version.limit).filter(|&limit| limit < NO_LIMIT)
    }

    fn available_bytes(&self) -> Option<u64> {
        let (limit, usage) = (self.limit_bytes()?, self.number(self.version.usage)?);
        let stat = read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let droppable = stat.lines().find_map(|line| line.strip_prefix(self.version.droppable));
        let droppable = droppable.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
        Some(limit.saturating_sub(usage.saturating_sub(droppable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group's files, as a kernel would have them.
    fn group(root: &Path, path: &str, version: Version, [limit, usage, stat]: [&str; 3]) {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in [(version.limit, limit), (version.usage, usage), ("memory.stat", stat)] {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }

    fn left(groups: &str, root: &Path) -> Option<u64> {
        limited(groups, root).iter().filter_map(Limited::available_bytes).min()
    }

    #[test]
    fn the_tightest_group_decides_wherever_it_is() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        group(
            root,
            "pod",
            VERSION_2,
            ["1000\n", "400\n", "anon 1\ninactive_file 100\n"],
        );
        group(root, "pod/one", VERSION_2, ["max\n", "300\n", ""]);
        group(root, "pod/two", VERSION_2, ["350\n", "300\n", "inactive_file 20\n"]);
        group(root, "pod/over", VERSION_2, ["100\n", "300\n", ""]);
        assert_eq!(left("0::/pod/one\n", root), Some(700), "the one above");
        assert_eq!(left("0::/pod/two\n", root), Some(70));
        assert_eq!(left("0::/pod/over\n", root), Some(0));
        assert_eq!(left("0::/\n", root), None);
        assert_eq!(left("0::/../elsewhere\n", root), None);
        assert_eq!(left("nonsense\n0::\n", root), None);
    }

    #[test]
    fn version_1_is_read_beside_version_2() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        group(root, "memory", VERSION_1, ["9223372036854771712\n", "500\n", ""]);
        group(
            root,
            "memory/a",
            VERSION_1,
            ["600\n", "500\n", "inactive_file 9\ntotal_inactive_file 50\n"],
        );
        let groups = "3:cpuset:/b\n2:cpu,memory:/a\n1:name=systemd:/\n0::/\n";
        assert_eq!(left(groups, root), Some(150));
        assert_eq!(left("2:memory:/\n", root), None, "no limit");
        assert_eq!(left("2:hugetlb:/a\n", root), None, "another controller's");
    }
}
