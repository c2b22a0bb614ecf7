//! The decoders of bytes from outside, for the fuzz targets in `fuzz/`.
//!
//! Each function accepts any bytes, checks invariants of the decoded value, and returns whether the bytes are valid.
//! They are compiled only with the feature `fuzzing`: for cargo-fuzz, and for this crate's own tests, which run each function on its files in
//! `fuzz/seeds`.

use std::collections::HashMap;

use phalanx_core::env::LaunchEnv;
use phalanx_core::store::MAX_VALUE;
use phalanx_launch::Failure;
use phalanx_proto::rank::{Generation, Rank};
use phalanx_proto::wire::auth::NONCE;
use phalanx_proto::wire::control::{self, Control, MAX_BODY, Notice, PREFIX};
use phalanx_proto::wire::frame::{HEADER, Header};
use phalanx_proto::wire::greeting::{self, StoreSecret};
use phalanx_proto::wire::handshake::{ANSWER, GroupSecret, Initiator, Responder};
use phalanx_proto::wire::hello::{Channel, HELLO, Hello};
use phalanx_proto::wire::rpc;
use phalanx_proto::wire::store::{Decoder, MAX_COUNT, MAX_REQUEST};

pub use phalanx_checkpoint::{
    fuzz_claim as checkpoint_claim, fuzz_manifest as checkpoint_manifest, fuzz_tensors as checkpoint_tensors,
};
pub use phalanx_core::domain::fuzz_encoded_call as encoded_call;
pub use phalanx_core::elastic::fuzz_workers as workers;
pub use phalanx_core::key::fuzz as job_key;
pub use phalanx_core::rendezvous::fuzz as rendezvous;
#[cfg(feature = "etcd")]
pub use phalanx_core::store::fuzz_etcd as etcd;
pub use phalanx_core::store::{fuzz_log as store_log, fuzz_reply as store_reply};
pub use phalanx_launch::{
    fuzz_error_file as error_file, fuzz_hosts as hosts, fuzz_lines as lines, fuzz_nodes as nodes,
    fuzz_remote as remote,
};
pub use phalanx_proto::collective::fuzz_tuning as tuning;

/// Accepts any bytes. Returns whether they are valid.
pub type Target = fn(&[u8]) -> bool;

/// All targets, by the names of their folders and programs.
pub const TARGETS: &[(&str, Target)] = &[
    ("address", address),
    ("checkpoint_claim", checkpoint_claim),
    ("checkpoint_manifest", checkpoint_manifest),
    ("checkpoint_tensors", checkpoint_tensors),
    ("control", control),
    ("encoded_call", encoded_call),
    ("error_file", error_file),
    #[cfg(feature = "etcd")]
    ("etcd", etcd),
    ("failure", failure),
    ("frame", frame),
    ("greeting", greeting),
    ("handshake", handshake),
    ("hello", hello),
    ("hosts", hosts),
    ("job_key", job_key),
    ("launch_env", launch_env),
    ("lines", lines),
    ("nodes", nodes),
    ("remote", remote),
    ("rendezvous", rendezvous),
    ("rpc_frame", rpc_frame),
    ("store_log", store_log),
    ("store_reply", store_reply),
    ("store_request", store_request),
    ("tuning", tuning),
    ("workers", workers),
];

/// What ranks write to the store for each other when they connect.
pub fn address(bytes: &[u8]) -> bool {
    let understood = [
        phalanx_core::transport::fuzz(bytes),
        phalanx_core::domain::fuzz(bytes),
        phalanx_core::group::fuzz_part(bytes),
    ];
    understood.contains(&true)
}

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

/// The frame of a remote call.
pub fn rpc_frame(bytes: &[u8]) -> bool {
    let Some(frame) = bytes.first_chunk() else { return false };
    let Ok(head) = rpc::Head::decode(frame) else { return false };
    let inline = head.inline(frame);
    assert_eq!(inline.is_some(), head.length <= rpc::INLINE as u64);
    assert_eq!(rpc::Head::decode(&head.encode(inline.unwrap_or_default())).ok(), Some(head));
    true
}

/// The hello of a rank that connects.
pub fn hello(bytes: &[u8]) -> bool {
    let Some(hello) = bytes.first_chunk::<HELLO>() else { return false };
    let Ok(hello) = Hello::decode(hello) else { return false };
    assert_eq!(Hello::decode(&hello.encode()).ok(), Some(hello));
    let own = rank_saying_hello(0, 1);
    if own.accept(&hello).is_ok() {
        assert_eq!(hello, Hello { group: own.group, nonce: hello.nonce, ..rank_saying_hello(1, 0) });
    }
    true
}

/// The hello of one of two ranks to the other.
fn rank_saying_hello(rank: u32, to: u32) -> Hello {
    Hello {
        group: group_secret().name(),
        generation: Generation(0),
        rank: Rank::new(rank),
        to: Rank::new(to),
        world: 2,
        channel: Channel::Data,
        nonce: [rank as u8; NONCE],
    }
}

fn group_secret() -> GroupSecret {
    GroupSecret::new(None, &[0; 16])
}

/// What a rank receives in a handshake. After a 0, as the accepting rank: a hello and a proof. After a 1, as the
/// connecting rank: an answer and a welcome.
pub fn handshake(bytes: &[u8]) -> bool {
    let secret = group_secret();
    match bytes.split_first() {
        Some((0, bytes)) => {
            let Some((said, proof)) = bytes.split_first_chunk::<HELLO>() else { return false };
            let (Ok(hello), Some(proof)) = (Hello::decode(said), proof.first_chunk()) else { return false };
            let responder = Responder::new(&secret, &rank_saying_hello(0, 1), hello, *said);
            let Ok((peer, _)) = responder.and_then(|responder| responder.proven(&secret, proof)) else {
                return false;
            };
            assert_eq!(peer, Hello { nonce: peer.nonce, ..rank_saying_hello(1, 0) });
        }
        Some((1, bytes)) => {
            let Some((answer, welcome)) = bytes.split_first_chunk::<ANSWER>() else { return false };
            let (initiator, Some(welcome)) = (Initiator::new(rank_saying_hello(1, 0)), welcome.first_chunk())
            else {
                return false;
            };
            let answered = initiator.answered(&secret, *answer);
            let Ok(peer) = answered.and_then(|answered| answered.welcomed(&secret, welcome)) else {
                return false;
            };
            assert_eq!(peer, Hello { nonce: peer.nonce, ..rank_saying_hello(0, 1) });
        }
        _ => return false,
    }
    true
}

/// What a store and its clients receive before they are authenticated. After a 0: a client's call and its proof. After
/// a 1: a server's answer.
pub fn greeting(bytes: &[u8]) -> bool {
    let secret = StoreSecret::of_zeros();
    match bytes.split_first() {
        Some((0, bytes)) => {
            let Some((call, proof)) = bytes.split_first_chunk() else { return false };
            let responder = greeting::Responder::new(&secret, *call, [2; NONCE]);
            let (Some(responder), Some(proof)) = (responder, proof.first_chunk()) else { return false };
            responder.proven(&secret, proof)
        }
        Some((1, bytes)) => {
            let Some(answer) = bytes.first_chunk() else { return false };
            greeting::Initiator::new([1; NONCE]).answered(&secret, answer).is_some()
        }
        _ => false,
    }
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
            // A rank that receives it passes it on.
            let passed_on = control::encode(&Control::Failure(Notice::of(&error)));
            assert!(passed_on.is_ok_and(|bytes| matches!(control::decode(&bytes), Ok(Some(_)))));
        }
    }
    any
}

/// The report of another node's launcher about a failed worker.
pub fn failure(bytes: &[u8]) -> bool {
    let Ok(failure) = postcard::from_bytes::<Failure>(bytes) else { return false };
    assert!(failure.to_string().contains(&failure.exit.to_string()));
    let _ = failure.exit.code();
    let written = postcard::to_stdvec(&failure);
    assert!(
        written
            .is_ok_and(|bytes| postcard::from_bytes::<Failure>(&bytes).is_ok_and(|again| again == failure))
    );
    true
}

/// A client's requests to a store.
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
                // Those of a change are its key and two values, and one key is before all.
                assert!(request.strings.len() <= 1 + 3 * MAX_COUNT);
                assert!(request.strings.iter().map(Vec::len).sum::<usize>() <= MAX_REQUEST);
                any = true;
            }
            Err(_) => break,
        }
    }
    any
}

/// A launcher's variables, one on each line.
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
    use std::path::{Path, PathBuf};

    use super::*;
    use phalanx_proto::wire::auth::TAG;
    use phalanx_proto::wire::hello::REFUSAL;
    use phalanx_proto::wire::store::Op;

    fn seeds() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds")
    }

    /// Seeds in the current format have names that begin with "valid".
    #[test]
    fn what_the_fuzzer_has_found_before_is_still_right() {
        for (name, target) in TARGETS {
            let mut valid = 0;
            for file in fs::read_dir(seeds().join(name)).unwrap() {
                let path = file.unwrap().path();
                let is_valid = path.file_name().unwrap().to_str().unwrap().starts_with("valid");
                assert_eq!(
                    target(&fs::read(&path).unwrap()),
                    is_valid,
                    "does {} mean anything?",
                    path.display()
                );
                valid += usize::from(is_valid);
            }
            assert!(valid > 0, "no seed of {name} means anything: add one as it is written today");
        }
    }

    #[test]
    fn a_request_with_as_many_changes_as_there_may_be_is_one() {
        let (count, change) = ((MAX_COUNT as u64).to_le_bytes(), [0_u8; 3 * 8]);
        let request = [&[Op::CompareSetAfter as u8][..], &[0; 8], &count, &change.repeat(MAX_COUNT)].concat();
        assert!(store_request(&request));
    }

    /// The seeds that cannot be written by hand: with proofs, and with the version.
    fn handshakes() -> Vec<(&'static str, Vec<u8>)> {
        let (secret, zero, one) = (group_secret(), rank_saying_hello(0, 1), rank_saying_hello(1, 0));
        let stranger = Hello { group: [7; 16], generation: Generation(3), world: 9, ..one };
        let hello = |hello: Hello, channel| hello.on(channel, hello.to).encode().to_vec();
        let initiator = Initiator::new(one);
        let said = *initiator.hello();
        let responder = Responder::new(&secret, &zero, one, said).unwrap();
        let answer = *responder.answer();
        let answered = initiator.answered(&secret, answer).unwrap();
        let (_, welcome) = responder.proven(&secret, answered.proof()).unwrap();
        let connects = |proof: &[u8; TAG]| [&[0][..], &said, proof].concat();
        let accepts = |welcome: &[u8; TAG]| [&[1][..], &answer, welcome].concat();
        vec![
            ("hello/valid_data", hello(one, Channel::Data)),
            ("hello/valid_control", hello(one, Channel::Control)),
            ("hello/valid_messages", hello(one, Channel::Messages)),
            ("hello/valid_data_stranger", hello(stranger, Channel::Data)),
            ("hello/valid_control_stranger", hello(stranger, Channel::Control)),
            ("hello/refusal", REFUSAL.to_vec()),
            ("handshake/valid_connects", connects(answered.proof())),
            ("handshake/unproven", connects(&[5; TAG])),
            ("handshake/valid_accepts", accepts(&welcome)),
            ("handshake/unwelcome", accepts(&[5; TAG])),
            ("handshake/refused", [&[1][..], &REFUSAL, &[0; 2 * TAG]].concat()),
        ]
    }

    /// After a change of the format: `UPDATE_SEEDS=1 cargo test -p phalanx --lib seeds_of_handshakes`.
    #[test]
    fn seeds_of_handshakes_are_what_is_said_today() {
        for (name, bytes) in handshakes() {
            let path = seeds().join(name);
            if std::env::var_os("UPDATE_SEEDS").is_some() {
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(
                fs::read(&path).unwrap(),
                bytes,
                "{name}: set UPDATE_SEEDS=1 and run this test to write it"
            );
        }
    }

    /// Each target has a program, so that each is fuzzed.
    #[test]
    fn every_target_can_be_run() {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
        let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
        for (name, _) in TARGETS {
            let program = fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs"))).unwrap();
            assert!(program.contains(&format!("phalanx::fuzzing::{name}(bytes)")), "{name}");
            assert!(manifest.contains(&format!("name = \"{name}\"\n")), "{name}");
        }
    }
}
