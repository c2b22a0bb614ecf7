//! The options of an elastic job.

use clap::Args;
use phalanx::WorldSize;
use phalanx::launch::Job;

#[derive(Args, Debug)]
#[command(next_help_heading = "Elastic")]
pub(crate) struct ElasticOptions {
    /// Makes the job elastic, for a program that trains inside `phalanx::elastic::run`: a worker that fails ends nobody else
    /// as long as there are so many, and is replaced as often as --max-restarts says
    #[arg(long, alias = "min_np", value_name = "N")]
    pub(crate) min_np: Option<u32>,

    /// How often the workers of an elastic job may form a new group [default: without end]
    #[arg(long, alias = "reset_limit", value_name = "N", requires = "min_np")]
    pub(crate) reset_limit: Option<u32>,
}

impl ElasticOptions {
    pub(crate) fn apply(&self, job: Job) -> Result<Job, String> {
        let Some(min) = self.min_np else { return Ok(job) };
        let min = WorldSize::new(min).map_err(|error| format!("--min-np {min}: {error}"))?;
        let job = job.min_workers(min);
        Ok(self.reset_limit.into_iter().fold(job, Job::reset_limit))
    }
}
