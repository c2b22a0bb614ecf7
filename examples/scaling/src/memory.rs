//! The most memory that a rank takes. What one kind of training has touched stays with the process for the next, so each kind
//! has processes of its own.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::ValueEnum;
use phalanx::ProcessGroup;
use phalanx_burn::DdpOptions;
use serde::{Deserialize, Serialize};

use crate::models::{Encoder, Mlp, ResNet, Subject};
use crate::named::Named;
use crate::{Name, Trainer};

/// Steps after which nothing new is taken: buckets have been rebuilt by then.
const STEPS: usize = 4;

/// How a rank trains.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Kind {
    Local,
    Ddp,
    View,
    Horovod,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Local, Self::Ddp, Self::View, Self::Horovod];

    fn text(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Ddp => "ddp",
            Self::View => "view",
            Self::Horovod => "horovod",
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Peak {
    /// The most memory that rank 0 had at one time, in bytes. Of pages that both ranks have mapped, it has half.
    bytes: u64,
    /// One copy of the gradients.
    gradients: u64,
}

/// Prints, for each model, what data parallelism adds to local training.
pub fn compare(models: &[Name]) -> Result<()> {
    println!(
        "peak of a rank      local       2 ranks        as views         horovod   (beyond local, in copies of the gradients)"
    );
    for model in models {
        let peaks = Kind::ALL.map(|kind| peak(kind, *model));
        let [local, ddp, view, horovod] =
            peaks.map(|peak| peak.map(|peak| (peak.bytes as f64, peak.gradients as f64)));
        let (local, ddp, view, horovod) = (local?, ddp?, view?, horovod?);
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let beyond =
            |peak: (f64, f64)| format!("{:>6.0} MiB {:>+5.2}", mib(peak.0), (peak.0 - local.0) / peak.1);
        let (ddp, view, horovod) = (beyond(ddp), beyond(view), beyond(horovod));
        println!("{:12} {:>8.0} MiB {ddp} {view} {horovod}", model.text(), mib(local.0));
    }
    Ok(())
}

fn peak(kind: Kind, model: Name) -> Result<Peak> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--kind", kind.text(), "--models", model.text()])
        // What has been freed is to be seen as freed: glibc would keep some of it, and how much is chance.
        .env("MALLOC_MMAP_THRESHOLD_", "131072")
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the ranks of {} {} failed", model.text(), kind.text());
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().find(|line| line.contains("\"gradients\"")).context("no figures came")?;
    let start = line.find('{').unwrap_or(0);
    Ok(serde_json::from_str(&line[start..])?)
}

/// Trains some steps; rank 0 prints its peak.
pub fn measure_all(kind: Kind, models: &[Name]) -> Result<()> {
    let group = phalanx::init()?;
    for model in models {
        let (gradients, bytes) = watched(|| match model {
            Name::Mlp => train::<Mlp>(kind, &group),
            Name::Encoder => train::<Encoder>(kind, &group),
            Name::ResNet => train::<ResNet>(kind, &group),
        })?;
        group.barrier()?;
        if group.rank().is_main() {
            println!("{}", serde_json::to_string(&Peak { bytes, gradients })?);
        }
    }
    Ok(())
}

/// Gives the bytes of the gradients.
fn train<M: Subject>(kind: Kind, group: &ProcessGroup) -> Result<u64> {
    let mut options = DdpOptions::default();
    options.gradient_as_bucket_view = matches!(kind, Kind::View);
    let alone = ProcessGroup::alone()?;
    let group = if matches!(kind, Kind::Local) { &alone } else { group };
    if let Kind::Horovod = kind {
        let mut trainer = Named::<M>::new(group, &Device::flex())?;
        for _ in 0..STEPS {
            trainer.step()?;
        }
        return Ok(trainer.parameters() as u64 * 4);
    }
    let mut trainer = Trainer::<M>::new(group, &Device::flex(), options)?;
    for _ in 0..STEPS {
        trainer.step()?;
    }
    Ok(trainer.ddp.model().num_params() as u64 * 4)
}

/// Runs `work` and gives the most memory that this process had meanwhile, looked at every few milliseconds.
fn watched<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(proportional_set()?);
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(most)
        });
        let outcome = work();
        done.store(true, Ordering::Relaxed);
        let most = watcher.join().map_err(|_| anyhow::anyhow!("the watcher of the memory panicked"))?;
        outcome.and_then(|outcome| most.map(|most| (outcome, most)))
    })
}

/// The memory that this process has, as Linux counts it: pages that several processes have mapped count in parts.
fn proportional_set() -> Result<u64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
