//! `phalanx run`.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use phalanx::launch::{Job, Logs, Outcome, Report, Signal};
use phalanx::{Error, WorldSize};

use crate::cli::Run;
use crate::processes::Processes;
use crate::render::{Format, Renderer, wants_colour};
use crate::{json, report};

/// How long the output of a job that a signal has ended may take to be read. Who sent the signal will not wait long.
const AFTER_A_SIGNAL: Duration = Duration::from_secs(1);

/// Runs the job; what comes back is the command's exit code.
pub(crate) fn run(options: Run) -> ExitCode {
    let workers = match count(&options) {
        Ok(workers) => workers,
        Err(message) => return refuse(&message, 2),
    };
    let mut renderer = match Renderer::start(options.log_format) {
        Ok(renderer) => renderer,
        Err(error) => return refuse(&format!("cannot start a thread for the output: {error}"), 1),
    };
    let format = options.log_format;
    let job = match job(options, workers) {
        Ok(job) => job,
        Err(message) => return refuse(&message, 2),
    };
    let report = match job.run(&mut renderer) {
        Ok(report) => report,
        Err(error) => return refuse(&error.to_string(), code_of(&error)),
    };
    let code = match &report.outcome {
        Outcome::Succeeded => 0,
        Outcome::Failed(failure) => failure.exit.code(),
        Outcome::Interrupted(signal) => 128 + signal.number(),
        // As if the signal that ends the writers of a pipe without readers had ended us.
        _ if renderer.reader_is_gone() => 128 + Signal::PIPE.number(),
        _ => 1,
    };
    let patience = match &report.outcome {
        Outcome::Interrupted(_) => AFTER_A_SIGNAL,
        // No worker is left, and signals end this process again.
        _ => Duration::MAX,
    };
    let last_words = match format {
        Format::Text => last_words(&report),
        Format::Json => json::ended(&report, code),
    };
    renderer.finish(last_words, patience);
    exit_code(code)
}

fn count(options: &Run) -> Result<WorldSize, String> {
    match options.nproc_per_node {
        Some(processes) => processes.count(),
        None => Processes::from_other_variable()?.map_or(Ok(WorldSize::ONE), Processes::count),
    }
}

fn job(options: Run, workers: WorldSize) -> Result<Job, String> {
    let cluster = options.nodes.cluster()?;
    if options.standalone && cluster.is_some() {
        return Err("--standalone is one machine, --nnodes several".to_owned());
    }
    let (address, port) = options.nodes.endpoint()?;
    let mut program = options.program.into_iter();
    let job = Job::new(program.next().unwrap_or_default(), workers)
        .arguments(program)
        .role(options.role)
        .grace(options.grace_period)
        .max_restarts(options.max_restarts)
        .master_port(port.unwrap_or(0));
    let job = address.into_iter().fold(job, Job::master_addr);
    let job = cluster.into_iter().fold(job, Job::cluster);
    let job = options.rdzv_id.into_iter().fold(job, Job::run_id);
    let job = options.elastic.apply(job)?;
    // As torchrun does, what is to be kept is kept somewhere, also if nobody says where.
    let wanted = !options.redirects.is_empty() || !options.tee.is_empty();
    let folder = options.log_dir.or_else(|| wanted.then(std::env::temp_dir));
    let logs = folder.map(|folder| Logs::new(folder).redirects(options.redirects).tee(options.tee));
    Ok(logs.into_iter().fold(job, Job::logs))
}

fn last_words(report: &Report) -> Vec<u8> {
    match &report.outcome {
        Outcome::Failed(failure) => report::failure(failure, report, wants_colour(&io::stderr())),
        Outcome::NodeFailed(failure) => report::node_failure(failure, wants_colour(&io::stderr())),
        Outcome::Interrupted(signal) => format!("phalanx: ended by {signal}\n").into_bytes(),
        _ => Vec::new(),
    }
}

/// The code with which a shell reports a program that cannot be started. Only then is a rank named.
fn code_of(error: &Error) -> i32 {
    match (error.peer(), error.io_kind()) {
        (Some(_), Some(ErrorKind::NotFound)) => 127,
        (Some(_), Some(ErrorKind::PermissionDenied)) => 126,
        _ if error.is_invalid_argument() => 2,
        _ => 1,
    }
}

fn refuse(message: &str, code: i32) -> ExitCode {
    let _ = writeln!(io::stderr(), "phalanx: {message}");
    exit_code(code)
}

/// A code that the system cannot pass on is a failure all the same.
fn exit_code(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}
