//! NVIDIA's libraries: whether they are installed. Phalanx does not need them.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::finding::Report;

/// The folders of libraries, besides LD_LIBRARY_PATH.
const FOLDERS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/opt/nvidia/nccl/lib",
];

pub(super) fn look(report: &mut Report) {
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(PathBuf::from).collect();
    folders.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
    for (check, name) in [("cuda", "libcuda.so"), ("nccl", "libnccl.so")] {
        match find(&folders, name) {
            Some(path) => report.note(check, path.display().to_string()),
            None => report.note(check, format!("no {name} in {} folders and LD_LIBRARY_PATH", FOLDERS.len())),
        }
    }
}

/// The library of this name, in any version.
fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    let is_it = |path: &Path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name));
    let files = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    files.map(|file| file.path()).filter(|path| is_it(path)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_version_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [folder.path().join("not there"), folder.path().to_owned()];
        assert_eq!(find(&folders, "libnccl.so"), None);
        let path = folder.path().join("libnccl.so.2");
        fs::write(&path, "").unwrap();
        assert_eq!(find(&folders, "libnccl.so"), Some(path));
    }
}
