//! RoBERTa and BERT in Burn, as published: with Hugging Face's weights and tokenizers, fine-tuned and pre-trained on several
//! ranks. See README.md.

pub mod config;
pub mod data;
pub mod files;
pub mod inputs;
pub mod labels;
pub mod loading;
pub mod masking;
pub mod mesh;
pub mod model;
pub mod schedule;
pub mod strategy;
pub mod tasks;
pub mod text;
pub mod train;
pub mod weights;

pub use config::{Config, Family};
pub use inputs::Inputs;
pub use model::{Backbone, Classifier, MaskedLm};
pub use text::Text;
