//! The fault matrix at the level of a group: which fault, at which moment, in which world. docs/failure.md maps each row
//! to its test; those of the launcher are in phalanx-cli.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx::store::{Store, TcpStore};
use phalanx::{Buffer, DType, Deadline, GroupOptions, ProcessGroup, Rank, ReduceOp, rendezvous};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};

use crate::support::network::{Network, run};
use crate::support::world::{LIMIT, World, in_time};

/// How long the ranks of these worlds wait at the start for one that is stopped: longer than one of them that is not the victim may be late.
const START_TIMEOUT: Duration = Duration::from_secs(6);
/// The heartbeats' time-out, plus the time that a busy machine may need. (`phalanx bench faults` measures; this finds hangs.)
const SILENCE_LIMIT: Duration = Duration::from_secs(4);
/// The same if the network between hosts is silent.
const NETWORK_SILENCE_LIMIT: Duration = Duration::from_secs(16);
/// A death is known at once; again on a machine that may be busy.
const DEATH_LIMIT: Duration = Duration::from_secs(2);
/// Where ranks say in the store that they have come.
const ROLL_CALL: &str = "phalanx/none/0/0";

pub const TESTS: &[(&str, fn())] = &[
    ("a_rank_is_killed", || at_every_moment("kill", DEATH_LIMIT)),
    ("a_rank_aborts", || at_every_moment("abort", DEATH_LIMIT)),
    ("a_rank_exits", || at_every_moment("exit", DEATH_LIMIT)),
    ("a_rank_is_frozen_and_thaws", || at_every_moment("stop", SILENCE_LIMIT)),
    ("the_store_ends_while_ranks_meet", the_store_ends_while_ranks_meet),
    ("a_rank_of_many_is_killed", a_rank_of_many_is_killed),
    ("a_rank_of_many_has_no_descriptors_left", a_rank_of_many_has_no_descriptors_left),
];

/// These need root and its tools.
pub const PRIVILEGED: &[(&str, fn())] = &[
    ("a_cable_is_pulled", || between_hosts("the network is silent", NETWORK_SILENCE_LIMIT, Network::pull)),
    ("a_network_is_parted", || {
        between_hosts("the network is silent", NETWORK_SILENCE_LIMIT, |network| {
            network.lose_what_the_first_sends();
            network.lose_what_the_second_sends();
        });
    }),
    ("a_network_is_parted_one_way", || {
        between_hosts("the network is silent", NETWORK_SILENCE_LIMIT, Network::lose_what_the_first_sends)
    }),
    ("a_network_is_parted_the_other_way", || {
        between_hosts("the network is silent", NETWORK_SILENCE_LIMIT, Network::lose_what_the_second_sends)
    }),
    // Long before a silence would be noticed.
    ("connections_are_reset", || between_hosts("was lost", SILENCE_LIMIT, Network::reset)),
    ("a_process_of_another_host_is_frozen", a_process_of_another_host_is_frozen),
    ("a_disk_is_full_where_ranks_meet", a_disk_is_full_where_ranks_meet),
    ("small_packets_carry_large_data", small_packets_carry_large_data),
    ("a_loopback_that_is_down_is_named", a_loopback_that_is_down_is_named),
    ("a_loopback_that_goes_down_is_named", a_loopback_that_goes_down_is_named),
];

/// What this program does as a rank.
pub fn play(scenario: &str) {
    let outcome = match scenario {
        "train" => train(),
        "meet" => meet(),
        "sum" => sum(),
        "many" => many(),
        "short" => short(),
        other => panic!("no scenario {other}"),
    };
    if let Err(error) = outcome {
        give_up(&error);
    }
}

/// Ends at once, as a program does that has nothing to save: what is timed is when a call returned its error. (Rank 0 would
/// else go on serving the store for those that it cannot reach.)
fn give_up(error: &phalanx::Error) -> ! {
    let blamed = error.peer().map_or("nobody".to_owned(), |peer| peer.to_string());
    eprintln!("blames {blamed}: {error}");
    let code = match error {
        error if error.is_peer_failure() => 3,
        error if error.is_timeout() => 4,
        _ => 1,
    };
    std::process::exit(code)
}

/// Trains until something goes wrong; one of the ranks sees to that itself, at the moment that it was told.
fn train() -> phalanx::Result<()> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (fault, moment) = (variable("FAULT"), variable("MOMENT"));
    let met = rendezvous::from_env(LIMIT)?;
    let is_victim = variable("VICTIM") == met.rank.to_string();
    let mut options = GroupOptions::from_env()?;
    // A death is known long before. Of a stop, this may be the end of the wait.
    options.timeout = if moment == "rendezvous" && fault == "stop" { START_TIMEOUT } else { LIMIT };
    if is_victim && moment == "rendezvous" {
        strike(&fault);
    }
    let group = ProcessGroup::join(met, options)?;
    let mut gradients = vec![1f32; 1 << 20];
    for step in 0.. {
        if step == 10 {
            println!("training");
        }
        // All have come to the call before, and so have said that they train.
        if step == 11 && is_victim && moment == "collective" {
            let fault = fault.clone();
            // In the middle of one of the next calls.
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(7));
                strike(&fault);
            });
        }
        if step == 12 && is_victim && moment == "steps" {
            strike(&fault);
        }
        if let Err(error) = group.all_reduce(&mut gradients, ReduceOp::Avg) {
            give_up(&error);
        }
    }
    Ok(())
}

/// Meets the others, or is the one that does not come.
fn meet() -> phalanx::Result<()> {
    println!("training");
    if std::env::var("RANK").is_ok_and(|rank| rank == "1") {
        std::thread::sleep(LIMIT);
    }
    rendezvous::from_env(LIMIT * 10).map(drop)
}

/// One sum of more data than any buffer between has.
fn sum() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut data = vec![group.rank().get() as f32 + 1.0; 4 << 20];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let world = group.world_size().get() as f32;
    assert!(data.iter().all(|sum| *sum == world * (world + 1.0) / 2.0));
    group.leave()
}

/// In a world that connects at first use: neighbours in a ring, then ranks that are far apart, and then all. Afterwards each rank uses a
/// connection for the first time with the victim, which is killed meanwhile, or waits for one.
fn many() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let (rank, world) = (group.rank().get(), group.world_size().get());
    let mut data = vec![rank as f32 + 1.0; 1 << 16];
    let outcome = (|| {
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        assert!(data.iter().all(|sum| *sum == (world * (world + 1) / 2) as f32));
        let away = |distance: u32| Rank::new((rank + distance) % world);
        for distance in [3, world / 2, world - 2] {
            let mut from = [0i64];
            let sending = group.isend(Buffer::from_slice(&[i64::from(rank)]), away(distance))?;
            group.recv(&mut from, away(world - distance))?;
            sending.wait()?;
            assert_eq!(from, [i64::from(away(world - distance).get())]);
        }
        let all: Vec<i64> = (0..world).map(|to| i64::from(rank * world + to)).collect();
        let mut received = vec![0; all.len()];
        if std::env::var("FIRST").is_err() {
            group.all_to_all(&all, &mut received)?;
            assert!((0..world).all(|from| received[from as usize] == i64::from(from * world + rank)));
        }
        group.barrier()?;
        println!("training");
        let victim: u32 = std::env::var("VICTIM").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
        if rank == victim {
            std::thread::sleep(LIMIT);
        }
        // It never sends, so who waits for its call waits until it is dead.
        match rank % 3 {
            0 => group.recv(&mut [0i64], Rank::new(victim)),
            1 => group.irecv(Buffer::zeroed(DType::I64, 1), Rank::new(victim))?.wait().map(drop),
            _ => group.barrier(),
        }
    })();
    outcome.or_else(|error: phalanx::Error| give_up(&error))
}

/// One of many ranks has no descriptors left when it calls others for the first time, or is called.
fn short() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    group.barrier()?;
    let (rank, world) = (group.rank().get(), group.world_size().get());
    let victim: u32 = std::env::var("VICTIM").unwrap().parse().unwrap();
    let calls = std::env::var("CALLS").is_ok();
    let _held = if rank == victim { use_up_descriptors() } else { Vec::new() };
    // Nobody calls before.
    group.barrier()?;
    // None of these pairs is connected for a barrier.
    let others: Vec<Rank> = [5, 7, 9].map(|distance| Rank::new((victim + distance) % world)).into();
    let message = |sends| {
        let victim = Rank::new(victim);
        if sends { group.send(&[1i64], victim) } else { group.recv(&mut [0i64], victim) }
    };
    if rank == victim {
        others.iter().try_for_each(|other| match calls {
            true => group.send(&[1i64], *other),
            false => group.recv(&mut [0i64], *other),
        })?;
    } else if others.contains(&group.rank()) {
        message(!calls)?;
    }
    group.barrier()
}

/// Opens as many descriptors as this process may have.
fn use_up_descriptors() -> Vec<OwnedFd> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let highest =
        open.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<u64>().ok()).max().unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(highest + 1), ..limit }).unwrap();
    std::iter::from_fn(|| rustix::io::dup(std::io::stderr()).ok()).collect()
}

fn strike(fault: &str) {
    let signal = |signal| kill_process(getpid(), signal).unwrap();
    match fault {
        "kill" => signal(Signal::KILL),
        "abort" => std::process::abort(),
        "exit" => std::process::exit(7),
        "stop" => signal(Signal::STOP),
        other => panic!("no fault {other}"),
    }
}

/// One world for each moment, size and transport: every survivor's call returns, names the victim, and nothing is left.
fn at_every_moment(fault: &str, bound: Duration) {
    let before = Traces::now();
    for (world, victim) in [(2, 0), (2, 1), (4, 0), (4, 2)] {
        for (moment, transport) in [
            ("rendezvous", "shm"),
            ("collective", "shm"),
            ("collective", "tcp"),
            ("steps", "tcp"),
            ("steps", "shm"),
        ] {
            let what = format!("{fault} of rank {victim} of {world}, {moment}, {transport}");
            let number = victim.to_string();
            let variables =
                [("FAULT", fault), ("MOMENT", moment), ("VICTIM", &number), ("PHALANX_TRANSPORT", transport)];
            // It takes its time until the ranks have met.
            let bound = if moment == "rendezvous" { START_TIMEOUT * 2 + bound } else { bound };
            in_time(bound, &what, || {
                let mut ranks = World::start("faults::train", world, false, &variables);
                if moment != "rendezvous" {
                    ranks.training();
                }
                let start = Instant::now();
                let took = ranks.await_all_but(&[victim]) - start;
                ranks.send(victim, Signal::CONT);
                let (outcomes, _) = ranks.end();
                for (rank, (code, error)) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != victim) {
                    let expected = if moment == "rendezvous" && fault == "stop" { [3, 4] } else { [3, 3] };
                    assert!(
                        code.is_some_and(|code| expected.contains(&code)),
                        "{what}: rank {rank}: {error}"
                    );
                    assert!(error.contains(&format!("blames {victim}: ")), "{what}: rank {rank}: {error}");
                }
                // A rank that has thawed finds that it was given up.
                let code = outcomes[victim].0;
                let expected = match fault {
                    "exit" => Some(7),
                    "stop" => code.filter(|code| [1, 3, 4].contains(code)),
                    _ => None,
                };
                assert_eq!(code, expected, "{what}: {}", outcomes[victim].1);
                assert!(fault != "stop" || code.is_some(), "{what}");
                took
            });
        }
    }
    before.are_all();
}

/// More ranks than connect all pairs at the start.
fn a_rank_of_many_is_killed() {
    const VICTIM: usize = 7;
    let before = Traces::now();
    let victim = VICTIM.to_string();
    for (transport, first) in [("tcp", "FIRST"), ("tcp", "ALL"), ("shm", "ALL")] {
        let what = format!("{transport}, {first}");
        let variables = [("PHALANX_TRANSPORT", transport), ("VICTIM", &victim), (first, "1")];
        // The ends of 20 processes are in this.
        in_time(DEATH_LIMIT * 5, &what, || {
            let mut ranks = World::start("faults::many", 20, false, &variables);
            ranks.training();
            // They are about to wait.
            std::thread::sleep(Duration::from_millis(100));
            let start = ranks.kill(VICTIM);
            let took = ranks.await_all_but(&[VICTIM]) - start;
            let (outcomes, _) = ranks.end();
            for (rank, (code, error)) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != VICTIM) {
                assert_eq!(*code, Some(3), "{what}: rank {rank}: {error}");
                assert!(error.contains(&format!("blames {VICTIM}: ")), "{what}: rank {rank}: {error}");
            }
            took
        });
    }
    before.are_all();
}

fn a_rank_of_many_has_no_descriptors_left() {
    const VICTIM: &str = "7";
    for who in ["CALLS", "IS_CALLED"] {
        let ranks = World::start(
            "faults::short",
            20,
            false,
            &[("PHALANX_TRANSPORT", "tcp"), ("VICTIM", VICTIM), (who, "1")],
        );
        // Who is not answered calls for 10 s, and on a busy machine 20 processes take their time.
        let (outcomes, _) = ranks.end_within(3 * LIMIT);
        for (rank, (code, error)) in outcomes.iter().enumerate() {
            assert!(code.is_some_and(|code| code != 0), "{who}: rank {rank}: {error}");
            assert!(error.contains("`ulimit -n`"), "{who}: rank {rank}: {error}");
        }
    }
}

fn the_store_ends_while_ranks_meet() {
    let before = Traces::now();
    for world in [2, 4] {
        in_time(SILENCE_LIMIT, "the end of a store", || {
            let mut ranks = World::start("faults::meet", world, false, &[]);
            ranks.training();
            // All but one have come to the roll-call.
            let soon = Deadline::after(LIMIT);
            let store = TcpStore::connect(format!("127.0.0.1:{}", ranks.port), soon).unwrap();
            let came: Vec<String> =
                (0..world).filter(|rank| *rank != 1).map(|rank| format!("{ROLL_CALL}/rank/{rank}")).collect();
            store.wait(&came.iter().map(String::as_str).collect::<Vec<_>>(), soon).unwrap();
            drop(store);
            // They are about to wait for the one that does not come.
            std::thread::sleep(Duration::from_millis(200));
            drop(ranks.server.take());
            let start = Instant::now();
            let took = ranks.await_all_but(&[1]) - start;
            ranks.kill(1);
            for (code, error) in
                ranks.end().0.iter().enumerate().filter(|(rank, _)| *rank != 1).map(|(_, end)| end)
            {
                assert!(code.is_some_and(|code| code != 0) && error.contains("store"), "{error}");
            }
            took
        });
    }
    before.are_all();
}

/// Two hosts, whose ranks lose each other: all of them have an error, and none hangs.
fn between_hosts(says: &str, bound: Duration, fault: impl Fn(&Network)) {
    for (world, transport) in [(2, "tcp"), (4, "auto")] {
        let network = Network::new();
        let mut ranks = network.start("faults::train", world, &[("PHALANX_TRANSPORT", transport)]);
        ranks.training();
        let start = Instant::now();
        fault(&network);
        let took = ranks.await_all_but(&[]) - start;
        let (outcomes, _) = ranks.end();
        for (rank, (code, error)) in outcomes.iter().enumerate() {
            assert_eq!(*code, Some(3), "rank {rank} of {world}: {error}");
            // The first rank that heard of it blames the other side; the ranks that it could still tell say the same.
            assert!(
                error.contains("blames ") && !error.contains("blames nobody"),
                "rank {rank} of {world}: {error}"
            );
        }
        assert!(outcomes.iter().any(|(_, error)| error.contains(says)), "{outcomes:?}");
        assert!(took < bound, "it took {took:?}: {outcomes:?}");
        println!("{world} ranks: {took:?}");
    }
}

/// Its host acknowledges what the others send to it, so it is not the network.
fn a_process_of_another_host_is_frozen() {
    let network = Network::new();
    let mut ranks = network.start("faults::train", 2, &[("PHALANX_HEARTBEAT_TIMEOUT", "3")]);
    ranks.training();
    ranks.send(1, Signal::STOP);
    ranks.await_all_but(&[1]);
    ranks.send(1, Signal::CONT);
    let (outcomes, _) = ranks.end();
    let (code, error) = &outcomes[0];
    assert_eq!(*code, Some(3), "{error}");
    assert!(error.contains("blames 1") && error.contains("its process is frozen"), "{error}");
}

/// 576 is the least that every host on the Internet takes.
fn small_packets_carry_large_data() {
    for mtu in [576, 1280] {
        let network = Network::new();
        network.set_mtu(mtu);
        let ranks = network.start("faults::sum", 4, &[]);
        let (outcomes, _) = ranks.end();
        assert!(
            outcomes.iter().all(|(code, said)| *code == Some(0) && said.is_empty()),
            "{mtu}: {outcomes:?}"
        );
    }
}

fn a_loopback_that_goes_down_is_named() {
    let network = Network::new();
    let mut ranks = network.start_on_loopback("faults::train", 2, &[("PHALANX_HEARTBEAT_TIMEOUT", "0.5")]);
    ranks.training();
    network.pull_loopback();
    ranks.await_all_but(&[]);
    let (outcomes, _) = ranks.end();
    for (code, said) in &outcomes {
        assert!(*code == Some(3) && said.contains("ip link set lo up"), "{outcomes:?}");
    }
}

/// That of a new namespace, and one that was up once.
fn a_loopback_that_is_down_is_named() {
    for was_up in [false, true] {
        let network = if was_up { Network::new() } else { Network::without_loopback() };
        network.pull_loopback();
        let ranks = network.start_on_loopback("faults::sum", 2, &[]);
        let (outcomes, _) = ranks.end();
        for (code, said) in &outcomes {
            assert!(matches!(code, Some(1 | 4)) && said.contains("ip link set lo up"), "{outcomes:?}");
        }
    }
}

fn a_disk_is_full_where_ranks_meet() {
    struct Full(tempfile::TempDir);
    impl Drop for Full {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(self.0.path()).output();
        }
    }
    let disk = Full(tempfile::tempdir().unwrap());
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(disk.0.path()));
    let filling = std::fs::write(disk.0.path().join("full"), vec![1; 1 << 20]);
    assert_eq!(filling.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    let url = format!("file://{}", disk.0.path().join("job").display());
    let start = Instant::now();
    let error = rendezvous::from_url(
        &url,
        Some(Rank::MAIN),
        Some(phalanx::WorldSize::new(2).unwrap()),
        START_TIMEOUT,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("No space left") && error.contains("job"), "{error}");
    assert!(start.elapsed() < START_TIMEOUT * 2);
    std::fs::remove_file(disk.0.path().join("full")).unwrap();
}

/// What a world could leave behind it. Its shared memory has no name, and ends with its processes.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    descriptors: usize,
    children: BTreeSet<String>,
}

impl Traces {
    fn now() -> Self {
        let names = |folder: &str| -> BTreeSet<String> {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let own = format!(" {} ", std::process::id());
        let is_child = |pid: &String| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            // State, then the parent.
            after_name.get(2..).is_some_and(|rest| rest.starts_with(&own))
        };
        Self {
            descriptors: names("/proc/self/fd").len(),
            children: names("/proc").into_iter().filter(is_child).collect(),
        }
    }

    /// Nothing has come to them; a server's threads may take a moment to end.
    fn are_all(&self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = Self::now();
            if now == *self {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {now:?}; before: {self:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
