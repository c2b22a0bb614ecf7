//! A store of the program's own, in which its ranks meet.

use std::net::Ipv4Addr;

use phalanx_proto::rendezvous::Identity;

use super::arrival::arrive;
use super::{Held, KeepAlive, RankConfig, Rendezvous, start};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::SharedStore;

/// Whose keys a store may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Starts {
    /// Those of this start.
    One,
    /// Also those of earlier starts of the same ranks.
    Several,
}

/// Meets in `store`.
pub(super) fn join(
    store: &SharedStore,
    config: &RankConfig,
    starts: Starts,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    if config.world_size.get() == 1 {
        return Ok(config.alone());
    }
    let agreed = match starts {
        Starts::One => None,
        Starts::Several => Some(start::agree(store, config, deadline)?),
    };
    let config = agreed.as_ref().unwrap_or(config);
    let arrived = arrive(store, None, config, me, deadline)?.met()?;
    config.met(arrived, Ipv4Addr::LOCALHOST.into(), KeepAlive(Held::Nothing), deadline)
}
