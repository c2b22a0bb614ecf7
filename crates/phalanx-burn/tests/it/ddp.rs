//! What Ddp promises besides the right average.

mod handles;
mod trace;

use std::sync::Barrier;
use std::time::Duration;

use crate::common::{Mlp, Watched, device, distance, floats, run, samples};
use burn::module::{Module, Param, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, DropoutConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Distribution, Tensor};
use phalanx::ProcessGroup;
use phalanx::join::JoinGroup;
use phalanx::reducer::ReducerOptions;
use phalanx_burn::{Ddp, DdpOptions, clip_grad_norm};

fn options(reducer: ReducerOptions) -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = reducer;
    options
}

#[derive(Module, Debug)]
struct Normed {
    dense: Linear,
    norm: BatchNorm,
}

impl Normed {
    fn new() -> Self {
        Self { dense: LinearConfig::new(8, 4).init(&device()), norm: BatchNormConfig::new(4).init(&device()) }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.norm.forward(self.dense.forward(x)).powi_scalar(4).mean()
    }

    fn mean(&self) -> Vec<f32> {
        self.norm.running_mean.value_sync().into_data().iter::<f32>().collect()
    }
}

#[test]
fn who_waits_for_rank_0s_buffers_is_not_slow_itself() {
    const SLOW_RANK_DELAY: Duration = Duration::from_millis(50);
    let times = run(2, |group| {
        let rank = group.rank();
        let mut ddp = Ddp::new(Normed::new(), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..34 {
            if rank.is_main() {
                std::thread::sleep(SLOW_RANK_DELAY);
            }
            let loss = ddp.forward(|model| model.loss(samples(step, step + 6).0)).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 0.1, gradients).unwrap();
        }
        ddp.step_times()
    });
    for times in times {
        assert!(
            times[0].own >= SLOW_RANK_DELAY && times[1].own + SLOW_RANK_DELAY / 2 < times[0].own,
            "{times:?}"
        );
        assert!(times[1].wait >= times[0].wait + SLOW_RANK_DELAY / 2, "{times:?}");
    }
}

#[test]
fn buffers_are_rank_0s_at_construction_and_before_each_forward_pass() {
    let means = run(3, |group| {
        let rank = group.rank().index();
        let model = Normed::new();
        // Something else on each rank, before the group ever sees it.
        model.norm.forward(model.dense.forward(samples(100 * rank, 100 * rank + 6).0));
        let own = model.mean();
        let mut ddp = Ddp::new(model, &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut seen = vec![own, ddp.model().mean()];
        for step in 0..3 {
            let from = 50 * step + 10 * rank;
            let mut before = Vec::new();
            let loss = ddp.forward(|model| {
                before = model.mean();
                model.loss(samples(from, from + 6).0)
            });
            seen.extend([before, ddp.model().mean()]);
            let gradients = ddp.backward(&loss.unwrap()).unwrap();
            ddp.step(&mut optimizer, 0.1, gradients).unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
        seen
    });
    let [main, others @ ..] = means.as_slice() else { unreachable!() };
    for other in others {
        assert_ne!(main[0], other[0], "the ranks began alike");
        assert_eq!(main[1], main[0], "rank 0 keeps its own");
        assert_eq!(main[1], other[1], "the others take it over at construction");
        for step in 0..3 {
            let (before, after) = (2 + 2 * step, 3 + 2 * step);
            assert_eq!(main[before], other[before], "before forward {step}");
            assert_ne!(main[after], other[after], "forward {step} changes each rank's own");
            if step > 0 {
                assert_eq!(main[before], main[before - 1], "nothing of rank 0 is lost before {step}");
            }
        }
    }
}

#[test]
fn an_average_of_the_model_leaves_frozen_parameters_alone() {
    // A third of three times this number is another one.
    let value = f32::from_bits(1.5_f32.to_bits() + 2);
    assert_ne!((value + value + value) / 3.0, value);
    run(3, |group| {
        let mut frozen = LinearConfig::new(4, 4).with_bias(false).init(&device());
        frozen.weight = frozen.weight.map(|_| Tensor::full([4, 4], value, &device()).require_grad());
        let model = (frozen.no_grad(), LinearConfig::new(4, 3).init(&device()));
        let mut ddp = Ddp::new(model, &group).unwrap();
        ddp.average_parameters().unwrap();
        assert_eq!(floats(&ddp.model().0), [[value; 16]]);
        assert!(ddp.replicas_identical().unwrap());
    });
}

#[test]
fn an_update_that_running_statistics_have_put_off_does_not_replace_rank_0s() {
    let means = run(3, |group| {
        let rank = group.rank().index();
        let model = Normed::new();
        // To try the model. Burn applies the update of the statistics with the next pass.
        model.norm.forward(model.dense.forward(samples(100 * rank, 100 * rank + 6).0));
        let mut options = DdpOptions::default();
        options.broadcast_buffers = false;
        let ddp = Ddp::with_options(model, &group, options).unwrap();
        assert!(ddp.buffers_identical().unwrap());
        ddp.model().mean()
    });
    assert_eq!(means[1..], [means[0].clone(), means[0].clone()]);
    assert_ne!(means[0], [0.0; 4], "rank 0 keeps its update");
}

#[test]
fn buffers_and_the_model_s_average_are_one_operation_each_in_memory_that_is_taken_once() {
    let start = Normed::new();
    run(2, |group| {
        let watched = Watched::new(group);
        let mut ddp = Ddp::new(start.clone(), JoinGroup::new(watched.clone())).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut allocated = 0;
        for step in 0..5 {
            let x = Tensor::random([3, 8], Distribution::Default, &device());
            let before = watched.state.lock().broadcast;
            let loss = ddp.forward(|model| model.loss(x)).unwrap();
            // The mean and the variance.
            assert_eq!(watched.state.lock().broadcast - before, usize::from(step > 0));
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 0.01, gradients).unwrap();
            let before = watched.state.lock().averaged;
            ddp.average_parameters().unwrap();
            assert_eq!(watched.state.lock().averaged - before, 1);
            assert!(ddp.replicas_identical().unwrap());
            if step == 2 {
                allocated = watched.state.lock().allocated;
            }
        }
        // Each `replicas_identical` takes two numbers' memory.
        assert_eq!(watched.state.lock().allocated - allocated, 2);
    });
}

#[test]
fn a_model_without_trainable_parameters_is_refused_on_every_rank() {
    for error in run(2, |group| Ddp::new(Mlp::new(&[8, 4, 3]).freeze(), &group).unwrap_err()) {
        assert!(error.is_invalid_argument());
        let text = error.to_string();
        assert!(text.contains("all 4 are frozen") && text.contains("unfreeze"), "{text}");
    }
    // Also if it is frozen on one rank only.
    for error in run(2, |group| {
        let model = Mlp::new(&[8, 4, 3]);
        let model = if group.rank().is_main() { model } else { model.freeze() };
        Ddp::new(model, &group).unwrap_err()
    }) {
        assert!(error.to_string().contains("frozen"), "{error}");
    }
    let group = ProcessGroup::alone().unwrap();
    assert!(Ddp::new(Mlp::new(&[8, 3]).freeze(), &group).unwrap_err().to_string().contains("frozen"));
    let plain = Ddp::new(Mlp::new(&[8, 3]).valid(), &group).unwrap_err().to_string();
    assert!(plain.contains("without autodiff") && plain.contains("Device::flex().autodiff()"), "{plain}");
}

#[test]
fn frozen_parameters_are_shared_at_construction_and_then_left_alone() {
    let trained = run(2, |group| {
        let model = Mlp::new(&[8, 5, 3]);
        let first = ParamGroup::ids_from_module(model.layers[0].clone());
        let mut ddp = Ddp::new(model.freeze_group(first), &group).unwrap();
        let before = floats(ddp.model());
        let mut optimizer = SgdConfig::new().init();
        let from = group.rank().index() * 4;
        let loss = ddp.forward(|model| model.loss(samples(from, from + 4))).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        assert_eq!(gradients.len(), 2);
        ddp.step(&mut optimizer, 0.1, gradients).unwrap();
        let after = floats(ddp.model());
        assert_eq!(before[..2], after[..2]);
        assert_ne!(before[2..], after[2..]);
        (before, after)
    });
    assert_eq!(trained[0], trained[1]);
}

#[test]
fn models_that_differ_are_named_on_every_rank() {
    for error in run(3, |group| {
        let width = if group.rank().get() == 2 { 6 } else { 5 };
        Ddp::new(Mlp::new(&[8, width, 3]), &group).unwrap_err()
    }) {
        assert!(error.is_mismatch(), "{error}");
        let text = error.to_string();
        assert!(text.contains("layers.0.weight") && text.contains("rank 2"), "{text}");
    }
}

#[test]
fn buffers_that_differ_are_named_on_every_rank() {
    for error in run(3, |group| {
        let mut model = Normed::new();
        if group.rank().get() == 1 {
            model.norm.running_mean = BatchNormConfig::new(5).init(&device()).running_mean;
        }
        Ddp::new(model, &group).unwrap_err()
    }) {
        assert!(error.is_mismatch(), "{error}");
        let text = error.to_string();
        assert!(text.contains("`norm.running_mean` (f32 [4]) on rank 0"), "{text}");
        assert!(text.contains("`norm.running_mean` (f32 [5]) on rank 1"), "{text}");
    }
}

#[test]
fn a_rank_that_alone_would_keep_its_buffers_is_named_on_every_rank() {
    for error in run(2, |group| {
        let mut options = DdpOptions::default();
        options.broadcast_buffers = group.rank().is_main();
        Ddp::with_options(Normed::new(), &group, options).unwrap_err()
    }) {
        let said = "the option broadcast_buffers is true on rank 0 and false on rank 1";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        assert!(error.remedy().unwrap().contains("give every rank the same model, options"), "{error}");
    }
}

#[test]
fn layers_that_train_on_some_ranks_only_are_named_on_every_rank() {
    for error in run(3, |group| {
        let dropout = DropoutConfig::new(0.5).init();
        let dropout = if group.rank().get() == 1 { dropout.freeze() } else { dropout };
        Ddp::new((LinearConfig::new(4, 3).init(&device()), dropout), &group).unwrap_err()
    }) {
        assert!(error.is_mismatch(), "{error}");
        let text = error.to_string();
        assert!(text.contains("`1.training (enabled)`") && text.contains("on rank 0"), "{text}");
        assert!(text.contains("`1.training (disabled)`") && text.contains("on rank 1"), "{text}");
    }
}

#[test]
fn gradients_of_another_model_are_refused_and_change_nothing() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let mut other = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let before = floats(ddp.model());
        let loss = other.forward(|model| model.loss(samples(0, 4))).unwrap();
        let gradients = other.backward(&loss).unwrap();
        // The first error ends the group, and with it the average that the other rank may still wait for.
        all_are_here.wait();
        let error = ddp.step(&mut SgdConfig::new().init(), 0.1, gradients).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("another"), "{error}");
        assert_eq!(floats(ddp.model()), before);
        // The group has ended: on no rank does a step follow that another has left out.
        let error = ddp.forward(|model| model.loss(samples(0, 4))).unwrap_err();
        assert!(error.to_string().contains("another"), "{error}");
    });
}

#[test]
fn a_norm_of_one_rank_that_is_none_ends_the_group() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let gradients = |ddp: &mut Ddp<Mlp>| {
            let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
            ddp.backward(&loss)
        };
        let mut first = gradients(&mut ddp).unwrap();
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        if group.rank().is_main() {
            assert!(ddp.clip_grad_norm(&mut first, f64::NAN).unwrap_err().is_invalid_argument());
        } else {
            let error = gradients(&mut ddp).map(drop).unwrap_err().to_string();
            assert!(error.contains("rank 0") && error.contains("max_norm"), "{error}");
        }
    });
}

/// As by a schedule that divides by zero on one rank.
#[test]
fn a_learning_rate_of_one_rank_that_is_no_number_ends_the_group() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let gradients = |ddp: &mut Ddp<Mlp>| {
            let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
            ddp.backward(&loss)
        };
        let first = gradients(&mut ddp).unwrap();
        ddp.step(&mut optimizer, 0.1, first).unwrap();
        let second = gradients(&mut ddp).unwrap();
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        let error = if group.rank().is_main() {
            let before = floats(ddp.model());
            let error = ddp.step(&mut optimizer, f64::NAN, second).unwrap_err();
            assert_eq!(floats(ddp.model()), before);
            error
        } else {
            ddp.step(&mut optimizer, 0.1, second).unwrap();
            gradients(&mut ddp).map(drop).unwrap_err()
        };
        let error = error.to_string();
        assert!(error.contains("rank 0") || group.rank().is_main(), "{error}");
        assert!(error.contains("the learning rate NaN, of `layers.0.weight`"), "{error}");
    });
}

#[test]
fn the_norm_of_another_model_s_gradients_is_refused() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let mut other = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let loss = other.forward(|model| model.loss(samples(0, 4))).unwrap();
        let mut gradients = other.backward(&loss).unwrap();
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        for error in [
            clip_grad_norm(ddp.model(), &mut gradients, 1e-3).unwrap_err(),
            ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap_err(),
        ] {
            assert!(error.is_invalid_argument() && error.to_string().contains("another model"), "{error}");
        }
        assert!(clip_grad_norm(other.model(), &mut gradients, 1e9).unwrap() > 1e-3, "nothing was scaled");
    });
}

#[test]
fn replicas_that_drifted_apart_are_noticed() {
    let drifted = run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        // The rates of the second step have not been compared yet.
        [0.1, 0.1 * (1.0 + f64::from(group.rank().get()))].map(|rate| {
            let same = ddp.replicas_identical().unwrap();
            let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, rate, gradients).unwrap();
            (same, ddp.replicas_identical().unwrap())
        })
    });
    assert_eq!(drifted, [[(true, true), (true, false)]; 2]);
}

#[test]
fn a_failure_within_backward_surfaces_from_the_call_and_stays() {
    let all_are_here = Barrier::new(2);
    let errors = run(2, |group| {
        let watched = Watched::new(group);
        // Each layer is a bucket of its own, so that the failure comes while backward runs.
        let reducer = ReducerOptions::default().bucket_cap_mb(0.0);
        let mut ddp =
            Ddp::with_options(Mlp::new(&[8, 5, 5, 3]), JoinGroup::new(watched.clone()), options(reducer))
                .unwrap();
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
        // The failure ends the group, whose barrier one rank leaves before the other.
        all_are_here.wait();
        watched.state.lock().refuse = watched.group.rank().is_main();
        let first = ddp.backward(&loss).unwrap_err().to_string();
        let second = ddp.forward(|model| model.loss(samples(0, 4))).unwrap_err().to_string();
        [first, second]
    });
    for text in errors.iter().flatten() {
        assert!(text.contains("the cable was cut"), "{text}");
    }
}

#[test]
fn a_loss_that_ddp_has_not_seen_is_refused_on_every_rank() {
    // Rank 0 waits for the gradients of rank 1, whose loss gives none.
    for (which, remedy) in [("unseen", "Ddp::forward"), ("detached", "does not depend on any parameter")] {
        let all_are_here = Barrier::new(2);
        let errors = run(2, |group| {
            let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
            let loss = match (group.rank().is_main(), which) {
                (false, "unseen") => ddp.model().loss(samples(0, 4)),
                (false, _) => ddp.forward(|model| model.loss(samples(0, 4)).detach()).unwrap(),
                (true, _) => ddp.forward(|model| model.loss(samples(0, 4))).unwrap(),
            };
            // Rank 1's error ends the group, which rank 0 may still be constructing.
            all_are_here.wait();
            ddp.backward(&loss).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|text| text.contains(remedy)), "{which}: {errors:?}");
    }
}

/// Burn keeps the graph of a loss that has not run backward, here as long as the loss lives.
#[test]
fn a_rank_leaves_with_its_ddp_and_does_not_wait_for_a_loss_to_run_backward() {
    const LIMIT: Duration = Duration::from_secs(120);
    let together = Barrier::new(2);
    run(2, |group| {
        let limited = group.with_timeout(LIMIT);
        drop(group);
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &limited).unwrap();
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
        together.wait();
        if limited.rank().is_main() {
            let error = ddp.backward(&loss).map(drop).unwrap_err();
            together.wait();
            assert!(!error.is_timeout(), "{error}");
        } else {
            drop((ddp, limited));
            together.wait();
            // Nothing takes its gradients any more.
            drop(loss.backward());
        }
    });
}

#[test]
fn several_forward_passes_may_share_a_backward_pass_or_have_their_own() {
    let model = Mlp::new(&[8, 6, 3]);
    run(2, |group| {
        let mut ddp = Ddp::new(model.clone(), &group).unwrap();
        let batch = |part: usize| samples(part * 4, part * 4 + 4);
        let mut train = |losses: &mut dyn FnMut(&mut Ddp<Mlp>) -> Tensor<1>| {
            let loss = losses(&mut ddp);
            let gradients = ddp.backward(&loss).unwrap();
            let of = |layer: &Linear| gradients.get::<2>(layer.weight.id).unwrap();
            ddp.model()
                .layers
                .iter()
                .map(|layer| of(layer).into_data().iter::<f32>().collect())
                .collect::<Vec<_>>()
        };
        let together = train(&mut |ddp| ddp.forward(|m| m.loss(batch(0)) + m.loss(batch(1))).unwrap());
        let apart = train(&mut |ddp| {
            let first = ddp.forward(|m| m.loss(batch(0))).unwrap();
            first + ddp.forward(|m| m.loss(batch(1))).unwrap()
        });
        assert!(distance(&apart, &together) < 1e-6);

        let first = ddp.forward(|m| m.loss(batch(0))).unwrap();
        let second = ddp.forward(|m| m.loss(batch(1))).unwrap();
        let later = ddp.backward(&second).unwrap();
        let earlier = ddp.backward(&first).unwrap();
        assert_eq!((earlier.len(), later.len()), (4, 4));
    });
}

#[test]
fn a_part_of_the_model_can_be_trained_alone() {
    run(2, |group| {
        let reducer = ReducerOptions::default().find_unused_parameters(true);
        let mut ddp = Ddp::with_options(Mlp::new(&[8, 8, 8]), &group, options(reducer)).unwrap();
        for layer in [0, 1, 0] {
            let x = samples(0, 4).0;
            let loss = ddp.forward(|model| model.layers[layer].forward(x).powi_scalar(2).mean()).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            assert!(gradients.get::<2>(ddp.model().layers[layer].weight.id).is_some());
            assert!(gradients.get::<2>(ddp.model().layers[1 - layer].weight.id).is_none());
        }
    });
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    let gradients = run(2, |group| {
        let device = device().gradient_checkpointing();
        let model: Linear = LinearConfig::new(8, 4).init(&device);
        let mut ddp = Ddp::new(model, &group).unwrap();
        let x = Tensor::<2>::ones([3, 8], &device) * (group.rank().get() + 1) as f32;
        let loss = ddp.forward(|model| model.forward(x).tanh().sum()).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        gradients.get::<2>(ddp.model().weight.id).unwrap().into_data().iter::<f32>().collect::<Vec<_>>()
    });
    assert!(gradients[0] == gradients[1] && gradients[0].iter().any(|value| *value != 0.0));
}

#[test]
fn without_that_option_the_missing_parameters_are_named() {
    let all_are_here = Barrier::new(2);
    for text in run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 8, 8]), &group).unwrap();
        let loss = ddp.forward(|model| model.layers[0].forward(samples(0, 4).0).mean()).unwrap();
        all_are_here.wait(); // One rank's failure ends the other's construction too.
        ddp.backward(&loss).unwrap_err().to_string()
    }) {
        assert!(text.contains("layers.1.weight") && text.contains("find_unused_parameters"), "{text}");
    }
}

#[test]
fn a_layer_that_stands_in_two_places_has_one_gradient() {
    let model = Mlp::new(&[8, 8]);
    let x = Tensor::<2>::random([4, 8], Distribution::Default, &device());
    let twice = |model: &Mlp| Mlp { layers: vec![model.layers[0].clone(), model.layers[0].clone()] };
    let expected = {
        let model = twice(&model);
        let gradients = model.forward(x.clone()).powi_scalar(2).mean().backward();
        model.layers[0].weight.val().grad(&gradients).unwrap().into_data()
    };
    run(2, |group| {
        let mut ddp = Ddp::new(twice(&model), &group).unwrap();
        let loss = ddp.forward(|model| model.forward(x.clone()).powi_scalar(2).mean()).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        let ours = gradients.get::<2>(model.layers[0].weight.id).unwrap().into_data();
        ours.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::relative(1e-5));
    });
}

/// The gradient of `shift` is that of the sum, which backward goes on with, and may change where it lies.
#[test]
fn a_gradient_is_taken_as_it_was_when_it_was_ready() {
    #[derive(Module, Debug)]
    struct Shifted {
        dense: Linear,
        shift: Param<Tensor<2>>,
    }
    impl Shifted {
        fn loss(&self, x: Tensor<2>) -> Tensor<1> {
            (self.dense.forward(x).tanh() + self.shift.val()).powi_scalar(2).mean()
        }
    }
    let shift = Tensor::<2>::random([4, 8], Distribution::Default, &device()).require_grad();
    let model = Shifted { dense: LinearConfig::new(8, 8).init(&device()), shift: Param::from_tensor(shift) };
    let x = Tensor::<2>::random([4, 8], Distribution::Default, &device());
    let gradients = model.loss(x.clone()).backward();
    let expected = model.shift.val().grad(&gradients).unwrap().into_data();
    run(2, |group| {
        let mut ddp = Ddp::new(model.clone(), &group).unwrap();
        let loss = ddp.forward(|model| model.loss(x.clone())).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        let ours = gradients.get::<2>(model.shift.id).unwrap().into_data();
        ours.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::relative(1e-5));
    });
}

#[test]
fn a_model_without_parameters_is_refused() {
    #[derive(Module, Debug)]
    struct Empty {}
    let group = ProcessGroup::alone().unwrap();
    assert!(Ddp::new(Empty {}, &group).unwrap_err().to_string().contains("no parameters"));
}
