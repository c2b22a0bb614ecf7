//! What a launcher says of why it cannot go on, and of how the job has ended.

use std::io::ErrorKind;
use std::time::Instant;

use super::MultiNode;
use crate::cluster::RendezvousBackend;
use crate::error::{Error, Kind};
use crate::exit::{Failure, NodeFailure, Outcome, Signal};
use crate::log::AFTER_STANDSTILL;
use crate::names::listed;
use crate::nodes::membership::{Cause, Departure};

impl MultiNode<'_> {
    /// Why the log of the launchers is lost.
    pub(super) fn store_is_lost(&self, error: Error) -> Error {
        // This host lacks something, or this launcher has a fault, or stood still while it joined: no other node is to blame.
        if error.is_local_shortage() || error.is_aborted() || error.is_peer_left() {
            return error;
        }
        // What the log says, or what the store refuses, is the cause. The store is there.
        let kinds = [Kind::Protocol, Kind::InvalidArgument, Kind::Mismatch, Kind::OutOfMemory];
        if kinds.contains(&error.kind()) {
            let advice =
                "does another program write to the launchers' store, or another job with the same --rdzv-id?";
            return if self.reached.is_some() { error.with_remedy_if_none(advice) } else { error };
        }
        // The others have given it up, and closed its connections, meanwhile.
        if let Some(time) = self.view.stood_still {
            let cause = format!(
                "this launcher stood still for {:.0} s, and has lost the launchers' store since: {}",
                time.as_secs_f64(),
                error.full_cause()
            );
            return Error::new(Kind::PeerLeft, cause)
                .in_operation("rendezvous of the launchers", None)
                .with_remedy(AFTER_STANDSTILL);
        }
        let server = self.view.state.present().find(|node| node.serves_store && node.id != self.me);
        let is_served = matches!(self.cluster.backend, RendezvousBackend::Store { .. });
        match server {
            Some(node) => {
                // A call that may not end with a time-out ends with an error of the environment.
                let is_silent = error.is_timeout() || error.is_environment();
                let what = if is_silent { "does not answer" } else { "is gone" };
                let cause =
                    format!("node 0 ({}) {what}, and with it the launchers' store: {}", node.host, error.cause());
                Error::new(Kind::PeerFailed, cause).with_remedy("its own launcher's output says why")
            }
            // It was never reached: the error says what may stand between, or why it was refused.
            None if self.reached.is_none() && error.remedy().is_some() && (is_served || !error.is_timeout()) => error,
            None if !is_served => match error.io_kind() {
                Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                    error.with_remedy("make room on the disk where the launchers meet, and start all nodes again")
                }
                _ => error.with_remedy("is the launchers' store up, and does this host reach it?"),
            },
            // It has ended before it joined, or has sent no heartbeat.
            None if self.served_at().is_none() => error.with_remedy(
                "is the launcher that serves the store gone? Its own output says why; then start all nodes again",
            ),
            None => error,
        }
    }

    /// The error where `cause` is that another launcher has ended, and this one, which serves the launchers' store, had stood still before:
    /// the others got no answer from it, and ended for that.
    pub(super) fn lost_by_others(&self, cause: &Cause) -> Option<Error> {
        let Cause::Node { node, node_rank, why: Departure::Ended } = cause else { return None };
        let time = self.stood_still.filter(|_| self.served_at().is_some())?;
        let name =
            node_rank.or(node.node_rank).map_or_else(|| "the node".to_owned(), |rank| format!("node {rank}"));
        let cause = format!(
            "this launcher, which serves the launchers' store, stood still for {:.0} s; the launcher of {name} ({}) got no answer from it \
             in that time, and has ended",
            time.as_secs_f64(),
            node.host
        );
        let error = Error::new(Kind::PeerLeft, cause).in_operation("rendezvous of the launchers", None);
        Some(error.with_remedy(AFTER_STANDSTILL))
    }

    /// Why this node, which waits since then, has no place in a round.
    pub(super) fn too_few(&self, since: Instant) -> Error {
        let waited = since.elapsed().as_secs_f64();
        if self.reached.is_none() {
            let remedy = match &self.cluster.backend {
                RendezvousBackend::Store { .. } => {
                    "has the launcher that serves it started, and does this host reach it?"
                }
                _ => "is it up, and does this host reach it?",
            };
            let cause = format!("no store has answered at {} within {waited:.0} s", self.cluster.endpoint());
            return Error::timeout(cause)
                .in_operation("rendezvous of the launchers", None)
                .with_remedy(remedy);
        }
        if let Some(running) = self.view.state.running() {
            if running.node_rank(self.me).is_some() {
                let cause = format!(
                    "a round has begun with this node, and its first node has not said where the workers meet: this node has waited {waited:.0} s \
                     for it, and for the other nodes"
                );
                return Error::timeout(cause).in_operation("rendezvous of the launchers", None).with_remedy(
                    "does the first node's launcher say why? --rdzv-conf join_timeout=.. waits longer",
                );
            }
            let nodes = self.view.state.present().count() - self.view.state.waiting().len();
            let cause = format!(
                "the {nodes} nodes of the round that runs have gone on without this node, which has waited {waited:.0} s for a place"
            );
            return Error::timeout(cause)
                .in_operation("rendezvous of the launchers", None)
                .with_remedy("it gets one when a node leaves: --rdzv-conf join_timeout=.. waits longer");
        }
        let hosts: Vec<&str> = self.view.state.waiting().iter().map(|node| node.host.as_str()).collect();
        let mut cause = format!(
            "{} of at least {} nodes have come within {waited:.0} s",
            hosts.len(),
            self.cluster.min_nodes
        );
        if !hosts.is_empty() {
            cause.push_str(&format!(": {}", listed(&hosts)));
        }
        match self.view.state.last_cause().map(outcome_of) {
            Some(Outcome::Failed(failure)) => cause.push_str(&format!("; before, {failure}")),
            Some(Outcome::NodeFailed(failure)) => cause.push_str(&format!("; before, {failure}")),
            Some(Outcome::Succeeded | Outcome::Interrupted(_) | Outcome::Stopped) | None => {}
        }
        let error = Error::timeout(cause).in_operation("rendezvous of the launchers", None);
        if let Some(address) = self.served_at().filter(|address| address.ip().to_canonical().is_loopback()) {
            return error.with_remedy(format!(
                "nodes on other hosts do not reach the store at {address}: give every node an address of this host as --rdzv-endpoint (or \
                 --master-addr); if all nodes are on this host, --rdzv-conf join_timeout=.. waits longer"
            ));
        }
        error.with_remedy(
            "start `phalanx run` on every node, with the same --rdzv-endpoint (or --master-addr and --master-port) and --rdzv-id; \
             --rdzv-conf join_timeout=.. waits longer",
        )
    }
}

/// How a job ends for this cause.
pub(super) fn outcome_of(cause: &Cause) -> Outcome {
    match cause {
        Cause::Worker(failure) => Outcome::Failed(
            postcard::from_bytes(&failure.detail).unwrap_or_else(|_| Failure::unknown(failure.rank)),
        ),
        Cause::Node { node, node_rank, why } => {
            let why = match why {
                Departure::Silent(since) => {
                    format!(
                        "its launcher has not been heard of for {:.1} s: it is frozen, or its host or the network is silent",
                        since.as_secs_f64()
                    )
                }
                Departure::Ended => {
                    "its launcher has ended without a word: its connection to the launchers' store was closed"
                        .to_owned()
                }
                Departure::Signal(signal) => format!("its launcher was ended by {}", Signal::new(*signal)),
                Departure::GaveUp(why) => format!("its launcher gave up: {why}"),
                Departure::Replaced => "its launcher was gone, and was started again".to_owned(),
            };
            Outcome::NodeFailed(NodeFailure {
                node: node_rank.or(node.node_rank),
                host: node.host.clone(),
                why,
            })
        }
    }
}
