//! The settings of an elastic job, and how its launcher describes it.

use std::time::Duration;

pub use super::commits::Drift;
use super::members::Settings;
use crate::env::LaunchEnv;
pub use crate::env::{ELASTIC as WORKERS, is_elastic};
use crate::error::{Error, Result};
use crate::group::GroupOptions;
use crate::key::JobKey;
use crate::store::MAX_RANKS;
use crate::wire::auth::Secret;

/// How often its workers may form a new group.
pub const RESET_LIMIT: &str = "PHALANX_RESET_LIMIT";

/// How [`run_with`](super::run_with) behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How each round's group is built.
    pub group: GroupOptions,
    /// What to do about replicas that have drifted apart.
    pub drift: Drift,
    /// How long the first round waits for more workers when there are enough: 30 s.
    pub first_call: Duration,
    /// How long a later round waits for more workers: 1 s. A replacement that comes later joins at the next commit.
    pub last_call: Duration,
    /// How long to wait for enough workers, and for a worker that is alive but does not leave its group: 600 s.
    pub join_timeout: Duration,
    /// The time limit for connecting a round's group: 60 s, and 0.1 s more for each of its workers, which connects with all others.
    pub connect_timeout: Duration,
    /// How often a worker sends a heartbeat to the job's store, 1 s, and after how many missing ones it is declared dead. If that is
    /// not given, as many as fit into the time-outs of [`group`](Self::group) and at least 5: if all workers are on one host 5, else 12.
    pub keep_alive: (Duration, Option<u32>),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            group: GroupOptions::default(),
            drift: Drift::default(),
            first_call: Duration::from_secs(30),
            last_call: Duration::from_secs(1),
            join_timeout: Duration::from_secs(600),
            connect_timeout: Duration::from_secs(60),
            keep_alive: (Duration::from_secs(1), None),
        }
    }
}

impl Options {
    /// The defaults, with [`GroupOptions::from_env`].
    ///
    /// # Errors
    /// As those of [`GroupOptions::from_env`].
    pub fn from_env() -> Result<Self> {
        Ok(Self { group: GroupOptions::from_env()?, ..Self::default() })
    }
}

/// An elastic job, as its launcher describes it to a worker.
#[derive(Clone, Debug)]
pub(super) struct ElasticEnv {
    pub(super) env: LaunchEnv,
    pub(super) settings: Settings,
}

impl ElasticEnv {
    /// None if no launcher has started an elastic job.
    pub(super) fn from_process() -> Result<Option<Self>> {
        let settings = settings(|name| std::env::var(name).ok())?;
        let Some(settings) = settings else { return Ok(None) };
        match LaunchEnv::from_process()? {
            Some(env) => Ok(Some(Self { env, settings })),
            None => {
                Err(Error::environment(format!("{WORKERS} is set, but no launcher's other variables are"))
                    .with_remedy(format!(
                        "start the program with `phalanx run --min-np`, or unset {WORKERS}"
                    )))
            }
        }
    }
}

/// A name of this elastic job that all its workers compute, and no other job has; none if the job is not elastic. It
/// may be written to disk: the key cannot be derived from it.
pub fn job_name() -> Result<Option<String>> {
    let Some(ElasticEnv { env, .. }) = ElasticEnv::from_process()? else { return Ok(None) };
    let known = format!("{:?} {:?}", env.run_id, env.rendezvous);
    let secret =
        Secret::new(JobKey::from_env()?.as_ref().map(JobKey::bytes), "phalanx job name", known.as_bytes());
    Ok(Some(secret.tag("name", &[])[..16].iter().map(|byte| format!("{byte:02x}")).collect()))
}

fn settings(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Settings>> {
    let value = |name| lookup(name).filter(|value| !value.trim().is_empty());
    let malformed = |name: &str, value: &str, form: &str| {
        Error::environment(format!("{name}={value:?} is not {form}"))
            .with_remedy("`phalanx run --min-np` sets it for each worker")
    };
    let Some(workers) = value(WORKERS) else { return Ok(None) };
    let numbers =
        workers.trim().split_once(':').and_then(|(min, max)| min.parse().ok().zip(max.parse().ok()));
    let (min, max) = match numbers {
        Some((min, max)) if min >= 1 && min <= max => (min, max),
        _ => return Err(malformed(WORKERS, &workers, "MIN:MAX")),
    };
    if min > MAX_RANKS {
        return Err(Error::environment(format!(
            "an elastic job of at least {min} workers is too large for its store, which serves {MAX_RANKS}"
        ))
        .with_remedy("lower --min-np"));
    }
    let reset_limit = match value(RESET_LIMIT) {
        Some(limit) => Some(limit.trim().parse().map_err(|_| malformed(RESET_LIMIT, &limit, "a number"))?),
        None => None,
    };
    // In any round: more may wait for a place.
    Ok(Some(Settings { min, max: max.min(MAX_RANKS), reset_limit }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(workers: Option<&str>, limit: Option<&str>) -> Result<Option<Settings>> {
        settings(|name| if name == WORKERS { workers } else { limit }.map(str::to_owned))
    }

    #[test]
    fn the_launchers_words_are_read_and_checked() {
        assert_eq!(of(None, Some("3")).unwrap(), None);
        assert_eq!(of(Some(""), None).unwrap(), None);
        assert_eq!(of(Some("2:4"), None).unwrap(), Some(Settings { min: 2, max: 4, reset_limit: None }));
        assert_eq!(of(Some("1:1"), Some("7")).unwrap().unwrap().reset_limit, Some(7));
        for (workers, limit) in
            [("0:2", None), ("3:2", None), ("4", None), ("a:b", None), ("1:2", Some("-1"))]
        {
            let error = of(Some(workers), limit).unwrap_err();
            assert!(error.is_environment() && error.remedy().is_some(), "{error}");
        }
    }

    #[test]
    fn more_workers_than_the_store_serves_are_refused() {
        // A job that grows later stays within it.
        for workers in [format!("{MAX_RANKS}:65536"), "2:65536".to_owned()] {
            assert_eq!(of(Some(&workers), None).unwrap().unwrap().max, MAX_RANKS);
        }
        let error = of(Some(&format!("{}:65536", MAX_RANKS + 1)), None).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains("--min-np"), "{error}");
    }
}
