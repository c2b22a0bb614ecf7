//! `phalanx run`.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use phalanx::launch::{
    Cluster, ElasticHosts, Exit, Host, HostList, Job, Logs, Outcome, RemoteJob, RemoteShell, Report, Signal,
    write_error_file,
};
use phalanx::{Error, JobKey, WorldSize};
use rustix::io::Errno;
use rustix::process::{Signal as Raw, getpid, kill_process};

use crate::cli::Keygen;
use crate::processes::Processes;
use crate::render::{self, Format, Prefix, Renderer, wants_colour};
use crate::report::Look;
use crate::run_options::{Run, ranked, thread_note};
use crate::{json, launch, parse, report, slurm};

/// How long a reader may take to read the output of a job that a signal has ended. The sender of the signal will not
/// wait long.
const SIGNAL_GRACE: Duration = Duration::from_secs(1);

/// Runs the job, and returns the command's exit code.
pub(crate) fn run(options: Run) -> ExitCode {
    let given: Vec<OsString> = std::env::args_os().collect();
    let program = options.program.first().map(OsString::as_os_str).unwrap_or_default();
    let format = options.log_format;
    let refuse = |message: &str, code: i32| {
        let _ = io::stderr().write_all(&not_run(message, code, format));
        exit_code(code)
    };
    if let Err(message) = options.hosts.check_blanks(&given, program) {
        return refuse(&message, 2);
    }
    if let Err(message) = launch::check_has_program(&options.command_line()) {
        return refuse(&message, 2);
    }
    let (started, slurm) = match Started::new(&options) {
        Ok(started) => started,
        Err(message) => return refuse(&message, 2),
    };
    let most = match &started {
        Started::Here(workers) => workers.get(),
        Started::Hosts(hosts, _) => hosts.hosts().iter().map(Host::slots).max().unwrap_or(1),
    };
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let mut notes = options.notes();
    notes.extend(parse::unused_variables(|name| std::env::var_os(name)));
    if let Started::Here(_) = started {
        notes.extend(options.nodes.unused_alone(is_set));
        notes.extend(options.nodes.unused_beside_endpoint(is_set).filter(|_| !options.standalone));
        notes.extend(options.hosts.unused_here());
        notes.extend(options.absent(most));
        let other = phalanx::env::other_launcher();
        notes.extend(options.apart(other.or_else(|| ranked(|name| std::env::var(name).ok()))));
    }
    for note in slurm.into_iter().chain(notes).chain(thread_note(most, is_set)) {
        let _ = io::stderr().write_all(&render::note(&note, format));
    }
    let prefix = options.log_line_prefix_template.clone().filter(|template| !template.is_empty());
    let prefix = prefix.map(|template| Prefix::new(template, &options.role));
    let mut renderer = match Renderer::start(format, prefix) {
        Ok(renderer) => renderer,
        Err(error) => return refuse(&format!("cannot start a thread for the output: {error}"), 1),
    };
    let result = match started {
        Started::Here(workers) => match here(options, workers) {
            Ok(job) => job.run(&mut renderer),
            Err(message) => return refuse(&message, 2),
        },
        Started::Hosts(hosts, shell) => match across(&options, hosts, shell) {
            Ok(job) => job.run(&mut renderer),
            Err(message) => return refuse(&message, 2),
        },
    };
    match result {
        Ok(report) => conclude(&report, renderer, format),
        Err(error) => {
            write_error_file(&error.to_string());
            renderer.finish(Vec::new(), Duration::MAX);
            refuse(&error.to_string(), code_of(&error))
        }
    }
}

/// How this command starts the workers.
#[derive(Debug)]
pub(crate) enum Started {
    Here(WorldSize),
    Hosts(HostList, RemoteShell),
}

impl Started {
    /// How `options` say it, or the Slurm job that this command is in, which is then said too.
    fn new(options: &Run) -> Result<(Self, Option<String>), String> {
        match slurm::allocation(options)? {
            Some(allocation) => {
                let (started, note) = slurm::started(options, &allocation)?;
                if let Self::Here(_) = started {
                    options.elastic.needs_no_hosts()?;
                }
                Ok((started, note))
            }
            None => Self::without_slurm(options).map(|started| (started, None)),
        }
    }

    fn without_slurm(options: &Run) -> Result<Self, String> {
        // In an elastic job workers may start on any host with free slots.
        let hosts = match options.elastic.min_np {
            Some(_) if options.elastic.host_discovery_script.is_some() => Some(HostList::default()),
            Some(_) => options.hosts.named()?,
            None => options.hosts.placed()?,
        };
        if let Some(hosts) = hosts {
            return Ok(Self::Hosts(hosts, options.hosts.shell()));
        }
        options.elastic.needs_no_hosts()?;
        Ok(Self::Here(match (options.hosts.here()?, options.nproc_per_node) {
            (Some(workers), _) => workers,
            (None, Some(processes)) => processes.count()?,
            (None, None) => Processes::from_other_variable()?.map_or(Ok(WorldSize::ONE), Processes::count)?,
        }))
    }
}

/// The final report, and the exit code.
fn conclude(report: &Report, renderer: Renderer, format: Format) -> ExitCode {
    let code = match &report.outcome {
        Outcome::Succeeded => 0,
        Outcome::Failed(failure) => failure.exit.code(),
        Outcome::Interrupted(signal) => Exit::Signal(*signal).code(),
        // As if SIGPIPE, which ends the writers of a pipe without readers, had ended this command.
        _ if renderer.reader_is_gone() => 128 + Signal::PIPE.number(),
        _ => 1,
    };
    let timeout = match &report.outcome {
        Outcome::Interrupted(_) => SIGNAL_GRACE,
        // No worker is left, and signals end this process again.
        _ => Duration::MAX,
    };
    // As torchrun does: a service that keeps the errors of jobs may read it there, or the launcher of which this command is a worker.
    match &report.outcome {
        Outcome::Failed(failure) => write_error_file(&failure.to_string()),
        Outcome::NodeFailed(failure) => write_error_file(&failure.to_string()),
        _ => {}
    }
    let summary = match format {
        Format::Text if renderer.reader_is_gone() && matches!(report.outcome, Outcome::Stopped) => {
            b"phalanx: what read standard output has closed it, so the workers were ended\n".to_vec()
        }
        Format::Text => summary(report),
        Format::Json => json::ended(report, code),
    };
    renderer.finish(summary, timeout);
    if matches!(report.outcome, Outcome::Interrupted(Signal::INT)) {
        // A shell ends its script with this command only if Ctrl-C has ended that, and else goes on. Where the signal is ignored, the code
        // says it.
        let _ = kill_process(getpid(), Raw::INT);
    }
    exit_code(code)
}

/// The job on `hosts`, whose launchers get this command's own command line.
fn across(options: &Run, hosts: HostList, shell: RemoteShell) -> Result<RemoteJob, String> {
    refuse_open_tls(options)?;
    let launcher =
        std::env::current_exe().map_err(|error| format!("cannot find this command's own file: {error}"))?;
    let job = RemoteJob::new(hosts, launcher, std::env::args_os())
        .shell(shell)
        .master_port(options.nodes.master_port.unwrap_or(0))
        .start_timeout(options.hosts.start_timeout)
        .grace(options.grace_period)
        .open_store(options.open_store);
    let job = key(options)?.into_iter().fold(job, RemoteJob::key);
    let job = options.nodes.bind.into_iter().fold(job, RemoteJob::bind);
    let elastic = options.elastic.hosts(options.hosts.num_proc, options.max_restarts)?;
    let elastic = elastic.map(|elastic| options.rdzv_id.iter().fold(elastic, ElasticHosts::run_id));
    // Only then does this command serve a store itself.
    let job = if elastic.is_some() { options.tls.apply(job, RemoteJob::tls)? } else { job };
    let job = elastic.into_iter().fold(job, RemoteJob::elastic);
    Ok(options.nodes.master_addr.iter().fold(job, RemoteJob::master_addr))
}

fn refuse_open_tls(options: &Run) -> Result<(), String> {
    match options.open_store && options.tls.is_given() {
        true => {
            Err("--open-store would admit programs that do not use TLS: leave out --open-store, or --tls-ca, --tls-cert and --tls-key"
                .to_owned())
        }
        false => Ok(()),
    }
}

/// `phalanx keygen`.
pub(crate) fn keygen(options: &Keygen) -> ExitCode {
    match JobKey::generate().and_then(|key| key.write_new(&options.file)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&error.to_string(), 1),
    }
}

/// The job, or this node's part of it.
fn here(options: Run, workers: WorldSize) -> Result<Job, String> {
    if !options.standalone {
        options.nodes.check_node_rank()?;
    }
    let cluster = options.nodes.cluster()?;
    if options.standalone && cluster.is_some() {
        return Err("--standalone is one machine, --nnodes several".to_owned());
    }
    job(options, workers, cluster)
}

/// The job that `options` describe, with the settings that were found out for this machine.
pub(crate) fn job(options: Run, workers: WorldSize, cluster: Option<Cluster>) -> Result<Job, String> {
    let (address, port) = match options.standalone {
        true => (None, None),
        false => options.nodes.endpoint()?,
    };
    let key = key(&options)?;
    refuse_open_tls(&options)?;
    let command = options.command_line();
    let behind = launch::script_end(&command);
    let mut program = command.into_iter();
    let tls = options.tls;
    let job = Job::new(program.next().unwrap_or_default(), workers)
        .arguments(program)
        .role(options.role)
        .grace(options.grace_period)
        .max_restarts(options.max_restarts)
        .open_store(options.open_store)
        // This command has no other children.
        .subreaper(true)
        .master_port(port.unwrap_or(0));
    let job =
        options.local_rank_option.into_iter().fold(job, |job, option| job.local_rank_option(option, behind));
    let job = tls.apply(key.into_iter().fold(job, Job::key), Job::tls)?;
    let job = address.into_iter().fold(job, Job::master_addr);
    let job = cluster.into_iter().fold(job, Job::cluster);
    let job = options.rdzv_id.into_iter().fold(job, Job::run_id);
    let job = options.elastic.apply(job)?;
    // As torchrun does: if no folder was named, logs go to one that is made.
    let wanted = !options.redirects.is_empty() || !options.tee.is_empty();
    let folder = wanted.then(|| options.log_dir.unwrap_or_else(std::env::temp_dir));
    let job = options
        .local_ranks_filter
        .into_iter()
        .filter(|ranks| !ranks.0.is_empty())
        .fold(job, |job, ranks| job.show_only(ranks.0));
    let logs = folder.map(|folder| Logs::new(folder).redirects(options.redirects).tee(options.tee));
    Ok(logs.into_iter().fold(job, Job::logs))
}

/// The key that was given.
fn key(options: &Run) -> Result<Option<JobKey>, String> {
    let file = options.job_key_file.as_ref().filter(|file| !file.as_os_str().is_empty());
    file.map(JobKey::read).transpose().map_err(|error| error.to_string())
}

fn look() -> Look {
    Look::of_stderr(wants_colour(&io::stderr()))
}

fn summary(report: &Report) -> Vec<u8> {
    match &report.outcome {
        Outcome::Failed(failure) => report::failure(failure, report, look()),
        Outcome::NodeFailed(failure) => report::node_failure(failure, look()),
        Outcome::Interrupted(signal) => format!("phalanx: ended by {signal}\n").into_bytes(),
        _ => Vec::new(),
    }
}

/// The code with which a shell reports a program that cannot be started. Only then is a rank named.
fn code_of(error: &Error) -> i32 {
    match (error.peer(), error.io_kind()) {
        (Some(_), Some(ErrorKind::NotFound)) => 127,
        (
            Some(_),
            Some(
                ErrorKind::PermissionDenied
                | ErrorKind::NotADirectory
                | ErrorKind::ExecutableFileBusy
                | ErrorKind::ArgumentListTooLong,
            ),
        ) => 126,
        (Some(_), _) if error.errno() == Some(Errno::NOEXEC.raw_os_error()) => 126,
        _ if error.is_invalid_argument() => 2,
        _ => 1,
    }
}

fn refuse(message: &str, code: i32) -> ExitCode {
    let _ = io::stderr().write_all(&not_run(message, code, Format::Text));
    exit_code(code)
}

/// What is said of a job that could not be started or watched.
fn not_run(message: &str, code: i32, format: Format) -> Vec<u8> {
    match format {
        Format::Text => format!("phalanx: {message}\n").into_bytes(),
        Format::Json => json::not_run(message, code),
    }
}

/// A code that the system cannot pass on is a failure all the same.
fn exit_code(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}
