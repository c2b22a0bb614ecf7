//! Which tensors travel together: a pure function of what all ranks agree on.

use std::collections::BTreeMap;

use crate::dtype::DType;

use crate::horovod::message::Response;
use crate::horovod::reduction::{Compression, Factor, Op, Reduction};
use crate::horovod::request::Kind;

/// A tensor of so many bytes, which could be combined where it is, is: what an operation costs beside its bytes is less than two
/// copies of these.
const ALONE: usize = 1 << 20;

/// A tensor of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    /// Which of the responses.
    pub response: usize,
    /// Which of its tensors.
    pub part: usize,
}

/// What is carried out as one operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Batch {
    /// An allreduce of several tensors.
    Reduce(Fused),
    /// All other operations, one response each.
    Single(usize),
}

/// Tensors that are combined in the same way.
#[derive(Clone, Debug, PartialEq)]
pub struct Fused {
    /// The tensors, in their order in the buffer.
    pub members: Vec<Member>,
    /// The type of their elements.
    pub dtype: DType,
    /// The type in which elements travel.
    pub wire: DType,
    /// How they are combined.
    pub reduction: Reduction,
    /// The elements of all members.
    pub elements: usize,
}

impl Fused {
    /// The bytes that travel.
    pub fn wire_bytes(&self) -> usize {
        self.elements.saturating_mul(self.wire.size())
    }

    /// Whether it is one tensor that travels as it is, and needs no fusion buffer.
    pub fn is_in_place(&self) -> bool {
        self.members.len() == 1 && self.wire == self.dtype
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    dtype: DType,
    op: Op,
    factors: [u64; 2],
    compression: Compression,
}

impl Key {
    fn new(dtype: DType, reduction: &Reduction) -> Self {
        let Reduction { op, prescale: Factor(before), postscale: Factor(after), compression } = *reduction;
        Self { dtype, op, factors: [before.to_bits(), after.to_bits()], compression }
    }
}

/// Whether a tensor is combined where it is, whatever else is ready.
pub fn is_alone(reduction: &Reduction, dtype: DType, elements: usize) -> bool {
    let travels_as_it_is = reduction.compression.travels_as(dtype) == dtype && reduction.op != Op::Adasum;
    elements.saturating_mul(dtype.size()) >= ALONE && travels_as_it_is
}

/// Puts the tensors of allreduces into batches of at most `threshold` bytes, in the order of the responses. A tensor that is
/// larger has a batch of its own, and so has one of 1 MiB that travels as it is. A tensor may join an earlier batch of its kind,
/// past others.
pub fn fuse(responses: &[Response], threshold: usize) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut open: BTreeMap<Key, usize> = BTreeMap::new();
    for (response, Response { request, error, .. }) in responses.iter().enumerate() {
        let reduction = match &request.kind {
            Kind::Allreduce(reduction) if error.is_none() && !request.parts.is_empty() => *reduction,
            _ => {
                batches.push(Batch::Single(response));
                continue;
            }
        };
        for (part, tensor) in request.parts.iter().enumerate() {
            let (member, elements) = (Member { response, part }, tensor.elements());
            let key = Key::new(tensor.dtype, &reduction);
            let wire = reduction.compression.travels_as(tensor.dtype);
            let bytes = elements.saturating_mul(wire.size());
            let fused = Fused { members: vec![member], dtype: tensor.dtype, wire, reduction, elements };
            if is_alone(&reduction, tensor.dtype, elements) {
                batches.push(Batch::Reduce(fused));
                continue;
            }
            if let Some(Batch::Reduce(batch)) = open.get(&key).and_then(|index| batches.get_mut(*index))
                && batch.wire_bytes().saturating_add(bytes) <= threshold
            {
                batch.members.push(member);
                batch.elements += elements;
                continue;
            }
            open.insert(key, batches.len());
            batches.push(Batch::Reduce(fused));
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::horovod::request::{Part, Request};

    fn response(reduction: impl Into<Reduction>, tensors: &[(DType, u64)]) -> Response {
        let parts = tensors
            .iter()
            .map(|(dtype, length)| Part { dtype: *dtype, stands_for: None, shape: vec![*length] })
            .collect();
        let request = Request { name: "t".into(), kind: Kind::Allreduce(reduction.into()), parts };
        Response { request, rows: Vec::new(), absent: Vec::new(), error: None }
    }

    fn members(batch: &Batch) -> Vec<usize> {
        match batch {
            Batch::Reduce(fused) => fused.members.iter().map(|member| member.response).collect(),
            Batch::Single(response) => vec![*response],
        }
    }

    #[test]
    fn tensors_of_one_kind_share_batches_past_others() {
        let (f32s, f64s) = (response(Op::Sum, &[(DType::F32, 4)]), response(Op::Sum, &[(DType::F64, 2)]));
        let half = response(Reduction::new(Op::Sum).compression(Compression::Fp16), &[(DType::F32, 4)]);
        let all = [f32s.clone(), f64s, f32s.clone(), half, f32s];
        let batches: Vec<_> = fuse(&all, 32).iter().map(members).collect();
        assert_eq!(batches, [vec![0, 2], vec![1], vec![3], vec![4]]);
    }

    #[test]
    fn a_group_is_divided_by_type_and_size_and_nothing_is_fused_without_a_threshold() {
        let group =
            response(Op::Sum, &[(DType::F32, 4), (DType::I32, 4), (DType::F32, 4), (DType::F32, 100)]);
        let batches = fuse(std::slice::from_ref(&group), 32);
        let parts = |batch: &Batch| match batch {
            Batch::Reduce(fused) => fused.members.iter().map(|member| member.part).collect::<Vec<_>>(),
            Batch::Single(_) => Vec::new(),
        };
        assert_eq!(batches.iter().map(parts).collect::<Vec<_>>(), [vec![0, 2], vec![1], vec![3]]);
        assert_eq!(fuse(&[group], 0).len(), 4);
    }

    #[test]
    fn a_large_tensor_is_combined_where_it_is_and_smaller_ones_share_a_batch_past_it() {
        let large = (ALONE / 4) as u64;
        let all = |reduction: Reduction| {
            let tensors = [large - 1, large, large - 1];
            let all = tensors.map(|length| response(reduction, &[(DType::F32, length)]));
            fuse(&all, usize::MAX).iter().map(members).collect::<Vec<_>>()
        };
        assert_eq!(all(Op::Sum.into()), [vec![0, 2], vec![1]]);
        // What travels in another type, and an Adasum, needs the buffer.
        assert_eq!(all(Reduction::new(Op::Sum).compression(Compression::Fp16)), [[0, 1, 2]]);
        assert_eq!(all(Op::Adasum.into()), [[0, 1, 2]]);
    }

    #[test]
    fn what_failed_is_carried_out_by_itself() {
        let failed = Response { error: Some("why".into()), ..response(Op::Sum, &[(DType::F32, 4)]) };
        assert_eq!(fuse(&[failed, response(Op::Sum, &[])], 1 << 20), [Batch::Single(0), Batch::Single(1)]);
    }
}
