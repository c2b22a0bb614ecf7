//! Measures how much memory each replica holds. Of the heap, what a replica's thread allocates is that replica's until it is freed, wherever that
//! happens; what the threads of Burn's kernels allocate, which work for all replicas, is counted by itself; what other threads
//! allocate is the main replica's. Memory that processes share is no heap: the kernel says how much of it is this process's.

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use tracking_allocator::{AllocationGroupId, AllocationGroupToken, AllocationRegistry, AllocationTracker};

/// The allocator that counts. A program that asks for [`Peaks`] has it:
///
/// ```ignore
/// #[global_allocator]
/// static ALLOCATOR: Allocator = memory::allocator();
/// ```
pub type Allocator = tracking_allocator::Allocator<System>;

/// See [`Allocator`].
pub const fn allocator() -> Allocator {
    Allocator::system()
}

/// Groups of allocations that can be registered.
const GROUPS: usize = 64;
/// Their owners: the main replica, the kernels, and the other replicas.
const MAIN: usize = 0;
const KERNELS: usize = 1;
const OTHERS: usize = 2;

/// The owner of each group; the main replica's if nobody has said so.
static OWNER: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(MAIN) }; GROUPS];
static HELD: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(0) }; GROUPS];
static PEAK: [AtomicUsize; GROUPS] = [const { AtomicUsize::new(0) }; GROUPS];

/// The most that a replica may hold, with what its process shares with others.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Of the memory that this process shares with others, its part, when somebody looked.
static SHARED: AtomicUsize = AtomicUsize::new(0);
/// What a process says that ends because a replica would hold more.
pub const EXCEEDED: &str = "out of memory: replica ";

struct Tracker;

impl Tracker {
    fn owner(group: &AllocationGroupId) -> usize {
        OWNER.get(group.as_usize().get()).map_or(MAIN, |owner| owner.load(Ordering::Relaxed))
    }
}

impl AllocationTracker for Tracker {
    fn allocated(&self, _address: usize, size: usize, _wrapped: usize, group: AllocationGroupId) {
        let owner = Self::owner(&group);
        let held = HELD[owner].fetch_add(size, Ordering::Relaxed) + size;
        PEAK[owner].fetch_max(held, Ordering::Relaxed);
        let limit = LIMIT.load(Ordering::Relaxed);
        // The first thread reports it, and the others go on until the process ends.
        if held + SHARED.load(Ordering::Relaxed) > limit
            && LIMIT.swap(usize::MAX, Ordering::Relaxed) != usize::MAX
        {
            let replica = owner.saturating_sub(OTHERS);
            eprintln!("{EXCEEDED}{replica} asks for more than {limit} bytes");
            std::process::abort();
        }
    }

    fn deallocated(
        &self,
        _address: usize,
        size: usize,
        _wrapped: usize,
        source: AllocationGroupId,
        _current: AllocationGroupId,
    ) {
        HELD[Self::owner(&source)].fetch_sub(size, Ordering::Relaxed);
    }
}

/// A group of allocations that are `owner`'s.
fn register(owner: usize) -> Result<AllocationGroupToken> {
    let token = AllocationGroupToken::register().context("too many groups of allocations")?;
    let place = OWNER.get(token.id().as_usize().get());
    place.context("too many groups of allocations")?.store(owner, Ordering::Relaxed);
    Ok(token)
}

/// Bytes that are allocated to see whether they are counted.
const PROBE: usize = 1 << 16;

/// The highest values so far.
#[derive(Default)]
pub struct Peaks {
    replicas: usize,
}

impl Peaks {
    /// Begins to count. Called before any kernel runs, because kernels get threads that count for themselves.
    ///
    /// # Errors
    /// If the program has not [this allocator](Allocator), or something has begun already.
    pub fn begin() -> Result<Self> {
        let threads: Vec<_> = (0..rayon::max_num_threads().min(threads()))
            .map(|_| register(KERNELS).map(|token| Mutex::new(Some(token))))
            .collect::<Result<_>>()?;
        AllocationRegistry::set_global_tracker(Tracker).context("memory is tracked already")?;
        AllocationRegistry::enable_tracking();
        let probe = std::hint::black_box(vec![0_u8; PROBE]);
        ensure!(
            PEAK[MAIN].load(Ordering::Relaxed) >= probe.len(),
            "nothing counts memory: the program needs `#[global_allocator] static ALLOCATOR: Allocator = memory::allocator();`"
        );
        rayon::ThreadPoolBuilder::new()
            .start_handler(move |number| {
                if let Some(token) = threads.get(number).and_then(|token| token.lock().take()) {
                    // For as long as the thread lives, which is as long as the process.
                    std::mem::forget(Box::leak(Box::new(token)).enter());
                }
            })
            .build_global()?;
        Ok(Self::default())
    }

    /// Forgets what was held before, such as while files were read.
    pub fn restart(&mut self) {
        for (peak, held) in PEAK.iter().zip(&HELD) {
            peak.store(held.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// From now on the process ends, with [`EXCEEDED`] on standard error, when a replica would hold more than `bytes`, as a device
    /// refuses what it has no memory for.
    pub fn limit(&mut self, bytes: usize) {
        LIMIT.store(bytes, Ordering::Relaxed);
    }

    /// Takes note of the memory that this process shares with others now: buckets. A page that is mapped by several processes
    /// counts for each as a part.
    pub fn look(&self) -> Result<()> {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss_Shmem:"));
        let kib = line.and_then(|line| line.split_whitespace().next()).context("no Pss_Shmem is there")?;
        SHARED.fetch_max(kib.parse::<usize>()? * 1024, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of the memory that this process shares with others, its part, when somebody [looked](Self::look).
    pub fn shared(&self) -> usize {
        SHARED.load(Ordering::Relaxed)
    }

    /// Of the main replica, or of a rank: heap, and its part of what is shared.
    pub fn main_mb(&self) -> f64 {
        mb(&PEAK[MAIN]) + mb(&SHARED)
    }

    /// Of the replica that held most besides.
    pub fn other_mb(&self) -> f64 {
        (1..self.replicas).map(|replica| mb(&PEAK[OTHERS + replica])).fold(0.0, f64::max)
    }

    /// Of the kernels' threads.
    pub fn kernels_mb(&self) -> f64 {
        mb(&PEAK[KERNELS])
    }
}

fn mb(bytes: &AtomicUsize) -> f64 {
    bytes.load(Ordering::Relaxed) as f64 / 1e6
}

fn threads() -> usize {
    let set = std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok());
    set.filter(|number| *number > 0)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
}

/// What `DataParallel::with_scope` takes.
pub type Scope = Box<dyn Fn(usize, &mut dyn FnMut()) + Send + Sync>;

/// A scope for `DataParallel` that attributes memory to replicas.
pub fn of_replicas(count: usize) -> Result<(Peaks, Scope)> {
    ensure!(OTHERS + count <= GROUPS, "too many replicas to tell apart");
    let mut peaks = Peaks::begin()?;
    peaks.replicas = count;
    let tokens = (1..count).map(|replica| register(OTHERS + replica).map(Mutex::new));
    let tokens: Arc<[_]> = tokens.collect::<Result<Vec<_>>>()?.into();
    let scope = move |replica: usize, work: &mut dyn FnMut()| match replica.checked_sub(1) {
        None => work(),
        Some(other) => {
            let mut token = tokens[other].lock();
            let _within = token.enter();
            work();
        }
    };
    Ok((peaks, Box::new(scope)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_whose_allocator_counts_nothing_is_told_so() {
        let error = Peaks::begin().err().unwrap().to_string();
        assert!(error.contains("nothing counts memory"), "{error}");
    }
}
