//! What a worker leaves for its launcher, in case that it fails: its error, in torchrun's format, and the rank whose failure
//! came first.

use std::fs;
use std::io;
use std::panic::{self, PanicHookInfo};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::rank::Rank;

/// torchrun's variable: the file for the error with which this process ends.
pub(crate) const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// The file for the rank whose failure this one has heard of. Not part of the error: a program may go on, and end
/// of something else. `phalanx run` alone sets it, since torchrun takes whatever was written first for the cause.
pub(crate) const BLAME_FILE: &str = "PHALANX_BLAME_FILE";

static PANIC_IS_REPORTED: AtomicBool = AtomicBool::new(false);

/// Leaves `message` in the error file of this process, if its launcher gave it one (`TORCHELASTIC_ERROR_FILE`).
///
/// The launcher shows it as the cause of the failure. A file that is given but cannot be written is not an error: the
/// worker has a worse one to report.
pub fn write(message: &str) {
    if let Some(path) = path(ERROR_FILE) {
        let _ = write_to(&path, message, false);
    }
}

/// Notes that `rank`, counted in the first group, failed before this one did. If both fail, that is the job's first failure.
pub(crate) fn blame(rank: Rank) {
    if let Some(path) = path(BLAME_FILE) {
        // Without it the launcher goes by who ended first.
        let _ = fs::write(path, rank.to_string());
    }
}

/// From now on a panic of the main thread leaves its message and its place in the error file, besides what the panic hook of
/// the program does. Another thread's panic need not end the process.
pub(crate) fn report_panics() {
    static ONCE: Once = Once::new();
    if path(ERROR_FILE).is_none() {
        return;
    }
    ONCE.call_once(|| {
        let earlier = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            earlier(info);
            if thread::current().name() == Some("main") {
                write_panic(info);
            }
        }));
    });
}

/// Has a panic been left in the error file?
pub(crate) fn panic_is_reported() -> bool {
    PANIC_IS_REPORTED.load(Ordering::Relaxed)
}

fn write_panic(info: &PanicHookInfo<'_>) {
    let message = info.payload_as_str().unwrap_or("with a value that is not text");
    let place = info.location().map_or_else(String::new, |location| format!(" at {location}"));
    if let Some(path) = path(ERROR_FILE) {
        let written = write_to(&path, &format!("panicked{place}: {message}"), true);
        PANIC_IS_REPORTED.store(written.is_ok(), Ordering::Relaxed);
    }
}

fn path(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// `panicked`: a panic, which counts only if it has ended the process.
pub(crate) fn write_to(path: &Path, message: &str, panicked: bool) -> io::Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let extra = json!({ "py_callstack": "", "timestamp": seconds.to_string(), "panicked": panicked });
    fs::write(path, json!({ "message": { "message": message, "extraInfo": extra } }).to_string())
}
