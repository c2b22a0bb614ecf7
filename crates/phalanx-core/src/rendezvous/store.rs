//! A store of the program's own, in which its ranks meet.

use std::net::Ipv4Addr;

use phalanx_proto::rendezvous::Identity;

use super::arrival::arrive;
use super::{Held, KeepAlive, RankConfig, Rendezvous};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::store::SharedStore;

/// Meets in `store`.
pub(super) fn join(
    store: &SharedStore,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    if config.world_size.get() == 1 {
        return Ok(config.alone());
    }
    let arrived = arrive(store, None, config, me, deadline)?.met()?;
    config.met(arrived, Ipv4Addr::LOCALHOST.into(), KeepAlive(Held::Nothing), deadline)
}
