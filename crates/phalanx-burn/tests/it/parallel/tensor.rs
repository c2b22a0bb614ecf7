//! Divided layers are the undivided ones, forward and backward.

mod norms;
mod refused;

use burn::module::{Module, Param};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::TransformerEncoderInput;
use burn::nn::{BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use phalanx::testing::{self, Fabric};
use phalanx_burn::parallel;
use phalanx_burn::parallel::tensor::{
    Activations, ColumnParallelLinear, ParallelAttention, ParallelEncoder, RowParallelLinear, TensorGroup,
    VocabParallelEmbedding,
};

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
