//! Servers of parameters as processes, of which one is lost.

use std::time::{Duration, Instant};

use phalanx::asynchronous::{Consistency, ParameterServer, Sgd, UpdateRule};
use phalanx::{ProcessGroup, Rank};
use rustix::process::Signal;

use crate::rpc::take_no_more_than;
use crate::support::network::Network;
use crate::support::world::{LIMIT, World, end_with};

const STEPS: u32 = 150;
/// So many that a cable is pulled before they are over.
const MANY_STEPS: u32 = 1500;
const KEYS: [usize; 3] = [700, 30, 1200];
const ELEMENTS: usize = 1930;

pub const TESTS: &[(&str, fn())] = &[
    ("a_server_that_is_killed_loses_no_acknowledged_update", || server_is_lost(Signal::KILL)),
    ("a_server_that_is_frozen_loses_no_acknowledged_update", || server_is_lost(Signal::STOP)),
    ("a_worker_that_is_killed_holds_up_nobody", || worker_is_lost(Signal::KILL)),
    ("a_worker_that_is_frozen_holds_up_nobody", || worker_is_lost(Signal::STOP)),
    ("a_server_without_memory_for_its_parameters_is_an_error_on_every_rank", || {
        let (outcomes, _) = World::start("parameter_server::poor", 2, false, &[]).end();
        for (rank, (code, error)) in outcomes.into_iter().enumerate() {
            assert_eq!(code, Some(0), "rank {rank}: {error}");
        }
    }),
];

/// These need root and `ip`.
pub const PRIVILEGED: &[(&str, fn())] = &[
    ("a_cable_between_workers_and_servers_that_is_pulled_is_an_error_of_the_workers", || {
        link_is_lost("across")
    }),
    ("a_cable_between_two_halves_that_is_pulled_leaves_no_half_hanging", || link_is_lost("halves")),
];

/// The heartbeats' time-out, the time that a busy machine may need, and the rest of the training.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

pub fn play(scenario: &str) {
    match scenario {
        "bsp" => end_with(train(Consistency::Bsp, [2, 3], STEPS)),
        "ssp" => end_with(train(Consistency::Ssp(2), [2, 3], STEPS)),
        "across" => end_with(train(Consistency::Ssp(2), [2, 3], MANY_STEPS)),
        "halves" => end_with(train(Consistency::Ssp(2), [1, 2], MANY_STEPS / 4)),
        "poor" => end_with(poor()),
        other => panic!("no scenario {other}"),
    }
}

/// Rank 1, which serves, has no memory for the parameters.
fn poor() -> phalanx::Result<()> {
    const MUCH: usize = 128 << 20;
    let group = phalanx::init()?;
    let mut parameters = vec![1.0f32; MUCH / 4];
    // What the transport needs it has taken.
    group.broadcast(&mut parameters, Rank::MAIN)?;
    if group.rank() == Rank::new(1) {
        take_no_more_than(MUCH / 2);
    }
    let started = ParameterServer::builder(&[MUCH / 4], Sgd::new(0.1))
        .servers(&[Rank::new(1)])
        .start(&group, &mut parameters);
    let error = started.expect_err("there is no memory for it").to_string();
    assert!(error.contains("rank 1 could not start its parameter server: no memory for"), "{error}");
    Ok(())
}

fn gradient(rank: u32, step: u32) -> Vec<f32> {
    (0..ELEMENTS as u32).map(|index| ((index * 7 + rank * 13 + step * 5) % 11) as f32 * 0.1 - 0.5).collect()
}

/// These two ranks serve, and are each other's replicas; the other two train.
fn train(consistency: Consistency, servers: [u32; 2], steps: u32) -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut parameters = vec![1.0f32; ELEMENTS];
    let workers: Vec<Rank> =
        group.world_size().ranks().filter(|rank| !servers.contains(&rank.get())).collect();
    let server = ParameterServer::builder(&KEYS, Sgd::new(0.1).with_momentum(0.9))
        .consistency(consistency)
        .servers(&servers.map(Rank::new))
        .workers(&workers)
        .replicated()
        .start(&group, &mut parameters)?;
    let rank = group.rank().get();
    if servers.contains(&rank) {
        println!("training");
        return server.shutdown();
    }
    let mut lead = 0;
    for step in 0..steps {
        if step == 10 {
            println!("training");
        }
        if step + 10 == steps {
            await_a_loss(&group);
        }
        server.step(&gradient(rank, step), &mut parameters)?;
        // It may begin the next step: since then the other can only have come nearer.
        let clocks = server.statistics()?.into_iter().flat_map(|shard| shard.clocks);
        lead = clocks.map(|(_, clock)| u64::from(step + 1).saturating_sub(clock)).fold(lead, u64::max);
        // Rank 1 is slower, so that there is somebody to be ahead of.
        std::thread::sleep(Duration::from_millis(1 + 2 * u64::from(rank)));
    }
    let statistics = server.statistics()?;
    eprintln!("digest {:x}", digest(&parameters));
    eprintln!("servers {:?}", statistics.iter().map(|shard| shard.server.get()).collect::<Vec<_>>());
    eprintln!("lead {lead}");
    server.shutdown()
}

/// In each test somebody is lost, and before the training is over, however late the test is.
fn await_a_loss(group: &ProcessGroup) {
    let deadline = Instant::now() + LIMIT;
    while group.failure().is_none() {
        assert!(Instant::now() < deadline, "nobody is lost");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Of the bits.
fn digest(parameters: &[f32]) -> u64 {
    parameters.iter().fold(17, |sum, p| sum.wrapping_mul(31).wrapping_add(u64::from(p.to_bits())))
}

/// What two workers come to whom nothing happens.
fn undisturbed() -> u64 {
    let rule = Sgd::new(0.1).with_momentum(0.9);
    let (mut parameters, mut velocity) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
    for step in 0..STEPS {
        let mean: Vec<f32> =
            gradient(0, step).iter().zip(gradient(1, step)).map(|(own, other)| (own + other) * 0.5).collect();
        rule.update(u64::from(step) + 1, 1.0, &mut parameters, &mean, &mut [&mut velocity]);
    }
    digest(&parameters)
}

fn server_is_lost(signal: Signal) {
    for transport in ["shm", "tcp"] {
        let mut ranks = World::start("parameter_server::bsp", 4, false, &[("PHALANX_TRANSPORT", transport)]);
        ranks.training();
        std::thread::sleep(Duration::from_millis(40));
        ranks.send(2, signal);
        ranks.await_all_but(&[2]);
        ranks.kill(2);
        for (rank, (code, said)) in ranks.end().0.iter().enumerate().filter(|(rank, _)| *rank != 2) {
            assert_eq!(*code, Some(0), "rank {rank} over {transport}: {said}");
            if rank < 2 {
                // Bit by bit: no update is missing, and none was applied twice.
                assert!(said.contains(&format!("digest {:x}\n", undisturbed())), "{transport}: {said}");
                assert!(said.contains("servers [3, 3]"), "it was lost too late: {said}");
            }
        }
    }
}

fn worker_is_lost(signal: Signal) {
    for (scenario, transport) in [("bsp", "shm"), ("ssp", "tcp")] {
        let scenario = format!("parameter_server::{scenario}");
        let mut ranks = World::start(&scenario, 4, false, &[("PHALANX_TRANSPORT", transport)]);
        ranks.training();
        ranks.send(1, signal);
        ranks.await_all_but(&[1]);
        ranks.kill(1);
        for (rank, (code, said)) in ranks.end().0.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            assert_eq!(*code, Some(0), "rank {rank}, {scenario}: {said}");
            assert!(rank != 0 || said.contains("servers [2, 3]"), "{said}");
            let allowed = if scenario.ends_with("bsp") { 0..=0 } else { 1..=2 };
            let is_allowed = allowed.into_iter().any(|lead: u64| said.contains(&format!("lead {lead}\n")));
            assert!(rank != 0 || is_allowed, "{scenario}: {said}");
        }
    }
}

/// Two hosts lose each other. A worker that has lost a copy of everything says so; one that has not goes on to its end.
fn link_is_lost(scenario: &str) {
    let network = Network::new();
    let mut ranks = network.start(&format!("parameter_server::{scenario}"), 4, &[]);
    ranks.training();
    let start = Instant::now();
    network.pull();
    let took = ranks.await_all_but(&[]) - start;
    let (outcomes, _) = ranks.end();
    for (rank, (code, said)) in outcomes.iter().enumerate() {
        match (scenario, rank) {
            // Both servers are on the other host.
            ("across", 0 | 1) => assert_eq!(*code, Some(3), "rank {rank}: {said}"),
            ("across", _) => assert_eq!(*code, Some(0), "rank {rank}: {said}"),
            _ => assert!(matches!(code, Some(0 | 3)), "rank {rank}: {code:?} {said}"),
        }
    }
    assert!(took < SILENCE_LIMIT, "it took {took:?}: {outcomes:?}");
}
