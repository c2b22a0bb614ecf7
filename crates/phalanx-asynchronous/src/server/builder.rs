//! Settings of parameter servers, compared among all ranks, and which server has which keys.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::layout::Layout;
use super::service::{Hosted, Service};
use super::shard::Shard;
use super::{Compensation, ParameterServer, Place, State};
use crate::buffer::copy_of;
use crate::caller::Caller;
use crate::clock::{Clocks, Consistency};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::hash::fnv1a;
use crate::optimizer::UpdateRule;
use crate::rank::Rank;
use crate::rpc::Rpc;
use crate::wire::rpc::MAX_PAYLOAD;

/// The most parameters of one server: a step sends them in one call, which takes a little more.
pub(super) const MAX_SHARD: usize = (MAX_PAYLOAD - 4096) / size_of::<f32>();

/// How a [`ParameterServer`] is made; see [`ParameterServer::builder`].
pub struct ParameterServerBuilder {
    lengths: Vec<usize>,
    servers: Option<Vec<Rank>>,
    workers: Option<Vec<Rank>>,
    consistency: Consistency,
    rule: Arc<dyn UpdateRule>,
    compensation: Compensation,
    replicated: bool,
    timeout: Option<Duration>,
}

impl ParameterServerBuilder {
    pub(super) fn new(lengths: &[usize], rule: impl UpdateRule + 'static) -> Self {
        Self {
            lengths: lengths.to_vec(),
            servers: None,
            workers: None,
            consistency: Consistency::Bsp,
            rule: Arc::new(rule),
            compensation: Compensation::default(),
            replicated: false,
            timeout: None,
        }
    }

    /// The ranks that keep parameters; all ranks if it is not set.
    #[must_use]
    pub fn servers(self, servers: &[Rank]) -> Self {
        Self { servers: Some(servers.to_vec()), ..self }
    }

    /// The ranks that push gradients from the start on; all ranks if it is not set. Others may
    /// [join](ParameterServer::join) later.
    #[must_use]
    pub fn workers(self, workers: &[Rank]) -> Self {
        Self { workers: Some(workers.to_vec()), ..self }
    }

    /// How far workers may be apart; [`Bsp`](Consistency::Bsp) if it is not set.
    #[must_use]
    pub fn consistency(self, consistency: Consistency) -> Self {
        Self { consistency, ..self }
    }

    /// How stale gradients are corrected; not at all if it is not set.
    #[must_use]
    pub fn compensation(self, compensation: Compensation) -> Self {
        Self { compensation, ..self }
    }

    /// Each server keeps a copy of the one before it, and a worker gets its answer when both have its update. Needs two
    /// servers. Each push is sent twice.
    #[must_use]
    pub fn replicated(self) -> Self {
        Self { replicated: true, ..self }
    }

    /// How long an operation waits, also for slower workers; the group's time-out if it is not set.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// Starts servers and workers. Every rank of `group` must call it with the same settings, in the same order as its
    /// collectives. `parameters` become rank 0's on all ranks; those of the others only have to be as many.
    ///
    /// # Errors
    /// If the settings differ, or are impossible: no servers, a rank that is not in the group, a replica without a second
    /// server, more than 256 MiB of parameters on one server, a rule or a compensation by which [no training goes](UpdateRule::check). If
    /// `parameters` are not as many as the keys have elements, on any rank. If a server has no memory for its parameters: that ends the group. If the group fails.
    pub fn start(self, group: &ProcessGroup, parameters: &mut [f32]) -> Result<ParameterServer> {
        let Self { lengths, servers, workers, consistency, rule, compensation, replicated, timeout } = self;
        let world = group.world_size();
        let all = || world.ranks().collect::<Vec<_>>();
        let (servers, workers) = (servers.unwrap_or_else(all), workers.unwrap_or_else(all));
        let layout = Layout::new(&lengths).and_then(|layout| match layout.elements() == parameters.len() {
            true => Ok(layout),
            false => Err(Error::invalid_argument(format!(
                "the keys have {} elements, and there are {} parameters",
                layout.elements(),
                parameters.len()
            ))
            .with_remedy("give ParameterServer::builder the length of each tensor of the parameters")),
        });
        let checked = rule.check().and_then(|()| compensation.check());
        let layout = layout.and_then(|layout| checked.map(|()| layout));
        let group = group.in_call(Caller::RpcStart);
        let own = (
            fnv1a(format!("{lengths:?}").bytes()),
            &servers,
            &workers,
            consistency,
            compensation,
            replicated,
            rule.fingerprint(),
        );
        let own = fnv1a(postcard::to_stdvec(&own).unwrap_or_default());
        // A rank that cannot start tells the others, which would wait for it.
        let settings = group.all_gather_object(&layout.is_ok().then_some(own))?;
        let layout = layout?;
        if let Some(other) = settings.iter().position(Option::is_none) {
            return Err(Error::invalid_argument(format!("rank {other} could not start its ParameterServer"))
                .with_peer(Rank::new(other as u32))
                .with_remedy("see its own error"));
        }
        if let Some(other) = settings.iter().position(|setting| *setting != settings[0]) {
            return Err(Error::mismatch(format!(
                "rank {other} has made its ParameterServer with other settings than rank 0"
            ))
            .with_peer(Rank::new(other as u32))
            .with_remedy(
                "every rank must name the same keys, update rule, servers, workers, consistency and compensation",
            ));
        }
        check(&servers, &workers, replicated, &|rank| world.rank(rank.get()).map(drop))?;
        let shares = shares(&layout, &servers)?;
        group.broadcast(parameters, Rank::MAIN)?;
        let shards: Vec<Place> = shares
            .into_iter()
            .enumerate()
            .map(|(index, keys)| Place {
                keys,
                primary: servers[index],
                replica: replicated.then(|| servers[(index + 1) % servers.len()]),
            })
            .collect();
        let shard = |place: &Place| {
            let part = copy_of(&parameters[layout.place(&place.keys)?])?;
            let clocks = Clocks::new(consistency, workers.iter().copied());
            Shard::new(layout.part(&place.keys)?, part, rule.clone(), compensation, clocks)
        };
        let mut hosted = Vec::new();
        for (index, place) in shards.iter().enumerate() {
            let is_here = place.primary == group.rank() || place.replica == Some(group.rank());
            if is_here && !place.keys.is_empty() {
                // The other ranks wait for this one.
                let shard = shard(place)
                    .map_err(|error| group.fail_half_way("start its parameter server", &error))?;
                hosted.push(Hosted::new(index as u32, shard, place, group.rank()));
            }
        }
        let timeout = timeout.unwrap_or(group.timeout());
        // A worker asks servers alone, and servers their replicas.
        let rpc = Rpc::builder().around(&servers).timeout(timeout);
        let rpc = Service::new(hosted).functions(rpc).start(&group)?;
        let (servers, replicas) = shards.iter().map(|place| (place.primary, place.replica)).unzip();
        let state = State { number: 0, servers, replicas, torn: None };
        Ok(ParameterServer { rpc, layout, shards, state: Mutex::new(state), timeout })
    }
}

/// The keys of each server.
pub(super) fn shares(layout: &Layout, servers: &[Rank]) -> Result<Vec<Range<usize>>> {
    let shares = layout.shards(servers.len());
    for (server, keys) in servers.iter().zip(&shares) {
        let elements = layout.place(keys)?.len();
        if elements > MAX_SHARD {
            return Err(Error::invalid_argument(format!(
                "rank {server} would serve {elements} parameters; a server may have {MAX_SHARD}"
            ))
            .with_remedy("name more servers, or divide the parameters into smaller keys"));
        }
    }
    Ok(shares)
}

fn check(
    servers: &[Rank],
    workers: &[Rank],
    replicated: bool,
    known: &dyn Fn(Rank) -> Result<()>,
) -> Result<()> {
    let is_twice =
        |ranks: &[Rank]| ranks.iter().enumerate().any(|(index, rank)| ranks[..index].contains(rank));
    servers.iter().chain(workers).try_for_each(|rank| known(*rank))?;
    let (wrong, remedy) = match () {
        () if servers.is_empty() => {
            ("a parameter server needs at least one rank that serves", "name one, or call no `servers`")
        }
        () if is_twice(servers) || is_twice(workers) => {
            ("a rank is named twice among the servers or the workers", "name each rank once")
        }
        () if replicated && servers.len() < 2 => {
            ("a replica needs a second server", "name two servers, or leave `replicated` out")
        }
        () => return Ok(()),
    };
    Err(Error::invalid_argument(wrong).with_remedy(remedy))
}

impl std::fmt::Debug for ParameterServerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ParameterServerBuilder({} keys, {:?})", self.lengths.len(), self.consistency)
    }
}
