//! All ranks' controllers without I/O, and properties of them under random orders of submission.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::dtype::DType;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::*;
use crate::horovod::reduction::Op;
use crate::horovod::request::Part;

/// A world of controllers.
pub(super) struct World {
    ranks: Vec<Controller>,
    pub stall: StallTimes,
    now: Instant,
    /// Whether ranks sent messages in the last cycle.
    pub negotiated: bool,
    pub all_joined: Option<u32>,
    pub stalled: Option<String>,
}

impl World {
    pub fn new(size: usize, capacity: usize, stall: StallTimes) -> Self {
        let now = crate::some_time();
        let controller = |rank| Controller::new(Rank::new(rank as u32), size, capacity, stall, now);
        let ranks = (0..size).map(controller).collect();
        Self { ranks, stall, now, negotiated: false, all_joined: None, stalled: None }
    }

    pub fn submit(&mut self, rank: usize, request: Request) {
        self.ranks[rank].submit(request, self.now);
    }

    pub fn join(&mut self, rank: usize) {
        self.ranks[rank].join();
    }

    pub fn refuse(&mut self, rank: usize, name: &str, cause: &str) {
        self.ranks[rank].refuse(Refusal { name: name.into(), cause: cause.into() });
    }

    /// With what calls of this rank have ended.
    pub fn refused(&mut self, rank: usize) -> Vec<Refused> {
        self.ranks[rank].refused()
    }

    fn has_in_flight(&self, rank: usize, name: &str) -> bool {
        self.ranks[rank].pending.contains_key(name)
    }

    pub fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    pub fn warning(&mut self) -> Option<String> {
        self.ranks[0].warning(self.now)
    }

    pub fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.in_flight() == 0)
    }

    /// One cycle of all ranks. Returns what is ready, after a check that all ranks say the same.
    pub fn cycle(&mut self) -> Vec<Response> {
        let now = self.now;
        let vectors: Vec<Vec<u64>> = self.ranks.iter_mut().map(|rank| rank.vector(now, false)).collect();
        let mut all = vectors[0].clone();
        for vector in &vectors {
            assert_eq!(vector.len(), all.len());
            all.iter_mut().zip(vector).for_each(|(all, one)| *all &= one);
        }
        let nexts: Vec<Next> = self.ranks.iter_mut().map(|rank| rank.combined(&all).unwrap()).collect();
        assert!(nexts.iter().all(|next| *next == nexts[0]));
        self.negotiated = nexts[0].negotiate;
        let mut round = Round::default();
        if self.negotiated {
            let messages = self.ranks.iter_mut().map(|rank| rank.message(now)).collect();
            round = self.ranks[0].round(messages, now).unwrap();
        }
        self.all_joined = round.all_joined;
        self.stalled = round.stalled.clone();
        let mut ready: Vec<_> =
            self.ranks.iter_mut().map(|rank| rank.finish(round.clone()).unwrap()).collect();
        assert!(ready.iter().all(|other| *other == ready[0]), "the same order on all ranks");
        ready.swap_remove(0)
    }
}

pub(super) fn tensor(kind: Kind, name: &str, rows: u64) -> Request {
    Request {
        name: name.into(),
        kind,
        parts: vec![Part { dtype: DType::F32, stands_for: None, shape: vec![rows] }],
    }
}

pub(super) fn allreduce(name: &str, elements: u64) -> Request {
    tensor(Kind::Allreduce(Op::Sum.into()), name, elements)
}

/// Every tensor of every step, in an order that differs between ranks and steps.
struct Plan {
    size: usize,
    capacity: usize,
    threshold: usize,
    tensors: Vec<Request>,
    /// For each step and rank: the order of the tensors, and how many are submitted in each cycle.
    steps: Vec<Vec<(Vec<usize>, usize)>>,
}

/// Plays `plan` and checks it.
fn play(plan: &Plan) -> Result<(), TestCaseError> {
    let Plan { size, capacity, threshold, tensors, steps } = plan;
    let forever = Duration::from_secs(1 << 30);
    let mut world = World::new(*size, *capacity, StallTimes { warn: Some(forever), end: forever });
    for step in steps {
        let mut submitted = vec![0; *size];
        let mut ranks_with: BTreeMap<usize, usize> = BTreeMap::new();
        let mut reduced = BTreeSet::new();
        let mut complete = 0;
        while reduced.len() < tensors.len() {
            let before = complete;
            for (rank, (order, pace)) in step.iter().enumerate() {
                for index in order.iter().skip(submitted[rank]).take(*pace) {
                    world.submit(rank, tensors[*index].clone());
                    let ranks = ranks_with.entry(*index).or_default();
                    *ranks += 1;
                    complete += usize::from(*ranks == *size);
                }
                submitted[rank] = (submitted[rank] + pace).min(order.len());
            }
            let ready = world.cycle();
            assert_eq!(
                ready.len(),
                complete - before,
                "what all ranks have is ready in that cycle: nothing starves"
            );
            check_batches(&ready, *threshold);
            for response in &ready {
                assert!(reduced.insert(response.request.name.clone()), "{} twice", response.request.name);
            }
        }
        assert!(world.is_done());
    }
    Ok(())
}

fn check_batches(ready: &[Response], threshold: usize) {
    let mut members = BTreeSet::new();
    for batch in fuse(ready, threshold) {
        match batch {
            Batch::Reduce(fused) => {
                assert!(fused.members.len() == 1 || fused.wire_bytes() <= threshold);
                let elements = |member: &Member| ready[member.response].request.parts[member.part].elements();
                assert_eq!(fused.members.iter().map(elements).sum::<usize>(), fused.elements);
                assert!(fused.members.iter().all(|member| members.insert(*member)), "once");
                assert!(fused.members.is_sorted(), "in the order of the responses");
            }
            Batch::Single(response) => assert!(members.insert(Member { response, part: 0 })),
        }
    }
    assert_eq!(members.len(), ready.iter().map(|response| response.request.parts.len()).sum::<usize>());
}

fn plans(tensors: std::ops::Range<usize>, steps: usize) -> impl Strategy<Value = Plan> {
    let orders = |size, count: usize, steps| {
        let order = Just((0..count).collect::<Vec<_>>()).prop_shuffle();
        let rank = (order, 1..count + 2);
        prop::collection::vec(prop::collection::vec(rank, size), steps)
    };
    let kinds = prop::sample::select(vec![
        Kind::Allreduce(Op::Sum.into()),
        Kind::Allreduce(Op::Sum.into()),
        Kind::Allreduce(Op::Average.into()),
        Kind::Allgather,
        Kind::Alltoall,
        Kind::Broadcast { root: 0 },
        Kind::Barrier,
    ]);
    (2usize..9, tensors, prop::sample::select(vec![0, 1, 5, 64, 1024]), 0usize..400).prop_flat_map(
        move |(size, count, capacity, threshold)| {
            let parts = prop::collection::vec((kinds.clone(), 1u64..60), count);
            (parts, orders(size, count, steps)).prop_map(move |(parts, steps)| {
                let tensors = parts.into_iter().enumerate();
                let tensors =
                    tensors.map(|(index, (kind, rows))| tensor(kind, &format!("t{index}"), rows)).collect();
                Plan { size, capacity, threshold, tensors, steps }
            })
        },
    )
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { size, capacity, threshold, tensors, steps } = self;
        write!(f, "Plan({size} ranks, cache {capacity}, {threshold} B, {} tensors, {steps:?})", tensors.len())
    }
}

#[test]
fn every_tensor_is_reduced_once_in_one_order_whatever_the_order_of_submission() {
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    runner.run(&plans(1..40, 4), |plan| play(&plan)).unwrap();
}

#[test]
fn ten_thousand_tensors_are_reduced_once_in_one_order() {
    let mut runner = TestRunner::new(Config {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: 0,
        ..Config::default()
    });
    runner.run(&plans(10_000..10_001, 2), |plan| play(&plan)).unwrap();
}

#[test]
fn ranks_that_join_at_any_time_hold_nobody_up() {
    // For each rank: after how many of the shared steps it joins.
    let lives = (2usize..9).prop_flat_map(|size| prop::collection::vec(0usize..6, size));
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let test = (lives, prop::sample::select(vec![0usize, 2, 64]), 1usize..5);
    let outcome = runner.run(&test, |(lives, capacity, tensors)| {
        let forever = Duration::from_secs(1 << 30);
        let size = lives.len();
        let mut world = World::new(size, capacity, StallTimes { warn: Some(forever), end: forever });
        for _ in 0..2 {
            let most = lives.iter().copied().max().unwrap_or(0);
            for step in 0..=most {
                let active: Vec<usize> = (0..size).filter(|rank| lives[*rank] > step).collect();
                (0..size).filter(|rank| lives[*rank] == step).for_each(|rank| world.join(rank));
                for rank in &active {
                    // Another order on each.
                    for index in (0..tensors).map(|index| (index + rank) % tensors) {
                        world.submit(*rank, allreduce(&format!("t{index}"), 3));
                    }
                }
                let ready = world.cycle();
                prop_assert_eq!(ready.len(), if active.is_empty() { 0 } else { tensors });
                prop_assert_eq!(world.all_joined.is_some(), active.is_empty());
            }
            let last = (0..size).filter(|rank| lives[*rank] == most).max();
            prop_assert_eq!(world.all_joined, last.map(|rank| rank as u32));
        }
        Ok(())
    });
    outcome.unwrap();
}

/// What a rank does, one after the other.
#[derive(Clone, Debug)]
enum Act {
    Submit(Request),
    Join,
}

/// Each rank's acts: steps, each with every tensor once in an order of its own, then a join; all of that several times.
/// Shapes may change from step to step, so that what is cached no longer fits.
fn scripts() -> impl Strategy<Value = Vec<Vec<Act>>> {
    (2usize..6, 1usize..5).prop_flat_map(|(size, tensors)| {
        let order = Just((0..tensors).collect::<Vec<_>>()).prop_shuffle();
        let steps = prop::collection::vec(order, 0..5);
        let epochs = prop::collection::vec(steps, 3);
        let changes = prop::collection::vec(prop::collection::vec(1u64..4, tensors), 5);
        let kinds = prop::sample::select(vec![
            Kind::Allreduce(Op::Sum.into()),
            Kind::Allreduce(Op::Sum.into()),
            Kind::Allgather,
            Kind::Alltoall,
            Kind::Reducescatter(Op::Sum.into()),
            Kind::Broadcast { root: 0 },
            Kind::Broadcast { root: 1 },
        ]);
        let kinds = prop::collection::vec(kinds, tensors);
        (prop::collection::vec(epochs, size), changes, kinds).prop_map(|(ranks, changes, kinds)| {
            let script = |epochs: Vec<Vec<Vec<usize>>>| {
                let mut acts = Vec::new();
                for steps in epochs {
                    for (step, order) in steps.into_iter().enumerate() {
                        acts.extend(order.into_iter().map(|index| {
                            // Some tensors keep their shape in all steps.
                            let rows = if index % 2 == 0 { 3 } else { changes[step][index] };
                            Act::Submit(tensor(kinds[index].clone(), &format!("t{index}"), rows))
                        }));
                    }
                    acts.push(Act::Join);
                }
                acts
            };
            ranks.into_iter().map(script).collect()
        })
    })
}

#[test]
fn whatever_ranks_submit_before_they_join_is_carried_out() {
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    // How many acts of each rank come in a cycle, and how many seconds pass.
    let paces = prop::collection::vec((prop::collection::vec(0usize..5, 6), 0u64..100), 1..40);
    let test = (scripts(), paces, prop::sample::select(vec![0usize, 1, 2, 64]));
    let outcome = runner.run(&test, |(scripts, paces, capacity)| {
        let (size, forever) = (scripts.len(), Duration::from_secs(1 << 30));
        let stall = StallTimes { warn: Some(Duration::from_secs(60)), end: forever };
        let mut world = World::new(size, capacity, stall);
        let mut rest: Vec<_> = scripts.iter().map(|script| script.iter().peekable()).collect();
        let mut joined = vec![false; size];
        let mut epochs = 0;
        let mut paces = paces.iter().cycle();
        for cycle in 0..2000 {
            let Some((counts, seconds)) = paces.next() else { break };
            for (rank, acts) in rest.iter_mut().enumerate() {
                // In the end all go on, so that there is one.
                for _ in 0..counts[rank].max(usize::from(cycle > 200)) {
                    let may = |act: &&Act| match act {
                        Act::Submit(request) => !world.has_in_flight(rank, &request.name),
                        Act::Join => true,
                    };
                    match if joined[rank] { None } else { acts.next_if(may) } {
                        Some(Act::Submit(request)) => world.submit(rank, request.clone()),
                        Some(Act::Join) => {
                            joined[rank] = true;
                            world.join(rank);
                        }
                        None => break,
                    }
                }
            }
            world.pass(Duration::from_secs(*seconds));
            world.cycle();
            world.warning();
            if world.all_joined.is_some() {
                prop_assert!(world.is_done(), "what was submitted before the last join");
                joined.fill(false);
                epochs += 1;
            }
            if rest.iter_mut().all(|acts| acts.peek().is_none()) {
                break;
            }
        }
        // The last words.
        world.cycle();
        prop_assert!(world.is_done());
        prop_assert_eq!((epochs, rest.iter().map(ExactSizeIterator::len).sum::<usize>()), (3, 0));
        Ok(())
    });
    outcome.unwrap();
}

/// How often a rank calls each name.
const CALLS: usize = 4;

#[test]
fn a_refused_call_meets_the_calls_that_it_would_have_met_and_no_others() {
    // For each rank and name: which of its calls it refuses.
    let refuses = (2usize..5, 1usize..4).prop_flat_map(|(size, names)| {
        let calls = prop::collection::vec(prop::bool::weighted(0.3), CALLS);
        prop::collection::vec(prop::collection::vec(calls, names), size)
    });
    // How many calls of each name each rank makes in a cycle.
    let paces = prop::collection::vec(prop::collection::vec(0usize..3, 12), 1..20);
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let test = (refuses, paces, prop::sample::select(vec![0usize, 1, 64]));
    let outcome = runner.run(&test, |(refuses, paces, capacity)| {
        let (size, names, forever) = (refuses.len(), refuses[0].len(), Duration::from_secs(1 << 30));
        let mut world = World::new(size, capacity, StallTimes { warn: Some(forever), end: forever });
        let mut made = vec![vec![0; names]; size];
        let mut flying: Vec<Vec<Option<usize>>> = vec![vec![None; names]; size];
        let index = |name: &str| name[1..].parse::<usize>().unwrap();
        for cycle in 0..100 {
            let pace = &paces[cycle % paces.len()];
            for (rank, name) in (0..size).flat_map(|rank| (0..names).map(move |name| (rank, name))) {
                for _ in 0..pace[rank * names + name].max(usize::from(cycle > 50)) {
                    let (call, text) = (made[rank][name], format!("t{name}"));
                    if call == CALLS || !refuses[rank][name][call] && world.has_in_flight(rank, &text) {
                        break;
                    }
                    if refuses[rank][name][call] {
                        world.refuse(rank, &text, &call.to_string());
                    } else {
                        world.submit(rank, allreduce(&text, 3));
                        flying[rank][name] = Some(call);
                    }
                    made[rank][name] += 1;
                }
            }
            for response in world.cycle() {
                let name = index(&response.request.name);
                let calls: Vec<Option<usize>> = flying.iter_mut().map(|names| names[name].take()).collect();
                prop_assert!(calls[0].is_some() && calls.iter().all(|call| *call == calls[0]), "{calls:?}");
            }
            for (rank, flying) in flying.iter_mut().enumerate() {
                for Refused { refusal, rank: by, told } in world.refused(rank) {
                    let name = index(&refusal.name);
                    let call = flying[name].take();
                    prop_assert_eq!(call.map(|call| call.to_string()), Some(refusal.cause));
                    prop_assert!(call.is_some_and(|call| refuses[by as usize][name][call]));
                    prop_assert!(told.contains(&(rank as u32)));
                }
            }
        }
        prop_assert!(world.is_done() && made.iter().flatten().all(|made| *made == CALLS));
        Ok(())
    });
    outcome.unwrap();
}
