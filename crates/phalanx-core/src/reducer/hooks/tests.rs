//! Hooks on several ranks, over a group of threads.

mod power_sgd;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::super::fake::{FakeGroup, run};
use super::super::{HookedReducer, ParameterSpec, Reducer, ReducerOptions};
use super::*;
use crate::dtype::DType;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::join::{JoinGroup, JoinOptions};
use crate::world_size::WorldSize;

const ROWS: usize = 12;
const COLUMNS: usize = 40;

/// A matrix, a vector, and a tensor of a type that hooks leave alone.
fn reducer(group: Arc<dyn Communicator>, hook: impl CommHook + 'static) -> Reducer {
    let parameters = vec![
        ParameterSpec::new("matrix", [ROWS, 5, COLUMNS / 5], DType::F32),
        ParameterSpec::new("vector", [9], DType::F32),
        ParameterSpec::new("double", [ROWS, COLUMNS], DType::F64),
    ];
    let mut reducer = Reducer::new(group, parameters, ReducerOptions::default()).unwrap();
    reducer.register_hook(Box::new(hook)).unwrap();
    reducer
}

/// A gradient of rank 1: the outer product of two vectors, which every rank scales by its own factor.
fn rank_one(factor: f32, step: usize) -> Vec<f32> {
    let wave = |i: usize, scale: f32| ((i + 1) as f32 * scale + step as f32).sin();
    (0..ROWS * COLUMNS).map(|i| factor * wave(i / COLUMNS, 0.7) * wave(i % COLUMNS, 0.3)).collect()
}

fn full_rank(rank: Rank) -> Vec<f32> {
    (0..ROWS * COLUMNS).map(|i| ((i * i + 31 * rank.index()) as f32 * 0.011).sin()).collect()
}

fn step(reducer: &mut Reducer, matrix: &[f32]) -> Vec<f32> {
    reducer.start().unwrap();
    let double: Vec<f64> = matrix.iter().copied().map(f64::from).collect();
    reducer.ready(2, bytemuck::cast_slice(&double)).unwrap();
    reducer.ready(1, bytemuck::cast_slice(&matrix[..9])).unwrap();
    reducer.ready(0, bytemuck::cast_slice(matrix)).unwrap();
    reducer.finish().unwrap();
    numbers(reducer, 0)
}

fn numbers<T: bytemuck::Pod>(reducer: &Reducer, index: usize) -> Vec<T> {
    let bytes = reducer.gradient(index).unwrap().unwrap();
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn average(world: u32, of: impl Fn(Rank) -> Vec<f32>) -> Vec<f32> {
    let mut sum = vec![0.0; ROWS * COLUMNS];
    for rank in 0..world {
        sum.iter_mut().zip(of(Rank::new(rank))).for_each(|(sum, x)| *sum += x / world as f32);
    }
    sum
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap()
}

#[test]
fn half_precision_rounds_the_average_and_sends_half() {
    for (hook, most) in [(Compressed::f16(), 2e-3), (Compressed::bf16(), 2e-2)] {
        for world in [2, 3, 4] {
            let expected = average(world, full_rank);
            let results = run(world, |group| {
                let mut reducer = reducer(group.clone(), hook.clone());
                let matrix = step(&mut reducer, &full_rank(group.rank()));
                let floats = ROWS * COLUMNS + 9;
                assert_eq!(reducer.communicated_bytes() as usize, floats * 2 + ROWS * COLUMNS * 8);
                let double: Vec<f64> = numbers(&reducer, 2);
                assert!(farthest(&double.iter().map(|&x| x as f32).collect::<Vec<_>>(), &expected) < 1e-6);
                matrix
            });
            for ours in &results {
                assert_eq!(ours, &results[0], "the same bits on every rank");
                let distance = farthest(ours, &expected);
                assert!(distance > 0.0 && distance < most, "{world} ranks: {distance:e}");
            }
        }
    }
}

#[test]
fn a_hook_goes_on_from_its_saved_state_bit_for_bit() {
    let power = || PowerSgd::new(PowerSgdOptions::default().start_iter(2).rank(2)).unwrap();
    let hooks: [fn() -> Box<dyn CommHook>; 3] = [
        || Box::new(PowerSgd::new(PowerSgdOptions::default().start_iter(2).rank(2)).unwrap()),
        || Box::new(PostLocalSgd::new(7)),
        || Box::new(Compressed::f16()),
    ];
    for hook in hooks {
        run(2, |group| {
            let mine = |number: usize| -> Vec<f32> {
                full_rank(group.rank()).iter().map(|x| x * (number as f32 + 1.0).sin()).collect()
            };
            let fresh = || {
                let mut reducer = reducer(group.clone(), AllReduce);
                reducer.register_hook(hook()).unwrap();
                reducer
            };
            let mut whole = fresh();
            let expected: Vec<_> = (0..10).map(|number| step(&mut whole, &mine(number))).collect();
            let mut first = fresh();
            (0..5).for_each(|number| drop(step(&mut first, &mine(number))));
            let state = first.hook_state().unwrap();
            let mut second = fresh();
            second.load_hook_state(state.clone()).unwrap();
            assert_eq!(second.hook_state().unwrap(), state);
            for (number, expected) in expected.iter().enumerate().skip(5) {
                let ours = step(&mut second, &mine(number));
                assert!(
                    ours.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{} step {number}",
                    hook().describe()
                );
            }
        });
    }
    // Other settings are another hook, and no state is nothing to go on from.
    run(2, |group| {
        let mut saved = reducer(group.clone(), power());
        (0..4).for_each(|number| drop(step(&mut saved, &rank_one(1.0, number))));
        let state = saved.hook_state().unwrap();
        let mut other = reducer(group.clone(), PowerSgd::new(PowerSgdOptions::default()).unwrap());
        for (refused, said) in [(state.clone(), "start_iter: 2, "), (HookState::default(), "that of none")] {
            let error = other.load_hook_state(refused).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        }
        let mut none = reducer(group.clone(), AllReduce);
        assert!(none.load_hook_state(state).unwrap_err().to_string().contains("hook here is all_reduce"));
        none.load_hook_state(HookState::default()).unwrap();
    });
}

/// Keeps one tensor, from its first step on, and no number.
#[derive(Default)]
struct Lazy(Option<Vec<f32>>);

impl CommHook for Lazy {
    fn describe(&self) -> String {
        "lazy".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let elements = self.0.get_or_insert_with(|| vec![0.0]);
        elements[0] += 1.0;
        AllReduce.start(group, bucket)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(self.0.iter().fold(HookState::default(), |state, kept| state.common("kept", 0, kept.clone())))
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        self.0 = state.take("kept").remove(&0);
        Ok(())
    }
}

#[test]
fn a_hook_whose_state_comes_with_its_first_step_goes_on_from_it_and_back_to_none() {
    run(2, |group| {
        let new = || reducer(group.clone(), Lazy::default());
        let mut saved = new();
        let before = saved.hook_state().unwrap();
        drop(step(&mut saved, &rank_one(1.0, 0)));
        let after = saved.hook_state().unwrap();
        assert!(before.is_empty() && !after.is_empty());
        assert_eq!([before.hook(), after.hook()], ["lazy"; 2]);
        // A new one has nothing yet.
        let mut resumed = new();
        resumed.load_hook_state(after.clone()).unwrap();
        assert_eq!(resumed.hook_state().unwrap(), after);
        // A rollback to the time before the first step.
        resumed.load_hook_state(before.clone()).unwrap();
        assert_eq!(resumed.hook_state().unwrap(), before);
        // Two hooks that have nothing so far, but not one that has, and one that has none.
        reducer(group.clone(), AllReduce).load_hook_state(before.clone()).unwrap();
        for (mut other, state) in [(reducer(group.clone(), AllReduce), after), (saved, HookState::default())]
        {
            assert!(other.load_hook_state(state).unwrap_err().is_mismatch());
        }
    });
}

/// What it keeps lies on a device, which may be lost.
struct Remote {
    kept: f32,
    reads: Arc<AtomicUsize>,
    is_lost: Arc<AtomicBool>,
}

impl CommHook for Remote {
    fn describe(&self) -> String {
        "remote".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        AllReduce.start(group, bucket)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(Error::aborted("the device is lost")),
            false => Ok(HookState::default().own("kept", 0, vec![self.kept])),
        }
    }

    fn common_state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        self.kept = state.take("kept").remove(&0).map_or(0.0, |kept| kept[0]);
        Ok(())
    }
}

#[test]
fn a_state_is_loaded_without_a_look_at_the_last_one_and_one_that_cannot_be_read_is_an_error() {
    run(2, |group| {
        let (reads, is_lost) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let new = |kept| Remote { kept, reads: reads.clone(), is_lost: is_lost.clone() };
        let saved = reducer(group.clone(), new(2.0)).hook_state().unwrap();
        is_lost.store(true, Ordering::Relaxed);
        let hooked = HookedReducer::new(reducer(group.clone(), new(1.0)), ());
        let mut loaded = LoadedHook::default();
        check_hook(Some(&hooked), Some(&saved)).unwrap();
        loaded.load(Some(&hooked), Some(saved.clone())).unwrap();
        assert!(check_hook(Some(&hooked), None).unwrap_err().is_mismatch());
        // The loaded checkpoint has none for a hook that is registered then.
        let mut absent = LoadedHook::default();
        absent.mark_absent(String::new());
        let mut fresh = reducer(group.clone(), AllReduce);
        assert!(absent.register(&mut fresh, Box::new(new(3.0))).unwrap_err().is_mismatch());
        assert_eq!(reads.load(Ordering::Relaxed), 1, "what was kept has been read");
        // All ranks have in common that it is there.
        let common = loaded.common_state(Some(&hooked)).unwrap().unwrap();
        assert!(common.is_empty() && common.hook() == "remote");
        let error = loaded.state(Some(&hooked)).unwrap_err().to_string();
        assert!(error.contains("the device is lost"), "{error}");
        is_lost.store(false, Ordering::Relaxed);
        assert_eq!(loaded.state(Some(&hooked)).unwrap(), Some(saved));
    });
}

#[test]
fn a_loaded_state_with_nothing_but_a_rank_s_own_is_like_one_without_it() {
    run(2, |group| {
        // As in an elastic job that goes on from a checkpoint that rank 0 has loaded: the others have what all have in common.
        let is_main = group.rank().is_main();
        let saved = HookState::default().own("kept", 0, vec![2.0]).of("remote".into());
        let state = if is_main { saved } else { saved.without_own() };
        let mut loaded = LoadedHook::default();
        loaded.load(None::<&HookedReducer<()>>, Some(state)).unwrap();
        let mut reducer = reducer(group, AllReduce);
        let hook = Remote { kept: 1.0, reads: Arc::default(), is_lost: Arc::default() };
        loaded.register(&mut reducer, Box::new(hook)).unwrap();
        let kept = reducer.hook_state().unwrap().take("kept").remove(&0);
        assert_eq!(kept, Some(vec![if is_main { 2.0 } else { 1.0 }]));
    });
}

#[test]
fn a_hook_of_whose_state_nothing_is_left_begins_anew_and_no_other_one_does() {
    run(2, |group| {
        // Another number of ranks has saved what each had of its own.
        let loaded = || {
            let mut loaded = LoadedHook::default();
            let left = HookState::default().of("remote".into());
            loaded.load(None::<&HookedReducer<()>>, Some(left)).unwrap();
            loaded.mark_absent("remote".into());
            loaded
        };
        assert_eq!(loaded().absent(), Some("remote"));
        let hook = Remote { kept: 1.0, reads: Arc::default(), is_lost: Arc::default() };
        let mut same = reducer(group.clone(), AllReduce);
        loaded().register(&mut same, Box::new(hook)).unwrap();
        assert_eq!(same.hook_state().unwrap().take("kept").remove(&0), Some(vec![1.0]));
        let other = PowerSgd::new(PowerSgdOptions::default()).unwrap();
        let error = loaded().register(&mut reducer(group, AllReduce), Box::new(other)).unwrap_err();
        assert!(error.to_string().contains("the saved state is that of remote, and"), "{error}");
    });
}

/// Panics when it is asked for what it keeps, and when it is given that.
struct Panicking;

impl CommHook for Panicking {
    fn describe(&self) -> String {
        "panicking".into()
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        AllReduce.start(group, bucket)
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        panic!("the state cannot be read")
    }

    fn common_state(&self) -> Result<HookState> {
        panic!("what all have in common cannot be read")
    }

    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }

    fn load(&mut self, _: HookState) -> Result<()> {
        panic!("the state cannot be loaded")
    }
}

#[test]
fn a_panic_of_a_hook_whose_state_is_saved_or_loaded_is_an_error_and_ends_the_reducer() {
    type Call = fn(&mut LoadedHook, &HookedReducer<()>) -> Result<()>;
    let calls: [(Call, &str); 3] = [
        (|loaded, hooked| loaded.state(Some(hooked)).map(drop), "the state cannot be read"),
        (|loaded, hooked| loaded.common_state(Some(hooked)).map(drop), "in common cannot be read"),
        (
            |loaded, hooked| loaded.load(Some(hooked), Some(HookState::default().of("panicking".into()))),
            "the state cannot be loaded",
        ),
    ];
    for (call, expected) in calls {
        run(1, |group| {
            let hooked = HookedReducer::new(reducer(group, Panicking), ());
            let error = call(&mut LoadedHook::default(), &hooked).unwrap_err().to_string();
            assert!(error.contains("a panic in") && error.contains(expected), "{error}");
            // Nobody trains with what the hook has left half done.
            let error = hooked.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        });
    }
}

#[test]
fn what_checkpoints_say_of_a_hook_stays_the_same() {
    let power = PowerSgd::new(PowerSgdOptions::default().rank(2).orthogonalization_epsilon(0.5)).unwrap();
    let said: [(Box<dyn CommHook>, &str); 4] = [
        (
            Box::new(power),
            "PowerSGD (rank: 2, start_iter: 1000, min_compression_rate: 2, error_feedback: true, warm_start: true, \
             orthogonalization_epsilon: 0.5, seed: 0)",
        ),
        (Box::new(PostLocalSgd::new(7)), "local sgd after 7 steps, in subgroups: false"),
        (Box::new(Compressed::bf16()), "compressed to bf16"),
        (Box::new(AllReduce), "all_reduce"),
    ];
    for (hook, expected) in said {
        assert_eq!(hook.describe(), expected);
    }
}

#[test]
fn hooks_take_the_group_s_memory_once() {
    let hooks: [fn() -> Box<dyn CommHook>; 3] = [
        || Box::new(Compressed::f16()),
        || Box::new(Compressed::bf16()),
        || Box::new(PowerSgd::new(PowerSgdOptions::default().start_iter(1)).unwrap()),
    ];
    for hook in hooks {
        run(2, |group| {
            let mut reducer = reducer(group.clone(), AllReduce);
            reducer.register_hook(hook()).unwrap();
            // Buckets are rebuilt after the first step.
            (0..3).for_each(|_| drop(step(&mut reducer, &full_rank(group.rank()))));
            let taken = group.allocations();
            (0..5).for_each(|_| drop(step(&mut reducer, &full_rank(group.rank()))));
            assert_eq!(group.allocations(), taken);
        });
    }
}

#[test]
fn local_sgd_stops_averaging_and_may_go_on_in_a_subgroup() {
    run(2, |group| {
        let alone = FakeGroup::world(1).swap_remove(0);
        for hook in [PostLocalSgd::new(1), PostLocalSgd::new(1).subgroup(Alone(alone))] {
            let mut reducer = reducer(group.clone(), hook);
            let mine = full_rank(group.rank());
            assert!(farthest(&step(&mut reducer, &mine), &average(2, full_rank)) < 1e-6);
            // What a `join` multiplies averages by is nothing to a rank's own gradients.
            assert_eq!(reducer.scale_in_step(2.0), 2.0);
            assert_eq!(step(&mut reducer, &mine), mine);
            assert_eq!(reducer.scale_in_step(2.0), 1.0);
        }
    });
}

/// A handle to a group of one.
struct Alone(Arc<FakeGroup>);

impl Communicator for Alone {
    crate::group::forward_to_group!(self => self.0);
    fn in_call(&self, _: crate::Caller) -> Arc<dyn Communicator> {
        Arc::new(Self(self.0.clone()))
    }
    fn all_reduce_async(&self, buffer: Buffer, _: ReduceOp) -> Result<Work> {
        Ok(Work::ready(Ok(buffer)))
    }
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.0.broadcast_async(buffer, root)
    }
    fn reduce_scatter_v_async(&self, buffer: Buffer, _: &[usize], _: ReduceOp) -> Result<Work> {
        Ok(Work::ready(Ok(buffer)))
    }
    fn all_gather_v_in_place_async(&self, buffer: Buffer, _: &[usize]) -> Result<Work> {
        Ok(Work::ready(Ok(buffer)))
    }
}

#[test]
fn hooks_that_differ_or_give_back_something_else_are_errors() {
    let parameters = || vec![ParameterSpec::new("p", [3], DType::F32)];
    let errors = run(2, |group| {
        let hook = if group.rank().is_main() { Compressed::f16() } else { Compressed::bf16() };
        let mut reducer = Reducer::new(group, parameters(), ReducerOptions::default()).unwrap();
        reducer.register_hook(Box::new(hook)).unwrap_err().to_string()
    });
    for text in errors {
        assert!(text.contains("communication hook is compressed to f16 on rank 0"), "{text}");
        assert!(text.contains("compressed to bf16 on rank 1"), "{text}");
    }
    struct Cut;
    impl CommHook for Cut {
        fn describe(&self) -> String {
            "cut".into()
        }
        fn start(&mut self, _: &dyn Communicator, _: GradBucket) -> Result<Pending> {
            Ok(Pending::ready(Buffer::zeroed(DType::F32, 1)))
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
    }
    run(2, |group| {
        let mut reducer = Reducer::new(group, parameters(), ReducerOptions::default()).unwrap();
        reducer.register_hook(Box::new(Cut)).unwrap();
        reducer.start().unwrap();
        reducer.ready(0, &[0; 12]).unwrap();
        assert!(reducer.finish().unwrap_err().to_string().contains("gave back"));
    });
    assert!(PowerSgd::new(PowerSgdOptions::default().rank(0)).is_err());
}
