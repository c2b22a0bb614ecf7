//! Devices and their contexts.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use phalanx::{Error, ProcessGroup, Result};

use super::raw::{
    CAPTURE_RELAXED, Context, Cuda, INVALID_VALUE, MEMORY_OF_DEVICE, MEMORY_POOLS_SUPPORTED,
    POINTER_DEVICE_ORDINAL, POINTER_MEMORY_TYPE, SUCCESS, Stream as RawStream, UUID_BYTES,
};
use super::stream::NON_BLOCKING;

/// A CUDA device with its primary context, which is the one that PyTorch, Burn and NCCL use. Clones are handles to the same.
///
/// libcuda is opened at run time: `PHALANX_CUDA_LIBRARY`, or else `libcuda.so.1` of the system.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

/// The memory of a device, in bytes, as the driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that are not in use.
    pub free: u64,
    /// All bytes of the device.
    pub total: u64,
}

impl MemoryInfo {
    /// Bytes that are in use, by this process or another one, for tensors or by the driver.
    pub fn used(self) -> u64 {
        self.total.saturating_sub(self.free)
    }
}

struct DeviceInner {
    cuda: Cuda,
    ordinal: u32,
    /// The process that has opened it, and not one that was forked from that, in which CUDA cannot be used.
    process: u32,
    context: Context,
    /// Whether it allocates and frees memory in the order of a stream (`cuMemAllocAsync`).
    has_pools: bool,
    /// The stream in whose order memory is freed.
    freeing: OnceLock<RawStream>,
    /// Events that nobody uses, by address.
    spare_events: Mutex<Vec<usize>>,
}

// SAFETY: a context may be used by any thread; it is a handle, and no memory of this process is behind it.
unsafe impl Send for DeviceInner {}
// SAFETY: as above; the driver's functions may be called by several threads at once.
unsafe impl Sync for DeviceInner {}

impl Device {
    /// The device with this number, as `CUDA_VISIBLE_DEVICES` counts.
    ///
    /// # Errors
    /// If libcuda cannot be opened, if it finds no device, or fewer.
    pub fn open(ordinal: u32) -> Result<Self> {
        let cuda = Cuda::open()?;
        let count = cuda.device_count()?;
        if ordinal >= count {
            return Err(Error::environment(format!(
                "there is no CUDA device {ordinal}: this process sees {count}"
            ))
            .with_remedy("start as many ranks on a host as it has devices, or see CUDA_VISIBLE_DEVICES"));
        }
        let (mut handle, mut context) = (0, ptr::null_mut());
        // SAFETY: it writes one number there.
        cuda.check("cuDeviceGet", unsafe { (cuda.cuDeviceGet)(&mut handle, ordinal as i32) })?;
        // SAFETY: `handle` is a device, and it writes one pointer. The drop releases what is retained here.
        cuda.check("cuDevicePrimaryCtxRetain", unsafe {
            (cuda.cuDevicePrimaryCtxRetain)(&mut context, handle)
        })?;
        let mut pools = 0;
        // SAFETY: it writes one number there.
        let code = unsafe { (cuda.cuDeviceGetAttribute)(&mut pools, MEMORY_POOLS_SUPPORTED, handle) };
        let has_pools = code == SUCCESS && pools != 0;
        Ok(Self(Arc::new(DeviceInner {
            cuda,
            ordinal,
            process: std::process::id(),
            context,
            has_pools,
            freeing: OnceLock::new(),
            spare_events: Mutex::default(),
        })))
    }

    /// The device for this rank: the one with the number of its [local rank](ProcessGroup::local_rank). If this process sees only one, that one:
    /// schedulers such as Slurm's `--gpus-per-task` show each task its own. Where ranks share a device by mistake, [`Communicator::new`] says
    /// which.
    ///
    /// [`Communicator::new`]: crate::Communicator::new
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of_local_rank(group: &ProcessGroup) -> Result<Self> {
        Self::open(ordinal_for(group.local_rank(), Self::count()?))
    }

    /// How many devices this process sees.
    ///
    /// # Errors
    /// If libcuda cannot be opened.
    pub fn count() -> Result<u32> {
        Cuda::open()?.device_count()
    }

    /// All devices that this process sees, by number.
    ///
    /// # Errors
    /// If libcuda cannot be opened, or a device cannot be used.
    pub fn all() -> Result<Vec<Self>> {
        (0..Self::count()?).map(Self::open).collect()
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// What it is called.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn name(&self) -> Result<String> {
        describe(&self.0.cuda, self.0.ordinal).map(|(name, _)| name)
    }

    /// How much of its memory is free now. The rest is used: by this process and others, by tensors, by contexts, and by what allocators keep
    /// for later, as those of PyTorch and CubeCL do.
    ///
    /// # Errors
    /// If the driver does not say.
    #[doc(alias("cuMemGetInfo", "torch.cuda.mem_get_info"))]
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two numbers there.
        let code = unsafe { (self.cuda().cuMemGetInfo_v2)(&mut free, &mut total) };
        self.cuda().check("cuMemGetInfo", code)?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Whether the driver says that `pointer` is an address in this device's memory. An adapter asks before it lends a tensor
    /// ([`DeviceSlice`](crate::DeviceSlice)): with an address of the host, or of another device, a collective would fail on the device, after
    /// which the process can use it no longer.
    ///
    /// # Errors
    /// If the driver refuses the question.
    pub fn holds(&self, pointer: u64) -> Result<bool> {
        let _bound = self.bind()?;
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: both attributes are numbers of this size. The driver does not follow the address.
            let code = unsafe {
                (self.cuda().cuPointerGetAttribute)(ptr::from_mut(&mut value).cast(), attribute, pointer)
            };
            match code {
                INVALID_VALUE => Ok(None), // It does not know the address.
                code => self.cuda().check("cuPointerGetAttribute", code).map(|()| Some(value)),
            }
        };
        let is_device = ask(POINTER_MEMORY_TYPE)? == Some(MEMORY_OF_DEVICE);
        Ok(is_device && ask(POINTER_DEVICE_ORDINAL)? == i32::try_from(self.ordinal()).ok())
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        &self.0.cuda
    }

    /// Alive as long as this device.
    pub(super) fn context(&self) -> Context {
        self.0.context
    }

    /// The driver's own number for it.
    pub(super) fn handle(&self) -> Result<c_int> {
        let mut handle = 0;
        // SAFETY: it writes one number there.
        let code = unsafe { (self.cuda().cuDeviceGet)(&mut handle, self.0.ordinal as i32) };
        self.cuda().check("cuDeviceGet", code).map(|()| handle)
    }

    /// Whether this process has opened it, and is not one that was forked from that: another thread of the parent's may have held a lock then.
    pub(super) fn is_own(&self) -> bool {
        self.0.process == std::process::id()
    }

    pub(super) fn spare_events(&self) -> &Mutex<Vec<usize>> {
        &self.0.spare_events
    }

    pub(super) fn has_pools(&self) -> bool {
        self.0.has_pools
    }

    /// The stream in whose order memory is freed, while the device is bound. Nothing else is queued on it.
    pub(super) fn freeing_stream(&self) -> Result<RawStream> {
        if let Some(stream) = self.0.freeing.get() {
            return Ok(*stream);
        }
        let mut made = ptr::null_mut();
        // SAFETY: it writes one pointer there.
        let code = unsafe { (self.cuda().cuStreamCreateWithPriority)(&mut made, NON_BLOCKING, 0) };
        self.cuda().check("cuStreamCreateWithPriority", code)?;
        if self.0.freeing.set(made).is_err() {
            // SAFETY: another thread was faster, and nobody has this one.
            unsafe { (self.cuda().cuStreamDestroy_v2)(made) };
        }
        Ok(*self.0.freeing.get().unwrap_or(&made))
    }

    /// What distinguishes it from every other device, of this host and of others.
    pub(crate) fn uuid(&self) -> Result<[u8; UUID_BYTES]> {
        let (cuda, handle, mut uuid) = (&self.0.cuda, self.handle()?, [0; UUID_BYTES]);
        // SAFETY: it writes that many bytes.
        cuda.check("cuDeviceGetUuid", unsafe { (cuda.cuDeviceGetUuid)(&mut uuid, handle) })?;
        Ok(uuid)
    }

    /// Makes it the calling thread's current device, until the guard is dropped.
    ///
    /// Meanwhile the thread's calls do not disturb the capture of a graph (`cuStreamBeginCapture`), which another thread, or a framework on this
    /// one, may have begun: without that, a look at an event or a free here would invalidate it. Nothing that is called under this
    /// guard belongs into such a graph.
    pub(crate) fn bind(&self) -> Result<Bound<'_>> {
        // SAFETY: the context is retained as long as this device exists.
        let code = unsafe { (self.0.cuda.cuCtxPushCurrent_v2)(self.0.context) };
        self.0.cuda.check("cuCtxPushCurrent", code)?;
        let mut bound = Bound { device: self, capture_mode: None, _of_this_thread: PhantomData };
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: it reads a mode there, and writes the one before.
        let code = unsafe { (self.0.cuda.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        self.0.cuda.check("cuThreadExchangeStreamCaptureMode", code)?;
        bound.capture_mode = Some(mode);
        Ok(bound)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.ordinal == other.0.ordinal
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.ordinal)
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        let (mut handle, mut popped) = (0, ptr::null_mut());
        // SAFETY: the context is retained until below.
        if unsafe { (self.cuda.cuCtxPushCurrent_v2)(self.context) } == SUCCESS {
            if let Some(stream) = self.freeing.take() {
                // SAFETY: it is this value's own. The driver frees it when what is queued on it is done.
                unsafe { (self.cuda.cuStreamDestroy_v2)(stream) };
            }
            for event in std::mem::take(self.spare_events.get_mut()) {
                // SAFETY: it is this value's own, as above.
                unsafe { (self.cuda.cuEventDestroy_v2)(ptr::with_exposed_provenance_mut(event)) };
            }
            // SAFETY: it was pushed above.
            unsafe { (self.cuda.cuCtxPopCurrent_v2)(&mut popped) };
        }
        // SAFETY: it was a device before, and it writes one number.
        if unsafe { (self.cuda.cuDeviceGet)(&mut handle, self.ordinal as i32) } == SUCCESS {
            // SAFETY: it releases what `open` has retained.
            unsafe { (self.cuda.cuDevicePrimaryCtxRelease_v2)(handle) };
        }
    }
}

/// The current device of a thread.
pub(crate) struct Bound<'a> {
    device: &'a Device,
    /// The thread's mode before.
    capture_mode: Option<i32>,
    _of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: it reads a mode there, and writes the one before.
            unsafe { (self.device.0.cuda.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        }
        // SAFETY: this thread has pushed a context, and its guards are dropped in the reverse order.
        unsafe { (self.device.0.cuda.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

/// The number of the device of a local rank, in a process that sees `visible` devices.
fn ordinal_for(local_rank: u32, visible: u32) -> u32 {
    if visible == 1 { 0 } else { local_rank }
}

/// The name of device `ordinal`, and the bytes of its memory.
pub(crate) fn describe(cuda: &Cuda, ordinal: u32) -> Result<(String, u64)> {
    let (mut handle, mut bytes) = (0, 0);
    let mut name = [0u8; 256];
    // SAFETY: it writes one number there.
    cuda.check("cuDeviceGet", unsafe { (cuda.cuDeviceGet)(&mut handle, ordinal as i32) })?;
    // SAFETY: it writes at most 255 bytes and a zero.
    let code = unsafe { (cuda.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), 255, handle) };
    cuda.check("cuDeviceGetName", code)?;
    // SAFETY: it writes one number there.
    cuda.check("cuDeviceTotalMem", unsafe { (cuda.cuDeviceTotalMem_v2)(&mut bytes, handle) })?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok((String::from_utf8_lossy(&name[..end]).into_owned(), bytes as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_the_device_of_its_number_or_the_only_one_that_it_sees() {
        assert_eq!([0, 1, 3].map(|local_rank| ordinal_for(local_rank, 4)), [0, 1, 3]);
        assert_eq!([0, 1, 3].map(|local_rank| ordinal_for(local_rank, 1)), [0, 0, 0]);
        // Two devices for each of two tasks, or too few for four ranks: nobody guesses, and `open` says what is missing.
        assert_eq!(ordinal_for(3, 2), 3);
    }
}
