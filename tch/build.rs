//! Builds the shim against the libtorch that torch-sys has found.

use std::env;
use std::path::PathBuf;

fn main() -> Result<(), &'static str> {
    println!("cargo:rerun-if-changed=src/shim.cpp");
    let libraries = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from);
    let libraries =
        libraries.ok_or("torch-sys does not say where libtorch is: phalanx-tch builds on Linux")?;
    let include = headers().unwrap_or_else(|| libraries.with_file_name("include"));
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .include(include.join("torch/csrc/api/include"))
        .include(&include)
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        // libtorch's headers are not ours to clean up.
        .warnings(false)
        .file("src/shim.cpp")
        .compile("phalanx_tch_shim");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-lib=torch_cpu");
    // For the tests and examples of this package; a program of one's own sets LD_LIBRARY_PATH, or does the same.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    Ok(())
}

/// Where libtorch's headers are, if not beside its libraries: torch-sys has read the same variables.
fn headers() -> Option<PathBuf> {
    for name in ["LIBTORCH_INCLUDE", "LIBTORCH_USE_PYTORCH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
        return None;
    }
    env::var_os("LIBTORCH_INCLUDE").map(|folder| PathBuf::from(folder).join("include"))
}
