//! What a model learns: which label a text has, or which tokens were masked.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use crate::config::{Config, Family};
use crate::data::{Dataset, Example, pieces};
use crate::inputs::Inputs;
use crate::masking;
use crate::model::{Classifier, MaskedLm};
use crate::schedule::seed_of;
use crate::text::Text;
use crate::weights;

/// Which examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Those that are learned from, as they are in this epoch.
    Train {
        /// The pass over the examples.
        epoch: u64,
    },
    /// Those that are never learned from.
    HeldOut,
}

/// Examples as tensors.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The texts.
    pub inputs: Inputs,
    /// Where something is to be predicted, `row * length + column`; none if it is the text's label.
    pub places: Option<Tensor<1, Int>>,
    /// What is to be predicted, `[count]`.
    pub targets: Tensor<1, Int>,
    /// How many predictions that is.
    pub count: usize,
}

/// What held-out examples say about a model.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Evaluation {
    /// The mean negative log-likelihood of the right answer, in nats.
    pub loss: f64,
    /// The share of right answers.
    pub accuracy: f64,
}

/// A model and its examples.
pub trait Task {
    /// The model.
    type Model: Module;

    /// What is shown beside a number of examples, such as `mails`.
    const EXAMPLES: &'static str;

    /// How many examples there are.
    fn examples(&self, part: Part) -> usize;

    /// Makes a batch of the examples at `indices`: the collate function.
    fn batch(&self, part: Part, indices: &[usize], device: &Device) -> Result<Batch>;

    /// The model's scores, `[count, answers]`.
    fn logits(&self, model: &Self::Model, batch: &Batch) -> Tensor<2>;

    /// Is a model better than the best so far?
    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool;

    /// Writes the model, as `transformers` reads it, to a folder that is there.
    fn save(&self, model: &Self::Model, folder: &Path) -> Result<()>;
}

/// The sum over a batch of each answer's negative log-likelihood, `[1]`.
pub fn loss_sum(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    activation::log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)).sum().neg()
}

/// Which label a text has.
pub struct Classification {
    /// The model's size.
    pub config: Config,
    /// Its tokenizer.
    pub text: Text,
    /// The examples.
    pub data: Dataset,
}

impl Classification {
    fn part(&self, part: Part) -> &[Example] {
        match part {
            Part::Train { .. } => &self.data.train,
            Part::HeldOut => &self.data.held_out,
        }
    }
}

impl Task for Classification {
    type Model = Classifier;

    const EXAMPLES: &'static str = "texts";

    fn examples(&self, part: Part) -> usize {
        self.part(part).len()
    }

    fn batch(&self, part: Part, indices: &[usize], device: &Device) -> Result<Batch> {
        let examples = chosen(self.part(part), indices)?;
        let texts =
            examples.iter().map(|example| self.text.encode(&example.text)).collect::<Result<Vec<_>>>()?;
        let labels = self.data.labels.len();
        let outside = examples.iter().find(|example| example.label >= labels);
        ensure!(outside.is_none(), "{outside:?}: the label is out of range, there are {labels}");
        Ok(Batch {
            inputs: Inputs::new(&texts, &self.config, device)?,
            places: None,
            targets: integers(examples.iter().map(|example| example.label as i64).collect(), device),
            count: examples.len(),
        })
    }

    fn logits(&self, model: &Classifier, batch: &Batch) -> Tensor<2> {
        model.forward(&batch.inputs)
    }

    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool {
        (new.accuracy, -new.loss) > (best.accuracy, -best.loss)
    }

    fn save(&self, model: &Classifier, folder: &Path) -> Result<()> {
        let class = match self.config.model_type {
            Family::Roberta => "RobertaForSequenceClassification",
            Family::Bert => "BertForSequenceClassification",
        };
        let config = self.config.clone().with_labels(class, &self.data.labels);
        write(&config, &self.text, folder)?;
        weights::save(model, self.config.model_type, &folder.join("model.safetensors"))
    }
}

/// Which tokens were masked.
pub struct MaskedLanguage {
    config: Config,
    text: Text,
    train: Vec<String>,
    held_out: Vec<String>,
    seed: u64,
}

impl MaskedLanguage {
    /// Of texts, cut to pieces of about `characters`, which are masked anew in each epoch, as `seed` says.
    pub fn new(config: Config, text: Text, data: &Dataset, characters: usize, seed: u64) -> Self {
        let cut = |examples: &[Example]| {
            examples.iter().flat_map(|example| pieces(&example.text, characters)).collect()
        };
        let (train, held_out) = (cut(&data.train), cut(&data.held_out));
        Self { config, text, train, held_out, seed }
    }

    fn part(&self, part: Part) -> &[String] {
        match part {
            Part::Train { .. } => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }
}

impl Task for MaskedLanguage {
    type Model = MaskedLm;

    const EXAMPLES: &'static str = "pieces";

    fn examples(&self, part: Part) -> usize {
        self.part(part).len()
    }

    fn batch(&self, part: Part, indices: &[usize], device: &Device) -> Result<Batch> {
        // Held-out texts are masked alike in every epoch, so that perplexities can be compared.
        let epoch = match part {
            Part::Train { epoch } => epoch,
            Part::HeldOut => u64::MAX,
        };
        let mut masked = Vec::with_capacity(indices.len());
        for (piece, &index) in chosen(self.part(part), indices)?.iter().zip(indices) {
            let seed = seed_of(&[self.seed, epoch, index as u64]);
            masked.push(masking::mask(&self.text.encode(piece)?, &self.text, seed));
        }
        let inputs = Inputs::new(masked.iter().map(|masked| &masked.text), &self.config, device)?;
        let [_, length] = inputs.tokens.dims();
        let places = masked
            .iter()
            .enumerate()
            .flat_map(|(row, masked)| masked.places.iter().map(move |&place| (row * length + place) as i64));
        let places: Vec<i64> = places.collect();
        ensure!(!places.is_empty(), "no text of a batch has a token that could be masked");
        let targets = masked.iter().flat_map(|masked| masked.targets.iter().map(|&token| i64::from(token)));
        Ok(Batch {
            inputs,
            count: places.len(),
            targets: integers(targets.collect(), device),
            places: Some(integers(places, device)),
        })
    }

    fn logits(&self, model: &MaskedLm, batch: &Batch) -> Tensor<2> {
        let all = || {
            Tensor::arange(
                0..batch.inputs.tokens.dims().iter().product::<usize>() as i64,
                &batch.targets.device(),
            )
        };
        model.forward(&batch.inputs, batch.places.clone().unwrap_or_else(all))
    }

    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool {
        new.loss < best.loss
    }

    fn save(&self, model: &MaskedLm, folder: &Path) -> Result<()> {
        let class = match self.config.model_type {
            Family::Roberta => "RobertaForMaskedLM",
            Family::Bert => "BertForMaskedLM",
        };
        write(&self.config.clone().with_labels(class, &[]), &self.text, folder)?;
        weights::save(model, self.config.model_type, &folder.join("model.safetensors"))
    }
}

fn chosen<'a, T>(examples: &'a [T], indices: &[usize]) -> Result<Vec<&'a T>> {
    let example = |&index: &usize| {
        examples
            .get(index)
            .with_context(|| format!("example {index} was asked for, there are {}", examples.len()))
    };
    indices.iter().map(example).collect()
}

fn integers(numbers: Vec<i64>, device: &Device) -> Tensor<1, Int> {
    let count = numbers.len();
    Tensor::from_data(TensorData::new(numbers, [count]), device)
}

fn write(config: &Config, text: &Text, folder: &Path) -> Result<()> {
    let path = folder.join("config.json");
    std::fs::write(&path, serde_json::to_string_pretty(config)?)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    text.save(&folder.join("tokenizer.json"))
}
