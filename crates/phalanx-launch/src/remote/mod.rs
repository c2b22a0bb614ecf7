//! A job on several hosts, started by one command, like horovodrun.
//!
//! [`RemoteJob`] starts a launcher on each host, over ssh or, on this machine, directly; or on each node of a Slurm job, by srun. Over
//! the launcher's standard input it sends the working directory, what to start and the node rank; over its standard output it
//! receives events.
//! [`protocol`] has the messages and their order. The launchers have a rendezvous like those of
//! [several nodes](super::Cluster); this command takes no part in it.
//!
//! No part outlives the job: a launcher whose standard input is closed, or silent for [`SILENCE_TIMEOUT`](node::SILENCE_TIMEOUT), ends
//! its workers; and the other launchers notice a launcher that is gone.

mod address;
mod connection;
mod diagnosis;
mod driver;
mod elastic;
mod environment;
mod fixed;
mod frame;
mod here;
mod hosts;
mod inbox;
mod node;
mod peer;
mod protocol;
mod quote;
mod shell;
mod slurm;
mod window;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::cluster::NO_LIMIT;
use super::event::Observer;
use super::exit::Report;
use super::job::{check_open_store, not_a_host};
use crate::credentials::Credentials;
use crate::env;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::host::unfit_host;
use crate::key::JobKey;
use crate::tls::Tls;

pub use elastic::{ElasticHosts, HostDiscovery};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use hosts::fuzz as fuzz_hosts;
pub use hosts::{Host, HostList};
pub use node::RemoteNode;
pub use shell::RemoteShell;
pub use slurm::SlurmAllocation;

use diagnosis::LostConnection;
use driver::{Driver, Launchers};
use fixed::FixedHosts;
use here::is_here;
use peer::Peer;

/// How many lines of a host's standard error are kept for an error.
const KEPT_LINES: usize = 20;
/// How long launchers may take in addition to the workers' grace period.
const BEYOND_GRACE: Duration = Duration::from_secs(15);

/// A job on several hosts that are reached over ssh.
///
/// The program that starts it must be installed on every host, and behave there as [`RemoteNode`] says.
#[derive(Clone, Debug)]
pub struct RemoteJob {
    hosts: HostList,
    launcher: PathBuf,
    arguments: Vec<OsString>,
    shell: RemoteShell,
    master_addr: Option<String>,
    master_port: u16,
    start_timeout: Duration,
    grace: Duration,
    credentials: Credentials,
    bind: Option<IpAddr>,
    open_store: bool,
    elastic: Option<ElasticHosts>,
}

/// How long the connection to a host may be silent at least.
const SSH_SILENCE_LIMIT: Duration = Duration::from_secs(15);

/// How long the connection to a host may be silent: not less than the network between its ranks.
fn ssh_silence(heartbeat: Heartbeat) -> Duration {
    SSH_SILENCE_LIMIT.max(heartbeat.network_silence())
}

impl RemoteJob {
    /// As many workers as `hosts` have slots. `launcher` is this program, and `arguments` are passed to it on each
    /// host: see [`RemoteNode::arguments`].
    pub fn new(
        hosts: HostList,
        launcher: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Self {
        Self {
            hosts,
            launcher: launcher.into(),
            arguments: arguments.into_iter().collect(),
            shell: RemoteShell::default(),
            master_addr: None,
            master_port: 0,
            start_timeout: Duration::from_secs(30),
            grace: super::Job::GRACE,
            credentials: Credentials::default(),
            bind: None,
            open_store: false,
            elastic: None,
        }
    }

    /// How the hosts are reached; over OpenSSH if not given.
    pub fn shell(mut self, shell: RemoteShell) -> Self {
        self.shell = shell;
        self
    }

    /// The address at which the hosts reach the first one. If not given, it is that of the ssh connection.
    pub fn master_addr(mut self, address: impl Into<String>) -> Self {
        self.master_addr = Some(address.into());
        self
    }

    /// The port of the launchers' store on that host. The default, 0, takes a free one.
    pub fn master_port(mut self, port: u16) -> Self {
        self.master_port = port;
        self
    }

    /// How long the hosts may take to answer, and then their launchers to find each other: 30 s each.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = timeout.min(NO_LIMIT);
        self
    }

    /// How long workers may take to end after SIGTERM, as the launchers were told.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// The key with which the job's processes authenticate each other; a new one if not given.
    pub fn key(mut self, key: JobKey) -> Self {
        self.credentials.key = Some(key);
        self
    }

    /// As [`Job::tls`](super::Job::tls), for the store of an elastic job, which this process serves. The launchers of
    /// the hosts get the same files on their command line.
    ///
    /// # Errors
    /// As those of [`Tls::read`].
    pub fn tls(mut self, ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        self.credentials.tls = Some(Tls::read(ca, certificate, key)?);
        Ok(self)
    }

    /// Makes the job [elastic](super::Job::min_workers): hosts may be lost, and others may be added. The launchers then
    /// have no rendezvous; this process serves the workers' store for the whole job.
    pub fn elastic(mut self, elastic: ElasticHosts) -> Self {
        self.elastic = Some(elastic);
        self
    }

    /// The address at which that store listens, if it is not the one at which the hosts reach it.
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.bind = Some(address);
        self
    }

    /// As [`Job::open_store`](super::Job::open_store), for that store; it excludes [`tls`](Self::tls).
    pub fn open_store(mut self, open: bool) -> Self {
        self.open_store = open;
        self
    }

    /// Runs the job to its end, and handles signals, as [`Job::run`](super::Job::run) does.
    ///
    /// # Errors
    /// If it cannot be started, or the connection to a host is lost.
    pub fn run(&self, observer: &mut dyn Observer) -> Result<Report> {
        check_open_store(self.open_store, self.credentials.tls.is_some())?;
        if let Some(host) = &self.master_addr
            && let Some(why) = unfit_host(host)
        {
            return Err(not_a_host(host, why));
        }
        match &self.elastic {
            Some(elastic) => {
                let plan = |launchers: &mut Launchers<'_>| Ok(Box::new(elastic.plan(launchers)?) as _);
                Driver::start(self, observer, plan)?.run()
            }
            None => {
                let plan = |launchers: &mut Launchers<'_>| Ok(Box::new(FixedHosts::start(launchers)?) as _);
                Driver::start(self, observer, plan)?.run()
            }
        }
    }

    /// The command that starts the launcher on `host`.
    fn command(&self, host: &Host) -> Result<Command> {
        Ok(if self.is_this_machine(host) && !self.shell.is_srun() {
            let mut command = Command::new(&self.launcher);
            command.arg("node");
            command
        } else {
            let silence = ssh_silence(Heartbeat::from_variables(env::variable)?);
            self.shell.command(host.name(), &self.launcher, self.start_timeout, silence)
        })
    }

    /// How long a launcher may take to end after it was told to.
    fn end_timeout(&self) -> Duration {
        self.grace.min(Duration::from_secs(365 * 24 * 3600)) + BEYOND_GRACE
    }

    /// Why the connection to a launcher has ended.
    fn diagnose(&self, peer: &Peer) -> Error {
        self.lost(peer, |lost| lost.error())
    }

    /// Whether another try to start a launcher, which has failed, may succeed.
    fn may_pass(&self, peer: &Peer) -> bool {
        self.lost(peer, |lost| lost.may_pass())
    }

    fn lost<T>(&self, peer: &Peer, look: impl FnOnce(&LostConnection<'_>) -> T) -> T {
        let stderr = peer.stderr.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        let (launcher, shell) = (self.launcher.to_string_lossy(), self.shell.name());
        let lost = LostConnection {
            host: peer.host.name(),
            shell: &shell,
            is_srun: self.shell.is_srun(),
            is_here: peer.is_here,
            was_up: peer.hello.is_some(),
            code: peer.connection.code(),
            stderr: &stderr,
            launcher: &launcher,
        };
        look(&lost)
    }

    /// Whether `host` is this machine. Another user of this machine is reached by ssh, as on any other machine.
    fn is_this_machine(&self, host: &Host) -> bool {
        let is_node = self.shell.is_srun() && slurm::is_this_node(host.name());
        is_node || host.name() == host.address() && is_here(host.address())
    }
}

/// For `phalanx::fuzzing`: the bytes of a pipe from another host, in either direction: instructions, or a
/// greeting and a launcher's messages. Returns whether all of it was decoded, and there was any.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let mut from = bytes;
    if frame::skip_to_greeting(&mut from).unwrap_or(false) {
        return all_frames(from, |said: protocol::FromLauncher| said.fuzz());
    }
    all_frames(bytes, |_: protocol::ToLauncher| {})
}

#[cfg(any(test, fuzzing, feature = "fuzzing"))]
fn all_frames<T: serde::de::DeserializeOwned>(mut from: &[u8], hear: impl Fn(T)) -> bool {
    let mut any = false;
    loop {
        match frame::read(&mut from) {
            Ok(Some(frame)) => hear(frame),
            Ok(None) => return any,
            Err(_) => return false,
        }
        any = true;
    }
}
