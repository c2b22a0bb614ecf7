//! The encoder of a transformer, with [`linear`](crate::linear).

use burn::nn::Gelu;
use burn::nn::activation::Activation;
use burn::nn::attention::MultiHeadAttention;
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoder, TransformerEncoderLayer};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Bool, Tensor};

use crate::{dropout, gelu, linear};

/// What keeps a token from attending to others.
#[derive(Clone)]
struct Masks {
    pad: Option<Tensor<2, Bool>>,
    attn: Option<Tensor<3, Bool>>,
}

/// `encoder.forward(TransformerEncoderInput::new(x).mask_pad(mask_pad).mask_attn(mask_attn))`: of `[samples, length, width]`, each with
/// [`linear`], [`gelu`] and [`dropout`].
///
/// `mask_pad`, of `[samples, length]`, is true for tokens to which none attends; `mask_attn`, of `[samples, length, length]`, for tokens to
/// which one does not attend. A token that may attend to none attends to all of them alike, as in Burn. In PyTorch it becomes NaN.
///
/// # Panics
/// As Burn's `forward`: if the width of `x` is not the encoder's.
pub fn transformer_encoder(
    encoder: &TransformerEncoder,
    x: Tensor<3>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
) -> Tensor<3> {
    let masks = Masks { pad: mask_pad, attn: mask_attn };
    encoder.layers.iter().fold(x, |x, layer| encoder_layer(layer, x, masks.clone()))
}

fn encoder_layer(layer: &TransformerEncoderLayer, x: Tensor<3>, masks: Masks) -> Tensor<3> {
    let TransformerEncoderLayer { mha, pwff, norm_1, norm_2, dropout: between, norm_first } = layer;
    if *norm_first {
        let x = x.clone() + dropout(between, self_attention(mha, norm_2.forward(x), masks));
        return x.clone() + dropout(between, feed_forward(pwff, norm_1.forward(x)));
    }
    let x = norm_1.forward(x.clone() + dropout(between, self_attention(mha, x, masks)));
    norm_2.forward(x.clone() + dropout(between, feed_forward(pwff, x)))
}

fn self_attention(mha: &MultiHeadAttention, x: Tensor<3>, masks: Masks) -> Tensor<3> {
    let [samples, length, width] = x.dims();
    let [query, key, value] = [&mha.query, &mha.key, &mha.value].map(|layer| {
        linear(layer, x.clone()).reshape([samples, length, mha.n_heads, mha.d_k]).swap_dims(1, 2)
    });
    let mut scores = query.matmul(key.transpose()).div_scalar((mha.d_k as f32).sqrt());
    if let Some(mask) = masks.pad {
        let [samples, length] = mask.dims();
        scores = scores.mask_fill(mask.reshape([samples, 1, 1, length]), mha.min_float);
    }
    if let Some(mask) = masks.attn {
        let [samples, rows, columns] = mask.dims();
        scores = scores.mask_fill(mask.reshape([samples, 1, rows, columns]), mha.min_float);
    }
    let weights = if mha.quiet_softmax { quiet_softmax(scores, 3) } else { softmax(scores, 3) };
    let context = dropout(&mha.dropout, weights).matmul(value).swap_dims(1, 2);
    linear(&mha.output, context.reshape([samples, length, width]))
}

fn feed_forward(pwff: &PositionWiseFeedForward, x: Tensor<3>) -> Tensor<3> {
    let x = linear(&pwff.linear_inner, x);
    let x = match &pwff.activation {
        Activation::Gelu(Gelu { approximate: false }) => gelu(x),
        other => other.forward(x),
    };
    linear(&pwff.linear_outer, dropout(&pwff.dropout, x))
}
