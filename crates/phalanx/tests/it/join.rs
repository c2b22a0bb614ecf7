//! Ranks with unequal amounts of data.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::testing::{Fabric, run};
use phalanx::{Buffer, Communicator, DType, Element, Error, GroupHandle, Rank, ReduceOp, Result};

fn combine<T: Element>(group: &JoinGroup, mine: T, op: ReduceOp) -> Result<T> {
    let combined = group.all_reduce_async(Buffer::from_slice(&[mine; 3]), op)?.wait()?;
    Ok(combined.as_slice::<T>()?[2])
}

#[test]
fn ranks_without_data_change_no_result_and_all_return_together() {
    for (fabric, world) in Fabric::ALL.into_iter().flat_map(|fabric| [(fabric, 2), (fabric, 3), (fabric, 4)])
    {
        let outcomes = run(world, fabric, |group| {
            let group = JoinGroup::new(group);
            let rank = group.rank().get();
            // Rank 0 has no batch at all, the last rank the most.
            let joined = group.join(JoinOptions::default(), || {
                for step in 0..rank * 2 {
                    let active = group.step()?;
                    let first = step / 2 + 1; // Ranks below have no data.
                    assert_eq!(active, (world - first) as usize);
                    assert_eq!(GroupHandle::new(group.clone()).active_ranks(), active);
                    let sum: u32 = (first..world).sum();
                    assert_eq!(combine(&group, rank as f32, ReduceOp::Sum)?, sum as f32);
                    assert_eq!(
                        combine(&group, f64::from(rank), ReduceOp::Avg)?,
                        f64::from(sum) / f64::from(world)
                    );
                    assert_eq!(combine(&group, -f64::from(rank), ReduceOp::Max)?, -f64::from(first));
                    assert_eq!(combine(&group, i64::from(rank), ReduceOp::Min)?, i64::from(first));
                    assert_eq!(combine(&group, -(rank as i32), ReduceOp::Max)?, -(first as i32));
                    let product: u32 = (first..world).product();
                    assert_eq!(combine(&group, rank as u8, ReduceOp::Product)?, product as u8);
                    let told =
                        group.broadcast_async(Buffer::from_slice(&[i64::from(rank)]), Rank::MAIN)?.wait()?;
                    assert_eq!(told.as_slice::<i64>()?, [i64::from(first)], "the first with data speaks");
                }
                Ok(rank)
            });
            let joined = joined.unwrap();
            assert_eq!(joined.value, rank);
            assert_eq!(group.active_ranks(), world as usize);
            // Afterwards the group is as it was.
            assert_eq!(combine(&group, 1i64, ReduceOp::Sum).unwrap(), i64::from(world));
            (joined.last, joined.uneven)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == (Rank::new(world - 1), true)), "{outcomes:?}");
    }
}

#[test]
fn scattered_sums_are_answered_too_and_a_gather_needs_every_rank() {
    for fabric in [Fabric::InProcess, Fabric::SharedMemory] {
        run(3, fabric, |group| {
            let group = JoinGroup::new(group);
            let rank = group.rank().index();
            let counts = [2, 0, 3];
            let own = [0..2, 2..2, 2..5][rank].clone();
            let joined = group.join(JoinOptions::default(), || {
                for _ in 0..=rank {
                    let active = group.step()?;
                    let ones = Buffer::from_slice(&[1.0f32; 5]);
                    let sums = group.reduce_scatter_v_async(ones, &counts, ReduceOp::Sum)?.wait()?;
                    assert_eq!(sums.as_slice::<f32>()?[own.clone()], [active as f32; 5][own.clone()]);
                    let gathered = group.all_gather_v_in_place_async(sums, &counts);
                    if active == 3 {
                        assert_eq!(gathered?.wait()?.as_slice::<f32>()?, [3.0; 5]);
                    } else {
                        assert!(gathered.unwrap_err().is_invalid_argument());
                    }
                }
                Ok(())
            });
            assert_eq!(joined.unwrap().last, Rank::new(2));
        });
    }
}

#[test]
fn equal_amounts_are_told_apart_and_nesting_is_refused() {
    run(3, Fabric::InProcess, |group| {
        let group = JoinGroup::new(group);
        for _ in 0..2 {
            let joined = group.join(JoinOptions::default(), || {
                group.step()?;
                let nested = group.join(JoinOptions::default(), || Ok(())).map(drop);
                let replaced = group.rebind(phalanx::ProcessGroup::alone()?);
                for (outcome, words) in [(nested, "called inside `join`"), (replaced, "cannot be replaced")] {
                    let error = outcome.unwrap_err();
                    assert!(error.is_invalid_argument() && error.to_string().contains(words), "{error}");
                }
                combine(&group, 1i32, ReduceOp::Sum)
            });
            let joined = joined.unwrap();
            assert_eq!((joined.value, joined.uneven, joined.last), (3, false, Rank::MAIN));
        }
    });
    let alone = JoinGroup::new(phalanx::ProcessGroup::alone().unwrap());
    assert_eq!(alone.join(JoinOptions::default(), || alone.step()).unwrap().value, 1);
}

#[test]
fn a_model_that_has_not_taken_over_an_uneven_join_is_an_error_on_every_rank() {
    fn step(reducer: &mut Reducer) -> Result<()> {
        reducer.start()?;
        reducer.ready(0, &1.0f32.to_ne_bytes())?;
        reducer.finish()
    }
    for is_uneven in [false, true] {
        let outcomes = run(2, Fabric::InProcess, |group| {
            let group = JoinGroup::new(group);
            let new = || {
                let parameters = vec![ParameterSpec::new("weight", [1], DType::F32)];
                Reducer::new(Arc::new(group.clone()), parameters, ReducerOptions::default()).unwrap()
            };
            let (mut own, mut other) = (new(), new());
            let joined = group.join(JoinOptions::default(), || {
                for number in 0..=group.rank().get() {
                    group.step()?;
                    step(&mut own)?;
                    // Some ranks make more steps with the other one, or all make one.
                    if is_uneven || number == 0 {
                        step(&mut other)?;
                    }
                }
                Ok(())
            });
            let joined = joined.unwrap();
            assert!(joined.uneven);
            own.adopt(joined.last).unwrap();
            step(&mut own).unwrap();
            let outcome = step(&mut other).and_then(|()| step(&mut other));
            // One that is made now was in no join.
            if !is_uneven {
                step(&mut new()).unwrap();
            }
            outcome.map_err(|error| error.to_string())
        });
        for outcome in outcomes {
            assert_eq!(outcome.is_err(), is_uneven);
            assert!(outcome.err().is_none_or(|error| error.contains("1 to 2 by now")));
        }
    }
}

#[test]
fn early_termination_is_an_error_on_every_rank_that_ends_nothing_else() {
    for world in [2, 3, 4] {
        run(world, Fabric::Tcp, |group| {
            let group = JoinGroup::new(group);
            let mut options = JoinOptions::default();
            options.throw_on_early_termination = true;
            let mut done = 0;
            let error = group
                .join(options, || {
                    for _ in 0..if group.rank().get() == 1 { 2 } else { 5 } {
                        group.step()?;
                        combine(&group, 1i32, ReduceOp::Sum)?;
                        done += 1;
                    }
                    Ok(())
                })
                .unwrap_err();
            assert!(error.to_string().contains("rank 1 has no data left"), "{error}");
            assert_eq!(done, 2, "the same step everywhere");
            assert_eq!(combine(&group, 1i64, ReduceOp::Sum).unwrap(), i64::from(world));
        });
    }
}

#[test]
fn other_options_on_one_rank_are_an_error_on_every_rank() {
    let [mut unlike, mut throws] = [JoinOptions::default(); 2];
    unlike.divide_by_initial_world_size = false;
    throws.throw_on_early_termination = true;
    // Where one rank has no data at all, it hears of the options of the others.
    for (other, batches) in [(unlike, 2), (throws, 2), (unlike, 0), (throws, 0)] {
        let errors = run(2, Fabric::InProcess, |group| {
            let group = JoinGroup::new(group);
            let is_main = group.rank().is_main();
            let options = if is_main { JoinOptions::default() } else { other };
            let joined = group.join(options, || {
                for _ in 0..if is_main { 2 } else { batches } {
                    group.step()?;
                    combine(&group, 1i64, ReduceOp::Sum)?;
                }
                Ok(())
            });
            joined.map(|joined| joined.value).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| error.contains("with different options")), "{errors:?}");
    }
}

#[test]
fn a_failure_of_one_rank_s_body_reaches_all() {
    let errors = run(3, Fabric::SharedMemory, |group| {
        let group = JoinGroup::new(group);
        group
            .join(JoinOptions::default(), || {
                if group.rank().get() == 2 {
                    return Err(Error::aborted("the disk is full"));
                }
                for _ in 0..3 {
                    group.step()?;
                }
                Ok(())
            })
            .unwrap_err()
            .to_string()
    });
    assert!(errors.iter().all(|error| error.contains("the disk is full")), "{errors:?}");
}

#[test]
fn a_panic_of_one_rank_s_body_that_its_program_catches_reaches_all() {
    let errors = run(2, Fabric::InProcess, |group| {
        let joining = JoinGroup::new(group.clone());
        let joined = catch_unwind(AssertUnwindSafe(|| {
            joining.join(JoinOptions::default(), || {
                assert!(!group.rank().is_main(), "a test");
                joining.step()
            })
        }));
        assert_eq!(joined.is_err(), group.rank().is_main());
        group.barrier().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("rank 0 panicked")), "{errors:?}");
}

#[test]
fn that_workers_form_a_new_group_ends_the_join_and_not_the_group() {
    run(2, Fabric::InProcess, |group| {
        let joining = JoinGroup::new(group.clone());
        let error = joining
            .join(JoinOptions::default(), || {
                joining.step()?;
                // As a commit of an elastic job, on all ranks.
                group.barrier()?;
                Err::<(), _>(Error::regrouping("workers have come, and all form a new group"))
            })
            .unwrap_err();
        assert!(error.is_regrouping(), "{error}");
        assert!(group.failure().is_none(), "{:?}", group.failure());
        assert_eq!(combine(&joining, 1i64, ReduceOp::Sum).unwrap(), 2);
    });
}

#[test]
fn a_handle_and_its_clones_go_from_one_group_to_another() {
    use phalanx::{Caller, GroupHandle, ProcessGroup, WorldSize};
    let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
    let clone = JoinGroup::from(&handle);
    clone.abort(Error::aborted("the first is over"));
    assert!(handle.failure().unwrap().to_string().contains("the first is over"));
    assert!(combine(&clone, 1i32, ReduceOp::Sum).is_err());

    let mut groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap().into_iter();
    let (first, second) = (groups.next().unwrap(), groups.next().unwrap());
    let in_call = handle.in_call(Caller::DdpBackward);
    handle.rebind(first);
    assert!(clone.failure().is_none());
    let sums = std::thread::scope(|scope| {
        let other = scope.spawn(|| combine(&JoinGroup::from(&second), 2i32, ReduceOp::Sum).unwrap());
        [combine(&clone, 1i32, ReduceOp::Sum).unwrap(), other.join().unwrap()]
    });
    assert_eq!((sums, in_call.world_size().get()), ([3, 3], 2));

    let inside = clone.join(JoinOptions::default(), || clone.rebind(ProcessGroup::alone()?)).unwrap_err();
    assert!(inside.is_invalid_argument(), "{inside}");
    // A clone for a call still says so.
    let alone = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap().swap_remove(0);
    handle.rebind(alone.with_timeout(std::time::Duration::from_millis(50)));
    let late =
        in_call.all_reduce_async(Buffer::from_slice(&[1i32]), ReduceOp::Sum).unwrap().wait().unwrap_err();
    assert!(late.to_string().contains("Ddp::backward"), "{late}");
}
