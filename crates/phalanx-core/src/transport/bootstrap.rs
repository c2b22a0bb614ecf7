//! The bootstrap exchange: data that ranks exchange through the store while they connect.

use std::time::Duration;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::tcp::MeshConfig;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::notice::Reminders;
use crate::rank::Rank;

/// How long the store may take to say which rank's message is missing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The health of a group that is being connected: data can be exchanged while the connections are made.
#[derive(Default)]
pub(crate) struct Starting {
    /// Once the connections stand.
    health: OnceLock<Arc<Health>>,
    /// Whether this rank could not make its connections.
    has_failed: AtomicBool,
}

impl Starting {
    /// The connections stand.
    pub(crate) fn connected(&self, health: Arc<Health>) {
        // There is one group.
        let _ = self.health.set(health);
    }

    /// The connections could not be made.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    fn cause(&self) -> Option<Error> {
        if self.has_failed.load(Ordering::Relaxed) {
            return Some(Error::aborted("the ranks could not be connected"));
        }
        self.health.get().and_then(|health| health.cause())
    }

    fn explain(&self, error: Error) -> Error {
        match self.health.get() {
            Some(health) => health.explain(error),
            None => error,
        }
    }
}

/// Publishes this rank's message on `topic`.
pub(crate) fn publish<T: Serialize>(
    config: &MeshConfig<'_>,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<()> {
    config.store.set(&key(topic, config.rank), &encode(topic, message)?, deadline)
}

fn encode<T: Serialize>(topic: &str, message: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(|error| malformed(topic, error))
}

/// Publishes this rank's message on `topic` and returns all ranks' messages. If a rank dies meanwhile, the wait ends.
pub(crate) fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    starting: &Starting,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let ranks: Vec<Rank> = config.world.ranks().collect();
    exchange_among(config, &ranks, starting, topic, message, deadline)
}

/// [`exchange`] among some of the `ranks`, including this one; returns their messages in that order.
pub(crate) fn exchange_among<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    ranks: &[Rank],
    starting: &Starting,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let (own, message) = (key(topic, config.rank), encode(topic, message)?);
    let keys: Vec<String> = ranks.iter().map(|rank| key(topic, *rank)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut reminders = Reminders::new();
    let mut go_on = || {
        if let Some(cause) = starting.cause() {
            return Err(cause);
        }
        (config.watch)()?;
        reminders.remind(|| {
            let soon = Deadline::after(ANSWER_TIMEOUT);
            let is_missing =
                |index: &usize| !config.store.check(&keys[*index..=*index], soon).unwrap_or(true);
            let missing = (0..keys.len()).find(is_missing).map(|index| ranks[index]);
            let who = missing.map_or("other ranks".to_owned(), |rank| format!("rank {rank}"));
            format!("rank {} waits for {who} to publish the message {topic:?}", config.rank)
        });
        Ok(())
    };
    // One request, also where a round trip is long: a wait in short parts would never see its answer.
    let messages = config.store.set_and_get(&[(&own, &message)], &keys, deadline, &mut go_on);
    let messages = messages.map_err(|error| match error.is_timeout() {
        true => error,
        // Rank 0 may have died, with the store that it serves.
        false => starting.explain(error),
    })?;
    messages
        .iter()
        .map(|bytes| postcard::from_bytes(bytes).map_err(|error| malformed(topic, error)))
        .collect()
}

/// The key of the message of `rank` on `topic`.
pub(crate) fn key(topic: &str, rank: Rank) -> String {
    format!("{topic}/{rank}")
}

fn malformed(topic: &str, error: postcard::Error) -> Error {
    Error::malformed(format!("the store holds a malformed message on {topic}")).with_source(error)
}
