//! The parts within a host of an `all_reduce` of several hosts: a reduce_scatter to some owners before the exchange
//! between hosts, and an all_gather from these owners after it.

use std::ops::Range;

use phalanx_sys::control_block::{Protocol, SharedOperation, Unregistered, share};

use super::{Domain, Job, LINE, compare, direct, encoded_call, staged, watch};
use crate::collective::kernel::Fold;
use crate::deadline::Patience;
use crate::error::{Error, Result};
use crate::rank::Sequence;
use crate::wire::frame::Call;

impl Domain {
    /// Checks that all members make the same call, before it runs between ranks over the transport.
    pub(crate) fn agree(&mut self, call: Call, sequence: Sequence, patience: &Patience) -> Result<()> {
        let (members, rank, health, encoded) =
            (&*self.members, self.rank, &*self.health, encoded_call::encode(&call));
        let slots = self
            .control_block
            .small(encoded, &[], &mut |missing| watch(health, members[missing], patience))?;
        (0..members.len())
            .try_for_each(|index| compare(rank, call, sequence, members[index], &encoded, slots.call(index)))
    }

    /// The chunk of `bytes` that the member at index `place` owns, if the first `owners` members own all of them.
    pub(crate) fn chunk(bytes: usize, owners: usize, place: usize) -> Range<usize> {
        share(bytes, LINE, owners, place)
    }

    /// Combines the members' `data`. Afterwards each of the first `owners` members has the result in its
    /// [`chunk`](Self::chunk), and the rest of `data` is unspecified.
    ///
    /// All members make the same call, with the same owners. The caller passes `fold`, because it knows what follows:
    /// an average is divided once, where all ranks' elements have been added.
    pub(crate) fn reduce_scatter(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        owners: usize,
        fold: Fold,
        patience: &Patience,
    ) -> Result<()> {
        let bytes = data.len();
        self.on_data((call, sequence), data, patience, |operation, job| match operation.protocol() {
            Protocol::Direct => operation.combine(owners, LINE, |chunks| fold.apply(chunks)),
            Protocol::Small | Protocol::Staged => {
                staged::reduce(operation, job, fold, |place| Self::chunk(bytes, owners, place))
            }
        })
    }

    /// Copies the chunk of each of the first `owners` members to all others.
    pub(crate) fn all_gather(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        owners: usize,
        patience: &Patience,
    ) -> Result<()> {
        let bytes = data.len();
        self.on_data((call, sequence), data, patience, |operation, job| match operation.protocol() {
            Protocol::Direct => {
                operation.combine(owners, LINE, |chunks| direct::spread(chunks, job.me));
                Ok(())
            }
            Protocol::Small | Protocol::Staged => {
                staged::collect(operation, job, |place| Self::chunk(bytes, owners, place))
            }
        })
    }

    pub(super) fn on_data(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        patience: &Patience,
        work: impl FnOnce(&mut SharedOperation<'_, '_, Error>, Job) -> Result<()>,
    ) -> Result<()> {
        let (members, rank, health, encoded) =
            (&*self.members, self.rank, &*self.health, encoded_call::encode(&call));
        let job = Job { call, me: self.control_block.me(), ranks: members.len(), root: 0 };
        let mut watch = |missing: usize| watch(health, members[missing], patience);
        self.control_block.in_place(encoded, data, Unregistered::Later, &mut watch, |operation| {
            (0..job.ranks).try_for_each(|index| {
                compare(rank, call, sequence, members[index], &encoded, operation.call(index))
            })?;
            work(operation, job)
        })
    }
}
