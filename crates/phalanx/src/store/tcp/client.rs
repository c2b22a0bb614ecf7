//! The client side.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::slice::from_ref;
use std::time::Duration;

use parking_lot::Mutex;

use super::client_connection::{ClientCredentials, Link};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::key::JobKey;
use crate::store::Store;
use crate::store::call::Call;
use crate::store::table::decimal;
use crate::wire::store::{CHECK_READY, Frame, MAX_COUNT, MAX_REQUEST, Op};

/// The most idle connections that are kept.
const IDLE: usize = 8;

/// A store that a [`TcpStoreServer`](super::TcpStoreServer), or PyTorch's, serves.
///
/// Threads that share it do not wait for each other: each call takes an idle connection, or makes one.
#[derive(Debug)]
pub struct TcpStore {
    /// As errors name it.
    name: String,
    credentials: ClientCredentials,
    /// The address, of those that the name resolves to, at which the store was found.
    found: SocketAddr,
    local: IpAddr,
    idle: Mutex<Vec<Link>>,
}

impl TcpStore {
    /// Connects to the store at `address`, a `SocketAddr` or `host:port`. Tries until `deadline` while nothing
    /// listens there. If the listener is not a store, the error says so.
    pub fn connect(address: impl fmt::Display, deadline: Deadline) -> Result<Self> {
        Self::connect_with(address, &Credentials::default(), deadline)
    }

    /// [`connect`](Self::connect) to a store of the job with this key. Each side proves to the other that it knows the key
    /// before any request: a server that does not, such as PyTorch's, is an error.
    pub fn connect_with_key(address: impl fmt::Display, key: &JobKey, deadline: Deadline) -> Result<Self> {
        Self::connect_with(address, &key.clone().into(), deadline)
    }

    /// [`connect`](Self::connect) to a store of the job with these credentials: with the key, if there is
    /// one, as above, and with TLS, if there are certificates.
    pub fn connect_with(
        address: impl fmt::Display,
        credentials: &Credentials,
        deadline: Deadline,
    ) -> Result<Self> {
        let address = address.to_string();
        let credentials = ClientCredentials::new(credentials);
        let link = Link::connect(&address, &credentials, deadline)?;
        let lost = |error| Error::io(format!("the connection to the store at {address} was lost"), error);
        let local = link.local_ip().map_err(lost)?;
        let found = link.peer().map_err(lost)?;
        Ok(Self {
            name: format!("the store tcp://{address}"),
            credentials,
            found,
            local,
            idle: Mutex::new(vec![link]),
        })
    }

    /// The address of this host from which the store is reached.
    pub(crate) fn local_ip(&self) -> IpAddr {
        self.local
    }

    /// The address at which the store was found; one of its host's, unless a proxy is in between.
    pub(crate) fn found_ip(&self) -> IpAddr {
        self.found.ip()
    }

    /// Closes the connections that no call is using.
    pub(crate) fn close_idle(&self) {
        self.idle.lock().clear();
    }

    /// Sends `request` and reads its answer with `read`.
    fn exchange<T>(
        &self,
        call: &Call<'_>,
        request: Frame,
        read: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> Result<T> {
        let mut link = self.link(call)?;
        let answer = link.send(&request.into_bytes()).and_then(|()| read(&mut link));
        let answer = answer.map_err(|error| call.failed(error))?;
        self.put_back(link);
        Ok(answer)
    }

    /// Sends a request that has no answer in PyTorch's protocol, and a ping, whose answer shows that the request was
    /// carried out.
    fn command(&self, call: &Call<'_>, request: Frame) -> Result<()> {
        const NONCE: u32 = 0x5048_4C58;
        let echo = self.exchange(call, request.then(Op::Ping).u32(NONCE), Link::take::<4>)?;
        if echo == NONCE.to_le_bytes() { Ok(()) } else { Err(call.broken("a ping came back changed")) }
    }

    /// Waits for the call's keys, then sends `request` on the same connection.
    fn wait_then<T>(&self, call: &Call<'_>, then: impl FnOnce(&mut Link) -> io::Result<T>) -> Result<T> {
        let request = Frame::new(Op::Wait).keys(call.keys);
        check_size(call, call.keys.len(), request.len())?;
        let mut link = self.link(call)?;
        let came = link.wait(&request.into_bytes()).map_err(|error| call.failed(error))?;
        let answer = if came {
            // A key that was set at the last moment is still read.
            link.deadline = call.deadline.max(Deadline::after(Duration::from_millis(50)));
            Some(then(&mut link).map_err(|error| call.failed(error))?)
        } else {
            None
        };
        self.put_back(link);
        answer.ok_or_else(|| call.timed_out())
    }

    fn link(&self, call: &Call<'_>) -> Result<Link> {
        let idle = self.idle.lock().pop();
        let mut link = match idle {
            Some(link) => link,
            None => Link::reconnect(&self.found.to_string(), &self.credentials, call.deadline)
                .map_err(|error| call.failed(error))?,
        };
        link.deadline = call.deadline;
        Ok(link)
    }

    fn put_back(&self, link: Link) {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE {
            idle.push(link);
        }
    }

    /// Why the store closed the connection on an addition: the protocol cannot say.
    fn explain_add(&self, call: &Call<'_>, key: &str, error: Error) -> Error {
        let deadline = Deadline::after(Duration::from_secs(1));
        let there = self.check(&[key], deadline).unwrap_or(false);
        let Some(value) = there.then(|| self.get(key, deadline).ok()).flatten() else { return error };
        match decimal(&value) {
            Err(refusal) => call.refused(&refusal),
            Ok(_) => error,
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "set", from_ref(&key), deadline)?;
        call.value(value)?;
        self.command(&call, Frame::new(Op::Set).key(key).value(value))
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "get", from_ref(&key), deadline)?;
        self.wait_then(&call, |link| {
            link.send(&Frame::new(Op::Get).key(key).into_bytes())?;
            link.value()
        })
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "wait", keys, deadline)?;
        self.wait_then(&call, |_| Ok(()))
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "check", keys, deadline)?;
        let request = Frame::new(Op::Check).keys(keys);
        check_size(&call, keys.len(), request.len())?;
        Ok(self.exchange(&call, request, Link::take)? == [CHECK_READY])
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let call = Call::new(&self.name, "add", from_ref(&key), deadline)?;
        self.exchange(&call, Frame::new(Op::Add).key(key).i64(amount), Link::integer)
            .map_err(|error| if error.is_timeout() { error } else { self.explain_add(&call, key, error) })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "compare_set", from_ref(&key), deadline)?;
        call.value(expected)?;
        call.value(desired)?;
        self.exchange(&call, Frame::new(Op::CompareSet).key(key).value(expected).value(desired), Link::value)
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "delete_key", from_ref(&key), deadline)?;
        Ok(self.exchange(&call, Frame::new(Op::Delete).key(key), Link::integer)? > 0)
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        let call = Call::new(&self.name, "num_keys", &[], deadline)?;
        let count = self.exchange(&call, Frame::new(Op::NumKeys), Link::integer)?;
        usize::try_from(count).map_err(|_| call.broken(format!("a count of {count} keys")))
    }

    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "append", from_ref(&key), deadline)?;
        call.value(value)?;
        self.command(&call, Frame::new(Op::Append).key(key).value(value))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        self.wait_then(&call, |link| {
            link.send(&Frame::new(Op::MultiGet).keys(keys).into_bytes())?;
            keys.iter().map(|_| link.value()).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let call = Call::new(&self.name, "multi_set", &keys, deadline)?;
        pairs.iter().try_for_each(|(_, value)| call.value(value))?;
        check_size(&call, pairs.len(), pairs.iter().map(|(key, value)| key.len() + value.len() + 1).sum())?;
        let frame = Frame::new(Op::MultiSet).u64(pairs.len() as u64);
        self.command(&call, pairs.iter().fold(frame, |frame, (key, value)| frame.key(key).value(value)))
    }
}

/// Checks the caps of a whole request.
fn check_size(call: &Call<'_>, count: usize, bytes: usize) -> Result<()> {
    if count <= MAX_COUNT && bytes <= MAX_REQUEST {
        return Ok(());
    }
    Err(call.too_much(count, bytes))
}
