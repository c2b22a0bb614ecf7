//! The decoders of bytes from other ranks, for the fuzz targets in `fuzz/`. Compiled only for cargo-fuzz and for tests.

use std::time::{Duration, Instant};

use phalanx::{DType, Rank};
use serde::de::DeserializeOwned;

use phalanx_proto::horovod::controller::{Controller, StallTimes, fuse};
use phalanx_proto::horovod::message::{Message, Round};
use phalanx_proto::horovod::reduction::Op;
use phalanx_proto::horovod::request::{Kind, Part, Request};

/// Accepts any bytes. Returns whether they are valid.
pub type Target = fn(&[u8]) -> bool;

/// All targets, by the names of their folders and programs.
pub const TARGETS: &[(&str, Target)] =
    &[("horovod_message", horovod_message), ("horovod_round", horovod_round)];

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::take_from_bytes(bytes).ok().filter(|(_, rest)| rest.is_empty()).map(|(value, _)| value)
}

fn controller(rank: u32) -> Controller {
    let stall = StallTimes { warn: None, end: Duration::from_secs(60) };
    Controller::new(Rank::new(rank), 2, 8, stall, Instant::now())
}

/// What a rank sends to rank 0: rank 0 answers it, or refuses it. Returns whether it answers.
pub fn horovod_message(bytes: &[u8]) -> bool {
    let Some(message) = read::<Message>(bytes) else { return false };
    let mut main = controller(0);
    // Alone it waits for the other rank; then that has the same, or has joined.
    let others = [Message::default(), message.clone(), Message { joins: true, ..Message::default() }];
    let now = Instant::now();
    let mut answered = true;
    for other in others {
        match main.round(vec![message.clone(), other], now) {
            // What is answered takes no more memory than was counted, and every rank checks it again.
            Ok(round) => {
                let reckoned: usize =
                    round.responses.iter().map(|response| response.request.answer_bytes(2)).sum();
                let errors: usize = round
                    .responses
                    .iter()
                    .filter_map(|response| response.error.as_ref())
                    .map(String::len)
                    .sum();
                let written = postcard::to_stdvec(&round.responses).map_or(usize::MAX, |bytes| bytes.len());
                assert!(written <= reckoned + errors + 16 * (1 + round.responses.len()));
                assert!(round.responses.iter().all(|response| response.request.check(2).is_ok()));
            }
            Err(error) => {
                assert!(error.is_mismatch(), "{error}");
                answered = false;
            }
        }
    }
    answered
}

/// What rank 0 sends to a rank that has submitted an allreduce `a` of 4 x f32 and an allgather `g` of two rows. Returns whether the
/// rank accepts it.
pub fn horovod_round(bytes: &[u8]) -> bool {
    let Some(round) = read::<Round>(bytes) else { return false };
    let mut rank = controller(1);
    asked().into_iter().for_each(|request| rank.submit(request, Instant::now()));
    match rank.finish(round) {
        Ok(ready) => {
            let batches = fuse(&ready, 1 << 20);
            assert!(batches.len() <= ready.iter().map(|response| response.request.parts.len().max(1)).sum());
            true
        }
        Err(error) => {
            assert!(error.is_mismatch() || error.is_invalid_argument(), "{error}");
            false
        }
    }
}

fn asked() -> [Request; 2] {
    let request = |name: &str, kind, shape: &[u64]| Request {
        name: name.into(),
        kind,
        parts: vec![Part { dtype: DType::F32, stands_for: None, shape: shape.into() }],
    };
    [request("a", Kind::Allreduce(Op::Sum.into()), &[4]), request("g", Kind::Allgather, &[2, 3])]
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use serde::Serialize;

    use super::*;
    use phalanx_proto::horovod::message::{Refusal, Refused, Response, Settings};

    fn fuzz() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
    }

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        fn written(value: &impl Serialize) -> Vec<u8> {
            postcard::to_stdvec(value).unwrap()
        }
        let [a, g] = asked();
        let message = |requests: &[&Request]| Message {
            requests: requests.iter().map(|request| ((*request).clone(), 7)).collect(),
            ..Message::default()
        };
        let alltoall = Request { kind: Kind::Alltoall, ..g.clone() };
        let endless = Part { dtype: DType::F64, stands_for: None, shape: vec![u64::MAX, 3] };
        let response = |request: &Request, rows: &[&[u64]]| Response {
            request: request.clone(),
            rows: rows.iter().map(|rows| rows.to_vec()).collect(),
            absent: Vec::new(),
            error: None,
        };
        let round = |responses| Round { responses, ..Round::default() };
        let settings = Some(Settings { threshold: 1 << 20, cycle_micros: 500 });
        let refusal = |cause: &str| Refusal { name: "a".into(), cause: cause.into() };
        let refused = |rank| {
            let refused = vec![Refused { refusal: refusal("why"), rank, told: vec![1] }];
            written(&Round { refused, ..Round::default() })
        };
        let refuses = |cause: &str| {
            let refusals = vec![refusal(cause)];
            written(&Message { requests: vec![(a.clone(), 7)], refusals, ..Message::default() })
        };
        let wrong = Response { error: Some("both sides".into()), ..response(&a, &[]) };
        vec![
            ("horovod_message/valid_two", written(&message(&[&a, &g]))),
            ("horovod_message/valid_alltoall", written(&message(&[&alltoall]))),
            ("horovod_message/valid_joins", written(&Message { joins: true, ..Message::default() })),
            ("horovod_message/valid_one_name_twice", written(&message(&[&a, &alltoall, &g, &a]))),
            ("horovod_message/cut", written(&message(&[&a]))[..9].to_vec()),
            ("horovod_message/left_over", [written(&message(&[&a])), vec![0]].concat()),
            ("horovod_message/valid_refusal", refuses("why")),
            ("horovod_message/long_refusal", refuses(&"w".repeat(1025))),
            (
                "horovod_message/no_such_tensor",
                written(&message(&[&Request { parts: vec![endless], ..a.clone() }])),
            ),
            (
                "horovod_message/no_such_root",
                written(&message(&[&Request { kind: Kind::Broadcast { root: 2 }, ..a.clone() }])),
            ),
            (
                "horovod_round/valid_both",
                written(&round(vec![response(&g, &[&[5], &[2]]), response(&a, &[])])),
            ),
            ("horovod_round/valid_error", written(&round(vec![wrong]))),
            ("horovod_round/valid_settings", written(&Round { settings, ..Round::default() })),
            (
                "horovod_round/valid_stalled",
                written(&Round { stalled: Some("\"a\"".into()), all_joined: Some(9), ..Round::default() }),
            ),
            ("horovod_round/valid_refused", refused(0)),
            ("horovod_round/refused_by_no_rank", refused(2)),
            ("horovod_round/other_rows", written(&round(vec![response(&g, &[&[5], &[3]])]))),
            ("horovod_round/rows_without_end", written(&round(vec![response(&g, &[&[u64::MAX], &[2]])]))),
            ("horovod_round/rows_of_one", written(&round(vec![response(&g, &[&[2]])]))),
            (
                "horovod_round/not_asked_for",
                written(&round(vec![response(&Request { name: "b".into(), ..a }, &[])])),
            ),
        ]
    }

    /// After a change of the format: `UPDATE_SEEDS=1 cargo test -p phalanx-horovod --lib seeds_are`.
    #[test]
    fn seeds_are_what_is_said_today_and_mean_what_their_names_say() {
        for (name, bytes) in seeds() {
            let path = fuzz().join("seeds").join(name);
            if std::env::var_os("UPDATE_SEEDS").is_some() {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(
                fs::read(&path).unwrap(),
                bytes,
                "{name}: set UPDATE_SEEDS=1 and run this test to write it"
            );
        }
        // Also what the fuzzer has found.
        for (name, target) in TARGETS {
            for file in fs::read_dir(fuzz().join("seeds").join(name)).unwrap() {
                let path = file.unwrap().path();
                let is_valid = path.file_name().unwrap().to_str().unwrap().starts_with("valid");
                assert_eq!(target(&fs::read(&path).unwrap()), is_valid, "{}", path.display());
            }
        }
    }

    #[test]
    fn every_target_can_be_run() {
        let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
        for (name, _) in TARGETS {
            let program = fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).unwrap();
            assert!(program.contains(&format!("phalanx_horovod::fuzzing::{name}(bytes)")), "{name}");
            assert!(manifest.contains(&format!("name = \"{name}\"\n")), "{name}");
        }
    }
}
