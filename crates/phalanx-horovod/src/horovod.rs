//! The handle.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx::group::RemoteError;
use phalanx::trace::Trace;
use phalanx::{Buffer, DType, Error, ProcessGroup, Rank, Result};

use crate::background::Timeline;
use crate::engine::{self, Engine, Groups, Stats};
use crate::options::{Options, is_set, warnings};
use crate::tensor::Tensor;
use crate::topology::{Topology, numbered_among};
use phalanx_proto::horovod::controller::is_alone;
use phalanx_proto::horovod::reduction::Reduction;

/// What `import horovod.torch as hvd; hvd.init()` is in Python: the functions of `hvd` are the methods of this handle. Clones
/// are handles to the same.
///
/// Collectives have names. Each rank may submit them in any order and from any thread. A background thread on each rank agrees with
/// those of the others on what all have submitted, and executes that in the same order on all ranks.
///
/// When the last handle is dropped, or with [`shutdown`](Self::shutdown), this rank leaves; operations that need it then
/// fail on the others, with an error that names it. So all ranks must have made the same calls before the first one leaves.
#[doc(alias("hvd", "horovod"))]
#[derive(Clone)]
pub struct Horovod {
    inner: Arc<Inner>,
}

struct Inner {
    /// Dropped first: its thread uses the groups.
    engine: Engine,
    groups: Groups,
    topology: Topology,
    options: Options,
    /// Of the same ranks, for the program's own calls: process sets are made of it.
    group: ProcessGroup,
    sets: Sets,
}

/// The process sets that were made of a handle, and of these.
type Sets = Arc<Mutex<Vec<Set>>>;

/// A process set.
struct Set {
    /// This rank in it.
    rank: Rank,
    /// What tells why it has ended.
    shared: Arc<engine::Shared>,
    handle: Weak<Inner>,
    /// The handle that it was made of.
    of: Weak<Inner>,
}

impl Set {
    /// Whether the program has it no more.
    fn is_dropped(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

/// The most process sets that are kept of those that have failed and that the program has dropped.
const MAX_DROPPED: usize = 256;

/// Adds a process set. Those that the program has stay, and the last ones that have failed.
fn keep(sets: &mut Vec<Set>, set: Set) {
    sets.retain(|set| !set.is_dropped() || set.shared.failed_by_another(set.rank).is_some());
    let mut spare = sets.iter().filter(|set| set.is_dropped()).count().saturating_sub(MAX_DROPPED);
    sets.retain(|set| {
        let goes = spare > 0 && set.is_dropped();
        spare -= usize::from(goes);
        !goes
    });
    sets.push(set);
}

/// Joins the group that the launcher describes, as [`phalanx::init`] does, with [`Options::from_env`].
///
/// ```
/// use phalanx_horovod::Op;
/// let hvd = phalanx_horovod::init()?; // `cargo run` alone: a world of one
/// let loss = hvd.allreduce("loss", 0.5f32, Op::Average)?.item::<f32>()?;
/// assert_eq!(loss, 0.5);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// # Errors
/// As [`phalanx::init`]. On every rank, if a `HOROVOD_*` variable of one has no valid value.
#[doc(alias = "hvd.init")]
pub fn init() -> Result<Horovod> {
    init_in(&phalanx::init()?)
}

/// As [`init`], among the ranks of `group`: for a program that shuts down and begins again, whose ranks have met already.
///
/// # Errors
/// As [`Horovod::new`]. On every rank, if a `HOROVOD_*` variable of one has no valid value.
pub fn init_in(group: &ProcessGroup) -> Result<Horovod> {
    warn_of_variables(group.rank());
    Horovod::start(group, Options::from_env(), true, Sets::default())
}

/// On rank 0, of variables that are set and have no meaning.
pub(crate) fn warn_of_variables(rank: Rank) {
    if rank.is_main() {
        warnings(is_set).for_each(phalanx::warn);
    }
}

impl Horovod {
    /// A handle to the ranks of `group`. Every rank must call it, in the same order as the collectives of the group, which stays
    /// free for other use: negotiation and data have groups of their own.
    ///
    /// # Errors
    /// As [`ProcessGroup::new_group`]. On every rank, if an option of rank 0 is not valid.
    pub fn new(group: &ProcessGroup, options: Options) -> Result<Self> {
        Self::begin(group, options, true)
    }

    /// As [`new`](Self::new). Unless it `begins_timeline`, its events are added to those of earlier handles, as in a later round of an elastic
    /// job.
    pub(crate) fn begin(group: &ProcessGroup, options: Options, begins_timeline: bool) -> Result<Self> {
        Self::start(group, Ok(options), begins_timeline, Sets::default())
    }

    /// The `options` may be this rank's error, which all ranks get.
    fn start(
        group: &ProcessGroup,
        options: Result<Options>,
        begins_timeline: bool,
        sets: Sets,
    ) -> Result<Self> {
        // The thread's calls are not the program's, and its cycles would fill a trace.
        let control = group.new_group_aside(Trace::disabled())?;
        let data = group.new_group_aside(group.trace())?;
        let own = options.as_ref().ok().and_then(|options| options.timeline.clone());
        // Rank 0 begins the file.
        let begun = own
            .as_ref()
            .filter(|_| control.rank().is_main() && begins_timeline)
            .map(|path| Timeline::to_file(path, control.rank()));
        let (shared, options) = shared_by_all(&control, options)?;
        let timeline = match (begun, &own) {
            (Some(timeline), _) => timeline,
            (None, Some(path)) => Timeline::new(Trace::onto_file(path, control.rank())),
            (None, None) => Timeline::new(group.trace()),
        };
        let options = shared.into_options(options);
        options.check()?;
        let topology = Topology::of(&control)?;
        let groups = Groups { control, data };
        // The threads of the others wait for this rank's.
        let engine = Engine::start(groups.clone(), &options, timeline);
        let engine = engine.inspect_err(|error| groups.abort(error))?;
        let group = group.clone();
        Ok(Self { inner: Arc::new(Inner { engine, groups, topology, options, group, sets }) })
    }

    /// A handle to some of these ranks, in ascending order; `None` on the others. Its ranks count from 0, and its operations
    /// are apart from those of other handles: the same name may be in flight in both.
    ///
    /// Every rank must call it, with the same ranks, and in the same order as the collectives of the group that this handle was
    /// made of. Operations by name may be in flight meanwhile.
    ///
    /// ```
    /// use phalanx_horovod::Op;
    /// let hvd = phalanx_horovod::init()?;
    /// if let Some(first) = hvd.add_process_set(&[hvd.rank()])? {
    ///     assert_eq!(first.allreduce("x", [1.0f32], Op::Sum)?.as_slice::<f32>()?, [1.0]);
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`ProcessGroup::new_group`].
    #[doc(alias("ProcessSet", "process_set"))]
    pub fn add_process_set(&self, ranks: &[Rank]) -> Result<Option<Self>> {
        // Its events would cross those of the same names here.
        let options = Options { timeline: None, ..self.inner.options.clone() };
        let Some(set) = self.inner.group.new_group(ranks)? else { return Ok(None) };
        let set = Self::start(&set, Ok(options), true, self.inner.sets.clone())?;
        let (rank, shared) = (set.rank(), set.inner.engine.shared());
        let (handle, of) = (Arc::downgrade(&set.inner), Arc::downgrade(&self.inner));
        keep(&mut self.inner.sets.lock(), Set { rank, shared, handle, of });
        Ok(Some(set))
    }

    /// Ends a process set that [`add_process_set`](Self::add_process_set) made: waits until its ranks have all called it, and leaves.
    /// Ranks that are not in it pass `None`, and do nothing.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub fn remove_process_set(&self, set: Option<Self>) -> Result<()> {
        let Some(set) = set else { return Ok(()) };
        set.barrier()?;
        set.shutdown();
        Ok(())
    }

    /// Zeroed memory for a tensor that is allreduced often. For one that is combined where it is (of 1 MiB or more, and neither
    /// compressed nor an Adasum), it is memory that the other ranks of this host reach, so that nothing of it is copied; for any other,
    /// ordinary memory. A tensor in it comes back in it: fill it again for the next step.
    ///
    /// ```
    /// use phalanx::DType;
    /// use phalanx_horovod::{Op, Tensor};
    /// let hvd = phalanx_horovod::init()?;
    /// let mut gradient = Tensor::from(hvd.alloc(DType::F32, 1 << 18, Op::Average)?);
    /// for step in 0..3 {
    ///     gradient.as_mut_slice::<f32>()?.fill(step as f32);
    ///     gradient = hvd.allreduce("gradient", gradient, Op::Average)?;
    /// }
    /// assert_eq!(gradient.as_slice::<f32>()?[0], 2.0);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is too little memory.
    pub fn alloc(&self, dtype: DType, elements: usize, reduction: impl Into<Reduction>) -> Result<Buffer> {
        match is_alone(&reduction.into(), dtype, elements) {
            true => self.inner.groups.data.alloc(dtype, elements),
            false => Tensor::zeroed(dtype, vec![elements]).map(Tensor::into_buffer),
        }
    }

    /// Whether operations can be submitted. False after [`shutdown`](Self::shutdown), or when a rank has failed or left.
    pub fn is_initialized(&self) -> bool {
        self.inner.engine.is_open()
    }

    /// Begins a timeline in the file at `path`, in place of the one that there is. Every rank must call it, in the same order as the
    /// collectives of the group that this handle was made of. Cycles are always in it: Horovod's `mark_cycles`.
    ///
    /// # Errors
    /// As [`ProcessGroup::barrier`], and if the job has failed.
    pub fn start_timeline(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, rank) = (path.as_ref(), self.rank());
        // Rank 0 begins the file.
        let begun = rank.is_main().then(|| Timeline::to_file(path, rank));
        self.inner.group.barrier()?;
        self.inner.engine.set_timeline(begun.unwrap_or_else(|| Timeline::to_file(path, rank)))
    }

    /// Ends the timeline, whose file has this rank's events when it returns. From then on there is that of `PHALANX_TRACE`, if there
    /// is one.
    ///
    /// # Errors
    /// If the job has failed.
    pub fn stop_timeline(&self) -> Result<()> {
        self.inner.engine.set_timeline(Timeline::new(self.inner.group.trace()))
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.inner.group.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.inner.group.world_size().get()
    }

    /// This process's index among the ranks of its host.
    pub fn local_rank(&self) -> u32 {
        self.inner.topology.local_rank
    }

    /// The number of ranks on its host.
    pub fn local_size(&self) -> u32 {
        self.inner.topology.local_size
    }

    /// The index of its host among the hosts that have a rank with this local rank.
    pub fn cross_rank(&self) -> u32 {
        self.inner.topology.cross_rank
    }

    /// The number of hosts that have a rank with this local rank.
    pub fn cross_size(&self) -> u32 {
        self.inner.topology.cross_size
    }

    /// Whether every host has the same number of ranks.
    pub fn is_homogeneous(&self) -> bool {
        self.inner.topology.is_homogeneous
    }

    /// The settings, as rank 0 has them where they must be the same.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// What was negotiated and carried out so far.
    pub fn stats(&self) -> Stats {
        self.inner.engine.stats()
    }

    /// The cause of the failure, if one has ended this job.
    pub fn failure(&self) -> Option<Error> {
        let Groups { control, data } = &self.inner.groups;
        control.failure().or_else(|| data.failure())
    }

    /// Why operations of a process set that was made of this handle have failed, if another rank has left it or has failed. Also if the program
    /// has dropped it since.
    pub(crate) fn failure_of_set(&self) -> Option<Error> {
        self.inner.sets.lock().iter().find_map(|set| set.shared.failed_by_another(set.rank))
    }

    /// Leaves, and waits until this rank's thread has ended. Operations in flight fail on every rank. The drop of the last handle
    /// does the same.
    pub fn shutdown(&self) {
        self.inner.engine.shutdown();
    }

    /// Fails the job on every rank with `cause`: what is in flight and what is submitted later, also in the process sets that were made of
    /// this handle and have this rank. For a program that ends before its time, of which the others would otherwise only learn that it has left.
    pub fn abort(&self, cause: Error) {
        // First, so that who is in a set finds it.
        self.inner.groups.abort(&cause);
        let is_of_this = |set: &&Set| std::ptr::eq(set.of.as_ptr(), Arc::as_ptr(&self.inner));
        let sets: Vec<Arc<Inner>> =
            self.inner.sets.lock().iter().filter(is_of_this).filter_map(|set| set.handle.upgrade()).collect();
        sets.into_iter().for_each(|inner| Self { inner }.abort(cause.clone()));
    }

    /// Leaves because of an `error` of this rank, which cannot bring its part: the job fails on every rank with it, unless it has ended before,
    /// which the error may come from. For adapters.
    #[doc(hidden)]
    pub fn leave_with(&self, error: &Error) {
        if self.is_initialized() {
            let (rank, whose) = (self.rank(), numbered_among(&self.inner.groups.control));
            let cause = format!("rank {rank} cannot take part{whose}: {}", error.full_cause());
            self.inner
                .groups
                .abort(&error.remedy().into_iter().fold(Error::aborted(cause), Error::with_remedy));
        }
        self.shutdown();
    }

    /// Tells the other ranks that this one has refused a call of its program, before it came to this crate. Their calls of `name` that would have
    /// met it end with an error that has the `cause`. For adapters.
    #[doc(hidden)]
    pub fn refuse(&self, name: &str, cause: &str) {
        self.inner.engine.refuse(name, cause);
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }
}

impl fmt::Debug for Horovod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Horovod(rank {} of {})", self.rank(), self.size())
    }
}

/// What all ranks use of rank 0's `options`, and this rank's own. An error on every rank if one has none.
fn shared_by_all(group: &ProcessGroup, options: Result<Options>) -> Result<(Shared, Options)> {
    let told = options.as_ref().map(Shared::of).map_err(|error| RemoteError::of(error, group.rank()));
    let all: Vec<Result<Shared, RemoteError>> = group.all_gather_object(&told)?;
    let options = options?;
    let mut all = all
        .into_iter()
        .collect::<Result<Vec<Shared>, RemoteError>>()
        .map_err(|told| group.note_remote_error(told.error()))?;
    // Rank 0 is in every group.
    Ok((all.swap_remove(0), options))
}

/// What must be the same on all ranks.
#[derive(serde::Serialize, serde::Deserialize)]
struct Shared {
    fusion_threshold: usize,
    cycle_time: Duration,
    cache_capacity: usize,
    stall_check_time: Option<Duration>,
    stall_shutdown_time: Option<Duration>,
    autotune: bool,
}

impl Shared {
    fn of(options: &Options) -> Self {
        let Options {
            fusion_threshold,
            cycle_time,
            cache_capacity,
            stall_check_time,
            stall_shutdown_time,
            autotune,
            ..
        } = *options;
        Self { fusion_threshold, cycle_time, cache_capacity, stall_check_time, stall_shutdown_time, autotune }
    }

    fn into_options(self, own: Options) -> Options {
        let Self {
            fusion_threshold,
            cycle_time,
            cache_capacity,
            stall_check_time,
            stall_shutdown_time,
            autotune,
        } = self;
        Options {
            fusion_threshold,
            cycle_time,
            cache_capacity,
            stall_check_time,
            stall_shutdown_time,
            autotune,
            timeline: own.timeline,
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx::testing::{Fabric, run};

    use super::*;

    #[test]
    fn no_process_set_that_the_program_has_is_forgotten() {
        let mut sets = Vec::new();
        let all: Vec<Arc<engine::Shared>> = (0..MAX_DROPPED + 10).map(|_| Arc::default()).collect();
        let set = |shared| Set { rank: Rank::MAIN, shared, handle: Weak::new(), of: Weak::new() };
        all.iter().for_each(|shared| keep(&mut sets, set(shared.clone())));
        assert_eq!(sets.len(), all.len());
        drop(all);
        keep(&mut sets, set(Arc::default()));
        assert_eq!(sets.len(), 1);
    }

    #[test]
    fn a_variable_of_one_rank_that_is_not_valid_is_an_error_on_every_rank_and_ends_no_group() {
        run(3, Fabric::SharedMemory, |group| {
            let bad = || Error::invalid_argument("HOROVOD_CYCLE_TIME is soon").with_remedy("give a number");
            let options = if group.rank().get() == 1 { Err(bad()) } else { Ok(Options::default()) };
            let error = Horovod::start(&group, options, true, Sets::default()).unwrap_err().to_string();
            assert!(error.contains("HOROVOD_CYCLE_TIME is soon (give a number)"), "{error}");
            assert!(group.rank().get() == 1 || error.contains("rank 1"), "{error}");
            let hvd = Horovod::new(&group, Options::default()).unwrap();
            hvd.barrier().unwrap();
        });
    }
}
