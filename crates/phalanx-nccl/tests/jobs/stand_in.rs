//! The stand-ins for libcuda and libnccl, which are no GPU (tests/stand_in).

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the stand-ins in `folder`. The variables with which a program uses them.
pub fn build(folder: &Path) -> [(&'static str, PathBuf); 2] {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../phalanx-nccl/tests/stand_in");
    let compile = |source: &str, library: &str, more: &[&str]| {
        let mut command = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o"]);
        command.arg(folder.join(library)).arg(sources.join(source)).args(more).arg("-pthread");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        folder.join(library)
    };
    let cuda = compile("cuda.c", "libcuda.so.1", &[]);
    let beside = format!("-L{}", folder.display());
    let nccl = compile("nccl.c", "libnccl.so.2", &[&beside, "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]);
    [("PHALANX_CUDA_LIBRARY", cuda), ("PHALANX_NCCL_LIBRARY", nccl)]
}
