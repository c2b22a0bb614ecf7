//! How ranks report a failed start to each other: through the store, because there are no connections yet.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use phalanx_proto::store;

use super::MeshConfig;
use super::accept::Pair;
use super::call::{begin_to_connect, is_connected};
use super::connect::{self, ADDRESS, Address, read_address};
use super::connection::Connection;
use super::stop_probe::StopProbe;
use crate::deadline::Deadline;
use crate::error::{Error, Kind, Result};
use crate::interrupt;
use crate::notice::Reminders;
use crate::poll::look_until;
use crate::rank::Rank;
use crate::store::Store;
use crate::transport::bootstrap;
use crate::wire::control::{self, Control, MAX_BODY, Notice, PREFIX};

/// The key of the cause for which a start has failed.
pub(crate) const KEY: &str = "mesh/failure";
/// How often a rank that waits for others checks whether one of them has failed.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A missing rank has died if it refuses this many connections, `POLL_INTERVAL` apart. One is not enough: its connections may be
/// complete, while its accepting thread has not yet been scheduled to report this.
const REFUSALS: u32 = 3;
/// How long the store may take for this, even after the deadline: several round trips of a slow network, of which one may be lost.
pub(super) const LAST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Tells the other ranks that connect through `store` why `rank`, this one, cannot start. Returns the failure that was reported first, which all
/// ranks see. Whatever fails after the roll-call is told: until its time-out nobody else would know why this rank does not come.
pub(crate) fn report_failed_start(store: &dyn Store, rank: Rank, host: &str, error: Error) -> Error {
    let error = match error.operation() {
        Some(_) => error,
        None => error.in_operation("joining the group", None),
    };
    let error = error.at(rank, host);
    let Ok(notice) = control::encode(&Control::Failure(Notice::of(&error))) else { return error };
    // Without the store the others time out at their deadlines.
    let tell = || store.compare_set(KEY, b"", &notice, Deadline::after(LAST_MESSAGE_TIMEOUT));
    // A second Ctrl-C may come while this rank tells them of the first.
    let first = interrupt::undisturbed(tell);
    match first {
        Ok(first) if first != notice => reported(&first, host).unwrap_or(error),
        _ => error,
    }
}

/// An error if it is useless to wait, if a rank has reported one, or if the store has gone, because its host has then died. A store that has
/// not answered at the deadline is only slow.
pub(super) fn check(config: &MeshConfig<'_>, host: &str, deadline: Deadline) -> Result<()> {
    (config.watch)()?;
    let failed = config.store.check(&[KEY], deadline).and_then(|failed| match failed {
        true => config.store.get(KEY, deadline).map(Some),
        false => Ok(None),
    });
    match failed {
        Ok(Some(notice)) => Err(reported(&notice, host).unwrap_or_else(|| {
            Error::malformed("the cause of the failed start cannot be read from the store")
        })),
        // If the store is slow, it is asked again.
        Err(error) if !error.is_timeout() => Err(error),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Tells the ranks that are connecting through `store` why the start has failed.
pub(crate) fn fail_start(store: &dyn Store, error: &Error) {
    let Ok(notice) = control::encode(&Control::Failure(Notice::of(error))) else { return };
    // Without the store they time out.
    let _ = store.compare_set(KEY, b"", &notice, Deadline::after(LAST_MESSAGE_TIMEOUT));
}

fn reported(notice: &[u8], host: &str) -> Option<Error> {
    match control::decode(notice) {
        // The notice names its origin; if it does not, the host is used.
        Ok(Some((Control::Failure(notice), _))) => Some(notice.into_error(Rank::MAIN, host)),
        _ => None,
    }
}

/// Sets `pairs`, and waits until each of the ranks has set its key, or one of them has failed. Returns the values of the keys.
pub(super) fn exchange(
    config: &MeshConfig<'_>,
    host: &str,
    pairs: &[(&str, &[u8])],
    keys: &[(Rank, String)],
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>> {
    exchange_by(config, host, keys, deadline, |names, go_on| {
        config.store.set_and_get(pairs, names, deadline, go_on)
    })
}

/// The same of pairs that are written once: an error if one of these keys has another value already.
pub(super) fn exchange_once(
    config: &MeshConfig<'_>,
    host: &str,
    pairs: &[(&str, &[u8])],
    keys: &[(Rank, String)],
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>> {
    let changes: Vec<(&str, &[u8], &[u8])> =
        pairs.iter().map(|(key, value)| (*key, &b""[..], *value)).collect();
    let mut found = |values: &[Vec<u8>]| match pairs.iter().zip(values).all(|((_, own), there)| own == there)
    {
        true => Ok(()),
        false => {
            Err(Error::mismatch(format!("another process has come as rank {} of this group", config.rank))
                .with_peer(config.rank)
                .with_remedy("every member must name the same ranks, in the same order"))
        }
    };
    exchange_by(config, host, keys, deadline, |names, go_on| {
        config.store.compare_set_and_get(&changes, names, deadline, &mut found, go_on)
    })
}

fn exchange_by(
    config: &MeshConfig<'_>,
    host: &str,
    keys: &[(Rank, String)],
    deadline: Deadline,
    ask: impl FnOnce(&[&str], &mut dyn FnMut() -> Result<()>) -> Result<Vec<Vec<u8>>>,
) -> Result<Vec<Vec<u8>>> {
    let names: Vec<&str> = keys.iter().map(|(_, key)| key.as_str()).collect();
    let (mut probe, mut awaited, mut reminders) =
        (StopProbe::new(config), Awaited::new(keys), Reminders::of(config.rank, config.world));
    // Those that gather look after each other, and tell all: the calls of all ranks would be a flood.
    let mut listening = bootstrap::gathers(config).map(|_| ListenProbe::default());
    let interval = look_interval(config.world.get());
    let mut looked = Instant::now();
    let mut go_on = || {
        interrupt::check()?;
        if looked.elapsed() < interval {
            return Ok(());
        }
        looked = Instant::now();
        // One limit for all that is asked: the start's own ends on time, however slow the store is.
        let until = deadline.at_most(LAST_MESSAGE_TIMEOUT);
        check(config, host, until)?;
        if let Some(late) = awaited.first(config, until)? {
            let (rank, what) = (late.rank(), late.what());
            reminders.remind(|| format!("rank {} waits for rank {rank} to publish {what}", config.rank));
            probe.check_alive(rank, until)?;
            if let (Late::Gathered(_), Some(listening)) = (late, &mut listening) {
                check_listens(config, listening, rank, until)?;
            }
        }
        Ok(())
    };
    let outcome = ask(&names, &mut go_on);
    match outcome {
        Err(error) if error.is_timeout() && deadline.has_passed() => {
            let until = Deadline::after(LAST_MESSAGE_TIMEOUT);
            check(config, host, until)?;
            let error = match awaited.first(config, until)? {
                Some(late) => {
                    let (rank, what) = (late.rank(), late.what());
                    Error::timeout(format!("rank {rank} did not publish {what} in time")).with_peer(rank)
                }
                None => Error::timeout("not all ranks published their addresses in time"),
            };
            Err(error.with_remedy("is it alive? If it is only slow, raise the time-out"))
        }
        outcome => outcome,
    }
}

/// How often each of so many ranks looks what it waits for. All ask the same store, several questions each time.
fn look_interval(ranks: u32) -> Duration {
    POLL_INTERVAL * (1 + ranks / 2048)
}

/// What a rank waits for in the store.
struct Awaited<'a> {
    keys: &'a [(Rank, String)],
    names: Vec<&'a str>,
    /// So many of the keys are there.
    there: usize,
    /// Of the first that is not, if it is one under which a rank gathers the addresses of others.
    part: Part,
}

/// The addresses that a rank gathers, of which so many are there.
#[derive(Default)]
struct Part {
    /// The place of the rank's own key.
    place: Option<usize>,
    addresses: Vec<(Rank, String)>,
    there: usize,
}

/// Who is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    /// It has not published where it listens.
    Address(Rank),
    /// It has not published the addresses that it gathers, all of which are there.
    Gathered(Rank),
}

impl Late {
    fn rank(self) -> Rank {
        match self {
            Self::Address(rank) | Self::Gathered(rank) => rank,
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Address(_) => "its address",
            Self::Gathered(_) => "the addresses that it gathers",
        }
    }
}

impl<'a> Awaited<'a> {
    fn new(keys: &'a [(Rank, String)]) -> Self {
        let names = keys.iter().map(|(_, key)| key.as_str()).collect();
        Self { keys, names, there: 0, part: Part::default() }
    }

    /// Who is the first that is waited for, as far as the store says so by `deadline`. Who waits for a rank that gathers addresses waits for those
    /// whose it gathers, and then for it. Of many ranks each looks only there: else the store would look up as many addresses as the square of the
    /// ranks, each time.
    ///
    /// # Errors
    /// If the program of this rank has ended the wait.
    fn first(&mut self, config: &MeshConfig<'_>, deadline: Deadline) -> Result<Option<Late>> {
        self.there = count_there(config, &self.names, self.there, deadline)?;
        let Some((rank, key)) = self.keys.get(self.there) else { return Ok(None) };
        let Some(ranks) = bootstrap::gathered_at(config, ADDRESS, (*rank, key.as_str())) else {
            return Ok(Some(Late::Address(*rank)));
        };
        if self.part.place != Some(self.there) {
            let addresses = bootstrap::keys_on(ADDRESS, &ranks);
            self.part = Part { place: Some(self.there), addresses, there: 0 };
        }
        let Part { addresses, there, .. } = &mut self.part;
        let names: Vec<&str> = addresses.iter().map(|(_, key)| key.as_str()).collect();
        *there = count_there(config, &names, *there, deadline)?;
        let late = addresses.get(*there).map_or(Late::Gathered(*rank), |(rank, _)| Late::Address(*rank));
        Ok(Some(late))
    }
}

/// An error if `peer`, which has published where it listens, no longer does. The store is asked until `deadline`; that it does not answer is
/// reported elsewhere.
fn check_listens(
    config: &MeshConfig<'_>,
    listening: &mut ListenProbe,
    peer: Rank,
    deadline: Deadline,
) -> Result<()> {
    let published = match config.store.get(&connect::key(peer), deadline) {
        Err(error) if error.is_aborted() => return Err(error),
        published => published.unwrap_or_default(),
    };
    match read_address(&published) {
        Ok((address, _)) if listening.is_gone(peer.index(), address.socket) => Err(gone(peer, &address)),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// How many of `keys` exist before the first that does not, according to the store. `known` is how many there were before.
///
/// # Errors
/// If the program of this rank has ended the wait. Other errors of the store are reported elsewhere.
fn count_there(config: &MeshConfig<'_>, keys: &[&str], known: usize, deadline: Deadline) -> Result<usize> {
    store::count_there(keys.len(), known, |range| match keys.get(range) {
        Some(keys) => are_set(config.store, keys, deadline),
        None => Ok(false),
    })
}

/// Whether all of `keys` are set, as far as the store says so.
///
/// # Errors
/// If the program of this rank has ended the wait.
pub(super) fn are_set(store: &dyn Store, keys: &[&str], deadline: Deadline) -> Result<bool> {
    match store.check(keys, deadline) {
        Err(error) if error.is_aborted() => Err(error),
        answer => Ok(answer.unwrap_or(false)),
    }
}

/// An error if `peer` has reported on its control connection why its group has failed, or has died.
pub(super) fn check_peer(peer: Rank, host: &str, control: &Connection) -> Result<()> {
    // The peer's `Connected`, or its `Watching`, may come before the failure. Both do not, nor do heartbeats: they come when this rank
    // has sent the same.
    let mut bytes = [0; 2 * (PREFIX + MAX_BODY)];
    // Only peeked: any other message is for the watching thread.
    match control.peek(&mut bytes) {
        Ok(count) if count > 0 => match failure(&bytes[..count]) {
            Some(notice) => Err(notice.into_error(peer, host)),
            None => Ok(()),
        },
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
        Ok(_) | Err(_) => Err(lost(peer, host)),
    }
}

/// The error if the control connection with `peer` has closed.
pub(super) fn lost(peer: Rank, host: &str) -> Error {
    Error::new(Kind::PeerFailed, format!("rank {peer} ({host}) was lost: its connection closed"))
        .with_peer(peer)
        .with_remedy(format!("see rank {peer}'s own output for its reason"))
}

/// The first notice of a failure in these messages.
fn failure(mut bytes: &[u8]) -> Option<Notice> {
    while let Ok(Some((message, used))) = control::decode(bytes) {
        if let Control::Failure(notice) = message {
            return Some(notice);
        }
        bytes = &bytes[used..];
    }
    None
}

/// Waits while a thread of this rank accepts higher ranks, until `finished` is closed at its other end. Fails as [`Watch::look`] does.
pub(super) fn watch(
    watch: &mut Watch<'_>,
    below: &[Pair],
    missing: &AtomicUsize,
    finished: &Receiver<()>,
    deadline: Deadline,
) -> Result<()> {
    let mut looked = Instant::now();
    look_until(|| finished.try_recv() == Err(TryRecvError::Disconnected));
    while finished.recv_timeout(interrupt::at_most(POLL_INTERVAL)) == Err(RecvTimeoutError::Timeout) {
        interrupt::check()?;
        if looked.elapsed() >= POLL_INTERVAL {
            looked = Instant::now();
            watch.look(below, missing, deadline)?;
        }
    }
    Ok(())
}

/// What a rank that accepts higher ranks looks at meanwhile.
pub(super) struct Watch<'a> {
    config: &'a MeshConfig<'a>,
    host: &'a str,
    /// By rank.
    addresses: &'a [Address],
    listening: ListenProbe,
    probe: StopProbe<'a>,
    reminders: Reminders,
}

impl<'a> Watch<'a> {
    pub(super) fn new(config: &'a MeshConfig<'a>, host: &'a str, addresses: &'a [Address]) -> Self {
        let (listening, probe, reminders) =
            (ListenProbe::default(), StopProbe::new(config), Reminders::of(config.rank, config.world));
        Self { config, host, addresses, listening, probe, reminders }
    }

    /// Fails if another rank has failed, such as one of those `below`, or if the rank that is `missing` is frozen or no longer listens.
    pub(super) fn look(&mut self, below: &[Pair], missing: &AtomicUsize, deadline: Deadline) -> Result<()> {
        let Self { config, host, addresses, .. } = *self;
        // The connections before the store: if rank 0 dies with the store that it serves, they show which rank is gone.
        for ((peer, address), pair) in config.world.ranks().zip(addresses).zip(below) {
            pair.control.as_ref().map_or(Ok(()), |control| check_peer(peer, &address.host, control))?;
        }
        let until = deadline.at_most(LAST_MESSAGE_TIMEOUT);
        check(config, host, until)?;
        let peer = missing.load(Ordering::Relaxed);
        let Some(address) = addresses.get(peer) else { return Ok(()) };
        self.reminders.remind(|| {
            let host = &address.host;
            format!("rank {} waits for rank {peer} ({host}), which has come, to connect with it", config.rank)
        });
        self.probe.check(Rank::new(peer as u32), until)?;
        match self.listening.is_gone(peer, address.socket) {
            true => Err(gone(Rank::new(peer as u32), address)),
            false => Ok(()),
        }
    }
}

/// Looks whether a rank still listens, as it does until it is connected with this one too. For it, a call is a foreign connection that is
/// closed again. This never waits: the answer of a host that is far away is looked at the next time.
#[derive(Default)]
struct ListenProbe {
    peer: usize,
    refusals: u32,
    calling: Option<TcpStream>,
}

impl ListenProbe {
    /// Looks at the answer of `peer` to the last call, or calls it if there is none out. Whether it has refused [`REFUSALS`] calls in turn.
    fn is_gone(&mut self, peer: usize, address: SocketAddr) -> bool {
        if self.peer != peer {
            *self = Self { peer, ..Self::default() };
        }
        let call = match self.calling.take() {
            Some(call) => Ok(call),
            None => begin_to_connect(address),
        };
        match call.and_then(|call| Ok((is_connected(&call, Duration::ZERO)?, call))) {
            Ok((true, _)) => self.refusals = 0,
            Ok((false, call)) => self.calling = Some(call),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.refusals += 1,
            Err(_) => {}
        }
        self.refusals >= REFUSALS
    }
}

/// The error for a rank that no longer listens at its address.
pub(super) fn gone(peer: Rank, address: &Address) -> Error {
    let Address { host, socket } = address;
    Error::new(Kind::PeerFailed, format!("rank {peer} ({host}) was lost: it no longer listens at {socket}"))
        .with_peer(peer)
        .with_remedy(format!("see rank {peer}'s own output for its reason"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::MemoryStore;
    use crate::world_size::WorldSize;

    proptest! {
        #[test]
        fn the_first_that_is_missing_is_found(
            there in prop::collection::vec(prop::bool::weighted(0.9), 1..40), known in 0_usize..40
        ) {
            let store = MemoryStore::new();
            let config = MeshConfig::on_loopback(&store, Rank::MAIN, WorldSize::ONE);
            let names: Vec<String> = (0..there.len()).map(|key| key.to_string()).collect();
            for (name, _) in names.iter().zip(&there).filter(|(_, is_there)| **is_there) {
                store.set(name, b"x", Deadline::after(LAST_MESSAGE_TIMEOUT)).unwrap();
            }
            let first = there.iter().position(|is_there| !is_there).unwrap_or(there.len());
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let found = count_there(&config, &names, known.min(first), Deadline::after(LAST_MESSAGE_TIMEOUT));
            prop_assert_eq!(found.unwrap(), first);
        }
    }

    #[test]
    fn each_of_many_ranks_looks_for_the_one_that_keeps_it_waiting_where_it_is_missing() {
        let (store, soon) = (MemoryStore::new(), Deadline::after(Duration::from_secs(60)));
        let config = MeshConfig::on_loopback(&store, Rank::new(1), WorldSize::new(600).unwrap());
        let first_ranks = [0, 256, 512].map(Rank::new);
        let parts = first_ranks.map(|first| (first, bootstrap::keys_of(ADDRESS, first).pop().unwrap()));
        let mut awaited = Awaited::new(&parts);
        let publish = |key: &str| store.set(key, b"x", soon).unwrap();
        assert_eq!(awaited.first(&config, soon).unwrap(), Some(Late::Address(Rank::MAIN)));
        // Of those of the first part nobody asks any more.
        publish(&parts[0].1);
        (256..600).filter(|rank| *rank != 300).for_each(|rank| publish(&connect::key(Rank::new(rank))));
        for _ in 0..2 {
            assert_eq!(awaited.first(&config, soon).unwrap(), Some(Late::Address(Rank::new(300))));
        }
        publish(&connect::key(Rank::new(300)));
        assert_eq!(awaited.first(&config, soon).unwrap(), Some(Late::Gathered(Rank::new(256))));
        publish(&parts[1].1);
        assert_eq!(awaited.first(&config, soon).unwrap(), Some(Late::Gathered(Rank::new(512))));
        publish(&parts[2].1);
        assert_eq!(awaited.first(&config, soon).unwrap(), None);
    }

    #[test]
    fn the_more_ranks_there_are_the_less_often_each_asks_the_store() {
        assert_eq!([2, 2047, 8000].map(look_interval), [1, 1, 4].map(|times| times * POLL_INTERVAL));
    }

    /// A store that answers nothing in time, and remembers how long it was asked for.
    #[derive(Debug, Default)]
    struct Slow {
        asked: parking_lot::Mutex<Vec<Deadline>>,
        /// Whether the thread that asks has ended its wait instead.
        is_interrupted: bool,
    }

    impl Slow {
        fn late<T>(&self, deadline: Deadline) -> Result<T> {
            self.asked.lock().push(deadline);
            Err(match self.is_interrupted {
                true => Error::aborted("somebody pressed Ctrl-C"),
                false => Error::timeout("it is slow"),
            })
        }
    }

    impl Store for Slow {
        fn set(&self, _: &str, _: &[u8], deadline: Deadline) -> Result<()> {
            self.late(deadline)
        }

        fn get(&self, _: &str, deadline: Deadline) -> Result<Vec<u8>> {
            self.late(deadline)
        }

        fn wait(&self, _: &[&str], deadline: Deadline) -> Result<()> {
            self.late(deadline)
        }

        fn check(&self, _: &[&str], deadline: Deadline) -> Result<bool> {
            self.late(deadline)
        }

        fn add(&self, _: &str, _: i64, deadline: Deadline) -> Result<i64> {
            self.late(deadline)
        }

        fn compare_set(&self, _: &str, _: &[u8], _: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
            self.late(deadline)
        }

        fn delete_key(&self, _: &str, deadline: Deadline) -> Result<bool> {
            self.late(deadline)
        }

        fn num_keys(&self, deadline: Deadline) -> Result<usize> {
            self.late(deadline)
        }

        fn append(&self, _: &str, _: &[u8], deadline: Deadline) -> Result<()> {
            self.late(deadline)
        }

        fn multi_get(&self, _: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
            self.late(deadline)
        }

        fn multi_set(&self, _: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
            self.late(deadline)
        }

        fn set_and_get(
            &self,
            _: &[(&str, &[u8])],
            _: &[&str],
            _: Deadline,
            go_on: &mut dyn FnMut() -> Result<()>,
        ) -> Result<Vec<Vec<u8>>> {
            std::thread::sleep(POLL_INTERVAL);
            go_on()?;
            Err(Error::aborted("it was asked once"))
        }
    }

    #[test]
    fn a_store_that_is_slow_is_asked_no_longer_than_the_start_may_take() {
        let store = Slow::default();
        let config = MeshConfig::on_loopback(&store, Rank::MAIN, WorldSize::new(2).unwrap());
        let deadline = Deadline::after(10 * POLL_INTERVAL);
        let error = exchange(&config, "here", &[], &[(Rank::new(1), "key".into())], deadline).unwrap_err();
        assert!(error.to_string().contains("asked once"), "{error}");
        let asked = store.asked.into_inner();
        // Whether a rank has failed, who is there, and which process the missing one is.
        assert_eq!(asked.len(), 3);
        assert!(asked.iter().all(|until| *until <= deadline), "{asked:?}");
    }

    #[test]
    fn a_thread_that_ends_its_wait_for_the_store_ends_all_that_it_asks() {
        let store = Slow { is_interrupted: true, ..Slow::default() };
        let config = MeshConfig::on_loopback(&store, Rank::MAIN, WorldSize::new(2).unwrap());
        let deadline = Deadline::after(LAST_MESSAGE_TIMEOUT);
        assert!(count_there(&config, &["key"], 0, deadline).unwrap_err().is_aborted());
        let mut probe = StopProbe::new(&config);
        assert!(probe.check(Rank::new(1), deadline).unwrap_err().is_aborted());
    }

    #[test]
    fn a_rank_is_gone_when_it_has_refused_three_calls_in_turn() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut probe = ListenProbe::default();
        assert!((0..2 * REFUSALS).all(|_| !probe.is_gone(1, address)));
        drop(listener);
        let outcomes: Vec<bool> = (0..REFUSALS).map(|_| probe.is_gone(1, address)).collect();
        assert_eq!(outcomes, [false, false, true]);
        // Another rank at that address has refused nothing yet.
        assert!(!probe.is_gone(2, address));
        let again = std::net::TcpListener::bind(address).unwrap();
        assert!(!probe.is_gone(2, address));
        drop(again);
        assert!(!probe.is_gone(2, address) && !probe.is_gone(2, address) && probe.is_gone(2, address));
    }
}
