//! Rank 0's part: it counts which ranks have asked for which names, and says what is ready.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::time::{Duration, Instant};

use super::StallTimes;
use crate::request::{Kind, Message, Request, Response, Round};

/// The most tensors that a warning names.
const NAMED: usize = 8;

#[derive(Debug)]
pub(super) struct Coordinator {
    size: usize,
    stall: StallTimes,
    /// What some ranks have asked for, by the order of arrival.
    waiting: BTreeMap<u64, Waiting>,
    by_name: HashMap<String, u64>,
    arrivals: u64,
    /// Which ranks have joined, and which was the last.
    joined: Vec<bool>,
    last: u32,
    /// If some ranks have joined and others have not: since when nothing was carried out.
    joining: Option<Instant>,
    warned: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    /// By rank.
    requests: Vec<Option<Request>>,
    since: Instant,
}

impl Waiting {
    fn ranks(&self) -> impl Iterator<Item = usize> {
        self.requests.iter().enumerate().filter(|(_, request)| request.is_some()).map(|(rank, _)| rank)
    }
}

impl Coordinator {
    pub fn new(size: usize, stall: StallTimes) -> Self {
        Self {
            size,
            stall,
            waiting: BTreeMap::new(),
            by_name: HashMap::new(),
            arrivals: 0,
            joined: vec![false; size],
            last: 0,
            joining: None,
            warned: None,
        }
    }

    /// Takes the ranks' messages, by rank, and answers all of them.
    pub fn round(&mut self, messages: Vec<Message>, now: Instant) -> Round {
        let mut touched = Vec::new();
        let mut joins = false;
        for (rank, message) in messages.into_iter().enumerate().take(self.size) {
            for (request, waited) in message.requests {
                touched.push(self.note(
                    rank,
                    request,
                    now.checked_sub(Duration::from_millis(waited)).unwrap_or(now),
                ));
            }
            if message.joins {
                joins = true;
                self.joining = self.joining.or(Some(now));
                self.joined[rank] = true;
                self.last = rank as u32;
            }
        }
        if joins {
            touched.extend(self.waiting.keys());
        }
        let responses: Vec<Response> =
            touched.into_iter().filter_map(|arrival| self.answer(arrival)).collect();
        if !responses.is_empty() {
            self.progressed(now);
        }
        let all_joined = self.joined.iter().all(|joined| *joined).then(|| {
            self.joined.fill(false);
            self.joining = None;
            self.last
        });
        Round { responses, all_joined, stalled: self.expired(now), settings: None }
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
        let size = self.size;
        let waiting =
            self.waiting.entry(arrival).or_insert_with(|| Waiting { requests: vec![None; size], since });
        waiting.since = waiting.since.min(since);
        waiting.requests[rank] = Some(request);
        arrival
    }

    /// The response, if every rank has asked or joined.
    fn answer(&mut self, arrival: u64) -> Option<Response> {
        let waiting = self.waiting.get(&arrival)?;
        let is_ready =
            waiting.requests.iter().zip(&self.joined).all(|(request, joined)| request.is_some() || *joined);
        if !is_ready {
            return None;
        }
        let Waiting { requests, .. } = self.waiting.remove(&arrival)?;
        let response = respond(requests)?;
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
        let stalled = self.stalled(end, now);
        if stalled.is_empty() {
            let waiting = self.waiting_for_joins(end, now)?;
            return Some(format!("nothing was carried out within {seconds} s: {waiting}"));
        }
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
            let name = waiting.requests.iter().flatten().next().map_or("", |request| request.name.as_str());
            let missing =
                (0..self.size).filter(|rank| waiting.requests[*rank].is_none() && !self.joined[*rank]);
            let separator = if index == 0 { "" } else { "; " };
            let (there, missing) = (ranks(waiting.ranks()), ranks(missing));
            // Writing to a string does not fail.
            let _ = write!(text, "{separator}{name:?} (submitted by {there}; missing: {missing})");
        }
        match stalled.len().saturating_sub(NAMED) {
            0 => text,
            more => format!("{text} and {more} more"),
        }
    }
}

/// "rank 3", "ranks 0, 2".
pub(crate) fn ranks(ranks: impl Iterator<Item = usize>) -> String {
    const SHOWN: usize = 16;
    let all: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    let more = if all.len() > SHOWN { ", .." } else { "" };
    let word = if all.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}{more}", all[..all.len().min(SHOWN)].join(", "))
}

/// What all ranks do with these requests, one of each rank; none of a rank that has joined.
fn respond(requests: Vec<Option<Request>>) -> Option<Response> {
    let first = requests.iter().position(Option::is_some)?;
    let request = requests[first].clone()?;
    let absent: Vec<u32> = requests
        .iter()
        .enumerate()
        .filter(|(_, request)| request.is_none())
        .map(|(rank, _)| rank as u32)
        .collect();
    let present = requests.iter().enumerate().filter_map(|(rank, request)| Some((rank, request.as_ref()?)));
    let mut differing = present.clone().filter(|(_, other)| !request.agrees_with(other));
    let error = match (differing.next(), &request.kind) {
        (Some((rank, other)), _) => {
            Some(format!("{:?}: rank {first} submits {request}, rank {rank} {other}", request.name))
        }
        (None, Kind::Broadcast { root }) if absent.contains(root) => {
            Some(format!("{:?}: the root of {request} has joined, and has nothing to send", request.name))
        }
        (None, _) => None,
    };
    let of_all = |rows: &dyn Fn(&Request) -> Vec<u64>, none: usize| -> Vec<Vec<u64>> {
        requests.iter().map(|request| request.as_ref().map_or_else(|| vec![0; none], rows)).collect()
    };
    let rows = match &request.kind {
        _ if error.is_some() => Vec::new(),
        Kind::Allgather => of_all(&Request::rows, request.parts.len()),
        Kind::Alltoall { .. } => of_all(&Request::rows, requests.len()),
        Kind::Allreduce(_) | Kind::Broadcast { .. } | Kind::Reducescatter(_) | Kind::Barrier => Vec::new(),
    };
    Some(Response { request, rows, absent, error })
}
