//! The options of an elastic job.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use phalanx::WorldSize;
use phalanx::launch::{ElasticHosts, HostDiscovery, Job};

use crate::cli::seconds;
use crate::processes::out_of_range;

#[derive(Args, Debug)]
#[command(next_help_heading = "Elastic jobs")]
pub(crate) struct ElasticOptions {
    /// Makes the job elastic, for a program that trains inside `phalanx::elastic::run`: the others continue when a worker fails,
    /// as long as at least N are left. Failed workers are replaced, at most --max-restarts times
    #[arg(long, alias = "min_np", value_name = "N")]
    pub(crate) min_np: Option<u32>,

    /// The largest number of workers, on several hosts [default: all slots of the hosts]
    #[arg(long, alias = "max_np", value_name = "N", requires = "min_np")]
    pub(crate) max_np: Option<u32>,

    /// How often the workers of an elastic job may form a new group [default: no limit]
    #[arg(long, alias = "reset_limit", value_name = "N", requires = "min_np")]
    pub(crate) reset_limit: Option<u32>,

    /// A program, or a command line for the shell, that prints the available hosts, one `host:slots` or `host` per line. It runs every second. New hosts get
    /// workers; the workers of hosts that it no longer prints are ended
    #[arg(long, alias = "host_discovery_script", value_name = "PROGRAM", requires = "min_np",
          conflicts_with_all = ["hosts", "hostfile", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "standalone",
                                "nproc_per_node"])]
    pub(crate) host_discovery_script: Option<PathBuf>,

    /// The slots of hosts that --host-discovery-script prints without a number [default: 1]
    #[arg(long, value_name = "N", requires = "host_discovery_script")]
    pub(crate) slots: Option<u32>,

    /// How long a host is left out of an elastic job after it was lost, or its workers have failed repeatedly: MIN seconds
    /// the first time, then twice as long each time, up to MAX [default: 5 300]
    #[arg(long, alias = "blacklist_cooldown_range", num_args = 2, value_names = ["MIN", "MAX"], requires = "min_np",
          value_parser = seconds)]
    pub(crate) blacklist_cooldown_range: Vec<Duration>,

    /// How long a job on several hosts may have fewer workers than --min-np while it waits for new ones [default: 600]
    #[arg(long, alias = "elastic_timeout", value_name = "SECONDS", requires = "min_np", value_parser = seconds)]
    pub(crate) elastic_timeout: Option<Duration>,
}

impl ElasticOptions {
    pub(crate) fn apply(&self, job: Job) -> Result<Job, String> {
        let Some(min) = self.min()? else { return Ok(job) };
        let job = job.min_workers(min);
        Ok(self.reset_limit.into_iter().fold(job, Job::reset_limit))
    }

    /// The settings that make the job on the named hosts elastic, if it is; `initial` workers are asked for at first.
    pub(crate) fn hosts(
        &self,
        initial: Option<u32>,
        max_restarts: u32,
    ) -> Result<Option<ElasticHosts>, String> {
        let Some(min) = self.min()? else { return Ok(None) };
        let elastic = ElasticHosts::new(min).max_restarts(max_restarts);
        // It cannot wait for so many: all that come take part at once.
        let max = self.max_np.or(initial);
        if let (Some(initial), Some(max)) = (initial, max)
            && !(min.get()..=max).contains(&initial)
        {
            return Err(format!("-np {initial} is not between --min-np {min} and --max-np {max}"));
        }
        let elastic = number("--max-np", max)?.into_iter().fold(elastic, ElasticHosts::max);
        let elastic = match *self.blacklist_cooldown_range {
            [first, most] if first > most => {
                return Err("--blacklist-cooldown-range MIN MAX: MIN is the larger one".to_owned());
            }
            [first, most] => elastic.cool_down(first, most),
            _ => elastic,
        };
        let slots = number("--slots", self.slots)?;
        let discovery = self.host_discovery_script.as_ref().map(HostDiscovery::new);
        let discovery = discovery.map(|script| slots.into_iter().fold(script, HostDiscovery::slots));
        let elastic = discovery.into_iter().fold(elastic, ElasticHosts::discovery);
        Ok(Some(self.elastic_timeout.into_iter().fold(elastic, ElasticHosts::timeout)))
    }

    /// On this machine alone, options about hosts would have no effect.
    pub(crate) fn needs_no_hosts(&self) -> Result<(), String> {
        let given = [
            ("--max-np", self.max_np.is_some()),
            ("--blacklist-cooldown-range", !self.blacklist_cooldown_range.is_empty()),
            ("--elastic-timeout", self.elastic_timeout.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(format!(
                "{option} is about hosts: name them with -H, --hostfile or --host-discovery-script"
            )),
            None => Ok(()),
        }
    }

    fn min(&self) -> Result<Option<WorldSize>, String> {
        number("--min-np", self.min_np)
    }
}

fn number(option: &str, workers: Option<u32>) -> Result<Option<WorldSize>, String> {
    workers
        .map(|count| WorldSize::new(count).map_err(|_| format!("{option} {count}: {}", out_of_range())))
        .transpose()
}
