//! The lease to which all keys of a job are attached.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::gateway::{Gateway, Refused, encode, number};
use super::{answer, found};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::store::call::Call;

/// How long keys stay after the last process has closed the store.
pub(crate) const TIME_TO_LIVE: Duration = Duration::from_secs(15);
/// The interval of its renewal.
const INTERVAL: Duration = Duration::from_secs(4);

/// The pause before a lease is searched for again.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// The job's lease, renewed by a thread while this value lives. Its number is a key that is attached to it as well.
#[derive(Debug)]
pub(super) struct Lease {
    id: String,
    // Dropping it ends the thread.
    _end: Sender<()>,
}

impl Lease {
    /// The job's lease, whose number is at `key`; a new one if there is none.
    pub(super) fn open(gateway: &Arc<Gateway>, key: &str, call: &Call<'_>) -> Result<Self> {
        let key = encode(key.as_bytes());
        let ask = |path: &str, request: Value| answer(call, gateway.ask(path, &request, true, call.deadline));
        let id = loop {
            if let Some(known) = found(call, &ask("kv/range", json!({ "key": key }))?)? {
                let id = String::from_utf8_lossy(&known.value).into_owned();
                if keep(gateway, &id, call.deadline).is_ok_and(|lives| lives) {
                    break id;
                }
                // It has expired, and its key will go in a moment.
                std::thread::sleep(RETRY_DELAY);
            } else {
                let granted = ask("lease/grant", json!({ "TTL": TIME_TO_LIVE.as_secs().to_string() }))?;
                let id = number(&granted["ID"]).filter(|id| *id != 0);
                let id = id.ok_or_else(|| call.broken("it grants no lease"))?.to_string();
                let put = json!({ "key": key, "value": encode(id.as_bytes()), "lease": id });
                let first = json!({
                    "compare": [{ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": "0" }],
                    "success": [{ "request_put": put }],
                });
                // A process that is second finds the first one's lease in the next iteration; its own expires.
                if ask("kv/txn", first)?["succeeded"] == true {
                    break id;
                }
            }
            if call.deadline.has_passed() {
                return Err(call.timed_out());
            }
        };
        let (end, ended) = channel::<()>();
        let (gateway, kept) = (Arc::clone(gateway), id.clone());
        let keeper = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // If it expires all the same, the next write returns the error.
                let _ = keep(&gateway, &kept, Deadline::after(INTERVAL));
            }
        };
        std::thread::Builder::new()
            .name("phalanx-lease".into())
            .spawn(keeper)
            .map_err(|error| Error::not_started("cannot start a thread for etcd's lease", error))?;
        Ok(Self { id, _end: end })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

/// Renews the lease for its whole time. Returns whether it still existed.
fn keep(gateway: &Gateway, id: &str, deadline: Deadline) -> Result<bool, Refused> {
    let answer = gateway.ask("lease/keepalive", &json!({ "ID": id }), true, deadline)?;
    Ok(number(&answer["result"]["TTL"]).is_some_and(|left| left > 0))
}
