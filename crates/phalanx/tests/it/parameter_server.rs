//! Servers of parameters, on every transport.

use std::time::{Duration, Instant};

use phalanx::asynchronous::{Adam, Consistency, ParameterServer, Sgd, UpdateRule};
use phalanx::testing::{Fabric, run};
use phalanx::{ProcessGroup, Rank, ReduceOp};

const KEYS: [usize; 4] = [3, 5, 0, 7];
const ELEMENTS: usize = 15;

fn ranks(ranks: &[u32]) -> Vec<Rank> {
    ranks.iter().copied().map(Rank::new).collect()
}

/// A gradient that depends on all that a real one does. No mean of three is 0 but for rounding: Adam, which divides a gradient by
/// its size, would make steps of the rounding.
fn gradient(parameters: &[f32], rank: Rank, step: u32) -> Vec<f32> {
    let noise = |index: usize| ((index as u32 * 7 + rank.get() * 13 + step * 5) % 11) as f32 * 0.1 - 0.43;
    parameters.iter().enumerate().map(|(index, p)| 0.3 * p + noise(index)).collect()
}

fn initial() -> Vec<f32> {
    (0..ELEMENTS).map(|index| 1.0 - index as f32 * 0.1).collect()
}

/// The same training with an all_reduce of the gradients, and the optimizer on every rank.
fn synchronous(group: &ProcessGroup, rule: &dyn UpdateRule, steps: u32) -> Vec<f32> {
    let mut parameters = initial();
    let mut states = vec![vec![0.0; ELEMENTS]; rule.states()];
    for step in 0..steps {
        let mut mean = gradient(&parameters, group.rank(), step);
        group.all_reduce(&mut mean, ReduceOp::Avg).unwrap();
        let mut states: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
        rule.update(u64::from(step) + 1, 1.0, &mut parameters, &mean, &mut states);
    }
    parameters
}

fn close(left: &[f32], right: &[f32]) {
    let differences = left.iter().zip(right).map(|(left, right)| (left - right).abs());
    let largest = differences.max_by(f32::total_cmp).unwrap_or_default();
    assert!(left.len() == right.len() && largest < 1e-6, "{largest}: {left:?}, {right:?}");
}

#[test]
fn with_staleness_0_the_server_is_what_an_all_reduce_is() {
    fn check(group: &ProcessGroup, servers: &[u32], rule: impl UpdateRule + Clone + 'static) {
        let expected = synchronous(group, &rule, 20);
        // Only rank 0's parameters count.
        let mut parameters = if group.rank().is_main() { initial() } else { vec![9.0; ELEMENTS] };
        let builder = ParameterServer::builder(&KEYS, rule).servers(&ranks(servers));
        let server = builder.start(group, &mut parameters).unwrap();
        assert_eq!(parameters, initial());
        for step in 0..20 {
            let staleness = server.step(&gradient(&parameters, group.rank(), step), &mut parameters).unwrap();
            assert_eq!(staleness, 0);
        }
        close(&parameters, &expected);
        server.shutdown().unwrap();
    }
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            check(&group, &[0, 1, 2], Sgd::new(0.1).with_momentum(0.9));
            check(&group, &[1], Adam::w(0.05, 0.1));
            check(&group, &[2, 0], Sgd::new(0.1));
        });
    }
}

/// Each gradient is applied once, where it belongs, and with the whole rate: all numbers are sums of powers of two, so in any order the
/// parameters end with the same bits. And a worker sees each server's part as it was between two gradients: those are the same in all elements.
#[test]
fn every_gradient_is_applied_once_and_whole() {
    const LENGTHS: [usize; 3] = [1_000, 6_000, 1_192];
    const STEPS: u32 = 60;
    let len: usize = LENGTHS.iter().sum();
    let sizes = |rank: u32, step: u32| ((rank * 5 + step * 3) % 8) as f32 / 8.0 - 0.375;
    for fabric in Fabric::ALL {
        for consistency in [Consistency::Asp, Consistency::Ssp(0), Consistency::Ssp(4)] {
            run(4, fabric, |group| {
                let mut parameters = vec![1.0f32; len];
                let server = ParameterServer::builder(&LENGTHS, Sgd::new(0.25))
                    .consistency(consistency)
                    .start(&group, &mut parameters)
                    .unwrap();
                for step in 0..STEPS {
                    let gradients = vec![sizes(group.rank().get(), step); len];
                    server.step(&gradients, &mut parameters).unwrap();
                    let mut parts = &parameters[..];
                    for length in LENGTHS {
                        let (part, more) = parts.split_at(length);
                        assert!(part.iter().all(|one| *one == part[0]), "step {step}: a key of two versions");
                        parts = more;
                    }
                }
                group.barrier().unwrap();
                server.pull(0..3, &mut parameters).unwrap();
                let all = (0..4).flat_map(|rank| (0..STEPS).map(move |step| sizes(rank, step)));
                let expected = 1.0 - 0.25 * all.sum::<f32>();
                assert!(parameters.iter().all(|one| *one == expected), "{} for {expected}", parameters[0]);
                group.barrier().unwrap();
                server.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn nobody_is_further_ahead_than_the_rule_allows() {
    for fabric in [Fabric::InProcess, Fabric::Tcp, Fabric::SharedMemory] {
        for bound in [1, 4] {
            run(3, fabric, |group| {
                let mut parameters = initial();
                let server = ParameterServer::builder(&KEYS, Sgd::new(0.01))
                    .consistency(Consistency::Ssp(bound))
                    .servers(&ranks(&[0, 1]))
                    .start(&group, &mut parameters)
                    .unwrap();
                let mut largest = 0;
                for step in 0..40 {
                    if group.rank().get() == 2 {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    server.step(&gradient(&parameters, group.rank(), step), &mut parameters).unwrap();
                    // It may begin the next step: since then the others can only have come nearer.
                    for shard in server.statistics().unwrap() {
                        let slowest = shard.clocks.iter().map(|(_, clock)| *clock).min().unwrap();
                        let lead = u64::from(step) + 1 - slowest;
                        assert!(lead <= bound, "{shard:?}");
                        largest = largest.max(lead);
                    }
                }
                assert!(largest > 0 || group.rank().get() == 2, "nobody was ahead of the slow worker");
                group.barrier().unwrap();
                for shard in server.statistics().unwrap() {
                    assert!(shard.staleness.lead <= bound, "{shard:?}");
                    assert_eq!(
                        shard.clocks,
                        ranks(&[0, 1, 2]).into_iter().map(|rank| (rank, 40)).collect::<Vec<_>>()
                    );
                    assert_eq!(shard.staleness.histogram.iter().sum::<u64>(), 120);
                    assert_eq!(shard.updates, 120 * shard.keys.len() as u64);
                }
                group.barrier().unwrap();
                server.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn parameters_are_pushed_and_pulled_by_keys_and_staleness_is_counted() {
    for fabric in Fabric::ALL {
        run(2, fabric, |group| {
            let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
                .consistency(Consistency::Asp)
                .start(&group, &mut initial())
                .unwrap();
            if group.rank().is_main() {
                for _ in 0..5 {
                    server.push(1..2, &[1.0; 5]).unwrap();
                    server.advance().unwrap();
                }
                // Its own pushes are news to it too, until it pulls.
                assert_eq!(server.push(1..2, &[0.0; 5]).unwrap(), 5);
            }
            group.barrier().unwrap();
            if group.rank().get() == 1 {
                assert_eq!(server.push(0..1, &[0.0; 3]).unwrap(), 0, "another key");
                assert_eq!(server.push(0..4, &[0.0; ELEMENTS]).unwrap(), 6);
                let mut parameters = [0.0; 8];
                server.pull(0..2, &mut parameters).unwrap();
                let expected: Vec<f32> =
                    initial()[..3].iter().copied().chain(initial()[3..8].iter().map(|p| p - 5.0)).collect();
                close(&parameters, &expected);
                assert_eq!(server.push(0..2, &[0.0; 8]).unwrap(), 0);
                let largest = server.statistics().unwrap().iter().map(|shard| shard.staleness.largest).max();
                assert_eq!(largest, Some(6));
                for outcome in [server.push(0..5, &[]), server.push(0..2, &[0.0; 3]), server.push(5..9, &[])]
                {
                    assert!(outcome.unwrap_err().is_invalid_argument());
                }
            }
            group.barrier().unwrap();
            server.shutdown().unwrap();
        });
    }
}

#[test]
fn workers_come_and_go() {
    for fabric in Fabric::ALL {
        run(3, fabric, |group| {
            let mut parameters = initial();
            let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
                .servers(&ranks(&[0]))
                .workers(&ranks(&[0, 1]))
                .start(&group, &mut parameters)
                .unwrap();
            let ones = [1.0; ELEMENTS];
            match group.rank().get() {
                0 => {
                    // With rank 1, then alone, since it leaves without a word about this step.
                    server.step(&ones, &mut parameters).unwrap();
                    server.step(&[3.0; ELEMENTS], &mut parameters).unwrap();
                    close(&parameters, &initial().iter().map(|p| p - 4.0).collect::<Vec<_>>());
                }
                1 => {
                    server.step(&ones, &mut parameters).unwrap();
                    server.push(0..4, &[100.0; ELEMENTS]).unwrap();
                    server.leave().unwrap();
                    assert!(server.push(0..4, &ones).unwrap_err().to_string().contains("no worker"));
                }
                _ => {
                    let mut seen = vec![0.0; ELEMENTS];
                    server.pull(0..4, &mut seen).unwrap();
                    assert!(server.advance().unwrap_err().to_string().contains("ParameterServer::join"));
                }
            }
            group.barrier().unwrap();
            if group.rank().get() != 1 {
                server.join(&mut parameters).unwrap();
                close(&parameters, &initial().iter().map(|p| p - 4.0).collect::<Vec<_>>());
            }
            group.barrier().unwrap();
            if group.rank().get() != 1 {
                server.step(&[group.rank().get() as f32; ELEMENTS], &mut parameters).unwrap();
                close(&parameters, &initial().iter().map(|p| p - 5.0).collect::<Vec<_>>());
            }
            group.barrier().unwrap();
            server.shutdown().unwrap();
        });
    }
}

#[test]
fn a_step_that_a_worker_has_ended_counts_if_it_leaves_before_the_others_have() {
    run(3, Fabric::InProcess, |group| {
        let (rank, limit) = (group.rank().get(), Duration::from_secs(60));
        let mut parameters = initial();
        let server = ParameterServer::builder(&KEYS, Sgd::new(1.0))
            .servers(&ranks(&[0]))
            .workers(&ranks(&[1, 2]))
            .timeout(if rank == 2 { Duration::from_millis(500) } else { limit })
            .start(&group, &mut parameters)
            .unwrap();
        if rank == 2 {
            // Rank 1 does not come, as if it were frozen.
            let error = server.step(&[1.0; ELEMENTS], &mut parameters).unwrap_err();
            assert!(error.is_timeout(), "{error}");
            let has_ended =
                || server.statistics().is_ok_and(|shards| shards[0].clocks.contains(&(Rank::new(2), 1)));
            let until = Instant::now() + limit;
            let eventually = |is: &dyn Fn() -> bool| {
                while !is() {
                    assert!(Instant::now() < until, "the server is silent");
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            eventually(&has_ended);
            eventually(&|| server.leave().is_ok());
        }
        group.barrier().unwrap();
        if rank == 1 {
            server.step(&[3.0; ELEMENTS], &mut parameters).unwrap();
            close(&parameters, &initial().iter().map(|p| p - 2.0).collect::<Vec<_>>());
        }
        group.barrier().unwrap();
        let ended = server.shutdown();
        assert!(rank == 2 || ended.is_ok(), "{ended:?}");
    });
}

#[test]
fn who_joins_while_others_train_is_in_one_step_on_all_servers() {
    for (fabric, consistency) in [
        (Fabric::InProcess, Consistency::Bsp),
        (Fabric::Tcp, Consistency::Bsp),
        (Fabric::SharedMemory, Consistency::Ssp(1)),
    ] {
        run(4, fabric, |group| {
            let mut parameters = initial();
            let server = ParameterServer::builder(&KEYS, Sgd::new(0.1))
                .consistency(consistency)
                .servers(&ranks(&[0, 1, 2]))
                .workers(&ranks(&[0, 1]))
                .timeout(Duration::from_secs(60))
                .start(&group, &mut parameters)
                .unwrap();
            let joins = group.rank().get() > 1;
            let rounds = if joins { 15 } else { 1 };
            for _ in 0..rounds {
                if joins {
                    server.join(&mut parameters).unwrap();
                }
                for step in 0..if joins { 3 } else { 200 } {
                    server.step(&gradient(&parameters, group.rank(), step), &mut parameters).unwrap();
                    // What it has ended, and the others do not change.
                    let clocks = server.statistics().unwrap().into_iter().map(|shard| {
                        shard.clocks.into_iter().find(|(rank, _)| *rank == group.rank()).unwrap().1
                    });
                    let clocks: Vec<u64> = clocks.collect();
                    assert!(clocks.iter().all(|clock| *clock == clocks[0]), "{clocks:?}");
                }
                server.leave().unwrap();
            }
            group.barrier().unwrap();
            server.shutdown().unwrap();
        });
    }
}

#[test]
fn a_server_that_is_lost_is_replaced_by_its_replica_with_all_that_was_acknowledged() {
    for fabric in Fabric::ALL {
        for consistency in [Consistency::Bsp, Consistency::Asp] {
            run(4, fabric, |group| {
                let workers = ranks(&[0, 1]);
                let mut parameters = initial();
                let server = ParameterServer::builder(&KEYS, Sgd::new(0.1).with_momentum(0.5))
                    .consistency(consistency)
                    .servers(&ranks(&[2, 3]))
                    .workers(&workers)
                    .replicated()
                    .start(&group, &mut parameters)
                    .unwrap();
                // The gradients do not depend on the order of workers.
                let mut train = |steps: u32| {
                    for _ in 0..steps {
                        server.step(&[0.25; ELEMENTS], &mut parameters).unwrap();
                    }
                };
                let survivors = group.new_group(&ranks(&[0, 1, 3])).unwrap();
                let works = workers.contains(&group.rank());
                if works {
                    train(10);
                }
                group.barrier().unwrap();
                if group.rank().get() == 2 {
                    // Without shutdown: as if it had died.
                    drop(server);
                    return group.barrier().unwrap();
                }
                group.barrier().unwrap();
                if works {
                    train(10);
                }
                survivors.as_ref().unwrap().barrier().unwrap();
                if works {
                    let updates = if consistency == Consistency::Bsp { 20 } else { 40 };
                    let (mut expected, mut velocity) = (initial(), 0.0);
                    for _ in 0..updates {
                        velocity = 0.25 + velocity * 0.5;
                        expected.iter_mut().for_each(|p| *p -= velocity * 0.1);
                    }
                    server.pull(0..4, &mut parameters).unwrap();
                    assert!(
                        parameters.iter().zip(&expected).all(|(left, right)| (left - right).abs() < 1e-5),
                        "{fabric:?}, {consistency:?}: {parameters:?}, {expected:?}"
                    );
                    let statistics = server.statistics().unwrap();
                    assert!(statistics.iter().all(|shard| shard.server.get() == 3), "{statistics:?}");
                }
                survivors.as_ref().unwrap().barrier().unwrap();
                server.shutdown().unwrap();
            });
        }
    }
}

#[test]
fn settings_that_differ_or_cannot_be_are_refused_on_every_rank() {
    run(2, Fabric::InProcess, |group| {
        let builder = || ParameterServer::builder(&KEYS, Sgd::new(0.1));
        let start = |builder: phalanx::asynchronous::ParameterServerBuilder| {
            builder.start(&group, &mut initial()).unwrap_err()
        };
        let other = start(builder().consistency(Consistency::Ssp(u64::from(group.rank().get()))));
        assert!(other.is_mismatch() && other.to_string().contains("rank 1"), "{other}");
        for (builder, why) in [
            (builder().servers(&[]), "at least one"),
            (builder().servers(&ranks(&[1])).replicated(), "second server"),
            (builder().workers(&ranks(&[0, 0])), "twice"),
        ] {
            let error = start(builder);
            assert!(error.to_string().contains(why) && error.remedy().is_some(), "{error}");
        }
        assert!(start(builder().workers(&ranks(&[7]))).is_invalid_argument());
        let error = builder().start(&group, &mut [1.0]).unwrap_err();
        assert!(error.to_string().contains("15 elements") && error.remedy().is_some(), "{error}");
        group.barrier().unwrap();
    });
}
