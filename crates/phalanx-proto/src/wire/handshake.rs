//! The handshake between two ranks: each proves to the other that it knows the group's secret, in four messages.
//!
//! Pure: bytes in, bytes out. docs/wire.md shows the messages, and says why none of them can be replayed, sent back or
//! moved to another connection.
//!
//! The last message says that the connection is kept. Without it a rank could count on a connection that the other side
//! has dropped.

use super::auth::{Binding, KEY, Secret, TAG, Tag};
use super::hello::{GroupName, HELLO, Hello, JobId};
use crate::error::{Error, Result};

/// Bytes of the accepting rank's answer: its hello, and its proof.
pub const ANSWER: usize = HELLO + TAG;

const PURPOSE: &str = "phalanx mesh 2";
// The labels of the proofs.
const ANSWERS: &str = "answers";
const CALLS: &str = "calls";
const WELCOMES: &str = "welcomes";

/// The secret that the ranks of one group share.
#[derive(Clone)]
pub struct GroupSecret(Secret);

impl GroupSecret {
    /// The secret of the group that drew this number. Without a job key, every process that can read the store knows
    /// it.
    pub fn new(key: Option<&[u8; KEY]>, job: &JobId) -> Self {
        Self(Secret::new(key, PURPOSE, job))
    }

    /// The secret on the TLS session with this binding. The name stays that of the secret without TLS.
    pub fn bound(&self, binding: &Binding) -> Self {
        Self(self.0.bound(binding))
    }

    /// The name of the group in hellos, which stands for the secret.
    pub fn name(&self) -> GroupName {
        let mut name = GroupName::default();
        let length = name.len();
        name.copy_from_slice(&self.0.tag("name", &[])[..length]);
        name
    }
}

/// The connecting rank, which has sent its hello.
pub struct Initiator {
    own: Hello,
    hello: [u8; HELLO],
}

impl Initiator {
    /// A rank whose first message is this hello. Its nonce must be random.
    pub fn new(own: Hello) -> Self {
        Self { own, hello: own.encode() }
    }

    /// The first message.
    pub fn hello(&self) -> &[u8; HELLO] {
        &self.hello
    }

    /// Takes the second message, the peer's answer: the peer's hello, and a proof.
    pub fn answered(self, secret: &GroupSecret, answer: [u8; ANSWER]) -> Result<Answered> {
        let (hello, proof) = split(&answer);
        let peer = Hello::decode(hello)?;
        self.own.accept(&peer)?;
        if !secret.0.verify(ANSWERS, &[&self.hello, hello], proof) {
            return Err(unproven());
        }
        let proof = secret.0.tag(CALLS, &[&self.hello, &answer]);
        Ok(Answered { hello: self.hello, answer, proof, peer })
    }
}

/// The connecting rank, which knows which rank it has reached.
pub struct Answered {
    hello: [u8; HELLO],
    answer: [u8; ANSWER],
    proof: Tag,
    peer: Hello,
}

impl Answered {
    /// The third message.
    pub fn proof(&self) -> &Tag {
        &self.proof
    }

    /// Takes the last message: the peer keeps the connection. Returns the peer's hello.
    pub fn welcomed(self, secret: &GroupSecret, welcome: &Tag) -> Result<Hello> {
        match secret.0.verify(WELCOMES, &[&self.hello, &self.answer, &self.proof], welcome) {
            true => Ok(self.peer),
            false => Err(unproven()),
        }
    }
}

/// The accepting rank, which has sent its answer.
pub struct Responder {
    hello: [u8; HELLO],
    answer: [u8; ANSWER],
    peer: Hello,
}

impl Responder {
    /// Takes the first message. `own` is this rank's hello to its sender.
    pub fn new(secret: &GroupSecret, own: &Hello, peer: Hello, hello: [u8; HELLO]) -> Result<Self> {
        own.accept(&peer)?;
        let mut answer = [0; ANSWER];
        let (said, proof) = answer.split_at_mut(HELLO);
        said.copy_from_slice(&own.encode());
        proof.copy_from_slice(&secret.0.tag(ANSWERS, &[&hello, said]));
        Ok(Self { hello, answer, peer })
    }

    /// The second message.
    pub fn answer(&self) -> &[u8; ANSWER] {
        &self.answer
    }

    /// Takes the third message, the peer's proof. Returns the peer's hello, and the last message.
    pub fn proven(&self, secret: &GroupSecret, proof: &Tag) -> Result<(Hello, Tag)> {
        match secret.0.verify(CALLS, &[&self.hello, &self.answer], proof) {
            true => Ok((self.peer, secret.0.tag(WELCOMES, &[&self.hello, &self.answer, proof]))),
            false => Err(unproven()),
        }
    }
}

fn split(answer: &[u8; ANSWER]) -> (&[u8; HELLO], &Tag) {
    // Both parts have these lengths.
    let (hello, proof) = (answer.first_chunk(), answer.last_chunk());
    (hello.unwrap_or(&[0; HELLO]), proof.unwrap_or(&[0; TAG]))
}

fn unproven() -> Error {
    Error::protocol("a peer does not know this job's key, or what it said was changed on its way")
        .with_remedy("start every rank with the same key; is something else between the hosts?")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rank::{Generation, Rank};
    use crate::wire::auth::NONCE;
    use crate::wire::hello::Channel;

    fn secret(key: Option<&[u8; KEY]>) -> GroupSecret {
        GroupSecret::new(key, &[3; 16])
    }

    fn hello(secret: &GroupSecret, rank: u32, to: u32, channel: Channel, nonce: u8) -> Hello {
        Hello {
            group: secret.name(),
            generation: Generation(4),
            rank: Rank::new(rank),
            to: Rank::new(to),
            world: 3,
            channel,
            nonce: [nonce; NONCE],
        }
    }

    /// All four messages of rank 1's connection to rank 0, unchanged.
    struct Said {
        hello: [u8; HELLO],
        answer: [u8; ANSWER],
        proof: Tag,
        welcome: Tag,
    }

    fn said(secret: &GroupSecret, channel: Channel, nonces: (u8, u8)) -> Said {
        play(secret, channel, nonces, |_, _| {}).unwrap()
    }

    /// Simulates the handshake. `tamper` may change messages 0 to 3 before they arrive.
    fn play(
        secret: &GroupSecret,
        channel: Channel,
        nonces: (u8, u8),
        mut tamper: impl FnMut(usize, &mut [u8]),
    ) -> Result<Said> {
        let initiator = Initiator::new(hello(secret, 1, 0, channel, nonces.0));
        let mut first = *initiator.hello();
        tamper(0, &mut first);
        let peer = Hello::decode(&first)?;
        let own = Hello { to: peer.rank, channel: peer.channel, ..hello(secret, 0, 1, channel, nonces.1) };
        let responder = Responder::new(secret, &own, peer, first)?;
        let mut answer = *responder.answer();
        tamper(1, &mut answer);
        let answered = initiator.answered(secret, answer)?;
        let mut proof = *answered.proof();
        tamper(2, &mut proof);
        let (peer, mut welcome) = responder.proven(secret, &proof)?;
        assert_eq!(peer.rank, Rank::new(1));
        tamper(3, &mut welcome);
        assert_eq!(answered.welcomed(secret, &welcome)?.rank, Rank::MAIN);
        Ok(Said { hello: first, answer, proof, welcome })
    }

    #[test]
    fn every_flipped_bit_of_every_message_is_refused() {
        for key in [None, Some(&[5; KEY])] {
            let secret = secret(key);
            for (message, length) in [HELLO, ANSWER, TAG, TAG].into_iter().enumerate() {
                for bit in 0..8 * length {
                    let flip = |number: usize, bytes: &mut [u8]| {
                        if number == message {
                            bytes[bit / 8] ^= 1 << (bit % 8);
                        }
                    };
                    assert!(
                        play(&secret, Channel::Data, (1, 2), flip).is_err(),
                        "bit {bit} of message {message}"
                    );
                }
            }
        }
    }

    #[test]
    fn messages_are_few_bytes() {
        const { assert!(HELLO + TAG <= 256 && ANSWER + TAG <= 256) }
    }

    #[test]
    fn who_has_another_key_or_none_is_told_apart() {
        let keys = [[5; KEY], [6; KEY]];
        let secrets = [secret(None), secret(Some(&keys[0])), secret(Some(&keys[1]))];
        let other_job = GroupSecret::new(Some(&keys[0]), &[4; 16]);
        for (i, one) in secrets.iter().chain([&other_job]).enumerate() {
            for (j, other) in secrets.iter().chain([&other_job]).enumerate() {
                assert_eq!(one.name() == other.name(), i == j);
                // Also if it has a false group name.
                let initiator = Initiator::new(hello(other, 1, 0, Channel::Data, 1));
                let own = hello(other, 0, 1, Channel::Data, 2);
                let peer = Hello::decode(initiator.hello()).unwrap();
                let responder = Responder::new(one, &own, peer, *initiator.hello()).unwrap();
                assert_eq!(initiator.answered(other, *responder.answer()).is_ok(), i == j);
            }
        }
    }

    #[test]
    fn nothing_that_was_heard_is_of_use_again() {
        let secret = secret(Some(&[5; KEY]));
        let old = said(&secret, Channel::Data, (1, 2));
        // To the accepting rank, which has drawn another nonce.
        let own = hello(&secret, 0, 1, Channel::Data, 3);
        let peer = Hello::decode(&old.hello).unwrap();
        let responder = Responder::new(&secret, &own, peer, old.hello).unwrap();
        assert!(responder.proven(&secret, &old.proof).is_err());
        // To the connecting rank, which has drawn another nonce.
        let initiator = Initiator::new(hello(&secret, 1, 0, Channel::Data, 5));
        assert!(initiator.answered(&secret, old.answer).is_err());
        // The welcome of another connection.
        let initiator = Initiator::new(hello(&secret, 1, 0, Channel::Data, 1));
        let own = hello(&secret, 0, 1, Channel::Data, 7);
        let responder = Responder::new(&secret, &own, peer, *initiator.hello()).unwrap();
        let answered = initiator.answered(&secret, *responder.answer()).unwrap();
        assert!(answered.welcomed(&secret, &old.welcome).is_err());
    }

    #[test]
    fn a_channel_is_not_spliced_into_another_nor_a_rank_led_to_another() {
        let secret = secret(Some(&[5; KEY]));
        let control = said(&secret, Channel::Control, (1, 2));
        let initiator = Initiator::new(hello(&secret, 1, 0, Channel::Data, 1));
        assert!(initiator.answered(&secret, control.answer).is_err());
        let own = hello(&secret, 0, 1, Channel::Data, 2);
        let peer = hello(&secret, 1, 0, Channel::Data, 1);
        let responder = Responder::new(&secret, &own, peer, peer.encode()).unwrap();
        assert!(responder.proven(&secret, &control.proof).is_err());
        // Rank 2's hello to rank 0, relayed to rank 1.
        let misled = hello(&secret, 2, 0, Channel::Data, 1);
        let own = hello(&secret, 1, 2, Channel::Data, 2);
        assert!(Responder::new(&secret, &own, misled, misled.encode()).is_err());
    }

    #[test]
    fn nothing_passes_for_a_message_in_the_other_direction() {
        let secret = secret(Some(&[5; KEY]));
        let old = said(&secret, Channel::Data, (1, 2));
        // A rank that gets its own messages as the answer.
        let initiator = Initiator::new(hello(&secret, 1, 0, Channel::Data, 1));
        let mut echo = [0; ANSWER];
        echo[..HELLO].copy_from_slice(initiator.hello());
        echo[HELLO..].copy_from_slice(&old.proof);
        assert!(initiator.answered(&secret, echo).is_err());
        // The accepting rank's own proof, sent as that of the connecting rank.
        let own = hello(&secret, 0, 1, Channel::Data, 2);
        let peer = hello(&secret, 1, 0, Channel::Data, 1);
        let responder = Responder::new(&secret, &own, peer, peer.encode()).unwrap();
        let proof = *responder.answer().last_chunk().unwrap();
        assert!(responder.proven(&secret, &proof).is_err());
        assert!(responder.proven(&secret, &old.welcome).is_err());
        // The right proof is accepted.
        assert!(responder.proven(&secret, &old.proof).is_ok());
    }

    proptest! {
        #[test]
        fn garbage_is_refused(answer in any::<[[u8; 28]; 4]>(), proof in any::<[u8; TAG]>()) {
            let secret = secret(None);
            let mut bytes = [0; ANSWER];
            bytes.copy_from_slice(answer.as_flattened());
            let initiator = || Initiator::new(hello(&secret, 1, 0, Channel::Data, 1));
            prop_assert!(initiator().answered(&secret, bytes).is_err());
            // Also after a correct hello.
            bytes[..HELLO].copy_from_slice(&hello(&secret, 0, 1, Channel::Data, 2).encode());
            prop_assert!(initiator().answered(&secret, bytes).is_err());
            let peer = hello(&secret, 1, 0, Channel::Data, 1);
            let own = hello(&secret, 0, 1, Channel::Data, 2);
            let responder = Responder::new(&secret, &own, peer, peer.encode()).unwrap();
            prop_assert!(responder.proven(&secret, &proof).is_err());
        }
    }
}
