//! Units of one layer each: their gradients in graphs of every kind, their memory, and their checkpoints.

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use phalanx::Result;
use phalanx::checkpoint::{Checkpoints, Snapshot};
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup};

use super::super::model::scalar;
use super::{all_options, options};
use crate::common::{LOADS, Mlp, device, distance, floats, plain, run, samples};

/// Dense layers, each a unit.
#[derive(Module, Debug)]
pub struct Layers {
    pub layers: Vec<FullySharded<Linear>>,
}

impl Layers {
    pub fn new(widths: &[usize], sharding: &ShardingGroup) -> Result<Self> {
        let layers = Mlp::new(widths).layers.into_iter().map(|layer| FullySharded::new(layer, sharding));
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x, |layer, x| layer.forward(x).tanh()))
    }

    pub fn whole(&self) -> Mlp {
        Mlp { layers: self.layers.iter().map(|layer| layer.gather().unwrap()).collect() }
    }
}

fn tanh(model: &Mlp, x: Tensor<2>) -> Tensor<2> {
    model.layers.iter().fold(x, |x, layer| layer.forward(x).tanh())
}

/// The gradients of a whole model, tensor by tensor.
pub fn gradients_of(model: &Mlp, loss: &Tensor<1>) -> Vec<Vec<f32>> {
    let gradients = loss.backward();
    let mut all = Vec::new();
    for Linear { weight, bias } in &model.layers {
        all.push(weight.grad(&gradients).unwrap().into_data().iter().collect());
        all.push(bias.as_ref().unwrap().grad(&gradients).unwrap().into_data().iter().collect());
    }
    all
}

/// The gradients, from the step of an optimizer that subtracts them: many times, so that weights do not hide them.
pub fn subtracted(fsdp: &mut Fsdp<Layers>, loss: &Tensor<1>) -> Vec<Vec<f32>> {
    const TIMES: f32 = 64.0;
    let before = floats(&fsdp.model().whole());
    let gradients = fsdp.backward(loss).unwrap();
    fsdp.step(&mut SgdConfig::new().init(), f64::from(TIMES), gradients).unwrap();
    let after = floats(&fsdp.model().whole());
    let minus = |(before, after): (&Vec<f32>, &Vec<f32>)| -> Vec<f32> {
        before.iter().zip(after).map(|(before, after)| (before - after) / TIMES).collect()
    };
    before.iter().zip(&after).map(minus).collect()
}

#[test]
fn shards_of_any_length_come_together_again() {
    // Units of 63, 8 and 2 elements: of the last two, some ranks have padding only.
    for ranks in [1, 3, 4, 5] {
        for options in all_options() {
            run(ranks, |group| {
                let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
                let mut fsdp = Fsdp::new(Layers::new(&[8, 7, 1, 1], &sharding).unwrap(), &sharding).unwrap();
                let whole = fsdp.model().whole();
                let loss = fsdp.forward(|model| model.forward(samples(0, 4).0).mean()).unwrap();
                let expected = tanh(&whole, samples(0, 4).0).mean();
                assert!((scalar(&loss) - scalar(&expected)).abs() < 1e-6);
                let apart = distance(&subtracted(&mut fsdp, &loss), &gradients_of(&whole, &expected));
                assert!(apart < 1e-5, "{ranks} ranks: {apart:e}");
            });
        }
    }
}

/// Two branches from one input, a unit that is used twice, one that skips, and two forward passes for one backward.
#[test]
fn graphs_that_are_no_chains_are_one_process() {
    for options in all_options() {
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            let mut fsdp = Fsdp::new(Layers::new(&[8, 8, 8, 8], &sharding).unwrap(), &sharding).unwrap();
            let whole = fsdp.model().whole();
            let inputs = [samples(0, 4).0, samples(4, 8).0];
            let branched = |model: &Layers, x: Tensor<2>| {
                let [first, second, third] = [0, 1, 2].map(|index| &model.layers[index]);
                let unit = |unit: &FullySharded<Linear>, x| {
                    unit.forward(x, |layer: &Linear, x| layer.forward(x).tanh())
                };
                let x = unit(first, x);
                let (left, right) = (unit(second, x.clone()), unit(third, x.clone()));
                let unused = right.clone();
                let joined = second.forward((left, Some(right), vec![unused]), |layer, (left, right, _)| {
                    layer.forward(left).tanh() * right.unwrap()
                });
                (joined + x).mean()
            };
            let together = |model: &Mlp, x: Tensor<2>| {
                let unit = |index: usize, x| model.layers[index].forward(x).tanh();
                let x = unit(0, x);
                let (left, right) = (unit(1, x.clone()), unit(2, x.clone()));
                (unit(1, left) * right + x).mean()
            };
            // The second forward pass uses the order of the first.
            for _ in 0..2 {
                let [x, y] = inputs.clone();
                let first = fsdp.forward(|model| branched(model, x)).unwrap();
                let second = fsdp.forward(|model| branched(model, y)).unwrap();
                let loss = first + second;
                let [x, y] = inputs.clone();
                let whole = fsdp.model().whole();
                let expected = together(&whole, x) + together(&whole, y);
                assert!((scalar(&loss) - scalar(&expected)).abs() < 1e-6);
                let apart = distance(&subtracted(&mut fsdp, &loss), &gradients_of(&whole, &expected));
                assert!(apart < 1e-5, "{options:?}: {apart:e}");
            }
            drop(whole);
        });
    }
}

#[test]
fn a_loss_may_be_dropped_and_a_model_evaluated_between_steps() {
    for options in all_options() {
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            let mut fsdp = Fsdp::new(Layers::new(&[8, 8, 3], &sharding).unwrap(), &sharding).unwrap();
            let batch = || samples(0, 4).0;
            let whole = fsdp.model().whole();
            drop(fsdp.forward(|model| model.forward(batch()).mean()).unwrap());
            let loss = fsdp.forward(|model| model.forward(batch()).mean()).unwrap();
            let evaluated = fsdp.evaluate(|model| model.forward(batch().inner()).mean()).unwrap();
            assert!(!evaluated.is_autodiff());
            assert_eq!(scalar(&evaluated), scalar(&loss));
            assert_eq!(scalar(&fsdp.model().valid().forward(batch().inner()).mean()), scalar(&loss));
            let apart =
                distance(&subtracted(&mut fsdp, &loss), &gradients_of(&whole, &tanh(&whole, batch()).mean()));
            assert!(apart < 1e-5, "{options:?}: {apart:e}");
            // What is evaluated now has taken the step; whether it is smaller is for the weights to say, which are drawn anew each time.
            let after = fsdp.evaluate(|model| scalar(&model.forward(batch().inner()).mean())).unwrap();
            assert_ne!(after, scalar(&loss));
        });
    }
}

#[test]
fn memory_and_traffic_are_those_of_the_formula() {
    const WIDTH: usize = 32;
    const UNITS: usize = 6;
    for ranks in [1, 2, 4] {
        for (reshard, prefetch) in [(true, 0), (true, 1), (true, 2), (false, 1)] {
            let all = run(ranks, |group| {
                let options = options(reshard, prefetch);
                let sharding = ShardingGroup::new(&group).unwrap().with_options(options);
                let model = Layers::new(&[WIDTH; UNITS + 1], &sharding).unwrap();
                let mut fsdp = Fsdp::new(model, &sharding).unwrap();
                // With a gradient, without which the first layer's weight is not needed for backward.
                let x = Tensor::<2>::ones([2, WIDTH], &device()).require_grad();
                let mut traffic = Vec::new();
                for _ in 0..3 {
                    let loss = fsdp.forward(|model| model.forward(x.clone()).mean()).unwrap();
                    let gradients = fsdp.backward(&loss).unwrap();
                    fsdp.step(&mut SgdConfig::new().init(), 0.1, gradients).unwrap();
                    traffic.push(fsdp.bytes().communicated);
                }
                (fsdp.bytes(), traffic)
            });
            let unit = 4 * (WIDTH * WIDTH + WIDTH);
            let passes = if reshard { 3 } else { 2 };
            for (bytes, traffic) in all {
                let what = format!("{ranks} ranks, {reshard} {prefetch}: {bytes:?}");
                assert_eq!(bytes.shards, UNITS * unit / ranks as usize, "{what}");
                // Elsewhere the device has the tensors, and what is counted is freed when they have been copied there.
                if plain() == Device::flex() {
                    let whole = if reshard { (1 + prefetch) * unit } else { UNITS * unit };
                    assert_eq!(bytes.parameters_peak, whole, "{what}");
                    assert_eq!(bytes.gradients_peak, 2 * unit, "{what}");
                }
                for (step, traffic) in traffic.iter().enumerate() {
                    assert_eq!(*traffic, ((step + 1) * passes * UNITS * unit) as u64, "{what}");
                }
            }
        }
    }
}

/// A mask that is used in units, outside of them and in the loss: Burn has all these in one graph, which backward locks.
#[test]
fn inputs_may_be_used_anywhere_else() {
    for options in all_options() {
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            let mut fsdp = Fsdp::new(Layers::new(&[8, 8, 8], &sharding).unwrap(), &sharding).unwrap();
            let whole = fsdp.model().whole();
            let (x, mask) = (samples(0, 4).0, samples(4, 8).0.sin());
            let loss = fsdp.forward(|model| {
                let masked = |x: Tensor<2>, unit: &FullySharded<Linear>| {
                    let x = unit.forward((x, mask.clone(), 0.5), |layer, (x, mask, factor)| {
                        layer.forward(x * mask).tanh() * factor
                    });
                    x * mask.clone()
                };
                (model.layers.iter().fold(x.clone(), masked) * mask.clone()).mean()
            });
            let loss = loss.unwrap();
            let masked =
                |x: Tensor<2>, layer: &Linear| layer.forward(x * mask.clone()).tanh() * 0.5 * mask.clone();
            let expected = (whole.layers.iter().fold(x.clone(), masked) * mask.clone()).mean();
            let apart = distance(&subtracted(&mut fsdp, &loss), &gradients_of(&whole, &expected));
            assert!(apart < 1e-5, "{options:?}: {apart:e}");
        });
    }
}

#[test]
fn gradient_checkpointing_changes_nothing() {
    for options in all_options() {
        run(2, |group| {
            let device = device().gradient_checkpointing();
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            let layers: Vec<Linear> = (0..3).map(|_| LinearConfig::new(8, 8).init(&device)).collect();
            let layers = layers.into_iter().map(|layer| FullySharded::new(layer, &sharding).unwrap());
            let mut fsdp = Fsdp::new(Layers { layers: layers.collect() }, &sharding).unwrap();
            let whole = fsdp.model().whole();
            let x = || Tensor::from_data(samples(0, 4).0.into_data(), &device);
            let loss = fsdp.forward(|model| model.forward(x()).mean()).unwrap();
            let expected = gradients_of(&whole, &tanh(&whole, x()).mean());
            let apart = distance(&subtracted(&mut fsdp, &loss), &expected);
            assert!(apart < 1e-5, "{options:?}: {apart:e}");
        });
    }
}

#[test]
fn frozen_parameters_stay_whole_and_as_they_are() {
    for options in all_options() {
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap().with_options(options.clone());
            let Linear { weight, bias } = LinearConfig::new(4, 4).init(&device());
            let layer = Linear { weight: weight.no_grad(), bias };
            let mut fsdp = Fsdp::new(FullySharded::new(layer, &sharding).unwrap(), &sharding).unwrap();
            assert_eq!(fsdp.model().elements(), 4);
            let before = floats(&fsdp.model().gather().unwrap());
            for _ in 0..2 {
                let x = Tensor::<2>::ones([2, 4], &device());
                let loss = fsdp.forward(|unit| unit.forward(x, |layer, x| layer.forward(x)).sum()).unwrap();
                let gradients = fsdp.backward(&loss).unwrap();
                fsdp.step(&mut SgdConfig::new().init(), 0.5, gradients).unwrap();
            }
            let after = floats(&fsdp.model().gather().unwrap());
            assert_eq!(before[0], after[0]);
            // Two rows, two steps of a half.
            assert!(
                before[1].iter().zip(&after[1]).all(|(before, after)| (before - after - 2.0).abs() < 1e-6)
            );
        });
    }
}

/// A unit, and tensors of every kind that are in none.
#[derive(Module, Debug)]
struct Mixed {
    unit: FullySharded<Linear>,
    frozen: Linear,
    numbers: Param<Tensor<1, Int>>,
    flags: Param<Tensor<1, Bool>>,
}

impl Mixed {
    fn new(number: u32, sharding: &ShardingGroup) -> Result<Self> {
        let frozen = LinearConfig::new(2, 2).with_bias(false).init(&device()).no_grad();
        let frozen = Linear { weight: frozen.weight.map(|weight| weight.zeros_like() + number), ..frozen };
        let numbers = Tensor::from_data([number as i32, 7], &device());
        let flags = Tensor::from_data([number == 0, true], &device());
        Ok(Self {
            unit: FullySharded::new(LinearConfig::new(4, 4).init(&device()), sharding)?,
            frozen,
            numbers: Param::initialized(ParamId::new(), numbers),
            flags: Param::initialized(ParamId::new(), flags),
        })
    }

    fn rest(&self) -> (Vec<f32>, Vec<i64>, Vec<bool>) {
        let flags = self.flags.val().into_data().iter::<bool>().collect();
        let weight = self.frozen.weight.val();
        assert!(!weight.is_require_grad());
        (weight.into_data().iter().collect(), self.numbers.val().into_data().iter().collect(), flags)
    }
}

#[test]
fn what_is_in_no_unit_is_that_of_rank_0_and_is_saved() {
    let expected =
        |number: u32| (vec![number as f32; 4], vec![i64::from(number), 7], vec![number == 0, true]);
    for replicas in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        run(2 * replicas, |group| {
            let mesh = [("replicate", replicas as usize), ("shard", 2)];
            let mesh = DeviceMesh::new(&group, &mesh).unwrap();
            let (shard, replicate) = (mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = || ShardingGroup::hybrid(shard, replicate);
            let number = group.rank().get();
            let fsdp = |number: u32| {
                let sharding = sharding();
                Fsdp::new(Mixed::new(number, &sharding).unwrap(), &sharding).unwrap()
            };
            let first = fsdp(number);
            assert_eq!(first.model().rest(), expected(0), "{replicas} replicas, rank {number}");
            let mut optimizer = SgdConfig::new().init();
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            checkpoints.save_sharded(1, |snapshot| first.save(&optimizer, snapshot, "model")).unwrap();
            checkpoints.finish().unwrap();
            let mut again = fsdp(number + 9);
            assert_eq!(again.model().rest(), expected(9));
            let saved = checkpoints.newest().unwrap().unwrap();
            again.load(&mut optimizer, &saved, "model").unwrap();
            assert_eq!(again.model().rest(), expected(0));
            assert_eq!(
                floats(&again.model().unit.gather().unwrap()),
                floats(&first.model().unit.gather().unwrap())
            );
        });
    }
}

#[test]
fn ranks_that_load_other_states_are_an_error_on_every_rank() {
    // Ranks that have other shards, and ranks that have the same.
    for shards in [2, 1] {
        for (loads, is_error) in LOADS {
            let folder = tempfile::tempdir().unwrap();
            let errors = run(2, |group| {
                let mesh = DeviceMesh::new(&group, &[("replicate", 2 / shards), ("shard", shards)]).unwrap();
                let sharding =
                    ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
                let mut fsdp = Fsdp::new(Layers::new(&[8, 4, 1], &sharding).unwrap(), &sharding).unwrap();
                let mut optimizer = SgdConfig::new().init();
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                let saved = [1, 2].map(|step| {
                    let save = |snapshot: &mut Snapshot| fsdp.save(&optimizer, snapshot, "model");
                    checkpoints.save_sharded(step, save).unwrap();
                    checkpoints.finish().unwrap();
                    checkpoints.newest().unwrap().unwrap()
                });
                for which in loads[group.rank().index()] {
                    fsdp.load(&mut optimizer, &saved[*which], "model").unwrap();
                }
                let mut step = || {
                    let loss = fsdp.forward(|model| model.forward(samples(0, 4).0).mean())?;
                    let gradients = fsdp.backward(&loss)?;
                    fsdp.step(&mut optimizer, 0.01, gradients)
                };
                (0..40).find_map(|_| step().err()).map(|error| error.to_string())
            });
            for error in errors {
                assert_eq!(error.is_some(), is_error, "{shards} shards, {loads:?}: {error:?}");
                assert!(error.is_none_or(|error| error.contains("one rank alone has loaded a state")));
            }
        }
    }
}

#[test]
fn a_state_is_refused_if_what_is_frozen_in_its_units_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let fsdp = |value: f32| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let Linear { weight, bias } = LinearConfig::new(4, 4).init(&device());
            let weight = weight.map(|weight| weight.zeros_like() + value).no_grad();
            Fsdp::new(FullySharded::new(Linear { weight, bias }, &sharding).unwrap(), &sharding).unwrap()
        };
        let mut optimizer = SgdConfig::new().init();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(1, |snapshot| fsdp(2.0).save(&optimizer, snapshot, "model")).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        fsdp(2.0).load(&mut optimizer, &saved, "model").unwrap();
        let error = fsdp(3.0).load(&mut optimizer, &saved, "model").unwrap_err();
        assert!(error.to_string().contains("the frozen tensors in the unit of `shard`"), "{error}");
    });
}

#[test]
fn a_replica_may_evaluate_alone() {
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
        let sharding = ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
        let mut fsdp = Fsdp::new(Layers::new(&[8, 8, 3], &sharding).unwrap(), &sharding).unwrap();
        if mesh.coordinate("replicate").unwrap() == 0 {
            drop(fsdp.evaluate(|model| model.forward(samples(0, 4).0.inner())).unwrap());
        }
        let loss = fsdp.forward(|model| model.forward(samples(0, 4).0).mean()).unwrap();
        let gradients = fsdp.backward(&loss).unwrap();
        fsdp.step(&mut SgdConfig::new().init(), 0.1, gradients).unwrap();
    });
}

#[test]
fn the_norm_has_the_same_bits_on_every_replica() {
    for fabric in [Fabric::InProcess, Fabric::TwoHosts] {
        let norms = testing::run(6, fabric, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 3)]).unwrap();
            let sharding =
                ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let mut fsdp = Fsdp::new(Layers::new(&[8, 9, 3], &sharding).unwrap(), &sharding).unwrap();
            let rank = group.rank().index();
            let inputs = samples(4 * rank, 4 * rank + 4).0;
            let loss = fsdp.forward(|model| model.forward(inputs).mean()).unwrap();
            let mut gradients = fsdp.backward(&loss).unwrap();
            fsdp.clip_grad_norm(&mut gradients, 0.01).unwrap().to_bits()
        });
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{fabric:?}: {norms:?}");
    }
}

#[test]
fn steps_without_an_optimizer_s_state_are_refused_by_one_that_needs_some() {
    for step in [0, 5] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let new = || {
                let sharding = ShardingGroup::new(&group).unwrap();
                Fsdp::new(Layers::new(&[8, 7, 1], &sharding).unwrap(), &sharding).unwrap()
            };
            // Whatever took the steps, this one did not, and has nothing.
            let (first, mut sgd) = (new(), SgdConfig::new().init());
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            checkpoints.save_sharded(step, |snapshot| first.save(&sgd, snapshot, "model")).unwrap();
            checkpoints.finish().unwrap();
            let saved = checkpoints.newest().unwrap().unwrap();
            let mut other = new();
            let before = floats(&other.model().whole());
            let loaded = other.load(&mut AdamWConfig::new().init(), &saved, "model");
            if step == 0 {
                loaded.unwrap();
            } else {
                let error = loaded.unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains(".momentum.moment_1`"), "{error}");
                assert_eq!(floats(&other.model().whole()), before);
            }
            other.load(&mut sgd, &saved, "model").unwrap();
        });
    }
}

#[test]
fn any_number_of_ranks_goes_on_with_what_any_number_has_saved() {
    const WIDTHS: [usize; 4] = [8, 7, 1, 1];
    let optimizer = || AdamWConfig::new().init();
    let step = |fsdp: &mut Fsdp<Layers>, optimizer: &mut ModuleOptimizer, step: usize| {
        let loss = fsdp.forward(|model| model.forward(samples(4 * step, 4 * step + 4).0).mean()).unwrap();
        let gradients = fsdp.backward(&loss).unwrap();
        fsdp.step(optimizer, 0.01, gradients).unwrap();
    };
    for ranks in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let expected = run(ranks, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let mut fsdp = Fsdp::new(Layers::new(&WIDTHS, &sharding).unwrap(), &sharding).unwrap();
            let mut optimizer = optimizer();
            (0..3).for_each(|index| step(&mut fsdp, &mut optimizer, index));
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            checkpoints.save_sharded(3, |snapshot| fsdp.save(&optimizer, snapshot, "model")).unwrap();
            checkpoints.finish().unwrap();
            let saved = floats(&fsdp.model().whole());
            (3..5).for_each(|index| step(&mut fsdp, &mut optimizer, index));
            (saved, floats(&fsdp.model().whole()))
        });
        for world in [1, 2, 4, 5] {
            run(world, |group| {
                let sharding = ShardingGroup::new(&group).unwrap();
                let mut fsdp = Fsdp::new(Layers::new(&WIDTHS, &sharding).unwrap(), &sharding).unwrap();
                let mut optimizer = optimizer();
                let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
                let error = fsdp.load(&mut optimizer, &saved, "other").unwrap_err();
                assert!(error.to_string().contains("other"), "{error}");
                fsdp.load(&mut optimizer, &saved, "model").unwrap();
                assert_eq!(floats(&fsdp.model().whole()), expected[0].0);
                (3..5).for_each(|index| step(&mut fsdp, &mut optimizer, index));
                // All ranks have the same batch: only the sum over them is rounded.
                let apart = distance(&floats(&fsdp.model().whole()), &expected[0].1);
                assert!(apart < 1e-5, "{ranks} to {world}: {apart:e}");
            });
        }
        run(2, |group| {
            let sharding = ShardingGroup::new(&group).unwrap();
            let mut fsdp = Fsdp::new(Layers::new(&[8, 6, 1, 1], &sharding).unwrap(), &sharding).unwrap();
            let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
            let error = fsdp.load(&mut optimizer(), &saved, "model").unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("layers.0.shard"), "{error}");

            // As many elements, divided otherwise.
            let sharding = ShardingGroup::new(&group).unwrap();
            let layers = [(6, 9), (7, 1), (1, 1)].map(|(from, to)| {
                FullySharded::new(LinearConfig::new(from, to).init(&device()), &sharding).unwrap()
            });
            let mut fsdp = Fsdp::new(Layers { layers: layers.into() }, &sharding).unwrap();
            let error = fsdp.load(&mut optimizer(), &saved, "model").unwrap_err();
            let cause = "is layers.0.shard.weight F32 [8, 7], here it is layers.0.shard.weight F32 [6, 9]";
            assert!(error.is_mismatch() && error.to_string().contains(cause), "{error}");
        });
    }
}
