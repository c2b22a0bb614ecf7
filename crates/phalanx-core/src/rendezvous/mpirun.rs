//! At the host on which Open MPI's mpirun runs. Its variables name that host to every rank, and name rank 0's to none. So rank 0 looks
//! whether it is there, before anything is waited for; if it is not, it ends, and says what to give.

use super::RankConfig;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host;
use crate::interfaces::{is_every_hosts, is_own};
use crate::store::{addresses_to_serve, host_port};

/// An error if this process is rank 0, and cannot be reached at `address`.
pub(super) fn check(address: &str, config: &RankConfig, deadline: Deadline) -> Result<()> {
    if !config.rank.is_main() {
        return Ok(());
    }
    let found = addresses_to_serve(&host_port(address, 0), deadline).map_err(|error| error.without_remedy());
    let here = host::name();
    let cause = match found {
        Err(error) if error.is_aborted() => return Err(error),
        Err(error) => format!("{} ({address}, where mpirun runs)", error.cause()),
        Ok(found) if !found.iter().any(|found| is_own(found.ip())) => {
            format!("mpirun runs on {address}, and rank 0 on {here}: nothing tells the other ranks so")
        }
        Ok(found) if found.iter().all(|found| is_every_hosts(found.ip())) => {
            format!(
                "{address} is the loopback on this host, where rank 0 is: other hosts cannot reach it there"
            )
        }
        Ok(_) => return Ok(()),
    };
    Err(Error::environment(cause).in_operation("rendezvous", None).with_remedy(format!(
        "give mpirun an address at which the other hosts reach {here}, and a free port there: mpirun -x MASTER_ADDR={here} -x \
         MASTER_PORT=29500 ..; or start mpirun on that host"
    )))
}
