//! From a rendezvous to a group.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::connect::{TransportOptions, connect};
use super::{Backend, DEFAULT_TIMEOUT, GroupConfig, Identity, LocalRank, ProcessGroup};
use crate::caller::Caller;
use crate::collective::{Tuning, TuningRow};
use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::env;
use crate::error::{Error, Result};
use crate::health::Heartbeat;
use crate::host;
use crate::rendezvous::{self, Rendezvous};
use crate::secret_file::read_regular;
use crate::trace::Trace;
use crate::transport::{MeshConfig, TransportKind, report_failed_start};
use crate::wire::frame::Operation;
use crate::worker_error;
use crate::world_size::WorldSize;

/// The longest table of `PHALANX_TUNING`, in bytes.
const LONGEST_TUNING: u64 = 16 << 20;

/// Joins the group that the launcher's variables describe; without a launcher, a world of one.
///
/// `phalanx run`, `phalanx::spawn`, torchrun and others set RANK, WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT. For other rendezvous see [`rendezvous::from_url`] and [`ProcessGroup::join`].
///
/// ```
/// let group = phalanx::init()?; // `cargo run` alone: a world of one
/// assert_eq!(group.world_size().get(), 1);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// If the launcher sets an error file (`TORCHELASTIC_ERROR_FILE`), a panic hook is added with the first group. It runs
/// after the program's own hook, and writes a panic of the main thread to that file, with its source line. From then on the process
/// ignores SIGXFSZ, as [`ProcessGroup::join`] says.
///
/// # Errors
/// If a variable is malformed or missing (an empty one counts as missing), if the port is taken, or if ranks are missing after 30 minutes.
#[doc(alias("init_process_group", "MPI_Init", "hvd.init"))]
pub fn init() -> Result<ProcessGroup> {
    // Before this rank waits for the others.
    let options = GroupOptions::from_env()?;
    ProcessGroup::join(rendezvous::from_env(DEFAULT_TIMEOUT)?, options)
}

/// How a group is built.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Limits the time for connecting, and for each operation unless [`ProcessGroup::with_timeout`] changes it.
    pub timeout: Duration,
    /// The transport of the data. If None: shared memory among ranks of one host that can map each other's memory, and TCP between all others.
    /// With `SharedMemory` it is an error if some ranks cannot share memory, and with `Tcp` no ranks share memory.
    pub transport: Option<TransportKind>,
    /// The sizes at which the algorithm changes; they must be the same on every rank.
    pub tuning: Tuning,
    /// Ranks with the same name share memory, if they can map each other's. If None, the name is the kernel's boot id.
    pub host_id: Option<String>,
    /// How often the ranks send heartbeats, and how long they wait for them.
    pub heartbeat: Heartbeat,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: DEFAULT_TIMEOUT,
            transport: None,
            tuning: Tuning::default(),
            host_id: None,
            heartbeat: Heartbeat::default(),
        }
    }
}

impl GroupOptions {
    /// The defaults, with the transport in `PHALANX_TRANSPORT` (`tcp`, `shm`, or `auto`), the host's identity in
    /// `PHALANX_HOST_ID`, the [`Tuning`] in the file that `PHALANX_TUNING` names, and the [`Heartbeat`] in
    /// `PHALANX_HEARTBEAT_INTERVAL`, `PHALANX_HEARTBEAT_TIMEOUT` and `PHALANX_NETWORK_TIMEOUT`, in seconds.
    ///
    /// # Errors
    /// If the value of one of these is not valid, or the file holds no such table.
    pub fn from_env() -> Result<Self> {
        let transport = match env::variable("PHALANX_TRANSPORT").unwrap_or_default().as_str() {
            "" | "auto" => None,
            name => Some(name.parse().map_err(|_| {
                Error::environment(format!("PHALANX_TRANSPORT={name} names no transport"))
                    .with_remedy("it may be tcp, shm or auto")
            })?),
        };
        let tuning = match std::env::var_os("PHALANX_TUNING") {
            Some(path) if !path.is_empty() => read_tuning(Path::new(&path))?,
            _ => Tuning::default(),
        };
        let host_id = host_id(std::env::var_os("PHALANX_HOST_ID"))?;
        let heartbeat = Heartbeat::from_variables(env::variable)?;
        Ok(Self { transport, tuning, host_id, heartbeat, ..Self::default() })
    }
}

/// The host's identity, as the user gives it. The ranks compare it as text.
fn host_id(given: Option<OsString>) -> Result<Option<String>> {
    let text = given.filter(|given| !given.is_empty()).map(OsString::into_string).transpose();
    text.map_err(|given| {
        Error::environment(format!("PHALANX_HOST_ID={} is not UTF-8", given.display()))
            .with_remedy("give another identity, or unset it")
    })
}

fn read_tuning(path: &Path) -> Result<Tuning> {
    let unusable = |cause: String| {
        Error::environment(format!("PHALANX_TUNING={}: {cause}", path.display()))
            .with_remedy("unset it to use the defaults")
    };
    let text = read_regular(path, LONGEST_TUNING).map_err(|error| unusable(error.to_string()))?;
    let text = String::from_utf8(text).map_err(|error| unusable(error.to_string()))?;
    Tuning::from_json(&text).map_err(|error| unusable(error.full_cause()))
}

impl ProcessGroup {
    /// Connects the ranks of a rendezvous with each other.
    ///
    /// From then on the process ignores SIGXFSZ, as Python's do, unless the program has a handler of its own: a file that would exceed
    /// `ulimit -f` is an error of the write, and not the end of the process. Processes that it starts inherit that.
    ///
    /// # Errors
    /// If a rank cannot be reached or another process answers, if the ranks' tuning tables differ, or if shared memory
    /// was requested and some rank cannot map another's memory; the error says which, and why.
    pub fn join(rendezvous: Rendezvous, options: GroupOptions) -> Result<Self> {
        worker_error::report_panics();
        // So that what a rank writes beside its checkpoints, such as the trace, may reach `ulimit -f` without ending it.
        let _ = phalanx_sys::signal::ignore_file_size_signal();
        let GroupOptions { timeout, transport, tuning, host_id, heartbeat } = options;
        let checked = tuning.check().and_then(|()| heartbeat.check());
        let Rendezvous {
            store,
            rank,
            world_size,
            local_rank,
            local_world_size,
            generation,
            interface,
            credentials,
            group_number,
            mut keep_alive,
        } = rendezvous;
        let marks_left = keep_alive.marks_left(world_size);
        let _presence = keep_alive.take_presence();
        match checked {
            // The others have met, and wait for this rank.
            Err(error) if world_size != WorldSize::ONE => {
                return Err(report_failed_start(&*store, rank, &host::name(), error));
            }
            checked => checked?,
        }
        // Before any rank has a group, and something to write. Rounds of an elastic job count from 1, generations from
        // 0.
        let begins = local_rank == 0 && generation.0 <= u64::from(env::is_elastic());
        let trace = Trace::from_env(rank, begins);
        let local = LocalRank { rank: local_rank, world_size: local_world_size };
        if world_size == WorldSize::ONE {
            return Ok(Self::alone_in(local, generation, trace)?.with_timeout(timeout));
        }
        let mesh = MeshConfig {
            store: &*store,
            rank,
            world: world_size,
            generation,
            interface,
            credentials: &credentials,
            heartbeat,
            number: group_number,
            // The workers of a round meet in a log.
            tells_process: env::is_elastic(),
            marks_left,
            watch: &|| Ok(()),
        };
        let silent_hosts = Arc::default();
        let options = TransportOptions {
            kind: transport,
            host: host_id.as_deref(),
            local_world_size,
            silent_hosts: Some(&silent_hosts),
        };
        let connected = connect(&mesh, options, Deadline::after(timeout))?;
        let backend = Backend::Mesh { store, interface, transport, host_id, heartbeat, credentials };
        let config = GroupConfig {
            tuning: tuning.clone(),
            silent_hosts,
            _keep_alive: Arc::new(keep_alive),
            number: group_number,
            ..GroupConfig::new(backend, local, generation)
        };
        let identity = Identity { rank, world: world_size, trace, config };
        Self::new(identity, connected)?.with_timeout(timeout).tuned(&tuning, Caller::Init)
    }

    /// Before the first call: chooses algorithms by `tuning`, on every rank.
    pub(crate) fn tuned(self, tuning: &Tuning, caller: Caller) -> Result<Self> {
        let timeout = self.operation_timeout();
        let call = self.in_call(caller).call(Operation::Barrier, DType::U8, 0);
        self.run_in_turn(&timeout, |engine| engine.tune(tuning, call, timeout.deadline()))?;
        Ok(self)
    }

    /// The row by which this group chooses its algorithms. For tools that time them.
    ///
    /// # Errors
    /// If the group's worker is gone.
    #[doc(hidden)]
    pub fn tuning_row(&self) -> Result<TuningRow> {
        self.inner.queue.run(&self.operation_timeout(), |engine| engine.row().clone())
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::collective::ReduceOp;
    use crate::collective::TuningRow;
    use crate::testing::{Fabric, groups};

    /// A table with which every algorithm is used at these sizes.
    fn small() -> Tuning {
        let row = TuningRow {
            doubling_max: 16,
            halving_max: 400,
            broadcast_ring_min: 100,
            reduce_ring_min: 100,
            tree_max: 8,
            ..TuningRow::default()
        };
        Tuning { rows: vec![row] }
    }

    #[test]
    fn every_algorithm_gives_the_same_result() {
        for world in [2, 3, 5, 8] {
            std::thread::scope(|scope| {
                for group in groups(world, Fabric::Tcp).unwrap() {
                    scope.spawn(move || {
                        let group = group.tuned(&small(), Caller::Init).unwrap();
                        for length in [1usize, 4, 7, 50, 101, 1000] {
                            let mut data = vec![i64::from(group.rank().get()); length];
                            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                            let sum = i64::from(world * (world - 1) / 2);
                            assert!(data.iter().all(|value| *value == sum), "{length} in {world}");
                            let mut average = vec![half::f16::MAX; length];
                            group.all_reduce(&mut average, ReduceOp::Avg).unwrap();
                            assert!(average.iter().all(|value| *value == half::f16::MAX));
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn ranks_with_different_tables_are_told_at_once() {
        std::thread::scope(|scope| {
            for group in groups(3, Fabric::Tcp).unwrap() {
                scope.spawn(move || {
                    let tuning = if group.rank().get() == 1 { small() } else { Tuning::default() };
                    // A rank that was done before gets the error later.
                    let outcome = group.tuned(&tuning, Caller::Init).and_then(|group| {
                        std::iter::repeat_with(|| group.barrier()).find(Result::is_err).unwrap_or(Ok(()))
                    });
                    let error = outcome.unwrap_err();
                    assert!(error.to_string().contains("different tuning tables"), "{error}");
                });
            }
        });
    }

    #[test]
    fn sub_groups_choose_by_the_same_table_and_compare_their_own_row() {
        let (store, world) = (Arc::new(crate::store::MemoryStore::new()), WorldSize::new(3).unwrap());
        let rank = |rank: crate::Rank| {
            let alone = rendezvous::from_url("env://", None, Some(WorldSize::ONE), Duration::ZERO).unwrap();
            let (local_rank, local_world_size) = (rank.get(), world.get());
            let store = store.clone();
            let rendezvous =
                Rendezvous { store, rank, world_size: world, local_rank, local_world_size, ..alone };
            // The row for three ranks is the same; the row for two is not.
            let mut tuning = Tuning::default();
            tuning.rows[0].doubling_max += rank.index();
            let (timeout, transport) = (Duration::from_secs(20), Some(TransportKind::Tcp));
            let options = GroupOptions { timeout, transport, tuning, ..GroupOptions::default() };
            let group = ProcessGroup::join(rendezvous, options).unwrap();
            let pair = group.new_group(&[crate::Rank::MAIN, crate::Rank::new(2)]);
            match rank.get() {
                1 => assert!(pair.unwrap().is_none()),
                _ => assert!(pair.unwrap_err().to_string().contains("different tuning tables")),
            }
            group.barrier().unwrap();
        };
        std::thread::scope(|scope| {
            for number in world.ranks() {
                let rank = &rank;
                scope.spawn(move || rank(number));
            }
        });
    }

    #[test]
    fn a_worker_that_is_left_alone_keeps_its_place_among_those_of_its_host() {
        let left = Rendezvous { local_rank: 3, local_world_size: 4, ..rendezvous::alone() };
        let group = ProcessGroup::join(left, GroupOptions::default()).unwrap();
        assert_eq!((group.world_size(), group.rank().get(), group.local_rank()), (WorldSize::ONE, 0, 3));
        let part = group.new_group(&[group.rank()]).unwrap().unwrap();
        assert_eq!(part.local_rank(), 3);
        assert_eq!(ProcessGroup::alone().unwrap().local_rank(), 0);
    }

    #[test]
    fn a_rank_whose_options_are_refused_tells_the_others_why() {
        const LIMIT: Duration = Duration::from_secs(120);
        let (store, world) = (Arc::new(crate::store::MemoryStore::new()), WorldSize::new(3).unwrap());
        let rank = |rank: crate::Rank| {
            let met = rendezvous::from_store(store.clone(), rank, world, LIMIT).unwrap();
            let mut options = GroupOptions { timeout: LIMIT, ..GroupOptions::default() };
            if rank.get() == 1 {
                options.heartbeat.timeout = options.heartbeat.interval;
            }
            let error = ProcessGroup::join(met, options).err().unwrap();
            assert!(error.is_invalid_argument() && error.rank() == Some(crate::Rank::new(1)), "{error}");
            assert!(error.to_string().contains("a single late heartbeat"), "{error}");
        };
        std::thread::scope(|scope| {
            for number in world.ranks() {
                let rank = &rank;
                scope.spawn(move || rank(number));
            }
        });
    }

    #[test]
    fn a_host_s_identity_that_is_not_utf_8_is_refused_and_an_empty_one_is_none() {
        let bytes = |bytes: &[u8]| Some(OsString::from_vec(bytes.to_vec()));
        assert_eq!(host_id(bytes(b"node7")).unwrap().as_deref(), Some("node7"));
        assert!(host_id(None).unwrap().is_none() && host_id(bytes(b"")).unwrap().is_none());
        let error = host_id(bytes(b"node\xff")).unwrap_err();
        assert!(error.is_environment() && error.remedy().is_some(), "{error}");
        assert!(error.to_string().contains("PHALANX_HOST_ID=node\u{fffd} is not UTF-8"), "{error}");
    }

    #[test]
    fn a_table_that_is_not_there_is_named() {
        let error = read_tuning(Path::new("/no/such/table.json")).unwrap_err();
        assert!(error.is_environment(), "{error}");
        assert!(error.to_string().contains("PHALANX_TUNING=/no/such/table.json"), "{error}");
        // As a pipe, it is no file, and a reader of a pipe would wait.
        let error = read_tuning(Path::new("/dev/null")).unwrap_err();
        assert!(error.is_environment() && error.to_string().contains("not a regular file"), "{error}");
    }
}
