//! The address that this host tells to others, where nothing has shown at which address they reach it.

use std::net::IpAddr;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::env;
use crate::error::Result;
use crate::host;
use crate::interfaces;
use crate::store::{host_port, resolve};

/// How long the look-up of the host's own name may take. It is of use only if it is quick.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// The address at which other hosts reach this one. Never the loopback, to which many hosts map their own name, unless this host has
/// no other address.
pub(super) fn own_address() -> Result<IpAddr> {
    let found = resolve(&host_port(&host::name(), 0), Deadline::after(LOOK_UP_TIMEOUT)).unwrap_or_default();
    interfaces::outward(env::interface(), found.into_iter().map(|address| address.ip()).collect())
}
