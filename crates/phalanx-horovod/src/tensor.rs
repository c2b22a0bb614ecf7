//! What operations take and return: elements with a shape.

use std::any::Any;
use std::fmt;

use phalanx::{Buffer, BufferPart, Caller, DType, Element, Error, Result};

use phalanx::adapter::elements::{cast, cast_mut};

/// Memory that an operation may own while it is in flight, such as a framework's. [`Buffer`] and `Vec<T>` are.
///
/// ```
/// use phalanx::DType;
/// use phalanx_horovod::{Memory, Tensor};
/// struct Pinned(Box<[u8]>);
/// impl Memory for Pinned {
///     fn as_bytes(&self) -> &[u8] {
///         &self.0
///     }
///     fn as_bytes_mut(&mut self) -> &mut [u8] {
///         &mut self.0
///     }
/// }
/// let tensor = Tensor::from_memory(DType::U8, [2, 2], Pinned(Box::new([1, 2, 3, 4])))?;
/// assert_eq!(tensor.into_memory::<Pinned>().unwrap().0[3], 4); // the same memory
/// # Ok::<(), phalanx::Error>(())
/// ```
pub trait Memory: Any + Send {
    /// Its bytes.
    fn as_bytes(&self) -> &[u8];

    /// Its bytes, for writing; as many.
    fn as_bytes_mut(&mut self) -> &mut [u8];
}

impl Memory for Buffer {
    fn as_bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

impl Memory for BufferPart {
    fn as_bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

impl<T: Element> Memory for Vec<T> {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }
}

/// Elements of one type with a shape, in memory of any kind.
///
/// ```
/// use phalanx_horovod::Tensor;
/// let tensor = Tensor::from(vec![1.0f32, 2.0, 3.0, 4.0]).reshaped([2, 2])?;
/// assert_eq!((tensor.shape(), tensor.len()), (&[2, 2][..], 4));
/// assert_eq!(Tensor::scalar(0.5f64).item::<f64>()?, 0.5);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Tensor {
    dtype: DType,
    /// What it is to the program, if its elements are of another type there.
    stands_for: Option<Caller>,
    shape: Vec<usize>,
    memory: Box<dyn Memory>,
}

impl Tensor {
    /// All of `buffer`, in `shape`.
    ///
    /// # Errors
    /// If the shape has another number of elements.
    pub fn new(shape: impl Into<Vec<usize>>, buffer: Buffer) -> Result<Self> {
        Self::from_memory(buffer.dtype(), shape, buffer)
    }

    /// All of `memory`, as elements of `dtype` in `shape`.
    ///
    /// # Errors
    /// If the shape has another number of elements, or the memory is not aligned to them.
    pub fn from_memory(dtype: DType, shape: impl Into<Vec<usize>>, memory: impl Memory) -> Result<Self> {
        let (shape, bytes) = (shape.into(), memory.as_bytes().len());
        let fits = elements(&shape).and_then(|elements| elements.checked_mul(dtype.size())) == Some(bytes);
        if !fits {
            let held = bytes / dtype.size();
            return Err(Error::invalid_argument(format!("{held} x {dtype} do not have the shape {shape:?}"))
                .with_remedy(SHAPE_REMEDY));
        }
        if !(memory.as_bytes().as_ptr() as usize).is_multiple_of(dtype.size()) {
            return Err(Error::invalid_argument(format!("a tensor's memory is not aligned to {dtype}"))
                .with_remedy(
                    "give memory that was allocated for elements of that type, such as a Buffer or a Vec",
                ));
        }
        Ok(Self { dtype, stands_for: None, shape, memory: Box::new(memory) })
    }

    /// One element, of the shape `[]`.
    pub fn scalar<T: Element>(value: T) -> Self {
        Self { dtype: T::DTYPE, stands_for: None, shape: Vec::new(), memory: Box::new(vec![value]) }
    }

    /// Zeros, in ordinary memory. Other ranks have told the shape: if there is no memory for it, that is an error, and does not end the process.
    pub(crate) fn zeroed(dtype: DType, shape: Vec<usize>) -> Result<Self> {
        // More than addresses are more than any memory has.
        let memory = Buffer::try_zeroed(dtype, elements(&shape).unwrap_or(usize::MAX)).map_err(|error| {
            Error::out_of_memory(format!("there is no memory for a tensor of {dtype} {shape:?}"))
                .with_source(error)
                .with_remedy("submit tensors that fit into the memory of every rank, also gathered from all")
        })?;
        Ok(Self { dtype, stands_for: None, shape, memory: Box::new(memory) })
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// If the shape has another number of elements.
    pub fn reshaped(self, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        if elements(&shape) != Some(self.len()) {
            return Err(Error::invalid_argument(format!(
                "{} x {} do not have the shape {shape:?}",
                self.len(),
                self.dtype
            ))
            .with_remedy(SHAPE_REMEDY));
        }
        Ok(Self { shape, ..self })
    }

    /// Notes that it is a tensor of another type to the program, such as one of `int16`, which travels as bytes: ranks compare that, too.
    /// For adapters, which must call the same type by one name. The factors of a reduction of integers are theirs to apply then: ranks compare
    /// them, and no more.
    pub fn stand_for(&mut self, tensor: Caller) {
        self.stands_for = Some(tensor);
    }

    /// What it is to the program, if its elements are of another type there.
    pub fn stands_for(&self) -> Option<Caller> {
        self.stands_for
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its shape, the slowest dimension first; `[]` is a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.memory.as_bytes().len() / self.dtype.size()
    }

    /// Whether the number of its elements is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements, row by row.
    ///
    /// # Errors
    /// If `T` is not its type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        cast(self.memory.as_bytes())
    }

    /// Its elements, for writing.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        cast_mut(self.memory.as_bytes_mut())
    }

    /// Its only element.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice), and if it has not exactly one.
    pub fn item<T: Element>(&self) -> Result<T> {
        match self.as_slice()? {
            [item] => Ok(*item),
            _ => {
                Err(Error::invalid_argument(format!("a tensor of shape {:?} is not one element", self.shape))
                    .with_remedy("read it with as_slice"))
            }
        }
    }

    /// Its memory.
    pub fn as_bytes(&self) -> &[u8] {
        self.memory.as_bytes()
    }

    /// Its memory, for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_bytes_mut()
    }

    /// Its memory, if it is an `M`, otherwise the tensor.
    pub fn into_memory<M: Memory>(self) -> Result<M, Self> {
        let Self { dtype, stands_for, shape, memory } = self;
        if !<dyn Any>::is::<M>(&*memory) {
            return Err(Self { dtype, stands_for, shape, memory });
        }
        let any: Box<dyn Any> = memory;
        match any.downcast::<M>() {
            Ok(memory) => Ok(*memory),
            Err(_) => Err(Self { dtype, stands_for, shape, memory: Box::new(Vec::<u8>::new()) }),
        }
    }

    /// Its elements as a buffer: its memory if that is one, otherwise a copy.
    pub fn into_buffer(self) -> Buffer {
        self.into_memory::<Buffer>().unwrap_or_else(|tensor| {
            let mut copy = Buffer::zeroed(tensor.dtype, tensor.len());
            copy.as_bytes_mut().copy_from_slice(tensor.as_bytes());
            copy
        })
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("a tensor of {} was read as {}", self.dtype, T::DTYPE))
            .with_remedy(format!("read it as {}, and convert its elements", self.dtype)))
    }
}

/// What a shape has to be.
const SHAPE_REMEDY: &str = "give a shape whose extents, multiplied, are the number of elements";

/// How many elements a shape has. `None` if they are more than addresses.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent))
}

impl From<Buffer> for Tensor {
    /// One dimension.
    fn from(buffer: Buffer) -> Self {
        let (dtype, shape) = (buffer.dtype(), vec![buffer.len()]);
        Self { dtype, stands_for: None, shape, memory: Box::new(buffer) }
    }
}

impl<T: Element> From<Vec<T>> for Tensor {
    /// One dimension.
    fn from(elements: Vec<T>) -> Self {
        let shape = vec![elements.len()];
        Self { dtype: T::DTYPE, stands_for: None, shape, memory: Box::new(elements) }
    }
}

impl<T: Element> From<&[T]> for Tensor {
    /// One dimension, a copy. As for a `Vec`, the process ends if there is no memory for it: for large ones convert a [`Buffer::try_from_slice`].
    fn from(elements: &[T]) -> Self {
        Buffer::from_slice(elements).into()
    }
}

impl<T: Element, const N: usize> From<[T; N]> for Tensor {
    /// One dimension.
    fn from(elements: [T; N]) -> Self {
        elements.to_vec().into()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?})", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_types_are_checked() {
        let tensor = Tensor::from([1i32, 2, 3, 4, 5, 6]).reshaped([2, 3]).unwrap();
        assert!(tensor.as_slice::<f32>().unwrap_err().is_invalid_argument());
        assert!(tensor.item::<i32>().is_err());
        assert!(tensor.reshaped([4]).unwrap_err().to_string().contains("6 x i32"));
        assert!(Tensor::new([usize::MAX, 8], Buffer::zeroed(DType::U8, 8)).is_err());
        assert!(Tensor::from_memory(DType::F32, [1], vec![1u8, 2, 3]).is_err());
        assert_eq!(Tensor::new([0, 7], Buffer::zeroed(DType::F64, 0)).unwrap().len(), 0);
    }

    #[test]
    fn a_tensor_for_which_there_is_no_memory_is_an_error() {
        let most = isize::MAX as usize;
        for (dtype, shape) in
            [(DType::U8, vec![most]), (DType::F64, vec![most]), (DType::U8, vec![most, most])]
        {
            let error = Tensor::zeroed(dtype, shape).unwrap_err();
            let text = error.to_string();
            assert!(error.is_out_of_memory() && text.contains("no memory for a tensor of"), "{text}");
        }
        assert_eq!(Tensor::zeroed(DType::F32, vec![2, 3]).unwrap().len(), 6);
    }

    #[test]
    fn the_memory_comes_back_as_it_was() {
        let buffer = Buffer::from_slice(&[1.5f32, 2.5]);
        let place = buffer.as_bytes().as_ptr();
        let tensor = Tensor::from(buffer).into_memory::<Vec<f32>>().unwrap_err();
        assert_eq!(tensor.into_buffer().as_bytes().as_ptr(), place);
        assert_eq!(Tensor::from([1.5f32]).into_buffer().as_slice::<f32>().unwrap(), [1.5]);
    }
}
