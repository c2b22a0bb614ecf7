//! Signs the entries of a log with the job's key: the store may be one that knows no key, such as etcd, or a file.
//!
//! An entry is signed for one place in one job's log, so that it counts nowhere else. It is not bound to those before it: who
//! can write to the store can delete and withhold entries, and bring back those of an earlier job of the same name and key.

use crate::key::JobKey;
use crate::wire::auth::{Secret, TAG};

/// Before a signed entry; no version of an entry is this number.
const MARK: u8 = 0xff;
const LABEL: &str = "entry";

/// What the members of a job sign with; nothing, if the job has no key.
#[derive(Clone)]
pub(crate) struct Seal(Option<Secret>);

/// An entry as it was found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unsealed<'a> {
    /// What was appended.
    Entry(&'a [u8]),
    /// Nobody of this job has appended this here.
    Forged,
    /// The others have a key, and this process has none.
    Keyless,
}

impl Seal {
    /// For a log that everybody may write to who reaches it.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// With the key of the job whose part of the store is `scope`.
    pub(crate) fn new(key: Option<&JobKey>, scope: &str) -> Self {
        Self(key.map(|key| Secret::new(Some(key), "phalanx membership", scope.as_bytes())))
    }

    /// The entry, signed for this place: the mark, the signature and the entry.
    pub(crate) fn close(&self, index: u64, entry: &[u8]) -> Vec<u8> {
        match &self.0 {
            None => entry.to_vec(),
            Some(secret) => {
                let tag = secret.tag(LABEL, &[&index.to_le_bytes(), entry]);
                [&[MARK], &tag[..], entry].concat()
            }
        }
    }

    /// What stands in this place.
    pub(crate) fn open<'a>(&self, index: u64, bytes: &'a [u8]) -> Unsealed<'a> {
        let signed = bytes.split_first().filter(|(mark, _)| **mark == MARK);
        match (&self.0, signed) {
            (None, None) => Unsealed::Entry(bytes),
            (None, Some(_)) => Unsealed::Keyless,
            (Some(_), None) => Unsealed::Forged,
            (Some(secret), Some((_, signed))) => match signed.split_first_chunk::<TAG>() {
                Some((tag, entry)) if secret.verify(LABEL, &[&index.to_le_bytes(), entry], tag) => {
                    Unsealed::Entry(entry)
                }
                _ => Unsealed::Forged,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seal(key: u8, scope: &str) -> Seal {
        Seal::new(Some(&JobKey::from_bytes([key; 32])), scope)
    }

    proptest! {
        #[test]
        fn an_entry_counts_in_its_place_of_its_job_alone(
            entry in proptest::collection::vec(any::<u8>(), 1..64),
            index in 0..1000u64,
            bit in 0..8 * 97usize,
        ) {
            let closed = seal(1, "a").close(index, &entry);
            prop_assert_eq!(seal(1, "a").open(index, &closed), Unsealed::Entry(&entry[..]));
            for (other, at) in [(seal(1, "a"), index + 1), (seal(1, "b"), index), (seal(2, "a"), index)] {
                prop_assert_eq!(other.open(at, &closed), Unsealed::Forged);
            }
            prop_assert_eq!(Seal::none().open(index, &closed), Unsealed::Keyless);
            let mut changed = closed.clone();
            changed[bit / 8 % closed.len()] ^= 1 << (bit % 8);
            prop_assert_eq!(seal(1, "a").open(index, &changed), Unsealed::Forged);
            prop_assert_eq!(seal(1, "a").open(index, &closed[..closed.len() - 1]), Unsealed::Forged);
        }

        #[test]
        fn nobody_is_believed_without_a_signature(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            prop_assert_eq!(seal(1, "a").open(0, &bytes), Unsealed::Forged);
        }
    }
}
