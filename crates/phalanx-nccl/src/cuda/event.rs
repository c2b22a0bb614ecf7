//! Events: points in a stream.

use std::ptr;

use phalanx::Result;

use super::device::Device;
use super::raw::{self, NOT_READY, SUCCESS};
use super::stream::Stream;

/// Without the time, which makes it cheaper.
const DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: i32 = 0;

/// A point in a stream, which is reached when all that was queued before it is done.
pub(crate) struct Event {
    device: Device,
    raw: raw::Event,
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
        let bound = device.bind().ok()?;
        let mut status = 0;
        // SAFETY: the stream is alive, and it writes one number.
        let code = unsafe { (device.cuda().cuStreamIsCapturing)(stream, &mut status) };
        drop(bound);
        if code != SUCCESS || status != NOT_CAPTURING {
            return None;
        }
        Self::at_end_of_raw(device, stream).ok()
    }

    fn at_end_of_raw(device: &Device, stream: raw::Stream) -> Result<Self> {
        let (device, mut raw) = (device.clone(), ptr::null_mut());
        let bound = device.bind()?;
        let cuda = device.cuda();
        // SAFETY: it writes one pointer there.
        cuda.check("cuEventCreate", unsafe { (cuda.cuEventCreate)(&mut raw, DISABLE_TIMING) })?;
        drop(bound);
        let event = Self { device, raw };
        let bound = event.device.bind()?;
        // SAFETY: both are alive, and of the same context.
        let code = unsafe { (event.device.cuda().cuEventRecord)(raw, stream) };
        event.device.cuda().check("cuEventRecord", code)?;
        drop(bound);
        Ok(event)
    }

    /// Has it been reached?
    pub(crate) fn is_reached(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is alive.
        match unsafe { (self.device.cuda().cuEventQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => self.device.cuda().check("cuEventQuery", code).map(|()| true),
        }
    }

    pub(super) fn raw(&self) -> raw::Event {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: nobody else has it. If it has not been reached, the driver frees it when it is.
            unsafe { (self.device.cuda().cuEventDestroy_v2)(self.raw) };
        }
    }
}
