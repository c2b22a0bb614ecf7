//! The launcher on one host of a [remote job](super::RemoteJob).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, getpid, kill_process};

use super::protocol::{
    FromLauncher, LauncherConfig, LauncherError, RemoteEvent, RemoteReport, Route, ToLauncher,
};
use super::window::Window;
use super::{frame, slurm, ssh_silence};
use crate::agent::Agent;
use crate::cluster::{Cluster, Hosting};
use crate::env;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::exit::Report;
use crate::health::Heartbeat;
use crate::job::Job;
use crate::world_size::WorldSize;

/// How long the user's command may send nothing, if the network may not be silent for longer; it sends a heartbeat every 5 s. In an
/// elastic job it is as long as ssh waits: when the command has declared a host lost, it may start another launcher there.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// The part of a [`RemoteJob`](super::RemoteJob) on one host.
///
/// The program starts twice. Called with `node`, it [arrives](Self::arrive), changes to the working directory, and
/// executes itself again in the environment that it got, with `node --ready`. There it [starts](Self::start) the job.
#[derive(Debug)]
pub struct RemoteNode {
    arguments: Vec<OsString>,
    config: LauncherConfig,
    agent: Option<Agent>,
    window: Window,
}

impl RemoteNode {
    /// Sends its hello, and executes this program again in the working directory. It returns only if that is not
    /// possible, which it has then reported, or if the job has ended.
    pub fn arrive() {
        let mut out = io::stdout();
        let ssh = || std::env::var("SSH_CONNECTION").ok().and_then(|variable| Route::parse(&variable));
        // A step of Slurm has the variables of a login besides, which may be one on another host.
        let route = slurm::route().or_else(ssh);
        let hello = FromLauncher::Hello { version: version(), route };
        let greeted = out.write_all(frame::GREETING).and_then(|()| frame::write(&mut out, &hello));
        if greeted.is_err() {
            return;
        }
        if let Err(error) = enter_working_directory() {
            let _ = frame::write(&mut out, &FromLauncher::Failed(LauncherError::of(&error)));
        }
    }

    /// Receives what to start; nothing if the job has ended. From now on it follows the user's command: it raises the
    /// command's signals in this process, and SIGTERM at its end.
    pub fn start() -> Result<Option<Self>> {
        let mut messages = DriverMessages::open()?;
        let (arguments, config) = loop {
            match messages.next().map_err(undecodable)? {
                Some(ToLauncher::Start { arguments, config }) => break (arguments, config),
                Some(_) => {}
                None => return Ok(None),
            }
        };
        let agent = config.agent.clone().map(Agent::new).transpose()?;
        let silence = ssh_silence(Heartbeat::from_variables(env::variable)?);
        messages.silence = if agent.is_some() { silence } else { SILENCE_TIMEOUT.max(silence) };
        let window = Window::default();
        let (follower, opened) = (agent.clone(), window.clone());
        std::thread::Builder::new()
            .name("phalanx-driver".into())
            .spawn(move || then_end(|| follow(messages, follower.as_ref(), &opened), end_job))
            .map_err(|error| {
                Error::not_started("cannot start a thread for the signals of another host", error)
            })?;
        let arguments = arguments.into_iter().map(OsString::from_vec).collect();
        Ok(Some(Self { arguments, config, agent, window }))
    }

    /// What [`RemoteJob::new`](super::RemoteJob::new) was given.
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// The number of workers on this host.
    pub fn workers(&self) -> Result<WorldSize> {
        WorldSize::new(self.config.workers)
    }

    /// `job` with this host's part in it, as the command has sent it, but without the [cluster](Self::cluster).
    pub fn part(&self, job: Job) -> Job {
        let job = job.key(self.config.key.key());
        match self.agent.clone() {
            Some(agent) => job.run_id(agent.config.run_id.clone()).part_of(agent),
            None => job,
        }
    }

    /// The nodes of the job, if there are several whose launchers have a rendezvous.
    pub fn cluster(&self) -> Result<Option<Cluster>> {
        let LauncherConfig { node, nodes, ref host, port, join_timeout, .. } = self.config;
        if nodes == 1 || self.agent.is_some() {
            return Ok(None);
        }
        let cluster = match (node, port) {
            (0, 0) => Cluster::at_any_port(nodes, host.as_str())?,
            (0, _) => Cluster::new(nodes, nodes, host.as_str(), port)?.hosting(Hosting::Serve),
            _ => Cluster::new(nodes, nodes, host.as_str(), port)?.hosting(Hosting::Connect),
        };
        Ok(Some(cluster.node_rank(node).join_timeout(join_timeout)))
    }

    /// Sends `event` to the user's command, on standard output.
    pub fn tell(&self, event: &Event<'_>) -> Vec<u8> {
        let said = match event {
            Event::Serving { address } => Some(FromLauncher::Serving { port: address.port() }),
            event => RemoteEvent::of(event).map(|event| {
                self.window.fill(event.room());
                FromLauncher::Event(event)
            }),
        };
        said.map_or_else(Vec::new, |said| encode(&said))
    }

    /// Whether the user's command takes lines now, for [`Observer::is_ready`](super::Observer::is_ready). It takes everything else at any time.
    pub fn is_ready(&self) -> bool {
        self.window.is_open()
    }

    /// Sends how the job ended, in the same way.
    pub fn final_message(result: &Result<Report>) -> Vec<u8> {
        encode(&match result {
            Ok(report) => FromLauncher::Ended(RemoteReport::of(report)),
            Err(error) => FromLauncher::Failed(LauncherError::of(error)),
        })
    }
}

/// A message that is too long is left out.
fn encode(said: &FromLauncher) -> Vec<u8> {
    frame::encode(said).unwrap_or_default()
}

/// The version of these messages, which is that of this crate.
pub(super) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

fn enter_working_directory() -> Result<()> {
    let (folder, variables) = match DriverMessages::open()?.next().map_err(undecodable)? {
        Some(ToLauncher::Environment { folder, variables }) => {
            (PathBuf::from(OsString::from_vec(folder)), variables)
        }
        Some(_) => return Err(Error::protocol("the command's first message is not the working directory")),
        None => return Ok(()),
    };
    std::env::set_current_dir(&folder).map_err(|error| {
        Error::io(format!("cannot work in {}", folder.display()), error).with_remedy(
            "all hosts need the folder in which you start the job, by a shared disk for instance",
        )
    })?;
    let program =
        std::env::current_exe().map_err(|error| Error::io("cannot find the launcher's own file", error))?;
    let mut command = Command::new(&program);
    command.args(["node", "--ready"]);
    command.envs(variables.iter().map(|(name, value)| (OsStr::from_bytes(name), OsStr::from_bytes(value))));
    // The login's is its home.
    command.env("PWD", &folder);
    Err(Error::io(format!("cannot start {} again", program.display()), command.exec()))
}

fn undecodable(error: io::Error) -> Error {
    Error::io("the messages of the job's command cannot be decoded", error)
}

/// Calls `follow`, and then `end`, also if it panics: nobody would hear what the command says any more, and the job would never end.
fn then_end(follow: impl FnOnce(), end: impl FnOnce()) {
    // The panic is on standard error.
    let _ = catch_unwind(AssertUnwindSafe(follow));
    end();
}

fn end_job() {
    let _ = kill_process(getpid(), Signal::TERM);
}

/// Until the instructions end, which is the end of the job.
fn follow(mut messages: DriverMessages, agent: Option<&Agent>, window: &Window) {
    loop {
        let signal = match messages.next() {
            Ok(Some(ToLauncher::Signal(signal))) => Signal::from_named_raw(signal),
            Ok(Some(ToLauncher::Elastic(instruction))) => {
                agent.into_iter().for_each(|agent| agent.send(instruction));
                None
            }
            Ok(Some(ToLauncher::Taken(room))) => {
                window.free(room);
                None
            }
            Ok(Some(_)) => None,
            Ok(None) | Err(_) => return,
        };
        if let Some(signal) = signal {
            let _ = kill_process(getpid(), signal);
        }
    }
}

/// Standard input, without reading ahead: the program that this process executes next reads on.
struct DriverMessages {
    stdin: File,
    /// How long nothing may come.
    silence: Duration,
}

impl DriverMessages {
    fn open() -> Result<Self> {
        let stdin = io::stdin().as_fd().try_clone_to_owned();
        stdin.map(|stdin| Self { stdin: stdin.into(), silence: SILENCE_TIMEOUT }).map_err(undecodable)
    }

    fn next(&mut self) -> io::Result<Option<ToLauncher>> {
        frame::read(self)
    }
}

impl Read for DriverMessages {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let silence = Timespec::try_from(self.silence).ok();
        let mut descriptors = [PollFd::new(&self.stdin, PollFlags::IN)];
        if poll(&mut descriptors, silence.as_ref())? == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stdin.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_who_follows_the_command_ends_the_job() {
        let mut ends = 0;
        then_end(|| (), || ends += 1);
        then_end(|| panic!("as a fault of this program would"), || ends += 1);
        assert_eq!(ends, 2);
    }
}
