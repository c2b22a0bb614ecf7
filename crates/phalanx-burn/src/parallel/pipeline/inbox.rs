//! What comes from other stages, in the order in which their ranks send it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::TensorData;
use parking_lot::Mutex;
use phalanx::pipeline::{Action, Pass, Plan};
use phalanx::{Error, ProcessGroup, Rank, Result, Work};

use super::super::message::{Header, Kind, Layout};

/// Tensors that have come, or that this rank has made for itself, by the action that needs them.
pub(super) type Arrived = Arc<Mutex<HashMap<Action, TensorData>>>;

/// The messages to this rank in one step.
pub(super) struct Inbox {
    group: ProcessGroup,
    pub arrived: Arrived,
    /// Of what goes from stage to stage.
    dimensions: usize,
    /// By rank: what it sends, in its order.
    lines: Vec<Line>,
}

#[derive(Default)]
struct Line {
    expected: VecDeque<Action>,
    /// The first of them, if it is being received.
    posted: Option<(Layout, Work)>,
}

impl Inbox {
    /// What others send, tensors of so many `dimensions`, while they carry out `plan`, of whose actions they do those that are `done`.
    pub fn new(group: &ProcessGroup, plan: &Plan, dimensions: usize, done: impl Fn(&Action) -> bool) -> Self {
        let own = group.rank().index();
        let line = |from: usize| {
            let expected = plan.messages(from, own).filter(|action| done(action)).collect();
            Line { expected, posted: None }
        };
        Self {
            group: group.clone(),
            arrived: Arrived::default(),
            dimensions,
            lines: (0..plan.ranks()).map(line).collect(),
        }
    }

    /// What `action` needs, which comes from rank `from`, or has been made by this one. `inputs` has the layout of each stage's
    /// input, and gets that of a stage that is told now.
    pub fn take(&mut self, action: Action, from: usize, inputs: &mut [Option<Layout>]) -> Result<TensorData> {
        loop {
            if let Some(data) = self.arrived.lock().remove(&action) {
                return Ok(data);
            }
            let line = &mut self.lines[from];
            let Some(next) = line.expected.front().copied() else {
                return Err(Error::aborted(format!(
                    "rank {from} sends nothing for {action:?}: this is a defect of phalanx"
                )));
            };
            if line.posted.is_none() {
                announced(&self.group, next, from, self.dimensions, inputs)?;
                line.post(&self.group, from, inputs)?;
            }
            let Some((layout, work)) = line.posted.take() else {
                return Err(Error::aborted(format!(
                    "the size of {next:?} is unknown: this is a defect of phalanx"
                )));
            };
            let buffer = work.wait()?;
            line.expected.pop_front();
            self.arrived.lock().insert(next, layout.data(&buffer));
            // The next one comes while this rank computes.
            line.post(&self.group, from, inputs)?;
        }
    }
}

impl Line {
    /// Starts to receive the next message, if its size is known.
    fn post(&mut self, group: &ProcessGroup, from: usize, inputs: &[Option<Layout>]) -> Result<()> {
        let layout = self.expected.front().and_then(|next| inputs.get(boundary(*next))?.clone());
        if let Some(layout) = layout {
            let work = group.irecv(layout.memory()?, Rank::new(from as u32))?;
            self.posted = Some((layout, work));
        }
        Ok(())
    }
}

/// The stage whose input an action needs, or whose input's gradient.
pub(super) fn boundary(action: Action) -> usize {
    match action.pass {
        Pass::Forward => action.stage,
        Pass::Backward => action.stage + 1,
    }
}

/// Receives the layout of a stage's input before the first of them.
fn announced(
    group: &ProcessGroup,
    next: Action,
    from: usize,
    dimensions: usize,
    inputs: &mut [Option<Layout>],
) -> Result<()> {
    let stage = boundary(next);
    let Some(input) = inputs.get_mut(stage).filter(|input| input.is_none()) else { return Ok(()) };
    let header = Header::receive(group, Rank::new(from as u32))?;
    if (header.kind, header.number) != (Kind::Activation, stage as u64) {
        return Err(Error::mismatch(format!(
            "rank {from} announces {:?} {}, where the input of stage {stage} is due",
            header.kind, header.number
        ))
        .with_peer(Rank::new(from as u32))
        .with_remedy("use the group of a pipeline for nothing else while it trains"));
    }
    if header.layout.shape.len() != dimensions {
        return Err(Error::mismatch(format!(
            "rank {from} announces the input of stage {stage} with the shape {:?}, and rank {} takes one of {dimensions} dimensions",
            header.layout.shape,
            group.rank()
        ))
        .with_peer(Rank::new(from as u32))
        .with_remedy("make the Pipeline with the same number of dimensions on every rank"));
    }
    *input = Some(header.layout);
    Ok(())
}
