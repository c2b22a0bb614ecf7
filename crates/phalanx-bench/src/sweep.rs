//! Times a collective at growing sizes, as nccl-tests does, and checks its results.

use std::fs;
use std::path::{Path, PathBuf, absolute};

use phalanx::env::LaunchEnv;
use phalanx::{DType, Error, GroupOptions, ProcessGroup, Rank, ReduceOp, Result, rendezvous, with_element};

use crate::collectives::{Case, Collective};
use crate::device;
use crate::measure::{Counts, Times};
use crate::options::{Bench, DeviceKind, Memory};
use crate::plot::Figure;
use crate::points::Point;
use crate::report::{Report, size};
use crate::row::{HEADING, Row};
use crate::tune::{self, Algorithms};
use crate::values::{Value, Values};

impl Bench {
    /// Runs the benchmark: under a launcher as one of its workers, otherwise with workers of its own.
    pub(crate) fn run(&self) -> Result<()> {
        self.check()?;
        phalanx::spawn(self.nproc_per_node, || work(self))
    }
}

fn work(options: &Bench) -> Result<()> {
    let mut group = GroupOptions::from_env()?;
    group.transport = options.transport.or(group.transport);
    let world = rendezvous::from_env(group.timeout)?;
    if options.tune.is_none() {
        return dispatch(options, &[ProcessGroup::join(world, group)?], None);
    }
    let algorithms = tune::algorithms(options.collective)?;
    let (groups, _keep_alive) = tune::groups(&algorithms, world, &group)?;
    groups.iter().try_for_each(tune::has_a_choice)?;
    tune::are_forced(&groups, &algorithms)?;
    dispatch(options, &groups, Some(&algorithms))
}

fn dispatch(options: &Bench, groups: &[ProcessGroup], algorithms: Option<&Algorithms>) -> Result<()> {
    with_element!(options.dtype, T => sweep::<T>(options, groups, algorithms))
}

/// Times all sizes, each on every group: one for each algorithm, or one that chooses by size. Rank 0 writes the results.
fn sweep<T: Value>(options: &Bench, groups: &[ProcessGroup], algorithms: Option<&Algorithms>) -> Result<()> {
    let Some(group) = groups.first() else { return Ok(()) };
    if options.bind {
        group.keep_apart();
    }
    let (root, world) = (options.root(group)?, group.world_size().get());
    if options.collective == Collective::SendRecv && world < 2 {
        return Err(Error::invalid_argument("there is one rank, and nobody to send to")
            .with_remedy("give a larger --nproc-per-node"));
    }
    let nccl = device::connect(options, group)?;
    let sizes = options.sizes(world as usize);
    if let Some(largest) = sizes.last() {
        let count = largest / size_of::<T>();
        let case = Case::new(group, nccl.as_ref(), options.collective, ReduceOp::Sum, root, count);
        let here = LaunchEnv::from_process()?.and_then(|env| env.local_world_size).unwrap_or(1);
        check_together(group, case.bytes::<T>(), here, phalanx_sys::arena::available_memory)?;
    }
    let mut output = Output::new(options, group, algorithms)?;
    let mut times = vec![Vec::new(); groups.len()];
    let mut wrong = 0;
    for bytes in &sizes {
        for (number, group) in groups.iter().enumerate() {
            let op = options.op.unwrap_or(ReduceOp::Sum);
            let case = Case::new(group, nccl.as_ref(), options.collective, op, root, bytes / size_of::<T>());
            let algorithm = algorithms.map(|algorithms| algorithms.names[number]);
            let row = measure::<T>(options, &case, algorithm)?;
            wrong += row.wrong.unwrap_or(0);
            times[number].push(row.time_us);
            output.row(&row)?;
        }
    }
    output.finish()?;
    if wrong > 0 {
        return Err(Error::aborted(format!("{wrong} elements came out wrong")));
    }
    if let (Some(path), Some(algorithms), true) = (&options.tune, algorithms, group.rank().is_main()) {
        tune::write(path, algorithms, (options.collective, T::DTYPE), world, &sizes, &times)?;
    }
    Ok(())
}

/// [`check_memory`] on all ranks, before any of them takes its part: the memory of a rank that has begun would be counted twice.
fn check_together(
    group: &ProcessGroup,
    bytes: usize,
    ranks: u32,
    available: impl FnOnce() -> Option<u64>,
) -> Result<()> {
    check_memory(bytes, ranks, available())?;
    group.barrier()
}

/// An error if this host has less than so many bytes left for each of so many ranks: the kernel would not refuse them, but kill
/// some process later.
fn check_memory(bytes: usize, ranks: u32, available: Option<u64>) -> Result<()> {
    match available {
        Some(available) if available < (bytes as u64).saturating_mul(ranks.into()) => {
            let (each, left) = (size(bytes as f64), size(available as f64));
            let cause = format!(
                "the largest size takes {each} of each of {ranks} ranks here, and {left} of memory are left"
            );
            Err(Error::out_of_memory(cause)
                .with_remedy("give a smaller --max-bytes (-e), or start fewer ranks on this host"))
        }
        Some(_) | None => Ok(()),
    }
}

/// Where a file is, or would be made.
fn place(file: &Path) -> PathBuf {
    fs::canonicalize(file).or_else(|_| absolute(file)).unwrap_or_else(|_| file.to_owned())
}

/// Table, JSON and plot, on rank 0; nothing on other ranks.
struct Output(Option<(Report, Option<Figure>)>);

impl Output {
    fn new(options: &Bench, group: &ProcessGroup, algorithms: Option<&Algorithms>) -> Result<Self> {
        if !group.rank().is_main() {
            return Ok(Self(None));
        }
        // What cannot be written is known before anything is timed.
        if let Some(path) = &options.tune {
            tune::check_file(path)?;
        }
        let curves = options.curves(group, algorithms);
        let world = group.world_size().get();
        let figure = match &options.plot {
            Some(path) => Some(Figure::new(path, options.collective, world, &curves, &options.peers)?),
            None => None,
        };
        let report = Report::new(options.json.as_deref())?;
        report.line(&format!("# {}", options.title(group)))?;
        HEADING.iter().try_for_each(|line| report.line(line))?;
        Ok(Self(Some((report, figure))))
    }

    fn row(&mut self, row: &Row) -> Result<()> {
        let Some((report, figure)) = &mut self.0 else { return Ok(()) };
        if let Some(figure) = figure {
            figure.add(Point::from(row));
        }
        report.json(row)?;
        report.line(&row.to_string())
    }

    fn finish(self) -> Result<()> {
        match self.0 {
            Some((_, Some(figure))) => figure.draw(),
            Some((_, None)) | None => Ok(()),
        }
    }
}

fn measure<T: Value>(options: &Bench, case: &Case<'_>, algorithm: Option<&str>) -> Result<Row> {
    let Case { group, collective, op, root, count, .. } = *case;
    let world = group.world_size().get();
    let mut buffers = case.buffers::<T>(options.memory)?;
    let mut wrong = [0];
    for call in 0..options.check {
        wrong[0] += case.check::<T>(&mut buffers, &Values::new(op, world, call.into()))? as i64;
    }
    // Sums of zeros stay zeros, however often they are summed.
    buffers.clear()?;
    let counts = Counts { warm_up: options.warm_up, timed: options.iterations };
    let times = Times::of(group, counts, || case.call::<T>(&mut buffers))?;
    for call in 0..options.check {
        wrong[0] += case.check::<T>(&mut buffers, &Values::new(op, world, !u64::from(call)))? as i64;
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;

    let bytes = count * size_of::<T>();
    let micros = |seconds: f64| seconds / collective.trips() * 1e6;
    let algbw = bytes as f64 / micros(times.median) / 1e3;
    Ok(Row {
        name: options.curve(group, algorithm),
        collective,
        algorithm: algorithm.map(str::to_owned),
        ranks: world,
        dtype: T::DTYPE.to_string(),
        op: collective.reduces().then(|| op.to_string()),
        root: collective.has_root().then_some(root.get()),
        bytes,
        count,
        time_us: micros(times.median),
        min_us: micros(times.min),
        p99_us: micros(times.p99),
        algbw_gbs: algbw,
        busbw_gbs: algbw * collective.bus_factor(world),
        wrong: (options.check > 0).then_some(wrong[0] as u64),
    })
}

impl Bench {
    /// Refuses options that do not go together, before workers are started.
    fn check(&self) -> Result<()> {
        let collective = self.collective;
        if self.op.is_some() && !collective.reduces() {
            return Err(Error::invalid_argument(format!("{collective} combines nothing"))
                .with_remedy("leave --op away"));
        }
        if let Some(op) = self.op.filter(|op| !op.supports(self.dtype)) {
            let names = ReduceOp::ALL.iter().filter(|op| op.supports(self.dtype)).map(ToString::to_string);
            let names: Vec<_> = names.collect();
            return Err(Error::invalid_argument(format!("{op} is not defined for {}", self.dtype))
                .with_remedy(format!("--op may be {}, or choose another --dtype", names.join(", "))));
        }
        if self.device == DeviceKind::Cuda {
            self.check_device()?;
        }
        if self.root.is_some() && !collective.has_root() {
            return Err(
                Error::invalid_argument(format!("{collective} has no root")).with_remedy("leave --root away")
            );
        }
        if self.plot.is_some() && !collective.has_data() {
            return Err(Error::invalid_argument(format!("{collective} has no sizes to plot against"))
                .with_remedy("leave --plot away"));
        }
        if self.tune.is_some() {
            tune::algorithms(collective)?;
        }
        if self.min_bytes > self.max_bytes {
            return Err(Error::invalid_argument("the smallest size is above the largest")
                .with_remedy("give a smaller --min-bytes (-b) or a larger --max-bytes (-e)"));
        }
        self.check_files()
    }

    /// Refuses files that would take each other's place, whichever of its names each is given.
    fn check_files(&self) -> Result<()> {
        let named = [("--json", &self.json), ("--plot", &self.plot), ("--tune", &self.tune)];
        let written: Vec<(&str, PathBuf)> =
            named.into_iter().filter_map(|(option, file)| Some((option, place(file.as_ref()?)))).collect();
        for (number, (option, file)) in written.iter().enumerate() {
            if let Some((other, _)) = written[..number].iter().find(|(_, other)| other == file) {
                let cause = format!("{other} and {option} name one file, {}", file.display());
                return Err(Error::invalid_argument(cause).with_remedy("give each a file of its own"));
            }
        }
        let peers: Vec<PathBuf> = self.peers.iter().map(|file| place(file)).collect();
        match written.iter().find(|(_, file)| peers.contains(file)) {
            Some((option, file)) => {
                let cause =
                    format!("{} has the times of --peers, and {option} would replace them", file.display());
                Err(Error::invalid_argument(cause).with_remedy(format!("give {option} another name")))
            }
            None => Ok(()),
        }
    }

    /// Refuses what NCCL does not have.
    fn check_device(&self) -> Result<()> {
        if !device::supports(self.collective) {
            return Err(device::unsupported(self.collective));
        }
        let refused = |what: String, remedy| {
            Err(Error::invalid_argument(format!("NCCL has no {what}")).with_remedy(remedy))
        };
        if self.dtype == DType::Bool {
            return refused("bool".to_owned(), "time u8");
        }
        match self.op {
            Some(op @ (ReduceOp::BAnd | ReduceOp::BOr | ReduceOp::BXor | ReduceOp::PreMulSum(_))) => {
                refused(op.to_string(), "--op may be sum, avg, product, min, max")
            }
            _ if self.memory == Memory::Registered => {
                refused("registered memory of the host".to_owned(), "leave --memory away")
            }
            _ => Ok(()),
        }
    }

    fn root(&self, group: &ProcessGroup) -> Result<Rank> {
        let (root, world) = (self.root.unwrap_or(0), group.world_size());
        world.rank(root).map_err(|_| {
            Error::invalid_argument(format!("--root {root} is none of the {world} ranks"))
                .with_remedy("give a smaller --root or a larger --nproc-per-node")
        })
    }

    /// All sizes in bytes, ascending, rounded up to whole elements for every rank.
    fn sizes(&self, world: usize) -> Vec<usize> {
        if !self.collective.has_data() {
            return vec![0];
        }
        let unit = self.dtype.size() * if self.collective.has_shares() { world } else { 1 };
        let next = |bytes: &usize| bytes.checked_mul(self.factor as usize);
        let sizes = std::iter::successors(Some(self.min_bytes), next)
            .take_while(|bytes| *bytes <= self.max_bytes)
            .map(|bytes| bytes.next_multiple_of(unit));
        let mut sizes: Vec<_> = sizes.collect();
        sizes.dedup();
        sizes
    }

    /// The name of these measurements' curve in a plot: times of other types and operations are no times of the same curve.
    fn curve(&self, group: &ProcessGroup, algorithm: Option<&str>) -> String {
        let mut name = self.path(group);
        if self.collective.has_data() && self.dtype != DType::F32 {
            name += &format!(", {}", self.dtype);
        }
        if let Some(op) = self.op.filter(|op| self.collective.reduces() && *op != ReduceOp::Sum) {
            name += &format!(", {op}");
        }
        name + &algorithm.map_or(String::new(), |algorithm| format!(", {algorithm}"))
    }

    /// Over what the data goes.
    fn path(&self, group: &ProcessGroup) -> String {
        let transport = match self.device {
            DeviceKind::Cpu => group.transport().map_or("alone".to_owned(), |kind| kind.to_string()),
            DeviceKind::Cuda => "cuda".to_owned(),
        };
        let memory = if self.memory == Memory::Registered { ", registered" } else { "" };
        format!("Phalanx, {transport}{memory}")
    }

    /// The names of all curves that are measured.
    fn curves(&self, group: &ProcessGroup, algorithms: Option<&Algorithms>) -> Vec<String> {
        match algorithms {
            Some(algorithms) => algorithms.names.iter().map(|name| self.curve(group, Some(name))).collect(),
            None => vec![self.curve(group, None)],
        }
    }

    fn title(&self, group: &ProcessGroup) -> String {
        let (collective, mut what) = (self.collective, String::new());
        if collective.has_data() {
            what += &format!(", {}", self.dtype);
        }
        if collective.reduces() {
            what += &format!(", {}", self.op.unwrap_or(ReduceOp::Sum));
        }
        if collective.has_root() {
            what += &format!(", root {}", self.root.unwrap_or(0));
        }
        format!("{}: {collective}{what}, {} ranks", self.path(group), group.world_size())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    use clap::Parser;
    use phalanx::WorldSize;

    use super::*;
    use crate::options::Cli;

    #[test]
    fn each_algorithm_has_a_curve_of_its_own() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let options = Cli::try_parse_from(["bench", "broadcast"]).unwrap().collective.unwrap();
        let algorithms = tune::algorithms(options.collective).unwrap();
        let usual = options.curve(&groups[0], None);
        assert_eq!(options.curves(&groups[0], None), std::slice::from_ref(&usual));
        let curves = options.curves(&groups[0], Some(&algorithms));
        assert_eq!(curves, [format!("{usual}, tree"), format!("{usual}, ring")]);
    }

    #[test]
    fn times_of_another_type_or_operation_are_another_curve() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let curve = |arguments: &[&str]| {
            let arguments = [&["bench", "all_reduce"][..], arguments].concat();
            let options = Cli::try_parse_from(arguments).unwrap().collective.unwrap();
            (options.curve(&groups[0], None), options.title(&groups[0]))
        };
        let (usual, title) = curve(&[]);
        assert_eq!(
            (curve(&["--dtype", "f32", "--op", "sum"]).0, title.matches("f32").count()),
            (usual.clone(), 1)
        );
        let (other, title) = curve(&["--dtype", "bf16", "--op", "avg"]);
        assert_eq!((other, title.matches("bf16").count()), (format!("{usual}, bf16, avg"), 1));
    }

    #[test]
    fn no_rank_begins_before_all_have_looked_at_the_memory() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let (begins, begun) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                check_together(&groups[0], 1, 2, || Some(2)).unwrap();
                let _ = begins.send(());
            });
            let slow = || {
                assert_eq!(begun.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
                Some(2)
            };
            check_together(&groups[1], 1, 2, slow).unwrap();
        });
    }

    #[test]
    fn sizes_that_do_not_fit_into_memory_are_refused() {
        assert!(check_memory(1 << 20, 4, Some(4 << 20)).is_ok());
        assert!(check_memory(usize::MAX, u32::MAX, None).is_ok(), "it is not known");
        let error = check_memory(1 << 30, 4, Some(3 << 30)).unwrap_err().to_string();
        for part in ["1 GiB of each of 4 ranks", "3 GiB of memory are left", "--max-bytes"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(check_memory(usize::MAX, 2, Some(u64::MAX - 1)).is_err(), "it does not wrap around");
    }
}
