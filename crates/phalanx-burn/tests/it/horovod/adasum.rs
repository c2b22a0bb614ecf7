//! Adasum: of the changes that each rank's optimizer makes.

use burn::module::{ModuleMapper, Param};
use burn::tensor::TensorData;

use super::*;

fn with_floats(model: Mlp, values: &[Vec<f32>]) -> Mlp {
    struct Put<'a>(std::slice::Iter<'a, Vec<f32>>);
    impl ModuleMapper for Put<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let values = self.0.next().unwrap().clone();
            param.map(|old| {
                let data = TensorData::new(values, old.shape());
                Tensor::from_data(data, &old.device()).set_require_grad(true)
            })
        }
    }
    model.map(&mut Put(values.iter()))
}

/// What every rank's own optimizer would make of its own gradients, and the Adasum of the changes.
fn by_adasum_of_changes(model: &Mlp, micro: usize) -> Vec<Vec<f32>> {
    let mut trained = run(2, |group| {
        let hvd = horovod(&group);
        // A world of one for each rank, with the rank's own batches.
        let alone = ProcessGroup::alone().unwrap();
        let mut optimizer = sgd();
        // Each thread needs tensors of its own, and `Ddp` in a world of one keeps what it is given: Burn can take a graph apart that two threads share.
        let mut model = with_floats(model.clone(), &floats(model));
        for step in 0..STEPS {
            let mut ddp = Ddp::new(model, &alone).unwrap();
            let before = floats(ddp.model());
            ddp_step(&mut ddp, &mut optimizer, &group, step, micro);
            let after = floats(ddp.model());
            let combined = before.iter().zip(&after).enumerate().map(|(index, (before, after))| {
                let change: Vec<f32> =
                    before.iter().zip(after).map(|(before, after)| after - before).collect();
                let change = hvd.allreduce(&format!("{index}"), change, Op::Adasum).unwrap();
                before
                    .iter()
                    .zip(change.as_slice::<f32>().unwrap())
                    .map(|(before, change)| before + change)
                    .collect()
            });
            let combined: Vec<Vec<f32>> = combined.collect();
            model = ddp.into_model();
            model = with_floats(model, &combined);
        }
        hvd.barrier().unwrap();
        floats(&model)
    });
    trained.swap_remove(0)
}

#[test]
fn adasum_combines_what_each_rank_s_optimizer_has_changed() {
    let model = Mlp::new(&WIDTHS);
    for micro in [1, 2] {
        let expected = by_adasum_of_changes(&model, micro);
        for groups in [0, 2] {
            let options = DistributedOptions {
                op: Op::Adasum,
                backward_passes_per_step: micro,
                groups: groups.into(),
                ..DistributedOptions::default()
            };
            let trained = with_horovod(&model, 2, &options);
            let apart = distance(&trained, &expected);
            assert!(apart < ROUNDING, "{micro} {groups}: {apart:e}");
        }
        assert!(distance(&expected, &with_ddp(&model, 2, micro)) > 1e-3, "it is not the average");
    }
}

#[test]
fn adasum_has_no_gradients_of_all_ranks_to_give() {
    run(2, |group| {
        let hvd = horovod(&group);
        let model = broadcast_parameters(&hvd, Mlp::new(&WIDTHS), Rank::MAIN).unwrap();
        let options = DistributedOptions { op: Op::Adasum, ..DistributedOptions::default() };
        let mut optimizer = DistributedOptimizer::with_options(sgd(), &model, &hvd, options).unwrap();
        let loss = optimizer.forward(&model, |model| model.loss(batch(&group, 0)));
        optimizer.backward(&loss).unwrap();
        let error = optimizer.synchronize(&model).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("call step"), "{error}");
        optimizer.step(0.05, model).unwrap();
        hvd.barrier().unwrap();
    });
}

#[test]
fn an_adasum_of_parts_is_refused() {
    run(4, |group| {
        // Ranks 0 and 2 have the first part, and 1 and 3 the second.
        let rank = group.rank().get();
        let parts = group.split(Some(rank / 2), 0).unwrap().unwrap();
        let replicas = group.split(Some(rank % 2), 0).unwrap().unwrap();
        let layer = LinearConfig::new(4, 4).init(&device());
        let divided = ColumnParallelLinear::new(layer, &TensorGroup::new(&parts)).unwrap();
        let hvd = horovod(&replicas);
        let made = |op: Op| {
            let options = DistributedOptions { op, ..DistributedOptions::default() };
            DistributedOptimizer::with_options(sgd(), &divided, &hvd, options)
        };
        drop(made(Op::Average).unwrap());
        let error = made(Op::Adasum).map(drop).unwrap_err().to_string();
        assert!(error.contains("of `weight`, and Op::Adasum"), "{error}");
        hvd.barrier().unwrap();
    });
}
