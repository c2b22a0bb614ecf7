//! All ranks are threads of this process: `cargo test -p phalanx-horovod --test it -- faults::` runs one file.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod faults;
mod operations;
mod others;

use phalanx::testing::{Fabric, run};
use phalanx_horovod::{Horovod, Options};

/// Runs `rank` on each rank of a world of `world`. No rank leaves before all are done.
fn ranks<R: Send>(
    world: u32,
    fabric: Fabric,
    options: &Options,
    rank: impl Fn(&Horovod) -> R + Sync,
) -> Vec<R> {
    run(world, fabric, |group| {
        let hvd = Horovod::new(&group, options.clone()).unwrap();
        let result = rank(&hvd);
        hvd.barrier().unwrap();
        result
    })
}
