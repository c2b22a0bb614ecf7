//! Batch norm over all ranks.

use std::sync::Barrier;
use std::time::Duration;

use phalanx::{GroupHandle, ProcessGroup};
use phalanx_tch::{Ddp, SyncBatchNorm};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use crate::common::{device, distance, elements, floats, load, on_device, run};

struct Network {
    store: nn::VarStore,
    first: nn::Conv2D,
    norm: SyncBatchNorm,
}

impl Network {
    fn new(group: &ProcessGroup) -> Self {
        let store = nn::VarStore::new(device());
        let first = nn::conv2d(store.root() / "first", 3, 6, 3, Default::default());
        let config = nn::BatchNormConfig::default();
        let norm = nn::batch_norm2d(store.root() / "norm", 6, config);
        let norm = SyncBatchNorm::new(norm, config, &GroupHandle::new(group.clone()));
        Self { store, first, norm }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.norm.forward(&self.first.forward(x), true).unwrap()
    }
}

fn images(from: i64, to: i64) -> Tensor {
    (Tensor::arange_start(from * 75, to * 75, on_device(Kind::Float)) * 0.7).sin().reshape([
        to - from,
        3,
        5,
        5,
    ])
}

#[test]
fn statistics_and_gradients_are_those_of_the_whole_batch_also_if_parts_differ_in_size() {
    let start = floats(&Network::new(&ProcessGroup::alone().unwrap()).store);
    // A sum over all samples, so that parts of any size have the whole one's gradient.
    let loss = |output: &Tensor| (output.square() * output.cos()).sum(Kind::Float);
    let (whole, gradient) = {
        let network = Network::new(&ProcessGroup::alone().unwrap());
        load(&network.store, &start);
        let output = network.forward(&images(0, 9));
        loss(&output).backward();
        let gradient: Vec<_> =
            network.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect();
        (floats(&network.store), gradient)
    };
    for ends in [[0, 4, 9], [0, 1, 9], [0, 0, 9]] {
        let parts = run(2, |group| {
            let network = Network::new(&group);
            load(&network.store, &start);
            let mut ddp = Ddp::new(&network.store, &group).unwrap();
            let rank = group.rank().index();
            let output = ddp.forward(|| network.forward(&images(ends[rank], ends[rank + 1]))).unwrap();
            // The average over two ranks of twice the parts' sums.
            ddp.backward(&(loss(&output) * 2.0)).unwrap();
            let gradient: Vec<_> =
                network.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect();
            (floats(&network.store), gradient)
        });
        for (state, ours) in parts {
            assert!(distance(&state, &whole) < 1e-5, "{ends:?}: {:e}", distance(&state, &whole));
            assert!(distance(&ours, &gradient) < 1e-4, "{ends:?}: {:e}", distance(&ours, &gradient));
        }
    }
}

#[test]
fn a_failed_exchange_is_the_error_of_the_pass() {
    run(2, |group| {
        let network = Network::new(&group);
        if group.rank().is_main() {
            group.abort(phalanx::Error::aborted("the cable was cut"));
        }
        let outcome = network.norm.forward(&Tensor::ones([2, 6, 3, 3], on_device(Kind::Float)), true);
        assert!(outcome.unwrap_err().to_string().contains("the cable was cut"));
        let norm = &network.norm.norm;
        assert_eq!(elements(&norm.running_mean), [0.0; 6]);
        assert_eq!(elements(&norm.running_var), [1.0; 6]);
    });
}

#[test]
fn layers_with_other_settings_are_an_error_on_every_rank() {
    let usual = nn::BatchNormConfig::default();
    for other in [nn::BatchNormConfig { eps: 1e-3, ..usual }, nn::BatchNormConfig { momentum: 0.5, ..usual }]
    {
        run(2, |group| {
            let store = nn::VarStore::new(device());
            let config = if group.rank().is_main() { usual } else { other };
            let norm = SyncBatchNorm::new(nn::batch_norm2d(store.root(), 6, config), config, &group);
            let outcome = norm.forward(&Tensor::ones([2, 6, 3, 3], on_device(Kind::Float)), true);
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("batch norms of the ranks have different settings"), "{error}");
            assert_eq!(elements(&norm.norm.running_mean), [0.0; 6]);
        });
    }
}

/// The other one would wait for its part.
#[test]
fn an_input_that_one_rank_alone_cannot_normalise_ends_the_group() {
    // Of other channels; and an image without its batch, as high as it has channels.
    for size in [&[2i64, 5, 3, 3][..], &[6, 6, 3]] {
        // The groups are dropped when both ranks are done: nobody has left.
        let ends = run(2, |group| {
            let network = Network::new(&group);
            let outcome = match group.rank().is_main() {
                true => Ok(Tensor::default()),
                false => network.norm.forward(&Tensor::ones(size, on_device(Kind::Float)), true),
            };
            let error = outcome.err().map(|error| error.to_string());
            (error, group.failure().map(|cause| cause.to_string()), group)
        });
        let (error, failure, _) = &ends[1];
        for text in [error, failure] {
            assert!(text.as_ref().is_some_and(|text| text.contains("6 channels got")), "{text:?}");
        }
        // Also where nothing is exchanged.
        let alone = Network::new(&ProcessGroup::alone().unwrap());
        let input = Tensor::ones(size, on_device(Kind::Float));
        assert!([true, false].into_iter().all(|train| alone.norm.forward(&input, train).is_err()));
    }
}

/// Their imaginary parts were dropped from the statistics.
#[test]
fn complex_numbers_and_integers_are_refused() {
    for ranks in [1, 2] {
        for kind in [Kind::ComplexFloat, Kind::Int64] {
            run(ranks, |group| {
                let store = nn::VarStore::new(device());
                let norm = norm_of_3(&store, &group);
                let input = images(0, 2).to_kind(kind);
                let error = norm.forward(&input, true).unwrap_err().to_string();
                assert!(error.contains(&format!("{kind:?}")), "{error}");
                assert_eq!(elements(&norm.norm.running_mean), [0.0; 3]);
            });
        }
    }
}

/// It has no variance, and the running variance would be divided by 0.
#[test]
fn one_value_of_each_channel_in_all_ranks_together_is_refused_on_every_rank() {
    let norm = |group: &ProcessGroup| {
        let store = nn::VarStore::new(device());
        let config = nn::BatchNormConfig::default();
        (SyncBatchNorm::new(nn::batch_norm1d(store.root(), 6, config), config, group), store)
    };
    let input = |samples: i64| Tensor::ones([samples, 6], on_device(Kind::Float));
    for ranks in [1, 2] {
        run(ranks, |group| {
            let (norm, _store) = norm(&group);
            let mine = i64::from(group.rank().is_main());
            let error = norm.forward(&input(mine), true).unwrap_err().to_string();
            assert!(error.contains("one value of each channel"), "{error}");
            assert_eq!(elements(&norm.norm.running_mean), [0.0; 6]);
            assert_eq!(elements(&norm.norm.running_var), [1.0; 6]);
        });
    }
    // One of each rank is enough, and so is one with several places; an evaluation needs none.
    run(2, |group| {
        let (norm, _store) = norm(&group);
        let _ = norm.forward(&input(1), true).unwrap();
        assert!(elements(&norm.norm.running_var).iter().all(|variance| variance.is_finite()));
    });
    let (norm, _store) = norm(&ProcessGroup::alone().unwrap());
    let _ = norm.forward(&Tensor::ones([1, 6, 2], on_device(Kind::Float)), true).unwrap();
    let _ = norm.forward(&input(1), false).unwrap();
}

#[test]
fn half_precision_is_normalised_in_single() {
    // Far from zero, where the squares of bf16 say nothing of the variance.
    let x = |from, to| (images(from, to) + 20.0).to_kind(Kind::BFloat16);
    let of = |group: &ProcessGroup, input: &Tensor, kind: Kind| {
        let store = nn::VarStore::new(device());
        let norm = norm_of_3(&store, group);
        let input = input.to_kind(kind).set_requires_grad(true);
        let output = norm.forward(&input, true).unwrap();
        assert_eq!(output.kind(), kind);
        output.to_kind(Kind::Float).pow_tensor_scalar(3.0).sum(Kind::Float).backward();
        assert_eq!(input.grad().kind(), kind);
        [elements(&output), elements(&input.grad()), elements(&norm.norm.running_var)]
    };
    let [output, gradient, variance] = of(&ProcessGroup::alone().unwrap(), &x(0, 8), Kind::Float);
    let parts = run(2, |group| {
        let from = 4 * i64::from(group.rank().get());
        of(&group, &x(from, from + 4), Kind::BFloat16)
    });
    let both = |which: usize| vec![[&parts[0][which][..], &parts[1][which][..]].concat()];
    assert!(distance(&both(0), &[output]) < 5e-3);
    assert!(distance(&both(1), &[gradient]) < 2e-2);
    assert!(distance(&[parts[1][2].clone()], &[variance]) < 1e-5);
}

#[test]
fn running_statistics_of_halves_take_their_share_of_a_variance_that_is_infinite_in_their_type() {
    let variances = run(2, |group| {
        let mut store = nn::VarStore::new(device());
        let norm = norm_of_3(&store, &group);
        store.half();
        let from = 4 * i64::from(group.rank().get());
        let input = (images(from, from + 4) * 500.0).to_kind(Kind::Half);
        let _ = norm.forward(&input, true).unwrap();
        assert_eq!(norm.norm.running_var.kind(), Kind::Half);
        elements(&norm.norm.running_var)
    });
    // A tenth of about half of 500².
    assert!(variances.iter().flatten().all(|variance| (1e4..2e4).contains(variance)), "{variances:?}");
}

#[test]
fn a_rank_leaves_with_its_last_handle_also_if_it_keeps_what_was_normalised() {
    const LIMIT: Duration = Duration::from_secs(120);
    let together = Barrier::new(2);
    run(2, |group| {
        let limited = group.with_timeout(LIMIT);
        drop(group);
        let output = Network::new(&limited).forward(&images(0, 2));
        together.wait();
        if limited.rank().is_main() {
            let error = limited.barrier().unwrap_err();
            together.wait();
            assert!(!error.is_timeout(), "{error}");
        } else {
            drop(limited);
            together.wait();
        }
        drop(output);
    });
}

/// A layer of three channels whose weights are 1.
fn norm_of_3(store: &nn::VarStore, group: &ProcessGroup) -> SyncBatchNorm {
    let config = nn::BatchNormConfig { ws_init: nn::Init::Const(1.0), ..Default::default() };
    SyncBatchNorm::new(nn::batch_norm2d(store.root(), 3, config), config, group)
}

/// The squares of such values, as doubles, say nothing of the variance.
#[test]
fn a_variance_that_is_small_beside_the_squared_mean_is_that_of_the_whole_batch() {
    let of = |group: &ProcessGroup, images: Tensor| {
        let mut store = nn::VarStore::new(device());
        let norm = norm_of_3(&store, group);
        store.double();
        let input = (images.to_kind(Kind::Double) + 1e9).set_requires_grad(true);
        let output = norm.forward(&input, true).unwrap();
        output.pow_tensor_scalar(3.0).sum(Kind::Double).backward();
        [elements(&output), elements(&input.grad()), elements(&norm.norm.running_var)]
    };
    let [output, gradient, variance] = of(&ProcessGroup::alone().unwrap(), images(0, 9));
    let ends = [0, 4, 9];
    let parts = run(2, |group| {
        let rank = group.rank().index();
        of(&group, images(ends[rank], ends[rank + 1]))
    });
    let both = |which: usize| vec![[&parts[0][which][..], &parts[1][which][..]].concat()];
    assert!(distance(&both(0), &[output]) < 1e-5);
    assert!(distance(&both(1), &[gradient]) < 1e-4);
    assert!(distance(&[parts[1][2].clone()], &[variance]) < 1e-5);
}

#[test]
fn a_channel_that_is_nan_leaves_the_others_their_small_variance() {
    let of = |group: &ProcessGroup, images: Tensor| {
        let mut store = nn::VarStore::new(device());
        let norm = norm_of_3(&store, group);
        store.double();
        let input = images.to_kind(Kind::Double) + 1e9;
        let first = input.narrow(1, 0, 1).full_like(f64::NAN);
        let input = Tensor::cat(&[first, input.narrow(1, 1, 2)], 1);
        elements(&norm.forward(&input, true).unwrap().narrow(1, 1, 2))
    };
    let whole = of(&ProcessGroup::alone().unwrap(), images(0, 9));
    let parts = run(2, |group| {
        let (ends, rank) = ([0, 4, 9], group.rank().index());
        of(&group, images(ends[rank], ends[rank + 1]))
    });
    assert!(distance(&[parts.concat()], &[whole]) < 1e-5);
}

#[test]
fn gradients_of_gradients_are_those_of_the_whole_batch() {
    let start = floats(&Network::new(&ProcessGroup::alone().unwrap()).store);
    // A penalty for the gradient of the loss by the images.
    let gradient = |group: &ProcessGroup, images: Tensor| {
        let network = Network::new(group);
        load(&network.store, &start);
        let images = images.set_requires_grad(true);
        let output = network.forward(&images);
        let loss = (output.square() * output.cos()).sum(Kind::Float);
        let by_images = Tensor::run_backward(&[loss], &[&images], true, true).remove(0);
        by_images.square().sum(Kind::Float).backward();
        elements(&network.first.ws.grad())
    };
    let whole = gradient(&ProcessGroup::alone().unwrap(), images(0, 9));
    let parts = run(2, |group| {
        let ends = [0, 4, 9];
        let rank = group.rank().index();
        gradient(&group, images(ends[rank], ends[rank + 1]))
    });
    let sum: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
    let apart = distance(&[sum], &[whole]);
    assert!(apart < 1e-3, "{apart:e}");
}
