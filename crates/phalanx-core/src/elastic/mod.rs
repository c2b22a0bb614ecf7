//! Training that survives the loss of workers.
//!
//! When a worker of a job without `--min-np` dies, the launcher ends the others and starts all again. In an elastic job
//! the others keep their processes and their memory. They form a new group: a smaller one, or one of the same size once
//! a replacement has come. Each goes back to the last commit, which it holds in memory; new workers get the commit from
//! the others; and the loop continues.
//!
//! ```no_run
//! use phalanx::elastic::{self, Context, Plain};
//! use phalanx::{ProcessGroup, ReduceOp};
//!
//! type Training = Plain<(u64, Vec<f32>)>; // the step, and the weights
//!
//! fn train(context: &mut Context<'_, Training>, group: &ProcessGroup) -> phalanx::Result<()> {
//!     while context.state.0.0 < 1000 {
//!         let (step, weights) = &mut context.state.0;
//!         let mut gradients = vec![0.1; weights.len()]; // backward
//!         group.all_reduce(&mut gradients, ReduceOp::Avg)?;
//!         weights.iter_mut().zip(&gradients).for_each(|(weight, gradient)| *weight -= 0.01 * gradient);
//!         *step += 1;
//!         context.commit()?;
//!     }
//!     Ok(())
//! }
//!
//! let mut state = Plain((0, vec![0.0; 1 << 20]));
//! elastic::run(&mut state, train)?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! Start it with `phalanx run --nproc-per-node 4 --min-np 2 --max-restarts 10 -- ./train`. Started in any other way,
//! the world does not change and every failure is an error; without a launcher it is a world of one.
//!
//! Make everything that is bound to a group, such as a [`Reducer`](crate::reducer::Reducer) or a sampler that knows its
//! rank, inside the loop: rank and world size may differ each time the loop is called. Survivors get the first ranks,
//! in their old order, so rank 0 always has the state.
//!
//! With [`Context::step`] the step that a death cuts off is in most cases not lost: the survivors replay it. The guide
//! lists the exceptions.
//!
//! See the guide `docs/guide/elastic.md`.

mod context;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
mod fuzz;
mod options;
mod parts;
mod publisher;
mod round_store;
mod rounds;
mod run;
mod session;
mod snapshot;
mod state;
mod state_sync;
mod step;

pub use context::Context;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use fuzz::fuzz as fuzz_workers;
pub use options::{Drift, Options};
#[doc(hidden)]
pub use options::{RESET_LIMIT, WORKERS, is_elastic, job_name};
pub use parts::Parts;
use phalanx_proto::elastic::{commits, members, retry, waiting, worlds};
#[doc(hidden)]
pub use publisher::Publisher;
pub use run::{run, run_with};
pub use state::{Plain, State};
pub use step::Step;
