//! Which tokens a masked language model must guess.

use rand_mt::Mt64;

use crate::inputs::Encoded;
use crate::text::Text;

/// The share of tokens to guess.
const GUESSED: f64 = 0.15;

/// A text with some tokens replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Masked {
    /// The text as the model sees it.
    pub text: Encoded,
    /// Where a token is to be guessed.
    pub places: Vec<usize>,
    /// Which token it is, for each of `places`.
    pub targets: Vec<u32>,
}

/// Chooses 15 % of the tokens, and at least one: 80 % of these become the mask, 10 % any token, and 10 % stay. They are chosen anew
/// for each `seed`: RoBERTa's dynamic masking. Those at the ends of a text are never chosen.
///
/// A text without any other token has none to guess.
pub fn mask(original: &Encoded, text: &Text, seed: u64) -> Masked {
    let mut random = Mt64::new(seed);
    let mut chance = move || (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    let candidates: Vec<usize> =
        (0..original.tokens.len()).filter(|&place| !text.is_special(original.tokens[place])).collect();
    let mut places: Vec<usize> = candidates.iter().copied().filter(|_| chance() < GUESSED).collect();
    if places.is_empty() && !candidates.is_empty() {
        places.push(candidates[below(candidates.len(), chance())]);
    }
    let mut masked = original.clone();
    for &place in &places {
        match chance() {
            share if share < 0.8 => masked.tokens[place] = text.mask(),
            share if share < 0.9 => masked.tokens[place] = below(text.vocabulary() as usize, chance()) as u32,
            // The rest stays as it is.
            _ => {}
        }
    }
    let targets = places.iter().map(|&place| original.tokens[place]).collect();
    Masked { text: masked, places, targets }
}

fn below(end: usize, chance: f64) -> usize {
    ((chance * end as f64) as usize).min(end - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::text::train_byte_level;

    fn text() -> Text {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        train_byte_level(["a few words"].into_iter(), 270, &path).unwrap();
        let config = Config::parse(include_str!("../models/tiny-roberta/config.json")).unwrap();
        Text::open(&path, &config, 128).unwrap()
    }

    #[test]
    fn fifteen_percent_are_to_be_guessed_and_eighty_percent_of_these_are_masked() {
        let text = text();
        let tokens: Vec<u32> = [0].into_iter().chain((0..10_000).map(|i| 10 + i % 200)).chain([2]).collect();
        let original = Encoded { types: vec![0; tokens.len()], tokens };
        let masked = mask(&original, &text, 1);
        let guessed = masked.places.len() as f64 / 10_000.0;
        assert!((guessed - 0.15).abs() < 0.02, "{guessed}");
        let share = |is: &dyn Fn(usize) -> bool| {
            masked.places.iter().filter(|place| is(**place)).count() as f64 / masked.places.len() as f64
        };
        let hidden = share(&|place| masked.text.tokens[place] == text.mask());
        let kept = share(&|place| masked.text.tokens[place] == original.tokens[place]);
        assert!((hidden - 0.8).abs() < 0.05 && (kept - 0.1).abs() < 0.04, "{hidden} {kept}");
        assert!(!masked.places.contains(&0) && !masked.places.contains(&10_001));
        for (place, token) in
            masked.text.tokens.iter().enumerate().filter(|(place, _)| !masked.places.contains(place))
        {
            assert_eq!(*token, original.tokens[place]);
        }
        assert_eq!(mask(&original, &text, 1), masked);
        assert_ne!(mask(&original, &text, 2), masked);
    }

    #[test]
    fn a_short_text_has_one_token_to_guess_and_an_empty_one_none() {
        let text = text();
        for seed in 0..50 {
            let short = Encoded { tokens: vec![0, 70, 2], types: vec![0; 3] };
            assert_eq!(
                (mask(&short, &text, seed).places, mask(&short, &text, seed).targets),
                (vec![1], vec![70])
            );
            let empty = Encoded { tokens: vec![0, 2], types: vec![0; 2] };
            assert_eq!(mask(&empty, &text, seed).places, Vec::<usize>::new());
        }
    }
}
