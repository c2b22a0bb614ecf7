//! Orders of events, without memory and without a group.

use proptest::prelude::*;
use proptest::sample::Selector;

use super::*;
use crate::dtype::DType;

fn state(rank: u32, world: u32, sizes: &[(usize, bool)], options: &ReducerOptions) -> ReducerState {
    let dtype = |wide| if wide { DType::F64 } else { DType::F32 };
    let spec = |&(size, wide): &(usize, bool)| ParameterSpec::new("p", [size], dtype(wide));
    let limits = Limits::Bytes { first: 100, others: 300 };
    let place = (Rank::new(rank), WorldSize::new(world).unwrap());
    ReducerState::new(place, sizes.iter().map(spec).collect(), options, limits)
}

fn options(kind: u8) -> ReducerOptions {
    match kind {
        0 => ReducerOptions::default(),
        1 => ReducerOptions::default().find_unused_parameters(true),
        _ => ReducerOptions::default().static_graph(true),
    }
}

/// What a reducer does with what the state says, on paper: which bucket holds which gradients.
struct Played {
    state: ReducerState,
    /// The parameters whose gradients, or zeros, are in each bucket.
    buckets: Vec<Vec<usize>>,
    launched: Vec<usize>,
    /// Launches that succeed before one fails through another rank.
    sound: usize,
}

impl Played {
    fn new(state: ReducerState, sound: usize) -> Self {
        let buckets = vec![Vec::new(); state.plan().buckets.len()];
        Self { state, buckets, launched: Vec::new(), sound }
    }

    fn fill(&mut self, index: usize) {
        let (bucket, _) = self.state.slice_of(index);
        assert!(!self.launched.contains(&bucket), "a gradient came after its bucket had left");
        self.buckets[bucket].push(index);
        let full = self.state.arrived(index);
        assert_eq!(full.is_some(), self.holds_all(bucket));
        self.launch();
    }

    fn holds_all(&self, bucket: usize) -> bool {
        self.buckets[bucket].len() == self.state.plan().buckets[bucket].parameters.len()
    }

    fn launch(&mut self) {
        while let Some(bucket) = self.state.next_launch() {
            assert!(self.holds_all(bucket), "a bucket left without all of its gradients");
            assert_eq!(bucket, self.launched.len(), "not in the order of the plan, or twice");
            self.launched.push(bucket);
            if self.launched.len() > self.sound {
                assert!(self.state.cut_off(&Error::timeout("rank 2 is gone")));
            }
        }
    }

    fn zero_unused(&mut self) {
        while let Some(index) = self.state.next_unused() {
            self.fill(index);
        }
    }

    fn start(&mut self) {
        self.state.begin(None);
        self.buckets.iter_mut().for_each(Vec::clear);
        self.launched.clear();
        self.zero_unused();
    }

    fn finish(&mut self) -> Result<bool> {
        self.state.end()?;
        self.zero_unused();
        self.launch();
        let exchange = self.state.closed()?;
        self.state.finished();
        Ok(exchange)
    }
}

/// The parameters in an order that `draws` makes, without those in `unused`.
fn shuffled(count: usize, unused: &[usize], draws: &Selector) -> Vec<usize> {
    let mut left: Vec<usize> = (0..count).filter(|index| !unused.contains(index)).collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let next = *draws.select(&left);
        left.retain(|&index| index != next);
        order.push(next);
    }
    order
}

fn sizes() -> impl Strategy<Value = Vec<(usize, bool)>> {
    prop::collection::vec((1usize..50, any::<bool>()), 1..20)
}

proptest! {
    /// Whatever gradients come in whatever order, unused or not, and whatever launch fails in whatever step: every rank
    /// launches the plan's buckets in the plan's order, each once, with all of their gradients, and so again in a replay.
    #[test]
    fn each_bucket_is_launched_once_in_the_order_of_the_plan_and_a_replay_has_them_all(
        sizes in sizes(), kind in 0..3_u8, fails_in in 0..3_usize, sound in 0..12_usize,
        draws in prop::collection::vec(any::<Selector>(), 6), left_out in any::<Selector>(), survivors in 1..3_u32,
    ) {
        let unused: Vec<usize> = match kind {
            0 => Vec::new(),
            _ => vec![*left_out.select(&(0..sizes.len()).collect::<Vec<_>>())],
        };
        for rank in 0..2 {
            let state = state(rank, 3, &sizes, &options(kind));
            let mut played = Played::new(state, usize::MAX);
            for step in 0..3 {
                played.state.keep(true).unwrap();
                played.sound = if step == fails_in { sound } else { usize::MAX };
                played.start();
                prop_assert!(step == 0 || kind != 2 || played.buckets.concat() == unused, "learned in the first step");
                for index in shuffled(sizes.len(), &unused, &draws[rank as usize * 3 + step]) {
                    played.state.admit(index, None).unwrap();
                    played.fill(index);
                    prop_assert!(played.state.admit(index, None).is_err());
                }
                let count = played.buckets.len();
                let outcome = played.finish();
                prop_assert_eq!(outcome.is_ok(), step != fails_in || sound >= count);
                if step == fails_in {
                    // What was launched before is kept beside the buckets, the others hold what they held.
                    let place = (Rank::new(rank), WorldSize::new(survivors).unwrap());
                    let launched = played.state.replay(place).unwrap();
                    prop_assert_eq!(launched, count.min(sound.saturating_add(1)));
                    prop_assert!((0..count).all(|bucket| played.holds_all(bucket)), "nothing is lost");
                    (played.launched, played.sound) = (Vec::new(), usize::MAX);
                    prop_assert_eq!(played.finish().unwrap(), kind == 1 || (kind == 2 && step == 0));
                    let expected = if survivors == 1 { 0 } else { count };
                    prop_assert_eq!(played.launched.len(), expected);
                    played.state.regrouped((Rank::new(rank), WorldSize::new(3).unwrap())).unwrap();
                }
                let used = played.state.used_here();
                prop_assert!((0..sizes.len()).all(|index| (used[index] == 0) == unused.contains(&index)));
            }
        }
    }

    /// Calls in any order never panic, never launch a bucket before its gradients or twice, and never revive what has failed.
    #[test]
    fn calls_in_any_order_keep_the_order_of_launches(
        sizes in sizes(), kind in 0..3_u8, calls in prop::collection::vec((0..11_u8, any::<Selector>()), 0..200),
    ) {
        let mut played = Played::new(state(0, 2, &sizes, &options(kind)), usize::MAX);
        let mut failure: Option<String> = None;
        for (call, draw) in calls {
            let place = (Rank::MAIN, WorldSize::new(2).unwrap());
            let index = *draw.select(&(0..sizes.len()).collect::<Vec<_>>());
            if failure.is_some() {
                prop_assert_eq!(played.state.check().err().map(|error| error.to_string()), failure.clone());
                prop_assert!(played.state.check_backward("").is_err() && played.state.average(index).is_err());
                prop_assert!(played.state.replay(place).is_err() && played.state.regrouped(place).is_err());
                prop_assert!(played.state.begin_gather().is_err() && played.state.keep(true).is_err());
                played.state.emptied();
                let (first, is_first) = played.state.fail(Error::aborted("another"));
                prop_assert!(!is_first && Some(first.to_string()) == failure);
                continue;
            }
            match call {
                0 | 1 => if played.state.rebuild().is_ok() { played.start() },
                2..=5 => {
                    let open = played.state.check_backward("").is_ok();
                    if open && played.state.admit(index, None).is_ok() { played.fill(index) }
                }
                6 | 7 => if played.state.check_backward("").is_ok()
                    && let Err(error) = played.finish()
                    && !played.state.cut_off(&error)
                {
                    failure = Some(played.state.fail(error).0.to_string());
                },
                8 => if played.state.replay(place).is_ok() { played.launched.clear() },
                9 => drop(played.state.keep(true)),
                10 => {
                    let averaged = played.state.average(index);
                    prop_assert!(averaged.is_err() || (0..played.buckets.len()).all(|bucket| played.holds_all(bucket)));
                    played.state.emptied();
                    prop_assert!(played.state.average(index).is_err());
                }
                other => unreachable!("{other}"),
            }
        }
    }

    /// After the first step the buckets follow rank 0's order of gradients, once, on every rank alike, also on one that has
    /// taken over from another.
    #[test]
    fn buckets_are_built_anew_once_alike_on_every_rank(
        sizes in sizes(), draws in prop::collection::vec(any::<Selector>(), 3), kind in 0..3_u8, sharded in any::<bool>(),
    ) {
        let count = sizes.len();
        let mut ranks: Vec<_> =
            (0..3).map(|rank| Played::new(state(rank, 3, &sizes, &options(kind)), usize::MAX)).collect();
        if sharded {
            for played in &mut ranks {
                let owners = (0..count).map(|index| Rank::new(index as u32 % 3)).collect();
                let order = played.state.shard(owners).unwrap().unwrap();
                let plan = played.state.plan_for(&order).unwrap();
                played.state.set_plan(order, plan);
            }
        }
        // Rank 2 has had no data, and takes over from rank 0.
        for (played, draws) in ranks.iter_mut().zip(&draws).take(2) {
            prop_assert_eq!(played.state.rebuild().unwrap(), None);
            played.start();
            for index in shuffled(count, &[], draws) {
                played.fill(index);
            }
            played.finish().unwrap();
        }
        let progress = ranks[0].state.progress();
        let order = ranks[2].state.adopt(progress, Rank::MAIN).unwrap();
        let plan = ranks[2].state.plan_for(&order).unwrap();
        prop_assert!(!ranks[2].state.set_plan(order, plan));
        let first = ranks[0].state.rebuild().unwrap().cloned();
        prop_assert_eq!(first.is_some(), kind != 1);
        for played in &mut ranks {
            prop_assert_eq!(played.state.rebuild().unwrap().is_some(), kind != 1);
            if let Some(order) = first.clone() {
                let plan = played.state.plan_for(&order).unwrap();
                played.state.set_plan(order, plan);
                played.buckets = vec![Vec::new(); played.state.plan().buckets.len()];
            }
            played.start();
            for index in shuffled(count, &[], &draws[0]) {
                played.fill(index);
            }
            played.finish().unwrap();
            prop_assert_eq!(played.state.rebuild().unwrap(), None);
        }
        prop_assert!(ranks.windows(2).all(|pair| pair[0].state.plan() == pair[1].state.plan()));
        let wrong = [vec![0; count + 1], vec![count; count]];
        prop_assert!(wrong.iter().all(|order| ranks[0].state.plan_for(order).is_err()));
    }
}
