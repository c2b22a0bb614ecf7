//! Texts of unequal lengths as tensors of one batch.

use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::Config;

/// Added to the attention to a padding token: its weight becomes exactly zero.
const NEVER: f32 = -1e9;

/// The tokens of a text, with those at its ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Rows of the token embedding.
    pub tokens: Vec<u32>,
    /// Rows of the token type embedding, one for each token: BERT tells the two sentences of a pair by them.
    pub types: Vec<u32>,
}

/// A batch of texts, each as long as the longest.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Rows of the token embedding, `[batch, length]`.
    pub tokens: Tensor<2, Int>,
    /// Rows of the token type embedding, `[batch, length]`.
    pub types: Tensor<2, Int>,
    /// Rows of the position embedding, `[batch, length]`.
    pub positions: Tensor<2, Int>,
    /// Added to attention's scores, `[batch, 1, 1, length]`: 0 for a token, a large negative number for padding.
    pub bias: Tensor<4>,
}

impl Inputs {
    /// Pads `texts` to the length of the longest.
    ///
    /// # Errors
    /// If there is none, one is empty, too long for the model, or has a token that the model does not have.
    pub fn new<'a>(
        texts: impl IntoIterator<Item = &'a Encoded>,
        config: &Config,
        device: &Device,
    ) -> Result<Self> {
        let texts: Vec<&Encoded> = texts.into_iter().collect();
        let length = texts.iter().map(|text| text.tokens.len()).max().unwrap_or(0);
        ensure!(length > 0, "a batch without any token cannot be computed");
        let shape = [texts.len(), length];
        let (pad, first) = (config.pad() as i64, config.first_position() as i64);
        let cells = texts.len() * length;
        let (mut tokens, mut types, mut positions) =
            (vec![pad; cells], vec![0_i64; cells], vec![0_i64; cells]);
        let mut bias = vec![NEVER; cells];
        for (row, text) in texts.iter().enumerate() {
            check(text, config)?;
            let row = row * length;
            // RoBERTa numbers what is not padding, wherever it stands; BERT every place.
            let mut next = first;
            for (place, (&token, &kind)) in text.tokens.iter().zip(&text.types).enumerate() {
                let token = i64::from(token);
                (tokens[row + place], types[row + place], bias[row + place]) = (token, i64::from(kind), 0.0);
                let padding = first > 0 && token == pad;
                positions[row + place] = if padding { pad } else { next };
                next += i64::from(!padding);
            }
            for place in text.tokens.len()..length {
                positions[row + place] = if first > 0 { pad } else { place as i64 };
            }
        }
        let rows = |rows: Vec<i64>| Tensor::from_data(TensorData::new(rows, shape), device);
        Ok(Self {
            tokens: rows(tokens),
            types: rows(types),
            positions: rows(positions),
            bias: Tensor::from_data(TensorData::new(bias, [shape[0], 1, 1, length]), device),
        })
    }
}

/// A lookup outside of a table would be a panic of the backend.
fn check(text: &Encoded, config: &Config) -> Result<()> {
    let Encoded { tokens, types } = text;
    ensure!(!tokens.is_empty(), "a text has no token, not even those at its ends");
    ensure!(
        tokens.len() == types.len(),
        "a text has {} tokens and {} token types",
        tokens.len(),
        types.len()
    );
    ensure!(
        tokens.len() <= config.max_tokens(),
        "a text has {} tokens, the model takes {}: truncate it",
        tokens.len(),
        config.max_tokens()
    );
    let outside = |ids: &[u32], rows: usize| ids.iter().copied().find(|&id| id as usize >= rows);
    if let Some(token) = outside(tokens, config.vocab_size) {
        anyhow::bail!("token {token} is not in the model's vocabulary of {}", config.vocab_size);
    }
    if let Some(kind) = outside(types, config.type_vocab_size) {
        anyhow::bail!("token type {kind} is not one of the model's {}", config.type_vocab_size);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(family: &str) -> Config {
        let json = include_str!("../models/tiny-roberta/config.json");
        let mut json: serde_json::Value = serde_json::from_str(json).unwrap();
        json["model_type"] = family.into();
        json["pad_token_id"] = u32::from(family == "roberta").into();
        Config::parse(&json.to_string()).unwrap()
    }

    fn text(tokens: &[u32]) -> Encoded {
        Encoded { tokens: tokens.to_vec(), types: vec![0; tokens.len()] }
    }

    fn inputs(family: &str, texts: &[Encoded]) -> Result<Inputs> {
        Inputs::new(texts, &config(family), &Device::flex())
    }

    #[test]
    fn short_texts_are_padded_and_padding_has_no_position() {
        let texts = [text(&[0, 7, 2]), text(&[0, 7, 8, 9, 2])];
        let roberta = inputs("roberta", &texts).unwrap();
        let numbers = |tensor: Tensor<2, Int>| tensor.into_data().iter::<i64>().collect::<Vec<_>>();
        assert_eq!(numbers(roberta.tokens), [0, 7, 2, 1, 1, 0, 7, 8, 9, 2]);
        assert_eq!(numbers(roberta.positions), [2, 3, 4, 1, 1, 2, 3, 4, 5, 6]);
        let bias: Vec<f32> = roberta.bias.into_data().iter().collect();
        assert_eq!(bias, [0.0, 0.0, 0.0, NEVER, NEVER, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let bert = inputs("bert", &texts).unwrap();
        assert_eq!(numbers(bert.tokens), [0, 7, 2, 0, 0, 0, 7, 8, 9, 2]);
        assert_eq!(numbers(bert.positions), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]);
    }

    #[test]
    fn what_has_no_row_is_refused() {
        let second = Encoded { tokens: vec![0, 2], types: vec![0, 1] };
        let cases = [
            (vec![], "without any token"),
            (vec![text(&[])], "without any token"),
            (vec![text(&[0, 2]), text(&[])], "a text has no token"),
            (vec![text(&[4096])], "token 4096 is not in the model's vocabulary of 4096"),
            (vec![text(&[5; 129])], "a text has 129 tokens, the model takes 128"),
            (vec![second], "token type 1 is not one of the model's 1"),
        ];
        for (texts, expected) in cases {
            let error = inputs("roberta", &texts).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
