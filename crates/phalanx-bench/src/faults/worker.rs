//! A rank that trains until something goes wrong, and says when that was.

use std::io::{self, Read};
use std::thread;
use std::time::Duration;

use phalanx::{Error, ReduceOp, Result};
use serde::{Deserialize, Serialize};

use crate::measure::monotonic;
use crate::report::print;

/// Elements of each step's gradients: 1 MiB.
const ELEMENTS: usize = 1 << 18;
/// After so many steps the world is said to train.
const WARM_UP: usize = 10;

/// What a rank reports, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum RankEvent {
    Trains,
    /// A call has returned an error, at this time of the host's [`monotonic`] clock.
    Failed {
        at: Duration,
        blames: Option<u32>,
        text: String,
    },
}

/// Trains as long as its parent process lives.
pub(crate) fn run() -> Result<()> {
    thread::spawn(|| {
        // It ends with the other end of the pipe.
        let _ = io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
    let group = phalanx::init()?;
    let mut gradients = vec![1f32; ELEMENTS];
    let mut steps = 0;
    let error = loop {
        let step = group.barrier().and_then(|()| group.all_reduce(&mut gradients, ReduceOp::Avg));
        if let Err(error) = step {
            break error;
        }
        thread::sleep(Duration::from_millis(1));
        steps += 1;
        if steps == WARM_UP {
            say(&RankEvent::Trains)?;
        }
    };
    let at = monotonic();
    let blames = error.peer().filter(|_| error.is_peer_failure()).map(phalanx::Rank::get);
    say(&RankEvent::Failed { at, blames, text: error.to_string() })?;
    // Its end would be another fault.
    thread::sleep(Duration::from_secs(60));
    Ok(())
}

fn say(event: &RankEvent) -> Result<()> {
    let line = serde_json::to_string(event).map_err(|error| Error::aborted(error.to_string()))?;
    print(&format!("{line}\n"))
}
