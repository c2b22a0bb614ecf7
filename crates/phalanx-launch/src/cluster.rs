//! A job on several nodes: its nodes, and the rendezvous of their launchers.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::env;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::host::{is_localhost, unfit_host};
use crate::job::not_a_host;
use crate::store::host_port;

/// No time limit.
pub(super) const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The node that serves the launchers' store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hosting {
    /// This node.
    Serve,
    /// Another node.
    Connect,
    /// The node that has the address of the store; of several launchers on it, the first. If nodes may come and go, that address must be
    /// one host's alone, so not the loopback.
    ByAddress,
}

/// The backend that serves the rendezvous of the launchers (torchrun: --rdzv-backend).
#[derive(Clone, Debug)]
pub(super) enum RendezvousBackend {
    /// A store that one of the launchers serves. The job ends if that launcher is lost.
    Store { host: String, port: u16, hosting: Hosting },
    /// In an etcd cluster.
    #[cfg(feature = "etcd")]
    Etcd(String),
    /// A file on a disk that all nodes share.
    File(PathBuf),
}

/// The nodes of a job, as one node's launcher is configured for them.
///
/// The launchers find each other, and keep their log, in a store. Each round of the job also has its own store, which the first
/// node serves for the workers. If a launcher sends no heartbeats, or its node is gone, the round ends for all.
#[derive(Clone, Debug)]
pub struct Cluster {
    pub(super) min_nodes: u32,
    pub(super) max_nodes: u32,
    pub(super) node_rank: Option<u32>,
    pub(super) backend: RendezvousBackend,
    pub(super) local_addr: Option<String>,
    pub(super) bind: Option<IpAddr>,
    pub(super) keep_alive: (Duration, Option<u32>),
    heartbeat: Heartbeat,
    pub(super) join_timeout: Duration,
    pub(super) last_call: Duration,
}

impl Cluster {
    /// At least `min_nodes` and at most `max_nodes`; the launchers' store is at `host:port`.
    ///
    /// # Errors
    /// If `port` is 0, or `host` is not the name or address of a host. If the numbers of nodes are 0 or in the wrong order, or a variable of
    /// [heartbeats](Heartbeat) cannot be read.
    pub fn new(min_nodes: u32, max_nodes: u32, host: impl Into<String>, port: u16) -> Result<Self> {
        if port == 0 {
            return Err(Error::invalid_argument(
                "port 0 means any free port, which the other nodes cannot know",
            )
            .with_remedy("give every node the same free port"));
        }
        let host = host.into();
        if let Some(why) = unfit_host(&host) {
            return Err(not_a_host(&host, why));
        }
        let host = host.trim_matches(['[', ']']).to_owned();
        Self::with_backend(
            min_nodes,
            max_nodes,
            RendezvousBackend::Store { host, port, hosting: Hosting::ByAddress },
        )
    }

    /// The same, but the launchers' store is in the etcd cluster whose members are `endpoints`, `host:port,host:port`. Any
    /// node may be lost, also the first.
    ///
    /// # Errors
    /// As [`new`](Self::new), for numbers of nodes and variables.
    #[cfg(feature = "etcd")]
    pub fn etcd(min_nodes: u32, max_nodes: u32, endpoints: impl Into<String>) -> Result<Self> {
        Self::with_backend(min_nodes, max_nodes, RendezvousBackend::Etcd(endpoints.into()))
    }

    /// The same, in a file at `path`, on a disk that all nodes share and whose file locks work across nodes.
    ///
    /// # Errors
    /// As [`new`](Self::new), for numbers of nodes and variables.
    pub fn file(min_nodes: u32, max_nodes: u32, path: impl Into<PathBuf>) -> Result<Self> {
        Self::with_backend(min_nodes, max_nodes, RendezvousBackend::File(path.into()))
    }

    /// The node that serves the store, at any free port. [`Event::Serving`](super::Event::Serving) reports the port.
    pub(super) fn at_any_port(nodes: u32, host: impl Into<String>) -> Result<Self> {
        let backend = RendezvousBackend::Store { host: host.into(), port: 0, hosting: Hosting::Serve };
        Self::with_backend(nodes, nodes, backend)
    }

    fn with_backend(min_nodes: u32, max_nodes: u32, backend: RendezvousBackend) -> Result<Self> {
        if min_nodes == 0 || min_nodes > max_nodes {
            let cause = format!("{min_nodes} to {max_nodes} nodes");
            return Err(Error::invalid_argument(cause).with_remedy("give one number, or MIN:MAX"));
        }
        Ok(Self {
            min_nodes,
            max_nodes,
            node_rank: None,
            backend,
            local_addr: None,
            bind: None,
            keep_alive: (Duration::from_secs(1), None),
            heartbeat: Heartbeat::from_variables(env::variable)?,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
        })
    }

    /// This node's rank among the nodes (torchrun: --node-rank; workers get it as `GROUP_RANK`). If not given, nodes
    /// are ranked in the order in which they join, after the one that serves the store.
    pub fn node_rank(mut self, node_rank: u32) -> Self {
        self.node_rank = Some(node_rank);
        self
    }

    /// The node that serves the launchers' store, if one does. The default is [`ByAddress`](Hosting::ByAddress).
    pub fn hosting(mut self, serving: Hosting) -> Self {
        if let RendezvousBackend::Store { hosting, .. } = &mut self.backend {
            *hosting = serving;
        }
        self
    }

    /// The address at which the other nodes reach this one, if the launchers' store is in etcd or a file. If not given,
    /// it is the address of the interface to etcd, or of that which `GLOO_SOCKET_IFNAME` names, or that of this host's name, or that of
    /// its default route; never the loopback, unless this host has no other. To give the loopback, or `localhost`, is to say that all
    /// nodes are on this host: only then may nodes come and go at an end point, or in a file, that other hosts cannot reach.
    pub fn local_addr(mut self, address: impl Into<String>) -> Self {
        self.local_addr = Some(address.into().trim_matches(['[', ']']).to_owned());
        self
    }

    /// The address at which stores listen, if it is not the one at which others reach them. It does not say that this node serves a
    /// store: see [`hosting`](Self::hosting). An unspecified address (0.0.0.0) opens them to every network of this host: then give the
    /// job a [key](super::Job::key).
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.bind = Some(address);
        self
    }

    /// How often a launcher sends a heartbeat, 1 s, and after how many missing ones it is declared dead. If that is not given, as many
    /// as fit into the time that the network between ranks may be silent (10 s, or `PHALANX_NETWORK_TIMEOUT`) and two more, at least 5.
    pub fn keep_alive(mut self, interval: Duration, attempts: Option<u32>) -> Self {
        let interval = interval.clamp(Duration::from_millis(10), NO_LIMIT);
        self.keep_alive = (interval, attempts.map(|attempts| attempts.max(1)));
        self
    }

    /// How long to wait for enough nodes: 600 s.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout.min(NO_LIMIT);
        self
    }

    /// How long to wait for more nodes when there are enough: 30 s.
    pub fn last_call(mut self, timeout: Duration) -> Self {
        self.last_call = timeout.min(NO_LIMIT);
        self
    }

    /// Whether the job needs all of its nodes.
    pub(super) fn is_fixed(&self) -> bool {
        self.min_nodes == self.max_nodes
    }

    /// Whether the user says that the other nodes reach this one at the loopback: all are on this host.
    pub(super) fn is_all_here(&self) -> bool {
        self.local_addr.as_deref().is_some_and(|address| {
            is_localhost(address)
                || address.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
        })
    }

    /// The end point of the rendezvous, for errors.
    pub(super) fn endpoint(&self) -> String {
        match &self.backend {
            RendezvousBackend::Store { host, port, .. } => host_port(host, *port),
            #[cfg(feature = "etcd")]
            RendezvousBackend::Etcd(endpoints) => endpoints.clone(),
            RendezvousBackend::File(path) => path.display().to_string(),
        }
    }

    /// After how long without a heartbeat a launcher is declared dead.
    pub(super) fn silence(&self) -> Duration {
        let (interval, attempts) = self.keep_alive;
        let attempts = attempts.unwrap_or_else(|| self.heartbeat.missing_in_store(interval, false));
        interval.saturating_mul(attempts).min(NO_LIMIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_host_is_refused_at_once() {
        for host in ["tcp://node0", "node0:29500", ""] {
            let error = Cluster::new(1, 2, host, 1).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains("no place to meet"), "{error}");
        }
        assert!(Cluster::new(1, 2, "[::1]", 1).is_ok());
    }

    #[test]
    fn all_nodes_are_on_a_host_that_names_itself_in_capitals() {
        let cluster = Cluster::new(1, 2, "node0", 1).unwrap();
        for here in ["localhost", "Localhost", "localhost.", "127.0.0.1", "[::1]"] {
            assert!(cluster.clone().local_addr(here).is_all_here(), "{here}");
        }
        assert!(!cluster.is_all_here() && !cluster.clone().local_addr("localhost.example").is_all_here());
    }

    /// Others are added to them, and to the time of day.
    #[test]
    fn times_have_a_limit() {
        let cluster = Cluster::new(1, 2, "localhost", 1).unwrap();
        let cluster = cluster.keep_alive(Duration::MAX, Some(u32::MAX)).join_timeout(Duration::MAX);
        let cluster = cluster.last_call(Duration::MAX);
        assert_eq!([cluster.silence(), cluster.join_timeout, cluster.last_call], [NO_LIMIT; 3]);
        assert_eq!(cluster.keep_alive(Duration::from_secs(2), Some(3)).silence(), Duration::from_secs(6));
    }
}
