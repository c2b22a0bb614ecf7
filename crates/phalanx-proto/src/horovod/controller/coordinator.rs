//! Rank 0's part: it counts which ranks have asked for which names, and says what is ready.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::{Duration, Instant};

use super::StallTimes;
use crate::horovod::message::{MAX_REFUSALS, Message, Refusal, Refused, Response, Round};
use crate::horovod::request::{Kind, MAX_ANSWER_BYTES, Request};

/// The most tensors that a warning names.
const NAMED: usize = 8;
/// The most refusals that wait for calls of ranks. A program may refuse a call on one rank again and again, without which the others go on.
const MAX_OPEN: usize = MAX_REFUSALS;

#[derive(Debug)]
pub(super) struct Coordinator {
    size: usize,
    stall: StallTimes,
    /// What some ranks have asked for, by the order of arrival.
    waiting: BTreeMap<u64, Waiting>,
    by_name: BTreeMap<String, u64>,
    arrivals: u64,
    /// What may be ready now, and has not been looked at.
    due: VecDeque<u64>,
    /// What ranks have refused and others have not called, by the order of arrival.
    open: BTreeMap<u64, Open>,
    /// Those of each name, in their order. With a look at those of all names for each call, the looks would be as many as the square of the names,
    /// for each rank.
    open_by_name: BTreeMap<String, Vec<u64>>,
    /// With what calls end, and the ranks have not been told.
    refused: VecDeque<Refused>,
    /// Answers begin until there are so many bytes of them.
    room: usize,
    /// Which ranks have joined, and which was the last.
    joined: Vec<bool>,
    last: u32,
    /// If some ranks have joined and others have not: since when nothing was carried out.
    joining: Option<Instant>,
    warned: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    /// The first that came.
    model: Request,
    /// What each rank has asked for, by rank.
    asked: Vec<Asked>,
    /// How many ranks have asked: with a look at all of them for each that comes, the looks would be as many as the square of the ranks.
    count: usize,
    since: Instant,
}

/// A refusal that meets calls which some ranks have not made.
#[derive(Debug)]
struct Open {
    refusal: Refusal,
    rank: u32,
    /// Whether the next call of each rank meets it.
    meets: Vec<bool>,
    /// How many do.
    count: usize,
    /// The ranks whose calls have met it, and have not been told. They are told together: thousands of ranks may meet thousands of refusals.
    told: Vec<u32>,
}

/// What a rank has asked for under a name. Most times all ranks ask for the same, which is kept once: thousands of ranks may have asked for thousands of
/// names before the last rank does.
#[derive(Clone, Debug)]
enum Asked {
    Nothing,
    /// The same as the model.
    Same,
    Other(Box<Request>),
}

impl Waiting {
    /// What waits since the first request has come. Nobody has asked yet.
    fn new(model: Request, size: usize, since: Instant) -> Self {
        Self { model, asked: vec![Asked::Nothing; size], count: 0, since }
    }

    fn note(&mut self, rank: usize, request: Request) {
        let asked = if request == self.model { Asked::Same } else { Asked::Other(Box::new(request)) };
        if matches!(std::mem::replace(&mut self.asked[rank], asked), Asked::Nothing) {
            self.count += 1;
        }
    }

    /// What each rank has asked for, by rank.
    fn requests(&self) -> impl Iterator<Item = Option<&Request>> {
        self.asked.iter().map(|asked| match asked {
            Asked::Nothing => None,
            Asked::Same => Some(&self.model),
            Asked::Other(request) => Some(&**request),
        })
    }

    /// The requests of the ranks that have asked, with these.
    fn of_ranks(&self) -> impl Iterator<Item = (usize, &Request)> {
        self.requests().enumerate().filter_map(|(rank, request)| Some((rank, request?)))
    }

    /// The ranks that have not asked.
    fn absent(&self) -> impl Iterator<Item = usize> {
        self.requests().enumerate().filter(|(_, request)| request.is_none()).map(|(rank, _)| rank)
    }
}

impl Coordinator {
    pub fn new(size: usize, stall: StallTimes) -> Self {
        Self {
            size,
            stall,
            waiting: BTreeMap::new(),
            by_name: BTreeMap::new(),
            arrivals: 0,
            due: VecDeque::new(),
            open: BTreeMap::new(),
            open_by_name: BTreeMap::new(),
            refused: VecDeque::new(),
            room: MAX_ANSWER_BYTES,
            joined: vec![false; size],
            last: 0,
            joining: None,
            warned: None,
        }
    }

    /// Takes the ranks' messages, by rank, and answers all of them.
    pub fn round(&mut self, messages: Vec<Message>, now: Instant) -> Round {
        let mut joins = false;
        for (rank, message) in messages.into_iter().enumerate().take(self.size) {
            message.refusals.into_iter().for_each(|refusal| self.refuse(rank, refusal));
            for (request, waited) in message.requests {
                if let Some(open) = self.meet(rank, &request.name) {
                    open.told.push(rank as u32);
                    continue;
                }
                let since = now.checked_sub(Duration::from_millis(waited)).unwrap_or(now);
                let arrival = self.note(rank, request, since);
                self.due.push_back(arrival);
            }
            if message.joins {
                joins = true;
                self.joining = self.joining.or(Some(now));
                self.joined[rank] = true;
                self.last = rank as u32;
                self.miss(rank);
            }
        }
        self.tell_met();
        if joins {
            self.due.extend(self.waiting.keys());
        }
        let joined = self.joined.iter().filter(|joined| **joined).count();
        let (mut responses, mut refused, mut bytes) = (Vec::new(), Vec::new(), 0);
        while bytes < self.room
            && let Some(one) = self.refused.pop_front()
        {
            bytes += one.wire_bytes();
            refused.push(one);
        }
        while bytes < self.room
            && let Some(arrival) = self.due.pop_front()
        {
            if let Some(response) = self.answer(arrival, joined) {
                bytes +=
                    response.request.answer_bytes(self.size) + response.error.as_ref().map_or(0, String::len);
                responses.push(response);
            }
        }
        // What has been answered may have been due twice.
        while self.due.front().is_some_and(|arrival| !self.waiting.contains_key(arrival)) {
            self.due.pop_front();
        }
        if !responses.is_empty() {
            self.progressed(now);
        }
        // What the next round answers is of ranks that have joined too.
        let all_joined = (!self.has_due() && self.joined.iter().all(|joined| *joined)).then(|| {
            self.joined.fill(false);
            self.joining = None;
            self.last
        });
        Round { responses, all_joined, stalled: self.expired(now), settings: None, refused }
    }

    /// Whether the next round has answers, whatever the ranks send.
    pub fn has_due(&self) -> bool {
        !self.due.is_empty() || !self.refused.is_empty()
    }

    /// A rank has refused its own call of a name. All that ranks have asked for under that name meets it, and the next calls of the other ranks
    /// do, unless they have joined.
    fn refuse(&mut self, rank: usize, refusal: Refusal) {
        // The others have met a rank that has joined. What meets another rank's refusal ends with that.
        if self.joined[rank] || self.meet(rank, &refusal.name).is_some() {
            return;
        }
        let waiting = self.by_name.remove(&refusal.name).and_then(|arrival| self.waiting.remove(&arrival));
        let mut meets: Vec<bool> = self.joined.iter().map(|joined| !joined).collect();
        meets[rank] = false;
        let mut told = Vec::new();
        for (other, _) in waiting.iter().flat_map(Waiting::of_ranks) {
            meets[other] = false;
            told.push(other as u32);
        }
        let (rank, count) = (rank as u32, meets.iter().filter(|meets| **meets).count());
        if count > 0 {
            if self.open.len() == MAX_OPEN {
                self.tell_met();
            }
            if self.open.len() == MAX_OPEN
                && let Some((arrival, oldest)) = self.open.pop_first()
            {
                forget(&mut self.open_by_name, &oldest.refusal.name, arrival);
            }
            self.arrivals += 1;
            self.open_by_name.entry(refusal.name.clone()).or_default().push(self.arrivals);
            let open = Open { refusal: refusal.clone(), rank, meets, count, told: Vec::new() };
            self.open.insert(self.arrivals, open);
        }
        if !told.is_empty() {
            self.refused.push_back(Refused { refusal, rank, told });
        }
    }

    /// A rank calls a name. Returns the refusal that it meets, if it does.
    fn meet(&mut self, rank: usize, name: &str) -> Option<&mut Open> {
        let meets = |arrival: &&u64| self.open.get(*arrival).is_some_and(|open| open.meets[rank]);
        let arrival = *self.open_by_name.get(name)?.iter().find(meets)?;
        let open = self.open.get_mut(&arrival)?;
        open.meets[rank] = false;
        open.count -= 1;
        Some(open)
    }

    /// The ranks that have met refusals are to be told, and what no other rank meets is forgotten.
    fn tell_met(&mut self) {
        for open in self.open.values_mut().filter(|open| !open.told.is_empty()) {
            let (refusal, told) = (open.refusal.clone(), std::mem::take(&mut open.told));
            self.refused.push_back(Refused { refusal, rank: open.rank, told });
        }
        let by_name = &mut self.open_by_name;
        self.open.retain(|arrival, open| {
            if open.count == 0 {
                forget(by_name, &open.refusal.name, *arrival);
            }
            open.count > 0
        });
    }

    /// A rank has joined: it makes no calls that would meet refusals.
    fn miss(&mut self, rank: usize) {
        for open in self.open.values_mut() {
            open.count -= usize::from(std::mem::take(&mut open.meets[rank]));
        }
        self.tell_met();
    }

    fn note(&mut self, rank: usize, request: Request, since: Instant) -> u64 {
        let arrival = match self.by_name.get(&request.name) {
            Some(arrival) => *arrival,
            None => {
                self.arrivals += 1;
                self.by_name.insert(request.name.clone(), self.arrivals);
                self.arrivals
            }
        };
        let new = || Waiting::new(request.clone(), self.size, since);
        let waiting = self.waiting.entry(arrival).or_insert_with(new);
        waiting.since = waiting.since.min(since);
        waiting.note(rank, request);
        arrival
    }

    /// The response, if every rank has asked or is one of the `joined`.
    fn answer(&mut self, arrival: u64, joined: usize) -> Option<Response> {
        let waiting = self.waiting.get(&arrival)?;
        if waiting.count + joined < self.size {
            return None;
        }
        if !waiting.absent().all(|rank| self.joined[rank]) {
            return None;
        }
        let response = respond(waiting)?;
        self.waiting.remove(&arrival);
        self.by_name.remove(&response.request.name);
        Some(response)
    }

    /// Something is carried out: ranks that have joined wait for a reason.
    pub fn progressed(&mut self, now: Instant) {
        self.joining = self.joining.map(|_| now);
    }

    /// A warning, if it is time, of what some ranks wait for and others lack.
    pub fn warning(&mut self, now: Instant) -> Option<String> {
        let after = self.stall.warn?;
        let is_due = self.warned.is_none_or(|warned| now.saturating_duration_since(warned) >= after);
        if !is_due {
            return None;
        }
        let (stalled, seconds) = (self.stalled(after, now), after.as_secs_f64());
        let warning = if !stalled.is_empty() {
            let described = self.described(&stalled);
            format!(
                "tensors that some ranks have submitted wait for others for {seconds} s: {described} (do all ranks submit \
                 the same names? a rank without data calls join)"
            )
        } else {
            let waiting = self.waiting_for_joins(after, now)?;
            format!("nothing was carried out for {seconds} s: {waiting} (every rank calls join at its end)")
        };
        self.warned = Some(now);
        Some(warning)
    }

    /// Why everything ends, if a tensor or a rank that has joined has waited for too long.
    pub fn expired(&self, now: Instant) -> Option<String> {
        let (end, seconds) = (self.stall.end, self.stall.end.as_secs_f64());
        if self.stalled(end, now).is_empty() {
            let waiting = self.waiting_for_joins(end, now)?;
            return Some(format!("nothing was carried out within {seconds} s: {waiting}"));
        }
        // What was submitted together has times that differ a little, and is one cause.
        let stalled = self.stalled(end - end / 10, now);
        Some(format!(
            "tensors were not submitted by all ranks within {seconds} s: {}",
            self.described(&stalled)
        ))
    }

    /// Which ranks have joined and which have not, if nothing was carried out for so long.
    fn waiting_for_joins(&self, after: Duration, now: Instant) -> Option<String> {
        self.joining.filter(|since| now.saturating_duration_since(*since) >= after)?;
        let of = |has_joined: bool| (0..self.size).filter(move |rank| self.joined[*rank] == has_joined);
        Some(format!("{} joined, and {} did not", ranks(of(true)), ranks(of(false))))
    }

    fn stalled(&self, after: Duration, now: Instant) -> Vec<&Waiting> {
        self.waiting
            .values()
            .filter(|waiting| now.saturating_duration_since(waiting.since) >= after)
            .collect()
    }

    fn described(&self, stalled: &[&Waiting]) -> String {
        let mut text = String::new();
        for (index, waiting) in stalled.iter().take(NAMED).enumerate() {
            let name = &waiting.model.name;
            let there = waiting.of_ranks().map(|(rank, _)| rank);
            let missing = waiting.absent().filter(|rank| !self.joined[*rank]);
            let separator = if index == 0 { "" } else { "; " };
            let (there, missing) = (ranks(there), ranks(missing));
            // Writing to a string does not fail.
            let _ = write!(text, "{separator}{name:?} (submitted by {there}; missing: {missing})");
        }
        match stalled.len().saturating_sub(NAMED) {
            0 => text,
            more => format!("{text} and {more} more"),
        }
    }
}

/// The refusal of this `name` with this number is no longer open.
fn forget(by_name: &mut BTreeMap<String, Vec<u64>>, name: &str, arrival: u64) {
    let Some(arrivals) = by_name.get_mut(name) else { return };
    arrivals.retain(|other| *other != arrival);
    if arrivals.is_empty() {
        by_name.remove(name);
    }
}

/// Names ranks in a message: "rank 3", "ranks 0, 2".
pub fn ranks(ranks: impl Iterator<Item = usize>) -> String {
    const SHOWN: usize = 16;
    let all: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    let more = if all.len() > SHOWN { ", .." } else { "" };
    let word = if all.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}{more}", all[..all.len().min(SHOWN)].join(", "))
}

/// What all ranks do with what they have asked for; those that have not have joined.
fn respond(waiting: &Waiting) -> Option<Response> {
    let (first, request) = waiting.of_ranks().next()?;
    let request = request.clone();
    let absent: Vec<u32> = waiting.absent().map(|rank| rank as u32).collect();
    let differing = waiting.of_ranks().find(|(_, other)| !request.agrees_with(other));
    let error = match (differing, &request.kind) {
        (Some((rank, other)), _) => {
            Some(format!("{:?}: rank {first} submits {request}, rank {rank} {other}", request.name))
        }
        (None, Kind::Broadcast { root }) if absent.contains(root) => {
            Some(format!("{:?}: the root of {request} has joined, and has nothing to send", request.name))
        }
        (None, _) => None,
    };
    let rows = if error.is_none() && request.kind.tells_rows() {
        let none = || vec![0; request.parts.len()];
        waiting.requests().map(|request| request.map_or_else(none, Request::rows)).collect()
    } else {
        Vec::new()
    };
    Some(Response { request, rows, absent, error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::horovod::reduction::Op;
    use crate::horovod::request::Part;

    #[test]
    fn a_name_is_ready_when_each_rank_has_asked_or_joined_however_often_one_has() {
        let stall = StallTimes { warn: None, end: Duration::from_secs(1000) };
        let request = Request { name: "a".into(), kind: Kind::Barrier, parts: Vec::new() };
        let asks = || Message { requests: vec![(request.clone(), 0)], ..Message::default() };
        let joins = || Message { joins: true, ..Message::default() };
        let twice = Message { requests: vec![(request.clone(), 0); 2], joins: true, ..Message::default() };
        let (none, now) = (Message::default, crate::some_time());
        // What the ranks say in each round. The last round makes the name ready.
        for rounds in [
            vec![[asks(), none(), none()], [asks(), asks(), none()], [none(), none(), asks()]],
            vec![[twice, none(), none()], [none(), none(), joins()], [none(), asks(), none()]],
            vec![[joins(), none(), asks()], [none(), none(), joins()], [none(), joins(), none()]],
        ] {
            let mut coordinator = Coordinator::new(3, stall);
            let last = rounds.len() - 1;
            for (round, messages) in rounds.into_iter().enumerate() {
                let answered = coordinator.round(messages.into(), now).responses.len();
                assert_eq!(answered, usize::from(round == last), "{round}");
            }
        }
    }

    #[test]
    fn what_all_ranks_ask_for_alike_is_kept_once() {
        let stall = StallTimes { warn: None, end: Duration::from_secs(1000) };
        let mut coordinator = Coordinator::new(4, stall);
        let part = |rows| Part { dtype: crate::dtype::DType::F32, stands_for: None, shape: vec![rows, 2] };
        let gathers = |rows| {
            let request = Request { name: "a".into(), kind: Kind::Allgather, parts: vec![part(rows)] };
            Message { requests: vec![(request, 0)], ..Message::default() }
        };
        let (none, now) = (Message::default, crate::some_time());
        assert!(
            coordinator.round(vec![none(), gathers(3), gathers(3), gathers(5)], now).responses.is_empty()
        );
        let waiting = coordinator.waiting.values().next().unwrap();
        assert!(matches!(waiting.asked[..], [Asked::Nothing, Asked::Same, Asked::Same, Asked::Other(_)]));
        assert!(size_of::<Asked>() <= 2 * size_of::<usize>());
        // A rank may ask again, for something else: the last counts, and the answer is that of the first rank.
        let again = coordinator.round(vec![gathers(1), gathers(7), none(), none()], now).responses;
        let [response] = &again[..] else { panic!("{again:?}") };
        assert_eq!(response.rows, [[1], [7], [3], [5]]);
        assert_eq!(response.request.parts[0].rows(), 1);
        assert!(response.absent.is_empty() && response.error.is_none());
        assert!(coordinator.waiting.is_empty() && coordinator.by_name.is_empty());
    }

    #[test]
    fn refusals_that_no_rank_meets_do_not_become_more_and_more() {
        let stall = StallTimes { warn: None, end: Duration::from_secs(1000) };
        let mut coordinator = Coordinator::new(3, stall);
        let refusal = |name: usize| Refusal { name: name.to_string(), cause: "why".into() };
        let now = crate::some_time();
        for name in 0..MAX_OPEN + 2 {
            let refuses = Message { refusals: vec![refusal(name)], ..Message::default() };
            let round = coordinator.round(vec![Message::default(), refuses, Message::default()], now);
            assert!(round.refused.is_empty() && !coordinator.has_due());
        }
        let oldest = &coordinator.open.values().next().unwrap().refusal;
        let names = coordinator.open_by_name.len();
        assert_eq!((coordinator.open.len(), names, oldest), (MAX_OPEN, MAX_OPEN, &refusal(2)));
        let joins = || Message { joins: true, ..Message::default() };
        coordinator.round(vec![joins(), Message::default(), Message::default()], now);
        assert!(coordinator.open.values().all(|open| open.count == 1));
        coordinator.round(vec![Message::default(), Message::default(), joins()], now);
        assert!(coordinator.open.is_empty() && coordinator.open_by_name.is_empty());
        assert!(coordinator.expired(now).is_none());
    }

    #[test]
    fn ranks_that_meet_one_refusal_in_one_round_are_told_together() {
        let stall = StallTimes { warn: None, end: Duration::from_secs(1000) };
        let (mut coordinator, now) = (Coordinator::new(5, stall), crate::some_time());
        let none = Message::default;
        let asks = || {
            let request = |name: &str| Request { name: name.into(), kind: Kind::Barrier, parts: Vec::new() };
            Message { requests: ["a", "b"].map(|name| (request(name), 0)).into(), ..none() }
        };
        let refusals = ["a", "b"].map(|name| Refusal { name: name.into(), cause: "why".into() });
        let refuses = Message { refusals: refusals.into(), ..none() };
        let told = |round: Round| -> Vec<(String, Vec<u32>)> {
            round.refused.into_iter().map(|refused| (refused.refusal.name, refused.told)).collect()
        };
        let first = coordinator.round(vec![asks(), refuses, asks(), asks(), none()], now);
        // Rank 0 waits already when it is refused.
        let expected = [("a", vec![0u32]), ("b", vec![0]), ("a", vec![2, 3]), ("b", vec![2, 3])];
        assert_eq!(told(first), expected.map(|(name, ranks)| (name.to_owned(), ranks)));
        let last = coordinator.round(vec![none(), none(), none(), none(), asks()], now);
        assert_eq!(told(last), ["a", "b"].map(|name| (name.to_owned(), vec![4u32])));
        assert!(coordinator.open.is_empty() && coordinator.open_by_name.is_empty());
        assert!(!coordinator.has_due());
    }

    #[test]
    fn answers_that_no_message_has_room_for_go_with_the_next_rounds() {
        let stall = StallTimes { warn: None, end: Duration::from_secs(1000) };
        let mut coordinator = Coordinator { room: 1, ..Coordinator::new(2, stall) };
        let parts = vec![Part { dtype: crate::dtype::DType::F32, stands_for: None, shape: vec![1] }];
        let kind = Kind::Allreduce(Op::Sum.into());
        let request =
            |name: &str| (Request { name: name.into(), kind: kind.clone(), parts: parts.clone() }, 0);
        let names = ["a", "b", "c"];
        let first = Message { requests: names.map(request).into(), joins: true, ..Message::default() };
        let second = Message { joins: true, ..Message::default() };
        let now = crate::some_time();
        let mut round = coordinator.round(vec![first, second], now);
        for (index, name) in names.iter().enumerate() {
            let [response] = &round.responses[..] else { panic!("{round:?}") };
            assert_eq!((response.request.name.as_str(), &response.absent[..]), (*name, &[1][..]));
            // Rank 1 has joined as long as there are answers for which it has.
            assert_eq!(round.all_joined.is_some(), index + 1 == names.len());
            round = coordinator.round(vec![Message::default(), Message::default()], now);
        }
        assert!(round.responses.is_empty() && !coordinator.has_due());
    }
}
