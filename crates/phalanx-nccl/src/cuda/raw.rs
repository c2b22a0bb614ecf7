//! The functions of libcuda, and their errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use phalanx::{Error, Result};

use crate::library::{self, functions};

pub(crate) type Context = *mut c_void;
pub(crate) type Stream = *mut c_void;
pub(crate) type Event = *mut c_void;
pub(crate) type Pool = *mut c_void;
/// `CUresult`.
pub(crate) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const NOT_READY: Code = 600;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_RELAXED: c_int = 2;
/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`.
pub(super) const MEMORY_POOLS_SUPPORTED: c_int = 115;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
pub(super) const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const MEMORY_OF_DEVICE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_IS_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_int = 3;
/// The size of a `CUuuid`.
pub(crate) const UUID_BYTES: usize = 16;

/// The variable that names the library.
const VARIABLE: &str = "PHALANX_CUDA_LIBRARY";

/// `CUmemAccessDesc`: what may reach the memory of a pool.
#[repr(C)]
pub(crate) struct Access {
    location_type: c_int,
    location: c_int,
    flags: c_int,
}

impl Access {
    /// The device of this handle may read and write it.
    pub(super) fn of_device(handle: c_int) -> Self {
        Self { location_type: LOCATION_IS_DEVICE, location: handle, flags: READ_AND_WRITE }
    }
}

functions! {
    /// The functions of libcuda.so.1, of CUDA 11.2 and later.
    Functions {
        fn cuInit(c_uint) -> Code;
        fn cuDriverGetVersion(*mut c_int) -> Code;
        fn cuGetErrorName(Code, *mut *const c_char) -> Code;
        fn cuGetErrorString(Code, *mut *const c_char) -> Code;
        fn cuDeviceGetCount(*mut c_int) -> Code;
        fn cuDeviceGet(*mut c_int, c_int) -> Code;
        fn cuDeviceGetUuid(*mut [u8; UUID_BYTES], c_int) -> Code;
        fn cuDeviceGetName(*mut c_char, c_int, c_int) -> Code;
        fn cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> Code;
        fn cuDeviceTotalMem_v2(*mut usize, c_int) -> Code;
        fn cuDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> Code;
        fn cuDeviceGetMemPool(*mut Pool, c_int) -> Code;
        fn cuDevicePrimaryCtxRetain(*mut Context, c_int) -> Code;
        fn cuDevicePrimaryCtxRelease_v2(c_int) -> Code;
        fn cuCtxPushCurrent_v2(Context) -> Code;
        fn cuCtxPopCurrent_v2(*mut Context) -> Code;
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> Code;
        fn cuStreamCreateWithPriority(*mut Stream, c_uint, c_int) -> Code;
        fn cuThreadExchangeStreamCaptureMode(*mut c_int) -> Code;
        fn cuStreamDestroy_v2(Stream) -> Code;
        fn cuStreamIsCapturing(Stream, *mut c_int) -> Code;
        fn cuCtxSynchronize() -> Code;
        fn cuCtxEnablePeerAccess(Context, c_uint) -> Code;
        fn cuStreamWaitEvent(Stream, Event, c_uint) -> Code;
        fn cuEventCreate(*mut Event, c_uint) -> Code;
        fn cuEventDestroy_v2(Event) -> Code;
        fn cuEventRecord(Event, Stream) -> Code;
        fn cuEventQuery(Event) -> Code;
        fn cuPointerGetAttribute(*mut c_void, c_int, u64) -> Code;
        fn cuMemAlloc_v2(*mut u64, usize) -> Code;
        fn cuMemFree_v2(u64) -> Code;
        fn cuMemAllocAsync(*mut u64, usize, Stream) -> Code;
        fn cuMemFreeAsync(u64, Stream) -> Code;
        fn cuMemPoolSetAccess(Pool, *const Access, usize) -> Code;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> Code;
        fn cuMemsetD8Async(u64, u8, usize, Stream) -> Code;
        fn cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Stream) -> Code;
        fn cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Stream) -> Code;
        fn cuMemcpyDtoDAsync_v2(u64, u64, usize, Stream) -> Code;
        fn cuMemcpyPeerAsync(u64, Context, u64, Context, usize, Stream) -> Code;
    }
}

/// libcuda, opened and initialised.
#[derive(Clone)]
pub(crate) struct Cuda {
    functions: Arc<Functions>,
    /// What it was opened as.
    pub name: Arc<PathBuf>,
}

impl std::ops::Deref for Cuda {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Cuda {
    pub(crate) fn open() -> Result<Self> {
        let library = library::open(VARIABLE, &["libcuda.so.1", "libcuda.so"])?;
        let functions = Arc::new(Functions::load(&library)?);
        let cuda = Self { functions, name: Arc::new(library.name.clone()) };
        // SAFETY: zero is the only value that the flags may have.
        cuda.check("cuInit", unsafe { (cuda.cuInit)(0) })?;
        Ok(cuda)
    }

    /// The version of CUDA up to which the driver goes, such as 13000 for 13.0.
    pub(crate) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: it writes one number there.
        self.check("cuDriverGetVersion", unsafe { (self.cuDriverGetVersion)(&mut version) })?;
        Ok(version)
    }

    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: it writes one number there.
        self.check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&mut count) })?;
        Ok(count.max(0) as u32)
    }

    /// An error with the name that CUDA has for it, unless `code` says success.
    pub(crate) fn check(&self, function: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let name = self.text(self.cuGetErrorName, code);
        let cause = format!("{function}: {name}: {}", self.text(self.cuGetErrorString, code));
        Err(match code {
            OUT_OF_MEMORY => {
                Error::out_of_memory(cause).with_remedy("does another process use the device? See nvidia-smi")
            }
            _ => Error::other(cause),
        })
    }

    fn text(&self, of: unsafe extern "C" fn(Code, *mut *const c_char) -> Code, code: Code) -> String {
        let mut text = ptr::null();
        // SAFETY: it writes one pointer there.
        let known = unsafe { of(code, &mut text) };
        if known != SUCCESS || text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: the library's texts are constants that end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
