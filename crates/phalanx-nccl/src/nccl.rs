//! The functions of libnccl, and their errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use phalanx::{Error, ReduceOp, Result};

use crate::cuda::RawStream;
use crate::element::DType;
use crate::library::{self, functions};

/// `ncclComm_t`.
pub(crate) type Comm = *mut c_void;
/// `ncclResult_t`.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const SYSTEM_ERROR: Code = 2;
pub(crate) const INTERNAL_ERROR: Code = 3;
pub(crate) const REMOTE_ERROR: Code = 6;
pub(crate) const IN_PROGRESS: Code = 7;

/// The variable that names the library.
const VARIABLE: &str = "PHALANX_NCCL_LIBRARY";
/// The oldest version, as `ncclGetVersion` has it: 2.27.0. Until 2.26 what `ncclCommInitRankConfig` and `ncclGroupEnd` do beside their
/// caller is noted in memory of the calling thread (`ncclGroupJobMain`): an abort by another thread then ends nothing (2.18), or uses
/// that memory when its thread has ended. From 2.27 on it is on the heap.
const OLDEST: c_int = 22_700;
/// `NCCL_SHRINK_ABORT`: what still runs in the parent is ended, and the child shares nothing with it, so that the parent can be aborted.
pub(crate) const SHRINK_ABORT: c_int = 1;
/// `NCCL_REVOKE_DEFAULT`.
pub(crate) const REVOKE_DEFAULT: c_int = 0;
/// The version that the configuration says it is of.
const LAYOUT: c_uint = 21_800;
pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t` of version 2.18, with the field that 2.26 has put where the padding was. Later ones have more fields at the end; NCCL reads as
/// many bytes as `size` says.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// The defaults. If `blocking` is not set, no call waits for other ranks. `NCCL_COMM_BLOCKING` and NCCL's own configuration files
    /// go before it, so that nothing here relies on it.
    pub(crate) fn new(blocking: bool) -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: LAYOUT,
            blocking: blocking.into(),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

functions! {
    /// The functions of libnccl.so.2. `*const c_void` and `*mut c_void` are addresses on the device.
    Functions {
        fn ncclGetVersion(*mut c_int) -> Code;
        fn ncclGetErrorString(Code) -> *const c_char;
        fn ncclGetLastError(Comm) -> *const c_char;
        fn ncclGetUniqueId(*mut UniqueId) -> Code;
        fn ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
        fn ncclCommGetAsyncError(Comm, *mut Code) -> Code;
        fn ncclCommFinalize(Comm) -> Code;
        fn ncclCommDestroy(Comm) -> Code;
        fn ncclCommAbort(Comm) -> Code;
        fn ncclRedOpCreatePreMulSum(*mut c_int, *mut c_void, c_int, c_int, Comm) -> Code;
        fn ncclRedOpDestroy(c_int, Comm) -> Code;
        fn ncclGroupStart() -> Code;
        fn ncclGroupEnd() -> Code;
        fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
        fn ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
        fn ncclReduce(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, RawStream) -> Code;
        fn ncclAllGather(*const c_void, *mut c_void, usize, c_int, Comm, RawStream) -> Code;
        fn ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
        fn ncclSend(*const c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
        fn ncclRecv(*mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    }
}

/// `ncclCommShrink`: the parent, the ranks to leave out and how many, the child, its configuration, flags.
type Shrink = unsafe extern "C" fn(Comm, *mut c_int, c_int, *mut Comm, *mut Config, c_int) -> Code;
/// `ncclCommRevoke`: the communicator, flags.
type Revoke = unsafe extern "C" fn(Comm, c_int) -> Code;

/// libnccl, opened, of a version that will do.
#[derive(Clone)]
pub(crate) struct Nccl {
    functions: Arc<Functions>,
    /// Since 2.27.
    pub shrink: Option<Shrink>,
    /// Since 2.28.7.
    pub revoke: Option<Revoke>,
    /// What it was opened as.
    pub name: Arc<PathBuf>,
}

impl std::ops::Deref for Nccl {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Nccl {
    pub(crate) fn open() -> Result<Self> {
        let library = library::open(VARIABLE, &["libnccl.so.2", "libnccl.so"])?;
        // SAFETY: this function has had the same type in every version.
        let version: unsafe extern "C" fn(*mut c_int) -> Code =
            unsafe { library.function("ncclGetVersion") }?;
        let mut found = 0;
        // SAFETY: it writes one number there.
        unsafe { version(&mut found) };
        if found < OLDEST {
            let (name, found, oldest) = (library.name.display(), dotted(found), dotted(OLDEST));
            return Err(Error::environment(format!(
                "{name} is NCCL {found}, and this needs {oldest} or later"
            ))
            .with_remedy(format!("install a later one, or name it with {VARIABLE}")));
        }
        // SAFETY: the types are those of the library's header.
        let (shrink, revoke) = unsafe {
            (library.function::<Shrink>("ncclCommShrink"), library.function::<Revoke>("ncclCommRevoke"))
        };
        let (functions, name) = (Arc::new(Functions::load(&library)?), Arc::new(library.name.clone()));
        Ok(Self { functions, shrink: shrink.ok(), revoke: revoke.ok(), name })
    }

    /// Its version, such as 22703 for 2.27.3.
    pub(crate) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: it writes one number there.
        unsafe { (self.ncclGetVersion)(&mut version) };
        version
    }

    /// An identity for a new communicator, which this process then serves.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: it writes an identity there.
        let code = unsafe { (self.ncclGetUniqueId)(&mut id) };
        match code {
            SUCCESS => Ok(id),
            _ => Err(self.error("ncclGetUniqueId", code)),
        }
    }

    /// Makes `call` with the operation's number. One with a factor exists only for this call: NCCL permits to destroy it when the function that
    /// was given it has returned.
    ///
    /// # Safety
    /// `comm` is alive, and no other thread is in a call of NCCL with it.
    pub(crate) unsafe fn with_op(
        &self,
        op: ReduceOp,
        dtype: DType,
        comm: Comm,
        call: impl FnOnce(c_int) -> Code,
    ) -> Result<Code> {
        /// `ncclScalarHostImmediate`: the factor is read before the function returns.
        const HOST_IMMEDIATE: c_int = 1;
        let mut factor = match op_for(op, dtype)? {
            Operation::Code(code) => return Ok(call(code)),
            Operation::PreMulSum(factor) => factor,
        };
        let mut made = 0;
        // SAFETY: the factor is one element of the type. It writes one number.
        let code = unsafe {
            let factor = factor.as_mut_ptr().cast::<c_void>();
            (self.ncclRedOpCreatePreMulSum)(&mut made, factor, dtype.code(), HOST_IMMEDIATE, comm)
        };
        if code != SUCCESS {
            return Err(self.error("ncclRedOpCreatePreMulSum", code));
        }
        let outcome = call(made);
        // SAFETY: it was made above, and the function that was given it has returned.
        match unsafe { (self.ncclRedOpDestroy)(made, comm) } {
            SUCCESS => Ok(outcome),
            code => Err(self.error("ncclRedOpDestroy", code)),
        }
    }

    /// What NCCL says about `code`, and about the last error of this process.
    pub(crate) fn error(&self, function: &str, code: Code) -> Error {
        // SAFETY: the text of each code is a constant, and of other numbers too. Without a communicator the last error is that of
        // any, in memory that stays; another thread's error may come between, but its text always ends with a zero.
        let (what, last) = unsafe {
            (text((self.ncclGetErrorString)(code)), text((self.ncclGetLastError)(std::ptr::null_mut())))
        };
        let last = if last.is_empty() { last } else { format!(": {last}") };
        Error::other(format!("{function}: {what}{last}")).with_remedy("NCCL_DEBUG=INFO shows more")
    }
}

/// # Safety
/// `text` is null or ends with a zero.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller says so.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// A version as people write it.
pub(crate) fn dotted(version: i32) -> String {
    // Until 2.8 minor versions had two digits less.
    match version {
        ..10_000 => format!("{}.{}.{}", version / 1000, version / 100 % 10, version % 100),
        _ => format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
    }
}

/// An operation, as NCCL has it.
#[derive(Debug, PartialEq)]
pub(crate) enum Operation {
    /// `ncclRedOp_t`.
    Code(c_int),
    /// The bytes of the factor, in the elements' type; NCCL reads only as many as that has.
    PreMulSum([u8; 8]),
}

/// The operation for elements of this type, or an error that says what there is.
pub(crate) fn op_for(op: ReduceOp, dtype: DType) -> Result<Operation> {
    match op {
        ReduceOp::Sum => Ok(Operation::Code(0)),
        ReduceOp::Product => Ok(Operation::Code(1)),
        ReduceOp::Max => Ok(Operation::Code(2)),
        ReduceOp::Min => Ok(Operation::Code(3)),
        ReduceOp::Avg => Ok(Operation::Code(4)),
        ReduceOp::PreMulSum(factor) => {
            let mut bytes = [0; 8];
            match dtype {
                DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(factor).to_ne_bytes()),
                DType::BF16 => bytes[..2].copy_from_slice(&bf16::from_f64(factor).to_ne_bytes()),
                DType::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_ne_bytes()),
                DType::F64 => bytes = factor.to_ne_bytes(),
                DType::I8 | DType::U8 | DType::I32 | DType::U32 | DType::I64 | DType::U64 => {
                    return Err(Error::invalid_argument(format!("{op} is not defined for {dtype}"))
                        .with_remedy("premul_sum is for f16, bf16, f32 and f64"));
                }
            }
            Ok(Operation::PreMulSum(bytes))
        }
        ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor => {
            Err(Error::invalid_argument(format!("{op} is not an operation of this transport"))
                .with_remedy("on devices there are sum, avg, product, min, max and premul_sum"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_nccl_counts_them() {
        assert_eq!([2708, 21803, 22304, 23107].map(dotted), ["2.7.8", "2.18.3", "2.23.4", "2.31.7"]);
    }

    #[test]
    fn a_configuration_has_no_padding_that_nccl_would_read() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, traffic_class), 44);
        assert_eq!(Config::new(false).traffic_class, c_int::MIN);
        assert_eq!([false, true].map(|blocking| Config::new(blocking).blocking), [0, 1]);
    }

    #[test]
    fn what_nccl_cannot_do_is_refused_with_what_it_can() {
        assert_eq!(op_for(ReduceOp::Avg, DType::I32).unwrap(), Operation::Code(4));
        let error = op_for(ReduceOp::BXor, DType::U8).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("sum, avg, product"), "{error}");
        let error = op_for(ReduceOp::PreMulSum(0.5), DType::I32).unwrap_err();
        assert!(error.to_string().contains("premul_sum is for f16"), "{error}");
    }

    #[test]
    fn a_factor_has_the_bits_of_the_elements_type() {
        let bytes = |dtype| match op_for(ReduceOp::PreMulSum(0.25), dtype).unwrap() {
            Operation::PreMulSum(bytes) => u64::from_le_bytes(bytes),
            Operation::Code(code) => panic!("{code}"),
        };
        // One sign bit, then 5, 8, 8 and 11 of the exponent, which is 2 less than its bias.
        assert_eq!(bytes(DType::F16), 13 << 10);
        assert_eq!(bytes(DType::BF16), 125 << 7);
        assert_eq!(bytes(DType::F32), 125 << 23);
        assert_eq!(bytes(DType::F64), 1021 << 52);
    }
}
