//! The encoder and its heads. Its layers may be divided among ranks ([`plan`]), and a model may be a stage of a pipeline, which lacks what
//! other stages have.

use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::{Device, Int, Tensor, activation};
use phalanx_burn::parallel::tensor::{ParallelLinear, TensorGroup, TensorPlan, VocabParallelEmbedding};
use phalanx_layers::dropout;

use crate::config::{Activation, Config};
use crate::inputs::Inputs;

/// From tokens to a vector for each: post-norm, as both papers have it.
#[derive(Module, Debug)]
pub struct Backbone {
    /// None in a stage that is not the first.
    embeddings: Option<Embeddings>,
    layers: Vec<Layer>,
}

#[derive(Module, Debug)]
struct Embeddings {
    word_embeddings: VocabParallelEmbedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Layer {
    attention: Attention,
    intermediate: ParallelLinear,
    output: ParallelLinear,
    norm: LayerNorm,
    dropout: Dropout,
    gelu_tanh: bool,
}

#[derive(Module, Debug)]
struct Attention {
    query: ParallelLinear,
    key: ParallelLinear,
    value: ParallelLinear,
    output: ParallelLinear,
    norm: LayerNorm,
    weights_dropout: Dropout,
    dropout: Dropout,
    /// Elements of a head.
    head_size: usize,
}

/// How the layers of a model are divided among ranks: heads, hidden units, and the tokens of the vocabulary.
fn plan() -> TensorPlan {
    let layers = |plan: TensorPlan, layer: &str| plan.column(&format!("backbone.layers.*.{layer}"));
    ["attention.query", "attention.key", "attention.value", "intermediate"]
        .into_iter()
        .fold(TensorPlan::new(), layers)
        .row("backbone.layers.*.attention.output")
        .row("backbone.layers.*.output")
        .vocabulary("backbone.embeddings.word_embeddings")
}

/// The layers, of so many, that a stage of so many has: the first ones have one more if they do not divide evenly.
pub fn layers_of(layers: usize, stage: usize, stages: usize) -> Range<usize> {
    let (each, more) = (layers / stages, layers % stages);
    let from = |stage: usize| stage * each + stage.min(more);
    from(stage)..from(stage + 1)
}

impl Backbone {
    /// With new random weights.
    pub fn new(config: &Config, device: &Device) -> Self {
        let layers = (0..config.num_hidden_layers).map(|_| Layer::new(config, device)).collect();
        Self { embeddings: Some(Embeddings::new(config, device)), layers }
    }

    /// The vectors of all tokens, `[batch, length, hidden_size]`; those of padding mean nothing.
    pub fn forward(&self, inputs: &Inputs) -> Tensor<3> {
        self.pass(None, inputs)
    }

    /// This stage's part of that. `hidden` is what the stage before gives; the first one gets none.
    fn pass(&self, hidden: Option<Tensor<3>>, inputs: &Inputs) -> Tensor<3> {
        let x = match (hidden, &self.embeddings) {
            (Some(hidden), None) => hidden,
            (None, Some(embeddings)) => embeddings.forward(inputs),
            _ => unreachable!("the first stage, and no other, begins with tokens"),
        };
        self.layers.iter().fold(x, |x, layer| layer.forward(x, &inputs.bias))
    }

    fn stage(self, stage: usize, stages: usize) -> Self {
        let range = layers_of(self.layers.len(), stage, stages);
        let layers = self.layers.into_iter().skip(range.start).take(range.len()).collect();
        Self { embeddings: self.embeddings.filter(|_| stage == 0), layers }
    }

    fn joined(stages: impl IntoIterator<Item = Self>) -> Self {
        stages.into_iter().fold(Self { embeddings: None, layers: Vec::new() }, |mut whole, stage| {
            whole.embeddings = whole.embeddings.or(stage.embeddings);
            whole.layers.extend(stage.layers);
            whole
        })
    }

    /// The vectors of tokens, if this is the first stage.
    fn word_embeddings(&self) -> Option<&VocabParallelEmbedding> {
        self.embeddings.as_ref().map(|embeddings| &embeddings.word_embeddings)
    }

    fn heads(&self) -> usize {
        let heads = |Attention { query, head_size, .. }: &Attention| query.weight.dims()[1] / head_size;
        self.layers.first().map_or(0, |layer| heads(&layer.attention))
    }

    fn has_dropout(&self) -> bool {
        let embeddings = self.embeddings.iter().map(|embeddings| &embeddings.dropout);
        let layers = self.layers.iter();
        let layers = layers
            .flat_map(|layer| [&layer.dropout, &layer.attention.dropout, &layer.attention.weights_dropout]);
        embeddings.chain(layers).any(|dropout| dropout.prob > 0.0)
    }
}

impl Embeddings {
    fn new(config: &Config, device: &Device) -> Self {
        let table = |rows| {
            EmbeddingConfig::new(rows, config.hidden_size).with_initializer(normal(config)).init(device)
        };
        Self {
            word_embeddings: table(config.vocab_size).into(),
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
        dropout(&self.dropout, self.norm.forward(x))
    }
}

impl Layer {
    fn new(config: &Config, device: &Device) -> Self {
        Self {
            attention: Attention::new(config, device),
            intermediate: linear(config.hidden_size, config.intermediate_size, config, device).into(),
            output: linear(config.intermediate_size, config.hidden_size, config, device).into(),
            norm: norm(config, device),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
            gelu_tanh: config.hidden_act == Activation::GeluTanh,
        }
    }

    fn forward(&self, x: Tensor<3>, bias: &Tensor<4>) -> Tensor<3> {
        let x = self.attention.forward(x, bias);
        let inner = gelu(self.intermediate.forward(x.clone()), self.gelu_tanh);
        self.norm.forward(dropout(&self.dropout, self.output.forward(inner)) + x)
    }
}

impl Attention {
    fn new(config: &Config, device: &Device) -> Self {
        let square = || linear(config.hidden_size, config.hidden_size, config, device).into();
        Self {
            query: square(),
            key: square(),
            value: square(),
            output: square(),
            norm: norm(config, device),
            weights_dropout: DropoutConfig::new(config.attention_probs_dropout_prob).init(),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
            head_size: config.hidden_size / config.num_attention_heads,
        }
    }

    fn forward(&self, x: Tensor<3>, bias: &Tensor<4>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        // A rank that shares the layer with others has some of the heads.
        let split = |x: Tensor<3>| {
            let heads = x.dims()[2] / self.head_size;
            x.reshape([batch, length, heads, self.head_size]).swap_dims(1, 2)
        };
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = ParallelLinear::forward_each(layers, x.clone()).map(split);
        let scores = query.matmul(key.transpose()) / (self.head_size as f64).sqrt() + bias.clone();
        let weights = dropout(&self.weights_dropout, activation::softmax(scores, 3));
        let context = weights.matmul(value).swap_dims(1, 2);
        let [.., heads, head_size] = context.dims();
        let context = context.reshape([batch, length, heads * head_size]);
        self.norm.forward(dropout(&self.dropout, self.output.forward(context)) + x)
    }
}

/// Predicts tokens that were masked. The decoder is the token embedding, transposed.
#[derive(Module, Debug)]
pub struct MaskedLm {
    /// The encoder.
    pub backbone: Backbone,
    /// None in a stage that is not the last.
    lm_head: Option<LmHead>,
    /// In the last of several stages: its copy of the token embedding.
    decoder: Option<Param<Tensor<2>>>,
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
            gelu_tanh: !config.model_type.is_roberta() && config.hidden_act == Activation::GeluTanh,
        };
        Self { backbone: Backbone::new(config, device), lm_head: Some(lm_head), decoder: None }
    }

    /// Scores of all tokens of the vocabulary at each of `places`, `[places, vocab_size]`. A place is `row * length + column`
    /// of the batch: the head computes nothing for tokens that nobody asks for.
    pub fn forward(&self, inputs: &Inputs, places: Tensor<1, Int>) -> Tensor<2> {
        self.pass(None, inputs, places).expect_logits()
    }

    /// This stage's part of that; if the vocabulary is divided, the scores of this rank's tokens.
    pub fn pass(&self, hidden: Option<Tensor<3>>, inputs: &Inputs, places: Tensor<1, Int>) -> Passed {
        let x = self.backbone.pass(hidden, inputs);
        let Some(LmHead { dense, norm, bias, gelu_tanh }) = &self.lm_head else { return Passed::Hidden(x) };
        let x: Tensor<2> = x.flatten::<2>(0, 1).select(0, places);
        let x = norm.forward(gelu(dense.forward(x), *gelu_tanh));
        let scores = match (&self.decoder, self.vocabulary()) {
            (Some(decoder), _) => x.matmul(decoder.val().transpose()),
            (None, Some(vocabulary)) => vocabulary.logits(x),
            (None, None) => unreachable!("the last stage has a copy of the token embedding"),
        };
        Passed::Logits(scores + bias.val().unsqueeze())
    }

    /// The token embedding, if the scores are those of its tokens. It may be divided, and then has the loss that goes with it.
    pub fn vocabulary(&self) -> Option<&VocabParallelEmbedding> {
        self.backbone.word_embeddings().filter(|_| self.decoder.is_none())
    }
}

/// What a stage of a model computes.
pub enum Passed {
    /// What the next one begins with, `[batch, length, hidden_size]`.
    Hidden(Tensor<3>),
    /// The scores.
    Logits(Tensor<2>),
}

impl Passed {
    fn expect_logits(self) -> Tensor<2> {
        match self {
            Self::Logits(logits) => logits,
            Self::Hidden(_) => unreachable!("the last stage alone has scores"),
        }
    }
}

/// A model whose layers can be divided, or that can be cut into stages.
pub trait Stages: Module {
    /// This rank's part of every layer. All ranks of `group` call it together.
    ///
    /// # Errors
    /// If a layer cannot be divided among so many, or the exchange fails.
    fn divided(self, group: &TensorGroup) -> phalanx::Result<Self>;

    /// Stage `stage` of `stages` of a whole model.
    fn stage(self, stage: usize, stages: usize) -> Self;

    /// The whole model of all its stages, in their order.
    fn joined(stages: Vec<Self>) -> Self;

    /// What the first and the last stage share, if this is one of them, and where the model has such a thing.
    fn tied(&mut self) -> Option<&mut Param<Tensor<2>>>;

    /// The layers that it has.
    fn layers(&self) -> usize;

    /// The heads of a layer.
    fn heads(&self) -> usize;

    /// Whether it drops anything.
    fn has_dropout(&self) -> bool;
}

/// What the whole model calls the tensor at `path` of a stage that begins with layer `first`.
pub fn whole_path(path: &str, first: usize) -> String {
    if path == "decoder" {
        return TIED.to_owned();
    }
    let layer = path.strip_prefix("backbone.layers.").and_then(|rest| rest.split_once('.'));
    match layer.and_then(|(layer, rest)| Some((layer.parse::<usize>().ok()?, rest))) {
        Some((layer, rest)) => format!("backbone.layers.{}.{rest}", first + layer),
        None => path.to_owned(),
    }
}

/// What the first and the last stage of a [`MaskedLm`] share.
pub const TIED: &str = "backbone.embeddings.word_embeddings.weight";

impl Stages for MaskedLm {
    fn divided(self, group: &TensorGroup) -> phalanx::Result<Self> {
        let mut model = plan().divide(self, group)?;
        // It is no layer of its own that a plan knows.
        if let Some(head) = &mut model.lm_head {
            head.bias = group.shard(head.bias.clone(), 0)?;
        }
        Ok(model)
    }

    fn stage(self, stage: usize, stages: usize) -> Self {
        let is_last = stage + 1 == stages;
        let copy =
            |vectors: &VocabParallelEmbedding| Param::initialized(ParamId::new(), vectors.weight.val());
        Self {
            decoder: self.backbone.word_embeddings().filter(|_| is_last && stages > 1).map(copy),
            lm_head: self.lm_head.filter(|_| is_last),
            backbone: self.backbone.stage(stage, stages),
        }
    }

    fn joined(stages: Vec<Self>) -> Self {
        let (backbones, mut heads): (Vec<_>, Vec<_>) =
            stages.into_iter().map(|stage| (stage.backbone, stage.lm_head)).unzip();
        Self { backbone: Backbone::joined(backbones), lm_head: heads.pop().flatten(), decoder: None }
    }

    fn tied(&mut self) -> Option<&mut Param<Tensor<2>>> {
        let embeddings = self.backbone.embeddings.as_mut();
        self.decoder.as_mut().or(embeddings.map(|embeddings| &mut embeddings.word_embeddings.weight))
    }

    fn layers(&self) -> usize {
        self.backbone.layers.len()
    }

    fn heads(&self) -> usize {
        self.backbone.heads()
    }

    fn has_dropout(&self) -> bool {
        self.backbone.has_dropout()
    }
}

/// Says which of several labels a text has.
#[derive(Module, Debug)]
pub struct Classifier {
    /// The encoder.
    pub backbone: Backbone,
    /// None in a stage that is not the last.
    classifier: Option<ClassificationHead>,
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
        let before = if config.model_type.is_roberta() { dropout } else { 0.0 };
        let classifier = ClassificationHead {
            dense: linear(config.hidden_size, config.hidden_size, config, device),
            out: linear(config.hidden_size, labels, config, device),
            dropout_before: DropoutConfig::new(before).init(),
            dropout: DropoutConfig::new(dropout).init(),
        };
        Self { backbone: Backbone::new(config, device), classifier: Some(classifier) }
    }

    /// The scores of all labels, `[batch, labels]`.
    pub fn forward(&self, inputs: &Inputs) -> Tensor<2> {
        self.pass(None, inputs).expect_logits()
    }

    /// This stage's part of that.
    pub fn pass(&self, hidden: Option<Tensor<3>>, inputs: &Inputs) -> Passed {
        let x = self.backbone.pass(hidden, inputs);
        match &self.classifier {
            None => Passed::Hidden(x),
            Some(head) => Passed::Logits(head.out.forward(dropout(&head.dropout, head.pooled(x)))),
        }
    }

    /// A vector for each text, `[batch, hidden_size]`: BERT's `pooler_output`. Of a whole model, or the last stage.
    pub fn pooled(&self, inputs: &Inputs) -> Option<Tensor<2>> {
        self.classifier.as_ref().map(|head| head.pooled(self.backbone.forward(inputs)))
    }
}

impl ClassificationHead {
    fn pooled(&self, x: Tensor<3>) -> Tensor<2> {
        let first = x.narrow(1, 0, 1).squeeze_dim::<2>(1);
        activation::tanh(self.dense.forward(dropout(&self.dropout_before, first)))
    }
}

impl Stages for Classifier {
    fn divided(self, group: &TensorGroup) -> phalanx::Result<Self> {
        plan().divide(self, group)
    }

    fn stage(self, stage: usize, stages: usize) -> Self {
        let classifier = self.classifier.filter(|_| stage + 1 == stages);
        Self { backbone: self.backbone.stage(stage, stages), classifier }
    }

    fn joined(stages: Vec<Self>) -> Self {
        let (backbones, mut heads): (Vec<_>, Vec<_>) =
            stages.into_iter().map(|stage| (stage.backbone, stage.classifier)).unzip();
        Self { backbone: Backbone::joined(backbones), classifier: heads.pop().flatten() }
    }

    fn tied(&mut self) -> Option<&mut Param<Tensor<2>>> {
        None
    }

    fn layers(&self) -> usize {
        self.backbone.layers.len()
    }

    fn heads(&self) -> usize {
        self.backbone.heads()
    }

    fn has_dropout(&self) -> bool {
        let head = self.classifier.iter().flat_map(|head| [&head.dropout, &head.dropout_before]);
        self.backbone.has_dropout() || head.into_iter().any(|dropout| dropout.prob > 0.0)
    }
}

fn gelu<const D: usize>(x: Tensor<D>, tanh: bool) -> Tensor<D> {
    if tanh { activation::gelu_approximate(x) } else { phalanx_layers::gelu(x) }
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
