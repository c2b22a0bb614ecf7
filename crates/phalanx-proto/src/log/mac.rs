//! A MAC (message authentication code) for each entry of a log, and for the state that replaces old entries, made with the job's key: the
//! store may be one without keys, such as etcd, or a file.
//!
//! A MAC covers the entry, its index and the job's scope, so that the entry is not valid anywhere else. It does not cover the
//! entries before it: a client that can write to the store can delete and withhold entries, and bring back those of an earlier job
//! of the same name and key. The same holds for a state: it is valid only as the state before the entry at its index.

use crate::wire::auth::{KEY, Secret, TAG};

/// The first byte of a signed entry; no entry has this version number.
const MARK: u8 = 0xff;
/// What a MAC is for. One of an entry proves no state.
const ENTRY: &str = "entry";
const STATE: &str = "state";

/// Makes and verifies MACs with the job's key; without a key it does nothing.
#[derive(Clone)]
pub struct Mac(Option<Secret>);

/// The result of [`Mac::verify`].
#[derive(Debug, PartialEq, Eq)]
pub enum Verified<'a> {
    /// A valid entry, or a valid state.
    Content(&'a [u8]),
    /// The MAC is missing or wrong: no member of this job has written this here.
    Forged,
    /// There is a MAC, and this process has no key.
    Keyless,
}

impl Mac {
    /// For a log without MACs: every client of the store can write to it.
    pub fn none() -> Self {
        Self(None)
    }

    /// With the key of the job whose part of the store is `scope`.
    pub fn new(key: Option<&[u8; KEY]>, scope: &str) -> Self {
        Self(key.map(|key| Secret::new(Some(key), "phalanx membership", scope.as_bytes())))
    }

    /// The mark, the MAC for this index, and the entry.
    pub fn sign(&self, index: u64, entry: &[u8]) -> Vec<u8> {
        self.seal(ENTRY, index, entry)
    }

    /// The same for the state before the entry at this index.
    pub fn sign_state(&self, index: u64, state: &[u8]) -> Vec<u8> {
        self.seal(STATE, index, state)
    }

    /// Verifies the bytes of the entry at this index.
    pub fn verify<'a>(&self, index: u64, bytes: &'a [u8]) -> Verified<'a> {
        self.open(ENTRY, index, bytes)
    }

    /// Verifies the bytes of the state before the entry at this index.
    pub fn verify_state<'a>(&self, index: u64, bytes: &'a [u8]) -> Verified<'a> {
        self.open(STATE, index, bytes)
    }

    fn seal(&self, label: &str, index: u64, content: &[u8]) -> Vec<u8> {
        match &self.0 {
            None => content.to_vec(),
            Some(secret) => {
                let tag = secret.tag(label, &[&index.to_le_bytes(), content]);
                [&[MARK], &tag[..], content].concat()
            }
        }
    }

    fn open<'a>(&self, label: &str, index: u64, bytes: &'a [u8]) -> Verified<'a> {
        let signed = bytes.split_first().filter(|(mark, _)| **mark == MARK);
        match (&self.0, signed) {
            (None, None) => Verified::Content(bytes),
            (None, Some(_)) => Verified::Keyless,
            (Some(_), None) => Verified::Forged,
            (Some(secret), Some((_, signed))) => match signed.split_first_chunk::<TAG>() {
                Some((tag, content)) if secret.verify(label, &[&index.to_le_bytes(), content], tag) => {
                    Verified::Content(content)
                }
                _ => Verified::Forged,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mac(key: u8, scope: &str) -> Mac {
        Mac::new(Some(&[key; 32]), scope)
    }

    proptest! {
        #[test]
        fn an_entry_is_valid_at_its_index_of_its_job_only(
            entry in proptest::collection::vec(any::<u8>(), 1..64),
            index in 0..1000u64,
            bit in 0..8 * 97usize,
        ) {
            let closed = mac(1, "a").sign(index, &entry);
            prop_assert_eq!(mac(1, "a").verify(index, &closed), Verified::Content(&entry[..]));
            for (other, at) in [(mac(1, "a"), index + 1), (mac(1, "b"), index), (mac(2, "a"), index)] {
                prop_assert_eq!(other.verify(at, &closed), Verified::Forged);
            }
            prop_assert_eq!(Mac::none().verify(index, &closed), Verified::Keyless);
            let mut changed = closed.clone();
            changed[bit / 8 % closed.len()] ^= 1 << (bit % 8);
            prop_assert_eq!(mac(1, "a").verify(index, &changed), Verified::Forged);
            prop_assert_eq!(mac(1, "a").verify(index, &closed[..closed.len() - 1]), Verified::Forged);
        }

        #[test]
        fn an_entry_is_no_state_and_a_state_is_valid_at_its_index_only(
            state in proptest::collection::vec(any::<u8>(), 1..64),
            index in 0..1000u64,
        ) {
            let own = mac(1, "a");
            let closed = own.sign_state(index, &state);
            prop_assert_eq!(own.verify_state(index, &closed), Verified::Content(&state[..]));
            prop_assert_eq!(own.verify_state(index + 1, &closed), Verified::Forged);
            prop_assert_eq!(own.verify(index, &closed), Verified::Forged);
            let entry = own.sign(index, &state);
            prop_assert_eq!(own.verify_state(index, &entry), Verified::Forged);
            prop_assert_eq!(mac(2, "a").verify_state(index, &closed), Verified::Forged);
            prop_assert_eq!(Mac::none().verify_state(index, &closed), Verified::Keyless);
        }

        #[test]
        fn without_a_mac_nothing_is_valid(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            prop_assert_eq!(mac(1, "a").verify(0, &bytes), Verified::Forged);
        }
    }
}
