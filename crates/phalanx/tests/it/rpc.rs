//! Calls between ranks, on every transport.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use phalanx::asynchronous::{Answer, Bytes, RemoteRef, Rpc, RpcBuilder, Ticket};
use phalanx::testing::{Fabric, run};
use phalanx::{Error, ProcessGroup, Rank, ReduceOp};

/// Nothing takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn everywhere(rank: impl Fn(ProcessGroup, Fabric) + Sync) {
    for fabric in Fabric::ALL {
        for world in [2, 3] {
            run(world, fabric, |group| rank(group, fabric));
        }
    }
}

fn next(rpc: &Rpc) -> Rank {
    Rank::new((rpc.rank().get() + 1) % rpc.world_size().get())
}

#[test]
fn functions_are_called_by_name_with_arguments_of_any_length() {
    everywhere(|group, fabric| {
        let rpc = Rpc::builder()
            .handler("add", |_, (a, b): (i64, i64)| Ok(a + b))
            .handler("reversed", |_, mut bytes: Vec<u8>| {
                bytes.reverse();
                Ok(bytes)
            })
            .handler("who", |context, ()| Ok((context.caller(), context.rpc().rank())))
            .start(&group)
            .unwrap();
        for to in rpc.world_size().ranks() {
            assert_eq!(rpc.call::<_, i64>(to, "add", &(2i64, 40i64)).unwrap(), 42, "{fabric:?}");
            assert_eq!(rpc.call::<_, (Rank, Rank)>(to, "who", &()).unwrap(), (rpc.rank(), to));
            // In the frame, just beyond it, and far beyond a ring.
            for length in [0, 100, 215, 216, 217, 3_000_000usize] {
                let mut bytes: Vec<u8> = (0..length).map(|index| index as u8).collect();
                let answer: Vec<u8> = rpc.call(to, "reversed", &bytes).unwrap();
                bytes.reverse();
                assert!(answer == bytes, "{length} bytes over {fabric:?}");
            }
        }
        // Collectives and messages go on beside them.
        let calls: Vec<_> =
            (0..100i64).map(|n| rpc.call_async::<_, i64>(next(&rpc), "add", &(n, n)).unwrap()).collect();
        let mut sum = [1i64];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        for (n, call) in calls.into_iter().enumerate() {
            assert_eq!(call.wait().unwrap(), 2 * n as i64);
        }
        rpc.shutdown().unwrap();
        group.barrier().unwrap();
    });
}

#[test]
fn bytes_of_any_length_are_carried_in_both_directions_and_outlive_the_calls() {
    everywhere(|group, fabric| {
        let rpc = Rpc::builder()
            .handler("turned", |_, (name, parts, number): (String, Vec<Bytes>, u32)| {
                Ok((number + 1, parts, name))
            })
            .start(&group)
            .unwrap();
        let mut kept = Vec::new();
        for lengths in
            [vec![], vec![1], vec![40_000], vec![3_000_000, 5, 70_000], vec![1 << 15; 3], vec![40_000]]
        {
            let parts: Vec<Bytes> =
                lengths.iter().zip(1u8..).map(|(length, byte)| vec![byte; *length].into()).collect();
            for to in rpc.world_size().ranks() {
                let (number, back, name): (u32, Vec<Bytes>, String) =
                    rpc.call(to, "turned", &("name", &parts, 6u32)).unwrap();
                assert!((number, &*name) == (7, "name") && back == parts, "{lengths:?} over {fabric:?}");
                kept.push((back, parts.clone()));
            }
        }
        rpc.shutdown().unwrap();
        assert!(kept.iter().all(|(back, sent)| back == sent), "nothing was received into memory in use");
    });
}

#[test]
fn errors_and_panics_come_back_with_rank_and_name() {
    everywhere(|group, _| {
        let rpc = Rpc::builder()
            .handler("divide", |_, (a, b): (i64, i64)| match b {
                0 => Err(Error::other("the divisor is 0").with_remedy("choose another")),
                b => Ok(a / b),
            })
            .handler("panics", |_, (): ()| -> phalanx::Result<()> { panic!("no such luck") })
            .deferred("forgets", |_, (): (), answer: Answer<()>| drop(answer))
            .start(&group)
            .unwrap();
        let to = next(&rpc);
        let (me, to_) = (rpc.rank(), to);
        let fails = |outcome: phalanx::Result<i64>, parts: &[&str]| {
            let error = outcome.unwrap_err();
            let text = error.to_string();
            for part in parts.iter().chain(&[&*format!("rank {to_} ("), &*format!("rank {me}")]) {
                assert!(text.contains(part), "{text:?} lacks {part:?}");
            }
            error
        };
        let error = fails(
            rpc.call(to, "divide", &(1i64, 0i64)),
            &["rpc \"divide\"", "the divisor is 0", "choose another"],
        );
        assert_eq!(error.rank(), Some(to));
        fails(rpc.call(to, "panics", &()), &["rpc \"panics\"", "panicked: no such luck"]);
        fails(rpc.call(to, "forgets", &()), &["without an answer"]);
        let error =
            fails(rpc.call(to, "multiply", &()), &["no function \"multiply\"", "divide, forgets, panics"]);
        assert!(error.is_invalid_argument());
        let error =
            fails(rpc.call(to, "divide", "text"), &["cannot read the arguments of \"divide\"", "(i64, i64)"]);
        assert!(error.is_mismatch());
        let wrong = rpc.call::<_, String>(to, "divide", &(6i64, 2i64)).unwrap_err();
        assert!(wrong.is_mismatch() && wrong.to_string().contains("cannot read the result"), "{wrong}");
        assert_eq!(rpc.call::<_, i64>(to, "divide", &(6i64, 2i64)).unwrap(), 3, "all goes on");
        assert!(rpc.call::<_, ()>(Rank::new(9), "divide", &()).unwrap_err().is_invalid_argument());
        rpc.shutdown().unwrap();
    });
}

#[test]
fn a_rank_that_cannot_start_tells_the_others() {
    run(2, Fabric::Tcp, |group| {
        let twice = |builder: RpcBuilder| match group.rank().is_main() {
            true => builder.handler("f", |_, ()| Ok(())),
            false => builder,
        };
        let error = twice(Rpc::builder().handler("f", |_, ()| Ok(()))).start(&group).unwrap_err().to_string();
        let expected = if group.rank().is_main() { "two functions" } else { "rank 0 could not start" };
        assert!(error.contains(expected), "{error}");
        group.barrier().unwrap();
    });
}

/// Fibonacci numbers, with every addend from the other rank: handlers call back, as deep as they may.
fn nested(context: &phalanx::asynchronous::Context, depth: u32) -> phalanx::Result<u32> {
    if depth == 0 {
        return Ok(1);
    }
    let rpc = context.rpc();
    let to = context.caller();
    let both =
        [rpc.call_async::<_, u32>(to, "nested", &(depth - 1))?, rpc.call_async(to, "nested", &(depth - 1))?];
    both.into_iter().map(|call| call.wait()).sum()
}

#[test]
fn handlers_that_call_back_and_full_windows_on_both_sides_do_not_wait_for_each_other() {
    everywhere(|group, fabric| {
        // One thread, two places, and all ranks call all others at once from several threads.
        let builder = Rpc::builder().threads(1).calls_in_flight(2).timeout(LIMIT);
        let rpc = builder.handler("nested", nested).start(&group).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..6 {
                        for to in rpc.world_size().ranks() {
                            let sum: u32 = rpc.call(to, "nested", &3u32).unwrap();
                            assert_eq!(sum, 8, "{fabric:?}, round {round}");
                        }
                    }
                });
            }
        });
        let error = rpc.call::<_, u32>(next(&rpc), "nested", &4u32).unwrap_err();
        assert!(error.to_string().contains("more than 4 deep"), "{error}");
        rpc.shutdown().unwrap();
    });
}

#[test]
fn ranks_that_send_much_at_once_all_receive() {
    everywhere(|group, _| {
        let rpc = Rpc::builder()
            .threads(1)
            .bytes_in_flight(1 << 20)
            .timeout(LIMIT)
            .handler("echo", |_, bytes: Vec<u8>| Ok(bytes))
            .start(&group)
            .unwrap();
        let bytes = vec![7u8; 2_000_000];
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for to in rpc.world_size().ranks().filter(|to| *to != rpc.rank()) {
                        assert!(rpc.call::<_, Vec<u8>>(to, "echo", &bytes).unwrap() == bytes);
                    }
                });
            }
        });
        rpc.shutdown().unwrap();
    });
}

/// A gate that handlers wait at.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

#[test]
fn who_calls_more_than_is_admitted_waits_and_is_told_why() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let gate = Arc::new(Gate::default());
            let (handlers, running, most) =
                (gate.clone(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (counted, highest) = (running.clone(), most.clone());
            let rpc = Rpc::builder()
                .calls_in_flight(3)
                .threads(2)
                .handler("wait", move |_, ()| {
                    highest.fetch_max(counted.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    handlers.pass();
                    counted.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                })
                .start(&group)
                .unwrap();
            let calls: Vec<_> =
                (0..3).map(|_| rpc.call_async::<_, ()>(next(&rpc), "wait", &()).unwrap()).collect();
            let patient = rpc.with_timeout(Duration::from_millis(100));
            let error = patient.call::<_, ()>(next(&rpc), "wait", &()).unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains("3 are in flight"), "{error}");
            assert!(calls.iter().all(|call| !call.is_completed()));
            group.barrier().unwrap();
            gate.open();
            calls.into_iter().for_each(|call| call.wait().unwrap());
            rpc.call::<_, ()>(next(&rpc), "wait", &()).unwrap();
            assert!(most.load(Ordering::SeqCst) <= 2, "two threads");
            rpc.shutdown().unwrap();
        });
    }
}

#[test]
fn a_call_that_is_not_answered_in_time_ends_alone() {
    everywhere(|group, _| {
        let late: Arc<Mutex<Vec<Answer<u8>>>> = Arc::default();
        let kept = late.clone();
        let rpc = Rpc::builder()
            .deferred("later", move |_, (): (), answer: Answer<u8>| kept.lock().unwrap().push(answer))
            .handler("now", |_, ()| Ok(1u8))
            .start(&group)
            .unwrap();
        let brief = rpc.with_timeout(Duration::from_millis(50));
        let start = Instant::now();
        let error = brief.call::<_, u8>(next(&rpc), "later", &()).unwrap_err();
        assert!(error.is_timeout() && start.elapsed() < LIMIT, "{error}");
        let text = error.to_string();
        assert!(text.contains("rpc \"later\" on rank") && text.contains("within 0.1 s"), "{text}");
        assert_eq!(error.peer(), Some(next(&rpc)));
        // Until then nobody answers, which a brief call could have to wait for.
        group.barrier().unwrap();
        assert_eq!(rpc.call::<_, u8>(next(&rpc), "now", &()).unwrap(), 1);
        // Waiting in parts.
        let call = rpc.call_async::<_, u8>(next(&rpc), "later", &()).unwrap();
        let call = call.wait_timeout(Duration::from_millis(20)).unwrap_err();
        assert!(!call.is_completed());
        group.barrier().unwrap();
        eventually("both calls have come", || late.lock().unwrap().len() == 2);
        // The first of these answers comes too late, and does no harm.
        let answers = std::mem::take(&mut *late.lock().unwrap());
        answers.into_iter().for_each(|answer| answer.send(Ok(9)));
        assert_eq!(call.wait().unwrap(), 9);
        rpc.shutdown().unwrap();
    });
}

/// Waits until `is` holds.
fn eventually(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn counters() -> RpcBuilder {
    Rpc::builder()
        .object("counter", |_, start: i64| Ok(AtomicI64::new(start)))
        .object("text", |_, text: String| Ok(text))
        .method("add", |_, counter: &AtomicI64, by: i64| Ok(counter.fetch_add(by, Ordering::SeqCst) + by))
        .handler("kept", |context, ()| Ok(context.rpc().objects() as u64))
}

#[test]
fn an_object_lives_on_its_owner_until_the_last_reference_is_dropped() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let (give, take) = mpsc::channel::<Ticket>();
            let give = Mutex::new(give);
            let rpc = counters()
                .handler("take", move |_, ticket: Ticket| {
                    give.lock().unwrap().send(ticket).map_err(Error::other)
                })
                .start(&group)
                .unwrap();
            let owner = Rank::new(2);
            if group.rank().is_main() {
                let counter: RemoteRef<AtomicI64> = rpc.remote(owner, "counter", &10i64).unwrap();
                let clone = counter.clone();
                drop(counter);
                assert_eq!(clone.call::<_, i64>("add", &1i64).unwrap(), 11);
                let ticket = clone.lend(Rank::new(1)).unwrap();
                let error = rpc.accept::<AtomicI64>(ticket).unwrap_err();
                assert!(error.to_string().contains("lent to rank 1") && error.remedy().is_some(), "{error}");
                rpc.call::<_, ()>(Rank::new(1), "take", &ticket).unwrap();
                drop(clone);
                // Another type, and an object that could not be made.
                let text: RemoteRef<String> = rpc.remote(owner, "text", "five").unwrap();
                let error = text.call::<_, i64>("add", &1i64).unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains("AtomicI64"), "{error}");
                assert!(rpc.remote::<_, i64>(owner, "counter", "eight").is_err());
                assert!(
                    rpc.call::<_, i64>(owner, "counter", &1i64)
                        .unwrap_err()
                        .to_string()
                        .contains("Rpc::remote")
                );
            }
            group.barrier().unwrap();
            if group.rank().get() == 1 {
                let counter: RemoteRef<AtomicI64> = rpc.accept(take.recv_timeout(LIMIT).unwrap()).unwrap();
                assert_eq!(counter.call::<_, i64>("add", &5i64).unwrap(), 16);
                eventually("rank 0 has let go", || rpc.call::<_, u64>(owner, "kept", &()).unwrap() == 1);
                drop(counter);
                eventually("nobody holds it", || rpc.call::<_, u64>(owner, "kept", &()).unwrap() == 0);
            }
            rpc.shutdown().unwrap();
        });
    }
}

#[test]
fn who_leaves_ends_its_calls_and_holds_nothing_and_the_others_go_on() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let (say, said) = mpsc::channel();
            let say = Mutex::new(say);
            let answers: Mutex<Vec<Answer<()>>> = Mutex::default();
            let rpc = counters()
                .deferred("never", move |_, (): (), answer: Answer<()>| answers.lock().unwrap().push(answer))
                .on_lost(move |context, error| {
                    say.lock().unwrap().send((context.caller(), error.clone())).unwrap()
                })
                .start(&group)
                .unwrap();
            let leaver = Rank::new(2);
            let held: Option<RemoteRef<AtomicI64>> =
                (group.rank() == leaver).then(|| rpc.remote(Rank::MAIN, "counter", &0i64).unwrap());
            let pending =
                (group.rank() != leaver).then(|| rpc.call_async::<_, ()>(leaver, "never", &()).unwrap());
            group.barrier().unwrap();
            if group.rank() == leaver {
                drop(rpc);
                assert!(
                    held.unwrap().call::<_, i64>("add", &1i64).unwrap_err().to_string().contains("shut down")
                );
                return;
            }
            let error = pending.unwrap().wait().unwrap_err();
            assert!(error.is_peer_left() && error.peer() == Some(leaver), "{error}");
            assert!(rpc.call::<_, u64>(leaver, "kept", &()).unwrap_err().is_peer_left());
            assert!(rpc.failure(leaver).unwrap().is_some());
            let (lost, why) = said.recv_timeout(LIMIT).unwrap();
            assert!(lost == leaver && why.is_peer_left());
            eventually("what it held", || rpc.call::<_, u64>(Rank::MAIN, "kept", &()).unwrap() == 0);
            rpc.shutdown().unwrap();
        });
    }
}

#[test]
fn the_end_waits_for_the_calls_of_others_however_long_and_says_whose_answers_are_missing() {
    run(2, Fabric::SharedMemory, |group| {
        let rpc = Rpc::builder().handler("now", |_, ()| Ok(())).start(&group).unwrap();
        match group.rank().is_main() {
            true => rpc.shutdown().unwrap(),
            false => {
                // Rank 0 waits in its shutdown, and serves.
                for _ in 0..1000 {
                    rpc.call::<_, ()>(Rank::MAIN, "now", &()).unwrap();
                }
                let other = rpc.clone();
                rpc.shutdown().unwrap();
                assert!(
                    other
                        .call::<_, ()>(Rank::MAIN, "now", &())
                        .unwrap_err()
                        .to_string()
                        .contains("shut down")
                );
            }
        }
        // However long: the time-out is for answers.
        let answers: Mutex<Vec<Answer<()>>> = Mutex::default();
        let keeps =
            move |_: &phalanx::asynchronous::Context, (): (), answer| answers.lock().unwrap().push(answer);
        let rpc = Rpc::builder().deferred("never", keeps).start(&group).unwrap();
        let brief = rpc.with_timeout(Duration::from_millis(50));
        drop(rpc);
        if group.rank().is_main() {
            brief
                .shutdown()
                .unwrap_or_else(|error| assert!(error.to_string().contains("has no answer"), "{error}"));
        } else {
            std::thread::sleep(Duration::from_millis(300));
            let patient = brief.with_timeout(LIMIT);
            let call = patient.call_async::<_, ()>(Rank::MAIN, "never", &()).unwrap();
            let error = brief.shutdown().unwrap_err();
            assert!(
                error.is_timeout() && error.to_string().contains("has not answered all calls"),
                "{error}"
            );
            assert!(call.wait().is_err());
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_world_of_one_calls_itself() {
    let rpc =
        Rpc::builder().threads(1).handler("nested", nested).start(&ProcessGroup::alone().unwrap()).unwrap();
    assert_eq!(rpc.call::<_, u32>(Rank::MAIN, "nested", &3u32).unwrap(), 8);
    rpc.shutdown().unwrap();
}
