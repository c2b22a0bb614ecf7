//! One client of the server: its handshake, its requests one after the other, its waits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use phalanx_proto::store::server::{Answer, Finished, StoreServer, Then, WaitId};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::access::Admission;
use super::server_stream::Stream;
use crate::wire::store::{Decoder, Op, Request, WAIT_CANCELLED, WAIT_DONE};

/// How long a client may leave a part of its answer unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// The most bytes of what a client has set at its end.
const MAX_AT_END: usize = 1024;
/// The buffer of a validated client.
const BUFFER: usize = 4096;

/// What all connections share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    server: StoreServer,
    /// Who waits on its connection.
    parked: BTreeMap<WaitId, oneshot::Sender<()>>,
}

impl Shared {
    /// Tells those whose waits are over.
    fn wake(&mut self) {
        for wait in self.server.take_over() {
            if let Some(done) = self.parked.remove(&wait) {
                // A receiver that has gone has just been cancelled.
                let _ = done.send(());
            }
        }
    }
}

/// Serves `stream` until its client closes it. What `admitted` gives is kept until then. If the client breaks the protocol, that is the
/// error.
pub(super) async fn serve<T>(
    mut stream: Stream,
    admission: Rc<Admission>,
    shared: Rc<RefCell<Shared>>,
    admitted: impl FnOnce() -> T,
) -> io::Result<()> {
    // It has no buffer before it is admitted.
    admission.admit(&mut stream).await?;
    stream.admit();
    let _inside = admitted();
    let at_end = AtEnd { shared: Rc::clone(&shared), pair: None };
    let stream = BufReader::with_capacity(BUFFER, stream);
    Box::pin(Connection { stream, answers: Vec::new(), shared, at_end }.run()).await
}

struct Connection {
    stream: BufReader<Stream>,
    /// Answers that are not sent yet: those to requests that have come together go out together. Each in a packet of its own, they would
    /// take several round trips of a slow network.
    answers: Vec<u8>,
    shared: Rc<RefCell<Shared>>,
    at_end: AtEnd,
}

/// The key that gets a value when the connection has ended, however it ended, if it is there then.
struct AtEnd {
    shared: Rc<RefCell<Shared>>,
    pair: Option<(Vec<u8>, Vec<u8>)>,
}

impl Drop for AtEnd {
    fn drop(&mut self) {
        let Some((key, value)) = self.pair.take() else { return };
        let mut shared = self.shared.borrow_mut();
        // Whoever has removed it meanwhile does not need it, and nobody would remove it again.
        if !shared.server.has(&key) {
            return;
        }
        // A store that is full keeps what it has: there is nobody to tell.
        let _ = shared.server.set(&key, &value);
        shared.wake();
    }
}

/// A waiting client, which is removed when this is dropped.
struct Parked {
    shared: Rc<RefCell<Shared>>,
    id: WaitId,
    woken: oneshot::Receiver<()>,
    /// What follows when the wait is over.
    then: Then,
}

impl Parked {
    fn new(cell: &Rc<RefCell<Shared>>, id: WaitId, then: Then) -> Self {
        let (done, woken) = oneshot::channel();
        cell.borrow_mut().parked.insert(id, done);
        Self { shared: Rc::clone(cell), id, woken, then }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        shared.parked.remove(&self.id);
        shared.server.forget(self.id);
    }
}

impl Connection {
    async fn run(mut self) -> io::Result<()> {
        let answered = self.answer_requests().await;
        // Also those before a request that ends the connection.
        let sent = self.send_answers().await;
        answered.and(sent)
    }

    async fn answer_requests(&mut self) -> io::Result<()> {
        // A client that does not read its answers cannot use up memory: more than a buffer of them is sent before the next request is read.
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
            let answer = {
                let mut shared = self.shared.borrow_mut();
                let answer = shared.server.execute(request);
                // A request that is refused may have set keys before that.
                shared.wake();
                answer
            };
            match answer.map_err(|refusal| invalid(refusal.to_string()))? {
                Answer::Nothing => {}
                Answer::Bytes(bytes) => self.write(&bytes).await?,
                Answer::Values(values) => self.write_values(Vec::new(), values).await?,
                Answer::Waited(values) => self.write_values(vec![WAIT_DONE], values).await?,
                Answer::Wait { id, then } => self.wait(Parked::new(&self.shared, id, then)).await?,
            }
        }
        Ok(())
    }

    /// The next request; `None` if the client closed its end between two.
    async fn next_request(&mut self) -> io::Result<Option<Request>> {
        if self.stream.buffer().is_empty() {
            self.send_answers().await?;
        }
        if self.stream.fill_buf().await?.is_empty() {
            return Ok(None);
        }
        let mut decoder = Decoder::default();
        loop {
            let need = decoder.need();
            // No answer waits for what the client may send only when it has that.
            if self.stream.buffer().len() < need {
                self.send_answers().await?;
            }
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
        self.send_answers().await?;
        loop {
            let next = tokio::select! {
                _ = &mut parked.woken => None,
                bytes = self.stream.fill_buf() => Some(bytes?.first().copied()),
            };
            return match next {
                None => {
                    let finished = {
                        let mut shared = self.shared.borrow_mut();
                        let finished = shared.server.finish(&parked.then);
                        // What was changed may be what others wait for.
                        shared.wake();
                        finished.map_err(|refusal| invalid(refusal.to_string()))?
                    };
                    match finished {
                        Finished::Values(values) => self.write_values(vec![WAIT_DONE], values).await,
                        Finished::Again(id) => {
                            let then = std::mem::replace(&mut parked.then, Then::Get(Vec::new()));
                            parked = Parked::new(&self.shared, id, then);
                            continue;
                        }
                    }
                }
                Some(Some(byte)) if byte == Op::CancelWait as u8 => {
                    drop(parked);
                    self.stream.consume(1);
                    self.write(&[WAIT_CANCELLED]).await
                }
                Some(None) => Ok(()),
                Some(Some(byte)) => Err(invalid(format!("operation {byte} while it waits"))),
            };
        }
    }

    /// Writes `head`, and each value with its length.
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

    /// Adds to the answers, and sends them if they are many.
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.answers.len() + bytes.len() > BUFFER {
            self.send_answers().await?;
        }
        if bytes.len() > BUFFER {
            return self.send(bytes).await;
        }
        self.answers.extend_from_slice(bytes);
        Ok(())
    }

    async fn send_answers(&mut self) -> io::Result<()> {
        // A connection on which nothing happens has no memory for them.
        let answers = std::mem::take(&mut self.answers);
        if answers.is_empty() { Ok(()) } else { self.send(&answers).await }
    }

    async fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
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

pub(super) fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
