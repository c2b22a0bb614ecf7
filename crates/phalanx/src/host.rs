//! The name of this host.

/// The name of this host, as errors and logs show it. Linux allows 64 bytes. Spaces would end a field in a store.
pub fn name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.split_whitespace().collect()
}
