//! What to start, and how.

use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use super::agent::Agent;
use super::attempts;
use super::cluster::Cluster;
use super::event::Observer;
use super::exit::Report;
use super::key_file::KeyFile;
use super::logs::Logs;
use super::placement::Placement;
use super::replacements::Replacements;
use crate::credentials::Credentials;
use crate::deadline::Deadline;
use crate::elastic;
use crate::error::{Error, Result};
use crate::host::unfit_host;
use crate::key::{self, JobKey};
use crate::random;
use crate::store::{Access, KeylessClients, Refusals, TcpStoreServer, host_port};
use crate::tls::{self, Tls};
use crate::world_size::WorldSize;

/// How long the system may take to look up the master address, which is one of this machine.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Where the workers' standard output and standard error go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// They come line by line as [events](super::Event::Line).
    #[default]
    Lines,
    /// They share those of this process.
    Inherit,
}

/// What makes a job elastic.
#[derive(Clone, Copy, Debug)]
struct Elastic {
    min: WorldSize,
    reset_limit: Option<u32>,
}

/// A job on this machine: a program, and how many copies of it.
///
/// Each worker finds torchrun's variables in its environment. This process serves the store at `MASTER_ADDR` and
/// `MASTER_PORT` as long as the job runs, and has bound the port before it starts workers: no other process can take
/// it.
#[derive(Clone, Debug)]
pub struct Job {
    pub(super) program: OsString,
    name: Option<OsString>,
    pub(super) arguments: Vec<OsString>,
    local_rank_option: Option<(OsString, usize)>,
    variables: Vec<(OsString, OsString)>,
    pub(super) workers: WorldSize,
    pub(super) role: String,
    master_addr: Option<String>,
    master_port: u16,
    grace: Duration,
    output: Output,
    max_restarts: u32,
    elastic: Option<Elastic>,
    run_id: Option<String>,
    pub(super) logs: Option<Logs>,
    pub(super) cluster: Option<Cluster>,
    pub(super) agent: Option<Agent>,
    pub(super) credentials: Credentials,
    open_store: bool,
    pub(super) subreaper: bool,
    shown: Option<Vec<u32>>,
}

impl Job {
    /// The longest line that is reported in one piece.
    pub const MAX_LINE: usize = 64 * 1024;
    /// The default grace period, as torchrun's.
    pub const GRACE: Duration = Duration::from_secs(30);

    /// `workers` copies of `program`, which is looked for in `PATH` unless it contains a slash.
    pub fn new(program: impl Into<OsString>, workers: WorldSize) -> Self {
        Self {
            program: program.into(),
            name: None,
            arguments: Vec::new(),
            local_rank_option: None,
            variables: Vec::new(),
            workers,
            role: "default".to_owned(),
            master_addr: None,
            master_port: 0,
            grace: Self::GRACE,
            output: Output::default(),
            max_restarts: 0,
            elastic: None,
            run_id: None,
            logs: None,
            cluster: None,
            agent: None,
            credentials: Credentials::default(),
            open_store: false,
            subreaper: false,
            shown: None,
        }
    }

    /// The program's arguments.
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments = arguments.into_iter().map(Into::into).collect();
        self
    }

    /// Passes `option=N` to each worker, with its local rank, before the argument numbered `index`: as torch.distributed.launch
    /// does, for programs that do not read `LOCAL_RANK`.
    pub fn local_rank_option(mut self, option: impl Into<OsString>, index: usize) -> Self {
        self.local_rank_option = Some((option.into(), index));
        self
    }

    /// The arguments of one worker.
    pub(super) fn arguments_of(&self, local_rank: u32) -> Vec<OsString> {
        let mut arguments = self.arguments.clone();
        if let Some((option, index)) = &self.local_rank_option {
            let mut argument = option.clone();
            argument.push(format!("={local_rank}"));
            arguments.insert((*index).min(arguments.len()), argument);
        }
        arguments
    }

    /// What the program sees as its own name (`argv[0]`), if not its path.
    pub fn name(mut self, name: impl Into<OsString>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets another variable for every worker.
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// The workers' role (`ROLE_NAME`); `default` if not given.
    pub fn role(mut self, role: impl Into<String>) -> Self {
        self.role = role.into();
        self
    }

    /// The address of this machine at which the store listens; 127.0.0.1 if not given.
    pub fn master_addr(mut self, address: impl Into<String>) -> Self {
        // Workers get an IPv6 address without brackets: other programs' resolvers do not accept brackets.
        self.master_addr = Some(address.into().trim_matches(['[', ']']).to_owned());
        self
    }

    /// The store's port. The default, 0, takes a free one.
    pub fn master_port(mut self, port: u16) -> Self {
        self.master_port = port;
        self
    }

    /// How long workers may take to end after SIGTERM, before SIGKILL.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Where the workers' output goes.
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// How often a failure ends all workers and starts them again, instead of ending the job; 0 if not given.
    ///
    /// Each time workers get a higher `TORCHELASTIC_RESTART_COUNT` and an empty store. No process of the attempt before
    /// is left on this machine. One that is left on another machine knows only the store of that attempt.
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.max_restarts = restarts;
        self
    }

    /// Makes the job elastic: workers that fail do not end the others, as long as at least `min` are left. Their program
    /// has to train inside [`elastic::run`](crate::elastic::run()).
    ///
    /// A worker that fails is replaced, at most [`max_restarts`](Self::max_restarts) times for all workers together. If
    /// a worker fails repeatedly soon after its start, its replacement starts after a pause. The job has succeeded when
    /// at least `min` workers have ended well and none is left.
    pub fn min_workers(mut self, min: WorldSize) -> Self {
        let reset_limit = self.elastic.and_then(|elastic| elastic.reset_limit);
        self.elastic = Some(Elastic { min, reset_limit });
        self
    }

    /// How often the workers of an elastic job may form a new group; no limit if not given.
    pub fn reset_limit(mut self, limit: u32) -> Self {
        let min = self.elastic.map_or(self.workers, |elastic| elastic.min);
        self.elastic = Some(Elastic { min, reset_limit: Some(limit) });
        self
    }

    /// The job's name (`TORCHELASTIC_RUN_ID`), of which blanks at its ends are no part. If none is given, or an empty one, it is `none` in a
    /// [cluster](Self::cluster), as torchrun's is, and else a name that no other job has.
    pub fn run_id(mut self, run_id: impl Into<String>) -> Self {
        self.run_id = given_name(run_id);
        self
    }

    /// Keeps the workers' output and errors in files.
    pub fn logs(mut self, logs: Logs) -> Self {
        self.logs = Some(logs);
        self
    }

    /// Runs on several nodes: `workers` of [`new`](Self::new) is then the number on this one, and the master address is
    /// the cluster's.
    pub fn cluster(mut self, cluster: Cluster) -> Self {
        self.cluster = Some(cluster);
        self
    }

    /// Is a part of an elastic job whose driver runs in another process.
    pub(super) fn part_of(mut self, agent: Agent) -> Self {
        self.agent = Some(agent);
        self
    }

    /// The key with which the job's processes authenticate each other. If not given, a job on one node makes its own,
    /// and a job on several nodes has none, because their launchers would not have the same one.
    pub fn key(mut self, key: JobKey) -> Self {
        self.credentials.key = Some(key);
        self
    }

    /// The certificates with which the job's processes authenticate each other and encrypt their connections; the
    /// workers read them from the same files. Every process of the job must have certificates of the same CA, also the
    /// launchers of other nodes.
    ///
    /// # Errors
    /// As those of [`Tls::read`].
    pub fn tls(mut self, ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        self.credentials.tls = Some(Tls::read(ca, certificate, key)?);
        let files = tls::VARIABLES.into_iter().zip([ca, certificate, key]);
        Ok(files.fold(self, |job, (name, path)| job.variable(name, path)))
    }

    /// [`tls`](Self::tls) with the files that this process's environment names, if it names any.
    pub(crate) fn tls_from_env(mut self) -> Result<Self> {
        self.credentials.tls = Tls::from_env()?;
        Ok(self)
    }

    /// Lets programs that do not know the job's key use the workers' store, from any host. Without this, only programs
    /// of this user on the store's own host may. PyTorch programs on several nodes need it. It excludes
    /// [`tls`](Self::tls), which those programs do not use.
    pub fn open_store(mut self, open: bool) -> Self {
        self.open_store = open;
        self
    }

    /// Makes this process, while the job runs, the parent of the job's orphans (Linux's child subreaper), so that they
    /// end with the job, also if they have cleared their environment. Only for a program that starts no other processes
    /// meanwhile: it would take their orphans for the job's. It has no effect if this process has children already, or
    /// is a subreaper. The first process of a container (its number is 1) uses the tag alone, because it is the parent
    /// of every orphan there; it reaps those that end.
    pub fn subreaper(mut self, subreaper: bool) -> Self {
        self.subreaper = subreaper;
        self
    }

    /// The local ranks of the workers whose lines are reported as [events](super::Event::Line); all if not given.
    /// [Files](Self::logs) are not affected.
    pub fn show_only(mut self, local_ranks: impl IntoIterator<Item = u32>) -> Self {
        self.shown = Some(local_ranks.into_iter().collect());
        self
    }

    /// Runs the job to its end.
    ///
    /// When this returns, no process of the job is left.
    ///
    /// While it runs, the job handles SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1 and SIGUSR2 for this
    /// process. Afterwards the previous handlers are in place. The program does not get a signal that ended the job,
    /// and may raise it again: see [`Outcome::Interrupted`](super::Outcome::Interrupted).
    ///
    /// # Errors
    /// If the job cannot be started or watched. A worker's failure is no error: it is in the report.
    pub fn run(&self, observer: &mut dyn Observer) -> Result<Report> {
        self.check_elastic()?;
        check_open_store(self.open_store, self.credentials.tls.is_some())?;
        attempts::run(self, observer)
    }

    pub(super) fn argv0(&self) -> &OsStr {
        self.name.as_ref().unwrap_or(&self.program)
    }

    pub(super) fn grace_period(&self) -> Duration {
        self.grace.min(Duration::from_secs(365 * 24 * 3600))
    }

    /// Whether the lines of the `local_rank`-th worker are reported as events.
    pub(super) fn shows(&self, local_rank: u32) -> bool {
        self.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank))
    }

    pub(super) fn captures_output(&self) -> bool {
        self.output == Output::Lines
    }

    /// The job with its key; `lent` holds the key for the workers.
    pub(super) fn with_key(&self, key: Option<JobKey>, lent: Option<&KeyFile>) -> Self {
        // An empty key counts as none: the key of this process's own launcher is not this job's.
        let path = lent.map(KeyFile::path).unwrap_or_default();
        let credentials = Credentials { key, ..self.credentials.clone() };
        let unused = if credentials.tls.is_none() { &tls::VARIABLES[..] } else { &[] };
        let job = Self { credentials, ..self.clone() }.variable(key::VARIABLE, path);
        unused.iter().fold(job, |job, name| job.variable(name, ""))
    }

    /// The given key, or a new one if no other launcher needs the same.
    pub(super) fn key_of_run(&self) -> Result<Option<JobKey>> {
        match &self.credentials.key {
            None if self.cluster.is_none() => JobKey::generate().map(Some),
            given => Ok(given.clone()),
        }
    }

    /// The clients that may use the store that is served for the workers.
    pub(super) fn workers_access(&self, refusals: &Refusals) -> Access {
        let keyless = if self.open_store { KeylessClients::All } else { KeylessClients::OfThisUser };
        Access::to(self.credentials.clone(), keyless).telling(refusals)
    }

    /// The clients that may use the launchers' store.
    pub(super) fn launchers_access(&self, refusals: &Refusals) -> Access {
        Access::to(self.credentials.clone(), KeylessClients::None).telling(refusals)
    }

    /// Serves the store.
    pub(super) fn serve_store(&self, refusals: &Refusals) -> Result<TcpStoreServer> {
        let access = self.workers_access(refusals);
        match &self.master_addr {
            None => TcpStoreServer::bind_for((Ipv4Addr::LOCALHOST, self.master_port).into(), access),
            Some(host) if let Some(why) = unfit_host(host) => Err(not_a_host(host, why)),
            Some(host) => TcpStoreServer::bind_to(
                &host_port(host, self.master_port),
                access,
                Deadline::after(RESOLVE_TIMEOUT),
            ),
        }
    }

    /// Where the workers find the store that listens at `address`.
    pub(super) fn master_name(&self, address: SocketAddr) -> String {
        self.master_addr.clone().unwrap_or_else(|| address.ip().to_string())
    }

    /// How often all workers may be started again.
    pub(super) fn restarts_allowed(&self) -> u32 {
        if self.elastic.is_some() { 0 } else { self.max_restarts }
    }

    /// The slots of an elastic job's workers.
    pub(super) fn replacements(&self, now: Instant) -> Option<Replacements> {
        let Elastic { min, .. } = self.elastic?;
        let workers = self.workers.count();
        Some(match self.agent {
            Some(_) => Replacements::of_agent(workers, now),
            None => Replacements::new(workers, min.count(), self.max_restarts, now),
        })
    }

    fn check_elastic(&self) -> Result<()> {
        let Some(Elastic { min, .. }) = self.elastic else { return Ok(()) };
        if self.agent.is_some() {
            // The driver of the job has checked the total number.
            return Ok(());
        }
        if self.cluster.is_some() {
            return Err(Error::invalid_argument(
                "an elastic job cannot have nodes whose launchers are started one by one (--nnodes)",
            )
            .with_remedy("let one command start all hosts, -H host:slots,.., or leave out --min-np"));
        }
        if min.get() > self.workers.get() {
            return Err(Error::invalid_argument(format!(
                "at least {min} workers are asked for, but only {} are started",
                self.workers
            ))
            .with_remedy("--min-np may be at most --nproc-per-node"));
        }
        Ok(())
    }

    /// The job's name: the given one, or a new one.
    pub(super) fn name_of_run(&self) -> Result<String> {
        match &self.run_id {
            Some(run_id) => Ok(run_id.clone()),
            // Launchers of other nodes could not know a new name.
            None if self.cluster.is_some() => Ok("none".to_owned()),
            None => random_name(),
        }
    }

    /// Every variable that the worker gets on top of this process's own.
    pub(super) fn environment(&self, local_rank: u32, placement: &Placement) -> Vec<(OsString, OsString)> {
        let worker = placement.worker(local_rank, self.workers, &self.role, self.max_restarts);
        let known = worker.variables().into_iter().map(|(name, value)| (name.into(), value.into()));
        // Empty variables count as not set: the values of this process's own launcher are not this job's.
        let (workers, limit) = match self.elastic {
            Some(Elastic { min, reset_limit }) => {
                let limit = reset_limit.map_or_else(String::new, |limit| limit.to_string());
                let most = self.agent.as_ref().map_or(self.workers.get(), |agent| agent.config.max_workers);
                (format!("{min}:{most}"), limit)
            }
            None => Default::default(),
        };
        let elastic = [(elastic::WORKERS, workers), (elastic::RESET_LIMIT, limit)];
        let elastic = elastic.map(|(name, value)| (name.into(), value.into()));
        known.chain(elastic).chain(self.variables.iter().cloned()).collect()
    }
}

/// An open store accepts clients without TLS, which a job with TLS does not allow.
pub(super) fn check_open_store(is_open: bool, uses_tls: bool) -> Result<()> {
    if is_open && uses_tls {
        return Err(Error::invalid_argument("an open store would admit programs that do not use TLS")
            .with_remedy("leave out open_store (--open-store), or the certificates (--tls-ca and so on)"));
    }
    Ok(())
}

/// The error for what was given as a host.
pub(super) fn not_a_host(host: &str, why: &str) -> Error {
    Error::invalid_argument(format!("{host:?} is no place to meet: {why}"))
        .with_remedy("correct --master-addr or --rdzv-endpoint, or the variable that sets it")
}

/// The name that was given to a job, if there is one. Workers read it from a variable, in which blanks at the ends do not count, nor an
/// empty value, and look for what their launcher writes under it.
pub(super) fn given_name(name: impl Into<String>) -> Option<String> {
    let name = name.into().trim().to_owned();
    Some(name).filter(|name| !name.is_empty())
}

/// A new name for the job.
pub(super) fn random_name() -> Result<String> {
    Ok(format!("{:016x}", random::number()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_the_name_that_its_workers_read() {
        let name = |name: &str| Job::new("train", WorldSize::ONE).run_id(name).name_of_run().unwrap();
        assert_eq!(name(" job 7\n"), "job 7");
        // As `--rdzv-id "$JOB"` where JOB is not set.
        for empty in ["", " "] {
            assert_eq!(name(empty).len(), random_name().unwrap().len());
        }
    }

    #[test]
    fn a_store_is_not_open_to_all_and_closed_to_those_without_tls() {
        let error = check_open_store(true, true).unwrap_err();
        assert!(error.to_string().contains("do not use TLS") && error.remedy().is_some(), "{error}");
        check_open_store(false, true).unwrap();
        check_open_store(true, false).unwrap();
    }
}
