//! The options of `phalanx run`. Their help is the launcher's manual.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::FalseyValueParser;
use phalanx::launch::Selection;

use crate::cli::seconds;
use crate::elastic::ElasticOptions;
use crate::hosts::HostOptions;
use crate::launch::python;
use crate::nodes::NodeOptions;
use crate::processes::Processes;
use crate::render::Format;
use crate::tls::{TlsOptions, path};

const RUN: &str = "\
Starts a program several times on this machine, or on each of several, as the ranks of one job.

Each worker finds its rank and the store in its environment, under torchrun's names: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, \
MASTER_PORT and so on. Any program that reads them can be a worker: one that uses Phalanx, a Python script with PyTorch, \
a shell script. The store behind MASTER_ADDR and MASTER_PORT is served by this command (PyTorch's protocol).";

const MANUAL: &str = "\
Output:
  Each line of a worker goes to the stream to which the worker wrote it, with the worker's rank as prefix: `[1] loss 0.25`. Lines of \
different workers never mix. A progress bar is shown once a second, and at its end. On a terminal each rank has its own colour, unless \
NO_COLOR is set, and a status line stays at the bottom.
  With --redirects or --tee each job has a folder, in --log-dir or else in the system's folder for temporary files: \
<log-dir>/<name>_<random>/attempt_<restart>/<local rank>/ with stdout.log, stderr.log and error.json, as torchrun \
makes them.
  With --log-format json each line is a JSON object. Workers' lines go to the same streams as without it, and this command's events to \
standard error. The last event is `ended`, with `outcome` and `exit_code`, also if no worker could be started. Only an option that cannot be \
read is answered in plain text.

How it ends:
  The first worker that fails ends the job, or, with --max-restarts, this attempt. The other workers, and all processes that workers have \
started, also in sessions of their own, then get SIGTERM, and after the grace period SIGKILL. If restarts are left, all workers are started \
again, with a new store and a higher TORCHELASTIC_RESTART_COUNT. The first failure is printed at the end, and its exit code is this command's \
(128 + n for signal n). If a failed rank reports that another rank failed, that other rank's failure counts as the first.
  Ctrl-C, SIGTERM, SIGHUP and SIGQUIT are passed on to all workers, with the same grace period. A second Ctrl-C kills at once. The exit code is \
then 128 + n for signal n, and 1 on other nodes that end because of it. Ctrl-C ends this command by SIGINT itself, which is 130 for a shell, so that a \
script that calls it ends too. If the signal comes when a failure has ended the job, or \
when all workers have ended well, it changes neither the report nor the exit code. SIGUSR1 and SIGUSR2 are passed on too, and do not end this \
command. If this command is killed, its workers are killed too.
  Workers may end with 0 at different times. If no worker can be started, the exit code is 127 (the program is not found), 126 (it cannot be \
executed), 2 (wrong options) or 1.

Elastic jobs:
  With --min-np a worker that fails does not end the job, as long as at least that many workers are left. It is replaced, at most \
--max-restarts times for all workers together. A worker that crashes soon after each start is replaced after a pause, and \
not replaced after the fourth crash. The others keep their processes, continue without it from their last commit, and \
its replacement joins them. The prefix of a line is then the worker's slot, not its rank, which changes. The job has succeeded when all \
workers that are left have ended with 0, and there are at least --min-np.
  On several hosts (-H, --hostfile or --host-discovery-script) this command serves the store. If this command ends, the job ends. If another \
host is lost, only that host's workers end. That host is left out for --blacklist-cooldown-range, and then started again, which counts as a \
replacement. Hosts that --host-discovery-script prints later are added, up to --max-np workers. The job ends when fewer than --min-np workers \
are left and no more can come, or none has come for --elastic-timeout.

Several hosts, one command:
  With -H or --hostfile this command starts a launcher on each host, over ssh without a password (`ssh -o BatchMode=yes \
HOST true` must work), and on this machine directly. The same version of phalanx must be there, at the same path or in \
PATH, and the folder in which this command is started. The hosts get this command's environment, except what belongs to a \
login, through ssh's standard input. PHALANX_RSH names another program to call instead of ssh. This command shows all output. \
When it gets a signal or ends, for any reason, the workers on all hosts end.

Slurm:
  In a batch script, or a shell of salloc, `phalanx run ./train` without options about nodes reads the job's nodes, and how many workers each is \
to have, from Slurm's variables (SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE), and starts a launcher on each node with srun. --nproc-per-node sets another number; \
--nnodes, --node-rank, --master-addr, --rdzv-endpoint, -H, --hostfile, --host-discovery-script and --standalone override this. In a task that srun has started, this command \
ignores these variables. A program of Phalanx needs no launcher there: `srun ./train` is enough.

Several nodes, a command on each:
  You, or a scheduler, start the same command on every node, with the same --nnodes, --master-addr and --master-port and its own \
--node-rank; the number of workers may differ. Node 0 serves the store that the launchers use, on that address \
only. A worker's failure, the end of a launcher, and a node without heartbeats for 12 s end the job on all nodes, or restart it \
on all; each node shows the first failure, and its host. With --nnodes MIN:MAX a job continues without the \
nodes that it loses as long as MIN are left, and new nodes join it, up to MAX. All workers are then started again.

Who may take part:
  The processes of a job authenticate each other with a key. This command makes it on one machine, and with -H. If you start one on each \
node, make a key with `phalanx keygen FILE`, copy it to each and give --job-key-file FILE; without it any process that reaches the job's ports can \
take part. Connections are authenticated, and not encrypted, unless each process has a certificate of one CA: make them with \
`phalanx certgen FOLDER HOST...`, and give --tls-ca, --tls-cert and --tls-key on every node. Programs that do not know the key, such as PyTorch's, may use the \
store if this user runs them on the store's own machine, or with --open-store.

Environment of a worker:
  RANK, LOCAL_RANK
      its rank in the job and on this machine, from 0
  WORLD_SIZE, LOCAL_WORLD_SIZE
      the number of workers
  GROUP_RANK, GROUP_WORLD_SIZE
      the rank of this machine, and the number of machines
  ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE
      the role (--role), and rank and number of workers among those of that role
  MASTER_ADDR, MASTER_PORT
      where the store is
  TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE
      as torchrun sets them
  PHALANX_ELASTIC, PHALANX_RESET_LIMIT
      of an elastic job: the number of workers, MIN:MAX, and how often they may form a new group
  TORCHELASTIC_ERROR_FILE
      a worker may leave {\"message\": \"..\"} there, to be shown if it fails
  HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE, HOROVOD_CROSS_RANK, HOROVOD_CROSS_SIZE
      the same under Horovod's names, with `phalanx horovodrun`
  PHALANX_LAUNCHER_STORE
      where this command's store is, for workers that use Phalanx
  PHALANX_BLAME_FILE
      where Phalanx notes which rank's failure a worker has seen
  PHALANX_JOB_TAG
      a tag by which all processes of the job are found and ended with it
  PHALANX_JOB_KEY_FILE
      the job's key, by which its workers and the store know each other
  PHALANX_TLS_CA, PHALANX_TLS_CERT, PHALANX_TLS_KEY
      the files of --tls-ca, --tls-cert and --tls-key, if they are given
  PYTHONUNBUFFERED
      1, unless it is set: Python shows lines as soon as they are written
  OMP_NUM_THREADS, RAYON_NUM_THREADS
      1 if there are several workers and it is not set already

Examples:
  phalanx run --nproc-per-node 4 -- ./train --epochs 6
  phalanx run --nproc-per-node gpu -- python train.py
  phalanx run -np 8 -H node0:4,node1:4 ./train
  phalanx run --nnodes 2 --node-rank 1 --master-addr node0 -- ./train
  sbatch --nodes 2 --ntasks-per-node 4 --wrap 'phalanx run ./train'
  phalanx run --nproc-per-node 4 --min-np 2 --max-restarts 10 -- ./train
  phalanx run --nproc-per-node 2 -- sh -c 'echo I am $RANK of $WORLD_SIZE'";

/// Start a program several times, on one machine or several, as the ranks of one job
#[derive(Args, Debug)]
#[command(long_about = RUN, after_long_help = MANUAL, after_help = "`--help` prints the whole manual.")]
#[command(override_usage = "phalanx run [OPTIONS] [--] <PROGRAM> [ARGUMENTS]...")]
pub(crate) struct Run {
    /// How many workers: a number, `cpu` (one a processor), `gpu` (one an NVIDIA GPU) or `auto` (`gpu` if there is one,
    /// else `cpu`); 1, or as many as a Slurm job has tasks, if not given
    #[arg(
        long,
        alias = "nproc_per_node",
        value_name = "N",
        env = "PET_NPROC_PER_NODE",
        hide_env_values = true
    )]
    pub(crate) nproc_per_node: Option<Processes>,

    /// One machine, with a free port for the store. --rdzv-endpoint, --master-addr, --master-port and --node-rank are ignored. This is
    /// the default if no address or port is given
    #[arg(long, env = "PET_STANDALONE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) standalone: bool,

    /// The role of this node's workers, for their ROLE_NAME, ROLE_RANK and ROLE_WORLD_SIZE
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

    /// The job's name, for the workers' TORCHELASTIC_RUN_ID and the logs [default: `none` with several nodes or a fixed list of several
    /// hosts; else a new name for each job]
    #[arg(long, alias = "rdzv_id", value_name = "NAME", env = "PET_RDZV_ID", hide_env_values = true)]
    pub(crate) rdzv_id: Option<String>,

    /// A folder for the workers' logs; each job makes a folder in it. --redirects or --tee selects what is kept there
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

    /// Output that goes to files and is also shown: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: `0:3,1:1`
    #[arg(short, long, value_name = "STREAMS", env = "PET_TEE", hide_env_values = true, default_value = "0")]
    pub(crate) tee: Selection,

    /// The workers whose output is shown, by local rank: `0,2`; all if not given. What goes to files stays the same
    #[arg(
        long,
        alias = "local_ranks_filter",
        value_name = "RANKS",
        env = "PET_LOCAL_RANKS_FILTER",
        hide_env_values = true,
        value_parser = local_ranks
    )]
    pub(crate) local_ranks_filter: Option<LocalRanks>,

    /// The prefix of each line that is shown, with ${role_name}, ${rank} and ${local_rank} [default: `[RANK] `]
    #[arg(
        long,
        alias = "log_line_prefix_template",
        value_name = "TEMPLATE",
        env = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        hide_env_values = true
    )]
    pub(crate) log_line_prefix_template: Option<String>,

    /// The format of workers' lines and of this command's messages
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

    /// Accepted for compatibility with torchrun; no effect: this command waits for events and does not poll
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS", env = "PET_MONITOR_INTERVAL", hide_env_values = true, default_value = "0.1", value_parser = seconds)]
    pub(crate) monitor_interval: Duration,

    /// The program is a Python module: it is started as `python3 -u -m PROGRAM`, with the interpreter in PYTHON_EXEC, or of the virtual
    /// environment in which this command is installed, or in PATH
    #[arg(short, long, env = "PET_MODULE", hide_env_values = true, value_parser = FalseyValueParser::new(), conflicts_with = "no_python")]
    pub(crate) module: bool,

    /// Accepted for compatibility with torchrun; no effect: every program is started as it is
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) no_python: bool,

    /// The file with the key by which the processes of this job authenticate each other. A job on several nodes needs the
    /// same key on each; a job on one node makes its own
    #[arg(long, value_name = "FILE", env = "PHALANX_JOB_KEY_FILE", hide_env_values = true, value_parser = path())]
    pub(crate) job_key_file: Option<PathBuf>,

    /// Lets programs that do not know the job's key use the workers' store, from any host, such as PyTorch's on several
    /// nodes. Programs of this user on the store's own machine may use it without this option
    #[arg(long, env = "PHALANX_OPEN_STORE", hide_env_values = true, value_parser = FalseyValueParser::new())]
    pub(crate) open_store: bool,

    #[command(flatten)]
    pub(crate) tls: TlsOptions,

    // After all other options: their headings would also apply to the options that follow.
    #[command(flatten)]
    pub(crate) elastic: ElasticOptions,

    #[command(flatten)]
    pub(crate) nodes: NodeOptions,

    #[command(flatten)]
    pub(crate) hosts: HostOptions,

    /// The program, looked for in PATH unless it contains a slash, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,

    /// The option with which each worker gets its local rank.
    #[arg(skip)]
    pub(crate) local_rank_option: Option<&'static str>,
}

/// Workers of one node; none means all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalRanks(pub(crate) Vec<u32>);

fn local_ranks(text: &str) -> Result<LocalRanks, String> {
    let rank = |text: &str| text.trim().parse().map_err(|_| format!("{text:?} is no local rank"));
    // An empty variable gives this.
    if text.trim().is_empty() {
        return Ok(LocalRanks(Vec::new()));
    }
    text.split(',').map(rank).collect::<Result<_, _>>().map(LocalRanks)
}

/// What is said of the limits of threads that a machine's workers get, if there are several; `is_set` says which variables are set
/// already.
pub(crate) fn thread_note(workers: u32, is_set: impl Fn(&str) -> bool) -> Option<String> {
    let set = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"].into_iter().filter(|name| !is_set(name));
    let names: Vec<&str> = set.filter(|_| workers > 1).collect();
    let verb = if names.len() == 1 { "is" } else { "are" };
    (!names.is_empty()).then(|| {
        format!(
            "{} {verb} set to 1 for each worker, so that several do not compete for the processors; set other numbers if they are \
             faster",
            names.join(" and ")
        )
    })
}

/// The rank that an operator of Kubernetes, or a person, has given to this process as one of several: `RANK=1 and WORLD_SIZE=2`. None in
/// a worker of torchrun's or ours, which may start jobs of its own.
pub(crate) fn ranked(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let text = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    if text("TORCHELASTIC_RUN_ID").is_some() {
        return None;
    }
    let (rank, size) = (text("RANK")?, text("WORLD_SIZE")?);
    let is_one_of_several = size.trim().parse::<u32>().is_ok_and(|size| size > 1);
    is_one_of_several.then(|| format!("RANK={rank} and WORLD_SIZE={size}"))
}

impl Run {
    /// The program and its arguments.
    pub(crate) fn command_line(&self) -> Vec<OsString> {
        let program = self.program.iter().cloned();
        if !self.module {
            return program.collect();
        }
        // Unbuffered, as torchrun does: its lines come as soon as they are written.
        let before = [python(), "-u".into(), "-m".into()];
        before.into_iter().chain(program).collect()
    }

    /// Warnings about options that have no effect, printed before the start.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let wanted = !self.redirects.is_empty() || !self.tee.is_empty();
        if self.log_dir.is_some() && !wanted {
            notes.push(
                "--log-dir alone keeps no logs: add --tee 3 (files and screen) or --redirects 3 (files only)"
                    .to_owned(),
            );
        }
        let given = [
            ("--rdzv-endpoint", self.nodes.rdzv_endpoint.is_some()),
            ("--master-addr", self.nodes.master_addr.is_some()),
            ("--master-port", self.nodes.master_port.is_some()),
            ("--node-rank", self.nodes.node_rank.is_some()),
        ];
        for (option, _) in given.iter().filter(|(_, given)| *given && self.standalone) {
            notes.push(format!("--standalone: {option} has no effect"));
        }
        notes.extend(self.nodes.rdzv_conf.note());
        notes
    }

    /// Notes about workers that options name by their local rank, and which this machine does not have.
    pub(crate) fn absent(&self, workers: u32) -> Vec<String> {
        let ranks = |selection: &Selection| match selection {
            Selection::Every(_) => Vec::<u32>::new(),
            Selection::Each(each) => each.iter().map(|(rank, _)| *rank).collect(),
        };
        let shown = self.local_ranks_filter.as_ref().map(|shown| shown.0.clone());
        let named = [
            ("--local-ranks-filter", shown.unwrap_or_default()),
            ("--redirects", ranks(&self.redirects)),
            ("--tee", ranks(&self.tee)),
        ];
        let missing = named.into_iter().filter_map(|(option, ranks)| {
            let rank = ranks.into_iter().find(|rank| *rank >= workers)?;
            Some(format!(
                "{option}: no worker of this machine has the local rank {rank}; there are {workers}, from 0"
            ))
        });
        missing.collect()
    }

    /// A warning if another launcher, with these variables, has started this command several times, and each is a job by itself.
    pub(crate) fn apart(&self, other: Option<String>) -> Option<String> {
        let other = other.filter(|_| self.nodes.nnodes().max == 1 && !self.standalone)?;
        Some(format!(
            "{other} say that this command was started several times: each trains by itself, as a job of its own. For one job give --nnodes, \
             --node-rank and --master-addr, or start the program without `phalanx run`; --standalone says that it is meant so"
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(words: &[&str]) -> Result<Box<Run>, String> {
        let words = ["phalanx", "run"].iter().chain(words);
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Run(run) => Ok(run),
            _ => Err("not run".to_owned()),
        }
    }

    #[test]
    fn arguments_of_the_program_are_not_ours() {
        let run = parse(&["./train", "--role", "x", "--", "y"]).unwrap();
        assert_eq!(run.program, ["./train", "--role", "x", "--", "y"]);
        assert_eq!(run.role, "default");
    }

    #[test]
    fn commands_that_another_launcher_starts_apart_are_told() {
        let apart = |options: &[&str], other: Option<&str>| {
            parse(&[options, &["./train"]].concat()).unwrap().apart(other.map(str::to_owned))
        };
        let slurm = Some("SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=2");
        assert!(apart(&["--nproc-per-node", "4"], slurm).unwrap().contains("SLURM_STEP_NUM_TASKS=2 say"));
        assert_eq!(apart(&["--nnodes", "2", "--node-rank", "1"], slurm), None);
        assert_eq!(apart(&["--standalone"], slurm), None);
        assert_eq!(apart(&[], None), None);
        let given = |pairs: &[(&str, &str)]| {
            ranked(|name| {
                pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let pod = [("RANK", "1"), ("WORLD_SIZE", "2")];
        assert_eq!(given(&pod).as_deref(), Some("RANK=1 and WORLD_SIZE=2"));
        assert_eq!(given(&[pod[0], ("WORLD_SIZE", "1")]), None);
        assert_eq!(given(&[pod[0], ("WORLD_SIZE", "")]), None);
        assert_eq!(given(&[pod[0], pod[1], ("TORCHELASTIC_RUN_ID", "none")]), None);
    }

    #[test]
    fn workers_that_are_not_there_and_are_to_be_shown_are_told() {
        let absent = |option: &str, ranks: &str| parse(&[option, ranks, "./train"]).unwrap().absent(2);
        assert!(absent("--local-ranks-filter", "0,1").is_empty() && absent("--tee", "3").is_empty());
        assert!(absent("--tee", "0:3,1:1").is_empty() && parse(&["./train"]).unwrap().absent(1).is_empty());
        for (option, ranks) in [("--local-ranks-filter", "0,2"), ("--redirects", "2:1"), ("--tee", "0:3,2:3")]
        {
            let notes = absent(option, ranks);
            let expected = format!("{option}: no worker of this machine has the local rank 2; there are 2");
            assert!(notes.len() == 1 && notes[0].starts_with(&expected), "{notes:?}");
        }
    }

    #[test]
    fn an_unknown_option_is_no_program() {
        let error = parse(&["--nproc-per-nod", "2", "./train"]).unwrap_err();
        assert!(error.contains("'--nproc-per-nod'") && error.contains("'--nproc-per-node'"), "{error}");
        assert!(parse(&["--epochs", "3", "./train"]).is_err());
        let run = parse(&["./train", "--nproc-per-nod", "2", "-x"]).unwrap();
        assert_eq!(run.program, ["./train", "--nproc-per-nod", "2", "-x"]);
        assert_eq!(parse(&["--", "-odd", "--name"]).unwrap().program, ["-odd", "--name"]);
    }

    #[test]
    fn a_module_is_started_by_python() {
        let run = parse(&["-m", "pkg.train", "--epochs", "3"]).unwrap();
        assert_eq!(run.command_line()[1..], ["-u", "-m", "pkg.train", "--epochs", "3"]);
        assert_eq!(parse(&["./train", "-m"]).unwrap().command_line(), ["./train", "-m"]);
        assert!(parse(&["-m", "--no-python", "x"]).is_err());
    }

    #[test]
    fn limits_of_threads_that_are_set_silently_are_said() {
        assert_eq!(thread_note(1, |_| false), None);
        assert_eq!(thread_note(2, |_| true), None);
        let note = thread_note(2, |name| name == "OMP_NUM_THREADS").unwrap();
        assert!(note.starts_with("RAYON_NUM_THREADS is set to 1 for each worker"), "{note}");
        let note = thread_note(2, |_| false).unwrap();
        assert!(
            note.starts_with("OMP_NUM_THREADS and RAYON_NUM_THREADS are set to 1 for each worker"),
            "{note}"
        );
    }

    #[test]
    fn what_has_no_effect_is_said() {
        let notes = |words: &[&str]| parse(&[words, &["./train"]].concat()).unwrap().notes();
        assert!(notes(&["--log-dir", "x"])[0].contains("--tee 3"));
        assert!(notes(&["--log-dir", "x", "--tee", "1"]).is_empty());
        let standalone =
            notes(&["--standalone", "--rdzv-endpoint", "node7:1", "--master-port", "2", "--node-rank", "1"]);
        for (note, option) in standalone.iter().zip(["--rdzv-endpoint", "--master-port", "--node-rank"]) {
            assert!(note.contains(option), "{standalone:?}");
        }
        assert_eq!(standalone.len(), 3);
        assert!(notes(&["--rdzv-conf", "read_timeout=9,is_host=1"])[0].contains("read_timeout"));
        assert_eq!(local_ranks("0, 2"), Ok(LocalRanks(vec![0, 2])));
        assert!(local_ranks("0,x").is_err() && local_ranks("0,").is_err());
        assert_eq!(local_ranks(""), Ok(LocalRanks(Vec::new())));
    }
}
