//! The unsafe code: the C++ shim, and tensors' memory as slices.
//!
//! Tensors are handles that share memory, and `tch` lets anybody write to it, and take other memory for it, through any of them. So a
//! tensor's memory is borrowed only to copy from it, to it, or to hash it: meanwhile this crate runs no code of others on this thread,
//! such as a communicator or a hook of the program's own. That another thread does not write to a tensor meanwhile is what libtorch
//! demands of every operation, too.
//!
//! The memory of a device is never borrowed: libtorch copies it, on the device's current stream of the calling thread, and waits until that is
//! done. In a hook that is the stream on which the gradient was made; elsewhere libtorch has let the caller's stream wait for those.
//!
//! Elements that nobody has written (`Tensor::empty`) have some bits, for all that Rust's compiler can know: their memory comes from
//! libtorch's allocator.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;

use phalanx::reducer::Reducer;
use phalanx::{DType, Error, Result};
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

type DropFn = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn phx_free(error: *mut c_char);
    fn phx_identity(tensor: *const C_tensor) -> usize;
    fn phx_is_plain(tensor: *const C_tensor) -> bool;
    fn phx_is_here(tensor: *const C_tensor) -> bool;
    fn phx_may_become(gradient: *const C_tensor, leaf: *const C_tensor) -> bool;
    fn phx_read(tensor: *const C_tensor, data: *mut c_void) -> *mut c_char;
    fn phx_write(tensor: *const C_tensor, data: *mut c_void) -> *mut c_char;
    fn phx_copy_all(to: *const *mut C_tensor, from: *const *mut C_tensor, count: usize) -> *mut c_char;
    fn phx_used_here(tensor: *const C_tensor) -> *mut c_char;
    fn phx_current_stream(index: i32, stream: *mut *mut c_void) -> *mut c_char;
    fn phx_storage_bytes(tensor: *const C_tensor) -> usize;
    fn phx_hook(
        leaf: *const C_tensor,
        ready: unsafe extern "C" fn(*mut c_void),
        context: *mut c_void,
        drop: DropFn,
    ) -> *mut c_char;
    fn phx_mark(mark: *mut *mut c_void) -> *mut c_char;
    fn phx_unmark(mark: *mut c_void);
    fn phx_is_marked() -> bool;
    fn phx_unhook(leaf: *const C_tensor) -> *mut c_char;
    fn phx_set_gradient(leaf: *const C_tensor, gradient: *const C_tensor) -> *mut c_char;
    fn phx_view(
        like: *const C_tensor,
        data: *mut c_void,
        keeper: *mut c_void,
        drop: DropFn,
        view: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn phx_sum_over_ranks(
        values: *const C_tensor,
        sum: unsafe extern "C" fn(*mut c_void, *mut f64, usize),
        context: *mut c_void,
        drop: DropFn,
        sums: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn phx_fused_adamw(
        parameters: *const *mut C_tensor,
        gradients: *const *mut C_tensor,
        firsts: *const *mut C_tensor,
        seconds: *const *mut C_tensor,
        steps: *const *mut C_tensor,
        count: usize,
        rate: f64,
        beta_1: f64,
        beta_2: f64,
        weight_decay: f64,
        epsilon: f64,
    ) -> *mut c_char;
    fn phx_fused_sgd(
        parameters: *const *mut C_tensor,
        gradients: *const *mut C_tensor,
        velocities: *const *mut C_tensor,
        count: usize,
        rate: f64,
        momentum: f64,
        weight_decay: f64,
        nesterov: bool,
    ) -> *mut c_char;
}

/// The outcome of a function of the shim.
fn outcome(error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a string of the shim, which is this function's to free, and not used afterwards.
    let text = unsafe {
        let text = CStr::from_ptr(error).to_string_lossy().into_owned();
        phx_free(error);
        text
    };
    Err(error_of(&text))
}

/// What libtorch's errors of a device have: of the runtime, of the driver, and of the libraries for it.
const DEVICE_ERRORS: &[&str] =
    &["CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "CUSOLVER_STATUS", "CUFFT_"];

/// The error that libtorch describes by `text`, of which a stack may follow in further lines. Where memory or the device is to blame, it is this rank's
/// alone: the other ranks of an elastic job go on. All others are the program's, which is the same on every rank.
pub(crate) fn error_of(text: &str) -> Error {
    let says = |words: &[&str]| words.iter().any(|words| text.contains(words));
    let kind = if says(&["out of memory", "not enough memory", "there is no memory", "bad_alloc"]) {
        Error::out_of_memory
    } else if says(DEVICE_ERRORS) {
        Error::aborted
    } else {
        Error::invalid_argument
    };
    kind(format!("libtorch: {}", text.lines().next().unwrap_or("an error without a message")))
}

/// A value of Rust's for the shim to keep, and how it drops it.
fn lend<T: Send + 'static>(value: T) -> (*mut c_void, DropFn) {
    unsafe extern "C" fn drop<T>(value: *mut c_void) {
        // SAFETY: from `Box::into_raw` below, and the shim drops it once. A panic of a destructor must not reach C++.
        let _ignored =
            catch_unwind(AssertUnwindSafe(|| std::mem::drop(unsafe { Box::from_raw(value.cast::<T>()) })));
    }
    (Box::into_raw(Box::new(value)).cast(), drop::<T>)
}

/// A number that all handles of one tensor have, and no other tensor while they live.
pub(crate) fn identity(tensor: &Tensor) -> usize {
    // SAFETY: a handle that lives as long as this borrow.
    unsafe { phx_identity(tensor.as_ptr()) }
}

/// Whether `tensor` lies in memory, of this machine or of a CUDA device, element by element, with the bits that it has: neither sparse, nor a
/// view that negates.
pub(crate) fn is_plain(tensor: &Tensor) -> bool {
    // SAFETY: a handle that lives as long as this borrow.
    tensor.defined() && unsafe { phx_is_plain(tensor.as_ptr()) }
}

/// Whether `tensor` lies in this machine's memory, and not in that of a device.
pub(crate) fn is_here(tensor: &Tensor) -> bool {
    // SAFETY: a handle that lives as long as this borrow.
    tensor.defined() && unsafe { phx_is_here(tensor.as_ptr()) }
}

/// Whether `gradient` may be overwritten to become another gradient of `leaf`.
pub(crate) fn may_become(gradient: &Tensor, leaf: &Tensor) -> bool {
    // SAFETY: handles that live as long as these borrows.
    gradient.defined() && unsafe { phx_may_become(gradient.as_ptr(), leaf.as_ptr()) }
}

/// Copies the elements of `tensor`, row by row, to `memory`; also from a device.
pub(crate) fn read(tensor: &Tensor, memory: &mut [u8]) -> Result<()> {
    check_length(tensor, memory.len())?;
    // SAFETY: a live handle, and as many bytes as the tensor has, which libtorch uses until it returns. Any bits are valid elements.
    outcome(unsafe { phx_read(tensor.as_ptr(), memory.as_mut_ptr().cast()) })
}

/// Copies `elements`, row by row, to `tensor`; also to a device.
pub(crate) fn write(tensor: &Tensor, elements: &[u8]) -> Result<()> {
    check_length(tensor, elements.len())?;
    // SAFETY: as in `read`; libtorch only reads there.
    outcome(unsafe { phx_write(tensor.as_ptr(), elements.as_ptr().cast_mut().cast()) })
}

/// Copies each of `from` to the tensor of `to` at its place, which has its shape.
pub(crate) fn copy_all(to: &[Tensor], from: &[Tensor]) -> Result<()> {
    if to.len() != from.len() {
        return Err(Error::invalid_argument("copies need as many sources as places"));
    }
    let (to, from) = (handles(to), handles(from));
    // SAFETY: as many live handles in each list; libtorch compares their shapes.
    outcome(unsafe { phx_copy_all(to.as_ptr(), from.as_ptr(), to.len()) })
}

/// The memory of `tensor` is used by what the calling thread queues on its current stream: once it is freed, nobody has it again before that is done.
pub(crate) fn used_here(tensor: &Tensor) -> Result<()> {
    // SAFETY: a handle that lives as long as this borrow.
    outcome(unsafe { phx_used_here(tensor.as_ptr()) })
}

/// The calling thread's current stream of a CUDA device, as the number of a `CUstream`.
pub(crate) fn current_stream(ordinal: u32) -> Result<usize> {
    let index =
        i32::try_from(ordinal).map_err(|_| Error::invalid_argument("a device's number is too large"))?;
    let mut stream = ptr::null_mut();
    // SAFETY: it writes a pointer there.
    outcome(unsafe { phx_current_stream(index, &mut stream) })?;
    Ok(stream.addr())
}

/// The address of a tensor in a device's memory, and how many bytes it has there, row by row.
pub(crate) fn device_memory(tensor: &Tensor) -> Result<(u64, usize)> {
    let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
    // SAFETY: a handle that lives as long as this borrow.
    let there = if is_plain(tensor) { unsafe { phx_storage_bytes(tensor.as_ptr()) } } else { 0 };
    if is_here(tensor) || !tensor.is_contiguous() || bytes > there {
        return Err(Error::invalid_argument("a tensor does not lie row by row in the memory of a device"));
    }
    Ok((tensor.data_ptr().addr() as u64, bytes))
}

fn check_length(tensor: &Tensor, bytes: usize) -> Result<()> {
    if !is_plain(tensor) {
        return Err(Error::invalid_argument("a tensor does not lie in memory element by element any more"));
    }
    match tensor.numel() * tensor.kind().elt_size_in_bytes() {
        there if there == bytes => Ok(()),
        there => Err(Error::invalid_argument(format!(
            "a tensor's size has changed meanwhile from {bytes} B to {there} B"
        ))),
    }
}

/// Calls `ready` whenever backward has finished the gradient of `leaf`, on the thread that runs backward or on another one of libtorch's, until
/// [`unhook`]. A panic of it ends the process: it cannot pass through libtorch.
pub(crate) fn hook(leaf: &Tensor, ready: impl Fn() + Send + Sync + 'static) -> Result<()> {
    unsafe extern "C" fn call<F: Fn()>(ready: *mut c_void) {
        // SAFETY: the closure below, which lives as long as the hook; only shared references to it are made.
        unsafe { (*ready.cast::<F>())() }
    }
    fn of<F: Fn()>(_: &F) -> unsafe extern "C" fn(*mut c_void) {
        call::<F>
    }
    let call = of(&ready);
    let (context, drop) = lend(ready);
    // SAFETY: a live handle; the shim takes the context, and calls `call` with nothing else.
    outcome(unsafe { phx_hook(leaf.as_ptr(), call, context, drop) })
}

/// Marks the backward passes that this thread begins while it lives as those of a `Ddp`.
pub(crate) struct OfDdp {
    mark: *mut c_void,
}

impl OfDdp {
    pub(crate) fn new() -> Result<Self> {
        let mut mark = ptr::null_mut();
        // SAFETY: it writes a pointer there.
        outcome(unsafe { phx_mark(&mut mark) })?;
        Ok(Self { mark })
    }

    /// Whether this thread takes part in a backward pass of a `Ddp`; also on a thread of libtorch's, as in a hook.
    pub(crate) fn is_marked() -> bool {
        // SAFETY: it has no conditions.
        unsafe { phx_is_marked() }
    }
}

impl Drop for OfDdp {
    fn drop(&mut self) {
        // SAFETY: of `phx_mark`, once, and on the same thread, because a pointer is not `Send`. Marks are dropped in reverse order: they are
        // only kept by `sink::run`, while it runs.
        unsafe { phx_unmark(self.mark) }
    }
}

/// No longer reports the gradients of `leaf`.
pub(crate) fn unhook(leaf: &Tensor) {
    // SAFETY: a live handle. It fails for no leaf that was hooked.
    let _ignored = outcome(unsafe { phx_unhook(leaf.as_ptr()) });
}

/// Makes `gradient` that of `leaf`, or leaves it without one.
pub(crate) fn set_gradient(leaf: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let gradient = gradient.map_or(ptr::null(), |gradient| gradient.as_ptr());
    // SAFETY: live handles.
    outcome(unsafe { phx_set_gradient(leaf.as_ptr(), gradient) })
}

/// The averaged gradient of the parameter at `index`, as a tensor of `like`'s shape and type in its place in a bucket; nothing if there
/// is none.
///
/// It shares the memory with the reducer, which says when it uses it: see [`Reducer::gradient_view`].
pub(crate) fn gradient_view(like: &Tensor, reducer: &mut Reducer, index: usize) -> Result<Option<Tensor>> {
    let Some((memory, keeper)) = reducer.gradient_view(index)? else { return Ok(None) };
    let needed = like.numel() * like.kind().elt_size_in_bytes();
    if memory.len() != needed {
        return Err(Error::invalid_argument(format!(
            "a view of {needed} B was asked for in {} B",
            memory.len()
        )));
    }
    let (keeper, drop) = lend(keeper);
    let mut view = ptr::null_mut();
    // SAFETY: a live handle, and as many bytes as the tensor has. The reducer has given them with what keeps them, and the shim drops
    // that with the last use of the view. Any bits are valid elements.
    outcome(unsafe { phx_view(like.as_ptr(), memory.as_mut_ptr().cast(), keeper, drop, &mut view) })?;
    // SAFETY: a new handle, which is this function's.
    Ok(Some(unsafe { Tensor::from_ptr(view) }))
}

/// `values` (f64) after `sum` has changed a copy of them in place; in backward the gradient goes the same way, on the thread that runs
/// it: of one graph several may. A panic of `sum` ends the process: it cannot pass through libtorch.
pub(crate) fn sum_over_ranks<F>(values: &Tensor, sum: F) -> Result<Tensor>
where
    F: Fn(&mut [f64]) + Send + Sync + 'static,
{
    unsafe extern "C" fn call<F: Fn(&mut [f64])>(sum: *mut c_void, values: *mut f64, count: usize) {
        // SAFETY: the closure below, which lives as long as the node of the graph.
        let sum = unsafe { &*sum.cast::<F>() };
        let values = match count {
            0 => &mut [],
            // SAFETY: the elements of a tensor that the shim has just made, which nobody else has.
            _ => unsafe { slice::from_raw_parts_mut(values, count) },
        };
        sum(values);
    }
    if values.kind() != Kind::Double || !is_plain(values) {
        return Err(Error::invalid_argument("sums over ranks are of doubles"));
    }
    let (context, drop) = lend(sum);
    let mut sums = ptr::null_mut();
    // SAFETY: a live handle of doubles; the shim takes the context.
    outcome(unsafe { phx_sum_over_ranks(values.as_ptr(), call::<F>, context, drop, &mut sums) })?;
    // SAFETY: a new handle, which is this function's.
    Ok(unsafe { Tensor::from_ptr(sums) })
}

/// The handles of tensors, for one call.
fn handles(tensors: &[Tensor]) -> Vec<*mut C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

/// The tensors that AdamW works on, one of each kind for each parameter.
pub(crate) struct AdamWTensors {
    pub parameters: Vec<Tensor>,
    pub gradients: Vec<Tensor>,
    pub firsts: Vec<Tensor>,
    pub seconds: Vec<Tensor>,
    /// Of one f32 each.
    pub steps: Vec<Tensor>,
}

/// Whether the fused kernels can go through `parameter` and `others` element by element. The kernels look neither at
/// sizes nor at strides.
pub(crate) fn are_alike(parameter: &Tensor, others: &[&Tensor]) -> bool {
    let is_rows = |tensor: &Tensor| is_plain(tensor) && tensor.is_contiguous();
    let (size, kind) = (parameter.size(), parameter.kind());
    let is_like = |other: &&Tensor| {
        is_rows(other) && other.kind() == kind && other.size() == size && other.device() == parameter.device()
    };
    is_rows(parameter) && others.iter().all(is_like)
}

/// An error unless each list has one tensor for each of `parameters`, [like it](are_alike).
fn check_alike(rule: &str, parameters: &[Tensor], lists: &[&[Tensor]]) -> Result<()> {
    let fits = |(index, parameter): (usize, &Tensor)| {
        let others: Option<Vec<&Tensor>> = lists.iter().map(|list| list.get(index)).collect();
        others.is_some_and(|others| are_alike(parameter, &others))
    };
    let counts = lists.iter().all(|list| list.len() == parameters.len());
    if counts && parameters.iter().enumerate().all(fits) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("{rule} has not one tensor of each kind like each parameter")))
}

/// One step of AdamW; `betas`, `weight_decay` and `epsilon` as PyTorch's. The steps are counted before.
pub(crate) fn fused_adamw(
    tensors: &AdamWTensors,
    rate: f64,
    betas: (f64, f64),
    weight_decay: f64,
    epsilon: f64,
) -> Result<()> {
    let AdamWTensors { parameters, gradients, firsts, seconds, steps } = tensors;
    check_alike("AdamW", parameters, &[gradients, firsts, seconds])?;
    if steps.len() != parameters.len() {
        return Err(Error::invalid_argument("AdamW has not one count of steps for each parameter"));
    }
    let [parameters, gradients, firsts, seconds, steps] =
        [parameters, gradients, firsts, seconds, steps].map(|list| handles(list));
    // SAFETY: as many live handles in each list. The kernels take the parameter's size and type for those of the other
    // tensors, which `check_alike` has compared; counts of steps they read as numbers, which libtorch checks.
    outcome(unsafe {
        phx_fused_adamw(
            parameters.as_ptr(),
            gradients.as_ptr(),
            firsts.as_ptr(),
            seconds.as_ptr(),
            steps.as_ptr(),
            parameters.len(),
            rate,
            betas.0,
            betas.1,
            weight_decay,
            epsilon,
        )
    })
}

/// The settings of [`fused_sgd`], PyTorch's.
#[derive(Clone, Copy)]
pub(crate) struct SgdSettings {
    pub rate: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub nesterov: bool,
}

/// One step of SGD; without `velocities` there is no momentum.
pub(crate) fn fused_sgd(
    parameters: &[Tensor],
    gradients: &[Tensor],
    velocities: Option<&[Tensor]>,
    settings: SgdSettings,
) -> Result<()> {
    match velocities {
        Some(velocities) => check_alike("SGD", parameters, &[gradients, velocities])?,
        None => check_alike("SGD", parameters, &[gradients])?,
    }
    let (parameters, gradients, velocities) =
        (handles(parameters), handles(gradients), velocities.map(handles));
    // SAFETY: as many live handles in each list; sizes and types as for AdamW.
    outcome(unsafe {
        phx_fused_sgd(
            parameters.as_ptr(),
            gradients.as_ptr(),
            velocities.as_ref().map_or(ptr::null(), |velocities| velocities.as_ptr()),
            parameters.len(),
            settings.rate,
            settings.momentum,
            settings.weight_decay,
            settings.nesterov,
        )
    })
}

/// The type in which tensors of `kind` are sent.
pub(crate) fn dtype(kind: Kind) -> Result<DType> {
    match kind {
        Kind::Float => Ok(DType::F32),
        Kind::Double => Ok(DType::F64),
        Kind::Half => Ok(DType::F16),
        Kind::BFloat16 => Ok(DType::BF16),
        Kind::Int64 => Ok(DType::I64),
        Kind::Int => Ok(DType::I32),
        Kind::Int8 => Ok(DType::I8),
        Kind::Uint8 => Ok(DType::U8),
        Kind::Bool => Ok(DType::Bool),
        other => {
            Err(Error::invalid_argument(format!("tensors of type {other:?} do not travel between ranks"))
                .with_remedy("cast it, or leave it out of the VarStore"))
        }
    }
}

/// The elements of `tensor`, row by row, if they lie like that in this machine's memory. See the module for when it may be borrowed.
pub(crate) fn bytes(tensor: &Tensor) -> Option<&[u8]> {
    let (data, len) = place(tensor)?;
    // SAFETY: the memory lives as long as a handle, and `tensor` is borrowed; that nobody writes meanwhile: see the module.
    Some(unsafe { slice::from_raw_parts(data, len) })
}

/// The elements of `tensor` for writing, as in [`bytes`].
pub(crate) fn bytes_mut(tensor: &mut Tensor) -> Option<&mut [u8]> {
    let (data, len) = place(tensor)?;
    // SAFETY: as in `bytes`; and of this handle there is no other borrow.
    Some(unsafe { slice::from_raw_parts_mut(data, len) })
}

fn place(tensor: &Tensor) -> Option<(*mut u8, usize)> {
    if !is_plain(tensor) || !is_here(tensor) || !tensor.is_contiguous() {
        return None;
    }
    let len = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if len == 0 {
        return Some((ptr::NonNull::dangling().as_ptr(), 0));
    }
    // SAFETY: a handle that lives as long as this borrow.
    let there = unsafe { phx_storage_bytes(tensor.as_ptr()) };
    // It makes a copy first, where tensors share memory until one of them is written.
    let data = tensor.data_ptr().cast::<u8>();
    (!data.is_null() && len <= there).then_some((data, len))
}
