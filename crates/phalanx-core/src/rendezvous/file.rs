//! `file:///path`: a store in a file.
//!
//! A greeting distinguishes the file from one that an earlier job has left. Rank 0 always creates a new file at the
//! path. Every other rank opens the file that is there, writes a hello with a random number, and waits for rank 0's
//! welcome to that number, which an old file cannot contain. If the path then names another file, it starts again with
//! that one.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use phalanx_proto::rendezvous::Identity;

use super::arrival::{arrive, nonce, report_aborted, reserve};
use super::{Held, KeepAlive, RankConfig, Rendezvous};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::rank::Rank;
use crate::store::{FileStore, PrefixStore, SharedStore, Store};

/// All hellos: one line each, rank and number.
const HELLOS: &str = "hellos";
/// How often a waiting rank checks whether the path names another file, and rank 0 looks for new hellos.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) fn join(
    path: &Path,
    config: &RankConfig,
    me: &Identity,
    deadline: Deadline,
) -> Result<Rendezvous> {
    if config.world_size.get() == 1 {
        return Ok(config.alone());
    }
    let file = match config.rank.is_main() {
        true => {
            let file = Arc::new(FileStore::create(path)?);
            welcome_all(&file, config, deadline).map_err(|error| tell(&file, config, error))?;
            file
        }
        false => greet(path, config, deadline)?,
    };
    let store: SharedStore = Arc::<FileStore>::clone(&file);
    let arrived = arrive(&store, None, config, me, deadline)?.met()?;
    config.met(arrived, Ipv4Addr::LOCALHOST.into(), KeepAlive(Held::File { _store: file }), deadline)
}

/// Rank 0: answers every hello, until each other rank has sent one, one has ended the start, or the time is almost up.
fn welcome_all(store: &FileStore, config: &RankConfig, deadline: Deadline) -> Result<()> {
    let verdict = PrefixStore::key_in(&first_start(config), "verdict");
    let mut seen = vec![false; config.world_size.count()];
    seen[0] = true;
    let mut answered = 0;
    // Time is left for the start of the world, which reports the missing ranks.
    let until = Deadline::after(deadline.remaining().saturating_sub(reserve(deadline)));
    store.append(HELLOS, b"", deadline)?;
    while seen.contains(&false) && !until.has_passed() {
        let hellos = store.get(HELLOS, deadline)?;
        let hellos = String::from_utf8_lossy(&hellos).into_owned();
        for line in hellos.lines().skip(answered) {
            answered += 1;
            if let Some((rank, number)) = line.split_once(' ')
                && let Ok(rank) = rank.parse::<usize>()
            {
                store.set(&format!("welcome/{number}"), b"", deadline)?;
                if let Some(seen) = seen.get_mut(rank) {
                    *seen = true;
                }
            }
        }
        if !store.is_current() {
            return Err(Error::mismatch("another process has replaced this job's file with its own")
                .in_operation("rendezvous", None)
                .with_remedy("does another job use the same path, or are there two processes with rank 0?"));
        }
        if store.check(&[&verdict], deadline)? {
            break;
        }
        interrupt::check()?;
        std::thread::sleep(POLL_INTERVAL.min(until.remaining()));
    }
    Ok(())
}

/// Another rank: finds the file of this job.
fn greet(path: &Path, config: &RankConfig, deadline: Deadline) -> Result<Arc<FileStore>> {
    let number = nonce()?;
    loop {
        let store = Arc::new(FileStore::open(path, deadline)?);
        store.append(HELLOS, format!("{} {number}\n", config.rank).as_bytes(), deadline)?;
        let welcome = format!("welcome/{number}");
        loop {
            match store.wait(&[&welcome], deadline.at_most(POLL_INTERVAL)) {
                Ok(()) => return Ok(store),
                Err(error) if !error.is_timeout() => return Err(tell(&store, config, error)),
                Err(_) if deadline.has_passed() => {
                    return Err(Error::timeout(format!(
                        "rank 0 has not answered in the file {}",
                        path.display()
                    ))
                    .with_peer(Rank::MAIN)
                    .in_operation("rendezvous", None)
                    .with_remedy(format!(
                        "does rank 0 run, with the same path? If it does, another process with rank {} came \
                             first; a file of an earlier job does no harm",
                        config.rank
                    )));
                }
                // Rank 0 may have left after it has answered: then it has told why.
                Err(_) if !store.is_current() => match store.check(&[&welcome], deadline)? {
                    true => return Ok(store),
                    false => break,
                },
                Err(_) => {}
            }
        }
    }
}

/// If the program of this rank has ended its wait, tells the ranks that have been answered, or will be.
fn tell(file: &Arc<FileStore>, config: &RankConfig, error: Error) -> Error {
    let store: SharedStore = Arc::<FileStore>::clone(file);
    report_aborted(&PrefixStore::new(first_start(config), store), config, error)
}

/// Where the start is in the file: it is that of one start.
fn first_start(config: &RankConfig) -> String {
    format!("{}/0", config.scope)
}
