//! The client's side.

/// A store that a [`TcpStoreServer`](super::TcpStoreServer), or PyTorch's, serves.
#[derive(Debug)]
pub struct TcpStore {}
