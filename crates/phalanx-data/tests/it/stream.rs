//! Loaders of streams.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;
use std::time::Duration;

use phalanx::testing::{Fabric, run};
use phalanx::{Error, ProcessGroup, Rank, Result, WorldSize};
use phalanx_data::{IterableDataset, Shard, StreamBatches, StreamLoader, StreamPosition, worker_info};
use proptest::prelude::*;

use crate::support::{ThreadCount, shards, world};

type Stream<T> = Box<dyn Iterator<Item = Result<T>>>;

/// The numbers below it.
pub struct Numbers(pub u64);

impl IterableDataset for Numbers {
    type Item = u64;
    type Stream = Stream<u64>;

    fn stream(&self, shard: &Shard) -> Result<Stream<u64>> {
        Ok(Box::new(shard.part_of((0..self.0).map(Ok))))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However often ranks and workers change in a pass, also when some ranks have come to their ends.
    #[test]
    fn no_item_is_lost_or_repeated_by_resuming_elsewhere(
        len in 0..300_u64, batch in 1..7_usize, count in 6..20_usize,
        worlds in prop::collection::vec((1..6_u32, 0..4_usize, 0..9_usize), 0..5),
    ) {
        let mut seen = vec![0; len as usize];
        let mut position: Option<StreamPosition> = None;
        for (ranks, workers, steps) in worlds.into_iter().chain([(3, 2, usize::MAX)]) {
            let positions = shards(ranks).map(|(rank, world)| {
                let loader = StreamLoader::builder(Numbers(len)).shard(rank, world).shards(count);
                let loader = loader.num_workers(workers).batch_size(batch).build().unwrap();
                if let Some(position) = &position {
                    loader.resume(position).unwrap();
                }
                let batches = loader.iter().take(steps).map(Result::unwrap);
                batches.flatten().for_each(|item| seen[item as usize] += 1);
                postcard::from_bytes(&postcard::to_stdvec(&loader.position()).unwrap()).unwrap()
            });
            position = Some(StreamPosition::merged(&positions.collect::<Vec<_>>()).unwrap());
        }
        prop_assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
        prop_assert_eq!(position.unwrap().read().iter().sum::<u64>(), len);
    }
}

#[test]
fn ranks_that_divide_a_stream_in_another_way_are_told() {
    run(2, Fabric::InProcess, |group| {
        let builder = || StreamLoader::builder(Numbers(40)).group(&group);
        let second = usize::from(!group.rank().is_main());
        builder().shards(6).num_workers(second).build().unwrap().check_ranks(&group).unwrap();
        let cases = [
            (builder().num_workers(1 + second), "4 shards"),
            (builder().seed(second as u64), "seed 1"),
            (builder().shard(Rank::MAIN, WorldSize::ONE), "part of rank 0 of 1, and there are 2 ranks"),
        ];
        for (builder, said) in cases {
            let error = builder.build().unwrap().check_ranks(&group).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        }
    });
}

#[test]
fn ranks_that_begin_a_stream_at_different_places_are_told() {
    run(2, Fabric::InProcess, |group| {
        let loader =
            || StreamLoader::builder(Numbers(40)).group(&group).shards(4).batch_size(3).build().unwrap();
        let first = loader();
        first.iter().take(2).for_each(|batch| drop(batch.unwrap()));
        let position = StreamPosition::merged(&group.all_gather_object(&first.position()).unwrap()).unwrap();
        let (all, one) = (loader(), loader());
        all.resume(&position).unwrap();
        all.check_ranks(&group).unwrap();
        // Within a pass each rank has come to its own place.
        first.check_ranks(&group).unwrap();
        if group.rank().is_main() {
            one.resume(&position).unwrap();
        }
        let error = one.check_ranks(&group).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("behind 12 items"), "{error}");
    });
}

#[test]
fn each_shard_is_where_the_rank_is_that_reads_it() {
    let loader = |(rank, world): (Rank, WorldSize)| {
        let loader = StreamLoader::builder(Numbers(40)).shards(2).shard(rank, world);
        loader.batch_size(5).build().unwrap()
    };
    let loaders: Vec<_> = shards(2).map(loader).collect();
    let alone = loader((Rank::MAIN, world(1)));
    let read = |loader: &StreamLoader<Numbers>, batches: usize| {
        loader.iter().take(batches).for_each(|batch| drop(batch.unwrap()));
    };
    // Of the first shard 20 items, and of the second 10.
    read(&alone, 6);
    assert_eq!(alone.position().read(), [20, 10]);
    // Rank 0 alone goes on there, and rank 1 begins anew.
    loaders[0].resume(&alone.position()).unwrap();
    read(&loaders[0], 1);
    read(&loaders[1], 1);
    let positions: Vec<StreamPosition> = loaders.iter().map(StreamLoader::position).collect();
    for order in [[0, 1], [1, 0]] {
        let all = StreamPosition::merged(&order.map(|rank: usize| positions[rank].clone())).unwrap();
        assert_eq!(all.read(), [20, 5]);
    }
}

/// A source that says nothing until its sender is dropped.
struct Silent(Mutex<Receiver<()>>);

impl IterableDataset for Silent {
    type Item = u64;
    type Stream = Stream<u64>;

    fn stream(&self, _shard: &Shard) -> Result<Stream<u64>> {
        let _ = self.0.lock().unwrap().recv();
        Ok(Box::new(std::iter::empty()))
    }
}

#[test]
fn a_batch_that_does_not_come_is_a_time_out() {
    let (free, blocked) = channel::<()>();
    let loader = StreamLoader::builder(Silent(Mutex::new(blocked))).num_workers(1);
    let loader = loader.timeout(Duration::from_millis(50)).build().unwrap();
    let mut batches = loader.iter();
    let error = batches.next().unwrap().unwrap_err();
    assert!(error.cause().is_timeout() && Error::from(error.clone()).is_timeout(), "{error}");
    assert!(error.cause().remedy().unwrap().contains("timeout"), "{error}");
    assert!(batches.next().is_none());
    drop(free);
}

#[test]
fn workers_take_turns_until_all_have_ended() {
    // Worker 0 reads the shards 0 and 2, worker 1 the shards 1 and 3.
    let loader = StreamLoader::builder(Numbers(11)).shards(4).num_workers(2).batch_size(2).build().unwrap();
    let expected = [vec![0, 4], vec![1, 5], vec![8, 2], vec![9, 3], vec![6, 10], vec![7]];
    for epoch in 0..2 {
        let mut batches = loader.iter();
        assert_eq!(batches.by_ref().map(Result::unwrap).collect::<Vec<_>>(), expected);
        assert!(batches.next().is_none());
        assert_eq!(loader.epoch(), epoch);
    }
    let full = StreamLoader::builder(Numbers(11)).shards(4).num_workers(2).batch_size(2).drop_last(true);
    assert_eq!(full.build().unwrap().iter().count(), 5);
}

/// Fails at some of its places, in each shard.
struct Flawed;

impl IterableDataset for Flawed {
    type Item = u64;
    type Stream = Stream<u64>;

    fn stream(&self, shard: &Shard) -> Result<Stream<u64>> {
        let index = shard.index;
        if index == 3 {
            return Err(Error::other("no such file"));
        }
        let items = (shard.skip..5).map(move |place| match (index, place) {
            (1, 2) => Err(Error::other("bad line")),
            (2, 2) => panic!("torn"),
            _ => Ok(place),
        });
        Ok(Box::new(items))
    }
}

#[test]
fn errors_and_panics_name_shard_and_place() {
    for workers in [0, 1] {
        let loader =
            StreamLoader::builder(Flawed).shards(4).num_workers(workers).batch_size(3).build().unwrap();
        let all: Vec<_> = loader.iter().collect();
        let texts = all.iter().map(|batch| match batch {
            Ok(items) => format!("{items:?}"),
            Err(error) => error.to_string(),
        });
        let texts: Vec<String> = texts.collect();
        // Behind a bad line its shard goes on, behind a panic the next shard does; nothing else is lost.
        let expected = [
            "[0, 1, 2]",
            "[3, 4, 0]",
            "item 2 of shard 1 of the stream (epoch 0, worker 0 of rank 0): bad line",
            "[1, 3, 4]",
            "item 2 of shard 2 of the stream (epoch 0, worker 0 of rank 0) panicked: torn",
            "item 0 of shard 3 of the stream (epoch 0, worker 0 of rank 0): no such file",
            "[0, 1]",
        ];
        assert_eq!(texts, expected);
        assert!(all[4].as_ref().unwrap_err().is_panic() && all[4].as_ref().unwrap_err().index().is_none());
    }
}

#[test]
fn a_worker_that_cannot_begin_gives_one_error_and_then_the_end() {
    for workers in [0, 2] {
        let loader = StreamLoader::builder(Numbers(100)).shards(4).num_workers(workers).batch_size(3);
        let loader = loader.worker_init(|_| Err(Error::other("no licence"))).build().unwrap();
        let errors: Vec<String> =
            loader.iter().take(10).map(|batch| batch.unwrap_err().to_string()).collect();
        assert_eq!(errors.len(), workers.max(1), "{errors:?}");
        assert!(errors.iter().all(|error| error.contains("no licence")), "{errors:?}");
    }
}

/// What a producer sends, as in online learning.
struct Queue(Mutex<Option<Receiver<u32>>>);

impl IterableDataset for Queue {
    type Item = u32;
    type Stream = Stream<u32>;

    fn stream(&self, _: &Shard) -> Result<Stream<u32>> {
        let queue = self.0.lock().map_err(|_| Error::other("the lock was poisoned"))?.take();
        let queue = queue.ok_or_else(|| Error::other("the queue is read already"))?;
        Ok(Box::new(queue.into_iter().map(Ok)))
    }
}

#[test]
fn a_queue_is_learned_from_while_it_is_filled() {
    let (producer, queue) = channel();
    let loader =
        StreamLoader::builder(Queue(Mutex::new(Some(queue)))).batch_size(2).num_workers(1).build().unwrap();
    let mut batches = loader.iter();
    for n in 0..50 {
        producer.send(2 * n).unwrap();
        producer.send(2 * n + 1).unwrap();
        assert_eq!(batches.next().unwrap().unwrap(), [2 * n, 2 * n + 1]);
    }
    drop(producer);
    assert!(batches.next().is_none());
    assert!(loader.iter().next().unwrap().unwrap_err().to_string().contains("read already"));
}

/// Never ends, and counts the threads that read it.
struct Endless(ThreadCount);

impl IterableDataset for Endless {
    type Item = u64;
    type Stream = Stream<u64>;

    fn stream(&self, _: &Shard) -> Result<Stream<u64>> {
        self.0.enter();
        Ok(Box::new(std::iter::repeat_with(|| Ok(worker_info().unwrap().item_seed))))
    }
}

#[test]
fn no_thread_of_an_endless_stream_outlives_its_iterator() {
    let count = ThreadCount::default();
    // A batch of it cannot be had.
    let loader = StreamLoader::builder(Endless(count.clone())).batch_size(usize::MAX >> 8).num_workers(3);
    let loader = loader.collate(|items| Ok(items.len())).build().unwrap();
    let batches = loader.iter();
    drop(batches);
    assert_eq!(count.alive(), 0);
    let loader = StreamLoader::builder(Endless(count.clone())).batch_size(4).num_workers(3).build().unwrap();
    let mut seeds: Vec<u64> = loader.iter().take(30).flat_map(Result::unwrap).collect();
    assert_eq!((seeds.len(), count.alive()), (120, 0));
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 120, "each item draws from its own seed");
}

/// Tells which thread has dropped it.
struct Closing(Sender<ThreadId>);

impl Drop for Closing {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().id());
    }
}

impl IterableDataset for Closing {
    type Item = u64;
    type Stream = Stream<u64>;

    fn stream(&self, shard: &Shard) -> Result<Stream<u64>> {
        Numbers(60).stream(shard)
    }
}

#[test]
fn the_loop_drops_the_stream_when_all_workers_have_ended() {
    for workers in [0, 3] {
        let (closed, told) = channel();
        let mut batches = StreamLoader::builder(Closing(closed)).num_workers(workers).build().unwrap().iter();
        batches.next().unwrap().unwrap();
        drop(batches);
        assert_eq!(told.try_recv().unwrap(), std::thread::current().id(), "{workers} workers");
    }
}

/// Gives for each item its seed, and those of its shard: when it was opened, and as the shard says.
struct Seeds;

impl IterableDataset for Seeds {
    type Item = [u64; 3];
    type Stream = Stream<[u64; 3]>;

    fn stream(&self, shard: &Shard) -> Result<Self::Stream> {
        let (opened, seed) = (worker_info().unwrap().item_seed, shard.seed);
        let items = (shard.skip..6).map(move |_| Ok([worker_info().unwrap().item_seed, opened, seed]));
        Ok(Box::new(items))
    }
}

#[test]
fn items_batches_and_shards_of_a_stream_draw_from_seeds_of_their_own() {
    let loader = |workers: usize| {
        let loader = StreamLoader::builder(Seeds).shards(4).seed(5).batch_size(3).num_workers(workers);
        loader.collate(|items| Ok((worker_info().unwrap().item_seed, items))).build().unwrap()
    };
    let of = |batches: StreamBatches<Seeds, (u64, Vec<[u64; 3]>)>| {
        let mut batches: Vec<_> = batches.map(Result::unwrap).collect();
        batches.sort_unstable();
        batches
    };
    // A shard has two whole batches, so these are the same with any number of workers.
    let all = of(loader(0).iter());
    assert_eq!(all, of(loader(2).iter()));
    let items = || all.iter().flat_map(|(_, items)| items);
    let shards: BTreeSet<u64> = items().map(|[.., shard]| *shard).collect();
    assert!(items().all(|[_, opened, shard]| opened == shard));
    let of_items = items().map(|[item, ..]| *item);
    let seeds: BTreeSet<u64> =
        of_items.chain(all.iter().map(|(batch, _)| *batch)).chain(shards.clone()).collect();
    assert_eq!((shards.len(), seeds.len()), (4, 24 + 8 + 4));

    let first = loader(2);
    let mut seen: Vec<_> = first.iter().take(3).map(Result::unwrap).collect();
    let second = loader(2);
    second.resume(&first.position()).unwrap();
    seen.extend(second.iter().map(Result::unwrap));
    seen.sort_unstable();
    assert_eq!(seen, all);
    let next_epoch = of(second.iter());
    assert!(next_epoch.iter().all(|(batch, _)| !seeds.contains(batch)));
}

#[test]
fn positions_of_different_passes_do_not_go_together() {
    let loader = |count| StreamLoader::builder(Numbers(8)).shards(count).build().unwrap();
    let (one, other) = (loader(2), loader(2));
    one.iter().for_each(drop);
    one.iter().next();
    let error = StreamPosition::merged(&[one.position(), other.position()]).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("epoch 1"), "{error}");
    assert!(StreamPosition::merged(&[]).is_err());
    let error = loader(3).resume(&one.position()).unwrap_err();
    assert!(error.to_string().contains("`.shards(2)`"), "{error}");
}

#[test]
fn a_position_within_a_pass_is_one_for_the_same_seed() {
    let of = |seed: u64| StreamLoader::builder(Numbers(8)).shards(2).seed(seed).build().unwrap();
    let first = of(1);
    // Nothing was drawn yet.
    of(2).resume(&first.position()).unwrap();
    first.iter().next().unwrap().unwrap();
    of(1).resume(&first.position()).unwrap();
    let error = of(2).resume(&first.position()).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("with the seed 1"), "{error}");
    assert!(error.remedy().unwrap().contains("`.seed(1)`"), "{error}");
    let error = StreamPosition::merged(&[of(1).position(), of(2).position()]).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("the seed 1, another's 2"), "{error}");
}

#[test]
fn a_rank_s_own_position_is_not_that_of_all() {
    let loader = |(rank, world): (Rank, WorldSize)| {
        let loader = StreamLoader::builder(Numbers(40)).shards(4).shard(rank, world);
        loader.batch_size(3).build().unwrap()
    };
    let own = shards(2).map(|shard| {
        let loader = loader(shard);
        loader.iter().take(2).for_each(|batch| drop(batch.unwrap()));
        loader.position()
    });
    let own: Vec<StreamPosition> = own.collect();
    for other in [(Rank::new(1), world(2)), (Rank::MAIN, world(3)), (Rank::MAIN, world(1))] {
        let error = loader(other).resume(&own[0]).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("merged"), "{error}");
    }
    for (shard, position) in shards(2).zip(&own) {
        let same = loader(shard);
        same.resume(position).unwrap();
        let error = same.set_group(&ProcessGroup::alone().unwrap()).unwrap_err();
        assert!(error.to_string().contains("merged"), "{error}");
        assert_eq!(same.position(), *position);
        assert_eq!(same.iter().flat_map(Result::unwrap).count(), 20 - 6);
    }

    let all = StreamPosition::merged(&own).unwrap();
    let twice = [own[0].clone(), own[0].clone()];
    for some in [&own[..1], &twice[..], std::slice::from_ref(&all)] {
        let error = StreamPosition::merged(some).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("merged"), "{error}");
    }
    let alone = loader((Rank::MAIN, world(1)));
    alone.resume(&all).unwrap();
    assert_eq!(alone.iter().flat_map(Result::unwrap).count(), 40 - 12);
    for shard in shards(3) {
        // Alone, a rank has all shards.
        loader(shard).resume(&alone.position()).unwrap();
    }
}
