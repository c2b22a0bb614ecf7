//! The latest calls of this rank, and the calls in which its peers wait.
//!
//! Ranks compare their calls with the frames that they receive. But if ranks call different collectives, each may wait
//! for a rank that sends it nothing, and would learn of it only from its time-out. So a rank that has been in one call
//! for a while sends this call to the others, on their control connections; in a large world [to some](is_told). A rank
//! that has called something else in its place reports it. A call that is not stuck costs no message.

use std::collections::BTreeMap;
use std::time::Duration;

use super::liveness::are_powers_of_two_apart;
use crate::error::Result;
use crate::rank::{Rank, Sequence};
use crate::wire::frame::Header;
use crate::world_size::WorldSize;

/// How often to check whether a call is stuck: it is, if it was already running at the last check.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How many calls are remembered. A rank may be ahead of the others by some calls in which it only sends.
const KEPT: usize = 64;
/// In a world of at most so many ranks, each tells all others in which call it is stuck.
const TOLD_BY_ALL: u32 = 128;

/// Whether `own` tells `peer` in which call it is stuck. In a large world each rank tells those at the distances 1, 2, 4, .. around the ring of the
/// ranks, in both directions: else one rank that is late would bring as many messages as the square of the ranks. They are enough. Around the ring
/// there is a place where a rank that has made one call is next to a rank that has made another. Late ranks may stand between the two, but seldom
/// at all distances.
pub fn is_told(own: Rank, peer: Rank, world: WorldSize) -> bool {
    world.get() <= TOLD_BY_ALL || are_powers_of_two_apart(own.index(), peer.index(), world.count())
}

/// What a rank knows of its own calls and of those of its peers.
#[derive(Debug, Default)]
pub struct Calls {
    /// The latest calls, each at its number modulo [`KEPT`].
    last: Vec<Option<Header>>,
    /// The call that began last.
    latest: Option<Header>,
    /// The call that has begun and not ended.
    running: Option<Header>,
    /// The call that was running at the last check, and whether the others were told.
    seen: Option<(Sequence, bool)>,
    /// Earlier calls that the others must be told, because a frame has shown that one of them differs.
    untold: Vec<Header>,
    /// The calls that peers have told, if this rank has not reached them.
    waiting: BTreeMap<Rank, (Header, Told)>,
    /// The peers that leave, with the last call of each that has made one.
    lasts: BTreeMap<Rank, Option<Header>>,
}

/// Why a peer tells one of its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It has been in it for a while, or a frame has shown that one like it differs.
    Waiting,
    /// It is its latest one when this rank leaves.
    Latest,
    /// It is its last one, and the peer leaves.
    Last,
}

/// The last call of one rank, which another that has left too has not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// This rank has not made this call of the peer.
    Here(Rank, Header),
    /// The peer has not made this call of this rank.
    There(Rank, Header),
}

impl Calls {
    /// A collective begins, whose data goes in frames.
    pub fn begin(&mut self, call: Header) {
        self.note(call);
        self.running = Some(call);
    }

    /// A collective begins that ranks compare when they leave, also if its data goes in no frames.
    pub fn note(&mut self, call: Header) {
        if self.last.is_empty() {
            self.last.resize(KEPT, None);
        }
        let place = place(call.sequence);
        self.last[place] = Some(call);
        self.latest = Some(call);
    }

    /// The last of these calls.
    pub fn latest(&self) -> Option<Header> {
        self.latest
    }

    /// The call that runs, if its data goes to other ranks in frames.
    pub fn running(&self) -> Option<Header> {
        self.running
    }

    /// It has ended.
    pub fn end(&mut self) {
        self.running = None;
    }

    /// The running call, if it was already running at the last check and has not been returned yet.
    pub fn stuck(&mut self) -> Option<Header> {
        let running = self.running?;
        match self.seen {
            Some((sequence, told)) if sequence == running.sequence => {
                self.seen = Some((sequence, true));
                (!told).then_some(running)
            }
            _ => {
                self.seen = Some((running.sequence, false));
                None
            }
        }
    }

    /// Has the others told which calls this rank made before the one numbered `sequence`. Returns whether there are any.
    pub fn tell_earlier(&mut self, sequence: Sequence) -> bool {
        let mut earlier: Vec<Header> =
            self.last.iter().flatten().filter(|call| call.sequence < sequence).copied().collect();
        // The first that differs is found first.
        earlier.sort_unstable_by_key(|call| call.sequence.0);
        self.untold = earlier;
        !self.untold.is_empty()
    }

    /// What the others must be told of earlier calls, once.
    pub fn untold(&mut self) -> Vec<Header> {
        std::mem::take(&mut self.untold)
    }

    /// `peer` has told its call `theirs`.
    pub fn hear(&mut self, peer: Rank, theirs: Header, told: Told) {
        self.waiting.insert(peer, (theirs, told));
        if told == Told::Last {
            self.lasts.insert(peer, Some(theirs));
        }
    }

    /// `peer` has left. If it has not told its last call, it has made none.
    pub fn left(&mut self, peer: Rank) {
        self.lasts.entry(peer).or_insert(None);
    }

    /// A peer that has left without the call numbered `sequence`, if there is one. A rank that only sends to it would never hear of that.
    pub fn absent(&self, sequence: Sequence) -> Option<Rank> {
        let is_absent = |last: &Option<Header>| last.is_none_or(|last| last.sequence < sequence);
        self.lasts.iter().find(|&(_, last)| is_absent(last)).map(|(peer, _)| *peer)
    }

    /// When this rank has left: a call that one of the ranks that have left has made, and the other has not. Only a call in which
    /// a rank waits for nobody can be so.
    pub fn missing(&self) -> Option<Missing> {
        if self.running.is_some() {
            return None;
        }
        let own = self.latest;
        self.lasts.iter().find_map(|(&peer, &theirs)| match (own, theirs) {
            (Some(own), Some(theirs)) if own.sequence == theirs.sequence => None,
            (Some(own), Some(theirs)) if own.sequence < theirs.sequence => Some(Missing::Here(peer, theirs)),
            (Some(own), _) => Some(Missing::There(peer, own)),
            (None, Some(theirs)) => Some(Missing::Here(peer, theirs)),
            (None, None) => None,
        })
    }

    /// Looks whether this rank, `own`, has made another call where a peer waits. What differs stays, for other threads that look before the group
    /// has failed.
    ///
    /// # Errors
    /// With both calls, if it has.
    pub fn compare(&mut self, own: Rank) -> Result<()> {
        let Self { last, waiting, .. } = self;
        let mut outcome = Ok(());
        waiting.retain(|&peer, &mut (ref theirs, told)| {
            if outcome.is_err() {
                return true;
            }
            let there = last.get(place(theirs.sequence)).copied().flatten();
            // This rank may still reach it.
            let Some(call) = there.filter(|call| call.sequence >= theirs.sequence) else { return true };
            if call.sequence == theirs.sequence {
                // A rank that waits in the same call gets a frame of it, and finds another history itself. Then it tells the
                // calls before it, of which the first that differs is here.
                let history = if told == Told::Waiting { call.history } else { theirs.history };
                let checked = call.check(&Header { history, ..*theirs }, own, peer);
                outcome =
                    checked.map_err(|error| error.in_operation(call.call.to_string(), Some(call.sequence)));
            }
            outcome.is_err()
        });
        outcome
    }
}

fn place(sequence: Sequence) -> usize {
    (sequence.0 % KEPT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::rank::Generation;
    use crate::wire::frame::{Call, History, Operation};

    const ME: Rank = Rank::MAIN;

    fn header(operation: Operation, sequence: u64) -> Header {
        let call = Call::new(operation, DType::F32, 8);
        Header {
            call,
            sequence: Sequence(sequence),
            generation: Generation(0),
            history: History::default(),
            payload: 0,
        }
    }

    #[test]
    fn a_call_is_told_once_if_it_lasts_from_one_look_to_the_next() {
        let mut calls = Calls::default();
        assert_eq!(calls.stuck(), None);
        let call = header(Operation::AllGather, 3);
        calls.begin(call);
        assert_eq!([calls.stuck(), calls.stuck(), calls.stuck()], [None, Some(call), None]);
        calls.end();
        assert_eq!(calls.stuck(), None);
        calls.begin(header(Operation::AllGather, 4));
        assert_eq!(calls.stuck(), None);
    }

    #[test]
    fn in_a_large_world_few_are_told_and_wherever_two_calls_meet_somebody_is() {
        for size in [2, TOLD_BY_ALL, TOLD_BY_ALL + 1, 1000, 4096] {
            let world = WorldSize::new(size).unwrap();
            let told =
                |own: Rank| world.ranks().filter(|peer| *peer != own && is_told(own, *peer, world)).count();
            let most = if size <= TOLD_BY_ALL { size as usize - 1 } else { 26 };
            assert!([0, 1, size - 1].iter().all(|own| told(Rank::new(*own)) <= most), "{size}");
            assert!(size > TOLD_BY_ALL || told(Rank::MAIN) == most);
            for own in world.ranks() {
                let next = Rank::new((own.get() + 1) % size);
                assert!(is_told(own, next, world) && is_told(next, own, world), "{own} of {size}");
            }
        }
    }

    #[test]
    fn a_call_that_one_of_two_that_have_left_never_made_is_missing() {
        let (peer, call) = (Rank::new(2), |sequence| header(Operation::Broadcast, sequence));
        let mut calls = Calls::default();
        assert_eq!(calls.missing(), None);
        // A rank that stays may still make it.
        calls.hear(peer, call(0), Told::Latest);
        assert_eq!(calls.missing(), None);
        calls.hear(peer, call(0), Told::Last);
        assert_eq!(calls.missing(), Some(Missing::Here(peer, call(0))));
        calls.begin(call(0));
        // It has not ended: another error says more.
        assert_eq!(calls.missing(), None);
        calls.end();
        assert_eq!(calls.missing(), None);
        calls.begin(call(1));
        calls.end();
        assert_eq!(calls.missing(), Some(Missing::There(peer, call(1))));
    }

    #[test]
    fn who_has_left_without_a_call_is_absent_from_it_and_misses_it() {
        let (peer, call) = (Rank::new(2), |sequence| header(Operation::Broadcast, sequence));
        let mut calls = Calls::default();
        assert_eq!(calls.absent(Sequence(0)), None);
        // It has made no call at all.
        calls.left(peer);
        assert_eq!((calls.absent(Sequence(0)), calls.missing()), (Some(peer), None));
        calls.begin(call(0));
        calls.end();
        assert_eq!(calls.missing(), Some(Missing::There(peer, call(0))));
        // What it tells before it leaves is its last call.
        let mut calls = Calls::default();
        calls.hear(peer, call(3), Told::Last);
        calls.left(peer);
        assert_eq!([3, 4].map(|sequence| calls.absent(Sequence(sequence))), [None, Some(peer)]);
    }

    #[test]
    fn another_call_in_the_place_of_a_peers_is_found_before_and_after_it_is_made() {
        let (mut calls, peer) = (Calls::default(), Rank::new(2));
        calls.hear(peer, header(Operation::AllGather, 3), Told::Waiting);
        calls.compare(ME).unwrap();
        calls.begin(header(Operation::Broadcast, 3));
        let error = calls.compare(ME).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && error.peer() == Some(peer), "{text}");
        assert!(text.contains("rank 0 calls broadcast(8 x f32) #3"), "{text}");
        assert!(text.contains("rank 2 calls all_gather(8 x f32) #3"), "{text}");
        // Whoever looks before the group has failed finds it, too.
        assert_eq!(calls.compare(ME).unwrap_err().to_string(), text);
        // The same call, and one that ended long ago.
        calls.hear(peer, header(Operation::Broadcast, 3), Told::Waiting);
        calls.compare(ME).unwrap();
        calls.begin(header(Operation::Barrier, 3 + KEPT as u64));
        calls.hear(peer, header(Operation::AllGather, 3), Told::Waiting);
        calls.compare(ME).unwrap();
        // Ahead of this peer by some calls.
        calls.hear(peer, header(Operation::AllGather, 3 + KEPT as u64), Told::Waiting);
        assert!(calls.compare(ME).is_err());
    }
}
