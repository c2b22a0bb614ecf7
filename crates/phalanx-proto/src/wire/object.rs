//! Values of the program, as postcard writes them.

use postcard::Error as Refusal;
use postcard::ser_flavors::Flavor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Bytes that grow as long as there is memory.
struct Growing<'a>(&'a mut Vec<u8>);

impl Flavor for Growing<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.try_reserve(bytes.len()).map_err(|_| Refusal::SerializeBufferFull)?;
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Writes `value`, which errors call `what`, behind the `bytes` that are there.
///
/// # Errors
/// If it cannot be written, or there is no memory for it: a `Vec` that grew without asking would end the process.
pub fn write<T: Serialize + ?Sized>(value: &T, bytes: &mut Vec<u8>, what: &str) -> Result<()> {
    postcard::serialize_with_flavor(value, Growing(bytes)).map_err(|error| unwritten(what, error))
}

/// Checks that `value`, which errors call `what`, can be read again when it has been written. Neither the names of fields nor their types are written, so
/// some types can only be written.
///
/// # Errors
/// If it cannot be written, or what is written cannot be read as this type.
pub fn check_readable<T: Serialize + DeserializeOwned>(value: &T, what: &str) -> Result<()> {
    let mut bytes = Vec::new();
    write(value, &mut bytes, what)?;
    let cause = match postcard::take_from_bytes::<T>(&bytes) {
        Ok((_, [])) => return Ok(()),
        Ok((_, rest)) => format!("{} bytes are left over", rest.len()),
        Err(error) => error.to_string(),
    };
    Err(Error::invalid_argument(format!("{what} could be written, and not be loaded again: {cause}")).with_remedy(
        "take `tag`, `untagged` and `skip_serializing_if` out of the serde attributes of its type, and `serde_json::Value` out of its fields; \
         a String of JSON may be one",
    ))
}

/// Why `what` could not be written, by a flavor that takes memory as [`write()`] does.
pub fn unwritten(what: &str, error: Refusal) -> Error {
    match error {
        Refusal::SerializeBufferFull => {
            Error::out_of_memory(format!("there is no memory for the bytes of {what}"))
                .with_remedy("make less of it, or start fewer ranks on this host")
        }
        error => Error::not_serialized(format!("{what} could not be written"), error),
    }
}

#[cfg(test)]
mod tests {
    use serde::Serializer;
    use serde::ser::SerializeSeq;

    use super::*;

    #[test]
    fn a_value_is_written_behind_what_is_there() {
        let mut bytes = vec![9];
        write(&(7u8, "ab"), &mut bytes, "a pair").unwrap();
        assert_eq!(bytes, [9, 7, 2, b'a', b'b']);
    }

    #[test]
    fn what_cannot_be_written_and_what_there_is_no_memory_for_are_told_apart() {
        /// Does not say how many it has.
        struct Endless;
        impl Serialize for Endless {
            fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.serialize_seq(None)?.end()
            }
        }
        let error = write(&Endless, &mut Vec::new(), "the list").unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("the list could not be written"),
            "{error}"
        );
        let error = unwritten("the list", Refusal::SerializeBufferFull);
        assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        assert!(error.to_string().contains("no memory for the bytes of the list"), "{error}");
    }
}
