//! The publisher: a launcher appends the ends of processes to the log of its elastic workers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::members::{Entry, MembersState};
use super::session::scope;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::log::{Log, Mac, awake};
use crate::random;
use crate::store::{PrefixStore, TcpStore};

/// How long the launcher's own store may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Appends in its own thread, so that the launcher, which watches workers, does not wait for the store.
#[derive(Debug)]
pub struct Publisher {
    entries: Sender<Entry>,
    changes: u64,
}

impl Publisher {
    /// Starts the thread, for the workers of `run_id` whose rendezvous is in `store`.
    pub fn start(store: SocketAddr, credentials: &Credentials, run_id: &str) -> Result<Self> {
        let (entries, inbox) = channel();
        let (credentials, run_id) = (credentials.clone(), run_id.to_owned());
        std::thread::Builder::new()
            .name("phalanx-publish".into())
            .spawn(move || tell(&inbox, || connect(store, &credentials, &run_id)))
            .map_err(|error| {
                Error::not_started("cannot start the thread that tells workers about failures", error)
            })?;
        Ok(Self { entries, changes: 0 })
    }

    /// Publishes that the process in this slot has ended. The ranks of its group have seen that already. Workers that wait for the
    /// next group would otherwise wait until its heartbeats time out.
    pub fn exited(&self, slot: u32, process: u32) {
        match random::number() {
            Ok(nonce) => self.tell(Entry::Exited { slot, process, nonce }),
            Err(error) => {
                tracing::debug!(%error, "the workers could not be told that one has ended, and must notice it themselves")
            }
        }
    }

    /// Publishes how many workers run, or are being started.
    pub fn expect(&mut self, workers: u32) {
        self.changes += 1;
        self.tell(Entry::Expected { change: self.changes, workers });
    }

    fn tell(&self, entry: Entry) {
        // The thread ends with this.
        let _ = self.entries.send(entry);
    }
}

fn connect(store: SocketAddr, credentials: &Credentials, run_id: &str) -> Result<Log<MembersState>> {
    let client = TcpStore::connect_with(store, credentials, Deadline::after(TIMEOUT))?;
    Ok(Log::new(Arc::new(PrefixStore::new(scope(run_id), Arc::new(client))), Mac::none()))
}

fn tell(inbox: &Receiver<Entry>, connect: impl Fn() -> Result<Log<MembersState>>) {
    let mut log = None;
    while let Ok(entry) = inbox.recv() {
        let mut append = || {
            let log = match &mut log {
                Some(log) => log,
                none => none.insert(connect()?),
            };
            awake(Deadline::after(TIMEOUT), |deadline| log.append(&entry, deadline))
        };
        if let Err(error) = append() {
            tracing::debug!(%error, "the workers could not be told what their launcher has seen, and must notice it themselves");
        }
    }
}
