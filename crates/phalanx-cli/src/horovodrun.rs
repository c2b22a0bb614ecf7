//! `phalanx horovodrun`, also under the name `horovodrun`: Horovod's launcher, in terms of `phalanx run`.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{ArgAction, Args, CommandFactory};
use phalanx::launch::ElasticHosts;

use crate::cli::{Cli, seconds};
use crate::output::print;

/// The name of the subcommand, and of links to this program.
pub(crate) const NAME: &str = "horovodrun";
/// Tells the launcher to set Horovod's variables for workers beside its own.
const MARK: &str = "PHALANX_HOROVODRUN";

const MANUAL: &str = "\
This is `phalanx run` under horovodrun's options, also as a link to phalanx with the name horovodrun. Workers see HOROVOD_RANK, \
HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE, HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE beside the variables of `phalanx run`, \
whose manual (`phalanx run --help`) describes everything else. Options of horovodrun that have no meaning here are refused, with what to do.

Examples:
  phalanx horovodrun -np 4 -H localhost:4 ./train
  phalanx horovodrun -np 8 -H a:4,b:4 --timeline-filename t.json ./train
  phalanx horovodrun -np 8 --min-np 4 --host-discovery-script ./hosts ./train";

/// The answer to --check-build, in Horovod's form.
const BUILD: &str = concat!(
    "Phalanx v",
    env!("CARGO_PKG_VERSION"),
    ":\n\nAvailable Controllers:\n    [ ] MPI\n    [ ] Gloo\n    [X] Phalanx\n\n\
     Available Tensor Operations:\n    [X] shared memory\n    [X] TCP\n    [ ] MPI\n    [ ] Gloo\n\n\
     There is one build. `phalanx doctor` looks at this machine, its GPUs and libraries.\n"
);

/// Start a program with horovodrun's options
#[derive(Args, Debug)]
#[command(version, after_long_help = MANUAL, after_help = "`--help` says more.")]
#[command(override_usage = "phalanx horovodrun -np N [OPTIONS] <PROGRAM> [ARGUMENTS]...")]
pub(crate) struct Horovodrun {
    /// The number of workers, written -np
    #[arg(long, visible_alias = "np", value_name = "N")]
    num_proc: Option<OsString>,

    /// The hosts, and how many workers each takes
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,..")]
    hosts: Option<OsString>,

    /// A file with the hosts, and how many workers each takes: one `host slots=4` a line
    #[arg(long, value_name = "FILE")]
    hostfile: Option<OsString>,

    /// The port of the hosts' ssh servers
    #[arg(short = 'p', long, value_name = "PORT")]
    ssh_port: Option<OsString>,

    /// The file of ssh's private key
    #[arg(short = 'i', long, value_name = "FILE")]
    ssh_identity_file: Option<OsString>,

    /// How long the hosts may take to answer, and then their launchers to find each other [default: HOROVOD_START_TIMEOUT, or 30]
    #[arg(long, value_name = "SECONDS")]
    start_timeout: Option<OsString>,

    /// A folder for the workers' output, which is shown too
    #[arg(long, value_name = "FOLDER")]
    output_filename: Option<OsString>,

    /// Megabytes of tensors that are reduced in one operation (sets HOROVOD_FUSION_THRESHOLD)
    #[arg(long, value_name = "MB", value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    fusion_threshold_mb: Option<u64>,

    /// Milliseconds from one cycle of negotiation to the next (sets HOROVOD_CYCLE_TIME)
    #[arg(long, value_name = "MS", value_parser = time)]
    cycle_time_ms: Option<f64>,

    /// How many tensor names are remembered (sets HOROVOD_CACHE_CAPACITY)
    #[arg(long, value_name = "N")]
    cache_capacity: Option<u64>,

    /// Find a good fusion threshold and cycle time by measurement (sets HOROVOD_AUTOTUNE)
    #[arg(long)]
    autotune: bool,

    /// Do not tune, also if HOROVOD_AUTOTUNE is set
    #[arg(long, conflicts_with = "autotune")]
    no_autotune: bool,

    /// The file of a trace that contains the negotiation (sets HOROVOD_TIMELINE)
    #[arg(long, value_name = "FILE")]
    timeline_filename: Option<PathBuf>,

    /// Do not report tensors that some ranks have not submitted, and do not end the job for them (sets HOROVOD_STALL_CHECK_DISABLE)
    #[arg(long, conflicts_with = "stall_check_warning_time_seconds")]
    no_stall_check: bool,

    /// Report tensors that some ranks have not submitted, also if HOROVOD_STALL_CHECK_DISABLE is set
    #[arg(long, conflicts_with = "no_stall_check")]
    stall_check: bool,

    /// After how long such tensors are reported (sets HOROVOD_STALL_CHECK_TIME_SECONDS)
    #[arg(long, value_name = "SECONDS", value_parser = time)]
    stall_check_warning_time_seconds: Option<f64>,

    /// After how long such tensors end the job; 0 for never (sets HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)
    #[arg(long, value_name = "SECONDS", value_parser = time)]
    stall_check_shutdown_time_seconds: Option<f64>,

    /// The fewest workers of an elastic job
    #[arg(long, alias = "min-num-proc", value_name = "N")]
    min_np: Option<OsString>,

    /// The most workers of an elastic job
    #[arg(long, alias = "max-num-proc", value_name = "N")]
    max_np: Option<OsString>,

    /// How often the workers of an elastic job may form a new group
    #[arg(long, value_name = "N")]
    reset_limit: Option<OsString>,

    /// A program that prints the available hosts
    #[arg(long, value_name = "PROGRAM")]
    host_discovery_script: Option<OsString>,

    /// The slots of hosts that --host-discovery-script prints without a number
    #[arg(long, alias = "slots-per-host", value_name = "N")]
    slots: Option<OsString>,

    /// How long the job may have fewer workers than --min-np while it waits for new ones [default: HOROVOD_ELASTIC_TIMEOUT, or 600]
    #[arg(long, value_name = "SECONDS")]
    elastic_timeout: Option<OsString>,

    /// How long a host is left out of an elastic job after it was lost; then it is started again. Without this option, neither hosts nor
    /// workers are started again
    #[arg(long, num_args = 2, value_names = ["MIN", "MAX"])]
    blacklist_cooldown_range: Vec<OsString>,

    /// Print what this build can do, and end
    #[arg(long)]
    check_build: bool,

    /// No effect: accepted for compatibility
    #[arg(long)]
    verbose: bool,

    /// No effect: the collectives are always Phalanx's
    #[arg(long)]
    gloo: bool,

    /// No effect: nothing is cached between jobs
    #[arg(long)]
    disable_cache: bool,

    /// No effect: the trace always has the rounds
    #[arg(long)]
    timeline_mark_cycles: bool,

    /// No effect: there is no MPI whose threads could be disabled
    #[arg(long)]
    no_mpi_threads_disable: bool,

    #[command(flatten)]
    refused: Refused,

    /// The program, looked for in PATH unless it contains a slash, and its arguments
    #[arg(required_unless_present = "check_build", trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// A time in any unit.
fn time(text: &str) -> Result<f64, String> {
    let time = text.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0);
    time.ok_or_else(|| "give a number from 0".to_owned())
}

/// Options that would have no effect, although their user expects one.
macro_rules! refused {
    ($($field:ident $([$value:literal])? => $option:literal, $instead:literal;)*) => {
        #[derive(Args, Debug)]
        struct Refused {
            $(
                #[arg(long = $option, hide = true, num_args = 0..=1, default_missing_value = "",
                      require_equals = refused!(@is_flag $($value)?), allow_hyphen_values = true)]
                $field: Option<OsString>,
            )*
        }

        impl Refused {
            /// What was given, and what to do instead.
            fn given(&self) -> Option<(&'static str, &'static str)> {
                let given = [$((self.$field.is_some(), $option, $instead)),*];
                given.into_iter().find(|(given, ..)| *given).map(|(_, option, instead)| (option, instead))
            }
        }
    };
    (@is_flag) => { true };
    (@is_flag $value:literal) => { false };
}

refused! {
    network_interfaces ["value"] => "network-interfaces", "set GLOO_SOCKET_IFNAME, or give --master-addr to `phalanx run`";
    network_interface ["value"] => "network-interface", "set GLOO_SOCKET_IFNAME, or give --master-addr to `phalanx run`";
    config_file ["value"] => "config-file", "give its settings as options, or as HOROVOD_* variables";
    gloo_timeout_seconds ["value"] => "gloo-timeout-seconds", "give --start-timeout";
    mpi => "mpi", "leave it out, or start the program with mpirun itself: it understands mpirun's variables";
    mpi_args ["value"] => "mpi-args", "start the program with mpirun itself: it understands mpirun's variables";
    mpi_threads_disable => "mpi-threads-disable", "there is no MPI";
    jsrun => "jsrun", "start the program with jsrun and set MASTER_ADDR and MASTER_PORT";
    tcp => "tcp", "set PHALANX_TRANSPORT=tcp";
    binding_args ["value"] => "binding-args", "Phalanx chooses the processors of its threads";
    thread_affinity ["value"] => "thread-affinity", "Phalanx chooses the processors of its threads";
    num_nccl_streams ["value"] => "num-nccl-streams", "there is no NCCL";
    hierarchical_allreduce => "hierarchical-allreduce", "ranks of one host always share memory";
    no_hierarchical_allreduce => "no-hierarchical-allreduce", "ranks of one host always share memory; PHALANX_TRANSPORT=tcp ends that";
    hierarchical_allgather => "hierarchical-allgather", "ranks of one host always share memory";
    no_hierarchical_allgather => "no-hierarchical-allgather", "ranks of one host always share memory; PHALANX_TRANSPORT=tcp ends that";
    autotune_log_file ["value"] => "autotune-log-file", "the program's own log has what is measured";
    autotune_warmup_samples ["value"] => "autotune-warmup-samples", "autotune measures for a fixed time";
    autotune_steps_per_sample ["value"] => "autotune-steps-per-sample", "autotune measures for a fixed time";
    autotune_bayes ["value"] => "autotune-bayes-opt-max-samples", "autotune tries each setting in turn";
    autotune_noise ["value"] => "autotune-gaussian-process-noise", "autotune tries each setting in turn";
    log_level ["value"] => "log-level", "Rust's programs have a tracing subscriber, Python's warnings alone";
    log_timestamp => "log-with-timestamp", "Rust's programs have a tracing subscriber, Python's warnings alone";
    log_without_timestamp => "log-without-timestamp", "Rust's programs have a tracing subscriber, Python's warnings alone";
    log_hide_timestamp => "log-hide-timestamp", "Rust's programs have a tracing subscriber, Python's warnings alone";
    no_log_hide_timestamp => "no-log-hide-timestamp", "Rust's programs have a tracing subscriber, Python's warnings alone";
    no_timeline_mark_cycles => "no-timeline-mark-cycles", "the timeline always has the rounds of negotiation";
    prefix_time => "prefix-output-with-timestamp", "give --log-format json to `phalanx run`: every event has its time";
}

/// Names and values for the environment.
type Variables = Vec<(&'static str, OsString)>;

impl Horovodrun {
    /// Whether anything says how many workers there are. `phalanx run` takes one otherwise, which nobody wants of horovodrun.
    fn says_how_many(&self) -> bool {
        [&self.num_proc, &self.hosts, &self.hostfile, &self.min_np, &self.host_discovery_script]
            .into_iter()
            .any(Option::is_some)
    }

    /// With the times that variables give in place of options, as Horovod reads them.
    fn with_variables(mut self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, String> {
        let given = |name: &str| {
            let Some(value) = variable(name).filter(|value| !value.is_empty()) else { return Ok(None) };
            let text = value.to_string_lossy().into_owned();
            match seconds(&text) {
                Ok(_) => Ok(Some(value)),
                Err(why) => Err(format!("{name}={text}: {why}")),
            }
        };
        if self.start_timeout.is_none() {
            self.start_timeout = given("HOROVOD_START_TIMEOUT")?;
        }
        // It is about hosts of elastic jobs, and refused for others, while the variable may be that of all jobs.
        let names_hosts =
            [&self.hosts, &self.hostfile, &self.host_discovery_script].into_iter().any(Option::is_some);
        if self.elastic_timeout.is_none() && self.min_np.is_some() && names_hosts {
            self.elastic_timeout = given("HOROVOD_ELASTIC_TIMEOUT")?;
        }
        Ok(self)
    }

    /// The same for `phalanx run`: its arguments, and what the environment has besides.
    fn translated(self) -> Result<(Vec<OsString>, Variables), String> {
        if let Some((option, instead)) = self.refused.given() {
            return Err(format!("--{option} has no meaning here: {instead}"));
        }
        let mut arguments: Vec<OsString> = vec!["run".into()];
        let same = [
            ("--num-proc", self.num_proc),
            ("--hosts", self.hosts),
            ("--hostfile", self.hostfile),
            ("--ssh-port", self.ssh_port),
            ("--ssh-identity-file", self.ssh_identity_file),
            ("--start-timeout", self.start_timeout),
            ("--min-np", self.min_np),
            ("--max-np", self.max_np),
            ("--reset-limit", self.reset_limit),
            ("--host-discovery-script", self.host_discovery_script),
            ("--slots", self.slots),
            ("--elastic-timeout", self.elastic_timeout),
            ("--log-dir", self.output_filename.clone()),
            ("--tee", self.output_filename.map(|_| "3".into())),
        ];
        for (option, value) in same {
            arguments.extend(value.into_iter().flat_map(|value| [option.into(), value]));
        }
        if !self.blacklist_cooldown_range.is_empty() {
            arguments.push("--blacklist-cooldown-range".into());
            arguments.extend(self.blacklist_cooldown_range);
            // Horovod starts hosts again, and their workers, as often as they fail, as long as others are left; otherwise the job ends. Without
            // the option it leaves them out for good, as without this.
            arguments.push("--max-restarts".into());
            arguments.push(ElasticHosts::NO_LIMIT.to_string().into());
        }
        arguments.push("--".into());
        arguments.extend(self.program);
        let number = |value: Option<f64>| value.map(|value| OsString::from(value.to_string()));
        let switch = |on: bool, off: bool| (on || off).then(|| OsString::from(if on { "1" } else { "0" }));
        let variables = [
            (MARK, switch(true, false)),
            (
                "HOROVOD_FUSION_THRESHOLD",
                self.fusion_threshold_mb.map(|mb| mb.saturating_mul(1 << 20).to_string().into()),
            ),
            ("HOROVOD_CYCLE_TIME", number(self.cycle_time_ms)),
            ("HOROVOD_CACHE_CAPACITY", self.cache_capacity.map(|names| names.to_string().into())),
            ("HOROVOD_AUTOTUNE", switch(self.autotune, self.no_autotune)),
            ("HOROVOD_TIMELINE", self.timeline_filename.map(PathBuf::into_os_string)),
            ("HOROVOD_STALL_CHECK_DISABLE", switch(self.no_stall_check, self.stall_check)),
            ("HOROVOD_STALL_CHECK_TIME_SECONDS", number(self.stall_check_warning_time_seconds)),
            ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", number(self.stall_check_shutdown_time_seconds)),
        ];
        let variables = variables.into_iter().filter_map(|(name, value)| Some((name, value?)));
        Ok((arguments, variables.collect()))
    }
}

/// Becomes `phalanx run`.
pub(crate) fn run(options: Horovodrun) -> ExitCode {
    let refuse = |message: String, code: u8| {
        let _ = writeln!(std::io::stderr(), "phalanx: {message}");
        ExitCode::from(code)
    };
    if options.check_build {
        return print(BUILD.as_bytes()).map_or_else(|message| refuse(message, 1), |()| ExitCode::SUCCESS);
    }
    // A Slurm job says it itself.
    let says_how_many =
        options.says_how_many() || std::env::var_os("SLURM_JOB_ID").is_some_and(|job| !job.is_empty());
    let options = options.with_variables(|name| std::env::var_os(name));
    let (arguments, variables) = match options.and_then(Horovodrun::translated) {
        Ok(translated) => translated,
        Err(message) => return refuse(message, 2),
    };
    if !says_how_many {
        let message = "how many workers? Give -np N, or the hosts with their slots (-H, --hostfile)";
        return refuse(message.to_owned(), 2);
    }
    match std::env::current_exe() {
        Ok(own) => {
            let error = Command::new(own).arg0("phalanx").args(arguments).envs(variables).exec();
            refuse(format!("cannot start `phalanx run`: {error}"), 126)
        }
        Err(error) => refuse(format!("cannot find this command's own file: {error}"), 1),
    }
}

/// The long option that a short one of several letters means, which Horovod has.
fn renamed(word: &str) -> Option<String> {
    let end = word.find('=').unwrap_or(word.len());
    let long = match &word[..end] {
        "-np" => "--num-proc",
        "-cb" => "--check-build",
        "-hostfile" => "--hostfile",
        "-prefix-timestamp" => "--prefix-output-with-timestamp",
        "-v" => "--version",
        _ => return None,
    };
    Some(format!("{long}{}", &word[end..]))
}

/// The command line as clap understands it: a link with the name horovodrun is the subcommand, and the short options of several
/// letters that Horovod has are long ones.
pub(crate) fn command_line(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut given: Vec<OsString> = given.collect();
    let called = given.first().and_then(|program| Path::new(program).file_name()).unwrap_or_default();
    if called == OsStr::new(NAME) {
        given.insert(1, NAME.into());
    }
    if given.get(1).is_none_or(|command| command != NAME) {
        return given;
    }
    let cli = Cli::command();
    let command = cli.find_subcommand(NAME);
    let values = |word: &str| {
        let named = |arg: &&clap::Arg| match word.strip_prefix("--") {
            Some(long) => {
                arg.get_long() == Some(long) || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
            }
            None => arg.get_short().is_some_and(|short| word == format!("-{short}")),
        };
        let arg = command.and_then(|command| command.get_arguments().find(named));
        arg.map_or(0, |arg| match arg.get_action() {
            ArgAction::SetTrue => 0,
            _ if arg.is_require_equals_set() => 0,
            _ => arg.get_num_args().map_or(1, |count| count.max_values()),
        })
    };
    // Behind the first word that is no option and no option's value, words are the program's.
    let mut skip = 0;
    for word in given.iter_mut().skip(2) {
        if skip > 0 {
            skip -= 1;
            continue;
        }
        match word.to_str().map(|text| (renamed(text), text.starts_with('-') && text != "--")) {
            Some((Some(long), _)) => *word = long.into(),
            Some((None, true)) => {}
            _ => break,
        }
        skip = word.to_str().filter(|word| !word.contains('=')).map_or(0, values);
    }
    given
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli;

    fn parse(line: &str) -> Result<Horovodrun, String> {
        let line = command_line(line.split_whitespace().map(OsString::from));
        match Cli::try_parse_from(line).map_err(|error| error.to_string())?.command {
            cli::Command::Horovodrun(options) => Ok(*options),
            _ => Err("not horovodrun".to_owned()),
        }
    }

    fn translated(line: &str) -> (String, Vec<String>) {
        let (arguments, variables) = parse(line).unwrap().translated().unwrap();
        let variables = variables.into_iter().map(|(name, value)| format!("{name}={}", value.display()));
        (arguments.join(OsStr::new(" ")).into_string().unwrap(), variables.collect())
    }

    #[test]
    fn its_options_become_those_of_run() {
        for name in ["phalanx horovodrun", "/usr/bin/horovodrun"] {
            let (arguments, variables) =
                translated(&format!("{name} -np 4 -H localhost:4 ./train -np 9 --mpi"));
            assert_eq!(arguments, "run --num-proc 4 --hosts localhost:4 -- ./train -np 9 --mpi");
            assert_eq!(variables, ["PHALANX_HOROVODRUN=1"]);
        }
        assert_eq!(
            translated("horovodrun -np=2 -hostfile=h x -np=3").0,
            "run --num-proc 2 --hostfile h -- x -np=3"
        );
        let elastic = "horovodrun -p 22 --verbose -np 8 --min-np 4 --max-num-proc 12 --host-discovery-script ./h --slots 2 \
                       --blacklist-cooldown-range 1 9 --reset-limit 3 --output-filename out x";
        let expected = "run --num-proc 8 --ssh-port 22 --min-np 4 --max-np 12 --reset-limit 3 --host-discovery-script ./h \
                        --slots 2 --log-dir out --tee 3 --blacklist-cooldown-range 1 9 --max-restarts 4294967295 -- x";
        assert_eq!(translated(elastic).0, expected);
    }

    #[test]
    fn times_may_be_given_by_horovods_variables() {
        let given = |line: &str, value: &str| {
            let variable = |name: &str| {
                let is_known = ["HOROVOD_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"].contains(&name);
                is_known.then(|| OsString::from(value))
            };
            let (arguments, _) = parse(line)?.with_variables(variable)?.translated()?;
            Ok::<_, String>(arguments.join(OsStr::new(" ")).into_string().unwrap())
        };
        let [alone, elastic] = ["horovodrun -np 1 x", "horovodrun -np 2 --min-np 1 -H a:1,b:1 x"];
        assert_eq!(given(alone, "90").unwrap(), "run --num-proc 1 --start-timeout 90 -- x");
        let both = "run --num-proc 2 --hosts a:1,b:1 --start-timeout 90 --min-np 1 --elastic-timeout 90 -- x";
        assert_eq!(given(elastic, "90").unwrap(), both);
        // Where no hosts are named, `phalanx run` refuses the option.
        let here = "run --num-proc 2 --start-timeout 90 --min-np 1 -- x";
        assert_eq!(given("horovodrun -np 2 --min-np 1 x", "90").unwrap(), here);
        assert_eq!(given(alone, "").unwrap(), "run --num-proc 1 -- x");
        // What is typed goes before them.
        let typed = "horovodrun -np 1 --start-timeout 5 x";
        assert_eq!(given(typed, "soon").unwrap(), "run --num-proc 1 --start-timeout 5 -- x");
        assert!(given(alone, "soon").unwrap_err().starts_with("HOROVOD_START_TIMEOUT=soon: "));
    }

    #[test]
    fn its_settings_become_variables() {
        let line = "horovodrun -np 1 --fusion-threshold-mb 32 --cycle-time-ms 3.5 --cache-capacity 7 --autotune \
                    --timeline-filename t.json --stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 9 x";
        let expected = [
            "PHALANX_HOROVODRUN=1",
            "HOROVOD_FUSION_THRESHOLD=33554432",
            "HOROVOD_CYCLE_TIME=3.5",
            "HOROVOD_CACHE_CAPACITY=7",
            "HOROVOD_AUTOTUNE=1",
            "HOROVOD_TIMELINE=t.json",
            "HOROVOD_STALL_CHECK_TIME_SECONDS=5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=9",
        ];
        assert_eq!(translated(line).1, expected);
        for (option, variable) in [
            ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE=1"),
            ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE=0"),
            ("--no-autotune", "HOROVOD_AUTOTUNE=0"),
        ] {
            assert_eq!(translated(&format!("horovodrun {option} x")).1[1..], [variable]);
        }
        // What is so anyway.
        for option in ["--timeline-mark-cycles", "--no-mpi-threads-disable", "--gloo", "--disable-cache"] {
            assert_eq!(translated(&format!("horovodrun {option} x")).1.len(), 1, "{option}");
        }
        assert!(parse("horovodrun --autotune --no-autotune x").unwrap_err().contains("cannot be used with"));
        for time in ["nan", "inf", "soon"] {
            let error = parse(&format!("horovodrun --cycle-time-ms {time} x")).unwrap_err();
            assert!(error.contains("give a number from 0"), "{error}");
        }
        assert!(parse("horovodrun -v").unwrap_err().contains(env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn a_build_is_checked_without_a_program() {
        for line in ["horovodrun --check-build", "horovodrun -cb", "horovodrun --check-build x"] {
            assert!(parse(line).unwrap().check_build, "{line}");
        }
        assert!(!parse("horovodrun x").unwrap().check_build && parse("horovodrun").is_err());
        assert!(BUILD.contains("[X] shared memory") && BUILD.ends_with('\n'));
    }

    #[test]
    fn what_has_no_meaning_is_refused_with_what_to_do() {
        let refused = |line: &str| parse(line).unwrap().translated().unwrap_err();
        assert!(refused("horovodrun -np 2 --mpi-args --oversubscribe x").contains("with mpirun itself"));
        assert!(refused("horovodrun -np 2 --network-interfaces eth0 x").contains("GLOO_SOCKET_IFNAME"));
        assert!(refused("horovodrun --network-interface eth0 -np 2 x").contains("--master-addr"));
        assert!(refused("horovodrun --jsrun -np 2 x").contains("with jsrun"));
        for option in ["-prefix-timestamp", "--prefix-output-with-timestamp"] {
            assert!(refused(&format!("horovodrun {option} x")).contains("--log-format json"));
        }
        for option in ["--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"] {
            assert!(refused(&format!("horovodrun {option} x")).contains("tracing subscriber"));
        }
        assert!(refused("horovodrun --no-timeline-mark-cycles x").contains("always has the rounds"));
        assert!(refused("horovodrun --hierarchical-allreduce -np 2 x").contains("share memory"));
        assert!(
            parse("horovodrun -np 2 --fusion-threshold-md 3 x")
                .unwrap_err()
                .contains("--fusion-threshold-mb")
        );
    }

    #[test]
    fn other_commands_are_left_alone() {
        let line = ["phalanx", "run", "-np", "3", "x"].map(OsString::from);
        assert_eq!(command_line(line.iter().cloned()), line);
    }
}
