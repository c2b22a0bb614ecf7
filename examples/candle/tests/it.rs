//! Ranks as threads, against one process that has the whole batch and candle's own optimizers.
#![allow(missing_docs, clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use candle_core::{CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear};
use phalanx::adapter::{Caller, Communicator, JoinGroup};
use phalanx::checkpoint::Checkpoints;
use phalanx::elastic::Parts;
use phalanx::join::JoinOptions;
use phalanx::reducer::ReducerOptions;
use phalanx::testing::{Fabric, run};
use phalanx::trace::Trace;
use phalanx::{Buffer, ProcessGroup, Rank, ReduceOp, Work, WorldSize};
use phalanx_candle::{AdamW, Ddp};

const RATE: f64 = 0.05;
const ROWS: usize = 12;

/// Numbers between -1 and 1 that look random; each `seed` has its own.
fn numbers(seed: usize, count: usize) -> Vec<f64> {
    (0..count).map(|index| ((seed * 7919 + index * 104_729 + 1) as f64 * 0.618_034).sin()).collect()
}

fn tensor(seed: usize, shape: (usize, usize), dtype: DType) -> Tensor {
    let numbers = numbers(seed, shape.0 * shape.1);
    Tensor::from_vec(numbers, shape, &Device::Cpu).and_then(|tensor| tensor.to_dtype(dtype)).unwrap()
}

/// Three layers, of which two share their weight.
fn output(vb: &VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    let first = linear(5, 6, vb.pp("first"))?.forward(x)?.tanh()?;
    let second = linear(6, 6, vb.pp("second"))?.forward(&first)?.tanh()?;
    let again = linear(6, 6, vb.pp("second"))?.forward(&second)?.tanh()?;
    linear(6, 2, vb.pp("third"))?.forward(&again)
}

/// The mean over the rows of this step's batch.
fn loss(vb: &VarBuilder<'_>, step: usize, rows: std::ops::Range<usize>, dtype: DType) -> Result<Tensor> {
    let x = tensor(10 + step, (ROWS, 5), dtype).narrow(0, rows.start, rows.len())?;
    let y = tensor(50 + step, (ROWS, 2), dtype).narrow(0, rows.start, rows.len())?;
    (output(vb, &x)? - y)?.sqr()?.mean_all()
}

fn builder(map: &VarMap, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_varmap(map, dtype, &Device::Cpu)
}

/// The model's variables, with values of this `seed`.
fn model(seed: usize, dtype: DType) -> VarMap {
    let map = VarMap::new();
    output(&builder(&map, dtype), &tensor(0, (1, 5), dtype)).unwrap();
    fill(&map, seed);
    map
}

fn fill(map: &VarMap, seed: usize) {
    for (index, (_, var)) in sorted(map).iter().enumerate() {
        let values = Tensor::from_vec(numbers(seed + index, var.elem_count()), var.shape(), &Device::Cpu);
        var.set(&values.unwrap().to_dtype(var.dtype()).unwrap()).unwrap();
    }
}

fn sorted(map: &VarMap) -> Vec<(String, candle_core::Var)> {
    let mut all: Vec<_> = map.data().lock().unwrap().clone().into_iter().collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}

fn values(map: &VarMap) -> Vec<f64> {
    let of = |var: &Tensor| var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    sorted(map).iter().flat_map(|(_, var)| of(var).unwrap()).collect()
}

fn assert_close(got: &[f64], expected: &[f64], within: f64) {
    assert_eq!(got.len(), expected.len());
    let differences = got.iter().zip(expected).map(|(one, other)| (one - other).abs());
    let far = differences.max_by(f64::total_cmp).unwrap_or_default();
    assert!(far <= within, "the largest difference is {far}");
}

fn rows(group: &ProcessGroup) -> std::ops::Range<usize> {
    let (rank, share) = (group.rank().index(), ROWS / group.world_size().count());
    rank * share..(rank + 1) * share
}

/// What one process has after these losses' steps, and candle's SGD.
fn alone(steps: usize, dtype: DType, loss: impl Fn(&VarBuilder<'_>, usize) -> Result<Tensor>) -> Vec<f64> {
    let map = model(0, dtype);
    let mut optimizer = SGD::new(map.all_vars(), RATE).unwrap();
    for step in 0..steps {
        optimizer.backward_step(&loss(&builder(&map, dtype), step).unwrap()).unwrap();
    }
    values(&map)
}

/// A rank's `Ddp`, whose model had other values before.
fn ddp(group: &ProcessGroup, dtype: DType) -> (VarMap, Ddp, SGD) {
    let map = model(100 * group.rank().index(), dtype);
    let ddp = Ddp::new(&map, group, ReducerOptions::default()).unwrap();
    let optimizer = SGD::new(map.all_vars(), RATE).unwrap();
    (map, ddp, optimizer)
}

#[test]
fn steps_of_sgd_are_those_of_one_process() {
    for (dtype, within) in [(DType::F32, 1e-6), (DType::F64, 1e-12)] {
        let expected = alone(6, dtype, |vb, step| loss(vb, step, 0..ROWS, dtype));
        for (world, fabric, is_hooked) in [
            (1, Fabric::InProcess, true),
            (2, Fabric::SharedMemory, true),
            (3, Fabric::Tcp, true),
            (3, Fabric::TwoHosts, false),
        ] {
            let ranks = run(world, fabric, |group| {
                let (map, mut ddp, mut optimizer) = ddp(&group, dtype);
                for step in 0..6 {
                    let own = |vb: &VarBuilder<'_>| loss(vb, step, rows(&group), dtype);
                    let loss = if is_hooked {
                        ddp.forward(|vb| own(&vb)).unwrap()
                    } else {
                        own(&builder(&map, dtype)).unwrap()
                    };
                    optimizer.step(&ddp.backward(&loss).unwrap()).unwrap();
                }
                assert!(ddp.replicas_identical().unwrap());
                values(&map)
            });
            ranks.iter().for_each(|got| assert_close(got, &expected, within));
        }
    }
}

#[test]
fn steps_of_adamw_are_those_of_candle_s_on_one_process() {
    let params = ParamsAdamW { lr: RATE, weight_decay: 0.1, ..ParamsAdamW::default() };
    for (dtype, within) in [(DType::F32, 1e-6), (DType::F64, 1e-12)] {
        let map = model(0, dtype);
        let mut optimizer = candle_nn::AdamW::new(map.all_vars(), params.clone()).unwrap();
        for step in 0..6 {
            optimizer.backward_step(&loss(&builder(&map, dtype), step, 0..ROWS, dtype).unwrap()).unwrap();
        }
        let expected = values(&map);
        let ranks = run(2, Fabric::InProcess, |group| {
            let (map, mut ddp, _) = ddp(&group, dtype);
            let mut optimizer = AdamW::new(&map, params.clone()).unwrap();
            for step in 0..6 {
                let loss = ddp.forward(|vb| loss(&vb, step, rows(&group), dtype)).unwrap();
                optimizer.step(&ddp.backward(&loss).unwrap()).unwrap();
            }
            values(&map)
        });
        ranks.iter().for_each(|got| assert_close(got, &expected, within));
    }
}

#[test]
fn ranks_count_by_their_numbers_of_samples() {
    let dtype = DType::F64;
    let expected = alone(3, dtype, |vb, step| loss(vb, step, 0..ROWS, dtype));
    for ends in [[0, 7, 10, 12], [0, 8, 8, 12]] {
        let ranks = run(3, Fabric::InProcess, |group| {
            let (map, mut ddp, mut optimizer) = ddp(&group, dtype);
            let rows = ends[group.rank().index()]..ends[group.rank().index() + 1];
            for step in 0..3 {
                // A rank without samples runs a pass of any, which does not count.
                let shown = if rows.is_empty() { 3..4 } else { rows.clone() };
                let loss = ddp.forward(|vb| loss(&vb, step, shown, dtype)).unwrap();
                optimizer.step(&ddp.backward_weighted(&loss, rows.len() as f64).unwrap()).unwrap();
            }
            values(&map)
        });
        ranks.iter().for_each(|got| assert_close(got, &expected, 1e-12));
    }
}

#[test]
fn a_pass_that_does_not_count_uses_no_parameter() {
    for is_hooked in [true, false] {
        run(2, Fabric::InProcess, |group| {
            let map = pair_map(|vb| drop(pair(vb, 1.0, true).unwrap()));
            let options = ReducerOptions::default().find_unused_parameters(true);
            let mut ddp = Ddp::new(&map, &group, options).unwrap();
            // Only the pass of weight 0 uses the second parameter.
            let (weight, uses) = if group.rank().is_main() { (3.0, false) } else { (0.0, true) };
            let own = |vb: &VarBuilder<'_>| pair(vb, 7.0, uses);
            let loss = if is_hooked {
                ddp.forward(|vb| own(&vb)).unwrap()
            } else {
                own(&builder(&map, DType::F64)).unwrap()
            };
            let gradients = ddp.backward_weighted(&loss, weight).unwrap();
            let of = |name: usize| {
                gradients.get(&sorted(&map)[name].1).map(|one| one.to_vec1::<f64>().unwrap()[0])
            };
            assert_eq!((of(0), of(1)), (None, Some(7.0)));
        });
    }
}

#[test]
fn passes_without_communication_are_in_the_next_average() {
    let dtype = DType::F64;
    // Gradients of two passes are added up, as in PyTorch.
    let both = |vb: &VarBuilder<'_>, step: usize| {
        loss(vb, step, 0..ROWS, dtype)? + loss(vb, step + 7, 0..ROWS, dtype)?
    };
    let mean = |vb: &VarBuilder<'_>, step: usize| loss(vb, step, 0..ROWS, dtype);
    let (expected, expected_mean) = (alone(3, dtype, both), alone(3, dtype, mean));
    for is_hooked in [true, false] {
        let pass = |ddp: &Ddp, map: &VarMap, step: usize, rows: std::ops::Range<usize>| {
            let own = |vb: &VarBuilder<'_>| loss(vb, step, rows, dtype);
            if is_hooked { ddp.forward(|vb| own(&vb)).unwrap() } else { own(&builder(map, dtype)).unwrap() }
        };
        let ranks = run(2, Fabric::InProcess, |group| {
            let (map, mut ddp, mut optimizer) = ddp(&group, dtype);
            for step in 0..3 {
                let first = pass(&ddp, &map, step, rows(&group));
                ddp.backward_no_sync(&first).unwrap();
                let second = pass(&ddp, &map, step + 7, rows(&group));
                optimizer.step(&ddp.backward(&second).unwrap()).unwrap();
            }
            values(&map)
        });
        ranks.iter().for_each(|got| assert_close(got, &expected, 1e-12));
        // Passes of 4 and 1 samples on one rank, of 7 and none on the other.
        let ranks = run(2, Fabric::InProcess, |group| {
            let (map, mut ddp, mut optimizer) = ddp(&group, dtype);
            let (long, short, weight) =
                if group.rank().is_main() { (0..4, 4..5, 1.0) } else { (5..12, 0..3, 0.0) };
            for step in 0..3 {
                let first = pass(&ddp, &map, step, long.clone());
                ddp.backward_no_sync_weighted(&first, long.len() as f64).unwrap();
                let second = pass(&ddp, &map, step, short.clone());
                optimizer.step(&ddp.backward_weighted(&second, weight).unwrap()).unwrap();
            }
            values(&map)
        });
        ranks.iter().for_each(|got| assert_close(got, &expected_mean, 1e-12));
    }
}

/// Two parameters, of which the second is used by some ranks.
fn pair(vb: &VarBuilder<'_>, number: f64, uses_extra: bool) -> Result<Tensor> {
    let used = (vb.get(1, "used")? * number)?;
    let all = if uses_extra { (used + (vb.get(1, "extra")? * (10.0 * number))?)? } else { used };
    all.sum_all()
}

fn pair_map(vb: impl Fn(&VarBuilder<'_>)) -> VarMap {
    let map = VarMap::new();
    vb(&builder(&map, DType::F64));
    map
}

#[test]
fn unused_parameters_have_no_gradient_if_no_rank_uses_them() {
    for options in
        [ReducerOptions::default().find_unused_parameters(true), ReducerOptions::default().static_graph(true)]
    {
        for users in [0, 1, 2] {
            run(2, Fabric::InProcess, |group| {
                let map = pair_map(|vb| drop(pair(vb, 1.0, true).unwrap()));
                let number = group.rank().index() as f64 + 1.0;
                let mut ddp = Ddp::new(&map, &group, options.clone()).unwrap();
                for step in 0..3 {
                    let uses = group.rank().index() < users;
                    let loss = match step {
                        // Without hooks in one of the steps.
                        1 => pair(&builder(&map, DType::F64), number, uses).unwrap(),
                        _ => ddp.forward(|vb| pair(&vb, number, uses)).unwrap(),
                    };
                    let gradients = ddp.backward(&loss).unwrap();
                    let of = |name: usize| {
                        gradients.get(&sorted(&map)[name].1).map(|one| one.to_vec1::<f64>().unwrap()[0])
                    };
                    assert_eq!(of(1), Some(1.5));
                    assert_eq!(of(0), [None, Some(5.0), Some(15.0)][users]);
                }
            });
        }
    }
}

#[test]
fn each_parameter_of_a_pass_has_its_own_type() {
    let map = VarMap::new();
    for (name, dtype) in [("a", DType::F32), ("b", DType::F64)] {
        builder(&map, dtype).get(1, name).unwrap();
    }
    let mut ddp = Ddp::new(&map, &ProcessGroup::alone().unwrap(), ReducerOptions::default()).unwrap();
    let loss = ddp.forward(|vb| {
        let (a, b) = (vb.get(1, "a")?, vb.get(1, "b")?);
        assert_eq!((a.dtype(), b.dtype()), (DType::F32, DType::F64));
        assert!(vb.get(2, "a").is_err() && vb.get(1, "c").is_err());
        (a.to_dtype(DType::F64)? + b)?.sum_all()
    });
    let gradients = ddp.backward(&loss.unwrap()).unwrap();
    for (name, var) in sorted(&map) {
        assert_eq!(gradients.get(&var).unwrap().dtype(), var.dtype(), "{name}");
    }
}

#[test]
fn an_unused_parameter_is_named_on_every_rank() {
    let errors = run(2, Fabric::InProcess, |group| {
        let map = pair_map(|vb| drop(pair(vb, 1.0, true).unwrap()));
        let step = |mut ddp: Ddp| ddp.backward(&ddp.forward(|vb| pair(&vb, 1.0, group.rank().is_main()))?);
        Ddp::new(&map, &group, ReducerOptions::default()).and_then(step).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("`extra`") && error.contains("find_unused")),
        "{errors:?}"
    );
}

#[test]
fn models_that_differ_are_refused_on_every_rank() {
    type Make = fn(&VarBuilder<'_>, usize);
    let cases: [(Make, &str); 3] = [
        (|vb, rank| drop(vb.get(1 + rank, "weight").unwrap()), "`weight` (f64 [1])"),
        (|vb, rank| drop(vb.get(1, &format!("weight{rank}")).unwrap()), "`weight1`"),
        (
            |vb, rank| {
                vb.get(1, "a").unwrap();
                if rank == 1 {
                    vb.get(1, "b").unwrap();
                }
            },
            "`b`",
        ),
    ];
    for (make, named) in cases {
        let errors = run(2, Fabric::InProcess, |group| {
            let map = pair_map(|vb| make(vb, group.rank().index()));
            Ddp::new(&map, &group, ReducerOptions::default()).err().unwrap()
        });
        for error in errors {
            assert!(error.is_mismatch() && error.to_string().contains(named), "{error}");
        }
    }
    let errors = run(2, Fabric::InProcess, |group| {
        let map = pair_map(|vb| drop(vb.get(1, "tied").unwrap()));
        let twin = map.data().lock().unwrap()["tied"].clone();
        map.data().lock().unwrap().insert("head".to_owned(), twin);
        Ddp::new(&map, &group, ReducerOptions::default()).err().unwrap().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("another name")), "{errors:?}");
}

/// What goes wrong on rank 0 is the error of every rank, in this step or the next: none waits for it, or goes on training.
fn refused(named: &str, wrong: impl Fn(&mut Ddp, &VarMap) -> String + Sync) {
    let errors = run(2, Fabric::InProcess, |group| {
        let map = pair_map(|vb| drop(pair(vb, 1.0, true).unwrap()));
        let ddp = Ddp::new(&map, &group, ReducerOptions::default());
        if group.rank().is_main() {
            return wrong(&mut ddp.unwrap(), &map);
        }
        // Rank 0 may have ended the group before this rank has left any of these calls, or see only after backward what was wrong with it.
        let steps = |mut ddp: Ddp| -> phalanx::Result<()> {
            loop {
                ddp.backward(&ddp.forward(|vb| pair(&vb, 1.0, true))?)?;
            }
        };
        ddp.and_then(steps).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains(named)), "{errors:?}");
}

#[test]
fn misuse_is_refused_by_name() {
    refused("call ddp.backward(&loss)", |ddp, _| {
        let loss = ddp.forward(|vb| pair(&vb, 1.0, true)).unwrap();
        loss.backward().unwrap_err().to_string()
    });
    refused("makes the model anew", |ddp, _| {
        let early = ddp.forward(|vb| pair(&vb, 1.0, true)).unwrap();
        ddp.forward(|vb| pair(&vb, 1.0, true)).unwrap();
        ddp.backward(&early).unwrap_err().to_string()
    });
    refused("before Ddp::new", |ddp, map| {
        builder(map, DType::F64).get(1, "late").unwrap();
        let loss = pair(&builder(map, DType::F64), 1.0, true).unwrap();
        ddp.backward(&loss).unwrap_err().to_string()
    });
    // Used with its hook and without, each of which has a part of the gradient.
    refused("`used`", |ddp, map| {
        let own = pair(&builder(map, DType::F64), 1.0, false).unwrap();
        let loss = ddp.forward(|vb| pair(&vb, 1.0, true)? + own).unwrap();
        ddp.backward(&loss).unwrap_err().to_string()
    });
    refused("no weight", |ddp, _| {
        let loss = ddp.forward(|vb| pair(&vb, 1.0, true)).unwrap();
        ddp.backward_weighted(&loss, f64::NAN).unwrap_err().to_string()
    });
    refused("too narrow for weights", |ddp, _| {
        let loss = ddp.forward(|vb| pair(&vb, 1.0, true)?.to_dtype(DType::F16)).unwrap();
        ddp.backward_weighted(&loss, 4097.0).unwrap_err().to_string()
    });
    refused("with weights and of passes without", |ddp, map| {
        let loss = pair(&builder(map, DType::F64), 1.0, true).unwrap();
        ddp.backward_no_sync(&loss).unwrap();
        ddp.backward_weighted(&loss, 1.0).unwrap_err().to_string()
    });
}

#[test]
fn the_norm_is_that_of_the_averages() {
    let all_are_here = Barrier::new(2);
    run(2, Fabric::InProcess, |group| {
        let map = pair_map(|vb| drop(pair(vb, 1.0, true).unwrap()));
        let mut ddp = Ddp::new(&map, &group, ReducerOptions::default()).unwrap();
        let number = [0.2, 0.4][group.rank().index()]; // Averages 0.3 and 3.
        let loss = ddp.forward(|vb| pair(&vb, number, true)).unwrap();
        let mut gradients = ddp.backward(&loss).unwrap();
        let norm = 9.09f64.sqrt();
        assert!((ddp.clip_grad_norm(&mut gradients, 100.0).unwrap() - norm).abs() < 1e-12);
        assert!((ddp.clip_grad_norm(&mut gradients, 1.0).unwrap() - norm).abs() < 1e-12);
        assert!((ddp.clip_grad_norm(&mut gradients, 1.0).unwrap() - 1.0).abs() < 1e-6);
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        assert!(ddp.clip_grad_norm(&mut gradients, f64::NAN).unwrap_err().is_invalid_argument());
    });
}

#[test]
fn ranks_with_fewer_batches_end_with_the_same_model() {
    let dtype = DType::F64;
    // Both ranks have batches for two steps, and rank 1 for two more.
    let expected =
        alone(4, dtype, |vb, step| loss(vb, step, if step < 2 { 0..ROWS } else { 6..ROWS }, dtype));
    let mut options = JoinOptions::default();
    options.divide_by_initial_world_size = false;
    let ranks = run(2, Fabric::InProcess, |group| {
        let (map, mut ddp, mut optimizer) = ddp(&group, dtype);
        let steps = 2 + 2 * group.rank().index();
        let outcome = ddp.join(&mut optimizer, options, |ddp, optimizer| {
            for step in 0..steps {
                let loss = ddp.forward(|vb| loss(&vb, step, rows(&group), dtype))?;
                let gradients = ddp.backward(&loss)?;
                optimizer.step(&gradients).map_err(phalanx::Error::other)?;
            }
            Ok(steps)
        });
        assert_eq!(outcome.unwrap(), steps);
        assert!(ddp.replicas_identical().unwrap());
        values(&map)
    });
    ranks.iter().for_each(|got| assert_close(got, &expected, 1e-12));
}

#[test]
fn a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended() {
    let (folder, dtype) = (tempfile::tempdir().unwrap(), DType::F32);
    let params = || ParamsAdamW { lr: RATE, ..ParamsAdamW::default() };
    let train =
        |ddp: &mut Ddp, optimizer: &mut AdamW, group: &ProcessGroup, steps: std::ops::Range<usize>| {
            for step in steps {
                let loss = ddp.forward(|vb| loss(&vb, step, rows(group), dtype)).unwrap();
                optimizer.step(&ddp.backward(&loss).unwrap()).unwrap();
            }
        };
    let whole = run(2, Fabric::InProcess, |group| {
        let (map, mut ddp, _) = ddp(&group, dtype);
        let mut optimizer = AdamW::new(&map, params()).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        train(&mut ddp, &mut optimizer, &group, 0..3);
        checkpoints.save(3, |snapshot| ddp.save(&optimizer, snapshot)).unwrap();
        checkpoints.finish().unwrap();
        train(&mut ddp, &mut optimizer, &group, 3..6);
        values(&map)
    });
    let resumed = run(2, Fabric::InProcess, |group| {
        let (map, mut ddp, mut sgd) = ddp(&group, dtype);
        let mut optimizer = AdamW::new(&map, params()).unwrap();
        let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
        let before = values(&map);
        let error = ddp.load(&mut sgd, &saved).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("optimizer.first.bias.exp_avg"), "{error}");
        assert_eq!(values(&map), before);
        // What is held for a step is in no state, and does not outlive a load.
        let held = ddp.forward(|vb| loss(&vb, 9, rows(&group), dtype)).unwrap();
        ddp.backward_no_sync_weighted(&held, 1.0).unwrap();
        let error = ddp.save(&optimizer, &mut Parts::default()).unwrap_err();
        assert!(error.to_string().contains("in the middle of a step"), "{error}");
        ddp.load(&mut optimizer, &saved).unwrap();
        train(&mut ddp, &mut optimizer, &group, saved.step() as usize..6);
        values(&map)
    });
    assert_eq!(resumed, whole);
}

/// A group that counts the buckets that have left.
struct Counted(Arc<dyn Communicator>, Arc<AtomicUsize>);

impl Communicator for Counted {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }

    fn alloc(&self, dtype: phalanx::DType, elements: usize) -> phalanx::Result<Buffer> {
        self.0.alloc(dtype, elements)
    }

    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(Self(self.0.in_call(caller), self.1.clone()))
    }

    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> phalanx::Result<Work> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.all_reduce_async(buffer, op)
    }

    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> phalanx::Result<Work> {
        self.0.broadcast_async(buffer, root)
    }

    fn reduce_scatter_v_async(
        &self,
        buffer: Buffer,
        counts: &[usize],
        op: ReduceOp,
    ) -> phalanx::Result<Work> {
        self.0.reduce_scatter_v_async(buffer, counts, op)
    }

    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> phalanx::Result<Work> {
        self.0.all_gather_v_in_place_async(buffer, counts)
    }

    fn abort(&self, cause: phalanx::Error) {
        self.0.abort(cause);
    }

    fn failure(&self) -> Option<phalanx::Error> {
        self.0.failure()
    }

    fn trace(&self) -> Trace {
        self.0.trace()
    }
}

/// An identity that notes how many buckets have left when backward comes to it.
struct Probe {
    launched: Arc<AtomicUsize>,
    seen: Arc<AtomicUsize>,
}

impl CustomOp1 for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(
        &self,
        storage: &candle_core::CpuStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.seen.store(self.launched.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(Some(gradient.clone()))
    }
}

#[test]
fn buckets_leave_while_backward_still_runs() {
    run(2, Fabric::InProcess, |group| {
        let (launched, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let map = model(0, DType::F32);
        let counted = JoinGroup::new(Counted(Arc::new(group), launched.clone()));
        // A bucket for each of the six parameters.
        let mut ddp = Ddp::new(&map, counted, ReducerOptions::default().bucket_cap_mb(0.0)).unwrap();
        let mut pass = |is_hooked: bool| {
            let (launched, seen) = (launched.clone(), seen.clone());
            let probed = |vb: &VarBuilder<'_>| {
                let first = linear(5, 6, vb.pp("first"))?.forward(&tensor(1, (4, 5), DType::F32))?;
                let first = first.apply_op1(Probe { launched: launched.clone(), seen: seen.clone() })?;
                let second = linear(6, 6, vb.pp("second"))?.forward(&first)?;
                linear(6, 2, vb.pp("third"))?.forward(&second)?.sqr()?.mean_all()
            };
            let loss = if is_hooked {
                ddp.forward(|vb| probed(&vb)).unwrap()
            } else {
                probed(&builder(&map, DType::F32)).unwrap()
            };
            let before = launched.load(Ordering::Relaxed);
            ddp.backward(&loss).unwrap();
            let [during, all] = [&seen, &launched].map(|count| count.load(Ordering::Relaxed) - before);
            (during, all)
        };
        assert_eq!(
            pass(true),
            (4, 6),
            "two layers' weights and biases have left before the first layer's turn"
        );
        pass(true); // The buckets are in the order of the gradients now.
        assert_eq!(pass(true), (4, 6));
        assert_eq!(pass(false), (0, 6), "without hooks, all leave after backward");
    });
}
