//! Hugging Face's safetensors files: the same names and shapes, so that `transformers` reads what is written here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{DType, Shape};
use burn_store::{
    BurnToPyTorchAdapter, FloatCastAdapter, KeyRemapper, ModuleAdapter, ModuleContext, ModuleSnapshot,
    ModuleStore, PyTorchToBurnAdapter, SafetensorsStore,
};

use crate::config::Family;

/// What a file had, and what it had not.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Tensors of heads that are not in the file, and keep their random weights.
    pub new: Vec<String>,
    /// Tensors of the file for which this model has no use, such as another head's.
    pub ignored: Vec<String>,
}

/// Gives `model`, a [`MaskedLm`](crate::MaskedLm) or [`Classifier`](crate::Classifier), the weights of a file that
/// `transformers` or [`save`] has written. A file of the encoder alone will do: a head that is not there stays as it is.
/// The names `gamma` and `beta` of older BERT files are understood, and types other than f32 are converted.
///
/// # Errors
/// If the file is damaged; if a tensor of the encoder is missing, or a head is there in part; if a tensor has another shape
/// than `model`'s, or a name that no model of this family has. The error names the tensor. The model is as it was then.
pub fn load<M: ModuleSnapshot>(model: &mut M, family: Family, path: &Path) -> Result<Loaded> {
    load_into(model, family, path).with_context(|| format!("{} cannot be loaded", path.display()))
}

fn load_into<M: ModuleSnapshot>(model: &mut M, family: Family, path: &Path) -> Result<Loaded> {
    let expected = expected(model, family)?;
    let mut store = SafetensorsStore::from_file(path);
    let tensors = store.get_all_tensors()?;
    let (mut found, mut loaded) = (BTreeMap::new(), Loaded::default());
    for (file_name, tensor) in tensors {
        let name = full_name(file_name, family);
        if let Some((module_path, shape)) = expected.get(&name) {
            ensure!(
                tensor.shape == *shape,
                "{file_name} has the shape {:?}, this model's has {:?}",
                tensor.shape.as_slice(),
                shape.as_slice()
            );
            ensure!(
                tensor.dtype.is_float(),
                "{file_name} has elements of type {:?}, not floats",
                tensor.dtype
            );
            let mut tensor = tensor.clone();
            tensor.name = module_path.clone();
            ensure!(found.insert(name.clone(), tensor).is_none(), "{name} is there twice, under two names");
        } else {
            check_other(file_name, &name, family)?;
            loaded.ignored.push(file_name.clone());
        }
    }
    check_tied(tensors, family)?;

    let there: BTreeSet<&str> = found.keys().map(|name| part(name, family)).collect();
    for name in expected.keys().filter(|name| !found.contains_key(*name)) {
        let part = part(name, family);
        ensure!(part != BACKBONE, "{name} is missing");
        ensure!(!there.contains(part), "{name} is missing, though other tensors of {part} are there");
        loaded.new.push(name.clone());
    }

    let adapter = FloatCastAdapter::to(DType::F32).chain(Linears(PyTorchToBurnAdapter));
    let applied = model.apply(found.into_values().collect(), None, Some(Box::new(adapter)), false);
    if let Some(error) = applied.errors.first() {
        bail!("{error}");
    }
    ensure!(applied.unused.is_empty(), "tensors without a place in the model: {:?}", applied.unused);
    Ok(loaded)
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
        Family::Roberta => vec![
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
        Family::Roberta => "roberta",
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

/// Refuses a tensor that no model of the family has.
fn check_other(file_name: &str, name: &str, family: Family) -> Result<()> {
    let prefix = prefix(family);
    let heads: &[&str] = match family {
        Family::Roberta => &["lm_head.", "classifier."],
        Family::Bert => &["cls.", "classifier."],
    };
    let buffers = ["embeddings.position_ids", "embeddings.token_type_ids"];
    let known = heads.iter().any(|head| name.starts_with(head))
        || name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| {
            buffers.contains(&rest) || ["pooler.dense.weight", "pooler.dense.bias"].contains(&rest)
        });
    ensure!(known, "{file_name} is not a tensor of this model: does config.json belong to this file?");
    Ok(())
}

/// Decoders that files repeat must be the token embedding, or the model here would not be theirs.
fn check_tied(tensors: &BTreeMap<String, burn_pack::Tensor>, family: Family) -> Result<()> {
    let (head, embedding) = match family {
        Family::Roberta => ("lm_head", "roberta.embeddings.word_embeddings.weight"),
        Family::Bert => ("cls.predictions", "bert.embeddings.word_embeddings.weight"),
    };
    let pairs = [
        (format!("{head}.decoder.weight"), embedding.to_owned()),
        (format!("{head}.decoder.bias"), format!("{head}.bias")),
    ];
    for (decoder, original) in pairs {
        if let (Some(one), Some(other)) = (tensors.get(&decoder), tensors.get(&original)) {
            ensure!(
                one.shape == other.shape && one.to_bytes()? == other.to_bytes()?,
                "{decoder} is not {original}: this model has one tensor for both"
            );
        }
    }
    Ok(())
}
