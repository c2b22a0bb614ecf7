//! Burn's transformer encoder with heads and hidden units divided among ranks.

use burn::module::{Module, Param};
use burn::nn::activation::Activation;
use burn::nn::attention::MultiHeadAttention;
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoder, TransformerEncoderLayer};
use burn::nn::{Dropout, Gelu, LayerNorm};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Bool, Tensor};
use phalanx::{Error, Result};

use super::linear::SEQUENCE;
use super::{Activations, ColumnParallelLinear, RowParallelLinear, TensorGroup};

/// An error if a layer has dropout: ranks would have to drop the same of what all have, and other elements of what each has alone.
fn check_dropout(probability: f64) -> Result<()> {
    if probability == 0.0 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "dropout of {probability} in a layer that is divided among ranks: they would not drop alike what all of them have"
    ))
    .with_remedy("make the layer with dropout 0, as by TransformerEncoderConfig::with_dropout(0.0)"))
}

/// Self-attention of [`MultiHeadAttention`] whose heads are divided among ranks: each computes its own heads.
#[derive(Module, Debug)]
pub struct ParallelAttention {
    query: ColumnParallelLinear,
    key: ColumnParallelLinear,
    value: ColumnParallelLinear,
    output: RowParallelLinear,
    dropout: Dropout,
    /// This rank's heads.
    heads: usize,
    d_k: usize,
    min_float: f64,
    quiet_softmax: bool,
    #[module(skip)]
    group: TensorGroup,
    #[module(skip)]
    activations: Activations,
}

impl ParallelAttention {
    /// This rank's part of rank 0's `attention`. All ranks call it together.
    ///
    /// # Errors
    /// If the heads cannot be divided evenly, the dropout is not 0, or the exchange fails. On every rank, if one's has other settings, such as another
    /// number of heads.
    pub fn new(attention: MultiHeadAttention, group: &TensorGroup) -> Result<Self> {
        group.compare("attention", &attention.to_string())?;
        Self::of(group.replicate(attention)?, group, Activations::Replicated)
    }

    fn of(attention: MultiHeadAttention, group: &TensorGroup, activations: Activations) -> Result<Self> {
        check_dropout(attention.dropout.prob)?;
        group.check_divides(attention.n_heads, "heads")?;
        let column = |linear| ColumnParallelLinear::of(linear, group);
        Ok(Self {
            query: column(attention.query)?,
            key: column(attention.key)?,
            value: column(attention.value)?,
            output: RowParallelLinear::of(attention.output, group)?.with_activations(activations),
            dropout: attention.dropout,
            heads: attention.n_heads / group.ranks(),
            d_k: attention.d_k,
            min_float: attention.min_float,
            quiet_softmax: attention.quiet_softmax,
            group: group.clone(),
            activations,
        })
    }

    /// The context of `x`, `[batch, length, d_model]`, for itself. `mask_pad`, `[batch, length]`, and `mask_attn`,
    /// `[batch, length, length]`, are true where nothing is to be attended to. A mask of a batch of one is for all samples.
    pub fn forward(
        &self,
        x: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let x = self.activations.enter(&self.group, x);
        let [batch, length, _] = x.dims();
        let heads = |x: Tensor<3>| x.reshape([batch, length, self.heads, self.d_k]).swap_dims(1, 2);
        let (query, key) = (heads(self.query.local(x.clone())), heads(self.key.local(x.clone())));
        let mut scores = query.matmul(key.transpose()).div_scalar((self.d_k as f32).sqrt());
        if let Some(mask) = mask_pad {
            let [samples, length] = mask.dims();
            scores = scores.mask_fill(mask.reshape([samples, 1, 1, length]), self.min_float);
        }
        if let Some(mask) = mask_attn {
            let [samples, rows, columns] = mask.dims();
            scores = scores.mask_fill(mask.reshape([samples, 1, rows, columns]), self.min_float);
        }
        let weights = if self.quiet_softmax { quiet_softmax(scores, 3) } else { softmax(scores, 3) };
        let context = self.dropout.forward(weights).matmul(heads(self.value.local(x)));
        self.output.forward(context.swap_dims(1, 2).reshape([batch, length, self.heads * self.d_k]))
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<MultiHeadAttention> {
        let heads = self.heads * self.group.ranks();
        Ok(MultiHeadAttention {
            query: self.query.gather()?,
            key: self.key.gather()?,
            value: self.value.gather()?,
            output: self.output.gather()?,
            dropout: self.dropout.clone(),
            activation: Gelu::new(),
            d_model: heads * self.d_k,
            n_heads: heads,
            d_k: self.d_k,
            min_float: self.min_float,
            quiet_softmax: self.quiet_softmax,
        })
    }
}

/// [`PositionWiseFeedForward`] whose hidden units are divided among ranks.
#[derive(Module, Debug)]
pub struct ParallelFeedForward {
    linear_inner: ColumnParallelLinear,
    linear_outer: RowParallelLinear,
    dropout: Dropout,
    #[module(skip)]
    activation: Activation,
}

impl ParallelFeedForward {
    /// This rank's part of rank 0's `layer`. All ranks call it together.
    ///
    /// # Errors
    /// If the hidden units cannot be divided evenly, the dropout is not 0, or the exchange fails. On every rank, if one's has another activation.
    pub fn new(layer: PositionWiseFeedForward, group: &TensorGroup) -> Result<Self> {
        group.compare("feed-forward activation", &kind(&layer.activation))?;
        Self::of(group.replicate(layer)?, group, Activations::Replicated)
    }

    fn of(layer: PositionWiseFeedForward, group: &TensorGroup, activations: Activations) -> Result<Self> {
        check_dropout(layer.dropout.prob)?;
        Ok(Self {
            linear_inner: ColumnParallelLinear::of(layer.linear_inner, group)?.with_activations(activations),
            linear_outer: RowParallelLinear::of(layer.linear_outer, group)?.with_activations(activations),
            dropout: layer.dropout,
            activation: layer.activation,
        })
    }

    /// The output for `x`, `[.., d_model]`, of the same shape.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let hidden = self.activation.forward(self.linear_inner.forward(x));
        self.linear_outer.forward(self.dropout.forward(hidden))
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<PositionWiseFeedForward> {
        Ok(PositionWiseFeedForward {
            linear_inner: self.linear_inner.gather()?,
            linear_outer: self.linear_outer.gather()?,
            dropout: self.dropout.clone(),
            activation: self.activation.clone(),
        })
    }
}

/// [`TransformerEncoderLayer`] divided among ranks. Its parameters have Burn's names, in checkpoints too.
#[derive(Module, Debug)]
pub struct ParallelEncoderLayer {
    mha: ParallelAttention,
    pwff: ParallelFeedForward,
    norm_1: LayerNorm,
    norm_2: LayerNorm,
    dropout: Dropout,
    norm_first: bool,
    #[module(skip)]
    group: TensorGroup,
    #[module(skip)]
    activations: Activations,
}

impl ParallelEncoderLayer {
    fn of(layer: TransformerEncoderLayer, group: &TensorGroup, activations: Activations) -> Result<Self> {
        check_dropout(layer.dropout.prob)?;
        Ok(Self {
            mha: ParallelAttention::of(layer.mha, group, activations)?,
            pwff: ParallelFeedForward::of(layer.pwff, group, activations)?,
            norm_1: layer.norm_1,
            norm_2: layer.norm_2,
            dropout: layer.dropout,
            norm_first: layer.norm_first,
            group: group.clone(),
            activations,
        })
    }

    fn forward(
        &self,
        x: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let (first, second) = (|x| self.norm(&self.norm_1, x), |x| self.norm(&self.norm_2, x));
        let attend = |x| self.dropout.forward(self.mha.forward(x, mask_pad, mask_attn));
        let feed = |x| self.dropout.forward(self.pwff.forward(x));
        if self.norm_first {
            let x = x.clone() + attend(second(x));
            x.clone() + feed(first(x))
        } else {
            let x = first(x.clone() + attend(x));
            second(x.clone() + feed(x))
        }
    }

    fn norm(&self, norm: &LayerNorm, x: Tensor<3>) -> Tensor<3> {
        let shared = |parameter: &Param<Tensor<1>>| {
            let (id, tensor, mapper) = parameter.clone().consume();
            let shared = self.activations.shared(&self.group, tensor);
            Param::from_mapped_value(id, shared, mapper)
        };
        let mut with_shared = norm.clone();
        with_shared.gamma = shared(&norm.gamma);
        with_shared.beta = norm.beta.as_ref().map(shared);
        with_shared.forward(x)
    }

    fn gather(&self) -> Result<TransformerEncoderLayer> {
        Ok(TransformerEncoderLayer {
            mha: self.mha.gather()?,
            pwff: self.pwff.gather()?,
            norm_1: self.norm_1.clone(),
            norm_2: self.norm_2.clone(),
            dropout: self.dropout.clone(),
            norm_first: self.norm_first,
        })
    }
}

/// Burn's [`TransformerEncoder`] divided among ranks: heads, and hidden units of the feed-forward layers.
///
/// A layer has two all_reduces in each direction, of the size of its activations. Norms, and biases that are added after a sum, are on
/// every rank, and stay the same there, because their gradients are. Output and gradients are those of the undivided encoder, but
/// for the order in which sums are added up.
///
/// The dropout must be 0 ([`with_dropout(0.0)`](burn::nn::transformer::TransformerEncoderConfig::with_dropout)): it is not divided.
#[derive(Module, Debug)]
pub struct ParallelEncoder {
    layers: Vec<ParallelEncoderLayer>,
    #[module(skip)]
    group: TensorGroup,
    #[module(skip)]
    activations: Activations,
    #[module(skip)]
    whole: Whole,
}

/// The figures of the undivided encoder.
#[derive(Clone, Copy, Debug)]
struct Whole {
    d_model: usize,
    d_ff: usize,
    n_heads: usize,
    dropout: f64,
    norm_first: bool,
    quiet_softmax: bool,
}

/// An activation, or its kind alone if it has parameters, whose ids are each rank's own.
fn kind(activation: &Activation) -> String {
    let shown = format!("{activation:?}");
    match shown.contains("Param") {
        true => shown.chars().take_while(char::is_ascii_alphanumeric).collect(),
        false => shown,
    }
}

/// The numbers with which an encoder computes, for people.
fn described(encoder: &TransformerEncoder) -> String {
    let layer = |TransformerEncoderLayer { mha, pwff, norm_1, norm_2, .. }: &TransformerEncoderLayer| {
        format!("{mha}, {}, {norm_1}, {norm_2}", kind(&pwff.activation))
    };
    let layers: Vec<String> = encoder.layers.iter().map(layer).collect();
    format!("{encoder} of [{}]", layers.join("; "))
}

impl ParallelEncoder {
    /// This rank's part of rank 0's `encoder`. All ranks call it together, with the same `activations`.
    ///
    /// # Errors
    /// If heads or hidden units cannot be divided evenly, the dropout is not 0, or the exchange fails. On every rank, if one's has other settings, such as
    /// another number of heads, place or epsilon of norms, or other `activations`.
    pub fn new(encoder: TransformerEncoder, group: &TensorGroup, activations: Activations) -> Result<Self> {
        group.compare("encoder", &format!("{} with {activations:?} activations", described(&encoder)))?;
        let encoder = group.replicate(encoder)?;
        let whole = Whole {
            d_model: encoder.d_model,
            d_ff: encoder.d_ff,
            n_heads: encoder.n_heads,
            dropout: encoder.dropout,
            norm_first: encoder.norm_first,
            quiet_softmax: encoder.quiet_softmax,
        };
        let layers = encoder.layers.into_iter();
        let layers = layers.map(|layer| ParallelEncoderLayer::of(layer, group, activations));
        Ok(Self { layers: layers.collect::<Result<_>>()?, group: group.clone(), activations, whole })
    }

    /// The encoding of `x`, `[batch, length, d_model]`, which every rank has and gets; masks as in
    /// [`ParallelAttention::forward`]. With [`Activations::Sequence`] the length must be a multiple of the number of ranks.
    pub fn forward(
        &self,
        x: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let sequence = self.activations == Activations::Sequence;
        let x = if sequence {
            // The layers' inputs are parts, which differ.
            self.group.compare_input(&x);
            self.group.part(x, SEQUENCE)
        } else {
            x
        };
        let layer = |x, layer: &ParallelEncoderLayer| layer.forward(x, mask_pad.clone(), mask_attn.clone());
        let x = self.layers.iter().fold(x, layer);
        if sequence { self.group.gather(x, SEQUENCE) } else { x }
    }

    /// The undivided encoder, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<TransformerEncoder> {
        let Whole { d_model, d_ff, n_heads, dropout, norm_first, quiet_softmax } = self.whole;
        let layers: Vec<_> = self.layers.iter().map(ParallelEncoderLayer::gather).collect::<Result<_>>()?;
        let n_layers = layers.len();
        Ok(TransformerEncoder {
            layers,
            d_model,
            d_ff,
            n_heads,
            n_layers,
            dropout,
            norm_first,
            quiet_softmax,
        })
    }
}
