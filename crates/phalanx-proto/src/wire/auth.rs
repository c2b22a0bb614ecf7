//! Proofs that both sides of a connection know the same secret: HMAC-SHA256 over the messages sent.
//!
//! Every connection begins with a proof, because a cluster's network has other users. One key for a job is enough: its
//! processes trust each other. HMAC needs no certificates and costs a microsecond. Both sides prove that they have the
//! key, because a rank must not trust a program only because it listens on the right port.
//!
//! # One proof, two handshakes
//!
//! All connections between two ranks have one handshake (`wire::handshake`), whose hello has rank, world and
//! generation. A client of the store knows none of these, and a server must recognise PyTorch's clients by the first
//! byte, so the store has a shorter one (`wire::greeting`). The purpose is part of the secret: a proof of one is not
//! valid in the other.
//!
//! In both, the number of TLS handshakes at once is limited by the same rule and the same times, with two drivers:
//! ranks accept in one `poll` loop (`transport::tcp::pending`), the store in tasks of tokio
//! (`store::tcp::handshake_permits`). One queue for both would be an abstraction over blocking and asynchronous code
//! that is longer than either. A rank keeps a pending connection in 1 KiB and drops the one that has got least far; the
//! store keeps a future of 2 KiB and drops the oldest; and what follows the proof is another thing in each.

use std::time::Duration;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a job's key.
pub const KEY: usize = 32;
/// Bytes of the random number with which each side makes sure that the other's messages are fresh.
pub const NONCE: usize = 32;
/// Bytes of a proof.
pub const TAG: usize = 32;

/// The time that an unauthenticated peer has for the handshake; with TLS, once for its ClientHello and once more after that. On a slow
/// network that is a few round trips, and one or two packets that are sent again after 1 and 3 s.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that each TLS handshake has at least, even if others wait for a permit: a round trip more than this.
pub const MIN_HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(500);
/// The most that the round trip counts for: a stranger may make its own seem long.
const ROUND_TRIP_LIMIT: Duration = Duration::from_secs(1);

/// The time that a TLS handshake with a peer has at least, if the kernel has measured this round trip: it takes one. With less, none of many ranks
/// that are far away would ever be done.
pub fn least_handshake_time(round_trip: Duration) -> Duration {
    MIN_HANDSHAKE_TIMEOUT + round_trip.min(ROUND_TRIP_LIMIT)
}

/// A random number of one side for one handshake.
pub type Nonce = [u8; NONCE];
/// A proof: a MAC with the secret of a connection.
pub type Tag = [u8; TAG];

/// A value that only the two sides of one TLS session know, different for every session (RFC 9266).
pub type Binding = [u8; 32];

/// The block size of SHA-256, to which HMAC pads its key.
const BLOCK: usize = 64;

/// The secret of both sides of one kind of connection. A proof made with one secret is worthless with another.
#[derive(Clone)]
pub struct Secret([u8; BLOCK]);

impl Secret {
    /// The secret for one purpose and for other data that both sides know. Without a job key, it is made of these only.
    pub fn new(key: Option<&[u8; KEY]>, purpose: &str, known: &[u8]) -> Self {
        let mut padded = [0; BLOCK];
        if let Some(key) = key {
            padded[..KEY].copy_from_slice(key);
        }
        let tag = Self(padded).tag(purpose, &[known]);
        let mut secret = [0; BLOCK];
        secret[..TAG].copy_from_slice(&tag);
        Self(secret)
    }

    /// The secret of the one connection with this `binding`: a proof made on it is worthless on another.
    pub fn bound(&self, binding: &Binding) -> Self {
        let mut secret = [0; BLOCK];
        secret[..TAG].copy_from_slice(&self.tag("bound", &[binding]));
        Self(secret)
    }

    /// Proves that its maker knows the secret, and has seen `said`. The label says which side proves what, so that no
    /// proof can be used as another.
    pub fn tag(&self, label: &str, said: &[&[u8]]) -> Tag {
        self.mac(label, said).finalize().into_bytes().into()
    }

    /// Whether `tag` is that proof. Takes constant time.
    pub fn verify(&self, label: &str, said: &[&[u8]], tag: &Tag) -> bool {
        self.mac(label, said).verify(tag.into()).is_ok()
    }

    fn mac(&self, label: &str, said: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = <Hmac<Sha256> as hmac::digest::KeyInit>::new((&self.0).into());
        mac.update(label.as_bytes());
        // Labels have no zero byte, so this marks the end of the label.
        mac.update(&[0]);
        // Each label is used with messages of fixed lengths: no byte can move from one to the next.
        said.iter().for_each(|part| mac.update(part));
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_tag_is_the_standards_hmac() {
        // python3 -c 'import hmac; print(hmac.new(bytes(range(32)), b"label\0said", "sha256").hexdigest())'
        let mut padded = [0; BLOCK];
        (0..32).for_each(|i| padded[i] = i as u8);
        let tag = Secret(padded).tag("label", &[b"sa", b"id"]);
        assert_eq!(hex(&tag), "da391754e32790f7752a305463861d6a3879439cb7ab11822e139ef63c8bc1a0");
    }

    #[test]
    fn a_handshake_with_a_peer_that_is_far_away_has_a_round_trip_more_up_to_a_limit() {
        let round_trips = [0, 600, 60_000].map(Duration::from_millis);
        assert_eq!(
            round_trips.map(|round_trip| least_handshake_time(round_trip).as_millis()),
            [500, 1100, 1500]
        );
    }

    #[test]
    fn what_is_proven_on_one_connection_proves_nothing_on_another() {
        let secret = Secret::new(None, "purpose", b"known");
        let tag = secret.bound(&[1; 32]).tag("label", &[b"said"]);
        assert!(secret.bound(&[1; 32]).verify("label", &[b"said"], &tag));
        assert!(!secret.bound(&[2; 32]).verify("label", &[b"said"], &tag));
        assert!(!secret.verify("label", &[b"said"], &tag));
    }

    #[test]
    fn secrets_differ_by_key_purpose_and_what_is_known() {
        let keys = [[3; KEY], [4; KEY]];
        let mut tags = Vec::new();
        for key in [None, Some(&keys[0]), Some(&keys[1])] {
            for purpose in ["one", "two"] {
                for known in [&b"a"[..], b"b"] {
                    let secret = Secret::new(key, purpose, known);
                    let tag = secret.tag("label", &[b"said"]);
                    assert!(secret.verify("label", &[b"said"], &tag));
                    assert!(!secret.verify("labels", &[b"said"], &tag));
                    assert!(!secret.verify("label", &[b"sad"], &tag));
                    tags.push(tag);
                }
            }
        }
        let count = tags.len();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), count);
    }
}
