//! The command line. Its help is the manual.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand};

use phalanx::launch::Selection;

use crate::bench::{BenchCommand, Plot};
#[cfg(feature = "tls")]
use crate::certgen::Certgen;
use crate::doctor::Doctor;
use crate::elastic::ElasticOptions;
use crate::hosts::HostOptions;
use crate::node::Node;
use crate::nodes::NodeOptions;
use crate::processes::Processes;
use crate::render::Format;
use crate::tls::{TlsOptions, path};

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Distributed data-parallel training: starts and watches the workers of a job.
#[derive(Debug, Parser)]
#[command(version, styles = STYLES, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "`phalanx run --help` is the launcher's manual.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Box<Run>),
    #[command(hide = true)]
    Node(Node),
    Keygen(Keygen),
    #[cfg(feature = "tls")]
    Certgen(Certgen),
    Bench(Box<BenchCommand>),
    Plot(Plot),
    Doctor(Doctor),
}

const RUN: &str = "\
Starts a program several times on this machine, or on each of several, as the ranks of one job.

Each worker finds its place in its environment, under torchrun's names: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, \
MASTER_PORT and so on. Any program that reads them can be a worker: one that uses Phalanx, a Python script with PyTorch, \
a shell script. The store behind MASTER_ADDR and MASTER_PORT is served by this command (PyTorch's protocol).";

const MANUAL: &str = "\
Output:
  Each line of a worker goes to the stream it was written to, behind its rank: `[1] loss 0.25`. Lines of different \
workers never mix. Of a progress bar one state a second is shown, and the last. On a terminal each rank has its colour, \
unless NO_COLOR is set, and a status line stays at the bottom.
  With --log-dir, --redirects or --tee there is a folder for each job: \
<log-dir>/<name>_<random>/attempt_<restart>/<local rank>/ with stdout.log, stderr.log and error.json, as torchrun \
makes them. With --log-format json everything is a JSON object a line: workers' lines on the stream they were \
written to, this command's news on standard error.

How it ends:
  The first worker that fails ends the job, or, with --max-restarts, this life of it: the others, and all that workers have started, get SIGTERM, after the grace \
period SIGKILL. Then all are started again, with a new store and a higher TORCHELASTIC_RESTART_COUNT, as long as \
restarts are left. What failed first is shown last, and its exit code is this command's (128 + n for signal n). \
Ctrl-C, SIGTERM, SIGHUP and SIGQUIT are passed on to all workers, with the same grace period; a second Ctrl-C kills \
at once. SIGUSR1 and SIGUSR2 are passed on and end nothing here. If this command is killed itself, its workers are killed \
too. Workers may end with 0 at different times. If no worker can be \
started, the exit code is 127 (the program is not found), 126 (it cannot be executed), 2 (wrong options) or 1.

Elastic jobs:
  With --min-np a worker that fails ends only itself, as long as so many are left. Another takes its place, as often as \
--max-restarts says for all together; one that fails at once, again and again, is replaced after a pause and given up \
the fourth time. The others keep their processes and go on without it from their last commit, and take its successor in. \
The prefix of a line is then the worker's place, not its rank, which changes. The job has succeeded when all that are \
left have ended with 0, and are enough.
  On several hosts (-H, --hostfile or --host-discovery-script) this command serves the store, and must not be lost; the loss of a host ends its workers only. It is left out for --blacklist-cooldown-range, and then started again, which counts as a replacement. Hosts that --host-discovery-script names later are taken in, up to --max-np workers. The job ends when fewer than --min-np are left and nobody can come, or nobody has for --elastic-timeout.

Several hosts:
  With -H or --hostfile this command starts a launcher on each host, over ssh without a password (`ssh -o BatchMode=yes \
HOST true` must work), and on this machine directly. The same version of phalanx must be there, at the same path or in \
PATH, and the folder in which this command is started. The hosts get this command's environment, but for what belongs to a \
login, through ssh's standard input. PHALANX_RSH names another program that is called as ssh is. All output comes here; \
signals to this command, and its end, whatever the reason, end all hosts.

Several nodes:
  The same command is started on every node, with the same --nnodes, --master-addr and --master-port and its own \
--node-rank; the number of workers may differ. Node 0 serves the store at which the launchers meet, on that address \
alone. A failure, a launcher that is ended and a node that falls silent (5 s) end the job on all nodes, or start it \
again on all; each of them says what failed first, and on which host. With --nnodes MIN:MAX a job goes on without the \
nodes that it loses as long as there are MIN, and takes in those that come up to MAX: all workers are then started again.

Who may take part:
  The processes of a job recognise each other by a key. On one machine it is made for the job. For several, make one with \
`phalanx keygen FILE`, copy it to each and give --job-key-file FILE; without it whoever reaches the job's ports can take \
part. Connections are authenticated, and not encrypted, unless each process has a certificate of one CA: make them with \
`phalanx certgen FOLDER HOST...`, and give --tls-ca, --tls-cert and --tls-key on every node. Programs that do not know the key, such as PyTorch's, may use the \
store if this user runs them on the store's own machine, or with --open-store.

Environment of a worker:
  RANK, LOCAL_RANK             its place in the job and on this machine, from 0
  WORLD_SIZE, LOCAL_WORLD_SIZE the number of workers
  GROUP_RANK, GROUP_WORLD_SIZE the place of this machine, and the number of machines
  ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE
  MASTER_ADDR, MASTER_PORT     where the store is
  TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE,
  PHALANX_ELASTIC, PHALANX_RESET_LIMIT
                               of an elastic job: MIN:MAX workers, and how many new groups
  TORCHELASTIC_ERROR_FILE      a worker may leave {\"message\": \"..\"} there, to be shown if it fails
  PHALANX_JOB_KEY_FILE         the job's key, lent by this command: by it workers recognise each other and the store
  PHALANX_TLS_CA, PHALANX_TLS_CERT, PHALANX_TLS_KEY
                               the files of --tls-ca, --tls-cert and --tls-key, if they are given
  OMP_NUM_THREADS, RAYON_NUM_THREADS
                               1 if there are several workers and it is not set already

Examples:
  phalanx run --nproc-per-node 4 -- ./target/release/train --epochs 6
  phalanx run --nproc-per-node gpu -- python train.py
  phalanx run -np 8 -H node0:4,node1:4 ./target/release/train
  phalanx run --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 4 -- ./target/release/train
  phalanx run --nproc-per-node 4 --min-np 2 --max-restarts 10 -- ./target/release/train
  phalanx run --nproc-per-node 2 -- sh -c 'echo I am rank $RANK of $WORLD_SIZE'";

/// Start a program several times, on one machine or several, as the ranks of one job
#[derive(Args, Debug)]
#[command(long_about = RUN, after_long_help = MANUAL, after_help = "`--help` says more.")]
#[command(override_usage = "phalanx run [OPTIONS] [--] <PROGRAM> [ARGUMENTS]...")]
pub(crate) struct Run {
    /// How many workers: a number, `cpu` (one a processor), `gpu` (one an NVIDIA GPU) or `auto` (`gpu` if there is one,
    /// else `cpu`); 1 if not given
    #[arg(
        long,
        alias = "nproc_per_node",
        value_name = "N",
        env = "PET_NPROC_PER_NODE",
        hide_env_values = true
    )]
    pub(crate) nproc_per_node: Option<Processes>,

    /// One machine and a free port for the store; this is so unless an address or a port is given
    #[arg(long, env = "PET_STANDALONE", hide_env_values = true, value_parser = FalseyValueParser::new(),
          conflicts_with_all = ["master_addr", "master_port", "rdzv_endpoint"])]
    pub(crate) standalone: bool,

    /// The workers' role, for their ROLE_NAME
    #[arg(long, value_name = "NAME", env = "PET_ROLE", hide_env_values = true, default_value = "default")]
    pub(crate) role: String,

    /// How often a failure ends all workers and starts them again, instead of ending the job
    #[arg(
        long,
        alias = "max_restarts",
        value_name = "N",
        env = "PET_MAX_RESTARTS",
        hide_env_values = true,
        default_value_t = 0
    )]
    pub(crate) max_restarts: u32,

    /// The job's name, for the workers' TORCHELASTIC_RUN_ID and the logs [default: one of its own]
    #[arg(long, alias = "rdzv_id", value_name = "NAME", env = "PET_RDZV_ID", hide_env_values = true)]
    pub(crate) rdzv_id: Option<String>,

    /// A folder for the workers' logs, below which each job makes its own
    #[arg(long, alias = "log_dir", value_name = "FOLDER", env = "PET_LOG_DIR", hide_env_values = true)]
    pub(crate) log_dir: Option<PathBuf>,

    /// Output that goes to files and is not shown: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: `0:3,1:1`
    #[arg(
        short,
        long,
        value_name = "STREAMS",
        env = "PET_REDIRECTS",
        hide_env_values = true,
        default_value = "0"
    )]
    pub(crate) redirects: Selection,

    /// Output that goes to files and is shown too, in the same way
    #[arg(short, long, value_name = "STREAMS", env = "PET_TEE", hide_env_values = true, default_value = "0")]
    pub(crate) tee: Selection,

    /// How everything is written
    #[arg(
        long,
        value_name = "FORMAT",
        env = "PHALANX_LOG_FORMAT",
        hide_env_values = true,
        default_value = "text"
    )]
    pub(crate) log_format: Format,

    /// How long workers may take to end after SIGTERM, before SIGKILL
    #[arg(long, value_name = "SECONDS", env = "PHALANX_GRACE_PERIOD", hide_env_values = true, default_value = "30", value_parser = seconds)]
    pub(crate) grace_period: Duration,

    /// Taken for torchrun's sake: this command is woken by what happens, and need not look every so many seconds
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", env = "PET_MONITOR_INTERVAL", hide_env_values = true, default_value = "0.1", value_parser = seconds)]
    pub(crate) monitor_interval: Duration,

    /// Taken for torchrun's sake: every program is started as it is
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) no_python: bool,

    /// The file with the key by which the processes of this job recognise each other; needed on every node of a job on
    /// several, the same there. A job on one makes its own
    #[arg(long, value_name = "FILE", env = "PHALANX_JOB_KEY_FILE", hide_env_values = true, value_parser = path())]
    pub(crate) job_key_file: Option<PathBuf>,

    /// Lets programs use the workers' store that do not know the job's key, from wherever they reach it: PyTorch's on
    /// several nodes. Those of this user on the store's own machine may without
    #[arg(long, env = "PHALANX_OPEN_STORE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) open_store: bool,

    #[command(flatten)]
    pub(crate) tls: TlsOptions,

    // Behind all other options: their headings would stand over those that follow.
    #[command(flatten)]
    pub(crate) elastic: ElasticOptions,

    #[command(flatten)]
    pub(crate) nodes: NodeOptions,

    #[command(flatten)]
    pub(crate) hosts: HostOptions,

    /// The program, looked for in PATH unless it contains a slash, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// Make a key for jobs on several machines
///
/// Copy it to each of them and start their launchers with `--job-key-file`. Whoever can read it can take part in the job.
#[derive(Args, Debug)]
pub(crate) struct Keygen {
    /// The file to make; it must not be there yet. Only this user may read it
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "it is not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_of_the_program_are_not_ours() {
        let command = Cli::parse_from(["phalanx", "run", "./train", "--role", "x", "--", "y"]).command;
        let Command::Run(run) = command else { unreachable!() };
        assert_eq!(run.program, ["./train", "--role", "x", "--", "y"]);
        assert_eq!(run.role, "default");
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err());
    }
}
