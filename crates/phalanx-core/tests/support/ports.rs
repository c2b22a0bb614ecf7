//! Ports for tests that have to know one before anybody listens there.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// A port that was free a moment ago. It is below those that the system gives out by itself, and each process of tests begins at
/// another one.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() * 37 % 20_000) as u16;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
