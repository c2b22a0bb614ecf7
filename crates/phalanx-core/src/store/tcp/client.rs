//! The client side.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client_connection::{ClientCredentials, Link, Patience, WaitOutcome};
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::key::JobKey;
use crate::notice::while_waiting_if;
use crate::store::call::Call;
use crate::store::table::decimal;
use crate::store::{Store, WATCH_INTERVAL, compare_set_after};
use crate::wire::store::{CHECK_READY, Frame, MAX_COUNT, MAX_REQUEST, Op};

/// The most idle connections that are kept.
const IDLE: usize = 8;
/// How long an answer may take, even after the deadline, that is asked for when a wait has ended.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a client that waits for the first of several connections asks whether the store is still needed. To answer may take a second,
/// in which a connection may come.
const PATIENCE_INTERVAL: Duration = Duration::from_secs(2);
/// How long a call waits for a connection that is being made already, before it makes its own.
const COMING_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it looks.
const COMING_INTERVAL: Duration = Duration::from_millis(1);
/// Requests of so many bytes together are sent before their answers are read; a longer one alone. The server reads the next request
/// only when the last answer has gone out, so that more could leave both sides writing.
const PIPELINED: usize = 16 << 10;

/// So many removals are sent before their answers are read. The answers are short: both sides' buffers hold them, however long the keys are.
const REMOVED_TOGETHER: usize = 256;

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
    /// Connections that are still being made.
    coming: Mutex<Receiver<Result<Link>>>,
    /// How many threads are in the `go_on` of a [`set_and_get`](Store::set_and_get), in which they ask the store something else.
    in_go_on: AtomicUsize,
}

/// The connection at whose end a key gets a value: see [`TcpStore::set_at_end`].
#[derive(Debug)]
pub struct AtEnd {
    _link: Link,
}

impl TcpStore {
    /// Connects to the store at `address`, a `SocketAddr` or `host:port`. Tries until `deadline` while nothing
    /// listens there. If the listener is not a store, the error says so.
    ///
    /// # Errors
    /// At `deadline`, with the last reason for which it cannot connect. At once, if the address cannot be used, or the listener is no store.
    pub fn connect(address: impl fmt::Display, deadline: Deadline) -> Result<Self> {
        Self::connect_with(address, &Credentials::default(), deadline)
    }

    /// [`connect`](Self::connect) to a store of the job with this key. Each side proves to the other that it knows the key
    /// before any request: a server that does not, such as PyTorch's, is an error.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and if the server does not know the key.
    pub fn connect_with_key(address: impl fmt::Display, key: &JobKey, deadline: Deadline) -> Result<Self> {
        Self::connect_with(address, &key.clone().into(), deadline)
    }

    /// [`connect`](Self::connect) to a store of the job with these credentials: with the key, if there is
    /// one, as above, and with TLS, if there are certificates.
    ///
    /// # Errors
    /// As [`connect_with_key`](Self::connect_with_key), and if a certificate cannot be used, or the server's is not of the same CA.
    pub fn connect_with(
        address: impl fmt::Display,
        credentials: &Credentials,
        deadline: Deadline,
    ) -> Result<Self> {
        Self::connect_patiently(address, credentials, deadline, &Patience::WHOLE)
    }

    #[doc(hidden)]
    pub fn connect_patiently(
        address: impl fmt::Display,
        credentials: &Credentials,
        deadline: Deadline,
        patience: &Patience<'_>,
    ) -> Result<Self> {
        let address = address.to_string();
        let credentials = ClientCredentials::new(credentials);
        let (link, coming) = match patience.connections {
            0 | 1 => (Link::connect(&address, &credentials, deadline, patience)?, mpsc::channel().1),
            _ => first_of_several(&address, &credentials, deadline, patience)?,
        };
        let lost = |error| {
            Error::io(format!("the connection to the store at {address} was lost"), error)
                .with_remedy("does the store's host (rank 0, or the launcher) still run?")
        };
        let local = link.local_ip().map_err(lost)?;
        let found = link.peer().map_err(lost)?;
        Ok(Self {
            name: format!("the store tcp://{address}"),
            credentials,
            found,
            local,
            idle: Mutex::new(vec![link]),
            coming: Mutex::new(coming),
            in_go_on: AtomicUsize::new(0),
        })
    }

    /// Another client of this store, with a connection of its own. If nothing listens where the store was found, that is the error at once.
    pub(crate) fn connect_again(&self, deadline: Deadline) -> io::Result<Self> {
        let link = Link::reconnect(&self.found.to_string(), &self.credentials, deadline)?;
        Ok(Self {
            name: self.name.clone(),
            credentials: self.credentials.clone(),
            found: self.found,
            local: self.local,
            idle: Mutex::new(vec![link]),
            coming: Mutex::new(mpsc::channel().1),
            in_go_on: AtomicUsize::new(0),
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

    /// Sets `key` to `value` when this client has ended, or drops what this returns, if the key is there then. None if the server is PyTorch's, which cannot.
    #[doc(hidden)]
    pub fn set_at_end(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<Option<AtEnd>> {
        let call = Call::new(&self.name, "set", from_ref(&key), deadline)?;
        call.value(value)?;
        let mut link = self.link(&call)?;
        if !link.is_own {
            self.put_back(link);
            return Ok(None);
        }
        // It has no answer: on a slow network a start would wait for it. A server of an earlier build, which does not know it, is
        // refused by the next call on another connection.
        let request = Frame::new(Op::SetAtEnd).key(key).value(value).into_bytes();
        link.send(&request).map_err(|error| call.failed(error))?;
        Ok(Some(AtEnd { _link: link }))
    }

    /// Closes the connections that no call is using.
    pub(crate) fn close_idle(&self) {
        self.idle.lock().clear();
        // A connection that is still being made is closed when it is there.
        *self.coming.lock() = mpsc::channel().1;
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
        let answer = answer.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => call.unanswered(link.network(call.started.elapsed())),
            _ => call.failed(error),
        })?;
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

    /// Sends `first`, a request without an answer, and waits for the call's keys. Returns their values. From a server of ours
    /// that takes one round trip.
    fn wait_for_values(
        &self,
        call: &Call<'_>,
        first: Vec<u8>,
        go_on: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> Result<Vec<Vec<u8>>> {
        let keys = call.keys;
        let size = Frame::new(Op::Wait).keys(keys).len();
        check_size(call, keys.len(), size)?;
        let mut link = self.link(call)?;
        let (op, values) = if link.is_own { (Op::WaitGet, keys.len()) } else { (Op::Wait, 0) };
        let request = [first, Frame::new(op).keys(keys).into_bytes()].concat();
        let waited = link.wait(&request, values, go_on).map_err(|error| call.failed(error))?;
        self.waited(call, link, waited, values)
    }

    /// The outcome of a wait for the call's keys, whose answer has so many values.
    fn waited(
        &self,
        call: &Call<'_>,
        mut link: Link,
        waited: WaitOutcome,
        values: usize,
    ) -> Result<Vec<Vec<u8>>> {
        let keys = call.keys;
        let outcome = match waited {
            WaitOutcome::Values(came) if values == keys.len() => Ok(came),
            WaitOutcome::Values(_) => {
                // A key that was set at the last moment is still read.
                link.deadline = call.deadline.max(Deadline::after(ANSWER_TIMEOUT));
                let request = Frame::new(Op::MultiGet).keys(keys).into_bytes();
                let came = link.send(&request).and_then(|()| keys.iter().map(|_| link.value()).collect());
                Ok(came.map_err(|error| call.failed(error))?)
            }
            WaitOutcome::TimedOut => Err(call.timed_out()),
            WaitOutcome::Stopped(error) => Err(error),
        };
        self.put_back(link);
        outcome
    }

    /// Calls `go_on` as one of the threads that may ask the store something else meanwhile.
    fn counted(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.in_go_on.fetch_add(1, Ordering::Relaxed);
        let outcome = go_on();
        self.in_go_on.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn link(&self, call: &Call<'_>) -> Result<Link> {
        let mut link = match self.idle_link(call.deadline) {
            Some(link) => link,
            None => Link::reconnect(&self.found.to_string(), &self.credentials, call.deadline)
                .map_err(|error| call.failed(error))?,
        };
        link.deadline = call.deadline;
        Ok(link)
    }

    /// An idle connection. One that is still being made is waited for: a new one would come later.
    fn idle_link(&self, deadline: Deadline) -> Option<Link> {
        let until = Deadline::after(COMING_TIMEOUT.min(deadline.remaining() / 2));
        loop {
            let mut idle = self.idle.lock();
            // Those of the process from which this one was forked stay open there.
            idle.retain(|link| !link.is_inherited());
            if let Some(link) = idle.pop() {
                return Some(link);
            }
            drop(idle);
            match self.coming.lock().try_recv() {
                Ok(Ok(link)) if !link.is_inherited() => return Some(link),
                Ok(Ok(_) | Err(_)) => {}
                Err(TryRecvError::Empty) if !until.has_passed() => {}
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return None,
            }
            thread::sleep(COMING_INTERVAL);
        }
    }

    fn put_back(&self, link: Link) {
        // Many ranks may wait for a store on their host, and each connection costs its server a descriptor.
        if self.found.ip() == self.local && self.in_go_on.load(Ordering::Relaxed) > 0 {
            return;
        }
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
        let values = self.wait_for_values(&call, Vec::new(), None)?;
        values.into_iter().next().ok_or_else(|| call.broken("an answer without a value"))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "wait", keys, deadline)?;
        let request = Frame::new(Op::Wait).keys(keys);
        check_size(&call, keys.len(), request.len())?;
        let mut link = self.link(&call)?;
        let waited = link.wait(&request.into_bytes(), 0, None).map_err(|error| call.failed(error))?;
        self.put_back(link);
        match waited {
            WaitOutcome::Values(_) => Ok(()),
            WaitOutcome::TimedOut => Err(call.timed_out()),
            WaitOutcome::Stopped(error) => Err(error),
        }
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "check", keys, deadline)?;
        let request = Frame::new(Op::Check).keys(keys);
        check_size(&call, keys.len(), request.len())?;
        Ok(self.exchange(&call, request, Link::take)? == [CHECK_READY])
    }

    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let call = Call::new(&self.name, "add", from_ref(&key), deadline)?;
        self.exchange(&call, Frame::new(Op::Add).key(key).i64(amount), Link::integer).map_err(|error| {
            match error.is_timeout() || error.is_aborted() {
                true => error,
                false => self.explain_add(&call, key, error),
            }
        })
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

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "delete_key", keys, deadline)?;
        let mut link = self.link(&call)?;
        for keys in keys.chunks(REMOVED_TOGETHER) {
            let requests: Vec<u8> =
                keys.iter().flat_map(|key| Frame::new(Op::Delete).key(key).into_bytes()).collect();
            let answers =
                link.send(&requests).and_then(|()| keys.iter().try_for_each(|_| link.integer().map(drop)));
            answers.map_err(|error| call.failed(error))?;
        }
        self.put_back(link);
        Ok(())
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
        self.wait_for_values(&call, Vec::new(), None)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let call = Call::new(&self.name, "multi_set", &keys, deadline)?;
        self.command(&call, multi_set(&call, pairs)?)
    }

    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let set: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let setting = Call::new(&self.name, "multi_set", &set, deadline)?;
        let first = match pairs {
            [] => Vec::new(),
            _ => multi_set(&setting, pairs)?.into_bytes(),
        };
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        self.wait_for_values(&call, first, Some(&mut || self.counted(go_on)))
    }

    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<&str> = changes.iter().map(|(key, ..)| *key).collect();
        let call = Call::new(&self.name, "compare_set", &keys, deadline)?;
        check_changes(&call, None, changes)?;
        let mut link = self.link(&call)?;
        let answers = send_changes(&mut link, changes, Vec::new(), &mut || Ok(()));
        let answers = answers.map_err(|error| call.failed(error))??;
        self.put_back(link);
        Ok(answers)
    }

    fn multi_compare_set_after(
        &self,
        before: &str,
        changes: &[(&str, &[u8], &[u8])],
        until: Deadline,
        deadline: Deadline,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let keys: Vec<&str> = [before].into_iter().chain(changes.iter().map(|(key, ..)| *key)).collect();
        let call = Call::new(&self.name, "compare_set", &keys, deadline)?;
        check_changes(&call, Some(before), changes)?;
        let mut link = self.link(&call)?;
        if !link.is_own {
            self.put_back(link);
            // This call also waits for keys of which PyTorch's server tells nobody.
            let until = until.min(deadline);
            let waited =
                self.compare_set_and_get(&[], &[before], until, &mut |_| Ok(()), &mut || Ok(())).map(drop);
            return compare_set_after(self, waited, changes, deadline);
        }
        let frame = Frame::new(Op::CompareSetAfter).key(before).u64(changes.len() as u64);
        let frame = changes
            .iter()
            .fold(frame, |frame, (key, expected, desired)| frame.key(key).value(expected).value(desired));
        let values = link.wait_or_cancel(&frame.into_bytes(), changes.len(), until);
        let values = values.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => call.unanswered(link.network(call.started.elapsed())),
            _ => call.failed(error),
        })?;
        self.put_back(link);
        Ok(values)
    }

    fn compare_set_and_get(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        keys: &[&str],
        deadline: Deadline,
        found: &mut dyn FnMut(&[Vec<u8>]) -> Result<()>,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let changed: Vec<&str> = changes.iter().map(|(key, ..)| *key).collect();
        let changing = Call::new(&self.name, "compare_set", &changed, deadline)?;
        check_changes(&changing, None, changes)?;
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        check_size(&call, keys.len(), Frame::new(Op::WaitGet).keys(keys).len())?;
        let mut link = self.link(&call)?;
        // PyTorch's server is asked for the values when they are there.
        let (op, values) = if link.is_own { (Op::WaitGet, keys.len()) } else { (Op::Wait, 0) };
        let wait = Frame::new(op).keys(keys).into_bytes();
        // A server that does not answer, or not all, holds nobody up who does not want to go on.
        let answers = send_changes(&mut link, changes, wait, &mut || self.counted(go_on));
        let answers = answers.map_err(|error| changing.failed(error))??;
        if let Err(error) = found(&answers) {
            link.leave_wait(values).map_err(|error| call.failed(error))?;
            self.put_back(link);
            return Err(error);
        }
        // PyTorch's server without libuv wakes nobody for a key that has come by COMPARE_SET.
        let (is_own, mut have_come, mut asked) = (link.is_own, false, Instant::now());
        let mut go_on = || {
            go_on()?;
            // A thread that makes checks comes here more often, and all ranks ask the same server.
            if is_own || asked.elapsed() < WATCH_INTERVAL {
                return Ok(());
            }
            asked = Instant::now();
            have_come = self.check(keys, deadline)?;
            if have_come { Err(Error::aborted("the keys are there: the wait ends")) } else { Ok(()) }
        };
        let waited = link.wait_for_answer(values, Some(&mut || self.counted(&mut go_on)));
        let waited = waited.map_err(|error| call.failed(error))?;
        if have_come {
            self.put_back(link);
            return self.multi_get(keys, deadline);
        }
        self.waited(&call, link, waited, values)
    }
}

/// Makes the connections that `patience` asks for at the same time, because each takes round trips. Returns the first that stands: on a
/// network that loses packets any of them may be late. The others come later.
fn first_of_several(
    address: &str,
    credentials: &ClientCredentials,
    deadline: Deadline,
    patience: &Patience<'_>,
) -> Result<(Link, Receiver<Result<Link>>)> {
    let is_decided = Arc::new(AtomicBool::new(false));
    let last = Arc::new(Mutex::new(String::new()));
    let (made, coming) = mpsc::channel();
    for index in 0..patience.connections {
        let (to, with, made) = (address.to_owned(), credentials.clone(), made.clone());
        let (is_decided, last, silence) = (Arc::clone(&is_decided), Arc::clone(&last), patience.silence);
        let dial = move || {
            let goes_on = || !is_decided.load(Ordering::Relaxed);
            let patience = Patience { silence, goes_on: &goes_on, connections: 1, reports: false };
            let report =
                |why: &dyn fmt::Display| *last.lock() = format!(", to which it cannot connect: {why}");
            let link = Link::retry_until(&to, &with, deadline, &patience, report);
            // All meet the same errors. If the store is no longer used, the connection is closed here.
            if index == 0 || link.is_ok() {
                drop(made.send(link));
            }
        };
        match thread::Builder::new().name("phalanx-store-dial".into()).spawn(dial) {
            Ok(_) => {}
            Err(_) if index == 0 => {
                let link = Link::connect(address, credentials, deadline, patience)?;
                return Ok((link, mpsc::channel().1));
            }
            // Without it, the call that needs a connection makes it.
            Err(_) => break,
        }
    }
    drop(made);
    let what = || format!("this process waits for the store at {address}{}", last.lock());
    let first = while_waiting_if(patience.reports, what, || {
        let mut asked = Instant::now();
        loop {
            let left = PATIENCE_INTERVAL.saturating_sub(asked.elapsed());
            match coming.recv_timeout(interrupt::at_most(left)) {
                Ok(first) => return first,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::panicked("a thread that connects with the store panicked"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            interrupt::check()?;
            if asked.elapsed() < PATIENCE_INTERVAL {
                continue;
            }
            asked = Instant::now();
            if !(patience.goes_on)() {
                return Err(Error::aborted(format!("the store at {address} is no longer needed")));
            }
        }
    });
    is_decided.store(true, Ordering::Relaxed);
    first.map(|link| (link, coming))
}

fn compare_set(key: &str, expected: &[u8], desired: &[u8]) -> Vec<u8> {
    Frame::new(Op::CompareSet).key(key).value(expected).value(desired).into_bytes()
}

/// Sends the changes, so many together that no side waits for the other to read, and `then` with the last of them. Returns the values in the
/// answers to the changes; an error of `go_on` ends the wait for them.
fn send_changes(
    link: &mut Link,
    changes: &[(&str, &[u8], &[u8])],
    then: Vec<u8>,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> io::Result<Result<Vec<Vec<u8>>>> {
    let (mut requests, mut sent) = (Vec::new(), 0);
    let mut answers = Vec::with_capacity(changes.len());
    let mut exchange = |requests: &mut Vec<u8>, count: usize| -> io::Result<Result<()>> {
        link.send(requests)?;
        requests.clear();
        for _ in 0..count {
            if let Err(error) = link.wait_to_read(go_on)? {
                return Ok(Err(error));
            }
            answers.push(link.value()?);
        }
        Ok(Ok(()))
    };
    for (index, (key, expected, desired)) in changes.iter().enumerate() {
        let request = compare_set(key, expected, desired);
        if !requests.is_empty() && requests.len() + request.len() > PIPELINED {
            if let Err(error) = exchange(&mut requests, index - sent)? {
                return Ok(Err(error));
            }
            sent = index;
        }
        requests.extend(request);
    }
    if requests.len() > PIPELINED {
        if let Err(error) = exchange(&mut requests, changes.len() - sent)? {
            return Ok(Err(error));
        }
        sent = changes.len();
    }
    requests.extend(then);
    Ok(exchange(&mut requests, changes.len() - sent)?.map(|()| answers))
}

/// Checks the caps of changes together, and of each, in a request that also names the key `before`.
fn check_changes(call: &Call<'_>, before: Option<&str>, changes: &[(&str, &[u8], &[u8])]) -> Result<()> {
    changes.iter().try_for_each(|(_, expected, desired)| call.value(expected).and(call.value(desired)))?;
    let bytes = changes.iter().map(|(key, expected, desired)| key.len() + expected.len() + desired.len() + 1);
    check_size(call, changes.len(), before.map_or(0, |key| key.len() + 1) + bytes.sum::<usize>())
}

/// The request that sets `pairs`, whose size is checked.
fn multi_set(call: &Call<'_>, pairs: &[(&str, &[u8])]) -> Result<Frame> {
    pairs.iter().try_for_each(|(_, value)| call.value(value))?;
    check_size(call, pairs.len(), pairs.iter().map(|(key, value)| key.len() + value.len() + 1).sum())?;
    let frame = Frame::new(Op::MultiSet).u64(pairs.len() as u64);
    Ok(pairs.iter().fold(frame, |frame, (key, value)| frame.key(key).value(value)))
}

/// Checks the caps of a whole request.
fn check_size(call: &Call<'_>, count: usize, bytes: usize) -> Result<()> {
    if count <= MAX_COUNT && bytes <= MAX_REQUEST {
        return Ok(());
    }
    Err(call.too_much(count, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tcp::TcpStoreServer;

    #[test]
    fn a_process_that_was_forked_uses_no_connection_of_its_parent() {
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let soon = Deadline::after(Duration::from_secs(20));
        let store = TcpStore::connect(server.local_addr(), soon).unwrap();
        store.idle.lock().iter_mut().for_each(Link::is_of_another_process);
        store.set("key", b"value", soon).unwrap();
        let idle = store.idle.lock();
        assert!(idle.len() == 1 && !idle[0].is_inherited(), "{idle:?}");
    }
}
