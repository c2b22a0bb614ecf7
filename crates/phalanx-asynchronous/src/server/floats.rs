//! Numbers as they travel: their bytes, in one piece.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Floats<'a>(pub Cow<'a, [f32]>);

impl Serialize for Floats<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(&self.0))
    }
}

/// Always a copy, which is aligned.
impl<'de> Deserialize<'de> for Floats<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Vec<f32>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the bytes of numbers of four bytes each")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<f32>, E> {
                match bytes.as_chunks::<4>() {
                    (chunks, []) => Ok(chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()),
                    _ => Err(E::invalid_length(bytes.len(), &self)),
                }
            }
        }
        deserializer.deserialize_bytes(Bytes).map(|numbers| Self(Cow::Owned(numbers)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_bit_by_bit() {
        let numbers = Floats(Cow::Owned(vec![0.0, -1.5, f32::NAN, f32::INFINITY]));
        let bytes = postcard::to_stdvec(&numbers).unwrap();
        assert_eq!(bytes.len(), 17);
        let back: Floats<'_> = postcard::from_bytes(&bytes).unwrap();
        assert!(
            back.0.iter().map(|number| number.to_bits()).eq(numbers.0.iter().map(|number| number.to_bits()))
        );
        assert!(postcard::from_bytes::<Floats<'_>>(&[3, 1, 2, 3]).is_err());
        assert!(postcard::from_bytes::<Floats<'_>>(&[0xff, 0xff, 0xff, 0xff, 0x0f, 1]).is_err());
    }
}
