//! What a launcher tells the workers of its elastic job.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::members::Entry;
use super::session::{random, scope};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::rendezvous::membership::Log;
use crate::store::{PrefixStore, TcpStore};

/// How long the launcher's own store may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tells the workers that meet at `store` that a process has ended, so that nobody has to wait for its silence. Who is in a
/// group with it knows already; who waits for the next one does not.
pub(crate) fn announce(
    store: SocketAddr,
    credentials: &Credentials,
    run_id: &str,
    place: u32,
    process: u32,
) -> Result<()> {
    let deadline = Deadline::after(PATIENCE);
    let client = TcpStore::join(store, credentials, deadline)?;
    let store = PrefixStore::new(scope(run_id), Arc::new(client));
    let exited = Entry::Exited { place, process, nonce: random()? };
    Log::new(Arc::new(store)).append(&exited.to_bytes()?, deadline)
}
