//! The settings of Burn's layers that are no tensors, such as the epsilon of a norm, the probability of a dropout and the stride of a convolution.
//!
//! Nothing that a module gives has them, but every module can be debugged, and what derived code shows of it has them under the names of its structs and
//! fields; parameters show their ids there, and no elements. Ranks compare those of some of Burn's layers alone: what a program's own structs have may be
//! each rank's own. What a program's own `Debug` shows may be anything: it can hide settings, and nothing is an error.

use std::fmt::{self, Debug, Write};

use phalanx::{Error, Rank, Result};

/// Layers of Burn and of this crate, with those of their settings that must be the same on every rank, and that no shape shows. A struct of a program's
/// own may have a layer's name, with other fields.
const LAYERS: &[(&str, &[&str])] = &[
    ("AdaptiveAvgPool1d", &["output_size"]),
    ("AdaptiveAvgPool2d", &["output_size"]),
    ("AdaptiveAvgPool3d", &["output_size"]),
    ("AvgPool1d", AVG_POOL),
    ("AvgPool2d", AVG_POOL),
    ("BatchNorm", &["momentum", "epsilon"]),
    ("BiGru", &["batch_first"]),
    ("BiLstm", &["batch_first"]),
    ("BiRnn", &["batch_first"]),
    ("Celu", &["alpha"]),
    ("Conv1d", CONV),
    ("Conv2d", CONV),
    ("Conv3d", CONV),
    ("ConvTranspose1d", CONV_TRANSPOSE),
    ("ConvTranspose2d", CONV_TRANSPOSE),
    ("ConvTranspose3d", CONV_TRANSPOSE),
    ("CrossAttention", &["n_heads", "n_heads_kv", "scale", "min_float", "quiet_softmax"]),
    ("DeformConv2d", &["stride", "dilation", "weight_groups", "offset_groups", "padding"]),
    ("Dropout", &["prob"]),
    ("Elu", &["alpha"]),
    ("Fold4d", &["output_size", "kernel_size", "stride", "dilation", "padding"]),
    ("GLU", &["dim"]),
    ("GaussianNoise", &["std"]),
    ("Gelu", &["approximate"]),
    ("GroupNorm", &["num_groups", "epsilon"]),
    ("Gru", &["reset_after", "gate_activation", "hidden_activation", "clip"]),
    ("HardShrink", &["lambda"]),
    ("HardSigmoid", &["alpha", "beta"]),
    ("Hardtanh", &["min_val", "max_val"]),
    ("InstanceNorm", &["epsilon"]),
    ("Interpolate1d", INTERPOLATE),
    ("Interpolate2d", INTERPOLATE),
    ("LayerNorm", &["epsilon"]),
    ("LeakyRelu", &["negative_slope"]),
    ("LocalResponseNorm", &["size", "alpha", "beta", "k"]),
    (
        "Lstm",
        &[
            "batch_first",
            "reverse",
            "clip",
            "input_forget",
            "gate_activation",
            "cell_activation",
            "hidden_activation",
        ],
    ),
    ("MaxPool1d", MAX_POOL),
    ("MaxPool2d", MAX_POOL),
    ("MultiHeadAttention", &["n_heads", "min_float", "quiet_softmax"]),
    ("PixelShuffle", &["upscale_factor"]),
    ("PixelUnshuffle", &["downscale_factor"]),
    ("PositionWiseFeedForward", &["activation"]),
    ("PositionalEncoding", &["max_timescale"]),
    ("RRelu", &["lower", "upper"]),
    ("RmsNorm", &["epsilon"]),
    ("Rnn", &["batch_first", "reverse", "clip", "hidden_activation"]),
    ("Shrink", &["lambda", "bias"]),
    ("SoftShrink", &["lambda"]),
    ("Softplus", &["beta", "threshold"]),
    ("SyncBatchNorm", &["momentum", "epsilon"]),
    ("Threshold", &["threshold", "value"]),
    ("ThresholdedRelu", &["alpha"]),
    ("TransformerDecoderLayer", &["norm_first"]),
    ("TransformerEncoderLayer", &["norm_first"]),
    ("Unfold4d", &["kernel_size", "stride", "dilation", "padding"]),
];
const AVG_POOL: &[&str] = &["stride", "kernel_size", "padding", "count_include_pad", "ceil_mode"];
const CONV: &[&str] = &["stride", "dilation", "groups", "padding"];
const CONV_TRANSPOSE: &[&str] = &["stride", "dilation", "groups", "padding", "padding_out"];
const INTERPOLATE: &[&str] = &["output_size", "scale_factor", "mode", "align_corners"];
const MAX_POOL: &[&str] = &["stride", "kernel_size", "padding", "dilation", "ceil_mode"];
/// The most characters of a name or a setting.
const LONGEST: usize = 64;
/// The most settings of a model that are compared.
const MOST: usize = 4096;

/// The settings of the layers of `model`, by names that say where they are.
pub(crate) fn of(model: &impl Debug) -> Vec<(String, String)> {
    let mut scan = Scan::default();
    // Only a `Debug` of the program's own can fail.
    let _shown = write!(scan, "{model:?}");
    scan.found
}

/// The probability of the first dropout among these settings that drops anything.
pub(crate) fn dropout(settings: &[(String, String)]) -> Option<&str> {
    let drops = |(name, value): &&(String, String)| {
        name.starts_with("`prob` of Dropout ") && value.parse::<f64>().is_ok_and(|prob| prob > 0.0)
    };
    settings.iter().find(drops).map(|(_, value)| value.as_str())
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

/// Reads what derived code shows of a value, and keeps nothing but the settings.
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
    /// The setting that is being read.
    setting: Option<Setting>,
    /// Whether this is within quotes, and behind a backslash there.
    is_text: bool,
    is_escaped: bool,
}

struct Open {
    name: String,
    /// Of a layer: which one it is, and the names of its settings.
    layer: Option<(usize, &'static [&'static str])>,
}

struct Setting {
    name: String,
    value: String,
    /// How many brackets are open around it.
    depth: usize,
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
        self.read_setting(character);
        match character {
            '"' => self.is_text = true,
            ':' => {
                let word = std::mem::take(&mut self.word);
                if std::mem::take(&mut self.is_field) {
                    self.begin_setting(&word);
                }
            }
            '{' | '(' | '[' => {
                let name = if self.word.is_empty() { &mut self.last } else { &mut self.word };
                let name = std::mem::take(name);
                let settings = LAYERS.iter().find(|(layer, _)| character == '{' && *layer == name);
                self.layers += usize::from(settings.is_some());
                let layer = settings.map(|(_, settings)| (self.layers, *settings));
                self.open.push(Open { name, layer });
                self.begins_field = character == '{';
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
        if !self.word.is_empty() {
            self.last = std::mem::take(&mut self.word);
        }
    }

    /// The value of a `field` comes.
    fn begin_setting(&mut self, field: &str) {
        let depth = self.open.len();
        let Some(Open { name, layer: Some((layer, settings)) }) = self.open.last() else { return };
        if settings.contains(&field) && self.found.len() < MOST {
            let name = format!("`{field}` of {name} (layer {layer} of those with such numbers)");
            self.setting = Some(Setting { name, value: String::new(), depth });
        }
    }

    /// The value goes on with this character, or is over. Of a struct it has the name alone: a layer's settings follow.
    fn read_setting(&mut self, character: char) {
        let Some(setting) = &mut self.setting else { return };
        let ends_field = matches!(character, ',' | '}') && self.open.len() == setting.depth;
        if character != '{' && !ends_field {
            if setting.value.len() < LONGEST {
                setting.value.push(character);
            }
            return;
        }
        let Some(Setting { name, value, .. }) = self.setting.take() else { return };
        // `Gelu(Gelu {` is a Gelu.
        let end = if character == '{' { value.find('(') } else { None };
        let value = value[..end.unwrap_or(value.len())].trim();
        if is_setting(value) {
            self.found.push((name, value.to_owned()));
        }
    }
}

/// Whether a value is made of numbers, truth values and names of types and variants, and so the same in every process.
fn is_setting(value: &str) -> bool {
    let is_name = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_uppercase())
            && word.chars().all(|character| character.is_ascii_alphanumeric())
    };
    let is_fixed = |word: &str| word.parse::<f64>().is_ok() || word.parse::<bool>().is_ok() || is_name(word);
    let mut words = value.split([' ', ',', '(', ')', '[', ']']).filter(|word| !word.is_empty());
    !value.is_empty() && words.all(is_fixed)
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
    use burn::nn::activation::{
        ActivationConfig, CeluConfig, EluConfig, GLU, HardShrinkConfig, HardSigmoidConfig, HardtanhConfig,
        LeakyReluConfig, RReluConfig, ShrinkConfig, SoftShrinkConfig, SoftplusConfig, ThresholdConfig,
        ThresholdedReluConfig,
    };
    use burn::nn::attention::{CrossAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig};
    use burn::nn::conv::{
        Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
        ConvTranspose3dConfig, DeformConv2dConfig,
    };
    use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig};
    use burn::nn::pool::{
        AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
        AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
    };
    use burn::nn::transformer::{TransformerDecoderConfig, TransformerEncoderConfig};
    use burn::nn::{
        BatchNorm, BatchNormConfig, BiGruConfig, BiLstmConfig, BiRnnConfig, Dropout, DropoutConfig,
        Fold4dConfig, GaussianNoiseConfig, GroupNormConfig, InstanceNormConfig, LayerNorm, LayerNormConfig,
        LocalResponseNormConfig, LstmConfig, PaddingConfig2d, PixelShuffleConfig, PixelUnshuffleConfig,
        PositionalEncodingConfig, RmsNormConfig, Unfold4dConfig,
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
    fn a_setting_of_several_numbers_or_words_is_one() {
        let device = Device::flex().autodiff();
        let conv = Conv2dConfig::new([2, 2], [3, 3]).with_stride([2, 1]);
        let conv = conv.with_padding(PaddingConfig2d::Explicit(0, 1, 2, 3)).init(&device);
        let lstm = LstmConfig::new(2, 2, true).with_clip(Some(5.0));
        let lstm = lstm.with_hidden_activation(ActivationConfig::GeluApproximate).init(&device);
        let found = of(&(conv, lstm));
        let expected = [
            ("`stride` of Conv2d (layer 1 ", "[2, 1]"),
            ("`groups` of Conv2d (layer 1 ", "1"),
            ("`padding` of Conv2d (layer 1 ", "Explicit(0, 1, 2, 3)"),
            ("`clip` of Lstm (layer 2 ", "Some(5.0)"),
            ("`gate_activation` of Lstm (layer 2 ", "Sigmoid(Sigmoid)"),
            // Its own settings follow.
            ("`hidden_activation` of Lstm (layer 2 ", "Gelu"),
            ("`approximate` of Gelu (layer 3 ", "true"),
        ];
        for (name, value) in expected {
            let is_it = |(other, found): &(String, String)| other.starts_with(name) && found == value;
            assert!(found.iter().any(is_it), "{name} {value}: {found:?}");
        }
    }

    /// With ids in them, or addresses, they would differ between any two processes.
    #[test]
    fn values_that_are_no_settings_are_left_out() {
        #[derive(Debug)]
        #[allow(dead_code, reason = "it is shown")]
        struct Dropout {
            prob: &'static str,
            rate: own::Dropout,
        }
        for value in ["Param: 12 - ParamMapper", "0x7f00", "\"text\"", "'a'", "", "id"] {
            assert!(!is_setting(value), "{value}");
        }
        for value in ["1", "-1e-5", "NaN", "false", "Valid", "Some([1, 2])"] {
            assert!(is_setting(value), "{value}");
        }
        assert!(of(&Dropout { prob: "{ prob: 1 }", rate: own::Dropout { seed: 1 } }).is_empty());
    }

    #[test]
    fn layers_have_settings_of_the_names_that_are_compared() {
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
        // They have norms, dropouts, attentions and feed-forward layers.
        let transformers = (
            TransformerEncoderConfig::new(8, 16, 2, 1).init(&device),
            TransformerDecoderConfig::new(8, 16, 2, 1).init(&device),
            CrossAttentionConfig::new(8, 8, 2, 2, 4).init(&device),
            PositionalEncodingConfig::new(4).with_max_sequence_size(8).init(&device),
        );
        let convolutions = (
            Conv1dConfig::new(2, 2, 3).init(&device),
            Conv2dConfig::new([2, 2], [3, 3]).init(&device),
            Conv3dConfig::new([2, 2], [3, 3, 3]).init(&device),
            ConvTranspose1dConfig::new([2, 2], 3).init(&device),
            ConvTranspose2dConfig::new([2, 2], [3, 3]).init(&device),
            ConvTranspose3dConfig::new([2, 2], [3, 3, 3]).init(&device),
            DeformConv2dConfig::new([2, 2], [3, 3]).init(&device),
        );
        let pools = (
            AdaptiveAvgPool1dConfig::new(2).init(),
            AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            AdaptiveAvgPool3dConfig::new([2, 2, 2]).init(),
            AvgPool1dConfig::new(2).init(),
            AvgPool2dConfig::new([2, 2]).init(),
            MaxPool1dConfig::new(2).init(),
            MaxPool2dConfig::new([2, 2]).init(),
        );
        let shapes = (
            Fold4dConfig::new([4, 4], [2, 2]).init(),
            Unfold4dConfig::new([2, 2]).init(),
            Interpolate1dConfig::new().init(),
            Interpolate2dConfig::new().init(),
            PixelShuffleConfig::new(2).init(),
            PixelUnshuffleConfig::new(2).init(),
            GaussianNoiseConfig::new(0.1).init(),
        );
        // They have those of one direction.
        let recurrent = (
            BiGruConfig::new(2, 2, true).init(&device),
            BiLstmConfig::new(2, 2, true).init(&device),
            BiRnnConfig::new(2, 2, true).init(&device),
        );
        // The feed-forward layers have Gelu.
        let activations = (
            CeluConfig::new().init(),
            EluConfig::new().init(),
            HardShrinkConfig::new().init(),
            HardSigmoidConfig::new().init(),
            HardtanhConfig::new().init(),
            LeakyReluConfig::new().init(),
            RReluConfig::new().init(),
            ShrinkConfig::new().init(),
            SoftShrinkConfig::new().init(),
            SoftplusConfig::new().init(),
            (ThresholdConfig::new(0.1, 0.0).init(), ThresholdedReluConfig::new().init(), GLU::new(1)),
        );
        let all = (norms, transformers, convolutions, pools, shapes, recurrent, activations);
        let found = of(&all);
        for (layer, settings) in LAYERS.iter().copied() {
            for setting in settings {
                let name = format!("`{setting}` of {layer} (layer ");
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
