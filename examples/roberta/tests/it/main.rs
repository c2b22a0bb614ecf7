//! Tests of the example: against transformers, of files, of training on several ranks, and of the program itself.

mod fixtures;
mod jobs;
mod training;
mod vectors;
mod weights;
