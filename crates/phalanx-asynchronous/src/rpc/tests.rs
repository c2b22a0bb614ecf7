use std::sync::mpsc;

use super::*;
use crate::deadline::Backoff;

/// Nothing takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `rank` on two ranks of this process.
fn two(rank: impl Fn(ProcessGroup) + Sync) {
    several(2, rank);
}

fn several(ranks: u32, rank: impl Fn(ProcessGroup) + Sync) {
    std::thread::scope(|scope| {
        for group in ProcessGroup::in_process(WorldSize::new(ranks).unwrap()).unwrap() {
            scope.spawn(|| rank(group));
        }
    });
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let mut pauses =
        Backoff::new((Duration::from_millis(1), Duration::from_millis(20)), Deadline::after(LIMIT));
    while !is() {
        assert!(pauses.pause(), "{what}");
    }
}

/// Waits when it is dropped, calls, ends the calls, or panics.
struct Kept(Box<dyn Fn() + Send + Sync>);

impl Drop for Kept {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn who_sends_may_see_the_end_first_and_on_lost_is_called_all_the_same() {
    two(|group| {
        let (say, said) = mpsc::channel();
        let say = Mutex::new(say);
        let lost = move |context: &Context, _: &Error| {
            let _ = say.lock().send(context.caller());
        };
        let rpc = Rpc::builder().on_lost(lost).start(&group).unwrap();
        let peer = Rank::new(1);
        if group.rank().is_main() {
            rpc.shared.link(peer).unwrap().fail(Error::aborted("a message could not be sent"));
        }
        group.barrier().unwrap();
        if group.rank().is_main() {
            assert_eq!(said.recv_timeout(LIMIT), Ok(peer));
            assert!(said.recv_timeout(Duration::from_millis(50)).is_err(), "once");
        }
    });
}

#[test]
fn a_process_that_was_forked_from_a_rank_s_does_not_end_its_calls() {
    two(|group| {
        let rpc = Rpc::builder().start(&group).unwrap();
        // Of no process.
        drop(Guard { shared: rpc.shared.clone(), process: 0 });
        assert!(!rpc.shared.closed.load(Ordering::Acquire));
        rpc.shutdown().unwrap();
    });
}

#[test]
fn all_peers_are_left_however_many_there_are() {
    // More than are left at a time.
    several(11, |group| {
        let rpc = Rpc::builder().start(&group).unwrap();
        let shared = rpc.shared.clone();
        rpc.shutdown().unwrap();
        assert!(shared.links.iter().all(|link| link.group().is_none()));
    });
}

#[test]
fn what_to_do_without_memory_is_told_on_both_sides() {
    two(|group| {
        let rpc = Rpc::builder().start(&group).unwrap();
        let peer = Rank::new(1 - group.rank().get());
        group.barrier().unwrap();
        if group.rank().is_main() {
            let pair = rpc.shared.link(peer).unwrap().group().unwrap();
            pair.abort(Error::out_of_memory("no memory for it").with_remedy("send less"));
        }
        eventually("the calls have ended", || rpc.failure(peer).unwrap().is_some());
        let error = rpc.failure(peer).unwrap().unwrap();
        assert!(error.is_out_of_memory() && error.remedy() == Some("send less"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn the_loss_of_a_rank_is_told_while_every_thread_waits_for_it() {
    two(|group| {
        let (say, said) = mpsc::channel();
        let (say, said) = (Mutex::new(say), Mutex::new(said));
        let (ended, end) = mpsc::channel();
        let ended = Mutex::new(ended);
        let rpc = Rpc::builder()
            .threads(1)
            .on_lost(move |context, _| {
                let _ = say.lock().send(context.caller());
            })
            // As a handler that waits for what the other rank brings.
            .handler("wait", move |_, ()| {
                let _ = ended.lock().send(said.lock().recv_timeout(LIMIT));
                Ok(())
            })
            .start(&group)
            .unwrap();
        let peer = Rank::new(1);
        if group.rank().is_main() {
            let call = rpc.call_async::<_, ()>(Rank::MAIN, "wait", &()).unwrap();
            group.barrier().unwrap();
            assert_eq!(end.recv_timeout(LIMIT), Ok(Ok(peer)));
            call.wait().unwrap();
        } else {
            group.barrier().unwrap();
            drop(rpc);
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_call_that_is_never_answered_keeps_nothing_when_the_calls_have_ended() {
    let (say, said) = mpsc::channel();
    let (say, held) = (Mutex::new(say), Mutex::new(Vec::new()));
    let rpc = Rpc::builder()
        .deferred("never", move |_, (): (), answer: Answer<()>| {
            held.lock().push(answer);
            let _ = say.lock().send(());
        })
        .start(&ProcessGroup::alone().unwrap())
        .unwrap();
    let call = rpc.call_async::<_, ()>(Rank::MAIN, "never", &()).unwrap();
    said.recv_timeout(LIMIT).unwrap();
    let shared = Arc::downgrade(&rpc.shared);
    drop((call, rpc));
    eventually("all memory of the calls is freed", || shared.strong_count() == 0);
}

#[test]
fn who_gives_calls_no_time_is_told_what_waits_without_an_end() {
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let rpc = Rpc::builder()
        .handler("wait", move |_, ()| gate.lock().recv_timeout(LIMIT).map_err(Error::other))
        .start(&ProcessGroup::alone().unwrap())
        .unwrap();
    let error = rpc.with_timeout(Duration::ZERO).call::<_, ()>(Rank::MAIN, "wait", &()).unwrap_err();
    let is_told = error.remedy().is_some_and(|remedy| remedy.contains("Duration::MAX"));
    assert!(error.is_timeout() && is_told, "{error}");
    open.send(()).unwrap();
    rpc.shutdown().unwrap();
}

#[test]
fn a_reference_is_lent_while_every_thread_of_its_owner_is_busy() {
    two(|group| {
        let (open, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let rpc = Rpc::builder()
            .threads(1)
            .object("number", |_, n: i64| Ok(n))
            .handler("wait", move |_, ()| gate.lock().recv_timeout(LIMIT).map_err(Error::other))
            .start(&group)
            .unwrap();
        let owner = Rank::new(1);
        if group.rank().is_main() {
            let number: RemoteRef<i64> = rpc.remote(owner, "number", &7i64).unwrap();
            let busy = rpc.call_async::<_, ()>(owner, "wait", &()).unwrap();
            number.lend(Rank::MAIN).unwrap();
            group.barrier().unwrap();
            busy.wait().unwrap();
        } else {
            group.barrier().unwrap();
            open.send(()).unwrap();
        }
        rpc.shutdown().unwrap();
    });
}

#[test]
fn a_reference_that_is_dropped_does_not_overtake_a_call_on_its_object() {
    for to_itself in [false, true] {
        two(|group| {
            let (open, gate) = mpsc::channel::<()>();
            let gate = Mutex::new(gate);
            let rpc = Rpc::builder()
                .threads(1)
                .object("number", |_, n: i64| Ok(n))
                .method("read", |_, n: &i64, (): ()| Ok(*n))
                .handler("wait", move |_, ()| gate.lock().recv_timeout(LIMIT).map_err(Error::other))
                .start(&group)
                .unwrap();
            let owner = Rank::new(u32::from(!to_itself));
            if group.rank().is_main() {
                let number: RemoteRef<i64> = rpc.remote(owner, "number", &7i64).unwrap();
                // The only thread is busy, so the call is still queued when the object is released.
                let busy = rpc.call_async::<_, ()>(owner, "wait", &()).unwrap();
                let call = number.call_async::<_, i64>("read", &()).unwrap();
                drop(number);
                group.barrier().unwrap();
                if to_itself {
                    open.send(()).unwrap();
                }
                assert_eq!(call.wait().unwrap(), 7);
                busy.wait().unwrap();
            } else {
                group.barrier().unwrap();
                eventually("it is released", || rpc.objects() == 0);
                open.send(()).unwrap();
            }
            rpc.shutdown().unwrap();
        });
    }
}

#[test]
fn a_ticket_of_other_calls_is_refused() {
    two(|group| {
        let start = || {
            let builder = Rpc::builder().object("number", |_, n: i64| Ok(n));
            builder.method("read", |_, n: &i64, (): ()| Ok(*n)).start(&group).unwrap()
        };
        let (rpc, other) = (start(), start());
        if group.rank().is_main() {
            // Each is the first object of its calls.
            let remote =
                |rpc: &Rpc, n: i64| -> RemoteRef<i64> { rpc.remote(Rank::new(1), "number", &n).unwrap() };
            let (one, _two) = (remote(&rpc, 1), remote(&other, 2));
            let ticket = one.lend(Rank::MAIN).unwrap();
            let error = other.accept::<i64>(ticket).unwrap_err();
            assert!(
                error.is_invalid_argument() && error.to_string().contains("lent by another Rpc"),
                "{error}"
            );
            assert_eq!(rpc.accept::<i64>(ticket).unwrap().call::<_, i64>("read", &()).unwrap(), 1);
        }
        rpc.shutdown().unwrap();
        other.shutdown().unwrap();
    });
}

#[test]
fn what_a_kept_object_does_when_it_is_dropped_harms_nobody() {
    two(|group| {
        let (say, said) = mpsc::channel();
        let (say, said) = (Mutex::new(say), Mutex::new(said));
        let say = Arc::new(say);
        let rpc = Rpc::builder()
            .threads(1)
            .handler("now", |_, ()| Ok(3u8))
            .object("panics", |_, ()| Ok(Kept(Box::new(|| panic!("no such luck")))))
            .object("calls back", move |context, ()| {
                let (rpc, to, say) = (context.rpc().clone(), context.caller(), say.clone());
                Ok(Kept(Box::new(move || {
                    let _ = say.lock().send(rpc.call::<_, u8>(to, "now", &()));
                })))
            })
            .start(&group)
            .unwrap();
        let owner = Rank::new(1);
        if group.rank().is_main() {
            for _ in 0..3 {
                drop(rpc.remote::<_, Kept>(owner, "panics", &()).unwrap());
                drop(rpc.remote::<_, Kept>(owner, "calls back", &()).unwrap());
                assert_eq!(rpc.call::<_, u8>(owner, "now", &()).unwrap(), 3, "all goes on");
            }
        } else {
            for _ in 0..3 {
                assert_eq!(said.lock().recv_timeout(LIMIT).unwrap().unwrap(), 3);
            }
        }
        group.barrier().unwrap();
        rpc.shutdown().unwrap();
    });
}

#[test]
fn the_last_handle_in_a_kept_object_ends_the_calls_when_it_is_dropped() {
    two(|group| {
        let (end, ended) = mpsc::channel::<()>();
        let slot = Arc::new(Mutex::new(None::<(Rpc, mpsc::Sender<()>)>));
        let last = slot.clone();
        let rpc = Rpc::builder()
            .object("keeps", move |_, ()| {
                let held = Mutex::new(last.lock().take());
                // The sender goes after the handle.
                Ok(Kept(Box::new(move || drop(held.lock().take()))))
            })
            .start(&group)
            .unwrap();
        let peer = Rank::new(1 - group.rank().get());
        if group.rank().is_main() {
            drop((slot, end));
            group.barrier().unwrap();
            drop(rpc.remote::<_, Kept>(peer, "keeps", &()).unwrap());
            eventually("rank 1 has ended its calls", || rpc.failure(peer).unwrap().is_some());
        } else {
            *slot.lock() = Some((rpc, end));
            group.barrier().unwrap();
            assert_eq!(ended.recv_timeout(LIMIT), Err(mpsc::RecvTimeoutError::Disconnected));
        }
        group.barrier().unwrap();
    });
}

#[test]
fn an_answer_waits_for_its_turn_as_long_as_the_connection_stands() {
    two(|group| {
        // A message may take so long, and those before the answer take longer.
        let timeout = Duration::from_secs(5);
        group.barrier().unwrap();
        let rpc = Rpc::builder().handler("now", |_, ()| Ok(3u8)).start(&group.with_timeout(timeout)).unwrap();
        let peer = Rank::new(1 - group.rank().get());
        if group.rank().is_main() {
            group.barrier().unwrap();
            assert_eq!(rpc.call::<_, u8>(peer, "now", &()).unwrap(), 3);
        } else {
            let (link, turn) = (rpc.shared.link(peer).unwrap(), rpc.occupy(peer).unwrap());
            group.barrier().unwrap();
            eventually("the handler has returned", || link.answers_on_the_way() > 0);
            std::thread::sleep(timeout + timeout / 10);
            drop(turn);
        }
        rpc.shutdown().unwrap();
    });
}

#[test]
fn answers_on_the_way_to_a_slow_rank_delay_no_calls_of_others() {
    several(3, |group| {
        let calls = 3;
        let rpc = Rpc::builder().threads(1).handler("now", |_, ()| Ok(3u8)).start(&group).unwrap();
        let slow = Rank::new(1);
        match group.rank() {
            Rank::MAIN => {
                // As if a long message to it were under way.
                let (link, turn) = (rpc.shared.link(slow).unwrap(), rpc.occupy(slow).unwrap());
                group.barrier().unwrap();
                eventually("its calls are being answered", || link.answers_on_the_way() == calls);
                assert_eq!(rpc.call::<_, u8>(Rank::MAIN, "now", &()).unwrap(), 3, "its own call");
                // The third rank's call has been answered.
                group.barrier().unwrap();
                assert_eq!(link.answers_on_the_way(), calls);
                drop(turn);
            }
            rank if rank == slow => {
                group.barrier().unwrap();
                let call = |_| rpc.call_async::<_, u8>(Rank::MAIN, "now", &()).unwrap();
                let pending: Vec<_> = (0..calls).map(call).collect();
                group.barrier().unwrap();
                pending.into_iter().for_each(|call| assert_eq!(call.wait().unwrap(), 3));
            }
            _ => {
                group.barrier().unwrap();
                assert_eq!(rpc.call::<_, u8>(Rank::MAIN, "now", &()).unwrap(), 3);
                group.barrier().unwrap();
            }
        }
        rpc.shutdown().unwrap();
    });
}

#[test]
fn long_calls_one_after_the_other_share_their_memory_on_both_sides() {
    for to_itself in [false, true] {
        two(|group| {
            let rpc = Rpc::builder()
                .handler("length", |_, text: String| Ok(text.len()))
                .handler("text", |_, length: usize| Ok("t".repeat(length)))
                .start(&group)
                .unwrap();
            let to = Rank::new(u32::from(!to_itself));
            if group.rank().is_main() {
                for length in [100_000, 99_000, 100_000] {
                    assert_eq!(rpc.call::<_, usize>(to, "length", &"t".repeat(length)).unwrap(), length);
                    assert_eq!(rpc.call::<_, String>(to, "text", &length).unwrap().len(), length);
                }
                assert_eq!(rpc.shared.spare.count(), 1);
            }
            group.barrier().unwrap();
            assert_eq!(rpc.shared.spare.count(), usize::from(group.rank().is_main() || !to_itself));
            rpc.shutdown().unwrap();
        });
    }
}
