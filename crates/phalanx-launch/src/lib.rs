//! Starts the workers of a job on this machine, watches them, starts them again, and leaves none behind.
//!
//! [`Job`] says what to start. [`Job::run`] returns when every worker and every process that they have started is gone,
//! in all cases. `phalanx run` and [`spawn`](crate::spawn()) both use it.
//!
//! - Each worker leads a process group of its own, without a controlling terminal. Its standard input is empty (`/dev/null`).
//! - Each job has a [key](phalanx_core::JobKey) with which its processes authenticate each other; workers find it in the file
//!   that `PHALANX_JOB_KEY_FILE` names.
//! - The first failure ends the job, or starts all workers [again](Job::max_restarts). The others have half a second to
//!   notice it themselves and to report it; then each group gets SIGTERM and, after [a grace period](Job::grace),
//!   SIGKILL.
//! - A worker that a signal has stopped (SIGSTOP) does not hold up the job's end. Five seconds after another worker has ended
//!   well, it is [killed](Exit::Frozen), and this is its failure. A worker that is only slow is waited for without limit.
//! - In an [elastic](Job::min_workers) job a failure ends only the worker that fails, and a replacement may be started.
//! - If a worker has noted in its `PHALANX_BLAME_FILE` that another rank failed, and that rank has failed too, that rank's
//!   failure counts as the first.
//! - SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the groups, with the same grace period; a second SIGINT kills
//!   at once. If this process is stuck, on a disk from which a worker is started for instance, and has handled no such signal for 5 s, another
//!   SIGINT or SIGTERM ends it, and its end kills the workers. Ctrl-Z stops the workers too, where a shell can continue them. SIGUSR1 and SIGUSR2, with which schedulers announce the end of a time
//!   limit, are passed on and do not end the job.
//! - If this process is killed, workers and grandchildren are killed as well.
//!
//! All processes that a worker has started end with it, also in other process groups or sessions: daemons, and what
//! `setsid` or a shell with job control starts. They are found by a tag in their environment, PHALANX_JOB_TAG, or by
//! their parents. Some processes cannot be found: those of another user, and those whose environment was cleared or
//! overwritten and whose parents have ended. The second kind is found if the launcher is a [subreaper](Job::subreaper),
//! as `phalanx run` is, and is not killed itself. Processes that systemd, cron or a container's daemon starts for a
//! worker cannot be found either.
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

#![forbid(unsafe_code)]

mod agent;
mod attempts;
mod cluster;
mod descriptors;
mod disk;
mod error_file;
mod event;
mod exit;
mod failures;
mod job;
mod job_processes;
mod key_file;
mod lines;
mod logs;
mod names;
mod nodes;
mod own_address;
mod placement;
mod program;
mod reap;
mod refusals;
mod remote;
mod replacements;
mod shortage;
mod spawn;
mod supervisor;
mod worker;

pub use cluster::{Cluster, Hosting};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use error_file::fuzz as fuzz_error_file;
pub use event::{Event, Observer, Stream};
pub use exit::{Exit, Failure, NodeFailure, Outcome, Report, Signal};
pub use job::{Job, Output};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use lines::fuzz as fuzz_lines;
pub use logs::{Logs, Selection, Streams};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use nodes::fuzz_nodes;
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
use phalanx_core::fuzz_input;
pub use phalanx_core::worker_error::write as write_error_file;
use phalanx_core::{
    credentials, deadline, elastic, env, frozen, health, host, interfaces, key, log, notice, poll, proc_stat,
    random, store, tls, transport, worker_error,
};
use phalanx_proto::launch::{host_manager, membership, policy, slot};
use phalanx_proto::{error, hash, rank, world_size};
pub use remote::{
    ElasticHosts, Host, HostDiscovery, HostList, RemoteJob, RemoteNode, RemoteShell, SlurmAllocation,
};
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
pub use remote::{fuzz as fuzz_remote, fuzz_hosts};
pub use spawn::spawn;

/// The program on this crate's page must run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
