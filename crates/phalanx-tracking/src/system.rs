//! What a process costs: processor time and memory.

use std::time::Instant;

use procfs::process::Process;
use serde::{Deserialize, Serialize};

/// What the record cannot find out by itself about a rank's communication, for [`Run::log_system`](crate::Run::log_system).
///
/// ```
/// use phalanx_tracking::Traffic;
/// let traffic = Traffic { bytes_sent: Some(1 << 20), ..Traffic::default() };
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// The bytes that this rank has given to collectives since the beginning: `Ddp::communicated_bytes` of `phalanx-burn`,
    /// [`Reducer::communicated_bytes`](phalanx::reducer::Reducer::communicated_bytes).
    pub bytes_sent: Option<u64>,
    /// The share of the communication, from 0 to 1, during which this rank computed. A trace shows it (`PHALANX_TRACE`), and so
    /// does a clock around the wait for gradients.
    pub hidden: Option<f64>,
}

/// The figures of one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Processor time over time since the last look: 1 is one processor.
    pub processors: Option<f64>,
    /// Resident memory, in bytes.
    pub memory: Option<u64>,
    /// The most that it has been, in bytes.
    pub peak_memory: Option<u64>,
    pub traffic: Traffic,
}

impl Figures {
    /// By the names under which they are recorded.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let figures = [
            ("cpu_percent", self.processors.map(|processors| processors * 100.0)),
            ("memory_bytes", self.memory.map(|bytes| bytes as f64)),
            ("peak_memory_bytes", self.peak_memory.map(|bytes| bytes as f64)),
            ("bytes_sent", self.traffic.bytes_sent.map(|bytes| bytes as f64)),
            ("communication_hidden", self.traffic.hidden),
        ];
        figures.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Looks at this process again and again.
pub(crate) struct Sampler {
    last: Option<(Instant, f64)>,
}

impl Sampler {
    pub fn new() -> Self {
        Self { last: processor_seconds().map(|seconds| (Instant::now(), seconds)) }
    }

    /// The figures since the last look. What the system does not tell is left out.
    pub fn look(&mut self, traffic: Traffic) -> Figures {
        let now = processor_seconds().map(|seconds| (Instant::now(), seconds));
        let processors = match (self.last, now) {
            (Some((before, used)), Some((now, seconds))) if now > before => {
                Some((seconds - used) / (now - before).as_secs_f64())
            }
            _ => None,
        };
        self.last = now;
        let status = Process::myself().and_then(|process| process.status()).ok();
        let bytes = |kilobytes: Option<u64>| kilobytes.map(|kilobytes| kilobytes * 1024);
        Figures {
            processors,
            memory: bytes(status.as_ref().and_then(|status| status.vmrss)),
            peak_memory: bytes(status.as_ref().and_then(|status| status.vmhwm)),
            traffic,
        }
    }
}

/// What all threads of this process have used, in seconds.
fn processor_seconds() -> Option<f64> {
    let stat = Process::myself().and_then(|process| process.stat()).ok()?;
    Some((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_busy_process_uses_processors_and_memory() {
        let mut sampler = Sampler::new();
        let began = processor_seconds().unwrap();
        // Until the system has counted ten of its ticks.
        while processor_seconds().unwrap() < began + 0.1 {
            std::hint::black_box((0..100_000).sum::<u64>());
        }
        let figures = sampler.look(Traffic::default());
        assert!(figures.processors.unwrap() > 0.0);
        let (memory, peak) = (figures.memory.unwrap(), figures.peak_memory.unwrap());
        assert!(memory > 100 << 10 && peak >= memory, "{memory} {peak}");
        assert_eq!(figures.named().count(), 3, "what is not known is left out");
        std::thread::sleep(Duration::from_millis(20));
        let traffic = Traffic { bytes_sent: Some(7), hidden: Some(0.5) };
        let named: Vec<_> = sampler.look(traffic).named().collect();
        assert_eq!(&named[3..], [("bytes_sent", 7.0), ("communication_hidden", 0.5)]);
    }
}
