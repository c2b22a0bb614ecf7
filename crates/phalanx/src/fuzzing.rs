//! What decodes bytes from outside, for the fuzz targets in `fuzz/`.
//!
//! Each function takes any bytes, checks what must hold of what they mean, and says whether they mean anything. It is
//! built for cargo-fuzz and for this crate's own tests, which give each function what `fuzz/seeds` holds for it.

use std::collections::HashMap;

use crate::env::LaunchEnv;
use crate::rank::{Epoch, Rank};
use crate::store::MAX_VALUE;
use crate::wire::control::{self, Control, MAX_BODY, Notice, PREFIX};
use crate::wire::frame::{HEADER, Header};
use crate::wire::hello::{Channel, HELLO, Hello};
use crate::wire::store::{Decoder, MAX_COUNT, MAX_REQUEST};

pub use crate::checkpoint::{fuzz_manifest as checkpoint_manifest, fuzz_tensors as checkpoint_tensors};
pub use crate::domain::fuzz_word as board_word;
pub use crate::elastic::fuzz_members as workers;
pub use crate::launch::{fuzz_error_file as error_file, fuzz_lines as lines};
pub use crate::rendezvous::{fuzz as rendezvous, fuzz_nodes as nodes};
pub use crate::store::{fuzz_log as store_log, fuzz_reply as store_reply};
pub use crate::transport::fuzz as address;

/// Takes any bytes; do they mean anything?
pub type Target = fn(&[u8]) -> bool;

/// All targets, by the names of their folders and programs.
pub const TARGETS: [(&str, Target); 16] = [
    ("address", address),
    ("board_word", board_word),
    ("checkpoint_manifest", checkpoint_manifest),
    ("checkpoint_tensors", checkpoint_tensors),
    ("control", control),
    ("error_file", error_file),
    ("frame", frame),
    ("hello", hello),
    ("launch_env", launch_env),
    ("lines", lines),
    ("nodes", nodes),
    ("rendezvous", rendezvous),
    ("store_log", store_log),
    ("store_reply", store_reply),
    ("store_request", store_request),
    ("workers", workers),
];

/// The header of a payload.
pub fn frame(bytes: &[u8]) -> bool {
    let Some(frame) = bytes.first_chunk::<HEADER>() else { return false };
    let Ok(header) = Header::decode(frame) else { return false };
    assert_eq!(header.encode(), *frame);
    let other = Header { payload: !header.payload, ..header };
    assert!(header.check(&header, Rank::MAIN, Rank::new(1)).is_ok());
    assert!(other.check(&header, Rank::MAIN, Rank::new(1)).is_err_and(|error| error.is_mismatch()));
    true
}

/// What a rank says when it connects.
pub fn hello(bytes: &[u8]) -> bool {
    let Some(hello) = bytes.first_chunk::<HELLO>() else { return false };
    let Ok(hello) = Hello::decode(hello) else { return false };
    assert_eq!(Hello::decode(&hello.encode()).ok(), Some(hello));
    let own = Hello { job: [0; 16], epoch: Epoch(0), rank: Rank::MAIN, world: 2, channel: Channel::Data };
    if own.accept(&hello).is_ok() {
        assert_eq!(hello, Hello { rank: Rank::new(1), ..own });
    }
    true
}

/// The messages on a control connection.
pub fn control(mut bytes: &[u8]) -> bool {
    let mut any = false;
    while let Ok(Some((message, used))) = control::decode(bytes) {
        assert!(used == 1 || (PREFIX..=PREFIX + MAX_BODY).contains(&used));
        bytes = &bytes[used..];
        any = true;
        if let Control::Failure(notice) = message {
            let error = notice.into_error(Rank::new(1), "host");
            assert!(error.rank().is_some() && error.peer().is_some() && !error.to_string().is_empty());
            // Whoever heard of it passes it on.
            let passed_on = control::encode(&Control::Failure(Notice::of(&error)));
            assert!(passed_on.is_ok_and(|bytes| matches!(control::decode(&bytes), Ok(Some(_)))));
        }
    }
    any
}

/// What a client asks a store.
pub fn store_request(mut bytes: &[u8]) -> bool {
    let (mut decoder, mut any) = (Decoder::default(), false);
    while bytes.len() >= decoder.need() {
        let need = decoder.need();
        assert!((1..=MAX_VALUE).contains(&need));
        let (piece, rest) = bytes.split_at(need);
        bytes = rest;
        match decoder.feed(piece.to_vec()) {
            Ok(None) => {}
            Ok(Some(request)) => {
                assert!(request.strings.len() <= 2 * MAX_COUNT);
                assert!(request.strings.iter().map(Vec::len).sum::<usize>() <= MAX_REQUEST);
                any = true;
            }
            Err(_) => break,
        }
    }
    any
}

/// What a launcher has set: a variable on each line.
pub fn launch_env(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let variables: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let Ok(Some(env)) = LaunchEnv::from_lookup(|name| Some((*variables.get(name)?).to_owned())) else {
        return false;
    };
    assert!(env.rank.get() < env.world_size.get());
    true
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn what_the_fuzzer_has_found_before_is_still_right() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        for (name, target) in TARGETS {
            let files = fs::read_dir(seeds.join(name)).unwrap();
            let meaningful =
                files.filter(|file| target(&fs::read(file.as_ref().unwrap().path()).unwrap())).count();
            assert!(meaningful > 0, "no seed of {name} means anything: add one as it is written today");
        }
    }
}
