//! The options of `phalanx bench`, and how sizes are read. Their help is the manual.

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use phalanx::{DType, ReduceOp, TransportKind};

use crate::collectives::Collective;
use crate::faults::Faults;
use crate::plot::Plot;
use crate::rpc::Rpc;
use crate::startup::Startup;
use crate::values::FACTOR;

/// As those of `phalanx run --help`.
const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Time a collective, as nccl-tests does, or the survivors' reaction to a fault
#[derive(Debug, Parser)]
#[command(version, styles = STYLES, max_term_width = 100, arg_required_else_help = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(long_about = ABOUT, after_long_help = MANUAL, after_help = "`--help` says what the columns are.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) other: Option<Other>,
    #[command(flatten)]
    pub(crate) collective: Option<Bench>,
}

/// All but the collectives.
#[derive(Debug, Subcommand)]
pub(crate) enum Other {
    Faults(Faults),
    Startup(Startup),
    Rpc(Rpc),
    Plot(Plot),
}

// Its options stand beside the sub-commands: a comment for users would take the place of the command's own.
#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// The collective
    #[arg(value_enum)]
    pub(crate) collective: Collective,

    /// The smallest size in bytes, such as 4, 64K or 1M
    #[arg(short = 'b', long, default_value = "4", value_parser = bytes, value_name = "BYTES")]
    pub(crate) min_bytes: usize,

    /// The largest size in bytes
    #[arg(short = 'e', long, default_value = "64M", value_parser = bytes, value_name = "BYTES")]
    pub(crate) max_bytes: usize,

    /// Each size is this many times the one before
    #[arg(short = 'f', long, default_value_t = 4, value_name = "FACTOR",
          value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,

    /// How many processes take part; under a launcher it is the launcher that says so
    #[arg(long, visible_alias = "nproc_per_node", default_value_t = 2, value_name = "N")]
    pub(crate) nproc_per_node: u32,

    /// What carries the data: tcp or shm [default: shm among ranks of one host, tcp between hosts]
    #[arg(long, value_name = "KIND")]
    pub(crate) transport: Option<TransportKind>,

    /// Bind each rank to its share of the host's processors, as mpirun does, if there is one for each. Where others compute, too, the kernel may
    /// otherwise leave two ranks on one processor
    #[arg(long)]
    pub(crate) bind: bool,

    /// Where the buffers are: in the host's memory, or on CUDA devices, one for each rank of a host, where NCCL moves them
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu, value_name = "KIND", conflicts_with_all = ["transport", "tune"])]
    pub(crate) device: DeviceKind,

    /// The buffers: memory of the group (`ProcessGroup::alloc`), or the program's own
    #[arg(long, value_enum, default_value_t = Memory::Ordinary, value_name = "KIND")]
    pub(crate) memory: Memory,

    /// The type of the elements
    #[arg(short = 'd', long, visible_alias = "datatype", default_value = "f32", value_parser = dtype,
          value_name = "TYPE")]
    pub(crate) dtype: DType,

    /// How elements are combined, where they are; premul_sum halves them first [default: sum]
    #[arg(short = 'o', long, value_parser = op, value_name = "OPERATION")]
    pub(crate) op: Option<ReduceOp>,

    /// The rank from which data goes out, or at which it ends [default: 0]
    #[arg(short = 'r', long, value_name = "RANK")]
    pub(crate) root: Option<u32>,

    /// How many calls are timed for each size, at most 10000000 [default: some 0.3 s of them, from 8 to 30000]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_ITERATIONS))]
    pub(crate) iterations: Option<u32>,

    /// How many calls go before the timed ones [default: until their times have settled, for 0.1 s to 1 s]
    #[arg(short = 'w', long, value_name = "N")]
    pub(crate) warm_up: Option<u32>,

    /// How many calls have every element of their results checked, before the timed ones and again after them
    #[arg(short = 'c', long, value_name = "N", default_value_t = 1, num_args = 0..=1, default_missing_value = "10")]
    pub(crate) check: u32,

    /// Print a line of JSON for each size, or write it to a file besides printing the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,

    /// Draw time and bus bandwidth against size
    #[arg(long, value_name = "PNG")]
    pub(crate) plot: Option<PathBuf>,

    /// What was measured before, with --json or by others, to be drawn beside it
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "plot")]
    pub(crate) peers: Vec<PathBuf>,

    /// Time each algorithm, and note in this table of PHALANX_TUNING's where one gives way to the next in such a world; only
    /// over TCP, since ranks that share memory use no table
    #[arg(long, value_name = "FILE")]
    pub(crate) tune: Option<PathBuf>,
}

const ABOUT: &str = "\
Times a collective at growing sizes, as nccl-tests does, and checks its results.

Starts the processes itself. Under a launcher (`phalanx run`, torchrun, RANK and WORLD_SIZE set by hand on several \
hosts) each process is one of the ranks.";

const MANUAL: &str = "\
Sizes:
  Those of the whole data: what stands in one rank's buffer for all_reduce, all_reduce_coalesced, broadcast, reduce and send_recv, in the \
output of all_gather, all_gather_v and gather, in the input of reduce_scatter, scatter, all_to_all and all_to_all_v. They are rounded up to whole elements for every rank.

Columns:
  time   of a call, in µs: the median of the rank for which it is longest; min and p99 (99 of 100 calls are faster) \
likewise. Calls of a few µs are timed several at once, so that reading the clock does not show; min and p99 are then \
those of such a sample's mean. send_recv goes there and back: its time is half of that.
  algbw  size over time, in GB/s (10^9 bytes)
  busbw  what each rank's link carries if the algorithm is optimal, as nccl-tests defines it: algbw times 2(n-1)/n for \
all_reduce and all_reduce_coalesced, (n-1)/n for all_gather, all_gather_v, reduce_scatter, gather, scatter, all_to_all and all_to_all_v, 1 for \
the others
  wrong  elements of all ranks that came out wrong; the exit code is 1 if there is one. With --check 0 none is looked at, and a dash stands here

Examples:
  phalanx bench all_reduce -b 4 -e 256M -f 4 --nproc-per-node 4
  phalanx bench reduce_scatter --dtype bf16 --op avg --memory registered --check 10
  phalanx bench all_reduce --transport tcp --json tcp.json
  phalanx bench all_reduce --plot all_reduce.png --peers tcp.json
  phalanx bench all_reduce --nproc-per-node 4 -b 1K -f 2 --transport tcp --tune tuning.json
  PHALANX_TUNING=tuning.json ./train
  phalanx bench all_reduce --device cuda --nproc-per-node 8 -e 1G
  phalanx bench faults
  phalanx bench startup
  phalanx bench rpc";

/// Whose memory is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceKind {
    /// The host's
    Cpu,
    /// That of CUDA devices, by NCCL; a call is timed until the device has done it
    Cuda,
}

/// Whose memory is sent from and received into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// The program's own
    Ordinary,
    /// The group's, which it moves without a further copy
    Registered,
}

/// The largest number of bytes that an option may give.
const MAX_BYTES: u64 = 1 << 40;
/// The largest number of calls that are timed: their times are kept.
pub(crate) const MAX_ITERATIONS: i64 = 10_000_000;

/// A number of bytes with an optional K, M or G (powers of 1024).
pub(crate) fn bytes(text: &str) -> Result<usize, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" | "B" if !digits.is_empty() => 0,
        "K" | "KB" | "KIB" if !digits.is_empty() => 10,
        "M" | "MB" | "MIB" if !digits.is_empty() => 20,
        "G" | "GB" | "GIB" if !digits.is_empty() => 30,
        _ => return Err("it is not a number of bytes such as 4, 64K or 1M".to_owned()),
    };
    // Digits alone are no number only if they are too many.
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let number = number.filter(|bytes| (1..=MAX_BYTES).contains(bytes));
    number.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(|| "give from 1 byte to 1024G".to_owned())
}

fn dtype(text: &str) -> Result<DType, String> {
    one_of(&DType::ALL, text)
}

fn op(text: &str) -> Result<ReduceOp, String> {
    one_of(&ReduceOp::ALL, text).map(|op| match op {
        ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(FACTOR),
        op => op,
    })
}

fn one_of<T: Copy + ToString>(all: &[T], text: &str) -> Result<T, String> {
    all.iter().copied().find(|known| known.to_string() == text).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(T::to_string).collect();
        format!("it may be {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(bytes("4"), Ok(4));
        assert_eq!(bytes("64K"), Ok(64 << 10));
        assert_eq!([bytes("2MB"), bytes("2MiB")], [Ok(2 << 20), Ok(2 << 20)]);
        assert_eq!(bytes("1024g"), Ok(1 << 40));
        for bad in ["x", "", "K", "9T", "4BB", "4KIIB", "4I", "-4", "+4", "1.5M", "4 K"] {
            assert!(bytes(bad).unwrap_err().contains("not a number"), "{bad}");
        }
        for bad in ["0", "0G", "1025G", "18446744073709551616", "17179869184G"] {
            assert!(bytes(bad).unwrap_err().contains("to 1024G"), "{bad}");
        }
    }

    #[test]
    fn what_is_unknown_is_answered_with_what_is_known() {
        assert_eq!(dtype("bf16"), Ok(DType::BF16));
        assert!(dtype("float").unwrap_err().contains("f32, f64"));
        assert_eq!(op("avg"), Ok(ReduceOp::Avg));
    }
}
