//! Starts the workers of a job on this machine, watches them, starts them again, and leaves none behind.
//!
//! [`Job`] says what to start; [`Job::run`] returns when every worker and everything that they have started is gone,
//! whatever happened. `phalanx run` and [`spawn`](crate::spawn()) are two faces of it.
//!
//! - Each worker leads a process group of its own, with standard input closed.
//! - Each job has a [key](crate::JobKey) by which its processes recognise each other; workers find it in the file that
//!   `PHALANX_JOB_KEY_FILE` names.
//! - The first failure ends the job, or starts all workers [again](Job::max_restarts). The others get half a second to notice it themselves and say what they saw; then
//!   SIGTERM to each group, [a grace period](Job::grace), and SIGKILL.
//! - A worker that a signal has stopped (SIGSTOP) does not hold up the job's end: five seconds after another has ended well,
//!   it is [killed](Exit::Frozen), which is its failure. One that is slow is waited for, however long it takes.
//! - In an [elastic](Job::min_workers) job a failure ends only the worker that fails; another may take its place.
//! - A worker whose error file blames another rank is believed if that one has failed too: that is then the first
//!   failure.
//! - SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the groups, with the same grace period; a further SIGINT
//!   kills at once. Ctrl-Z stops the workers too. SIGUSR1 and SIGUSR2, with which schedulers announce the end of a time
//!   limit, are passed on and end nothing here.
//! - If this process is killed, workers and grandchildren are killed as well.
//!
//! What a worker has started is ended with it, also in a process group or session of its own: a daemon, what `setsid` or a
//! shell with job control starts. It is known by a tag in its environment, PHALANX_JOB_TAG, or by its parents. Out of reach is
//! what has neither: a process of another user; one whose environment was cleared or written over, and whose parents have
//! ended, unless the launcher is a [subreaper](Job::subreaper), as `phalanx run` is, and not killed itself. What systemd, cron
//! or a container's daemon starts for a worker is theirs.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//! use phalanx::launch::{Event, Job, Outcome};
//!
//! let report = Job::new("./train", phalanx::WorldSize::new(4)?).run(&mut |event: Event<'_>| {
//!     if let Event::Exited { rank, exit, .. } = event {
//!         println!("rank {rank}: {exit}");
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! assert!(matches!(report.outcome, Outcome::Succeeded));
//! # Ok::<(), phalanx::Error>(())
//! ```

mod agent;
mod attempts;
mod cluster;
mod error_file;
mod event;
mod exit;
mod job;
mod lent_key;
mod lines;
mod logs;
mod members;
mod nodes;
mod placement;
mod policy;
mod refusals;
mod remote;
mod replacements;
mod slot;
mod supervisor;
mod worker;

pub use crate::worker_error::write as write_error_file;
pub use cluster::{Cluster, Hosting};
#[cfg(any(test, fuzzing))]
pub use error_file::fuzz as fuzz_error_file;
pub use event::{Event, Observer, Stream};
pub use exit::{Exit, Failure, NodeFailure, Outcome, Report, Signal};
pub use job::{Job, Output};
#[cfg(any(test, fuzzing))]
pub use lines::fuzz as fuzz_lines;
pub use logs::{Logs, Selection, Streams};
#[cfg(any(test, fuzzing))]
pub use nodes::fuzz_nodes;
pub use remote::{ElasticHosts, Host, HostDiscovery, HostList, RemoteJob, RemoteNode, RemoteShell};
#[cfg(any(test, fuzzing))]
pub use remote::{fuzz as fuzz_remote, fuzz_hosts};
