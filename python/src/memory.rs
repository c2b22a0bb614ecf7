//! Memory of tensors and arrays, lent to collectives. The only unsafe code of this package is in here.
//!
//! A collective works on slices. PyTorch's and NumPy's memory has an owner in Python, so a [`Memory`] holds a reference
//! to that owner for as long as it lives. Of a tensor that is its storage, and not the tensor, which may be given another
//! one (`tensor.data = other`, `set_`). What can still free the memory is a program that resizes the storage (`resize_`), or
//! the array, while the operation is in flight: that it must not is its duty, as the guide says. Pointer and length are read
//! from the owner by this module, never taken from a caller.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use phalanx::{DType, Element};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyTuple, PyType};

use crate::dtypes::{self, Meaning, Seen};

/// The contiguous elements of one tensor or array, which their owner keeps: the tensor's storage, or the array.
pub struct Memory {
    pointer: *mut u8,
    bytes: usize,
    seen: Seen,
    is_writable: bool,
    _owner: Py<PyAny>,
}

/// `PyArrayInterface`, as version 3 of NumPy's array interface lays it out for all versions of NumPy.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    dimensions: c_int,
    kind: c_char,
    item_size: c_int,
    flags: c_int,
    shape: *const isize,
    _strides: *const isize,
    data: *mut c_void,
    _description: *mut c_void,
}

impl ArrayInterface {
    /// One element after the other, aligned, in this machine's byte order.
    const USUAL: c_int = 0x1 | 0x100 | 0x200;
    const WRITEABLE: c_int = 0x400;
}

/// NumPy, if the program has imported it.
fn numpy(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    let modules = py.import(intern!(py, "sys")).ok()?.getattr(intern!(py, "modules")).ok()?;
    // A program without NumPy comes here with each tensor: a look into the dictionary raises nothing.
    modules.cast::<PyDict>().ok()?.get_item(intern!(py, "numpy")).ok()?
}

/// Whether it is a scalar of NumPy, such as `numpy.float64(1.0)`.
fn is_scalar(array: &Bound<'_, PyAny>) -> bool {
    let generic = numpy(array.py()).and_then(|numpy| numpy.getattr(intern!(array.py(), "generic")).ok());
    generic.is_some_and(|generic| array.is_instance(&generic).unwrap_or(false))
}

/// NumPy's type of arrays, if the program has imported NumPy. It is written in C, so that Python cannot replace its attributes.
fn ndarray(py: Python<'_>) -> Option<&Bound<'_, PyType>> {
    static NDARRAY: PyOnceLock<Option<Py<PyType>>> = PyOnceLock::new();
    if let Some(known) = NDARRAY.get(py) {
        return known.as_ref().map(|ndarray| ndarray.bind(py));
    }
    let ndarray = numpy(py)?.getattr(intern!(py, "ndarray")).ok()?.cast_into::<PyType>().ok()?;
    // SAFETY: it is a type.
    let flags = unsafe { ffi::PyType_GetFlags(ndarray.as_type_ptr()) };
    // Classes that Python makes are on the heap.
    let known = (flags & ffi::Py_TPFLAGS_HEAPTYPE == 0).then(|| ndarray.unbind());
    NDARRAY.get_or_init(py, || known).as_ref().map(|ndarray| ndarray.bind(py))
}

// SAFETY: the pointer is to memory of the owner, which no thread owns: PyTorch and NumPy let any thread read and write
// it. The reference to the owner may be dropped on any thread: PyO3 passes it on to a thread that is attached.
unsafe impl Send for Memory {}

impl Memory {
    /// The memory of `owner`, a tensor of PyTorch or an array of NumPy's kind. If it is `written`, it must be writable.
    pub fn of(owner: &Bound<'_, PyAny>, meaning: Meaning, written: bool) -> PyResult<Self> {
        if let Some(memory) = Self::of_usual_array(owner, meaning, written) {
            return Ok(memory);
        }
        match owner.hasattr(intern!(owner.py(), "is_cpu"))? {
            true => Self::of_tensor(owner, meaning),
            false => Self::of_array(owner, meaning, written),
        }
    }

    /// The memory of a tensor on a CPU, which must be contiguous. A `meaning` of `Bytes` takes every type of elements.
    pub fn of_tensor(tensor: &Bound<'_, PyAny>, meaning: Meaning) -> PyResult<Self> {
        let py = tensor.py();
        let seen = dtypes::of_torch(&tensor.getattr(intern!(py, "dtype"))?, meaning)?;
        if !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            let device = tensor.getattr(intern!(py, "device"))?;
            if tensor.getattr(intern!(py, "is_meta"))?.is_truthy()? {
                return Err(PyTypeError::new_err("a tensor on meta has no elements: make it on the CPU"));
            }
            return Err(PyTypeError::new_err(format!(
                "this tensor is on {device}; phalanx moves tensors on the CPU: use a group of NCCL's for this one"
            )));
        }
        if tensor.getattr(intern!(py, "is_nested"))?.is_truthy()? {
            return Err(PyTypeError::new_err(
                "a nested tensor is several of lengths of their own: exchange what unbind() gives",
            ));
        }
        if !tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
            return Err(PyValueError::new_err("this tensor is not contiguous"));
        }
        // `conj()` and `imag` may only leave a mark: the elements are then others than those in memory. Only complex numbers,
        // which are two elements, can be conjugated.
        let is_conj = seen.each > 1 && tensor.call_method0(intern!(py, "is_conj"))?.is_truthy()?;
        if is_conj || tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Err(PyValueError::new_err(
                "this tensor is conjugated or negated only when it is read: resolve_conj().resolve_neg() makes one whose memory \
                 has its elements",
            ));
        }
        let elements: usize = tensor.call_method0(intern!(py, "numel"))?.extract()?;
        // What only stands for other tensors has no address; PyTorch's error says neither what it is nor what to do.
        let read = || {
            let pointer: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
            let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
            Ok::<_, PyErr>((pointer, storage, start))
        };
        // Sizes and strides are the tensor's, and the memory is the storage's, which may have been made smaller since.
        let (pointer, storage, start) = read().map_err(|error| without_memory(tensor, &error))?;
        let length: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let elements = elements.checked_mul(seen.each);
        if !elements.is_some_and(|elements| is_within(pointer, elements, seen.dtype, (start, length))) {
            return Err(PyValueError::new_err(format!(
                "this tensor has {} elements, and its storage of {length} bytes does not hold them: has the storage been \
                 resized (`untyped_storage().resize_`)? Make the tensor anew",
                elements.map_or("too many".to_owned(), |elements| elements.to_string())
            )));
        }
        Self::new(pointer, elements, seen, true, &storage)
    }

    /// The memory of an array that has NumPy's array interface, which must be contiguous, and writable if it is written.
    fn of_array(array: &Bound<'_, PyAny>, meaning: Meaning, written: bool) -> PyResult<Self> {
        let py = array.py();
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let interface = interface.cast::<PyDict>()?;
        let part = |name: &str| {
            interface.get_item(name)?.ok_or_else(|| PyTypeError::new_err(format!("the array has no {name}")))
        };
        let (pointer, read_only): (usize, bool) = part("data")?.extract()?;
        // A scalar of NumPy gives the memory of a copy, which the interface keeps, or since NumPy 2.5 its own, which is read-only.
        let is_copy = interface.contains("__ref")?;
        if written && (is_copy || read_only && is_scalar(array)) {
            return Err(PyTypeError::new_err(
                "a scalar of NumPy cannot be written to: numpy.atleast_1d makes an array of it",
            ));
        }
        if written && read_only {
            return Err(PyValueError::new_err(
                "this array is read-only: numpy.array makes a copy that is not",
            ));
        }
        if interface.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
            return Err(PyTypeError::new_err(
                "a masked array would be exchanged without its mask: fill it, or give its elements and its mask, one by one",
            ));
        }
        let shape = part("shape")?;
        let shape: Vec<usize> = shape.cast::<PyTuple>()?.extract()?;
        let typestr: String = part("typestr")?.extract()?;
        let name = match array.getattr_opt(intern!(py, "dtype"))? {
            Some(dtype) => dtype.str()?.to_string(),
            None => typestr.clone(),
        };
        let seen = dtypes::of_numpy(&typestr, &name, meaning)?;
        // None, of NumPy's arrays and of most others, means that the elements are one after the other.
        if let Some(strides) = interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
            let strides: Vec<isize> = strides.cast::<PyTuple>()?.extract()?;
            if !is_contiguous(&shape, &strides, seen.dtype.size() * seen.each) {
                return Err(PyValueError::new_err(
                    "this array is not contiguous: numpy.ascontiguousarray copies it",
                ));
            }
        }
        let elements = shape.iter().try_fold(seen.each, |product, length| product.checked_mul(*length));
        Self::new(pointer, elements, seen, !read_only, (array, interface).into_pyobject(py)?.as_any())
    }

    /// The memory of a `numpy.ndarray` with nothing unusual about it. Its description is a structure of C, which
    /// takes a tenth of a microsecond, and the interface that every kind of array has takes two.
    pub fn of_usual_array(array: &Bound<'_, PyAny>, meaning: Meaning, written: bool) -> Option<Self> {
        let py = array.py();
        // Exactly that type: of others, the attribute might be anybody's.
        if !array.get_type().is(ndarray(py)?) {
            return None;
        }
        let capsule = array.getattr(intern!(py, "__array_struct__")).ok()?;
        let pointer = capsule.cast::<PyCapsule>().ok()?.pointer_checked(None).ok()?;
        // SAFETY: NumPy's own code makes the capsule of an `ndarray`, and puts a `PyArrayInterface` into it, which lives as
        // long as the capsule, and is aligned as the allocator of C aligns.
        let described = unsafe { pointer.cast::<ArrayInterface>().as_ref() };
        let needed = ArrayInterface::USUAL | if written { ArrayInterface::WRITEABLE } else { 0 };
        if described.two != 2 || described.flags & needed != needed {
            return None;
        }
        let dimensions = usize::try_from(described.dimensions).ok()?;
        let mut elements = 1_usize;
        for dimension in 0..dimensions {
            // SAFETY: `shape` has `dimensions` elements; without any it is null, and not read.
            let length = unsafe { *described.shape.add(dimension) };
            elements = elements.checked_mul(usize::try_from(length).ok()?)?;
        }
        let bytes = usize::try_from(described.item_size).ok()?;
        let seen = dtypes::of_usual_numpy(described.kind as u8, bytes, meaning)?;
        let is_writable = described.flags & ArrayInterface::WRITEABLE != 0;
        Self::new(described.data as usize, elements.checked_mul(seen.each), seen, is_writable, array).ok()
    }

    /// `pointer` must be the address of that many elements, whatever Python's code has done.
    fn new(
        pointer: usize,
        elements: Option<usize>,
        seen: Seen,
        is_writable: bool,
        owner: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let dtype = seen.dtype;
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.size()));
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| PyValueError::new_err("this is longer than memory can be"))?;
        if bytes > 0 && (pointer == 0 || !pointer.is_multiple_of(dtype.size())) {
            return Err(PyValueError::new_err(format!(
                "the elements are not aligned as {dtype} must be: exchange a copy, numpy.array(array) or tensor.clone()"
            )));
        }
        // An empty tensor may have no memory at all; a slice of nothing must still be aligned.
        let pointer = if bytes == 0 { std::ptr::without_provenance_mut(64) } else { pointer as *mut u8 };
        Ok(Self { pointer, bytes, seen, is_writable, _owner: owner.clone().unbind() })
    }

    /// The type of its elements, as collectives see them.
    pub fn dtype(&self) -> DType {
        self.seen.dtype
    }

    /// PyTorch's name of their type, and how many elements of collectives one of them is.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.bytes / self.seen.dtype.size()
    }

    /// May it be written? Only arrays may be read-only.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Its elements.
    ///
    /// # Panics
    /// If `T` is not their type: a mistake of this package.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.seen.dtype);
        // SAFETY: `new` has checked alignment and length, and the owner keeps the memory. Every `Element` takes any
        // bytes as a value. Nothing writes meanwhile if the program keeps PyTorch's rule, that a tensor is left alone
        // until the operation on it is done; a program that breaks it reads garbage, as with every backend. Within this
        // package one operation has at most one `Memory` that it writes for each place: see `overlaps`.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.len()) }
    }

    /// Its elements, for writing.
    ///
    /// # Panics
    /// As [`as_slice`](Self::as_slice), and if it is read-only.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.seen.dtype);
        assert!(self.is_writable);
        // SAFETY: as in `as_slice`, and it is writable.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.len()) }
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: as in `as_slice`; bytes have no alignment.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Its bytes, for writing.
    ///
    /// # Panics
    /// If it is read-only: a mistake of this package.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_writable);
        // SAFETY: as in `as_mut_slice`; bytes have no alignment.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Do the two share memory? Then what is sent must be copied before anything is received.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (start, end) = (self.pointer as usize, self.pointer as usize + self.bytes);
        let (other_start, other_end) = (other.pointer as usize, other.pointer as usize + other.bytes);
        start < other_end && other_start < end
    }
}

/// The error for a tensor of whose memory PyTorch does not give the address.
fn without_memory(tensor: &Bound<'_, PyAny>, error: &PyErr) -> PyErr {
    let kind = tensor
        .get_type()
        .fully_qualified_name()
        .map_or_else(|_| "tensor".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!(
        "a {kind} has no memory of its own: exchange the tensors that it is made of, such as to_local() of a DTensor ({error})"
    ))
}

/// Whether elements of so many bytes lie one after the other, the last dimension's first.
fn is_contiguous(shape: &[usize], strides: &[isize], bytes: usize) -> bool {
    let mut next = Some(bytes);
    let is_next = |(&length, &stride): (&usize, &isize)| {
        let this = next;
        next = this.and_then(|bytes| bytes.checked_mul(length));
        // From a dimension of one element to the next element no step is made.
        length == 1 || usize::try_from(stride).ok() == this && this.is_some()
    };
    shape.len() == strides.len() && (shape.contains(&0) || shape.iter().zip(strides).rev().all(is_next))
}

/// Whether `elements` at `pointer` lie within the bytes of a storage, which are an address and a number. No elements lie within
/// any.
fn is_within(pointer: usize, elements: usize, dtype: DType, (start, length): (usize, usize)) -> bool {
    let end = elements.checked_mul(dtype.size()).and_then(|bytes| pointer.checked_add(bytes));
    let storage_end = start.checked_add(length);
    elements == 0
        || pointer >= start && end.zip(storage_end).is_some_and(|(end, storage_end)| end <= storage_end)
}
