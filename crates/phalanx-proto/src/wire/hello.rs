//! How two ranks of one job identify themselves when they open a connection.

use crate::error::{Error, Result};
use crate::rank::{Generation, Rank};
use crate::wire::Fields;
use crate::wire::auth::{NONCE, Nonce};
use crate::world_size::WorldSize;

/// Bytes of a hello, in either direction.
pub const HELLO: usize = 80;

const MAGIC: u32 = u32::from_le_bytes(*b"PHXH");
/// The version of all messages between ranks, and of what they write for each other in the store.
const VERSION: u16 = 4;

/// The answer to a refused rank: magic and version, and no channel.
pub const REFUSAL: [u8; HELLO] = {
    let mut bytes = [0; HELLO];
    bytes.split_at_mut(4).0.copy_from_slice(&MAGIC.to_le_bytes());
    bytes.split_at_mut(6).0.split_at_mut(4).1.copy_from_slice(&VERSION.to_le_bytes());
    bytes
};

/// An error if these bytes begin a hello of another version, which may have another length.
pub fn check_version(bytes: &[u8]) -> Result<()> {
    let version = bytes.strip_prefix(&MAGIC.to_le_bytes()).and_then(|bytes| bytes.first_chunk());
    match version.map(|version| u16::from_le_bytes(*version)) {
        Some(version) if version != VERSION => {
            Err(Error::protocol(format!("a peer speaks version {version}, this one {VERSION}"))
                .with_remedy("start every rank with the same build"))
        }
        Some(_) | None => Ok(()),
    }
}

/// The purpose of a connection between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// Frames of collectives.
    Data = 1,
    /// Heartbeats, goodbyes and failures.
    Control = 2,
    /// Frames of point-to-point messages.
    Messages = 3,
}

impl Channel {
    /// Each of them.
    pub const ALL: [Self; 3] = [Self::Data, Self::Control, Self::Messages];
}

/// A random number that rank 0 draws for each group and writes to the store. It distinguishes the group from strangers
/// and former jobs. It does not travel between ranks.
pub type JobId = [u8; 16];

/// Represents a group's secret in a hello. It reveals nothing about the secret.
pub type GroupName = [u8; 16];

/// The identity of a rank. The connecting rank sends its own, the accepting rank answers with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The group that it takes part in.
    pub group: GroupName,
    /// The generation of that group.
    pub generation: Generation,
    /// The rank that sends it.
    pub rank: Rank,
    /// The rank that it is sent to.
    pub to: Rank,
    /// The number of ranks in the group, not checked yet.
    pub world: u32,
    /// The purpose of the connection.
    pub channel: Channel,
    /// The sender's random number for this handshake.
    pub nonce: Nonce,
}

impl Hello {
    /// The same rank's hello, on `channel` to another rank.
    pub fn on(self, channel: Channel, to: Rank) -> Self {
        Self { channel, to, ..self }
    }

    /// The same with this nonce.
    pub fn saying(self, nonce: Nonce) -> Self {
        Self { nonce, ..self }
    }

    /// The hello as it is sent.
    pub fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.channel as u8;
        bytes[8..24].copy_from_slice(&self.group);
        bytes[24..32].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.rank.get().to_le_bytes());
        bytes[36..40].copy_from_slice(&self.to.get().to_le_bytes());
        bytes[40..44].copy_from_slice(&self.world.to_le_bytes());
        bytes[HELLO - NONCE..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// If it does not begin with the magic number, has another version, or names no channel, as a refusal does.
    pub fn decode(bytes: &[u8; HELLO]) -> Result<Self> {
        let mut fields = Fields::new(bytes);
        let (magic, _version, channel, _) = (fields.u32(), fields.u16(), fields.u8(), fields.u8());
        if magic != MAGIC {
            return Err(Error::protocol("a connection did not begin with a handshake"));
        }
        check_version(bytes)?;
        let channel = match channel {
            0 => {
                return Err(Error::protocol(
                    "the peer says that this rank is not of its job, generation or world, or has another job key",
                ));
            }
            1 => Channel::Data,
            2 => Channel::Control,
            3 => Channel::Messages,
            other => return Err(Error::protocol(format!("a handshake names the unknown channel {other}"))),
        };
        let group = fields.take();
        let generation = Generation(fields.u64());
        let (rank, to) = (Rank::new(fields.u32()), Rank::new(fields.u32()));
        let world = fields.u32();
        let _reserved = fields.u32();
        Ok(Self { group, generation, rank, to, world, channel, nonce: fields.take() })
    }

    /// Checks that `other` is from a rank of the same job, generation and world, on the same channel, and meant for
    /// this rank. The claims are not proven yet.
    pub fn accept(&self, other: &Self) -> Result<()> {
        let world = WorldSize::new(self.world)?;
        let reason = if other.group != self.group {
            "it belongs to another job, or has another job key".to_owned()
        } else if other.generation != self.generation {
            format!(
                "it belongs to generation {}, this group to generation {}",
                other.generation.0, self.generation.0
            )
        } else if other.world != self.world {
            format!("it counts {} ranks, this one {}", other.world, self.world)
        } else if other.channel != self.channel {
            "it is on another channel".to_owned()
        } else if world.rank(other.rank.get()).is_err() || other.rank == self.rank {
            format!("it calls itself rank {}", other.rank)
        } else if other.to != self.rank {
            format!("it takes this rank, {}, for rank {}", self.rank, other.to)
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
        Hello {
            group: [7; 16],
            generation: Generation(1),
            rank: Rank::new(1),
            to: Rank::MAIN,
            world: 3,
            channel: Channel::Control,
            nonce: [9; NONCE],
        }
    }

    #[test]
    fn strangers_are_turned_away() {
        assert_eq!(Hello::decode(&hello().encode()).unwrap(), hello());
        let own = Hello { rank: Rank::MAIN, to: Rank::new(1), ..hello() };
        own.accept(&hello()).unwrap();
        for stranger in [
            Hello { group: [8; 16], ..hello() },
            Hello { generation: Generation(0), ..hello() },
            Hello { world: 4, ..hello() },
            Hello { rank: Rank::new(3), ..hello() },
            Hello { rank: Rank::MAIN, ..hello() },
            Hello { to: Rank::new(2), ..hello() },
            Hello { channel: Channel::Data, ..hello() },
        ] {
            assert!(own.accept(&stranger).is_err(), "{stranger:?}");
        }
    }

    #[test]
    fn a_refusal_says_that_it_is_one_and_names_the_version() {
        assert!(Hello::decode(&REFUSAL).unwrap_err().to_string().contains("not of its job"));
        let mut other = REFUSAL;
        other[4] = 2;
        for error in [Hello::decode(&other).unwrap_err(), check_version(&other[..6]).unwrap_err()] {
            assert!(error.to_string().contains("speaks version 2, this one 4"), "{error}");
            assert!(error.remedy().unwrap().contains("the same build"));
        }
        for start in [&other[..5], &REFUSAL, b"GET / "] {
            assert!(check_version(start).is_ok());
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), HELLO)) {
            let mut hello = [0; HELLO];
            hello.copy_from_slice(&bytes);
            let _ = Hello::decode(&hello);
            hello[..6].copy_from_slice(&REFUSAL[..6]);
            hello[6] = Channel::Data as u8;
            prop_assert!(Hello::decode(&hello).is_ok());
        }
    }
}
