//! Divided layers are the undivided ones, forward and backward.

use std::sync::Barrier;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdafactorConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, MuonConfig, SgdConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx::{Error, ProcessGroup};
use phalanx_burn::parallel::tensor::{
    Activations, ColumnParallelLinear, ParallelAttention, ParallelEncoder, ParallelFeedForward,
    RowParallelLinear, TensorGroup, VocabParallelEmbedding,
};
use phalanx_burn::parallel::{ShardedState, StateNames};
use phalanx_burn::{DataParallel, Ddp, FusedAdamWConfig, TowerGradients, TrainState, parallel};

use super::model::{LENGTH, VOCABULARY, WIDTH, Waves, encoder_config, rows, scalar};
use crate::common::{device, distance, floats, plain, run};

const TOLERANCE: f64 = 1e-5;

fn input() -> Tensor<3> {
    let wave: Vec<f32> = (0..3 * LENGTH * WIDTH).map(|i| ((i * i % 977) as f32 * 0.2).sin()).collect();
    Tensor::from_data(TensorData::new(wave, [3, LENGTH, WIDTH]), &device()).require_grad()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// A loss that depends on every element otherwise.
fn weighed<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let weights: Vec<f32> = (0..y.shape().num_elements()).map(|i| (0.3 * i as f32).cos()).collect();
    let weights = Tensor::from_data(TensorData::new(weights, y.shape()), &device());
    (y.powi_scalar(2) * weights).sum()
}

fn near(ours: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let apart = distance(ours, expected);
    assert!(apart < TOLERANCE, "{what}: {apart}");
}

/// Gradients of divided layers are put together as their parameters are: one optimizer step of plain SGD makes `-gradient` of
/// them, and the layers are gathered.
fn stepped<M: Module>(model: M, loss: &Tensor<1>) -> M {
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    SgdConfig::new().init().step(1.0, model, gradients)
}

#[test]
fn linear_layers_are_one() {
    let layers = || -> (Linear, Linear) {
        let inner = LinearConfig::new(WIDTH, 4 * WIDTH).init(&device());
        let outer = LinearConfig::new(4 * WIDTH, WIDTH).init(&device());
        (inner.map(&mut Waves(0)), outer.map(&mut Waves(10)))
    };
    let (inner, outer) = layers();
    let x = input();
    let y = outer.forward(gelu(inner.forward(x.clone())));
    let gradients = weighed(y.clone()).backward();
    let expected_x = values(x.grad(&gradients).unwrap());
    let loss = weighed(outer.forward(gelu(inner.forward(input()))));
    let expected = floats(&stepped(vec![inner, outer], &loss));
    for (ranks, fabric) in
        [(1, Fabric::InProcess), (2, Fabric::InProcess), (4, Fabric::SharedMemory), (4, Fabric::Tcp)]
    {
        testing::run(ranks, fabric, |group| {
            let group = TensorGroup::new(&group);
            let (inner, outer) = layers();
            let inner = ColumnParallelLinear::new(inner, &group).unwrap();
            let outer = RowParallelLinear::new(outer, &group).unwrap();
            assert_eq!(inner.weight.dims(), [WIDTH, 4 * WIDTH / ranks as usize]);
            assert_eq!(outer.weight.dims(), [4 * WIDTH / ranks as usize, WIDTH]);
            let x = input();
            let ours = outer.forward(gelu(inner.forward(x.clone())));
            near(&[values(ours.clone())], &[values(y.clone())], "output");
            let gradients = weighed(ours).backward();
            near(
                &[values(x.grad(&gradients).unwrap())],
                std::slice::from_ref(&expected_x),
                "input's gradient",
            );
            let loss = weighed(outer.forward(gelu(inner.forward(input()))));
            let (inner, outer) = stepped((inner, outer), &loss);
            let whole = vec![inner.gather().unwrap(), outer.gather().unwrap()];
            near(&floats(&whole), &expected, "parameters after a step");
            assert!(group.failure().is_none());
        });
    }
}

#[test]
fn a_tensor_without_elements_keeps_its_shape() {
    run(2, |group| {
        let group = TensorGroup::new(&group);
        let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device());
        let inner = ColumnParallelLinear::new(layer(), &group).unwrap();
        let outer = RowParallelLinear::new(layer(), &group).unwrap();
        for [samples, length] in [[0, LENGTH], [3, 0], [0, 0]] {
            let y = inner.forward(Tensor::<3>::zeros([samples, length, WIDTH], &device()));
            assert_eq!(y.dims(), [samples, length, WIDTH / 2]);
            assert_eq!(outer.forward(y).dims(), [samples, length, WIDTH]);
        }
        assert!(group.failure().is_none());
    });
}

#[test]
fn columns_that_are_gathered_and_parts_that_are_given_are_one() {
    let layer = || -> Linear { LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0)) };
    let x = input();
    let y = layer().forward(layer().forward(x.clone()));
    let expected = values(x.grad(&weighed(y.clone()).backward()).unwrap());
    run(4, |group| {
        let group = TensorGroup::new(&group);
        let inner = ColumnParallelLinear::new(layer(), &group).unwrap();
        let outer = RowParallelLinear::new(layer(), &group).unwrap();
        let x = input();
        let whole = group.gather(inner.forward(x.clone()), 2);
        let ours = outer.forward(group.part(whole, 2));
        near(&[values(ours.clone())], &[values(y.clone())], "output");
        near(
            &[values(x.grad(&weighed(ours).backward()).unwrap())],
            std::slice::from_ref(&expected),
            "gradient",
        );
    });
}

#[test]
fn vocabularies_are_one_whatever_their_size() {
    let embedding =
        || -> Embedding { EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device()).map(&mut Waves(3)) };
    let (tokens, _) = rows(0, 3);
    let targets: Vec<i64> = (0..3 * LENGTH).map(|i| (5 * i % VOCABULARY) as i64).collect();
    let targets = || Tensor::<1, Int>::from_data(TensorData::new(targets.clone(), [3 * LENGTH]), &device());
    for padding in [None, Some(5)] {
        let whole = embedding();
        // The decoder is the embedding, transposed.
        let loss = |vectors: Tensor<3>| vectors.reshape([3 * LENGTH, WIDTH]).tanh() * 3.0;
        let hidden = loss(whole.forward(tokens.clone()));
        let logits = hidden.matmul(whole.weight.val().transpose());
        let pad = padding.map(|padding| vec![padding]);
        let expected_loss =
            CrossEntropyLossConfig::new().with_pad_tokens(pad).init(&device()).forward(logits, targets());
        let expected = floats(&stepped(whole, &expected_loss));
        for ranks in [2, 4] {
            run(ranks, |group| {
                let group = TensorGroup::new(&group);
                let model = VocabParallelEmbedding::new(embedding(), &group).unwrap();
                let hidden = loss(model.forward(tokens.clone()));
                let ours = model.cross_entropy(model.logits(hidden), targets(), padding);
                let (ours_loss, theirs) = (scalar(&ours), scalar(&expected_loss));
                assert!((ours_loss - theirs).abs() < TOLERANCE, "{ours_loss} {theirs}");
                let whole = stepped(model, &ours).gather().unwrap();
                near(&floats(&whole), &expected, "vectors after a step");
            });
        }
    }
}

fn check_encoder(ranks: u32, fabric: Fabric, activations: Activations, norm_first: bool) {
    let encoder = || {
        let config = encoder_config(2).with_norm_first(norm_first).with_activation(ActivationConfig::Relu);
        config.init(&device()).map(&mut Waves(0))
    };
    let pad = || {
        let pad: Vec<bool> = (0..3 * LENGTH).map(|i| i % LENGTH > 5 && i < LENGTH).collect();
        Tensor::<2, Bool>::from_data(TensorData::new(pad, [3, LENGTH]), &device())
    };
    let causal = || {
        let mask: Vec<bool> = (0..3 * LENGTH * LENGTH).map(|i| i % LENGTH > i / LENGTH % LENGTH).collect();
        Tensor::<3, Bool>::from_data(TensorData::new(mask, [3, LENGTH, LENGTH]), &device())
    };
    let whole = encoder();
    let x = input();
    let masked = TransformerEncoderInput::new(x.clone()).mask_pad(pad()).mask_attn(causal());
    let y = whole.forward(masked);
    let loss = weighed(y.clone());
    let gradients = loss.backward();
    let expected_x = values(x.grad(&gradients).unwrap());
    let again = TransformerEncoderInput::new(input()).mask_pad(pad()).mask_attn(causal());
    let loss = weighed(whole.forward(again));
    let expected = floats(&stepped(whole, &loss));
    let replicated = testing::run(ranks, fabric, |group| {
        let group = TensorGroup::new(&group);
        let model = ParallelEncoder::new(encoder(), &group, activations).unwrap();
        let what = format!("{ranks} ranks, {activations:?}, norm first {norm_first}");
        let x = input();
        let ours = model.forward(x.clone(), Some(pad()), Some(causal()));
        near(&[values(ours.clone())], &[values(y.clone())], &what);
        let gradients = weighed(ours).backward();
        near(&[values(x.grad(&gradients).unwrap())], std::slice::from_ref(&expected_x), &what);
        let model = stepped(model.clone(), &weighed(model.forward(input(), Some(pad()), Some(causal()))));
        let whole = model.gather().unwrap();
        near(&floats(&whole), &expected, &what);
        assert!(group.failure().is_none());
        floats(&whole)
    });
    // What every rank has stays the same to the bit.
    assert!(replicated.iter().all(|rank| *rank == replicated[0]));
}

#[test]
fn encoders_are_one() {
    check_encoder(2, Fabric::InProcess, Activations::Replicated, false);
    check_encoder(2, Fabric::InProcess, Activations::Replicated, true);
    check_encoder(4, Fabric::SharedMemory, Activations::Replicated, false);
    check_encoder(4, Fabric::Tcp, Activations::Replicated, true);
}

#[test]
fn one_mask_may_be_for_all_samples() {
    let attention =
        || MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).init(&device()).map(&mut Waves(0));
    let pad = |samples: usize| {
        let pad: Vec<bool> = (0..samples * LENGTH).map(|i| i % LENGTH > 5).collect();
        Tensor::<2, Bool>::from_data(TensorData::new(pad, [samples, LENGTH]), &device())
    };
    let causal = |samples: usize| {
        let mask: Vec<bool> =
            (0..samples * LENGTH * LENGTH).map(|i| i % LENGTH > i / LENGTH % LENGTH).collect();
        Tensor::<3, Bool>::from_data(TensorData::new(mask, [samples, LENGTH, LENGTH]), &device())
    };
    let masked = MhaInput::self_attn(input()).mask_pad(pad(3)).mask_attn(causal(3));
    let expected = values(attention().forward(masked).context);
    run(2, |group| {
        let model = ParallelAttention::new(attention(), &TensorGroup::new(&group)).unwrap();
        for samples in [1, 3] {
            let ours = model.forward(input(), Some(pad(samples)), Some(causal(samples)));
            near(&[values(ours)], std::slice::from_ref(&expected), &format!("masks of {samples} samples"));
        }
    });
}

#[test]
fn so_they_are_with_their_sequences_divided() {
    check_encoder(2, Fabric::InProcess, Activations::Sequence, false);
    check_encoder(4, Fabric::SharedMemory, Activations::Sequence, true);
    check_encoder(4, Fabric::Tcp, Activations::Sequence, false);
}

#[test]
fn ranks_take_rank_0_s_weights_and_give_back_what_they_took() {
    let whole = run(2, |group| {
        let group = TensorGroup::new(&group);
        // Each rank makes weights of its own.
        let encoder = encoder_config(1).init(&device()).map(&mut Waves(100 * group.rank()));
        floats(&ParallelEncoder::new(encoder, &group, Activations::Replicated).unwrap().gather().unwrap())
    });
    let expected = floats(&encoder_config(1).init(&device()).map(&mut Waves(0)));
    assert!(whole.iter().all(|whole| *whole == expected));
}

#[test]
fn the_norm_of_divided_gradients_is_the_whole_one() {
    let encoder = || encoder_config(2).init(&device()).map(&mut Waves(0));
    let whole = encoder();
    let loss = weighed(whole.forward(TransformerEncoderInput::new(input())));
    let mut gradients = GradientsParams::from_grads(loss.backward(), &whole);
    let expected = phalanx_burn::clip_grad_norm(&whole, &mut gradients, 0.5).unwrap();
    let norms = run(2, |group| {
        let group = TensorGroup::new(&group);
        let model = ParallelEncoder::new(encoder(), &group, Activations::Replicated).unwrap();
        let loss = weighed(model.forward(input(), None, None));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let norm = parallel::clip_grad_norm(&model, &mut gradients, 0.5, Some(&group), None, &[]).unwrap();
        let after = parallel::clip_grad_norm(&model, &mut gradients, 0.5, Some(&group), None, &[]).unwrap();
        assert!((after - 0.5).abs() < 1e-4, "{after}");
        norm
    });
    assert_eq!(norms[0].to_bits(), norms[1].to_bits());
    assert!((norms[0] / expected - 1.0).abs() < 1e-5, "{} {expected}", norms[0]);
}

/// On every rank, of replicas too, and nothing is scaled.
#[test]
fn the_norm_of_a_part_is_refused() {
    let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("data", 2), ("tensor", 2)]).unwrap();
        let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
        let model = vec![ColumnParallelLinear::new(layer(), &tensor).unwrap()];
        let mut ddp = Ddp::new(model, mesh.group("data").unwrap()).unwrap();
        let loss = ddp.forward(|model| weighed(model[0].forward(input()))).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        let id = ddp.model()[0].weight.id;
        let before = values(gradients.get::<2>(id).unwrap());
        for error in [
            ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap_err(),
            phalanx_burn::clip_grad_norm(ddp.model(), &mut gradients, 1e-3).unwrap_err(),
            parallel::clip_grad_norm(ddp.model(), &mut gradients, 1e-3, None, None, &[]).unwrap_err(),
        ] {
            assert!(error.is_invalid_argument() && error.to_string().contains("`0.weight`"), "{error}");
            assert!(error.remedy().unwrap().contains("parallel::clip_grad_norm"), "{error}");
        }
        assert_eq!(values(gradients.get::<2>(id).unwrap()), before);
        // The group goes on.
        let (tensor, model) = (Some(&tensor), ddp.model());
        parallel::clip_grad_norm(model, &mut gradients, 1e-3, tensor, None, &[]).unwrap();
        assert_ne!(values(gradients.get::<2>(id).unwrap()), before);
    });
    // The part of a group of one is the whole, and what is frozen has no gradient.
    let alone = ProcessGroup::alone().unwrap();
    let model = ColumnParallelLinear::new(layer(), &TensorGroup::new(&alone)).unwrap();
    let mut ddp = Ddp::new(model, &alone).unwrap();
    let loss = ddp.forward(|model| weighed(model.forward(input()))).unwrap();
    let mut gradients = ddp.backward(&loss).unwrap();
    ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap();
    run(2, |group| {
        let base = ColumnParallelLinear::new(layer(), &TensorGroup::new(&group)).unwrap().no_grad();
        let mut ddp = Ddp::new((base, layer()), &ProcessGroup::alone().unwrap()).unwrap();
        let loss = ddp.forward(|(_, layer)| weighed(layer.forward(input()))).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        ddp.clip_grad_norm(&mut gradients, 1e-3).unwrap();
    });
}

/// Its ranks may have the same parts, whose squares would be added up.
#[test]
fn a_norm_over_another_group_than_that_of_the_layers_is_refused_on_every_rank() {
    for (data, tensor) in [(2, 2), (4, 1)] {
        let together = Barrier::new(4);
        let outcomes = run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", data), ("tensor", tensor)]).unwrap();
            let (data, tensor) = (mesh.group("data").unwrap(), mesh.group("tensor").unwrap());
            let layer = LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
            let layer = ColumnParallelLinear::new(layer, &TensorGroup::new(tensor)).unwrap();
            let mut ddp = Ddp::new(layer, data).unwrap();
            let loss = ddp.forward(|layer| weighed(layer.forward(input()))).unwrap();
            let mut gradients = ddp.backward(&loss).unwrap();
            let other = TensorGroup::new(data);
            // An error ends the groups, and no other rank is in the middle of its backward pass.
            together.wait();
            parallel::clip_grad_norm(ddp.model(), &mut gradients, 1e-3, Some(&other), None, &[]).unwrap_err()
        });
        for error in outcomes {
            assert!(error.to_string().contains("of a divided layer, and in the tensor group"), "{error}");
        }
    }
}

/// It would be made of equal parts.
#[test]
fn a_module_is_gathered_by_no_other_group_than_that_of_its_layers() {
    for (data, tensor, said) in [
        (2, 2, "rank 1 has part 0 of 2 of a divided layer, and in this tensor group it is number 1 of 2"),
        (4, 1, "rank 0 has part 0 of 1 of a divided layer, and in this tensor group it is number 0 of 4"),
    ] {
        run(4, |group| {
            let mesh = DeviceMesh::new(&group, &[("data", data), ("tensor", tensor)]).unwrap();
            let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
            let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device()).map(&mut Waves(0));
            let divided = ColumnParallelLinear::new(layer(), &tensor).unwrap();
            let other = TensorGroup::new(mesh.group("data").unwrap());
            let error = other.gather_module(divided.clone()).unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            // Of the ranks of the first part, or of the second.
            let text = error.to_string();
            assert!(text.contains("of a divided layer, and in this tensor group it is number"), "{text}");
            if group.rank().is_main() {
                assert!(text.contains(said), "{text}");
            }
            let whole = tensor.gather_module(divided).unwrap();
            assert_eq!(floats(&whole), floats(&layer()));
        });
    }
}

/// Rank 0's part would overwrite the others', and their gradients would be averaged.
/// Their tensors have the same shapes.
#[test]
fn encoders_that_compute_otherwise_on_one_rank_are_refused_on_every_rank() {
    let config = |heads| TransformerEncoderConfig::new(8, 16, heads, 1).with_dropout(0.0);
    for (other, said) in [
        (config(2), None),
        (config(4), Some("n_heads: 4")),
        (config(2).with_norm_first(true), Some("norm_first: true")),
        (config(2).with_quiet_softmax(true), Some("quiet_softmax: true")),
    ] {
        let errors = run(2, |group| {
            let own = if group.rank().is_main() { config(2) } else { other.clone() };
            let tensor = TensorGroup::new(&group);
            let encoder = own.init(&device());
            let divided = ParallelEncoder::new(encoder, &tensor, Activations::Replicated);
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

/// A layer of one's own, which is not divided.
#[derive(Module, Debug)]
struct MyColumnParallelLinear {
    layer: Linear,
}

#[test]
fn a_layer_of_one_s_own_counts_once_whatever_its_name() {
    let layer =
        || MyColumnParallelLinear { layer: LinearConfig::new(WIDTH, 2).init(&device()).map(&mut Waves(0)) };
    let gradients = |model: &MyColumnParallelLinear| {
        GradientsParams::from_grads(weighed(model.layer.forward(input())).backward(), model)
    };
    let whole = layer();
    let expected = phalanx_burn::clip_grad_norm(&whole, &mut gradients(&whole), 1e9).unwrap();
    run(2, |group| {
        let (group, model) = (TensorGroup::new(&group), layer());
        let mut gradients = gradients(&model);
        let norm = parallel::clip_grad_norm(&model, &mut gradients, 1e9, Some(&group), None, &[]).unwrap();
        assert!((norm / expected - 1.0).abs() < 1e-6, "{norm} {expected}");
    });
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

/// A sum of 70,000 is infinite in f16, and the number of tokens was of the device's type.
#[test]
fn a_cross_entropy_may_be_of_any_type() {
    const TOKENS: usize = 70_000;
    let dtypes = [DType::F16, DType::BF16, DType::F64];
    for dtype in dtypes.into_iter().filter(|dtype| plain().supports_dtype(*dtype)) {
        for ranks in [1, 2] {
            run(ranks, |group| {
                let group = TensorGroup::new(&group);
                let weight = Tensor::<2>::zeros([TOKENS, 1], (&device(), dtype)).require_grad();
                let embedding = Embedding { weight: Param::from_tensor(weight) };
                let model = VocabParallelEmbedding::new(embedding, &group).unwrap();
                let x = Tensor::<2>::ones([3, 1], (&device(), dtype));
                for padding in [None, Some(0)] {
                    let targets = Tensor::<1, Int>::from_ints([0, 1, TOKENS as i32 - 1], &device());
                    let loss = model.cross_entropy(model.logits(x.clone()), targets, padding);
                    assert_eq!(loss.dtype(), dtype);
                    let gradients = loss.backward();
                    let gradient = values(model.weight.val().grad(&gradients).unwrap());
                    assert!(gradient.iter().all(|x| x.is_finite()), "{dtype:?}");
                    let apart = f64::from(values(loss)[0]) - (TOKENS as f64).ln();
                    assert!(apart.abs() < 0.05, "{dtype:?} {padding:?}: {apart}");
                }
            });
        }
    }
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

#[test]
fn replicated_statistics_are_rank_0_s_also_if_an_update_was_put_off() {
    let means = run(2, |group| {
        let norm = BatchNormConfig::new(4).init(&device());
        norm.forward(Tensor::<2>::full([3, 4], f64::from(group.rank().get()) + 1.0, &device()));
        let norm = TensorGroup::new(&group).replicate(norm).unwrap();
        values(norm.running_mean.value_sync())
    });
    assert_eq!(means[0], means[1]);
    assert_ne!(means[0], [0.0; 4]);
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
