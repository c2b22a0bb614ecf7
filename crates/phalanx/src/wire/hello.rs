//! The handshake with which two ranks of one job open a connection.

use crate::error::{Error, Result};
use crate::rank::{Epoch, Rank, WorldSize};
use crate::wire::Fields;

/// Bytes of a hello, in either direction.
pub(crate) const HELLO: usize = 48;

const MAGIC: u32 = u32::from_le_bytes(*b"PHXH");
const VERSION: u16 = 1;

/// The answer to a rank that has no business here: magic and version, and no channel.
pub(crate) const REFUSAL: [u8; HELLO] = {
    let mut bytes = [0; HELLO];
    bytes.split_at_mut(4).0.copy_from_slice(&MAGIC.to_le_bytes());
    bytes.split_at_mut(6).0.split_at_mut(4).1.copy_from_slice(&VERSION.to_le_bytes());
    bytes
};

/// Does a hello begin so, of whatever version?
pub(crate) fn is_hello(bytes: &[u8; HELLO]) -> bool {
    bytes.starts_with(&MAGIC.to_le_bytes())
}

/// What a connection between two ranks is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Channel {
    /// Frames of collectives.
    Data = 1,
    /// Goodbyes and failures.
    Control = 2,
    /// Frames of point-to-point messages.
    Messages = 3,
}

/// A random number that rank 0 draws for each group, so that strangers and former jobs are told apart.
pub(crate) type JobId = [u8; 16];

/// Who speaks. The connecting rank sends one, the accepting rank answers with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub job: JobId,
    pub epoch: Epoch,
    pub rank: Rank,
    pub world: u32,
    pub channel: Channel,
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.channel as u8;
        bytes[8..24].copy_from_slice(&self.job);
        bytes[24..32].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.rank.get().to_le_bytes());
        bytes[36..40].copy_from_slice(&self.world.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HELLO]) -> Result<Self> {
        let mut fields = Fields::new(bytes);
        let (magic, version, channel, _) = (fields.u32(), fields.u16(), fields.u8(), fields.u8());
        if magic != MAGIC {
            return Err(Error::protocol("a connection did not begin with a handshake"));
        }
        if version != VERSION {
            return Err(Error::protocol(format!("a peer speaks version {version}, this one {VERSION}"))
                .with_remedy("start every rank with the same build"));
        }
        let channel = match channel {
            0 => {
                return Err(Error::protocol(
                    "the peer says that this rank is not of its job, epoch or world",
                ));
            }
            1 => Channel::Data,
            2 => Channel::Control,
            3 => Channel::Messages,
            other => return Err(Error::protocol(format!("a handshake names the unknown channel {other}"))),
        };
        let job = fields.take();
        let epoch = Epoch(fields.u64());
        let rank = Rank::new(fields.u32());
        let world = fields.u32();
        Ok(Self { job, epoch, rank, world, channel })
    }

    /// Is `other` a rank of the same job, epoch and world, on the same channel?
    pub(crate) fn accept(&self, other: &Self) -> Result<()> {
        let world = WorldSize::new(self.world)?;
        let reason = if other.job != self.job {
            "it belongs to another job".to_owned()
        } else if other.epoch != self.epoch {
            format!("it belongs to epoch {}, this group to epoch {}", other.epoch.0, self.epoch.0)
        } else if other.world != self.world {
            format!("it counts {} ranks, this one {}", other.world, self.world)
        } else if other.channel != self.channel {
            "it is on another channel".to_owned()
        } else if world.rank(other.rank.get()).is_err() || other.rank == self.rank {
            format!("it calls itself rank {}", other.rank)
        } else {
            return Ok(());
        };
        Err(Error::protocol(format!("a peer was turned away: {reason}")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello { job: [7; 16], epoch: Epoch(1), rank: Rank::new(1), world: 3, channel: Channel::Control }
    }

    #[test]
    fn strangers_are_turned_away() {
        assert_eq!(Hello::decode(&hello().encode()).unwrap(), hello());
        let own = Hello { rank: Rank::MAIN, ..hello() };
        own.accept(&hello()).unwrap();
        for stranger in [
            Hello { job: [8; 16], ..hello() },
            Hello { epoch: Epoch(0), ..hello() },
            Hello { world: 4, ..hello() },
            Hello { rank: Rank::new(3), ..hello() },
            Hello { rank: Rank::MAIN, ..hello() },
            Hello { channel: Channel::Data, ..hello() },
        ] {
            assert!(own.accept(&stranger).is_err(), "{stranger:?}");
        }
    }

    #[test]
    fn a_refusal_says_that_it_is_one_and_names_the_version() {
        assert!(is_hello(&REFUSAL));
        assert!(Hello::decode(&REFUSAL).unwrap_err().to_string().contains("not of its job"));
        let mut other = REFUSAL;
        other[4] += 1;
        assert!(Hello::decode(&other).unwrap_err().to_string().contains("speaks version 2, this one 1"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), HELLO)) {
            let mut hello = [0; HELLO];
            hello.copy_from_slice(&bytes);
            let _ = Hello::decode(&hello);
            hello[..7].copy_from_slice(b"PHXH\x01\x00\x01");
            prop_assert!(Hello::decode(&hello).is_ok());
        }
    }
}
