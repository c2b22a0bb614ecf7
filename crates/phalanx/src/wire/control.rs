//! What ranks tell each other beside their data: that they leave, or why the group has failed.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::rank::{Rank, Sequence};

/// Bytes before a message's body: its length.
pub(crate) const PREFIX: usize = 4;
/// The longest body.
pub(crate) const MAX_BODY: usize = 4 * 1024;
/// The longest text inside a notice; each of its four texts is cut to a share of the body.
const MAX_TEXT: usize = 1000;

/// A message on a control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Control {
    /// The sender has ended its part of the job in good order.
    Goodbye,
    /// The sender's group has failed.
    Failure(Notice),
}

/// A failure as one rank reports it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    /// Who saw it first, and on which host.
    origin: Option<(Rank, String)>,
    kind: Kind,
    cause: String,
    operation: Option<String>,
    sequence: Option<Sequence>,
    peer: Option<Rank>,
    remedy: Option<String>,
}

impl Notice {
    pub(crate) fn of(error: &Error) -> Self {
        Self {
            origin: error.rank().zip(error.host().map(cut)),
            kind: error.kind(),
            cause: cut(&error.full_cause()),
            operation: error.operation().map(cut),
            sequence: error.sequence(),
            peer: error.peer(),
            remedy: error.remedy().map(cut),
        }
    }

    /// The same failure, as `reporter` passed it on.
    pub(crate) fn into_error(self, reporter: Rank, host: &str) -> Error {
        let (origin, host) = self.origin.unwrap_or_else(|| (reporter, host.to_owned()));
        let mut error = Error::new(self.kind, self.cause).at(origin, host);
        if let Some(operation) = self.operation {
            error = error.in_operation(operation, self.sequence);
        }
        if let Some(remedy) = self.remedy {
            error = error.with_remedy(remedy);
        }
        error.with_peer(self.peer.unwrap_or(origin))
    }
}

fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// The message with its length in front.
pub(crate) fn encode(message: &Control) -> Result<Vec<u8>> {
    let body = postcard::to_stdvec(message)
        .map_err(|error| Error::protocol("a control message could not be written").with_source(error))?;
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// The first message in `bytes`, if it is whole, and the bytes that it took.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Control, usize)>> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let length = u32::from_le_bytes(*prefix) as usize;
    if length > MAX_BODY {
        return Err(Error::protocol(format!(
            "a control message claims {length} bytes; at most {MAX_BODY} are allowed"
        )));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let message = postcard::from_bytes(body)
        .map_err(|error| Error::protocol("a control message could not be read").with_source(error))?;
    Ok(Some((message, PREFIX + length)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_failure_arrives_with_all_that_it_names() {
        let error = Error::mismatch("x".repeat(5000))
            .with_peer(Rank::new(2))
            .in_operation("barrier", Some(Sequence(3)))
            .with_remedy("call it everywhere");
        let bytes = encode(&Control::Failure(Notice::of(&error))).unwrap();
        assert!(bytes.len() <= PREFIX + MAX_BODY);
        assert!(decode(&bytes[..bytes.len() - 1]).unwrap().is_none());
        let (Control::Failure(notice), used) = decode(&bytes).unwrap().unwrap() else { unreachable!() };
        assert_eq!(used, bytes.len());
        let seen = notice.into_error(Rank::new(1), "b");
        assert!(seen.is_mismatch());
        assert_eq!(
            (seen.peer(), seen.sequence(), seen.rank()),
            (Some(Rank::new(2)), Some(Sequence(3)), Some(Rank::new(1)))
        );
    }

    #[test]
    fn a_long_claim_is_refused_before_memory_is_taken() {
        assert!(decode(&u32::MAX.to_le_bytes()).unwrap_err().to_string().contains("at most 4096"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
            let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
            framed.extend(&bytes);
            let _ = decode(&framed);
        }
    }
}
