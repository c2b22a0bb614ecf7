//! A `Ddp` that changes from one group to another, and ranks that end at different times.

use std::sync::Arc;

use phalanx::join::{JoinGroup, JoinOptions, Joined};
use phalanx::reducer::{LoadedState, LoadedStates, Reducer, verify_description};
use phalanx::sampler::ElasticSampler;
use phalanx::{Buffer, Caller, Communicator as _, Error, ProcessGroup, Rank, Result, WorldSize};
use phalanx_nccl::Communicator;
use tch::Tensor;

use super::{Accumulated, Ddp, DdpOptions, prepare};
use crate::Optimizer;
use crate::nccl::OnDevice;
use crate::shim;
use crate::tensors::{Named, Shared};

/// A `join` of the group of a [`Ddp`], which borrows nothing of it.
pub(crate) struct Joining {
    group: JoinGroup,
    /// What makes the others' calls of NCCL, if it averages.
    nccl: Option<Arc<OnDevice>>,
}

impl Joining {
    pub(crate) fn run<T>(self, options: JoinOptions, body: impl FnOnce() -> Result<T>) -> Result<Joined<T>> {
        match self.nccl {
            Some(nccl) => self.group.join_elsewhere(options, nccl, body),
            None => self.group.join(options, body),
        }
    }
}

impl Ddp {
    /// Runs `body`, such as an epoch, whose number of batches may differ between ranks. A rank that is done answers the
    /// others until the last one is done: it contributes zeros to their averages. All ranks call it together, and
    /// return together.
    ///
    /// Afterwards, if some ranks were done earlier, all ranks have the variables and the optimizer's state of a rank that
    /// took part to the end, and gradients that [`backward_no_sync`](Self::backward_no_sync) holds are dropped: their step was not made. All other code that calls collectives inside `body`, such as a synchronised batch norm, must
    /// do so through the same [`JoinGroup`]. Another `Ddp` over it must make as many steps on every rank: nobody takes over what it has, and if its
    /// steps were uneven, its next [`forward`](Self::forward) is an error on every rank.
    ///
    /// Over [NCCL](Self::with_nccl) a rank that is done makes the others' calls, too, with zeros on its device. It makes those of this `Ddp`
    /// alone: another one over NCCL cannot train in the same `join`.
    ///
    /// The `Ddp` of a [`TrainState`](crate::TrainState) joins by [`TrainState::join`](crate::TrainState::join), which counts the steps.
    ///
    /// # Errors
    /// As [`JoinGroup::join`]. On every rank, if some were done earlier, and the ranks' optimizers have other parameters by now, or other
    /// [groups](Optimizer::with_group) of them.
    pub fn join<T>(
        &mut self,
        optimizer: &mut Optimizer,
        options: JoinOptions,
        body: impl FnOnce(&mut Self, &mut Optimizer) -> Result<T>,
    ) -> Result<T> {
        let joining = self.joining();
        let joined = joining.run(options, || body(self, optimizer))?;
        if joined.uneven {
            self.adopt(optimizer, joined.last)?;
        }
        Ok(joined.value)
    }

    /// What runs a `join` in which this `Ddp` trains.
    pub(crate) fn joining(&mut self) -> Joining {
        self.has_begun = false;
        let nccl = self.sink.as_ref().and_then(|sink| sink.on_device());
        Joining { group: self.group.clone(), nccl }
    }

    /// After a `join`, takes over the variables of rank `root`, and the optimizer's state there. An error ends the group.
    pub(crate) fn adopt(&mut self, optimizer: &mut Optimizer, root: Rank) -> Result<()> {
        let adopted = self.adopt_all(optimizer, root);
        self.or_end(adopted)
    }

    /// After a `join`, the numbers of rank `root`, which are counts of steps. An error ends the group.
    pub(crate) fn adopt_counts<const N: usize>(&self, counts: [u64; N], root: Rank) -> Result<[u64; N]> {
        let adopted = || {
            let group = self.group.in_call(Caller::Join);
            let counts =
                group.broadcast_async(Buffer::from_slice(&counts.map(|count| count as i64)), root)?;
            let counts = counts.wait()?;
            let mut adopted = [0; N];
            for (to, from) in adopted.iter_mut().zip(counts.as_slice::<i64>()?) {
                *to = *from as u64;
            }
            Ok(adopted)
        };
        self.or_end(adopted())
    }

    /// An error on every rank, which ends the group, unless this rank's `what` is described as all others' are.
    pub(crate) fn check_alike(&self, what: &str, mine: &str) -> Result<()> {
        if self.sink.is_none() {
            return Ok(());
        }
        self.or_end(verify_description(&self.group.in_call(Caller::DdpNew), what, mine))
    }

    /// Gives all ranks rank 0's `optimizer`, as [`new`](Self::new) does with the variables. An error ends the group; it comes on every rank if
    /// their optimizers are not made alike.
    pub(crate) fn share(&self, optimizer: &mut Optimizer) -> Result<()> {
        if self.sink.is_none() {
            return Ok(());
        }
        let group = self.group.in_call(Caller::DdpNew);
        let shared = verify_description(&group, "optimizer", &optimizer.describe())
            .and_then(|()| optimizer.adopt(&group, Rank::MAIN));
        self.or_end(shared)
    }

    fn adopt_all(&mut self, optimizer: &mut Optimizer, root: Rank) -> Result<()> {
        if let Some(sink) = &self.sink {
            sink.adopt(root)?;
        }
        self.take_state(Caller::Join, root)?;
        (self.buffers_stale, self.accumulated) = (false, Accumulated::default());
        self.loads = self.loads.map(|_| LoadedStates::default());
        optimizer.adopt(&self.group.in_call(Caller::Join), root)?;
        // What the last of NCCL's calls have left on the device is what has been adopted.
        self.check_settled()
    }

    /// Changes to `group`, on all of whose ranks the variables are equal already; it checks that they are the same.
    /// What belonged to the previous group, such as a communication hook, is removed.
    pub(crate) fn enter(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        self.check_elastic()?;
        self.unhook();
        // Other users of the handle, such as a synchronised batch norm, change with it.
        self.group.rebind(group.clone())?;
        let nccl = match &self.cuda {
            Some(cuda) if group.world_size() != WorldSize::ONE => {
                Some(Communicator::new(group, cuda)?.shrinkable())
            }
            _ => None,
        };
        // Made again for the first round: parameters may have been frozen since. In later ones they are those of the first, as on a rank that begins
        // now: a program may have frozen some in its loop, and unfreezes them again.
        let before: &[Named] = if self.has_entered { &self.inventory.parameters } else { &[] };
        let names = self.owned_names();
        (self.inventory, self.sink) =
            prepare(&self.variables, before, &self.group, nccl.as_ref(), true, options)?;
        self.has_entered = true;
        let renumbered = self.renumber_hook(&names);
        self.or_end(renumbered)?;
        (self.buffers_stale, self.broadcast_buffers) = (false, options.broadcast_buffers);
        (self.accumulated, self.loads) = (Accumulated::default(), None);
        // Those that are there belong to a step that was not finished.
        self.inventory.parameters.iter().try_for_each(|one| shim::set_gradient(&one.tensor, None))
    }

    /// This state of the variables was loaded from a checkpoint, as on all ranks of the group.
    pub(crate) fn note_load(&mut self, state: LoadedState) {
        self.loads.iter_mut().for_each(|loads| loads.loaded(state));
    }

    /// The next step takes the last batch of `sampler`, of which each rank has its part.
    pub(crate) fn note_samples(&mut self, sampler: &ElasticSampler) {
        self.loads.iter_mut().for_each(|loads| loads.sampled(sampler));
    }

    /// What was [loaded](Self::note_load) last, as ranks that come into a group compare it.
    pub(crate) fn describe_load(&self) -> String {
        self.loads.unwrap_or_default().describe()
    }

    /// Leaves its group, for one of this process alone.
    pub(crate) fn leave(&mut self, alone: &ProcessGroup) {
        self.keep_hook();
        self.unhook();
        // It fails only inside a `join`, and those have ended with the loop; entering the next group would report it.
        let _free = self.group.rebind(alone.clone());
        // What is loaded from now on may differ between ranks.
        (self.buffers_stale, self.loads) = (false, Some(LoadedStates::default()));
    }

    /// [`backward`](Self::backward), or with a `weight` [`backward_weighted`](Self::backward_weighted), with gradients that can be
    /// [averaged again](Self::replay) if a peer's failure cuts it off.
    pub(crate) fn backward_replayable(&mut self, loss: &Tensor, weight: Option<f64>) -> Result<()> {
        self.check_elastic()?;
        if let Some(sink) = &self.sink {
            if self.group.running().is_some() {
                return Err(Error::invalid_argument(
                    "inside `join` no step of an elastic job can be done again",
                )
                .with_remedy(
                    "use an ElasticSampler, which gives every rank as many batches, and no `join`",
                ));
            }
            sink.call(Reducer::keep_gradients)?;
        }
        self.synchronised(loss, weight)
    }

    /// NCCL connects the ranks of a group that this has followed to. All ranks call it together, before the step in it.
    pub(crate) fn connect(&self) -> Result<()> {
        let Some(sink) = self.sink.as_ref().filter(|_| self.world_size() != WorldSize::ONE) else {
            return Ok(());
        };
        sink.connect()
    }

    /// Averages the gradients of the last [`backward_replayable`](Self::backward_replayable) in `group`.
    pub(crate) fn replay(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group.rebind(group.clone())?;
        match &self.sink {
            Some(sink) => {
                sink.move_to(group);
                self.connect()?;
                sink.replay(group.world_size())
            }
            None => Err(Error::aborted("a world of one keeps no gradients")),
        }
    }

    /// Changes to `group`, which has the remaining ranks of this one, between steps.
    pub(crate) fn follow(&mut self, group: &ProcessGroup) -> Result<()> {
        self.group.rebind(group.clone())?;
        self.sink.as_ref().map_or(Ok(()), |sink| {
            sink.move_to(group);
            sink.call(Reducer::regrouped)
        })
    }

    /// Gives all ranks rank 0's buffers now, instead of before the next forward pass.
    pub(crate) fn agree(&mut self) -> Result<()> {
        if self.sink.is_none() {
            return Ok(());
        }
        self.buffers_stale = false;
        self.take_buffers(Caller::ElasticCommit)
    }

    /// The names of the parameters that the reducer, and so a communication hook, knows by number.
    pub(crate) fn parameter_names(&self) -> Vec<&str> {
        self.inventory.parameters.iter().map(|one| one.spec.name.as_str()).collect()
    }

    /// The same, to be compared with those of another time.
    pub(crate) fn owned_names(&self) -> Vec<String> {
        self.parameter_names().into_iter().map(str::to_owned).collect()
    }

    /// Every variable, by name.
    pub(crate) fn state(&self) -> &[Named] {
        &self.inventory.state
    }

    /// The `VarStore`'s variables.
    pub(crate) fn variables(&self) -> &Shared {
        &self.variables
    }

    /// An error if a variable was made since, which [`state`](Self::state) lacks.
    pub(crate) fn check_all_known(&self) -> Result<()> {
        self.inventory.check_all_known(&self.variables)
    }

    /// All its collectives go through this handle, by which it changes its group.
    pub(crate) fn group(&self) -> &JoinGroup {
        &self.group
    }

    /// The same variables in another group, from rank 0, with gradients that `nccl` averages, if it is there.
    pub(crate) fn again(
        mut self,
        group: JoinGroup,
        nccl: Option<Communicator>,
        options: &DdpOptions,
    ) -> Result<Self> {
        self.unhook();
        let mut again = Self::of(self.variables.clone(), group, nccl, options)?;
        again.cuda = self.cuda.take();
        if again.world_size() == WorldSize::ONE {
            // Ranks compare it when they come into a group.
            again.loads = self.loads.or(again.loads);
        }
        Ok(again)
    }

    /// What averages its gradients, if its group does not.
    pub(crate) fn nccl(&self) -> Option<&Communicator> {
        self.nccl.as_ref()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use phalanx::reducer::ReducerOptions;
    use tch::nn::{Init, VarStore};
    use tch::{Device, Kind};

    use super::*;

    /// The device of a rank.
    type Place = fn(usize) -> Device;

    /// Averaged in the host's memory.
    fn cpu(_: usize) -> Device {
        Device::Cpu
    }

    /// Averaged by NCCL.
    fn cuda(rank: usize) -> Device {
        Device::Cuda(rank)
    }

    /// Two parameters, each in a bucket of its own, whose gradients are a rank's `number` and, if it uses the second one, ten times that.
    struct Pair {
        both: Tensor,
        extra: Tensor,
        store: VarStore,
    }

    impl Pair {
        fn new(device: Device) -> Self {
            let store = VarStore::new(device);
            let [both, extra] = ["both", "extra"].map(|name| store.root().var(name, &[1], Init::Const(1.0)));
            Self { both, extra, store }
        }

        /// In `group`, as [`TrainState`](crate::TrainState) enters it.
        fn ddp(&self, group: &ProcessGroup, reducer: ReducerOptions) -> Ddp {
            let reducer = reducer.bucket_cap_mb(1e-6);
            let options = DdpOptions { reducer, ..DdpOptions::default() };
            let mut ddp = Ddp::new(&self.store, &ProcessGroup::alone().unwrap()).unwrap();
            if let Device::Cuda(index) = self.store.device() {
                ddp.enter_with(phalanx_nccl::Device::open(index as u32).unwrap());
            }
            ddp.enter(group, &options).unwrap();
            let is_on_device = ddp.sink.as_ref().is_some_and(|sink| sink.is_on_device());
            assert_eq!(is_on_device, self.store.device() != Device::Cpu);
            ddp
        }

        fn loss(&self, number: f64, uses_extra: bool) -> Tensor {
            let extra = if uses_extra {
                &self.extra * (10.0 * number)
            } else {
                Tensor::zeros([1], (Kind::Float, self.store.device()))
            };
            (&self.both * number + extra).sum(Kind::Float)
        }

        fn gradients(&self) -> [Option<f64>; 2] {
            [&self.both, &self.extra].map(|parameter| {
                let gradient = parameter.grad();
                gradient.defined().then(|| gradient.double_value(&[0]))
            })
        }

        fn zero_grad(&self) {
            [&self.both, &self.extra].into_iter().for_each(|one| shim::set_gradient(one, None).unwrap());
        }
    }

    fn groups(world: u32) -> Vec<ProcessGroup> {
        ProcessGroup::in_process(WorldSize::new(world).unwrap()).unwrap()
    }

    /// Three ranks, as threads, each with its group, its parameters and, but for the last one, the group of those that are left.
    fn of_three_one_dies(place: Place, rank: impl Fn(ProcessGroup, Pair, Option<ProcessGroup>) + Sync) {
        let left = groups(2).into_iter().map(Some).chain([None]);
        thread::scope(|scope| {
            for (index, (group, left)) in groups(3).into_iter().zip(left).enumerate() {
                let rank = &rank;
                scope.spawn(move || rank(group, Pair::new(place(index)), left));
            }
        });
    }

    fn done_again(place: Place) {
        of_three_one_dies(place, |group, pair, left| {
            let mut ddp = pair.ddp(&group, ReducerOptions::default().find_unused_parameters(true));
            let number = group.rank().index() as f64 + 1.0;
            // Only the rank that dies uses the second parameter.
            let loss = ddp.forward(|| pair.loss(number, left.is_none())).unwrap();
            ddp.backward_replayable(&loss, None).unwrap();
            assert_eq!(pair.gradients(), [Some(2.0), Some(10.0)]);
            let Some(left) = left else { return };
            // This rank has seen the step's end, and others have not.
            ddp.replay(&left).unwrap();
            assert_eq!(pair.gradients(), [Some(1.5), None]);
            ddp.follow(&left).unwrap();
            for uses_extra in [true, false] {
                let loss = ddp.forward(|| pair.loss(number, uses_extra)).unwrap();
                pair.zero_grad();
                ddp.backward_replayable(&loss, None).unwrap();
                assert_eq!(pair.gradients(), [Some(1.5), uses_extra.then_some(15.0)]);
            }
        });
    }

    #[test]
    fn a_step_that_is_done_again_has_the_gradients_of_the_ranks_that_are_left() {
        done_again(cpu);
    }

    #[test]
    #[ignore = "needs three CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_step_that_is_done_again_has_the_gradients_of_the_ranks_that_are_left() {
        done_again(cuda);
    }

    /// Each rank counts by its number.
    fn weighted_again(place: Place) {
        of_three_one_dies(place, |group, pair, left| {
            let mut ddp = pair.ddp(&group, ReducerOptions::default());
            let number = group.rank().index() as f64 + 1.0;
            let step = |ddp: &mut Ddp| {
                let loss = ddp.forward(|| pair.loss(number, true)).unwrap();
                pair.zero_grad();
                ddp.backward_replayable(&loss, Some(number)).unwrap();
            };
            let assert_averages = |expected: f64| {
                let [both, extra] = pair.gradients().map(Option::unwrap);
                let apart = (both - expected).abs().max((extra / 10.0 - expected).abs());
                assert!(apart < 1e-5, "{both} and {extra}, and not {expected}");
            };
            step(&mut ddp);
            assert_averages(14.0 / 6.0);
            let Some(left) = left else { return };
            ddp.replay(&left).unwrap();
            assert_averages(5.0 / 3.0);
            ddp.follow(&left).unwrap();
            step(&mut ddp);
            assert_averages(5.0 / 3.0);
            // Each is left alone.
            ddp.replay(&ProcessGroup::alone().unwrap()).unwrap();
            assert_averages(number);
        });
    }

    #[test]
    fn a_weighted_step_that_is_done_again_has_the_average_of_the_samples_that_are_left() {
        weighted_again(cpu);
    }

    #[test]
    #[ignore = "needs three CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_weighted_step_that_is_done_again_has_the_average_of_the_samples_that_are_left() {
        weighted_again(cuda);
    }

    /// A step that is cut off when one bucket is averaged, again when it is averaged once more, and done by one rank in the end.
    fn cut_off_twice(place: Place) {
        let all_are_here = Barrier::new(3);
        of_three_one_dies(place, |group, pair, left| {
            let mut ddp = pair.ddp(&group, ReducerOptions::default());
            let number = group.rank().index() as f64 + 1.0;
            // Its gradient comes between those of the two parameters.
            let gate = Tensor::ones([1], (Kind::Float, pair.store.device())).set_requires_grad(true);
            let backward = |ddp: &mut Ddp| {
                let loss = ddp.forward(|| {
                    let both = &pair.both * number;
                    let gate = &gate * 1.0;
                    (both + gate + &pair.extra * (10.0 * number)).sum(Kind::Float)
                });
                pair.zero_grad();
                ddp.backward_replayable(&loss.unwrap(), None)
            };
            // Buckets come in the order of gradients from the second step on.
            for _ in 0..2 {
                backward(&mut ddp).unwrap();
                assert_eq!(pair.gradients(), [Some(2.0), Some(20.0)]);
                group.barrier().unwrap(); // As at the end of an elastic step.
            }
            // None begins the next step late: the first bucket must be averaged in time.
            all_are_here.wait();
            if left.is_none() {
                let group = group.clone();
                let die = move || {
                    thread::sleep(Duration::from_secs(1)); // The first bucket is averaged meanwhile.
                    group.abort(Error::aborted("one dies"));
                };
                shim::hook(&gate, die).unwrap();
            }
            backward(&mut ddp).unwrap_err();
            let Some(left) = left else { return };
            if left.rank().index() == 1 {
                return left.abort(Error::aborted("another one dies"));
            }
            ddp.replay(&left).unwrap_err();
            ddp.replay(&ProcessGroup::alone().unwrap()).unwrap();
            assert_eq!(pair.gradients(), [Some(1.0), Some(10.0)]);
            ddp.follow(&ProcessGroup::alone().unwrap()).unwrap();
            backward(&mut ddp).unwrap();
            assert_eq!(pair.gradients(), [Some(1.0), Some(10.0)]);
            let on_device = ddp.sink.as_ref().and_then(|sink| sink.on_device());
            assert_eq!(on_device.map_or(0, |on_device| on_device.bucket_count()), 0, "memory for nothing");
        });
    }

    #[test]
    fn a_step_that_is_cut_off_twice_has_the_gradients_of_the_last_rank() {
        cut_off_twice(cpu);
    }

    #[test]
    #[ignore = "needs three CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_step_that_is_cut_off_twice_has_the_gradients_of_the_last_rank() {
        cut_off_twice(cuda);
    }

    fn followed(place: Place) {
        of_three_one_dies(place, |group, pair, left| {
            let mut ddp = pair.ddp(&group, ReducerOptions::default());
            let number = group.rank().index() as f64 + 1.0;
            let step = |ddp: &mut Ddp| {
                let loss = ddp.forward(|| pair.loss(number, true)).unwrap();
                pair.zero_grad();
                ddp.backward_replayable(&loss, None).unwrap();
                pair.gradients()
            };
            assert_eq!(step(&mut ddp), [Some(2.0), Some(20.0)]);
            let Some(left) = left else { return };
            ddp.follow(&left).unwrap();
            assert_eq!(step(&mut ddp), [Some(1.5), Some(15.0)]);
            assert_eq!(step(&mut ddp), [Some(1.5), Some(15.0)]);
        });
    }

    #[test]
    fn a_group_that_follows_between_steps_has_the_next_one() {
        followed(cpu);
    }

    #[test]
    #[ignore = "needs three CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_group_that_follows_between_steps_has_the_next_one() {
        followed(cuda);
    }

    /// In a static graph a parameter that ranks used which are gone has the gradient zero.
    fn used_by_the_dead(place: Place) {
        thread::scope(|scope| {
            for (rank, group) in groups(2).into_iter().enumerate() {
                scope.spawn(move || {
                    let pair = Pair::new(place(rank));
                    let mut ddp = pair.ddp(&group, ReducerOptions::default().static_graph(true));
                    let step = |ddp: &mut Ddp| {
                        let loss = ddp.forward(|| pair.loss(2.0, rank == 1)).unwrap();
                        pair.zero_grad();
                        ddp.backward_replayable(&loss, None).unwrap();
                        pair.gradients()
                    };
                    for _ in 0..2 {
                        assert_eq!(step(&mut ddp), [Some(2.0), Some(10.0)]);
                        group.barrier().unwrap();
                    }
                    if rank == 1 {
                        return;
                    }
                    let alone = ProcessGroup::alone().unwrap();
                    ddp.replay(&alone).unwrap();
                    assert_eq!(pair.gradients(), [Some(2.0), Some(0.0)]);
                    ddp.follow(&alone).unwrap();
                    assert_eq!(step(&mut ddp), [Some(2.0), Some(0.0)]);
                });
            }
        });
    }

    #[test]
    fn a_parameter_that_only_the_dead_used_has_the_gradient_zero_in_a_static_graph() {
        used_by_the_dead(cpu);
    }

    #[test]
    #[ignore = "needs two CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_parameter_that_only_the_dead_used_has_the_gradient_zero_in_a_static_graph() {
        used_by_the_dead(cuda);
    }

    fn begun_anew(place: Place) {
        thread::scope(|scope| {
            for (rank, (first, second)) in groups(2).into_iter().zip(groups(2)).enumerate() {
                scope.spawn(move || {
                    let pair = Pair::new(place(rank));
                    let mut ddp = pair.ddp(&first, ReducerOptions::default());
                    let loss = ddp.forward(|| pair.loss(1.0, true)).unwrap();
                    ddp.backward_no_sync(&loss).unwrap();
                    ddp.leave(&ProcessGroup::alone().unwrap());
                    ddp.enter(&second, &DdpOptions::default()).unwrap();
                    assert_eq!(pair.gradients(), [None, None]);
                    let loss = ddp.forward(|| pair.loss(1.0, true)).unwrap();
                    ddp.backward(&loss).unwrap();
                    assert_eq!(pair.gradients(), [Some(1.0), Some(10.0)]);
                });
            }
        });
    }

    #[test]
    fn a_new_round_begins_without_gradients() {
        begun_anew(cpu);
    }

    #[test]
    #[ignore = "needs two CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_a_new_round_begins_without_gradients() {
        begun_anew(cuda);
    }

    #[test]
    fn parameters_that_are_frozen_when_a_round_begins_are_averaged_when_they_are_unfrozen() {
        thread::scope(|scope| {
            for (rank, (first, second)) in groups(2).into_iter().zip(groups(2)).enumerate() {
                scope.spawn(move || {
                    let mut pair = Pair::new(Device::Cpu);
                    let mut ddp = pair.ddp(&first, ReducerOptions::default());
                    // The other rank is as one that starts in the second round.
                    if rank == 0 {
                        pair.store.freeze();
                    }
                    ddp.leave(&ProcessGroup::alone().unwrap());
                    ddp.enter(&second, &DdpOptions::default()).unwrap();
                    pair.store.unfreeze();
                    let loss = ddp.forward(|| pair.loss(rank as f64 + 1.0, true)).unwrap();
                    ddp.backward(&loss).unwrap();
                    assert_eq!(pair.gradients(), [Some(1.5), Some(15.0)]);
                });
            }
        });
    }
}
