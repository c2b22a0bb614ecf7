//! Tokenizers of Hugging Face's format: byte-level BPE for RoBERTa, SentencePiece's unigrams for XLM-RoBERTa, WordPiece for BERT.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::{AddedToken, Tokenizer, TokenizerBuilder, TruncationParams};

use crate::config::{Config, Family};
use crate::files;
use crate::inputs::Encoded;

/// Turns texts into tokens of one model.
pub struct Text {
    tokenizer: Tokenizer,
    mask: u32,
    special: Vec<u32>,
    vocabulary: u32,
    /// Its largest token, and one.
    tokens: usize,
}

/// Files of a tokenizer that are not read.
const OTHER_FORMATS: [&str; 5] =
    ["vocab.json", "vocab.txt", "sentencepiece.bpe.model", "tokenizer.model", "spiece.model"];

impl Text {
    /// Reads a `tokenizer.json` for the model of `config`. Texts are cut to `max_tokens`.
    ///
    /// # Errors
    /// If it cannot be read; if the model has no positions for so many tokens; if it belongs to another model: it has a token without a row in
    /// the embedding, none of the tokens for masking, padding and the ends of a text, or another one for padding; or if
    /// `tokenizer_config.json` beside it contradicts it.
    pub fn open(path: &Path, config: &Config, max_tokens: usize) -> Result<Self> {
        let other = OTHER_FORMATS
            .into_iter()
            .find(|name| !files::is_there(path) && path.with_file_name(name).exists());
        if let Some(other) = other {
            bail!(
                "there is no {}, and {other} alone is not read: in transformers, AutoTokenizer.from_pretrained(folder)\
                 .save_pretrained(folder) writes tokenizer.json",
                path.display()
            );
        }
        let json = files::read_text(path)?;
        let tokenizer = Tokenizer::from_bytes(&json).map_err(|error| anyhow!(error));
        let tokenizer = tokenizer.with_context(|| format!("{} is no tokenizer", path.display()))?;
        let beside = path.with_file_name("tokenizer_config.json");
        if files::is_there(&beside) {
            check_beside(&serde_json::from_str(&json)?, &files::read_text(&beside)?)
                .with_context(|| format!("{} contradicts {}", beside.display(), path.display()))?;
        }
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
        let (mask, pad, ends) = match config.model_type {
            Family::Roberta | Family::XlmRoberta => ("<mask>", "<pad>", ["<s>", "</s>"]),
            Family::Bert => ("[MASK]", "[PAD]", ["[CLS]", "[SEP]"]),
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
        let max_length = config.max_tokens();
        ensure!(
            max_tokens <= max_length,
            "texts of {max_tokens} tokens (--max-tokens) are longer than the {max_length} that the model has positions for \
             (max_position_embeddings)"
        );
        let max_length = max_tokens;
        // Some files ask for padding to a fixed length, which batches do for themselves.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(Some(TruncationParams { max_length, ..TruncationParams::default() }))
            .map_err(|error| anyhow!(error))?;
        let vocabulary = u32::try_from(config.vocab_size)?;
        let text = Self { tokenizer, mask, special, vocabulary, tokens: largest as usize + 1 };
        let Encoded { tokens, .. } = text.encode("a")?;
        let found =
            [tokens.first(), tokens.last()].map(|id| id.and_then(|&id| text.tokenizer.id_to_token(id)));
        ensure!(
            tokens.len() > 1 && found.iter().zip(ends).all(|(found, end)| found.as_deref() == Some(end)),
            "it does not put {} before a text and {} behind it (post_processor), with which the model was trained",
            ends[0],
            ends[1]
        );
        Ok(text)
    }

    /// Refuses a tokenizer with fewer tokens than the model has rows: it is another model's, whose tokens mean other words. A model may have
    /// rows that fill a block of up to 512.
    ///
    /// # Errors
    /// If there are other rows without a token.
    pub fn check_unused(&self) -> Result<()> {
        let rows = self.vocabulary as usize;
        let fills_a_block = (0..=9).any(|power| self.tokens.next_multiple_of(1 << power) == rows);
        ensure!(
            fills_a_block,
            "the tokenizer has {} tokens, and the model rows for {rows} (vocab_size): it is probably another model's; if it is this \
             one's, add --allow-unused-tokens",
            self.tokens
        );
        Ok(())
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

    /// Whether it is one of those at the ends of texts, for padding and the like.
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

/// Refuses what `transformers` would do otherwise than the tokenizer's own file says: the fields of `tokenizer_config.json` replace its own.
fn check_beside(tokenizer: &Value, beside: &str) -> Result<()> {
    let beside: Value = serde_json::from_str(beside)?;
    for (field, part, name) in [
        ("do_lower_case", "normalizer", "lowercase"),
        ("add_prefix_space", "pre_tokenizer", "add_prefix_space"),
    ] {
        let (wanted, own) = (beside[field].as_bool(), tokenizer[part][name].as_bool());
        if let (Some(wanted), Some(own)) = (wanted, own) {
            ensure!(
                wanted == own,
                "{field} is {wanted}, and {name} of the {part} {own}: transformers would take {wanted}; correct the file that is wrong"
            );
        }
    }
    Ok(())
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
        let mut json: Value = serde_json::from_str(json).unwrap();
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
        let error = format!("{:#}", Text::open(&path, &config(270), 129).err().unwrap());
        assert!(error.contains("texts of 129 tokens (--max-tokens) are longer than the 128"), "{error}");

        let whole = std::fs::read_to_string(&path).unwrap();
        let mut json: Value = serde_json::from_str(&whole).unwrap();
        json["post_processor"] = Value::Null;
        std::fs::write(&path, json.to_string()).unwrap();
        let error = refused(&config(270));
        assert!(error.contains("it does not put <s> before a text and </s> behind it"), "{error}");
        for cut in [1, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let error = refused(&config(270));
            assert!(error.contains("tokenizer.json is no tokenizer"), "{error}");
        }
        std::fs::write(&path, "").unwrap();
        let error = refused(&config(270));
        assert!(error.contains("tokenizer.json cannot be used: it is empty"), "{error}");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(folder.path().join("vocab.json"), "{}").unwrap();
        let error = refused(&config(270));
        assert!(error.contains("vocab.json alone is not read") && error.contains("AutoTokenizer"), "{error}");
        assert!(train_byte_level(TEXTS.into_iter(), 200, &path).is_err());
    }

    #[test]
    fn rows_without_a_token_are_refused_unless_they_fill_a_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        train_byte_level(TEXTS.into_iter(), 270, &path).unwrap();
        let check = |rows| Text::open(&path, &config(rows), 128).unwrap().check_unused();
        for rows in [270, 272, 288, 320, 512] {
            check(rows).unwrap();
        }
        for rows in [271, 280, 300, 1024] {
            let error = check(rows).unwrap_err().to_string();
            let expected =
                format!("the tokenizer has 270 tokens, and the model rows for {rows} (vocab_size)");
            assert!(error.contains(&expected) && error.contains("--allow-unused-tokens"), "{error}");
        }
    }

    #[test]
    fn a_tokenizer_config_that_contradicts_the_tokenizer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        train_byte_level(TEXTS.into_iter(), 270, &path).unwrap();
        let beside = folder.path().join("tokenizer_config.json");
        std::fs::write(&beside, r#"{"add_prefix_space": false, "do_lower_case": true}"#).unwrap();
        Text::open(&path, &config(270), 128).unwrap();
        std::fs::write(&beside, r#"{"add_prefix_space": true}"#).unwrap();
        let error = format!("{:#}", Text::open(&path, &config(270), 128).err().unwrap());
        assert!(
            error.contains("add_prefix_space is true, and add_prefix_space of the pre_tokenizer false"),
            "{error}"
        );
        // What it says is not known.
        std::fs::remove_file(&beside).unwrap();
        std::os::unix::fs::symlink("nowhere", &beside).unwrap();
        let error = format!("{:#}", Text::open(&path, &config(270), 128).err().unwrap());
        assert!(error.contains("tokenizer_config.json: it is a link that leads nowhere"), "{error}");
    }

    /// SentencePiece's unigrams, as XLM-RoBERTa has them: of all ways to cut a text the one with the largest sum of scores is right.
    #[test]
    fn unigrams_are_cut_as_their_scores_say() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let special = |id: u32, content: &str| {
            serde_json::json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            })
        };
        let scores = [
            ("<s>", 0.0),
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            ("\u{2581}", -3.0),
            ("a", -4.0),
            ("b", -4.0),
            ("ab", -6.0),
            ("\u{2581}a", -4.5),
            ("\u{2581}ab", -9.0),
            ("ba", -9.0),
            ("<mask>", 0.0),
        ];
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [special(0, "<s>"), special(1, "<pad>"), special(2, "</s>"), special(3, "<unk>"), special(11, "<mask>")],
            "normalizer": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": "</s>", "type_id": 0}}
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {
                    "<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]},
                    "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
                }
            },
            "decoder": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
            "model": {"type": "Unigram", "unk_id": 3, "vocab": scores, "byte_fallback": false}
        });
        std::fs::write(&path, json.to_string()).unwrap();
        let config = Config { model_type: Family::XlmRoberta, ..config(12) };
        let text = Text::open(&path, &config, 128).unwrap();
        text.check_unused().unwrap();
        let tokens = |sample| text.encode(sample).unwrap().tokens;
        // "_a b" -8.5 is better than "_ab" and "_ ab", both -9.
        assert_eq!(tokens("ab"), [0, 8, 6, 2]);
        // "_ ba" -12 is worse than "_ b a" -11.
        assert_eq!(tokens("ba"), [0, 4, 6, 5, 2]);
        // "_a" -4.5, and "_ b ab" -13 rather than "_ ba b" -16 or "_ b a b" -15.
        assert_eq!(tokens("a bab"), [0, 8, 4, 6, 7, 2]);
        assert_eq!(tokens("c"), [0, 4, 3, 2]);
        assert_eq!(text.mask(), 11);
        assert!(text.is_special(11) && !text.is_special(5));
    }
}
