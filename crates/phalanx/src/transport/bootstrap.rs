//! The bootstrap exchange: data that ranks exchange through the store while they connect.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::tcp::MeshConfig;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::health::Health;
use crate::notice::Reminders;
use crate::rank::Rank;

/// How often a rank that waits for the others checks whether they are alive.
const LOOK: Duration = Duration::from_millis(200);

/// Publishes this rank's message on `topic`.
pub(crate) fn publish<T: Serialize>(
    config: &MeshConfig<'_>,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<()> {
    let message = postcard::to_stdvec(message).map_err(|error| malformed(topic, error))?;
    config.store.set(&key(topic, config.rank), &message, deadline)
}

/// Publishes this rank's message on `topic` and returns all ranks' messages. If a rank dies meanwhile, the wait ends.
pub(crate) fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    health: &Health,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    let ranks: Vec<Rank> = config.world.ranks().collect();
    exchange_among(config, &ranks, health, topic, message, deadline)
}

/// [`exchange`] among some of the `ranks`, including this one; returns their messages in that order.
pub(crate) fn exchange_among<T: Serialize + for<'a> Deserialize<'a>>(
    config: &MeshConfig<'_>,
    ranks: &[Rank],
    health: &Health,
    topic: &str,
    message: &T,
    deadline: Deadline,
) -> Result<Vec<T>> {
    publish(config, topic, message, deadline).map_err(|error| health.explain(error))?;
    let keys: Vec<String> = ranks.iter().map(|rank| key(topic, *rank)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut reminders = Reminders::new();
    let messages = loop {
        match config.store.multi_get(&keys, deadline.at_most(LOOK)) {
            Err(error) if error.is_timeout() && !deadline.has_passed() => {
                if let Some(cause) = health.cause() {
                    return Err(cause);
                }
                reminders.remind(|| {
                    let soon = Deadline::after(LOOK);
                    let is_missing =
                        |index: &usize| !config.store.check(&keys[*index..=*index], soon).unwrap_or(true);
                    let missing = (0..keys.len()).find(is_missing).map(|index| ranks[index]);
                    let who = missing.map_or("other ranks".to_owned(), |rank| format!("rank {rank}"));
                    format!("rank {} waits for {who} to publish the message {topic:?}", config.rank)
                });
            }
            Err(error) if error.is_timeout() => return Err(error),
            // Rank 0 may have died, with the store that it serves.
            outcome => break outcome.map_err(|error| health.explain(error))?,
        }
    };
    messages
        .iter()
        .map(|bytes| postcard::from_bytes(bytes).map_err(|error| malformed(topic, error)))
        .collect()
}

fn key(topic: &str, rank: Rank) -> String {
    format!("{topic}/{rank}")
}

fn malformed(topic: &str, error: postcard::Error) -> Error {
    Error::protocol(format!("the store holds a malformed message on {topic}")).with_source(error)
}
