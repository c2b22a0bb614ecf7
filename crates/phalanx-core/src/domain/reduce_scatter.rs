//! The parts within a host of an `all_reduce` of several hosts: a reduce_scatter to some owners before the exchange
//! between hosts, and an all_gather from these owners after it.

use std::ops::Range;

use phalanx_sys::control_block::{Division, Protocol, SharedOperation, Unregistered, share};

use super::{Domain, Job, LINE, copied, direct, say_that_copies_are_refused, staged};
use crate::collective::kernel::Fold;
use crate::deadline::Timeout;
use crate::error::{Error, Result};
use crate::rank::Sequence;
use crate::wire::frame::Call;

impl Domain {
    /// Checks that all members make the same call, before it runs between ranks over the transport.
    pub(crate) fn agree(&mut self, call: Call, sequence: Sequence, timeout: &Timeout) -> Result<()> {
        let call = self.peers.call(&call, sequence, timeout);
        let slots = self
            .control_block
            .small(call.encoded, &[])
            .slots(&mut |missing, difference| call.watch(missing, difference))?;
        call.check(|index| slots.call(index))
    }

    /// The chunk of `bytes` that the member with this `index` owns, if the first `owners` members own all of them.
    pub(crate) fn chunk(bytes: usize, owners: usize, index: usize) -> Range<usize> {
        share(bytes, LINE, owners, index)
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
        timeout: &Timeout,
    ) -> Result<()> {
        let bytes = data.len();
        let divided = (owners, false);
        self.on_data((call, sequence), data, divided, timeout, |operation, job| match operation.protocol() {
            Protocol::Direct => operation.combine(|chunks| fold.apply(chunks)),
            Protocol::Small | Protocol::Copied | Protocol::Staged => {
                staged::reduce(operation, job, fold, |index| Self::chunk(bytes, owners, index))
            }
        })
    }

    /// Copies the chunk of each of the first `owners` members to all others.
    pub(crate) fn all_gather(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        owners: usize,
        timeout: &Timeout,
    ) -> Result<()> {
        let bytes = data.len();
        let divided = (owners, copied::is_sooner_for(Self::chunk(bytes, owners, 0).len()));
        self.on_data((call, sequence), data, divided, timeout, |operation, job| match operation.protocol() {
            Protocol::Direct => {
                operation.combine(|chunks| direct::spread(chunks, job.me));
                Ok(())
            }
            Protocol::Copied => copied::collect(operation, job, |index| Self::chunk(bytes, owners, index)),
            Protocol::Small | Protocol::Staged => {
                staged::collect(operation, job, |index| Self::chunk(bytes, owners, index))
            }
        })
    }

    /// A call on `data`, of which each of the first `owners` members has a [`chunk`](Self::chunk). What is only copied may be `offered`.
    pub(super) fn on_data(
        &mut self,
        (call, sequence): (Call, Sequence),
        data: &mut [u8],
        (owners, offered): (usize, bool),
        timeout: &Timeout,
        work: impl Fn(&mut SharedOperation<'_, '_, Error>, Job<'_>) -> Result<()>,
    ) -> Result<()> {
        self.take_windows()?;
        let may_copy = offered && self.may_copy();
        let job = Job { call: &call, me: self.control_block.me(), ranks: self.peers.members.len(), root: 0 };
        let call = self.peers.call(&call, sequence, timeout);
        let mut watch = |missing, difference| call.watch(missing, difference);
        let division = Division { owners, unit: LINE, combines_windows: false };
        let work = |operation: &mut SharedOperation<'_, '_, Error>| {
            call.check(|index| operation.call(index))?;
            work(operation, job)
        };
        if may_copy {
            let outcome =
                self.control_block.offered_in_place(call.encoded, data, division, &mut watch, work)?;
            if outcome.is_some() {
                return Ok(());
            }
            say_that_copies_are_refused();
        }
        self.control_block.in_place(call.encoded, data, (division, Unregistered::Later), &mut watch, work)
    }
}
