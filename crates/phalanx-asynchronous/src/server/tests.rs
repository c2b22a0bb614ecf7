use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::builder::{MAX_SHARD, shares};
use super::service::{Hosted, Service};
use super::shard::Shard;
use super::*;
use crate::clock::Clocks;
use crate::group::ProcessGroup;
use crate::world_size::WorldSize;
use crate::{Consistency, Sgd};

const KEYS: [usize; 2] = [2, 2];

fn ranks(ranks: &[u32]) -> Vec<Rank> {
    ranks.iter().copied().map(Rank::new).collect()
}

/// Runs `rank` on `world` ranks of this process.
fn run(world: u32, rank: impl Fn(ProcessGroup) + Sync) {
    std::thread::scope(|scope| {
        for group in ProcessGroup::in_process(WorldSize::new(world).unwrap()).unwrap() {
            scope.spawn(|| rank(group));
        }
    });
}

#[test]
fn a_replica_that_has_missed_updates_does_not_take_over() {
    run(3, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .servers(&ranks(&[1, 2]))
            .workers(&[Rank::MAIN])
            .replicated()
            .start(&group, &mut parameters)
            .unwrap();
        let is_main = group.rank().is_main();
        if is_main {
            server.step(&[1.0; 4], &mut parameters).unwrap();
        }
        group.barrier().unwrap();
        // The servers part from each other, but not from the worker.
        if group.rank().get() == 1 {
            server.rpc.sever(Rank::new(2));
        }
        if !is_main {
            // Messages that were sent before both have seen it may still arrive.
            let other = Rank::new(3 - group.rank().get());
            let deadline = Deadline::after(Duration::from_secs(60));
            while server.rpc.failure(other).unwrap().is_none() {
                assert!(!deadline.has_passed(), "the connection is cut");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        group.barrier().unwrap();
        if is_main {
            server.step(&[1.0; 4], &mut parameters).unwrap();
            assert_eq!(parameters, [-1.0; 4]);
        }
        group.barrier().unwrap();
        if group.rank().get() == 1 {
            // As if it died: rank 2 lacks the second step.
            drop(server);
            group.barrier().unwrap();
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        if is_main {
            let error = server.pull(0..1, &mut [0.0; 2]).unwrap_err();
            assert_eq!(error.peer(), Some(Rank::new(1)), "{error}");
            server.pull(1..2, &mut parameters[2..]).unwrap();
            assert_eq!(parameters[2..], [-1.0; 2], "the other server has all");
        }
        group.barrier().unwrap();
        server.shutdown().unwrap();
    });
}

#[test]
fn the_statistics_of_a_server_that_is_lost_are_its_replica_s() {
    run(3, |group| {
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .servers(&ranks(&[1, 2]))
            .workers(&[Rank::MAIN])
            .replicated()
            .start(&group, &mut [1.0; 4])
            .unwrap();
        if group.rank().get() == 1 {
            drop(server);
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        if group.rank().is_main() {
            // Nothing else has been asked.
            let servers: Vec<u32> =
                server.statistics().unwrap().iter().map(|shard| shard.server.get()).collect();
            assert_eq!(servers, [2, 2]);
        }
        server.shutdown().unwrap();
    });
}

#[test]
fn workers_are_connected_with_servers_and_not_with_each_other() {
    run(4, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(0.5))
            .servers(&ranks(&[1]))
            .workers(&ranks(&[0, 2, 3]))
            .start(&group, &mut parameters)
            .unwrap();
        let serves = |rank: &Rank| rank.get() == 1;
        for peer in group.world_size().ranks().filter(|peer| *peer != group.rank()) {
            let is_apart = server.rpc.failure(peer).unwrap().is_some();
            assert_eq!(is_apart, !serves(&peer) && !serves(&group.rank()), "{peer}");
        }
        // Nobody ends before all have looked.
        group.barrier().unwrap();
        if !serves(&group.rank()) {
            for _ in 0..2 {
                server.step(&[1.0; 4], &mut parameters).unwrap();
            }
            assert_eq!(parameters, [0.0; 4]);
        }
        server.shutdown().unwrap();
    });
}

#[test]
fn a_worker_with_a_slow_connection_does_not_hold_up_the_answers_of_others() {
    run(3, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(0.5))
            .servers(&[Rank::MAIN])
            .workers(&ranks(&[1, 2]))
            .timeout(Duration::from_secs(60))
            .start(&group, &mut parameters)
            .unwrap();
        let slow = Rank::new(1);
        let others = group.new_group(&ranks(&[0, 2])).unwrap();
        let meet = || others.as_ref().unwrap().barrier().unwrap();
        match group.rank().get() {
            0 => {
                let deadline = Deadline::after(Duration::from_secs(60));
                while !server.statistics().unwrap()[0].clocks.contains(&(slow, 1)) {
                    assert!(!deadline.has_passed(), "rank 1 ends its step, and waits for rank 2");
                }
                let busy = server.rpc.occupy(slow).unwrap();
                meet();
                meet();
                drop(busy);
            }
            1 => {
                server.step(&[1.0; 4], &mut parameters).unwrap();
            }
            _ => {
                meet();
                // Both may go on.
                server.step(&[1.0; 4], &mut parameters).unwrap();
                meet();
            }
        }
        assert!(group.rank().is_main() || parameters == [0.5; 4], "{parameters:?}");
        server.shutdown().unwrap();
    });
}

#[test]
fn a_wait_for_workers_that_do_not_come_names_them_and_not_the_server() {
    run(4, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .servers(&[Rank::MAIN])
            .workers(&ranks(&[1, 2, 3]))
            .timeout(Duration::from_secs(2))
            .start(&group, &mut parameters)
            .unwrap();
        if group.rank().get() == 1 {
            let error = server.step(&[1.0; 4], &mut parameters).unwrap_err();
            let text = error.to_string();
            assert!(error.is_timeout() && error.peer() == Some(Rank::new(2)), "{text}");
            assert!(text.contains("ranks 2, 3 did not end a step within 2.0 s"), "{text}");
            assert!(text.contains("0 steps were ended there, and 1 on this rank"), "{text}");
            refused(&server, "ranks 2, 3");
        }
        group.barrier().unwrap();
    });
}

/// A server of two keys on rank 0, seen from the rank `own`.
fn hosted(workers: &[u32], own: Rank) -> Arc<Service> {
    let place = Place { keys: 0..2, primary: Rank::MAIN, replica: None };
    let (layout, clocks) = (Layout::new(&KEYS).unwrap(), Clocks::new(Consistency::Bsp, ranks(workers)));
    let rule = Arc::new(Sgd::new(1.0));
    let shard = Shard::new(layout, vec![1.0; 4], rule, Compensation::default(), clocks).unwrap();
    Service::new(vec![Hosted::new(0, shard, &place, own)])
}

/// The workers of that server, and the steps that each has ended.
fn clocks(rpc: &Rpc) -> Vec<(Rank, u64)> {
    let shard: Reply<ShardStatistics> = rpc.call(Rank::MAIN, STATISTICS, &0u32).unwrap();
    let Reply::Done(shard) = shard else { panic!("{shard:?}") };
    shard.clocks
}

#[test]
fn a_late_operation_does_not_end_the_wait_of_a_later_one() {
    let service = hosted(&[0, 1], Rank::MAIN);
    let rpc = service.clone().functions(Rpc::builder()).start(&ProcessGroup::alone().unwrap()).unwrap();
    let request = |number, ask| Request { shard: 0, number, ask };
    let step = |number| request(number, Ask::Step { push: None, advance: true, pull: None });
    let waits: PendingCall<Reply<Done>> = rpc.call_async(Rank::MAIN, STEP, &step(5)).unwrap();
    let deadline = Deadline::after(Duration::from_secs(60));
    while clocks(&rpc)[0] != (Rank::MAIN, 1) {
        assert!(!deadline.has_passed(), "it has ended its step, and waits for rank 1");
    }
    let (context, answer) = rpc.called_by(Rank::MAIN);
    service.step(&context, step(4), answer);
    assert!(!waits.is_completed());
    let (context, answer) = rpc.called_by(Rank::new(1));
    service.step(&context, request(1, Ask::Leave), answer);
    let Reply::Done(done) = waits.wait().unwrap() else { panic!("it serves") };
    assert_eq!(done.clock, 1);
}

#[test]
fn a_worker_that_asks_again_over_a_slow_connection_holds_up_nobody() {
    run(2, |group| {
        let rpc = hosted(&[0, 1], group.rank()).functions(Rpc::builder()).start(&group).unwrap();
        let ask = |number, ask| -> PendingCall<Reply<Done>> {
            rpc.call_async(Rank::MAIN, STEP, &Request { shard: 0, number, ask }).unwrap()
        };
        let worker = Rank::new(1);
        if group.rank() == worker {
            let waits = ask(5, Ask::Step { push: None, advance: true, pull: None });
            group.barrier().unwrap();
            let leaves = ask(6, Ask::Leave);
            group.barrier().unwrap();
            let error = waits.wait().unwrap_err().to_string();
            assert!(error.contains("rank 1 has asked again"), "{error}");
            leaves.wait().unwrap();
        } else {
            let deadline = Deadline::after(Duration::from_secs(60));
            while !clocks(&rpc).contains(&(worker, 1)) {
                assert!(!deadline.has_passed(), "it has ended its step, and waits for this rank");
            }
            // As if a long message to it were under way.
            let busy = rpc.occupy(worker).unwrap();
            group.barrier().unwrap();
            while clocks(&rpc).iter().any(|(rank, _)| *rank == worker) {
                assert!(!deadline.has_passed(), "it has left");
            }
            group.barrier().unwrap();
            drop(busy);
        }
        rpc.shutdown().unwrap();
    });
}

#[test]
fn who_is_lost_becomes_no_worker_although_it_has_asked() {
    run(2, |group| {
        let (say, said) = std::sync::mpsc::channel();
        let say = Mutex::new(say);
        let service = hosted(&[0], group.rank());
        let rpc = service
            .clone()
            .functions(Rpc::builder())
            // After the service's own.
            .on_lost(move |_, _| {
                let _ = say.lock().send(());
            })
            .start(&group)
            .unwrap();
        if group.rank().is_main() {
            said.recv_timeout(Duration::from_secs(60)).unwrap();
            // Its question has come before, and its handler runs after that.
            let lost = Rank::new(1);
            let (context, answer) = rpc.called_by(lost);
            service.step(&context, Request { shard: 0, number: 1, ask: Ask::Join }, answer);
            assert_eq!(clocks(&rpc), [(Rank::MAIN, 0)]);
        }
        drop(rpc);
        group.barrier().unwrap();
    });
}

/// Panics once, at its third update.
struct Panics(AtomicBool);

impl UpdateRule for Panics {
    fn states(&self) -> usize {
        0
    }

    fn update(&self, time: u64, _: f32, parameters: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {
        parameters[0] += 1.0;
        assert!(time != 3 || self.0.swap(true, Ordering::SeqCst), "no such luck");
    }
}

#[test]
fn a_shard_whose_rule_panics_takes_no_more_operations() {
    for consistency in [Consistency::Bsp, Consistency::Asp] {
        run(3, |group| {
            let mut parameters = [0.0; 4];
            let server = ParameterServer::builder(&KEYS, Panics(AtomicBool::new(false)))
                .consistency(consistency)
                .servers(&ranks(&[1, 2]))
                .workers(&[Rank::MAIN])
                .replicated()
                .start(&group, &mut parameters)
                .unwrap();
            if group.rank().is_main() {
                for _ in 0..2 {
                    server.step(&[1.0; 4], &mut parameters).unwrap();
                }
                for _ in 0..3 {
                    let error = server.step(&[1.0; 4], &mut parameters).unwrap_err().to_string();
                    assert!(error.contains("the update rule panicked: no such luck"), "{error}");
                }
            }
            group.barrier().unwrap();
            server.shutdown().unwrap();
        });
    }
}

#[test]
fn one_rank_that_cannot_start_tells_the_others() {
    run(3, |group| {
        let is_wrong = group.rank().get() == 1;
        let start = |elements: usize, rate: f32, lengths: &[usize]| {
            let mut parameters = vec![1.0; elements];
            ParameterServer::builder(lengths, Sgd::new(rate)).start(&group, &mut parameters).unwrap_err()
        };
        let error = start(if is_wrong { 1 } else { 4 }, 0.1, &KEYS).to_string();
        assert!(error.contains(if is_wrong { "4 elements" } else { "rank 1 could not start" }), "{error}");
        let error = start(4, 0.1, if is_wrong { &[usize::MAX, 1] } else { &KEYS }).to_string();
        assert!(error.contains(if is_wrong { "too many" } else { "rank 1 could not start" }), "{error}");
        let error = start(4, if is_wrong { 0.2 } else { 0.1 }, &KEYS);
        assert!(error.is_mismatch() && error.to_string().contains("rank 1"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_server_has_no_more_parameters_than_a_step_can_send() {
    let servers = ranks(&[0, 1]);
    let layout = |length| Layout::new(&[length, length]).unwrap();
    assert_eq!(shares(&layout(MAX_SHARD), &servers).unwrap(), [0..1, 1..2]);
    let error = shares(&layout(MAX_SHARD + 1), &servers).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("rank 0 would serve 67"), "{error}");
}

#[test]
fn a_worker_that_leaves_tells_all_servers_even_if_one_fails() {
    run(3, |group| {
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .servers(&ranks(&[1, 2]))
            .workers(&[Rank::MAIN])
            .start(&group, &mut [1.0; 4])
            .unwrap();
        if group.rank().get() == 1 {
            drop(server);
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        if group.rank().is_main() {
            assert!(server.leave().is_err());
            let last: Reply<ShardStatistics> = server.rpc.call(Rank::new(2), STATISTICS, &1u32).unwrap();
            let Reply::Done(last) = last else { panic!("{last:?}") };
            assert!(last.clocks.is_empty(), "{last:?}");
        }
        server.shutdown().unwrap();
    });
}

/// What is refused after a failed step, each with the step's `cause`.
fn refused(server: &ParameterServer, cause: &str) {
    let mut parameters = [0.0; 4];
    for error in [
        server.step(&[1.0; 4], &mut parameters).unwrap_err(),
        server.push(0..1, &[1.0; 2]).unwrap_err(),
        server.advance().unwrap_err(),
        server.pull(0..2, &mut parameters).unwrap_err(),
        server.join(&mut parameters).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(error.is_aborted() && text.contains("some servers may") && text.contains(cause), "{text}");
        assert!(error.remedy().unwrap().contains("ParameterServer::leave"), "{error}");
    }
    assert_eq!(parameters, [0.0; 4]);
}

#[test]
fn a_step_that_one_server_has_refused_counts_once_on_the_other() {
    run(3, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .consistency(Consistency::Asp)
            .servers(&ranks(&[1, 2]))
            .workers(&[Rank::MAIN])
            .start(&group, &mut parameters)
            .unwrap();
        if group.rank().is_main() {
            // The second server alone hears that it has left.
            let leave = Request { shard: 1, number: 0, ask: Ask::Leave };
            let _: Reply<Done> = server.rpc.call(Rank::new(2), STEP, &leave).unwrap();
            let error = server.step(&[1.0; 4], &mut parameters).unwrap_err();
            assert!(error.to_string().contains("no worker"), "{error}");
            refused(&server, "no worker");
            let updates: Vec<u64> = server.statistics().unwrap().iter().map(|shard| shard.updates).collect();
            assert_eq!(updates, [1, 0]);

            server.leave().unwrap();
            // All servers refuse it, and nothing has changed.
            for _ in 0..2 {
                let error = server.step(&[1.0; 4], &mut parameters).unwrap_err();
                assert!(error.is_invalid_argument() && error.to_string().contains("no worker"), "{error}");
            }
            server.pull(0..2, &mut parameters).unwrap();
            assert_eq!(parameters, [0.0, 0.0, 1.0, 1.0]);
            server.join(&mut parameters).unwrap();
            server.step(&[1.0; 4], &mut parameters).unwrap();
            assert_eq!(parameters, [-1.0, -1.0, 0.0, 0.0]);
            let statistics = server.statistics().unwrap();
            assert!(statistics.iter().all(|shard| shard.clocks == [(Rank::MAIN, 2)]), "{statistics:?}");
        }
        group.barrier().unwrap();
        server.shutdown().unwrap();
    });
}

#[test]
fn a_step_that_one_server_was_lost_in_is_not_repeated_on_the_other() {
    run(3, |group| {
        let mut parameters = [1.0; 4];
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .consistency(Consistency::Asp)
            .servers(&ranks(&[1, 2]))
            .workers(&[Rank::MAIN])
            .start(&group, &mut parameters)
            .unwrap();
        if group.rank().get() == 2 {
            drop(server);
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        if group.rank().is_main() {
            let error = server.step(&[1.0; 4], &mut parameters).unwrap_err();
            assert_eq!(error.peer(), Some(Rank::new(2)), "{error}");
            refused(&server, "rank 2");
            // It cannot leave all servers.
            assert!(server.leave().is_err());
            refused(&server, "rank 2");
            let first: Reply<ShardStatistics> = server.rpc.call(Rank::new(1), STATISTICS, &0u32).unwrap();
            let Reply::Done(first) = first else { panic!("{first:?}") };
            assert_eq!(first.updates, 1, "{first:?}");
        }
        server.shutdown().unwrap();
    });
}
