//! The header before every payload: the sender's call, for the receiver to compare with its own.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hash::fnv1a_32;
use crate::rank::{Generation, Rank, Sequence};
use crate::wire::Fields;

/// Bytes of a header.
pub const HEADER: usize = 48;

const MAGIC: u32 = u32::from_le_bytes(*b"PHX1");
const NO_ROOT: u32 = u32::MAX;

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Combines the elements of all ranks; all get the result.
    AllReduce = 1,
    /// The root's elements go to all.
    Broadcast = 2,
    /// Equally many elements of each rank go to all.
    AllGather = 3,
    /// Combines the elements of all ranks; each gets an equal share of the result.
    ReduceScatter = 4,
    /// Nobody goes on before all have come.
    Barrier = 5,
    /// A `send` with its `recv`.
    PointToPoint = 6,
    /// Combines the elements of all ranks; the root gets the result.
    Reduce = 7,
    /// Equally many elements of each rank go to the root.
    Gather = 8,
    /// Equal shares of the root's elements go to all.
    Scatter = 9,
    /// As `AllGather`, with a count for each rank.
    AllGatherV = 10,
    /// Each rank sends every rank an equal share of its elements.
    AllToAll = 11,
    /// As `AllToAll`, with counts.
    AllToAllV = 12,
    /// As `AllReduce`, of several buffers as one.
    AllReduceCoalesced = 13,
    /// As `Barrier`; if ranks do not come, the others are told which.
    MonitoredBarrier = 14,
    /// As `ReduceScatter`, with a count for each rank.
    ReduceScatterV = 15,
    /// As `AllGatherV`, in one buffer for all.
    AllGatherVInPlace = 16,
}

impl Operation {
    /// Every operation, in the order of their numbers on the wire.
    pub const ALL: [Self; 16] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Barrier,
        Self::PointToPoint,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllGatherV,
        Self::AllToAll,
        Self::AllToAllV,
        Self::AllReduceCoalesced,
        Self::MonitoredBarrier,
        Self::ReduceScatterV,
        Self::AllGatherVInPlace,
    ];

    /// The name, as a user writes the call.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Barrier => "barrier",
            Self::PointToPoint => "send/recv",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllGatherV => "all_gather_v",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
            Self::AllReduceCoalesced => "all_reduce_coalesced",
            Self::MonitoredBarrier => "monitored_barrier",
            Self::ReduceScatterV => "reduce_scatter_v",
            Self::AllGatherVInPlace => "all_gather_v in place",
        }
    }

    /// Whether the buffer consists of parts, of which all ranks must give the same lengths. Such a call has no root.
    #[inline]
    pub fn has_parts(self) -> bool {
        match self {
            Self::AllReduceCoalesced | Self::ReduceScatterV | Self::AllGatherV | Self::AllGatherVInPlace => {
                true
            }
            Self::AllReduce
            | Self::Broadcast
            | Self::AllGather
            | Self::ReduceScatter
            | Self::Barrier
            | Self::PointToPoint
            | Self::Reduce
            | Self::Gather
            | Self::Scatter
            | Self::AllToAll
            | Self::MonitoredBarrier => false,
            // The counts are compared, or decide how much each pair of ranks expects.
            Self::AllToAllV => false,
        }
    }
}

/// A collective that copies, with equal counts or a count for each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copying {
    /// Each rank's elements go to all.
    AllGather,
    /// Each rank's elements go to the root.
    Gather,
    /// The root's elements are divided among all.
    Scatter,
    /// Each rank's elements are divided among all.
    AllToAll,
}

impl Copying {
    /// An error for operations that do not copy from an input to an output.
    pub fn of(operation: Operation) -> Result<Self> {
        match operation {
            Operation::AllGather | Operation::AllGatherV => Ok(Self::AllGather),
            Operation::Gather => Ok(Self::Gather),
            Operation::Scatter => Ok(Self::Scatter),
            Operation::AllToAll | Operation::AllToAllV => Ok(Self::AllToAll),
            Operation::AllReduce
            | Operation::AllReduceCoalesced
            | Operation::Reduce
            | Operation::ReduceScatter
            | Operation::ReduceScatterV
            | Operation::Broadcast
            | Operation::AllGatherVInPlace
            | Operation::Barrier
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => {
                Err(Error::protocol(format!("{} copies nothing from input to output", operation.name())))
            }
        }
    }
}

/// A call as the user made it. Ranks whose calls differ must not exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The kind of call.
    pub operation: Operation,
    /// The type of the elements.
    pub dtype: DType,
    /// Elements of the call's buffer. For `all_gather` and `gather`: what each rank contributes. For `scatter`: what
    /// each rank receives. For `all_gather_v`: of all ranks together. For `all_to_all_v`, where the ranks' lengths
    /// differ: 0.
    pub elements: u64,
    /// The reduction, without its factor; None if nothing is reduced.
    pub reduce: Option<ReduceOp>,
    /// The root; None for calls without one.
    pub root: Option<Rank>,
    /// A digest of the lengths of the parts, if the operation [has parts](Operation::has_parts): the slices of
    /// `all_reduce_coalesced`, or what each rank has. 0 if there are fewer than two, and for the other operations.
    pub parts: u32,
    /// The fingerprint of the table by which the algorithm was chosen; 0 if there was no choice.
    pub tuning: u32,
    /// The user's call, if it is not the collective itself.
    pub caller: Option<Caller>,
}

impl Call {
    /// A call of so many elements, without root and reduction.
    #[inline]
    pub fn new(operation: Operation, dtype: DType, elements: usize) -> Self {
        Self {
            operation,
            dtype,
            elements: elements as u64,
            reduce: None,
            root: None,
            parts: 0,
            tuning: 0,
            caller: None,
        }
    }

    /// The same with this reduction.
    #[inline]
    pub fn reducing(self, op: ReduceOp) -> Self {
        Self { reduce: Some(op.without_factor()), ..self }
    }

    /// An error that names this call, if `op` is not defined for its elements.
    #[inline]
    pub fn check(&self, op: ReduceOp) -> Result<()> {
        op.check(self.dtype).map_err(|error| error.in_operation(self.to_string(), None))
    }

    /// Prepares this rank's elements for `op`, if it is defined for them.
    #[inline]
    pub fn prepare(&self, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        self.check(op)?;
        op.prepare(self.dtype, data)
    }

    /// The same with this root.
    #[inline]
    pub fn rooted_at(self, root: Rank) -> Self {
        Self { root: Some(root), ..self }
    }

    /// The same with parts of these lengths.
    pub fn in_parts(self, lengths: impl ExactSizeIterator<Item = usize>) -> Self {
        if lengths.len() < 2 {
            return self;
        }
        let parts = fnv1a_32(lengths.flat_map(|length| (length as u64).to_le_bytes()));
        Self { parts, ..self }
    }

    /// The root, or the digest of the parts, which have one place in what ranks send: no call has both.
    #[inline]
    pub(crate) fn root_or_parts(&self) -> u32 {
        match self.operation.has_parts() {
            true => self.parts,
            false => self.root.map_or(NO_ROOT, Rank::get),
        }
    }

    /// The root and the digest of the parts that `word` is in a call of this operation.
    pub(crate) fn read_root_or_parts(operation: Operation, word: u32) -> (Option<Rank>, u32) {
        match operation.has_parts() {
            true => (None, word),
            false => ((word != NO_ROOT).then(|| Rank::new(word)), 0),
        }
    }

    /// If `theirs` is this call with parts of other lengths: what `own` and `peer` do, and the remedy.
    fn other_parts(&self, theirs: &Self, own: Rank, peer: Rank) -> Option<(String, &'static str)> {
        if self.parts == theirs.parts || *self != (Self { parts: self.parts, tuning: self.tuning, ..*theirs })
        {
            return None;
        }
        Some(if self.operation == Operation::AllReduceCoalesced {
            (
                format!("ranks {own} and {peer} combine slices of different lengths"),
                "give every rank slices of the same lengths, in the same order",
            )
        } else {
            (
                format!("ranks {own} and {peer} have different counts"),
                "give every rank the same count for each rank",
            )
        })
    }

    /// The remedy if `peer` makes the call `theirs` instead.
    fn remedy_if_not(&self, theirs: &Self, own: Rank, peer: Rank) -> String {
        let batch = |call: &Self| call.caller.is_some_and(Caller::is_for_each_batch);
        match (batch(self), batch(theirs)) {
            (true, false) => uneven(peer),
            (false, true) => uneven(own),
            (true, true) | (false, false) => {
                "every rank must make the same calls, with the same sizes, in the same order".to_owned()
            }
        }
    }

    /// The remedy if `peer` has left.
    pub fn remedy_if_left(&self, peer: Rank) -> String {
        match self.caller.is_some_and(Caller::is_for_each_batch) {
            true => uneven(peer),
            // A program that closes its groups after an error leaves as any other.
            false => {
                format!(
                    "give every rank the same number of steps; if rank {peer} had an error before, its own output says so"
                )
            }
        }
    }
}

/// The remedy if a rank has ended before the others.
fn uneven(peer: Rank) -> String {
    format!(
        "has rank {peer} fewer batches? Run the epoch inside Ddp::join, see docs/guide/uneven-inputs.md, or give every \
         rank as many: DistributedSampler does"
    )
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(caller) = self.caller {
            return write!(f, "{} [{}]", caller.name(), Self { caller: None, ..*self });
        }
        f.write_str(self.operation.name())?;
        if matches!(self.operation, Operation::Barrier | Operation::MonitoredBarrier) {
            return Ok(());
        }
        if self.operation == Operation::AllToAllV {
            return write!(f, "({})", self.dtype);
        }
        f.write_str("(")?;
        if let Some(op) = self.reduce {
            write!(f, "{op}, ")?;
        }
        write!(f, "{} x {}", self.elements, self.dtype)?;
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        f.write_str(")")
    }
}

/// A digest of the collectives that a rank has made before a call. Ranks compare it with the call: a rank that only sends in
/// one, or only in some, hears of a difference in the next that it receives anything in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History(pub u32);

impl History {
    /// The digest that also covers the call in `header`.
    pub fn with(self, header: &Header) -> Self {
        const PRIME: u64 = 0x0000_0100_0000_01B3;
        let start = 0xCBF2_9CE4_8422_2325 ^ u64::from(self.0);
        let bytes = Header { history: Self::default(), payload: 0, ..*header }.encode();
        let (words, _) = bytes.as_chunks::<8>();
        let mixed = words.iter().fold(start, |hash, word| {
            let hash = (hash ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME);
            hash ^ hash >> 31
        });
        Self((mixed ^ mixed >> 32) as u32)
    }
}

/// The header before a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<u8>", try_from = "Vec<u8>")]
pub struct Header {
    /// The sender's call.
    pub call: Call,
    /// The number of the call in its group.
    pub sequence: Sequence,
    /// The generation of the sender's group, of which the wire has the lower 32 bits.
    pub generation: Generation,
    /// The collectives that the sender has made before.
    pub history: History,
    /// Bytes of the payload that follows.
    pub payload: u64,
}

impl Header {
    /// The header as it is sent.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.call.operation as u8;
        bytes[5] = self.call.dtype as u8;
        bytes[6] = self.call.reduce.map_or(0, ReduceOp::code);
        bytes[7] = self.call.caller.map_or(0, |caller| caller as u8);
        bytes[8..12].copy_from_slice(&self.call.root_or_parts().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.call.tuning.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.generation.on_the_wire().to_le_bytes());
        bytes[28..32].copy_from_slice(&self.history.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.call.elements.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.payload.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If it does not begin with the magic number, or if a number in it stands for nothing.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let mut fields = Fields::new(bytes);
        let magic = fields.u32();
        if magic != MAGIC {
            return Err(Error::malformed(format!(
                "a frame begins with {magic:#010x}, not with {MAGIC:#010x}"
            )));
        }
        let (operation, dtype, reduce, caller) = (fields.u8(), fields.u8(), fields.u8(), fields.u8());
        let unknown =
            |what: &str, code: u8| Error::malformed(format!("a frame has the unknown {what} {code}"));
        let operation = Operation::ALL
            .into_iter()
            .find(|known| *known as u8 == operation)
            .ok_or_else(|| unknown("operation", operation))?;
        let dtype = DType::from_wire(dtype).ok_or_else(|| unknown("dtype", dtype))?;
        let reduce = match reduce {
            0 => None,
            code => Some(ReduceOp::from_wire(code).ok_or_else(|| unknown("reduce operation", code))?),
        };
        let caller = match caller {
            0 => None,
            code => Some(Caller::from_wire(code).ok_or_else(|| unknown("caller", code))?),
        };
        let (root, parts) = Call::read_root_or_parts(operation, fields.u32());
        let tuning = fields.u32();
        let sequence = Sequence(fields.u64());
        let generation = Generation(fields.u32().into());
        let history = History(fields.u32());
        let elements = fields.u64();
        let payload = fields.u64();
        let call = Call { operation, dtype, elements, reduce, root, parts, tuning, caller };
        Ok(Self { call, sequence, generation, history, payload })
    }

    /// Compares a header that `peer` sent, or a call that it reports, with the one that this rank expects from its own
    /// call.
    pub fn check(&self, received: &Self, own: Rank, peer: Rank) -> Result<()> {
        if self == received {
            return Ok(());
        }
        let error = if self.generation.on_the_wire() != received.generation.on_the_wire() {
            Error::protocol(format!(
                "rank {peer} is in generation {}, this group in generation {}",
                received.generation.0, self.generation.0
            ))
        } else if self.sequence == received.sequence
            && self.call == (Call { tuning: self.call.tuning, ..received.call })
            && self.call != received.call
        {
            Error::mismatch(format!(
                "in {} {} ranks {own} and {peer} chose the algorithm by different tuning tables",
                self.call, self.sequence
            ))
            .with_remedy("give every rank the same table, in PHALANX_TUNING or GroupOptions::tuning")
        } else if let Some((difference, remedy)) =
            self.call.other_parts(&received.call, own, peer).filter(|_| self.sequence == received.sequence)
        {
            Error::mismatch(format!("in {} {} {difference}", self.call, self.sequence)).with_remedy(remedy)
        } else if self.call != received.call || self.sequence != received.sequence {
            Error::mismatch(format!(
                "the ranks disagree: rank {own} calls {} {}, rank {peer} calls {} {}",
                self.call, self.sequence, received.call, received.sequence
            ))
            .with_remedy(self.call.remedy_if_not(&received.call, own, peer))
            .with_sequence(received.sequence)
        } else if self.history != received.history {
            Error::mismatch(format!(
                "before {} {} the ranks disagreed: ranks {own} and {peer} have made different calls on this group, and \
                 neither has waited for the other in them",
                self.call, self.sequence
            ))
            .with_remedy(
                "every rank must make the same calls, with the same sizes and the same roots, in the same order",
            )
            .of_history()
        } else if self.payload == received.payload {
            return Ok(());
        } else {
            // In other calls the lengths follow from what has been compared.
            let remedy = match self.call.operation == Operation::AllToAllV {
                true => "every rank must expect of each other as many elements as that one sends to it",
                false => "every rank must run the same version with the same settings",
            };
            Error::mismatch(format!(
                "in {} {} rank {peer} sends {} bytes where rank {own} expects {}",
                self.call, self.sequence, received.payload, self.payload
            ))
            .with_remedy(remedy)
        };
        Err(error.with_peer(peer))
    }
}

impl From<Header> for Vec<u8> {
    fn from(header: Header) -> Self {
        header.encode().to_vec()
    }
}

impl TryFrom<Vec<u8>> for Header {
    type Error = Error;

    fn try_from(bytes: Vec<u8>) -> Result<Self> {
        let bytes = bytes.as_slice().try_into();
        Self::decode(bytes.map_err(|_| Error::malformed("a header has another length"))?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header {
            call: Call {
                operation: Operation::Broadcast,
                dtype: DType::BF16,
                elements: 10,
                reduce: None,
                root: Some(Rank::new(1)),
                parts: 0,
                tuning: 5,
                caller: None,
            },
            sequence: Sequence(7),
            generation: Generation(2),
            history: History(9),
            payload: 20,
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        let mut other = header();
        assert_eq!(Header::decode(&header().encode()).unwrap(), header());
        for operation in Operation::ALL {
            for op in ReduceOp::ALL {
                other.call = Call { operation, reduce: Some(op), root: None, parts: 0, ..other.call };
                assert_eq!(Header::decode(&other.encode()).unwrap(), other);
            }
            // What stands for no root in the other operations is a digest like any other.
            for parts in [1, NO_ROOT].into_iter().filter(|_| operation.has_parts()) {
                other.call.parts = parts;
                assert_eq!(Header::decode(&other.encode()).unwrap(), other);
            }
        }
        for caller in Caller::ALL {
            other.call.caller = Some(*caller);
            assert_eq!(Header::decode(&other.encode()).unwrap(), other);
        }
        let mut unknown = other.encode();
        unknown[7] = u8::MAX;
        assert!(Header::decode(&unknown).unwrap_err().to_string().contains("unknown caller 255"));
    }

    #[test]
    fn what_users_have_called_is_compared_and_named() {
        let by = |caller| Header { call: Call { caller, ..header().call }, ..header() };
        let check =
            |own, theirs| by(own).check(&by(theirs), Rank::MAIN, Rank::new(1)).unwrap_err().to_string();
        let text = check(Some(Caller::CheckpointsOpen), None);
        assert!(text.contains("rank 0 calls Checkpoints::open [broadcast(10 x bf16, root 1)] #7"), "{text}");
        assert!(
            text.contains("rank 1 calls broadcast(10 x bf16, root 1) #7 (every rank must make"),
            "{text}"
        );
        // A rank that has no more batches has gone on to another call.
        let text = check(Some(Caller::DdpBackward), None);
        assert!(text.contains("has rank 1 fewer batches?") && text.contains("Ddp::join"), "{text}");
        let text = check(Some(Caller::CheckpointsNewest), Some(Caller::DdpForward));
        assert!(text.contains("has rank 0 fewer batches?") && text.contains("uneven-inputs.md"), "{text}");
    }

    #[test]
    fn a_difference_shows_both_calls() {
        let mut other = header();
        other.call =
            Call { operation: Operation::AllReduce, reduce: Some(ReduceOp::Sum), root: None, ..other.call };
        let error = header().check(&other, Rank::MAIN, Rank::new(1)).unwrap_err();
        assert!(error.is_mismatch());
        let text = error.to_string();
        assert!(text.contains("rank 0 calls broadcast(10 x bf16, root 1) #7"), "{text}");
        assert!(text.contains("rank 1 calls all_reduce(sum, 10 x bf16) #7"), "{text}");
        let mut tuned = header();
        tuned.call.tuning = 6;
        let error = header().check(&tuned, Rank::MAIN, Rank::new(1)).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("different tuning tables"), "{error}");
        let stale = Header { generation: Generation(1), ..header() };
        assert!(
            header()
                .check(&stale, Rank::MAIN, Rank::new(1))
                .unwrap_err()
                .to_string()
                .contains("generation 1")
        );
    }

    #[test]
    fn parts_of_other_lengths_are_a_difference_with_a_remedy_of_its_own() {
        let of = |operation, lengths: &[usize]| {
            let call = Call::new(operation, DType::F32, lengths.iter().sum::<usize>());
            Header { call: call.reducing(ReduceOp::Sum).in_parts(lengths.iter().copied()), ..header() }
        };
        let check = |operation, own: &[usize], theirs: &[usize]| {
            of(operation, own).check(&of(operation, theirs), Rank::MAIN, Rank::new(1))
        };
        let coalesced = "in all_reduce_coalesced(sum, 5 x f32) #7 ranks 0 and 1 combine slices of different lengths (give \
                         every rank slices";
        let counts =
            "in reduce_scatter_v(sum, 5 x f32) #7 ranks 0 and 1 have different counts (give every rank";
        for (operation, text) in
            [(Operation::AllReduceCoalesced, coalesced), (Operation::ReduceScatterV, counts)]
        {
            for [own, theirs] in
                [[&[2, 3][..], &[3, 2][..]], [&[2, 3][..], &[5][..]], [&[5, 0][..], &[0, 5][..]]]
            {
                let error = check(operation, own, theirs).unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains(text), "{error}");
                check(operation, theirs, theirs).unwrap();
            }
            // Another sum says more.
            let error = check(operation, &[2, 3], &[2, 4]).unwrap_err().to_string();
            assert!(error.contains("5 x f32") && error.contains("6 x f32"), "{error}");
        }
        assert_eq!(of(Operation::AllReduceCoalesced, &[5]).call.parts, 0);
        // The next call shows it, too, to a rank that has received no frame of this one.
        let history =
            |lengths: &[usize]| History::default().with(&of(Operation::AllReduceCoalesced, lengths));
        assert_ne!(history(&[2, 3]), history(&[3, 2]));
    }

    #[test]
    fn another_length_than_a_count_says_has_a_remedy_of_its_own() {
        let check = |operation| {
            let call = Call { operation, root: None, ..header().call };
            let own = Header { call, payload: 8, ..header() };
            own.check(&Header { payload: 4, ..own }, Rank::MAIN, Rank::new(1)).unwrap_err().to_string()
        };
        let text = check(Operation::AllToAllV);
        assert!(
            text.contains(
                "rank 1 sends 4 bytes where rank 0 expects 8 (every rank must expect of each other"
            ),
            "{text}"
        );
        let text = check(Operation::AllGather);
        assert!(text.contains("same version with the same settings"), "{text}");
    }

    #[test]
    fn only_another_history_lets_another_error_name_the_difference() {
        let check = |theirs: Header| header().check(&theirs, Rank::MAIN, Rank::new(1)).unwrap_err();
        let history = check(Header { history: History(10), ..header() });
        assert!(history.is_of_history() && history.to_string().contains("disagreed"), "{history}");
        // These say all that there is: a rank that waited for more would wait for nothing.
        let tuned = Call { tuning: 6, ..header().call };
        let others = [
            Header { payload: 21, ..header() },
            Header { call: tuned, ..header() },
            Header { sequence: Sequence(8), ..header() },
        ];
        for other in others {
            let error = check(other);
            assert!(error.is_mismatch() && !error.is_of_history(), "{error}");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_means_what_it_says(bytes in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 16]>(), framed in any::<bool>()) {
            let mut frame = [0; HEADER];
            frame[..32].copy_from_slice(&bytes);
            frame[32..].copy_from_slice(&tail);
            if framed {
                frame[..4].copy_from_slice(b"PHX1");
                frame[7] %= 32;
            }
            if let Ok(header) = Header::decode(&frame) {
                prop_assert_eq!(header.encode(), frame);
            }
        }
    }
}
