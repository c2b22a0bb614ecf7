//! How much memory the control groups of this process have left: its own group, and all visible groups above it.
//!
//! `/proc/self/cgroup` names the process's group in each hierarchy, `/proc/self/mountinfo` where a hierarchy, or a part
//! of it, is mounted. In a container the name may be the one outside, while only the container's own part is mounted.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The memory that the control groups of this process have left, in bytes. None if there is no limit.
pub fn left() -> Option<u64> {
    left_in(&|path| read_to_string(path).ok())
}

/// Reads a file, if it exists.
type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

fn left_in(read: Read<'_>) -> Option<u64> {
    let groups = read("/proc/self/cgroup".as_ref())?;
    let mounts = read("/proc/self/mountinfo".as_ref())?;
    mounts.lines().filter_map(|line| Hierarchy::parse(line, &groups)?.left(read)).min()
}

/// A hierarchy that limits memory.
struct Hierarchy {
    files: &'static Files,
    /// Where the hierarchy, or a part of it, is mounted.
    mount: PathBuf,
    /// The process's group.
    group: PathBuf,
}

/// The names of a group's files.
struct Files {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

static V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file ", "total_inactive_file "],
};
static V2: Files =
    Files { limit: "memory.max", used: "memory.current", cached: ["active_file ", "inactive_file "] };

impl Hierarchy {
    /// Parses a line of `mountinfo`, `id parent device root mount options .. - type source options`, and all of
    /// `cgroup`, `id:controllers:group`. `None` if the hierarchy does not control memory.
    fn parse(line: &str, groups: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3).map(unescape);
        let (root, mount) = (fields.next()?, fields.next()?);
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1).unwrap_or_default());
        let has_memory = |list: &str| list.split(',').any(|name| name == "memory");
        let files = match kind {
            "cgroup2" => &V2,
            "cgroup" if has_memory(options) => &V1,
            _ => return None,
        };
        let group = groups.lines().find_map(|line| {
            let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
            let is_it = if kind == "cgroup2" { controllers.is_empty() } else { has_memory(controllers) };
            is_it.then_some(group)
        })?;
        // Only a part of the hierarchy may be mounted. A group outside that part is not visible.
        let inside = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
        let hidden = inside.components().any(|part| part == std::path::Component::ParentDir);
        let mount = PathBuf::from(mount);
        let group = if hidden { mount.clone() } else { mount.join(inside) };
        Some(Self { files, mount, group })
    }

    /// The least that any group has left, from the process's own up to the mounted root.
    fn left(&self, read: Read<'_>) -> Option<u64> {
        let groups = self.group.ancestors().take_while(|group| group.starts_with(&self.mount));
        groups.filter_map(|group| self.files.left(group, read)).min()
    }
}

impl Files {
    /// What a group has left. The page cache counts as used memory, but the kernel frees it when memory is needed. So
    /// it is treated as free.
    fn left(&self, group: &Path, read: Read<'_>) -> Option<u64> {
        let number = |name: &str| read(&group.join(name))?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let cached = self.cached.map(|name| {
            let value = stat.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        });
        let cached = cached.into_iter().fold(0, u64::saturating_add);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// Special characters such as spaces are written as `\040` in these files.
fn unescape(field: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(field.to_owned(), |field, (written, meant)| field.replace(written, meant))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str = "33 28 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    const NO_LIMIT: &str = "9223372036854771712\n";

    /// The memory left if these files, and no others, exist.
    fn left(cgroup: &str, mountinfo: &str, files: &[(&str, &str)]) -> Option<u64> {
        let own = [("/proc/self/cgroup", cgroup), ("/proc/self/mountinfo", mountinfo)];
        let files: HashMap<&Path, &str> =
            own.iter().chain(files).map(|(path, text)| (Path::new(*path), *text)).collect();
        left_in(&|path| files.get(path).map(|text| (*text).to_owned()))
    }

    #[test]
    fn the_least_of_a_group_and_those_above_it_counts() {
        let base = "/sys/fs/cgroup/system.slice/job.service";
        let file = |name: &str| format!("{base}/{name}");
        let (max, current, above, used) = (
            file("memory.max"),
            file("memory.current"),
            "/sys/fs/cgroup/system.slice/memory.max",
            "/sys/fs/cgroup/system.slice/memory.current",
        );
        let all = |own: &'static str, slice: &'static str| {
            let files = [(&*max, own), (&*current, "100\n"), (above, slice), (used, "600\n")];
            left("0::/system.slice/job.service\n", V2_MOUNT, &files)
        };
        assert_eq!(all("1000\n", "max\n"), Some(900));
        assert_eq!(all("1000\n", "1000\n"), Some(400));
        assert_eq!(all("max\n", "1000\n"), Some(400));
        assert_eq!(all("max\n", "max\n"), None);
        assert_eq!(all("50\n", "max\n"), Some(0));
    }

    #[test]
    fn cached_files_are_no_memory_in_use() {
        let files = |limit: &'static str, used: &'static str, stat: &'static str| {
            let files = [
                ("/sys/fs/cgroup/memory.max", limit),
                ("/sys/fs/cgroup/memory.current", used),
                ("/sys/fs/cgroup/memory.stat", stat),
            ];
            left("0::/\n", V2_MOUNT, &files)
        };
        let stat = "anon 100\nfile 900\ninactive_anon 50\ninactive_file 600\nactive_file 200\n";
        assert_eq!(files("1000", "1000", stat), Some(800));
        assert_eq!(files("1000", "1000", ""), Some(0));
        assert_eq!(files("1000", "10", stat), Some(1000));
    }

    #[test]
    fn the_first_version_has_a_tree_for_memory() {
        let cgroup = "5:cpu,cpuacct:/elsewhere\n4:memory:/batch/job 7\n0::/batch\n";
        let job = "/sys/fs/cgroup/memory/batch/job 7";
        let names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"]
            .map(|name| format!("{job}/{name}"));
        let files = [
            (&*names[0], "1000\n"),
            (&*names[1], "700\n"),
            (&*names[2], "cache 5\ntotal_active_file 100\ntotal_inactive_file 50\nactive_file 1\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", NO_LIMIT),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
        ];
        assert_eq!(left(cgroup, V1_MOUNT, &files), Some(450));
        // Both versions: v2 has the processes, v1 controls the memory.
        let unified = "34 28 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let cpu = "35 28 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n";
        assert_eq!(left(cgroup, &[cpu, unified, V1_MOUNT].concat(), &files), Some(450));
        assert_eq!(left(cgroup, &[cpu, unified].concat(), &files), None);
    }

    #[test]
    fn a_container_sees_its_own_part() {
        let limits = |folder: &str| ["memory.max", "memory.current"].map(|name| format!("{folder}/{name}"));
        let [max, current] = limits("/sys/fs/cgroup");
        let files = [(&*max, "1000"), (&*current, "300")];
        // A process with its own cgroup namespace; one with the outside name and only its part mounted, or no other
        // information; and one that was moved outside its namespace.
        let part = V2_MOUNT.replace(" / /sys", " /docker/f00 /sys");
        for (cgroup, mount) in [
            ("0::/\n", V2_MOUNT),
            ("0::/docker/f00\n", &*part),
            ("0::/docker/f00\n", V2_MOUNT),
            ("0::/../bar\n", V2_MOUNT),
            ("0::/elsewhere\n", &part),
        ] {
            assert_eq!(left(cgroup, mount, &files), Some(700), "{cgroup:?} {mount:?}");
        }
        // Below its part.
        let [max, current] = limits("/sys/fs/cgroup/job");
        let files = [(&*max, "500"), (&*current, "300")];
        assert_eq!(left("0::/docker/f00/job\n", &part, &files), Some(200));
        // A path with a space.
        let [max, current] = limits("/my groups");
        let files = [(&*max, "500"), (&*current, "100")];
        assert_eq!(left("0::/\n", &V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"), &files), Some(400));
    }

    #[test]
    fn what_is_not_there_limits_nothing() {
        assert_eq!(left("", "", &[]), None);
        assert_eq!(left("0::/\n", V2_MOUNT, &[]), None);
        assert_eq!(left("no colon\n:\n", " - \n- cgroup2\n1 2 3 4 5 - cgroup2\n", &[]), None);
        assert_eq!(left_in(&|_| None), None);
    }
}
