//! Random numbers of items and workers, whoever loads them.

use std::collections::HashSet;
use std::sync::Mutex;

use phalanx_data::{WorkerInfo, set_item, worker_info};

use super::*;

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
