//! How a client and a store of one job open a connection: each proves to the other that it knows the job's key.
//!
//! Pure: bytes in, bytes out. The first byte is not that of any request, so a server sees at once which kind of client
//! has connected. docs/wire.md shows the messages.

use super::auth::{Binding, KEY, NONCE, Nonce, Secret, TAG, Tag};

/// Bytes of the client's call.
pub const CALL: usize = HEAD + NONCE;
/// Bytes of the server's answer.
pub const ANSWER: usize = CALL + TAG;

/// Magic, version, and two zero bytes.
const HEAD: usize = 8;
const BEGINNING: [u8; HEAD] = *b"PHXS\x01\0\0\0";

const PURPOSE: &str = "phalanx store 1";
// The labels of the proofs.
const ANSWERS: &str = "answers";
const CALLS: &str = "calls";

/// The secret that the stores of a job and their clients share.
#[derive(Clone)]
pub struct StoreSecret(Secret);

impl StoreSecret {
    /// The secret of the job with this key.
    pub fn new(key: &[u8; KEY]) -> Self {
        Self(Secret::new(Some(key), PURPOSE, &[]))
    }

    /// The secret on the TLS session with this binding.
    pub fn bound(&self, binding: &Binding) -> Self {
        Self(self.0.bound(binding))
    }

    /// For `fuzzing`: the same secret every time.
    #[cfg(any(test, fuzzing, feature = "fuzzing"))]
    pub fn of_zeros() -> Self {
        Self(Secret::new(None, PURPOSE, &[]))
    }
}

impl std::fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreSecret(..)")
    }
}

/// Whether these bytes begin a greeting, in either direction and of any version.
pub fn is_greeting(start: &[u8; 4]) -> bool {
    BEGINNING.starts_with(start)
}

/// The client side.
pub struct Initiator([u8; CALL]);

impl Initiator {
    /// A client whose first message has this nonce, which must be random.
    pub fn new(nonce: Nonce) -> Self {
        Self(message(nonce))
    }

    /// The first message.
    pub fn call(&self) -> &[u8; CALL] {
        &self.0
    }

    /// Takes the server's answer. Returns the client's proof, if the server has proven that it knows the secret.
    pub fn answered(&self, secret: &StoreSecret, answer: &[u8; ANSWER]) -> Option<Tag> {
        let (said, proof) = (answer.first_chunk::<CALL>()?, answer.last_chunk::<TAG>()?);
        let proven = said.starts_with(&BEGINNING) && secret.0.verify(ANSWERS, &[&self.0, said], proof);
        proven.then(|| secret.0.tag(CALLS, &[&self.0, answer]))
    }
}

/// The server side, after it has read a call.
pub struct Responder {
    call: [u8; CALL],
    answer: [u8; ANSWER],
}

impl Responder {
    /// Answers `call`. None if it has another version.
    pub fn new(secret: &StoreSecret, call: [u8; CALL], nonce: Nonce) -> Option<Self> {
        if !call.starts_with(&BEGINNING) {
            return None;
        }
        let mut answer = [0; ANSWER];
        let (said, proof) = answer.split_at_mut(CALL);
        said.copy_from_slice(&message(nonce));
        proof.copy_from_slice(&secret.0.tag(ANSWERS, &[&call, said]));
        Some(Self { call, answer })
    }

    /// The second message.
    pub fn answer(&self) -> &[u8; ANSWER] {
        &self.answer
    }

    /// Whether this is the proof of the client that sent the call.
    pub fn proven(&self, secret: &StoreSecret, proof: &Tag) -> bool {
        secret.0.verify(CALLS, &[&self.call, &self.answer], proof)
    }
}

fn message(nonce: Nonce) -> [u8; CALL] {
    let mut message = [0; CALL];
    message[..HEAD].copy_from_slice(&BEGINNING);
    message[HEAD..].copy_from_slice(&nonce);
    message
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret() -> StoreSecret {
        StoreSecret::new(&[5; KEY])
    }

    /// Simulates the greeting. `tamper` may change messages 0 to 2 before they arrive. Returns whether the client is
    /// accepted.
    fn play(secret: &StoreSecret, nonces: (u8, u8), mut tamper: impl FnMut(usize, &mut [u8])) -> bool {
        let initiator = Initiator::new([nonces.0; NONCE]);
        let mut call = *initiator.call();
        tamper(0, &mut call);
        let Some(responder) = Responder::new(secret, call, [nonces.1; NONCE]) else { return false };
        let mut answer = *responder.answer();
        tamper(1, &mut answer);
        let Some(mut proof) = initiator.answered(secret, &answer) else { return false };
        tamper(2, &mut proof);
        responder.proven(secret, &proof)
    }

    #[test]
    fn every_flipped_bit_of_every_message_is_refused() {
        let secret = secret();
        assert!(play(&secret, (1, 2), |_, _| {}));
        for (message, length) in [CALL, ANSWER, TAG].into_iter().enumerate() {
            for bit in 0..8 * length {
                let flip = |number: usize, bytes: &mut [u8]| {
                    if number == message {
                        bytes[bit / 8] ^= 1 << (bit % 8);
                    }
                };
                assert!(!play(&secret, (1, 2), flip), "bit {bit} of message {message}");
            }
        }
    }

    #[test]
    fn nothing_can_be_replayed_or_sent_back() {
        let secret = secret();
        let mut heard = Vec::new();
        assert!(play(&secret, (1, 2), |_, bytes| heard.push(bytes.to_vec())));
        let tag = |bytes: &[u8]| -> Tag { bytes[bytes.len() - TAG..].try_into().unwrap() };
        // An old proof, to a server with a new nonce; an old answer, to a client with a new nonce.
        let call: [u8; CALL] = heard[0].as_slice().try_into().unwrap();
        let responder = Responder::new(&secret, call, [3; NONCE]).unwrap();
        assert!(!responder.proven(&secret, &tag(&heard[2])));
        let answer: [u8; ANSWER] = heard[1].as_slice().try_into().unwrap();
        assert!(Initiator::new([4; NONCE]).answered(&secret, &answer).is_none());
        // The server's proof is not the client's, and vice versa.
        assert!(!responder.proven(&secret, &tag(responder.answer())));
        let mut echo = [0; ANSWER];
        echo[..CALL].copy_from_slice(&call);
        echo[CALL..].copy_from_slice(&heard[2]);
        assert!(Initiator::new([1; NONCE]).answered(&secret, &echo).is_none());
    }

    #[test]
    fn another_key_proves_nothing_and_the_first_byte_is_no_requests() {
        let (one, other) = (secret(), StoreSecret::new(&[6; KEY]));
        let initiator = Initiator::new([1; NONCE]);
        let responder = Responder::new(&one, *initiator.call(), [2; NONCE]).unwrap();
        assert!(initiator.answered(&other, responder.answer()).is_none());
        let proof = initiator.answered(&one, responder.answer()).unwrap();
        assert!(!responder.proven(&other, &proof));
        // PyTorch's requests are 0 to 18.
        assert!(is_greeting(initiator.call().first_chunk().unwrap()) && initiator.call()[0] > 32);
        const { assert!(CALL + TAG <= 256 && ANSWER <= 256) }
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), ANSWER), beginning in any::<bool>()) {
            let secret = secret();
            let mut answer: [u8; ANSWER] = bytes.try_into().unwrap();
            if beginning {
                answer[..HEAD].copy_from_slice(&BEGINNING);
            }
            prop_assert!(Initiator::new([1; NONCE]).answered(&secret, &answer).is_none());
            let call = *answer.first_chunk().unwrap();
            let responder = Responder::new(&secret, call, [2; NONCE]);
            prop_assert_eq!(responder.is_some(), beginning);
            if let Some(responder) = responder {
                prop_assert!(!responder.proven(&secret, answer.last_chunk().unwrap()));
            }
        }
    }
}
