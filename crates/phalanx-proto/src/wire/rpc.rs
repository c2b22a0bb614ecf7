//! The frames of remote calls. They travel as point-to-point messages of a group of two ranks: each is a message of
//! [`FRAME`] bytes, and a payload that does not fit into it follows as a message of its own.
//!
//! A frame has a fixed length because the receiver of a message states the length of what it expects.

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::Fields;
use crate::wire::control::MAX_BODY;

/// Bytes of a frame.
pub const FRAME: usize = 256;
const HEAD: usize = 32;
/// The longest payload that travels in the frame itself.
pub const INLINE: usize = FRAME - HEAD;
/// The longest payload.
pub const MAX_PAYLOAD: usize = 256 << 20;
/// The longest name of a function, in bytes.
pub const MAX_NAME: usize = 128;
/// How deeply calls may be nested: depths are less.
pub const DEPTHS: usize = 4;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A call of a function. Payload: its name and its arguments.
    Call = 1,
    /// A call of a function whose value the callee keeps as `object`. Payload as for `Call`.
    Make = 2,
    /// A call of a function on `object`. Payload as for `Call`.
    Method = 3,
    /// The result of `call`.
    Answer = 4,
    /// The error of `call`.
    Failure = 5,
    /// The sender no longer holds `object`.
    Release = 6,
    /// The sender's program makes no more calls; it still answers.
    Done = 7,
    /// The last frame in this direction.
    Bye = 8,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Call,
        Self::Make,
        Self::Method,
        Self::Answer,
        Self::Failure,
        Self::Release,
        Self::Done,
        Self::Bye,
    ];

    /// Whether it asks for an answer.
    pub fn is_request(self) -> bool {
        matches!(self, Self::Call | Self::Make | Self::Method)
    }
}

/// An object that a rank keeps for others. The rank that asks for it numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ObjectId {
    /// The rank that asked for it.
    pub creator: Rank,
    /// From 1 on.
    pub number: u64,
}

impl ObjectId {
    /// In frames that are about no object.
    pub const NONE: Self = Self { creator: Rank::MAIN, number: 0 };
}

/// What a frame says, apart from its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// How many calls are around this one: a handler that calls is one deeper than the call that it serves.
    pub depth: u8,
    /// Bytes of the payload that are the function's name.
    pub name: u16,
    /// The caller's number of the call.
    pub call: u64,
    /// The object that it is about; [`ObjectId::NONE`] for kinds without one.
    pub object: ObjectId,
    /// Bytes of the payload.
    pub length: u64,
}

impl Head {
    /// A frame without a payload.
    pub fn plain(kind: Kind) -> Self {
        Self { kind, depth: 0, name: 0, call: 0, object: ObjectId::NONE, length: 0 }
    }

    /// The frame, with `payload` in it if that fits.
    pub fn encode(&self, payload: &[u8]) -> [u8; FRAME] {
        let mut frame = [0; FRAME];
        frame[0] = self.kind as u8;
        frame[1] = self.depth;
        frame[2..4].copy_from_slice(&self.name.to_le_bytes());
        frame[4..8].copy_from_slice(&self.object.creator.get().to_le_bytes());
        frame[8..16].copy_from_slice(&self.call.to_le_bytes());
        frame[16..24].copy_from_slice(&self.object.number.to_le_bytes());
        frame[24..32].copy_from_slice(&self.length.to_le_bytes());
        if let Some(room) = frame[HEAD..].get_mut(..payload.len()) {
            room.copy_from_slice(payload);
        }
        frame
    }

    /// What `frame` says, if it is what a rank sends.
    pub fn decode(frame: &[u8; FRAME]) -> Result<Self> {
        let mut fields = Fields::new(frame);
        let kind = fields.u8();
        let Some(kind) = Kind::ALL.into_iter().find(|known| *known as u8 == kind) else {
            return Err(invalid(&format!("its kind is {kind}")));
        };
        let (depth, name) = (fields.u8(), fields.u16());
        let creator = Rank::new(fields.u32());
        let (call, number, length) = (fields.u64(), fields.u64(), fields.u64());
        let head = Self { kind, depth, name, call, object: ObjectId { creator, number }, length };
        let most = match kind {
            Kind::Call | Kind::Make | Kind::Method | Kind::Answer => MAX_PAYLOAD,
            Kind::Failure => MAX_BODY,
            Kind::Release | Kind::Done | Kind::Bye => 0,
        };
        let has_object = matches!(kind, Kind::Make | Kind::Method | Kind::Release);
        let usual = match () {
            () if usize::from(depth) >= DEPTHS => Err("its depth is too large"),
            () if kind.is_request() != (1..=MAX_NAME).contains(&usize::from(name)) => {
                Err("the length of its name is not allowed")
            }
            () if u64::from(name) > length => Err("its name is longer than its payload"),
            () if length > most as u64 => Err("its payload is too long"),
            () if has_object != (number != 0) => Err("its object is not allowed"),
            () if !has_object && creator != Rank::MAIN => Err("it names the maker of no object"),
            () => Ok(head),
        };
        usual.map_err(invalid)
    }

    /// The payload, if it travels in the frame.
    pub fn inline<'a>(&self, frame: &'a [u8; FRAME]) -> Option<&'a [u8]> {
        frame[HEAD..].get(..usize::try_from(self.length).ok()?)
    }
}

fn invalid(why: &str) -> Error {
    Error::malformed(format!("a frame of a remote call is malformed: {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_head_comes_back_as_it_was_sent() {
        let object = ObjectId { creator: Rank::new(3), number: 7 };
        let head = Head { kind: Kind::Method, depth: 2, name: 3, call: 9, object, length: 5 };
        let frame = head.encode(b"addxy");
        assert_eq!(Head::decode(&frame).unwrap(), head);
        assert_eq!(head.inline(&frame), Some(&b"addxy"[..]));
        let long = Head { length: INLINE as u64 + 1, ..head };
        assert_eq!(long.inline(&long.encode(&[1; INLINE + 1])), None);
        assert_eq!(Head::decode(&Head::plain(Kind::Bye).encode(&[])).unwrap(), Head::plain(Kind::Bye));
    }

    #[test]
    fn what_no_rank_sends_is_refused() {
        let call = Head { name: 1, length: 1, ..Head::plain(Kind::Call) };
        assert!(Head::decode(&call.encode(b"f")).is_ok());
        let refused = [
            Head { depth: DEPTHS as u8, ..call },
            Head { name: 0, ..call },
            Head { name: 2, ..call },
            Head { name: MAX_NAME as u16 + 1, length: 1 << 10, ..call },
            Head { length: MAX_PAYLOAD as u64 + 1, ..call },
            Head { kind: Kind::Make, ..call },
            Head { object: ObjectId { creator: Rank::MAIN, number: 1 }, ..call },
            Head { kind: Kind::Failure, name: 0, length: MAX_BODY as u64 + 1, ..call },
            Head { length: 1, ..Head::plain(Kind::Bye) },
        ];
        for head in refused {
            assert!(Head::decode(&head.encode(b"f")).is_err(), "{head:?}");
        }
        let mut frame = call.encode(b"f");
        frame[0] = 0;
        assert!(Head::decode(&frame).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(start in prop::array::uniform32(0u8..9)) {
            let mut frame = [0; FRAME];
            frame[..32].copy_from_slice(&start);
            if let Ok(head) = Head::decode(&frame) {
                prop_assert_eq!(&head.encode(&[])[..32], &frame[..32]);
                prop_assert!(head.length <= MAX_PAYLOAD as u64);
            }
        }
    }
}
