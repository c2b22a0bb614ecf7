//! Whether a rank still is there, for those that cannot see its process: a connection at whose end rank 0's store says that it has left.
//!
//! It is made beside the start, which does not wait for it, and closed when the rank is connected with all others.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::store::{AtEnd, TcpStore};
use crate::transport::LEFT;

/// How long this connection may take, to a store with which the rank has another one already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// As long as this is held, and its process lives, the rank is there.
#[derive(Debug)]
pub(crate) struct Presence(Arc<Mutex<Option<Connection>>>);

/// None until it is made, or for ever: then the others hear of a death at their time-out.
type Connection = Option<AtEnd>;

impl Presence {
    /// Connects to the store at `address`, for this rank's `record` there.
    pub(super) fn begin(address: &str, credentials: &Credentials, record: String) -> Self {
        let presence = Self(Arc::new(Mutex::new(Some(None))));
        let (address, credentials) = (address.to_owned(), credentials.clone());
        let connection = Arc::clone(&presence.0);
        let connect = move || {
            let deadline = Deadline::after(CONNECT_TIMEOUT);
            let store = TcpStore::connect_with(&address, &credentials, deadline);
            let at_end = store.and_then(|store| store.set_at_end(&record, LEFT, deadline));
            // Unless it is over.
            if let Some(connection) = &mut *connection.lock() {
                *connection = at_end.ok().flatten();
            }
        };
        // Without a thread there is no connection.
        let _ = std::thread::Builder::new().name("phalanx-presence".into()).spawn(connect);
        presence
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Store, TcpStoreServer};

    #[test]
    fn the_store_says_that_a_rank_has_left() {
        let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = server.local_addr().to_string();
        let deadline = Deadline::after(Duration::from_secs(60));
        let store = TcpStore::connect(&address, deadline).unwrap();
        store.set("record", b"a process", deadline).unwrap();
        let wait = |is_there: &dyn Fn() -> bool| {
            while !is_there() {
                assert!(!deadline.has_passed());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let presence = Presence::begin(&address, &Credentials::default(), "record".to_owned());
        wait(&|| matches!(&*presence.0.lock(), Some(Some(_))));
        assert_eq!(store.get("record", deadline).unwrap(), b"a process");
        drop(presence);
        wait(&|| store.get("record", deadline).unwrap() == LEFT);
    }
}
