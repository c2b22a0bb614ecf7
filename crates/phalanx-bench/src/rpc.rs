//! `phalanx bench rpc`: calls between two ranks.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use phalanx::asynchronous::{Bytes, PendingCall, Rpc as Calls};
use phalanx::{Error, GroupOptions, ProcessGroup, Rank, Result, TransportKind, rendezvous};
use serde::Serialize;

use crate::measure::percentile;
use crate::options::{MAX_ITERATIONS, bytes};
use crate::report::{Report, size};

/// Time remote calls between two ranks
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_long_help = MANUAL)]
pub(crate) struct Rpc {
    /// The smallest argument in bytes, such as 4, 64K or 1M
    #[arg(short = 'b', long, default_value = "4", value_parser = bytes, value_name = "BYTES")]
    min_bytes: usize,

    /// The largest argument in bytes
    #[arg(short = 'e', long, default_value = "16M", value_parser = bytes, value_name = "BYTES")]
    max_bytes: usize,

    /// Each size is this many times the one before
    #[arg(short = 'f', long, default_value_t = 16, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,

    /// What carries the data: tcp or shm [default: shm if both ranks are on one host, else tcp]
    #[arg(long, value_name = "KIND")]
    transport: Option<TransportKind>,

    /// How many calls are under way at once when throughput is timed
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,

    /// How many calls are timed for each size [default: as many as move 256 MiB, from 20 to 5000]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_ITERATIONS))]
    iterations: Option<u32>,

    /// Print a line of JSON for each size, or write it to a file besides printing the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

const ABOUT: &str = "\
Times remote calls from rank 0 to rank 1: of a function that returns its argument, bytes.

Starts the two processes itself; under a launcher each process is one of the ranks.";

const MANUAL: &str = "\
Columns:
  time    of a call that is waited for, in µs: the median; p99: 99 of 100 calls are faster
  calls/s with --in-flight calls under way
  MB/s    their arguments and results, in 10^6 bytes in a second

Examples:
  phalanx bench rpc
  phalanx bench rpc --transport tcp -b 1K -e 64M -f 4 --in-flight 4
  python bench/peers/rpc.py   # the same calls on PyTorch's RPC";

/// A call's message may have 256 MiB, with what stands around the argument.
const LARGEST: usize = 255 << 20;
/// What is moved for each size if the number of calls is not given.
const MOVED: usize = 256 << 20;
/// How long calls go on before the first size is timed.
const WARM_UP_DELAY: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Row {
    benchmark: &'static str,
    library: &'static str,
    transport: String,
    bytes: usize,
    time_us: f64,
    p99_us: f64,
    calls_per_s: f64,
    mb_per_s: f64,
}

impl Rpc {
    pub(crate) fn run(&self) -> Result<()> {
        if self.min_bytes > self.max_bytes {
            return Err(Error::invalid_argument("the smallest size is above the largest")
                .with_remedy("give a smaller --min-bytes (-b) or a larger --max-bytes (-e)"));
        }
        if self.max_bytes > LARGEST {
            return Err(Error::invalid_argument("an argument may have 255 MiB")
                .with_remedy("give a smaller --max-bytes (-e)"));
        }
        self.check_memory(phalanx_sys::arena::available_memory())?;
        phalanx::spawn(2, || self.work())
    }

    /// An answer that has come is kept until its call is waited for.
    fn check_memory(&self, available: Option<u64>) -> Result<()> {
        let answers = self.iterations.map_or(self.in_flight, |count| count.min(self.in_flight));
        let needed = (self.max_bytes as u64).saturating_mul(answers.into());
        match available {
            Some(available) if available < needed => {
                let [each, left] = [self.max_bytes as f64, available as f64].map(size);
                let cause =
                    format!("{answers} answers of {each} may wait at once, and {left} of memory are left");
                Err(Error::out_of_memory(cause)
                    .with_remedy("give a smaller --max-bytes (-e), or a smaller --in-flight"))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn work(&self) -> Result<()> {
        let mut options = GroupOptions::from_env()?;
        options.transport = self.transport.or(options.transport);
        let group = ProcessGroup::join(rendezvous::from_env(options.timeout)?, options)?;
        if group.world_size().get() < 2 {
            return Err(Error::invalid_argument("there is one rank, and nobody to call")
                .with_remedy("start it with 2 ranks, or without a launcher"));
        }
        let calls = Calls::builder().handler("echo", |_, bytes: Bytes| Ok(bytes)).start(&group)?;
        if group.rank().is_main() {
            let transport = group.transport().map_or("alone".to_owned(), |kind| kind.to_string());
            let mut report = Report::new(self.json.as_deref())?;
            for heading in [["size", "time", "p99", "calls/s", "MB/s"], ["", "µs", "µs", "", ""]] {
                let line = heading.map(|cell| format!("{cell:>10}")).join(" ");
                report.line(line.trim_end())?;
            }
            warm_up(&calls, self.min_bytes)?;
            let next = |bytes: &usize| bytes.checked_mul(self.factor as usize);
            for bytes in
                std::iter::successors(Some(self.min_bytes), next).take_while(|bytes| *bytes <= self.max_bytes)
            {
                let row = self.time(&calls, &transport, bytes)?;
                let Row { time_us, p99_us, calls_per_s, mb_per_s, .. } = row;
                report.line(&format!(
                    "{:>10} {time_us:>10.1} {p99_us:>10.1} {calls_per_s:>10.0} {mb_per_s:>10.1}",
                    size(bytes as f64)
                ))?;
                report.json(&row)?;
            }
        }
        calls.shutdown()
    }

    fn time(&self, calls: &Calls, transport: &str, bytes: usize) -> Result<Row> {
        let count = self.iterations.map_or((MOVED / bytes).clamp(20, 5000), |count| count as usize);
        let argument = Bytes::from(vec![1; bytes]);
        let to = Rank::new(1);
        let start = || calls.call_async::<_, Bytes>(to, "echo", &argument);
        let mut times = Vec::with_capacity(count);
        for call in 0..count + count / 10 + 1 {
            let begin = Instant::now();
            let back = start()?.wait()?;
            let time = begin.elapsed();
            if back != argument {
                return Err(Error::other("a call has returned other bytes than it got"));
            }
            // The first tenth warms up.
            if call > count / 10 {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        times.sort_by(f64::total_cmp);
        let mut in_flight: VecDeque<PendingCall<Bytes>> = VecDeque::new();
        let begin = Instant::now();
        for _ in 0..count {
            if in_flight.len() == self.in_flight as usize
                && let Some(first) = in_flight.pop_front()
            {
                first.wait()?;
            }
            in_flight.push_back(start()?);
        }
        for call in in_flight {
            call.wait()?;
        }
        let calls_per_s = count as f64 / begin.elapsed().as_secs_f64();
        Ok(Row {
            benchmark: "rpc",
            library: "phalanx",
            transport: transport.to_owned(),
            bytes,
            time_us: percentile(&times, 50),
            p99_us: percentile(&times, 99),
            calls_per_s,
            mb_per_s: calls_per_s * 2.0 * bytes as f64 / 1e6,
        })
    }
}

/// Calls until processors, connections and allocators are in the state in which they stay.
fn warm_up(calls: &Calls, bytes: usize) -> Result<()> {
    let (begin, argument) = (Instant::now(), Bytes::from(vec![1; bytes]));
    while begin.elapsed() < WARM_UP_DELAY {
        calls.call::<_, Bytes>(Rank::new(1), "echo", &argument)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Given {
        #[command(flatten)]
        rpc: Rpc,
    }

    #[test]
    fn answers_that_do_not_fit_into_memory_are_refused() {
        let rpc = |options: &[&str]| Given::parse_from([&["rpc", "-e", "64M"][..], options].concat()).rpc;
        assert!(rpc(&["--in-flight", "4"]).check_memory(Some(256 << 20)).is_ok());
        assert!(rpc(&["--in-flight", "64"]).check_memory(None).is_ok(), "it is not known");
        assert!(rpc(&["--in-flight", "64", "-n", "4"]).check_memory(Some(256 << 20)).is_ok());
        let error = rpc(&["--in-flight", "5"]).check_memory(Some(256 << 20)).unwrap_err().to_string();
        assert!(error.contains("5 answers of 64 MiB") && error.contains("--in-flight"), "{error}");
    }
}
