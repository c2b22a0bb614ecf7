//! Two ranks fit a line, and rank 0 records it: every kind of record, in every format.
//!
//! ```sh
//! cargo run -p phalanx-tracking --example record -- runs/line
//! cargo run -p phalanx-tracking --example record -- runs/line --from 120   # as after a checkpoint of step 120
//! tensorboard --logdir runs
//! ```

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use phalanx::ReduceOp;
use phalanx_tracking::{Console, Picture, Run, RunOptions, Traffic, logs};
use serde::Serialize;

/// Two ranks fit a line, and rank 0 records it.
#[derive(Parser)]
struct Arguments {
    /// Where the record is, or goes on
    directory: PathBuf,
    /// Ranks, if no launcher has started them
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Steps of the training
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// The step at which it goes on
    #[arg(long)]
    from: Option<u64>,
    /// How long a step takes besides, in milliseconds
    #[arg(long, default_value_t = 0)]
    pause: u64,
}

#[derive(Serialize)]
struct Settings {
    learning_rate: f64,
    samples: usize,
    optimizer: &'static str,
}

fn main() -> phalanx::Result<()> {
    let arguments = Arguments::parse();
    phalanx::spawn(arguments.ranks, || train(&arguments))
}

fn train(arguments: &Arguments) -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let console = Console::stderr();
    logs::install(group.rank(), arguments.directory.join("logs"), &console)?;

    let options = RunOptions::new(&arguments.directory).tensorboard().json_lines().csv();
    let mut options = options.progress(&console, Some(arguments.steps));
    if let Some(step) = arguments.from {
        options = options.resume_at(step);
    }
    let run = Run::start(&group, options)?;

    let settings = Settings { learning_rate: 0.05, samples: 64, optimizer: "sgd" };
    run.log_hyperparameters(&settings)?;
    tracing::info!("rank {} of {} is ready", group.rank(), group.world_size());

    // y = 3 x - 1, of which each rank has other samples.
    let (mut slope, mut offset, mut sent) = (0.0, 0.0, 0);
    for step in arguments.from.unwrap_or(0)..arguments.steps {
        let samples = (0..settings.samples).map(|sample| {
            let seed = step * 64 + sample as u64 * 7 + u64::from(group.rank().get());
            let x = (seed % 200) as f64 / 100.0 - 1.0;
            (x, slope * x + offset - (3.0 * x - 1.0))
        });
        let samples: Vec<(f64, f64)> = samples.collect();
        let mean =
            |value: fn(&(f64, f64)) -> f64| samples.iter().map(value).sum::<f64>() / samples.len() as f64;
        let loss = mean(|(_, error)| error * error);
        let mut gradient = [mean(|(x, error)| 2.0 * error * x), mean(|(_, error)| 2.0 * error)];
        group.all_reduce(&mut gradient, ReduceOp::Avg)?;
        sent += size_of_val(&gradient) as u64;
        slope -= settings.learning_rate * gradient[0];
        offset -= settings.learning_rate * gradient[1];

        run.log_mean(step, "loss", loss)?;
        run.log(step, "weights/slope", slope);
        if step % 50 == 0 {
            let errors: Vec<f64> = samples.iter().map(|(_, error)| *error).collect();
            run.log_histogram(step, "errors", &errors);
            run.log_picture(step, "line", || drawn(slope, offset))?;
            run.log_text(step, "note", &format!("y = **{slope:.3}** x + **{offset:.3}**"));
            run.log_system(step, Traffic { bytes_sent: Some(sent), hidden: None })?;
            tracing::info!("rank {}: a loss of {loss:.4} at step {step}", group.rank());
        }
        std::thread::sleep(Duration::from_millis(arguments.pause));
    }
    run.finish()?;
    Ok(())
}

/// The line for x from -1 to 1 and y from -4 to 4.
fn drawn(slope: f64, offset: f64) -> phalanx::Result<Picture> {
    const SIDE: u32 = 64;
    let mut pixels = vec![0.0f32; (SIDE * SIDE) as usize];
    for column in 0..SIDE {
        let x = f64::from(column) / f64::from(SIDE) * 2.0 - 1.0;
        let row = (4.0 - (slope * x + offset)) / 8.0 * f64::from(SIDE);
        let row = (row as u32).min(SIDE - 1);
        pixels[(row * SIDE + column) as usize] = 1.0;
    }
    Picture::gray_f32(SIDE, SIDE, &pixels)
}
