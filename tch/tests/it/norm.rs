//! Batch norm over all ranks.

use phalanx::{GroupHandle, ProcessGroup};
use phalanx_tch::{Ddp, SyncBatchNorm};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::common::{FLOATS, distance, elements, floats, load, run};

struct Network {
    store: nn::VarStore,
    first: nn::Conv2D,
    norm: SyncBatchNorm,
}

impl Network {
    fn new(group: &ProcessGroup) -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let first = nn::conv2d(store.root() / "first", 3, 6, 3, Default::default());
        let config = nn::BatchNormConfig::default();
        let norm = nn::batch_norm2d(store.root() / "norm", 6, config);
        let norm = SyncBatchNorm::new(norm, config, &GroupHandle::new(group.clone()));
        Self { store, first, norm }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.norm.forward(&self.first.forward(x), true).unwrap()
    }
}

fn images(from: i64, to: i64) -> Tensor {
    (Tensor::arange_start(from * 75, to * 75, FLOATS) * 0.7).sin().reshape([to - from, 3, 5, 5])
}

#[test]
fn statistics_and_gradients_are_those_of_the_whole_batch_also_if_parts_differ_in_size() {
    let start = floats(&Network::new(&ProcessGroup::alone().unwrap()).store);
    // A sum over all samples, so that parts of any size have the whole one's gradient.
    let loss = |output: &Tensor| (output.square() * output.cos()).sum(Kind::Float);
    let (whole, gradient) = {
        let network = Network::new(&ProcessGroup::alone().unwrap());
        load(&network.store, &start);
        let output = network.forward(&images(0, 9));
        loss(&output).backward();
        let gradient: Vec<_> =
            network.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect();
        (floats(&network.store), gradient)
    };
    for ends in [[0, 4, 9], [0, 1, 9], [0, 0, 9]] {
        let parts = run(2, |group| {
            let network = Network::new(&group);
            load(&network.store, &start);
            let mut ddp = Ddp::new(&network.store, &group).unwrap();
            let rank = group.rank().index();
            let output = ddp.forward(|| network.forward(&images(ends[rank], ends[rank + 1]))).unwrap();
            // The average over two ranks of twice the parts' sums.
            ddp.backward(&(loss(&output) * 2.0)).unwrap();
            let gradient: Vec<_> =
                network.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect();
            (floats(&network.store), gradient)
        });
        for (state, ours) in parts {
            assert!(distance(&state, &whole) < 1e-5, "{ends:?}: {:e}", distance(&state, &whole));
            assert!(distance(&ours, &gradient) < 1e-4, "{ends:?}: {:e}", distance(&ours, &gradient));
        }
    }
}

#[test]
fn a_failed_exchange_is_the_error_of_the_pass() {
    run(2, |group| {
        let network = Network::new(&group);
        if group.rank().is_main() {
            group.abort(phalanx::Error::aborted("the cable was cut"));
        }
        let outcome = network.norm.forward(&Tensor::ones([2, 6, 3, 3], FLOATS), true);
        assert!(outcome.unwrap_err().to_string().contains("the cable was cut"));
    });
}
