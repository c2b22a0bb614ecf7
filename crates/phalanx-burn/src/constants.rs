//! The numbers of Burn's layers that are no tensors, such as the epsilon of a norm and the probability of a dropout.
//!
//! Nothing that a module gives has them, but every module can be debugged, and what derived code shows of it has them under the names of its structs and
//! fields; parameters show their ids there, and no elements. Ranks compare those of some of Burn's layers alone: what a program's own structs have may be
//! each rank's own. What a program's own `Debug` shows may be anything: it can hide numbers, and nothing is an error.

use std::fmt::{self, Debug, Write};

use phalanx::{Error, Rank, Result};

/// Layers of Burn and of this crate, with those of their numbers that must be the same on every rank, and that no shape shows. A struct of a program's own
/// may have a layer's name, with other fields.
const LAYERS: [(&str, &[&str]); 13] = [
    ("BatchNorm", &["momentum", "epsilon"]),
    ("CrossAttention", &["n_heads", "n_heads_kv", "scale", "min_float", "quiet_softmax"]),
    ("Dropout", &["prob"]),
    ("GroupNorm", &["num_groups", "epsilon"]),
    ("InstanceNorm", &["epsilon"]),
    ("LayerNorm", &["epsilon"]),
    ("LeakyRelu", &["negative_slope"]),
    ("LocalResponseNorm", &["size", "alpha", "beta", "k"]),
    ("MultiHeadAttention", &["n_heads", "min_float", "quiet_softmax"]),
    ("RmsNorm", &["epsilon"]),
    ("SyncBatchNorm", &["momentum", "epsilon"]),
    ("TransformerDecoderLayer", &["norm_first"]),
    ("TransformerEncoderLayer", &["norm_first"]),
];
/// The most characters of a name or a number.
const LONGEST: usize = 64;
/// The most numbers of a model that are compared.
const MOST: usize = 4096;

/// The numbers and truth values of the layers of `model`, by names that say where they are.
pub(crate) fn of(model: &impl Debug) -> Vec<(String, String)> {
    let mut scan = Scan::default();
    // Only a `Debug` of the program's own can fail.
    let _shown = write!(scan, "{model:?}");
    scan.found
}

/// The probability of the first dropout among these numbers that drops anything.
pub(crate) fn dropout(numbers: &[(String, String)]) -> Option<&str> {
    let drops = |(name, value): &&(String, String)| {
        name.starts_with("`prob` of Dropout ") && value.parse::<f64>().is_ok_and(|prob| prob > 0.0)
    };
    numbers.iter().find(drops).map(|(_, value)| value.as_str())
}

/// An error if the models of these ranks, `all` of a group, compute with other numbers than that of rank 0. All find the same.
pub(crate) fn check(all: &[Vec<(String, String)>]) -> Result<()> {
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (rank, other) in (1..).map(Rank::new).zip(others) {
        if let Some(cause) = difference(("rank 0", first), (&format!("rank {rank}"), other)) {
            return Err(Error::mismatch(format!("the models compute with other numbers: {cause}"))
                .with_peer(rank)
                .with_remedy("build the same model on every rank"));
        }
    }
    Ok(())
}

/// The first number that differs between two models, with both sides, for people.
pub(crate) fn difference(
    (here, one): (&str, &[(String, String)]),
    (there, other): (&str, &[(String, String)]),
) -> Option<String> {
    let place = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    if place == one.len().max(other.len()) {
        return None;
    }
    let shown = |numbers: &[(String, String)]| {
        numbers.get(place).map_or_else(|| "none".to_owned(), |(name, value)| format!("{name} {value}"))
    };
    let (one, other) = (shown(one), shown(other));
    Some(format!("number {} of the layers is {one} on {here}, and {other} on {there}", place + 1))
}

/// Reads what derived code shows of a value, and keeps nothing but the numbers.
#[derive(Default)]
struct Scan {
    found: Vec<(String, String)>,
    /// The names of the structs, and of other brackets, on the way.
    open: Vec<Open>,
    layers: usize,
    /// What is being read.
    word: String,
    /// The word before.
    last: String,
    /// Whether the next word is the name of a field, and whether this one is.
    begins_field: bool,
    is_field: bool,
    /// The field whose value comes.
    field: Option<String>,
    /// Whether this is within quotes, and behind a backslash there.
    is_text: bool,
    is_escaped: bool,
}

struct Open {
    name: String,
    /// Of a layer: which one it is, and the names of its numbers.
    layer: Option<(usize, &'static [&'static str])>,
}

impl Scan {
    fn read(&mut self, character: char) {
        if self.is_text {
            self.is_text = self.is_escaped || character != '"';
            self.is_escaped = !self.is_escaped && character == '\\';
            return;
        }
        // Behind a single quote there may be a quote or a bracket, which is none.
        if self.word == "'" {
            self.word.push(character);
            return;
        }
        match character {
            '"' => self.is_text = true,
            ':' => {
                let word = std::mem::take(&mut self.word);
                self.field = std::mem::take(&mut self.is_field).then_some(word);
            }
            '{' | '(' | '[' => {
                let name = if self.word.is_empty() { &mut self.last } else { &mut self.word };
                let name = std::mem::take(name);
                let numbers = LAYERS.iter().find(|(layer, _)| character == '{' && *layer == name);
                self.layers += usize::from(numbers.is_some());
                let layer = numbers.map(|(_, numbers)| (self.layers, *numbers));
                self.open.push(Open { name, layer });
                (self.field, self.begins_field) = (None, character == '{');
                self.last.clear();
            }
            ' ' | ',' | '}' | ')' | ']' => {
                self.end_word();
                if matches!(character, '}' | ')' | ']') {
                    self.open.pop();
                }
                self.begins_field |= character == ',';
            }
            character => {
                if self.word.is_empty() {
                    self.is_field = std::mem::take(&mut self.begins_field);
                }
                if self.word.len() < LONGEST {
                    self.word.push(character);
                }
            }
        }
    }

    fn end_word(&mut self) {
        if self.word.is_empty() {
            return;
        }
        self.last = std::mem::take(&mut self.word);
        let Some(field) = self.field.take() else { return };
        let Some(Open { name, layer: Some((layer, numbers)) }) = self.open.last() else { return };
        let is_number = self.last.parse::<f64>().is_ok() || self.last.parse::<bool>().is_ok();
        if is_number && numbers.contains(&field.as_str()) && self.found.len() < MOST {
            let name = format!("`{field}` of {name} (layer {layer} of those with such numbers)");
            self.found.push((name, self.last.clone()));
        }
    }
}

impl Write for Scan {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().for_each(|character| self.read(character));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{Module, ParamId};
    use burn::nn::attention::{CrossAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig};
    use burn::nn::transformer::{TransformerDecoderConfig, TransformerEncoderConfig};
    use burn::nn::{
        BatchNorm, BatchNormConfig, Dropout, DropoutConfig, GroupNormConfig, InstanceNormConfig, LayerNorm,
        LayerNormConfig, LeakyReluConfig, LocalResponseNormConfig, RmsNormConfig,
    };
    use burn::tensor::Device;
    use phalanx::ProcessGroup;

    use super::*;
    use crate::SyncBatchNorm;

    mod own {
        /// Of each rank's own.
        #[derive(Clone, Debug)]
        #[allow(dead_code, reason = "it is shown")]
        pub struct Dropout {
            pub seed: u64,
        }
    }

    #[derive(Module, Debug)]
    struct Net {
        /// The program's own, which are not compared.
        #[module(skip)]
        name: String,
        #[module(skip)]
        quotes: [char; 3],
        #[module(skip)]
        own: own::Dropout,
        epsilon: f64,
        layers: Vec<Layer>,
        attention: MultiHeadAttention,
        last: Option<BatchNorm>,
    }

    #[derive(Module, Debug)]
    struct Layer {
        norm: LayerNorm,
        dropout: Dropout,
    }

    fn net(dropout: f64, epsilon: f64, heads: usize) -> Net {
        let device = Device::flex().autodiff();
        let layer = |prob| Layer {
            norm: LayerNormConfig::new(8).with_epsilon(epsilon).init(&device),
            dropout: DropoutConfig::new(prob).init(),
        };
        Net {
            name: "a \"{ BatchNorm { epsilon: 1".to_owned(),
            quotes: ['"', '{', '\''],
            own: own::Dropout { seed: ParamId::new().val() },
            epsilon: 7.0,
            layers: vec![layer(0.1), layer(dropout)],
            attention: MultiHeadAttentionConfig::new(8, heads).init(&device),
            last: Some(BatchNormConfig::new(8).with_momentum(0.25).init(&device)),
        }
    }

    #[test]
    fn numbers_of_burn_s_layers_are_found_and_nothing_that_is_each_rank_s_own() {
        let found = of(&net(0.5, 1e-5, 2));
        // Each has ids of its own.
        assert_eq!(found, of(&net(0.5, 1e-5, 2)));
        let has = |field: &str, layer: &str, value: &str| {
            found.iter().any(|(name, other)| {
                name.starts_with(&format!("`{field}` of {layer} (layer ")) && value == other
            })
        };
        let expected = [
            ("epsilon", "LayerNorm", "1e-5"),
            ("prob", "Dropout", "0.1"),
            ("prob", "Dropout", "0.5"),
            ("n_heads", "MultiHeadAttention", "2"),
            ("momentum", "BatchNorm", "0.25"),
        ];
        assert!(expected.iter().all(|(field, layer, value)| has(field, layer, value)), "{found:?}");
        assert!(found.iter().all(|(_, value)| !["7", "7.0", "1"].contains(&value.as_str())), "{found:?}");
        let mut names: Vec<_> = found.iter().map(|(name, _)| name).collect();
        names.dedup();
        assert_eq!(names.len(), found.len(), "{found:?}");
    }

    #[test]
    fn each_number_that_differs_shows() {
        let own = of(&net(0.5, 1e-5, 2));
        for other in [net(0.4, 1e-5, 2), net(0.5, 1e-6, 2), net(0.5, 1e-5, 4)] {
            let other = of(&other);
            assert_eq!(own.len(), other.len());
            assert_ne!(own, other);
        }
    }

    #[test]
    fn layers_have_numbers_of_the_names_that_are_compared() {
        let device = Device::flex().autodiff();
        let norm = BatchNormConfig::new(8).init(&device);
        let norms = (
            SyncBatchNorm::new(norm.clone(), &ProcessGroup::alone().unwrap()),
            norm,
            GroupNormConfig::new(2, 8).init(&device),
            InstanceNormConfig::new(8).init(&device),
            LocalResponseNormConfig::new(3).init(),
            RmsNormConfig::new(8).init(&device),
        );
        // They have norms, dropouts and attentions.
        let encoder = TransformerEncoderConfig::new(8, 16, 2, 1).init(&device);
        let decoder = TransformerDecoderConfig::new(8, 16, 2, 1).init(&device);
        let attention = CrossAttentionConfig::new(8, 8, 2, 2, 4).init(&device);
        let found = of(&(norms, encoder, decoder, attention, LeakyReluConfig::new().init()));
        for (layer, numbers) in LAYERS {
            for number in numbers {
                let name = format!("`{number}` of {layer} (layer ");
                assert!(found.iter().any(|(other, _)| other.starts_with(&name)), "{name}: {found:?}");
            }
        }
    }

    #[test]
    fn what_is_compared_has_an_end() {
        let many: Vec<Dropout> = vec![DropoutConfig::new(0.5).init(); 2 * MOST];
        assert_eq!(of(&many).len(), MOST);
    }
}
