//! Which ranks share memory, and a call as it is in the shared control block.

pub mod encoded_call;
pub mod partition;
pub mod reach;
