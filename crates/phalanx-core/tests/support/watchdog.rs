//! The end of workers that wait for ever.

use std::time::Duration;

/// Aborts this worker after `limit`, when its test gives up. A job whose workers wait for ever has no event at which its test could end it:
/// then it has one.
pub fn abort_after(limit: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        eprintln!("this worker still runs after {limit:?}");
        std::process::abort();
    });
}
