//! The deciding half of the store: the operations of every store on its keys, and what a server answers.

pub mod server;
pub mod table;
mod there;
mod waiters;

pub use self::there::count_there;
