//! Messages with tags, and from whoever sends first.
//!
//! The core's messages have no tags: each direction of each pair of ranks is a line in order. Here every message is two of
//! them, a head with tag and length, and then the elements, straight into the tensor that waits for them. A message
//! that nobody waits for yet is kept until somebody does. Pickled objects are messages like others, of a type and of a length of their own,
//! which their receiver does not know before.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use phalanx::{Error, INTERRUPT_INTERVAL, ProcessGroup, Rank};

use crate::dtypes;
use crate::interrupt;
use crate::lane::Lane;
use crate::memory::Memory;
use crate::objects;
use crate::work::{Outcome, Pending};

/// Tag, bytes and the number of the elements' type.
const HEAD: usize = 3;
/// Messages that nobody waits for take at most this many bytes, unless `PHALANX_UNEXPECTED_BYTES` says how many.
const UNEXPECTED_BYTES: usize = 1 << 30;
/// The tag of messages with objects. It is that of tensors for which the program names none, so that PyTorch's function for objects on one rank, and
/// that of `phalanx_torch` on the other, meet, and are an error at once.
pub const OBJECTS_TAG: i64 = 0;
/// Tags that an error names.
const NAMED_TAGS: usize = 8;
/// How long a receive from any rank sleeps between looks at the lines; it begins with the first, and doubles it.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A group's messages on one rank.
pub struct Messages {
    outbound: Vec<Lane>,
    inbound: Vec<Lane>,
    from_any: Lane,
    received: Arc<Received>,
}

/// How a message is called.
pub struct Call {
    /// The group, with the limit of the call.
    pub group: ProcessGroup,
    pub timeout: Duration,
    /// Whether the caller waits for the end.
    pub wait: bool,
    pub pending: Arc<Pending>,
}

/// What a message has.
pub enum Content {
    Elements(Memory),
    /// Pickled objects.
    Parcel(Vec<u8>),
}

/// Where a receive puts what comes.
pub enum Place {
    /// As many elements as these.
    Elements(Memory),
    /// Pickled objects, however many they are.
    Parcel(Arc<Mutex<Vec<u8>>>),
}

/// What receives wait for, and what has come without one.
struct Received {
    table: Mutex<Table>,
    /// Locked by whoever receives from the peer.
    lines: Vec<Mutex<()>>,
}

struct Table {
    next: u64,
    waiting: Vec<Waiting>,
    unexpected: VecDeque<Message>,
    /// What `unexpected` takes, and what is being received for it.
    kept: usize,
    most_kept: usize,
}

/// A receive that waits for its message. Its end is told in any case, even if the thread that delivers it panics.
struct Waiting {
    number: u64,
    from: Option<Rank>,
    tag: i64,
    place: Place,
    pending: Arc<Pending>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Nothing, if the receive has ended.
        self.pending.complete(Err(Error::aborted("the receive has been given up on this rank")));
    }
}

struct Message {
    from: Rank,
    head: Head,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Head {
    tag: i64,
    bytes: usize,
    /// The name of the elements' type, and how many bytes one of them is; None if the peer has named none that is known.
    kind: Option<(&'static str, usize)>,
}

impl Messages {
    pub fn new(rank: Rank, world: usize, most_kept: usize) -> Self {
        let lane = |what: String| Lane::new(format!("phalanx-{what}"), || {});
        let lines = (0..world).map(|_| Mutex::new(())).collect();
        let table = Table { next: 0, waiting: Vec::new(), unexpected: VecDeque::new(), kept: 0, most_kept };
        Self {
            outbound: (0..world).map(|peer| lane(format!("to-{peer}"))).collect(),
            inbound: (0..world).map(|peer| lane(format!("from-{peer}"))).collect(),
            from_any: lane(format!("any-{rank}")),
            received: Arc::new(Received { table: Mutex::new(table), lines }),
        }
    }

    /// Returns when all calls have ended, and takes no more.
    pub fn close(&self) {
        self.lanes().for_each(Lane::close);
    }

    /// Returns when everything has been sent, and received, or what was to be received has not come within `patience`:
    /// then what that is.
    pub fn close_outbound(&self, patience: Duration) -> Option<String> {
        self.outbound.iter().for_each(Lane::close);
        self.inbound.iter().chain([&self.from_any]).for_each(Lane::close_later);
        let (deadline, mut pause) = (Instant::now() + patience, PAUSES.0);
        loop {
            let awaited = self.received.table.lock().waiting.first().map(|waiting| match waiting.from {
                Some(from) => format!("a message from rank {from} with tag {}", waiting.tag),
                None => format!("a message from any rank with tag {}", waiting.tag),
            })?;
            if Instant::now() >= deadline {
                return Some(awaited);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Takes no more calls.
    pub fn close_later(&self) {
        self.lanes().for_each(Lane::close_later);
    }

    /// Whether nothing is being sent, and nothing is waited for.
    pub fn is_idle(&self) -> bool {
        self.lanes().all(Lane::is_idle) && self.received.table.lock().waiting.is_empty()
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.outbound.iter().chain(&self.inbound).chain([&self.from_any])
    }

    /// Sends; returns at once if the call does not wait.
    pub fn send(&self, call: Call, to: Rank, tag: i64, content: Content) {
        let Call { group, wait, pending, .. } = call;
        let Some(lane) = self.outbound.get(to.index()) else { return pending.complete(Err(no_rank(to))) };
        let send = move || {
            let (bytes, kind) = match &content {
                // Every type that memory can have has a number.
                Content::Elements(memory) => {
                    (memory.as_bytes(), dtypes::number(memory.seen().name).unwrap_or(-1))
                }
                Content::Parcel(parcel) => (parcel.as_slice(), dtypes::OBJECTS.1),
            };
            // A short message would be sent, though nobody receives it.
            if let Some(error) = group.left_by(|rank| rank == to) {
                return Err(error);
            }
            group.send(&[tag, bytes.len() as i64, kind], to)?;
            if !bytes.is_empty() {
                group.send(bytes, to)?;
            }
            Ok(None)
        };
        match wait {
            true => pending.complete(lane.run(send)),
            false => lane.submit(send, move |outcome| pending.complete(outcome)),
        }
    }

    /// Receives from a rank, or from any; returns at once if the call does not wait.
    pub fn recv(&self, call: Call, from: Option<Rank>, tag: i64, place: Place) {
        let Call { group, timeout, wait, pending } = call;
        let lane = match from {
            None => &self.from_any,
            Some(from) => match self.inbound.get(from.index()) {
                Some(lane) => lane,
                None => return pending.complete(Err(no_rank(from))),
            },
        };
        let number = {
            let mut table = self.received.table.lock();
            let number = table.next;
            table.next += 1;
            let waiting = Waiting { number, from, tag, place, pending: pending.clone() };
            if let Some(message) = table.unexpected_for(from, tag) {
                drop(table);
                return deliver_kept(&group, message, waiting);
            }
            table.waiting.push(waiting);
            number
        };
        let (received, deadline) = (self.received.clone(), Instant::now() + timeout);
        let receive = move || match from {
            Some(from) => received.serve(&group, from, number, deadline),
            None => received.serve_any(&group, number, deadline),
        };
        // The message itself completes the operation, perhaps on another lane's thread.
        let received = self.received.clone();
        let done = move |outcome: Outcome| {
            if let Err(error) = outcome {
                received.give_up(number, &error);
            }
        };
        match wait {
            true => {
                lane.start(receive, done);
                // Not for what is before it on the lane: that may wait for a later message, and brings this one.
                if let Some(Err(error)) = pending.wait(None) {
                    self.received.give_up(number, &error);
                }
            }
            false => lane.submit(receive, done),
        }
    }
}

impl Received {
    fn awaits(&self, number: u64) -> bool {
        self.table.lock().waiting.iter().any(|waiting| waiting.number == number)
    }

    /// Receives from `peer` until the receive `number` has its message.
    fn serve(&self, group: &ProcessGroup, peer: Rank, number: u64, deadline: Instant) -> Outcome {
        while self.awaits(number) {
            let line = &self.lines[peer.index()];
            let _line = loop {
                match line.try_lock_for(INTERRUPT_INTERVAL) {
                    Some(line) => break line,
                    None => interrupt::look()?,
                }
            };
            if self.awaits(number) {
                self.receive_one(group, peer, deadline)?;
            }
        }
        Ok(None)
    }

    /// Receives from whoever sends until the receive `number` has its message.
    fn serve_any(&self, group: &ProcessGroup, number: u64, deadline: Instant) -> Outcome {
        let (mut pause, mut looks) = (PAUSES.0, interrupt::Looks::new());
        while self.awaits(number) {
            let mut moved = false;
            for peer in group.world_size().ranks().filter(|peer| *peer != group.rank()) {
                // Whoever holds the line receives for all.
                if let Some(_line) = self.lines[peer.index()].try_lock()
                    && group.probe(peer)?
                {
                    self.receive_one(group, peer, deadline)?;
                    moved = true;
                }
            }
            if moved {
                pause = PAUSES.0;
                continue;
            }
            let late = || (Instant::now() >= deadline).then(late_from_any);
            if let Some(error) = self.none_is_left(group, number).or_else(late) {
                group.abort(error.clone());
                return Err(error);
            }
            looks.look_if_due()?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
        Ok(None)
    }

    /// The error if nothing can come any more for the receive `number`, which takes what any rank sends.
    fn none_is_left(&self, group: &ProcessGroup, number: u64) -> Option<Error> {
        let error = group.left_by_all()?;
        // Whoever holds a line may be delivering the last message, which may be for this receive.
        let lines: Option<Vec<_>> = self.lines.iter().map(|line| line.try_lock()).collect();
        let is_over = lines.is_some() && self.awaits(number);
        is_over.then(|| {
            error
                .in_operation("recv from any source", None)
                .with_remedy("does a rank send to this one, and with this tag, before it leaves?")
        })
    }

    /// Receives the next message of a line, which the caller has locked.
    fn receive_one(&self, group: &ProcessGroup, peer: Rank, deadline: Instant) -> Result<(), Error> {
        let group = group.with_timeout(deadline.saturating_duration_since(Instant::now()));
        let mut head = [0i64; HEAD];
        group.recv(&mut head, peer)?;
        let head = Head::parse(head, peer)?;
        let waiting = self.take(peer, head.tag);
        if let Some(mut waiting) = waiting {
            let received = head.check(&group, peer, &waiting.place).and_then(|()| {
                waiting.place.fill(&group, head.bytes, |bytes| match bytes.len() {
                    0 => Ok(()),
                    _ => group.recv(bytes, peer),
                })
            });
            waiting.pending.complete(received.clone().map(|()| Some(peer.get())));
            return received;
        }
        // The length is the peer's word until the core has compared it with the message's own: room is made within the limit.
        self.table.lock().admit(peer, head).inspect_err(|error| group.abort(error.clone()))?;
        let mut bytes = Vec::new();
        let received = bytes.try_reserve_exact(head.bytes).map_err(|error| {
            let cause = format!("no memory for the {} bytes of a message from rank {peer}", head.bytes);
            let error = Error::out_of_memory(cause)
                .with_source(error)
                .with_remedy("receive messages sooner, or send smaller ones");
            // Its content would be taken for the next message's head.
            group.abort(error.clone());
            error
        });
        let received = received.and_then(|()| {
            bytes.resize(head.bytes, 0u8);
            match head.bytes {
                0 => Ok(()),
                _ => group.recv(&mut bytes, peer),
            }
        });
        let message = Message { from: peer, head, bytes };
        let mut table = self.table.lock();
        if let Err(error) = received {
            table.kept -= head.cost();
            return Err(error);
        }
        table.unexpected.push_back(message);
        // Somebody may have called meanwhile.
        if let Some(waiting) = table.take(peer, head.tag)
            && let Some(message) = table.unexpected_for(waiting.from, waiting.tag)
        {
            drop(table);
            deliver_kept(&group, message, waiting);
        }
        Ok(())
    }

    fn take(&self, peer: Rank, tag: i64) -> Option<Waiting> {
        self.table.lock().take(peer, tag)
    }

    fn give_up(&self, number: u64, error: &Error) {
        let mut table = self.table.lock();
        if let Some(place) = table.waiting.iter().position(|waiting| waiting.number == number) {
            let waiting = table.waiting.remove(place);
            drop(table);
            waiting.pending.complete(Err(error.clone()));
        }
    }
}

impl Table {
    /// The first receive that a message of `peer` with this tag is for.
    fn take(&mut self, peer: Rank, tag: i64) -> Option<Waiting> {
        let is_for = |waiting: &Waiting| waiting.tag == tag && waiting.from.is_none_or(|from| from == peer);
        let place = self.waiting.iter().position(is_for)?;
        Some(self.waiting.remove(place))
    }

    /// Takes the first message kept for a receive from `from`, or from any rank, with this tag.
    fn unexpected_for(&mut self, from: Option<Rank>, tag: i64) -> Option<Message> {
        let is_it =
            |message: &Message| message.head.tag == tag && from.is_none_or(|from| from == message.from);
        let place = self.unexpected.iter().position(is_it)?;
        let message = self.unexpected.remove(place)?;
        self.kept -= message.head.cost();
        Some(message)
    }

    /// Counts a message that is to be kept. An error if that were too much.
    fn admit(&mut self, peer: Rank, head: Head) -> Result<(), Error> {
        let kept = self.kept.saturating_add(head.cost());
        if kept <= self.most_kept {
            self.kept = kept;
            return Ok(());
        }
        let mut tags: Vec<i64> =
            self.unexpected.iter().map(|message| message.head.tag).chain([head.tag]).collect();
        tags.sort_unstable();
        tags.dedup();
        let more = if tags.len() > NAMED_TAGS { ", ..." } else { "" };
        let tags: Vec<String> = tags.iter().take(NAMED_TAGS).map(i64::to_string).collect();
        let (messages, most) = (self.unexpected.len() + 1, self.most_kept);
        let cause = format!(
            "{messages} messages that this rank does not receive, the last with tag {} from rank {peer}, need {kept} bytes, \
             and at most {most} are kept; their tags: {}{more}",
            head.tag,
            tags.join(", "),
        );
        Err(Error::other(cause).with_remedy(
            "receive these tags before later messages of the same rank, or allow more bytes with PHALANX_UNEXPECTED_BYTES",
        ))
    }
}

/// How many bytes of messages that nobody waits for are kept, as the environment says.
pub fn unexpected_bytes() -> Result<usize, Error> {
    match phalanx::env::variable("PHALANX_UNEXPECTED_BYTES").unwrap_or_default() {
        text if text.is_empty() => Ok(UNEXPECTED_BYTES),
        text => text.parse().map_err(|_| {
            Error::invalid_argument(format!(
                "PHALANX_UNEXPECTED_BYTES is {text:?}, and must be a number of bytes"
            ))
        }),
    }
}

impl Head {
    /// What it takes to keep the message.
    fn cost(self) -> usize {
        self.bytes.saturating_add(size_of::<Message>())
    }

    fn parse([tag, bytes, kind]: [i64; HEAD], peer: Rank) -> Result<Self, Error> {
        let kind = dtypes::numbered(kind);
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes =
            bytes.ok_or_else(|| Error::mismatch(format!("rank {peer} has sent no head of a message")))?;
        Ok(Self { tag, bytes, kind })
    }

    /// Is it the message that `place` is for? If not, the group fails: the lengths of all that follows are in doubt.
    fn check(self, group: &ProcessGroup, peer: Rank, place: &Place) -> Result<(), Error> {
        let is_parcel = self.kind.is_some_and(|(name, _)| name == dtypes::OBJECTS.0);
        let memory = match place {
            Place::Elements(memory) => memory,
            Place::Parcel(_) if is_parcel => return Ok(()),
            Place::Parcel(_) => return Err(self.other_call(group, peer, "objects")),
        };
        // By name: to the core, int16 and float8 are bytes, as uint8 is, and a complex number is two floats.
        let (seen, length) = (memory.seen(), memory.as_bytes().len());
        if self.bytes == length && self.kind.is_some_and(|(name, _)| name == seen.name) {
            return Ok(());
        }
        if is_parcel {
            let elements = format!("{} x {}", memory.len() / seen.each, seen.name);
            return Err(self.other_call(group, peer, &elements));
        }
        let (rank, tag, sent) = (group.rank(), self.tag, self.sent());
        let error = Error::mismatch(format!(
            "rank {peer} has sent {sent} with tag {tag} to rank {rank}, which receives {} x {}",
            memory.len() / seen.each,
            seen.name
        ))
        .with_remedy("send and receive tensors of the same type and number of elements");
        group.abort(error.clone());
        Err(error)
    }

    /// Fails the group: one of two ranks has called a function for objects of `phalanx_torch`, and the other has not.
    fn other_call(self, group: &ProcessGroup, peer: Rank, awaited: &str) -> Error {
        let (rank, tag, sent) = (group.rank(), self.tag, self.sent());
        let error = Error::mismatch(format!(
            "rank {peer} has sent {sent} with tag {tag} to rank {rank}, which receives {awaited}"
        ))
        .with_peer(peer)
        .with_remedy(
            "call send_object_list and recv_object_list of phalanx_torch on both ranks, or of torch.distributed on both",
        );
        group.abort(error.clone());
        error
    }

    /// What the peer says that it has sent.
    fn sent(self) -> String {
        match self.kind {
            Some((name, _)) if name == dtypes::OBJECTS.0 => "objects".to_owned(),
            Some((name, bytes)) => format!("{} x {name}", self.bytes / bytes),
            None => format!("{} bytes of a type that this rank does not know", self.bytes),
        }
    }
}

impl Place {
    /// Lets `receive` write a message of `bytes` bytes, which has been found to be for this.
    fn fill(
        &mut self,
        group: &ProcessGroup,
        bytes: usize,
        receive: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Elements(memory) => receive(memory.as_bytes_mut()),
            Self::Parcel(parcel) => {
                // The length is the peer's word.
                let mut whole = objects::zeroed(group, bytes)?;
                receive(&mut whole)?;
                *parcel.lock() = whole;
                Ok(())
            }
        }
    }
}

fn deliver_kept(group: &ProcessGroup, message: Message, mut waiting: Waiting) {
    let Message { from, head, bytes } = message;
    let outcome = head.check(group, from, &waiting.place).and_then(|()| {
        waiting.place.fill(group, bytes.len(), |place| {
            place.copy_from_slice(&bytes);
            Ok(())
        })
    });
    waiting.pending.complete(outcome.map(|()| Some(from.get())));
}

fn late_from_any() -> Error {
    Error::timeout("recv from any source: no rank has sent a message with this tag in time")
        .with_remedy("does a rank send to this one? A longer time-out can be set on the group")
}

fn no_rank(rank: Rank) -> Error {
    Error::invalid_argument(format!("rank {rank} is not a rank of this group"))
}
