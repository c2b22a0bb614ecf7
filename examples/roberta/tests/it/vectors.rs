//! The same logits and gradients as transformers, on the same weights: reference/make.py made the vectors.

use std::fs;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use roberta::tasks::loss_sum;
use roberta::{Classifier, Config, Inputs, MaskedLm, Text, weights};

use crate::fixtures::{Tensors, assert_close, named, reference};

enum Head {
    MaskedLm(MaskedLm),
    Classifier(Classifier),
}

fn check(name: &str, head: impl FnOnce(&Config, &Device) -> Head) {
    let device = Device::flex().autodiff();
    let folder = reference(name);
    let config = Config::read(&folder.join("config.json")).unwrap();
    let case = Tensors::read(&folder.join("case.safetensors"));
    let inputs = Inputs::new(&case.texts(), &config, &device).unwrap();
    let (family, file) = (config.model_type, folder.join("model.safetensors"));
    let (loaded, logits, head) = match head(&config, &device) {
        Head::MaskedLm(mut model) => {
            let loaded = weights::load(&mut model, family, &file).unwrap();
            (loaded, model.forward(&inputs, case.tensor("places", &device)), Head::MaskedLm(model))
        }
        Head::Classifier(mut model) => {
            let loaded = weights::load(&mut model, family, &file).unwrap();
            (loaded, model.forward(&inputs), Head::Classifier(model))
        }
    };
    assert_eq!(loaded, weights::Loaded::default());
    assert_close("logits", &logits.to_data().iter().collect::<Vec<f32>>(), &case.floats("logits"));

    let targets = case.tensor("targets", &device);
    let count = targets.dims()[0] as f32;
    let loss = loss_sum(logits, targets) / count;
    assert_close("loss", &loss.to_data().iter().collect::<Vec<f32>>(), &case.floats("loss"));
    let gradients = loss.backward();
    let found = match head {
        Head::MaskedLm(model) => named(GradientsParams::from_grads(gradients, &model), &model, family),
        Head::Classifier(model) => named(GradientsParams::from_grads(gradients, &model), &model, family),
    };
    let expected = Tensors::read(&folder.join("gradients.safetensors"));
    assert!(found.names().eq(expected.names()));
    for name in expected.names() {
        assert_close(name, &found.floats(name), &expected.floats(name));
    }
}

#[test]
fn roberta_masked_lm_is_that_of_transformers() {
    check("roberta-masked-lm", |config, device| Head::MaskedLm(MaskedLm::new(config, device)));
}

#[test]
fn roberta_classifier_is_that_of_transformers() {
    check("roberta-classifier", |config, device| Head::Classifier(Classifier::new(config, 3, device)));
}

#[test]
fn bert_masked_lm_is_that_of_transformers() {
    check("bert-masked-lm", |config, device| Head::MaskedLm(MaskedLm::new(config, device)));
}

#[test]
fn bert_classifier_is_that_of_transformers() {
    check("bert-classifier", |config, device| Head::Classifier(Classifier::new(config, 3, device)));
}

#[test]
#[ignore = "needs 90 MB of weights: examples/roberta/fetch.py, and ROBERTA_MINILM with the path of the folder"]
fn minilm_is_that_of_transformers() {
    let folder = std::env::var("ROBERTA_MINILM").expect("ROBERTA_MINILM is the folder that fetch.py made");
    let folder = std::path::Path::new(&folder);
    let device = Device::flex().autodiff();
    let mut config = Config::read(&folder.join("config.json")).unwrap();
    (config.hidden_dropout_prob, config.attention_probs_dropout_prob) = (0.0, 0.0);
    let case = Tensors::read(&reference("minilm/case.safetensors"));

    let text = Text::open(&folder.join("tokenizer.json"), &config, 128).unwrap();
    let texts: Vec<String> =
        serde_json::from_slice(&fs::read(reference("minilm/texts.json")).unwrap()).unwrap();
    let encoded: Vec<_> = texts.iter().map(|sample| text.encode(sample).unwrap()).collect();
    assert_eq!(encoded, case.texts());

    let mut model = Classifier::new(&config, 2, &device);
    let loaded = weights::load(&mut model, config.model_type, &folder.join("model.safetensors")).unwrap();
    assert_eq!(loaded.new, ["classifier.bias", "classifier.weight"]);
    assert_eq!(loaded.ignored, ["embeddings.position_ids"]);
    let inputs = Inputs::new(&encoded, &config, &device).unwrap();
    let pooled = model.pooled(&inputs).unwrap();
    assert_close("pooled", &pooled.to_data().iter().collect::<Vec<f32>>(), &case.floats("pooled"));
    let hidden = model.valid().backbone.forward(&Inputs::new(&encoded, &config, &Device::flex()).unwrap());
    let [_, columns, width] = hidden.dims();
    let (hidden, expected) = (hidden.into_data().iter().collect::<Vec<f32>>(), case.floats("hidden"));
    for (row, text) in encoded.iter().enumerate() {
        let (start, length) = (row * columns * width, text.tokens.len() * width);
        assert_close("hidden", &hidden[start..start + length], &expected[start..start + length]);
    }

    let [rows, columns] = pooled.dims();
    let weights = (0..rows * columns).map(|place| (place as f32).cos()).collect::<Vec<_>>();
    let weights = Tensor::<2>::from_data(TensorData::new(weights, [rows, columns]), &device);
    // The classifier's layer behind the pooler takes part with a factor of zero: every parameter has a gradient.
    let loss = (pooled * weights).sum() + model.forward(&inputs).sum() * 0.0;
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    let found = named(gradients, &model, config.model_type);
    let mut compared = 0;
    for name in case.names().filter_map(|name| name.strip_prefix("gradient.")) {
        let gradient = found.floats(&format!("bert.{name}"));
        let norm = gradient.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32;
        let expected = case.floats(&format!("gradient.{name}"));
        let samples = expected.len() - 1;
        let found = (0..samples).map(|place| gradient[place * (gradient.len() / samples)]);
        assert_close(name, &[norm].into_iter().chain(found).collect::<Vec<_>>(), &expected);
        compared += 1;
    }
    assert_eq!(compared, 103);
}
