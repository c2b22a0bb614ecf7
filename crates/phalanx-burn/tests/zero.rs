//! An optimizer whose state is spread over the ranks, against one whose is not.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use common::{Mlp, floats, run, samples};
use phalanx::Rank;
use phalanx_burn::{Ddp, ZeroRedundancyOptimizer};

const STEPS: usize = 12;
const WIDTHS: [usize; 5] = [8, 24, 16, 24, 3];

fn gradients(ddp: &mut Ddp<Mlp>, step: usize) -> burn::optim::GradientsParams {
    let from = (step * 4 + ddp.rank().index()) * 4;
    let loss = ddp.forward(|model| model.loss(samples(from, from + 4))).unwrap();
    ddp.backward(&loss).unwrap()
}

fn check(optimizer: ModuleOptimizer) {
    let start = Mlp::new(&WIDTHS);
    for ranks in [1, 2, 3, 4] {
        let sizes = run(ranks, |group| {
            let mut plain = Ddp::new(start.clone(), &group).unwrap();
            let mut whole = optimizer.clone();
            let mut zero = Ddp::new(start.clone(), &group).unwrap();
            let mut sharded = ZeroRedundancyOptimizer::new(optimizer.clone(), &zero).unwrap();
            for step in 0..STEPS {
                let averages = gradients(&mut plain, step);
                plain.step(&mut whole, 0.01, averages);
                let averages = gradients(&mut zero, step);
                sharded.step(&mut zero, 0.01, averages).unwrap();
                assert_eq!(floats(plain.model()), floats(zero.model()), "step {step}");
                if step == STEPS / 2 {
                    // A checkpoint: consolidated, and dealt out again.
                    let last = Rank::new(ranks - 1);
                    let consolidated = sharded.consolidate(&zero, last).unwrap();
                    assert_eq!(consolidated.is_some(), zero.rank() == last);
                    if let Some(consolidated) = consolidated {
                        assert_eq!(consolidated.to_record().len(), whole.to_record().len());
                        if ranks == 1 {
                            sharded = ZeroRedundancyOptimizer::new(consolidated, &zero).unwrap();
                        }
                    }
                }
            }
            assert!(zero.replicas_identical().unwrap());
            // Anyone may go on with the whole state, and drop what is not theirs.
            let mut optimizer = sharded.consolidate(&zero, zero.world_size().rank(0).unwrap()).unwrap();
            if let Some(optimizer) = &mut optimizer {
                assert_eq!(content(optimizer), content(&whole));
                let dealt = ZeroRedundancyOptimizer::new(optimizer.clone(), &zero).unwrap();
                assert_eq!(dealt.own_elements(&zero), sharded.own_elements(&zero));
            }
            sharded.own_elements(&zero)
        });
        let total: usize = floats(&start).iter().map(Vec::len).sum();
        assert_eq!(sizes.iter().sum::<usize>(), total);
        let largest = floats(&start).iter().map(Vec::len).max().unwrap();
        assert!(sizes.iter().all(|&size| size <= (total / ranks as usize).max(largest) + largest / 2));
    }
}

type Content = (Vec<(String, Vec<u8>)>, Vec<String>, Vec<(String, String)>);

/// All that a state consists of.
fn content(optimizer: &ModuleOptimizer) -> Content {
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let scalars = reader.scalars().iter().map(|(name, value)| format!("{name} {value:?}")).collect();
    let paths = reader.metadata().iter().map(|(id, path)| (id.clone(), path.clone())).collect();
    let tensors = reader.into_tensors().unwrap().into_iter();
    let mut tensors: Vec<_> =
        tensors.map(|tensor| (tensor.name.clone(), tensor.into_bytes().unwrap().to_vec())).collect();
    tensors.sort();
    (tensors, scalars, paths)
}

#[test]
fn a_sharded_adamw_takes_the_same_steps_to_the_last_bit() {
    check(AdamWConfig::new().init());
}

#[test]
fn so_do_optimizers_without_state_and_those_that_look_at_whole_matrices() {
    check(SgdConfig::new().init());
    check(AdafactorConfig::new().init());
}
