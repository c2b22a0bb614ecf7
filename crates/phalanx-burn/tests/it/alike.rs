//! What ranks compare of their optimizers.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ParamGroup};
use burn::nn::conv::Conv2dConfig;
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::nn::{
    BatchNormConfig, Dropout, DropoutConfig, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use phalanx::reducer::verify_description;
use phalanx::{ProcessGroup, Result};
use phalanx_burn::parallel::tensor::{ColumnParallelLinear, RowParallelLinear, TensorGroup};
use phalanx_burn::{Ddp, SyncedGradients, clip_grad_norm, parallel};

use crate::common::{Mlp, device, floats, projecting, run, samples};
use crate::unused::Log;

#[test]
fn other_learning_rates_on_one_rank_are_an_error_on_every_rank() {
    for (rate, said) in [(0.01, None), (0.02, Some("was 0.01 on rank 0, and 0.02 on rank 1"))] {
        let errors = run(2, |group| {
            let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut step = || {
                let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(&mut optimizer, if group.rank().is_main() { 0.01 } else { rate }, gradients)
            };
            (0..70).find_map(|_| step().err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn other_learning_rates_are_found_where_each_step_has_a_ddp_of_its_own() {
    run(2, |group| {
        let mut model = Mlp::new(&[8, 3]);
        for epoch in 0..4 {
            let mut ddp = Ddp::new(model, &group).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut step = |rate: f64| {
                let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                ddp.step(&mut optimizer, rate, gradients)
            };
            if epoch == 2 {
                let error = step(if group.rank().is_main() { 1e-5 } else { 2e-5 }).unwrap_err();
                let said = "the first one was 0.00001 on rank 0, and 0.00002 on rank 1";
                assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
            }
            // The error ends nothing.
            step(1e-5).unwrap();
            assert!(ddp.replicas_identical().unwrap());
            model = ddp.into_model();
        }
    });
}

#[test]
fn another_rate_of_a_group_of_parameters_is_an_error_in_the_first_step_on_every_rank() {
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 5, 3]), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut step = |rate: f64| {
            let first = ParamGroup::ids_from_module(ddp.model().layers[0].clone());
            let mut scheduler = ModuleLrScheduler::new(0.1_f64).with_group(first, rate);
            let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, scheduler.step(), gradients)
        };
        let error = step(if group.rank().is_main() { 0.01 } else { 0.02 }).unwrap_err();
        let said = "rank 0 and rank 1 give a group of parameters different learning rates; their base rate is 0.1 on both";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        step(0.01).unwrap();
    });
}

#[test]
fn gradients_that_one_rank_clips_to_another_norm_are_an_error_on_every_rank() {
    type Clips = fn(&Ddp<Mlp>, &mut SyncedGradients, f64) -> Result<f64>;
    let clips: [Clips; 3] = [
        |ddp, gradients, max_norm| ddp.clip_grad_norm(gradients, max_norm),
        |ddp, gradients, max_norm| clip_grad_norm(ddp.model(), gradients, max_norm),
        |ddp, gradients, max_norm| {
            parallel::clip_grad_norm(ddp.model(), gradients, max_norm, None, None, &[])
        },
    ];
    let cases = clips.into_iter().flat_map(|clip| [(clip, 1e-4, false), (clip, 2e-4, true)]);
    for (clip, other, expected) in cases {
        let errors = run(2, |group| {
            let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let max_norm = if group.rank().is_main() { 1e-4 } else { other };
            let mut step = || {
                let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                let mut gradients = ddp.backward(&loss)?;
                assert!(clip(&ddp, &mut gradients, max_norm)? > 2e-4);
                ddp.step(&mut optimizer, 0.01, gradients)
            };
            (0..70).find_map(|_| step().err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            assert!(error.is_none_or(|error| error.contains("clips gradients otherwise")));
        }
    }
}

#[test]
fn ranks_whose_optimizers_differ_are_refused_in_the_first_step_and_may_go_on_with_the_same() {
    let sgd =
        |decay: f64| SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(decay))).init();
    let gradients = |ddp: &mut Ddp<Mlp>| {
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
        ddp.backward(&loss).unwrap()
    };
    run(3, |group| {
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let before = floats(ddp.model());
        let mut own = sgd(if group.rank().index() == 2 { 0.8 } else { 0.9 });
        let averages = gradients(&mut ddp);
        let error = ddp.step(&mut own, 0.1, averages).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 2"), "{error}");
        assert_eq!(floats(ddp.model()), before);
        let mut same = sgd(0.9);
        for _ in 0..2 {
            let averages = gradients(&mut ddp);
            ddp.step(&mut same, 0.1, averages).unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
    });
}

#[test]
fn an_optimizer_that_one_rank_alone_has_exchanged_is_an_error_on_every_rank() {
    let sgd =
        |decay: f64| SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(decay))).init();
    for exchanged in [&[][..], &[0, 1, 2], &[2]] {
        let errors = run(3, |group| {
            let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
            let mut optimizer = sgd(0.9);
            let mut step = |number| {
                if number == 5 && exchanged.contains(&group.rank().index()) {
                    optimizer = sgd(0.8);
                }
                let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(&mut optimizer, 0.01, gradients)
            };
            (0..70).find_map(|number| step(number).err()).map(|error| error.to_string())
        });
        let said = "the optimizer of rank 2 changes parameters otherwise than that of rank 0";
        for error in errors {
            assert_eq!(error.is_some(), exchanged == [2], "{error:?}");
            assert!(error.is_none_or(|error| error.contains(said)));
        }
    }
}

/// As those of a generator and of a discriminator. The first step compares the first of them alone.
#[test]
fn each_of_several_optimizers_that_step_in_turns_is_compared() {
    let sgd =
        |decay: f64| SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(decay))).init();
    for turns in [2, 4] {
        for other in [0.9, 0.8] {
            let errors = run(2, |group| {
                let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
                let mut optimizers = vec![sgd(0.9); turns];
                optimizers[turns - 1] = sgd(if group.rank().is_main() { 0.9 } else { other });
                let mut step = |number: usize| {
                    let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                    let gradients = ddp.backward(&loss)?;
                    ddp.step(&mut optimizers[number % turns], 0.01, gradients)
                };
                (0..40).find_map(|number| step(number).err()).map(|error| error.to_string())
            });
            let said = "the optimizer of rank 1 changes parameters otherwise than that of rank 0";
            for error in errors {
                assert_eq!(error.is_some(), other == 0.8, "{turns}: {error:?}");
                assert!(error.is_none_or(|error| error.contains(said)));
            }
        }
    }
}

/// Of an even number of samples of the parameters, each optimizer would be compared in those of its own turns alone.
#[test]
fn each_of_two_optimizers_that_step_in_turns_is_compared_in_all_parameters() {
    let sgd = |decay: f64| SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(decay)));
    // 34 parameters, of which every second one is a bias.
    let mut widths = [3; 18];
    widths[0] = 8;
    let errors = run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&widths), &group).unwrap();
        let decay = if group.rank().is_main() { 0.9 } else { 0.8 };
        let biases = ParamGroup::from_regex(r"(^|\.)bias$").unwrap();
        let other = sgd(0.9).init().with_group(biases, sgd(decay).build(), None);
        let mut optimizers = [sgd(0.9).init(), other];
        let mut step = |number: usize| {
            let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
            let gradients = ddp.backward(&loss)?;
            ddp.step(&mut optimizers[number % 2], 0.01, gradients)
        };
        (0..140).find_map(|number| step(number).err()).map(|error| error.to_string())
    });
    let said = "the optimizer of rank 1 changes parameters otherwise than that of rank 0";
    assert!(
        errors.iter().all(|error| error.as_ref().is_some_and(|error| error.contains(said))),
        "{errors:?}"
    );
}

/// The epsilon of a rank's optimizer, and the learning rates of its first step and of the others.
type Settings = (f32, f64, f64);

/// Each trains what all of them have, here the bias of the second layer.
#[test]
fn other_settings_or_rates_on_a_rank_that_divides_layers_are_an_error_on_every_rank() {
    const SAME: Settings = (1e-5, 0.01, 0.01);
    let cases = [
        (SAME, None),
        (
            (1e-8, 0.01, 0.01),
            Some("the optimizer of rank 1 changes parameters otherwise than that of rank 0"),
        ),
        ((1e-5, 0.02, 0.01), Some("was 0.01 on rank 0, and 0.02 on rank 1")),
        ((1e-5, 0.01, 0.02), Some("the learning rates of the last 32 steps differ")),
    ];
    for (other, said) in cases {
        let errors = run(2, |group| {
            let (epsilon, first, later) = if group.rank().is_main() { SAME } else { other };
            let tensor = TensorGroup::new(&group);
            let layer = || LinearConfig::new(8, 8).init(&device());
            let inner = ColumnParallelLinear::new(layer(), &tensor).unwrap();
            let outer = RowParallelLinear::new(layer(), &tensor).unwrap();
            let mut ddp = Ddp::new((inner, outer), &ProcessGroup::alone().unwrap()).unwrap();
            let mut optimizer = AdamWConfig::new().with_epsilon(epsilon).init();
            let mut step = |number| {
                let x = samples(0, 4).0;
                let loss = ddp.forward(|(inner, outer)| outer.forward(inner.forward(x)).mean())?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(&mut optimizer, if number == 0 { first } else { later }, gradients)
            };
            (0..40).find_map(|number| step(number).err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn a_state_of_the_optimizer_that_one_rank_that_divides_layers_lacks_is_an_error_on_every_rank() {
    for (first_has, second_has) in [(true, true), (true, false), (false, true)] {
        let errors = run(2, |group| {
            let has_state = if group.rank().is_main() { first_has } else { second_has };
            let tensor = TensorGroup::new(&group);
            let layer = RowParallelLinear::new(LinearConfig::new(8, 8).init(&device()), &tensor).unwrap();
            let alone = ProcessGroup::alone().unwrap();
            let mut optimizer = AdamWConfig::new().init();
            let step = |layer: RowParallelLinear, optimizer: &mut ModuleOptimizer| {
                let mut ddp = Ddp::new(layer, &alone).unwrap();
                let x = tensor.part(samples(0, 4).0, 1);
                let loss = ddp.forward(|layer: &RowParallelLinear| layer.forward(x).mean()).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                ddp.step(optimizer, 0.01, gradients).map(|()| ddp.into_model())
            };
            let layer = step(layer, &mut optimizer).unwrap();
            // As if the state had been lost with the process, and loaded on some ranks alone.
            let mut own = if has_state { optimizer } else { AdamWConfig::new().init() };
            step(layer, &mut own).err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), first_has != second_has, "{error:?}");
            assert!(error.is_none_or(|error| error.contains("optimizers have different states")));
        }
    }
}

#[derive(Module, Debug)]
struct Dropping {
    layer: Linear,
    dropout: Dropout,
}

#[test]
fn layers_that_compute_with_other_numbers_on_one_rank_are_refused_on_every_rank() {
    let said = "`prob` of Dropout (layer 1 of those with such numbers) is 0.1 on rank 0 and 0.2 on rank 2";
    for (other, said) in [(0.1, None), (0.2, Some(said))] {
        let errors = run(3, |group| {
            let prob = if group.rank().index() == 2 { other } else { 0.1 };
            let (layer, dropout) = (LinearConfig::new(8, 3).init(&device()), DropoutConfig::new(prob).init());
            Ddp::new(Dropping { layer, dropout }, &group).err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

/// No shape of a parameter shows it.
#[test]
fn convolutions_and_pools_that_compute_otherwise_on_one_rank_are_refused_on_every_rank() {
    type Settings = ([usize; 2], PaddingConfig2d, [usize; 2]);
    const SAME: Settings = ([1, 1], PaddingConfig2d::Valid, [2, 2]);
    let padded = PaddingConfig2d::Explicit(1, 1, 1, 1);
    let cases: [(Settings, Option<[&str; 2]>); 4] = [
        (SAME, None),
        (([2, 1], SAME.1, SAME.2), Some(["`stride` of Conv2d", "is [1, 1] on rank 0 and [2, 1] on rank 1"])),
        (
            (SAME.0, padded, SAME.2),
            Some(["`padding` of Conv2d", "is Valid on rank 0 and Explicit(1, 1, 1, 1) on rank 1"]),
        ),
        (
            (SAME.0, SAME.1, [3, 2]),
            Some(["`kernel_size` of MaxPool2d", "is [2, 2] on rank 0 and [3, 2] on rank 1"]),
        ),
    ];
    for (other, said) in cases {
        let errors = run(2, |group| {
            let (stride, padding, size) = if group.rank().is_main() { SAME } else { other.clone() };
            let conv = Conv2dConfig::new([2, 2], [3, 3]).with_stride(stride).with_padding(padding);
            let pool = MaxPool2dConfig::new(size).with_strides([1, 1]).init();
            Ddp::new((conv.init(&device()), pool), &group).err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            let mut parts = said.iter().flatten();
            assert!(parts.all(|part| error.as_ref().is_some_and(|error| error.contains(part))), "{error:?}");
        }
    }
}

/// No replicas see it: each rank has another part of one.
#[test]
fn layers_that_compute_with_other_numbers_on_a_rank_that_divides_others_are_an_error_on_every_rank() {
    for (other, said) in [(1e-5, None), (1e-3, Some("0.001 on rank 1"))] {
        let errors = run(2, |group| {
            let epsilon = if group.rank().is_main() { 1e-5 } else { other };
            let tensor = TensorGroup::new(&group);
            let layer = ColumnParallelLinear::new(LinearConfig::new(8, 8).init(&device()), &tensor).unwrap();
            let norm = LayerNormConfig::new(8).with_epsilon(epsilon).init(&device());
            let mut ddp = Ddp::new((norm, layer), &ProcessGroup::alone().unwrap()).unwrap();
            let x = samples(0, 4).0;
            let loss = ddp.forward(|(norm, layer)| layer.forward(norm.forward(x)).mean()).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            let error = ddp.step(&mut SgdConfig::new().init(), 0.01, gradients).err();
            error.map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn a_warning_says_that_nothing_checks_what_a_dropout_among_divided_layers_drops() {
    for (prob, expected) in [(0.0, [0, 0]), (0.1, [1, 0])] {
        let warnings = run(2, |group| {
            let log = Log::default();
            tracing::subscriber::with_default(log.clone(), || {
                let layer = LinearConfig::new(8, 8).init(&device());
                let layer = ColumnParallelLinear::new(layer, &TensorGroup::new(&group)).unwrap();
                let dropout = DropoutConfig::new(prob).init();
                Ddp::new((layer, dropout), &ProcessGroup::alone().unwrap()).unwrap();
            });
            log.0.lock().iter().filter(|warning| warning.contains("has a dropout of 0.1")).count()
        });
        assert_eq!(warnings, expected, "{prob}");
    }
}

/// Each rank builds its own, with ids and weights of its own.
#[test]
fn the_descriptions_of_models_say_whether_numbers_that_are_no_tensors_differ() {
    const SAME: (f64, f64) = (0.1, 1e-5);
    for other in [SAME, (0.2, 1e-5), (0.1, 1e-3)] {
        run(2, |group| {
            let (dropout, epsilon) = if group.rank().is_main() { SAME } else { other };
            let encoder = TransformerEncoderConfig::new(8, 16, 2, 1).with_dropout(dropout).init(&device());
            let norm = BatchNormConfig::new(8).with_epsilon(epsilon).init(&device());
            let described = format!("{encoder} {norm}");
            let compared = verify_description(&group, "model", &described);
            assert_eq!(compared.is_err_and(|error| error.is_mismatch()), other != SAME);
        });
    }
}

#[test]
fn a_warning_says_once_that_an_optimizer_cannot_be_compared() {
    // Of the first step's optimizer, and of one that comes in its place.
    for from in [0, 5] {
        let warnings = run(2, |group| {
            let log = Log::default();
            tracing::subscriber::with_default(log.clone(), || {
                let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
                let mut optimizer = AdamWConfig::new().init();
                for step in 0..100 {
                    if step == from {
                        optimizer = projecting();
                    }
                    let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
                    let gradients = ddp.backward(&loss).unwrap();
                    ddp.step(&mut optimizer, 0.01, gradients).unwrap();
                }
            });
            log.0.lock().iter().filter(|warning| warning.contains("optimizers are not compared")).count()
        });
        assert_eq!(warnings, [1, 0], "from step {from}");
    }
}

#[test]
fn an_optimizer_that_has_a_state_on_one_rank_alone_is_refused_in_the_first_step() {
    let start = Mlp::new(&[8, 3]);
    // One without momentum has taken steps, and keeps nothing of them.
    for momentum in [Some(MomentumConfig::new()), None] {
        run(2, |group| {
            let mut optimizer = SgdConfig::new().with_momentum(momentum.clone()).init();
            let mut steps = |group: &ProcessGroup| {
                let mut ddp = Ddp::new(start.clone(), group).unwrap();
                let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
                let gradients = ddp.backward(&loss).unwrap();
                ddp.step(&mut optimizer, 0.1, gradients)
            };
            if group.rank().is_main() {
                steps(&ProcessGroup::alone().unwrap()).unwrap();
            }
            let Some(error) = steps(&group).err() else {
                assert!(momentum.is_none());
                return;
            };
            let said = error.to_string();
            assert!(
                momentum.is_some() && error.is_mismatch() && said.contains("have different states"),
                "{said}"
            );
        });
    }
}
