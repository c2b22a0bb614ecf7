//! Calls that are none of the group's, such as NCCL's: what they are, who makes them on a rank without data, and whether all ranks make the same.
//!
//! NCCL compares nothing. If one rank sends fewer elements than another, both wait until a time-out, or get wrong results. So a call whose form is a
//! program's own choice is [compared](JoinGroup::compare_elsewhere) through the group. That need not be waited for at each call: see [`ComparedCalls`].

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
/// Operation, type, number of elements.
const FIELDS: usize = 3;
/// Less than all numbers of a call.
const NOTHING: i64 = i64::MIN;

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
        self.numbers() == other.numbers()
    }

    fn numbers(&self) -> [i64; FIELDS] {
        let elements = i64::try_from(self.elements).unwrap_or(i64::MAX);
        [i64::from(self.op.code()), self.dtype as i64, elements]
    }

    fn from_numbers(numbers: &[i64]) -> Option<Self> {
        let &[op, dtype, elements] = numbers else { return None };
        let code = |number: i64| u8::try_from(number).ok();
        Some(Self {
            op: ElsewhereOp::from_wire(code(op)?)?,
            dtype: DType::from_wire(code(dtype)?)?,
            elements: usize::try_from(elements).ok()?,
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
    group: JoinGroup,
    call: ElsewhereCall,
    work: Work,
}

impl JoinGroup {
    /// Begins to compare `call`, which the caller makes next beside the group, with those of the other ranks. All ranks with data call it together; without
    /// data they take part in it. It waits for nobody.
    ///
    /// # Errors
    /// If the group has failed.
    pub fn compare_elsewhere(&self, call: ElsewhereCall) -> Result<Comparison> {
        let numbers = call.numbers();
        // The largest of each, and of its complement, which is that of the smallest.
        let both: Vec<i64> = numbers.into_iter().chain(numbers.map(|number| !number)).collect();
        let work = self.all_reduce_async(Buffer::from_slice(&both), ReduceOp::Max)?;
        Ok(Comparison { group: self.clone(), call, work })
    }
}

impl Comparison {
    /// Waits for the other ranks' calls, no longer than the group's time-out.
    ///
    /// # Errors
    /// On every rank, if two ranks' calls differ: it names both. If the group fails.
    pub fn wait(self) -> Result<()> {
        let Self { group, call, work } = self;
        let found = work.wait()?;
        let found = found.as_slice::<i64>()?;
        let is_same =
            found.len() == 2 * FIELDS && (0..FIELDS).all(|field| found[field] == !found[FIELDS + field]);
        if is_same {
            return Ok(());
        }
        // Every rank comes here: all have found the same numbers.
        let mut all = vec![NOTHING; FIELDS * group.world_size().count()];
        let own = FIELDS * group.rank().index();
        all[own..own + FIELDS].copy_from_slice(&call.numbers());
        let all = group.all_reduce_async(Buffer::from_slice(&all), ReduceOp::Max)?.wait()?;
        Err(difference(all.as_slice()?))
    }
}

/// The last calls of several places, such as the buckets of a step, that were found to be the same on all ranks.
///
/// Who makes the same call again in its place may wait for the comparison after the call; every other one waits before it. So calls that differ never
/// meet: of two ranks that differ at least one has changed its call, and does not make it.
#[derive(Debug, Default)]
pub struct ComparedCalls(Mutex<BTreeMap<usize, ElsewhereCall>>);

impl ComparedCalls {
    /// Compares `call` in its `place`, as [`JoinGroup::compare_elsewhere`]. The caller may make it if this returns: and then, if there is a comparison,
    /// waits for that before it uses what comes of the call.
    ///
    /// # Errors
    /// As [`JoinGroup::compare_elsewhere`] and [`Comparison::wait`].
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

/// The error for all ranks' calls, by rank, of which two differ. A rank without data has none.
fn difference(all: &[i64]) -> Error {
    let ranks = (0..).map(Rank::new);
    let mut calls = ranks.zip(all.chunks(FIELDS)).filter(|(_, numbers)| !numbers.contains(&NOTHING));
    let pair = calls.next().and_then(|first| Some((first, calls.find(|(_, numbers)| *numbers != first.1)?)));
    let Some(((first, ones), (second, others))) = pair else {
        return Error::protocol("the ranks' calls differ, and none says how");
    };
    let named = |numbers: &[i64]| match ElsewhereCall::from_numbers(numbers) {
        Some(call) => call.to_string(),
        None => format!("an unknown call {numbers:?}"),
    };
    Error::mismatch(format!(
        "the ranks make different calls beside the group: rank {first} {}, and rank {second} {}",
        named(ones),
        named(others)
    ))
    .with_peer(second)
    .with_remedy("make the same call on every rank: as many elements, of one type, combined in one way")
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
        for call in [gathered(0), gathered(7), reduced(ReduceOp::Avg, DType::BF16, 3)] {
            assert_eq!(ElsewhereCall::from_numbers(&call.numbers()), Some(call));
        }
        for numbers in [&[99, 1, 1][..], &[1, 99, 1], &[1, 1, -1], &[-1, 1, 1], &[1, 1]] {
            assert_eq!(ElsewhereCall::from_numbers(numbers), None, "{numbers:?}");
        }
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
