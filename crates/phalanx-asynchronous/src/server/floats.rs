//! Numbers as they travel: their bytes, in one piece. A server without memory for them gives an error, and does not end with the parameters
//! of all.

use std::borrow::Cow;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::buffer::with_room;
use crate::error::Result;
use crate::rpc::Bytes;

#[derive(Clone, Debug)]
pub(super) enum Floats<'a> {
    /// Those of the program, which sends them.
    Lent(&'a [f32]),
    /// The bytes of numbers of four bytes each, at any address.
    Received(Bytes),
}

impl Floats<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Lent(numbers) => numbers.len(),
            Self::Received(bytes) => bytes.len() / size_of::<f32>(),
        }
    }

    /// The numbers: a copy of those that have come.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(super) fn read(&self) -> Result<Cow<'_, [f32]>> {
        match *self {
            Self::Lent(numbers) => Ok(Cow::Borrowed(numbers)),
            Self::Received(ref bytes) => {
                let mut numbers = with_room(self.len())?;
                numbers.extend(bytes.as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)));
                Ok(Cow::Owned(numbers))
            }
        }
    }
}

impl Serialize for Floats<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Lent(numbers) => serializer.serialize_bytes(bytemuck::cast_slice(numbers)),
            Self::Received(ref bytes) => bytes.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Floats<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Bytes::deserialize(deserializer)?;
        match bytes.len().is_multiple_of(size_of::<f32>()) {
            true => Ok(Self::Received(bytes)),
            false => Err(D::Error::invalid_length(bytes.len(), &"the bytes of numbers of four bytes each")),
        }
    }
}

/// So many zeros.
///
/// # Errors
/// If there is no memory for them.
pub(super) fn zeros(elements: usize) -> Result<Vec<f32>> {
    let mut zeros = with_room(elements)?;
    zeros.resize(elements, 0.0);
    Ok(zeros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_bit_by_bit() {
        let numbers = [0.0, -1.5, f32::NAN, f32::INFINITY];
        let bytes = postcard::to_stdvec(&Floats::Lent(&numbers)).unwrap();
        assert_eq!(bytes.len(), 17);
        let back: Floats<'_> = postcard::from_bytes(&bytes).unwrap();
        assert_eq!((back.len(), postcard::to_stdvec(&back).unwrap()), (4, bytes));
        let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back.read().unwrap()), bits(&numbers));
        assert!(postcard::from_bytes::<Floats<'_>>(&[3, 1, 2, 3]).is_err());
        assert!(postcard::from_bytes::<Floats<'_>>(&[0xff, 0xff, 0xff, 0xff, 0x0f, 1]).is_err());
    }

    #[test]
    fn numbers_for_which_there_is_no_memory_are_an_error() {
        let error = zeros(1 << 60).unwrap_err();
        assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        assert_eq!(zeros(2).unwrap(), [0.0; 2]);
    }
}
