//! What a checkpoint has, and which part of a tensor is where. The files themselves are written and read by `phalanx`.

pub mod layout;
pub mod manifest;
pub mod region;
pub mod tensors;

/// The same places on every run: a fuzzer's findings must come back, and nobody chooses regions to suit them there.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub type Unseeded = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
