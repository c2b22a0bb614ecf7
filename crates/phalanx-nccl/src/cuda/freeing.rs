//! When the memory of a device is freed.
//!
//! Memory of a pool (`cuMemAllocAsync`) is freed in the order of a stream of its own, which waits for the ends of all streams that this crate
//! knows: `cuMemFree` would not wait for what is queued (the driver's documentation says so of memory of pools). While calls of communicators are
//! in flight, that stream would wait for other ranks, and behind a collective that never ends everything freed later would
//! wait, too. So meanwhile dropped memory is kept until all that was queued before is done, which the poller of a communicator asks. A program that
//! always has a call in flight would otherwise never free anything.
//!
//! A device without memory pools frees with `cuMemFree`, which waits for all that is queued on the device, and only when no call is in flight.
//!
//! After a failure nothing is freed until the abort is over: kernels that it ends, and NCCL's threads, may touch memory until then.
//!
//! Two locks: `MEMORY` is only held for a moment, because the watchdog takes it; `QUEUED` also while the driver is asked.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use phalanx::Deadline;

use super::device::Device;
use super::event::Event;
use super::raw;
use super::stream::Pause;

/// Places by number, because all handles of this process are to the same device. Devices that are this far apart share a place, which
/// only keeps memory longer.
const PLACES: usize = 64;

/// So many ends of streams cost little to look at.
const FEW: usize = 16;

/// What keeps memory of a device from being freed.
struct Memory {
    /// Calls of communicators in flight.
    calls: usize,
    /// Communicators that have failed, and whose kernels may still touch memory.
    aborting: usize,
    /// What was dropped meanwhile, since the last look.
    dropped: Vec<Block>,
    /// How much has ever been dropped meanwhile, and how much of it has been freed.
    all_dropped: u64,
    all_freed: u64,
}

type Block = (Device, u64);

impl Memory {
    fn is_in_use(&self) -> bool {
        self.calls > 0 || self.aborting > 0
    }
}

/// What is queued on a device, and what waits for that.
struct Queued {
    /// The streams that this crate knows, by address. Several values may be for one stream of another library's.
    streams: Vec<(Device, usize)>,
    /// The ends of streams that are no longer known, in the order in which they were forgotten.
    ends: Ends<Arc<Event>>,
    /// Whether a stream is no longer known that had no end that could be asked for: then memory is freed only when no call is in
    /// flight, after a wait for the whole device.
    is_unknown: bool,
    /// Memory, and the events after which nothing uses it; in the order in which it was dropped.
    batches: Vec<(Vec<Block>, Vec<Arc<Event>>)>,
}

static MEMORY: [Mutex<Memory>; PLACES] = [const {
    Mutex::new(Memory { calls: 0, aborting: 0, dropped: Vec::new(), all_dropped: 0, all_freed: 0 })
}; PLACES];

static QUEUED: [Mutex<Queued>; PLACES] = [const {
    Mutex::new(Queued {
        streams: Vec::new(),
        ends: Ends { queue: VecDeque::new(), crowd: 0 },
        is_unknown: false,
        batches: Vec::new(),
    })
}; PLACES];

impl Device {
    /// A communicator on it has failed: its kernels may touch memory until [`settled`](Self::settled).
    pub(crate) fn unsettled(&self) {
        self.memory().lock().aborting += 1;
    }

    pub(crate) fn settled(&self) {
        self.memory().lock().aborting -= 1;
    }

    /// A call is in flight on it until [`landed`](Self::landed).
    pub(crate) fn launched(&self) {
        self.memory().lock().calls += 1;
    }

    pub(crate) fn landed(&self) {
        self.memory().lock().calls -= 1;
    }

    /// Work may be queued on the stream until [`forget`](Self::forget).
    pub(super) fn know(&self, stream: raw::Stream) {
        self.queued().lock().streams.push((self.clone(), stream.addr()));
    }

    /// Nothing more is queued on the stream by this value, which is alive until this returns.
    pub(super) fn forget(&self, stream: raw::Stream) {
        let mut queued = self.queued().lock();
        let known = queued.streams.iter().position(|known| known.1 == stream.addr() && known.0 == *self);
        known.map(|at| queued.streams.swap_remove(at));
        match Event::unless_capturing(self, stream) {
            Some(end) => {
                queued.ends.queue.push_back(Arc::new(end));
                queued.prune();
            }
            None => queued.is_unknown = true,
        }
    }

    /// Frees the memory at `pointer` when all is done that is queued now; while calls are in flight, or a graph is captured,
    /// [`free_dropped`](Self::free_dropped) does so later.
    pub(super) fn free(&self, pointer: u64) {
        let is_in_use = {
            let mut memory = self.memory().lock();
            memory.dropped.push((self.clone(), pointer));
            memory.all_dropped += 1;
            memory.is_in_use()
        };
        if !is_in_use {
            self.free_dropped();
        }
    }

    /// Frees what was dropped while calls were in flight and is used by nothing any more.
    pub(crate) fn free_dropped(&self) {
        let mut queued = self.queued().lock();
        let (dropped, is_in_use, is_aborting) = {
            let mut memory = self.memory().lock();
            // What is kept until no call is in flight stays there.
            let takes = !memory.is_in_use() || self.has_pools() && memory.aborting == 0;
            let dropped = if takes { std::mem::take(&mut memory.dropped) } else { Vec::new() };
            (dropped, memory.is_in_use(), memory.aborting > 0)
        };
        let mut count = 0;
        if self.has_pools() {
            if !dropped.is_empty() {
                match queued.all_ends() {
                    Some(ends) => queued.batches.push((dropped, ends)),
                    None if queued.is_unknown && !is_in_use && self.await_all() => {
                        queued.is_unknown = false;
                        queued.batches.push((dropped, Vec::new()));
                    }
                    // The next look tries again.
                    None => self.memory().lock().dropped.extend(dropped),
                }
            }
            let is_reached = |end: &Arc<Event>| end.is_reached().unwrap_or(false);
            let is_over = |ends: &[Arc<Event>]| !is_in_use || !is_aborting && ends.iter().all(is_reached);
            while queued.batches.first().is_some_and(|(_, ends)| is_over(ends)) {
                let (blocks, ends) = queued.batches.remove(0);
                count += blocks.len() as u64;
                blocks.into_iter().for_each(|(device, pointer)| device.free_behind(pointer, &ends));
            }
        } else {
            count += dropped.len() as u64;
            dropped.into_iter().for_each(|(device, pointer)| device.free_now(pointer));
        }
        queued.prune();
        drop(queued);
        self.memory().lock().all_freed += count;
    }

    /// Waits until all memory that has been dropped so far is freed. Returns whether there was any.
    pub(super) fn await_dropped(&self, deadline: Deadline) -> bool {
        let mut pause = Pause::default();
        let (until, freed) = {
            let memory = self.memory().lock();
            (memory.all_dropped, memory.all_freed)
        };
        while self.memory().lock().all_freed < until && !deadline.has_passed() {
            self.free_dropped();
            pause.pause();
        }
        freed < until
    }

    /// Frees memory that is of no pool.
    fn free_now(&self, pointer: u64) {
        if let Ok(_bound) = self.bind() {
            // SAFETY: whoever has dropped it was its only owner. The driver waits for all that is queued on the device.
            unsafe { (self.cuda().cuMemFree_v2)(pointer) };
        }
    }

    /// Frees memory of a pool when the events are reached, after which nothing uses it. No thread waits. If the driver refuses to wait for
    /// them, the memory stays.
    fn free_behind(&self, pointer: u64, ends: &[Arc<Event>]) {
        let Ok(_bound) = self.bind() else { return };
        let Ok(stream) = self.freeing_stream() else { return };
        let waits = |end: &Arc<Event>| {
            // SAFETY: both are alive. The driver keeps what it needs of the event.
            unsafe { (self.cuda().cuStreamWaitEvent)(stream, end.raw(), 0) == raw::SUCCESS }
        };
        if ends.iter().all(waits) {
            // SAFETY: whoever has dropped it was its only owner, and the stream waits for all that was queued before. It is of a pool, as
            // all memory of a device that has pools.
            unsafe { (self.cuda().cuMemFreeAsync)(pointer, stream) };
        }
    }

    /// Waits for all that is queued on the device. False if the driver refuses, as while a graph is captured.
    fn await_all(&self) -> bool {
        // SAFETY: it has no conditions.
        self.bind().is_ok_and(|_bound| unsafe { (self.cuda().cuCtxSynchronize)() == raw::SUCCESS })
    }

    fn memory(&self) -> &'static Mutex<Memory> {
        &MEMORY[self.ordinal() as usize % PLACES]
    }

    fn queued(&self) -> &'static Mutex<Queued> {
        &QUEUED[self.ordinal() as usize % PLACES]
    }
}

impl Queued {
    /// The ends of all that is queued now; none if a part of it has no end that could be asked for, such as a stream that is captured.
    fn all_ends(&mut self) -> Option<Vec<Arc<Event>>> {
        if self.is_unknown {
            return None;
        }
        let mut known: Vec<(&Device, usize)> =
            self.streams.iter().map(|(device, stream)| (device, *stream)).collect();
        known.sort_by_key(|(device, stream)| (device.ordinal(), *stream));
        known.dedup();
        let ends = known.into_iter().map(|(device, stream)| {
            let stream = std::ptr::without_provenance_mut(stream);
            Event::unless_capturing(device, stream).map(Arc::new)
        });
        let mut ends: Vec<_> = ends.collect::<Option<_>>()?;
        ends.extend(self.ends.queue.iter().cloned());
        Some(ends)
    }

    /// Forgets the ends that are reached.
    fn prune(&mut self) {
        self.ends.prune(|end| end.is_reached().unwrap_or(false));
    }
}

/// Ends that are reached in about their order. An adapter that borrows a stream for each call leaves an end each time, and the driver is asked about
/// each: so those behind one that is late are looked at only when there are twice as many as were left.
struct Ends<E> {
    queue: VecDeque<E>,
    /// With so many ends all are looked at, and not only the first ones.
    crowd: usize,
}

impl<E> Ends<E> {
    /// Forgets those that are reached.
    fn prune(&mut self, is_reached: impl Fn(&E) -> bool) {
        while self.queue.front().is_some_and(&is_reached) {
            self.queue.pop_front();
        }
        if self.queue.len() >= self.crowd {
            self.queue.retain(|end| !is_reached(end));
            self.crowd = 2 * self.queue.len() + FEW;
        }
        // Also after fewer are left than at the last look: one that is late later has few behind it.
        self.crowd = self.crowd.min(2 * self.queue.len() + FEW);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn after_many_late_ends_few_are_kept_again() {
        let mut ends = Ends { queue: VecDeque::new(), crowd: 0 };
        for end in 0..1000 {
            ends.queue.push_back(end);
            ends.prune(|_| false);
        }
        assert_eq!(ends.queue.len(), 1000);
        ends.prune(|_| true);
        assert!(ends.queue.is_empty());
        // The first one is late, and all others are reached.
        let looks = Cell::new(0);
        for end in 0..1000 {
            ends.queue.push_back(end);
            ends.prune(|end| {
                looks.set(looks.get() + 1);
                *end != 0
            });
            assert!(ends.queue.len() <= 2 + FEW, "{} ends", ends.queue.len());
        }
        assert!(looks.get() < 5 * 1000, "{} looks", looks.get());
    }
}
