//! The hook of gradients that lie [elsewhere](crate::reducer::Reducer::elsewhere): which of the built-in hooks it acts as, or a hook of the program's.

use std::sync::Arc;

use super::{
    AveragedAmong, BuiltInHook, CommHook, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd,
    PowerSgdOptions,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::{Communicator, ProcessGroup};
use crate::rank::Rank;
use crate::reducer::broadcast_bytes;

/// The memory in which the buckets of an [`ElsewhereHook`] lie, and what averages them there.
pub trait ElsewhereBuckets: Send + Sync + 'static {
    /// What averages them, for [descriptions](CommHook::describe).
    fn describe(&self) -> String;

    /// The ranks among which gradients are averaged.
    fn group(&self) -> &dyn Communicator;

    /// Starts to average `bucket`, of which that is sent.
    ///
    /// # Errors
    /// If it cannot be sent.
    fn average(self: &Arc<Self>, bucket: GradBucket, sent: Sent) -> Result<Pending>;

    /// From now on [`Sent::LowRank`] may be asked for, with these options, after so many steps; or, if none, no longer. Nothing of a hook before is
    /// kept, nor a smaller group.
    ///
    /// # Errors
    /// If these options are not possible there.
    fn approximate(&self, low_rank: Option<(PowerSgdOptions, u64)>) -> Result<()>;

    /// What PowerSGD keeps, after so many steps; `with_own` also what is of each rank.
    ///
    /// # Errors
    /// If it cannot be read.
    fn low_rank_state(&self, steps: u64, with_own: bool) -> Result<HookState>;

    /// PowerSGD goes on from `saved`, after so many steps.
    ///
    /// # Errors
    /// If it is the state of something else.
    fn load_low_rank(&self, saved: HookState, steps: u64) -> Result<()>;
}

/// What is sent of a bucket.
#[derive(Debug)]
pub enum Sent {
    /// All gradients, as they are.
    Whole,
    /// The same, among the ranks of a smaller group.
    Within(ProcessGroup),
    /// Gradients of f32, rounded to this type: f16 or bf16.
    Rounded(DType),
    /// Gradients of f32, of which one or more are matrices. These are sent as [`PowerSgd`] does it, after so many steps.
    LowRank(u64),
    /// Nothing: gradients stay what they are, and zeros take the place of those that are not there.
    Nothing,
}

/// Averages gradients where they lie, as that one of the built-in hooks that is registered would in the memory of processes; or as a hook of the program's.
pub struct ElsewhereHook<B> {
    buckets: Arc<B>,
    how: How,
}

enum How {
    Whole,
    Rounded(DType),
    LowRank { options: PowerSgdOptions, description: String, steps: u64 },
    Local(PostLocalSgd),
    Own(Box<dyn CommHook>),
}

impl<B: ElsewhereBuckets> ElsewhereHook<B> {
    /// It sends all gradients as they are.
    pub fn new(buckets: Arc<B>) -> Self {
        Self { buckets, how: How::Whole }
    }

    /// With a hook that the adapter has made of one of the program's.
    ///
    /// # Errors
    /// If what was sent before has failed.
    pub fn own(buckets: Arc<B>, hook: Box<dyn CommHook>) -> Result<Self> {
        buckets.approximate(None)?;
        Ok(Self { buckets, how: How::Own(hook) })
    }

    /// What is sent of `bucket`.
    fn sent(&mut self, bucket: &GradBucket) -> Result<Sent> {
        let is_f32 = bucket.buffer.dtype() == DType::F32;
        Ok(match &mut self.how {
            How::Rounded(to) if is_f32 => Sent::Rounded(*to),
            How::LowRank { options, steps, .. } => {
                let made = *steps;
                *steps = made.saturating_add(u64::from(bucket.is_last));
                let has_matrix =
                    || bucket.gradients.iter().any(|place| options.matrix(&place.shape).is_some());
                match is_f32 && options.compresses_at(made) && has_matrix() {
                    true => Sent::LowRank(made),
                    false => Sent::Whole,
                }
            }
            How::Local(local) => match local.averaged_among(bucket.is_last, self.buckets.group())? {
                AveragedAmong::All => Sent::Whole,
                AveragedAmong::Subgroup(group) => Sent::Within(group),
                AveragedAmong::Nobody => Sent::Nothing,
            },
            How::Whole | How::Rounded(_) | How::Own(_) => Sent::Whole,
        })
    }
}

impl<B: ElsewhereBuckets> CommHook for ElsewhereHook<B> {
    fn describe(&self) -> String {
        match &self.how {
            How::Whole => self.buckets.describe(),
            How::Rounded(dtype) => format!("compressed to {dtype}"),
            How::LowRank { description, .. } => description.clone(),
            How::Local(local) => local.describe(),
            How::Own(hook) => hook.describe(),
        }
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        if let How::Own(hook) = &mut self.how {
            return hook.start(group, bucket);
        }
        let sent = self.sent(&bucket)?;
        self.buckets.average(bucket, sent)
    }

    /// As that of the host: what PowerSGD keeps begins anew, and the number of steps is the root's.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        let (steps, options) = match &mut self.how {
            How::Whole | How::Rounded(_) => return Ok(()),
            How::LowRank { options, steps, .. } => (steps, *options),
            How::Local(local) => return local.adopt(group, root),
            How::Own(hook) => return hook.adopt(group, root),
        };
        let bytes = broadcast_bytes(group, root, &steps.to_le_bytes(), size_of::<u64>())?;
        let bytes = bytes.as_bytes().try_into().map_err(|_| Error::protocol("a step is not a number"))?;
        *steps = u64::from_le_bytes(bytes);
        self.buckets.approximate(Some((options, *steps)))
    }

    fn state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { steps, .. } => self.buckets.low_rank_state(*steps, true),
            How::Local(local) => local.state(),
            How::Own(hook) => hook.state(),
            How::Whole | How::Rounded(_) => Ok(HookState::default()),
        }
    }

    /// It leaves the losses of PowerSGD where they are.
    fn common_state(&self) -> Result<HookState> {
        match &self.how {
            How::LowRank { steps, .. } => self.buckets.low_rank_state(*steps, false),
            How::Own(hook) => hook.common_state(),
            How::Whole | How::Rounded(_) | How::Local(_) => self.state().map(HookState::without_own),
        }
    }

    fn keeps_state(&self) -> Result<bool> {
        match &self.how {
            How::LowRank { .. } | How::Local(_) => Ok(true),
            How::Own(hook) => hook.keeps_state(),
            How::Whole | How::Rounded(_) => Ok(false),
        }
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        match &mut self.how {
            How::LowRank { steps, .. } => {
                *steps = state.get("step")?;
                self.buckets.load_low_rank(state, *steps)
            }
            How::Local(local) => local.load(state),
            How::Own(hook) => hook.load(state),
            How::Whole | How::Rounded(_) => state.nothing(),
        }
    }

    // As the hooks in the processes' memory: a step is not done again, unless the program's own hook says that it may be.
    fn is_stateless(&self) -> bool {
        match &self.how {
            How::Whole => true,
            How::Own(hook) => hook.is_stateless(),
            How::Rounded(_) | How::LowRank { .. } | How::Local(_) => false,
        }
    }

    fn act_as(&mut self, hook: BuiltInHook) -> Result<bool> {
        let (how, low_rank) = match hook {
            BuiltInHook::AllReduce => (How::Whole, None),
            BuiltInHook::Compressed(dtype @ (DType::F16 | DType::BF16)) => (How::Rounded(dtype), None),
            BuiltInHook::Compressed(_) => return Ok(false),
            BuiltInHook::PowerSgd(options) => {
                let description = PowerSgd::new(options)?.describe();
                (How::LowRank { options, description, steps: 0 }, Some((options, 0)))
            }
            BuiltInHook::PostLocalSgd(local) => (How::Local(local), None),
        };
        self.buckets.approximate(low_rank)?;
        self.how = how;
        Ok(true)
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn averages_over_all(&self) -> bool {
        match &self.how {
            How::Local(local) => local.averages_over_all(),
            How::Own(hook) => hook.averages_over_all(),
            How::Whole | How::Rounded(_) | How::LowRank { .. } => true,
        }
    }

    fn makes_zeros(&self) -> bool {
        true
    }

    fn accepts_weights(&self) -> bool {
        matches!(self.how, How::Whole)
    }

    fn keeps_gradients(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::buffer::Buffer;
    use crate::reducer::fake::FakeGroup;
    use crate::reducer::hooks::{AllReduce, Compressed, GradientPlace};

    /// Notes what is asked of it, and averages nothing.
    struct Noting {
        group: Arc<FakeGroup>,
        notes: Mutex<Vec<String>>,
    }

    impl Noting {
        fn new() -> Arc<Self> {
            Arc::new(Self { group: FakeGroup::world(1).remove(0), notes: Mutex::default() })
        }

        fn note(&self, what: String) {
            self.notes.lock().push(what);
        }

        /// Notes a step of this hook: a matrix and a row of f32, and a matrix of f64.
        fn step(&self, hook: &mut ElsewhereHook<Self>) -> Vec<String> {
            self.notes.lock().clear();
            let buckets = [(DType::F32, vec![12, 40]), (DType::F32, vec![9]), (DType::F64, vec![12, 40])];
            for (index, (dtype, shape)) in buckets.into_iter().enumerate() {
                let elements = 0..shape.iter().product::<usize>();
                let gradients: Arc<[GradientPlace]> =
                    Arc::from([GradientPlace { parameter: index, shape, elements }]);
                let (is_last, buffer) = (index == 2, Buffer::zeroed(dtype, 0));
                let bucket = GradBucket { index, is_last, buffer, gradients, keeps: false, counts: None };
                drop(hook.start(&*self.group, bucket).unwrap());
            }
            self.notes()
        }

        fn notes(&self) -> Vec<String> {
            std::mem::take(&mut *self.notes.lock())
        }
    }

    impl ElsewhereBuckets for Noting {
        fn describe(&self) -> String {
            "a device".to_owned()
        }

        fn group(&self) -> &dyn Communicator {
            &*self.group
        }

        fn average(self: &Arc<Self>, bucket: GradBucket, sent: Sent) -> Result<Pending> {
            self.note(format!("{sent:?}"));
            Ok(Pending::ready(bucket.buffer))
        }

        fn approximate(&self, low_rank: Option<(PowerSgdOptions, u64)>) -> Result<()> {
            self.note(format!("approximates after {:?}", low_rank.map(|(_, steps)| steps)));
            Ok(())
        }

        fn low_rank_state(&self, steps: u64, with_own: bool) -> Result<HookState> {
            let state = HookState::default().number("step", steps);
            Ok(if with_own { state.own("losses", 0, vec![0.5]) } else { state })
        }

        fn load_low_rank(&self, saved: HookState, steps: u64) -> Result<()> {
            self.note(format!("loads {} tensors after {steps}", saved.tensors().len()));
            Ok(())
        }
    }

    /// A hook, after how many steps it approximates, and what is sent of the buckets of two steps.
    type Case = (Box<dyn CommHook>, &'static str, [[&'static str; 3]; 2]);

    fn low_rank(steps: u64) -> PowerSgd {
        let options = PowerSgdOptions::default().start_iter(steps).min_compression_rate(1.0);
        PowerSgd::new(options).unwrap()
    }

    #[test]
    fn what_is_sent_of_a_bucket_is_what_the_same_hook_sends_in_the_memory_of_processes() {
        let (whole, within) = (["Whole"; 3], ["Within(ProcessGroup(rank 0 of 1))"; 3]);
        let local = || PostLocalSgd::new(1);
        let alone = ProcessGroup::alone().unwrap();
        let cases: [Case; 5] = [
            (Box::new(Compressed::bf16()), "None", [["Rounded(BF16)", "Rounded(BF16)", "Whole"]; 2]),
            (Box::new(low_rank(1)), "Some(0)", [whole, ["LowRank(1)", "Whole", "Whole"]]),
            (Box::new(local()), "None", [whole, ["Nothing"; 3]]),
            (Box::new(local().subgroup(alone)), "None", [whole, within]),
            (Box::new(AllReduce), "None", [whole; 2]),
        ];
        let buckets = Noting::new();
        let mut hook = ElsewhereHook::new(buckets.clone());
        for (here, after, steps) in cases {
            assert!(hook.act_as(here.built_in().unwrap()).unwrap());
            assert_eq!(buckets.notes(), [format!("approximates after {after}")]);
            assert_eq!(hook.is_stateless(), here.is_stateless(), "{}", here.describe());
            assert_eq!(hook.accepts_weights(), here.accepts_weights(), "{}", here.describe());
            // Checkpoints of the one go on with the other.
            assert!(here.is_stateless() || hook.describe() == here.describe(), "{}", hook.describe());
            for sent in steps {
                assert_eq!(buckets.step(&mut hook), sent, "{}", here.describe());
            }
        }
        assert_eq!(hook.describe(), "a device");
    }

    #[test]
    fn steps_go_on_from_a_state_and_from_those_of_the_root() {
        let buckets = Noting::new();
        let mut hook = ElsewhereHook::new(buckets.clone());
        assert!(hook.act_as(low_rank(0).built_in().unwrap()).unwrap());
        let low_rank = |steps: u64| [format!("LowRank({steps})"), "Whole".to_owned(), "Whole".to_owned()];
        assert_eq!(buckets.step(&mut hook), low_rank(0));
        let (state, common) = (hook.state().unwrap(), hook.common_state().unwrap());
        assert_eq!((state.get("step").unwrap(), state.tensors().len()), (1, 1));
        assert_eq!(common, state.without_own());
        hook.load(HookState::default().number("step", 7).own("losses", 0, vec![0.5])).unwrap();
        assert_eq!(buckets.notes(), ["loads 1 tensors after 7"]);
        assert_eq!(buckets.step(&mut hook), low_rank(7));
        hook.adopt(&*buckets.group, Rank::MAIN).unwrap();
        assert_eq!(buckets.notes(), ["approximates after Some(8)"]);
        assert_eq!(buckets.step(&mut hook), low_rank(8));
    }

    #[test]
    fn a_hook_of_the_program_s_is_asked_for_all_until_another_takes_its_place() {
        let buckets = Noting::new();
        let mut hook = ElsewhereHook::own(buckets.clone(), Box::new(PostLocalSgd::new(0))).unwrap();
        assert_eq!(buckets.notes(), ["approximates after None"]);
        assert!(buckets.step(&mut hook).is_empty());
        assert_eq!(hook.describe(), PostLocalSgd::new(0).describe());
        assert_eq!(hook.state().unwrap().get("step").unwrap(), 1);
        assert!(hook.keeps_state().unwrap() && !hook.is_stateless() && !hook.averages_over_all());
        assert!(hook.act_as(BuiltInHook::AllReduce).unwrap());
        assert_eq!(buckets.step(&mut hook), ["Whole"; 3]);
        assert!(!hook.keeps_state().unwrap() && hook.is_stateless() && hook.averages_over_all());
    }
}
