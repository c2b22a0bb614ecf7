//! RoBERTa with the weights of Hugging Face's `transformers`: its logits and its gradients, on one rank and on three.

#[path = "../../examples/roberta/model.rs"]
mod model;

use std::collections::HashMap;
use std::path::PathBuf;

use model::Classifier;
use phalanx_tch::{Ddp, DdpOptions};
use tch::Tensor;

use crate::common::{distance, elements, run};

/// Cargo says where the package is, or `.ci/gpu`, which runs what was built on another machine.
fn folder() -> PathBuf {
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap());
    package.join("../examples/roberta/reference/vectors/roberta-classifier")
}

fn read(name: &str) -> HashMap<String, Tensor> {
    Tensor::read_safetensors(folder().join(name)).unwrap().into_iter().collect()
}

#[test]
fn three_ranks_with_a_text_each_have_the_gradients_of_transformers() {
    let texts = 3;
    for ranks in [1, 3] {
        let gradients = run(ranks, |group| {
            let (model, case) = (Classifier::load(&folder(), 3).unwrap(), read("case.safetensors"));
            let (rank, share) = (i64::from(group.rank().get()), texts / i64::from(ranks));
            let mine = |name: &str| case[name].narrow(0, rank * share, share);
            let mut options = DdpOptions::default();
            options.reducer = options.reducer.bucket_cap_mb(0.002);
            let mut ddp = Ddp::with_options(&model.store, &group, options).unwrap();
            let logits =
                ddp.forward(|| model.forward(&mine("input_ids"), &mine("token_type_ids"), true)).unwrap();
            let apart = distance(&[elements(&logits)], &[elements(&mine("logits"))]);
            assert!(apart < 1e-5, "{ranks} ranks: logits are {apart:e} away");
            ddp.backward(&logits.cross_entropy_for_logits(&mine("targets"))).unwrap();
            let gradient = |(name, tensor): (String, Tensor)| (name, elements(&tensor.grad()));
            model.store.variables().into_iter().map(gradient).collect::<HashMap<_, _>>()
        });
        let expected = read("gradients.safetensors");
        assert_eq!(expected.len(), gradients[0].len());
        for ours in gradients {
            // All together: by theory a key's bias has none, and what it has is rounding.
            let (names, theirs): (Vec<_>, Vec<_>) =
                expected.iter().map(|(name, tensor)| (name, elements(tensor))).unzip();
            let ours: Vec<_> = names.iter().map(|&name| ours[name].clone()).collect();
            let apart = distance(&ours, &theirs);
            assert!(apart < 1e-4, "{ranks} ranks: gradients are {apart:e} away");
        }
    }
}
