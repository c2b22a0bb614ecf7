//! What a loader gives, and in which order.

mod failures;
mod memory;
mod seeds;

use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use phalanx::sampler::{DistributedSampler, ElasticSampler, Tail};
use phalanx::testing::{Fabric, run};
use phalanx::{ProcessGroup, Rank, Result, WorldSize};
use phalanx_data::{DataLoader, Dataset, InMemory, Sampler, from_fn};
use proptest::prelude::*;

use crate::support::{Function, numbers, shards, world};

/// What this rank gets in all passes of `epochs`.
fn passes<D: Dataset<Item = usize> + 'static>(loader: &DataLoader<D>, epochs: u64) -> Vec<Vec<Vec<usize>>> {
    (0..epochs).map(|_| loader.iter().map(Result::unwrap).collect()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ranks_get_what_pytorch_s_get(
        len in 1..90_usize, ranks in 1..5_u32, batch in 1..9_usize, workers in 0..4_usize,
        cut in any::<bool>(), drop_last in any::<bool>(), seed in any::<u64>(),
    ) {
        prop_assume!(len >= ranks as usize);
        for (rank, world) in shards(ranks) {
            let sampler = || DistributedSampler::new(len, rank, world).unwrap().seed(seed).drop_last(cut);
            let loader = DataLoader::builder(numbers(len)).sampler(sampler()).batch_size(batch).drop_last(drop_last);
            let loader = loader.num_workers(workers).build().unwrap();
            for epoch in 0..3 {
                let mut torch = sampler();
                torch.set_epoch(epoch);
                let mut expected: Vec<Vec<usize>> = torch.indices().chunks(batch).map(<[usize]>::to_vec).collect();
                expected.retain(|chunk| !drop_last || chunk.len() == batch);
                prop_assert_eq!(loader.epoch(), epoch);
                prop_assert_eq!(loader.len(), expected.len());
                prop_assert_eq!(loader.iter().len(), expected.len());
                loader.set_epoch(epoch);
                prop_assert_eq!(loader.iter().map(Result::unwrap).collect::<Vec<_>>(), expected);
            }
        }
    }

    /// However often the world changes in an epoch, each time from a position that was written and read.
    #[test]
    fn no_sample_is_lost_or_repeated_by_resuming_in_another_world(
        len in 9..200_usize, batch in 1..6_usize, shuffle in any::<bool>(), own in any::<bool>(), repeat in any::<bool>(),
        worlds in prop::collection::vec((1..9_u32, 0..5_usize), 1..6), workers in 0..3_usize,
    ) {
        let tail = if repeat { Tail::Repeat } else { Tail::Split };
        let loader = |rank: Rank, world: WorldSize| {
            let loader = DataLoader::builder(numbers(len)).shard(rank, world).batch_size(batch).num_workers(workers);
            let loader = loader.shuffle(shuffle && !own).seed(3).tail(tail);
            let backwards = from_fn(move |_| (0..len).rev().collect());
            if own { loader.sampler(backwards) } else { loader }.build().unwrap()
        };
        let mut seen = vec![0; len];
        let mut position = loader(Rank::MAIN, WorldSize::ONE).position();
        for (ranks, steps) in worlds.into_iter().chain([(2, usize::MAX)]) {
            let positions = shards(ranks).map(|(rank, world)| {
                let loader = loader(rank, world);
                loader.resume(&position).unwrap();
                // The iterator runs ahead of the loop, and is dropped: that must not count.
                let batches = loader.iter().take(steps).map(Result::unwrap);
                batches.flatten().for_each(|item| seen[item] += 1);
                let written = postcard::to_stdvec(&loader.position()).unwrap();
                postcard::from_bytes::<phalanx_data::Position>(&written).unwrap()
            });
            let positions: Vec<_> = positions.collect();
            prop_assert!(positions.iter().all(|one| *one == positions[0]));
            position = positions[0].clone();
            if position.epoch() == 1 {
                break;
            }
        }
        prop_assert_eq!(position.epoch(), 1);
        let repeated = seen.iter().sum::<usize>() - len;
        prop_assert!(seen.iter().all(|times| *times >= 1) && repeated < if repeat { 8 } else { 1 }, "{seen:?}");
    }

    /// Elastic steps: ranks die in them, and their samples come again.
    #[test]
    fn each_sample_counts_once_when_ranks_die_in_a_step(
        len in 9..120_usize, batch in 1..5_usize, workers in 0..3_usize,
        deaths in prop::collection::vec(prop::option::of(0..4_u32), 1..12),
    ) {
        let mut ranks = 5;
        let loaders: Vec<_> = shards(ranks)
            .map(|shard| {
                let sampler = ElasticSampler::new(len).seed(1);
                let loader = DataLoader::builder(numbers(len)).sampler(sampler).shard(shard.0, shard.1);
                loader.batch_size(batch).num_workers(workers).build().unwrap()
            })
            .collect();
        let mut alive: Vec<_> = loaders.iter().map(DataLoader::iter).collect();
        let mut seen = vec![0; len];
        for death in deaths.into_iter().chain(std::iter::repeat(None)) {
            let got: Vec<_> = alive.iter_mut().map(|batches| batches.next().transpose().unwrap()).collect();
            if got.iter().all(Option::is_none) {
                break;
            }
            let missing: Vec<Rank> = death.filter(|rank| *rank < ranks && ranks > 1).map(Rank::new).into_iter().collect();
            for (rank, items) in got.into_iter().enumerate() {
                if !missing.contains(&Rank::new(rank as u32)) {
                    items.unwrap().into_iter().for_each(|item| seen[item] += 1);
                }
            }
            if let Some(dead) = missing.first() {
                drop(alive.remove(dead.index()));
                ranks -= 1;
            }
            for (rank, batches) in alive.iter_mut().enumerate() {
                batches.regroup(&missing, Rank::new(rank as u32), world(ranks));
            }
        }
        prop_assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
    }
}

#[test]
fn batches_come_in_order_whatever_the_timing_of_workers() {
    let slow = Function(60, |index: usize| {
        // Early batches are the slow ones.
        std::thread::sleep(Duration::from_micros(4000 / (index as u64 + 1)));
        Ok(index)
    });
    let loader = DataLoader::builder(slow).batch_size(3).num_workers(5).prefetch_factor(4).build().unwrap();
    let all: Vec<usize> = loader.iter().flat_map(Result::unwrap).collect();
    assert_eq!(all, numbers(60).items());
}

#[test]
fn an_epoch_cannot_be_forgotten() {
    let loader = DataLoader::builder(numbers(50)).shuffle(true).seed(9).build().unwrap();
    let three = passes(&loader, 3);
    assert!(three[0] != three[1] && three[1] != three[2]);
    // A loop that breaks off a pass gets the next epoch's.
    let again = DataLoader::builder(numbers(50)).shuffle(true).seed(9).build().unwrap();
    for pass in &three {
        assert_eq!(again.iter().next().unwrap().unwrap(), pass[0]);
    }
    assert_eq!(again.epoch(), 2);
}

#[test]
fn a_position_at_the_end_of_a_pass_is_before_the_next() {
    let loader = || DataLoader::builder(numbers(10)).batch_size(5).shuffle(true).build().unwrap();
    let first = loader();
    let mut batches = first.iter();
    batches.by_ref().take(2).for_each(drop);
    let all_but_the_end = first.position();
    assert_eq!((all_but_the_end.epoch(), all_but_the_end.consumed()), (0, 10));
    assert!(batches.next().is_none() && batches.next().is_none());
    assert_eq!((first.position().epoch(), first.position().consumed()), (1, 0));
    // Resumed there, the pass is over at once, and the loop counts its epochs right.
    let second = loader();
    second.resume(&all_but_the_end).unwrap();
    assert_eq!((second.iter().count(), second.epoch(), second.iter().count()), (0, 1, 2));
}

#[test]
fn a_loop_that_sets_each_epoch_goes_on_where_it_was_cut_off() {
    let loader = || DataLoader::builder(numbers(20)).batch_size(2).shuffle(true).seed(3).build().unwrap();
    let expected = passes(&loader(), 2);
    let first = loader();
    let seen: Vec<Vec<usize>> = first.iter().take(4).map(Result::unwrap).collect();
    assert_eq!(seen, expected[0][..4]);
    let resumed = || {
        let resumed = loader();
        resumed.resume(&first.position()).unwrap();
        resumed
    };

    let second = resumed();
    second.set_epoch(0);
    second.set_epoch(0);
    assert_eq!(passes(&second, 1)[0], expected[0][4..]);
    // The pass is over, and comes again from its beginning. So does one that was broken off.
    second.set_epoch(0);
    assert_eq!(second.iter().next().unwrap().unwrap(), expected[0][0]);
    second.set_epoch(0);
    assert_eq!(passes(&second, 1)[0], expected[0]);

    let other = resumed();
    other.set_epoch(1);
    assert_eq!((other.position().epoch(), other.position().consumed()), (1, 0));
    assert_eq!(passes(&other, 1)[0], expected[1]);
    let back = resumed();
    back.set_epoch(1);
    back.set_epoch(0);
    assert_eq!(passes(&back, 1)[0], expected[0], "another epoch gives up the position");
}

#[test]
fn an_older_iterator_does_not_move_the_position() {
    let loader = DataLoader::builder(numbers(10)).build().unwrap();
    let (mut older, mut newer) = (loader.iter(), loader.iter());
    assert_eq!(newer.next().unwrap().unwrap(), [0]);
    older.by_ref().for_each(drop);
    assert_eq!((loader.position().epoch(), loader.position().consumed()), (1, 1));
}

#[test]
fn a_position_of_something_else_is_refused() {
    let of = |len: usize, seed| DataLoader::builder(numbers(len)).shuffle(true).seed(seed).build().unwrap();
    let loader = of(10, 1);
    loader.iter().next();
    for (other, words) in
        [(of(11, 1), "10 samples"), (of(10, 2), "another order, of samples 10, shuffle true, seed 1")]
    {
        let error = other.resume(&loader.position()).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains(words), "{error}");
    }
    let own = DataLoader::builder(numbers(10)).sampler(from_fn(|_| vec![1, 2])).build().unwrap();
    let error = own.resume(&loader.position()).unwrap_err().to_string();
    assert!(error.contains("10 samples in the epoch; now there are 2"), "{error}");
    // Both take the places in their order, which is not that of the items.
    let own = DataLoader::builder(numbers(10)).sampler(from_fn(|_| (0..10).rev().collect())).build().unwrap();
    own.iter().next();
    let plain = DataLoader::builder(numbers(10)).build().unwrap();
    let error = plain.resume(&own.position()).unwrap_err().to_string();
    assert!(error.contains("another order, by another sampler"), "{error}");
}

#[test]
fn a_position_within_a_pass_over_other_items_is_refused() {
    // As many, but others.
    let of = |first: usize| {
        let items = numbers(20).subset((first..first + 10).collect::<Vec<_>>()).unwrap();
        DataLoader::builder(items).shuffle(true).batch_size(5).build().unwrap()
    };
    let first = of(0);
    let mut batches = first.iter();
    batches.next().unwrap().unwrap();
    of(0).resume(&first.position()).unwrap();
    let error = of(5).resume(&first.position()).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("over another data set"), "{error}");
    // Between two passes nothing of the next one's items was taken.
    assert_eq!(batches.count(), 1);
    of(5).resume(&first.position()).unwrap();
}

#[test]
fn a_position_in_the_items_own_order_is_one_for_any_seed() {
    let of = |seed: u64| {
        let sampler = DistributedSampler::new(10, Rank::MAIN, WorldSize::ONE).unwrap();
        let sampler = sampler.shuffle(false).seed(seed);
        [
            DataLoader::builder(numbers(10)).sampler(sampler).build().unwrap(),
            DataLoader::builder(numbers(10)).seed(seed).build().unwrap(),
        ]
    };
    for (first, other) in of(1).into_iter().zip(of(2)) {
        first.iter().next();
        other.resume(&first.position()).unwrap();
        assert_eq!(other.iter().next().unwrap().unwrap(), [1]);
    }
}

#[test]
fn a_sampler_may_ask_its_loader() {
    struct Asking(Arc<OnceLock<DataLoader<InMemory<usize>>>>);
    impl Sampler for Asking {
        fn order(&self, _: u64) -> Vec<usize> {
            let items =
                self.0.get().map_or(10, |loader| loader.position().consumed() + loader.dataset().len());
            (0..items.min(10)).collect()
        }
    }
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let place = Arc::new(OnceLock::new());
        let loader = DataLoader::builder(numbers(10)).sampler(Asking(place.clone())).build().unwrap();
        assert!(place.set(loader.clone()).is_ok());
        loader.iter().next();
        let position = loader.position();
        loader.resume(&position).unwrap();
        loader.check_ranks(&ProcessGroup::alone().unwrap()).unwrap();
        tell.send((loader.items(), loader.len(), loader.iter().count())).unwrap();
    });
    assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), (10, 10, 9));
}

#[test]
fn an_order_of_one_s_own_may_change_its_length() {
    struct Growing;
    impl Sampler for Growing {
        fn order(&self, epoch: u64) -> Vec<usize> {
            (0..4 * (epoch as usize + 1)).rev().collect()
        }
    }
    for (rank, world) in shards(2) {
        let loader = || {
            let loader = DataLoader::builder(numbers(12)).sampler(Growing).shard(rank, world);
            loader.batch_size(2).num_workers(1).build().unwrap()
        };
        let first = loader();
        assert_eq!((first.len(), first.iter().count(), first.len()), (1, 1, 2));
        let position = first.position();
        assert_eq!(first.iter().next().unwrap().unwrap(), [7 - rank.index(), 5 - rank.index()]);
        let (between, within) = (loader(), loader());
        between.resume(&position).unwrap();
        within.resume(&first.position()).unwrap();
        assert_eq!((between.iter().len(), within.iter().len()), (2, 1));
        assert_eq!((between.epoch(), between.position().consumed()), (1, 0));
    }
    let outside = DataLoader::builder(numbers(3)).sampler(Growing).build().unwrap();
    let error = outside.iter().next().unwrap().unwrap_err();
    assert!(error.to_string().contains("no item 3"), "{error}");
}

#[test]
fn a_position_knows_the_order_of_a_sampler_again() {
    let of = |seed: usize| {
        let order =
            from_fn(move |epoch| (0..10).map(|place| (place * 7 + seed + epoch as usize) % 10).collect());
        DataLoader::builder(numbers(10)).sampler(order).batch_size(2).build().unwrap()
    };
    let first = of(1);
    let mut batches = first.iter();
    batches.next().unwrap().unwrap();
    let position = first.position();
    of(1).resume(&position).unwrap();
    let error = of(2).resume(&position).unwrap_err();
    assert!(
        error.is_invalid_argument() && error.to_string().contains("of epoch 0 in another one"),
        "{error}"
    );
    // Between two epochs nothing of the next one's order was taken.
    assert_eq!(batches.count(), 4);
    of(2).resume(&first.position()).unwrap();
    // Of a version that did not know it.
    let mut old = ElasticSampler::new(10).shuffle(false).tail(Tail::Repeat);
    old.next_batch(2, Rank::MAIN, WorldSize::ONE).unwrap();
    let old: phalanx_data::Position =
        postcard::from_bytes(&postcard::to_stdvec(&(old, 10_u64)).unwrap()).unwrap();
    let resumed = of(2);
    resumed.resume(&old).unwrap();
    assert_eq!(resumed.iter().next().unwrap().unwrap(), [6, 3]);
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let loader = |len: usize| DataLoader::builder(numbers(len));
    let sampler = |len| DistributedSampler::new(len, Rank::new(1), world(2)).unwrap();
    let refused = [
        (loader(4).batch_size(0).build(), "batch_size is 0"),
        (loader(4).num_workers(100_000).build(), "num_workers"),
        (loader(4).prefetch_factor(0).build(), "prefetch_factor"),
        (loader(4).timeout(Duration::ZERO).build(), "Duration::MAX"),
        (loader(4).sampler(sampler(5)).build(), "for 5 items"),
        (loader(4).sampler(sampler(4)).shard(Rank::MAIN, world(2)).build(), "the same group"),
        (loader(4).shard(Rank::new(2), world(2)).build(), "2"),
        (loader(0).shuffle(true).build(), "no item"),
        (loader(4).sampler(ElasticSampler::new(4).shuffle(false)).shuffle(true).build(), "both say"),
        (loader(4).shuffle(true).sampler(from_fn(|_| vec![0])).build(), "both say"),
    ];
    for (outcome, words) in refused {
        let error = outcome.unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains(words), "{error}");
    }
    assert!(loader(4).sampler(sampler(4)).shard(Rank::new(1), world(2)).build().is_ok());
    assert_eq!(loader(4).num_workers(1).timeout(Duration::MAX).build().unwrap().iter().count(), 4);
}

#[test]
fn slices_are_what_a_rank_gets_in_parts() {
    for (rank, world) in shards(2) {
        let loader = DataLoader::builder(numbers(21)).shuffle(true).seed(8).shard(rank, world).batch_size(4);
        let loader = loader.num_workers(1).build().unwrap();
        assert_eq!(loader.items(), 11);
        let (front, back) = (loader.slice(0..5), loader.slice(5..99));
        assert_eq!((front.items(), front.len(), back.items(), back.len()), (5, 2, 6, 2));
        for _ in 0..3 {
            let all: Vec<usize> = loader.iter().flat_map(Result::unwrap).collect();
            let parts = front.iter().chain(back.iter()).flat_map(Result::unwrap);
            assert_eq!(parts.collect::<Vec<_>>(), all);
        }
        let doubled = front.with_collate(|items| Ok(items.len() * 2));
        assert_eq!(doubled.iter().map(Result::unwrap).collect::<Vec<_>>(), [8, 2]);
        let (from, to) = (3, 2);
        assert_eq!((doubled.epoch(), front.epoch(), loader.slice(from..to).iter().count()), (4, 3, 0));
    }
}

/// 21 items of two ranks are two full steps of batches of 4, and 5 items that are left out.
#[test]
fn items_and_slices_are_those_of_the_passes_with_every_tail() {
    for tail in [Tail::Split, Tail::Drop, Tail::Repeat, Tail::Truncate] {
        for (rank, world) in shards(2) {
            let loader = DataLoader::builder(numbers(21)).shuffle(true).shard(rank, world).batch_size(4);
            let loader = loader.tail(tail).build().unwrap();
            let slices = (loader.slice(0..3), loader.slice(3..99));
            let all: Vec<usize> = loader.iter().flat_map(Result::unwrap).collect();
            assert_eq!(all.len() == 8, tail == Tail::Drop, "{tail:?}");
            let parts: Vec<usize> = slices.0.iter().chain(slices.1.iter()).flat_map(Result::unwrap).collect();
            assert_eq!((loader.items(), parts), (all.len(), all), "{tail:?}, rank {rank}");
        }
    }
}

#[test]
fn ranks_that_load_something_else_are_told_on_every_rank() {
    run(2, Fabric::InProcess, |group| {
        let (rank, second) = (group.rank(), usize::from(!group.rank().is_main()));
        let sampler =
            |seed: u64, len| DistributedSampler::for_group(len, &group).seed(seed).shuffle(len != 7);
        let loader = |seed, len| DataLoader::builder(numbers(len)).sampler(sampler(seed, len));
        let weighted = |seed: usize| {
            let order =
                from_fn(move |epoch| (0..10).map(|place| (place * 7 + seed + epoch as usize) % 10).collect());
            DataLoader::builder(numbers(10)).sampler(order).group(&group)
        };
        for alike in [loader(3, 10), loader(3, 7), loader(3, 0), weighted(1)] {
            let loader = alike.batch_size(2).num_workers(second).build().unwrap();
            loader.check_ranks(&group).unwrap();
            loader.iter().next();
            loader.check_ranks(&group).unwrap();
        }
        let cases = [
            (loader(second as u64, 10), "seed 1"),
            (loader(3, 10 + second), "11 items"),
            (loader(3, 10).seed(second as u64), "the loader's seed 1"),
            (loader(3, 10).batch_size(1 + second), "batch_size 2"),
            (loader(3, 10).drop_last(second == 1), "drop_last true"),
            (weighted(second), "digest"),
            (weighted(1).tail([Tail::Repeat, Tail::Drop][second]), "tail Drop"),
            // Each has all items, or the same part.
            (DataLoader::builder(numbers(10)), "part of rank 0 of 1, and there are 2 ranks"),
            (DataLoader::builder(numbers(10)).shard(Rank::MAIN, world(2)), "the part of rank 0 of 2"),
        ];
        for (loader, said) in cases {
            let error = loader.build().unwrap().check_ranks(&group).unwrap_err();
            assert!(error.is_mismatch() && error.remedy().is_some(), "{error}");
            assert!(error.to_string().contains(said), "{said} on rank {rank}: {error}");
        }
        // As many items, which one rank has drawn otherwise.
        let split = |indices: [usize; 4]| {
            DataLoader::builder(numbers(10).subset(indices).unwrap()).group(&group).build().unwrap()
        };
        split([1, 2, 3, 4]).check_ranks(&group).unwrap();
        let error = split([1, 2, 3, 4 + second]).check_ranks(&group).unwrap_err();
        assert!(error.to_string().contains("4 items (fingerprint"), "{error}");
        // One rank is a batch ahead.
        let loader = loader(3, 10).build().unwrap();
        let mut batches = loader.iter();
        (0..second).for_each(|_| drop(batches.next()));
        let error = loader.check_ranks(&group).unwrap_err();
        assert!(error.to_string().contains("epoch 0 behind 2 items"), "{error}");
        assert!(group.failure().is_none());
    });
}

#[test]
fn an_empty_data_set_has_no_batches() {
    for (rank, world) in shards(3) {
        let loader = DataLoader::builder(numbers(0)).shard(rank, world).num_workers(2).build().unwrap();
        assert_eq!((loader.len(), loader.iter().count(), loader.epoch()), (0, 0, 1));
        let error = DataLoader::builder(numbers(0)).sampler(from_fn(|_| vec![0])).build().unwrap();
        assert!(error.iter().next().unwrap().is_err());
    }
}
