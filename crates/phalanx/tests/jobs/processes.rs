//! Ranks as processes, started by hand as a launcher would, without anybody who watches over them.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use phalanx::mesh::DeviceMesh;
use phalanx::store::TcpStore;
use phalanx::{
    Buffer, Credentials, DType, Deadline, Error, JobKey, P2pOp, ProcessGroup, Rank, ReduceOp, Tls, WorldSize,
};

use crate::certificates::Authority;
use crate::harness::ROLE;
use crate::support::world::{FreePort, LIMIT, World, end_with, idle, in_time, train};

/// The promise: survivors know within 1 s that somebody died. Here the ends of their processes are in it, too.
const DETECTION_LIMIT: Duration = Duration::from_secs(2);

pub const TESTS: &[(&str, fn())] = &[
    ("a_killed_rank_is_named_by_all_survivors", a_killed_rank_is_named_by_all_survivors),
    ("rank_0_may_die_with_the_store_it_serves", rank_0_may_die_with_the_store_it_serves),
    ("idle_ranks_know_who_died", idle_ranks_know_who_died),
    ("a_death_ends_messages_in_flight", a_death_ends_messages_in_flight),
    ("a_death_is_known_in_every_sub_group", a_death_is_known_in_every_sub_group),
    ("a_store_that_has_gone_makes_no_more_sub_groups", a_store_that_has_gone_makes_no_more_sub_groups),
    ("groups_that_stand_outlive_their_store", groups_that_stand_outlive_their_store),
    ("ranks_end_in_any_order", ranks_end_in_any_order),
    ("a_job_leaves_one_trace_of_all_ranks", a_job_leaves_one_trace_of_all_ranks),
    ("strangers_disturb_nobody", strangers_disturb_nobody),
    ("a_rank_without_descriptors_tells_all_at_once", a_rank_without_descriptors_tells_all_at_once),
    (
        "who_has_no_descriptors_for_a_sub_group_blames_no_store",
        who_has_no_descriptors_for_a_sub_group_blames_no_store,
    ),
    ("who_has_no_descriptors_for_a_mesh_tells_all", who_has_no_descriptors_for_a_mesh_tells_all),
    (
        "what_has_no_addresses_in_shared_memory_is_in_ordinary_memory",
        what_has_no_addresses_in_shared_memory_is_in_ordinary_memory,
    ),
    ("rank_0_says_that_it_has_turned_a_client_away", rank_0_says_that_it_has_turned_a_client_away),
    ("a_rank_0_without_descriptors_names_the_limit", a_rank_0_without_descriptors_names_the_limit),
    (
        "a_worker_that_cannot_start_ends_all_that_wait_for_it",
        a_worker_that_cannot_start_ends_all_that_wait_for_it,
    ),
    (
        "a_rank_that_cannot_watch_its_connections_tells_the_others_why",
        a_rank_that_cannot_watch_its_connections_tells_the_others_why,
    ),
    ("a_start_that_waits_says_for_whom", a_start_that_waits_says_for_whom),
    ("a_name_without_an_address_ends_a_start_soon", a_name_without_an_address_ends_a_start_soon),
    ("ranks_of_other_launchers_are_no_worlds_of_one", ranks_of_other_launchers_are_no_worlds_of_one),
    (
        "a_variable_that_cannot_be_used_ends_a_start_at_once",
        a_variable_that_cannot_be_used_ends_a_start_at_once,
    ),
];

/// What this program does as a rank.
pub fn play(scenario: &str) {
    end_with(match scenario {
        "train" => train(),
        "idle" => idle(),
        "talk" => talk(),
        "listen" => listen(),
        "parts" => parts(),
        "divide" => divide(),
        "outlive" => outlive(),
        "short" => short(),
        "traced" => phalanx::init().and_then(|group| group.all_reduce(&mut [1i64], ReduceOp::Sum)),
        "poor" => poor(),
        "pair" => pair(),
        "poor_part" => poor_part(),
        "poor_mesh" => poor_mesh(),
        "few_addresses" => few_addresses(),
        "no_threads" => no_threads(),
        "no_watch" => no_watch(),
        other => panic!("no scenario {other}"),
    });
}

/// One of two, and never by itself.
fn pair() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut sum = [i64::from(group.rank().get()) + 1];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!((group.world_size().get(), sum), (2, [3]), "a world of its own");
    Ok(())
}

/// Exchanges messages with all others until something goes wrong.
fn talk() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let others: Vec<Rank> = group.world_size().ranks().filter(|peer| *peer != group.rank()).collect();
    for round in 0.. {
        let sent = others.iter().map(|peer| P2pOp::send(Buffer::zeroed(DType::U8, 3 << 20), *peer));
        let received = others.iter().map(|peer| P2pOp::recv(Buffer::zeroed(DType::U8, 3 << 20), *peer));
        for work in group.batch_isend_irecv(sent.chain(received).collect())? {
            work.wait()?;
        }
        if round == 10 {
            println!("training");
        }
    }
    Ok(())
}

/// Waits for messages that nobody sends.
fn listen() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let others = group.world_size().ranks().filter(|peer| *peer != group.rank());
    let works = others.map(|peer| group.irecv(Buffer::zeroed(DType::F32, 8), peer));
    let works = works.collect::<phalanx::Result<Vec<_>>>()?;
    println!("training");
    works.into_iter().try_for_each(|work| work.wait().map(drop))
}

/// Trains in a sub-group, whose ranks count backwards, until something goes wrong.
fn parts() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let part = group.split(Some(0), -i64::from(group.rank().get()))?;
    let part = part.unwrap_or(group);
    let mut gradients = vec![1f32; 1 << 18];
    for step in 0.. {
        part.all_reduce(&mut gradients, ReduceOp::Avg)?;
        if step == 10 {
            println!("training");
        }
    }
    Ok(())
}

/// Makes sub-groups until something goes wrong.
fn divide() -> phalanx::Result<()> {
    let group = phalanx::init()?.with_timeout(LIMIT);
    println!("training");
    loop {
        group.split(Some(group.rank().get() / 2), 0)?;
    }
}

/// Calls in two groups until the test has ended their store, and afterwards, also when no third one can be made.
fn outlive() -> phalanx::Result<()> {
    let group = phalanx::init()?.with_timeout(LIMIT);
    let part = group.split(Some(0), -i64::from(group.rank().get()))?.unwrap();
    println!("training");
    let works = || -> phalanx::Result<()> {
        for group in [&group, &part] {
            let mut sum = [i64::from(group.rank().get())];
            group.all_reduce(&mut sum, ReduceOp::Sum)?;
            assert_eq!(sum, [3]);
        }
        Ok(())
    };
    let gone = std::env::var("GONE").unwrap();
    let mut has_gone = [0u8];
    while has_gone[0] == 0 {
        works()?;
        has_gone[0] = u8::from(group.rank().is_main() && std::path::Path::new(&gone).exists());
        group.broadcast(&mut has_gone, Rank::MAIN)?;
    }
    works()?;
    let error = group.split(Some(0), 0).unwrap_err();
    assert!(error.to_string().contains("store"), "{error}");
    works()
}

/// A job of a few steps, whose ranks end at different times.
fn short() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut sum = [1i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, [4]);
    let mut shared = vec![group.rank().get() as f32; 1 << 20];
    group.broadcast(&mut shared, Rank::MAIN)?;
    assert!(shared.iter().all(|element| *element == 0.0));
    if std::env::var("LATE").is_ok_and(|late| late == group.rank().to_string()) {
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}

/// Rank 0 has too few descriptors left to accept the others.
fn poor() -> phalanx::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let met = phalanx::rendezvous::from_env(LIMIT)?;
    if met.rank.is_main() {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        // The listener, the signal of its thread, and one connection.
        let limit = Rlimit { current: Some(open - 1 + 4), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    let mut options = phalanx::GroupOptions::from_env()?;
    options.timeout = LIMIT * 10;
    ProcessGroup::join(met, options)?.barrier()
}

/// A group in which the rank `poor` has no descriptors left.
fn with_poor(poor: u32) -> phalanx::Result<ProcessGroup> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let group = phalanx::init()?;
    group.barrier()?;
    if group.rank() == Rank::new(poor) {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let limit = Rlimit { current: Some(open - 1), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }
    Ok(group.with_timeout(LIMIT * 10))
}

/// All make a sub-group, for which rank 0 has no descriptors.
fn poor_part() -> phalanx::Result<()> {
    with_poor(0)?.new_group(&[Rank::new(0), Rank::new(1)]).map(drop)
}

/// All make a mesh, in whose first dimension ranks 0 and 2 have nothing to do with rank 1, which has no descriptors.
fn poor_mesh() -> phalanx::Result<()> {
    DeviceMesh::new(&with_poor(1)?, &[("data", 2), ("tensor", 2)]).map(drop)
}

/// A group of two whose processes have few addresses (`ulimit -v`), of which it takes a part.
fn few_addresses() -> phalanx::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = sizes.split_whitespace().next().unwrap().parse().unwrap();
    // One half is the program's. Of what is left of the other one, at most 512 MiB, the memory of each rank gets an eighth.
    let limit = Rlimit { current: Some(2 * pages * 4096 + (1 << 30)), ..getrlimit(Resource::As) };
    setrlimit(Resource::As, limit).unwrap();
    let group = phalanx::init()?;
    let (mut little, mut much) = (group.alloc(DType::F32, 1)?, group.alloc(DType::F32, 20 << 20)?);
    assert!(little.is_registered() && !much.is_registered());
    for buffer in [&mut little, &mut much] {
        let elements = buffer.as_mut_slice::<f32>()?;
        elements.fill(1.5);
        group.all_reduce(elements, ReduceOp::Sum)?;
        assert!(elements.iter().all(|element| *element == 3.0));
    }
    Ok(())
}

/// A stack of a thread for which no system has addresses: `RUST_MIN_STACK` of a process that can start no threads.
const TOO_MUCH: &str = "1152921504606846976";

/// A thread that the system does start, whatever `RUST_MIN_STACK` asks for.
fn small_thread() -> std::thread::Builder {
    std::thread::Builder::new().stack_size(1 << 20)
}

/// Two ranks as threads, for which no worker can be started.
fn without_workers(rank: &(dyn Fn(ProcessGroup) + Sync)) -> phalanx::Result<()> {
    let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
    std::thread::scope(|scope| {
        for group in groups {
            small_thread().spawn_scoped(scope, move || rank(group.with_timeout(LIMIT * 10))).unwrap();
        }
    });
    Ok(())
}

/// Calls that need a worker, and calls that wait for their ranks.
fn no_threads() -> phalanx::Result<()> {
    let names = |error: &Error, worker: &str| {
        let text = error.to_string();
        assert!(text.contains(worker) && text.contains("could not be started"), "{text}");
        assert!(text.contains("ulimit -u") && !error.is_timeout(), "{text}");
    };
    without_workers(&|group: ProcessGroup| {
        let (peer, worker) = (Rank::new(1 - group.rank().get()), "the communication worker");
        std::thread::scope(|scope| {
            // On either rank a thread waits for a message.
            let waits = || names(&group.recv(&mut [0u8], peer).unwrap_err(), worker);
            small_thread().spawn_scoped(scope, waits).unwrap();
            let error = match group.rank().is_main() {
                true => group.all_reduce(&mut [1f32], ReduceOp::Sum).unwrap_err(),
                false => group.all_reduce_async(Buffer::from_slice(&[1f32]), ReduceOp::Sum).unwrap_err(),
            };
            names(&error, worker);
            assert_eq!(error.rank(), Some(Rank::new(1)));
            names(&group.barrier().unwrap_err(), worker);
        });
    })?;
    without_workers(&|group: ProcessGroup| {
        let peer = Rank::new(1 - group.rank().get());
        let started =
            [group.isend(Buffer::from_slice(&[7u8]), peer), group.irecv(Buffer::zeroed(DType::U8, 1), peer)];
        started.into_iter().for_each(|work| names(&work.unwrap_err(), "the worker for messages"));
        // No message was begun, and the group is usable.
        if group.rank().is_main() {
            group.send(&[5u8], peer).unwrap();
        } else {
            let mut got = [0u8];
            group.recv(&mut got, peer).unwrap();
            assert_eq!(got, [5]);
        }
        group.barrier().unwrap();
    })
}

fn a_worker_that_cannot_start_ends_all_that_wait_for_it() {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.env(ROLE, "processes::no_threads").env("RUST_MIN_STACK", TOO_MUCH);
    let ended = program.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

/// One of two ranks has no thread to watch its connections: all else that it does needs none.
fn no_watch() -> phalanx::Result<()> {
    if std::env::var("RANK").unwrap() == "1" && std::env::var_os("RUST_MIN_STACK").is_none() {
        let mut again = Command::new(std::env::current_exe().unwrap());
        panic!("{}", again.env("RUST_MIN_STACK", TOO_MUCH).exec());
    }
    phalanx::init()?.with_timeout(LIMIT * 10).barrier()
}

fn a_rank_that_cannot_watch_its_connections_tells_the_others_why() {
    for transport in ["tcp", "shm"] {
        let world = World::start("processes::no_watch", 2, false, &[("PHALANX_TRANSPORT", transport)]);
        let (outcomes, _) = world.end();
        for (code, error) in outcomes {
            assert_eq!(code, Some(1), "{error}");
            assert!(
                error.contains("rank 1 (") && error.contains("control connections could not be started"),
                "{error}"
            );
            assert!(error.contains("ulimit -u"), "{error}");
        }
    }
}

/// Kills `victim` of three ranks that run `scenario`; every survivor must name it in time, whatever carries the data.
fn survivors_name(scenario: &str, victim: usize, served_by_rank_0: bool) {
    for transport in ["tcp", "shm"] {
        in_time(DETECTION_LIMIT, transport, || {
            let mut world = World::start(
                &format!("processes::{scenario}"),
                3,
                served_by_rank_0,
                &[("PHALANX_TRANSPORT", transport)],
            );
            world.training();
            let killed = world.kill(victim);
            let (outcomes, ended) = world.end();
            for (rank, (code, error)) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != victim) {
                assert_eq!(*code, Some(3), "rank {rank}: {error}");
                assert!(error.contains(&format!("rank {victim} (")) && error.contains(") died: "), "{error}");
            }
            ended - killed
        });
    }
}

fn a_killed_rank_is_named_by_all_survivors() {
    for victim in 0..3 {
        survivors_name("train", victim, false);
    }
}

fn rank_0_may_die_with_the_store_it_serves() {
    survivors_name("train", 0, true);
}

fn idle_ranks_know_who_died() {
    survivors_name("idle", 1, false);
}

fn a_death_ends_messages_in_flight() {
    for victim in [0, 2] {
        survivors_name("talk", victim, false);
        survivors_name("listen", victim, false);
    }
}

/// The rank is that of the sub-group; which process it is, the error says too.
fn a_death_is_known_in_every_sub_group() {
    for transport in ["tcp", "shm"] {
        in_time(DETECTION_LIMIT, transport, || {
            let mut world = World::start("processes::parts", 3, false, &[("PHALANX_TRANSPORT", transport)]);
            world.training();
            let killed = world.kill(0);
            let (outcomes, ended) = world.end();
            for (code, error) in &outcomes[1..] {
                assert_eq!(*code, Some(3), "{error}");
                assert!(error.contains("rank 2 (") && error.contains("global rank 0) died: "), "{error}");
            }
            ended - killed
        });
    }
}

fn a_store_that_has_gone_makes_no_more_sub_groups() {
    let mut world = World::start("processes::divide", 3, false, &[]);
    world.training();
    drop(world.server.take());
    let (outcomes, _) = world.end();
    assert!(outcomes.iter().all(|(code, _)| code.is_some_and(|code| code != 0)), "{outcomes:?}");
    // Others may only hear that a rank has ended.
    assert!(outcomes.iter().any(|(_, error)| error.contains("store")), "{outcomes:?}");
}

fn groups_that_stand_outlive_their_store() {
    let folder = tempfile::tempdir().unwrap();
    for transport in ["tcp", "shm"] {
        let gone = folder.path().join(transport);
        let variables = [("PHALANX_TRANSPORT", transport), ("GONE", gone.to_str().unwrap())];
        let mut world = World::start("processes::outlive", 3, false, &variables);
        world.training();
        drop(world.server.take());
        std::fs::write(&gone, "").unwrap();
        let (outcomes, _) = world.end();
        assert!(outcomes.iter().all(|(code, _)| *code == Some(0)), "{transport}: {outcomes:?}");
    }
}

fn ranks_end_in_any_order() {
    for (late, transport) in [("0", "tcp"), ("1", "shm"), ("3", "auto")] {
        for served_by_rank_0 in [true, false] {
            let variables = [("LATE", late), ("PHALANX_TRANSPORT", transport)];
            let (outcomes, _) = World::start("processes::short", 4, served_by_rank_0, &variables).end();
            for (code, error) in outcomes {
                assert_eq!((code, error.as_str()), (Some(0), ""));
            }
        }
    }
}

/// And nothing of the job before, which had more of them.
fn a_job_leaves_one_trace_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.json");
    let ranks = |world: u32| -> Vec<u64> {
        let variables = [("LATE", "1"), ("PHALANX_TRACE", path.to_str().unwrap())];
        let (outcomes, _) = World::start("processes::traced", world, false, &variables).end();
        assert!(
            outcomes.iter().all(|(code, error)| (*code, error.as_str()) == (Some(0), "")),
            "{outcomes:?}"
        );
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let calls = trace["traceEvents"].as_array().unwrap().iter();
        let calls = calls.filter(|event| event["name"] == "all_reduce(sum, 1 x i64)" && event["ph"] == "X");
        let mut ranks: Vec<u64> = calls.map(|event| event["pid"].as_u64().unwrap()).collect();
        ranks.sort_unstable();
        ranks
    };
    assert_eq!(ranks(4), [0, 1, 2, 3]);
    assert_eq!(ranks(2), [0, 1]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Connections that say nothing, or nonsense, while the ranks look for each other.
fn strangers_disturb_nobody() {
    use std::io::Write;
    let mut world = World::start("processes::train", 2, false, &[]);
    let mut strangers = Vec::new();
    for number in 0..100 {
        if let Ok(mut stranger) = std::net::TcpStream::connect(("127.0.0.1", world.port)) {
            let _ = stranger.write_all(&[number; 64][..usize::from(number % 64)]);
            strangers.push(stranger);
        }
    }
    assert_eq!(strangers.len(), 100);
    world.training();
}

fn a_rank_without_descriptors_tells_all_at_once() {
    let (outcomes, _) = World::start("processes::poor", 3, false, &[]).end();
    for (code, error) in outcomes {
        assert_eq!(code, Some(1), "{error}");
        assert!(error.starts_with("rank 0 (") && error.contains("ulimit -n"), "{error}");
    }
}

fn who_has_no_descriptors_for_a_sub_group_blames_no_store() {
    let (outcomes, _) = World::start("processes::poor_part", 2, false, &[]).end();
    for (rank, (code, error)) in outcomes.into_iter().enumerate() {
        assert_eq!(code, Some(1), "{rank}: {error}");
        assert!(error.contains("ulimit -n") && !error.contains("still run"), "{rank}: {error}");
    }
}

fn who_has_no_descriptors_for_a_mesh_tells_all() {
    let (outcomes, _) = World::start("processes::poor_mesh", 4, false, &[]).end();
    for (rank, (code, error)) in outcomes.into_iter().enumerate() {
        assert_eq!(code, Some(1), "{rank}: {error}");
        assert!(error.contains("could not make its group of the dimension \"data\""), "{rank}: {error}");
        assert!(error.contains("ulimit -n"), "{rank}: {error}");
    }
}

fn what_has_no_addresses_in_shared_memory_is_in_ordinary_memory() {
    let variables = [("PHALANX_TRANSPORT", "shm")];
    let (outcomes, _) = World::start("processes::few_addresses", 2, false, &variables).end();
    for (code, error) in outcomes {
        assert_eq!((code, error.as_str()), (Some(0), ""));
    }
}

/// A rank 0 that no launcher has started, and clients without TLS or with a certificate of another CA.
fn rank_0_says_that_it_has_turned_a_client_away() {
    let (folder, ca, other) = (tempfile::tempdir().unwrap(), Authority::new(), Authority::new());
    let key = JobKey::generate().unwrap();
    let file = folder.path().join("job.key");
    key.write_new(&file).unwrap();
    let [authority, certificate, private] = ca.write(&ca.certificate(), folder.path());
    let strange = tempfile::tempdir().unwrap();
    // It knows both CAs, and has a certificate of the one that rank 0 does not know.
    let [both, certificate_of_other, private_of_other] = other.write(&other.certificate(), strange.path());
    std::fs::write(&both, format!("{}{}", ca.pem, other.pem)).unwrap();
    let tls = Tls::read(&both, &certificate_of_other, &private_of_other).unwrap();
    let certificates = format!(
        "PHALANX_TLS_CA={} PHALANX_TLS_CERT={} PHALANX_TLS_KEY={}",
        authority.display(),
        certificate.display(),
        private.display()
    );
    for client in [
        Credentials { key: Some(key.clone()), tls: None },
        Credentials { key: Some(key.clone()), tls: Some(tls) },
    ] {
        let port = FreePort::new();
        let wrapper = format!("export PHALANX_JOB_KEY_FILE={} {certificates};", file.display());
        let said = std::thread::scope(|scope| {
            let rank = scope
                .spawn(|| by_hand(0, "127.0.0.1", port.number, "was not let into the store", &wrapper).0);
            while !rank.is_finished() {
                let address = format!("127.0.0.1:{}", port.number);
                let _ = TcpStore::connect_with(address, &client, Deadline::after(Duration::from_secs(2)));
            }
            rank.join().unwrap()
        });
        assert!(said.contains("PHALANX_JOB_KEY_FILE") && said.contains("PHALANX_TLS_CA"), "{said}");
    }
}

/// A rank by hand, with nobody who has started it, until it says `expected` on its standard error.
fn by_hand(rank: u32, address: &str, port: u16, expected: &str, wrapper: &str) -> (String, Option<bool>) {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{wrapper} exec \"$0\"")]).arg(std::env::current_exe().unwrap());
    command.env(ROLE, "processes::idle").env("RANK", rank.to_string()).env("WORLD_SIZE", "3");
    command.env("MASTER_ADDR", address).env("MASTER_PORT", port.to_string());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let (found, ended) = std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let line = stderr.lines().map_while(Result::ok).find(|line| line.contains(expected));
            let _ = sender.send(line);
        });
        let found = receiver.recv_timeout(LIMIT).ok().flatten();
        // Ends the other thread as well: nobody writes any more.
        child.kill().unwrap();
        (found, child.wait().unwrap())
    });
    (
        found.unwrap_or_else(|| panic!("rank {rank} never says {expected:?}: {ended}")),
        ended.code().map(|code| code == 0),
    )
}

/// Each of them would wait for half an hour, and none in silence.
fn a_start_that_waits_says_for_whom() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().port();
    let (own, unused) = (FreePort::new(), FreePort::new());
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| by_hand(0, "127.0.0.1", own.number, "warning", ""));
        let nobody = scope.spawn(|| by_hand(1, "127.0.0.1", unused.number, "refused", ""));
        let silence = scope.spawn(move || by_hand(1, "127.0.0.1", silent, "warning", ""));
        let (text, ended) = alone.join().unwrap();
        assert!(
            text.starts_with(
                "phalanx: warning: rank 0 waits for the others: ranks 1, 2 of 3 have not arrived"
            ),
            "{text}"
        );
        assert!(ended.is_none(), "it waits on");
        let (text, ended) = nobody.join().unwrap();
        assert!(text.contains("this process waits for the store at 127.0.0.1:") && ended.is_none(), "{text}");
        let (text, _) = silence.join().unwrap();
        assert!(text.contains(&format!("waits for the store at 127.0.0.1:{silent}")), "{text}");
    });
}

fn a_name_without_an_address_ends_a_start_soon() {
    for rank in [0, 1] {
        let started = Instant::now();
        let (text, _) = by_hand(rank, "no-such-host.invalid", 29500, "getent hosts", "");
        assert!(text.contains("MASTER_ADDR") && text.contains("no-such-host.invalid:29500"), "{text}");
        assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    }
}

/// The exit codes and standard errors of two processes that a launcher has started with these variables, and no other.
fn launched(variables: &[(&str, [&str; 2])], port: u16) -> Vec<(Option<i32>, String)> {
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.env(ROLE, "processes::pair").env("MASTER_PORT", port.to_string());
        command.envs(variables.iter().map(|(name, values)| (*name, values[rank])));
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started = [start(0), start(1)];
    let outputs = started.into_iter().map(|child| child.wait_with_output().unwrap());
    outputs
        .map(|output| (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
        .collect()
}

fn ranks_of_other_launchers_are_no_worlds_of_one() {
    let ranks = ["0", "1"];
    for (rank, size) in [
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("PALS_RANKID", "PMI_SIZE"),
    ] {
        let port = FreePort::new();
        let variables = [(rank, ranks), (size, ["2"; 2]), ("MASTER_ADDR", ["127.0.0.1"; 2])];
        for (code, said) in launched(&variables, port.number) {
            assert_eq!(code, Some(0), "{rank}: {said}");
        }
    }
    let port = FreePort::new();
    for (code, said) in launched(&[("PMIX_RANK", ranks)], port.number) {
        assert!(code == Some(1) && said.contains("PMIX_RANK=") && said.contains("WORLD_SIZE"), "{said}");
    }
    // What is not known is a world of one, and the second says so.
    let unknown = [("SOME_LAUNCHERS_RANK", ranks), ("MASTER_PORT", [""; 2])];
    let outcomes = launched(&unknown, port.number);
    assert!(outcomes[1].1.contains("warning: SOME_LAUNCHERS_RANK=1 looks like a rank"), "{outcomes:?}");
}

/// And not when all have arrived: here nobody does.
fn a_variable_that_cannot_be_used_ends_a_start_at_once() {
    for (name, value, words) in [
        ("PHALANX_TRANSPORT", "udp", "PHALANX_TRANSPORT=udp names no transport (it may be tcp, shm or auto)"),
        ("PHALANX_TUNING", "/no/such/table.json", "PHALANX_TUNING=/no/such/table.json: "),
        ("PHALANX_HEARTBEAT_TIMEOUT", "soon", "PHALANX_HEARTBEAT_TIMEOUT"),
        ("PHALANX_RENDEZVOUS", "http://host", "it is neither tcp://host:port nor file:///path"),
        ("MASTER_PORT", "0", "MASTER_PORT=0: the other ranks cannot know which port that becomes"),
    ] {
        let port = FreePort::new();
        let wrapper = format!("export {name}={value};");
        let (said, _) = by_hand(1, "127.0.0.1", port.number, words, &wrapper);
        assert!(!said.contains("warning"), "{said}");
    }
}

fn a_rank_0_without_descriptors_names_the_limit() {
    for files in [4, 5, 6, 8] {
        let port = FreePort::new();
        let (text, _) = by_hand(0, "127.0.0.1", port.number, "ulimit", &format!("ulimit -n {files};"));
        assert!(text.contains("raise `ulimit -n`"), "{text}");
    }
}
