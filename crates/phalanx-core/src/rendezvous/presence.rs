//! Whether a rank still is there, for those that cannot see its process: a connection at whose end rank 0's store says that it has left.
//!
//! It is made beside the start, which does not wait for it, and closed when the rank is connected with all others.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::deadline::Deadline;
use crate::store::{AtEnd, TcpStore};
use crate::transport::LEFT;

/// In a world of at most so many ranks each has such a connection. In a larger one they could be more than rank 0 may have, and what ranks ask about
/// each other more than its store answers.
pub(super) const MOST_MARKED: u32 = 64;

/// How long this connection may take, to a store with which the rank has another one already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// As long as this is held, and its process lives, the rank is there.
#[derive(Debug)]
pub(crate) struct Presence(Shared);

/// None when the rank is connected, or has given up.
type Shared = Arc<Mutex<Option<Connection>>>;

/// None until it is made, or for ever: then the others hear of a death at their time-out.
type Connection = Option<AtEnd>;

impl Presence {
    /// Connects to the store of `client` once more, for this rank's `record` there.
    pub(super) fn begin(client: &Arc<TcpStore>, record: String) -> Self {
        let presence = Self(Arc::new(Mutex::new(Some(None))));
        let (client, shared) = (Arc::clone(client), Arc::clone(&presence.0));
        let connect = move || connect(&client, &record, &shared);
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

fn connect(client: &TcpStore, record: &str, shared: &Shared) {
    let deadline = Deadline::after(CONNECT_TIMEOUT);
    let Ok(store) = client.connect_again(deadline) else { return };
    // When it is over, nothing may be asked: at this address there may be rank 0's next store by now, with a record of this rank's next start.
    if let Some(connection) = &mut *shared.lock() {
        *connection = store.set_at_end(record, LEFT, deadline).ok().flatten();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Store, TcpStoreServer};

    #[test]
    fn the_store_says_that_a_rank_has_left_unless_its_start_was_over_before() {
        let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let deadline = Deadline::after(Duration::from_secs(60));
        let store = Arc::new(TcpStore::connect(server.local_addr(), deadline).unwrap());
        for record in ["record", "next start's"] {
            store.set(record, b"a process", deadline).unwrap();
        }
        let wait = |is_there: &dyn Fn() -> bool| {
            while !is_there() {
                assert!(!deadline.has_passed());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let over = Arc::new(Mutex::new(None));
        connect(&store, "next start's", &over);
        assert!(over.lock().is_none());
        let presence = Presence::begin(&store, "record".to_owned());
        wait(&|| matches!(&*presence.0.lock(), Some(Some(_))));
        assert_eq!(store.get("record", deadline).unwrap(), b"a process");
        drop(presence);
        wait(&|| store.get("record", deadline).unwrap() == LEFT);
        // Its connection was closed before the other one.
        assert_eq!(store.get("next start's", deadline).unwrap(), b"a process");
    }
}
