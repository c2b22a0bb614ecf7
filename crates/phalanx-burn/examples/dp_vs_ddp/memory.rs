//! Who holds how much of the heap. What a replica's thread allocates is that replica's until it is freed, wherever that
//! happens; what other threads allocate (the program's, and those of Burn's kernels) is the main replica's.

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow};
use parking_lot::Mutex;
use tracking_allocator::{
    AllocationGroupId, AllocationGroupToken, AllocationRegistry, AllocationTracker, Allocator,
};

#[global_allocator]
static ALLOCATOR: Allocator<System> = Allocator::system();

/// Groups that are told apart; the last stands for all others.
const GROUPS: usize = 64;

static HELD: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(0) }; GROUPS];
static PEAK: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(0) }; GROUPS];

struct Tracker;

impl Tracker {
    /// The main replica's number is that of the program itself.
    fn place(group: &AllocationGroupId) -> usize {
        (group.as_usize().get() - 1).min(GROUPS - 1)
    }
}

impl AllocationTracker for Tracker {
    fn allocated(&self, _address: usize, size: usize, _wrapped: usize, group: AllocationGroupId) {
        let place = Self::place(&group);
        let held = HELD[place].fetch_add(size, Ordering::Relaxed) + size;
        PEAK[place].fetch_max(held, Ordering::Relaxed);
    }

    fn deallocated(
        &self,
        _address: usize,
        size: usize,
        _wrapped: usize,
        source: AllocationGroupId,
        _current: AllocationGroupId,
    ) {
        HELD[Self::place(&source)].fetch_sub(size, Ordering::Relaxed);
    }
}

/// Where to read the highest values so far.
pub struct Peaks {
    others: Vec<usize>,
}

impl Peaks {
    /// Everything is the main replica's, from now on.
    pub fn of_process() -> Self {
        // A second tracker is refused, which does no harm: it would be the same.
        let _ = AllocationRegistry::set_global_tracker(Tracker);
        AllocationRegistry::enable_tracking();
        Self { others: Vec::new() }
    }

    pub fn main_mb(&self) -> f64 {
        PEAK[0].load(Ordering::Relaxed) as f64 / 1e6
    }

    /// Of the replica that held most.
    pub fn other_mb(&self) -> f64 {
        let peak = |place: &usize| PEAK[*place].load(Ordering::Relaxed);
        self.others.iter().map(peak).max().unwrap_or(0) as f64 / 1e6
    }
}

/// What `DataParallel::with_scope` takes.
type Scope = Box<dyn Fn(usize, &mut dyn FnMut()) + Send + Sync>;

/// A scope for `DataParallel` that attributes memory to replicas.
pub fn of_replicas(count: usize) -> Result<(Peaks, Scope)> {
    let mut peaks = Peaks::of_process();
    let mut tokens = Vec::new();
    for _ in 1..count {
        let token = AllocationGroupToken::register().context("too many groups of allocations")?;
        peaks.others.push(Tracker::place(&token.id()));
        tokens.push(Mutex::new(token));
    }
    let tokens = Arc::new(tokens);
    let scope = move |replica: usize, work: &mut dyn FnMut()| match replica.checked_sub(1) {
        None => work(),
        Some(other) => {
            let mut token = tokens[other].lock();
            let _within = token.enter();
            work();
        }
    };
    if peaks.others.contains(&0) {
        return Err(anyhow!("a replica's memory cannot be told from the program's"));
    }
    Ok((peaks, Box::new(scope)))
}
