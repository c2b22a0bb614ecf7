//! `phalanx bench`: times collectives between processes of this machine, in the manner of nccl-tests.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, ValueEnum};
use phalanx::{
    Buffer, DType, Error, GroupOptions, ProcessGroup, Rank, ReduceOp, Result, TransportKind, rendezvous,
};

/// Calls before the clock starts.
const WARM_UP: usize = 3;
/// Bytes moved per size, roughly: large buffers are timed less often. No size is timed less than `FEWEST` times.
const BUDGET: usize = 400 << 20;
const FEWEST: usize = 8;
const MOST: usize = 1000;

/// Time a collective between processes of this machine
#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// The collective
    #[arg(value_enum)]
    collective: Collective,

    /// The smallest size in bytes, such as 4, 64K or 1M
    #[arg(short = 'b', long, default_value = "4", value_parser = bytes, value_name = "BYTES")]
    min_bytes: usize,

    /// The largest size in bytes
    #[arg(short = 'e', long, default_value = "64M", value_parser = bytes, value_name = "BYTES")]
    max_bytes: usize,

    /// Each size is this many times the one before
    #[arg(short = 'f', long, default_value_t = 4, value_name = "FACTOR",
          value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,

    /// How many processes take part
    #[arg(long, visible_alias = "nproc_per_node", default_value_t = 2, value_name = "N")]
    nproc_per_node: u32,

    /// How often each size is timed [default: less for large sizes, from 1000 to 8]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,

    /// What carries the data: tcp or shm [default: shm if all ranks are on one host, else tcp]
    #[arg(long, value_name = "KIND")]
    transport: Option<TransportKind>,

    /// Use memory of the group, which the other ranks of this host reach
    #[arg(long)]
    registered: bool,

    /// Print a line of JSON for each size
    #[arg(long)]
    json: bool,
}

/// What is timed. Sizes are those of the whole buffer: for `all_gather` the output's, for `reduce_scatter` the input's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
}

/// One size's result.
struct Row {
    bytes: usize,
    count: usize,
    /// The median of the slowest rank's times, in seconds.
    time: f64,
    wrong: u64,
}

/// Runs the benchmark: under a launcher as one of its workers, otherwise with workers of its own.
pub(crate) fn run(options: Bench) -> ExitCode {
    let outcome = phalanx::spawn(options.nproc_per_node, || work(&options));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("phalanx bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn work(options: &Bench) -> Result<()> {
    let mut group = GroupOptions::from_env()?;
    group.transport = options.transport.or(group.transport);
    let group = ProcessGroup::join(rendezvous::from_env(group.timeout)?, group)?;
    let shows = group.rank().is_main();
    if shows && !options.json {
        let transport = group.transport().map_or("alone".to_owned(), |transport| transport.to_string());
        println!("# {:?}, f32, {} ranks, {transport}", options.collective, group.world_size());
        println!(
            "{:>12} {:>12} {:>12} {:>8} {:>8} {:>6}",
            "bytes", "count", "time µs", "algbw", "busbw", "wrong"
        );
    }
    let world = group.world_size().count();
    let mut wrong = 0;
    for bytes in sizes(options, world) {
        let row = measure(options, &group, bytes)?;
        wrong += row.wrong;
        if shows {
            row.show(options, world);
        }
    }
    match wrong {
        0 => Ok(()),
        _ => Err(Error::aborted(format!("{wrong} elements came out wrong"))),
    }
}

/// From the smallest to the largest, in whole elements of every rank's share.
fn sizes(options: &Bench, world: usize) -> impl Iterator<Item = usize> {
    let (max, factor) = (options.max_bytes, options.factor as usize);
    let unit = match options.collective {
        Collective::AllReduce | Collective::Broadcast => size_of::<f32>(),
        Collective::AllGather | Collective::ReduceScatter => size_of::<f32>() * world,
    };
    std::iter::successors(Some(options.min_bytes), move |bytes| bytes.checked_mul(factor))
        .take_while(move |bytes| *bytes <= max)
        .map(move |bytes| bytes.next_multiple_of(unit))
}

fn measure(options: &Bench, group: &ProcessGroup, bytes: usize) -> Result<Row> {
    let count = bytes / size_of::<f32>();
    let mut buffers = Buffers::new(options, group, count)?;
    buffers.fill(1.0)?;
    buffers.call(group)?;
    let mut wrong = [buffers.wrong(group)?];
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;

    // Sums of zeros stay zeros, however often they are summed.
    buffers.fill(0.0)?;
    for _ in 0..WARM_UP {
        buffers.call(group)?;
    }
    let iterations = options.iterations.map_or_else(
        || (BUDGET / (bytes + BUDGET / MOST)).clamp(FEWEST, MOST),
        |iterations| iterations as usize,
    );
    group.barrier()?;
    let mut times = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        let start = Instant::now();
        buffers.call(group)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let mut median = [times[iterations / 2]];
    group.all_reduce(&mut median, ReduceOp::Max)?;
    Ok(Row { bytes, count, time: median[0], wrong: wrong[0] as u64 })
}

/// A rank's memory for a collective.
struct Buffers {
    collective: Collective,
    whole: Buffer,
    share: Buffer,
}

impl Buffers {
    fn new(options: &Bench, group: &ProcessGroup, count: usize) -> Result<Self> {
        let alloc = |count| match options.registered {
            true => group.alloc(DType::F32, count),
            false => Ok(Buffer::zeroed(DType::F32, count)),
        };
        let share = alloc(count / group.world_size().count())?;
        Ok(Self { collective: options.collective, whole: alloc(count)?, share })
    }

    fn fill(&mut self, value: f32) -> Result<()> {
        self.whole.as_mut_slice()?.fill(value);
        self.share.as_mut_slice()?.fill(value);
        Ok(())
    }

    fn call(&mut self, group: &ProcessGroup) -> Result<()> {
        let Self { collective, whole, share } = self;
        let (whole, share) = (whole.as_mut_slice::<f32>()?, share.as_mut_slice::<f32>()?);
        match collective {
            Collective::AllReduce => group.all_reduce(whole, ReduceOp::Sum),
            Collective::AllGather => group.all_gather(share, whole),
            Collective::ReduceScatter => group.reduce_scatter(whole, share, ReduceOp::Sum),
            Collective::Broadcast => group.broadcast(whole, Rank::MAIN),
        }
    }

    /// Elements that are not what ones become.
    fn wrong(&self, group: &ProcessGroup) -> Result<i64> {
        let sum = group.world_size().get() as f32;
        let (result, expected) = match self.collective {
            Collective::AllReduce => (&self.whole, sum),
            Collective::ReduceScatter => (&self.share, sum),
            Collective::AllGather | Collective::Broadcast => (&self.whole, 1.0),
        };
        Ok(result.as_slice::<f32>()?.iter().filter(|element| **element != expected).count() as i64)
    }
}

impl Row {
    fn show(&self, options: &Bench, world: usize) {
        let Self { bytes, count, time, wrong } = self;
        let algorithm = *bytes as f64 / time / 1e9;
        // nccl-tests' factors: what each rank's link carries, whatever the algorithm.
        let share = (world - 1) as f64 / world as f64;
        let bus = algorithm
            * match options.collective {
                Collective::AllReduce => 2.0 * share,
                Collective::AllGather | Collective::ReduceScatter => share,
                Collective::Broadcast => 1.0,
            };
        let micros = time * 1e6;
        if options.json {
            println!(
                "{{\"bytes\": {bytes}, \"time_us\": {micros:.2}, \"algbw_gbs\": {algorithm:.4}, \
                 \"busbw_gbs\": {bus:.4}, \"wrong\": {wrong}}}"
            );
        } else {
            println!("{bytes:>12} {count:>12} {micros:>12.1} {algorithm:>8.3} {bus:>8.3} {wrong:>6}");
        }
    }
}

/// A number of bytes with an optional K, M or G (powers of 1024).
fn bytes(text: &str) -> Result<usize, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_uppercase().trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err("it is not a number of bytes such as 4, 64K or 1M".to_owned()),
    };
    let number: usize = digits.parse().map_err(|_| "it is not a number of bytes such as 4, 64K or 1M")?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(|| "it is out of range".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(bytes("4"), Ok(4));
        assert_eq!(bytes("64K"), Ok(64 << 10));
        assert_eq!(bytes("2MB"), Ok(2 << 20));
        assert!(bytes("0").is_err() && bytes("x").is_err() && bytes("").is_err() && bytes("9T").is_err());
    }
}
