//! Workers that train by themselves and meet now and then, against the same in one process.

use std::sync::Barrier;

use phalanx::asynchronous::{LocalMethod, LocalState, LocalUpdates, Sgd};
use phalanx::testing::{Fabric, run};

const ELEMENTS: usize = 37;
const STEPS: u32 = 24;

fn initial() -> Vec<f32> {
    (0..ELEMENTS).map(|index| (index as f32 * 0.7).sin()).collect()
}

/// A step of one worker, towards a minimum of its own.
fn descend(parameters: &mut [f32], rank: usize, step: u32) {
    for (index, p) in parameters.iter_mut().enumerate() {
        *p -= 0.1 * (*p - rank as f32 * 0.5) + 0.01 * ((index as u32 + step) % 3) as f32;
    }
}

/// All workers of a world in one process, with plain loops over elements, in double precision.
struct Reference {
    workers: Vec<Vec<f32>>,
    center: Vec<f64>,
    velocity: Vec<f64>,
}

impl Reference {
    fn meet(&mut self, method: LocalMethod) {
        let world = self.workers.len();
        let before: Vec<Vec<f64>> =
            self.workers.iter().map(|w| w.iter().map(|p| f64::from(*p)).collect()).collect();
        for index in 0..ELEMENTS {
            let mean = before.iter().map(|worker| worker[index]).sum::<f64>() / world as f64;
            let mut set = |worker: usize, value: f64| self.workers[worker][index] = value as f32;
            match method {
                LocalMethod::Average => (0..world).for_each(|worker| set(worker, mean)),
                LocalMethod::Elastic { moving_rate } => {
                    let rate = f64::from(moving_rate);
                    let center = self.center[index];
                    for (worker, own) in before.iter().enumerate() {
                        let pull = rate * (own[index] - center);
                        set(worker, own[index] - pull);
                        self.center[index] += pull;
                    }
                }
                LocalMethod::Ring => {
                    for worker in 0..world {
                        let mut near = vec![worker, (worker + 1) % world, (worker + world - 1) % world];
                        near.sort_unstable();
                        near.dedup();
                        set(
                            worker,
                            near.iter().map(|near| before[*near][index]).sum::<f64>() / near.len() as f64,
                        );
                    }
                }
                LocalMethod::RandomPairs { .. } => {
                    unreachable!("what pairs must do is tested by what they keep")
                }
                LocalMethod::Outer(Sgd { learning_rate, momentum, nesterov, .. }) => {
                    let (rate, momentum) = (f64::from(learning_rate), f64::from(momentum));
                    let delta = self.center[index] - mean;
                    self.velocity[index] = momentum * self.velocity[index] + delta;
                    let direction =
                        if nesterov { delta + momentum * self.velocity[index] } else { self.velocity[index] };
                    self.center[index] -= rate * direction;
                    (0..world).for_each(|worker| set(worker, self.center[index]));
                }
            }
        }
    }
}

#[test]
fn every_method_does_what_it_does_in_one_process() {
    let methods = [
        (LocalMethod::Average, 4),
        (LocalMethod::Average, 1),
        (LocalMethod::Elastic { moving_rate: 0.3 }, 3),
        (LocalMethod::Ring, 2),
        (LocalMethod::diloco(), 6),
        (LocalMethod::slow_momentum(1.0, 0.5), 4),
        (LocalMethod::slow_momentum(1.0, 0.0), 4),
    ];
    for fabric in Fabric::ALL {
        for world in [1, 2, 3, 4] {
            for (method, every) in methods {
                let mut reference = Reference {
                    workers: vec![initial(); world],
                    center: initial().into_iter().map(f64::from).collect(),
                    velocity: vec![0.0; ELEMENTS],
                };
                for step in 1..=STEPS {
                    for (rank, worker) in reference.workers.iter_mut().enumerate() {
                        descend(worker, rank, step);
                    }
                    if step % every == 0 {
                        reference.meet(method);
                    }
                }
                let results = run(world as u32, fabric, |group| {
                    let mut parameters = if group.rank().is_main() { initial() } else { vec![0.0; ELEMENTS] };
                    let mut local =
                        LocalUpdates::new(&group, method, u64::from(every), &mut parameters).unwrap();
                    for step in 1..=STEPS {
                        descend(&mut parameters, group.rank().index(), step);
                        let bytes = local.step(&mut parameters).unwrap();
                        assert_eq!(bytes.is_some(), step % every == 0);
                    }
                    (parameters, local.bytes_per_step())
                });
                let copies = match method {
                    LocalMethod::Ring => world.min(3) - 1,
                    _ => usize::from(world > 1),
                };
                for ((parameters, bytes), expected) in results.iter().zip(&reference.workers) {
                    let largest = parameters
                        .iter()
                        .zip(expected)
                        .map(|(own, other)| (own - other).abs())
                        .max_by(f32::total_cmp)
                        .unwrap();
                    assert!(largest < 1e-5, "{method:?}, {world} ranks over {fabric:?}: {largest}");
                    assert_eq!(*bytes, (copies * ELEMENTS * 4) as f64 / f64::from(every));
                }
            }
        }
    }
}

#[test]
fn random_pairs_keep_the_mean_and_come_together() {
    for fabric in Fabric::ALL {
        for world in [2, 3, 4] {
            let results = run(world, fabric, |group| {
                let mut parameters = vec![0.0; ELEMENTS];
                let method = LocalMethod::RandomPairs { seed: 3 };
                let mut local = LocalUpdates::new(&group, method, 1, &mut parameters).unwrap();
                parameters.fill(group.rank().get() as f32);
                for _ in 0..60 {
                    assert!(local.step(&mut parameters).unwrap().is_some());
                }
                parameters
            });
            let mean = (world - 1) as f32 / 2.0;
            assert!(results.iter().flatten().all(|p| (p - mean).abs() < 1e-3), "{world}: {results:?}");
        }
    }
}

#[test]
fn a_run_that_goes_on_has_the_bits_of_one_that_was_never_interrupted() {
    let methods = [
        LocalMethod::Average,
        LocalMethod::Elastic { moving_rate: 0.3 },
        LocalMethod::Ring,
        LocalMethod::RandomPairs { seed: 5 },
        LocalMethod::diloco(),
        LocalMethod::slow_momentum(1.0, 0.5),
    ];
    for method in methods {
        run(3, Fabric::InProcess, move |group| {
            let rank = group.rank().index();
            let train = |local: &mut LocalUpdates, parameters: &mut Vec<f32>, steps: std::ops::Range<u32>| {
                for step in steps {
                    descend(parameters, rank, step);
                    local.step(parameters).unwrap();
                }
            };
            let mut whole = initial();
            let mut local = LocalUpdates::new(&group, method, 4, &mut whole).unwrap();
            train(&mut local, &mut whole, 1..STEPS + 1);

            let mut parts = initial();
            let mut before = LocalUpdates::new(&group, method, 4, &mut parts).unwrap();
            // Between two meetings, when each rank has parameters of its own.
            train(&mut before, &mut parts, 1..7);
            let saved = serde_json::to_vec(before.state()).unwrap();
            let state: LocalState = serde_json::from_slice(&saved).unwrap();
            let mut after = LocalUpdates::resume(&group, method, 4, &parts, state).unwrap();
            train(&mut after, &mut parts, 7..STEPS + 1);
            assert_eq!(parts, whole, "{method:?}");
            assert_eq!(after.state(), local.state());
        });
    }
}

#[test]
fn a_meeting_that_fails_changes_nothing() {
    let methods = [
        LocalMethod::Average,
        LocalMethod::Elastic { moving_rate: 0.3 },
        LocalMethod::Ring,
        LocalMethod::diloco(),
    ];
    for method in methods {
        run(2, Fabric::InProcess, move |group| {
            let mut parameters = initial();
            let mut local = LocalUpdates::new(&group, method, 2, &mut parameters).unwrap();
            descend(&mut parameters, group.rank().index(), 1);
            local.step(&mut parameters).unwrap();
            let before = (parameters.clone(), local.state().clone());
            // The other rank has come so far too, whether or not this one's end cuts its barrier short.
            let _ = group.barrier();
            group.abort(phalanx::Error::aborted("a worker has died"));
            assert!(local.step(&mut parameters).is_err());
            assert_eq!((parameters, local.state().clone()), before, "{method:?}");
        });
    }
}

#[test]
fn rates_may_change_where_a_run_goes_on() {
    run(2, Fabric::InProcess, |group| {
        let mut parameters = initial();
        let local = LocalUpdates::new(&group, LocalMethod::diloco(), 2, &mut parameters).unwrap();
        let slower = LocalMethod::Outer(Sgd { nesterov: true, ..Sgd::new(0.3).with_momentum(0.9) });
        LocalUpdates::resume(&group, slower, 2, &parameters, local.state().clone()).unwrap();
        // One without momentum keeps no velocity.
        let plain = LocalMethod::slow_momentum(1.0, 0.0);
        let error = LocalUpdates::resume(&group, plain, 2, &parameters, local.state().clone()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
    });
}

#[test]
fn a_state_of_another_step_or_method_is_refused_on_every_rank() {
    run(2, Fabric::InProcess, |group| {
        let mut parameters = initial();
        let method = LocalMethod::diloco();
        let mut local = LocalUpdates::new(&group, method, 2, &mut parameters).unwrap();
        local.step(&mut parameters).unwrap();
        let old = local.state().clone();
        local.step(&mut parameters).unwrap();
        let new = local.state().clone();
        let is_main = group.rank().is_main();
        let resume = |method, state| LocalUpdates::resume(&group, method, 2, &parameters, state).unwrap_err();
        let error = resume(method, if is_main { old } else { new.clone() });
        assert!(error.is_mismatch() && error.to_string().contains("of step 1"), "{error}");
        assert!(error.to_string().contains("of step 2"), "{error}");
        // One rank names another method: that rank knows why, and the other repeats it.
        let error = resume(if is_main { LocalMethod::Average } else { method }, new);
        let text = error.to_string();
        assert!(text.contains("Average every 2 steps") && text.contains("momentum: 0.9"), "{text}");
        assert_eq!(text.contains("rank 0 cannot go on"), !is_main, "{text}");
    });
}

#[test]
fn no_steps_between_meetings_make_no_sense() {
    run(2, Fabric::InProcess, |group| {
        let error = LocalUpdates::new(&group, LocalMethod::Average, 0, &mut [0.0]).unwrap_err();
        assert!(error.is_invalid_argument());
    });
}

#[test]
fn a_moving_rate_by_which_workers_move_apart_is_refused() {
    // As many as can still meet, and one more.
    for (world, is_possible) in [(3, true), (4, false)] {
        run(world, Fabric::InProcess, |group| {
            let mut parameters = [1.0; 3];
            let method = LocalMethod::Elastic { moving_rate: 0.5 };
            let mut local = match LocalUpdates::new(&group, method, 1, &mut parameters) {
                Ok(local) => local,
                Err(error) => {
                    assert!(!is_possible && error.is_invalid_argument(), "{error}");
                    assert!(error.to_string().contains("4 workers"), "{error}");
                    assert!(error.remedy().is_some_and(|remedy| remedy.contains("from 0 to 0.4")), "{error}");
                    return;
                }
            };
            assert!(is_possible);
            parameters.fill(group.rank().get() as f32);
            for _ in 0..100 {
                local.step(&mut parameters).unwrap();
            }
            assert!(parameters.iter().all(|p| p.abs() < 10.0), "{parameters:?}");
        });
    }
    // One that is negative moves them away from each other.
    let group = phalanx::ProcessGroup::alone().unwrap();
    let method = LocalMethod::Elastic { moving_rate: -0.1 };
    assert!(LocalUpdates::new(&group, method, 1, &mut [1.0; 3]).unwrap_err().is_invalid_argument());
}

#[test]
fn a_rate_of_one_rank_that_is_no_number_is_refused_on_every_rank() {
    run(2, Fabric::InProcess, |group| {
        let is_main = group.rank().is_main();
        for method in [
            LocalMethod::Elastic { moving_rate: f32::NAN },
            LocalMethod::slow_momentum(f32::INFINITY, 0.5),
            LocalMethod::slow_momentum(1.0, f32::NAN),
        ] {
            let method = if is_main { method } else { LocalMethod::Average };
            let error = LocalUpdates::new(&group, method, 5, &mut [0.0; 3]).unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            assert_eq!(error.to_string().contains("rank 0 cannot go on"), !is_main, "{error}");
        }
    });
}

#[test]
fn settings_that_differ_or_cannot_be_are_refused_on_every_rank() {
    run(3, Fabric::InProcess, |group| {
        let is_other = group.rank().get() == 1;
        let start = |method, every, length| {
            LocalUpdates::new(&group, method, every, &mut vec![0.0; length]).unwrap_err()
        };
        let error = start(LocalMethod::Average, if is_other { 0 } else { 5 }, 3);
        assert!(error.is_invalid_argument() == is_other && error.is_mismatch() != is_other, "{error}");
        let method = if is_other { LocalMethod::Ring } else { LocalMethod::Average };
        assert!(start(method, 5, 3).is_mismatch());
        assert!(start(LocalMethod::Average, 5, if is_other { 4 } else { 3 }).is_mismatch());
    });
}

#[test]
fn a_step_of_one_rank_with_other_parameters_is_an_error_on_every_rank() {
    let all_are_here = Barrier::new(3);
    for method in [LocalMethod::Average, LocalMethod::Ring] {
        run(3, Fabric::InProcess, |group| {
            let mut parameters = [0.0; 3];
            let mut local = LocalUpdates::new(&group, method, 2, &mut parameters).unwrap();
            local.step(&mut parameters).unwrap();
            // The error ends the group, which another rank may still begin.
            all_are_here.wait();
            let is_other = group.rank().get() == 1;
            let error = local.step(&mut parameters[usize::from(is_other)..]).unwrap_err();
            assert!(error.to_string().contains("with 3 parameters, and this step has 2"), "{error}");
            assert!(is_other || error.to_string().contains("rank 1"), "{error}");
        });
    }
}
