//! What a rank wants to do with the tensors of a name, and whether ranks want the same. What comes from another rank is checked here.

use std::fmt;

use crate::caller::Caller;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::wire::MAX_OBJECT_BYTES;
use serde::{Deserialize, Serialize};

use crate::horovod::reduction::{Op, Reduction};

/// The most bytes of a name.
pub const MAX_NAME_BYTES: usize = 1024;
/// The most tensors of a group.
pub const MAX_GROUP: usize = 1 << 16;
/// The most tensors that a rank may have in flight.
pub const MAX_IN_FLIGHT: usize = 1 << 20;
/// The most dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 32;

/// The most bytes of an answer of rank 0. Answers begin until there are so many, and all go in one message.
pub const MAX_ANSWER_BYTES: usize = MAX_OBJECT_BYTES / 4;
/// The most bytes on the wire of a length, a type, a code or an extent.
pub(super) const NUMBER: usize = 10;

/// The bytes of a rank's share of the messages that `size` ranks send to rank 0 in a cycle.
pub fn share(size: usize) -> usize {
    // A list has a length of its own.
    (MAX_OBJECT_BYTES / size).saturating_sub(32)
}

/// What a rank wants to do with the tensors of a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The name, the same on all ranks.
    pub name: String,
    /// The operation.
    pub kind: Kind,
    /// One tensor, or those of a group, or none.
    pub parts: Vec<Part>,
}

/// An operation, with what all ranks must give alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kind {
    /// All ranks get the tensors of all, combined.
    Allreduce(Reduction),
    /// All ranks get the rows of all, in the order of the ranks.
    Allgather,
    /// All ranks get the tensors of one.
    Broadcast {
        /// That rank.
        root: u32,
    },
    /// Each rank gets a part of the rows of each. How many, the ranks tell each other when they carry it out: all splits together are as
    /// many as the square of the ranks, which rank 0 could not send.
    Alltoall,
    /// Each rank gets a part of the rows of the tensors of all, combined.
    Reducescatter(Reduction),
    /// No rank goes on before all have come.
    Barrier,
}

impl Kind {
    /// Horovod's name for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::Allgather => "allgather",
            Self::Broadcast { .. } => "broadcast",
            Self::Alltoall => "alltoall",
            Self::Reducescatter(_) => "reducescatter",
            Self::Barrier => "barrier",
        }
    }

    /// Whether ranks agree if only the first dimensions of their tensors differ.
    fn has_rows_of_its_own(&self) -> bool {
        match self {
            Self::Allgather | Self::Alltoall => true,
            Self::Allreduce(_) | Self::Broadcast { .. } | Self::Reducescatter(_) | Self::Barrier => false,
        }
    }

    /// Whether rank 0 tells all ranks how many rows each has.
    pub(super) fn tells_rows(&self) -> bool {
        match self {
            Self::Allgather => true,
            Self::Allreduce(_)
            | Self::Alltoall
            | Self::Broadcast { .. }
            | Self::Reducescatter(_)
            | Self::Barrier => false,
        }
    }

    /// Whether it is worth caching.
    pub fn is_cached(&self) -> bool {
        match self {
            Self::Allreduce(_)
            | Self::Allgather
            | Self::Broadcast { .. }
            | Self::Alltoall
            | Self::Reducescatter(_) => true,
            Self::Barrier => false,
        }
    }
}

/// A tensor, without its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "WirePart", try_from = "WirePart")]
pub struct Part {
    /// The type of its elements.
    pub dtype: DType,
    /// What the tensor is to the program, if its elements are of another type there: `int16` travels as bytes.
    pub stands_for: Option<Caller>,
    /// Its extents; none for a scalar.
    pub shape: Vec<u64>,
}

/// A [`Part`] as it is sent.
#[derive(Serialize, Deserialize)]
struct WirePart {
    /// The place of the type in [`DType::ALL`], and from the eighth bit on the number of what it stands for, or 0.
    elements: u32,
    shape: Vec<u64>,
}

impl From<Part> for WirePart {
    fn from(Part { dtype, stands_for, shape }: Part) -> Self {
        let stands_for = stands_for.map_or(0, |caller| u32::from(caller as u8));
        Self { elements: (u32::from(dtype as u8) - 1) | stands_for << 8, shape }
    }
}

impl TryFrom<WirePart> for Part {
    type Error = Error;

    fn try_from(WirePart { elements, shape }: WirePart) -> Result<Self> {
        let unknown = || Error::malformed(format!("a tensor has elements of the unknown type {elements:#x}"));
        let [dtype, stands_for, third, fourth] = elements.to_le_bytes();
        if (third, fourth) != (0, 0) {
            return Err(unknown());
        }
        let dtype = dtype.checked_add(1).and_then(DType::from_wire).ok_or_else(unknown)?;
        let stands_for = match stands_for {
            0 => None,
            code => Some(Caller::from_wire(code).ok_or_else(unknown)?),
        };
        Ok(Self { dtype, stands_for, shape })
    }
}

impl Part {
    /// The elements of one row, of the first dimension.
    pub fn row(&self) -> usize {
        self.shape.iter().skip(1).product::<u64>() as usize
    }

    /// The first dimension; 1 for a scalar.
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }

    /// Its shape, in this machine's numbers.
    pub fn dims(&self) -> Vec<usize> {
        self.shape.iter().map(|extent| *extent as usize).collect()
    }

    /// Checks that its bytes can be counted, and those of one row too if there are no rows.
    pub(super) fn check(&self) -> Result<()> {
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.size() as u64, |product, extent| product.checked_mul((*extent).max(1)));
        if self.shape.len() > MAX_DIMENSIONS || bytes.is_none_or(|bytes| bytes > isize::MAX as u64) {
            return Err(Error::invalid_argument(format!("no tensor has the shape {:?}", self.shape))
                .with_remedy(format!(
                    "a tensor has {MAX_DIMENSIONS} dimensions at most, and fits into memory"
                )));
        }
        Ok(())
    }

    /// Whether they are the same but for the number of rows.
    fn rows_match(&self, other: &Self) -> bool {
        (self.dtype, self.stands_for) == (other.dtype, other.stands_for)
            && self.shape.len() == other.shape.len()
            && self.shape.get(1..) == other.shape.get(1..)
    }
}

impl Request {
    /// Checks what a program or another rank has written, in a world of `size`.
    pub fn check(&self, size: usize) -> Result<()> {
        let refuse = |what: String, remedy: &str| Err(Error::invalid_argument(what).with_remedy(remedy));
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES {
            let what =
                format!("a tensor's name has {} bytes, and may have 1 to {MAX_NAME_BYTES}", self.name.len());
            return refuse(what, "give it a shorter name that is not empty");
        }
        if self.parts.len() > MAX_GROUP {
            let what =
                format!("{} has {} tensors; at most {MAX_GROUP} are allowed", self.name, self.parts.len());
            return refuse(what, "divide them among several names");
        }
        self.parts.iter().try_for_each(Part::check)?;
        if self.wire_bytes() > share(size) || self.answer_bytes(size) > MAX_ANSWER_BYTES {
            return Err(Error::invalid_argument(format!(
                "{} has {} tensors; so many cannot be negotiated under one name among {size} ranks",
                self.name,
                self.parts.len()
            ))
            .with_remedy("divide them among several names"));
        }
        match &self.kind {
            Kind::Allreduce(reduction) | Kind::Reducescatter(reduction) => {
                self.parts
                    .iter()
                    .try_for_each(|part| reduction.check_for(part.dtype, part.stands_for, size))?;
            }
            Kind::Broadcast { root } if *root as usize >= size => {
                let what = format!("root {root} is outside a world of {size}");
                return refuse(what, "name a rank of this handle: those of a process set count from 0");
            }
            Kind::Allgather | Kind::Alltoall | Kind::Broadcast { .. } | Kind::Barrier => {}
        }
        if let Kind::Reducescatter(reduction) = &self.kind
            && reduction.op == Op::Adasum
        {
            return refuse("a reducescatter cannot be an adasum".to_owned(), "use allreduce");
        }
        let has_rows = match &self.kind {
            Kind::Allgather | Kind::Alltoall | Kind::Reducescatter(_) => true,
            Kind::Allreduce(_) | Kind::Broadcast { .. } | Kind::Barrier => false,
        };
        if has_rows && self.parts.iter().any(|part| part.shape.is_empty()) {
            let what = format!("{} of a scalar: it needs a first dimension", self.kind.name());
            return refuse(what, "give it one, as of the shape [1]");
        }
        Ok(())
    }

    /// The most bytes that it takes on the wire.
    pub fn wire_bytes(&self) -> usize {
        let parts: usize = self.parts.iter().map(|part| NUMBER * (2 + part.shape.len())).sum();
        self.name.len() + parts + NUMBER * 10
    }

    /// The most bytes that the answer to it takes on the wire, with the rows of all ranks; but for an error.
    pub fn answer_bytes(&self, size: usize) -> usize {
        let columns = if self.kind.tells_rows() { self.parts.len() } else { 0 };
        // The ranks that have joined too.
        self.wire_bytes().saturating_add(size.saturating_mul(NUMBER * (columns + 2)))
    }

    /// What rank 0 tells all ranks of the rows of this rank's tensors: those of each (allgather).
    pub fn rows(&self) -> Vec<u64> {
        if self.kind.tells_rows() { self.parts.iter().map(Part::rows).collect() } else { Vec::new() }
    }

    /// Whether this rank's and another's request can be carried out together.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let parts = || {
            let mut pairs = self.parts.iter().zip(&other.parts);
            match self.kind.has_rows_of_its_own() {
                true => pairs.all(|(one, other)| one.rows_match(other)),
                false => pairs.all(|(one, other)| one == other),
            }
        };
        self.kind == other.kind && self.parts.len() == other.parts.len() && parts()
    }
}

impl fmt::Display for Request {
    /// The operation and the tensors, without the name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        match &self.kind {
            Kind::Allreduce(reduction) | Kind::Reducescatter(reduction) => {
                write!(f, "{}({reduction})", self.kind.name())?;
            }
            Kind::Broadcast { root } => write!(f, "broadcast(root {root})")?,
            Kind::Allgather | Kind::Alltoall | Kind::Barrier => f.write_str(self.kind.name())?,
        }
        for (index, part) in self.parts.iter().take(SHOWN).enumerate() {
            let separator = if index == 0 { " of" } else { "," };
            match part.stands_for {
                Some(whole) => write!(f, "{separator} {} ({} {:?})", whole.name(), part.dtype, part.shape)?,
                None => write!(f, "{separator} {} {:?}", part.dtype, part.shape)?,
            }
        }
        match self.parts.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world_size::MAX_WORLD_SIZE;

    fn part(shape: &[u64]) -> Part {
        Part { dtype: DType::F32, stands_for: None, shape: shape.into() }
    }

    fn request(kind: Kind, shape: &[u64]) -> Request {
        Request { name: "t".into(), kind, parts: vec![part(shape)] }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let sum = Kind::Allreduce(Op::Sum.into());
        assert!(request(sum.clone(), &[2, 3]).check(2).is_ok());
        assert!(request(sum.clone(), &[u64::MAX, 3]).check(2).is_err());
        assert!(request(Kind::Allgather, &[0, 1 << 40, 1 << 40]).check(2).is_err(), "a row without end");
        assert!(request(sum.clone(), &[1; MAX_DIMENSIONS + 1]).check(2).is_err());
        assert!(Request { name: String::new(), ..request(sum.clone(), &[1]) }.check(2).is_err());
        assert!(Request { name: "n".repeat(MAX_NAME_BYTES + 1), ..request(sum, &[1]) }.check(2).is_err());
        let adasum = Kind::Reducescatter(Op::Adasum.into());
        let scalars =
            [Kind::Broadcast { root: 2 }, Kind::Allgather, Kind::Alltoall].map(|kind| request(kind, &[]));
        for refused in scalars.into_iter().chain([request(adasum, &[2])]) {
            let error = refused.check(2).unwrap_err();
            assert!(error.is_invalid_argument() && error.remedy().is_some(), "{error}");
        }
    }

    #[test]
    fn a_tensor_can_be_negotiated_among_very_many_ranks() {
        let ranks = MAX_WORLD_SIZE as usize;
        let sum = Reduction::from(Op::Sum);
        let kinds = [
            Kind::Allreduce(sum),
            Kind::Allgather,
            Kind::Broadcast { root: 7 },
            Kind::Alltoall,
            Kind::Reducescatter(sum),
        ];
        for kind in kinds {
            let request = request(kind, &[1 << 20, 8]);
            request.check(ranks).unwrap();
            // An answer grows no faster than the ranks.
            assert!(request.answer_bytes(ranks) < 64 * ranks, "{request}");
        }
    }

    #[test]
    fn a_request_that_no_message_has_room_for_is_refused() {
        let part = part(&[1; MAX_DIMENSIONS]);
        let group =
            |kind: Kind, tensors| Request { name: "g".into(), kind, parts: vec![part.clone(); tensors] };
        let sum = Kind::Allreduce(Op::Sum.into());
        assert!(group(sum.clone(), MAX_GROUP).check(8).is_ok());
        let error = group(sum, MAX_GROUP).check(16).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("among several names"), "{error}");
        // Its answer has the rows of all ranks.
        assert!(group(Kind::Allgather, 4096).check(64).is_ok());
        assert!(group(Kind::Allgather, 4096).check(4096).is_err());
        assert!(MAX_ANSWER_BYTES + group(Kind::Allgather, 4096).answer_bytes(64) < MAX_OBJECT_BYTES);
    }

    #[test]
    fn no_request_takes_more_bytes_than_it_says() {
        let reduction = Reduction::new(Op::Average).prescale(0.1).postscale(1e300);
        let kinds = [
            Kind::Allreduce(reduction),
            Kind::Allgather,
            Kind::Broadcast { root: u32::MAX },
            Kind::Alltoall,
            Kind::Barrier,
        ];
        for kind in kinds {
            let request = Request { name: "n".repeat(300), ..request(kind, &[u64::MAX; 32]) };
            let bytes = postcard::to_stdvec(&(&request, u64::MAX)).unwrap().len();
            assert!(bytes <= request.wire_bytes(), "{bytes} {}", request.wire_bytes());
        }
    }

    #[test]
    fn types_that_travel_as_the_same_one_do_not_agree() {
        let of = |kind: Kind, stands_for| {
            let parts = vec![Part { dtype: DType::U8, stands_for, ..part(&[3, 2]) }];
            Request { name: "t".into(), kind, parts }
        };
        let [int16, uint16] = [Some(Caller::TensorsOfInt16), Some(Caller::TensorsOfUint16)];
        for kind in [Kind::Allgather, Kind::Broadcast { root: 0 }, Kind::Alltoall] {
            let own = of(kind.clone(), int16);
            assert!(own.agrees_with(&of(kind.clone(), int16)));
            assert!(!own.agrees_with(&of(kind.clone(), uint16)));
            assert!(!own.agrees_with(&of(kind.clone(), None)), "bytes");
            assert!(own.to_string().contains("tensors of int16 (u8 [3, 2])"), "{own}");
        }
    }

    #[test]
    fn integers_that_the_program_scales_agree_if_the_factors_do() {
        let of = |reduction: Reduction| {
            let parts =
                vec![Part { dtype: DType::I64, stands_for: Some(Caller::ScaledIntegers), ..part(&[3]) }];
            Request { name: "t".into(), kind: Kind::Allreduce(reduction), parts }
        };
        let (half, whole) = (of(Reduction::new(Op::Sum).postscale(0.5)), of(Op::Sum.into()));
        half.check(2).unwrap();
        assert!(half.agrees_with(&half) && !half.agrees_with(&whole));
        assert_eq!(half.to_string(), "allreduce(sum, postscale 0.5) of scaled integers (i64 [3])");
        let parts = vec![Part { dtype: DType::I64, ..part(&[3]) }];
        assert!(
            Request { parts, ..half }.check(2).unwrap_err().to_string().contains("postscale is not defined")
        );
    }

    #[test]
    fn a_tensor_is_read_as_it_was_written() {
        for dtype in DType::ALL {
            let plain = Part { dtype, ..part(&[2, 300]) };
            let bytes = postcard::to_stdvec(&plain).unwrap();
            // As the type alone, which seeds of the fuzzer have.
            assert_eq!(bytes, postcard::to_stdvec(&(dtype, &plain.shape)).unwrap());
            for stands_for in Caller::ALL.iter().copied().map(Some).chain([None]) {
                let part = Part { stands_for, ..plain.clone() };
                let bytes = postcard::to_stdvec(&part).unwrap();
                assert_eq!(postcard::from_bytes::<Part>(&bytes).unwrap(), part);
            }
        }
        for elements in [9, 255, 0xff00, 0x1_0000, u32::MAX] {
            let bytes = postcard::to_stdvec(&WirePart { elements, shape: vec![2] }).unwrap();
            assert!(postcard::from_bytes::<Part>(&bytes).is_err(), "{elements:#x}");
        }
    }

    #[test]
    fn only_rows_of_gathered_tensors_may_differ() {
        let gathered = |shape| request(Kind::Allgather, shape);
        assert!(gathered(&[2, 3]).agrees_with(&gathered(&[5, 3])));
        assert!(!gathered(&[2, 3]).agrees_with(&gathered(&[2, 4])));
        assert!(!gathered(&[2, 3]).agrees_with(&gathered(&[2, 3, 1])));
        let reduced = |op: Op, shape| request(Kind::Allreduce(op.into()), shape);
        assert!(!reduced(Op::Sum, &[2, 3]).agrees_with(&reduced(Op::Sum, &[3, 3])));
        assert!(!reduced(Op::Sum, &[2]).agrees_with(&reduced(Op::Max, &[2])));
        assert!(
            !request(Kind::Broadcast { root: 0 }, &[2])
                .agrees_with(&request(Kind::Broadcast { root: 1 }, &[2]))
        );
    }
}
