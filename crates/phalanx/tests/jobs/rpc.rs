//! Calls between processes, one of which is lost.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx::asynchronous::{Answer, Bytes, LocalMethod, LocalUpdates, Rpc};
use phalanx::{ProcessGroup, Rank};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use crate::support::network::Network;
use crate::support::world::{LIMIT, World, end_with, in_time};

const VICTIM: usize = 2;
/// A death is known at once; again on a machine that may be busy.
const DEATH_LIMIT: Duration = Duration::from_secs(2);
/// The heartbeats' time-out, plus the time that a busy machine may need.
const SILENCE_LIMIT: Duration = Duration::from_secs(4);
/// The same if the network between hosts is silent.
const NETWORK_SILENCE_LIMIT: Duration = Duration::from_secs(16);

pub const TESTS: &[(&str, fn())] = &[
    ("a_rank_that_is_killed_ends_its_calls_and_the_others_go_on", || lost(Signal::KILL, DEATH_LIMIT)),
    ("a_rank_that_is_frozen_ends_its_calls_and_the_others_go_on", || lost(Signal::STOP, SILENCE_LIMIT)),
    ("a_rank_that_cannot_connect_its_calls_tells_all", a_rank_that_cannot_connect_its_calls_tells_all),
    (
        "a_call_for_which_there_is_no_memory_ends_the_connection_and_no_process",
        a_call_for_which_there_is_no_memory_ends_the_connection_and_no_process,
    ),
    ("arguments_that_cannot_be_written_for_lack_of_memory_are_an_error_and_the_calls_go_on", || {
        for (rank, (code, error)) in World::start("rpc::tight", 2, false, &[]).end().0.into_iter().enumerate()
        {
            assert_eq!(code, Some(0), "rank {rank}: {error}");
        }
    }),
    ("parameters_for_which_there_is_no_memory_are_an_error_on_every_rank", || {
        for (rank, (code, error)) in World::start("rpc::meets", 2, false, &[]).end().0.into_iter().enumerate()
        {
            assert_eq!(code, Some(0), "rank {rank}: {error}");
        }
    }),
];

/// These need root and `ip`.
pub const PRIVILEGED: &[(&str, fn())] = &[
    ("a_cable_that_is_pulled_ends_the_calls_across_it_and_no_others", || link_is_lost(Network::pull)),
    ("connections_that_are_reset_end_the_calls_on_them_and_no_others", || link_is_lost(Network::reset)),
];

pub fn play(scenario: &str) {
    match scenario {
        "call" => end_with(call()),
        "across" => end_with(across()),
        "poor" => end_with(poor()),
        "narrow" => end_with(narrow()),
        "meets" => end_with(meets()),
        "tight" => end_with(tight()),
        other => panic!("no scenario {other}"),
    }
}

/// It answers "add", and never "never".
fn started(group: &ProcessGroup) -> phalanx::Result<Rpc> {
    let unanswered: Mutex<Vec<Answer<()>>> = Mutex::default();
    Rpc::builder()
        .deferred("never", move |_, (): (), answer: Answer<()>| unanswered.lock().unwrap().push(answer))
        .handler("add", |_, (a, b): (i64, i64)| Ok(a + b))
        .start(group)
}

/// Calls that `other` answers.
fn sums(rpc: &Rpc, other: Rank) -> phalanx::Result<()> {
    (0..20i64).try_for_each(|n| {
        assert_eq!(rpc.call::<_, i64>(other, "add", &(n, 1i64))?, n + 1);
        Ok(())
    })
}

/// Waits for an answer of the victim that does not come, and then calls the other survivor.
fn call() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let rpc = started(&group)?;
    let victim = Rank::new(VICTIM as u32);
    if rpc.rank() == victim {
        println!("training");
        std::thread::sleep(Duration::from_secs(60));
        return Ok(());
    }
    let pending = rpc.call_async::<_, ()>(victim, "never", &())?;
    println!("training");
    let error = pending.wait().expect_err("the victim never answers");
    eprintln!("blames {}: {error}", error.peer().map_or("nobody".to_owned(), |peer| peer.to_string()));
    assert!(error.is_peer_failure(), "{error}");
    assert!(rpc.call::<_, i64>(victim, "add", &(1i64, 1i64)).is_err_and(|error| error.is_peer_failure()));
    let other = Rank::new(1 - rpc.rank().get());
    sums(&rpc, other)?;
    rpc.shutdown()
}

/// Rank 1 has no descriptors left for its calls. Rank 2 does not call it before it has been connected with rank 0.
fn poor() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    group.barrier()?;
    if group.rank() == Rank::new(1) {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let limit = Rlimit { current: Some(open - 1), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    started(&group.with_timeout(LIMIT * 10)).map(drop)
}

/// This process gets so many more bytes of memory, and no more.
pub fn take_no_more_than(bytes: usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches("kB").trim().parse().unwrap();
    let limit = Rlimit { current: Some((size << 10) + bytes as u64), ..getrlimit(Resource::As) };
    setrlimit(Resource::As, limit).unwrap();
}

/// Rank 1 has no memory for the parameters of rank 0, which it meets.
fn meets() -> phalanx::Result<()> {
    const MUCH: usize = 128 << 20;
    let group = phalanx::init()?;
    let mut parameters = vec![1.0f32; MUCH / 4];
    let mut local = LocalUpdates::new(&group, LocalMethod::Ring, 1, &mut parameters)?;
    let before = local.state().clone();
    group.barrier()?;
    if group.rank() == Rank::new(1) {
        take_no_more_than(MUCH / 2);
    }
    // An average needs memory to be sent from, and is refused before anything is sent: the group goes on.
    let begun = LocalUpdates::new(&group, LocalMethod::Average, 1, &mut parameters);
    let error = begun.expect_err("there is no memory for it");
    assert!(error.is_out_of_memory() && error.to_string().contains("no memory for a copy of"), "{error}");
    let error = local.step(&mut parameters).expect_err("there is no memory for it");
    assert!(error.to_string().contains("rank 1 could not exchange its parameters"), "{error}");
    assert!(error.to_string().contains("no memory for a copy of"), "{error}");
    assert!(local.state() == &before && parameters.iter().all(|parameter| *parameter == 1.0));
    Ok(())
}

/// Rank 1 has no memory for what it would send.
fn tight() -> phalanx::Result<()> {
    const MUCH: usize = 128 << 20;
    let group = phalanx::init()?;
    let rpc = started(&group)?;
    let other = Rank::new(1 - rpc.rank().get());
    sums(&rpc, other)?;
    if rpc.rank() == Rank::new(1) {
        let much = "x".repeat(MUCH);
        take_no_more_than(MUCH / 2);
        let error = rpc.call::<_, i64>(other, "add", &much).expect_err("there is no memory for it");
        assert!(error.is_out_of_memory() && error.remedy().is_some(), "{error}");
        assert!(error.to_string().contains("no memory for the bytes of the arguments"), "{error}");
    }
    sums(&rpc, other)?;
    rpc.shutdown()
}

/// Rank 1 gets no more memory when rank 0 sends it much.
fn narrow() -> phalanx::Result<()> {
    const MUCH: usize = 200 << 20;
    let group = phalanx::init()?;
    let rpc = started(&group)?;
    let other = Rank::new(1 - rpc.rank().get());
    let says_what_to_do = |error: &phalanx::Error| {
        error.remedy().is_some_and(|remedy| remedy.contains("RpcBuilder::bytes_in_flight"))
    };
    sums(&rpc, other)?;
    if rpc.rank().is_main() {
        let much = Bytes::from(vec![0; MUCH]);
        group.barrier()?;
        let error = rpc.call::<_, i64>(other, "add", &much).expect_err("there is no memory for it");
        assert!(error.to_string().contains("rank 1 has no memory for the"), "{error}");
        assert!(says_what_to_do(&error), "{error}");
    } else {
        take_no_more_than(MUCH / 2);
        group.barrier()?;
        let deadline = Instant::now() + LIMIT;
        while rpc.failure(other)?.is_none() {
            assert!(Instant::now() < deadline, "it has taken the bytes");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = rpc.failure(other)?.expect("it has failed");
        assert!(error.is_out_of_memory() && says_what_to_do(&error), "{error}");
    }
    group.barrier()
}

fn a_call_for_which_there_is_no_memory_ends_the_connection_and_no_process() {
    for transport in ["shm", "tcp"] {
        let (outcomes, _) = World::start("rpc::narrow", 2, false, &[("PHALANX_TRANSPORT", transport)]).end();
        for (rank, (code, error)) in outcomes.into_iter().enumerate() {
            assert_eq!(code, Some(0), "rank {rank} over {transport}: {error}");
        }
    }
}

fn a_rank_that_cannot_connect_its_calls_tells_all() {
    let (outcomes, _) = World::start("rpc::poor", 3, false, &[]).end();
    for (rank, (code, error)) in outcomes.into_iter().enumerate() {
        assert_eq!(code, Some(1), "{rank}: {error}");
        assert!(error.contains("could not connect its remote calls with rank"), "{rank}: {error}");
        assert!(rank == 2 || error.contains("ulimit -n"), "{rank}: {error}");
    }
}

fn lost(signal: Signal, bound: Duration) {
    for transport in ["shm", "tcp"] {
        in_time(bound, &format!("{signal:?} over {transport}"), || {
            let mut ranks = World::start("rpc::call", 3, false, &[("PHALANX_TRANSPORT", transport)]);
            ranks.training();
            let start = Instant::now();
            ranks.send(VICTIM, signal);
            let took = ranks.await_all_but(&[VICTIM]) - start;
            ranks.kill(VICTIM);
            for (rank, (code, error)) in ranks.end().0.iter().enumerate().filter(|(rank, _)| *rank != VICTIM)
            {
                assert_eq!(*code, Some(0), "rank {rank} over {transport}: {error}");
                assert!(error.contains("blames 2: ") && error.contains("rpc \"never\" on rank 2"), "{error}");
            }
            took
        });
    }
}

/// Four ranks on two hosts: each waits for an answer from the other host that does not come, and then calls its neighbour.
fn across() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let rpc = started(&group)?;
    let rank = rpc.rank().get();
    let (far, near) = (Rank::new((rank + 2) % 4), Rank::new(rank ^ 1));
    let pending = rpc.call_async::<_, ()>(far, "never", &())?;
    rpc.call::<_, i64>(far, "add", &(1i64, 1i64))?;
    println!("training");
    let error = pending.wait().expect_err("it never answers");
    assert!(error.is_peer_failure() && error.peer() == Some(far), "{error}");
    sums(&rpc, near)?;
    rpc.shutdown()?;
    // Rank 0 would go on serving the store for those that it cannot reach.
    std::process::exit(0)
}

fn link_is_lost(fault: impl Fn(&Network)) {
    let network = Network::new();
    let mut ranks = network.start("rpc::across", 4, &[]);
    ranks.training();
    let start = Instant::now();
    fault(&network);
    let took = ranks.await_all_but(&[]) - start;
    let (outcomes, _) = ranks.end();
    for (rank, (code, error)) in outcomes.iter().enumerate() {
        assert_eq!(*code, Some(0), "rank {rank}: {error}");
    }
    assert!(took < NETWORK_SILENCE_LIMIT, "it took {took:?}: {outcomes:?}");
}
