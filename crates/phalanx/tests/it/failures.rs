//! What ranks see when something goes wrong: each of them an error that names the cause, and none a hang.

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx::checkpoint::Checkpoints;
use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::{ParameterSpec, Reducer, ReducerOptions};
use phalanx::testing::{Fabric, run};
use phalanx::trace::Trace;
use phalanx::{
    Buffer, Caller, Communicator, DType, Error, ProcessGroup, Rank, ReduceOp, Work, WorldSize, interruptible,
};

/// Nothing in here may wait for this long.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

fn within(limit: Duration, group: &ProcessGroup, f: impl FnOnce(&ProcessGroup) -> Error) -> Error {
    let start = Instant::now();
    let error = f(group);
    assert!(start.elapsed() < limit, "it took {:?}: {error}", start.elapsed());
    error
}

#[test]
fn ranks_that_call_different_collectives_all_see_both_calls() {
    for fabric in Fabric::ALL {
        let errors = run(3, fabric, |group| {
            within(WAIT_LIMIT, &group, |group| {
                let mut data = [1f32; 10];
                // A rank that leaves the barrier late may hear of it there; one that has sent its part already, in the last call.
                let outcome = group.barrier().and_then(|()| match group.rank().get() {
                    1 => group.broadcast(&mut data, Rank::new(1)),
                    _ => group.all_reduce(&mut data, ReduceOp::Sum),
                });
                outcome.and_then(|()| group.barrier()).unwrap_err()
            })
        });
        for error in errors {
            assert!(error.is_mismatch(), "{fabric:?}: {error}");
            let text = error.to_string();
            assert!(text.contains("calls all_reduce(sum, 10 x f32) #1"), "{text}");
            // The root may have gone on to its barrier before it hears of the others' call.
            let names =
                ["calls", "called"].map(|verb| format!("rank 1 {verb} broadcast(10 x f32, root 1) #1"));
            assert!(names.iter().any(|named| text.contains(named)), "{text}");
        }
    }
}

/// As Ctrl-C does it in languages whose runtimes handle signals on the thread that waits.
#[test]
fn a_wait_that_its_own_thread_ends_fails_the_group_with_that_cause() {
    fn pressed() -> phalanx::Result<()> {
        Err(Error::aborted("somebody pressed Ctrl-C"))
    }
    type Wait = fn(&ProcessGroup) -> phalanx::Result<()>;
    let waits: [Wait; 5] = [
        ProcessGroup::barrier,
        // What was called before is not this thread's wait; its turn is.
        |group| {
            let before = group.all_reduce_async(group.alloc(DType::F32, 4)?, ReduceOp::Sum)?;
            group.barrier().map(|()| drop(before))
        },
        |group| {
            let before = group.irecv(group.alloc(DType::F32, 4)?, Rank::new(1))?;
            group.recv(&mut [0f32; 4], Rank::new(1)).map(|()| drop(before))
        },
        |group| group.all_reduce(&mut [0f32; 1 << 16], ReduceOp::Sum),
        |group| group.recv(&mut [0f32; 4], Rank::new(1)),
    ];
    for fabric in Fabric::ALL {
        for wait in waits {
            let errors = run(2, fabric, |group| {
                within(WAIT_LIMIT, &group, |group| {
                    if group.rank().is_main() {
                        return interruptible(pressed, || wait(group)).unwrap_err();
                    }
                    while group.failure().is_none() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    group.barrier().unwrap_err()
                })
            });
            for error in errors {
                assert!(error.is_aborted() && error.rank() == Some(Rank::MAIN), "{fabric:?}: {error}");
                assert!(error.to_string().contains("somebody pressed Ctrl-C"), "{fabric:?}: {error}");
            }
        }
    }
}

#[test]
fn a_check_may_end_the_group_that_its_thread_waits_in() {
    static WAITING: Mutex<Option<ProcessGroup>> = Mutex::new(None);
    fn ends_it() -> phalanx::Result<()> {
        if let Some(group) = WAITING.lock().unwrap().take() {
            assert!(group.failure().is_none());
            group.abort(Error::aborted("the check has ended it"));
        }
        Ok(())
    }
    for fabric in Fabric::ALL {
        let errors = run(2, fabric, |group| {
            within(WAIT_LIMIT, &group, |group| {
                if group.rank().is_main() {
                    *WAITING.lock().unwrap() = Some(group.clone());
                    return interruptible(ends_it, || group.barrier()).unwrap_err();
                }
                while group.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                group.barrier().unwrap_err()
            })
        });
        errors
            .iter()
            .for_each(|error| assert!(error.to_string().contains("has ended it"), "{fabric:?}: {error}"));
    }
}

#[test]
fn a_check_that_panics_ends_the_group_and_nobody_waits_for_its_turn() {
    for fabric in Fabric::ALL {
        let errors = run(2, fabric, |group| {
            within(WAIT_LIMIT, &group, |group| {
                if group.rank().is_main() {
                    // The next call waits for its turn, and not for a peer.
                    let before = group.all_reduce_async(Buffer::from_slice(&[1f32]), ReduceOp::Sum).unwrap();
                    let error = interruptible(|| panic!("a test"), || group.barrier()).unwrap_err();
                    assert!(before.wait().is_err());
                    let after = group.all_reduce_async(Buffer::from_slice(&[1f32]), ReduceOp::Sum);
                    assert!(after.and_then(Work::wait).is_err());
                    return error;
                }
                while group.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                group.barrier().unwrap_err()
            })
        });
        errors
            .iter()
            .for_each(|error| assert!(error.to_string().contains("has panicked"), "{fabric:?}: {error}"));
    }
}

#[test]
fn a_check_that_calls_the_group_in_which_its_thread_waits_is_refused() {
    static WAITING: Mutex<Option<ProcessGroup>> = Mutex::new(None);
    static REFUSED: Mutex<Option<Error>> = Mutex::new(None);
    fn calls_it() -> phalanx::Result<()> {
        if let Some(group) = WAITING.lock().unwrap().take() {
            let started = group.all_reduce_async(Buffer::zeroed(DType::F32, 1), ReduceOp::Sum).err();
            // Its result could not be waited for either.
            *REFUSED.lock().unwrap() = started.and_then(|_| group.barrier().err());
        }
        Ok(())
    }
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            if group.rank().is_main() {
                *WAITING.lock().unwrap() = Some(group.clone());
                interruptible(calls_it, || group.barrier()).unwrap();
                return;
            }
            let start = Instant::now();
            let error = loop {
                if let Some(error) = REFUSED.lock().unwrap().take() {
                    break error;
                }
                assert!(start.elapsed() < WAIT_LIMIT, "{fabric:?}: the check waits");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert!(error.is_invalid_argument() && error.to_string().contains("set a flag"), "{error}");
            // The call in which the check was made goes on.
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_check_that_makes_a_group_where_its_thread_makes_one_is_refused() {
    static WAITING: Mutex<Option<ProcessGroup>> = Mutex::new(None);
    static REFUSED: Mutex<Option<Error>> = Mutex::new(None);
    const BOTH: [Rank; 2] = [Rank::MAIN, Rank::new(1)];
    fn makes_one() -> phalanx::Result<()> {
        if let Some(group) = WAITING.lock().unwrap().take() {
            *REFUSED.lock().unwrap() = group.new_group(&BOTH).err();
        }
        Ok(())
    }
    run(2, Fabric::InProcess, |group| {
        if group.rank().is_main() {
            *WAITING.lock().unwrap() = Some(group.clone());
            interruptible(makes_one, || group.new_group(&BOTH)).unwrap();
            return;
        }
        let start = Instant::now();
        let error = loop {
            if let Some(error) = REFUSED.lock().unwrap().take() {
                break error;
            }
            assert!(start.elapsed() < WAIT_LIMIT, "the check waits");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(error.is_invalid_argument() && error.to_string().contains("set a flag"), "{error}");
        // The call in which the check was made goes on.
        group.new_group(&BOTH).unwrap();
    });
}

/// A group that has no memory for buffers.
struct Poor(ProcessGroup);

impl Communicator for Poor {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }

    fn alloc(&self, _: DType, _: usize) -> phalanx::Result<Buffer> {
        Err(Error::out_of_memory("a test has no memory"))
    }

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(Self(self.0.in_call(caller)))
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> phalanx::Result<Work> {
        self.0.all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> phalanx::Result<Work> {
        self.0.broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(
        &self,
        buffer: Buffer,
        counts: &[usize],
        op: ReduceOp,
    ) -> phalanx::Result<Work> {
        self.0.reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> phalanx::Result<Work> {
        self.0.all_gather_v_in_place_async(buffer, counts)
    }

    fn abort(&self, cause: Error) {
        self.0.abort(cause);
    }

    fn failure(&self) -> Option<Error> {
        self.0.failure()
    }

    fn trace(&self) -> Trace {
        self.0.trace()
    }
}

#[test]
fn a_rank_without_data_that_cannot_answer_ends_the_group() {
    for fabric in Fabric::ALL {
        let errors = run(2, fabric, |group| {
            within(WAIT_LIMIT, &group, |group| {
                let options = JoinOptions::default();
                if group.rank().is_main() {
                    let join = JoinGroup::new(group.clone());
                    let sum = |join: &JoinGroup| {
                        join.step()?;
                        join.all_reduce_async(Buffer::from_slice(&[1f32; 8]), ReduceOp::Sum)?.wait().map(drop)
                    };
                    return join.join(options, || sum(&join)).map(drop).unwrap_err();
                }
                let error =
                    JoinGroup::new(Poor(group.clone())).join(options, || Ok(())).map(drop).unwrap_err();
                // It stays, and the other must not wait for it.
                while group.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                error
            })
        });
        errors
            .iter()
            .for_each(|error| assert!(error.to_string().contains("no memory"), "{fabric:?}: {error}"));
    }
}

/// What users have written, and not what it is made of.
#[test]
fn errors_name_the_calls_that_users_wrote() {
    type Written = fn(&ProcessGroup) -> phalanx::Result<()>;
    let opens: Written = |g| Checkpoints::open(tempfile::tempdir().unwrap().path(), g).map(drop);
    let compares: Written = |g| {
        let parameters = vec![ParameterSpec::new("weight", [2], DType::F32)];
        Reducer::new(Arc::new(g.clone()), parameters, ReducerOptions::default()).map(drop)
    };
    let calls: [(&str, Written); 9] = [
        ("Checkpoints::open", opens),
        ("Ddp::new", compares),
        ("new_group", |g| g.new_group(&[Rank::MAIN]).map(drop)),
        ("split", |g| g.split(Some(0), 0).map(drop)),
        ("broadcast_object", |g| g.broadcast_object(Some(&1), Rank::MAIN).map(drop)),
        ("all_gather_object", |g| g.all_gather_object(&1).map(drop)),
        ("gather_object", |g| g.gather_object(&1, Rank::MAIN).map(drop)),
        ("scatter_object", |g| g.scatter_object(Some(&[1, 2]), Rank::MAIN).map(drop)),
        ("Ddp::join", |g| {
            let join = JoinGroup::new(g.clone());
            join.join(JoinOptions::default(), || join.step()).map(drop)
        }),
    ];
    for fabric in Fabric::ALL {
        for (name, call) in calls {
            let errors = run(2, fabric, |group| {
                within(WAIT_LIMIT, &group, |group| {
                    let outcome = if group.rank().is_main() { call(group) } else { group.barrier() };
                    outcome.and_then(|()| group.barrier()).unwrap_err()
                })
            });
            for error in errors {
                assert!(error.is_mismatch(), "{fabric:?}, {name}: {error}");
                let text = error.to_string();
                // A root may have gone on to its barrier before it hears of the other's.
                let names = ["calls", "called"].map(|verb| format!("rank 0 {verb} {name} ["));
                assert!(names.iter().any(|named| text.contains(named)), "{fabric:?}, {name}: {text}");
                assert!(text.contains("rank 1 calls barrier #"), "{fabric:?}, {name}: {text}");
            }
        }
        // Made of the same collective, and yet not the same.
        for error in run(2, fabric, |group| {
            let calls = [Caller::DdpAverageParameters, Caller::DdpBackward];
            let group = group.in_call(calls[group.rank().index()]);
            within(WAIT_LIMIT, &group, |group| group.barrier().and_then(|()| group.barrier()).unwrap_err())
        }) {
            assert!(error.is_mismatch() && error.to_string().contains("Ddp::average_parameters"), "{error}");
        }
    }
}

/// Of the ranks of an epoch one has fewer batches, and no more to do.
#[test]
fn a_rank_with_fewer_batches_is_shown_the_way_to_join() {
    for fabric in Fabric::ALL {
        let outcomes = run(2, fabric, |group| {
            let ddp = group.in_call(Caller::DdpBackward);
            for _ in 0..3 - group.rank().get() {
                ddp.all_reduce(&mut [1f32; 4], ReduceOp::Avg)?;
            }
            Ok::<(), Error>(())
        });
        let error = outcomes[0].as_ref().unwrap_err();
        let text = error.to_string();
        assert!(error.is_peer_left(), "{fabric:?}: {text}");
        assert!(text.contains("Ddp::backward [all_reduce(avg, 4 x f32)] #2: rank 1"), "{text}");
        assert!(text.contains("has rank 1 fewer batches?") && text.contains("Ddp::join"), "{text}");
        assert!(text.contains("docs/guide/uneven-inputs.md"), "{text}");
    }
}

#[test]
fn every_kind_of_difference_is_found() {
    type Difference = fn(&ProcessGroup) -> phalanx::Result<()>;
    let differences: [(Difference, Difference); 6] = [
        (|g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0f32; 9], ReduceOp::Sum)),
        (|g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Max)),
        (|g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum), |g| g.all_reduce(&mut [0i32; 8], ReduceOp::Sum)),
        (
            |g| g.all_reduce(&mut vec![0f32; 1 << 20], ReduceOp::Sum),
            |g| g.all_reduce(&mut vec![0f32; (1 << 20) + 1], ReduceOp::Sum),
        ),
        (|g| g.barrier(), |g| g.all_to_all(&[0f32; 2], &mut [0f32; 2])),
        (|g| g.barrier(), |g| g.all_reduce(&mut vec![0f32; 1 << 20], ReduceOp::Sum)),
    ];
    for fabric in Fabric::ALL {
        for (one, other) in differences {
            let errors = run(2, fabric, |group| {
                within(WAIT_LIMIT, &group, |group| {
                    let outcome = if group.rank().is_main() { one(group) } else { other(group) };
                    outcome.and_then(|()| group.barrier()).unwrap_err()
                })
            });
            assert!(errors.iter().all(Error::is_mismatch), "{fabric:?}: {errors:?}");
        }
    }
}

#[test]
fn a_missing_call_times_out_with_the_name_of_the_missing_rank() {
    for fabric in Fabric::ALL {
        let errors = run(2, fabric, |group| {
            let hasty = group.with_timeout(Duration::from_millis(200));
            if group.rank().is_main() {
                let call = |hasty: &ProcessGroup| hasty.all_reduce(&mut [0f32], ReduceOp::Sum).unwrap_err();
                return Some(within(WAIT_LIMIT, &hasty, call));
            }
            while group.failure().is_none() {
                std::thread::yield_now();
            }
            None
        });
        let error = errors[0].as_ref().unwrap();
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.peer(), Some(Rank::new(1)));
        assert!(error.to_string().contains("all_reduce(sum, 1 x f32) #0"), "{error}");
    }
}

#[test]
fn a_time_out_says_where_the_peer_was_last_heard_of() {
    for fabric in [Fabric::InProcess, Fabric::Tcp] {
        let all_done = Barrier::new(3);
        run(3, fabric, |group| {
            // Large enough for a ring, in which each rank hears of its neighbour.
            let mut data = vec![1f32; 1 << 16];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            // A rank that is still in it would fail with the others' next call.
            all_done.wait();
            if group.rank().is_main() {
                while group.failure().is_none() {
                    std::thread::yield_now();
                }
                return;
            }
            // Rank 1 waits for rank 0, and rank 2 for rank 1, which may not have begun yet.
            let hasty = group.with_timeout(Duration::from_millis(200));
            let error = hasty.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
            assert!(error.is_timeout(), "{fabric:?}: {error}");
            let text = error.to_string();
            let missing = |rank| format!("rank {rank} was last heard of in all_reduce(sum, 65536 x f32) #0");
            let is_missing = text.contains(&missing(0)) || text.contains(&missing(1));
            assert!(is_missing || text.contains("rank 1 has begun this call"), "{text}");
        });
    }
}

#[test]
fn a_deadline_also_bounds_the_wait_for_ones_turn() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            if group.rank().is_main() {
                // Rank 1 never calls it; its own deadline is half an hour away.
                let first = group.all_reduce_async(Buffer::zeroed(DType::F32, 8), ReduceOp::Sum).unwrap();
                let hasty = group.with_timeout(Duration::from_millis(100));
                let error = within(WAIT_LIMIT, &hasty, |group| group.barrier().unwrap_err());
                assert!(error.is_timeout(), "{fabric:?}: {error}");
                assert!(first.wait().unwrap_err().is_timeout());
            } else {
                while group.failure().is_none() {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[test]
fn a_rank_that_left_is_told_from_one_that_died() {
    for fabric in Fabric::ALL {
        let all_done = Barrier::new(3);
        let errors = run(3, fabric, |group| {
            group.barrier().unwrap();
            // A rank that is still in it would fail with the other's next call.
            all_done.wait();
            (!group.rank().is_main()).then(|| {
                within(WAIT_LIMIT, &group, |group| {
                    loop {
                        if let Err(error) = group.barrier() {
                            break error;
                        }
                    }
                })
            })
        });
        for error in errors.into_iter().flatten() {
            assert!(error.is_peer_left(), "{fabric:?}: {error}");
        }
    }
}

#[test]
fn what_a_rank_sent_before_it_left_still_arrives() {
    const LENGTH: usize = 300_000;
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let rank = group.rank();
            let mut data = vec![f32::from(u8::try_from(rank.get()).unwrap()); LENGTH];
            if rank.is_main() {
                group.broadcast(&mut data, rank).unwrap();
                group.send(&[7i64; 1000], Rank::new(2)).unwrap();
                // Its part is in the kernel's buffers by now, and most of it not read yet.
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
            group.broadcast(&mut data, Rank::MAIN).unwrap();
            assert!(data.iter().all(|element| *element == 0.0));
            if rank.get() == 2 {
                std::thread::sleep(Duration::from_millis(50));
                let mut late = [0i64; 1000];
                group.recv(&mut late, Rank::MAIN).unwrap();
                assert_eq!(late, [7; 1000]);
            }
        });
    }
}

#[test]
fn an_abort_reaches_every_rank_with_its_reason() {
    for fabric in Fabric::ALL {
        let errors = run(3, fabric, |group| {
            if group.rank().get() == 2 {
                group.abort(Error::aborted("the loss is NaN").with_remedy("lower the learning rate"));
            }
            within(WAIT_LIMIT, &group, |group| {
                loop {
                    if let Err(error) = group.barrier() {
                        break error;
                    }
                }
            })
        });
        for error in errors {
            assert!(
                error.is_aborted() && error.to_string().contains("the loss is NaN"),
                "{fabric:?}: {error}"
            );
            assert!(
                error.to_string().contains("rank 2") && error.remedy() == Some("lower the learning rate")
            );
        }
    }
}

#[test]
fn every_work_in_flight_gets_the_cause_and_the_group_refuses_more() {
    for fabric in Fabric::ALL {
        let started = Barrier::new(2);
        run(2, fabric, |group| {
            if group.rank().is_main() {
                let start =
                    |_| group.all_reduce_async(Buffer::zeroed(DType::F32, 1000), ReduceOp::Sum).unwrap();
                let works: Vec<_> = (0..10).map(start).collect();
                started.wait();
                for work in works {
                    assert!(work.wait().unwrap_err().is_aborted());
                }
                assert!(group.barrier().unwrap_err().is_aborted());
                assert!(group.all_reduce_async(Buffer::zeroed(DType::F32, 1), ReduceOp::Sum).is_err());
            } else {
                started.wait();
                std::thread::sleep(Duration::from_millis(20));
                group.abort(Error::aborted("enough"));
            }
        });
    }
}

#[test]
fn a_panic_of_one_rank_is_the_others_error() {
    for fabric in Fabric::ALL {
        let outcome = std::panic::catch_unwind(|| {
            run(2, fabric, |group| {
                if group.rank().is_main() {
                    let error = within(WAIT_LIMIT, &group, |group| group.barrier().unwrap_err());
                    assert!(error.to_string().contains("rank 1 panicked"), "{error}");
                } else {
                    std::panic::resume_unwind(Box::new("rank 1 goes down"));
                }
            })
        });
        assert_eq!(*outcome.unwrap_err().downcast::<&str>().unwrap(), "rank 1 goes down");
    }
}

type Collective = fn(&ProcessGroup) -> phalanx::Result<()>;

/// Collectives of four ranks, each with what an error says of it.
const CALLS: [(&str, Collective); 22] = [
    ("all_reduce(sum, 8 x f32)", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Sum)),
    ("all_reduce(max, 8 x f32)", |g| g.all_reduce(&mut [0f32; 8], ReduceOp::Max)),
    ("all_reduce(sum, 9 x f32)", |g| g.all_reduce(&mut [0f32; 9], ReduceOp::Sum)),
    ("all_reduce(sum, 8 x i64)", |g| g.all_reduce(&mut [0i64; 8], ReduceOp::Sum)),
    ("all_reduce(sum, 300000 x f32)", |g| g.all_reduce(&mut vec![0f32; 300_000], ReduceOp::Sum)),
    ("broadcast(8 x f32, root 0)", |g| g.broadcast(&mut [0f32; 8], Rank::MAIN)),
    ("broadcast(8 x f32, root 3)", |g| g.broadcast(&mut [0f32; 8], Rank::new(3))),
    ("broadcast(300000 x f32, root 1)", |g| g.broadcast(&mut vec![0f32; 300_000], Rank::new(1))),
    ("reduce(sum, 8 x f32, root 1)", |g| g.reduce(&mut [0f32; 8], Rank::new(1), ReduceOp::Sum)),
    ("reduce(sum, 8 x f32, root 2)", |g| g.reduce(&mut [0f32; 8], Rank::new(2), ReduceOp::Sum)),
    ("all_gather(8 x f32)", |g| g.all_gather(&[0f32; 8], &mut [0f32; 32])),
    // So long that each rank of a host exchanges a part with other hosts.
    ("all_gather(90000 x f32)", |g| g.all_gather(&vec![0f32; 90_000], &mut vec![0f32; 360_000])),
    ("reduce_scatter(sum, 8 x f32)", |g| g.reduce_scatter(&[0f32; 8], &mut [0f32; 2], ReduceOp::Sum)),
    ("reduce_scatter(sum, 360000 x f32)", |g| scatter_sums(g, 360_000)),
    ("gather(8 x f32, root 0)", |g| gather(g, Rank::MAIN)),
    ("gather(8 x f32, root 2)", |g| gather(g, Rank::new(2))),
    ("scatter(8 x f32, root 1)", |g| scatter(g, Rank::new(1))),
    ("scatter(8 x f32, root 3)", |g| scatter(g, Rank::new(3))),
    ("all_to_all(", |g| g.all_to_all(&[0f32; 8], &mut [0f32; 8])),
    ("all_gather_v(", |g| g.all_gather_v(&[0f32; 8], &mut [0f32; 32], &[8; 4])),
    ("barrier", ProcessGroup::barrier),
    ("monitored_barrier", |g| g.monitored_barrier(WAIT_LIMIT)),
];

fn scatter_sums(group: &ProcessGroup, length: usize) -> phalanx::Result<()> {
    group.reduce_scatter(&vec![0f32; length], &mut vec![0f32; length / 4], ReduceOp::Sum)
}

fn gather(group: &ProcessGroup, root: Rank) -> phalanx::Result<()> {
    let length = if group.rank() == root { 32 } else { 0 };
    group.gather(&[0f32; 8], &mut vec![0f32; length], root)
}

fn scatter(group: &ProcessGroup, root: Rank) -> phalanx::Result<()> {
    let length = if group.rank() == root { 32 } else { 0 };
    group.scatter(&vec![0f32; length], &mut [0f32; 8], root)
}

/// Within each host all call the same, so that only hosts can learn from each other that they differ.
#[test]
fn hosts_that_call_different_collectives_all_see_both_calls() {
    all_differ(Fabric::TwoHosts, &CALLS);
}

/// Of few elements and of many: two neighbours may exchange all that they would in the same call, and then wait for ranks that send them nothing.
#[test]
fn ranks_that_call_the_same_collective_with_other_lengths_all_see_both_calls() {
    let names = ["all_reduce(sum", "all_gather(", "reduce_scatter("];
    let is_among = |call: &(&str, Collective)| names.iter().any(|name| call.0.starts_with(name));
    let calls: Vec<_> = CALLS.into_iter().filter(is_among).collect();
    for fabric in [Fabric::InProcess, Fabric::Tcp] {
        all_differ(fabric, &calls);
    }
}

/// Each two of these calls, on one half of the ranks each.
fn all_differ(fabric: Fabric, calls: &[(&'static str, Collective)]) {
    let pairs: Vec<(usize, usize)> =
        (0..calls.len()).flat_map(|one| (0..one).map(move |other| (one, other))).collect();
    // They mostly wait.
    for some in pairs.chunks(16) {
        std::thread::scope(|scope| {
            for &(one, other) in some {
                scope.spawn(move || differ(fabric, calls[one], calls[other]));
            }
        });
    }
}

fn differ(fabric: Fabric, (one, call_one): (&str, Collective), (other, call_other): (&str, Collective)) {
    let errors = run(4, fabric, |group| {
        within(WAIT_LIMIT, &group, |group| {
            let outcome = if group.rank().get() < 2 { call_one(group) } else { call_other(group) };
            // A rank that only sends has done its part, and hears of it in one of the next calls.
            outcome
                .and_then(|()| std::iter::repeat_with(|| group.barrier()).find(Result::is_err).unwrap())
                .unwrap_err()
        })
    });
    for error in errors {
        let text = error.to_string();
        assert!(error.is_mismatch(), "{one} and {other} over {fabric:?}: {text}");
        assert!([one, other].iter().any(|call| text.contains(call)), "{one} and {other}: {text}");
        for call in [one, other] {
            // A rank that only sends has gone on: it has called it before, and another may hear of its next call first.
            let ways = [format!("calls {call}"), format!("called {call}"), "calls barrier #1".to_owned()];
            assert!(ways.iter().any(|way| text.contains(way)), "{one} and {other}: {text}");
        }
    }
}
