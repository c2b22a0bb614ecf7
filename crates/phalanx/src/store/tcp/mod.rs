//! A store served over TCP, in PyTorch's TCPStore protocol: either side's clients work with either side's server.

mod access;
mod client;
mod connection;
mod handshake_limit;
mod link;
mod peer_user;
mod server;
mod stream;
mod waiters;

pub(crate) use access::{Access, KeylessClients, Refusals};
pub use client::TcpStore;
#[cfg(any(test, fuzzing))]
pub use link::fuzz;
pub(crate) use link::host_port;
pub use server::TcpStoreServer;

#[cfg(test)]
mod access_tests;
#[cfg(test)]
mod pytorch;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "tls"))]
mod tls_tests;
