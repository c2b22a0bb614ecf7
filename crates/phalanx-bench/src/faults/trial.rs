//! One world with one fault.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use phalanx::env::WorkerEnv;
use phalanx::store::TcpStoreServer;
use phalanx::{Credentials, Error, Generation, Rank, Result, TransportKind, WorldSize};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::worker::RankEvent;
use crate::measure::monotonic;

/// Nothing takes so long, unless it hangs.
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Fault {
    Kill,
    Freeze,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "kill",
            Self::Freeze => "freeze",
        })
    }
}

pub(crate) struct Trial {
    pub(crate) fault: Fault,
    pub(crate) world: WorldSize,
    pub(crate) victim: u32,
    pub(crate) transport: Option<TransportKind>,
}

/// What a survivor saw.
pub(crate) struct Verdict {
    /// From the fault to its error; none if there was none.
    pub(crate) after: Option<Duration>,
    /// What is wrong with it.
    pub(crate) complaint: Option<String>,
}

/// Processes that are ended with this, however it ends.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.kill();
        }
        for rank in &mut self.0 {
            let _ = rank.wait();
        }
    }
}

impl Trial {
    /// Lets a world train, and for a `moment` longer; gives what its survivors saw of the fault.
    pub(crate) fn run(&self, moment: Duration) -> Result<Vec<Verdict>> {
        let credentials = Credentials::from_env()?;
        let server = TcpStoreServer::bind_with((Ipv4Addr::LOCALHOST, 0).into(), credentials)?;
        let (mut ranks, events) = self.start(server.local_addr().port())?;
        let deadline = Instant::now() + LIMIT;
        for _ in self.world.ranks() {
            match next(&events, deadline) {
                Some((_, RankEvent::Trains)) => {}
                Some((_, RankEvent::Failed { text, .. })) => return Err(unstarted(&text)),
                None => return Err(unstarted("a rank has ended, or hangs")),
            }
        }
        thread::sleep(moment);
        let victim =
            ranks.0.get_mut(self.victim as usize).ok_or_else(|| unstarted("there is no such rank"))?;
        let signal = match self.fault {
            Fault::Kill => Signal::KILL,
            Fault::Freeze => Signal::STOP,
        };
        let struck = monotonic();
        kill_process(Pid::from_child(victim), signal).map_err(|error| {
            Error::aborted(format!("rank {} could not be signalled: {error}", self.victim))
        })?;
        Ok(self.listen(&events, struck))
    }

    fn start(&self, port: u16) -> Result<(Ranks, Receiver<(u32, RankEvent)>)> {
        let program = std::env::current_exe().map_err(|error| unstarted(&error.to_string()))?;
        let (say, events) = channel();
        let mut ranks = Ranks(Vec::new());
        for rank in self.world.ranks() {
            let mut command = Command::new(&program);
            command.args(["faults", "--worker"]).envs(self.variables(rank, port));
            if let Some(transport) = self.transport {
                command.env("PHALANX_TRANSPORT", transport.to_string());
            }
            // What it writes to standard error is this command's.
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().map_err(|error| unstarted(&error.to_string()))?;
            let out = child.stdout.take();
            ranks.0.push(child);
            let (say, rank) = (say.clone(), rank.get());
            thread::spawn(move || {
                let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
                let events = lines.map_while(|line| serde_json::from_str(&line.ok()?).ok());
                // If the receiver is gone, the trial is over.
                events.map(|event| say.send((rank, event))).take_while(Result::is_ok).for_each(drop);
            });
        }
        Ok((ranks, events))
    }

    fn variables(&self, rank: Rank, port: u16) -> Vec<(&'static str, String)> {
        let world = self.world.get();
        let env = WorkerEnv {
            rank,
            local_rank: rank.get(),
            world_size: self.world,
            local_world_size: world,
            group_rank: 0,
            cross: (0, 1),
            group_world_size: 1,
            role_name: "default".into(),
            role_rank: rank.get(),
            role_world_size: world,
            master_addr: "127.0.0.1".into(),
            master_port: port,
            restart_count: Generation(0),
            max_restarts: 0,
            run_id: "faults".into(),
            agent_store: true,
        };
        env.variables()
    }

    /// Waits for every survivor's event.
    fn listen(&self, events: &Receiver<(u32, RankEvent)>, struck: Duration) -> Vec<Verdict> {
        let deadline = Instant::now() + LIMIT;
        let mut silent: Vec<u32> =
            self.world.ranks().map(Rank::get).filter(|rank| *rank != self.victim).collect();
        let mut verdicts = Vec::new();
        while !silent.is_empty() {
            let Some((rank, event)) = next(events, deadline) else { break };
            let RankEvent::Failed { at, blames, text } = event else { continue };
            silent.retain(|other| *other != rank);
            let complaint = (blames != Some(self.victim))
                .then(|| format!("rank {rank} of {}, where rank {} failed: {text}", self.world, self.victim));
            verdicts.push(Verdict { after: Some(at.saturating_sub(struck)), complaint });
        }
        let hung = silent.into_iter().map(|rank| {
            let complaint = format!("rank {rank} of {} had no error for {LIMIT:?}", self.world);
            Verdict { after: None, complaint: Some(complaint) }
        });
        verdicts.extend(hung);
        verdicts
    }
}

fn next(events: &Receiver<(u32, RankEvent)>, deadline: Instant) -> Option<(u32, RankEvent)> {
    events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
}

fn unstarted(why: &str) -> Error {
    Error::aborted(format!("a world could not be started: {why}"))
}
