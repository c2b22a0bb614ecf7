//! Ranks as processes, started by hand as a launcher would, without anybody who watches over them.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx::ReduceOp;
use phalanx::store::TcpStoreServer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use socket2::{Domain, Socket, Type};

/// Nothing takes longer, or it hangs.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A port that no other program is given while this is held. It is bound, but nobody listens at it: a program that asks for
/// just this port may do so.
pub struct FreePort {
    pub number: u16,
    _socket: Socket,
}

impl FreePort {
    pub fn new() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let number = socket.local_addr().unwrap().as_socket().unwrap().port();
        Self { number, _socket: socket }
    }
}

/// Does `once`, which says what it took, until that is less than `bound`. Now and then the machine may stand still meanwhile, and not
/// each time.
pub fn in_time(bound: Duration, what: &str, mut once: impl FnMut() -> Duration) {
    const TRIES: usize = 4;
    let late: Vec<Duration> = (0..TRIES).map(|_| once()).take_while(|took| *took >= bound).collect();
    assert!(late.len() < TRIES, "{what}: it took {late:?}, and may take {bound:?}");
}

/// Where ranks meet.
pub struct Place<'a> {
    pub address: &'a str,
    pub port: u16,
    pub served_by_rank_0: bool,
}

impl Place<'_> {
    /// Starts a rank: `command`, which begins with or is the test's own program.
    pub fn rank(
        &self,
        mut command: Command,
        scenario: &str,
        (rank, world): (u32, u32),
        variables: &[(&str, &str)],
    ) -> Child {
        command.env(crate::harness::ROLE, scenario).envs(variables.iter().copied());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", self.address).env("MASTER_PORT", self.port.to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", if self.served_by_rank_0 { "False" } else { "True" });
        // The test is a launcher such as ours: it counts the restarts for all ranks.
        command.env("PHALANX_LAUNCHER_STORE", format!("{} {}", self.address, self.port));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// What a rank has said, but for whom it waits: it says so after some seconds, where the machine is slow.
pub fn without_reminders(said: &str) -> String {
    let is_reminder = |line: &&str| {
        line.starts_with("phalanx: warning: ")
            && (line.contains(" waits for ") || line.contains(" has waited for "))
    };
    said.split_inclusive('\n').filter(|line| !is_reminder(line)).collect()
}

/// Ranks that are ended with the test, however it ends.
pub struct World {
    pub ranks: Vec<Child>,
    pub port: u16,
    pub server: Option<TcpStoreServer>,
    /// Kept for rank 0, if it serves.
    #[allow(dead_code, reason = "it is held until it is dropped")]
    pub held: Option<FreePort>,
}

impl World {
    pub fn start(scenario: &str, world: u32, served_by_rank_0: bool, variables: &[(&str, &str)]) -> Self {
        let server =
            (!served_by_rank_0).then(|| TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap());
        let held = served_by_rank_0.then(FreePort::new);
        let port = match (&server, &held) {
            (Some(server), _) => server.local_addr().port(),
            (None, Some(held)) => held.number,
            (None, None) => unreachable!("one of them serves"),
        };
        let place = Place { address: "127.0.0.1", port, served_by_rank_0 };
        let program = std::env::current_exe().unwrap();
        let ranks =
            (0..world).map(|rank| place.rank(Command::new(&program), scenario, (rank, world), variables));
        Self { ranks: ranks.collect(), port, server, held }
    }

    /// Waits until every rank has said that it trains.
    pub fn training(&mut self) {
        let limit = Timespec::try_from(LIMIT * 6).unwrap();
        for (rank, child) in self.ranks.iter_mut().enumerate() {
            let out = child.stdout.as_mut().unwrap();
            let heard = poll(&mut [PollFd::new(&*out, PollFlags::IN)], Some(&limit));
            assert_eq!(heard, Ok(1), "rank {rank} does not train");
            let mut line = String::new();
            BufReader::new(out).read_line(&mut line).unwrap();
            assert_eq!(line, "training\n");
        }
    }

    pub fn kill(&mut self, rank: usize) -> Instant {
        self.send(rank, Signal::KILL)
    }

    /// Sends a signal to a rank; gives the moment.
    pub fn send(&mut self, rank: usize, signal: Signal) -> Instant {
        kill_process(Pid::from_child(&self.ranks[rank]), signal).unwrap();
        Instant::now()
    }

    /// Waits until all but these have ended; gives the moment.
    pub fn await_all_but(&mut self, others: &[usize]) -> Instant {
        self.await_within(LIMIT, others)
    }

    fn await_within(&mut self, limit: Duration, others: &[usize]) -> Instant {
        let deadline = Instant::now() + limit;
        for (rank, child) in self.ranks.iter_mut().enumerate().filter(|(rank, _)| !others.contains(rank)) {
            while child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < deadline, "rank {rank} hangs");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Instant::now()
    }

    /// Waits for each rank; gives exit codes, what they wrote to standard error, and when the last one ended.
    pub fn end(self) -> (Vec<(Option<i32>, String)>, Instant) {
        let (mut outcomes, ended) = self.end_within(LIMIT);
        outcomes.iter_mut().for_each(|(_, said)| *said = without_reminders(said));
        (outcomes, ended)
    }

    /// The same within `limit`, with all that they wrote.
    pub fn end_within(mut self, limit: Duration) -> (Vec<(Option<i32>, String)>, Instant) {
        let ended = self.await_within(limit, &[]);
        let outcomes = std::mem::take(&mut self.ranks).into_iter().map(|rank| {
            let output = rank.wait_with_output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        });
        (outcomes.collect(), ended)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Averages gradients of all sizes until something goes wrong.
pub fn train() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut gradients = [1, 1 << 12, 1 << 18].map(|elements| vec![1f32; elements]);
    for step in 0.. {
        for gradients in &mut gradients {
            group.all_reduce(gradients, ReduceOp::Avg)?;
        }
        if step == 10 {
            println!("training");
        }
    }
    Ok(())
}

/// Starts, and looks into its group only long after something has happened.
pub fn idle() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    println!("training");
    while group.failure().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    group.barrier()
}

/// Ends this rank. Its error goes to standard error, as any program's would; the failure of a peer is exit code 3.
pub fn end_with(outcome: phalanx::Result<()>) {
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(if error.is_peer_failure() { 3 } else { 1 });
    }
}
