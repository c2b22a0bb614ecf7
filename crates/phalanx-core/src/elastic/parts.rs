//! A state as named parts of bytes.
//!
//! Any framework can give its state in this form. It can be hashed and sent, and a part that a rank has already is not
//! sent.

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use super::commits::Summary;
use crate::error::{Error, Result};
use crate::wire::object;

/// A state as bytes, in named parts: what a [`State`](super::State) is saved to and loaded from.
///
/// The memory is kept from one [commit](super::Context::commit) to the next: saving a part of the same length is one
/// copy, without a new allocation.
#[derive(Debug, Default)]
pub struct Parts {
    parts: Vec<Part>,
    /// How many have been saved so far, while a state is being saved.
    saved: usize,
}

#[derive(Debug, Default)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

impl Parts {
    /// Saves `bytes` as the part `name`. All ranks must save the same parts in the same order.
    ///
    /// # Errors
    /// If that name has been given already, or there is too little memory.
    pub fn put(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.put_with(name, bytes.len(), |part| {
            part.extend_from_slice(bytes);
            Ok(())
        })
    }

    /// Saves `value` as the part `name`, as postcard writes it. Some types can be written so, and not be read again: enums with serde's `tag` or
    /// `untagged`, fields with `skip_serializing_if`, and `serde_json::Value`.
    ///
    /// # Errors
    /// As [`put`](Self::put), and if the value cannot be written.
    pub fn serialize<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) -> Result<()> {
        self.put_with(name, 0, |part| object::write(value, part, &format!("the part {name:?} of the state")))
    }

    /// The bytes of the part `name`.
    ///
    /// # Errors
    /// If there is no such part: the rank from which the state came saved others.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let part = self.parts.iter().find(|part| part.name == name).ok_or_else(|| {
            Error::mismatch(format!("the state that came from another rank has no part {name:?}"))
                .with_remedy("all ranks must save the same parts")
        })?;
        Ok(&part.bytes)
    }

    /// Copies the part `name` into memory of the same length.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes), and if the lengths differ.
    pub fn copy_to(&self, name: &str, memory: &mut [u8]) -> Result<()> {
        let bytes = self.bytes(name)?;
        if bytes.len() != memory.len() {
            return Err(Error::mismatch(format!(
                "the part {name:?} of the state has {} bytes, here there is room for {}",
                bytes.len(),
                memory.len()
            ))
            .with_remedy("all ranks must build the same model"));
        }
        memory.copy_from_slice(bytes);
        Ok(())
    }

    /// The value of the part `name`.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes), and if the bytes are no such value.
    pub fn deserialize<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let unreadable = |why: String| {
            Error::mismatch(format!("the part {name:?} of the state cannot be read: {why}"))
                .with_remedy("all ranks must save the same types")
        };
        match postcard::take_from_bytes(self.bytes(name)?) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(unreadable(format!("{} bytes are left", rest.len()))),
            Err(error) => Err(unreadable(error.to_string())),
        }
    }

    /// The number of bytes of all parts.
    pub fn total_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes.len()).sum()
    }

    fn put_with(
        &mut self,
        name: &str,
        length: usize,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        if self.parts[..self.saved].iter().any(|part| part.name == name) {
            return Err(Error::invalid_argument(format!("the state has two parts {name:?}"))
                .with_remedy("save each part under a name of its own"));
        }
        if self.saved == self.parts.len() {
            self.parts.push(Part::default());
        }
        let part = &mut self.parts[self.saved];
        if part.name != name {
            name.clone_into(&mut part.name);
        }
        part.bytes.clear();
        reserve(&mut part.bytes, length, name)?;
        fill(&mut part.bytes)?;
        self.saved += 1;
        Ok(())
    }

    /// Saving a state begins.
    pub(super) fn begin(&mut self) {
        self.saved = 0;
    }

    /// Saving the state has ended.
    pub(super) fn finish(&mut self) {
        self.parts.truncate(self.saved);
    }

    pub(super) fn summaries(&self) -> Vec<Summary> {
        let summary = |part: &Part| Summary {
            name: part.name.clone(),
            length: part.bytes.len() as u64,
            hash: xxh3_64(&part.bytes),
        };
        self.parts.iter().map(summary).collect()
    }

    /// The part `name`, if it is there.
    pub(super) fn find_mut(&mut self, name: &str) -> Option<&mut Part> {
        self.parts.iter_mut().find(|part| part.name == name)
    }

    /// Keeps only the parts in `wanted`, in its order: the `received` ones, or else the present ones.
    pub(super) fn rebuild(&mut self, wanted: &[Summary], received: Vec<Part>) {
        let mut parts: Vec<Part> = received.into_iter().chain(self.parts.drain(..)).collect();
        let mut take = |name: &str| Some(parts.remove(parts.iter().position(|part| part.name == name)?));
        self.parts = wanted.iter().filter_map(|part| take(&part.name)).collect();
    }
}

impl Part {
    /// `length` bytes, all 0.
    pub(super) fn zeroed(name: &str, length: u64) -> Result<Self> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        reserve(&mut bytes, length, name)?;
        bytes.resize(length, 0);
        Ok(Self { name: name.to_owned(), bytes })
    }
}

/// Allocates before the length is used: it may come from another rank, and too large a length must be an error.
fn reserve(bytes: &mut Vec<u8>, length: usize, name: &str) -> Result<()> {
    bytes.try_reserve_exact(length).map_err(|error| {
        Error::out_of_memory(format!("no memory for the {length} bytes of the part {name:?} of the state"))
            .with_source(error)
            .with_remedy("start fewer workers on this host: beside the state itself each keeps a copy of it")
    })
}

/// One number for all parts.
pub(super) fn digest(summaries: &[Summary]) -> u64 {
    let mut hasher = Xxh3Default::new();
    for Summary { name, length, hash } in summaries {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update(&hash.to_le_bytes());
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(parts: &mut Parts, what: &[(&str, &[u8])]) -> Result<()> {
        parts.begin();
        what.iter().try_for_each(|(name, bytes)| parts.put(name, bytes))?;
        parts.finish();
        Ok(())
    }

    #[test]
    fn what_is_saved_again_takes_the_same_memory() {
        let mut parts = Parts::default();
        saved(&mut parts, &[("weights", &[1; 1000]), ("step", &[7])]).unwrap();
        let memory = parts.bytes("weights").unwrap().as_ptr();
        saved(&mut parts, &[("weights", &[2; 1000])]).unwrap();
        assert_eq!(parts.bytes("weights").unwrap().as_ptr(), memory);
        assert_eq!(parts.total_bytes(), 1000);
        assert!(parts.bytes("step").unwrap_err().is_mismatch());
    }

    #[test]
    fn values_come_back_and_others_are_refused() {
        let mut parts = Parts::default();
        parts.serialize("place", &(3_u64, "epoch")).unwrap();
        parts.finish();
        assert_eq!(parts.deserialize::<(u64, String)>("place").unwrap(), (3, "epoch".to_owned()));
        for error in [
            parts.deserialize::<u64>("place").unwrap_err(),
            parts.deserialize::<(u64, String, u64)>("place").unwrap_err(),
        ] {
            assert!(error.is_mismatch() && error.to_string().contains("cannot be read"), "{error}");
        }
        assert!(parts.copy_to("place", &mut [0; 3]).unwrap_err().to_string().contains("room for 3"));
        assert!(saved(&mut parts, &[("a", &[]), ("a", &[])]).unwrap_err().is_invalid_argument());
    }

    #[test]
    fn every_difference_shows_in_the_digest() {
        let of = |what: &[(&str, &[u8])]| {
            let mut parts = Parts::default();
            saved(&mut parts, what).unwrap();
            digest(&parts.summaries())
        };
        let digests = [
            of(&[("a", b"x"), ("b", b"y")]),
            of(&[("b", b"y"), ("a", b"x")]),
            of(&[("a", b"x"), ("b", b"z")]),
            of(&[("a", b"x")]),
            of(&[("ab", b"x")]),
            of(&[("a", b"xy"), ("b", b"")]),
        ];
        assert!(digests.iter().enumerate().all(|(index, digest)| !digests[..index].contains(digest)));
    }
}
