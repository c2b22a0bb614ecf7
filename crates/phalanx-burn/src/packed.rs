//! Tensors that are sent together, in memory that is allocated once.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use phalanx::{Buffer, Communicator, DType, Rank, ReduceOp, Result, Work};

use crate::parameters::Select;
use crate::tensor_bytes;

/// The selected floats of a module, in one buffer for each type, in module order. The same tensors must be selected
/// each time.
#[derive(Default)]
pub(crate) struct Packed(BTreeMap<DType, Buffer>);

impl Packed {
    /// Takes the average over `count` ranks of the selected floats of `model`; those of other ranks are zeros.
    pub fn average<M: Module>(
        &mut self,
        model: &M,
        group: &dyn Communicator,
        count: usize,
        select: Select<'_>,
    ) -> Result<()> {
        let all = count == group.world_size().count();
        let op = if all { ReduceOp::Avg } else { ReduceOp::PreMulSum(1.0 / count as f64) };
        self.packed(model, group, select)?;
        self.exchange(|buffer| group.all_reduce_async(buffer, op))
    }

    /// Takes over the floats of rank `root`.
    pub fn receive<M: Module>(
        &mut self,
        model: &M,
        group: &dyn Communicator,
        root: Rank,
        select: Select<'_>,
    ) -> Result<()> {
        // On every rank: among ranks that may run out of data, another one may act as the root.
        self.packed(model, group, select)?;
        self.exchange(|buffer| group.broadcast_async(buffer, root))
    }

    /// `model` with the values in the buffers.
    pub fn unpack<M: Module>(&self, model: M, select: Select<'_>) -> M {
        model.map(&mut Unpacker { select, packed: self, ends: Ends::default() })
    }

    /// Ends the group if this rank's tensors cannot be had: the others wait for them.
    fn packed<M: Module>(&mut self, model: &M, group: &dyn Communicator, select: Select<'_>) -> Result<()> {
        self.pack(model, group, select).inspect_err(|error| group.abort(error.clone()))
    }

    fn pack<M: Module>(&mut self, model: &M, group: &dyn Communicator, select: Select<'_>) -> Result<()> {
        let mut sizes = Sizes { select, ends: Ends::default(), outcome: Ok(()) };
        model.visit(&mut sizes);
        sizes.outcome?;
        for (&dtype, &bytes) in &sizes.ends.0 {
            if self.0.get(&dtype).is_none_or(|buffer| buffer.as_bytes().len() != bytes) {
                self.0.insert(dtype, group.alloc(dtype, bytes / dtype.size())?);
            }
        }
        let mut packer = Packer { select, packed: self, ends: Ends::default(), outcome: Ok(()) };
        model.visit(&mut packer);
        packer.outcome
    }

    /// One operation for each type, all in progress at the same time.
    fn exchange(&mut self, start: impl Fn(Buffer) -> Result<Work>) -> Result<()> {
        let mut in_flight = Vec::new();
        for (dtype, buffer) in std::mem::take(&mut self.0) {
            in_flight.push((dtype, start(buffer)?));
        }
        for (dtype, work) in in_flight {
            self.0.insert(dtype, work.wait()?);
        }
        Ok(())
    }
}

/// How far each type's buffer is filled.
#[derive(Default)]
struct Ends(BTreeMap<DType, usize>);

impl Ends {
    fn next(&mut self, dtype: DType, bytes: usize) -> Range<usize> {
        let end = self.0.entry(dtype).or_default();
        let start = std::mem::replace(end, *end + bytes);
        start..*end
    }

    /// The position of the next selected float.
    fn place<const D: usize>(
        &mut self,
        select: Select<'_>,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<(DType, Range<usize>)>> {
        if !select.float(param.id) {
            return Ok(None);
        }
        let dtype = tensor_bytes::dtype(param.dtype())?;
        Ok(Some((dtype, self.next(dtype, param.shape().num_elements() * dtype.size()))))
    }
}

struct Sizes<'a> {
    select: Select<'a>,
    ends: Ends,
    outcome: Result<()>,
}

impl ModuleVisitor for Sizes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Err(error) = self.ends.place(self.select, param) {
            self.outcome = Err(error);
        }
    }
}

struct Packer<'a> {
    select: Select<'a>,
    packed: &'a mut Packed,
    ends: Ends,
    outcome: Result<()>,
}

impl ModuleVisitor for Packer<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(Some((dtype, place))) = self.ends.place(self.select, param) else { return };
        let Some(memory) = self.packed.0.get_mut(&dtype).and_then(|b| b.as_bytes_mut().get_mut(place)) else {
            return;
        };
        if let Err(error) =
            tensor_bytes::with_bytes(param.base(), |tensor| memory.copy_from_slice(tensor.bytes))
        {
            self.outcome = Err(error);
        }
    }
}

struct Unpacker<'a> {
    select: Select<'a>,
    packed: &'a Packed,
    ends: Ends,
}

impl ModuleMapper for Unpacker<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Ok(Some((dtype, place))) = self.ends.place(self.select, &param) else { return param };
        match self.packed.0.get(&dtype).and_then(|buffer| buffer.as_bytes().get(place)) {
            Some(elements) => param.map(|old| tensor_bytes::overwritten(old, elements)),
            None => param,
        }
    }
}
