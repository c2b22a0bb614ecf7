//! RoBERTa's encoder with a head that says which of several labels a text has; variables have the names of Hugging Face's
//! `transformers`, so that `VarStore::load` reads its `model.safetensors` as it is.

use std::fs::File;
use std::path::Path as FilePath;

use serde::Deserialize;
use tch::nn::{self, EmbeddingConfig, LayerNormConfig, Module, Path, VarStore};
use tch::{Device, Kind, Tensor};

/// What is used of `config.json`.
#[derive(Debug, Deserialize)]
pub struct Config {
    vocab_size: i64,
    hidden_size: i64,
    num_hidden_layers: i64,
    num_attention_heads: i64,
    intermediate_size: i64,
    max_position_embeddings: i64,
    type_vocab_size: i64,
    pad_token_id: i64,
    layer_norm_eps: f64,
    hidden_dropout_prob: f64,
    attention_probs_dropout_prob: f64,
}

/// `RobertaForSequenceClassification`.
#[derive(Debug)]
pub struct Classifier {
    pub store: VarStore,
    config: Config,
    words: nn::Embedding,
    positions: nn::Embedding,
    types: nn::Embedding,
    norm: nn::LayerNorm,
    layers: Vec<Layer>,
    dense: nn::Linear,
    out: nn::Linear,
}

#[derive(Debug)]
struct Layer {
    query: nn::Linear,
    key: nn::Linear,
    value: nn::Linear,
    attended: nn::Linear,
    attended_norm: nn::LayerNorm,
    inner: nn::Linear,
    output: nn::Linear,
    output_norm: nn::LayerNorm,
}

impl Classifier {
    /// With the weights in `folder`, of a model for `labels` labels.
    pub fn load(folder: &FilePath, labels: i64) -> Result<Self, Box<dyn std::error::Error>> {
        let config: Config = serde_json::from_reader(File::open(folder.join("config.json"))?)?;
        let mut this = Self::new(config, labels);
        this.store.load(folder.join("model.safetensors"))?;
        Ok(this)
    }

    fn new(config: Config, labels: i64) -> Self {
        let store = VarStore::new(Device::Cpu);
        let (root, width) = (store.root(), config.hidden_size);
        let (embeddings, encoder) =
            (&root / "roberta" / "embeddings", &root / "roberta" / "encoder" / "layer");
        let padded = || EmbeddingConfig { padding_idx: config.pad_token_id, ..Default::default() };
        let words = nn::embedding(&embeddings / "word_embeddings", config.vocab_size, width, padded());
        let positions = nn::embedding(
            &embeddings / "position_embeddings",
            config.max_position_embeddings,
            width,
            padded(),
        );
        let plain = EmbeddingConfig::default();
        let types =
            nn::embedding(&embeddings / "token_type_embeddings", config.type_vocab_size, width, plain);
        let norm = norm(&embeddings, &config);
        let layers =
            (0..config.num_hidden_layers).map(|index| Layer::new(&(&encoder / index), &config)).collect();
        let dense = nn::linear(&root / "classifier" / "dense", width, width, Default::default());
        let out = nn::linear(&root / "classifier" / "out_proj", width, labels, Default::default());
        Self { config, words, positions, types, norm, layers, dense, out, store }
    }

    /// The scores of all labels, `[batch, labels]`, of texts that are padded on the right.
    pub fn forward(&self, tokens: &Tensor, types: &Tensor, train: bool) -> Tensor {
        let present = tokens.not_equal(self.config.pad_token_id);
        // Positions count from behind the padding index, which padding itself has.
        let counted = present.to_kind(Kind::Int64);
        let places = counted.cumsum(1, Kind::Int64) * &counted + self.config.pad_token_id;
        let embedded =
            self.words.forward(tokens) + self.types.forward(types) + self.positions.forward(&places);
        let dropout = self.config.hidden_dropout_prob;
        let embedded = self.norm.forward(&embedded).dropout(dropout, train);
        let mask = present.unsqueeze(1).unsqueeze(1);
        let encoded =
            self.layers.iter().fold(embedded, |x, layer| layer.forward(&x, &mask, &self.config, train));
        let first = encoded.select(1, 0).dropout(dropout, train);
        self.out.forward(&self.dense.forward(&first).tanh().dropout(dropout, train))
    }
}

impl Layer {
    fn new(root: &Path<'_>, config: &Config) -> Self {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let linear = |path: Path<'_>, from, to| nn::linear(path, from, to, Default::default());
        let attention = root / "attention" / "self";
        let attended = root / "attention" / "output";
        Self {
            query: linear(&attention / "query", width, width),
            key: linear(&attention / "key", width, width),
            value: linear(&attention / "value", width, width),
            attended: linear(&attended / "dense", width, width),
            attended_norm: norm(&attended, config),
            inner: linear(root / "intermediate" / "dense", width, inner),
            output: linear(root / "output" / "dense", inner, width),
            output_norm: norm(&(root / "output"), config),
        }
    }

    fn forward(&self, x: &Tensor, mask: &Tensor, config: &Config, train: bool) -> Tensor {
        let (batch, length, width) = x.size3().unwrap_or_default();
        let heads = config.num_attention_heads;
        let split =
            |layer: &nn::Linear| layer.forward(x).view([batch, length, heads, width / heads]).transpose(1, 2);
        let [query, key, value] = [&self.query, &self.key, &self.value].map(split);
        let dropout = if train { config.attention_probs_dropout_prob } else { 0.0 };
        let mixed = Tensor::scaled_dot_product_attention(
            &query,
            &key,
            &value,
            Some(mask),
            dropout,
            false,
            None,
            false,
        );
        let mixed = self.attended.forward(&mixed.transpose(1, 2).reshape([batch, length, width]));
        let x = self.attended_norm.forward(&(mixed.dropout(config.hidden_dropout_prob, train) + x));
        let fed = self.output.forward(&self.inner.forward(&x).gelu("none"));
        self.output_norm.forward(&(fed.dropout(config.hidden_dropout_prob, train) + x))
    }
}

fn norm(root: &Path<'_>, config: &Config) -> nn::LayerNorm {
    let settings = LayerNormConfig { eps: config.layer_norm_eps, ..Default::default() };
    nn::layer_norm(root / "LayerNorm", vec![config.hidden_size], settings)
}
