//! A [`Ddp`] whose gradients NCCL averages.

use phalanx::join::JoinGroup;
use phalanx::{Error, Result};
use phalanx_nccl::DeviceGroup;
use tch::nn::VarStore;

use super::{Ddp, DdpOptions};
use crate::tensors;

impl Ddp {
    /// Like [`with_options`](Self::with_options), for variables on a CUDA device, whose gradients NCCL averages on the device, while backward
    /// continues: they lie in buckets of its memory, as with `gradient_as_bucket_view`, and no thread waits for the device. All ranks call it together. Everything else, such as comparing the
    /// models, parameters at the beginning, buffers and a [`SyncBatchNorm`](crate::SyncBatchNorm), goes through `group`'s
    /// [host](DeviceGroup::host).
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx_nccl::DeviceGroup;
    /// use phalanx_tch::{Ddp, DdpOptions};
    /// use tch::nn::{self, VarStore};
    ///
    /// let group = phalanx::init()?;
    /// let cuda = phalanx_nccl::Device::of_local_rank(&group)?;
    /// let group = DeviceGroup::new(group, &cuda)?; // init_process_group("cpu:gloo,cuda:nccl")
    /// let store = VarStore::new(tch::Device::Cuda(cuda.ordinal() as usize));
    /// let model = nn::linear(store.root(), 8, 3, Default::default());
    /// let mut ddp = Ddp::with_nccl(&store, &group, DdpOptions::default())?;
    /// // forward, backward and step as on any other device
    /// # drop((ddp, model));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// When [`backward`](Self::backward) returns, the averages are queued: what libtorch queues on the current stream from then on waits for
    /// them. A call that fails after that is the error of the next [`backward`](Self::backward), [`evaluate`](Self::evaluate), collective, save of a
    /// state or change of the group, and the steps since are worth nothing, as with PyTorch.
    ///
    /// `find_unused_parameters`, `static_graph`, [`backward_no_sync`](Self::backward_no_sync) and clipping work as everywhere. So does
    /// [`backward_weighted`](Self::backward_weighted), whose weights go through the host's group. If one rank calls
    /// [`backward`](Self::backward) in such a step, it gets a wrong average, and the others get an error with their next call of that group, or
    /// with its time-out.
    /// [`Compressed`](phalanx::reducer::hooks::Compressed) rounds on the device, and [`PowerSgd`](phalanx::reducer::hooks::PowerSgd) computes there: among
    /// devices of one model, and with its `warm_start`. With [`PostLocalSgd`](phalanx::reducer::hooks::PostLocalSgd) gradients stay where they are after
    /// the first steps, or are averaged within its smaller group; [`average_parameters`](Self::average_parameters) goes through the host. Hooks of
    /// your own are [registered](Self::register_device_hook) as [`DeviceHook`](crate::DeviceHook)s.
    ///
    /// In a [`join`](Self::join) ranks that are done make the calls of the others with zeros.
    ///
    /// **These are refused**, by name: [`register_comm_hook`](Self::register_comm_hook) with a hook of the host's memory, a step inside of a `join` that another
    /// `Ddp` has begun, and elastic jobs, for which there is [`TrainState::with_nccl_on`](crate::TrainState::with_nccl_on).
    /// [`with_options`](Self::with_options) has them all, through the host's memory.
    ///
    /// # Errors
    /// As [`new`](Self::new); if the variables are not on the communicator's device; on every rank also if some ranks average otherwise. In a
    /// world of one nothing is averaged, and nothing is refused but elastic jobs.
    #[doc(alias("nccl", "init_process_group"))]
    pub fn with_nccl(store: &VarStore, group: &DeviceGroup, options: DdpOptions) -> Result<Self> {
        let nccl = Some(group.device().clone());
        Self::of(tensors::shared(store), JoinGroup::from(group.host()), nccl, &options)
    }

    /// An error if `call` cannot be made because NCCL averages the gradients on the device. It ends the group: the others may not make it.
    pub(super) fn check_on_host(&self, call: &str) -> Result<()> {
        let Some(sink) = self.sink.as_ref().filter(|sink| sink.is_on_device()) else { return Ok(()) };
        sink.call(|_| Err(refused(call)))
    }

    /// An error if ranks that are done would not make NCCL's calls in the `join` that runs. It ends the group: the others wait for this step.
    pub(super) fn check_join(&self) -> Result<()> {
        let Some(nccl) = self.sink.as_ref().and_then(|sink| sink.on_device()) else { return Ok(()) };
        if self.group.answers(&*nccl) {
            Ok(())
        } else {
            self.check_on_host("a join that this Ddp has not begun")
        }
    }

    /// An error if it cannot change to another group, also in a world of one.
    pub(super) fn check_elastic(&self) -> Result<()> {
        let result = if self.nccl.is_some() { Err(refused(ELASTIC)) } else { Ok(()) };
        match &self.sink {
            Some(sink) => sink.call(|_| result),
            None => result,
        }
    }

    /// From the next group on that it [enters](Self::enter), NCCL averages on this device.
    pub(crate) fn enter_with(&mut self, cuda: phalanx_nccl::Device) {
        self.cuda = Some(cuda);
    }

    /// The failure of a call of NCCL's that nobody has waited for: what has been computed since is worth nothing.
    pub(crate) fn check_settled(&self) -> Result<()> {
        self.sink.as_ref().map_or(Ok(()), |sink| sink.check_settled())
    }

    /// Waits for the calls of NCCL's that nobody has waited for, and returns the failure of one.
    pub(super) fn await_settled(&self) -> Result<()> {
        self.sink.as_ref().map_or(Ok(()), |sink| sink.await_calls())
    }

    /// The same before the group is left: nobody would hear of it later. A failure that the program has got from a call already is no other one.
    pub(crate) fn check_left(&self) -> Result<()> {
        match self.hooked().is_some_and(|hooked| hooked.check().is_err()) {
            true => Ok(()),
            false => self.await_settled(),
        }
    }
}

const ELASTIC: &str = "an elastic job";

fn refused(call: &str) -> Error {
    let cause = format!("{call}: NCCL averages these gradients in the memory of the device");
    Error::invalid_argument(cause)
        .with_remedy(
            "do without it, or average in the host's memory, with Ddp::with_options; elastic jobs over NCCL: TrainState::with_nccl_on",
        )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use std::thread;

    use phalanx::reducer::ReducerOptions;
    use phalanx::{ProcessGroup, WorldSize};
    use tch::nn::Init;
    use tch::{Device, Kind};

    use super::*;

    #[test]
    #[ignore = "needs two CUDA devices, such as those of the stand-in: tch/check.sh"]
    fn over_nccl_buckets_of_the_first_step_that_there_are_no_more_have_no_memory() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        thread::scope(|scope| {
            for (rank, group) in groups.into_iter().enumerate() {
                scope.spawn(move || {
                    let cuda = phalanx_nccl::Device::open(rank as u32).unwrap();
                    let group = DeviceGroup::new(group, &cuda).unwrap();
                    let store = VarStore::new(Device::Cuda(rank));
                    let var = |(name, len): (&str, i64)| store.root().var(name, &[len], Init::Const(1.0));
                    let [first, second, third, fourth] =
                        [("first", 4), ("second", 4), ("third", 6), ("fourth", 6)].map(var);
                    // Backward begins with the last one.
                    let used = [&first, &third, &second, &fourth];
                    // With room for ten elements: of 6, 6 and 4, and 4; in the order of the gradients of 6 and 4, and 6 and 4.
                    let reducer = ReducerOptions::default().bucket_cap_mb(40.0 / f64::from(1 << 20));
                    let options = DdpOptions { reducer, ..DdpOptions::default() };
                    let mut ddp = Ddp::with_nccl(&store, &group, options).unwrap();
                    let number = rank as f64 + 1.0;
                    for (buckets, gradient) in [(3, 1.5), (2, 3.0)] {
                        let terms = used.iter().map(|one| (*one * number).sum(Kind::Float));
                        let loss = ddp.forward(|| terms.reduce(|sum, term| sum + term).unwrap()).unwrap();
                        ddp.backward(&loss).unwrap();
                        let on_device = ddp.sink.as_ref().unwrap().on_device().unwrap();
                        assert_eq!((ddp.bucket_bytes().len(), on_device.bucket_count()), (buckets, buckets));
                        for one in used {
                            let elements = Vec::<f32>::try_from(one.grad().to_device(Device::Cpu)).unwrap();
                            assert!(elements.iter().all(|element| *element == gradient), "{elements:?}");
                        }
                    }
                });
            }
        });
    }
}
