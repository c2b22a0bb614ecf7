//! What a worker of the soak does: it trains the network again and again, and obeys when it is told to fail.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use phalanx::elastic::{self, Context, Parts, State};
use phalanx::{Error, ProcessGroup, ReduceOp};

use super::super::{Job, Training};

/// Where orders for workers lie, each in a file with the name of the worker's process.
pub const ORDERS: &str = "PHALANX_SOAK_ORDERS";
/// When to end, in seconds of the epoch of Unix.
pub const UNTIL: &str = "PHALANX_SOAK_UNTIL";
/// After how many trainings to end.
pub const TRAININGS: &str = "PHALANX_SOAK_TRAININGS";

/// What one process is told by its environment.
pub struct Worker {
    orders: PathBuf,
    until: Duration,
    trainings: u64,
}

impl Worker {
    /// None if this process is no worker of a soak.
    pub fn from_env() -> Option<Self> {
        let number = |name| std::env::var(name).ok()?.parse().ok();
        Some(Self {
            orders: std::env::var_os(ORDERS)?.into(),
            until: Duration::from_secs(number(UNTIL).unwrap_or(u64::MAX)),
            trainings: number(TRAININGS).unwrap_or(u64::MAX),
        })
    }

    pub fn work(&self, job: &Job) -> anyhow::Result<()> {
        let mut training = job.training()?;
        let mut first = Parts::default();
        training.save(&mut first)?;
        // The furthest step that this process has taken, whatever has been lost of it.
        let mut furthest = 0;
        elastic::run(&mut training, |context, _| self.train(context, job, &first, &mut furthest))?;
        println!("done {:016x} pid {}", hash(training.model.model()), std::process::id());
        Ok(())
    }

    fn train(
        &self,
        context: &mut Context<'_, Training>,
        job: &Job,
        first: &Parts,
        furthest: &mut u64,
    ) -> phalanx::Result<()> {
        say_round(context, *furthest);
        let commit = |context: &mut Context<'_, Training>| {
            context.commit()?;
            println!("commit {} round {}", context.state.progress.step, context.round());
            Ok::<_, Error>(())
        };
        loop {
            self.obey()?;
            let round = context.round();
            if job.step(context)?.is_some() {
                *furthest = context.state.progress.step;
                if context.round() != round {
                    // A step was cut off, and done again.
                    say_round(context, *furthest);
                }
                if furthest.is_multiple_of(job.options.commit_every) {
                    commit(context)?;
                }
                continue;
            }
            context.state.progress.sampler.next_epoch();
            let epoch = context.state.progress.sampler.epoch();
            let training = epoch / job.options.epochs;
            let mut over = false;
            if epoch.is_multiple_of(job.options.epochs) {
                let accuracy = job.evaluate(context)?;
                if context.rank().is_main() {
                    println!("training {training} accuracy {accuracy}");
                }
                over = self.is_over(training, context.group())?;
                if !over {
                    let progress = context.state.progress.clone();
                    context.state.load(first)?;
                    context.state.progress = progress;
                }
            }
            commit(context)?;
            if over {
                return Ok(());
            }
        }
    }

    /// Whether it is time to end. All ranks get the same answer, although clocks may differ.
    fn is_over(&self, trainings: u64, group: &ProcessGroup) -> phalanx::Result<bool> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut over = [u8::from(now >= self.until || trainings >= self.trainings)];
        group.all_reduce(&mut over, ReduceOp::Max)?;
        Ok(over[0] != 0)
    }

    fn obey(&self) -> phalanx::Result<()> {
        let order = std::fs::read_to_string(self.orders.join(std::process::id().to_string()));
        match order.as_deref() {
            Ok("exit") => std::process::exit(7),
            Ok("abort") => std::process::abort(),
            #[allow(clippy::panic, reason = "it is what is asked for")]
            Ok("panic") => panic!("the soak asks for a panic"),
            Ok("error") => Err(Error::invalid_argument("the soak asks for an error")),
            _ => Ok(()),
        }
    }
}

/// Says in which group this worker is, and how many steps of the `furthest` it has lost.
fn say_round(context: &Context<'_, Training>, furthest: u64) {
    let (group, step) = (context.group(), context.state.progress.step);
    println!(
        "round {} rank {} world {} pid {} step {step} lost {}",
        context.round(),
        group.rank(),
        group.world_size(),
        std::process::id(),
        furthest.saturating_sub(step)
    );
}

/// One number for all floats of a model.
fn hash<M: Module>(model: &M) -> u64 {
    struct Hash(u64);
    impl ModuleVisitor for Hash {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            for byte in param.val().into_data().as_bytes() {
                self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
            }
        }
    }
    let mut hash = Hash(0xCBF2_9CE4_8422_2325);
    model.visit(&mut hash);
    hash.0
}
