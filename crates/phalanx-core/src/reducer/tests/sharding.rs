//! Averages that go to one rank each.

use super::super::hooks::{GradBucket, HookState, Pending, PostLocalSgd};
use super::*;

/// Each parameter goes to the rank that its index says.
fn owners(ranks: u32, count: usize) -> Vec<Rank> {
    (0..count).map(|index| Rank::new(index as u32 % ranks)).collect()
}

#[test]
fn sharded_averages_are_their_owner_s_and_updated_parameters_come_back_in_the_same_memory() {
    const SIZES: [usize; 5] = [6, 1, 4, 3, 5];
    run(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&SIZES), buckets_of(8)).unwrap();
        let order = [4, 3, 2, 1, 0];
        one_step(&mut reducer, rank, 0, &order).unwrap();
        reducer.shard(owners(3, SIZES.len())).unwrap();
        assert!(reducer.gradient(0).is_err(), "the averages before are gone");
        let mut taken = 0;
        for step in 1..4 {
            one_step(&mut reducer, rank, step, &order).unwrap();
            for (index, &size) in SIZES.iter().enumerate() {
                if index % 3 == rank.index() {
                    assert_eq!(floats(&reducer, index), expected(3, index, step, size));
                } else {
                    assert_eq!(reducer.gradient(index).unwrap(), None);
                }
            }
            let updated = |index: usize| vec![(index * 10 + step) as f32; SIZES[index]];
            reducer
                .gather_parameters(|put| {
                    (0..SIZES.len()).try_for_each(|index| match index % 3 == rank.index() {
                        true => put(index, bytemuck::cast_slice(&updated(index))),
                        false => put(index, &[]),
                    })
                })
                .unwrap();
            for index in 0..SIZES.len() {
                assert_eq!(
                    reducer.parameter(index).unwrap(),
                    bytemuck::cast_slice::<f32, u8>(&updated(index))
                );
            }
            assert!(reducer.gradient(0).is_err());
            if step == 2 {
                taken = group.allocations();
            }
        }
        assert_eq!(group.allocations(), taken);
        let kinds: Vec<_> = group.calls().iter().rev().take(2).map(|call| call.kind).collect();
        assert_eq!(kinds, [Kind::AllGather; 2]);
        assert!(averages(&group).len() <= 3, "{:?}", averages(&group));
    });
}

#[test]
fn parameters_are_sharded_alike_on_every_rank_or_not_at_all() {
    let errors = run(2, |group| {
        let mut reducer = Reducer::new(group.clone(), parameters(&[2, 2]), buckets_of(8)).unwrap();
        assert!(reducer.gather_parameters(|_| Ok(())).unwrap_err().is_invalid_argument());
        let mine = vec![Rank::MAIN, group.rank()];
        reducer.shard(mine).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.to_string().contains("bucket plans")), "{errors:?}");
    run(2, |group| {
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        assert!(reducer.shard(vec![Rank::new(2); 2]).unwrap_err().is_invalid_argument());
    });
}

/// A hook that says after its first bucket that it does not average over all ranks.
struct Alone(bool);

impl CommHook for Alone {
    fn describe(&self) -> String {
        "alone".into()
    }

    fn start(&mut self, _: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        self.0 = true;
        Ok(Pending::ready(bucket.buffer))
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }

    fn averages_over_all(&self) -> bool {
        !self.0
    }
}

#[test]
fn a_hook_that_does_not_always_average_over_all_ranks_is_refused_with_shards() {
    let refused = |error: Error, hook: &str| {
        let said = error.to_string();
        let expected = error.is_invalid_argument() && said.contains("averages are sharded");
        assert!(expected && said.contains(hook), "{said}");
    };
    run(2, |group| {
        // Whichever comes first.
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        reducer.register_hook(Box::new(PostLocalSgd::new(7))).unwrap();
        refused(reducer.shard(owners(2, 2)).unwrap_err(), "local sgd after 7 steps");
    });
    run(2, |group| {
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        reducer.shard(owners(2, 2)).unwrap();
        refused(reducer.register_hook(Box::new(PostLocalSgd::new(7))).unwrap_err(), "local sgd");
    });
    // One that only a step shows.
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        reducer.shard(owners(2, 2)).unwrap();
        reducer.register_hook(Box::new(Alone(false))).unwrap();
        refused(one_step(&mut reducer, rank, 0, &[1, 0]).unwrap_err(), "`alone`");
    });
    // In a world of one nothing is sharded.
    run(1, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[2, 2]), buckets_of(8)).unwrap();
        reducer.shard(owners(1, 2)).unwrap();
        reducer.register_hook(Box::new(PostLocalSgd::new(0))).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
    });
}
