//! Collectives of several hosts whose ranks share memory: within each host through memory, and between hosts only the
//! data that must cross.

use super::{Engine, Space};
use crate::collective::Memory;
use crate::collective::kernel::Fold;
use crate::collective::{self, Counts, Hierarchy, Leaders, Plan, ReduceOp};
use crate::deadline::Patience;
use crate::domain::Domain;
use crate::error::Result;
use crate::rank::{Rank, Sequence};
use crate::wire::frame::{Call, Operation};

/// A collective that is hierarchical: within hosts, and between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByHosts {
    AllReduce,
    Broadcast,
    Reduce,
    Barrier,
}

impl ByHosts {
    /// None if it goes from rank to rank.
    pub(super) fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::AllReduce | Operation::AllReduceCoalesced => Some(Self::AllReduce),
            Operation::Broadcast => Some(Self::Broadcast),
            Operation::Reduce => Some(Self::Reduce),
            Operation::Barrier => Some(Self::Barrier),
            Operation::AllGather
            | Operation::ReduceScatter
            | Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::AllGatherV
            | Operation::MonitoredBarrier
            | Operation::PointToPoint => None,
            // They have counts, and go by hosts in a way of their own.
            Operation::ReduceScatterV | Operation::AllGatherVInPlace => None,
        }
    }
}

impl Engine {
    pub(super) fn by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        kind: ByHosts,
        call: (Call, Sequence),
        data: &mut [u8],
        patience: &Patience,
    ) -> Result<()> {
        let root = call.0.root.unwrap_or(Rank::MAIN);
        match kind {
            ByHosts::AllReduce => self.all_reduce_by_hosts(hierarchy, call, data, patience),
            ByHosts::Broadcast => self.broadcast_by_hosts(hierarchy, call, root, data, patience),
            ByHosts::Reduce => self.reduce_by_hosts(hierarchy, call, root, data, patience),
            // No host may go on before all hosts have come.
            ByHosts::Barrier => {
                let meet = |engine: &mut Self| {
                    engine.within(call, &mut [], patience, |domain, none| {
                        domain.collective(call.0, call.1, Memory::InPlace(none), patience)
                    })
                };
                meet(self)?;
                let leaders = hierarchy.leaders(Rank::MAIN);
                let plan = collective::dissemination(leaders.host, leaders.hosts);
                self.across(&leaders, call, plan, (&mut [], 0), patience)?;
                meet(self)
            }
        }
    }

    /// A `reduce_scatter_v`, or an `all_gather_v` in place. From rank to rank, elements would cross between hosts once
    /// for each rank. Combined on each host first, and sent to hosts instead of ranks, they cross once.
    pub(super) fn in_place_v_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        counts: &Counts,
        patience: &Patience,
    ) -> Result<()> {
        if call.0.operation == Operation::ReduceScatterV {
            return self.all_reduce_by_hosts(hierarchy, call, data, patience);
        }
        for root in self.world.ranks() {
            let range = counts.of(root.index());
            if range.is_empty() {
                continue;
            }
            let part = &mut data[super::bytes_of(&range, call.0.dtype.size())];
            let elements = range.len() as u64;
            let of_root = Call { operation: Operation::Broadcast, elements, root: Some(root), ..call.0 };
            self.broadcast_by_hosts(hierarchy, (of_root, call.1), root, part, patience)?;
        }
        Ok(())
    }

    fn broadcast_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        root: Rank,
        data: &mut [u8],
        patience: &Patience,
    ) -> Result<()> {
        let (leaders, elements) = (hierarchy.leaders(root), data.len() / call.0.dtype.size());
        let (row, from) = (&self.choice.row, hierarchy.host_of(root));
        let plan = collective::broadcast(row, leaders.host, leaders.hosts, from, call.0.dtype, elements);
        self.across(&leaders, call, plan, (data, 0), patience)?;
        // On the root's host the leader is the root; on the others it is the first rank, to which `across` has sent the
        // data.
        self.within(call, data, patience, |domain, data| {
            domain.collective(call.0, call.1, Memory::InPlace(data), patience)
        })
    }

    /// Reduces each stripe to its owner on every host, then among its owners, and then copies the stripes to all ranks
    /// of each host.
    fn all_reduce_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        data: &mut [u8],
        patience: &Patience,
    ) -> Result<()> {
        let size = call.0.dtype.size();
        let stripes = if data.len() >= self.choice.row.stripes_min { hierarchy.most_stripes() } else { 1 };
        self.reduce_on_host(call, data, stripes, patience)?;
        if let Some((index, leaders)) = hierarchy.owned(stripes) {
            let stripe = Domain::chunk(data.len(), stripes, index);
            let (start, elements) = (stripe.start / size, stripe.len() / size);
            let row = &self.choice.row;
            let plan = collective::all_reduce(row, leaders.host, leaders.hosts, call.0.dtype, elements);
            self.across(&leaders, call, plan, (data, start), patience)?;
        }
        self.within(call, data, patience, |domain, data| domain.all_gather(call, data, stripes, patience))
    }

    /// As an all-reduce in one stripe; the first rank of the root's host gets all of it and passes it to the root.
    fn reduce_by_hosts(
        &mut self,
        hierarchy: &Hierarchy,
        call: (Call, Sequence),
        root: Rank,
        data: &mut [u8],
        patience: &Patience,
    ) -> Result<()> {
        self.reduce_on_host(call, data, 1, patience)?;
        let home = hierarchy.host_of(root);
        let Some(leaders) = hierarchy.owned(1).map(|(_, leaders)| leaders) else {
            return self.hand_out_at_home(hierarchy, home, call, data, patience);
        };
        let elements = data.len() / call.0.dtype.size();
        let row = &self.choice.row;
        let plan = collective::reduce(row, leaders.host, leaders.hosts, home, call.0.dtype, elements);
        self.across(&leaders, call, plan, (data, 0), patience)?;
        self.hand_out_at_home(hierarchy, home, call, data, patience)
    }

    fn hand_out_at_home(
        &mut self,
        hierarchy: &Hierarchy,
        home: Rank,
        call: (Call, Sequence),
        data: &mut [u8],
        patience: &Patience,
    ) -> Result<()> {
        if hierarchy.host_of(self.rank) != home {
            return Ok(());
        }
        self.within(call, data, patience, |domain, data| domain.all_gather(call, data, 1, patience))
    }

    /// Combines the elements of this host's ranks. An average is divided here by the number of all ranks of all hosts,
    /// so that no sum of half-precision numbers overflows between hosts.
    fn reduce_on_host(
        &mut self,
        call: (Call, Sequence),
        data: &mut [u8],
        owners: usize,
        patience: &Patience,
    ) -> Result<()> {
        let Call { dtype, reduce, .. } = call.0;
        let op = reduce.unwrap_or(ReduceOp::Sum);
        let fold = if op == ReduceOp::Avg {
            Fold::of_all(dtype, op, self.world.get())
        } else {
            Fold { dtype, op: sums(op), divide_by: None }
        };
        if self.domain.is_none() {
            return fold.apply(&mut [data]);
        }
        self.within(call, data, patience, |domain, data| {
            domain.reduce_scatter(call, data, owners, fold, patience)
        })
    }

    /// Called before a collective goes from rank to rank. Otherwise, if one rank waits for its host's ranks and another
    /// for a message, neither would see the other's call.
    pub(super) fn agree_on_host(
        &mut self,
        call: Call,
        sequence: Sequence,
        patience: &Patience,
    ) -> Result<()> {
        self.within((call, sequence), &mut [], patience, |domain, _| domain.agree(call, sequence, patience))
    }

    /// This rank's work within its host, if there are other ranks.
    fn within(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        patience: &Patience,
        work: impl FnOnce(&mut Domain, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.check_health()?;
        let Some(domain) = &mut self.domain else { return Ok(()) };
        // The deadline for all parts of the call counts from the first wait.
        patience.deadline();
        work(domain, data).map_err(|error| self.health.fail_operation(error, call, sequence))
    }

    /// Executes `plan` between the hosts, on elements from `start` on, if this rank is a leader.
    fn across(
        &mut self,
        leaders: &Leaders,
        (call, sequence): (Call, Sequence),
        plan: Plan,
        (data, start): (&mut [u8], usize),
        patience: &Patience,
    ) -> Result<()> {
        if !leaders.has(self.rank) {
            return Ok(());
        }
        let plan = leaders.translate(plan, start);
        let op = call.reduce.map(sums);
        self.execute_as(op, call, sequence, &plan, Space::One(data), patience.deadline())
    }
}

/// The operation of an average before it is divided.
fn sums(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::Avg { ReduceOp::Sum } else { op }
}
