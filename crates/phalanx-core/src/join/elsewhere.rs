//! Calls that are none of the group's, such as NCCL's: what they are, who makes them on a rank without data, and whether all ranks make the same.
//!
//! NCCL compares nothing. If one rank sends fewer elements than another, both wait until a time-out, or get wrong results. So a call whose form is a
//! program's own choice is compared through the group, by [`ComparedCalls`]: that need not be waited for at each call.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;

use super::JoinGroup;
use crate::buffer::Buffer;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, Work};
use crate::rank::Rank;
use crate::world_size::MAX_WORLD_SIZE;

/// What a call that is none of the group's does with the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElsewhereOp {
    /// Combines them.
    AllReduce(ReduceOp),
    /// Puts them behind each other, in the order of the ranks. All ranks bring as many.
    AllGather,
}

/// A collective that is none of the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElsewhereCall {
    /// What becomes of the elements.
    pub op: ElsewhereOp,
    /// Their type.
    pub dtype: DType,
    /// How many each rank brings: on a rank without data, what another rank says. All ranks' together have at most 2³⁸ bytes.
    pub elements: usize,
}

/// Makes the calls of others that are none of the group's, on a rank without data.
pub trait Elsewhere: Send + Sync {
    /// Makes `call` with zeros, as ranks with data make it. Nobody needs the result.
    ///
    /// # Errors
    /// If it cannot be made. The error ends the group.
    fn answer(&self, call: ElsewhereCall) -> Result<()>;
}

/// The number of `AllGather` beside the operations of an all_reduce, which are positive.
const ALL_GATHER: u8 = 0;
/// A number of a comparison has a rank in its lowest bits, then the number of elements, the type, and the operation.
const RANK_BITS: u32 = 16;
const ELEMENTS_BITS: u32 = 39;
const DTYPE_BITS: u32 = 4;
/// The largest rank, number of elements, and number of a type, for which there are bits.
const RANKS: i64 = (1 << RANK_BITS) - 1;
const ELEMENTS: i64 = (1 << ELEMENTS_BITS) - 1;
const DTYPES: i64 = (1 << DTYPE_BITS) - 1;
const _: () = assert!(MAX_WORLD_SIZE as i64 <= RANKS + 1);

impl ElsewhereOp {
    /// Its number on the wire. A factor is not part of it: each rank has its own.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::AllReduce(op) => op.code(),
            Self::AllGather => ALL_GATHER,
        }
    }

    pub(super) fn from_wire(code: u8) -> Option<Self> {
        if code == ALL_GATHER {
            return Some(Self::AllGather);
        }
        ReduceOp::from_wire(code).map(Self::AllReduce)
    }
}

impl ElsewhereCall {
    /// Whether ranks may make the one as well as the other. A factor may differ.
    pub fn is_like(&self, other: &Self) -> bool {
        let form = |call: &Self| (call.op.code(), call.dtype, call.elements);
        form(self) == form(other)
    }

    /// Operation, type and number of elements as one number; none if that has too few bits.
    fn form(&self) -> Option<i64> {
        let elements = i64::try_from(self.elements).ok().filter(|elements| *elements <= ELEMENTS)?;
        let kind = (i64::from(self.op.code()) << DTYPE_BITS) | self.dtype as i64;
        Some((kind << ELEMENTS_BITS) | elements)
    }

    fn from_form(form: i64) -> Option<Self> {
        let (kind, code) = (form >> ELEMENTS_BITS, |number: i64| u8::try_from(number).ok());
        Some(Self {
            op: ElsewhereOp::from_wire(code(kind >> DTYPE_BITS)?)?,
            dtype: DType::from_wire(code(kind & DTYPES)?)?,
            elements: usize::try_from(form & ELEMENTS).ok()?,
        })
    }
}

impl fmt::Display for ElsewhereCall {
    /// As errors have calls.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, dtype, elements } = self;
        match op {
            ElsewhereOp::AllReduce(op) => write!(f, "all_reduce({op}, {elements} x {dtype})"),
            ElsewhereOp::AllGather => write!(f, "all_gather({elements} x {dtype})"),
        }
    }
}

/// A comparison of all ranks' next calls that are none of the group's, under way.
#[must_use = "`wait` says whether the calls are the same"]
pub struct Comparison {
    call: ElsewhereCall,
    work: Work,
}

impl JoinGroup {
    /// Begins to compare `call` with those of the other ranks. It waits for nobody.
    fn compare_elsewhere(&self, call: ElsewhereCall) -> Result<Comparison> {
        let Some(form) = call.form() else {
            return Err(Error::invalid_argument(format!("the ranks cannot compare {call}"))
                .with_remedy("make several calls with fewer elements"));
        };
        // One call of the group says all: a second one would meet other calls of the ranks that have not waited yet. It has the largest form and, as a
        // complement, the smallest, each with the lowest rank of those that have it.
        let (form, rank) = (form << RANK_BITS, i64::from(self.rank().get()));
        let both = [form | (RANKS - rank), !(form | rank)];
        let work = self.all_reduce_async(Buffer::from_slice(&both), ReduceOp::Max)?;
        Ok(Comparison { call, work })
    }
}

impl Comparison {
    /// Waits for the other ranks' calls, no longer than the group's time-out.
    ///
    /// # Errors
    /// On every rank, if two ranks' calls differ: it names both. If the group fails.
    pub fn wait(self) -> Result<()> {
        let found = self.work.wait()?;
        let &[largest, smallest] = found.as_slice::<i64>()? else {
            return Err(Error::malformed(format!("a comparison of calls has {} numbers", found.len())));
        };
        let of = |number: i64| (number & RANKS, number >> RANK_BITS);
        let ((complement, largest), (rank, smallest)) = (of(largest), of(!smallest));
        match largest == smallest {
            true => Ok(()),
            false => Err(difference([(RANKS - complement, largest), (rank, smallest)])),
        }
    }
}

/// The last calls of several places, such as the buckets of a step, that were found to be the same on all ranks.
///
/// A rank that makes the same call again in its place may wait for the comparison after the call; every other rank waits before it. So calls that differ never
/// meet: of two ranks that differ at least one has changed its call, and does not make it.
#[derive(Debug, Default)]
pub struct ComparedCalls(Mutex<BTreeMap<usize, ElsewhereCall>>);

impl ComparedCalls {
    /// Compares `call` in its `place`, which the caller makes next beside the group, with those of the other ranks. All ranks with data call it together;
    /// without data they take part in it. The caller may make its call if this returns: and then, if there is a comparison, waits for that before it uses
    /// what comes of the call.
    ///
    /// # Errors
    /// If the call has 2³⁹ elements or more. As [`Comparison::wait`].
    pub fn compare(
        &self,
        group: &JoinGroup,
        place: usize,
        call: ElsewhereCall,
    ) -> Result<Option<Comparison>> {
        let comparison = group.compare_elsewhere(call)?;
        if self.0.lock().get(&place).is_some_and(|last| last.is_like(&call)) {
            return Ok(Some(comparison));
        }
        comparison.wait()?;
        self.0.lock().insert(place, call);
        Ok(None)
    }

    /// Compares all calls anew, before they are made: after a change of what makes them.
    pub fn forget(&self) {
        self.0.lock().clear();
    }
}

/// The error for two ranks' calls that differ, each with its rank.
fn difference(mut calls: [(i64, i64); 2]) -> Error {
    calls.sort_unstable();
    let [(first, one), (second, other)] = calls;
    let named = |form: i64| match ElsewhereCall::from_form(form) {
        Some(call) => call.to_string(),
        None => format!("an unknown call {form}"),
    };
    let error = Error::mismatch(format!(
        "the ranks make different calls beside the group: rank {first} {}, and rank {second} {}",
        named(one),
        named(other)
    ))
    .with_remedy(
        "make the same call on every rank: as many elements, of one type, combined in one way. If `DeviceHook::send` says what is sent: what \
         does that depend on?",
    );
    match u32::try_from(second) {
        Ok(second) => error.with_peer(Rank::new(second)),
        Err(_) => error,
    }
}

impl fmt::Debug for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comparison({})", self.call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::JoinOptions;
    use crate::testing::{Fabric, run};

    fn reduced(op: ReduceOp, dtype: DType, elements: usize) -> ElsewhereCall {
        ElsewhereCall { op: ElsewhereOp::AllReduce(op), dtype, elements }
    }

    fn gathered(elements: usize) -> ElsewhereCall {
        ElsewhereCall { op: ElsewhereOp::AllGather, dtype: DType::I32, elements }
    }

    #[test]
    fn calls_survive_as_numbers_and_nonsense_does_not() {
        let most = usize::try_from(ELEMENTS).unwrap();
        let largest = reduced(ReduceOp::PreMulSum(1.0), DType::Bool, most);
        for call in [gathered(0), gathered(7), reduced(ReduceOp::Avg, DType::BF16, 3), largest] {
            let form = call.form().unwrap();
            assert_eq!(ElsewhereCall::from_form(form), Some(call));
            // There is room for a rank.
            assert!(form >= 0 && (form << RANK_BITS) >> RANK_BITS == form, "{call}");
        }
        assert_eq!(gathered(most + 1).form(), None);
        for (op, dtype) in [(99i64, 1), (1, 0), (1, 15)] {
            let form = ((op << DTYPE_BITS) | dtype) << ELEMENTS_BITS;
            assert_eq!(ElsewhereCall::from_form(form), None, "{op}, {dtype}");
        }
        assert_eq!(ElsewhereCall::from_form(-1), None);
    }

    #[test]
    fn calls_that_differ_are_named_on_every_rank() {
        let same = reduced(ReduceOp::Sum, DType::F32, 64);
        let cases = [
            (same, None),
            // Each rank has a factor of its own.
            (reduced(ReduceOp::PreMulSum(2.0), DType::F32, 64), None),
            (reduced(ReduceOp::Sum, DType::F32, 63), Some("all_reduce(sum, 63 x f32)")),
            (reduced(ReduceOp::Avg, DType::F32, 64), Some("all_reduce(avg, 64 x f32)")),
            (reduced(ReduceOp::Sum, DType::F16, 64), Some("all_reduce(sum, 64 x f16)")),
            (ElsewhereCall { op: ElsewhereOp::AllGather, ..same }, Some("all_gather(64 x f32)")),
        ];
        for fabric in Fabric::ALL {
            for (other, name) in cases {
                let first = if other.op.code() == ReduceOp::PreMulSum(1.0).code() {
                    reduced(ReduceOp::PreMulSum(0.5), DType::F32, 64)
                } else {
                    same
                };
                let errors = run(3, fabric, |group| {
                    let group = JoinGroup::new(group);
                    let own = if group.rank().index() == 1 { other } else { first };
                    group.compare_elsewhere(own).unwrap().wait().err().map(|error| error.to_string())
                });
                for error in errors {
                    let Some(name) = name else {
                        assert_eq!(error, None, "{fabric:?}, {other}");
                        continue;
                    };
                    let error = error.unwrap();
                    let words = format!("rank 0 all_reduce(sum, 64 x f32), and rank 1 {name}");
                    assert!(error.contains(&words), "{fabric:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_call_that_has_changed_is_not_made_before_it_is_compared() {
        for fabric in Fabric::ALL {
            let ranks = run(3, fabric, |group| {
                let (group, compared) = (JoinGroup::new(group), ComparedCalls::default());
                let changes = group.rank().index() == 1;
                // Of two places: how many comparisons were left to wait for.
                let mut later = Vec::new();
                for step in 0..3 {
                    for place in 0..2 {
                        let elements = 8 + place + usize::from(changes && (step, place) == (2, 1));
                        match compared.compare(&group, place, gathered(elements)) {
                            Ok(None) => {}
                            Ok(Some(comparison)) => {
                                let outcome = comparison.wait();
                                later.push((step, place, outcome.err().map(|error| error.to_string())));
                            }
                            Err(error) => return (later, Some(error.to_string())),
                        }
                    }
                }
                (later, None)
            });
            let said = "rank 0 all_gather(9 x i32), and rank 1 all_gather(10 x i32)";
            for (rank, (later, error)) in ranks.into_iter().enumerate() {
                assert_eq!(later[..3], [(1, 0, None), (1, 1, None), (2, 0, None)], "{fabric:?}");
                // The other ranks may have made it; the one that has changed has not.
                let last = later.into_iter().nth(3).and_then(|(_, _, error)| error);
                let (seen, other) = if rank == 1 { (error, last) } else { (last, error) };
                assert!(seen.is_some_and(|error| error.contains(said)) && other.is_none(), "{fabric:?}");
            }
        }
    }

    #[test]
    fn a_difference_is_named_while_other_ranks_compare_what_comes_next() {
        for fabric in Fabric::ALL {
            for world in [2, 3] {
                let ranks = run(world, fabric, |group| {
                    let (group, compared) = (JoinGroup::new(group), ComparedCalls::default());
                    let rank = group.rank().index();
                    let mut errors = Vec::new();
                    for step in 0..2 {
                        let mut later = Vec::new();
                        // As the buckets of a step: the others wait behind the last one, rank 1 in the first one.
                        for place in 0..3 {
                            let elements = 8 + place + usize::from((rank, step, place) == (1, 1, 0));
                            match compared.compare(&group, place, gathered(elements)) {
                                Ok(comparison) => later.extend(comparison),
                                Err(error) => errors.push(error.to_string()),
                            }
                        }
                        let late = later.into_iter().filter_map(|comparison| comparison.wait().err());
                        errors.extend(late.map(|error| error.to_string()));
                    }
                    errors
                });
                let said = "rank 0 all_gather(8 x i32), and rank 1 all_gather(9 x i32)";
                for errors in ranks {
                    let is_named = errors.len() == 1 && errors[0].contains(said);
                    assert!(is_named, "{fabric:?}, {world} ranks: {errors:?}");
                }
            }
        }
    }

    #[test]
    fn ranks_without_data_take_part_and_are_not_compared() {
        for world in [2, 3] {
            run(world, Fabric::InProcess, |group| {
                let group = JoinGroup::new(group);
                let rank = group.rank().index();
                let joined = group.join(JoinOptions::default(), || {
                    // Rank 0 has no data at all.
                    for step in 0..2 * rank.min(1) {
                        group.step()?;
                        group.compare_elsewhere(gathered(step + 1))?.wait()?;
                    }
                    Ok(())
                });
                joined.unwrap();
            });
        }
    }
}
