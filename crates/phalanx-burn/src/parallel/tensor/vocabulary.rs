//! Embedding and cross entropy whose vocabulary is divided among ranks.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::tensor::module::embedding;
use burn::tensor::{Bool, Int, Tensor};
use phalanx::{Error, Result};

use super::TensorGroup;
use super::group::part;

/// [`Embedding`] whose vectors are divided among ranks by their tokens. Megatron-LM's `VocabParallelEmbedding`.
///
/// The vocabulary may be of any size; the first ranks have one vector more if it does not divide evenly. With
/// [`logits`](Self::logits) the same vectors score tokens, as where the decoder is tied to the embedding, and
/// [`cross_entropy`](Self::cross_entropy) takes these scores without ever putting them together.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    /// This rank's vectors, about `[n_embedding / ranks, d_model]`.
    pub weight: Param<Tensor<2>>,
    n_embedding: usize,
    #[module(skip)]
    group: TensorGroup,
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
        Ok(Self { weight: group.shard(weight, 0, n_embedding), n_embedding, group: group.clone() })
    }

    /// The vectors of `tokens`, `[batch, length]`, which every rank has: `[batch, length, d_model]`, the same on every rank.
    ///
    /// A token that the vocabulary does not have ends the group with an error that names it, and the result is NaN.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let others_are = self.check(&tokens, None);
        let (own, others) = self.own(tokens);
        let vectors = embedding(self.weight.val(), own);
        self.group.reduce(vectors.mask_fill(others.unsqueeze_dim::<3>(2), others_are))
    }

    /// This rank's part of the scores of all tokens, about `[.., n_embedding / ranks]`, for `x` of shape `[.., d_model]`, which
    /// every rank has.
    pub fn logits<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.group.copy(x).matmul(self.weight.val().transpose().unsqueeze())
    }

    /// The mean cross entropy of `logits`, `[samples, about n_embedding / ranks]`, of which every rank has the part that
    /// [`logits`](Self::logits) gives, against the tokens `targets`, `[samples]`, which every rank has. The same on every rank, of
    /// shape `[1]`. Targets that are `padding` do not count; any other that the vocabulary does not have ends the group with an
    /// error that names it, and the result is NaN.
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
        let others_are = self.check(&targets, padding);
        let counted = padding.map(|padding| targets.clone().equal_elem(padding as i64));
        let shifted = logits.clone() - self.group.max(logits.max_dim(1));
        let sums = self.group.reduce(shifted.clone().exp().sum_dim(1)).reshape([samples]);
        let (own, others) = self.own(targets.reshape([samples, 1]));
        let score =
            self.group.reduce(shifted.gather(1, own).mask_fill(others, others_are)).reshape([samples]);
        let losses = sums.log() - score;
        match counted {
            None => losses.mean(),
            Some(padding) => {
                let count = padding.clone().bool_not().float().sum();
                losses.mask_fill(padding, 0.0).sum() / count
            }
        }
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<Embedding> {
        Ok(Embedding { weight: self.group.gathered(&self.weight, 0)? })
    }

    /// What stands for other ranks' tokens: 0, or NaN if one is neither in the vocabulary nor `padding`. Then the group has ended.
    fn check<const D: usize>(&self, tokens: &Tensor<D, Int>, padding: Option<usize>) -> f64 {
        let padding = padding.map(|padding| padding as i64);
        let tokens = tokens.clone().into_data();
        let known = |token: &i64| (0..self.n_embedding as i64).contains(token) || Some(*token) == padding;
        let Some(token) = tokens.iter::<i64>().find(|token| !known(token)) else { return 0.0 };
        self.group.abort(
            Error::invalid_argument(format!(
                "token {token} is not in the vocabulary, which has tokens from 0 to {}",
                self.n_embedding - 1
            ))
            .with_remedy(
                "make the embedding as large as the tokenizer's vocabulary, or give the token as padding",
            ),
        );
        f64::NAN
    }

    /// The places of `tokens` among this rank's vectors, and which tokens are other ranks': their places are of no use.
    fn own<const D: usize>(&self, tokens: Tensor<D, Int>) -> (Tensor<D, Int>, Tensor<D, Bool>) {
        let (from, length) = part(self.n_embedding, self.group.ranks(), self.group.rank());
        let places = tokens - from as i64;
        let last = length as i64 - 1;
        let others = places.clone().lower_elem(0).bool_or(places.clone().greater_elem(last));
        (places.clamp(0, last), others)
    }
}
