//! The collectives of a group, on tensors and lists of tensors.

use phalanx::{Buffer, Caller, DType, Element, Rank, ReduceOp, Result, with_element};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::dtypes::{Meaning, Seen};
use crate::group::{Group, How, Op, Reduction};
use crate::memory::Memory;
use crate::work::Work;

type Tensors<'py> = Vec<Bound<'py, PyAny>>;

#[pymethods]
impl Group {
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        op: Op,
        how: How,
    ) -> PyResult<Option<Work>> {
        let reduction = Reduction::of(op)?;
        let op = reduction.op;
        let mut memory = Memory::of(tensor, reduction.meaning(), true)?;
        self.reduction(
            py,
            how,
            (reduction, memory.seen()),
            move |group| with_element!(memory.dtype(), T => group.all_reduce(memory.as_mut_slice::<T>(), op)),
        )
    }

    /// `allreduce` as PyTorch calls it, if its caller waits and its one tensor needs no preparation. Returns whether it was
    /// that: otherwise nothing has been done, and `process_group.py` prepares it, or says what is wrong with it.
    fn all_reduce_as_it_is(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let Some(timeout) = waited_for(options)? else { return Ok(false) };
        let number = u8::try_from(options.getattr(intern!(py, "reduceOp"))?.hash()?);
        let Some(reduction) = number.ok().and_then(Reduction::usual) else { return Ok(false) };
        let memory = only(tensors)?.and_then(|tensor| written_as_it_is(&tensor, reduction.meaning()));
        self.all_reduce_usual(py, memory, timeout, reduction)
    }

    /// `ArrayGroup.all_reduce` of an array of NumPy's with nothing unusual about it. Returns whether it was that: otherwise nothing
    /// has been done, and `arrays.py` looks for its memory, or says what is wrong with it.
    fn all_reduce_array_as_it_is(&self, py: Python<'_>, array: &Bound<'_, PyAny>, op: u8) -> PyResult<bool> {
        let Some(reduction) = Reduction::usual(op) else { return Ok(false) };
        let memory = Memory::of_usual_array(array, reduction.meaning(), true);
        self.all_reduce_usual(py, memory, None, reduction)
    }

    fn all_reduce_coalesced(
        &self,
        py: Python<'_>,
        tensors: Tensors<'_>,
        op: Op,
        how: How,
    ) -> PyResult<Option<Work>> {
        let reduction = Reduction::of(op)?;
        let op = reduction.op;
        let mut memories = each(&tensors, reduction.meaning(), true)?;
        let seen = one_type(&memories)?;
        let dtype = seen.dtype;
        self.reduction(py, how, (reduction, seen), move |group| {
            // One after the other: they may share memory, and then there is no slice of each at the same time.
            let mut packed = pack(dtype, &memories)?;
            with_element!(dtype, T => {
                let (mut slices, mut rest) = (Vec::with_capacity(memories.len()), packed.as_mut_slice::<T>()?);
                for memory in &memories {
                    let (head, tail) = rest.split_at_mut(memory.len());
                    slices.push(head);
                    rest = tail;
                }
                group.all_reduce_coalesced(&mut slices, op)
            })?;
            unpack(packed.as_bytes(), &mut memories);
            Ok(())
        })
    }

    /// Every rank but the root keeps its elements.
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        root: u32,
        op: Op,
        how: How,
    ) -> PyResult<Option<Work>> {
        let reduction = Reduction::of(op)?;
        let op = reduction.op;
        let mut memory = Memory::of(tensor, reduction.meaning(), true)?;
        let is_root = self.is_rank(root);
        self.reduction(py, how, (reduction, memory.seen()), move |group| {
            with_element!(memory.dtype(), T => match is_root {
                true => group.reduce(memory.as_mut_slice::<T>(), Rank::new(root), op),
                false => {
                    let mut copy = Buffer::try_from_slice(memory.as_slice::<T>())?;
                    group.reduce(copy.as_mut_slice::<T>()?, Rank::new(root), op)
                }
            })
        })
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        root: u32,
        how: How,
    ) -> PyResult<Option<Work>> {
        let mut memory = Memory::of(tensor, Meaning::Bytes, !self.is_rank(root))?;
        self.moving(py, how, memory.seen(), move |group| {
            with_element!(memory.dtype(), T => match memory.is_writable() {
                true => group.broadcast(memory.as_mut_slice::<T>(), Rank::new(root)),
                // The root's is only read, but the core wants memory that it could write.
                false => {
                    let mut copy = Buffer::try_from_slice(memory.as_slice::<T>())?;
                    group.broadcast(copy.as_mut_slice::<T>()?, Rank::new(root))
                }
            })
        })
    }

    /// `broadcast` as PyTorch calls it, on the conditions of `all_reduce_as_it_is`.
    fn broadcast_as_it_is(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let Some(timeout) = waited_for(options)? else { return Ok(false) };
        let option = |name| options.getattr(name)?.extract::<u32>();
        let (Ok(root), Ok(0)) = (option(intern!(py, "rootRank")), option(intern!(py, "rootTensor"))) else {
            return Ok(false);
        };
        let memory = only(tensors)?.and_then(|tensor| written_as_it_is(&tensor, Meaning::Bytes));
        let Some(mut memory) = memory else { return Ok(false) };
        self.moving(
            py,
            (timeout, true),
            memory.seen(),
            move |group| with_element!(memory.dtype(), T => group.broadcast(memory.as_mut_slice::<T>(), Rank::new(root))),
        )?;
        Ok(true)
    }

    /// `allgather` as PyTorch calls it, on the conditions of `all_reduce_as_it_is`.
    fn all_gather_as_it_is(
        &self,
        py: Python<'_>,
        outputs: &Bound<'_, PyAny>,
        inputs: &Bound<'_, PyAny>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let Some(timeout) = waited_for(options)? else { return Ok(false) };
        let (Some(outputs), Some(input)) = (only(outputs)?, only(inputs)?) else { return Ok(false) };
        let Ok(outputs) = outputs.cast_into::<PyList>() else { return Ok(false) };
        let lent: Option<Vec<Memory>> =
            outputs.iter().map(|output| written_as_it_is(&output, Meaning::Bytes)).collect();
        let (Some(lent), Ok(own)) = (lent, Memory::of_tensor(&input, Meaning::Bytes)) else {
            return Ok(false);
        };
        if !have_shape_of(&outputs, &input)? {
            return Ok(false);
        }
        self.gather_each(py, (timeout, true), lent, own)?;
        Ok(true)
    }

    /// Gathers into one tensor. If that is the begin of a sum of sparse tensors, ranks compare whether it is: all else of it depends on what this
    /// brings.
    #[pyo3(signature = (output, input, how, is_of_sparse = false))]
    fn all_gather_single(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        how: How,
        is_of_sparse: bool,
    ) -> PyResult<Option<Work>> {
        let (mut output, input) = pair(output, input, Meaning::Bytes)?;
        let caller = if is_of_sparse { Some(Caller::SumOfSparse) } else { input.seen().caller };
        self.in_call(py, how, caller, move |group| {
            with_element!(input.dtype(), T => {
                let input = Sent::<T>::beside(&input, &output)?;
                group.all_gather(input.as_slice()?, output.as_mut_slice::<T>())
            })
        })
    }

    /// Gathers into a list of tensors, which may have a length of their own for each rank.
    fn all_gather(
        &self,
        py: Python<'_>,
        outputs: Tensors<'_>,
        input: &Bound<'_, PyAny>,
        how: How,
    ) -> PyResult<Option<Work>> {
        let outputs = each(&outputs, Meaning::Bytes, true)?;
        self.gather_each(py, how, outputs, Memory::of(input, Meaning::Bytes, false)?)
    }

    /// Gathers at the root, into a list of tensors that is empty elsewhere.
    fn gather(
        &self,
        py: Python<'_>,
        outputs: Tensors<'_>,
        input: &Bound<'_, PyAny>,
        root: u32,
        how: How,
    ) -> PyResult<Option<Work>> {
        if self.is_rank(root) {
            self.one_for_each("gather: outputs", outputs.len())?;
        }
        let mut outputs = each(&outputs, Meaning::Bytes, true)?;
        let input = Memory::of(input, Meaning::Bytes, false)?;
        let seen = one_type(outputs.iter().chain([&input]))?;
        let dtype = seen.dtype;
        let elements = outputs.iter().map(Memory::len).sum();
        self.moving(py, how, seen, move |group| {
            with_element!(dtype, T => {
                let mut packed = Buffer::try_zeroed(dtype, elements)?;
                group.gather(input.as_slice::<T>(), packed.as_mut_slice()?, Rank::new(root))?;
                unpack(packed.as_bytes(), &mut outputs);
                Ok(())
            })
        })
    }

    /// Scatters from the root's list of tensors, which is empty elsewhere.
    fn scatter(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        inputs: Tensors<'_>,
        root: u32,
        how: How,
    ) -> PyResult<Option<Work>> {
        if self.is_rank(root) {
            self.one_for_each("scatter: inputs", inputs.len())?;
        }
        let mut output = Memory::of(output, Meaning::Bytes, true)?;
        let inputs = each(&inputs, Meaning::Bytes, false)?;
        let seen = one_type(inputs.iter().chain([&output]))?;
        let dtype = seen.dtype;
        self.moving(py, how, seen, move |group| {
            with_element!(dtype, T => {
                let packed = pack(dtype, &inputs)?;
                group.scatter(packed.as_slice::<T>()?, output.as_mut_slice(), Rank::new(root))
            })
        })
    }

    fn reduce_scatter_single(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        op: Op,
        how: How,
    ) -> PyResult<Option<Work>> {
        let reduction = Reduction::of(op)?;
        let op = reduction.op;
        let (mut output, input) = pair(output, input, reduction.meaning())?;
        self.reduction(py, how, (reduction, input.seen()), move |group| {
            with_element!(input.dtype(), T => {
                let input = Sent::<T>::beside(&input, &output)?;
                group.reduce_scatter(input.as_slice()?, output.as_mut_slice::<T>(), op)
            })
        })
    }

    /// Combines lists of tensors, which may have a length of their own for each rank.
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        inputs: Tensors<'_>,
        op: Op,
        how: How,
    ) -> PyResult<Option<Work>> {
        self.one_for_each("reduce_scatter: inputs", inputs.len())?;
        let reduction = Reduction::of(op)?;
        let op = reduction.op;
        let mut output = Memory::of(output, reduction.meaning(), true)?;
        let inputs = each(&inputs, reduction.meaning(), false)?;
        let seen = one_type(inputs.iter().chain([&output]))?;
        let dtype = seen.dtype;
        let counts: Vec<usize> = inputs.iter().map(Memory::len).collect();
        self.reduction(py, how, (reduction, seen), move |group| {
            let packed = pack(dtype, &inputs)?;
            if are_even(&counts) {
                return with_element!(dtype, T => {
                    group.reduce_scatter(packed.as_slice::<T>()?, output.as_mut_slice::<T>(), op)
                });
            }
            let me = group.rank().index();
            let start: usize = counts[..me].iter().sum();
            if output.len() != counts[me] {
                return Err(phalanx::Error::invalid_argument(format!(
                    "reduce_scatter: this rank's input has {} elements, the output {}",
                    counts[me],
                    output.len()
                )));
            }
            let combined = group.reduce_scatter_v_async(packed, &counts, op)?.wait()?;
            let own = start * dtype.size()..(start + counts[me]) * dtype.size();
            output.as_bytes_mut().copy_from_slice(&combined.as_bytes()[own]);
            Ok(())
        })
    }

    /// Exchanges blocks of one tensor for those of another. `sent` and `received` are numbers of PyTorch's elements for
    /// each rank; both empty if all blocks have the same length.
    fn all_to_all_single(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        received: Vec<usize>,
        sent: Vec<usize>,
        how: How,
    ) -> PyResult<Option<Work>> {
        let (mut output, input) = pair(output, input, Meaning::Bytes)?;
        let each = input.seen().each;
        if received.is_empty() && sent.is_empty() {
            // Some types are several elements of collectives, which alone might be divisible.
            self.has_equal_parts("all_to_all: the output", output.len() / each)?;
            self.has_equal_parts("all_to_all: the input", input.len() / each)?;
            return self.moving(py, how, input.seen(), move |group| {
                with_element!(input.dtype(), T => {
                    let input = Sent::<T>::beside(&input, &output)?;
                    group.all_to_all(input.as_slice()?, output.as_mut_slice::<T>())
                })
            });
        }
        // Types that collectives do not know are so many bytes.
        let in_elements = |counts: Vec<usize>| -> PyResult<Vec<usize>> {
            let counts: Option<Vec<usize>> =
                counts.into_iter().map(|count| count.checked_mul(each)).collect();
            counts.ok_or_else(|| PyValueError::new_err("all_to_all: a part is longer than memory can be"))
        };
        let (received, sent) = (in_elements(received)?, in_elements(sent)?);
        self.moving(py, how, input.seen(), move |group| {
            with_element!(input.dtype(), T => {
                let input = Sent::<T>::beside(&input, &output)?;
                group.all_to_all_v(input.as_slice()?, &sent, output.as_mut_slice::<T>(), &received)
            })
        })
    }

    /// Exchanges lists of tensors.
    fn all_to_all(
        &self,
        py: Python<'_>,
        outputs: Tensors<'_>,
        inputs: Tensors<'_>,
        how: How,
    ) -> PyResult<Option<Work>> {
        self.one_for_each("all_to_all: outputs", outputs.len())?;
        self.one_for_each("all_to_all: inputs", inputs.len())?;
        let (mut outputs, inputs) =
            (each(&outputs, Meaning::Bytes, true)?, each(&inputs, Meaning::Bytes, false)?);
        let seen = one_type(outputs.iter().chain(&inputs))?;
        let dtype = seen.dtype;
        let received: Vec<usize> = outputs.iter().map(Memory::len).collect();
        let sent: Vec<usize> = inputs.iter().map(Memory::len).collect();
        self.moving(py, how, seen, move |group| {
            with_element!(dtype, T => {
                let packed = pack(dtype, &inputs)?;
                let mut into = Buffer::try_zeroed(dtype, received.iter().sum())?;
                group.all_to_all_v(packed.as_slice::<T>()?, &sent, into.as_mut_slice()?, &received)?;
                unpack(into.as_bytes(), &mut outputs);
                Ok(())
            })
        })
    }
}

impl Group {
    /// Gathers into memories that may have a length of their own for each rank.
    fn gather_each(
        &self,
        py: Python<'_>,
        how: How,
        mut outputs: Vec<Memory>,
        input: Memory,
    ) -> PyResult<Option<Work>> {
        self.one_for_each("all_gather: outputs", outputs.len())?;
        let seen = one_type(outputs.iter().chain([&input]))?;
        let dtype = seen.dtype;
        let counts: Vec<usize> = outputs.iter().map(Memory::len).collect();
        self.moving(py, how, seen, move |group| {
            with_element!(dtype, T => {
                let mut packed = Buffer::try_zeroed(dtype, counts.iter().sum())?;
                match are_even(&counts) {
                    true => group.all_gather(input.as_slice::<T>(), packed.as_mut_slice()?)?,
                    false => group.all_gather_v(input.as_slice::<T>(), packed.as_mut_slice()?, &counts)?,
                }
                unpack(packed.as_bytes(), &mut outputs);
                Ok(())
            })
        })
    }

    /// Carries out an `all_reduce` whose caller waits, if there is `memory` and nothing is to be done with it before and after.
    fn all_reduce_usual(
        &self,
        py: Python<'_>,
        memory: Option<Memory>,
        timeout: Option<f64>,
        reduction: Reduction,
    ) -> PyResult<bool> {
        let op = reduction.op;
        // Averages of integers are sums that are divided at the end.
        let memory = memory.filter(|memory| !matches!(op, ReduceOp::Avg) || !is_integer(memory.dtype()));
        let Some(mut memory) = memory else { return Ok(false) };
        self.reduction(
            py,
            (timeout, true),
            (reduction, memory.seen()),
            move |group| with_element!(memory.dtype(), T => group.all_reduce(memory.as_mut_slice::<T>(), op)),
        )?;
        Ok(true)
    }
}

/// The limit in seconds of a call with these options, if they have one. None if its caller does not wait, or if they are no options of
/// PyTorch's.
fn waited_for(options: &Bound<'_, PyAny>) -> PyResult<Option<Option<f64>>> {
    let py = options.py();
    // Not all versions of PyTorch say it.
    let Some(is_async) = options.getattr_opt(intern!(py, "asyncOp"))? else { return Ok(None) };
    if is_async.is_truthy()? {
        return Ok(None);
    }
    let timeout = options.getattr(intern!(py, "timeout"))?;
    let seconds: f64 = timeout.call_method0(intern!(py, "total_seconds"))?.extract()?;
    Ok(Some((seconds > 0.0).then_some(seconds)))
}

/// The memory of a tensor that a call writes into, if nothing is to be done for that. If autograd follows the tensor, PyTorch warns of the call.
fn written_as_it_is(tensor: &Bound<'_, PyAny>, meaning: Meaning) -> Option<Memory> {
    let memory = Memory::of_tensor(tensor, meaning).ok()?;
    let is_followed = tensor.getattr(intern!(tensor.py(), "requires_grad")).ok()?.is_truthy().ok()?;
    (!is_followed).then_some(memory)
}

/// Whether all of `tensors` have the shape of `tensor`.
fn have_shape_of(tensors: &Bound<'_, PyList>, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let name = intern!(tensor.py(), "shape");
    let shape = tensor.getattr(name)?;
    for other in tensors {
        if !other.getattr(name)?.eq(&shape)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The only element of a list; None if it is not a list, or has others.
fn only<'py>(list: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    match list.cast::<PyList>() {
        Ok(list) if list.len() == 1 => list.get_item(0).map(Some),
        _ => Ok(None),
    }
}

/// Whether they are integers, and no truth values.
pub fn is_integer(dtype: DType) -> bool {
    match dtype {
        DType::I32 | DType::I64 | DType::U8 | DType::I8 => true,
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::Bool => false,
    }
}

/// What is sent while something is received: copied, if it lies where that comes.
enum Sent<'a, T> {
    Lent(&'a [T]),
    Copied(Buffer),
}

impl<'a, T: Element> Sent<'a, T> {
    fn beside(input: &'a Memory, output: &Memory) -> Result<Self> {
        Ok(match input.overlaps(output) {
            true => Self::Copied(Buffer::try_from_slice(input.as_slice::<T>())?),
            false => Self::Lent(input.as_slice()),
        })
    }

    fn as_slice(&self) -> Result<&[T]> {
        match self {
            Self::Lent(input) => Ok(input),
            Self::Copied(buffer) => buffer.as_slice(),
        }
    }
}

fn pair(output: &Bound<'_, PyAny>, input: &Bound<'_, PyAny>, meaning: Meaning) -> PyResult<(Memory, Memory)> {
    let (output, input) = (Memory::of(output, meaning, true)?, Memory::of(input, meaning, false)?);
    one_type([&output, &input])?;
    Ok((output, input))
}

fn each(tensors: &[Bound<'_, PyAny>], meaning: Meaning, written: bool) -> PyResult<Vec<Memory>> {
    tensors.iter().map(|tensor| Memory::of(tensor, meaning, written)).collect()
}

/// How the elements of all of them are seen.
fn one_type<'a>(memories: impl IntoIterator<Item = &'a Memory>) -> PyResult<Seen> {
    let mut types = memories.into_iter().map(Memory::seen);
    let Some(first) = types.next() else { return Ok(Seen::NOTHING) };
    // By name: to collectives, int16 and float8 are bytes, as uint8 is.
    match types.find(|seen| seen.name != first.name) {
        None => Ok(first),
        Some(other) => Err(PyTypeError::new_err(format!(
            "all tensors of one call must have the same type; these are {} and {}",
            first.name, other.name
        ))),
    }
}

fn are_even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

fn pack(dtype: DType, memories: &[Memory]) -> Result<Buffer> {
    let mut packed = Buffer::try_zeroed(dtype, memories.iter().map(Memory::len).sum())?;
    let mut rest = packed.as_bytes_mut();
    for memory in memories {
        let (head, tail) = rest.split_at_mut(memory.as_bytes().len());
        head.copy_from_slice(memory.as_bytes());
        rest = tail;
    }
    Ok(packed)
}

fn unpack(mut rest: &[u8], memories: &mut [Memory]) {
    for memory in memories {
        let (head, tail) = rest.split_at(memory.as_bytes().len());
        memory.as_bytes_mut().copy_from_slice(head);
        rest = tail;
    }
}
