//! A store served over TCP, in PyTorch's TCPStore protocol: either side's clients work with either side's server.
//!
//! So a program under torchrun uses the agent's store, and PyTorch's clients can use ours.

mod access;
mod blocking;
mod client;
mod client_connection;
mod connect_error;
mod handshake_permits;
mod peer_user;
mod resolve;
mod server;
mod server_connection;
mod server_stream;

pub use access::{Access, KeylessClients, Refusals};
pub use client::{AtEnd, TcpStore};
pub use client_connection::Patience;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use client_connection::fuzz;
#[cfg(feature = "etcd")]
pub(super) use resolve::resolve_in_order;
pub use resolve::{host_port, resolve};
pub use server::{MAX_RANKS, TcpStoreServer, addresses_to_serve, listen, warn_of_own_name};

#[cfg(test)]
mod access_tests;
#[cfg(test)]
mod pytorch;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(all(test, feature = "tls"))]
mod tls_tests;
