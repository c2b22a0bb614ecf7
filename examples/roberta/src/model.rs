//! The encoder and its heads.

use burn::module::{Module, Param};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::{Device, Int, Tensor, activation};

use crate::config::{Activation, Config, Family};
use crate::inputs::Inputs;

/// From tokens to a vector for each: post-norm, as both papers have it.
#[derive(Module, Debug)]
pub struct Backbone {
    embeddings: Embeddings,
    layers: Vec<Layer>,
}

#[derive(Module, Debug)]
struct Embeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Layer {
    attention: Attention,
    intermediate: Linear,
    output: Linear,
    norm: LayerNorm,
    dropout: Dropout,
    gelu_tanh: bool,
}

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm: LayerNorm,
    weights_dropout: Dropout,
    dropout: Dropout,
    heads: usize,
}

impl Backbone {
    /// With new random weights.
    pub fn new(config: &Config, device: &Device) -> Self {
        let layers = (0..config.num_hidden_layers).map(|_| Layer::new(config, device)).collect();
        Self { embeddings: Embeddings::new(config, device), layers }
    }

    /// The vectors of all tokens, `[batch, length, hidden_size]`; those of padding mean nothing.
    pub fn forward(&self, inputs: &Inputs) -> Tensor<3> {
        let embedded = self.embeddings.forward(inputs);
        self.layers.iter().fold(embedded, |x, layer| layer.forward(x, &inputs.bias))
    }
}

impl Embeddings {
    fn new(config: &Config, device: &Device) -> Self {
        let table = |rows| {
            EmbeddingConfig::new(rows, config.hidden_size).with_initializer(normal(config)).init(device)
        };
        Self {
            word_embeddings: table(config.vocab_size),
            position_embeddings: table(config.max_position_embeddings),
            token_type_embeddings: table(config.type_vocab_size),
            norm: norm(config, device),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
        }
    }

    fn forward(&self, inputs: &Inputs) -> Tensor<3> {
        let x = self.word_embeddings.forward(inputs.tokens.clone())
            + self.token_type_embeddings.forward(inputs.types.clone())
            + self.position_embeddings.forward(inputs.positions.clone());
        self.dropout.forward(self.norm.forward(x))
    }
}

impl Layer {
    fn new(config: &Config, device: &Device) -> Self {
        Self {
            attention: Attention::new(config, device),
            intermediate: linear(config.hidden_size, config.intermediate_size, config, device),
            output: linear(config.intermediate_size, config.hidden_size, config, device),
            norm: norm(config, device),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
            gelu_tanh: config.hidden_act == Activation::GeluTanh,
        }
    }

    fn forward(&self, x: Tensor<3>, bias: &Tensor<4>) -> Tensor<3> {
        let x = self.attention.forward(x, bias);
        let inner = gelu(self.intermediate.forward(x.clone()), self.gelu_tanh);
        self.norm.forward(self.dropout.forward(self.output.forward(inner)) + x)
    }
}

impl Attention {
    fn new(config: &Config, device: &Device) -> Self {
        let square = || linear(config.hidden_size, config.hidden_size, config, device);
        Self {
            query: square(),
            key: square(),
            value: square(),
            output: square(),
            norm: norm(config, device),
            weights_dropout: DropoutConfig::new(config.attention_probs_dropout_prob).init(),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
            heads: config.num_attention_heads,
        }
    }

    fn forward(&self, x: Tensor<3>, bias: &Tensor<4>) -> Tensor<3> {
        let [batch, length, hidden] = x.dims();
        let side = hidden / self.heads;
        let split = |x: Tensor<3>| x.reshape([batch, length, self.heads, side]).swap_dims(1, 2);
        let query = split(self.query.forward(x.clone()));
        let key = split(self.key.forward(x.clone()));
        let value = split(self.value.forward(x.clone()));
        let scores = query.matmul(key.transpose()) / (side as f64).sqrt() + bias.clone();
        let weights = self.weights_dropout.forward(activation::softmax(scores, 3));
        let context = weights.matmul(value).swap_dims(1, 2).reshape([batch, length, hidden]);
        self.norm.forward(self.dropout.forward(self.output.forward(context)) + x)
    }
}

/// Predicts tokens that were masked. The decoder is the token embedding, transposed.
#[derive(Module, Debug)]
pub struct MaskedLm {
    /// The encoder.
    pub backbone: Backbone,
    lm_head: LmHead,
}

#[derive(Module, Debug)]
struct LmHead {
    dense: Linear,
    norm: LayerNorm,
    bias: Param<Tensor<1>>,
    gelu_tanh: bool,
}

impl MaskedLm {
    /// With new random weights.
    pub fn new(config: &Config, device: &Device) -> Self {
        let lm_head = LmHead {
            dense: linear(config.hidden_size, config.hidden_size, config, device),
            norm: norm(config, device),
            bias: Initializer::Zeros.init([config.vocab_size], device),
            // RoBERTa's head has GELU whatever the layers have.
            gelu_tanh: config.model_type == Family::Bert && config.hidden_act == Activation::GeluTanh,
        };
        Self { backbone: Backbone::new(config, device), lm_head }
    }

    /// Scores of all tokens of the vocabulary at each of `places`, `[places, vocab_size]`. A place is `row * length + column`
    /// of the batch: the head computes nothing for tokens that nobody asks for.
    pub fn forward(&self, inputs: &Inputs, places: Tensor<1, Int>) -> Tensor<2> {
        let x = self.backbone.forward(inputs);
        let x: Tensor<2> = x.flatten::<2>(0, 1).select(0, places);
        let x = self.lm_head.norm.forward(gelu(self.lm_head.dense.forward(x), self.lm_head.gelu_tanh));
        let decoder = self.backbone.embeddings.word_embeddings.weight.val().transpose();
        x.matmul(decoder) + self.lm_head.bias.val().unsqueeze()
    }
}

/// Says which of several labels a text has.
#[derive(Module, Debug)]
pub struct Classifier {
    /// The encoder.
    pub backbone: Backbone,
    classifier: ClassificationHead,
}

/// RoBERTa's is all new for a task. BERT's dense layer is its pooler, which is pre-trained, and has no dropout before it.
#[derive(Module, Debug)]
struct ClassificationHead {
    dense: Linear,
    out: Linear,
    dropout_before: Dropout,
    dropout: Dropout,
}

impl Classifier {
    /// With new random weights, for `labels` labels.
    pub fn new(config: &Config, labels: usize, device: &Device) -> Self {
        let dropout = config.classifier_dropout();
        let before = if config.model_type == Family::Roberta { dropout } else { 0.0 };
        let classifier = ClassificationHead {
            dense: linear(config.hidden_size, config.hidden_size, config, device),
            out: linear(config.hidden_size, labels, config, device),
            dropout_before: DropoutConfig::new(before).init(),
            dropout: DropoutConfig::new(dropout).init(),
        };
        Self { backbone: Backbone::new(config, device), classifier }
    }

    /// The scores of all labels, `[batch, labels]`.
    pub fn forward(&self, inputs: &Inputs) -> Tensor<2> {
        self.classifier.out.forward(self.classifier.dropout.forward(self.pooled(inputs)))
    }

    /// A vector for each text, `[batch, hidden_size]`: BERT's `pooler_output`.
    pub fn pooled(&self, inputs: &Inputs) -> Tensor<2> {
        let x = self.backbone.forward(inputs);
        let first = x.narrow(1, 0, 1).squeeze_dim::<2>(1);
        activation::tanh(self.classifier.dense.forward(self.classifier.dropout_before.forward(first)))
    }
}

fn gelu<const D: usize>(x: Tensor<D>, tanh: bool) -> Tensor<D> {
    if tanh { activation::gelu_approximate(x) } else { activation::gelu(x) }
}

fn normal(config: &Config) -> Initializer {
    Initializer::Normal { mean: 0.0, std: config.initializer_range }
}

fn norm(config: &Config, device: &Device) -> LayerNorm {
    LayerNormConfig::new(config.hidden_size).with_epsilon(config.layer_norm_eps).init(device)
}

fn linear(inputs: usize, outputs: usize, config: &Config, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(inputs, outputs).with_initializer(normal(config)).init(device);
    linear.bias = Some(Initializer::Zeros.init([outputs], device));
    linear
}
