//! What the examples that read digits share: the digits, and a small network.

mod data;
mod flat;
mod model;

pub use data::{Batch, Digits, FOLDER};
pub use flat::Flat;
pub use model::Network;
