//! The launcher's variables, parsed once.
//!
//! The names are torchrun's, so that a program started by `torchrun`, by `phalanx run` or by a Kubernetes PyTorchJob
//! finds its place in the same way. Read them with [`LaunchEnv::from_process`]; a launcher sets them for each worker
//! with [`WorkerEnv::variables`].

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::rank::{Epoch, Rank, WorldSize};

/// The variables without which there is no world of several ranks.
const REQUIRED: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

const REMEDY: &str = "start the program with `phalanx run` or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and \
                      MASTER_PORT for every rank, or none of them for a world of one";

/// What a launcher told this worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// `RANK`.
    pub rank: Rank,
    /// `WORLD_SIZE`.
    pub world_size: WorldSize,
    /// `LOCAL_RANK`: the place among the workers of this host. Some launchers (Kubernetes) do not say.
    pub local_rank: Option<u32>,
    /// `LOCAL_WORLD_SIZE`: the number of workers on this host, if known.
    pub local_world_size: Option<u32>,
    /// `GROUP_RANK`: the place of this host among the hosts, if known.
    pub group_rank: Option<u32>,
    /// `MASTER_ADDR`: where the store is.
    pub master_addr: String,
    /// `MASTER_PORT`: the store's port.
    pub master_port: u16,
    /// `TORCHELASTIC_RESTART_COUNT`: which life of the job this is; 0 if unset.
    pub restart_count: Epoch,
    /// `TORCHELASTIC_RUN_ID`: the job's name, if it has one.
    pub run_id: Option<String>,
    /// `TORCHELASTIC_USE_AGENT_STORE`: the launcher serves the store, so that every rank is a client.
    pub agent_store: bool,
}

impl LaunchEnv {
    /// Reads this process's environment; `None` if no launcher has set anything.
    pub fn from_process() -> Result<Option<Self>> {
        Self::from_lookup(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads variables through `lookup`; `None` if not one of the required variables is set.
    ///
    /// ```
    /// use phalanx::env::LaunchEnv;
    /// let error = LaunchEnv::from_lookup(|name| (name == "RANK").then(|| "1".into())).unwrap_err();
    /// assert!(error.is_environment() && error.to_string().contains("WORLD_SIZE"));
    /// ```
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        if REQUIRED.iter().chain(&["LOCAL_RANK"]).all(|name| lookup(name).is_none()) {
            return Ok(None);
        }
        let variables = Variables { lookup };
        variables.require(&REQUIRED)?;

        let world_size: u32 = variables.parse("WORLD_SIZE")?;
        let world_size = WorldSize::new(world_size)
            .map_err(|error| malformed("WORLD_SIZE", &world_size.to_string(), error.cause()))?;
        let rank: u32 = variables.parse("RANK")?;
        let rank =
            world_size.rank(rank).map_err(|error| malformed("RANK", &rank.to_string(), error.cause()))?;
        let local_rank = variables.parse_optional("LOCAL_RANK")?;
        let local_world_size = variables.parse_optional("LOCAL_WORLD_SIZE")?;
        check_local(local_rank, local_world_size, world_size)?;

        Ok(Some(Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            group_rank: variables.parse_optional("GROUP_RANK")?,
            master_addr: variables.text("MASTER_ADDR").unwrap_or_default(),
            master_port: variables.parse("MASTER_PORT")?,
            restart_count: Epoch(variables.parse_optional("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0)),
            run_id: variables.text("TORCHELASTIC_RUN_ID"),
            agent_store: variables.flag("TORCHELASTIC_USE_AGENT_STORE")?,
        }))
    }
}

/// Where a launcher puts one worker; the reverse of [`LaunchEnv`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerEnv {
    /// The worker's place in the world.
    pub rank: Rank,
    /// Its place among the workers of its host.
    pub local_rank: u32,
    /// The number of workers in all.
    pub world_size: WorldSize,
    /// The number of workers on its host.
    pub local_world_size: u32,
    /// Its host's place among the hosts.
    pub group_rank: u32,
    /// The number of hosts.
    pub group_world_size: u32,
    /// The role's name; torchrun's is `default`.
    pub role_name: String,
    /// The store's address.
    pub master_addr: String,
    /// The store's port.
    pub master_port: u16,
    /// How often the workers have been started again.
    pub restart_count: Epoch,
    /// How often they may be.
    pub max_restarts: u32,
    /// The job's name.
    pub run_id: String,
    /// Does the launcher serve the store?
    pub agent_store: bool,
}

impl WorkerEnv {
    /// The variables to set for this worker. Threads are limited to one for each of several workers of a host, except
    /// where this process's environment already says something else.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        self.variables_given(|name| std::env::var_os(name).is_some())
    }

    fn variables_given(&self, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let agent_store = if self.agent_store { "True" } else { "False" };
        let mut variables = vec![
            ("RANK", self.rank.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("GROUP_RANK", self.group_rank.to_string()),
            ("GROUP_WORLD_SIZE", self.group_world_size.to_string()),
            ("ROLE_RANK", self.rank.to_string()),
            ("ROLE_NAME", self.role_name.clone()),
            ("ROLE_WORLD_SIZE", self.world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restart_count.0.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.clone()),
            ("TORCHELASTIC_USE_AGENT_STORE", agent_store.to_owned()),
        ];
        if self.local_world_size > 1 {
            let threads = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"].into_iter();
            variables.extend(threads.filter(|name| !is_set(name)).map(|name| (name, "1".to_owned())));
        }
        variables
    }
}

/// Variables behind a lookup; one that is empty counts as unset.
struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Checks that each of `names` has a value, and names all that have none.
    fn require(&self, names: &[&str]) -> Result<()> {
        let lacking: Vec<String> = names
            .iter()
            .filter(|name| self.text(name).is_none())
            .map(|name| match (self.lookup)(name) {
                Some(_) => format!("{name} is empty"),
                None => format!("{name} is not set"),
            })
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        Err(Error::environment(lacking.join(", ")).with_remedy(REMEDY))
    }

    fn parse<T: FromStr>(&self, name: &str) -> Result<T>
    where
        T::Err: std::fmt::Display,
    {
        self.require(&[name])?;
        let text = self.text(name).unwrap_or_default();
        text.parse().map_err(|error: T::Err| malformed(name, &text, &error.to_string()))
    }

    fn parse_optional<T: FromStr>(&self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::fmt::Display,
    {
        self.text(name).is_some().then(|| self.parse(name)).transpose()
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name).as_deref() {
            None => Ok(false),
            Some(text) if ["1", "true"].iter().any(|yes| text.eq_ignore_ascii_case(yes)) => Ok(true),
            Some(text) if ["0", "false"].iter().any(|no| text.eq_ignore_ascii_case(no)) => Ok(false),
            Some(text) => Err(malformed(name, text, "it is neither True nor False")),
        }
    }
}

fn check_local(rank: Option<u32>, size: Option<u32>, world: WorldSize) -> Result<()> {
    if let Some(size) = size
        && !(1..=world.get()).contains(&size)
    {
        let why = format!("a host has at least one worker and at most WORLD_SIZE={world}");
        return Err(malformed("LOCAL_WORLD_SIZE", &size.to_string(), &why));
    }
    let size = size.unwrap_or(world.get());
    match rank {
        Some(rank) if rank >= size => {
            let why = format!("it must be below the number of workers on the host, {size}");
            Err(malformed("LOCAL_RANK", &rank.to_string(), &why))
        }
        _ => Ok(()),
    }
}

fn malformed(name: &str, value: &str, why: &str) -> Error {
    Error::environment(format!("{name}={value:?}: {why}"))
        .with_remedy(format!("correct {name}, or unset the launcher's variables for a world of one"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
        let map: HashMap<String, String> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        LaunchEnv::from_lookup(|name| map.get(name).cloned())
    }

    const FULL: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

    fn with(extra: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        FULL.iter()
            .copied()
            .filter(|(k, _)| extra.iter().all(|(e, _)| e != k))
            .chain(extra.iter().copied())
            .collect()
    }

    #[test]
    fn no_variables_is_a_world_of_one() {
        assert_eq!(parse(&[]).unwrap(), None);
    }

    #[test]
    fn the_four_variables_are_enough() {
        let env = parse(&FULL).unwrap().unwrap();
        assert_eq!((env.rank.get(), env.world_size.get(), env.master_port), (1, 2, 29500));
        assert_eq!((env.local_rank, env.restart_count, env.agent_store), (None, Epoch(0), false));
    }

    #[test]
    fn what_is_unset_or_empty_is_named() {
        for lone in FULL {
            let error = parse(&[lone]).unwrap_err();
            assert!(error.is_environment());
            for (name, _) in FULL.iter().filter(|(name, _)| *name != lone.0) {
                assert!(error.to_string().contains(&format!("{name} is not set")), "{error}");
            }
            let error = parse(&with(&[(lone.0, " ")])).unwrap_err();
            assert!(error.to_string().contains(&format!("{} is empty", lone.0)), "{error}");
            assert!(error.remedy().is_some());
        }
    }

    #[test]
    fn what_is_malformed_is_named() {
        let cases = [
            ("RANK", "two"),
            ("RANK", "2"),
            ("RANK", "-1"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "70000"),
            ("MASTER_PORT", "70000"),
            ("LOCAL_RANK", "x"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "x"),
            ("TORCHELASTIC_RESTART_COUNT", "x"),
            ("TORCHELASTIC_USE_AGENT_STORE", "maybe"),
        ];
        for (name, value) in cases {
            let error = parse(&with(&[(name, value)])).unwrap_err();
            assert!(
                error.is_environment() && error.to_string().contains(&format!("{name}={value:?}")),
                "{error}"
            );
        }
    }

    #[test]
    fn what_a_launcher_sets_is_what_a_worker_reads() {
        let worker = WorkerEnv {
            rank: Rank::new(3),
            local_rank: 1,
            world_size: WorldSize::new(4).unwrap(),
            local_world_size: 2,
            group_rank: 1,
            group_world_size: 2,
            role_name: "default".into(),
            master_addr: "10.0.0.1".into(),
            master_port: 29500,
            restart_count: Epoch(2),
            max_restarts: 3,
            run_id: "job".into(),
            agent_store: true,
        };
        let variables = worker.variables_given(|name| name == "OMP_NUM_THREADS");
        assert_eq!(variables.len(), 16);
        let pairs: Vec<(&str, &str)> = variables.iter().map(|(k, v)| (*k, v.as_str())).collect();
        assert!(pairs.contains(&("RAYON_NUM_THREADS", "1")));
        let env = parse(&pairs).unwrap().unwrap();
        assert_eq!((env.rank, env.world_size, env.restart_count), (worker.rank, worker.world_size, Epoch(2)));
        assert_eq!((env.local_rank, env.local_world_size, env.group_rank), (Some(1), Some(2), Some(1)));
        assert_eq!((env.run_id.as_deref(), env.agent_store), (Some("job"), true));
    }
}
