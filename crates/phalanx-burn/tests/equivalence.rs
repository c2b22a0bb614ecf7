//! Several ranks with a part of the batch each train the model that one rank trains with all of it.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use common::{Mlp, distance, floats, run, samples};
use phalanx::{ProcessGroup, Result};
use phalanx_burn::Ddp;

const STEPS: usize = 20;
const BATCH: usize = 8;
const WIDTHS: [usize; 4] = [8, 32, 32, 3];

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// Plain Burn, with `parts` times the batch.
fn reference(mut model: Mlp, parts: usize) -> Mlp {
    let mut optimizer = sgd();
    for step in 0..STEPS {
        let from = step * parts * BATCH;
        let loss = model.loss(samples(from, from + parts * BATCH));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    model
}

/// Each rank with `micro` batches a step, all but the last without communication.
fn distributed(model: Mlp, group: &ProcessGroup, micro: usize) -> Result<Ddp<Mlp>> {
    let mut ddp = Ddp::new(model, group)?;
    let mut optimizer = sgd();
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    for step in 0..STEPS {
        for part in 0..micro {
            let from = ((step * ranks + rank) * micro + part) * BATCH;
            let batch = samples(from, from + BATCH);
            let loss = ddp.forward(|model| model.loss(batch) / micro as f32)?;
            if part + 1 < micro {
                ddp.backward_no_sync(&loss)?;
            } else {
                let gradients = ddp.backward(&loss)?;
                ddp.step(&mut optimizer, 0.05, gradients);
            }
        }
    }
    Ok(ddp)
}

fn check(ranks: u32, micro: usize) {
    let model = Mlp::new(&WIDTHS);
    let expected = floats(&reference(model.clone(), ranks as usize * micro));
    let trained = run(ranks, |group| {
        // Only rank 0 has the model that counts.
        let model = if group.rank().is_main() { model.clone() } else { Mlp::new(&WIDTHS) };
        let ddp = distributed(model, &group, micro).unwrap();
        assert!(ddp.replicas_identical().unwrap());
        floats(ddp.model())
    });
    assert!(distance(&expected, &floats(&model)) > 0.01, "the reference has not moved");
    for (rank, ours) in trained.iter().enumerate() {
        assert_eq!(ours, &trained[0], "rank {rank} has other bits than rank 0");
        let distance = distance(ours, &expected);
        assert!(distance < 1e-5, "{ranks} ranks x {micro}: rank {rank} is {distance:e} away");
    }
}

#[test]
fn one_rank_trains_as_plain_burn() {
    check(1, 1);
}

#[test]
fn two_ranks_train_as_one_with_twice_the_batch() {
    check(2, 1);
}

#[test]
fn three_ranks_train_as_one_with_three_times_the_batch() {
    check(3, 1);
}

#[test]
fn accumulated_batches_train_as_large_ones() {
    check(1, 3);
    check(2, 2);
    check(3, 3);
}
