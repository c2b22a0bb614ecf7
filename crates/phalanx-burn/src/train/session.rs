//! One training on each rank.

use std::cell::OnceCell;
use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::data::dataset::DatasetError;
use burn::optim::GradientsParams;
use burn::train::train::WorkerFailure;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingError,
    TrainingItem, ValidLoader,
};
use phalanx::reducer::verify_description;
use phalanx::{Error, ProcessGroup, Rank, Result};

use super::DdpStrategy;
use super::average::Average;
use super::drift;
use super::exchange;
use super::loaders::{self, Purpose};
use super::outputs::Outputs;
use super::samples::Shard;
use crate::parameters::Select;
use crate::replicas;

pub(super) struct Session<'a, M: LearnerModel> {
    strategy: &'a DdpStrategy,
    group: &'a ProcessGroup,
    learner: Learner<M>,
    components: TrainingComponents<M>,
}

impl<'a, M: LearnerModel> Session<'a, M>
where
    <M as TrainStep>::Output: Outputs,
    <M as InferenceStep>::Output: Outputs,
{
    pub fn new(strategy: &'a DdpStrategy, learner: Learner<M>, components: TrainingComponents<M>) -> Self {
        Self { strategy, group: &strategy.group, learner, components }
    }

    /// Trains to the end; the interrupter keeps a failure.
    pub fn run(
        mut self,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        if let Err(error) = self.epochs(&train, &valid, starting_epoch) {
            self.group.abort(error.clone());
            let failure = WorkerFailure { device_id: self.group.rank().index(), message: error.to_string() };
            self.components.interrupter.fail(TrainingError::Workers(vec![failure]));
        }
        (self.learner.model(), self.components.event_processor)
    }

    fn epochs(
        &mut self,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<()> {
        let mut average = Average::new(&self.learner.model(), self.strategy)?;
        if self.group.rank().is_main() && starting_epoch > 1 {
            average.warn_of_a_new_hook(starting_epoch)?;
        }
        let model = replicas::from_rank(self.learner.model(), self.group, Rank::MAIN, Select::All)?;
        self.learner.load_model(model.into_record());

        let data = Data::<M>::of(train, self.strategy)?;
        let valid_total = loaders::items(valid, Purpose::Validation)?;
        for (what, own) in [
            ("first epoch", starting_epoch),
            ("number of epochs", self.components.num_epochs),
            ("number of batches for a step", self.components.grad_accumulation.unwrap_or(1)),
            ("number of training samples", data.samples()),
            ("number of validation samples", valid_total),
        ] {
            verify_description(self.group, what, &own.to_string())?;
        }
        verify_description(self.group, "seed of the training samples", &data.seed())?;
        let (rank, ranks) = (self.group.rank().index(), self.group.world_size().count());
        let bound = |rank: usize| rank * valid_total / ranks;
        let valid =
            valid.slice(bound(rank), bound(rank + 1)).to_device(&self.strategy.device.clone().inner());

        let mut is_told = false;
        for epoch in starting_epoch..=self.components.num_epochs {
            let total_items = data.share * ranks;
            self.train_event(|| LearnerEvent::StartSplit { epoch_number: epoch, total_items });
            let trained = self.train_epoch(data.of_epoch(epoch, self.strategy), epoch, &mut average);
            self.tie(&average);
            if trained? && !std::mem::replace(&mut is_told, true) && self.group.rank().is_main() {
                phalanx::warn(format_args!(
                    "in epoch {epoch} some ranks had training batches left that were not trained: the training loader of another rank gave fewer, and all \
                     ranks make as many steps. Give the loaders of all ranks the same batch size and number of workers"
                ));
            }
            drift::check(&self.learner.model(), &average.inventory.indices, epoch, self.group)?;
            self.train_event(|| LearnerEvent::EndSplit(epoch));
            if self.should_stop()? {
                // The models that the ranks return are the same.
                return self.share_buffers(&average);
            }
            self.share_buffers(&average)?;
            self.valid_event(|| LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid_total });
            self.valid_epoch(&valid, epoch, valid_total, &average)?;
            self.valid_event(|| LearnerEvent::EndSplit(epoch));
            self.train_event(|| LearnerEvent::EndEpoch(epoch));
            if self.should_stop()? {
                return Ok(());
            }
            let last = self.end_epoch(epoch)?;
            // Rank 0 may have failed to save.
            if self.should_stop()? || last {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns whether some ranks had batches left when the others had none.
    fn train_epoch(
        &mut self,
        loader: &TrainLoader<M>,
        epoch: usize,
        average: &mut Average<M>,
    ) -> Result<bool> {
        let mut items = loaders::pass(loader, epoch, self.group);
        let (mut iteration, mut accumulated) = (0, 0);
        let ranks = self.group.world_size().count();
        loop {
            let item = self.wanted(items.next());
            let has_item = item.is_some();
            let (true, Some(item)) = (exchange::all(self.group, has_item)?, item) else {
                // As Burn's trainer: batches that are too few for a step are no part of the next epoch's first one.
                average.drop_held();
                // A training that is to stop leaves batches, too.
                let stops = self.components.interrupter.should_stop();
                let own = if stops { STOPS } else { u8::from(has_item) };
                return Ok(exchange::highest(self.group, own)? == LEFT);
            };
            iteration += 1;
            let progress = items.progress();
            let (last, progress) = (progress.is_completed(), of_all(&progress, ranks));

            if accumulated == 0 {
                self.share_buffers(average)?;
            }
            let model = average.inventory.ties.retie(self.learner.model());
            let output = match self.components.grad_accumulation {
                None => {
                    let output = average.step(&model, item)?;
                    drop(model);
                    self.step(output.grads, average)?;
                    output.item
                }
                Some(parts) => {
                    let output = average.add(&model, item)?;
                    accumulated += 1;
                    // The last batches may come at different times: then no rank does that step early.
                    if accumulated >= parts || exchange::all(self.group, last)? {
                        accumulated = 0;
                        let gradients = average.sum(&model)?;
                        drop(model);
                        self.step(gradients, average)?;
                    }
                    output
                }
            };
            if let Some(output) =
                exchange::gather(self.group, Some(output), &self.strategy.device.clone().inner())?
            {
                let rates = Some(self.learner.lr_current());
                let item = TrainingItem::new(output, progress, Some(iteration), rates);
                self.train_event(|| LearnerEvent::ProcessedItem(item));
            }
        }
    }

    fn step(&mut self, gradients: GradientsParams, average: &Average<M>) -> Result<()> {
        self.learner.lr_step();
        average.stepped(&self.learner.lr_current())?;
        self.learner.optimizer_step(gradients);
        Ok(())
    }

    /// Gives all places of a parameter the tensor of the first, which alone has taken the steps of the epoch.
    fn tie(&mut self, average: &Average<M>) {
        let ties = average.inventory.ties;
        if ties.any() {
            // A learner takes a model in no other form.
            let model = ties.retie(self.learner.model());
            self.learner.load_model(model.into_record());
        }
    }

    fn valid_epoch(
        &mut self,
        loader: &ValidLoader<M>,
        epoch: usize,
        total: usize,
        average: &Average<M>,
    ) -> Result<()> {
        // The metrics are those of one model: rank 0's, also where ranks keep buffers of their own.
        let mut model = self.learner.model().valid();
        if !average.inventory.buffers.is_empty() {
            let buffers = Select::Only(&average.inventory.buffers);
            model = replicas::from_rank(model, self.group, Rank::MAIN, buffers)?;
        }
        let mut items = loaders::pass(loader, epoch, self.group);
        let (mut iteration, ranks) = (0, self.group.world_size().count());
        loop {
            let item = self.wanted(items.next());
            if !exchange::any(self.group, item.is_some())? {
                return Ok(());
            }
            iteration += 1;
            let output = item.map(|item| InferenceStep::step(&model, item));
            if let Some(output) = exchange::gather(self.group, output, &self.strategy.device.clone().inner())?
            {
                let mut progress = of_all(&items.progress(), ranks);
                progress.items_processed = progress.items_processed.min(total);
                progress.items_total = total;
                let item = TrainingItem::new(output, progress, Some(iteration), None);
                self.valid_event(|| LearnerEvent::ProcessedItem(item));
            }
        }
    }

    /// The loader's batch, unless training is to stop, which is also so after an error.
    fn wanted<T>(&self, item: Option<std::result::Result<T, DatasetError>>) -> Option<T> {
        let interrupter = &self.components.interrupter;
        let item = item.transpose().unwrap_or_else(|error| {
            interrupter.fail(error);
            None
        });
        item.filter(|_| !interrupter.should_stop())
    }

    /// Saves and decides, on rank 0; returns whether training stops here.
    fn end_epoch(&mut self, epoch: usize) -> Result<bool> {
        let mut stop = false;
        let components = &mut self.components;
        if self.group.rank().is_main() {
            components.interrupter.fail_on_error(components.event_processor.flush());
            if let Some(checkpointer) = &mut components.checkpointer {
                checkpointer.checkpoint(&self.learner, epoch, &components.event_store);
            }
            if let Some(early) = &mut components.early_stopping {
                stop = early.should_stop(epoch, &components.event_store);
            }
        }
        exchange::main_s(self.group, stop)
    }

    /// Whether any rank was interrupted. An error of one rank is the error of all; of several, that of the lowest rank.
    fn should_stop(&self) -> Result<bool> {
        let interrupter = &self.components.interrupter;
        let error = interrupter.error().map(|error| error.to_string());
        let own = if error.is_some() { FAILED } else { u8::from(interrupter.should_stop()) };
        let highest = exchange::highest(self.group, own)?;
        if highest == FAILED {
            let errors = self.group.all_gather_object(&error)?;
            let first = errors.into_iter().enumerate().find_map(|(rank, error)| Some((rank, error?)));
            if let (None, Some((device_id, message))) = (error, first) {
                interrupter.fail(TrainingError::Workers(vec![WorkerFailure { device_id, message }]));
            }
        } else if highest > own {
            interrupter.stop(Some("another rank was interrupted"));
        }
        Ok(highest > 0)
    }

    /// Gives every rank rank 0's running statistics.
    fn share_buffers(&self, average: &Average<M>) -> Result<()> {
        let buffers = &average.inventory.buffers;
        if buffers.is_empty() || !self.strategy.options.broadcast_buffers {
            return Ok(());
        }
        // Clones share the running state.
        replicas::from_rank(self.learner.model(), self.group, Rank::MAIN, Select::Only(buffers)).map(drop)
    }

    fn train_event(&mut self, event: impl FnOnce() -> LearnerEvent<<M as TrainStep>::Output>) {
        if self.group.rank().is_main() {
            let outcome = self.components.event_processor.process_train(event());
            self.components.interrupter.fail_on_error(outcome);
        }
    }

    fn valid_event(&mut self, event: impl FnOnce() -> LearnerEvent<<M as InferenceStep>::Output>) {
        if self.group.rank().is_main() {
            let outcome = self.components.event_processor.process_valid(event());
            self.components.interrupter.fail_on_error(outcome);
        }
    }
}

/// The level of an error: higher than that of an interruption without one, which is 1.
const FAILED: u8 = 2;
/// At the end of an epoch, the level of a rank that has batches left, and the higher one of a rank whose training is to stop.
const LEFT: u8 = 1;
const STOPS: u8 = 2;

/// The training data of one rank.
struct Data<'a, M: LearnerModel> {
    loader: &'a TrainLoader<M>,
    /// The number of its samples.
    items: usize,
    /// The data sets of [`DdpStrategy::sampled`]; the loader reads one of them, if there are any.
    shards: Vec<Arc<Shard>>,
    /// Its number of samples in an epoch, equal on each rank, because every rank must do as many steps.
    share: usize,
    /// The loaders of an epoch, used in turn. They are kept: a new loader would begin its shuffling again.
    stretches: Vec<OnceCell<TrainLoader<M>>>,
}

impl<'a, M: LearnerModel> Data<'a, M> {
    fn of(loader: &'a TrainLoader<M>, strategy: &DdpStrategy) -> Result<Self> {
        let (items, ranks) =
            (loaders::items(loader, Purpose::Training)?, strategy.group.world_size().count());
        let shards = strategy.living_shards();
        let lengths: Vec<_> = shards.iter().map(|shard| shard.len()).collect();
        let (share, stretches) = match lengths.is_empty() {
            true if items > 0 && items < ranks => {
                let cause = format!(
                    "the training loader has {items} samples for {ranks} ranks: none would be trained"
                );
                let remedy = "start fewer ranks, or make the loader of what DdpStrategy::sampled gives, which repeats samples";
                return Err(Error::invalid_argument(cause).with_remedy(remedy));
            }
            true => (items / ranks, ranks),
            false if lengths.contains(&items) => (items, 1),
            false => {
                let cause = format!(
                    "DdpStrategy::sampled has made data sets of {lengths:?} samples a rank, and the training loader has {items}"
                );
                let remedy = "make the training loader of what `sampled` gave";
                return Err(Error::invalid_argument(cause).with_remedy(remedy));
            }
        };
        Ok(Self {
            loader,
            items,
            shards,
            share,
            stretches: (0..stretches).map(|_| OnceCell::new()).collect(),
        })
    }

    /// The data set of [`DdpStrategy::sampled`] that the loader reads: of those that are as long the last one, because some ranks may still have one of
    /// an earlier training.
    fn sampled(&self) -> Option<&Arc<Shard>> {
        self.shards.iter().rfind(|shard| shard.len() == self.share)
    }

    /// The number of samples of all ranks. Data sets with other numbers may have equal shares, and then ranks would train on some samples twice, and on
    /// others not at all.
    fn samples(&self) -> usize {
        self.sampled().map_or(self.items, |shard| shard.samples)
    }

    /// The seed of their order, for people. With other seeds, too, ranks would train on some samples twice, and on others not at all.
    fn seed(&self) -> String {
        self.sampled().map_or_else(|| "none".to_owned(), |shard| shard.seed.to_string())
    }

    fn of_epoch(&self, epoch: usize, strategy: &DdpStrategy) -> &TrainLoader<M> {
        self.shards.iter().for_each(|shard| shard.set_epoch(epoch as u64));
        let stretch = (strategy.group.rank().index() + epoch - 1) % self.stretches.len();
        let (from, to) = (stretch * self.share, (stretch + 1) * self.share);
        self.stretches[stretch].get_or_init(|| match self.shards.is_empty() {
            true => self.loader.slice(from, to).to_device(&strategy.device),
            false => self.loader.to_device(&strategy.device),
        })
    }
}

/// What all ranks have processed, if they are as far as this one.
fn of_all(own: &Progress, ranks: usize) -> Progress {
    Progress::new(own.items_processed * ranks, own.items_total * ranks, own.unit.clone())
}
