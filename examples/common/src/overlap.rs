//! How well communication hides behind backward, read from the trace that `PHALANX_TRACE` asks for.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result};
use phalanx::ProcessGroup;
use serde::{Deserialize, Serialize};

/// Medians over the backward passes of rank 0.
#[derive(Serialize)]
pub struct Overlap {
    /// The share of backward that was over when the first bucket was launched.
    pub launch_at: f64,
    /// The share of the time from the first launch to the last average in which backward was still running.
    pub hidden: f64,
    /// How long, behind backward, a step waited for averages, in milliseconds.
    pub waiting_ms: f64,
}

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    /// The rank.
    pid: u32,
    name: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
}

impl Event {
    fn end(&self) -> f64 {
        self.ts + self.dur
    }
}

/// The trace's clock: microseconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

impl Overlap {
    /// Of what happened on rank 0 since `began`; nothing on other ranks, and without a trace.
    pub fn since(began: f64, group: &ProcessGroup) -> Result<Option<Self>> {
        let Some(path) = std::env::var_os("PHALANX_TRACE").filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        if !group.rank().is_main() {
            return Ok(None);
        }
        group.trace().flush();
        let path = Path::new(&path);
        let text = std::fs::read(path).with_context(|| format!("no trace at {}", path.display()))?;
        let events = serde_json::from_slice::<Trace>(&text)?.events;
        let named = |name| {
            events.iter().filter(move |event| event.pid == 0 && event.name == name && event.ts >= began)
        };
        let passes = named("backward").zip(named("wait for gradients")).filter_map(|(backward, wait)| {
            let launched = named("launched").map(|event| event.ts).find(|ts| *ts >= backward.ts)?;
            let launch_at = (launched - backward.ts) / backward.dur;
            Some([launch_at, (backward.end() - launched) / (wait.end() - launched), wait.dur / 1e3])
        });
        let passes: Vec<_> = passes.collect();
        let median = |column: usize| crate::median(passes.iter().map(|pass| pass[column]).collect());
        Ok((!passes.is_empty()).then(|| Self {
            launch_at: median(0),
            hidden: median(1),
            waiting_ms: median(2),
        }))
    }
}
