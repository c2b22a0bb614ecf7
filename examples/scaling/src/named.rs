//! A replica whose gradients are averaged by name.

use std::time::Instant;

use anyhow::{Context, Result};
use burn::tensor::Device;
use phalanx::{ProcessGroup, Rank};
use phalanx_burn::FusedAdamWConfig;
use phalanx_burn::horovod::{DistributedOptimizer, broadcast_parameters};
use phalanx_horovod::{Horovod, Options};

use crate::LEARNING_RATE;
use crate::models::Subject;

/// A model, and what trains it.
pub struct Named<M> {
    /// Not while the optimizer has it.
    model: Option<M>,
    optimizer: DistributedOptimizer,
    device: Device,
}

impl<M: Subject> Named<M> {
    pub fn new(group: &ProcessGroup, device: &Device) -> Result<Self> {
        let (hvd, device) = (Horovod::new(group, Options::from_env()?)?, device.clone().autodiff());
        let model = broadcast_parameters(&hvd, M::new(&device), Rank::MAIN)?;
        let optimizer = DistributedOptimizer::new(FusedAdamWConfig::new().init(), &model, &hvd)?;
        Ok(Self { model: Some(model), optimizer, device })
    }

    /// Trains one step; gives its milliseconds.
    pub fn step(&mut self) -> Result<f64> {
        let input = M::sample(&self.device);
        self.device.sync()?;
        let start = Instant::now();
        let model = self.model.take().context("an earlier step has failed")?;
        let loss = self.optimizer.forward(&model, |model| model.loss(input));
        self.optimizer.backward(&loss)?;
        self.model = Some(self.optimizer.step(LEARNING_RATE, model)?);
        self.device.sync()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    pub fn parameters(&self) -> usize {
        self.model.as_ref().map_or(0, |model| model.num_params())
    }
}
