//! Gradients that lie elsewhere, with a hook that averages them there: here in a map beside the reducer.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::*;
use crate::group::{GroupHandle, ProcessGroup};
use crate::join::{JoinGroup, JoinOptions};
use crate::reducer::hooks::{
    AveragedAmong, BuiltInHook, Compressed, GradBucket, GradientPlace, HookState, Pending, PostLocalSgd,
};
use crate::world_size::WorldSize;

/// The memory that the reducer does not see, by parameter.
type Shelf = Arc<Mutex<BTreeMap<usize, Vec<f32>>>>;

/// Averages on the shelf, and ends each bucket only when the reducer waits for it.
struct OnShelf {
    shelf: Shelf,
    name: &'static str,
    /// It then takes weights, too.
    makes_zeros: bool,
}

impl CommHook for OnShelf {
    fn describe(&self) -> String {
        self.name.to_owned()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        assert_eq!(bucket.buffer.len(), 0, "there is no memory in a bucket");
        let mut works = Vec::new();
        for place in &*bucket.gradients {
            let gradient = self.shelf.lock().remove(&place.parameter);
            let gradient =
                gradient.or_else(|| self.makes_zeros.then(|| vec![0.0; place.elements.len()])).unwrap();
            assert_eq!(gradient.len(), place.elements.len());
            let work = group.all_reduce_async(Buffer::from_slice(&gradient), ReduceOp::Avg)?;
            works.push((place.parameter, work));
        }
        let (shelf, done) = (self.shelf.clone(), Arc::new(AtomicBool::new(false)));
        let is_completed = done.clone();
        Ok(Pending::elsewhere(
            move || is_completed.load(Ordering::Relaxed),
            move || {
                for (parameter, work) in works {
                    shelf.lock().insert(parameter, work.wait()?.as_slice::<f32>()?.to_vec());
                }
                done.store(true, Ordering::Relaxed);
                Ok(bucket.buffer)
            },
        ))
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

    fn makes_zeros(&self) -> bool {
        self.makes_zeros
    }

    fn accepts_weights(&self) -> bool {
        self.makes_zeros
    }
}

fn elsewhere(group: &Arc<FakeGroup>, sizes: &[usize], options: ReducerOptions) -> Result<(Reducer, Shelf)> {
    let shelf = Shelf::default();
    let hook = Box::new(OnShelf { shelf: shelf.clone(), name: "on a shelf", makes_zeros: false });
    Reducer::elsewhere(group.clone(), parameters(sizes), options, hook).map(|reducer| (reducer, shelf))
}

#[test]
fn a_hook_that_makes_zeros_averages_what_only_some_ranks_have() {
    // Rank 0 uses the first parameter, rank 1 the second, both the third, and nobody the last.
    let sizes = [2, 2, 2, 2];
    for options in [buckets_of(4).find_unused_parameters(true), buckets_of(4).static_graph(true)] {
        run(2, |group| {
            let (rank, shelf) = (group.rank(), Shelf::default());
            let hook = OnShelf { shelf: shelf.clone(), name: "on a shelf", makes_zeros: true };
            let made = Reducer::elsewhere(group.clone(), parameters(&sizes), options.clone(), Box::new(hook));
            let mut reducer = made.unwrap();
            for step in 0..3 {
                reducer.start().unwrap();
                for index in [2, rank.index()] {
                    shelf.lock().insert(index, gradient(rank, index, step, 2));
                    reducer.ready_elsewhere(index).unwrap();
                }
                reducer.finish().unwrap();
                let averages = std::mem::take(&mut *shelf.lock());
                assert_eq!(averages[&2], expected(2, 2, step, 2), "step {step}");
                for index in [0, 1] {
                    let only = gradient(Rank::new(index as u32), index, step, 2);
                    assert_eq!(averages[&index], [only[0] / 2.0, only[1] / 2.0], "step {step}");
                }
                let had = (0..4).map(|index| reducer.has_average(index).unwrap());
                assert_eq!(had.collect::<Vec<_>>(), [true, true, true, false], "step {step}");
            }
        });
    }
}

#[test]
fn ranks_count_by_their_weights_where_gradients_lie() {
    let (sizes, weights) = ([2, 3], [[3.0, 0.0, 5.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.25, 8.0, 0.5]]);
    run(3, |group| {
        let (rank, shelf) = (group.rank(), Shelf::default());
        let hook = OnShelf { shelf: shelf.clone(), name: "on a shelf", makes_zeros: true };
        let made = Reducer::elsewhere(group.clone(), parameters(&sizes), buckets_of(8), Box::new(hook));
        let mut reducer = made.unwrap();
        for (step, weights) in weights.into_iter().enumerate() {
            let (own, total) = (weights[rank.index()], weights.iter().sum::<f64>());
            reducer.start_weighted(own).unwrap();
            for (index, size) in sizes.into_iter().enumerate() {
                if own == 0.0 {
                    reducer.ready_void(index).unwrap();
                    continue;
                }
                let weighted = gradient(rank, index, step, size).iter().map(|x| x * own as f32).collect();
                shelf.lock().insert(index, weighted);
                reducer.ready_elsewhere(index).unwrap();
            }
            let finished = reducer.finish();
            let averages = std::mem::take(&mut *shelf.lock());
            if total == 0.0 {
                let error = finished.unwrap_err().to_string();
                assert!(error.contains("weight"), "{error}");
                continue;
            }
            finished.unwrap();
            assert_eq!(reducer.average_weight(), total / 3.0);
            for (index, size) in sizes.into_iter().enumerate() {
                for (element, average) in averages[&index].iter().enumerate() {
                    let of = |rank| f64::from(gradient(Rank::new(rank), index, step, size)[element]);
                    let sum: f64 = (0..3).map(|rank| of(rank) * weights[rank as usize]).sum();
                    let mean = f64::from(*average) / reducer.average_weight();
                    assert!((mean - sum / total).abs() < 1e-5, "step {step}: {mean} and {}", sum / total);
                }
            }
        }
        // A step without weights follows.
        reducer.start().unwrap();
        for (index, size) in sizes.into_iter().enumerate() {
            shelf.lock().insert(index, gradient(rank, index, 9, size));
            reducer.ready_elsewhere(index).unwrap();
        }
        reducer.finish().unwrap();
        assert_eq!(reducer.average_weight(), 1.0);
        assert_eq!(shelf.lock()[&1], expected(3, 1, 9, 3));
    });
}

/// The device's calls match whatever kind of step a rank begins.
struct OnDevice {
    name: &'static str,
    built_in: Option<BuiltInHook>,
    is_elsewhere: bool,
}

impl CommHook for OnDevice {
    fn describe(&self) -> String {
        self.name.to_owned()
    }

    fn start(&mut self, _: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
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

    fn accepts_weights(&self) -> bool {
        true
    }

    fn built_in(&self) -> Option<BuiltInHook> {
        self.built_in.clone()
    }

    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        Ok(matches!(hook, BuiltInHook::Compressed(DType::F16)))
    }

    fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }
}

fn on_device(group: Arc<FakeGroup>) -> Reducer {
    let hook = Box::new(OnDevice { name: "a device", built_in: None, is_elsewhere: true });
    Reducer::elsewhere(group, parameters(&[4]), ReducerOptions::default(), hook).unwrap()
}

#[test]
fn weights_of_different_steps_are_an_error_and_no_average() {
    let errors = run(2, |group| {
        let is_main = group.rank().is_main();
        let mut reducer = on_device(group);
        let mut step = |weight: Option<f64>| {
            match weight {
                Some(weight) => reducer.start_weighted(weight)?,
                None => reducer.start()?,
            }
            reducer.ready_elsewhere(0)?;
            reducer.finish()
        };
        // Both begin with steps of weights, until the numbers of the first optimizer step have been compared.
        (0..3).for_each(|_| step(Some(2.0)).unwrap());
        let last = if is_main { Some(3.0) } else { None };
        step(last).and_then(|()| step(Some(1.0))).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("weights are of other steps"), "{error}");
    }
}

#[test]
fn a_hook_that_only_compresses_is_taken_where_gradients_lie_if_that_is_possible_there() {
    run(2, |group| on_device(group).register_hook(Box::new(Compressed::f16())).unwrap());
    run(2, |group| {
        let error = on_device(group).register_hook(Box::new(Compressed::bf16())).unwrap_err().to_string();
        assert!(error.contains("where they lie, by a device"), "{error}");
    });
    let errors = run(2, |group| {
        let hook: Box<dyn CommHook> = match group.rank().is_main() {
            true => Box::new(Compressed::f16()),
            false => {
                let built_in = Some(BuiltInHook::Compressed(DType::F16));
                Box::new(OnDevice { name: "another", built_in, is_elsewhere: false })
            }
        };
        on_device(group).register_hook(hook).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("compressed to f16") && error.contains("another"), "{error}");
    }
}

#[test]
fn each_hook_of_the_host_is_named_by_what_cannot_act_as_it() {
    type Make = fn(Arc<FakeGroup>) -> Box<dyn CommHook>;
    let hooks: [(&str, Make); 4] = [
        ("all_reduce", |_| Box::new(AllReduce)),
        ("compressed to bf16", |_| Box::new(Compressed::bf16())),
        ("local sgd after 3 steps, in subgroups: false", |_| Box::new(PostLocalSgd::new(3))),
        ("local sgd after 3 steps, in subgroups: true", |group| {
            Box::new(PostLocalSgd::new(3).subgroup(Metered::new(group)))
        }),
    ];
    for (name, hook) in hooks {
        run(1, |group| {
            let error = on_device(group.clone()).register_hook(hook(group)).unwrap_err().to_string();
            assert!(error.contains(&format!("register_hook({name})")), "{error}");
        });
    }
    // What stands in for a smaller group has no ranks that could average on a device.
    run(1, |group| assert!(PostLocalSgd::new(3).subgroup(Metered::new(group)).built_in().is_none()));
    let alone = ProcessGroup::alone().unwrap();
    for hook in [PostLocalSgd::new(3), PostLocalSgd::new(3).subgroup(GroupHandle::new(alone))] {
        let Some(BuiltInHook::PostLocalSgd(same)) = hook.built_in() else { panic!("{hook:?}") };
        assert_eq!(same.describe(), hook.describe());
    }
}

#[test]
fn ranks_that_mean_different_smaller_groups_are_named_and_others_are_not() {
    /// What registering says on each of three ranks, whose smaller groups have these ranks.
    fn registered(parts: [&[u32]; 3]) -> Vec<Result<()>> {
        let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
        let register = |group: ProcessGroup| {
            let own = parts[group.rank().index()];
            let mut made = Vec::new();
            for (rank, part) in parts.into_iter().enumerate() {
                // Each list is made once.
                if !parts[..rank].contains(&part) {
                    let ranks: Vec<Rank> = part.iter().copied().map(Rank::new).collect();
                    made.push((part, group.new_group(&ranks).unwrap()));
                }
            }
            let (_, part) = made.into_iter().find(|(part, _)| *part == own).unwrap();
            let handle = GroupHandle::new(part.unwrap());
            let mut reducer =
                Reducer::new(Arc::new(group), parameters(&[4]), ReducerOptions::default()).unwrap();
            reducer.register_hook(Box::new(PostLocalSgd::new(1).subgroup(handle)))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || register(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
    for parts in [[&[0, 1][..], &[0, 1], &[2]], [&[0, 1, 2][..]; 3], [&[0][..], &[1], &[2]]] {
        assert!(registered(parts).iter().all(Result::is_ok), "{parts:?}");
    }
    let different: [([&[u32]; 3], &str); 2] = [
        (
            [&[0, 1], &[1, 2], &[1, 2]],
            "the smaller group of rank 0 has the ranks 0, 1, and that of rank 1 has the ranks 1, 2",
        ),
        (
            [&[0], &[0, 1], &[2]],
            "the smaller group of rank 1 has the ranks 0, 1, and that of rank 0 has no other rank",
        ),
    ];
    for (parts, said) in different {
        for outcome in registered(parts) {
            let error = outcome.unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        }
    }
}

#[test]
fn local_sgd_says_among_which_ranks_a_bucket_is_averaged_where_it_lies() {
    fn ranks(hook: &mut PostLocalSgd, group: &JoinGroup) -> Result<u32> {
        hook.averaged_among(true, group).map(|among| match among {
            AveragedAmong::All => 2,
            AveragedAmong::Subgroup(group) => group.world_size().get(),
            AveragedAmong::Nobody => 0,
        })
    }
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let (rank, group) = (group.rank().index(), JoinGroup::new(group));
                let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
                let mut hooks = [PostLocalSgd::new(1), PostLocalSgd::new(1).subgroup(handle.clone())];
                let found = hooks.each_mut().map(|hook| [(); 2].map(|()| ranks(hook, &group).unwrap()));
                assert_eq!(found, [[2, 0], [2, 1]]);
                let [mut own, mut smaller] = hooks;
                // So it is in the memory of the processes.
                let mut here = PostLocalSgd::new(0).subgroup(handle.clone());
                let mut start = |group: &JoinGroup| {
                    let gradients: Arc<[GradientPlace]> = Vec::new().into();
                    let (buffer, counts) = (Buffer::zeroed(DType::F32, 1), None);
                    let bucket =
                        GradBucket { index: 0, is_last: true, buffer, gradients, keeps: false, counts };
                    here.start(group, bucket).map(drop)
                };
                // Rank 0 has a batch less: nobody would answer for it in the smaller group.
                let joined = group.join(JoinOptions::default(), || {
                    for step in 0..=rank {
                        group.step()?;
                        assert_eq!(ranks(&mut own, &group)?, 0);
                        let outcomes = [ranks(&mut smaller, &group), start(&group).map(|()| 1)];
                        for outcome in outcomes {
                            match outcome {
                                Ok(among) => assert_eq!((step, among), (0, 1)),
                                Err(error) => {
                                    let error = error.to_string();
                                    assert!(error.contains("1 of 2 ranks have data"), "{error}");
                                    assert_eq!(step, 1);
                                }
                            }
                        }
                    }
                    Ok(())
                });
                joined.unwrap();
                // A handle leads to what cannot average on a device.
                handle.rebind(FakeGroup::clone(&FakeGroup::world(1)[0]));
                let error = ranks(&mut smaller, &group).unwrap_err().to_string();
                assert!(error.contains("none of processes"), "{error}");
            });
        }
    });
}

#[test]
fn a_hook_that_works_where_gradients_lie_takes_the_place_of_the_first_one_there_and_nowhere_else() {
    let hook = || Box::new(OnDevice { name: "of the program", built_in: None, is_elsewhere: true });
    run(2, |group| {
        let mut reducer = on_device(group);
        reducer.register_hook(hook()).unwrap();
        // That one cannot act as another.
        let error = reducer.register_hook(Box::new(AllReduce)).unwrap_err().to_string();
        assert!(error.contains("where they lie, by of the program"), "{error}");
    });
    run(1, |group| {
        let mut here = Reducer::new(group, parameters(&[4]), ReducerOptions::default()).unwrap();
        let error = here.register_hook(hook()).unwrap_err().to_string();
        assert!(error.contains("register_hook(of the program)"), "{error}");
    });
}

#[test]
fn gradients_are_averaged_where_they_lie_in_the_order_of_buckets_and_no_bucket_takes_memory() {
    let sizes = [4, 4, 4, 3];
    run(2, |group| {
        let rank = group.rank();
        let (mut reducer, shelf) = elsewhere(&group, &sizes, buckets_of(8)).unwrap();
        let before = group.allocations();
        for step in 0..3 {
            reducer.start().unwrap();
            // Ranks have their gradients in another order; buckets are launched in one.
            let order = if rank.is_main() { [3, 2, 1, 0] } else { [2, 3, 0, 1] };
            for index in order {
                shelf.lock().insert(index, gradient(rank, index, step, sizes[index]));
                reducer.ready_elsewhere(index).unwrap();
            }
            reducer.finish().unwrap();
            let averages = std::mem::take(&mut *shelf.lock());
            for (index, size) in sizes.into_iter().enumerate() {
                assert_eq!(averages[&index], expected(2, index, step, size), "step {step}");
            }
        }
        // The order of buckets is exchanged once; each step has two buckets.
        assert_eq!(group.allocations(), before + 1);
        assert_eq!(averages(&group).len(), 3 * sizes.len());
    });
}

#[test]
fn a_gradient_that_does_not_come_is_an_error_with_its_name() {
    run(1, |group| {
        let (mut reducer, _shelf) = elsewhere(&group, &[4, 4], buckets_of(4)).unwrap();
        reducer.start().unwrap();
        let error = reducer.finish().unwrap_err().to_string();
        assert!(error.contains("`p0`"), "{error}");
    });
}

#[test]
fn what_needs_the_bytes_is_refused_by_name() {
    for options in
        [ReducerOptions::default().find_unused_parameters(true), ReducerOptions::default().static_graph(true)]
    {
        run(2, |group| {
            let error = elsewhere(&group, &[4], options.clone()).err().unwrap().to_string();
            assert!(error.contains("is set") && error.contains("on a shelf"), "{error}");
        });
    }
    type Call = fn(&mut Reducer) -> Result<()>;
    let calls: [(&str, Call); 7] = [
        ("ready", |reducer| reducer.ready(0, &[0; 16])),
        ("gradient", |reducer| reducer.gradient(0).map(drop)),
        ("take_gradients", |reducer| reducer.take_gradients().map(drop)),
        ("shard", |reducer| reducer.shard(vec![Rank::MAIN])),
        ("keep_gradients", Reducer::keep_gradients),
        ("regrouped", Reducer::regrouped),
        ("register_hook", |reducer| reducer.register_hook(Box::new(AllReduce))),
    ];
    for (name, call) in calls {
        run(1, |group| {
            let (mut reducer, _shelf) = elsewhere(&group, &[4], ReducerOptions::default()).unwrap();
            let error = call(&mut reducer).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("where they lie, by on a shelf"), "{error}");
        });
    }
    run(1, |group| {
        let (mut reducer, _shelf) = elsewhere(&group, &[4], ReducerOptions::default()).unwrap();
        let error = reducer.start_weighted(1.0).unwrap_err().to_string();
        assert!(error.contains("on a shelf") && error.contains("by their weights"), "{error}");
    });
    run(1, |group| {
        let mut here = Reducer::new(group, parameters(&[4]), ReducerOptions::default()).unwrap();
        assert!(here.ready_elsewhere(0).unwrap_err().to_string().contains("call ready"));
    });
}

#[test]
fn ranks_that_average_in_different_places_learn_it_before_anything_is_averaged() {
    for main_is_elsewhere in [true, false] {
        let errors = run(2, |group| {
            let made = match group.rank().is_main() == main_is_elsewhere {
                true => elsewhere(&group, &[4], ReducerOptions::default()).map(drop),
                false => Reducer::new(group, parameters(&[4]), ReducerOptions::default()).map(drop),
            };
            made.unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("on a shelf") && error.contains("all_reduce"), "{error}");
        }
    }
}

/// As an adapter that keeps copies does it.
struct Keeping {
    gradients: Shelf,
    kept: BTreeMap<usize, Vec<f32>>,
}

impl CommHook for Keeping {
    fn describe(&self) -> String {
        "on a shelf".to_owned()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        for place in &*bucket.gradients {
            let mut gradients = self.gradients.lock();
            let gradient = gradients.get_mut(&place.parameter).unwrap();
            if bucket.keeps {
                *gradient = self.kept.entry(place.parameter).or_insert_with(|| gradient.clone()).clone();
            }
        }
        let mut on_shelf = OnShelf { shelf: self.gradients.clone(), name: "on a shelf", makes_zeros: false };
        on_shelf.start(group, bucket)
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

    fn is_stateless(&self) -> bool {
        true
    }

    fn accepts_weights(&self) -> bool {
        true
    }

    fn keeps_gradients(&self) -> bool {
        true
    }
}

#[test]
fn a_hook_that_keeps_nothing_cannot_average_again() {
    run(1, |group| {
        let (mut reducer, _shelf) = elsewhere(&group, &[4, 4], buckets_of(4)).unwrap();
        let errors = [reducer.keep_gradients().unwrap_err(), reducer.regrouped().unwrap_err()];
        assert!(
            errors.iter().all(|error| error.to_string().contains("averaged where they lie, by on a shelf"))
        );
    });
}

#[test]
fn a_step_is_averaged_again_by_a_hook_that_keeps_its_gradients() {
    let sizes = [4, 4, 4, 3];
    let left: Vec<_> = FakeGroup::world(2).into_iter().map(Some).chain([None]).collect();
    std::thread::scope(|scope| {
        for (group, left) in FakeGroup::world(3).into_iter().zip(left) {
            scope.spawn(move || {
                let (rank, handle) = (group.rank(), GroupHandle::new((*group).clone()));
                let shelf = Shelf::default();
                let hook = Box::new(Keeping { gradients: shelf.clone(), kept: BTreeMap::new() });
                let parameters = parameters(&sizes);
                let mut reducer =
                    Reducer::elsewhere(Arc::new(handle.clone()), parameters, buckets_of(8), hook).unwrap();
                reducer.keep_gradients().unwrap();
                reducer.start().unwrap();
                for index in [3, 2, 1, 0] {
                    shelf.lock().insert(index, gradient(rank, index, 0, sizes[index]));
                    reducer.ready_elsewhere(index).unwrap();
                }
                reducer.finish().unwrap();
                assert_eq!(shelf.lock()[&0], expected(3, 0, 0, 4));
                let Some(left) = left else { return };
                // Averages have taken the place of the gradients.
                handle.rebind((*left).clone());
                reducer.replay().unwrap();
                for (index, size) in sizes.into_iter().enumerate() {
                    assert_eq!(shelf.lock()[&index], expected(2, index, 0, size));
                }
                reducer.regrouped().unwrap();
            });
        }
    });
}

/// Weights leave as the step begins, and a rank may have died before.
#[test]
fn a_weighted_step_in_groups_that_have_failed_is_averaged_again_in_the_next() {
    let (sizes, all_are_ready) = ([4, 3], Barrier::new(3));
    let [first, cut_off, left] = [3, 2, 2].map(FakeGroup::world);
    std::thread::scope(|scope| {
        for (index, group) in first.into_iter().enumerate() {
            let next = cut_off.get(index).cloned().zip(left.get(index).cloned());
            let all_are_ready = &all_are_ready;
            scope.spawn(move || {
                let (rank, handle) = (group.rank(), GroupHandle::new((*group).clone()));
                let shelf = Shelf::default();
                let hook = Box::new(Keeping { gradients: shelf.clone(), kept: BTreeMap::new() });
                let parameters = parameters(&sizes);
                let mut reducer =
                    Reducer::elsewhere(Arc::new(handle.clone()), parameters, buckets_of(8), hook).unwrap();
                all_are_ready.wait();
                let Some((cut_off, left)) = next else { return };
                let dead = || Error::timeout("nobody has heard of rank 2");
                group.abort(dead());
                cut_off.abort(dead());
                let weight = [1.0, 3.0][rank.index()];
                reducer.keep_gradients().unwrap();
                reducer.start_weighted(weight).unwrap();
                for (index, size) in sizes.into_iter().enumerate() {
                    let weighted = gradient(rank, index, 0, size).iter().map(|x| x * weight as f32).collect();
                    shelf.lock().insert(index, weighted);
                    reducer.ready_elsewhere(index).unwrap();
                }
                assert!(reducer.finish().unwrap_err().is_timeout());
                handle.rebind((*cut_off).clone());
                assert!(reducer.replay().unwrap_err().is_timeout());
                handle.rebind((*left).clone());
                reducer.replay().unwrap();
                assert_eq!(reducer.average_weight(), 2.0);
                for (index, size) in sizes.into_iter().enumerate() {
                    for (element, average) in shelf.lock()[&index].iter().enumerate() {
                        let of = |rank| f64::from(gradient(Rank::new(rank), index, 0, size)[element]);
                        let (mean, expected) = (f64::from(*average) / 2.0, (of(0) + 3.0 * of(1)) / 4.0);
                        assert!((mean - expected).abs() < 1e-5, "{mean} and {expected}");
                    }
                }
            });
        }
    });
}
