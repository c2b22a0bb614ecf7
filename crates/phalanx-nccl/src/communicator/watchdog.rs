//! The threads that look after a communicator. The watchdog sees failures and late calls, and ends the communicator; it waits for nothing
//! that the driver could hold up. The poller asks the driver which calls are done, and drops their memory.
//!
//! Only the watchdog aborts a communicator that is in use. A communicator may be used by one thread at a time, so it
//! waits 5 s for a thread that is inside NCCL, and then aborts all the same. When memory is freed, `cuda::freeing` says.
//!
//! A communicator that is to be shrunk must not have been aborted. So one that is `shrinkable` is only stopped at a failure, by `ncclCommRevoke`,
//! and kept until it has been shrunk, or will not be; then it is aborted. Where that cannot be done at once, it is aborted as any other.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx::{Deadline, Error};

use super::record;
use super::shared::{Handle, SETTLE_TIMEOUT, Shared};
use crate::cuda::Pause;
use crate::nccl::{Code, Comm, IN_PROGRESS, Nccl, REVOKE_DEFAULT, SUCCESS};

/// How often they look while calls are in flight, and while none is.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// The longest time for a clean end: the other ranks take part in it.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a launch may take that has begun before a failure, before the communicator is aborted and not revoked.
const LAUNCH_GRACE: Duration = Duration::from_millis(500);

/// Watches until the communicator has ended.
pub(super) fn watch(shared: &Arc<Shared>) {
    let _done = Done(|| {
        if std::thread::panicking() {
            // Nobody else ends calls that are late.
            let cause =
                "the thread that watches the communicator has panicked, as its message on stderr says";
            shared.fail(shared.group.fail_unless_explained(Error::aborted(cause)));
        }
        shared.ended();
    });
    // Once, and before anything is in flight.
    match shared.stream.device().bind() {
        Ok(_bound) => look_after(shared),
        Err(error) => shared.fail(shared.group.fail_unless_explained(error)),
    }
}

/// Polls until the watchdog has ended.
pub(super) fn poll(shared: &Arc<Shared>) {
    let _done = Done(|| shared.polled());
    while shared.rest_of_poller(BUSY_INTERVAL, IDLE_INTERVAL) {
        look(shared);
    }
    look(shared);
}

fn look(shared: &Shared) {
    if let Err(error) = shared.look() {
        shared.fail(shared.group.fail_unless_explained(error));
    }
    shared.stream.device().free_dropped();
}

/// Says so when a thread is done, however it ends.
struct Done<F: Fn()>(F);

impl<F: Fn()> Drop for Done<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn look_after(shared: &Arc<Shared>) {
    let mut left_since: Option<Instant> = None;
    while shared.rest(BUSY_INTERVAL, IDLE_INTERVAL) {
        if shared.failure().is_some() {
            return abort(shared);
        }
        let of_group = shared.group.watched_failure();
        if of_group.is_some() || shared.is_late() {
            shared.await_look();
        }
        if let Some(cause) = of_group {
            shared.fail_with_group(cause);
            return abort(shared);
        }
        let looked = shared
            .look_at_clock()
            .and_then(|()| shared.look_for_leavers(&mut left_since))
            .and_then(|()| shared.look_at_nccl());
        if let Err(error) = looked {
            shared.fail(shared.group.fail_unless_explained(error));
            return abort(shared);
        }
    }
    end(shared);
}

/// Aborts, and writes the record of the calls.
fn abort(shared: &Shared) {
    let dump = shared
        .failure()
        .filter(|_| !shared.is_retired())
        .and_then(|cause| record::dump(record::place(&shared.group), &cause, shared.calls()));
    stop(shared);
    record::await_dump(dump, END_TIMEOUT);
}

/// Aborts: NCCL stops its kernels, and frees what it has.
fn stop(shared: &Shared) {
    // A thread that is in a call of NCCL sees the failure when that returns, and uses the communicator no more. If it does not return, only the
    // abort can end it: NCCL permits that from another thread.
    let calling = shared.calling.try_lock_for(SETTLE_TIMEOUT);
    let is_stopped = calling.is_some() && shared.is_kept_wanted() && revoke(shared) && await_kernels(shared);
    drop(calling);
    if is_stopped {
        shared.aborted();
        shared.keep();
        // As above, for the thread that shrinks it.
        drop(shared.calling.try_lock_for(SETTLE_TIMEOUT));
    } else {
        shared.cannot_keep();
    }
    // SAFETY: after the failure nobody uses it, but for a call that is stuck in it.
    let is_aborted = unsafe { stop_bound(&shared.nccl, shared.raw()) };
    // Otherwise what is dropped stays.
    if !is_stopped && is_aborted && await_kernels(shared) {
        shared.aborted();
    }
}

/// Whether no kernel of a call runs any more. Where several ranks are threads of one process, NCCL returns from an abort before the kernels have
/// ended, but to the last of them.
fn await_kernels(shared: &Shared) -> bool {
    let (deadline, mut pause) = (Deadline::after(SETTLE_TIMEOUT), Pause::default());
    while shared.may_run() {
        if deadline.has_passed() {
            return false;
        }
        pause.pause();
    }
    true
}

/// Has NCCL end what it does, and leave the communicator so that it can be shrunk. False if it has not done so in time, or cannot. The caller
/// holds `calling`.
fn revoke(shared: &Shared) -> bool {
    if shared.is_retired() {
        return true; // It does nothing.
    }
    let Some(revoke) = shared.nccl.revoke else { return false };
    if !await_launch(shared) {
        return false;
    }
    let (deadline, mut pause) = (Deadline::after(SETTLE_TIMEOUT), Pause::default());
    // SAFETY: it is alive, its device is this thread's, and no other thread is in a call of NCCL.
    let mut state = unsafe { revoke(shared.raw(), REVOKE_DEFAULT) };
    while state == IN_PROGRESS && !deadline.has_passed() {
        pause.pause();
        // SAFETY: as above.
        let code = unsafe { (shared.nccl.ncclCommGetAsyncError)(shared.raw(), &mut state) };
        state = if code == SUCCESS { state } else { code };
    }
    state == SUCCESS
}

/// Whether NCCL launches nothing any more, for which it gets a moment. A revoke ends a launch and frees what NCCL has noted of it, but keeps the
/// address, and uses it when the revoke is done. After an abort nothing is used. The caller holds `calling`.
fn await_launch(shared: &Shared) -> bool {
    let (deadline, mut pause) = (Deadline::after(LAUNCH_GRACE), Pause::default());
    loop {
        // SAFETY: it is alive, its device is this thread's, and no other thread is in a call of NCCL.
        match unsafe { shared.is_settled(shared.raw()) } {
            Ok(true) => return true,
            Ok(false) if deadline.has_passed() => return false,
            Ok(false) => pause.pause(),
            // It hides whether NCCL still has a note of a launch.
            Err(_) => return shared.is_all_queued(),
        }
    }
}

/// Ends the communicator together with the other ranks, or without them if they do not come.
fn end(shared: &Arc<Shared>) {
    // The program may have dropped the communicator before this thread has seen the failure.
    if let Some(cause) = shared.group.watched_failure() {
        shared.fail(cause);
        return abort(shared);
    }
    let raw = shared.raw();
    let (deadline, mut pause) = (Deadline::after(END_TIMEOUT), Pause::default());
    let returned = Arc::new(OnceLock::new());
    let finalizing = finalize(shared, &returned);
    let mut state = IN_PROGRESS;
    while state == IN_PROGRESS
        && finalizing.is_ok()
        && !deadline.has_passed()
        && shared.group.watched_failure().is_none()
    {
        match returned.get() {
            None => {}
            Some(&IN_PROGRESS) => {
                // SAFETY: no call will come, all are done, and the other thread has returned from NCCL.
                let code = unsafe { (shared.nccl.ncclCommGetAsyncError)(raw, &mut state) };
                state = if code == SUCCESS { state } else { code };
            }
            Some(&code) => state = code,
        }
        if state == IN_PROGRESS {
            pause.pause();
        }
    }
    if state == SUCCESS {
        destroy(shared);
    } else if let Some(cause) = shared.group.watched_failure() {
        shared.fail(cause);
        abort(shared);
    } else {
        // The other ranks have not come, which is no failure of the program's calls.
        shared.fail(Error::aborted("the communicator has ended"));
        stop(shared);
    }
    // It has a handle of the group. After the abort it returns from NCCL, unless the abort does not do its work.
    let deadline = Deadline::after(END_TIMEOUT);
    if let Ok(thread) = finalizing {
        while !thread.is_finished() && !deadline.has_passed() {
            pause.pause();
        }
        if thread.is_finished() {
            drop(thread.join());
        }
    }
}

/// Calls `ncclCommFinalize` on a thread of its own: with a communicator that blocks, it waits for the other ranks, and only an abort can end it.
fn finalize(shared: &Arc<Shared>, returned: &Arc<OnceLock<Code>>) -> std::io::Result<JoinHandle<()>> {
    let (shared, returned) = (shared.clone(), returned.clone());
    let name = format!("phalanx-nccl-end-{}", shared.group.rank());
    std::thread::Builder::new().name(name).spawn(move || {
        let _calling = shared.calling.lock();
        // An error if the watchdog has not waited for this thread.
        let Ok(raw) = shared.alive() else { return };
        if let Ok(_bound) = shared.stream.device().bind() {
            // SAFETY: no call will come, and all are done. It is alive, or is aborted while it is stuck in this.
            let _ = returned.set(unsafe { (shared.nccl.ncclCommFinalize)(raw) });
        }
    })
}

/// `ncclCommDestroy`, which waits until NCCL's own thread has sent what the other ranks have not received yet, and has no limit: on a thread
/// that keeps neither the communicator nor the group, for some seconds.
fn destroy(shared: &Shared) {
    struct Finalized(Nccl, crate::cuda::Device, Handle);
    let finalized = Finalized(shared.nccl.clone(), shared.stream.device().clone(), Handle(shared.raw()));
    let name = format!("phalanx-nccl-free-{}", shared.group.rank());
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        let whole = finalized; // Not its parts, of which the pointer alone is not Send.
        let Finalized(nccl, device, Handle(raw)) = whole;
        if let Ok(_bound) = device.bind() {
            // SAFETY: it is finalized, and nobody uses it after this.
            unsafe { (nccl.ncclCommDestroy)(raw) };
        }
    });
    let (deadline, mut pause) = (Deadline::after(END_TIMEOUT), Pause::default());
    while thread.as_ref().is_ok_and(|thread| !thread.is_finished()) && !deadline.has_passed() {
        pause.pause();
    }
}

/// `ncclCommAbort`. Returns whether it was done.
///
/// # Safety
/// The communicator's device is the thread's, and nobody uses `raw` after this.
unsafe fn stop_bound(nccl: &Nccl, raw: Comm) -> bool {
    // SAFETY: the caller says so.
    let code = unsafe { (nccl.ncclCommAbort)(raw) };
    code == SUCCESS || code == IN_PROGRESS
}

/// The same of a communicator that nothing else has.
pub(super) fn stop_raw(nccl: &Nccl, device: &crate::cuda::Device, raw: Comm) -> bool {
    // SAFETY: the handle is the caller's alone, and nobody uses it after this.
    device.bind().is_ok_and(|_bound| unsafe { stop_bound(nccl, raw) })
}

/// Starts both. If that fails, the communicator is ended.
pub(super) fn start(shared: &Arc<Shared>) -> std::io::Result<[JoinHandle<()>; 2]> {
    let rank = shared.group.rank();
    let thread = |name: &str, work: fn(&Arc<Shared>)| {
        let shared = shared.clone();
        let builder = std::thread::Builder::new().name(format!("phalanx-nccl-{name}{rank}"));
        builder.spawn(move || work(&shared))
    };
    let watchdog = thread("", watch).inspect_err(|_| {
        stop_raw(&shared.nccl, shared.stream.device(), shared.raw());
    })?;
    match thread("poll-", poll) {
        Ok(poller) => Ok([watchdog, poller]),
        Err(error) => {
            // The watchdog ends the communicator.
            shared.polled();
            shared.close();
            Err(error)
        }
    }
}
