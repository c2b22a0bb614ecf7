//! Collectives of several hosts whose ranks share memory: within each host through memory, and between hosts only the
//! data that must cross.

use std::ops::Range;

use super::{Engine, Space};
use crate::collective::Memory;
use crate::collective::kernel::Fold;
use crate::collective::{self, Counts, Hierarchy, Leaders, Plan, ReduceOp};
use crate::deadline::Timeout;
use crate::domain::Domain;
use crate::error::Result;
use crate::rank::{Rank, Sequence};
use crate::wire::frame::{Call, Operation};

/// A collective that is hierarchical: within hosts, and between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hierarchical {
    AllReduce,
    Broadcast,
    Reduce,
    Barrier,
}

impl Hierarchical {
    /// None if it goes from rank to rank.
    pub(super) fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::AllReduce | Operation::AllReduceCoalesced => Some(Self::AllReduce),
            Operation::Broadcast => Some(Self::Broadcast),
            Operation::Reduce => Some(Self::Reduce),
            Operation::Barrier => Some(Self::Barrier),
            Operation::ReduceScatter
            | Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => None,
            // They have counts, and go by hosts in a way of their own.
            Operation::ReduceScatterV
            | Operation::AllGather
            | Operation::AllGatherV
            | Operation::AllGatherVInPlace => None,
        }
    }
}

impl Engine {
    pub(super) fn by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        kind: Hierarchical,
        call: (Call, Sequence),
        data: &mut [u8],
        timeout: &Timeout,
    ) -> Result<()> {
        let root = call.0.root.unwrap_or(Rank::MAIN);
        match kind {
            Hierarchical::AllReduce => self.all_reduce_by_hosts(hierarchy, call, data, timeout),
            Hierarchical::Broadcast => self.broadcast_by_hosts(hierarchy, call, root, data, timeout),
            Hierarchical::Reduce => self.reduce_by_hosts(hierarchy, call, root, data, timeout),
            // No host may go on before all hosts have come.
            Hierarchical::Barrier => {
                let within_host = |engine: &mut Self| {
                    engine.within(call, &mut [], timeout, |domain, none| {
                        domain.collective(&call.0, call.1, Memory::InPlace(none), timeout)
                    })
                };
                within_host(self)?;
                let leaders = hierarchy.leaders(Rank::MAIN);
                let plan = collective::dissemination(leaders.host, leaders.hosts);
                self.across(&leaders, call, plan, (&mut [], 0), timeout)?;
                within_host(self)
            }
        }
    }

    /// A `reduce_scatter_v`, or an all-gather in place. From rank to rank, elements would cross between hosts once
    /// for each rank. Combined on each host first, and sent to hosts instead of ranks, they cross once for each host.
    pub(super) fn in_place_v_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        timeout: &Timeout,
    ) -> Result<()> {
        if call.0.operation == Operation::ReduceScatterV {
            return self.reduce_scatter_by_hosts(hierarchy, call, data, counts, timeout);
        }
        self.all_gather_v_by_hosts(hierarchy, call, data, counts, timeout)
    }

    /// Each rank's part goes to all ranks of its host, then between the hosts, and on each host to all ranks. Of few bytes, one leader of each
    /// host exchanges all. Otherwise the owners of the stripes pass a share of the parts each around the ring of the hosts, so that as many
    /// rings turn at a time as every host has ranks for.
    fn all_gather_v_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        timeout: &Timeout,
    ) -> Result<()> {
        let (size, own) = (call.0.dtype.size(), hierarchy.host_of(self.rank));
        let member = |index: usize| hierarchy.ranks_of(own).get(index);
        let part = |index| member(index).map_or(0..0, |rank| counts.of(rank.index()));
        self.on_parts(call, data, |index| super::bytes_of(&part(index), size), None, timeout)?;
        if data.len() <= self.choice.row.bruck_max {
            self.all_gather_by_leaders(hierarchy, call, data, counts, timeout)?;
            return self
                .within(call, data, timeout, |domain, data| domain.all_gather(call, data, 1, timeout));
        }
        if let Some((leaders, plan)) = hierarchy.all_gather_v(counts) {
            self.across(&leaders, call, plan, (data, 0), timeout)?;
        }
        for host in hierarchy.hosts().ranks().filter(|host| *host != own) {
            for turn in 0..hierarchy.turns() {
                let part = |stripe| super::bytes_of(&hierarchy.part(counts, turn, host, stripe), size);
                // All ranks of this host have the same counts: they have compared them above.
                if has_elements(hierarchy, part) {
                    self.on_parts(call, data, part, None, timeout)?;
                }
            }
        }
        Ok(())
    }

    /// The leaders pack the parts of their hosts, exchange them in rounds, and unpack what came.
    fn all_gather_by_leaders(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        timeout: &Timeout,
    ) -> Result<()> {
        let Some((_, leaders)) = hierarchy.owned(1) else { return Ok(()) };
        let size = call.0.dtype.size();
        self.with_workspace(call, data.len(), |engine, packed| {
            // This host first, though its parts come last in the packed buffer.
            let parts =
                || hierarchy.parts_from(counts, leaders.host).map(|part| super::bytes_of(&part, size));
            let own = hierarchy.ranks_of(leaders.host).len();
            let others: usize = parts().skip(own).map(|part| part.len()).sum();
            let plan = hierarchy.all_gather_in_rounds(counts);
            pack(&mut packed[others..], data, parts().take(own));
            engine.across(&leaders, call, plan, (packed, 0), timeout)?;
            unpack(packed, data, parts().skip(own));
            Ok(())
        })
    }

    /// On each host the sums of every rank's elements go to the owner of the stripe in which that rank's part is. Then the owners of each stripe
    /// pass theirs around a ring, each to its host: only a share of the sums leaves a host. Where a host has more ranks than stripes, its owners
    /// give the others their parts. Of few bytes, and where a host has more than twice as many ranks as another, it is an all-reduce.
    pub(super) fn reduce_scatter_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        timeout: &Timeout,
    ) -> Result<()> {
        let whole = match call.0.operation == Operation::ReduceScatterV {
            true => self.reduces_v_whole(data.len()),
            false => self.reduces_whole(data.len()),
        };
        if whole || !hierarchy.scatters_in_few_rounds() {
            return self.all_reduce_by_hosts(hierarchy, call, data, timeout);
        }
        let (size, fold) = (call.0.dtype.size(), self.fold_on_host(call.0));
        if self.domain.is_none() {
            // It is alone on its host, and divides an average as the others do.
            fold.apply(&mut [&mut *data])?;
        }
        for turn in 0..hierarchy.turns() {
            for host in hierarchy.hosts().ranks() {
                let part = |stripe| super::bytes_of(&hierarchy.part(counts, turn, host, stripe), size);
                // The first time also if nothing is to be combined: in this call the ranks of this host compare what they have called.
                let is_first = turn == 0 && host == Rank::MAIN;
                if is_first || has_elements(hierarchy, part) {
                    self.on_parts(call, data, part, Some(fold), timeout)?;
                }
            }
        }
        if let Some((leaders, plan)) = hierarchy.reduce_scatter_v(counts) {
            self.across(&leaders, call, plan, (data, 0), timeout)?;
        }
        let own = hierarchy.host_of(self.rank);
        // In the first turn the parts are the owners' own.
        for turn in 1..hierarchy.turns() {
            let part = |stripe| super::bytes_of(&hierarchy.part(counts, turn, own, stripe), size);
            if has_elements(hierarchy, part) {
                self.on_parts(call, data, part, None, timeout)?;
            }
        }
        Ok(())
    }

    fn broadcast_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        root: Rank,
        data: &mut [u8],
        timeout: &Timeout,
    ) -> Result<()> {
        let (leaders, elements) = (hierarchy.leaders(root), data.len() / call.0.dtype.size());
        let (row, from) = (&self.choice.row, hierarchy.host_of(root));
        let plan = collective::broadcast(row, leaders.host, leaders.hosts, from, call.0.dtype, elements);
        self.across(&leaders, call, plan, (data, 0), timeout)?;
        // On the root's host the leader is the root; on the others it is the first rank, to which `across` has sent the
        // data.
        self.within(call, data, timeout, |domain, data| {
            domain.collective(&call.0, call.1, Memory::InPlace(data), timeout)
        })
    }

    /// Reduces each stripe to its owner on every host, then among its owners, and then copies the stripes to all ranks
    /// of each host.
    fn all_reduce_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        timeout: &Timeout,
    ) -> Result<()> {
        let size = call.0.dtype.size();
        let stripes = if data.len() >= self.choice.row.stripes_min { hierarchy.most_stripes() } else { 1 };
        self.reduce_on_host(call, data, stripes, timeout)?;
        if let Some((index, leaders)) = hierarchy.owned(stripes) {
            let stripe = Domain::chunk(data.len(), stripes, index);
            let (start, elements) = (stripe.start / size, stripe.len() / size);
            let row = &self.choice.row;
            let plan = collective::all_reduce(row, leaders.host, leaders.hosts, call.0.dtype, elements);
            self.across(&leaders, call, plan, (data, start), timeout)?;
        }
        self.within(call, data, timeout, |domain, data| domain.all_gather(call, data, stripes, timeout))
    }

    /// As an all-reduce in one stripe; the first rank of the root's host gets all of it and passes it to the root.
    fn reduce_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        root: Rank,
        data: &mut [u8],
        timeout: &Timeout,
    ) -> Result<()> {
        self.reduce_on_host(call, data, 1, timeout)?;
        let root_host = hierarchy.host_of(root);
        if let Some((_, leaders)) = hierarchy.owned(1) {
            let (row, elements) = (&self.choice.row, data.len() / call.0.dtype.size());
            let plan =
                collective::reduce(row, leaders.host, leaders.hosts, root_host, call.0.dtype, elements);
            self.across(&leaders, call, plan, (data, 0), timeout)?;
        }
        if hierarchy.host_of(self.rank) != root_host {
            return Ok(());
        }
        self.within(call, data, timeout, |domain, data| domain.all_gather(call, data, 1, timeout))
    }

    /// How the elements of a host's ranks are combined. An average is divided here by the number of all ranks of all hosts,
    /// so that no sum of half-precision numbers overflows between hosts.
    fn fold_on_host(&self, Call { dtype, reduce, .. }: Call) -> Fold {
        let op = reduce.unwrap_or(ReduceOp::Sum);
        if op == ReduceOp::Avg {
            Fold::of_all(dtype, op, self.world.get())
        } else {
            Fold { dtype, op, divide_by: None }
        }
    }

    /// Combines the elements of this host's ranks.
    fn reduce_on_host(
        &mut self,
        call: (Call, Sequence),
        data: &mut [u8],
        owners: usize,
        timeout: &Timeout,
    ) -> Result<()> {
        let fold = self.fold_on_host(call.0);
        if self.domain.is_none() {
            return fold.apply(&mut [data]);
        }
        self.within(call, data, timeout, |domain, data| {
            domain.reduce_scatter(call, data, owners, fold, timeout)
        })
    }

    /// Combines the parts of this host's ranks, or without a `fold` gives each to all of them.
    fn on_parts(
        &mut self,
        call: (Call, Sequence),
        data: &mut [u8],
        part: impl Fn(usize) -> Range<usize>,
        fold: Option<Fold>,
        timeout: &Timeout,
    ) -> Result<()> {
        self.within(call, data, timeout, |domain, data| domain.on_parts(call, data, part, fold, timeout))
    }

    /// Called before a collective goes from rank to rank. Otherwise, if one rank waits for its host's ranks and another
    /// for a message, neither would see the other's call.
    pub(super) fn agree_on_host(&mut self, call: Call, sequence: Sequence, timeout: &Timeout) -> Result<()> {
        self.within((call, sequence), &mut [], timeout, |domain, _| domain.agree(call, sequence, timeout))
    }

    /// This rank's work within its host, if there are other ranks.
    fn within(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        timeout: &Timeout,
        work: impl FnOnce(&mut Domain, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.check_health()?;
        let Some(domain) = &mut self.domain else { return Ok(()) };
        // The deadline for all parts of the call counts from the first wait.
        timeout.deadline();
        work(domain, data).map_err(|error| self.health.fail_operation(error, call, sequence))
    }

    /// Executes `plan` between the hosts, on elements from `start` on, if this rank is a leader.
    fn across(
        &mut self,
        leaders: &Leaders<'_>,
        (call, sequence): (Call, Sequence),
        plan: Plan,
        (data, start): (&mut [u8], usize),
        timeout: &Timeout,
    ) -> Result<()> {
        if leaders.of(leaders.host) != self.rank {
            return Ok(());
        }
        let plan = leaders.translate(plan, start);
        let op = call.reduce.map(sums);
        self.execute_as(op, call, sequence, &plan, Space::One(data), timeout.deadline())
    }
}

/// Whether any stripe has elements.
fn has_elements(hierarchy: &Hierarchy, part: impl Fn(usize) -> Range<usize>) -> bool {
    (0..hierarchy.most_stripes()).any(|stripe| !part(stripe).is_empty())
}

/// The operation of an average before it is divided.
fn sums(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}

/// Copies the `parts` of `data` to the front of `packed`, one after the other.
fn pack(packed: &mut [u8], data: &[u8], parts: impl Iterator<Item = Range<usize>>) {
    let mut end = 0;
    for part in parts {
        packed[end..end + part.len()].copy_from_slice(&data[part.clone()]);
        end += part.len();
    }
}

/// The reverse of [`pack`].
fn unpack(packed: &[u8], data: &mut [u8], parts: impl Iterator<Item = Range<usize>>) {
    let mut end = 0;
    for part in parts {
        data[part.clone()].copy_from_slice(&packed[end..end + part.len()]);
        end += part.len();
    }
}
