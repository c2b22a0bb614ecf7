//! What a model learns: which label a text has, or which tokens were masked.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};

use crate::config::Config;
use crate::data::{Dataset, Example, pieces};
use crate::inputs::{Encoded, Inputs};
use crate::labels;
use crate::masking::{self, Masked};
use crate::mesh::Part as ModelPart;
use crate::model::{Classifier, MaskedLm};
use crate::schedule::seed_of;
use crate::text::Text;
use crate::weights::{self, Head, Loaded, Weights};

/// Which examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Those that are learned from.
    Train,
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

impl Batch {
    /// Where tokens are to be predicted: everywhere, if nothing is said.
    pub fn places(&self) -> Tensor<1, Int> {
        let all = || {
            let places = self.inputs.tokens.dims().iter().product::<usize>();
            Tensor::arange(0..places as i64, &self.targets.device())
        };
        self.places.clone().unwrap_or_else(all)
    }
}

/// What held-out examples say about a model.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Evaluation {
    /// The mean negative log-likelihood of the right answer, in nats.
    pub loss: f64,
    /// The share of right answers.
    pub accuracy: f64,
}

impl Evaluation {
    /// Between how many tokens, all as likely, the model hesitates: e to the power of the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// What a model is written to.
pub const FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];

/// A model and its examples.
pub trait Task: Send + Sync + 'static {
    /// The model.
    type Model: ModelPart;

    /// An example as tokens.
    type Item: Send + 'static;

    /// A model with random weights.
    fn model(&self, device: &Device) -> Self::Model;

    /// How many examples there are.
    fn examples(&self, part: Part) -> usize;

    /// A number of all that is in the examples: ranks compare it, and a run goes on within an epoch only with the same.
    fn fingerprint(&self, part: Part) -> u64;

    /// Tokenizes the example at `index`. What is random in it draws from `seed`, which is another one in each epoch.
    fn item(&self, part: Part, index: usize, seed: u64) -> Result<Self::Item>;

    /// Makes a batch, in which each text is padded to the longest: the collate function.
    fn collate(&self, items: &[Self::Item], device: &Device) -> Result<Batch>;

    /// The model's scores, `[count, answers]`.
    fn logits(&self, model: &Self::Model, batch: &Batch) -> Tensor<2>;

    /// What is recorded and shown of an evaluation, by name.
    fn measures(&self, evaluation: &Evaluation) -> Vec<(&'static str, f64)>;

    /// The names of the answers, in the order of the model's scores; none if they are tokens. A run goes on only with the same.
    fn labels(&self) -> &[String];

    /// Whether a model is better than the best so far. One whose loss is not a number is not.
    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool;

    /// Writes the model, as `transformers` reads it, to a folder that is there: each of [`FILES`].
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

/// How a model is read that was trained before.
#[derive(Clone, Copy, Debug)]
pub struct ReadOptions {
    /// Tokens to which texts are cut.
    pub max_tokens: usize,
    /// The share of what is dropped everywhere, in place of what `config.json` says.
    pub dropout: Option<f64>,
    /// Whether the model keeps its classification head.
    pub head: Head,
    /// Whether the model may have rows for more tokens than its tokenizer has.
    pub allow_unused_tokens: bool,
}

impl Classification {
    /// What a model learns from `data`, and the model, of a folder with `config.json`, `tokenizer.json` and weights. A classification head that
    /// is there keeps its order of the labels: the data's are numbered as it numbers the same names.
    ///
    /// # Errors
    /// If a file cannot be read or the files do not belong together; or if the head that is kept has other labels.
    pub fn pretrained(
        folder: &Path,
        options: ReadOptions,
        data: Dataset,
        device: &Device,
    ) -> Result<(Self, Classifier, Loaded)> {
        ensure!(
            folder.is_dir(),
            "there is no folder {}: --model takes a folder with config.json, tokenizer.json and model.safetensors; nothing is \
             downloaded",
            folder.display()
        );
        let path = folder.join("config.json");
        let config = Config::read(&path)?;
        let config = match options.dropout {
            Some(dropout) => config.with_dropout(dropout)?,
            None => config,
        };
        let path_of_text = folder.join("tokenizer.json");
        let text = Text::open(&path_of_text, &config, options.max_tokens)?;
        if !options.allow_unused_tokens {
            text.check_unused()
                .with_context(|| format!("{} does not fit the model", path_of_text.display()))?;
        }
        let weights = Weights::find(folder)?;
        let data = match weights.head(config.model_type).filter(|_| options.head == Head::Kept) {
            None => data,
            Some((tensor, rows)) => {
                let count = data.labels.len();
                ensure!(
                    rows == count,
                    "{tensor} in {} has the shape [{rows}, {width}], and the {count} labels of the data, {}, need [{count}, {width}]: \
                     begin with a new head: --new-head",
                    folder.display(),
                    labels::list(&data.labels),
                    width = config.hidden_size
                );
                let names = config.check_head().and_then(|()| labels::of_head(&config, rows));
                let names = names.with_context(|| format!("{} cannot be used", path.display()))?;
                data.for_labels(names).with_context(|| format!("{} does not fit the data", path.display()))?
            }
        };
        let mut model = Classifier::new(&config, data.labels.len(), device);
        let loaded = weights.load(&mut model, config.model_type, options.head)?;
        Ok((Self { config, text, data }, model, loaded))
    }

    fn part(&self, part: Part) -> &[Example] {
        match part {
            Part::Train => &self.data.train,
            Part::HeldOut => &self.data.held_out,
        }
    }
}

impl Task for Classification {
    type Model = Classifier;
    type Item = (Encoded, usize);

    fn model(&self, device: &Device) -> Classifier {
        Classifier::new(&self.config, self.data.labels.len(), device)
    }

    fn examples(&self, part: Part) -> usize {
        self.part(part).len()
    }

    fn fingerprint(&self, part: Part) -> u64 {
        fingerprint(self.part(part).iter().map(|example| (example.text.as_str(), example.label)))
    }

    fn item(&self, part: Part, index: usize, _seed: u64) -> Result<(Encoded, usize)> {
        let example = at(self.part(part), index)?;
        let labels = self.data.labels.len();
        ensure!(
            example.label < labels,
            "label {} is out of range: there are {labels}, so labels are 0 to {}",
            example.label,
            labels - 1
        );
        Ok((self.text.encode(&example.text)?, example.label))
    }

    fn collate(&self, items: &[(Encoded, usize)], device: &Device) -> Result<Batch> {
        Ok(Batch {
            inputs: Inputs::new(items.iter().map(|(text, _)| text), &self.config, device)?,
            places: None,
            targets: integers(items.iter().map(|(_, label)| *label as i64).collect(), device),
            count: items.len(),
        })
    }

    fn logits(&self, model: &Classifier, batch: &Batch) -> Tensor<2> {
        model.forward(&batch.inputs)
    }

    fn measures(&self, evaluation: &Evaluation) -> Vec<(&'static str, f64)> {
        vec![("loss", evaluation.loss), ("accuracy", evaluation.accuracy)]
    }

    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool {
        match (new.loss.is_nan(), best.loss.is_nan()) {
            (true, _) => false,
            (false, true) => true,
            (false, false) => (new.accuracy, -new.loss) > (best.accuracy, -best.loss),
        }
    }

    fn labels(&self) -> &[String] {
        &self.data.labels
    }

    fn save(&self, model: &Classifier, folder: &Path) -> Result<()> {
        let class = self.config.model_type.class("SequenceClassification");
        let config = self.config.clone().with_labels(&class, &self.data.labels);
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
}

impl MaskedLanguage {
    /// Of texts, cut to pieces of about `characters`, which are masked anew in each epoch.
    pub fn new(config: Config, text: Text, data: &Dataset, characters: usize) -> Self {
        let cut = |examples: &[Example]| {
            examples.iter().flat_map(|example| pieces(&example.text, characters)).collect()
        };
        let (train, held_out) = (cut(&data.train), cut(&data.held_out));
        Self { config, text, train, held_out }
    }

    fn part(&self, part: Part) -> &[String] {
        match part {
            Part::Train => &self.train,
            Part::HeldOut => &self.held_out,
        }
    }
}

impl Task for MaskedLanguage {
    type Model = MaskedLm;
    type Item = Masked;

    fn model(&self, device: &Device) -> MaskedLm {
        MaskedLm::new(&self.config, device)
    }

    fn examples(&self, part: Part) -> usize {
        self.part(part).len()
    }

    fn fingerprint(&self, part: Part) -> u64 {
        fingerprint(self.part(part).iter().map(|text| (text.as_str(), 0)))
    }

    fn item(&self, part: Part, index: usize, seed: u64) -> Result<Masked> {
        let text = self.text.encode(at(self.part(part), index)?)?;
        Ok(masking::mask(&text, &self.text, seed))
    }

    fn collate(&self, masked: &[Masked], device: &Device) -> Result<Batch> {
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
        model.forward(&batch.inputs, batch.places())
    }

    fn measures(&self, evaluation: &Evaluation) -> Vec<(&'static str, f64)> {
        let Evaluation { loss, accuracy } = *evaluation;
        vec![("loss", loss), ("perplexity", evaluation.perplexity()), ("accuracy", accuracy)]
    }

    fn is_better(&self, new: &Evaluation, best: &Evaluation) -> bool {
        new.loss < best.loss || (best.loss.is_nan() && !new.loss.is_nan())
    }

    fn labels(&self) -> &[String] {
        &[]
    }

    fn save(&self, model: &MaskedLm, folder: &Path) -> Result<()> {
        let class = self.config.model_type.class("MaskedLM");
        write(&self.config.clone().with_labels(&class, &[]), &self.text, folder)?;
        weights::save(model, self.config.model_type, &folder.join("model.safetensors"))
    }
}

/// One number of texts and their labels.
fn fingerprint<'a>(examples: impl Iterator<Item = (&'a str, usize)>) -> u64 {
    let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    examples.fold(0_u64, |all, (text, label)| {
        let begun = seed_of(&[all, text.len() as u64, label as u64]);
        text.as_bytes().chunks(8).fold(begun, |all, bytes| seed_of(&[all, number(bytes)]))
    })
}

fn at<T>(examples: &[T], index: usize) -> Result<&T> {
    examples
        .get(index)
        .with_context(|| format!("example {index} was asked for, there are {}", examples.len()))
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
