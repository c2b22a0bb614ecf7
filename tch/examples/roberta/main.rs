//! Fine-tunes RoBERTa with the weights of Hugging Face's `transformers`, on as many ranks as it is started with.
//!
//! ```sh
//! cargo build --examples                 # with libtorch: docs/guide/libtorch.md
//! phalanx run --nproc-per-node 3 -- tch/target/debug/examples/roberta examples/roberta/reference/vectors/roberta-classifier
//! ```
//!
//! The folder has a `config.json`, a `model.safetensors`, and texts as tokens with their labels in `case.safetensors`
//! (`examples/roberta/reference/make.py` writes all three).

mod model;

use std::error::Error;
use std::path::PathBuf;

use phalanx_tch::{Ddp, Optimizer, Rule};
use tch::Tensor;

use model::Classifier;

const STEPS: usize = 30;

fn main() -> Result<(), Box<dyn Error>> {
    tch::set_num_threads(1);
    let folder = std::env::args().nth(1).map(PathBuf::from).ok_or("which folder?")?;
    let tensors = Tensor::read_safetensors(folder.join("case.safetensors"))?;
    let of = |name: &str| {
        let found = tensors.iter().find(|(other, _)| other == name);
        found.map(|(_, tensor)| tensor.shallow_clone()).ok_or(format!("the case has no {name}"))
    };
    let (tokens, types, labels) = (of("input_ids")?, of("token_type_ids")?, of("targets")?);

    let group = phalanx::init()?;
    // libtorch begins with the same seed in every process: all ranks would drop the same values.
    tch::manual_seed(1 + i64::from(group.rank().get()));
    // Each rank takes every so many texts; all take as many.
    let (rank, world) = (i64::from(group.rank().get()), i64::from(group.world_size().get()));
    let rows = tokens.size()[0] / world * world;
    if rows == 0 {
        // The mean of no text is NaN, and so all weights would be.
        return Err(format!("{:?} texts are too few for {world} ranks", tokens.size()).into());
    }
    let mine = |tensor: &Tensor| tensor.slice(0, rank, rows, world);
    let (tokens, types, labels) = (mine(&tokens), mine(&types), mine(&labels));

    let model = Classifier::load(&folder, 3)?;
    let mut ddp = Ddp::new(&model.store, &group)?;
    let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW)?;
    for step in 0..STEPS {
        let loss = ddp.forward(|| model.forward(&tokens, &types, true).cross_entropy_for_logits(&labels))?;
        optimizer.zero_grad()?;
        ddp.backward(&loss)?;
        optimizer.step(1e-3)?;
        if group.rank().is_main() && step % 10 == 0 {
            println!("step {step}: loss {:.4} on rank 0", loss.double_value(&[]));
        }
    }
    let accuracy = ddp.evaluate(|| model.forward(&tokens, &types, false).accuracy_for_logits(&labels))?;
    println!("accuracy {:.2} on rank {rank}", accuracy.double_value(&[]));
    assert!(ddp.replicas_identical()?);
    Ok(())
}
