//! What a checkpoint has, which part of a tensor is where, who may write it, and in which order. The files themselves are written and
//! read by `phalanx-checkpoint`.

pub mod claims;
pub mod layout;
pub mod manifest;
pub mod names;
pub mod region;
pub mod tensors;
pub mod writes;

/// The same places on every run: a fuzzer's findings must come back, and nobody chooses regions to suit them there.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub type Unseeded = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
