//! What this rank sends to other stages. Nothing waits for its receiver before the end of the step.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;
use phalanx::adapter::WeakGroup;
use phalanx::pipeline::{Action, Pass, Plan};
use phalanx::{Buffer, Error, ProcessGroup, Rank, Result, Work};

use super::super::message::{Header, Kind, Layout};
use super::super::op::GradientTarget;
use super::inbox::Arrived;
use crate::read_back;
use crate::tensor_bytes::{self, TensorBytes};

/// The messages in flight from this rank. Clones share them.
#[derive(Clone)]
pub(super) struct Outbox {
    group: ProcessGroup,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    works: VecDeque<Work>,
    /// The first error of a gradient that backward could not return.
    failure: Option<Error>,
    /// The action that needs the last gradient of an input that backward has given.
    given: Option<Action>,
}

impl Outbox {
    pub fn new(group: &ProcessGroup) -> Self {
        Self { group: group.clone(), state: Arc::default() }
    }

    pub fn send(&self, buffer: Buffer, to: usize) -> Result<()> {
        let work = self.group.isend(buffer, Rank::new(to as u32))?;
        let mut state = self.state.lock();
        state.works.push_back(work);
        // Memory of what has gone is freed.
        while state.works.front().is_some_and(Work::is_completed) {
            if let Some(work) = state.works.pop_front() {
                work.wait()?;
            }
        }
        Ok(())
    }

    /// Gives the output of a stage to the next one. The first of a stage is announced.
    pub fn pass_on<const D: usize>(
        &self,
        action: Action,
        hidden: Tensor<D>,
        plan: &Plan,
        inputs: &mut [Option<Layout>],
        arrived: &Arrived,
    ) -> Result<()> {
        let Action { pass, stage, microbatch } = action;
        let Some(sent) = plan.message(action) else {
            let data = read_back::data(hidden.detach())?;
            let found = Layout { dtype: data.dtype(), shape: data.shape().as_slice().to_vec() };
            check(&found, inputs[stage + 1].get_or_insert_with(|| found.clone()), stage)?;
            arrived.lock().insert(Action { pass, stage: stage + 1, microbatch }, data);
            return Ok(());
        };
        let shape = hidden.dims();
        let input = &mut inputs[stage + 1];
        tensor_bytes::with_bytes(hidden, |bytes| {
            let layout = match input {
                Some(layout) => layout,
                None => {
                    let layout = Layout::of(bytes, &shape);
                    let number = stage as u64 + 1;
                    let header = Header { kind: Kind::Activation, number, link: 0, layout: layout.clone() };
                    self.send(Buffer::from_slice(&header.encode()?), sent.to)?;
                    input.insert(layout)
                }
            };
            self.send(message(bytes, &shape, layout, stage)?, sent.to)
        })?
    }

    /// After a backward pass of `stage`: the error of a gradient that backward could not return, or one if there
    /// is no gradient of the stage's input, for which the stage before would wait.
    pub fn check(&self, stage: usize, microbatch: usize) -> Result<()> {
        let (failure, given) = {
            let mut state = self.state.lock();
            (state.failure.take(), state.given.take())
        };
        let needed_by = stage.checked_sub(1).map(|stage| Action { pass: Pass::Backward, stage, microbatch });
        match failure {
            Some(error) => Err(error),
            None if given == needed_by => Ok(()),
            // An exchange within the stage that fails may give a result without a graph.
            None => Err(self.group.failure().unwrap_or_else(|| {
                Error::invalid_argument(format!(
                    "stage {stage} computes micro-batch {microbatch} without its input, so there is no gradient for the stage before"
                ))
                .with_remedy("let every stage but the first compute with its input, and not detach it")
            })),
        }
    }

    /// Waits until all has gone.
    pub fn finish(&self) -> Result<()> {
        let works = std::mem::take(&mut self.state.lock().works);
        works.into_iter().try_for_each(|work| work.wait().map(drop))
    }

    /// For a graph, which may never run backward: it does not keep the group.
    pub fn downgrade(&self) -> WeakOutbox {
        WeakOutbox { group: self.group.downgrade(), state: self.state.clone() }
    }
}

/// An [`Outbox`] as long as there is its group.
pub(super) struct WeakOutbox {
    group: WeakGroup,
    state: Arc<Mutex<State>>,
}

/// The gradient of a stage's input, on its way to the stage before.
pub(super) struct ToStage {
    pub outbox: WeakOutbox,
    /// The rank that needs it; none if it is this one.
    pub to: Option<usize>,
    /// The action that needs it.
    pub needed_by: Action,
    pub arrived: Arrived,
}

impl GradientTarget for ToStage {
    fn deliver(&self, gradient: TensorBytes<'_>, shape: &[usize]) -> Result<()> {
        self.outbox.state.lock().given = Some(self.needed_by);
        let Some(to) = self.to else {
            let data = tensor_bytes::tensor_data(gradient.bytes, shape, gradient.dtype);
            self.arrived.lock().insert(self.needed_by, data);
            return Ok(());
        };
        let WeakOutbox { group, state } = &self.outbox;
        let outbox = Outbox { group: group.upgrade()?, state: state.clone() };
        outbox.send(Buffer::try_from_slice::<u8>(gradient.bytes)?, to)
    }

    fn fail(&self, error: Error) {
        self.outbox.state.lock().failure.get_or_insert(error);
    }
}

/// `bytes` in memory that is sent, if they are of `expected`.
fn message(bytes: TensorBytes<'_>, shape: &[usize], expected: &Layout, stage: usize) -> Result<Buffer> {
    check(&Layout::of(bytes, shape), expected, stage)?;
    Buffer::try_from_slice::<u8>(bytes.bytes)
}

/// An error if a stage's output is another one than in the first micro-batch: the mean over micro-batches would be another one than that over
/// samples.
fn check(found: &Layout, expected: &Layout, stage: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "stage {stage} gives a tensor of shape {:?} and type {:?}, and gave {:?} and {:?} in the first micro-batch",
        found.shape, found.dtype, expected.shape, expected.dtype
    ))
    .with_remedy(
        "make all micro-batches equally large, and pad sequences to one length; for another size make another Pipeline",
    ))
}
