//! The unsafe parts of Phalanx behind a safe interface.
#![warn(missing_docs)]
