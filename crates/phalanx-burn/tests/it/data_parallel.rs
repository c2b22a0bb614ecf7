//! Replicas of one process train as one model with the whole batch, and say what they move.

use std::sync::{Arc, Barrier};

use crate::common::{Mlp, device, distance, floats, plain, run, samples};
use burn::module::Module;
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use parking_lot::Mutex;
use phalanx_burn::parallel::tensor::TensorGroup;
use phalanx_burn::{Collectives, DataParallel, SyncBatchNorm, TowerGradients};

const STEPS: usize = 10;
/// Not divisible by three.
const BATCH: usize = 20;
const WIDTHS: [usize; 3] = [8, 16, 3];

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn batch(step: usize) -> (Tensor<2>, Tensor<2>) {
    samples(step * BATCH, (step + 1) * BATCH)
}

fn reference(mut model: Mlp) -> Vec<Vec<f32>> {
    let mut optimizer = sgd();
    for step in 0..STEPS {
        let gradients = GradientsParams::from_grads(model.loss(batch(step)).backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    floats(&model)
}

#[test]
fn replicas_train_as_one_model() {
    let model = Mlp::new(&WIDTHS);
    let expected = reference(model.clone());
    for replicas in 1..=4 {
        let mut parallel = DataParallel::new(model.clone(), vec![device(); replicas]).unwrap();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let (x, y) = batch(step);
            let output = parallel.forward(x, Mlp::forward).unwrap();
            let gradients = parallel.backward(&(output - y).powi_scalar(2).mean()).unwrap();
            parallel.step(&mut optimizer, 0.05, gradients).unwrap();
        }
        let distance = distance(&floats(parallel.model()), &expected);
        assert!(distance < 1e-5, "{replicas} replicas are {distance:e} away");
    }
}

#[test]
fn a_replica_may_be_on_a_device_of_another_kind() {
    let model = Mlp::new(&WIDTHS);
    let expected = reference(model.clone());
    let flex = Device::flex().autodiff();
    for devices in [vec![device(), flex.clone()], vec![flex, device(), device()]] {
        let main = devices[0].clone();
        let batch = |step| {
            let (x, y) = batch(step);
            (x.to_device(&main), y.to_device(&main))
        };
        let mut towers = TowerGradients::new(model.clone(), devices.clone()).unwrap();
        let mut parallel = DataParallel::new(model.clone(), devices).unwrap();
        let (mut of_towers, mut of_parallel) = (sgd(), sgd());
        for step in 0..STEPS {
            let (_, gradients) = towers.backward(batch(step), Mlp::loss).unwrap();
            towers.step(&mut of_towers, 0.05, gradients).unwrap();
            let (x, y) = batch(step);
            let output = parallel.forward(x, Mlp::forward).unwrap();
            let gradients = parallel.backward(&(output - y).powi_scalar(2).mean()).unwrap();
            parallel.step(&mut of_parallel, 0.05, gradients).unwrap();
        }
        for trained in [towers.model(), parallel.model()] {
            assert!(distance(&floats(trained), &expected) < 1e-5);
        }
    }
}

#[test]
fn towers_train_as_one_model() {
    let model = Mlp::new(&WIDTHS);
    let expected = reference(model.clone());
    for replicas in 1..=4 {
        let mut towers = TowerGradients::new(model.clone(), vec![device(); replicas]).unwrap();
        let mut optimizer = sgd();
        for step in 0..STEPS {
            let whole = towers.model().loss(batch(step)).into_scalar::<f64>();
            let (loss, gradients) = towers.backward(batch(step), Mlp::loss).unwrap();
            assert!((loss - whole).abs() < 1e-5, "{loss} {whole}");
            towers.step(&mut optimizer, 0.05, gradients).unwrap();
        }
        let distance = distance(&floats(towers.model()), &expected);
        assert!(distance < 1e-5, "{replicas} towers are {distance:e} away");
        assert_eq!(towers.transfers().gather.bytes, 0);
    }
}

#[test]
fn every_transfer_is_counted() {
    let model = Mlp::new(&WIDTHS);
    let parameters = 4 * model.num_params();
    let mut parallel = DataParallel::new(model, vec![device(); 4]).unwrap();
    let (x, y) = batch(0);
    let output = parallel.forward(x, Mlp::forward).unwrap();
    parallel.backward(&(output - y).mean()).unwrap();
    let transfers = parallel.transfers();
    // Three of four parts of 5 samples, with 8 inputs and 3 outputs of 4 bytes each.
    assert_eq!(transfers.scatter.bytes, 3 * 5 * 8 * 4);
    assert_eq!(transfers.replicate.bytes, 3 * parameters);
    assert_eq!(transfers.gather.bytes, 2 * 3 * 5 * 3 * 4);
    assert_eq!(transfers.reduce.bytes, 3 * parameters);
    assert!(transfers.replicate.time.as_nanos() > 0);
    assert_eq!(transfers.total().bytes, 480 + 360 + 6 * parameters);
    assert_eq!(transfers.total().host_bytes, transfers.total().bytes);
}

#[test]
fn a_penalty_on_the_parameters_counts_too() {
    let model = Mlp::new(&[8, 3]);
    let penalty = |model: &Mlp| model.layers[0].weight.val().powi_scalar(2).sum();
    let expected = {
        let loss = model.loss(batch(0)) + penalty(&model);
        model.layers[0].weight.val().grad(&loss.backward()).unwrap().into_data()
    };
    let mut parallel = DataParallel::new(model, vec![device(); 2]).unwrap();
    let (x, y) = batch(0);
    let output = parallel.forward(x, Mlp::forward).unwrap();
    let loss = (output - y).powi_scalar(2).mean() + penalty(parallel.model());
    let gradients = parallel.backward(&loss).unwrap();
    let ours = gradients.get::<2>(parallel.model().layers[0].weight.id).unwrap().into_data();
    ours.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-5));
}

#[test]
fn running_statistics_are_the_average_of_the_replicas() {
    let norm = BatchNormConfig::new(8).init(&device());
    let mut parallel = DataParallel::new(norm.clone(), vec![device(); 2]).unwrap();
    for step in 0..3 {
        let (x, _) = batch(step);
        drop(parallel.forward(x.clone(), |norm, x| norm.forward(x)).unwrap());
    }
    // Means of halves average to the mean of the whole.
    let expected = {
        let norm = BatchNormConfig::new(8).init(&device());
        (0..3).for_each(|step| drop(norm.forward(batch(step).0)));
        norm.running_mean.value_sync().into_data()
    };
    let ours = parallel.model().running_mean.value_sync().into_data();
    ours.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-5));
}

/// The exchanges of replicas that run at once would meet those of other replicas on other ranks.
#[test]
fn statistics_over_ranks_are_refused_within_several_replicas() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let norm = || SyncBatchNorm::new(BatchNormConfig::new(8).init(&device()), &group);
        let forward = |replicas: usize| {
            let mut parallel = DataParallel::new(norm(), vec![device(); replicas]).unwrap();
            let output = parallel.forward(batch(0).0, |norm, x| norm.forward(x)).unwrap();
            output.sum().into_scalar::<f32>()
        };
        // One replica is like no replica, also after it.
        assert!(forward(1).is_finite());
        assert!(norm().forward(batch(0).0).sum().into_scalar::<f32>().is_finite());
        // None ends the group while the other is still in that exchange.
        all_are_here.wait();
        assert!(forward(2).is_nan());
        let cause = norm().failure().unwrap();
        assert!(cause.to_string().contains("one of several replicas"), "{cause}");
    });
    // Neither does a rank alone exchange anything.
    run(1, |group| {
        let norm = SyncBatchNorm::new(BatchNormConfig::new(8).init(&device()), &group);
        let mut towers = TowerGradients::new(norm, vec![device(); 2]).unwrap();
        let (loss, _) = towers.backward(batch(0).0, |norm, x| norm.forward(x).mean()).unwrap();
        assert!(loss.is_finite());
    });
}

/// As statistics, and backward would add gradients to other rows.
#[test]
fn rows_of_all_ranks_are_refused_within_several_replicas() {
    let all_are_here = Barrier::new(2);
    for of_tensor_group in [false, true] {
        run(2, |group| {
            let tensor = TensorGroup::new(&group);
            let errors = |replicas: usize| {
                let layer: Linear = LinearConfig::new(8, 3).init(&device());
                let mut towers = TowerGradients::new(layer, vec![device(); replicas]).unwrap();
                let errors = Mutex::new(Vec::new());
                let pass = |layer: &Linear, x: Tensor<2>| {
                    let own = layer.forward(x);
                    let all = match of_tensor_group {
                        true => {
                            let all = tensor.gather(own.clone(), 0);
                            tensor.failure().map_or(Ok(all), Err)
                        }
                        false => own.clone().all_gather(&group),
                    };
                    all.map_err(|error| errors.lock().push(error.to_string())).unwrap_or(own).mean()
                };
                towers.backward(batch(0).0, pass).unwrap();
                errors.into_inner()
            };
            assert_eq!(errors(1), [""; 0]);
            // None ends the group while the other is still in that exchange.
            all_are_here.wait();
            let errors = errors(2);
            assert_eq!(errors.len(), 2);
            assert!(errors.iter().all(|error| error.contains("one of several replicas")), "{errors:?}");
        });
    }
}

#[test]
fn a_scope_is_entered_for_each_replica() {
    let entered = Arc::new(Mutex::new(vec![0; 3]));
    let counter = entered.clone();
    let model: Linear = LinearConfig::new(8, 3).init(&device());
    let mut parallel =
        DataParallel::new(model, vec![device(); 3]).unwrap().with_scope(move |number, work| {
            counter.lock()[number] += 1;
            work();
        });
    let output = parallel.forward(batch(0).0, |model, x| model.forward(x)).unwrap();
    parallel.backward(&output.mean()).unwrap();
    assert!(entered.lock().iter().all(|times| *times >= 3), "{entered:?}");
}

/// As of a network with two inputs, whose weights would get the gradients of the second output alone.
#[test]
fn a_loss_of_the_outputs_of_two_forward_passes_is_refused() {
    let mut parallel = DataParallel::new(Mlp::new(&WIDTHS), vec![device(); 2]).unwrap();
    let [(x, _), (other, _)] = [batch(0), batch(1)];
    for with_second in [true, false] {
        let first = parallel.forward(x.clone(), Mlp::forward).unwrap();
        let second = parallel.forward(other.clone(), Mlp::forward).unwrap();
        let loss = if with_second { (first - second).powi_scalar(2).mean() } else { first.mean() };
        let error = parallel.backward(&loss).unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("an earlier forward pass"),
            "{error}"
        );
    }
    // One that is out of the graph is none of the loss.
    let first = parallel.forward(x.clone(), Mlp::forward).unwrap();
    let second = parallel.forward(other.clone(), Mlp::forward).unwrap();
    let gradients = parallel.backward(&(second - first.detach()).powi_scalar(2).mean()).unwrap();
    assert!(!gradients.is_empty());
    // Both inputs in one pass, as the error advises.
    let expected = {
        let model = parallel.model();
        let loss = (model.forward(x.clone()) - model.forward(other.clone())).powi_scalar(2).mean();
        model.layers[0].weight.val().grad(&loss.backward()).unwrap().into_data()
    };
    let apart = |model: &Mlp, (x, other)| model.forward(x) - model.forward(other);
    let output = parallel.forward((x, other), apart).unwrap();
    let gradients = parallel.backward(&output.powi_scalar(2).mean()).unwrap();
    let ours = gradients.get::<2>(parallel.model().layers[0].weight.id).unwrap().into_data();
    ours.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-5));
}

/// PyTorch's would train the layer in front, too.
#[test]
fn an_input_that_a_trained_layer_computes_is_refused() {
    let in_front: Linear = LinearConfig::new(8, 8).init(&device());
    for replicas in [1, 2] {
        let (x, y) = batch(0);
        let mut parallel = DataParallel::new(Mlp::new(&WIDTHS), vec![device(); replicas]).unwrap();
        let mut towers = TowerGradients::new(Mlp::new(&WIDTHS), vec![device(); replicas]).unwrap();
        let input = || in_front.forward(x.clone());
        let errors = [
            parallel.forward(input(), Mlp::forward).unwrap_err(),
            towers.backward((input(), y.clone()), Mlp::loss).unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_invalid_argument() && error.to_string().contains("has a graph"), "{error}");
        }
        // Out of its graph it is an input like any other.
        drop(parallel.forward(input().detach(), Mlp::forward).unwrap());
        drop(towers.backward((input().detach(), y), Mlp::loss).unwrap());
    }
}

#[test]
fn misuse_is_an_error_that_says_so() {
    let model = || Mlp::new(&WIDTHS);
    assert!(DataParallel::<_, 2>::new(model(), vec![]).unwrap_err().is_invalid_argument());
    let plain = DataParallel::<_, 2>::new(model(), vec![plain()]).unwrap_err();
    assert!(plain.to_string().contains("autodiff"), "{plain}");
    let mut parallel = DataParallel::new(model(), vec![device(); 2]).unwrap();
    let loss = model().loss(batch(0));
    assert!(parallel.backward(&loss).unwrap_err().to_string().contains("forward"));
    drop(parallel.forward(batch(0).0, Mlp::forward).unwrap());
    assert!(parallel.backward(&loss).unwrap_err().to_string().contains("does not depend"));
    let output = parallel.forward(batch(0).0, Mlp::forward).unwrap();
    let error = parallel.backward(&output.mean().detach()).unwrap_err();
    assert!(error.to_string().contains("does not depend on the output of the forward pass"), "{error}");
    let output = parallel.forward(batch(0).0, |model, x| model.forward(x).detach()).unwrap();
    let error = parallel.backward(&output.mean()).unwrap_err();
    assert!(error.to_string().contains("on any parameter that needs a gradient"), "{error}");
    assert!(parallel.forward(samples(0, 0).0, Mlp::forward).unwrap_err().is_invalid_argument());
}
