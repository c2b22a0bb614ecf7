//! An elastic job on several hosts, like `horovodrun`: hosts may be lost, and others may be added.
//!
//! The command that the user has started serves the workers' store. On each host a launcher, the
//! [`agent`](crate::agent), starts the workers, reports their ends, and is told which ones to replace.
//! [`host_manager`] decides which hosts take part and when; [`plan`] does it; [`discovery`] runs the user's script.
//!
//! The command leads and serves the store, because the process that decides about hosts and replacements must outlive
//! every host and know all of them, and the command holds ssh's connections. A store on one of the hosts would make the
//! job depend on that host. So the launchers agree on nothing among themselves, and all share one budget of restarts.
//!
//! The command also appends the number of workers to their log, so that a round neither waits for workers that will not
//! come nor leaves out those that are about to.

mod discovery;
mod plan;

use std::path::PathBuf;
use std::time::Duration;

use self::plan::ElasticPlan;
use super::driver::Launchers;
use crate::cluster::NO_LIMIT;
use crate::error::{Error, Result};
use crate::host_manager::Limits;
use crate::job::given_name;
use crate::store::MAX_RANKS;
use crate::world_size::WorldSize;

/// What makes a [remote job](super::RemoteJob) elastic.
#[derive(Clone, Debug)]
pub struct ElasticHosts {
    min: WorldSize,
    max: Option<WorldSize>,
    max_restarts: u32,
    cool_down: (Duration, Duration),
    timeout: Duration,
    discovery: Option<HostDiscovery>,
    run_id: Option<String>,
}

/// A program that prints the available hosts, one per line: `node1:4`, or `node1`. If it prints a host twice, the last line
/// counts. A shell runs it, so it may have arguments.
#[derive(Clone, Debug)]
pub struct HostDiscovery {
    script: PathBuf,
    slots: u32,
}

impl HostDiscovery {
    /// `script`, a file or a command line, is started every second, and may take ten seconds. If it fails five times before it has
    /// printed any list, the job ends. If it prints no host, and does not fail, hosts are waited for, or the last list stays in use.
    pub fn new(script: impl Into<PathBuf>) -> Self {
        Self { script: script.into(), slots: 1 }
    }

    /// The slots of a host that is printed without a number; 1 if not given.
    pub fn slots(mut self, slots: WorldSize) -> Self {
        self.slots = slots.get();
        self
    }
}

impl ElasticHosts {
    /// As [`max_restarts`](Self::max_restarts): any number of times, as long as a worker goes on that holds the state. When all have failed the
    /// job ends, as Horovod's.
    pub const NO_LIMIT: u32 = crate::host_manager::NO_LIMIT;

    /// The job goes on as long as at least `min` workers are left.
    pub fn new(min: WorldSize) -> Self {
        Self {
            min,
            max: None,
            max_restarts: 0,
            cool_down: (Duration::from_secs(5), Duration::from_secs(300)),
            timeout: Duration::from_secs(600),
            discovery: None,
            run_id: None,
        }
    }

    /// The largest number of workers; if not given, the number of slots of all hosts.
    pub fn max(mut self, max: WorldSize) -> Self {
        self.max = Some(max);
        self
    }

    /// How often a failed worker is replaced, or a lost host is tried again, for all hosts together; 0 if not given. A
    /// host that has not worked since the last try is tried again at no cost. [`NO_LIMIT`](Self::NO_LIMIT) is no limit.
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.max_restarts = restarts;
        self
    }

    /// How long a host is left out after a failure: `first`, which is more than 0, then twice as long each time, up to `most`. 5 s and
    /// 300 s if not given.
    pub fn cool_down(mut self, first: Duration, most: Duration) -> Self {
        self.cool_down = (first, most.max(first));
        self
    }

    /// How long a job may have fewer workers than the minimum while hosts may still come: 600 s if not given.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Where the list of hosts comes from, instead of the list with which the job was made.
    pub fn discovery(mut self, discovery: HostDiscovery) -> Self {
        self.discovery = Some(discovery);
        self
    }

    /// The job's name (`TORCHELASTIC_RUN_ID`), as in [`Job::run_id`](crate::Job::run_id).
    pub fn run_id(mut self, run_id: impl Into<String>) -> Self {
        self.run_id = given_name(run_id);
        self
    }

    /// How a job on these hosts is driven.
    pub(super) fn plan(&self, launchers: &mut Launchers<'_>) -> Result<ElasticPlan> {
        let hosts = launchers.job.hosts.hosts().iter();
        let limits = self.limits(hosts.fold(0_u32, |slots, host| slots.saturating_add(host.slots())))?;
        ElasticPlan::start(self, limits, launchers)
    }

    /// The limits on hosts that have so many `slots` together.
    fn limits(&self, slots: u32) -> Result<Limits> {
        let is_open = self.discovery.is_some();
        let most = if is_open { MAX_RANKS } else { slots.min(MAX_RANKS) };
        let max = self.max.map_or(most, WorldSize::get);
        if max > MAX_RANKS {
            let cause = format!("up to {max} workers are asked for, and a job's store serves {MAX_RANKS}");
            return Err(Error::invalid_argument(cause).with_remedy("lower --max-np (or -np)"));
        }
        if self.min.get() > max || self.min.get() > most {
            let cause = format!(
                "at least {} workers are asked for, but there are at most {}",
                self.min,
                max.min(most)
            );
            return Err(Error::invalid_argument(cause)
                .with_remedy("--min-np may be at most --max-np, and the number of all hosts' slots"));
        }
        if self.cool_down.0.is_zero() {
            let cause = "a host that fails would be started again and again without a pause";
            return Err(Error::invalid_argument(cause).with_remedy(
                "--blacklist-cooldown-range MIN MAX: give a MIN of more than 0 seconds, which is doubled after each failure",
            ));
        }
        Ok(Limits {
            min: self.min.get(),
            max,
            max_restarts: self.max_restarts,
            cool_down: (self.cool_down.0.min(NO_LIMIT), self.cool_down.1.min(NO_LIMIT)),
            timeout: self.timeout.min(NO_LIMIT),
            is_open,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_name_is_none() {
        let named = |name: &str| ElasticHosts::new(WorldSize::ONE).run_id(name).run_id;
        assert_eq!((named(" "), named("job7 ").as_deref()), (None, Some("job7")));
    }

    #[test]
    fn a_host_is_left_out_for_some_time() {
        let limits = |first| {
            let elastic = ElasticHosts::new(WorldSize::ONE);
            elastic.cool_down(first, Duration::from_secs(9)).limits(1)
        };
        assert!(limits(Duration::from_millis(1)).is_ok());
        let error = limits(Duration::ZERO).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("more than 0 seconds"), "{error}");
    }

    #[test]
    fn a_job_grows_to_no_more_workers_than_its_store_serves() {
        let size = |size| WorldSize::new(size).unwrap();
        let named = ElasticHosts::new(size(2));
        let discovered = named.clone().discovery(HostDiscovery::new("./hosts"));
        assert_eq!(named.limits(MAX_RANKS + 1).unwrap().max, MAX_RANKS);
        assert_eq!(discovered.limits(0).unwrap().max, MAX_RANKS);
        assert_eq!(discovered.clone().max(size(MAX_RANKS)).limits(0).unwrap().max, MAX_RANKS);
        let error = discovered.max(size(MAX_RANKS + 1)).limits(0).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("--max-np"), "{error}");
        let error = ElasticHosts::new(size(MAX_RANKS + 1)).limits(u32::MAX).unwrap_err();
        assert!(error.to_string().contains(&format!("there are at most {MAX_RANKS}")), "{error}");
    }
}
