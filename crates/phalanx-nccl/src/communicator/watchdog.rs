//! The thread that looks after a communicator: it sees failures and late calls, and ends the communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::{Deadline, Error};

use super::shared::{Handle, Shared};
use crate::cuda::Pause;
use crate::nccl::{Comm, IN_PROGRESS, Nccl, SUCCESS};

/// How often it looks while calls are in flight, and while none is.
const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(50);
/// The longest time for a clean end: the other ranks take part in it.
const ENDING: Duration = Duration::from_secs(3);

/// Watches until the communicator has ended.
pub(super) fn watch(shared: &Arc<Shared>) {
    look_after(shared);
    shared.ended();
}

fn look_after(shared: &Shared) {
    let mut left_since: Option<Instant> = None;
    while shared.rest(if shared.is_idle() { IDLE } else { BUSY }) {
        // What is done is done, whatever fails afterwards.
        let looked = shared.look();
        let looked = looked
            .and_then(|()| shared.look_for_leavers(&mut left_since))
            .and_then(|()| shared.look_at_nccl());
        let cause = shared.failure().or_else(|| shared.group.failure());
        let cause = cause.or_else(|| looked.err().map(|error| shared.group.fail_unless_explained(error)));
        if let Some(cause) = cause {
            shared.fail(cause);
            return abort(shared);
        }
    }
    end(shared);
}

/// Aborts: NCCL stops its kernels, and frees what it has.
fn abort(shared: &Shared) {
    // Without the lock a call of another thread would lose its communicator. It looks for the failure itself, so that it returns, unless
    // NCCL keeps it; nobody waits for this thread longer than some seconds.
    let Some(handle) = shared.comm.lock().take() else { return };
    if stop(&shared.nccl, shared, handle) {
        shared.aborted();
    }
}

/// Ends the communicator together with the other ranks, or without them if they do not come.
fn end(shared: &Shared) {
    let Some(Handle(raw)) = shared.comm.lock().take() else { return };
    let Ok(bound) = shared.stream.device().bind() else { return };
    // SAFETY: the handle is this function's own, and all its calls are done.
    let mut state = unsafe { (shared.nccl.ncclCommFinalize)(raw) };
    let (deadline, mut pause) = (Deadline::after(ENDING), Pause::default());
    while state == IN_PROGRESS && !deadline.has_passed() && shared.group.failure().is_none() {
        pause.pause();
        // SAFETY: the handle is this function's own.
        let code = unsafe { (shared.nccl.ncclCommGetAsyncError)(raw, &mut state) };
        state = if code == SUCCESS { state } else { code };
    }
    if state == SUCCESS {
        // SAFETY: it is finalized, and nobody uses it after this.
        unsafe { (shared.nccl.ncclCommDestroy)(raw) };
        return;
    }
    drop(bound);
    shared.fail(shared.group.failure().unwrap_or_else(|| Error::aborted("the communicator has ended")));
    if stop(&shared.nccl, shared, Handle(raw)) {
        shared.aborted();
    }
}

/// `ncclCommAbort`. Was it done?
fn stop(nccl: &Nccl, shared: &Shared, handle: Handle) -> bool {
    stop_raw(nccl, shared.stream.device(), handle.0)
}

/// The same of a communicator that nothing else has.
pub(super) fn stop_raw(nccl: &Nccl, device: &crate::cuda::Device, raw: Comm) -> bool {
    let Ok(_bound) = device.bind() else { return false };
    // SAFETY: the handle is the caller's alone, and nobody uses it after this.
    let code = unsafe { (nccl.ncclCommAbort)(raw) };
    code == SUCCESS || code == IN_PROGRESS
}
