//! Models and calls that are refused, and averages that fail or are lost.

use super::super::hooks::HookState;
use super::*;
use crate::group::ProcessGroup;
use crate::testing;

#[test]
fn a_model_without_trainable_parameter_or_with_integers_is_refused() {
    for ranks in [1, 2] {
        run(ranks, |group| {
            let error = Reducer::new(group, Vec::new(), ReducerOptions::default()).err().unwrap();
            assert!(error.to_string().contains("no parameter needs a gradient"), "{error}");
        });
        run(ranks, |group| {
            let integers = vec![ParameterSpec::new("ids", [3], DType::I64)];
            let error = Reducer::new(group, integers, ReducerOptions::default()).err().unwrap();
            assert!(error.to_string().contains("`ids` (i64 [3])"), "{error}");
        });
        run(ranks, |group| {
            let huge = vec![ParameterSpec::new("huge", [usize::MAX / 2, 4], DType::F32)];
            assert!(Reducer::new(group, huge, ReducerOptions::default()).is_err());
        });
    }
}

#[test]
fn misuse_is_an_error_that_names_the_parameter_and_ends_the_group() {
    let errors = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        assert!(
            reducer.finish().is_err() && reducer.ready(0, &[0; 16]).is_err() && reducer.gradient(0).is_err()
        );
        reducer.start().unwrap();
        reducer.ready(0, &[0; 16]).unwrap();
        if rank.is_main() { reducer.finish().err() } else { reducer.ready(0, &[0; 16]).err() }
    });
    // Rank 0 lacks a gradient itself; whichever rank ends the group first, nobody waits.
    assert!(
        errors[1].as_ref().is_some_and(|error| error.to_string().contains("`p0` (f32 [4])")),
        "{errors:?}"
    );
    assert!(errors[0].is_some());

    let fresh = || {
        let group = FakeGroup::world(1).swap_remove(0);
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        reducer.start().unwrap();
        reducer
    };
    assert!(fresh().ready(0, &[0; 15]).unwrap_err().to_string().contains("15 B, not 16 B"));
    assert!(fresh().ready(2, &[0; 16]).unwrap_err().is_invalid_argument());
    assert!(fresh().start().unwrap_err().is_invalid_argument());
    let unwritten = fresh().ready_with(0, |_| Err(Error::aborted("no memory to read"))).unwrap_err();
    assert!(unwritten.is_aborted());
}

#[test]
fn a_failed_averaging_reaches_finish_and_stays() {
    let errors = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4, 4]), buckets_of(4)).unwrap();
        group.fail_after(1, Error::timeout("the fault of the test"));
        let error = one_step(&mut reducer, rank, 0, &[2, 1, 0]).unwrap_err();
        assert!(reducer.finish().unwrap_err().is_timeout());
        error
    });
    assert!(errors.iter().all(Error::is_timeout), "{errors:?}");
}

#[test]
fn optimizers_that_differ_end_the_reducers_in_the_third_step_or_after_a_window() {
    for (differs_from, found_in) in [(None, None), (Some(0), Some(2)), (Some(1), Some(32))] {
        let errors = run(2, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group.clone(), parameters(&[4]), buckets_of(4)).unwrap();
            for step in 0..70 {
                if let Err(error) = one_step(&mut reducer, rank, step, &[0]) {
                    assert_eq!(Some(step), found_in);
                    assert!(reducer.check().is_err() && group.failure().is_some());
                    return Some(error.to_string());
                }
                let differs = differs_from.is_some_and(|from| step >= from) && !rank.is_main();
                reducer.stepped([0.1], [0.9, if differs { 0.0 } else { 0.01 }]);
            }
            None
        });
        let said = "the optimizer of rank 1 has other settings than that of rank 0";
        for error in errors {
            assert_eq!(error.is_some(), differs_from.is_some(), "{error:?}");
            assert!(error.is_none_or(|error| error.contains(said)));
        }
    }
}

#[test]
fn optimizers_that_differ_are_found_although_no_epoch_has_a_window_of_steps() {
    // A reducer for each epoch, and one that ends each as an uneven `join` does.
    for is_new in [true, false] {
        let errors = run(2, |group| {
            let new = || Reducer::new(group.clone(), parameters(&[4]), buckets_of(4)).unwrap();
            let mut reducer = new();
            for epoch in 0..2 {
                for step in 0..3 {
                    one_step(&mut reducer, group.rank(), step, &[0]).map_err(|error| error.to_string())?;
                    let is_other = epoch == 1 && !group.rank().is_main();
                    reducer.stepped([if is_other { 0.2 } else { 0.1 }], []);
                }
                match is_new {
                    true => reducer = new(),
                    false => reducer.adopt(Rank::MAIN).map_err(|error| error.to_string())?,
                }
            }
            Ok::<(), String>(())
        });
        for error in errors {
            let error = error.unwrap_err();
            assert!(error.contains("was 0.1 on rank 0, and 0.2 on rank 1"), "{error}");
        }
    }
}

#[test]
fn optimizers_that_differ_in_a_join_of_two_steps_are_found_when_it_ends() {
    let errors = run(2, |group| {
        let mut reducer = Reducer::new(group.clone(), parameters(&[4]), buckets_of(4)).unwrap();
        for step in 0..2 {
            one_step(&mut reducer, group.rank(), step, &[0]).unwrap();
            reducer.stepped([if group.rank().is_main() { 0.1 } else { 0.2 }], []);
        }
        reducer.adopt(Rank::MAIN).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("was 0.1 on rank 0, and 0.2 on rank 1"), "{error}");
    }
}

#[test]
fn a_handle_that_leads_to_another_group_by_now_is_refused_unless_the_reducer_is_told() {
    testing::run(2, testing::Fabric::InProcess, |group| {
        for is_told in [false, true] {
            let handle = GroupHandle::new(group.clone());
            let mut reducer =
                Reducer::new(Arc::new(handle.clone()), parameters(&[4]), buckets_of(4)).unwrap();
            one_step(&mut reducer, group.rank(), 0, &[0]).unwrap();
            // The same group in another call.
            handle.rebind(group.in_call(Caller::DdpForward));
            one_step(&mut reducer, group.rank(), 1, &[0]).unwrap();
            handle.rebind(ProcessGroup::alone().unwrap());
            if is_told {
                reducer.regrouped().unwrap();
                one_step(&mut reducer, group.rank(), 2, &[0]).unwrap();
            } else {
                let errors = [reducer.check_joined().unwrap_err(), reducer.start().unwrap_err()];
                assert!(
                    errors.iter().all(|error| error.to_string().contains("leads to another group")),
                    "{errors:?}"
                );
            }
        }
    });
}

#[test]
fn updated_parameters_are_gathered_in_no_other_group_than_that_of_their_owners() {
    testing::run(2, testing::Fabric::InProcess, |group| {
        let handle = GroupHandle::new(group.clone());
        let mut reducer = Reducer::new(Arc::new(handle.clone()), parameters(&[4, 4]), buckets_of(8)).unwrap();
        reducer.shard(vec![Rank::MAIN, Rank::new(1)]).unwrap();
        one_step(&mut reducer, group.rank(), 0, &[1, 0]).unwrap();
        handle.rebind(ProcessGroup::alone().unwrap());
        let error = reducer.gather_parameters(|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("leads to another group"), "{error}");
    });
}

#[test]
fn a_hook_that_would_go_on_from_another_state_on_one_rank_is_refused_on_every_rank() {
    let errors = testing::run(2, testing::Fabric::InProcess, |group| {
        let mut reducer = Reducer::new(Arc::new(group.clone()), parameters(&[4]), buckets_of(4)).unwrap();
        let hook = hooks::PowerSgd::new(hooks::PowerSgdOptions::default()).unwrap();
        let mut loaded = hooks::LoadedHook::default();
        if group.rank().is_main() {
            let state = HookState::default().number("step", 7).of(hook.describe());
            loaded.load(None::<&HookedReducer<()>>, Some(state)).unwrap();
        }
        loaded.register(&mut reducer, Box::new(hook)).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("load the same state on every rank"), "{error}");
        assert!(error.contains("loaded state of the communication hook"), "{error}");
        assert!(error.contains("nothing on rank 1"), "{error}");
    }
}

#[test]
fn gradients_that_a_hook_s_panic_has_lost_are_an_error() {
    struct Panics;
    impl CommHook for Panics {
        fn describe(&self) -> String {
            "panics".into()
        }
        fn start(&mut self, _: &dyn Communicator, _: hooks::GradBucket) -> Result<hooks::Pending> {
            panic!("the hook's own")
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
    let new = |group: &Arc<FakeGroup>| {
        let mut reducer = without_verification(group.clone(), parameters(&[4]), buckets_of(4));
        reducer.hook = Box::new(Panics);
        reducer
    };
    // Where autograd's hooks reach the reducer, the panic itself is the error.
    let group = FakeGroup::world(2).swap_remove(0);
    let hooked = HookedReducer::new(new(&group), ());
    hooked.attempt(|reducer, ()| reducer.start()).unwrap();
    let errors = [
        hooked.attempt(|reducer, ()| reducer.ready(0, &[0; 16])).unwrap_err(),
        hooked.check().unwrap_err(),
        hooked.finish(|_, ()| Ok(())).unwrap_err(),
        group.failure().unwrap(),
    ];
    assert!(errors.iter().all(|error| error.to_string().contains("hook: the hook's own")), "{errors:?}");
    let group = FakeGroup::world(2).swap_remove(0);
    let mut reducer = new(&group);
    reducer.start().unwrap();
    let ready = std::panic::AssertUnwindSafe(|| reducer.ready(0, &[0; 16]));
    assert!(std::panic::catch_unwind(ready).is_err());
    let error = reducer.finish().unwrap_err();
    assert!(error.to_string().contains("lost"), "{error}");
    assert_eq!(group.failure().unwrap().to_string(), error.to_string(), "the other rank does not wait");
}
