//! What hooks of the program's own send: all ranks' parts are gathered, and messages that differ are named.

use phalanx::join::JoinOptions;
use phalanx::reducer::hooks::HookState;
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_tch::{DeviceBucket, DeviceHook, DeviceMessage, Optimizer, Rule};
use tch::nn::{Init, VarStore};
use tch::{Kind, Tensor};

use super::{ddp, options, zero_grad};
use crate::common::{device, elements};

/// Sends the largest elements of a bucket with their places (top-k): so many of each gradient, or all.
pub(super) struct Largest {
    pub of_each: Option<usize>,
}

impl DeviceHook for Largest {
    fn describe(&self) -> String {
        format!("largest {:?}", self.of_each)
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let whole = bucket.buffer();
        let count = self.of_each.map_or(whole.numel(), |count| count * bucket.gradients().count());
        let (_, places) = whole.abs().topk(count as i64, 0, true, false);
        // f64 has each f32, and each place in a bucket.
        let numbers = [whole.gather(0, &places, false), places].map(|one| one.to_kind(Kind::Double));
        Ok(DeviceMessage::all_gather(Tensor::stack(&numbers, 0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        let ranks = i64::from(bucket.world_size().get());
        assert_eq!(combined.size()[..2], [ranks, 2]);
        let [values, places] = [0, 1].map(|row| combined.select(1, row).reshape([-1i64].as_slice()));
        let values = (values / ranks as f64).to_kind(bucket.buffer().kind());
        let mut whole = bucket.buffer().shallow_clone();
        let _ = whole.zero_();
        let _ = whole.index_add_(0, &places.to_kind(Kind::Int64), &values);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Each rank's gradients have three elements that are not zero, in places of its own.
pub(super) fn largest(group: &ProcessGroup) -> Result<()> {
    let store = VarStore::new(device());
    let layers: Vec<Tensor> =
        (0..4).map(|index| store.root().var(&format!("l{index}"), &[40], Init::Const(0.0))).collect();
    let mut ddp = ddp(&store, group, options())?;
    ddp.register_device_hook(Largest { of_each: Some(3) })?;
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    // All ranks have something in the first place.
    let slope = |rank: usize, layer: usize, step: usize| {
        let mut slope = vec![0f32; 40];
        for (place, value) in [(0, 1.5), (2 + rank, -8.0), (20 + 3 * rank + layer, 0.25 + step as f32)] {
            slope[place] = value;
        }
        slope
    };
    let before = ddp.communicated_bytes();
    for step in 0..4 {
        let loss = ddp.forward(|| {
            let of = |(layer, one): (usize, &Tensor)| {
                let slope = Tensor::from_slice(&slope(rank, layer, step)).to_device(device());
                (one * slope).sum(Kind::Float)
            };
            layers.iter().enumerate().map(of).reduce(|a, b| a + b).unwrap()
        })?;
        zero_grad(&store);
        ddp.backward(&loss)?;
        // Queued before anybody has waited for the device.
        let seen: Vec<Tensor> = layers.iter().map(|one| one.grad() * 2.0).collect();
        for (layer, seen) in seen.iter().enumerate() {
            let mut sum = vec![0f32; 40];
            for rank in 0..ranks {
                sum.iter_mut().zip(slope(rank, layer, step)).for_each(|(sum, one)| *sum += one);
            }
            let near = |(found, sum): (&f32, &f32)| (found - 2.0 * sum / ranks as f32).abs() < 1e-5;
            let found = elements(seen);
            assert!(found.iter().zip(&sum).all(near), "step {step}, layer {layer}: {found:?} for {sum:?}");
        }
    }
    // Three values and three places of eight bytes for each rank and gradient, of which half counts, as an all_reduce moves twice as many.
    assert_eq!(ddp.communicated_bytes() - before, (4 * 4 * 6 * 8 * ranks / 2) as u64);
    Ok(())
}

/// Sends rounded gradients in a type of integers.
struct Integers(Kind);

impl DeviceHook for Integers {
    fn describe(&self) -> String {
        format!("integers of {:?}", self.0)
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        Ok(DeviceMessage::all_gather(bucket.buffer().to_kind(self.0)))
    }

    fn receive(&mut self, bucket: &DeviceBucket, combined: &Tensor) -> Result<()> {
        assert_eq!(combined.kind(), self.0);
        let average = combined.to_kind(Kind::Float).mean_dim([0i64].as_slice(), false, Kind::Float);
        bucket.buffer().shallow_clone().copy_(&average);
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// Rank 0 has no batch, and answers with zeros.
pub(super) fn gathered_integers(group: &ProcessGroup) -> Result<()> {
    for kind in [Kind::Int64, Kind::Int, Kind::Int8, Kind::Uint8] {
        let group = &group.split(Some(0), 0)?.unwrap();
        let store = VarStore::new(device());
        let one = store.root().var("one", &[5], Init::Const(0.0));
        let mut ddp = ddp(&store, group, options())?;
        ddp.register_device_hook(Integers(kind))?;
        let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0))?;
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, _| {
            for step in 0..3 * group.rank().index() {
                let loss = ddp.forward(|| one.sum(Kind::Float) * (4.0 + step as f64))?;
                zero_grad(&store);
                ddp.backward(&loss)?;
                assert_eq!(elements(&one.grad()), [(4.0 + step as f32) / 2.0; 5], "{kind:?}, step {step}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// In a step one rank sends less than the others, or in another way.
#[derive(Clone, Copy)]
enum Differs {
    Elements,
    Type,
    Operation,
    Gathers,
}

struct Different {
    how: Option<Differs>,
    /// Whether it differs in the first bucket, or in the last.
    in_first: bool,
    /// The step in which it differs.
    at: u64,
    step: u64,
}

impl DeviceHook for Different {
    fn describe(&self) -> String {
        "different".into()
    }

    fn send(&mut self, bucket: &DeviceBucket) -> Result<DeviceMessage> {
        let (whole, step) = (bucket.buffer() * 1.0, self.step);
        self.step += u64::from(bucket.is_last());
        let is_it = if self.in_first { bucket.index() == 0 } else { bucket.is_last() };
        Ok(match self.how.filter(|_| step == self.at && is_it) {
            None => DeviceMessage::all_reduce(whole, ReduceOp::Avg),
            Some(Differs::Elements) => DeviceMessage::all_reduce(whole.narrow(0, 1, 7), ReduceOp::Avg),
            Some(Differs::Type) => DeviceMessage::all_reduce(whole.to_kind(Kind::Half), ReduceOp::Avg),
            Some(Differs::Operation) => DeviceMessage::all_reduce(whole, ReduceOp::Sum),
            Some(Differs::Gathers) => DeviceMessage::all_gather(whole),
        })
    }

    fn receive(&mut self, _: &DeviceBucket, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        Ok(HookState::default())
    }

    fn load(&mut self, state: HookState) -> Result<()> {
        state.nothing()
    }
}

/// NCCL would wait until its time-out, or combine what does not belong together.
pub(super) fn own_hook_differs(group: &ProcessGroup) -> Result<()> {
    let cases = |elements: usize| {
        [
            (Differs::Elements, "all_reduce(avg, 7 x f32)".to_owned()),
            (Differs::Type, format!("all_reduce(avg, {elements} x f16)")),
            (Differs::Operation, format!("all_reduce(sum, {elements} x f32)")),
            (Differs::Gathers, format!("all_gather({elements} x f32)")),
        ]
    };
    let buckets = [(false, 8), (true, 200)].map(|(in_first, elements)| {
        cases(elements).map(|(how, name)| {
            (in_first, how, format!("all_reduce(avg, {elements} x f32), and rank 1 {name}"))
        })
    });
    for (in_first, how, words) in buckets.into_iter().flatten() {
        for at in [0, 3] {
            let group = &group.split(Some(0), 0)?.unwrap();
            let store = VarStore::new(device());
            // A bucket for each; that of `one` is the last.
            let one = store.root().var("one", &[8], Init::Const(1.0));
            let two = store.root().var("two", &[200], Init::Const(1.0));
            let mut ddp = ddp(&store, group, options())?;
            let how = (group.rank().index() == 1).then_some(how);
            ddp.register_device_hook(Different { how, in_first, at, step: 0 })?;
            let mut steps = 0..=at;
            let error = steps.find_map(|step| {
                let trained = ddp.forward(|| (&one * 2.0).sum(Kind::Float) + two.sum(Kind::Float));
                let trained = trained.and_then(|loss| ddp.backward(&loss));
                zero_grad(&store);
                trained.err().map(|error| (step, error.to_string()))
            });
            let (step, error) = error.unwrap();
            let words = format!("rank 0 {words}");
            // The error of the rank that differs may reach another one at the end of the step before.
            assert!(step <= at && error.contains(&words) && error.contains("DeviceHook"), "{error}");
        }
    }
    Ok(())
}
