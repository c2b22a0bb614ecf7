//! What the store takes: clients that join, a barrier of all, calls a second. `cargo bench -p phalanx --bench store`
//!
//! Clients are threads of this process, each with a connection of its own, and prove that they know the job's key. The
//! median of several runs is shown.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark ends where it cannot go on")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx::store::{Store, TcpStore, TcpStoreServer};
use phalanx::{Deadline, JobKey};
use rustix::process::{Resource, getrlimit, setrlimit};

const RUNS: usize = 5;
const CLIENTS: [u32; 3] = [10, 100, 1000];
/// Clients that call at the same time, and for how long.
const CALLERS: usize = 8;
const MEASURING_INTERVAL: Duration = Duration::from_secs(1);
/// A client's thread does little.
const STACK: usize = 128 << 10;

fn main() {
    // `cargo test` runs it too, only to see that it works.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    let (runs, calling) = if is_test { (1, Duration::from_millis(10)) } else { (RUNS, MEASURING_INTERVAL) };
    let clients = if is_test { &CLIENTS[..1] } else { &CLIENTS };
    allow_descriptors(2 * u64::from(*clients.last().unwrap()) + 200);
    let key = JobKey::generate().unwrap();
    println!("{:>8} {:>22} {:>12}", "clients", "join and barrier [ms]", "barrier [ms]");
    for count in clients {
        let (join, barrier): (Vec<_>, Vec<_>) = (0..runs).map(|_| join(&key, *count)).unzip();
        println!("{count:>8} {:>22.1} {:>12.1}", milliseconds(join), milliseconds(barrier));
    }
    for (name, call) in [("set", set as fn(&TcpStore, &str)), ("get", get)] {
        let rates = (0..runs).map(|_| rate(&key, calling, call));
        println!("{name:>8} {:>22.0} /s by {CALLERS} clients", median(rates.collect()));
    }
}

/// How long until `count` clients have joined and met, and how long until they have met again.
fn join(key: &JobKey, count: u32) -> (Duration, Duration) {
    let server = TcpStoreServer::bind_with_key(([127, 0, 0, 1], 0).into(), key.clone()).unwrap();
    let address = server.local_addr();
    let (start, again) = (Barrier::new(count as usize + 1), Barrier::new(count as usize + 1));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..count)
            .map(|_| {
                let client = || {
                    start.wait();
                    let store = TcpStore::connect_with_key(address, key, soon()).unwrap();
                    meet(&store, "first", count);
                    let joined = Instant::now();
                    again.wait();
                    meet(&store, "second", count);
                    (joined, Instant::now())
                };
                std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, client).unwrap()
            })
            .collect();
        start.wait();
        let started = Instant::now();
        again.wait();
        let started_again = Instant::now();
        let ends: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        let joined = ends.iter().map(|(joined, _)| *joined).max().unwrap();
        let met = ends.iter().map(|(_, met)| *met).max().unwrap();
        (joined - started, met - started_again)
    })
}

/// As ranks do: each counts itself, the last tells all.
fn meet(store: &TcpStore, name: &str, count: u32) {
    if store.add(name, 1, soon()).unwrap() == i64::from(count) {
        store.set(&format!("{name}/all"), b"", soon()).unwrap();
    }
    store.wait(&[&format!("{name}/all")], soon()).unwrap();
}

/// Calls a second of all clients together.
fn rate(key: &JobKey, calling: Duration, call: fn(&TcpStore, &str)) -> f64 {
    let server = TcpStoreServer::bind_with_key(([127, 0, 0, 1], 0).into(), key.clone()).unwrap();
    let address = server.local_addr();
    let start = Barrier::new(CALLERS);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let start = &start;
                scope.spawn(move || {
                    let store = TcpStore::connect_with_key(address, key, soon()).unwrap();
                    let name = format!("key of {caller}");
                    store.set(&name, &[7; 64], soon()).unwrap();
                    start.wait();
                    let started = Instant::now();
                    let mut calls = 0;
                    while started.elapsed() < calling {
                        call(&store, &name);
                        calls += 1;
                    }
                    f64::from(calls) / started.elapsed().as_secs_f64()
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).sum()
    })
}

fn set(store: &TcpStore, name: &str) {
    store.set(name, &[7; 64], soon()).unwrap();
}

fn get(store: &TcpStore, name: &str) {
    store.get(name, soon()).unwrap();
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn milliseconds(times: Vec<Duration>) -> f64 {
    median(times.iter().map(|time| time.as_secs_f64() * 1e3).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Both ends of all connections are in this process.
fn allow_descriptors(needed: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        limit.current = limit.maximum.map_or(Some(needed), |maximum| Some(needed.min(maximum)));
        setrlimit(Resource::Nofile, limit).unwrap();
        assert!(
            limit.current >= Some(needed),
            "this needs {needed} open files: raise the limit (`ulimit -n`)"
        );
    }
}
