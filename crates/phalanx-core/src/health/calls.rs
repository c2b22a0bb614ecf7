//! The latest calls of this rank, and the calls in which its peers wait.
//!
//! Ranks compare their calls with the frames that they receive. But if ranks call different collectives, each may wait
//! for a rank that sends it nothing, and would learn of it only from its time-out. So a rank that has been in one call
//! for a while sends this call to the others, on their control connections. A rank that has called something else in
//! its place reports it. A call that is not stuck costs no message.

use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Result;
use crate::rank::{Rank, Sequence};
use crate::wire::frame::Header;

/// How often to check whether a call is stuck: it is, if it was already running at the last check.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How many calls are remembered. A rank may be ahead of the others by some calls in which it only sends.
const KEPT: usize = 64;

#[derive(Default)]
pub(crate) struct Calls(Mutex<CallsState>);

#[derive(Default)]
struct CallsState {
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
    waiting: Vec<(Rank, Header, Told)>,
    /// The last calls of the peers that have left.
    lasts: Vec<(Rank, Header)>,
}

/// Why a peer tells one of its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// It has been in it for a while, or a frame has shown that one like it differs.
    Waiting,
    /// It is its latest one when this rank leaves.
    Latest,
    /// It is its last one, and the peer leaves.
    Last,
}

/// The last call of one rank, which another that has left too has not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    /// This rank has not made this call of the peer.
    Here(Rank, Header),
    /// The peer has not made this call of this rank.
    There(Rank, Header),
}

impl Calls {
    /// A collective begins.
    pub(crate) fn begin(&self, call: Header) {
        let mut state = self.0.lock();
        if state.last.is_empty() {
            state.last.resize(KEPT, None);
        }
        let place = place(call.sequence);
        state.last[place] = Some(call);
        state.running = Some(call);
        state.latest = Some(call);
    }

    /// The call that began last, if its data went to other ranks in frames.
    pub(crate) fn latest(&self) -> Option<Header> {
        self.0.lock().latest
    }

    /// The call that runs, if its data goes to other ranks in frames.
    pub(crate) fn running(&self) -> Option<Header> {
        self.0.lock().running
    }

    /// It has ended.
    pub(crate) fn end(&self) {
        self.0.lock().running = None;
    }

    /// The running call, if it was already running at the last check and has not been returned yet.
    pub(crate) fn stuck(&self) -> Option<Header> {
        let mut state = self.0.lock();
        let running = state.running?;
        match state.seen {
            Some((sequence, told)) if sequence == running.sequence => {
                state.seen = Some((sequence, true));
                (!told).then_some(running)
            }
            _ => {
                state.seen = Some((running.sequence, false));
                None
            }
        }
    }

    /// Has the others told which calls this rank made before the one numbered `sequence`. Returns whether there are any.
    pub(super) fn tell_earlier(&self, sequence: Sequence) -> bool {
        let mut state = self.0.lock();
        let mut earlier: Vec<Header> =
            state.last.iter().flatten().filter(|call| call.sequence < sequence).copied().collect();
        // The first that differs is found first.
        earlier.sort_unstable_by_key(|call| call.sequence.0);
        state.untold = earlier;
        !state.untold.is_empty()
    }

    /// What the others must be told of earlier calls, once.
    pub(crate) fn untold(&self) -> Vec<Header> {
        std::mem::take(&mut self.0.lock().untold)
    }

    /// `peer` has told its call `theirs`.
    pub(crate) fn hear(&self, peer: Rank, theirs: Header, told: Told) {
        let mut state = self.0.lock();
        state.waiting.retain(|(known, ..)| *known != peer);
        state.waiting.push((peer, theirs, told));
        if told == Told::Last {
            state.lasts.push((peer, theirs));
        }
    }

    /// When this rank has left: a call that one of the ranks that have left has made, and the other has not. Only a call in which
    /// a rank waits for nobody can be so.
    pub(super) fn missing(&self) -> Option<Missing> {
        let state = self.0.lock();
        if state.running.is_some() {
            return None;
        }
        let own = state.latest;
        state.lasts.iter().find_map(|&(peer, theirs)| match own {
            Some(own) if own.sequence > theirs.sequence => Some(Missing::There(peer, own)),
            Some(own) if own.sequence == theirs.sequence => None,
            Some(_) | None => Some(Missing::Here(peer, theirs)),
        })
    }

    /// An error with both calls if this rank, `own`, has made another call where a peer waits.
    pub(crate) fn compare(&self, own: Rank) -> Result<()> {
        let mut state = self.0.lock();
        let CallsState { last, waiting, .. } = &mut *state;
        let mut outcome = Ok(());
        waiting.retain(|&(peer, ref theirs, told)| {
            let there = last.get(place(theirs.sequence)).copied().flatten();
            // This rank may still reach it.
            let Some(call) = there.filter(|call| call.sequence >= theirs.sequence) else { return true };
            if call.sequence == theirs.sequence && outcome.is_ok() {
                // A rank that waits in the same call gets a frame of it, and finds another history itself. Then it tells the
                // calls before it, of which the first that differs is here.
                let history = if told == Told::Waiting { call.history } else { theirs.history };
                let checked = call.check(&Header { history, ..*theirs }, own, peer);
                outcome =
                    checked.map_err(|error| error.in_operation(call.call.to_string(), Some(call.sequence)));
            }
            false
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
        let calls = Calls::default();
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
    fn a_call_that_one_of_two_that_have_left_never_made_is_missing() {
        let (peer, call) = (Rank::new(2), |sequence| header(Operation::Broadcast, sequence));
        let calls = Calls::default();
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
    fn another_call_in_the_place_of_a_peers_is_found_before_and_after_it_is_made() {
        let (calls, peer) = (Calls::default(), Rank::new(2));
        calls.hear(peer, header(Operation::AllGather, 3), Told::Waiting);
        calls.compare(ME).unwrap();
        calls.begin(header(Operation::Broadcast, 3));
        let error = calls.compare(ME).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && error.peer() == Some(peer), "{text}");
        assert!(text.contains("rank 0 calls broadcast(8 x f32) #3"), "{text}");
        assert!(text.contains("rank 2 calls all_gather(8 x f32) #3"), "{text}");
        // It has been reported.
        calls.compare(ME).unwrap();
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
