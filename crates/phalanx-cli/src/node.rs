//! `phalanx node`: what `phalanx run -H` starts on each host. It communicates with that command, not with users.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use phalanx::launch::{Event, Observer, Outcome, RemoteNode, Report, Stream};
use phalanx::{Error, Result};

use crate::cli::Command;
use crate::output::Output;
use crate::parse;
use crate::render::Format;
use crate::run::job;

/// How long the reader may take to read the last message of a job that a signal has ended.
const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Started by `phalanx run -H`
#[derive(Args, Debug)]
pub(crate) struct Node {
    /// The working directory and the environment are set
    #[arg(long, hide = true)]
    ready: bool,
}

pub(crate) fn run(options: &Node) -> ExitCode {
    if !options.ready {
        RemoteNode::arrive();
        return ExitCode::FAILURE;
    }
    let Ok(output) = Output::start(Format::Text) else { return ExitCode::FAILURE };
    let mut teller = Teller(output);
    // The command reads no more while nobody reads its own output. A signal, and its end, end this process.
    let mut timeout = Duration::MAX;
    if let Some(result) = run_part(&mut teller).transpose() {
        teller.0.push(Stream::Stdout, RemoteNode::final_message(&result));
        if result.is_ok_and(|report| matches!(report.outcome, Outcome::Interrupted(_))) {
            timeout = LAST_MESSAGE_TIMEOUT;
        }
    }
    teller.0.finish(timeout);
    ExitCode::SUCCESS
}

/// This host's part of the job; nothing if the job has ended.
fn run_part(teller: &mut Teller) -> Result<Option<Report>> {
    let Some(node) = RemoteNode::start()? else { return Ok(None) };
    let parsed = parse::parse(node.arguments().iter().cloned());
    let command = parsed.map_err(|error| Error::invalid_argument(error.to_string()))?.command;
    let mut options = match command {
        Command::Run(options) => *options,
        Command::Launch(options) => options.into_run(),
        _ => return Err(Error::invalid_argument("this is neither `run` nor `launch`")),
    };
    let cluster = node.cluster()?.map(|cluster| options.nodes.shape(cluster));
    // The path is one of the host where the command was given.
    options.job_key_file = None;
    let job = job(options, node.workers()?, cluster).map_err(Error::invalid_argument)?;
    node.part(job).run(teller).map(Some)
}

/// Sends messages to the user's command.
#[derive(Debug)]
struct Teller(Output);

impl Observer for Teller {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self.0.push(Stream::Stdout, RemoteNode::tell(&event));
        if self.0.reader_is_gone() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn is_ready(&mut self) -> bool {
        !self.0.is_full()
    }
}
