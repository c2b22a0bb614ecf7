//! A program starts its own workers.

use std::fmt::Display;
use std::io::Write;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{getpid, getppid, kill_process};

use crate::env::{LaunchEnv, unknown_launcher};
use crate::error::{Error, Kind, Result, panic_message};
use crate::notice::warn;
use crate::worker_error;
use crate::world_size::WorldSize;
use crate::{Event, Job, Outcome, Output};

/// Tells a copy of the program which process and which call started it: `parent's pid:call:location`.
const VARIABLE: &str = "PHALANX_SPAWN";

/// The number of the next call of [`spawn`] in this process. A copy counts its own in the same way.
static CALLS: AtomicU32 = AtomicU32::new(1);

/// Starts `nprocs` copies of this program. In each of them this same call runs `worker` and ends the process.
///
/// In the program itself it returns when all workers have ended: `Ok` if every `worker` returned `Ok`; otherwise an
/// error that says which rank failed first and how, with [`is_worker_failure`](Error::is_worker_failure) and
/// [`peer`](Error::peer). The first failure ends the other workers.
///
/// ```no_run
/// fn main() -> phalanx::Result<()> {
///     phalanx::spawn(2, train)
/// }
///
/// fn train() -> phalanx::Result<()> {
///     // Here RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set: join the group and train.
///     Ok(())
/// }
/// ```
///
/// # What a worker is
///
/// - It has this program's arguments, environment, working directory, standard output and standard error; its standard
///   input is empty. It leads a process group of its own, without a controlling terminal.
/// - It runs `main` from the start: **code before this call runs in every worker as well**, and code after
///   it runs in none. Keep the code before the call short and the same in each process. Earlier calls of `spawn`
///   return `Ok` in a copy, and do nothing.
/// - If `worker` returns `Ok`, but has left a group whose ranks had made different calls, as
///   [`ProcessGroup::leave`](phalanx_core::ProcessGroup::leave) finds, the exit code is 1 as well.
/// - An error of `worker` is printed as `rank 1: ..`, and the exit code is 1. A panic ends it with code 101; the error
///   of `spawn` then has the panic's message and source line.
///
/// # Under a launcher
///
/// If `phalanx run`, torchrun or another launcher has started this program as one of its ranks (`RANK` is set), nothing
/// is started: `worker` runs here, as that rank, and `nprocs` is ignored. So one program can be started in every way. The process ends with
/// `worker`, as a copy does: **no process runs the code after this call**.
/// If the launcher is not known, and a variable looks like a rank, a warning says that workers are started all the same.
///
/// # When it ends otherwise
///
/// - If a worker is killed, the error names the signal. The others get SIGTERM, and after 30 s SIGKILL. Processes that
///   workers have started are ended too, also after success, and also in sessions of their own, unless they have
///   cleared their environment and lost their parents.
/// - Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end the workers first and then this program, as that signal would have. If the
///   program handles the signal itself, its handler is called. If it ignores the signal, as programs in the background of a
///   shell ignore Ctrl-C, nothing is called. In both cases `spawn` returns an error with [`is_aborted`](Error::is_aborted).
///   SIGUSR1 and SIGUSR2 are passed on and do not end this process.
/// - If this process is killed, so are its workers and all processes that they have started.
///
/// # Errors
///
/// Besides a worker's failure: `nprocs` is 0; a worker cannot be started; the launcher's variables are malformed; this
/// process is already inside `worker`; two threads call `spawn` at the same time.
#[doc(alias("mp.spawn", "torch.multiprocessing"))]
#[track_caller]
pub fn spawn<E: Display>(nprocs: u32, worker: impl FnOnce() -> Result<(), E>) -> Result<()> {
    let call =
        Call { number: CALLS.fetch_add(1, Ordering::Relaxed), location: Location::caller().to_string() };
    match Call::of_this_copy() {
        // The first call does not return.
        None if started_by_launcher()? => match call.number {
            1 => run_worker(worker),
            _ => Err(nested()),
        },
        None => call.start_workers(nprocs),
        Some(meant) if call.number < meant.number => Ok(()),
        Some(meant) if call == meant => run_worker(worker),
        Some(meant) if call.number == meant.number => {
            let cause = format!(
                "this worker was started by spawn at {} but came to {}",
                meant.location, call.location
            );
            Err(Error::invalid_argument(cause).with_remedy(
                "the way to spawn must be the same in every copy of the program, and spawn must not be called in two \
                 threads at once",
            ))
        }
        Some(_) => Err(nested()),
    }
}

fn nested() -> Error {
    Error::invalid_argument("spawn was called inside a worker of spawn")
        .with_remedy("call spawn in main, and not in the function that the workers run")
}

/// One call of [`spawn`], the same in the program and its copies.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    number: u32,
    location: String,
}

impl Call {
    /// The call for which this process was started, if it is a copy. None for a program that a copy has started.
    fn of_this_copy() -> Option<Self> {
        let value = std::env::var(VARIABLE).ok()?;
        let mut parts = value.splitn(3, ':');
        let parent: i32 = parts.next()?.parse().ok()?;
        let number = parts.next()?.parse().ok()?;
        let location = parts.next()?.to_owned();
        (getppid()?.as_raw_nonzero().get() == parent).then_some(Self { number, location })
    }

    fn start_workers(&self, nprocs: u32) -> Result<()> {
        let world = WorldSize::new(nprocs)?;
        if self.number == 1
            && let Some(rank) = unknown_launcher()
        {
            warn(format!(
                "{rank} looks like a rank, but its launcher is not known: this process starts {nprocs} workers of its own, which are a world by \
                 themselves. If it is one of several, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; else unset that variable"
            ));
        }
        let mut arguments = std::env::args_os();
        let name = arguments.next();
        let program = this_program()?;
        let job = Job::new(&program, world)
            .name(name.unwrap_or_else(|| program.into()))
            .arguments(arguments)
            .variable(VARIABLE, format!("{}:{}:{}", process::id(), self.number, self.location))
            .output(Output::Inherit)
            .tls_from_env()?;
        match job.run(&mut |_: Event<'_>| ControlFlow::Continue(()))?.outcome {
            Outcome::Succeeded => Ok(()),
            Outcome::Failed(failure) => {
                Err(Error::new(Kind::WorkerFailed, failure.to_string()).with_peer(failure.rank))
            }
            Outcome::NodeFailed(failure) => Err(Error::new(Kind::WorkerFailed, failure.to_string())),
            Outcome::Interrupted(signal) => {
                if let Some(signal) = rustix::process::Signal::from_named_raw(signal.number()) {
                    let _ = kill_process(getpid(), signal);
                }
                Err(Error::aborted(format!("{signal} ended the workers")))
            }
            Outcome::Stopped => Err(Error::aborted("the workers were ended")),
        }
    }
}

/// Whether a launcher has started this process as one of its ranks.
fn started_by_launcher() -> Result<bool> {
    let Some(env) = LaunchEnv::from_process()? else { return Ok(false) };
    if std::env::var_os(VARIABLE).is_none() {
        return Ok(true);
    }
    let cause =
        format!("this process was started by a worker of spawn, whose RANK={} it has inherited", env.rank);
    Err(Error::environment(cause).with_remedy(format!(
        "start it without RANK and {VARIABLE}, so that it can start workers of its own"
    )))
}

/// The program to execute. If it was replaced on disk while it runs, the running version is started.
fn this_program() -> Result<PathBuf> {
    let path = std::env::current_exe().map_err(|error| Error::io("this program cannot be found", error))?;
    Ok(if path.exists() { path } else { "/proc/self/exe".into() })
}

fn run_worker<E: Display>(worker: impl FnOnce() -> Result<(), E>) -> ! {
    worker_error::report_panics();
    // After the panic nothing of this process is used except to end it.
    let code = match catch_unwind(AssertUnwindSafe(worker)) {
        Ok(Ok(())) => match worker_error::disagreement() {
            None => 0,
            // It has been written to standard error.
            Some(message) => {
                worker_error::write(&message);
                1
            }
        },
        Ok(Err(error)) => {
            let message = format!("{error:#}");
            let speaker = format!("rank {}", std::env::var("RANK").unwrap_or_default());
            let line = if message.starts_with(&speaker) {
                format!("{message}\n")
            } else {
                format!("{speaker}: {message}\n")
            };
            // In one write, because other ranks write there too. Without a standard error there is still the error
            // file.
            let _ = std::io::stderr().write_all(line.as_bytes());
            worker_error::write(&message);
            1
        }
        Err(payload) => {
            // The program's own panic hook may have replaced ours.
            let message = panic_message(&*payload);
            if !worker_error::has_reported(message) {
                worker_error::write(&format!("panicked: {message}"));
            }
            101
        }
    };
    process::exit(code)
}
