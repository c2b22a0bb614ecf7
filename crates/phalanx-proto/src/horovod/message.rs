//! What ranks tell the coordinator in a cycle, and what it answers. What comes from another rank is checked here.

use crate::error::{Error, Result};
use crate::rank::Rank;
use serde::{Deserialize, Serialize};

use crate::horovod::request::{MAX_IN_FLIGHT, MAX_NAME_BYTES, NUMBER, Part, Request};

/// The most refusals that a rank keeps until rank 0 has heard of them. The other ranks are not told of further ones: a program that is refused again
/// and again must not fill the memory. One wrong root refuses every tensor of a model.
pub const MAX_REFUSALS: usize = 1 << 13;
/// The most bytes of what a rank says of a call that it has refused.
const MAX_CAUSE_BYTES: usize = 1024;

/// What a rank sends to the coordinator in a cycle.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Message {
    /// Requests that are new to the coordinator, with the milliseconds for which they have waited.
    pub requests: Vec<(Request, u64)>,
    /// Whether this rank has joined, in this cycle.
    pub joins: bool,
    /// The calls that this rank has refused, which its program made before those of the requests.
    pub refusals: Vec<Refusal>,
}

/// A rank's refusal of a call of its own program, such as one with a root that there is not: the other ranks must not wait for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The name that the program has given.
    pub name: String,
    /// Why.
    pub cause: String,
}

impl Refusal {
    /// The refusal of a call of `name`, with the beginning of its `cause`. None if no rank can submit such a name.
    pub fn new(name: &str, cause: &str) -> Option<Self> {
        let refusal = Self {
            name: name.to_owned(),
            cause: cause[..cause.floor_char_boundary(MAX_CAUSE_BYTES)].to_owned(),
        };
        refusal.is_valid().then_some(refusal)
    }

    fn is_valid(&self) -> bool {
        (1..=MAX_NAME_BYTES).contains(&self.name.len()) && self.cause.len() <= MAX_CAUSE_BYTES
    }

    /// The most bytes that it takes on the wire.
    pub fn wire_bytes(&self) -> usize {
        self.name.len() + self.cause.len() + NUMBER * 2
    }
}

/// A refusal that ends the calls of other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// What was refused.
    pub refusal: Refusal,
    /// By which rank.
    pub rank: u32,
    /// The ranks whose calls of the name end with it.
    pub told: Vec<u32>,
}

impl Refused {
    /// The most bytes that it takes on the wire.
    pub fn wire_bytes(&self) -> usize {
        self.refusal.wire_bytes() + NUMBER * (2 + self.told.len())
    }
}

/// What the coordinator sends to all ranks in a cycle.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Round {
    /// What is ready on all ranks, in the order in which all carry it out.
    pub responses: Vec<Response>,
    /// The last rank to join, if all have.
    pub all_joined: Option<u32>,
    /// Why everything ends, if it does: tensors have waited for too long.
    pub stalled: Option<String>,
    /// New settings, from the next cycle on.
    pub settings: Option<Settings>,
    /// What ranks have refused, and whose calls end with that.
    pub refused: Vec<Refused>,
}

/// What all ranks must have alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Bytes of a fused batch.
    pub threshold: usize,
    /// The time from cycle to cycle in microseconds.
    pub cycle_micros: u64,
}

/// A name is ready on all ranks, or never will be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// That of the first rank that has one.
    pub request: Request,
    /// For each rank: the rows of each of its tensors (allgather).
    pub rows: Vec<Vec<u64>>,
    /// Ranks that have joined, and bring nothing.
    pub absent: Vec<u32>,
    /// Why it cannot be carried out.
    pub error: Option<String>,
}

impl Response {
    /// Whether `rank`, which has submitted `own` or has joined, can carry this out. It compares the answer of rank 0 with the
    /// rank's own request.
    pub fn is_for(&self, rank: Rank, own: Option<&Request>) -> bool {
        if self.error.is_some() {
            return true;
        }
        let rows = self.rows.get(rank.index());
        match own {
            Some(own) => {
                own.agrees_with(&self.request)
                    && !self.absent.contains(&rank.get())
                    && rows.is_none_or(|rows| *rows == own.rows())
            }
            None => rows.is_none_or(|rows| rows.iter().all(|rows| *rows == 0)),
        }
    }

    /// Bytes of the first rank's tensors.
    pub fn bytes(&self) -> usize {
        self.request.parts.iter().map(|part| part.elements().saturating_mul(part.dtype.size())).sum()
    }
}

/// What no rank of this build sends.
const BUILD_REMEDY: &str = "start all processes of the job with the same build";

impl Message {
    /// Checks what `from` has sent.
    pub fn check(&self, from: Rank, size: usize) -> Result<()> {
        if !self.refusals.iter().all(Refusal::is_valid) {
            let cause = format!("rank {from} has refused what no rank submits");
            return Err(Error::mismatch(cause).with_peer(from).with_remedy(BUILD_REMEDY));
        }
        if self.requests.len() > MAX_IN_FLIGHT {
            let cause = format!("rank {from} asks for {} tensors at once", self.requests.len());
            return Err(Error::mismatch(cause).with_peer(from).with_remedy(BUILD_REMEDY));
        }
        let refused = |error: Error| Error::mismatch(format!("rank {from} asks for what cannot be: {error}"));
        self.requests.iter().try_for_each(|(request, _)| request.check(size)).map_err(refused)
    }
}

impl Round {
    /// Checks what the coordinator has sent.
    pub fn check(&self, size: usize) -> Result<()> {
        if !self.refused.iter().all(|refused| refused.refusal.is_valid() && (refused.rank as usize) < size) {
            let what = "rank 0 tells of a refusal that cannot be";
            return Err(Error::mismatch(what).with_peer(Rank::MAIN).with_remedy(BUILD_REMEDY));
        }
        for response in &self.responses {
            response.request.check(size)?;
            let (request, rows) = (&response.request, &response.rows);
            if response.error.is_some() || !request.kind.tells_rows() {
                continue;
            }
            let complete = rows.len() == size && rows.iter().all(|rows| rows.len() == request.parts.len());
            // The elements of all ranks together can be counted too.
            let total = rows.iter().flatten().try_fold(0u64, |sum, rows| sum.checked_add(*rows));
            let fits = |part: &Part| {
                let mut all = part.clone();
                all.shape[0] = total.unwrap_or(u64::MAX);
                all.check().is_ok()
            };
            if !complete || !request.parts.iter().all(fits) {
                let what = format!("rank 0 answers for {} with rows that cannot be", request.name);
                return Err(Error::mismatch(what).with_peer(Rank::MAIN).with_remedy(BUILD_REMEDY));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::horovod::reduction::Op;
    use crate::horovod::request::Kind;

    fn request(kind: Kind, shape: &[u64]) -> Request {
        let part = Part { dtype: DType::F32, stands_for: None, shape: shape.into() };
        Request { name: "t".into(), kind, parts: vec![part] }
    }

    #[test]
    fn no_answer_takes_more_bytes_than_was_reckoned_with() {
        let request = request(Kind::Allgather, &[u64::MAX]);
        let response = Response {
            rows: vec![vec![u64::MAX]; 3],
            absent: vec![u32::MAX; 3],
            error: None,
            request: request.clone(),
        };
        assert!(postcard::to_stdvec(&response).unwrap().len() <= request.answer_bytes(3));
    }

    #[test]
    fn a_coordinator_s_rows_are_checked_before_memory_is_taken() {
        let response = |rows: &[&[u64]]| Response {
            request: request(Kind::Allgather, &[2, 1 << 20]),
            rows: rows.iter().map(|rows| rows.to_vec()).collect(),
            absent: Vec::new(),
            error: None,
        };
        let round = |response| Round { responses: vec![response], ..Round::default() };
        assert!(round(response(&[&[2], &[0]])).check(2).is_ok());
        assert!(round(response(&[&[2]])).check(2).is_err());
        assert!(round(response(&[&[2], &[]])).check(2).is_err());
        assert!(round(response(&[&[1 << 50], &[1]])).check(2).is_err());
        assert!(round(response(&[&[u64::MAX], &[1]])).check(2).is_err());
    }

    #[test]
    fn an_answer_is_for_what_was_asked() {
        let answer = |kind: Kind, shape: &[u64], rows: &[&[u64]]| Response {
            request: request(kind, shape),
            rows: rows.iter().map(|rows| rows.to_vec()).collect(),
            absent: Vec::new(),
            error: None,
        };
        let (rank, sum) = (Rank::new(1), Kind::Allreduce(Op::Sum.into()));
        let own = request(sum.clone(), &[4]);
        assert!(answer(sum.clone(), &[4], &[]).is_for(rank, Some(&own)));
        assert!(!answer(sum.clone(), &[5], &[]).is_for(rank, Some(&own)), "longer");
        assert!(!Response { absent: vec![1], ..answer(sum.clone(), &[4], &[]) }.is_for(rank, Some(&own)));
        assert!(answer(sum, &[5], &[]).is_for(rank, None));
        let own = request(Kind::Allgather, &[2, 3]);
        assert!(answer(Kind::Allgather, &[7, 3], &[&[7], &[2]]).is_for(rank, Some(&own)));
        assert!(!answer(Kind::Allgather, &[7, 3], &[&[7], &[3]]).is_for(rank, Some(&own)), "more rows");
        assert!(!answer(Kind::Allgather, &[7, 3], &[&[7], &[2]]).is_for(rank, None), "it has joined");
        let own = request(Kind::Alltoall, &[2, 3]);
        assert!(answer(Kind::Alltoall, &[7, 3], &[]).is_for(rank, Some(&own)));
        assert!(!answer(Kind::Alltoall, &[7, 4], &[]).is_for(rank, Some(&own)), "wider");
    }

    #[test]
    fn no_refusal_takes_more_bytes_than_it_says_and_a_long_cause_is_cut() {
        let refusal =
            Refusal::new(&"n".repeat(MAX_NAME_BYTES), &format!("a{}", "é".repeat(MAX_CAUSE_BYTES))).unwrap();
        assert_eq!(refusal.cause.len(), MAX_CAUSE_BYTES - 1, "whole characters");
        let refused = Refused { refusal, rank: u32::MAX, told: vec![u32::MAX; 300] };
        assert!(postcard::to_stdvec(&refused.refusal).unwrap().len() <= refused.refusal.wire_bytes());
        assert!(postcard::to_stdvec(&refused).unwrap().len() <= refused.wire_bytes());
        let long = "n".repeat(MAX_NAME_BYTES + 1);
        for name in ["", long.as_str()] {
            assert_eq!(Refusal::new(name, "why"), None);
        }
    }

    #[test]
    fn refusals_that_cannot_be_are_refused() {
        let refused = |name: &str, rank| {
            let refusal = Refusal { name: name.into(), cause: "why".into() };
            Round { refused: vec![Refused { refusal, rank, told: vec![1] }], ..Round::default() }
        };
        assert!(refused("t", 1).check(2).is_ok());
        assert!(refused("t", 2).check(2).unwrap_err().is_mismatch(), "no such rank");
        assert!(refused("", 1).check(2).unwrap_err().is_mismatch());
        let refusals = vec![Refusal { name: "t".into(), cause: "w".repeat(MAX_CAUSE_BYTES + 1) }];
        assert!(Message { refusals, ..Message::default() }.check(Rank::new(1), 2).unwrap_err().is_mismatch());
    }
}
