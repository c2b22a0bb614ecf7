//! Frames on the pipes between the user's command and the launchers on the hosts: pure, except for the pipe itself.
//!
//! ```text
//! | length: u32, little-endian | postcard |
//! ```

use std::io::{self, BufRead, ErrorKind, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// No environment is larger on Linux, and all other messages are far smaller.
pub(super) const MAX_FRAME: u32 = 8 * 1024 * 1024;
/// A launcher sends this before its first frame: the output of a shell's start-up files comes before it.
pub(super) const GREETING: &[u8] = b"\nphalanx node 1\n";
/// The most bytes of such output.
const MAX_NOISE: usize = 64 * 1024;

/// `what` as a frame.
pub(super) fn encode(what: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = postcard::to_extend(what, vec![0; 4]).map_err(invalid)?;
    let length = u32::try_from(frame.len() - 4).ok().filter(|length| *length <= MAX_FRAME);
    let length = length.ok_or_else(|| invalid(format!("{} bytes are too much for a frame", frame.len())))?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

pub(super) fn write(to: &mut impl Write, what: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(what)?)?;
    to.flush()
}

/// The next frame; none at the end. It reads no byte beyond the frame.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    // An end between two frames is valid, an end within a frame is not.
    loop {
        match from.read(&mut length[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    from.read_exact(&mut length[1..])?;
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME {
        return Err(invalid(format!("a frame of {length} bytes; the longest has {MAX_FRAME}")));
    }
    // Allocated as bytes arrive.
    let mut bytes = Vec::new();
    if from.take(length.into()).read_to_end(&mut bytes)? < length as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    postcard::from_bytes(&bytes).map(Some).map_err(invalid)
}

/// Reads up to the end of the greeting; returns whether there is one. An error if much else comes.
pub(super) fn skip_to_greeting(from: &mut impl BufRead) -> io::Result<bool> {
    let mut matched = 0;
    // The greeting begins with a newline, and the output before it may not end with one.
    for _ in 0..MAX_NOISE {
        let mut byte = [0];
        match from.read(&mut byte) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        matched = if byte[0] == GREETING[matched] {
            matched + 1
        } else {
            // Only its first byte occurs twice: at its beginning and its end.
            usize::from(byte[0] == GREETING[0])
        };
        if matched == GREETING.len() {
            return Ok(true);
        }
    }
    let cause = format!(
        "{MAX_NOISE} bytes came before its first message: let the start-up files of the host's shell print less"
    );
    Err(invalid(cause))
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_come_back_one_by_one_and_the_end_is_an_end() {
        let mut bytes = Vec::new();
        write(&mut bytes, &(7_u32, "seven")).unwrap();
        write(&mut bytes, &(8_u32, "")).unwrap();
        let mut rest = &bytes[..];
        assert_eq!(read(&mut rest).unwrap(), Some((7_u32, "seven".to_owned())));
        assert_eq!(read(&mut rest).unwrap(), Some((8_u32, String::new())));
        assert_eq!(read::<(u32, String)>(&mut rest).unwrap(), None);
        let torn = read::<(u32, String)>(&mut &bytes[..6]).unwrap_err();
        assert_eq!(torn.kind(), ErrorKind::UnexpectedEof);
        let long = [&(MAX_FRAME + 1).to_le_bytes()[..], &[0; 9]].concat();
        assert_eq!(read::<u8>(&mut &long[..]).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn what_a_shell_prints_first_is_skipped() {
        for noise in ["", "Welcome!\n", "no line's end", "\n\nphalanx node", "\nphalanx\n"] {
            let text = [noise.as_bytes(), GREETING, b"rest"].concat();
            let mut from = &text[..];
            assert!(skip_to_greeting(&mut from).unwrap(), "{noise:?}");
            assert_eq!(from, b"rest");
        }
        assert!(!skip_to_greeting(&mut &b"Welcome!\n"[..]).unwrap());
        let refused = skip_to_greeting(&mut &vec![b'\n'; 2 * MAX_NOISE][..]).unwrap_err();
        assert!(refused.to_string().contains("start-up files"), "{refused}");
    }

    proptest! {
        #[test]
        fn the_greeting_is_found_behind_any_noise(noise in "[\nphalanx node1]{0,60}") {
            let text = [noise.as_bytes(), GREETING, b"!"].concat();
            let mut from = &text[..];
            prop_assert!(skip_to_greeting(&mut from).unwrap());
            // The first one counts, wherever it is.
            prop_assert!(from.ends_with(b"!"));
        }
    }
}
