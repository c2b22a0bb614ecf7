//! What goes on while backward computes, by the order in which ranks meet there: a rank that waited too early for the others would wait
//! for ever.

use std::cell::RefCell;
use std::time::Duration;

use burn::nn::Linear;
use burn::tensor::Tensor;
use phalanx::ReduceOp;
use phalanx::mesh::DeviceMesh;
use phalanx::testing::{self, Fabric};
use phalanx_burn::parallel::fsdp::{Fsdp, FullySharded, ShardingGroup, ShardingOptions};
use phalanx_burn::parallel::tensor::TensorGroup;

use super::layers::{Layers, gradients_of, subtracted};
use super::{all_options, options};
use crate::common::{Mlp, distance, samples};

const UNITS: usize = 4;
/// Much longer than the exchanges take on any machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Where a rank meets another one in its backward pass.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Before the unit has any gradient, and after its parameters were gathered.
    Inside(usize),
    /// Before the unit's backward pass begins, and after that of the next one.
    Before(usize),
}

thread_local! {
    /// With whom this rank meets inside of a unit: its pass captures nothing.
    static INSIDE: RefCell<Option<(usize, TensorGroup)>> = const { RefCell::new(None) };
}

/// A unit whose backward pass meets another rank, if it is the one.
fn unit(unit: &FullySharded<Linear>, number: usize, x: Tensor<2>) -> Tensor<2> {
    unit.forward((x, number), |layer, (x, number)| {
        let y = layer.forward(x).tanh();
        INSIDE.with_borrow(|inside| match inside {
            // What is exchanged in backward alone.
            Some((here, group)) if *here == number => group.copy(y),
            _ => y,
        })
    })
}

/// Trains two steps on two replicas of two shards. In each backward pass two ranks of `dimension` meet, number 0 of it at one place, and
/// number 1 at the other.
fn meets(options: &ShardingOptions, dimension: &str, places: [Place; 2]) {
    for fabric in [Fabric::InProcess, Fabric::TwoHosts] {
        testing::run(4, fabric, |group| {
            let group = group.with_timeout(LIMIT);
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
            let sharding =
                ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = sharding.with_options(options.clone());
            let [replica, shard] = ["replicate", "shard"].map(|name| mesh.coordinate(name).unwrap() as u32);
            let (color, number) = if dimension == "shard" { (replica, shard) } else { (shard, replica) };
            // A group of its own, whose operations are in no order with those of the shards and the replicas.
            let meeting = group.split(Some(color), i64::from(number)).unwrap().unwrap();
            let (meeting, place) = (TensorGroup::new(&meeting), places[number as usize]);
            if let Place::Inside(unit) = place {
                INSIDE.set(Some((unit, meeting.clone())));
            }
            let mut fsdp = Fsdp::new(Layers::new(&[8; UNITS + 1], &sharding).unwrap(), &sharding).unwrap();
            for _ in 0..2 {
                let loss = fsdp.forward(|model| {
                    let one = |x, (number, layer): (usize, &FullySharded<Linear>)| {
                        let y = unit(layer, number, x);
                        if place == Place::Before(number) { meeting.copy(y) } else { y }
                    };
                    model.layers.iter().enumerate().fold(samples(0, 4).0, one).mean()
                });
                fsdp.backward(&loss.unwrap()).unwrap();
            }
            INSIDE.set(None);
        });
    }
}

/// ZeRO-3 with one unit ahead and with none, and ZeRO-2.
fn each_options() -> [ShardingOptions; 3] {
    [options(true, 1), options(true, 0), options(false, 1)]
}

#[test]
fn a_unit_computes_its_gradients_before_those_of_the_next_are_scattered() {
    for options in each_options() {
        // Shard 1 has not got its gradients when shard 0 begins with the unit before.
        meets(&options, "shard", [Place::Before(UNITS - 2), Place::Inside(UNITS - 1)]);
    }
}

#[test]
fn gradients_are_on_their_way_before_the_unit_before_computes_its_own() {
    for options in each_options() {
        // Shard 0 is done with the last but one, so it has the average of the last: shard 1, which has only begun with the last but one, has
        // sent its part of it.
        meets(&options, "shard", [Place::Before(UNITS - 3), Place::Inside(UNITS - 2)]);
    }
}

#[test]
fn units_do_not_wait_for_the_other_replicas() {
    for options in each_options() {
        // Replica 1 has no gradients at all when replica 0 begins with its first unit.
        meets(&options, "replicate", [Place::Before(0), Place::Inside(UNITS - 1)]);
    }
}

/// Two uses of one unit, and two of another, of which the loss has one.
#[test]
fn units_that_are_used_several_times_are_averaged_over_replicas() {
    for options in all_options() {
        testing::run(4, Fabric::InProcess, |group| {
            let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)]).unwrap();
            let sharding =
                ShardingGroup::hybrid(mesh.group("shard").unwrap(), mesh.group("replicate").unwrap());
            let sharding = sharding.with_options(options.clone());
            let mut fsdp = Fsdp::new(Layers::new(&[8; 4], &sharding).unwrap(), &sharding).unwrap();
            let rank = group.rank().index();
            let input = || samples(4 * rank, 4 * rank + 4).0;
            for step in 0..2 {
                let loss = fsdp.forward(|model| {
                    let use_of = |number: usize, x| unit(&model.layers[number], number, x);
                    let x = use_of(0, input());
                    let again = use_of(0, x.clone());
                    drop(use_of(1, x.clone()));
                    (use_of(1, again) * use_of(2, x)).mean()
                });
                let whole = fsdp.model().whole();
                let together = |model: &Mlp| {
                    let use_of = |number: usize, x| model.layers[number].forward(x).tanh();
                    let x = use_of(0, input());
                    (use_of(1, use_of(0, x.clone())) * use_of(2, x)).mean()
                };
                let mut expected = gradients_of(&whole, &together(&whole));
                expected.iter_mut().for_each(|gradient| group.all_reduce(gradient, ReduceOp::Avg).unwrap());
                let apart = distance(&subtracted(&mut fsdp, &loss.unwrap()), &expected);
                assert!(apart < 1e-5, "{options:?}, step {step}: {apart:e}");
            }
        });
    }
}
