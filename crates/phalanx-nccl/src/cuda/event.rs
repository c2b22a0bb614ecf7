//! Events: points in a stream.

use std::ptr;

use phalanx::Result;

use super::device::Device;
use super::raw::{self, NOT_READY, SUCCESS};
use super::stream::Stream;

/// Without the time, which makes it cheaper.
const DISABLE_TIMING: u32 = 2;
/// The most events of a device that are kept for later. More are only needed while more calls are in flight.
const MOST_SPARE: usize = 256;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: i32 = 0;

/// A point in a stream, which is reached when all that was queued before it is done.
pub(crate) struct Event {
    device: Device,
    raw: raw::Event,
    is_recorded: bool,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above; the driver's functions may be called by several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// The end of what has been queued on `stream` so far.
    pub(crate) fn at_end_of(stream: &Stream) -> Result<Self> {
        Self::at_end_of_raw(stream.device(), stream.raw())
    }

    /// The same of a stream that is alive. None if that cannot be asked for, as while a graph is captured from it: the event would belong to the
    /// graph.
    pub(super) fn unless_capturing(device: &Device, stream: raw::Stream) -> Option<Self> {
        match is_capturing(device, stream) {
            Ok(false) => Self::at_end_of_raw(device, stream).ok(),
            Ok(true) | Err(_) => None,
        }
    }

    fn at_end_of_raw(device: &Device, stream: raw::Stream) -> Result<Self> {
        let bound = device.bind()?;
        let cuda = device.cuda();
        let spare = device.spare_events().lock().pop();
        let raw = match spare {
            Some(address) => ptr::with_exposed_provenance_mut(address),
            None => {
                let mut raw = ptr::null_mut();
                // SAFETY: it writes one pointer there.
                cuda.check("cuEventCreate", unsafe { (cuda.cuEventCreate)(&mut raw, DISABLE_TIMING) })?;
                raw
            }
        };
        let mut event = Self { device: device.clone(), raw, is_recorded: false };
        // SAFETY: both are alive, and of the same context.
        let code = unsafe { (cuda.cuEventRecord)(raw, stream) };
        cuda.check("cuEventRecord", code)?;
        event.is_recorded = true;
        drop(bound);
        Ok(event)
    }

    /// Whether it has been reached.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive.
        match unsafe { (self.device.cuda().cuEventQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            // Not of this call: what the device did before has failed.
            code => {
                let call = format!("cuEventQuery on CUDA device {}", self.device.ordinal());
                let failed = self.device.cuda().check(&call, code).map(|()| true);
                failed.map_err(|error| {
                    error.with_remedy(
                        "a kernel has failed, perhaps one of the program's: CUDA_LAUNCH_BLOCKING=1 shows which. This process cannot use the device \
                         any more",
                    )
                })
            }
        }
    }

    pub(super) fn raw(&self) -> raw::Event {
        self.raw
    }
}

impl Drop for Event {
    /// Keeps it for the next one: each call needs one. What waits for it has noted its state when the wait was queued (`cuStreamWaitEvent`).
    fn drop(&mut self) {
        let mut spare = self.device.spare_events().lock();
        if self.is_recorded && spare.len() < MOST_SPARE {
            return spare.push(self.raw.expose_provenance());
        }
        drop(spare);
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: nobody else has it. If it has not been reached, the driver frees it when it is.
            unsafe { (self.device.cuda().cuEventDestroy_v2)(self.raw) };
        }
    }
}

/// Whether a graph is captured from the stream, which is alive. An error if the driver does not say, as of the default stream during
/// some captures.
pub(super) fn is_capturing(device: &Device, stream: raw::Stream) -> Result<bool> {
    let _bound = device.bind()?;
    let mut status = NOT_CAPTURING;
    // SAFETY: the stream is alive, and it writes one number.
    let code = unsafe { (device.cuda().cuStreamIsCapturing)(stream, &mut status) };
    device.cuda().check("cuStreamIsCapturing", code)?;
    Ok(status != NOT_CAPTURING)
}
