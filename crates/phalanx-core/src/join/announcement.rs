//! What ranks with data send to those without, before each collective.
//!
//! It is an all_reduce (max) of [`FIELDS`] numbers and one flag for each rank. A rank without data contributes zeros,
//! so every rank learns which collective comes next and which ranks call it.
//!
//! An announcement has type and length, so a rank without data takes part with neutral elements and need not know which
//! code calls. PyTorch's `Join` needs code in every class that takes part. The announcements of buckets are not waited
//! for, so that buckets are still sent during backward.

use super::{ElsewhereCall, ElsewhereOp, JoinOptions};
use crate::caller::Caller;
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::world_size::WorldSize;

/// Kind, operation, type, length, root, the user's call.
const FIELDS: usize = 6;

/// The codes of options are less, and more than zero, which is what ranks without data give.
const OPTION_CODES: i64 = 5;

const STEP: i64 = 1;
const ALL_REDUCE: i64 = 2;
const BROADCAST: i64 = 3;
const ELSEWHERE: i64 = 4;

/// The largest buffer, in bytes, that ranks with data may make a rank without data allocate.
const MAX_BYTES: i64 = 1 << 38;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announced {
    /// Another step begins, in a `join` with these options.
    Step(JoinOptions),
    AllReduce {
        op: ReduceOp,
        dtype: DType,
        elements: usize,
    },
    Broadcast {
        dtype: DType,
        elements: usize,
        root: Rank,
    },
    /// A collective that is none of the group's.
    Elsewhere(ElsewhereCall),
}

/// The announcement, the user's call that it is for, and which ranks have data.
pub(super) type Decoded = (Option<Announced>, Option<Caller>, Vec<bool>);

impl Announced {
    /// The numbers that `rank` contributes. It makes the collective for `caller`.
    pub(super) fn encode(self, caller: Option<Caller>, rank: Rank, world: WorldSize) -> Vec<i64> {
        let mut numbers = silence(world);
        let by = caller.map_or(0, |caller| i64::from(caller as u8));
        let fields = match self {
            // The largest of the ranks' codes, and of what is left to the end: the codes are the same if these belong together.
            Self::Step(options) => [STEP, code_of(options), 0, OPTION_CODES - code_of(options), 0, by],
            Self::AllReduce { op, dtype, elements } => {
                [ALL_REDUCE, i64::from(op.code()), dtype as i64, elements as i64, 0, by]
            }
            Self::Broadcast { dtype, elements, root } => {
                [BROADCAST, 0, dtype as i64, elements as i64, i64::from(root.get()), by]
            }
            Self::Elsewhere(ElsewhereCall { op, dtype, elements }) => {
                [ELSEWHERE, i64::from(op.code()), dtype as i64, elements as i64, 0, by]
            }
        };
        numbers[..FIELDS].copy_from_slice(&fields);
        numbers[FIELDS + rank.index()] = 1;
        numbers
    }

    /// Decodes the announcement, the user's call, and the ranks that made it. No announcement if no rank has data any
    /// more. An error if these ranks have called `join` with different options.
    pub(super) fn decode(numbers: &[i64], world: WorldSize) -> Result<Decoded> {
        let (fields, flags) = numbers
            .split_at_checked(FIELDS)
            .filter(|(_, flags)| flags.len() == world.count())
            .ok_or_else(|| Error::malformed(format!("an announcement of {} numbers", numbers.len())))?;
        let active: Vec<bool> = flags.iter().map(|&flag| flag != 0).collect();
        if !active.contains(&true) {
            return Ok((None, None, active));
        }
        let malformed = || Error::malformed(format!("the announcement {fields:?} is malformed"));
        let code = |number: i64| u8::try_from(number).ok();
        let dtype = || code(fields[2]).and_then(DType::from_wire).ok_or_else(malformed);
        let elements = |dtype: DType| {
            let most = MAX_BYTES / dtype.size() as i64;
            usize::try_from(fields[3]).ok().filter(|_| fields[3] <= most).ok_or_else(malformed)
        };
        let op = || code(fields[1]).and_then(ReduceOp::from_wire).ok_or_else(malformed);
        let announced = match fields[0] {
            STEP => {
                let most = options_of(fields[1]).ok_or_else(malformed)?;
                let rest =
                    Some(fields[3]).filter(|rest| (1..OPTION_CODES).contains(rest)).ok_or_else(malformed)?;
                if fields[1] + rest != OPTION_CODES {
                    return Err(other_options());
                }
                Self::Step(most)
            }
            ALL_REDUCE => {
                let dtype = dtype()?;
                Self::AllReduce { op: op()?, dtype, elements: elements(dtype)? }
            }
            ELSEWHERE => {
                let (op, dtype) =
                    (code(fields[1]).and_then(ElsewhereOp::from_wire).ok_or_else(malformed)?, dtype()?);
                let elements = elements(dtype)?;
                // What comes of it has the elements of all ranks.
                let parts = match op {
                    ElsewhereOp::AllReduce(_) => 1,
                    ElsewhereOp::AllGather => world.count(),
                };
                let bytes = elements.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_mul(parts));
                bytes.filter(|bytes| *bytes as u64 <= MAX_BYTES as u64).ok_or_else(malformed)?;
                Self::Elsewhere(ElsewhereCall { op, dtype, elements })
            }
            BROADCAST => {
                let dtype = dtype()?;
                let root = u32::try_from(fields[4]).map_err(|_| malformed())?;
                Self::Broadcast { dtype, elements: elements(dtype)?, root: world.rank(root)? }
            }
            _ => return Err(malformed()),
        };
        let caller = match fields[5] {
            0 => None,
            by => Some(code(by).and_then(Caller::from_wire).ok_or_else(malformed)?),
        };
        Ok((Some(announced), caller, active))
    }
}

/// A number for these options.
fn code_of(options: JoinOptions) -> i64 {
    let JoinOptions { divide_by_initial_world_size, throw_on_early_termination } = options;
    1 + i64::from(divide_by_initial_world_size) + 2 * i64::from(throw_on_early_termination)
}

/// The options that have this number, if any have.
fn options_of(code: i64) -> Option<JoinOptions> {
    let bits = code.checked_sub(1).filter(|bits| (0..OPTION_CODES - 1).contains(bits))?;
    Some(JoinOptions {
        divide_by_initial_world_size: bits & 1 != 0,
        throw_on_early_termination: bits & 2 != 0,
    })
}

/// The error for ranks whose options of `join` differ.
pub(super) fn other_options() -> Error {
    Error::mismatch(
        "the ranks have called `join` with different options: divide_by_initial_world_size or throw_on_early_termination differs",
    )
    .with_remedy("give every rank the same JoinOptions")
}

/// What a rank without data contributes.
pub(super) fn silence(world: WorldSize) -> Vec<i64> {
    vec![0; FIELDS + world.count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_survive_the_way_and_nonsense_is_refused() {
        let world = WorldSize::new(3).unwrap();
        let rank = Rank::new(1);
        let options = |divide_by_initial_world_size, throw_on_early_termination| {
            Announced::Step(JoinOptions { divide_by_initial_world_size, throw_on_early_termination })
        };
        let announcements = [
            options(true, false),
            Announced::AllReduce { op: ReduceOp::Avg, dtype: DType::BF16, elements: 7 },
            Announced::Broadcast { dtype: DType::U8, elements: 0, root: Rank::new(2) },
            Announced::Elsewhere(ElsewhereCall {
                op: ElsewhereOp::AllReduce(ReduceOp::Sum),
                dtype: DType::F16,
                elements: 3,
            }),
            Announced::Elsewhere(ElsewhereCall {
                op: ElsewhereOp::AllGather,
                dtype: DType::I32,
                elements: 3,
            }),
        ];
        for announced in announcements {
            for caller in [None, Some(Caller::DdpBackward)] {
                let read = Announced::decode(&announced.encode(caller, rank, world), world).unwrap();
                assert_eq!(read, (Some(announced), caller, vec![false, true, false]));
            }
        }
        assert_eq!(Announced::decode(&silence(world), world).unwrap().0, None);
        // What ranks announce together is the largest of each number.
        let all = [options(false, false), options(false, true), options(true, false), options(true, true)];
        for (one, other) in all.into_iter().flat_map(|one| all.map(|other| (one, other))) {
            let announced =
                [(one, Rank::MAIN), (other, rank)].map(|(step, rank)| step.encode(None, rank, world));
            let together: Vec<i64> = announced[0].iter().zip(&announced[1]).map(|(a, b)| *a.max(b)).collect();
            match Announced::decode(&together, world) {
                Ok(read) => assert_eq!((read.0, one), (Some(one), other)),
                Err(error) => assert!(error.is_mismatch() && one != other, "{error}"),
            }
        }
        let mut huge = announcements[1].encode(None, rank, world);
        huge[3] = i64::MAX;
        let [mut above, mut below] =
            [announcements[0].encode(None, rank, world), announcements[0].encode(None, rank, world)];
        (above[1], below[3]) = (i64::MAX, i64::MIN);
        let mut strange = announcements[1].encode(None, rank, world);
        strange[1] = 99;
        let mut nowhere = announcements[2].encode(None, rank, world);
        nowhere[4] = 3;
        let mut nobody = announcements[1].encode(None, rank, world);
        nobody[5] = 99;
        let mut hidden = announcements[3].encode(None, rank, world);
        hidden[2] = 99;
        // One rank's part may be as large, and those of all may not.
        let mut wide = announcements[4].encode(None, rank, world);
        wide[3] = MAX_BYTES / 4;
        assert!(Announced::decode(&wide, world).is_err());
        wide[3] = MAX_BYTES / 4 / 3;
        assert!(Announced::decode(&wide, world).is_ok());
        for numbers in [huge, strange, nowhere, nobody, hidden, above, below, vec![1; 2]] {
            assert!(Announced::decode(&numbers, world).is_err());
        }
    }
}
