//! What a loader gives, and in which order.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use phalanx::sampler::{DistributedSampler, ElasticSampler, Tail};
use phalanx::testing::{Fabric, run};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};
use phalanx_data::{
    DataLoader, Dataset, InMemory, LoadError, Sampler, WorkerInfo, from_fn, set_item, worker_info,
};
use proptest::prelude::*;

use crate::support::{Function, ThreadCount, numbers, shards, world};

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
fn errors_and_panics_come_with_the_index_in_their_place() {
    for workers in [0, 1, 3] {
        let flawed = Function(12, |index: usize| match index {
            4 => Err(Error::other("broken file").with_remedy("copy it again")),
            7 => panic!("index {index} is odd"),
            _ => Ok(index),
        });
        let loader = DataLoader::builder(flawed).batch_size(3).num_workers(workers).build().unwrap();
        let all: Vec<Result<Vec<usize>, LoadError>> = loader.iter().collect();
        assert_eq!(all.len(), 4);
        assert_eq!((all[0].as_ref().unwrap(), all[3].as_ref().unwrap()), (&vec![0, 1, 2], &vec![9, 10, 11]));
        let (error, panic) = (all[1].as_ref().unwrap_err(), all[2].as_ref().unwrap_err());
        assert_eq!(
            (error.index(), error.is_panic(), panic.index(), panic.is_panic()),
            (Some(4), false, Some(7), true)
        );
        let text = Error::from(error.clone()).to_string();
        for word in ["item 4", "worker", "rank 0", "broken file (copy it again)"] {
            assert!(text.contains(word), "{text}");
        }
        assert!(panic.to_string().contains("panicked: index 7 is odd"), "{panic}");
        assert_eq!(error.worker().unwrap().id, if workers == 3 { 1 } else { 0 });
        assert_eq!(loader.epoch(), 1, "the pass has come to its end");
    }
}

#[test]
fn a_failed_collate_names_the_items_of_its_batch() {
    for workers in [0, 2] {
        let loader = DataLoader::builder(numbers(40)).batch_size(20).num_workers(workers);
        let loader = loader.collate(|items| match items[0] {
            0 => Err(Error::other("shapes differ")),
            _ => panic!("no memory"),
        });
        let all: Vec<Result<(), LoadError>> = loader.build().unwrap().iter().collect();
        let (error, panic) = (all[0].as_ref().unwrap_err(), all[1].as_ref().unwrap_err());
        assert_eq!((error.index(), error.indices().len(), panic.is_panic()), (None, 20, true));
        assert!(error.to_string().contains("items [0, 1, 2, 3, 4, 5, 6, 7, ..]"), "{error}");
        assert!(error.to_string().contains("shapes differ") && panic.to_string().contains("no memory"));
    }
}

#[test]
fn a_batch_is_made_of_one_item_after_the_other() {
    struct Counted(usize, Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::SeqCst);
        }
    }
    for workers in [0, 1] {
        let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now, peak) = (held.clone(), most.clone());
        let items = Function(50, move |index| {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok(Counted(index, now.clone()))
        });
        let loader = DataLoader::builder(items).batch_size(20).num_workers(workers).collate_each(
            Vec::with_capacity,
            |batch: &mut Vec<usize>, item| {
                assert!(worker_info().is_some());
                match item.0 {
                    23 => return Err(Error::other("another shape")),
                    45 => panic!("no memory"),
                    _ => batch.push(item.0),
                }
                Ok(())
            },
        );
        let loader = loader.build().unwrap();
        let all: Vec<Result<Vec<usize>, LoadError>> = loader.iter().collect();
        assert_eq!((all.len(), all[0].as_ref().unwrap()), (3, &numbers(20).items().to_vec()));
        assert_eq!(all[0].as_ref().unwrap().capacity(), 20);
        let (error, panic) = (all[1].as_ref().unwrap_err(), all[2].as_ref().unwrap_err());
        assert_eq!((error.indices(), panic.indices(), panic.is_panic()), (&[23][..], &[45][..], true));
        assert!(error.to_string().contains("the collate function, with the items [23]"), "{error}");
        assert_eq!(
            (most.load(Ordering::SeqCst), held.load(Ordering::SeqCst)),
            (1, 0),
            "no two items at once"
        );
    }
}

#[test]
fn a_failed_batch_is_loaded_again_by_whoever_resumes() {
    let loader = || {
        let flawed = Function(6, |index: usize| if index == 2 { Err(Error::other("no")) } else { Ok(index) });
        DataLoader::builder(flawed).batch_size(2).num_workers(2).build().unwrap()
    };
    let first = loader();
    let mut batches = first.iter();
    assert!(batches.next().unwrap().is_ok() && batches.next().unwrap().is_err());
    assert_eq!(first.position().consumed(), 2);
    // A loop that goes on has chosen to do without it.
    assert_eq!(batches.next().unwrap().unwrap(), [4, 5]);
    assert_eq!(first.position().consumed(), 6);
}

#[test]
fn a_rank_that_goes_on_without_a_failed_batch_stays_with_the_others() {
    let loader = |rank: u32, bad: usize| {
        let items = Function(30, move |index| match index == bad {
            true => Err(Error::aborted("a bad item")),
            false => Ok(index),
        });
        let sampler = ElasticSampler::new(30).shuffle(false);
        DataLoader::builder(items)
            .sampler(sampler)
            .shard(Rank::new(rank), world(3))
            .batch_size(2)
            .build()
            .unwrap()
    };
    let (first, second) = (loader(0, 9), loader(1, usize::MAX));
    let (mut ours, mut theirs) = (first.iter(), second.iter());
    for step in 0..4 {
        let (our, their) = (ours.next().unwrap(), theirs.next().unwrap());
        // The second step has 6 to 11 of all ranks; rank 2 dies in it, with 8 and 11.
        let (missing, ranks) =
            if step == 1 { (vec![Rank::new(2)], 2) } else { (vec![], if step == 0 { 3 } else { 2 }) };
        assert_eq!(our.is_err(), step == 1);
        if step == 2 {
            assert_eq!((our.unwrap(), their.unwrap()), (vec![8, 12], vec![11, 13]));
        }
        ours.regroup(&missing, Rank::MAIN, world(ranks));
        theirs.regroup(&missing, Rank::new(1), world(ranks));
        assert_eq!(first.position(), second.position(), "step {step}");
    }
}

#[test]
fn no_thread_outlives_its_iterator() {
    for (taken, items) in [(0, 400), (1, 400), (7, 400), (1000, 400), (3, 4)] {
        let count = ThreadCount::default();
        let entering = count.clone();
        let loader = DataLoader::builder(numbers(items)).batch_size(2).num_workers(6).prefetch_factor(8);
        let loader = loader.worker_init(move |_| {
            entering.enter();
            Ok(())
        });
        let loader = loader.build().unwrap();
        let mut batches = loader.iter();
        batches.by_ref().take(taken).for_each(|batch| drop(batch.unwrap()));
        drop(batches);
        assert_eq!(count.alive(), 0, "{taken} of {items}");
    }
}

#[test]
fn threads_end_when_the_loop_panics_and_in_the_middle_of_a_batch() {
    let count = ThreadCount::default();
    let (entering, (items, read)) = (count.clone(), channel::<()>());
    let items = Mutex::new(items);
    // A batch that would take an hour.
    let slow = Function(1 << 20, move |index: usize| {
        std::thread::sleep(Duration::from_millis(2));
        let _ = items.lock().unwrap().send(());
        Ok(index)
    });
    let loader = DataLoader::builder(slow).batch_size(1 << 20).num_workers(2);
    let loader = loader.worker_init(move |_| {
        entering.enter();
        Ok(())
    });
    let loader = loader.build().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let _batches = loader.iter();
        read.recv().unwrap();
        panic!("in the loop");
    }));
    assert!(panic.is_err());
    assert_eq!(count.alive(), 0);
}

#[test]
fn a_slow_loop_holds_no_more_batches_than_it_said() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    for (workers, prefetch) in [(0, 2), (1, 1), (3, 2)] {
        let (held, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let peak = most.clone();
        let counted = Function(240, move |_| {
            peak.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok(Counted(held.clone()))
        });
        let loader =
            DataLoader::builder(counted).batch_size(4).num_workers(workers).prefetch_factor(prefetch);
        for batch in loader.build().unwrap().iter() {
            std::thread::sleep(Duration::from_millis(1));
            drop(batch);
        }
        let most = most.load(Ordering::SeqCst);
        // Those ahead, and the loop's own.
        assert!(most <= 4 * (workers * prefetch + 1), "{most} items with {workers} workers");
        assert!(workers == 0 || most > 4, "{workers} workers stayed at {most}: nothing was loaded ahead");
    }
}

#[test]
fn a_batch_that_does_not_come_is_an_error_in_time() {
    let (free, blocked) = channel::<()>();
    let blocked = Mutex::new(blocked);
    let stuck = Function(4, move |index: usize| {
        if index == 2 {
            let _ = blocked.lock().unwrap().recv();
        }
        Ok(index)
    });
    let loader =
        DataLoader::builder(stuck).num_workers(1).prefetch_factor(3).timeout(Duration::from_millis(300));
    let loader = loader.build().unwrap();
    let mut batches = loader.iter();
    let begin = Instant::now();
    // A slow machine may be late with the others too.
    let error = batches.by_ref().find_map(Result::err).unwrap();
    // A pool that is dropped waits 5 s for its workers: not when it is known that one is late.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(error.to_string().contains("timeout") && error.indices().len() == 1, "{error}");
    assert!(error.cause().is_timeout() && !error.cause().is_aborted(), "{error}");
    let text = error.to_string();
    let error = Error::from(error);
    assert!(error.is_timeout() && error.to_string() == text, "{error}");
    assert!(batches.next().is_none());
    drop(free);
    assert_eq!(loader.position().epoch(), 0, "what did not come was not seen");
}

#[test]
fn random_seeds_per_rank() {
    let seeds = |workers: usize, rank: u32, epochs: u64| {
        let all = Arc::new(Mutex::new(Vec::new()));
        let noted = all.clone();
        let loader =
            DataLoader::builder(numbers(40)).num_workers(workers).seed(5).shard(Rank::new(rank), world(2));
        let loader = loader.worker_init(move |worker| {
            assert_eq!(worker_info(), Some(*worker));
            noted.lock().unwrap().push((worker.epoch, worker.id, worker.seed));
            Ok(())
        });
        let loader = loader.build().unwrap();
        (0..epochs).for_each(|_| loader.iter().for_each(|batch| drop(batch.unwrap())));
        let mut all = all.lock().unwrap().clone();
        all.sort_unstable();
        all
    };
    let two = seeds(3, 0, 2);
    let places: Vec<_> = two.iter().map(|(epoch, id, _)| (*epoch, *id)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    assert_eq!(two, seeds(3, 0, 2), "the same on every run");
    let mut seeds: Vec<u64> = [two, seeds(3, 1, 2)].concat().into_iter().map(|(.., seed)| seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 12);
}

#[test]
fn an_item_is_augmented_alike_whoever_loads_it() {
    let noise = |ranks: u32, workers: usize| {
        let mut all: Vec<(usize, u64)> = shards(ranks)
            .flat_map(|(rank, world)| {
                let noisy = numbers(24).map(|item| Ok((item, worker_info().unwrap().item_seed)));
                let loader =
                    DataLoader::builder(noisy).shuffle(true).seed(4).shard(rank, world).batch_size(2);
                let loader = loader.num_workers(workers).build().unwrap();
                loader.iter().flat_map(Result::unwrap).collect::<Vec<_>>()
            })
            .collect();
        all.sort_unstable();
        all
    };
    assert_eq!(noise(1, 0), noise(3, 2));
    assert_eq!(noise(1, 0), noise(2, 1));
}

/// As samplers with weights and replacement give it. Equal copies would teach no more than one.
#[test]
fn an_item_that_comes_several_times_draws_anew_each_time_whoever_loads_it() {
    let order: [usize; 8] = [3, 1, 3, 3, 0, 1, 3, 2];
    let loader = |rank: Rank, of: WorldSize, workers: usize| {
        let noisy = numbers(4).map(|item| Ok((item, worker_info().unwrap().item_seed)));
        let loader = DataLoader::builder(noisy).sampler(from_fn(move |_| order.to_vec())).seed(4);
        loader.shard(rank, of).num_workers(workers).build().unwrap()
    };
    let noise = |ranks: u32, workers: usize| {
        let of_rank =
            |(rank, of)| loader(rank, of, workers).iter().flat_map(Result::unwrap).collect::<Vec<_>>();
        let mut all: Vec<(usize, u64)> = shards(ranks).flat_map(of_rank).collect();
        all.sort_unstable();
        all
    };
    let all = noise(1, 0);
    assert_eq!(all.iter().map(|(_, seed)| *seed).collect::<HashSet<u64>>().len(), 8);
    assert!(all == noise(1, 3) && all == noise(2, 1) && all == noise(4, 2));

    let first = loader(Rank::MAIN, world(1), 0);
    let mut batches = first.iter();
    let mut whole: Vec<(usize, u64)> = batches.by_ref().take(3).flat_map(Result::unwrap).collect();
    let resumed = loader(Rank::MAIN, world(1), 2);
    resumed.resume(&first.position()).unwrap();
    whole.extend(resumed.iter().flat_map(Result::unwrap));
    whole.sort_unstable();
    assert_eq!(whole, all);

    // Trainers give each rank a slice of a loader: an item has come before also if that was in another slice.
    for ranks in [1, 2] {
        let of_rank = |(rank, of)| {
            let loader = loader(rank, of, 1);
            let parts = [loader.slice(0..3), loader.slice(3..99).slice(0..1), loader.slice(4..99)];
            parts.iter().flat_map(DataLoader::iter).flat_map(Result::unwrap).collect::<Vec<_>>()
        };
        let mut parts: Vec<(usize, u64)> = shards(ranks).flat_map(of_rank).collect();
        parts.sort_unstable();
        assert_eq!(parts, all, "{ranks} ranks");
    }

    // The first time it is the seed that the item has in any order.
    let once = numbers(4).map(|item| Ok((item, worker_info().unwrap().item_seed)));
    let once = DataLoader::builder(once).seed(4).build().unwrap();
    assert!(once.iter().flat_map(Result::unwrap).all(|item| all.contains(&item)));
}

/// There are copies because there are several ranks, and no seed depends on the number of ranks.
#[test]
fn an_item_that_fills_up_the_last_step_has_the_seed_of_the_one_that_it_repeats() {
    let of_rank = |(rank, of)| {
        let noisy = numbers(5).map(|item| Ok((item, worker_info().unwrap().item_seed)));
        let loader = DataLoader::builder(noisy).sampler(from_fn(|_| vec![3, 1, 3, 0, 2])).seed(4);
        let loader = loader.shard(rank, of).build().unwrap();
        loader.iter().flat_map(Result::unwrap).collect::<Vec<_>>()
    };
    let once: Vec<(usize, u64)> = shards(1).flat_map(of_rank).collect();
    let [first, second, third, ..] = once[..] else { panic!("{once:?}") };
    assert!(first.0 == third.0 && first.1 != third.1, "two of one order: {once:?}");
    let ranks: Vec<Vec<(usize, u64)>> = shards(4).map(of_rank).collect();
    // Ranks 1, 2 and 3 get the order's first three again.
    let last: Vec<(usize, u64)> = ranks.iter().map(|rank| rank[1]).collect();
    assert_eq!(last, [once[4], first, second, third]);
}

#[test]
fn collate_functions_draw_from_the_seeds_of_their_items() {
    let seed = || worker_info().unwrap().item_seed;
    let items = move || numbers(24).map(move |_| Ok(seed()));
    let builder = move |workers: usize| {
        DataLoader::builder(items()).shuffle(true).seed(4).batch_size(4).num_workers(workers)
    };
    // A batch is its own seed, and for each item those in the data set and in the collate function.
    type Seeds = (u64, Vec<[u64; 2]>);
    let all_at_once = |workers| {
        let collate = move |items: Vec<u64>| {
            Ok((seed(), items.into_iter().map(|item| [item, item]).collect::<Vec<_>>()))
        };
        builder(workers).collate(collate).build().unwrap()
    };
    let one_by_one = |workers| {
        let add = move |batch: &mut Seeds, item: u64| {
            batch.1.push([item, seed()]);
            Ok(())
        };
        builder(workers).collate_each(move |_| (seed(), Vec::new()), add).build().unwrap()
    };
    for each in [false, true] {
        let loader = |workers| if each { one_by_one(workers) } else { all_at_once(workers) };
        let first = loader(0);
        let mut batches = first.iter();
        let mut all: Vec<Seeds> = batches.by_ref().take(2).map(Result::unwrap).collect();
        let resumed = loader(2);
        resumed.resume(&first.position()).unwrap();
        let rest: Vec<Seeds> = batches.map(Result::unwrap).collect();
        assert_eq!(rest, resumed.iter().map(Result::unwrap).collect::<Vec<_>>());
        all.extend(rest);
        assert_eq!(all, loader(2).iter().map(Result::unwrap).collect::<Vec<_>>());

        let items = || all.iter().flat_map(|(_, items)| items);
        assert!(items().all(|[in_data_set, in_collate]| in_data_set == in_collate));
        let different: HashSet<u64> =
            items().map(|[item, _]| *item).chain(all.iter().map(|(batch, _)| *batch)).collect();
        assert_eq!(different.len(), 24 + 6);
        assert!(
            first.iter().map(Result::unwrap).all(|(batch, _)| !different.contains(&batch)),
            "another epoch"
        );
    }
}

#[test]
fn an_item_that_is_another_one_is_collated_with_that_one_s_seed() {
    let loader = |offset: usize| {
        let items = Function(8, move |index: usize| {
            set_item(index + offset);
            Ok(worker_info().unwrap().item_seed)
        });
        let builder = DataLoader::builder(items).batch_size(4);
        let add = |batch: &mut Vec<[u64; 2]>, item: u64| {
            batch.push([item, worker_info().unwrap().item_seed]);
            Ok(())
        };
        builder.collate_each(Vec::with_capacity, add).build().unwrap()
    };
    for offset in [0, 100] {
        let items: Vec<[u64; 2]> = loader(offset).iter().flat_map(Result::unwrap).collect();
        assert!(items.iter().all(|[in_data_set, in_collate]| in_data_set == in_collate), "{items:?}");
    }
}

#[test]
fn a_worker_that_cannot_be_readied_says_so_in_each_of_its_batches() {
    let loader = DataLoader::builder(numbers(4)).num_workers(2);
    let loader = loader.worker_init(|worker| match worker.id {
        1 => Err(Error::other("no device")),
        _ => Ok(()),
    });
    let all: Vec<_> = loader.build().unwrap().iter().collect();
    assert_eq!(all.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true, false]);
    assert!(all[1].as_ref().unwrap_err().to_string().contains("the start of a worker"));
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

/// So many items, each of which is the worker that has loaded it.
struct Workers(usize);

impl Dataset for Workers {
    type Item = WorkerInfo;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, _: usize) -> Result<WorkerInfo> {
        Ok(worker_info().unwrap())
    }
}

fn workers_of(len: usize, (rank, size): (Rank, WorldSize), workers: usize) -> DataLoader<Workers> {
    let loader = DataLoader::builder(Workers(len)).sampler(ElasticSampler::new(len)).shard(rank, size);
    loader.num_workers(workers).build().unwrap()
}

#[test]
fn workers_draw_by_the_rank_that_the_process_has_after_a_death() {
    for workers in [0, 2] {
        let (before, after) = ((Rank::new(2), world(3)), (Rank::new(1), world(2)));
        let loader = workers_of(40, before, workers);
        let mut batches = loader.iter();
        let first = batches.next().unwrap().unwrap()[0];
        assert_eq!((first.rank, first.world_size), before);
        batches.regroup(&[Rank::MAIN], after.0, after.1);
        let expected: Vec<WorkerInfo> =
            workers_of(40, after, workers).iter().flat_map(Result::unwrap).collect();
        let rest: Vec<WorkerInfo> = batches.flat_map(Result::unwrap).collect();
        assert!(!rest.is_empty());
        for worker in rest {
            assert_eq!((worker.rank, worker.world_size), after);
            let same = expected.iter().find(|other| other.id == worker.id).unwrap();
            assert_eq!(worker.seed, same.seed);
        }
    }
}

#[test]
fn workers_of_a_slice_are_those_of_the_rank() {
    let mut seeds = HashSet::new();
    for shard in shards(2) {
        let loader = workers_of(8, shard, 0);
        let own = loader.iter().next().unwrap().unwrap()[0];
        let slice = loader.slice(0..2);
        let part = slice.iter().next().unwrap().unwrap()[0];
        assert_eq!((part.rank, part.world_size), shard);
        assert_eq!(part.seed, own.seed);
        assert!(seeds.insert(own.seed));
        // A trainer says which rank it is; the items stay.
        let whole = workers_of(8, (Rank::MAIN, WorldSize::ONE), 0);
        whole.set_worker_rank(shard.0, shard.1);
        let all: Vec<WorkerInfo> = whole.with_collate(Ok).iter().flat_map(Result::unwrap).collect();
        assert!(all.iter().all(|worker| (worker.rank, worker.world_size) == shard));
        assert_eq!((all.len(), all[0].seed), (8, own.seed));
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

/// Batches that are given back are used again, and only then; in each a loader finds none of what was in it.
#[test]
fn memory_of_batches_that_are_given_back_is_used_again() {
    for workers in [0, 1, 2] {
        let made = Arc::new(AtomicUsize::new(0));
        let loader = |reuse: bool| {
            let made = made.clone();
            let loader =
                DataLoader::builder((0..120).collect::<InMemory<u32>>()).batch_size(3).num_workers(workers);
            let loader = loader.collate_each(
                move |items| {
                    made.fetch_add(1, Ordering::Relaxed);
                    Vec::with_capacity(items)
                },
                |batch: &mut Vec<u32>, item| {
                    batch.push(item);
                    Ok(())
                },
            );
            if reuse { loader.reuse(Vec::clear).build().unwrap() } else { loader.build().unwrap() }
        };
        let pass = |loader: &DataLoader<InMemory<u32>, Vec<u32>>, give_back: bool| {
            made.store(0, Ordering::Relaxed);
            let (mut batches, mut items) = (loader.iter(), Vec::new());
            while let Some(batch) = batches.next() {
                let batch = batch.unwrap();
                items.extend_from_slice(&batch);
                if give_back {
                    batches.recycle(batch);
                }
            }
            assert_eq!(items, (0..120).collect::<Vec<_>>());
            made.load(Ordering::Relaxed)
        };
        let reused = loader(true);
        // As many as there may be at a time: those ahead, two of each worker, and the loop's. The next pass goes on with them.
        let (first, second) = (pass(&reused, true), pass(&reused, true));
        assert!(first >= 1 && first + second <= 2 * workers + 1, "{first} and {second} of {workers} workers");
        assert_eq!((pass(&loader(false), true), pass(&loader(true), false)), (40, 40));
    }
}

#[test]
fn memory_that_would_not_be_used_again_is_an_error() {
    let builder = || DataLoader::builder((0..4).collect::<InMemory<u8>>());
    let add = |batch: &mut Vec<u8>, item: u8| {
        batch.push(item);
        Ok(())
    };
    let in_vain = [
        builder().reuse(Vec::clear).build(),
        builder().collate(Ok).reuse(Vec::clear).build(),
        builder().reuse(Vec::clear).collate_each(Vec::with_capacity, add).build(),
    ];
    for loader in in_vain {
        let error = loader.expect_err("it would do nothing");
        assert!(error.is_invalid_argument() && error.to_string().contains("collate_each"), "{error}");
    }
    assert!(builder().collate_each(Vec::with_capacity, add).reuse(Vec::clear).build().is_ok());
}

#[test]
fn more_items_than_memory_holds_an_order_of_are_refused_if_they_are_shuffled() {
    struct Endless;
    impl Dataset for Endless {
        type Item = usize;

        fn len(&self) -> usize {
            1 << 45
        }

        fn get(&self, index: usize) -> Result<usize> {
            Ok(index)
        }
    }
    let shuffled = DataLoader::builder(Endless).shuffle(true).build();
    let error = shuffled.expect_err("the pass would abort the process");
    assert!(error.is_invalid_argument() && error.to_string().contains("no memory for an order"), "{error}");
    let ordered = DataLoader::builder(Endless).batch_size(2).build().unwrap();
    assert_eq!(ordered.iter().next().unwrap().unwrap(), [0, 1]);
}
