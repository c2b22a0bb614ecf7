//! The store's requests on the wire: PyTorch's TCPStore protocol, described in `docs/wire.md`.
//!
//! There is no I/O here. [`Decoder`] says how many bytes it wants next, never more than the caps allow, and is fed
//! exactly those; [`Frame`] builds a request.

/// The longest key, in bytes.
pub const MAX_KEY: usize = 8 * 1024;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 8 * 1024 * 1024;
/// A client sends it after [`Op::Validate`], so that a foreign client is recognised.
pub const MAGIC: u32 = 0x3C85_F7CE;
/// The longest key on the wire: a user's key and its leading `/`.
pub const MAX_WIRE_KEY: usize = MAX_KEY + 1;
/// The most keys or pairs of one request.
pub const MAX_COUNT: usize = 65_536;
/// The most bytes of keys and values of one request.
pub const MAX_REQUEST: usize = 64 * 1024 * 1024;

/// A client of ours sends this number in the ping of its greeting. PyTorch's server returns it, a server of ours returns
/// [`OWN_ECHO`]. PyTorch's clients send their process id, which is smaller. It changes whenever a server of ours learns an operation.
pub const OWN_PING: u32 = 0x5048_4C5A;
/// The answer of a server of ours, which knows [`Op::WaitGet`], [`Op::SetAtEnd`] and [`Op::CompareSetAfter`].
pub const OWN_ECHO: u32 = !OWN_PING;

/// The answer to [`Op::Wait`], [`Op::WaitGet`], [`Op::CompareSetAfter`] and [`Op::Barrier`] when the wait is over.
pub const WAIT_DONE: u8 = 0;
/// The answer to [`Op::CancelWait`].
pub const WAIT_CANCELLED: u8 = 1;
/// The answer to [`Op::Check`] if all keys are there.
pub const CHECK_READY: u8 = 0;
/// The answer to [`Op::Check`] if a key is missing.
pub const CHECK_NOT_READY: u8 = 1;

/// The first byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// The first request: [`MAGIC`] follows.
    Validate = 0,
    /// Writes a value.
    Set = 1,
    /// Writes the second value if the key has the first. A key without a value has the empty one.
    CompareSet = 2,
    /// Reads a value.
    Get = 3,
    /// Adds to the number that a value is.
    Add = 4,
    /// Tells whether all keys are there.
    Check = 5,
    /// Is answered when all keys are there.
    Wait = 6,
    /// Counts the keys.
    NumKeys = 7,
    /// Removes a key.
    Delete = 8,
    /// Adds bytes to a value.
    Append = 9,
    /// Reads several values.
    MultiGet = 10,
    /// Writes several values.
    MultiSet = 11,
    /// Ends the wait of this connection.
    CancelWait = 12,
    /// Asks for an echo of a number.
    Ping = 13,
    /// Adds a value to the end of a queue.
    QueuePush = 14,
    /// Takes the first value of a queue.
    QueuePop = 15,
    /// Counts the values of a queue.
    QueueLen = 16,
    /// Reads the names of all keys.
    ListKeys = 17,
    /// Is answered when so many clients have come.
    Barrier = 18,
    /// Ours, not PyTorch's: a [`Wait`](Self::Wait) whose answer is followed by the values, so that both take one round trip.
    WaitGet = 64,
    /// Ours: the key gets the value when this connection ends.
    SetAtEnd = 65,
    /// Ours: a [`Wait`](Self::Wait) for one key, after which the server makes several [`CompareSet`](Self::CompareSet)s, and answers their
    /// values. So clients that wait for each other's changes do not need a round trip each.
    CompareSetAfter = 66,
}

/// Every operation a request may carry after the handshake.
const OPS: [Op; 21] = [
    Op::Set,
    Op::CompareSet,
    Op::Get,
    Op::Add,
    Op::Check,
    Op::Wait,
    Op::NumKeys,
    Op::Delete,
    Op::Append,
    Op::MultiGet,
    Op::MultiSet,
    Op::CancelWait,
    Op::Ping,
    Op::QueuePush,
    Op::QueuePop,
    Op::QueueLen,
    Op::ListKeys,
    Op::Barrier,
    Op::WaitGet,
    Op::SetAtEnd,
    Op::CompareSetAfter,
];

/// One part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
    /// An integer of this many bytes.
    Int(usize),
    /// A count, then the following parts that many times.
    Count,
}

impl Op {
    fn from_byte(byte: u8) -> Option<Self> {
        OPS.into_iter().find(|op| *op as u8 == byte)
    }

    /// The parts after the first byte.
    fn parts(self) -> &'static [Part] {
        match self {
            Self::NumKeys | Self::CancelWait | Self::ListKeys => &[],
            Self::Validate | Self::Ping => &[Part::Int(4)],
            Self::Get | Self::Delete | Self::QueuePop | Self::QueueLen => &[Part::Key],
            Self::Set | Self::Append | Self::QueuePush | Self::SetAtEnd => &[Part::Key, Part::Value],
            Self::CompareSet => &[Part::Key, Part::Value, Part::Value],
            Self::Add | Self::Barrier => &[Part::Key, Part::Int(8)],
            Self::Check | Self::Wait | Self::MultiGet | Self::WaitGet => &[Part::Count, Part::Key],
            Self::MultiSet => &[Part::Count, Part::Key, Part::Value],
            Self::CompareSetAfter => &[Part::Key, Part::Count, Part::Key, Part::Value, Part::Value],
        }
    }
}

/// A decoded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Keys and values in the order of the wire.
    pub strings: Vec<Vec<u8>>,
    /// The integer of `Add`, `Barrier` and `Ping`.
    pub int: i64,
}

/// Why a request is refused. The connection of its sender is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No operation has this number.
    #[error("unknown operation {0}")]
    Op(u8),
    /// A key is too long: its length in bytes.
    #[error("a key of {0} bytes; the longest is {MAX_WIRE_KEY}")]
    Key(u64),
    /// A value is too long: its length in bytes.
    #[error("a value of {0} bytes; the longest is {MAX_VALUE}")]
    Value(u64),
    /// There are too many keys: their number.
    #[error("{0} keys in one request; the most is {MAX_COUNT}")]
    Count(u64),
    /// Its keys and values are too long together.
    #[error("a request of more than {MAX_REQUEST} bytes")]
    Request,
}

/// Decodes requests from pieces of the sizes that it asks for.
#[derive(Debug, Default)]
pub struct Decoder {
    request: Option<Request>,
    /// The index in the operation's parts.
    part: usize,
    /// How many repetitions of the parts after a count remain.
    repeat: usize,
    /// The length of the string whose body is next.
    body: Option<usize>,
    total: usize,
}

impl Decoder {
    /// How many bytes to feed next: within the caps, and never 0.
    pub fn need(&self) -> usize {
        let Some(request) = &self.request else { return 1 };
        match (self.body, request.op.parts().get(self.part)) {
            (Some(length), _) => length,
            (None, Some(Part::Int(bytes))) => *bytes,
            (None, _) => 8,
        }
    }

    /// Whether no byte of the next request has been fed yet.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.request.is_none()
    }

    /// Takes exactly [`need`](Self::need) bytes. Returns the request if they complete one.
    pub fn feed(&mut self, bytes: Vec<u8>) -> Result<Option<Request>, Malformed> {
        debug_assert_eq!(bytes.len(), self.need());
        let Some(request) = &mut self.request else {
            let byte = bytes.first().copied().unwrap_or(u8::MAX);
            let op = Op::from_byte(byte).ok_or(Malformed::Op(byte))?;
            self.request = Some(Request { op, strings: Vec::new(), int: 0 });
            return Ok(self.finished());
        };
        let part = request.op.parts().get(self.part).copied();
        match part {
            Some(part @ (Part::Key | Part::Value)) => {
                if self.body.take().is_some() {
                    request.strings.push(bytes);
                } else {
                    let length = self.length(part, number(&bytes))?;
                    if length > 0 {
                        self.body = Some(length);
                        return Ok(None);
                    }
                    if let Some(request) = &mut self.request {
                        request.strings.push(Vec::new());
                    }
                }
            }
            Some(Part::Count) => {
                let count = number(&bytes);
                self.repeat =
                    usize::try_from(count).ok().filter(|n| *n <= MAX_COUNT).ok_or(Malformed::Count(count))?;
                if self.repeat == 0 {
                    self.part = usize::MAX - 1;
                }
            }
            // An i64 is sent as its eight bytes.
            _ => request.int = number(&bytes).cast_signed(),
        }
        self.part += 1;
        Ok(self.finished())
    }

    /// Checks a length before memory is allocated for it.
    fn length(&mut self, part: Part, length: u64) -> Result<usize, Malformed> {
        let (cap, error) = match part {
            Part::Key => (MAX_WIRE_KEY, Malformed::Key(length)),
            _ => (MAX_VALUE, Malformed::Value(length)),
        };
        let length = usize::try_from(length).ok().filter(|n| *n <= cap).ok_or(error)?;
        self.total += length;
        if self.total > MAX_REQUEST { Err(Malformed::Request) } else { Ok(length) }
    }

    fn finished(&mut self) -> Option<Request> {
        let parts = self.request.as_ref()?.op.parts();
        if self.part < parts.len() {
            return None;
        }
        if self.repeat > 1 {
            self.repeat -= 1;
            self.part = parts.iter().position(|part| *part == Part::Count).map_or(0, |count| count + 1);
            return None;
        }
        std::mem::take(self).request
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Builds a request.
pub struct Frame(Vec<u8>);

impl Frame {
    /// A request that begins with `op`; its parts must follow.
    pub fn new(op: Op) -> Self {
        Self(vec![op as u8])
    }

    /// Begins another request after this one.
    pub fn then(mut self, op: Op) -> Self {
        self.0.push(op as u8);
        self
    }

    /// A user's key, which is sent with a leading `/`.
    pub fn key(self, key: &str) -> Self {
        let mut frame = self.u64(key.len() as u64 + 1);
        frame.0.push(b'/');
        frame.0.extend_from_slice(key.as_bytes());
        frame
    }

    /// Their number, then each as by [`key`](Self::key).
    pub fn keys(self, keys: &[&str]) -> Self {
        keys.iter().fold(self.u64(keys.len() as u64), |frame, key| frame.key(key))
    }

    /// A value, after its length.
    pub fn value(self, value: &[u8]) -> Self {
        let mut frame = self.u64(value.len() as u64);
        frame.0.extend_from_slice(value);
        frame
    }

    /// Four bytes of a number, in little-endian order.
    pub fn u32(mut self, number: u32) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// Eight bytes of a number, in little-endian order.
    pub fn u64(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// Eight bytes of a signed number, in little-endian order.
    pub fn i64(self, number: i64) -> Self {
        self.u64(number.cast_unsigned())
    }

    /// How many bytes there are so far: at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a request has a byte at least")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes to send.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds a decoder from `bytes` until they end.
    fn decode(mut bytes: &[u8]) -> Result<Vec<Request>, Malformed> {
        let mut decoder = Decoder::default();
        let mut requests = Vec::new();
        while bytes.len() >= decoder.need() {
            let need = decoder.need();
            assert!((1..=MAX_VALUE).contains(&need));
            let (piece, rest) = bytes.split_at(need);
            bytes = rest;
            requests.extend(decoder.feed(piece.to_vec())?);
        }
        Ok(requests)
    }

    #[test]
    fn bytes_that_pytorch_sends_are_understood() {
        // Sent by torch 2.15's client for multi_set(["m1", "m2"], ["v1", ""]) and barrier("b", 2).
        let mut bytes = b"\x0b\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0/m1\x02\0\0\0\0\0\0\0v1".to_vec();
        bytes.extend(b"\x03\0\0\0\0\0\0\0/m2\0\0\0\0\0\0\0\0\x12\x02\0\0\0\0\0\0\0/b\x02\0\0\0\0\0\0\0");
        let requests = decode(&bytes).unwrap();
        let strings = [&b"/m1"[..], b"v1", b"/m2", b""].map(<[u8]>::to_vec).to_vec();
        assert_eq!(requests[0], Request { op: Op::MultiSet, strings, int: 0 });
        assert_eq!(requests[1], Request { op: Op::Barrier, strings: vec![b"/b".to_vec()], int: 2 });
    }

    #[test]
    fn lengths_are_refused_before_their_bytes_come() {
        let cases: [(&[u8], Malformed); 5] = [
            (&[0], Malformed::Op(0)),
            (b"GET / HTTP/1.1", Malformed::Op(b'G')),
            (&[3, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], Malformed::Key(0xffff_ffff)),
            (&[1, 1, 0, 0, 0, 0, 0, 0, 0, b'k', 0, 0, 0, 0, 1, 0, 0, 0], Malformed::Value(1 << 32)),
            (&[6, 0, 0, 0, 0, 0, 0, 0, 0x80], Malformed::Count(1 << 63)),
        ];
        for (bytes, error) in cases {
            assert_eq!(decode(bytes), Err(error));
        }
        let mut pairs = Frame::new(Op::MultiSet).u64(9).into_bytes();
        for _ in 0..8 {
            pairs.extend(Frame::new(Op::Set).key("").value(&vec![0; MAX_VALUE]).into_bytes().split_off(1));
        }
        assert_eq!(decode(&pairs), Err(Malformed::Request));
    }

    proptest! {
        #[test]
        fn garbage_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        #[test]
        fn what_is_built_is_what_is_decoded(
            keys in proptest::collection::vec("[a-z/é]{0,9}", 0..5),
            value in proptest::collection::vec(any::<u8>(), 0..50),
            amount in any::<i64>(),
        ) {
            let refs: Vec<&str> = keys.iter().map(String::as_str).collect();
            let bytes = Frame::new(Op::Wait).keys(&refs)
                .then(Op::CompareSet).key("k").value(&value).value(b"")
                .then(Op::Add).key("").i64(amount)
                .then(Op::CompareSetAfter).key("k").u64(2).key("é").value(&value).value(b"").key("").value(b"").value(&value)
                .then(Op::NumKeys)
                .into_bytes();
            let requests = decode(&bytes).unwrap();
            let wire: Vec<Vec<u8>> = keys.iter().map(|key| format!("/{key}").into_bytes()).collect();
            prop_assert_eq!(&requests[0].strings, &wire);
            prop_assert_eq!(&requests[1].strings, &vec![b"/k".to_vec(), value.clone(), Vec::new()]);
            prop_assert_eq!(requests[2].int, amount);
            let changes = [&b"/k"[..], "/é".as_bytes(), &value, b"", b"/", b"", &value].map(<[u8]>::to_vec).to_vec();
            prop_assert_eq!(&requests[3], &Request { op: Op::CompareSetAfter, strings: changes, int: 0 });
            prop_assert_eq!(requests[4].op, Op::NumKeys);
            prop_assert_eq!(requests.len(), 5);
            // A truncated request is never complete, and never an error.
            for end in 0..bytes.len() {
                prop_assert!(decode(&bytes[..end]).unwrap().len() < 5);
            }
        }

        #[test]
        fn a_decoder_is_idle_between_requests(key in "[a-z]{1,9}") {
            let mut decoder = Decoder::default();
            let bytes = Frame::new(Op::Get).key(&key).into_bytes();
            prop_assert!(decoder.is_idle());
            prop_assert_eq!(decoder.feed(bytes[..1].to_vec()), Ok(None));
            prop_assert!(!decoder.is_idle());
            prop_assert_eq!(decoder.feed(bytes[1..9].to_vec()), Ok(None));
            prop_assert!(decoder.feed(bytes[9..].to_vec()).unwrap().is_some());
            prop_assert!(decoder.is_idle());
        }
    }
}
