//! Embedding and cross entropy whose vocabulary is divided among ranks.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::tensor::activation::log_softmax;
use burn::tensor::module::embedding;
use burn::tensor::{Bool, Int, Tensor};
use phalanx::{Error, Result};

use super::super::division::Division;
use super::TensorGroup;
use super::group::part;
use crate::read_back;
use crate::sync_batch_norm::computed_in;

/// [`Embedding`] whose vectors are divided among ranks by their tokens. Megatron-LM's `VocabParallelEmbedding`.
///
/// Made [from](From) an `Embedding` alone it is whole until a [`TensorPlan`](super::TensorPlan) divides it.
///
/// The vocabulary may be of any size; the first ranks have one vector more if it does not divide evenly. With
/// [`logits`](Self::logits) the same vectors score tokens, as where the decoder is tied to the embedding, and
/// [`cross_entropy`](Self::cross_entropy) takes these scores without ever putting them together.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// This rank's vectors, about `[n_embedding / ranks, d_model]`.
    pub weight: Param<Tensor<2>>,
}

impl From<Embedding> for VocabParallelEmbedding {
    fn from(Embedding { weight }: Embedding) -> Self {
        Self { weight }
    }
}

impl VocabParallelEmbedding {
    /// This rank's part of rank 0's `embedding`. All ranks call it together.
    ///
    /// # Errors
    /// If there are fewer vectors than ranks, or the exchange fails.
    pub fn new(embedding: Embedding, group: &TensorGroup) -> Result<Self> {
        let Embedding { weight } = group.replicate(embedding)?;
        let [n_embedding, _] = weight.shape().dims();
        if n_embedding < group.ranks() {
            group.check_divides(n_embedding, "vectors of an embedding")?;
        }
        Ok(Self { weight: group.shard(weight, 0)? })
    }

    /// The vectors of `tokens`, `[batch, length]`, which every rank has: `[batch, length, d_model]`, the same on every rank.
    ///
    /// A token that the vocabulary does not have ends the group with an error that names it, and the result is NaN; and so do other tokens than those of
    /// another rank, which the ranks compare in the first two passes of tokens and targets through a group, and then in every 1021st.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let Some(division) = self.division() else { return embedding(self.weight.val(), tokens) };
        let others_are = check(division, &tokens, None);
        let (own, others) = own(division, tokens);
        let vectors = embedding(self.weight.val(), own);
        division.group.reduce(vectors.mask_fill(others.unsqueeze_dim::<3>(2), others_are))
    }

    /// This rank's part of the scores of all tokens, about `[.., n_embedding / ranks]`, for `x` of shape `[.., d_model]`, which
    /// every rank has.
    pub fn logits<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let x = match self.division() {
            Some(division) => division.group.enter(x),
            None => x,
        };
        x.matmul(self.weight.val().transpose().unsqueeze())
    }

    /// The mean cross entropy of `logits`, `[samples, about n_embedding / ranks]`, of which every rank has the part that
    /// [`logits`](Self::logits) gives, against the tokens `targets`, `[samples]`, which every rank has. The same on every rank, of
    /// shape `[1]`. Targets that are `padding` do not count; any other that the vocabulary does not have ends the group with an
    /// error that names it, and the result is NaN. It has the type of `logits`, and is computed in f32 if that has 16 bits.
    ///
    /// Nothing of the size of the vocabulary is exchanged: of each sample the largest score, the sum of exponentials and the score of
    /// the target.
    pub fn cross_entropy(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        padding: Option<usize>,
    ) -> Tensor<1> {
        let [samples, _] = logits.dims();
        let dtype = logits.dtype();
        let logits = logits.cast(computed_in(dtype));
        let counted = padding.map(|padding| targets.clone().equal_elem(padding as i64));
        let losses = match self.division() {
            Some(division) => losses(division, logits, targets, padding),
            None => {
                // Targets that stand for padding are not counted.
                let targets = match &counted {
                    Some(padding) => targets.mask_fill(padding.clone(), 0),
                    None => targets,
                };
                log_softmax(logits, 1).gather(1, targets.reshape([samples, 1])).reshape([samples]).neg()
            }
        };
        let mean = match counted {
            None => losses.mean(),
            Some(padding) => {
                // Of the device's default type.
                let count = padding.clone().bool_not().float().cast(losses.dtype()).sum();
                losses.mask_fill(padding, 0.0).sum() / count
            }
        };
        mean.cast(dtype)
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<Embedding> {
        match self.division() {
            Some(division) => Ok(Embedding { weight: division.group.gathered(&self.weight, 0)? }),
            None => Ok(Embedding { weight: self.weight.clone() }),
        }
    }

    fn division(&self) -> Option<&Division> {
        self.weight.reparameterization()
    }
}

/// The negative log-likelihood of each target, `[samples]`.
fn losses(
    division: &Division,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    padding: Option<usize>,
) -> Tensor<1> {
    let ([samples, _], group) = (logits.dims(), &division.group);
    let others_are = check(division, &targets, padding);
    let shifted = logits.clone() - group.max(logits.max_dim(1));
    let sums = group.reduce(shifted.clone().exp().sum_dim(1)).reshape([samples]);
    let (own, others) = own(division, targets.reshape([samples, 1]));
    let score = group.reduce(shifted.gather(1, own).mask_fill(others, others_are)).reshape([samples]);
    sums.log() - score
}

/// What stands for other ranks' tokens: 0, or NaN if one is neither in the vocabulary nor `padding`, or the ranks have found that they have different
/// ones, or another `padding`. Then the group has ended.
fn check<const D: usize>(division: &Division, tokens: &Tensor<D, Int>, padding: Option<usize>) -> f64 {
    let (padding, total) = (padding.map(|padding| padding as i64), division.span.total as i64);
    let tokens = match read_back::data(tokens.clone()) {
        Ok(tokens) => tokens,
        Err(error) => {
            division.group.abort(error);
            return f64::NAN;
        }
    };
    let known = |token: &i64| (0..total).contains(token) || Some(*token) == padding;
    let Some(token) = tokens.iter::<i64>().find(|token| !known(token)) else {
        let own_padding = padding.unwrap_or(-1).to_le_bytes();
        let same = division.group.is_everyones([tokens.as_bytes(), &own_padding[..]]);
        let other = || {
            Error::mismatch(
                "the ranks that divide a vocabulary have different tokens or padding, and each would compute its part of another batch",
            )
            .with_remedy(
                "give all ranks of a TensorGroup the same batch and padding: in a mesh, sample by the rank in the data dimension",
            )
        };
        return match same.and_then(|same| if same { Ok(0.0) } else { Err(other()) }) {
            Ok(zero) => zero,
            Err(error) => {
                division.group.abort(error);
                f64::NAN
            }
        };
    };
    division.group.abort(
        Error::invalid_argument(format!(
            "token {token} is not in the vocabulary, which has tokens from 0 to {}",
            total - 1
        ))
        .with_remedy(
            "make the embedding as large as the tokenizer's vocabulary, or give the token as padding",
        ),
    );
    f64::NAN
}

/// The places of `tokens` among this rank's vectors, and which tokens are other ranks': their places are of no use.
fn own<const D: usize>(division: &Division, tokens: Tensor<D, Int>) -> (Tensor<D, Int>, Tensor<D, Bool>) {
    let Division { group, span } = division;
    let (from, length) = part(span.total, group.ranks(), group.rank());
    let places = tokens - from as i64;
    let last = length as i64 - 1;
    let others = places.clone().lower_elem(0).bool_or(places.clone().greater_elem(last));
    (places.clamp(0, last), others)
}
