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

/// What no hello is.
const NO_HELLO: &[u8] = b"?";
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

/// Where a rank says its number. Each has a key of its own: to append to one value would write the hellos of all, at each of them.
fn hello_key(rank: Rank) -> String {
    format!("hello/{rank}")
}

fn welcome_key(number: &str) -> String {
    format!("welcome/{number}")
}

/// Rank 0: answers every hello, until each other rank has sent one, one has ended the start, or the time is almost up.
fn welcome_all(store: &FileStore, config: &RankConfig, deadline: Deadline) -> Result<()> {
    let verdict = PrefixStore::key_in(&first_start(config), "verdict");
    let keys: Vec<String> = config.world_size.ranks().skip(1).map(hello_key).collect();
    let asked: Vec<(&str, &[u8], &[u8])> =
        keys.iter().map(|key| (key.as_str(), NO_HELLO, NO_HELLO)).collect();
    // The last of each rank.
    let mut answered = vec![NO_HELLO.to_vec(); keys.len()];
    // Time is left for the start of the world, which reports the missing ranks.
    let until = Deadline::after(deadline.remaining().saturating_sub(reserve(deadline)));
    while answered.iter().any(|number| number == NO_HELLO) && !until.has_passed() {
        let hellos = store.multi_compare_set(&asked, deadline)?;
        let mut welcomes = Vec::new();
        for (answered, number) in answered.iter_mut().zip(hellos) {
            if *answered != number {
                welcomes.push(welcome_key(&String::from_utf8_lossy(&number)));
                *answered = number;
            }
        }
        if !welcomes.is_empty() {
            let pairs: Vec<(&str, &[u8])> = welcomes.iter().map(|key| (key.as_str(), &b""[..])).collect();
            store.multi_set(&pairs, deadline)?;
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
        match is_welcome(&store, path, config, &number, deadline) {
            Ok(true) => return Ok(store),
            Ok(false) => {}
            // An earlier job's that rank 0 has replaced: a network file system may not have it any more.
            Err(error)
                if !(error.is_aborted()
                    || error.is_timeout()
                    || deadline.has_passed()
                    || store.is_current()) =>
            {
                std::thread::sleep(POLL_INTERVAL);
            }
            Err(error) => return Err(tell(&store, config, error)),
        }
    }
}

/// Says hello in `store`, the file at `path`, and waits for the answer. `false` if the path names another file by then.
fn is_welcome(
    store: &FileStore,
    path: &Path,
    config: &RankConfig,
    number: &str,
    deadline: Deadline,
) -> Result<bool> {
    let (hello, welcome) = (hello_key(config.rank), welcome_key(number));
    store.set(&hello, number.as_bytes(), deadline)?;
    loop {
        match store.wait(&[&welcome], deadline.at_most(POLL_INTERVAL)) {
            Ok(()) => return Ok(true),
            Err(error) if !error.is_timeout() => return Err(error),
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
            Err(_) if !store.is_current() => return store.check(&[&welcome], deadline),
            // Another process has come as the same rank. Rank 0 answers both, and then all hear of it.
            Err(_) => {
                if store.get(&hello, deadline)? != number.as_bytes() {
                    store.set(&hello, number.as_bytes(), deadline)?;
                }
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::world_size::WorldSize;

    /// As on a network file system, which may not have it any more.
    #[test]
    fn a_rank_goes_on_where_the_file_of_an_earlier_job_cannot_be_read_after_it_was_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ranks");
        let soon = Deadline::after(Duration::from_secs(20));
        let world = WorldSize::new(2).unwrap();
        let config = RankConfig::given("the file", Some(Rank::new(1)), Some(world)).unwrap();
        let earlier = FileStore::create(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        std::thread::scope(|scope| {
            let greets = scope.spawn(|| greet(&path, &config, soon));
            earlier.wait(&[&hello_key(config.rank)], soon).unwrap();
            let new = FileStore::create(&path).unwrap();
            file.set_len(0).unwrap();
            let number = String::from_utf8(new.get(&hello_key(config.rank), soon).unwrap()).unwrap();
            new.set(&welcome_key(&number), b"", soon).unwrap();
            assert!(greets.join().unwrap().unwrap().is_current());
        });
    }
}
