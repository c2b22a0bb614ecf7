//! Streams: queues of work for a device.

use std::fmt;
use std::ptr;
use std::time::Duration;

use phalanx::{Deadline, Error, Result};

use super::device::Device;
use super::event::{self, Event};
use super::raw;

/// Does not wait for the default stream.
pub(super) const NON_BLOCKING: u32 = 1;
/// How often a wait looks, at first without a pause.
const BUSY: u32 = 200;
const PAUSE_DELAY: Duration = Duration::from_micros(50);

/// A queue of work for a device: what is queued on it is done in that order, beside what is queued on other streams.
pub struct Stream {
    device: Device,
    raw: raw::Stream,
    owned: bool,
}

// SAFETY: a stream is a handle that any thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver's functions may be called by several threads at once.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of one's own, which does not wait for the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        Self::with_priority(device, false)
    }

    /// The same, whose kernels go before those of other streams if `urgent`.
    pub(crate) fn with_priority(device: &Device, urgent: bool) -> Result<Self> {
        let _bound = device.bind()?;
        let cuda = device.cuda();
        let (mut least, mut greatest, mut raw) = (0, 0, ptr::null_mut());
        // SAFETY: it writes two numbers there.
        let code = unsafe { (cuda.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        cuda.check("cuCtxGetStreamPriorityRange", code)?;
        let priority = if urgent { greatest } else { least };
        // SAFETY: it writes one pointer there.
        let code = unsafe { (cuda.cuStreamCreateWithPriority)(&mut raw, NON_BLOCKING, priority) };
        cuda.check("cuStreamCreateWithPriority", code)?;
        device.know(raw);
        Ok(Self { device: device.clone(), raw, owned: true })
    }

    /// A stream that another library owns, such as PyTorch's current one: a `CUstream`, which is the same as a `cudaStream_t`. Zero
    /// is the default stream.
    ///
    /// # Safety
    /// It is a stream of the device's primary context, and lives as long as this value.
    pub unsafe fn from_raw(device: &Device, raw: usize) -> Self {
        let raw = ptr::without_provenance_mut(raw);
        device.know(raw);
        Self { device: device.clone(), raw, owned: false }
    }

    /// The `CUstream`, for other libraries. It is valid as long as this value.
    pub fn as_raw(&self) -> usize {
        self.raw.addr()
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is queued on this stream from now on waits for what has been queued on `other` so far. No thread waits.
    ///
    /// # Errors
    /// If the driver refuses, or a graph is captured from one of them.
    #[doc(alias("wait_stream", "cudaStreamWaitEvent"))]
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.check_not_captured()?;
        other.check_not_captured()?;
        self.wait_for_event(&Event::at_end_of(other)?)
    }

    /// An error if a graph is captured from it: what is queued on it, or waits for it, would become a part of the graph.
    pub(crate) fn check_not_captured(&self) -> Result<()> {
        if event::is_capturing(&self.device, self.raw)? {
            let cause =
                format!("a graph is captured from {self:?}, and what this crate queues cannot be captured");
            return Err(
                Error::invalid_argument(cause).with_remedy("make this call before the capture, or after it")
            );
        }
        Ok(())
    }

    pub(crate) fn wait_for_event(&self, event: &Event) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both are alive. The driver keeps what it needs of the event.
        let code = unsafe { (self.device.cuda().cuStreamWaitEvent)(self.raw, event.raw(), 0) };
        self.device.cuda().check("cuStreamWaitEvent", code)
    }

    /// Waits until all that has been queued so far is done.
    ///
    /// # Errors
    /// If `deadline` passes first, a kernel has failed, or a graph is captured from the stream.
    pub fn synchronize(&self, deadline: Deadline) -> Result<()> {
        self.check_not_captured()?;
        let event = Event::at_end_of(self)?;
        let mut pause = Pause::default();
        while !event.is_reached()? {
            if deadline.has_passed() {
                return Err(Error::timeout(format!(
                    "a stream of {:?} has not ended its work in time",
                    self.device
                ))
                .with_remedy(
                    "is a kernel stuck, or is a collective on it that another rank has not called?",
                ));
            }
            pause.pause();
        }
        Ok(())
    }

    pub(crate) fn raw(&self) -> raw::Stream {
        self.raw
    }
}

/// The pauses between two looks: none at first, because most waits are short.
#[derive(Default)]
pub(crate) struct Pause(u32);

impl Pause {
    pub(crate) fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=BUSY => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE_DELAY),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?} of {:?})", self.raw, self.device)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.device.is_own() {
            return;
        }
        self.device.forget(self.raw);
        if self.owned
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: it is this value's own. The driver frees it when what is queued on it is done.
            unsafe { (self.device.cuda().cuStreamDestroy_v2)(self.raw) };
        }
    }
}
