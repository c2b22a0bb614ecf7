//! Control messages between ranks: heartbeats, goodbyes, the call in which a rank waits, and the cause of the group's
//! failure.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::rank::{Rank, Sequence};
use crate::wire::frame::Header;

/// Bytes before a message's body: its type and its length.
pub const PREFIX: usize = 5;
/// The shortest message except for a heartbeat: its body says at least which it is.
pub const SHORTEST: u16 = PREFIX as u16 + 1;
/// The longest body.
pub const MAX_BODY: usize = 4 * 1024;
/// The longest content of [`Control::Connected`]: the rest of the body says which message it is, and how long.
pub const MAX_TOLD: usize = MAX_BODY - 16;
/// The longest text in a notice: each of its four texts has a share of the body.
const MAX_TEXT: usize = 1000;

/// A heartbeat. It is one byte, which the kernel accepts whole or not at all. So even if a frozen peer's connection is
/// full, no message after it is torn.
const BEAT: u8 = 0;
/// A length and a body follow.
const MESSAGE: u8 = 1;

/// A message on a control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// The sender has left cleanly.
    Goodbye,
    /// The sender's group has failed.
    Failure(Notice),
    /// The sender reads this connection from now on, and is ready for heartbeats.
    Watching(Introduction),
    /// The sender has been in this collective for a while.
    Waiting(Header),
    /// The sender's last collective, before its goodbye.
    Last(Header),
    /// A call waits for the receiver, and has waited for long.
    LongWait(LongWait),
    /// What the sender, for which a call has waited for long, is in. Sent to rank 0.
    WaitReport(WaitReport),
    /// The sender's latest collective, in answer to a goodbye.
    Latest(Header),
    /// What each rank tells all others when their connections stand, before any other message.
    Connected(Vec<u8>),
    /// The sender is alive.
    #[serde(skip)]
    Beat,
}

/// What a rank sends before its heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// Milliseconds between its heartbeats; 0: it sends none.
    interval: u32,
    /// With it, ranks of the same host can check whether the process runs.
    pub process: Option<ProcessId>,
}

/// Identifies a process, for others that see the same processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The kernel's boot id.
    pub boot: u128,
    /// The pid namespace of `pid`, and the network namespace of its connections.
    pub namespaces: (u64, u64),
    /// Its number in its pid namespace.
    pub pid: u32,
    /// When it started, in the kernel's ticks: its number may have been reused since.
    pub started: u64,
}

impl Introduction {
    /// Heartbeats every `interval`, rounded up to a millisecond; zero if there are none.
    pub fn new(interval: Duration, process: Option<ProcessId>) -> Self {
        // Less than a millisecond is sent as one.
        let milliseconds = interval.as_nanos().div_ceil(1_000_000);
        Self { interval: u32::try_from(milliseconds).unwrap_or(u32::MAX), process }
    }

    /// The time between its heartbeats, in whole milliseconds; zero if it sends none.
    pub fn interval(&self) -> Duration {
        Duration::from_millis(self.interval.into())
    }
}

/// A call that has waited for long, as the rank that waits describes it to the rank that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongWait {
    /// The call that waits.
    pub call: Header,
    /// The rank that waits in it.
    pub origin: Rank,
    /// The rank that `origin` itself waits for.
    pub awaited: Rank,
    /// How long `origin` has waited.
    pub seconds: u32,
    /// How many ranks have passed it on.
    pub hops: u32,
}

/// What the rank at the end of a chain of waits is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AwaitedState {
    /// It has not made the call.
    NotCalled {
        /// The number of its last call of this group; None if it has made none.
        last: Option<Sequence>,
        /// Its call of this group that is in progress.
        running: Option<Header>,
        /// What it waits for otherwise, in its own words.
        elsewhere: Option<String>,
    },
    /// It has made the call, and the data between the ranks does not arrive.
    Called,
}

/// A long wait with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReport {
    /// The wait.
    pub wait: LongWait,
    /// What its end is in.
    pub state: AwaitedState,
}

/// A failure as one rank reports it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// The rank that saw it first, and its host.
    origin: Option<(Rank, String)>,
    kind: Kind,
    cause: String,
    operation: Option<String>,
    sequence: Option<Sequence>,
    peer: Option<Rank>,
    remedy: Option<String>,
}

impl Notice {
    /// The notice of `error`, whose texts are cut to what a message can carry.
    pub fn of(error: &Error) -> Self {
        Self {
            origin: error.rank().zip(error.host().map(cut)),
            kind: error.kind(),
            cause: cut(&error.full_cause()),
            operation: error.operation().map(cut),
            sequence: error.sequence(),
            peer: error.peer(),
            remedy: error.remedy().map(cut),
        }
    }

    /// The same failure, as `reporter` passed it on.
    pub fn into_error(self, reporter: Rank, host: &str) -> Error {
        let (origin, host) = self.origin.unwrap_or_else(|| (reporter, host.to_owned()));
        let mut error = Error::new(self.kind, self.cause).at(origin, host);
        if let Some(operation) = self.operation {
            error = error.in_operation(operation, self.sequence);
        }
        if let Some(remedy) = self.remedy {
            error = error.with_remedy(remedy);
        }
        error.with_peer(self.peer.unwrap_or(origin))
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// The message as it is sent.
pub fn encode(message: &Control) -> Result<Vec<u8>> {
    if *message == Control::Beat {
        return Ok(vec![BEAT]);
    }
    let body = postcard::to_stdvec(message)
        .map_err(|error| Error::protocol("a control message could not be written").with_source(error))?;
    let mut bytes = vec![MESSAGE];
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Whether a message that begins with this byte has a length and a body: all but heartbeats.
pub fn is_message(first: u8) -> bool {
    first == MESSAGE
}

/// The first message in `bytes`, if it is complete, and its length.
pub fn decode(bytes: &[u8]) -> Result<Option<(Control, usize)>> {
    match bytes.first() {
        None => return Ok(None),
        Some(&BEAT) => return Ok(Some((Control::Beat, 1))),
        Some(&MESSAGE) => {}
        Some(other) => {
            return Err(Error::malformed(format!("a control message has the unknown type {other:#04x}")));
        }
    }
    let Some((&[_, a, b, c, d], rest)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > MAX_BODY {
        return Err(Error::malformed(format!(
            "a control message claims {length} bytes; at most {MAX_BODY} are allowed"
        )));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let message = postcard::from_bytes(body)
        .map_err(|error| Error::malformed("a control message could not be read").with_source(error))?;
    Ok(Some((message, PREFIX + length)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::rank::Generation;
    use crate::wire::frame::{Call, HEADER, History, Operation};

    #[test]
    fn a_failure_arrives_with_all_that_it_names() {
        let error = Error::mismatch("x".repeat(5000))
            .with_peer(Rank::new(2))
            .in_operation("barrier", Some(Sequence(3)))
            .with_remedy("call it everywhere");
        let bytes = encode(&Control::Failure(Notice::of(&error))).unwrap();
        assert!(bytes.len() <= PREFIX + MAX_BODY);
        assert!(decode(&bytes[..bytes.len() - 1]).unwrap().is_none());
        let (Control::Failure(notice), used) = decode(&bytes).unwrap().unwrap() else { unreachable!() };
        assert_eq!(used, bytes.len());
        let seen = notice.into_error(Rank::new(1), "b");
        assert!(seen.is_mismatch());
        assert_eq!(
            (seen.peer(), seen.sequence(), seen.rank()),
            (Some(Rank::new(2)), Some(Sequence(3)), Some(Rank::new(1)))
        );
    }

    #[test]
    fn only_a_heartbeat_is_shorter_than_the_shortest_message() {
        assert_eq!(encode(&Control::Goodbye).unwrap().len(), usize::from(SHORTEST));
        assert_eq!(encode(&Control::Beat).unwrap().len(), 1);
    }

    #[test]
    fn a_call_is_told_as_frames_tell_it() {
        let call = Call::new(Operation::AllGather, DType::F32, 8);
        let header = Header {
            call,
            sequence: Sequence(3),
            generation: Generation(1),
            history: History::default(),
            payload: 0,
        };
        let bytes = encode(&Control::Waiting(header)).unwrap();
        assert_eq!(decode(&bytes).unwrap(), Some((Control::Waiting(header), bytes.len())));
        assert!(bytes.ends_with(&header.encode()));
        let mut unknown = bytes.clone();
        unknown[bytes.len() - HEADER + 4] = 99;
        assert!(decode(&unknown).is_err());
    }

    #[test]
    fn a_heartbeat_is_a_byte_between_messages() {
        let process = ProcessId { boot: u128::MAX, namespaces: (u64::MAX, 0), pid: 1, started: 7 };
        let introduction = Introduction::new(Duration::from_micros(1), Some(process));
        assert_eq!(introduction.interval(), Duration::from_millis(1));
        let messages = [Control::Beat, Control::Watching(introduction), Control::Beat, Control::Goodbye];
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message).unwrap()).collect();
        let mut rest = &bytes[..];
        for expected in messages {
            let (message, used) = decode(rest).unwrap().unwrap();
            assert_eq!(message, expected);
            assert_eq!(used == 1, expected == Control::Beat);
            rest = &rest[used..];
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn a_long_claim_is_refused_before_memory_is_taken() {
        let claim = [&[MESSAGE][..], &u32::MAX.to_le_bytes()].concat();
        assert!(decode(&claim).unwrap_err().to_string().contains("at most 4096"));
        assert!(decode(&[2]).unwrap_err().to_string().contains("unknown type"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
            let mut framed = vec![MESSAGE];
            framed.extend((bytes.len() as u32).to_le_bytes());
            framed.extend(&bytes);
            let _ = decode(&framed);
        }
    }
}
