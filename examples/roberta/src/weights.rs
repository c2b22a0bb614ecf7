//! Hugging Face's safetensors files: the same names and shapes, so that `transformers` reads what is written here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{DType, Shape};
use burn_store::{
    BurnToPyTorchAdapter, FloatCastAdapter, KeyRemapper, ModuleAdapter, ModuleContext, ModuleSnapshot,
    ModuleStore, PyTorchToBurnAdapter, SafetensorsStore, bridge,
};

use crate::config::Family;
use crate::files;

/// What a file had, and what it had not.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Tensors of heads that are not in the file, and keep their random weights.
    pub new: Vec<String>,
    /// Tensors of the file for which this model has no use, such as another head's.
    pub ignored: Vec<String>,
}

/// Gives `model` the weights of a file, or of the files that an index names. See [`Weights`].
///
/// # Errors
/// As [`Weights::open`] and [`Weights::load`].
pub fn load<M: ModuleSnapshot>(model: &mut M, family: Family, path: &Path) -> Result<Loaded> {
    Weights::open(path)?.load(model, family, Head::Kept)
}

/// Whether a model takes the classification head that a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// It does.
    Kept,
    /// It begins with random weights, as `--new-head` says.
    New,
}

/// The tensors that `transformers` or [`save`] has written, by their names in the file. Their elements are read when they are needed.
pub struct Weights {
    /// The file, or the index.
    path: PathBuf,
    /// Each with the file that has it.
    tensors: BTreeMap<String, (PathBuf, burn_pack::Tensor)>,
}

impl Weights {
    /// The weights in a model's folder: `model.safetensors`, or else the files that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// If the folder has neither, as [`open`](Self::open). An error names weights of another format, and how to convert them.
    pub fn find(folder: &Path) -> Result<Self> {
        let [single, index] = [SINGLE, INDEX].map(|name| folder.join(name));
        if files::is_there(&single) || !files::is_there(&index) {
            if !files::is_there(&single)
                && let Some((name, remedy)) =
                    OTHER_FORMATS.iter().find(|(name, _)| folder.join(name).exists())
            {
                bail!("{} has no {SINGLE}, and {name} is not read: {remedy}", folder.display());
            }
            return Self::open(&single);
        }
        Self::open(&index)
    }

    /// The tensors of a safetensors file, or of those that an index, a JSON file, names.
    ///
    /// # Errors
    /// If a file is missing, empty, cut off, of another format or otherwise damaged, or the files do not have what the index says.
    pub fn open(path: &Path) -> Result<Self> {
        let tensors = if path.extension().is_some_and(|extension| extension == "json") {
            indexed(path)
        } else {
            tensors_of(path).map(|tensors| with_file(path, tensors).collect())
        };
        let tensors = tensors.with_context(|| cannot_load(path))?;
        Ok(Self { path: path.to_owned(), tensors })
    }

    /// The last layer of the classification head: its name, and its rows, of which each scores a label. None without a head.
    pub fn head(&self, family: Family) -> Option<(&str, usize)> {
        let name = match family {
            Family::Roberta | Family::XlmRoberta => "classifier.out_proj.weight",
            Family::Bert => "classifier.weight",
        };
        let (name, (_, tensor)) = self.tensors.get_key_value(name)?;
        Some((name, tensor.shape.first().copied().unwrap_or(0)))
    }

    /// Gives them to `model`, a [`MaskedLm`](crate::MaskedLm) or [`Classifier`](crate::Classifier). Those of the encoder alone will do: a
    /// head that is not there stays as it is, and so does the one for classification with [`Head::New`]. The names `gamma` and `beta` of
    /// older BERT files are understood, and types other than f32 are converted.
    ///
    /// # Errors
    /// If a tensor of the encoder is missing, or a head is there in part; if a tensor has another shape than `model`'s, elements that are not
    /// finite, or a name that no model of this family has. The error names the tensor. The model is as it was then.
    pub fn load<M: ModuleSnapshot>(&self, model: &mut M, family: Family, head: Head) -> Result<Loaded> {
        let expected = expected(model, family)?;
        let (mut found, mut loaded) = (BTreeMap::new(), Loaded::default());
        for (file_name, (path, tensor)) in &self.tensors {
            let name = full_name(file_name, family);
            let taken = expected.get(&name).filter(|_| head == Head::Kept || !is_classification(&name));
            let taken = match taken {
                Some((module_path, shape)) => {
                    fitting(file_name, tensor, shape, is_classification(&name)).map(|()| Some(module_path))
                }
                None => check_other(file_name, &name, tensor, family).map(|()| None),
            };
            let Some(module_path) = taken.with_context(|| cannot_load(path))? else {
                loaded.ignored.push(file_name.clone());
                continue;
            };
            let mut tensor = tensor.clone();
            tensor.name = module_path.clone();
            ensure!(
                found.insert(name.clone(), tensor).is_none(),
                "{}: {name} is there twice, under two names",
                cannot_load(path)
            );
        }
        self.check_tied(family).with_context(|| cannot_load(&self.path))?;
        loaded.new = missing(&expected, &found, family).with_context(|| cannot_load(&self.path))?;

        let adapter = FloatCastAdapter::to(DType::F32).chain(Linears(PyTorchToBurnAdapter));
        let applied = model.apply(found.into_values().collect(), None, Some(Box::new(adapter)), false);
        if let Some(error) = applied.errors.first() {
            bail!("{}: {error}", cannot_load(&self.path));
        }
        ensure!(
            applied.unused.is_empty(),
            "{}: tensors without a place in the model: {:?}",
            cannot_load(&self.path),
            applied.unused
        );
        Ok(loaded)
    }

    /// Decoders that files repeat must be the token embedding, or the model here would not be theirs.
    fn check_tied(&self, family: Family) -> Result<()> {
        let (head, embedding) = match family {
            Family::Roberta | Family::XlmRoberta => ("lm_head", "roberta.embeddings.word_embeddings.weight"),
            Family::Bert => ("cls.predictions", "bert.embeddings.word_embeddings.weight"),
        };
        let pairs = [
            (format!("{head}.decoder.weight"), embedding.to_owned()),
            (format!("{head}.decoder.bias"), format!("{head}.bias")),
        ];
        for (decoder, original) in pairs {
            if let (Some((_, one)), Some((_, other))) =
                (self.tensors.get(&decoder), self.tensors.get(&original))
            {
                ensure!(
                    one.shape == other.shape && one.to_bytes()? == other.to_bytes()?,
                    "{decoder} is not {original}: this model has one tensor for both"
                );
            }
        }
        Ok(())
    }
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Weights that are not read, and what to do about it.
const OTHER_FORMATS: [(&str, &str); 7] = [
    ("pytorch_model.bin", CONVERT),
    ("pytorch_model.bin.index.json", CONVERT),
    (
        "adapter_model.safetensors",
        "it is an adapter of PEFT: merge_and_unload() and save_pretrained(folder) write the whole model",
    ),
    (
        "adapter_model.bin",
        "it is an adapter of PEFT: merge_and_unload() and save_pretrained(folder) write the whole model",
    ),
    (
        "tf_model.h5",
        "from_pretrained(folder, from_tf=True).save_pretrained(folder) of transformers 4 writes safetensors",
    ),
    (
        "flax_model.msgpack",
        "from_pretrained(folder, from_flax=True).save_pretrained(folder) of transformers 4 writes safetensors",
    ),
    ("model.onnx", "take the model from which it was exported"),
];
const CONVERT: &str = "it is a pickle, which may run code; transformers writes safetensors, with the class that architectures in config.json \
                       names: BertForSequenceClassification.from_pretrained(folder).save_pretrained(folder)";

fn cannot_load(path: &Path) -> String {
    format!("{} cannot be loaded", path.display())
}

fn with_file(
    path: &Path,
    tensors: BTreeMap<String, burn_pack::Tensor>,
) -> impl Iterator<Item = (String, (PathBuf, burn_pack::Tensor))> {
    tensors.into_iter().map(|(name, tensor)| (name, (path.to_owned(), tensor)))
}

/// The tensors of all files that an index names.
fn indexed(path: &Path) -> Result<BTreeMap<String, (PathBuf, burn_pack::Tensor)>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } =
        serde_json::from_str(&files::read_text(path)?).context("it is no index of safetensors files")?;
    ensure!(!weight_map.is_empty(), "its weight_map names no tensor");
    let names: BTreeSet<&String> = weight_map.values().collect();
    for name in &names {
        let is_plain = Path::new(name).file_name().is_some_and(|file| file == name.as_str());
        ensure!(
            is_plain && name.ends_with(".safetensors"),
            "its weight_map names {name:?}: that is no safetensors file beside it"
        );
    }
    let mut all = BTreeMap::new();
    for name in names {
        let shard = path.with_file_name(name);
        let tensors = tensors_of(&shard).with_context(|| shard.display().to_string())?;
        for tensor in tensors.keys() {
            match weight_map.get(tensor) {
                Some(file) if file == name => {}
                Some(file) => bail!(
                    "{name} has {tensor}, which the index says is in {file}: the files do not belong together"
                ),
                None => bail!(
                    "{name} has {tensor}, which the index does not name: the files do not belong together"
                ),
            }
        }
        all.extend(with_file(&shard, tensors));
    }
    for (tensor, file) in &weight_map {
        ensure!(
            all.contains_key(tensor),
            "{file} has no {tensor}, though the index says so: the files do not belong together"
        );
    }
    Ok(all)
}

/// The tensors of one safetensors file.
fn tensors_of(path: &Path) -> Result<BTreeMap<String, burn_pack::Tensor>> {
    check_file(path)?;
    Ok(SafetensorsStore::from_file(path).get_all_tensors()?.clone())
}

/// The format's limit.
const MAX_HEADER: u64 = 100_000_000;
/// Those that can be converted to f32, and those of buffers.
const TYPES: [&str; 12] =
    ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U8", "BOOL"];

/// Says what is wrong with a file in words that the reader of the format lacks: it is another kind of file, cut off, or longer than its
/// header says.
fn check_file(path: &Path) -> Result<()> {
    let mut file = files::open(path)?;
    let length = file.metadata()?.len();
    let mut start = Vec::new();
    (&mut file).take(files::START as u64).read_to_end(&mut start)?;
    files::check_start(&start)?;
    let cut = |needed: u64| {
        format!(
            "it is cut off: it has {length} bytes, and its header asks for {needed}; copy or download it again"
        )
    };
    let Some(header) = start.first_chunk().map(|length| u64::from_le_bytes(*length)) else { bail!(cut(8)) };
    ensure!(
        header <= MAX_HEADER,
        "it is no safetensors file, or its begin is damaged: that asks for a header of {header} bytes"
    );
    ensure!(header + 8 <= length, cut(header + 8));
    file.seek(SeekFrom::Start(8))?;
    let mut text = Vec::new();
    file.take(header).read_to_end(&mut text)?;
    let header_map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&text).context("its header is damaged, or it is no safetensors file")?;
    let mut end = 0;
    for (name, tensor) in header_map.iter().filter(|(name, _)| *name != "__metadata__") {
        let place = tensor["data_offsets"][1].as_u64();
        end = end.max(place.with_context(|| format!("its header has no place for {name}"))?);
        let dtype = tensor["dtype"].as_str().unwrap_or_default();
        ensure!(
            TYPES.contains(&dtype),
            "{name} has elements of type {dtype:?}: let transformers save the model as float32"
        );
    }
    ensure!(end > 0, "it has no tensor");
    let whole = end.saturating_add(header + 8);
    ensure!(whole <= length, cut(whole));
    ensure!(
        whole == length,
        "{} bytes follow its last tensor: another file was joined to it, or it is damaged",
        length - whole
    );
    Ok(())
}

/// Refuses a tensor that is not what the model has at this place.
fn fitting(name: &str, tensor: &burn_pack::Tensor, shape: &Shape, is_classification: bool) -> Result<()> {
    let remedy = if is_classification { "; --new-head begins with a new head" } else { "" };
    ensure!(
        tensor.shape == *shape,
        "{name} has the shape {:?}, this model's has {:?}{remedy}",
        tensor.shape.as_slice(),
        shape.as_slice()
    );
    ensure!(tensor.dtype.is_float(), "{name} has elements of type {:?}, not floats", tensor.dtype);
    let values = bridge::to_data(tensor)?.convert_dtype(DType::F32);
    let values = values.as_slice::<f32>().map_err(|error| anyhow!("{name}: {error:?}"))?;
    if let Some(place) = values.iter().position(|value| !value.is_finite()) {
        let count = values.iter().filter(|value| !value.is_finite()).count();
        bail!(
            "{name} has {count} of {} elements that are not finite, the first is element {place}: {}; the file is damaged, or the \
             model's training had diverged",
            values.len(),
            values[place]
        );
    }
    Ok(())
}

/// The tensors that keep their random weights: those of heads of which nothing was found.
fn missing<T>(
    expected: &BTreeMap<String, (String, Shape)>,
    found: &BTreeMap<String, T>,
    family: Family,
) -> Result<Vec<String>> {
    let there: BTreeSet<&str> = found.keys().map(|name| part(name, family)).collect();
    let absent: Vec<&String> = expected.keys().filter(|name| !found.contains_key(*name)).collect();
    let needed: Vec<&str> =
        absent.iter().map(|name| name.as_str()).filter(|name| part(name, family) == BACKBONE).collect();
    match needed.as_slice() {
        [] => {}
        [one] => bail!("{one} is missing"),
        [one, others @ ..] => {
            bail!("{one} is missing, and so are {} more, such as {}", others.len(), others[0])
        }
    }
    for name in &absent {
        let part = part(name, family);
        ensure!(!there.contains(part), "{name} is missing, though other tensors of {part} are there");
    }
    Ok(absent.into_iter().cloned().collect())
}

/// Writes the weights of `model` for `transformers`. The file is there whole or not at all.
///
/// # Errors
/// If it cannot be written.
pub fn save<M: ModuleSnapshot>(model: &M, family: Family, path: &Path) -> Result<()> {
    SafetensorsStore::from_file(path)
        .clear_metadata()
        .metadata("format", "pt")
        .overwrite(true)
        .with_to_adapter(Linears(BurnToPyTorchAdapter))
        .remap(names(family)?)
        .collect_from(model)
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// An adapter that takes a layer which may be divided among ranks for the linear layer that it is.
#[derive(Clone)]
struct Linears<A>(A);

impl<A: ModuleAdapter + Clone + 'static> ModuleAdapter for Linears<A> {
    fn adapt(&self, tensor: burn_pack::Tensor, context: ModuleContext<'_>) -> burn_pack::Tensor {
        match context.module_type() {
            Some("Struct:ParallelLinear") => {
                self.0.adapt(tensor, ModuleContext::new(&["Struct:Linear".to_owned()]))
            }
            _ => self.0.adapt(tensor, context),
        }
    }

    fn get_alternative_param_name(&self, name: &str, module_type: &str) -> Option<String> {
        self.0.get_alternative_param_name(name, module_type)
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

/// For each name of a file: the path in the module, and the shape in the file.
fn expected<M: ModuleSnapshot>(model: &M, family: Family) -> Result<BTreeMap<String, (String, Shape)>> {
    let tensors = model.collect(None, Some(Box::new(Linears(BurnToPyTorchAdapter))), false);
    let (tensors, paths) = names(family)?.remap(tensors);
    let paths: HashMap<String, String> = paths.into_iter().collect();
    tensors
        .into_iter()
        .map(|tensor| {
            let path =
                paths.get(&tensor.name).with_context(|| format!("{} has no name in files", tensor.name))?;
            Ok((tensor.name.clone(), (path.clone(), tensor.shape)))
        })
        .collect()
}

/// From paths in our modules to names in files.
fn names(family: Family) -> Result<KeyRemapper> {
    let prefix = prefix(family);
    let mut patterns = vec![
        (r"^backbone\.embeddings\.norm\.", "PREFIX.embeddings.LayerNorm."),
        (r"^backbone\.embeddings\.", "PREFIX.embeddings."),
        (
            r"^backbone\.layers\.(\d+)\.attention\.(query|key|value)\.",
            "PREFIX.encoder.layer.$1.attention.self.$2.",
        ),
        (r"^backbone\.layers\.(\d+)\.attention\.output\.", "PREFIX.encoder.layer.$1.attention.output.dense."),
        (
            r"^backbone\.layers\.(\d+)\.attention\.norm\.",
            "PREFIX.encoder.layer.$1.attention.output.LayerNorm.",
        ),
        (r"^backbone\.layers\.(\d+)\.(intermediate|output)\.", "PREFIX.encoder.layer.$1.$2.dense."),
        (r"^backbone\.layers\.(\d+)\.norm\.", "PREFIX.encoder.layer.$1.output.LayerNorm."),
    ];
    patterns.extend(match family {
        Family::Roberta | Family::XlmRoberta => vec![
            (r"^lm_head\.norm\.", "lm_head.layer_norm."),
            (r"^classifier\.out\.", "classifier.out_proj."),
        ],
        Family::Bert => vec![
            (r"^lm_head\.(dense|norm)\.", "cls.predictions.transform.$1."),
            (r"^cls\.predictions\.transform\.norm\.", "cls.predictions.transform.LayerNorm."),
            (r"^lm_head\.bias$", "cls.predictions.bias"),
            // BERT's pooler is pre-trained: files have it in the encoder.
            (r"^classifier\.dense\.", "PREFIX.pooler.dense."),
            (r"^classifier\.out\.", "classifier."),
        ],
    });
    let patterns = patterns.into_iter().map(|(from, to)| (from, to.replace("PREFIX", prefix))).collect();
    Ok(KeyRemapper::from_patterns(patterns)?)
}

fn prefix(family: Family) -> &'static str {
    match family {
        Family::Roberta | Family::XlmRoberta => "roberta",
        Family::Bert => "bert",
    }
}

/// The name of today, with the family's name in front: files of the encoder alone lack that.
fn full_name(name: &str, family: Family) -> String {
    let name = match name.rsplit_once('.') {
        Some((norm, "gamma")) => format!("{norm}.weight"),
        Some((norm, "beta")) => format!("{norm}.bias"),
        _ => name.to_owned(),
    };
    match name.split('.').next() {
        Some("embeddings" | "encoder" | "pooler") => format!("{}.{name}", prefix(family)),
        _ => name,
    }
}

const BACKBONE: &str = "the encoder";

/// The part of a model that is in a file as a whole or not at all.
fn part(name: &str, family: Family) -> &str {
    match name.strip_prefix(prefix(family)) {
        Some(rest) if !rest.starts_with(".pooler.") => BACKBONE,
        Some(_) => "the pooler",
        None => name.split('.').next().unwrap_or(name),
    }
}

/// Whether a tensor is of the head that says which label a text has. BERT's pooler is pre-trained, and is not.
fn is_classification(name: &str) -> bool {
    name.starts_with("classifier.")
}

/// Refuses a tensor that no model of the family has, and a buffer with other numbers than this model computes with.
fn check_other(file_name: &str, name: &str, tensor: &burn_pack::Tensor, family: Family) -> Result<()> {
    let heads: &[&str] = match family {
        Family::Roberta | Family::XlmRoberta => &["lm_head.", "classifier.", "qa_outputs."],
        Family::Bert => &["cls.", "classifier.", "qa_outputs."],
    };
    let of_encoder = name.strip_prefix(prefix(family)).and_then(|rest| rest.strip_prefix('.'));
    match of_encoder {
        Some("pooler.dense.weight" | "pooler.dense.bias") => Ok(()),
        Some("embeddings.position_ids") => {
            check_buffer(file_name, tensor, |place| place as i64, "the numbers from 0 on")
        }
        Some("embeddings.token_type_ids") => check_buffer(file_name, tensor, |_| 0, "zeros"),
        _ if heads.iter().any(|head| name.starts_with(head)) => Ok(()),
        _ => bail!("{file_name} is not a tensor of this model: does config.json belong to this file?"),
    }
}

fn check_buffer(
    name: &str,
    tensor: &burn_pack::Tensor,
    expected: fn(usize) -> i64,
    what: &str,
) -> Result<()> {
    let data = bridge::to_data(tensor)?;
    let is_right = data.iter::<i64>().enumerate().all(|(place, number)| number == expected(place));
    ensure!(is_right, "{name} has other numbers than {what}, with which this model computes");
    Ok(())
}
