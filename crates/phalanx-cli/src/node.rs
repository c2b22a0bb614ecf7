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
    // The network may be slow. A signal, and the command's end, end this process.
    let mut timeout = Duration::MAX;
    if let Some(result) = run_part(&output).transpose() {
        output.push(Stream::Stdout, RemoteNode::final_message(&result));
        if result.is_ok_and(|report| matches!(report.outcome, Outcome::Interrupted(_))) {
            timeout = LAST_MESSAGE_TIMEOUT;
        }
    }
    output.finish(timeout);
    ExitCode::SUCCESS
}

/// This host's part of the job; nothing if the job has ended.
fn run_part(output: &Output) -> Result<Option<Report>> {
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
    node.part(job).run(&mut Teller { output, node: &node }).map(Some)
}

/// Sends messages to the user's command.
#[derive(Debug)]
struct Teller<'a> {
    output: &'a Output,
    node: &'a RemoteNode,
}

impl Observer for Teller<'_> {
    fn observe(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self.output.push(Stream::Stdout, self.node.tell(&event));
        if self.output.reader_is_gone() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn is_ready(&mut self) -> bool {
        self.node.is_ready() && !self.output.is_full()
    }
}
