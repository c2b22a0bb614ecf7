//! Layers that cannot be divided, ranks whose layers or tokens differ, and exchanges that fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use burn::grad_clipping::GradientClippingConfig;
use burn::nn::transformer::{PositionWiseFeedForwardConfig, TransformerEncoderConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, LambConfig, ModuleOptimizer, MuonConfig};
use phalanx::{Error, ProcessGroup};
use phalanx_burn::parallel::tensor::ParallelFeedForward;
use phalanx_burn::parallel::{ShardedState, StateNames};
use phalanx_burn::{DataParallel, Ddp, FusedAdamWConfig, TowerGradients, TrainState};

use super::*;

/// Rank 0's part would overwrite the others', and their gradients would be averaged.
/// Their tensors have the same shapes.
#[test]
fn encoders_that_compute_otherwise_on_one_rank_are_refused_on_every_rank() {
    let config = |heads| TransformerEncoderConfig::new(8, 16, heads, 1).with_dropout(0.0);
    let replicated = Activations::Replicated;
    for (other, activations, said) in [
        (config(2), replicated, None),
        (config(4), replicated, Some("n_heads: 4")),
        (config(2).with_norm_first(true), replicated, Some("norm_first: true")),
        (config(2).with_quiet_softmax(true), replicated, Some("quiet_softmax: true")),
        (config(2), Activations::Sequence, Some("with Sequence activations")),
    ] {
        let errors = run(2, |group| {
            let own =
                if group.rank().is_main() { (config(2), replicated) } else { (other.clone(), activations) };
            let tensor = TensorGroup::new(&group);
            let encoder = own.0.init(&device());
            let divided = ParallelEncoder::new(encoder, &tensor, own.1);
            divided.err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn a_feed_forward_layer_with_another_activation_on_one_rank_is_refused_on_every_rank() {
    for (other, said) in [
        (ActivationConfig::Gelu, None),
        (ActivationConfig::Relu, Some("and that of rank 1 is Relu")),
        (ActivationConfig::GeluApproximate, Some("and that of rank 1 is Gelu")),
    ] {
        let errors = run(2, |group| {
            let activation = if group.rank().is_main() { ActivationConfig::Gelu } else { other.clone() };
            let layer =
                PositionWiseFeedForwardConfig::new(8, 16).with_dropout(0.0).with_activation(activation);
            let divided = ParallelFeedForward::new(layer.init(&device()), &TensorGroup::new(&group));
            divided.err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), said.is_some(), "{error:?}");
            assert!(error.iter().zip(said).all(|(error, said)| error.contains(said)), "{error:?}");
        }
    }
}

#[test]
fn ranks_with_different_parts_are_no_replicas() {
    let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device());
    let outcomes = run(2, |group| {
        let model = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group)).unwrap();
        let alone = [
            DataParallel::<_, 3>::new(model.clone(), vec![device(); 2]).err().unwrap(),
            TowerGradients::new(model.clone(), vec![device(); 2]).err().unwrap(),
            TrainState::new(model.clone(), SgdConfig::new().init(), ()).err().unwrap(),
        ];
        for error in alone {
            assert!(error.is_invalid_argument() && error.to_string().contains("`weight`"), "{error}");
        }
        let own = Ddp::new(model.clone(), &ProcessGroup::alone().unwrap()).unwrap();
        let error = ShardedState::new(&own, &group, None, &StateNames::same()).unwrap_err();
        assert!(error.to_string().contains("has part 0 of 2 of a divided layer"), "{error}");
        assert!(error.remedy().unwrap().contains("TensorGroup"), "{error}");
        Ddp::new(model, &group).err().unwrap()
    });
    for error in outcomes {
        let text = error.to_string();
        assert!(text.contains("weight (part 0 of 2 along dimension 1)"), "{text}");
        assert!(text.contains("weight (part 1 of 2 along dimension 1)"), "{text}");
        assert!(text.contains("mesh.group(\"data\")"), "{text}");
    }
}

#[test]
fn dropout_is_refused() {
    run(2, |group| {
        let group = TensorGroup::new(&group);
        let attention = MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.1).init(&device());
        let feed_forward =
            PositionWiseFeedForwardConfig::new(WIDTH, 4 * WIDTH).with_dropout(0.1).init(&device());
        let encoder = encoder_config(1).with_dropout(0.1).init(&device());
        for error in [
            ParallelAttention::new(attention, &group).unwrap_err(),
            ParallelFeedForward::new(feed_forward, &group).unwrap_err(),
            ParallelEncoder::new(encoder, &group, Activations::Replicated).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(error.is_invalid_argument() && text.contains("dropout of 0.1"), "{text}");
        }
    });
}

/// As where each rank takes a sampler of its own. A batch that comes later is compared now and then.
#[test]
fn tokens_that_differ_between_ranks_end_the_group() {
    let said = "divide a vocabulary have different tokens";
    for (same, later) in [(0, 0), (1, 0), (2, 1019)] {
        run(2, |group| {
            let tensor = TensorGroup::new(&group);
            let embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device());
            let model = VocabParallelEmbedding::new(embedding, &tensor).unwrap();
            let tokens = |last: i32| Tensor::<2, Int>::from_ints([[1, 2, last]], &device());
            for _ in 0..same + later {
                assert!(values(model.forward(tokens(3))).iter().all(|x| x.is_finite()));
            }
            let own = if group.rank().is_main() { 3 } else { 4 };
            assert!(values(model.forward(tokens(own))).iter().any(|x| x.is_nan()));
            let cause = tensor.failure().unwrap().to_string();
            assert!(cause.contains(said), "{cause}");
        });
    }
}

/// Each rank would take the mean over other samples.
#[test]
fn a_padding_that_differs_between_ranks_ends_the_group() {
    for other in [None, Some(2)] {
        run(2, |group| {
            let padding = if group.rank().is_main() { Some(1) } else { other };
            let tensor = TensorGroup::new(&group);
            let embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device());
            let model = VocabParallelEmbedding::new(embedding, &tensor).unwrap();
            let logits = model.logits(Tensor::<2>::ones([3, WIDTH], &device()));
            let targets = Tensor::<1, Int>::from_ints([0, 1, 2], &device());
            assert!(scalar(&model.cross_entropy(logits, targets, padding)).is_nan());
            let cause = tensor.failure().unwrap().to_string();
            assert!(cause.contains("have different tokens or padding"), "{cause}");
        });
    }
}

/// No token says so where samples are images.
#[test]
fn inputs_of_divided_layers_that_differ_between_ranks_end_the_group() {
    for (factor, said) in [(1.001, None), (2.0, Some("has another input on rank 1 than on rank 0"))] {
        for activations in [None, Some(Activations::Replicated), Some(Activations::Sequence)] {
            run(2, |group| {
                let tensor = TensorGroup::new(&group);
                let x = if group.rank().is_main() { input() } else { input() * factor };
                let y = match activations {
                    Some(activations) => {
                        let encoder = encoder_config(1).init(&device()).map(&mut Waves(0));
                        ParallelEncoder::new(encoder, &tensor, activations).unwrap().forward(x, None, None)
                    }
                    None => {
                        let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
                        let inner = ColumnParallelLinear::new(layer(), &tensor).unwrap();
                        let outer = RowParallelLinear::new(layer(), &tensor).unwrap();
                        outer.forward(inner.forward(x))
                    }
                };
                assert_eq!(values(y).iter().any(|x| x.is_nan()), said.is_some());
                let cause = tensor.failure().map(|cause| cause.to_string());
                assert_eq!(cause.is_some(), said.is_some(), "{cause:?}");
                assert!(cause.iter().zip(said).all(|(cause, said)| cause.contains(said)), "{cause:?}");
            });
        }
    }
}

#[test]
fn inputs_of_divided_layers_are_compared_again_later() {
    run(2, |group| {
        let tensor = TensorGroup::new(&group);
        let layer = LinearConfig::new(4, 4).init(&device());
        let layer = ColumnParallelLinear::new(layer, &tensor).unwrap();
        let pass = |scale: f64| drop(layer.forward(Tensor::<2>::full([1, 4], scale, &device())));
        for _ in 0..1021 {
            pass(1.0);
        }
        assert!(tensor.failure().is_none());
        pass(1.0 + group.rank().index() as f64);
        assert!(tensor.failure().unwrap().to_string().contains("has another input on rank 1"));
    });
}

#[test]
fn tokens_that_no_rank_has_end_the_group() {
    let ints = |tokens: &[i64]| {
        Tensor::<1, Int>::from_data(TensorData::new(tokens.to_vec(), [tokens.len()]), &device())
    };
    for ranks in [1, 2] {
        for (unknown, padding) in [(VOCABULARY as i64, None), (-1, None), (VOCABULARY as i64, Some(0))] {
            for embeds in [true, false] {
                run(ranks, |group| {
                    let group = TensorGroup::new(&group);
                    let unknown_is_named = |error: Error| {
                        let text = error.to_string();
                        assert!(
                            text.contains(&format!("token {unknown} is not in the vocabulary")),
                            "{text}"
                        );
                    };
                    let embedding = EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device());
                    let model = match VocabParallelEmbedding::new(embedding, &group) {
                        Ok(model) => model,
                        // The other rank was so much faster that it has found the token already.
                        Err(error) => return unknown_is_named(error),
                    };
                    let tokens = ints(&[1, unknown, 0]);
                    let result = if embeds {
                        values(model.forward(tokens.reshape([1, 3])))
                    } else {
                        let logits = model.logits(Tensor::<2>::ones([3, WIDTH], &device()));
                        values(model.cross_entropy(logits, tokens, padding))
                    };
                    assert!(result.iter().any(|x| x.is_nan()), "{result:?}");
                    unknown_is_named(group.failure().unwrap());
                });
            }
        }
    }
    // Padding need not be in the vocabulary.
    run(2, |group| {
        let group = TensorGroup::new(&group);
        let model =
            VocabParallelEmbedding::new(EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device()), &group)
                .unwrap();
        let logits = model.logits(Tensor::<2>::ones([3, WIDTH], &device()));
        let loss = model.cross_entropy(logits, ints(&[1, 1000, 0]), Some(1000));
        assert!(scalar(&loss).is_finite() && group.failure().is_none());
    });
}

#[test]
fn a_width_is_no_sequence() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let group = TensorGroup::new(&group);
        let layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device());
        let layer = RowParallelLinear::new(layer, &group).unwrap().with_activations(Activations::Sequence);
        // The error ends the group, in which the other rank may still wait for its weights.
        all_are_here.wait();
        let y = layer.forward(Tensor::<2>::ones([4, WIDTH / 2], &device()));
        assert_eq!(y.dims(), [4, WIDTH]);
        assert!(y.into_data().iter::<f32>().all(f32::is_nan));
        assert!(group.failure().unwrap().to_string().contains("a tensor of shape [4, 16] has none"));
    });
}

#[test]
fn what_cannot_be_divided_is_refused() {
    run(3, |group| {
        let group = TensorGroup::new(&group);
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device());
        for error in [
            ColumnParallelLinear::new(linear(), &group).unwrap_err(),
            RowParallelLinear::new(linear(), &group).unwrap_err(),
            ParallelEncoder::new(encoder_config(1).init(&device()), &group, Activations::Replicated)
                .unwrap_err(),
            VocabParallelEmbedding::new(EmbeddingConfig::new(2, 4).init(&device()), &group).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                error.is_invalid_argument() && text.contains("cannot be divided evenly among 3 ranks"),
                "{text}"
            );
        }
        // A dimension is known only when a tensor comes; then the group ends, and the result is no number.
        let part = group.part(Tensor::<2>::ones([2, 4], &device()), 1);
        assert!(part.into_data().iter::<f32>().all(f32::is_nan));
        assert!(group.failure().unwrap().to_string().contains("dimension 1"));
    });
}

/// Rank 0's elements would fit.
#[test]
fn layers_of_another_shape_with_as_many_elements_are_refused_on_every_rank() {
    run(2, |group| {
        let (inputs, outputs) = if group.rank().is_main() { (4, 6) } else { (6, 4) };
        let layer = LinearConfig::new(inputs, outputs).with_bias(false).init(&device());
        let error = ColumnParallelLinear::new(layer, &TensorGroup::new(&group)).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && text.contains("`weight` of shape [4, 6]"), "{error}");
        assert!(text.contains("`weight` of shape [6, 4] and type F32 on rank 1"), "{error}");
    });
}

/// A step of two divided layers, one by its outputs and one by its inputs. The error of the step, if there is one.
fn stepped_by(group: &ProcessGroup, optimizer: &ModuleOptimizer) -> Option<Error> {
    let tensor = TensorGroup::new(group);
    let layer = |phase| -> Linear {
        LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device()).map(&mut Waves(phase))
    };
    let inner = ColumnParallelLinear::new(layer(0), &tensor).unwrap();
    let outer = RowParallelLinear::new(layer(10), &tensor).unwrap();
    let mut ddp = Ddp::new((inner, outer), &ProcessGroup::alone().unwrap()).unwrap();
    let pass = |(inner, outer): &(ColumnParallelLinear, RowParallelLinear)| {
        weighed(outer.forward(gelu(inner.forward(input()))))
    };
    let loss = ddp.forward(pass).unwrap();
    let gradients = ddp.backward(&loss).unwrap();
    let before = floats(ddp.model());
    let error = ddp.step(&mut optimizer.clone(), 0.1, gradients).err();
    assert_eq!(error.is_some(), floats(ddp.model()) == before);
    error
}

#[test]
fn optimizers_that_take_a_norm_of_a_part_are_refused() {
    let clipped = |by: GradientClippingConfig| SgdConfig::new().init().with_grad_clipping(by.init());
    for optimizer in [
        LambConfig::new().init(),
        MuonConfig::new().init(),
        AdafactorConfig::new().init(),
        clipped(GradientClippingConfig::Norm(1e-4)),
        clipped(GradientClippingConfig::Norm(1e4)),
    ] {
        for error in run(2, |group| stepped_by(&group, &optimizer).unwrap()) {
            let text = error.to_string();
            assert!(text.contains("of `0.weight`, of which each rank has a piece"), "{text}");
            assert!(error.remedy().unwrap().contains("parallel::clip_grad_norm"), "{error}");
        }
        // The part of one rank is the whole.
        run(1, |group| assert!(stepped_by(&group, &optimizer).is_none()));
    }
    for optimizer in [
        SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
        AdamWConfig::new().with_weight_decay(0.1).init(),
        FusedAdamWConfig::new().with_weight_decay(0.1).init(),
        clipped(GradientClippingConfig::Value(1.0)),
    ] {
        run(2, |group| assert!(stepped_by(&group, &optimizer).is_none()));
    }
}

/// A pass that a panic cuts off.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Broken {
    Forward,
    Backward,
    Evaluation,
}

/// This rank's next exchange would be taken for the one that it has left out.
#[test]
fn nothing_goes_on_after_a_pass_that_a_panic_has_cut_off() {
    for broken in [Broken::Forward, Broken::Backward, Broken::Evaluation] {
        let errors = run(2, |group| {
            let tensor = TensorGroup::new(&group);
            let layer: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
            let layer = RowParallelLinear::new(layer, &tensor).unwrap();
            let mut ddp = Ddp::new(layer, &ProcessGroup::alone().unwrap()).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut step = |broken: Option<Broken>| {
                let loss = ddp.forward(|layer| {
                    assert!(broken != Some(Broken::Forward), "this batch is broken");
                    weighed(layer.forward(tensor.part(input(), 2)))
                })?;
                if broken == Some(Broken::Backward) {
                    // Burn panics at a second backward pass.
                    drop(loss.backward());
                }
                let gradients = ddp.backward(&loss)?;
                ddp.step(&mut optimizer, 0.1, gradients)?;
                ddp.evaluate(|_| assert!(broken != Some(Broken::Evaluation), "this batch is broken"))
            };
            step(None).unwrap();
            if !group.rank().is_main() {
                // A program that leaves out a batch.
                assert!(catch_unwind(AssertUnwindSafe(|| step(Some(broken)))).is_err());
            }
            (0..2).find_map(|_| step(None).err()).map(|error| error.to_string())
        });
        for error in errors {
            assert!(error.is_some_and(|error| error.contains("a pass of divided layers has panicked")));
        }
    }
}

/// No backward pass says so, where there are no replicas.
#[test]
fn gradients_of_a_failed_exchange_are_not_stepped_with() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let tensor = TensorGroup::new(&group);
        let layer: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
        let layer = RowParallelLinear::new(layer, &tensor).unwrap();
        let mut ddp = Ddp::new(layer, &ProcessGroup::alone().unwrap()).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let x = || tensor.part(input(), 2);
        let loss = ddp.forward(|layer| weighed(layer.forward(x()))).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        ddp.step(&mut optimizer, 0.1, gradients).unwrap();
        // None ends the group while the other still compares.
        all_are_here.wait();
        if group.rank().is_main() {
            group.abort(Error::aborted("the cable was cut"));
            let loss = ddp.forward(|layer| weighed(layer.forward(x()))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            let before = floats(ddp.model());
            let error = ddp.step(&mut optimizer, 0.1, gradients).unwrap_err().to_string();
            assert!(error.contains("the cable was cut"), "{error}");
            assert_eq!(floats(ddp.model()), before);
        } else {
            assert!(group.barrier().unwrap_err().to_string().contains("the cable was cut"));
        }
    });
}
