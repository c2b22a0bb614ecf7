//! The ways to train. All have the same network, images, optimizer (SGD) and time.

use std::time::{Duration, Instant};

use anyhow::Result;
use burn::optim::SgdConfig;
use burn::tensor::Device;
use clap::ValueEnum;
use digits::{Digits, Flat};
use phalanx::asynchronous::{
    Compensation, Consistency, DelayCompensation, LocalMethod, LocalUpdates, ParameterServer, Sgd, UpdateRule,
};
use phalanx::sampler::DistributedSampler;
use phalanx::{ProcessGroup, Rank};
use phalanx_burn::Ddp;
use serde::Serialize;

use crate::model::Model;

/// How often rank 0's parameters are kept, to look at them when the training is over.
const SNAPSHOTS: u32 = 24;

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Way {
    /// `Ddp`: all ranks in every step
    Ddp,
    /// A parameter server; nobody is more than 1 step ahead of the slowest
    Ssp1,
    /// Not more than 4 steps
    Ssp4,
    /// Not more than 16 steps
    Ssp16,
    /// A parameter server; nobody waits
    Asp,
    /// As asp, with delay compensation
    DcAsgd,
    /// Local SGD: parameters are averaged every few steps
    LocalSgd,
    /// DiLoCo: as local-sgd, with an outer optimizer
    Diloco,
}

/// What all ways have in common.
pub struct Training<'a, M> {
    pub group: &'a ProcessGroup,
    /// How it begins.
    pub network: M,
    pub digits: &'a Digits,
    pub device: &'a Device,
    /// How long a step of this rank pretends to compute.
    pub compute: Duration,
    pub duration: Duration,
    pub batch_size: usize,
    pub learning_rate: f64,
    pub every: u64,
    pub seed: u64,
}

/// What one rank has done.
#[derive(Default)]
pub struct Trained {
    pub steps: u64,
    pub images: u64,
    /// Of all its gradients together.
    pub staleness: u64,
    /// The most steps that a rank was ahead of the slowest, by the records of all servers.
    pub lead: u64,
    pub seconds: f64,
    /// Seconds of training, and the parameters then; on rank 0 alone.
    pub snapshots: Vec<(f64, Vec<f32>)>,
}

impl Way {
    /// In the order in which they are compared.
    pub const ALL: [Self; 8] = [
        Self::Ddp,
        Self::Ssp1,
        Self::Ssp4,
        Self::Ssp16,
        Self::Asp,
        Self::DcAsgd,
        Self::LocalSgd,
        Self::Diloco,
    ];

    /// As tables and plots show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp => "Ddp",
            Self::Ssp1 => "SSP 1",
            Self::Ssp4 => "SSP 4",
            Self::Ssp16 => "SSP 16",
            Self::Asp => "ASP",
            Self::DcAsgd => "DC-ASGD",
            Self::LocalSgd => "local SGD",
            Self::Diloco => "DiLoCo",
        }
    }

    /// Whether gradients are applied to other parameters than they were computed for.
    pub fn is_stale(self) -> bool {
        self.server().is_some()
    }

    /// The consistency of its parameter server, if it has one, and what stale gradients undergo.
    fn server(self) -> Option<(Consistency, Compensation)> {
        let plain = Compensation::default();
        // As in the paper's experiments.
        let delay = Some(DelayCompensation::Adaptive { lambda: 2.0, mean: 0.95 });
        match self {
            Self::Ssp1 => Some((Consistency::Ssp(1), plain)),
            Self::Ssp4 => Some((Consistency::Ssp(4), plain)),
            Self::Ssp16 => Some((Consistency::Ssp(16), plain)),
            Self::Asp => Some((Consistency::Asp, plain)),
            Self::DcAsgd => Some((Consistency::Asp, Compensation { delay, ..plain })),
            Self::Ddp | Self::LocalSgd | Self::Diloco => None,
        }
    }
}

impl<M: Model> Training<'_, M> {
    /// Trains for the given time.
    pub fn run(&self, way: Way) -> Result<Trained> {
        match (way.server(), way) {
            (Some((consistency, compensation)), _) => self.served(consistency, compensation),
            (None, Way::LocalSgd) => self.local(LocalMethod::Average),
            (None, Way::Diloco) => self.local(LocalMethod::diloco()),
            (None, _) => self.synchronous(),
        }
    }

    fn synchronous(&self) -> Result<Trained> {
        let mut ddp = Ddp::new(self.network.clone(), self.group)?;
        let mut optimizer = SgdConfig::new().init();
        let mut batches = self.batches()?;
        let mut clock = Clock::start(self);
        while self.all_go_on(&clock)? {
            let indices = batches.next();
            let batch = self.digits.batch(&indices, self.device);
            let loss = ddp.forward(|network| network.loss(batch))?;
            std::thread::sleep(self.compute);
            let gradients = ddp.backward(&loss)?;
            ddp.step(&mut optimizer, self.learning_rate, gradients)?;
            clock.step(indices.len(), || ddp.model().to_flat());
        }
        Ok(clock.stop(|| ddp.model().to_flat()))
    }

    fn served(&self, consistency: Consistency, compensation: Compensation) -> Result<Trained> {
        let mut parameters = self.network.to_flat();
        // Each gradient is a step.
        let rate = self.learning_rate / self.group.world_size().count() as f64;
        let server = ParameterServer::builder(&self.network.lengths(), Sgd::new(rate as f32))
            .consistency(consistency)
            .compensation(compensation)
            .start(self.group, &mut parameters)?;
        let mut batches = self.batches()?;
        let mut clock = Clock::start(self);
        while clock.is_running() {
            let indices = batches.next();
            let gradients = self.gradients(&parameters, &indices);
            clock.trained.staleness += server.step(&gradients, &mut parameters)?;
            clock.step(indices.len(), || parameters.clone());
        }
        // From here on nobody waits for this rank, which serves until all have come.
        server.leave()?;
        let mut trained = clock.stop(|| parameters.clone());
        let leads = server.statistics()?.into_iter().map(|shard| shard.staleness.lead);
        trained.lead = leads.max().unwrap_or(0);
        server.shutdown()?;
        Ok(trained)
    }

    fn local(&self, method: LocalMethod) -> Result<Trained> {
        let mut parameters = self.network.to_flat();
        let rule = Sgd::new(self.learning_rate as f32);
        let mut local = LocalUpdates::new(self.group, method, self.every, &mut parameters)?;
        let mut batches = self.batches()?;
        let mut clock = Clock::start(self);
        while !clock.trained.steps.is_multiple_of(self.every) || self.all_go_on(&clock)? {
            let indices = batches.next();
            let gradients = self.gradients(&parameters, &indices);
            rule.update(clock.trained.steps + 1, 1.0, &mut parameters, &gradients, &mut []);
            local.step(&mut parameters)?;
            clock.step(indices.len(), || parameters.clone());
        }
        Ok(clock.stop(|| parameters.clone()))
    }

    /// Forward and backward on this rank, of the network with these parameters.
    fn gradients(&self, parameters: &[f32], indices: &[usize]) -> Vec<f32> {
        let network = self.network.clone().with_flat(parameters);
        let loss = network.loss(self.digits.batch(indices, self.device));
        std::thread::sleep(self.compute);
        let gradients = loss.backward();
        network.flat_gradients(gradients)
    }

    fn batches(&self) -> Result<Batches> {
        let sampler = DistributedSampler::new(self.digits.len(), self.group.rank(), self.group.world_size())?;
        Ok(Batches { sampler: sampler.seed(self.seed), size: self.batch_size, epoch: 0, left: Vec::new() })
    }

    /// Whether there is time left by rank 0's clock. Ranks that wait for each other must take as many steps.
    fn all_go_on(&self, clock: &Clock) -> Result<bool> {
        let mut is_running = [u8::from(clock.is_running())];
        self.group.broadcast(&mut is_running, Rank::MAIN)?;
        Ok(is_running == [1])
    }
}

/// This rank's images, one epoch after the other.
struct Batches {
    sampler: DistributedSampler,
    size: usize,
    epoch: u64,
    /// In this epoch, the next ones last.
    left: Vec<usize>,
}

impl Batches {
    fn next(&mut self) -> Vec<usize> {
        if self.left.is_empty() {
            self.sampler.set_epoch(self.epoch);
            self.epoch += 1;
            self.left = self.sampler.indices();
            self.left.reverse();
        }
        self.left.split_off(self.left.len().saturating_sub(self.size))
    }
}

/// How long the training has been going on, and what it has come to.
struct Clock {
    begin: Instant,
    duration: Duration,
    pause: Duration,
    /// When the next snapshot is due; None on ranks that take none.
    next: Option<Duration>,
    trained: Trained,
}

impl Clock {
    fn start<M>(training: &Training<'_, M>) -> Self {
        Self {
            begin: Instant::now(),
            duration: training.duration,
            pause: training.duration / SNAPSHOTS,
            next: training.group.rank().is_main().then_some(Duration::ZERO),
            trained: Trained::default(),
        }
    }

    fn is_running(&self) -> bool {
        self.begin.elapsed() < self.duration
    }

    fn step(&mut self, images: usize, parameters: impl FnOnce() -> Vec<f32>) {
        self.trained.steps += 1;
        self.trained.images += images as u64;
        let now = self.begin.elapsed();
        if self.next.is_some_and(|next| now >= next) {
            self.trained.snapshots.push((now.as_secs_f64(), parameters()));
            self.next = Some(now + self.pause);
        }
    }

    fn stop(mut self, parameters: impl FnOnce() -> Vec<f32>) -> Trained {
        self.trained.seconds = self.begin.elapsed().as_secs_f64();
        if self.next.is_some() {
            self.trained.snapshots.push((self.trained.seconds, parameters()));
        }
        self.trained
    }
}
