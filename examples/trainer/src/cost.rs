//! What it costs to be several: the trainer alone, several trainers beside each other that never speak, and as many ranks.

use std::time::Instant;

use anyhow::Result;
use burn::data::dataset::InMemDataset;
use burn::tensor::Device;
use burn::train::{ExecutionStrategy, TrainingStrategy};
use phalanx::{ProcessGroup, ReduceOp};
use phalanx_burn::train::DdpStrategy;

use crate::{Classifier, Loader, Options, Reader, loader, trained};

/// Of each way, in turn; medians are shown, because others may use the machine too.
const ROUNDS: usize = 5;

/// Measures one epoch with its validation, in which every process takes as many steps over as many samples.
pub fn measure(options: &Options) -> Result<()> {
    let group = phalanx::init()?;
    let (digits, unseen) = (Reader::new(options, "train")?, Reader::new(options, "t10k")?);
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    let batch_size = options.own_batch(ranks)?;
    let part = |reader: &Reader| {
        let share = reader.len() / ranks;
        InMemDataset::new((rank * share..(rank + 1) * share).collect())
    };
    let steps = (digits.len() / ranks).div_ceil(batch_size);

    let by_itself = || {
        let loaders = [loader(&digits, part(&digits), batch_size), loader(&unseen, part(&unseen), 250)];
        time(options, loaders, ExecutionStrategy::single(Device::flex().autodiff()).into())
    };
    let together = || {
        let strategy = DdpStrategy::new(&group);
        let whole = InMemDataset::new((0..digits.len() / ranks * ranks).collect());
        let loaders = [
            loader(&digits, strategy.sampled(whole, 1), batch_size),
            loader(&unseen, InMemDataset::new((0..unseen.len()).collect()), 250),
        ];
        time(options, loaders, strategy.into())
    };

    let mut times = [const { Vec::new() }; 3];
    for round in 0..=ROUNDS {
        let alone = if group.rank().is_main() { by_itself()? } else { 0.0 };
        group.barrier()?;
        let apart = slowest(&group, by_itself()?)?;
        let together = slowest(&group, together()?)?;
        if round > 0 {
            // The first touches memory.
            times.iter_mut().zip([alone, apart, together]).for_each(|(times, time)| times.push(time));
        }
    }
    let [alone, apart, together] = times.map(|times| 1e3 * median(times));
    if group.rank().is_main() {
        println!("{steps} steps of {batch_size} samples a rank; medians of {ROUNDS} rounds");
        let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "all".into());
        println!("ms an epoch with start-up and validation, kernel threads a process: {threads}");
        println!(
            "the trainer alone {alone:.0}, {ranks} that never speak {apart:.0}, {ranks} ranks {together:.0}"
        );
        println!("ranks / that never speak: {:.2}", together / apart);
    }
    Ok(())
}

fn time(options: &Options, loaders: [Loader; 2], strategy: TrainingStrategy<Classifier>) -> Result<f64> {
    let folder = options.directory.join(format!("cost-{}", std::process::id()));
    let start = Instant::now();
    let [train, valid] = loaders;
    trained(&folder, train, valid, 1, strategy)?;
    let elapsed = start.elapsed().as_secs_f64();
    std::fs::remove_dir_all(folder)?;
    Ok(elapsed)
}

/// All that wait for each other take as long as the slowest.
fn slowest(group: &ProcessGroup, own: f64) -> Result<f64> {
    let mut longest = [own];
    group.all_reduce(&mut longest, ReduceOp::Max)?;
    Ok(longest[0])
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
