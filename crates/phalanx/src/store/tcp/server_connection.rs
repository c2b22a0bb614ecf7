//! One client of the server: its handshake, its requests one after the other, its waits.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::access::Admission;
use super::server_stream::Stream;
use super::waiters::Waiters;
use crate::store::table::{MAX_BYTES, Refusal, Table};
use crate::wire::store::{
    CHECK_NOT_READY, CHECK_READY, Decoder, OWN_ECHO, OWN_FAREWELL, OWN_PING, OWN_PING_AGAIN, Op, Request,
    WAIT_CANCELLED, WAIT_DONE,
};

/// How long a client may leave a part of its answer unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a client that is sent away may take to close its connection.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);
/// The most bytes of what a client has set at its end.
const MAX_AT_END: usize = 1024;
/// The buffer of a validated client.
const BUFFER: usize = 4096;

/// What all connections share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    table: Table,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    queued_bytes: usize,
    waiters: Waiters,
    barriers: Waiters,
    /// Only clients that are here already are still served, until they have gone.
    pub is_ending: bool,
}

/// Serves `stream` until its client closes it. If the client breaks the protocol, that is the error.
pub(super) async fn serve(
    mut stream: Stream,
    admission: Rc<Admission>,
    shared: Rc<RefCell<Shared>>,
    admitted: impl FnOnce(),
) -> io::Result<()> {
    // It has no buffer before it is admitted.
    admission.admit(&mut stream).await?;
    stream.admit();
    admitted();
    let at_end = AtEnd { shared: Rc::clone(&shared), pair: None };
    Box::pin(Connection { stream: BufReader::with_capacity(BUFFER, stream), shared, at_end }.run()).await
}

struct Connection {
    stream: BufReader<Stream>,
    shared: Rc<RefCell<Shared>>,
    at_end: AtEnd,
}

/// The key that gets a value when the connection has ended, however it ended.
struct AtEnd {
    shared: Rc<RefCell<Shared>>,
    pair: Option<(Vec<u8>, Vec<u8>)>,
}

impl Drop for AtEnd {
    fn drop(&mut self) {
        let Some((key, value)) = self.pair.take() else { return };
        let mut shared = self.shared.borrow_mut();
        // A store that is full keeps what it has: there is nobody to tell.
        if shared.table.set(&key, value.as_slice()).is_ok() {
            shared.waiters.wake_all(&key);
        }
    }
}

/// The result of a request.
enum Answer {
    Nothing,
    Bytes(Vec<u8>),
    /// Each preceded by its length.
    Values(Vec<Arc<[u8]>>),
    /// The answer to a wait that is over, and the values that it was for.
    Waited(Vec<Arc<[u8]>>),
    Wait(Parked),
    /// The last one: the connection is closed.
    Farewell,
}

/// A waiting client, which is removed when this is dropped.
struct Parked {
    shared: Rc<RefCell<Shared>>,
    barrier: bool,
    id: u64,
    woken: oneshot::Receiver<()>,
    /// The keys whose values it gets when the wait is over.
    wanted: Vec<Vec<u8>>,
}

impl Drop for Parked {
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        if self.barrier { &mut shared.barriers } else { &mut shared.waiters }.remove(self.id);
    }
}

impl Connection {
    async fn run(mut self) -> io::Result<()> {
        // The next request is read only when the last answer has been taken, so that a client that does not read cannot
        // use up memory.
        while let Some(mut request) = self.next_request().await? {
            if let (Op::SetAtEnd, [key, value]) = (request.op, request.strings.as_mut_slice()) {
                // A connection holds it outside of the table, whose size is limited as a whole.
                if key.len() + value.len() > MAX_AT_END {
                    return Err(invalid(format!(
                        "what is set at the end takes more than {MAX_AT_END} bytes"
                    )));
                }
                self.at_end.pair = Some((std::mem::take(key), std::mem::take(value)));
                continue;
            }
            match execute(&self.shared, request).map_err(|refusal| invalid(refusal.to_string()))? {
                Answer::Nothing => {}
                Answer::Bytes(bytes) => self.write(&bytes).await?,
                Answer::Values(values) => self.write_values(Vec::new(), values).await?,
                Answer::Waited(values) => self.write_values(vec![WAIT_DONE], values).await?,
                Answer::Wait(parked) => self.wait(parked).await?,
                Answer::Farewell => return self.bid_farewell().await,
            }
        }
        Ok(())
    }

    /// Tells a new client that this store is about to end. A connection that is closed with unread data is reset, and the client might
    /// lose the message; so what the client has sent meanwhile is read.
    async fn bid_farewell(&mut self) -> io::Result<()> {
        self.write(&OWN_FAREWELL.to_le_bytes()).await?;
        timeout(FAREWELL_TIMEOUT, async {
            self.stream.shutdown().await?;
            loop {
                let unread = self.stream.fill_buf().await?.len();
                if unread == 0 {
                    return Ok(());
                }
                self.stream.consume(unread);
            }
        })
        .await?
    }

    /// The next request; `None` if the client closed its end between two.
    async fn next_request(&mut self) -> io::Result<Option<Request>> {
        if self.stream.fill_buf().await?.is_empty() {
            return Ok(None);
        }
        let mut decoder = Decoder::default();
        loop {
            let need = decoder.need();
            // Memory grows with the bytes that have arrived, not with the announced length.
            let mut bytes = Vec::with_capacity(need.min(BUFFER));
            (&mut self.stream).take(need as u64).read_to_end(&mut bytes).await?;
            if bytes.len() < need {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match decoder.feed(bytes) {
                Ok(None) => {}
                Ok(request) => return Ok(request),
                Err(malformed) => return Err(invalid(malformed.to_string())),
            }
        }
    }

    async fn wait(&mut self, mut parked: Parked) -> io::Result<()> {
        let next = tokio::select! {
            _ = &mut parked.woken => None,
            bytes = self.stream.fill_buf() => Some(bytes?.first().copied()),
        };
        match next {
            None => {
                let values = values(&self.shared.borrow().table, &parked.wanted);
                self.write_values(vec![WAIT_DONE], values).await
            }
            Some(Some(byte)) if byte == Op::CancelWait as u8 => {
                drop(parked);
                self.stream.consume(1);
                self.write(&[WAIT_CANCELLED]).await
            }
            Some(None) => Ok(()),
            Some(Some(byte)) => Err(invalid(format!("operation {byte} while it waits"))),
        }
    }

    /// Writes `head`, and each value with its length; what is short is written at once, so that it goes out in one packet.
    async fn write_values(&mut self, head: Vec<u8>, values: Vec<Arc<[u8]>>) -> io::Result<()> {
        let mut bytes = head;
        for value in values {
            bytes.extend((value.len() as u64).to_le_bytes());
            if bytes.len() + value.len() > BUFFER {
                self.write(&bytes).await?;
                bytes.clear();
                self.write(&value).await?;
            } else {
                bytes.extend_from_slice(&value);
            }
        }
        self.write(&bytes).await
    }

    async fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = timeout(WRITE_TIMEOUT, self.stream.write(bytes)).await??;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[written..];
        }
        timeout(WRITE_TIMEOUT, self.stream.flush()).await?
    }
}

/// Executes `request`. A refusal closes the connection, because the protocol has no answer for it.
fn execute(cell: &Rc<RefCell<Shared>>, request: Request) -> Result<Answer, Refusal> {
    let mut shared = cell.borrow_mut();
    let is_ending = shared.is_ending;
    let Shared { table, waiters, .. } = &mut *shared;
    let Request { op, strings, int } = request;
    let answer = match (op, strings.as_slice()) {
        (Op::Set, [key, value]) => {
            table.set(key, value.as_slice())?;
            waiters.wake_all(key);
            Answer::Nothing
        }
        (Op::Append, [key, value]) => {
            table.append(key, value)?;
            waiters.wake_all(key);
            Answer::Nothing
        }
        (Op::MultiSet, pairs) => {
            for pair in pairs.chunks_exact(2) {
                table.set(&pair[0], pair[1].as_slice())?;
                waiters.wake_all(&pair[0]);
            }
            Answer::Nothing
        }
        (Op::CompareSet, [key, expected, desired]) => {
            let (value, written) = table.compare_set(key, expected, desired)?;
            if written {
                waiters.wake_all(key);
            }
            Answer::Values(vec![value])
        }
        (Op::Add, [key]) => {
            let sum = table.add(key, int)?;
            waiters.wake_all(key);
            integer(sum)
        }
        (Op::Get | Op::MultiGet, keys) => Answer::Values(values(table, keys)),
        (Op::Delete, [key]) => integer(i64::from(table.delete(key))),
        (Op::NumKeys, _) => integer(count(table.len())),
        (Op::ListKeys, _) => list_keys(table),
        (Op::Ping, _) if int == i64::from(OWN_PING) && is_ending => Answer::Farewell,
        (Op::Ping, _) if [OWN_PING, OWN_PING_AGAIN].map(i64::from).contains(&int) => {
            Answer::Bytes(OWN_ECHO.to_le_bytes().to_vec())
        }
        (Op::Ping, _) => Answer::Bytes(int.to_le_bytes()[..4].to_vec()),
        (Op::CancelWait, _) => Answer::Bytes(vec![WAIT_CANCELLED]),
        (Op::Check, keys) => {
            let ready = keys.iter().all(|key| shared.has(key));
            Answer::Bytes(vec![if ready { CHECK_READY } else { CHECK_NOT_READY }])
        }
        (Op::Wait | Op::WaitGet, keys) => {
            let mut missing: Vec<Vec<u8>> = keys.iter().filter(|key| !shared.has(key)).cloned().collect();
            missing.sort_unstable();
            missing.dedup();
            match (op == Op::WaitGet, missing.is_empty()) {
                (true, true) => Answer::Waited(values(&shared.table, keys)),
                (true, false) => park(cell, &mut shared.waiters, missing, (false, strings)),
                (false, _) => park(cell, &mut shared.waiters, missing, (false, Vec::new())),
            }
        }
        (Op::Barrier, [key]) => {
            let arrived = table.add(key, 1)?;
            waiters.wake_all(key);
            if arrived >= int {
                shared.barriers.wake_all(key);
                Answer::Bytes(vec![WAIT_DONE])
            } else {
                park(cell, &mut shared.barriers, vec![key.clone()], (true, Vec::new()))
            }
        }
        (Op::QueuePush, [key, value]) => {
            shared.push(key, value)?;
            Answer::Nothing
        }
        (Op::QueuePop, [key]) => shared.pop(key).map_or(integer(0), |value| {
            let mut bytes = 1_i64.to_le_bytes().to_vec();
            bytes.extend((value.len() as u64).to_le_bytes());
            bytes.extend(value);
            Answer::Bytes(bytes)
        }),
        (Op::QueueLen, [key]) => integer(count(shared.queues.get(key).map_or(0, VecDeque::len))),
        // The decoder gives each operation its strings; `Validate` comes only once, and `SetAtEnd` is the connection's.
        _ => Answer::Nothing,
    };
    Ok(answer)
}

impl Shared {
    fn has(&self, key: &[u8]) -> bool {
        self.table.contains(key) || self.queues.contains_key(key)
    }

    fn push(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let bytes = self.queued_bytes + queue_cost(key, value);
        if bytes > MAX_BYTES {
            return Err(Refusal::ManyBytes(self.queued_bytes));
        }
        self.queued_bytes = bytes;
        self.queues.entry(key.to_vec()).or_default().push_back(value.to_vec());
        self.waiters.wake_one(key);
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        self.queued_bytes -= value.as_ref().map_or(0, |value| queue_cost(key, value));
        value
    }
}

/// An item counts with its key and the overhead of a small vector, so that empty ones are limited too.
fn queue_cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 64
}

/// The values of `keys`. As in PyTorch's server, an absent key reads as empty: clients wait for it first.
fn values(table: &Table, keys: &[Vec<u8>]) -> Vec<Arc<[u8]>> {
    keys.iter().map(|key| table.get(key).unwrap_or_default()).collect()
}

fn park(
    cell: &Rc<RefCell<Shared>>,
    waiters: &mut Waiters,
    missing: Vec<Vec<u8>>,
    (barrier, wanted): (bool, Vec<Vec<u8>>),
) -> Answer {
    if missing.is_empty() {
        return Answer::Bytes(vec![WAIT_DONE]);
    }
    let (id, woken) = waiters.add(missing);
    Answer::Wait(Parked { shared: Rc::clone(cell), barrier, id, woken, wanted })
}

/// All keys but those of PyTorch's own start-up.
fn list_keys(table: &Table) -> Answer {
    let keys: Vec<Arc<[u8]>> = table.keys().filter(|key| !key.starts_with(b"init/")).map(Arc::from).collect();
    let mut bytes = count(keys.len()).to_le_bytes().to_vec();
    for key in keys {
        bytes.extend((key.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&key);
    }
    Answer::Bytes(bytes)
}

fn integer(number: i64) -> Answer {
    Answer::Bytes(number.to_le_bytes().to_vec())
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
