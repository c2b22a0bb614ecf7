//! A linear model that continues to learn when workers die.
//!
//! ```text
//! cargo build --release -p elastic
//! phalanx run --nproc-per-node 4 --min-np 2 --max-restarts 10 -- target/release/elastic
//! ```
//!
//! Kill a worker while it runs (`kill -9` and one of the process numbers it shows). The other processes continue, and repeat the
//! interrupted step. A new worker joins at the next commit. Alone (`cargo run -p elastic`) the program is a world of
//! one. At the end every rank prints a hash of the model, which is the same on all.
//!
//! `target/release/elastic kills 4 100` kills workers by itself, 100 times with 4 workers, and measures the time
//! until the next commit.

mod kills;

use std::ffi::OsString;
use std::time::Duration;

use phalanx::elastic::{self, Context, Parts, State};
use phalanx::sampler::ElasticSampler;
use phalanx::{Error, ProcessGroup, ReduceOp, Result, WorldSize};

const FEATURES: usize = 32;
const SAMPLES: usize = 4096;

/// What outlives a worker: everything that the next step depends on.
struct Training {
    weights: Vec<f32>,
    /// Of the optimizer, which is gradient descent with momentum.
    momentum: Vec<f32>,
    /// The place in the data.
    sampler: ElasticSampler,
    step: u64,
}

impl State for Training {
    // What is large is a part of its own, as bytes; the rest can go through serde.
    fn save(&self, parts: &mut Parts) -> Result<()> {
        parts.put("weights", bytemuck::cast_slice(&self.weights))?;
        parts.put("momentum", bytemuck::cast_slice(&self.momentum))?;
        parts.serialize("place", &(&self.sampler, self.step))
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        parts.copy_to("weights", bytemuck::cast_slice_mut(&mut self.weights))?;
        parts.copy_to("momentum", bytemuck::cast_slice_mut(&mut self.momentum))?;
        (self.sampler, self.step) = parts.deserialize("place")?;
        Ok(())
    }
}

impl Training {
    /// Goes along the mean of the gradients of `samples`, whose sum this is. Without any nothing changes: a worker that has died may have had all of a
    /// step.
    fn learn(&mut self, sum: &[f32], samples: f32) {
        if samples == 0.0 {
            return;
        }
        let momentum = self.momentum.iter_mut().zip(&mut self.weights);
        for ((momentum, weight), sum) in momentum.zip(sum) {
            *momentum = 0.9 * *momentum + sum / samples;
            *weight -= 0.01 * *momentum;
        }
    }
}

/// Called anew whenever the workers change, with another group. What depends on rank or world size is made here.
fn train(context: &mut Context<'_, Training>, group: &ProcessGroup) -> Result<()> {
    let settings = Settings::read(|name| std::env::var_os(name))?;
    let (rank, world) = (group.rank(), group.world_size());
    println!("round {} rank {rank} of {world} pid {}", context.round(), std::process::id());
    let (mut gradients, mut sums) = (vec![0.0; FEATURES], vec![0.0; FEATURES]);
    while context.state.step < settings.steps {
        // Not those of `group`: a step that was cut off may have changed them.
        let (rank, world) = (context.rank(), context.world_size());
        let state = &mut *context.state;
        // This rank's samples of a global batch, which is as large as there are ranks.
        let Some(batch) = state.sampler.next_batch(settings.batch, rank, world) else {
            state.sampler.next_epoch();
            continue;
        };
        gradient(&state.weights, &batch, &mut gradients);
        // The sum over all ranks, divided by the number of samples of all: ranks may have unequal shares at the end.
        // If a worker dies meanwhile, the others do it again, without its samples: so it begins with a copy.
        let step = context.step(|_, group| {
            sums.copy_from_slice(&gradients);
            let mut samples = [batch.len() as f32];
            group.all_reduce(&mut sums, ReduceOp::Sum)?;
            group.all_reduce(&mut samples, ReduceOp::Sum)?;
            Ok(samples[0])
        })?;
        let state = &mut *context.state;
        // Those samples come again.
        state.sampler.put_back(&step.missing);
        state.learn(&sums, step.value);
        state.step += 1;
        std::thread::sleep(settings.pause);
        // From here on, no failure leads back further than to this step. `?` is all that elastic jobs ask for: where the loop
        // ends, it is called again with the new group.
        if state.step.is_multiple_of(settings.commit_every) || state.step == settings.steps {
            let step = state.step;
            context.commit()?;
            println!("commit {step} round {} world {world}", context.round());
        }
    }
    Ok(())
}

/// The gradient of the squared error, summed over `batch`.
fn gradient(weights: &[f32], batch: &[usize], gradients: &mut [f32]) {
    gradients.fill(0.0);
    for &index in batch {
        let (features, target) = sample(index);
        let output: f32 = weights.iter().zip(&features).map(|(weight, feature)| weight * feature).sum();
        for (gradient, feature) in gradients.iter_mut().zip(&features) {
            *gradient += 2.0 * (output - target) * feature;
        }
    }
}

/// The `index`-th sample: features made up from its number, and a target that depends on them linearly.
fn sample(index: usize) -> ([f32; FEATURES], f32) {
    let mut number = (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let features = std::array::from_fn(|_| {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        (number >> 40) as f32 / (1 << 24) as f32 - 0.5
    });
    let target = features.iter().zip(1..).map(|(feature, number)| feature * number as f32).sum();
    (features, target)
}

/// What the environment says about the run, so that the command line stays free.
struct Settings {
    steps: u64,
    batch: usize,
    commit_every: u64,
    /// Stands for the work of a larger model.
    pause: Duration,
}

impl Settings {
    /// Reads variables through `lookup`. An empty one counts as not set.
    fn read(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let number = |name: &str, least: u64, default: u64| {
            let Some(value) = lookup(name).filter(|value| !value.is_empty()) else { return Ok(default) };
            let number =
                value.to_str().and_then(|value| value.parse::<u64>().ok()).filter(|number| *number >= least);
            number.ok_or_else(|| {
                let cause = format!("{name}={}: it is no whole number from {least}", value.display());
                Error::invalid_argument(cause).with_remedy("correct the variable, or unset it")
            })
        };
        Ok(Self {
            steps: number("STEPS", 0, 2000)?,
            // No epoch has more.
            batch: usize::try_from(number("BATCH", 1, 16)?).unwrap_or(SAMPLES).min(SAMPLES),
            commit_every: number("COMMIT_EVERY", 1, 10)?,
            pause: Duration::from_millis(number("PAUSE_MS", 0, 5)?),
        })
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, workers, kills] = arguments.as_slice()
        && command == "kills"
    {
        let number =
            |text: &str| text.parse().map_err(|_| Error::invalid_argument(format!("{text:?} is no number")));
        return kills::Kills { workers: WorldSize::new(number(workers)?)?, kills: number(kills)? }.measure();
    }
    if !arguments.is_empty() {
        return Err(Error::invalid_argument(format!("{arguments:?} is not understood"))
            .with_remedy("give nothing, or `kills WORKERS KILLS`"));
    }
    let mut training = Training {
        weights: vec![0.0; FEATURES],
        momentum: vec![0.0; FEATURES],
        sampler: ElasticSampler::new(SAMPLES).seed(7),
        step: 0,
    };
    elastic::run(&mut training, train)?;
    let hash = training.weights.iter().fold(0xCBF2_9CE4_8422_2325_u64, |hash, weight| {
        (hash ^ u64::from(weight.to_bits())).wrapping_mul(0x0100_0000_01B3)
    });
    println!("done step {} hash {hash:016x} pid {}", training.step, std::process::id());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_whose_samples_have_all_gone_with_a_worker_changes_nothing() {
        let sampler = ElasticSampler::new(SAMPLES);
        let mut training =
            Training { weights: vec![1.0; FEATURES], momentum: vec![0.5; FEATURES], sampler, step: 0 };
        training.learn(&[0.0; FEATURES], 0.0);
        assert_eq!((training.weights[0], training.momentum[0]), (1.0, 0.5));
        training.learn(&[4.0; FEATURES], 2.0);
        assert!((training.momentum[0] - 2.45).abs() < 1e-6 && (training.weights[0] - 0.9755).abs() < 1e-6);
    }

    #[test]
    fn settings_that_are_no_numbers_are_refused_by_name() {
        let with = |name: &'static str, value: &'static str| {
            Settings::read(move |wanted| (wanted == name).then(|| OsString::from(value)))
        };
        assert_eq!(with("STEPS", "7").unwrap().steps, 7);
        assert_eq!(with("STEPS", "").unwrap().steps, 2000);
        assert_eq!(with("BATCH", "1000000").unwrap().batch, SAMPLES);
        for (name, value) in [("STEPS", "1e6"), ("BATCH", "0"), ("COMMIT_EVERY", "0"), ("PAUSE_MS", "-1")] {
            let error = with(name, value).err().unwrap().to_string();
            assert!(error.contains(&format!("{name}={value}")), "{error}");
        }
    }
}
