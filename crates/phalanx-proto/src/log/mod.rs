//! The replicated log: which members are silent, and proofs that an entry is a member's.

pub mod liveness;
pub mod mac;
