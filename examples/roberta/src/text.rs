//! Tokenizers of Hugging Face's format: byte-level BPE for RoBERTa, WordPiece for BERT.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::{AddedToken, Tokenizer, TokenizerBuilder, TruncationParams};

use crate::config::{Config, Family};
use crate::inputs::Encoded;

/// Turns texts into tokens of one model.
pub struct Text {
    tokenizer: Tokenizer,
    mask: u32,
    special: Vec<u32>,
    vocabulary: u32,
}

impl Text {
    /// Reads a `tokenizer.json` for the model of `config`. Texts are cut to `max_tokens`, and to what the model takes.
    ///
    /// # Errors
    /// If it cannot be read, or belongs to another model: it has a token without a row in the embedding, none of the tokens
    /// for masking and padding, or another one for padding.
    pub fn open(path: &Path, config: &Config, max_tokens: usize) -> Result<Self> {
        let tokenizer = Tokenizer::from_file(path).map_err(|error| anyhow!(error));
        let tokenizer = tokenizer.with_context(|| format!("cannot read {}", path.display()))?;
        Self::new(tokenizer, config, max_tokens)
            .with_context(|| format!("{} does not fit the model", path.display()))
    }

    fn new(mut tokenizer: Tokenizer, config: &Config, max_tokens: usize) -> Result<Self> {
        let largest = tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        let (token, largest) = largest.context("the tokenizer has no vocabulary")?;
        ensure!(
            (largest as usize) < config.vocab_size,
            "its token {token:?} has number {largest}, and the model has rows for {} tokens (vocab_size)",
            config.vocab_size
        );
        let (mask, pad) = match config.model_type {
            Family::Roberta => ("<mask>", "<pad>"),
            Family::Bert => ("[MASK]", "[PAD]"),
        };
        let id =
            |token: &str| tokenizer.token_to_id(token).with_context(|| format!("it has no token {token}"));
        let (mask, padding) = (id(mask)?, id(pad)?);
        ensure!(
            padding as usize == config.pad(),
            "its {pad} is token {padding}, the model's padding is token {} (pad_token_id)",
            config.pad()
        );
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        ensure!(max_tokens > 2, "texts of {max_tokens} tokens have no room between the two at their ends");
        let max_length = max_tokens.min(config.max_tokens());
        // Some files ask for padding to a fixed length, which batches do for themselves.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(Some(TruncationParams { max_length, ..TruncationParams::default() }))
            .map_err(|error| anyhow!(error))?;
        let vocabulary = u32::try_from(config.vocab_size)?;
        Ok(Self { tokenizer, mask, special, vocabulary })
    }

    /// The tokens of `text`, with those at its ends, cut to the longest that was asked for.
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        let encoding = self.tokenizer.encode(text, true).map_err(|error| anyhow!(error))?;
        Ok(Encoded { tokens: encoding.get_ids().to_vec(), types: encoding.get_type_ids().to_vec() })
    }

    /// The token that stands for a masked one.
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Is it one of those at the ends of texts, for padding and the like?
    pub fn is_special(&self, token: u32) -> bool {
        self.special.contains(&token)
    }

    /// How many tokens the model has.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// Writes it beside a model's weights.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.tokenizer
            .save(path, false)
            .map_err(|error| anyhow!(error))
            .with_context(|| format!("{} cannot be written", path.display()))
    }
}

/// The tokens that RoBERTa's tokenizers have first, in their order.
const SPECIAL: [&str; 5] = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"];

/// Learns a byte-level BPE of at most `vocabulary` tokens from `texts`, with RoBERTa's special tokens, and writes it.
///
/// # Errors
/// If `vocabulary` has no room for all bytes and the special tokens, or the file cannot be written.
pub fn train_byte_level<'a>(
    texts: impl Iterator<Item = &'a str> + Send,
    vocabulary: usize,
    path: &Path,
) -> Result<()> {
    let least = 256 + SPECIAL.len();
    if vocabulary < least {
        bail!("a byte-level vocabulary has at least {least} tokens, not {vocabulary}");
    }
    let special = SPECIAL.map(|token| AddedToken::from(token, true));
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(vocabulary)
        .min_frequency(2)
        .special_tokens(special.to_vec())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let byte_level = ByteLevel::default().add_prefix_space(false);
    let ends = RobertaProcessing::new(("</s>".into(), 2), ("<s>".into(), 0)).add_prefix_space(false);
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::normalizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(ends))
        .with_decoder(Some(byte_level))
        .build()
        .map_err(|error| anyhow!(error))?;
    tokenizer
        .train(&mut trainer, texts)
        .and_then(|tokenizer| tokenizer.save(path, false))
        .map_err(|error| anyhow!(error))
        .with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 3] = ["the cat sat on the mat", "the dog sat on the log", "naïve café — 猫"];

    fn config(vocabulary: usize) -> Config {
        let json = include_str!("../models/tiny-roberta/config.json");
        let mut json: serde_json::Value = serde_json::from_str(json).unwrap();
        json["vocab_size"] = vocabulary.into();
        Config::parse(&json.to_string()).unwrap()
    }

    #[test]
    fn a_tokenizer_that_was_learned_gives_texts_back_whatever_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        train_byte_level(TEXTS.into_iter(), 300, &path).unwrap();
        let text = Text::open(&path, &config(300), 128).unwrap();
        for sample in TEXTS.into_iter().chain(["\u{0}\u{1F600} never seen"]) {
            let Encoded { tokens, types } = text.encode(sample).unwrap();
            assert_eq!((tokens[0], tokens[tokens.len() - 1]), (0, 2));
            assert_eq!(types, vec![0; tokens.len()]);
            assert_eq!(text.tokenizer.decode(&tokens, true).unwrap(), sample);
        }
        let long = TEXTS[0].repeat(100);
        assert_eq!(Text::open(&path, &config(300), 16).unwrap().encode(&long).unwrap().tokens.len(), 16);
        assert_eq!(text.encode(&long).unwrap().tokens.len(), 128);
        assert!(text.is_special(text.mask()) && text.is_special(0) && !text.is_special(100));
    }

    #[test]
    fn a_tokenizer_that_does_not_fit_the_model_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        train_byte_level(TEXTS.into_iter(), 270, &path).unwrap();
        let refused = |config: &Config| format!("{:#}", Text::open(&path, config, 128).err().unwrap());

        let error = refused(&config(265));
        assert!(error.contains("tokenizer.json does not fit the model: its token "), "{error}");
        assert!(error.contains("has number 269, and the model has rows for 265 tokens"), "{error}");
        let error = refused(&Config { pad_token_id: Some(5), ..config(270) });
        assert!(error.contains("its <pad> is token 1, the model's padding is token 5"), "{error}");
        let error = refused(&Config { model_type: Family::Bert, ..config(270) });
        assert!(error.contains("it has no token [MASK]"), "{error}");
        std::fs::write(&path, "{").unwrap();
        assert!(refused(&config(270)).contains("cannot read"), "{}", refused(&config(270)));
        assert!(train_byte_level(TEXTS.into_iter(), 200, &path).is_err());
    }
}
