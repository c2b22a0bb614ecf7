//! Pure plans of the collectives: who sends which elements to whom, step by step. No I/O happens here.

mod op;

pub use op::ReduceOp;
