//! What is made of the collectives: joins, process sets, values, parameters, sparse gradients, the timeline.

use std::sync::Barrier;
use std::time::Duration;

use phalanx::Rank;
use phalanx::testing::Fabric;
use phalanx_horovod::{Horovod, Op, Options, Reduction, SparseGradient, Tensor};
use serde::{Deserialize, Serialize, Serializer};

use super::ranks;

#[test]
fn a_rank_without_data_brings_what_changes_nothing() {
    for fabric in [Fabric::SharedMemory, Fabric::Tcp] {
        let last = ranks(3, fabric, &Options::default(), |hvd| {
            let rank = hvd.rank().index();
            // Rank r has r + 1 batches. Names are known, new, and of every operation.
            for step in 0..=rank {
                let active = (step..3).collect::<Vec<_>>();
                let (least, most) = ((step + 1) as f32, 3.0);
                let value = (rank + 1) as f32;
                let submit = |name: &str, op| hvd.allreduce_async(name, [value; 4], op).unwrap();
                let sum: f32 = active.iter().map(|rank| (rank + 1) as f32).sum();
                let product: f32 = active.iter().map(|rank| (rank + 1) as f32).product();
                let expected = [
                    ("sum", Op::Sum, sum),
                    ("average", Op::Average, sum / 3.0),
                    ("min", Op::Min, least),
                    ("max", Op::Max, most),
                    ("product", Op::Product, product),
                ];
                let handles: Vec<_> = expected.iter().map(|(name, op, _)| submit(name, *op)).collect();
                let fresh = submit(&format!("new in step {step}"), Op::Sum);
                let rows = hvd.allgather("rows", [value]).unwrap();
                let shard = hvd.reducescatter("shard", [value; 3], Op::Sum).unwrap();
                let blocks = hvd.alltoall("blocks", [value; 3], None).unwrap();
                for (handle, (name, _, expected)) in handles.into_iter().zip(&expected) {
                    let result = handle.synchronize().unwrap();
                    assert_eq!(result.as_slice::<f32>().unwrap(), [*expected; 4], "{name} in step {step}");
                }
                assert_eq!(fresh.synchronize().unwrap().as_slice::<f32>().unwrap(), [sum; 4]);
                let brought: Vec<f32> = active.iter().map(|rank| (rank + 1) as f32).collect();
                assert_eq!(rows.as_slice::<f32>().unwrap(), brought);
                assert_eq!(shard.as_slice::<f32>().unwrap(), [sum]);
                assert_eq!(blocks.tensor.as_slice::<f32>().unwrap(), brought);
            }
            let last = hvd.join().unwrap();
            assert_eq!(
                hvd.allreduce("sum", [1.0f32; 4], Op::Sum).unwrap().as_slice::<f32>().unwrap(),
                [3.0; 4]
            );
            last
        });
        assert_eq!(last, [Rank::new(2); 3]);
    }
}

#[test]
fn what_a_rank_without_data_brings_is_not_multiplied() {
    for fusion_threshold in [0, 1 << 20] {
        let options = Options { fusion_threshold, ..Options::default() };
        ranks(2, Fabric::SharedMemory, &options, |hvd| {
            if hvd.rank().get() == 1 {
                hvd.join().unwrap();
                return;
            }
            let (product, most) =
                (Reduction::new(Op::Product).prescale(2.0), Reduction::new(Op::Max).prescale(-1.0));
            for (reduction, expected) in [(product, 6.0), (most, -3.0)] {
                let names = ["a", "b"];
                let handles = names.map(|name| hvd.allreduce_async(name, [3.0f32; 2], reduction).unwrap());
                for handle in handles {
                    assert_eq!(handle.synchronize().unwrap().as_slice::<f32>().unwrap(), [expected; 2]);
                }
                let shard = hvd.reducescatter("shard", [3.0f32; 2], reduction).unwrap();
                assert_eq!(shard.as_slice::<f32>().unwrap(), [expected]);
            }
            hvd.join().unwrap();
        });
    }
}

#[test]
fn objects_of_ranks_that_have_joined_are_missed() {
    ranks(3, Fabric::SharedMemory, &Options::default(), |hvd| {
        if hvd.rank().get() == 1 {
            hvd.join().unwrap();
            return;
        }
        while hvd.allgather("who is there", [1i32]).unwrap().len() == 3 {}
        let error = hvd.allgather_object("o", &hvd.rank().get()).unwrap_err();
        assert!(
            error.is_mismatch() && error.to_string().contains("2 values came where ranks 0, 1, 2"),
            "{error}"
        );
        let error = hvd.broadcast_object::<u8>("o", None, Rank::new(1)).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("0 values came where rank 1"), "{error}");
        let own = hvd.rank().is_main().then_some(7u8);
        assert_eq!(hvd.broadcast_object("o", own.as_ref(), Rank::MAIN).unwrap(), 7);
        hvd.join().unwrap();
    });
}

/// What rank 0 cannot serialise.
#[derive(Debug, Deserialize)]
struct OfRank(u32);

impl Serialize for OfRank {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            0 => Err(serde::ser::Error::custom("it has no form")),
            rank => serializer.serialize_u32(rank),
        }
    }
}

#[test]
fn an_object_that_cannot_be_written_is_an_error_on_every_rank() {
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        let value = OfRank(hvd.rank().get());
        let outcomes = [
            hvd.broadcast_object("o", Some(&value), Rank::MAIN).map(drop),
            hvd.broadcast_object::<u8>("o", None, Rank::MAIN).map(drop),
            hvd.allgather_object("o", &value).map(drop),
        ];
        for error in outcomes.map(Result::unwrap_err) {
            let (text, is_own) = (error.to_string(), value.0 == 0);
            assert_eq!(error.is_invalid_argument(), is_own, "{text}");
            assert!(is_own || text.contains("rank 0 could not write its object"), "{text}");
        }
        assert_eq!(hvd.broadcast_object("o", Some(&OfRank(1)), Rank::new(1)).unwrap().0, 1);
    });
}

#[test]
fn objects_of_several_roots_are_an_error_on_every_rank() {
    ranks(3, Fabric::InProcess, &Options::default(), |hvd| {
        // The last one would get rank 0's, which it did not ask for.
        let (own, last) = (hvd.rank().get(), hvd.rank().get() == 2);
        let error = hvd.broadcast_object("o", Some(&own), Rank::new(u32::from(last))).unwrap_err();
        let (ours, theirs) = if last { (1, 0) } else { (0, 1) };
        let expected =
            format!("called broadcast_object with root {ours}, another broadcast_object with root {theirs}");
        assert!(error.is_mismatch() && error.to_string().contains(&expected), "{error}");
        let outcome = if last {
            hvd.broadcast_object("o", Some(&own), Rank::MAIN).map(drop)
        } else {
            hvd.allgather_object("o", &own).map(drop)
        };
        assert!(outcome.unwrap_err().to_string().contains("allgather_object"));
        assert_eq!(hvd.broadcast_object("o", Some(&own), Rank::new(1)).unwrap(), 1);
    });
}

#[test]
fn process_sets_are_made_while_operations_are_in_flight() {
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        for step in 0..5 {
            let submit = |index| hvd.allreduce_async(&format!("t{index}"), vec![1.0f32; 50_000], Op::Sum);
            let handles: Vec<_> = (0..20).map(|index| submit(index).unwrap()).collect();
            if hvd.rank().get() == step % 2 {
                // What is in flight is carried out before this rank calls, and after the other one has.
                std::thread::sleep(Duration::from_millis(30));
            }
            let set = hvd.add_process_set(&[Rank::new(step % 2)]).unwrap();
            assert_eq!(set.is_some(), hvd.rank().get() == step % 2);
            for handle in handles {
                assert_eq!(handle.synchronize().unwrap().as_slice::<f32>().unwrap()[..2], [2.0; 2]);
            }
        }
    });
}

#[test]
fn process_sets_have_ranks_and_names_of_their_own() {
    ranks(4, Fabric::SharedMemory, &Options::default(), |hvd| {
        let even = hvd.add_process_set(&[Rank::new(0), Rank::new(2)]).unwrap();
        let odd = hvd.add_process_set(&[Rank::new(3), Rank::new(1)]).unwrap();
        assert_eq!(even.is_some(), hvd.rank().get() % 2 == 0);
        let set = even.or(odd).unwrap();
        assert_eq!((set.size(), set.rank().get()), (2, hvd.rank().get() / 2));
        let here = set.allreduce_async("x", [hvd.rank().get() as i32], Op::Sum).unwrap();
        let everywhere = hvd.allreduce_async("x", [hvd.rank().get() as i32], Op::Sum).unwrap();
        let expected = if hvd.rank().get() % 2 == 0 { 2 } else { 4 };
        assert_eq!(here.synchronize().unwrap().as_slice::<i32>().unwrap(), [expected]);
        assert_eq!(everywhere.synchronize().unwrap().as_slice::<i32>().unwrap(), [6]);
        set.barrier().unwrap();
    });
}

#[test]
fn hosts_are_what_the_group_was_told_that_they_are() {
    let places = ranks(3, Fabric::TwoHosts, &Options::default(), |hvd| {
        let place = |hvd: &Horovod| {
            let (local, cross) = ((hvd.local_rank(), hvd.local_size()), (hvd.cross_rank(), hvd.cross_size()));
            (local, cross, hvd.is_homogeneous())
        };
        let set = hvd.add_process_set(&[Rank::new(1), Rank::new(2)]).unwrap();
        (place(hvd), set.as_ref().map(place))
    });
    let apart = |host| Some(((0, 1), (host, 2), true));
    assert_eq!(
        places,
        [
            (((0, 2), (0, 2), false), None),
            (((1, 2), (0, 1), false), apart(0)),
            (((0, 1), (1, 2), false), apart(1)),
        ]
    );
}

#[test]
fn values_parameters_and_sparse_gradients() {
    ranks(3, Fabric::Tcp, &Options { fusion_threshold: 100, ..Options::default() }, |hvd| {
        let rank = hvd.rank().get();
        let mine = vec![format!("rank {rank}"); rank as usize];
        let value = hvd.broadcast_object("o", (rank == 2).then_some(&mine), Rank::new(2)).unwrap();
        assert_eq!(value, ["rank 2", "rank 2"]);
        let all = hvd.allgather_object("all", &mine).unwrap();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(hvd.broadcast_object::<u8>("o", None, Rank::new(3)).is_err());

        let mut parameters: Vec<Vec<f32>> =
            (0..5).map(|index| vec![rank as f32 + index as f32; 20]).collect();
        let names: Vec<String> = (0..5).map(|index| format!("layer.{index}")).collect();
        let named = names.iter().map(String::as_str).zip(parameters.iter_mut().map(Vec::as_mut_slice));
        hvd.broadcast_parameters(named, Rank::new(1)).unwrap();
        for (index, parameter) in parameters.iter().enumerate() {
            assert_eq!(*parameter, [1.0 + index as f32; 20]);
        }

        let count = rank as usize + 1;
        let values = Tensor::from(vec![3.0 * count as f32; 2 * count]).reshaped([count, 2]).unwrap();
        let gradient = SparseGradient { indices: vec![i64::from(rank) * 1000; count], values };
        let all = hvd.allreduce_sparse("embedding", gradient, Op::Average).unwrap();
        assert_eq!(all.indices, [0, 1000, 1000, 2000, 2000, 2000]);
        assert_eq!(all.values.shape(), [6, 2]);
        assert_eq!(all.values.as_slice::<f32>().unwrap()[..4], [1.0, 1.0, 2.0, 2.0]);
        let wrong = SparseGradient { indices: vec![1], values: Tensor::from([1.0f32, 2.0]) };
        assert!(hvd.allreduce_sparse("wrong", wrong, Op::Sum).unwrap_err().is_invalid_argument());
    });
}

#[test]
fn ranks_that_make_different_things_of_sparse_gradients_are_told_both() {
    ranks(2, Fabric::InProcess, &Options::default(), |hvd| {
        let is_main = hvd.rank().is_main();
        let gradient = || {
            let values = Tensor::from([1.0f32, 3.0]).reshaped([1, 2]).unwrap();
            SparseGradient { indices: vec![7], values }
        };
        let op = if is_main { Op::Sum } else { Op::Average };
        let error = hvd.allreduce_sparse("embedding", gradient(), op).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        for side in [
            "rank 0 submits allgather of sum of sparse tensors",
            "rank 1 allgather of average of sparse tensors",
        ] {
            assert!(error.to_string().contains(side), "{error}");
        }
        // Nor do they meet a gather of as many rows.
        let outcome = if is_main {
            hvd.allreduce_sparse("embedding", gradient(), Op::Sum).map(drop)
        } else {
            let SparseGradient { indices, values } = gradient();
            hvd.grouped_allgather("embedding", vec![indices.into(), values]).map(drop)
        };
        assert!(outcome.unwrap_err().is_mismatch());
        let all = hvd.allreduce_sparse("embedding", gradient(), Op::Average).unwrap();
        assert_eq!(all.values.as_slice::<f32>().unwrap(), [0.5, 1.5, 0.5, 1.5]);
    });
}

/// More than fit into one batch, so that a rank waits for some before it submits the others.
#[test]
fn parameters_come_in_any_order() {
    let options = Options {
        fusion_threshold: 100,
        stall_shutdown_time: Some(Duration::from_secs(20)),
        ..Options::default()
    };
    ranks(2, Fabric::InProcess, &options, |hvd| {
        let rank = hvd.rank().get();
        let mut parameters: Vec<(String, Vec<f32>)> =
            (0..6).map(|index| (format!("layer.{index}"), vec![rank as f32 + index as f32; 20])).collect();
        if !hvd.rank().is_main() {
            parameters.reverse();
        }
        let named = parameters.iter_mut().map(|(name, values)| (name.as_str(), values.as_mut_slice()));
        hvd.broadcast_parameters(named, Rank::new(1)).unwrap();
        parameters.sort_by(|one, other| one.0.cmp(&other.0));
        for (index, (_, values)) in parameters.iter().enumerate() {
            assert_eq!(*values, [1.0 + index as f32; 20]);
        }
    });
}

/// Ranks whose parameters have other lengths divide them into other batches.
#[test]
fn parameters_behind_one_that_differs_are_not_left_in_flight() {
    let options = Options {
        fusion_threshold: 100,
        stall_shutdown_time: Some(Duration::from_secs(20)),
        ..Options::default()
    };
    ranks(2, Fabric::InProcess, &options, |hvd| {
        let rank = hvd.rank().index();
        let broadcast = |first: usize| {
            let mut parameters =
                [("a", first), ("b", 20), ("c", 20)].map(|(name, length)| (name, vec![rank as f32; length]));
            let named = parameters.iter_mut().map(|(name, values)| (*name, values.as_mut_slice()));
            hvd.broadcast_parameters(named, Rank::new(1)).map(|()| parameters)
        };
        // Rank 0 submits a and b together, and rank 1 each by itself.
        let error = broadcast(5 * (rank + 1)).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("broadcast.a"), "{error}");
        let parameters = broadcast(5).unwrap();
        assert!(parameters.iter().all(|(_, values)| values.iter().all(|value| *value == 1.0)));
    });
}

#[test]
fn the_timeline_has_the_negotiation_and_the_operation_of_every_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    let options = Options { timeline: Some(path.clone()), ..Options::default() };
    ranks(2, Fabric::SharedMemory, &options, |hvd| {
        for _ in 0..3 {
            let names = ["weight", "bias"];
            let handles = names.map(|name| hvd.allreduce_async(name, [1.0f32; 8], Op::Sum).unwrap());
            handles.into_iter().for_each(|handle| drop(handle.synchronize().unwrap()));
        }
    });
    let text = std::fs::read_to_string(&path).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = file["traceEvents"].as_array().or(file.as_array()).unwrap();
    for rank in [0, 1] {
        let count =
            |name: &str| events.iter().filter(|event| event["name"] == name && event["pid"] == rank).count();
        for name in ["negotiate weight", "carry out weight", "negotiate bias", "carry out bias"] {
            assert_eq!(count(name), 3, "{name} on rank {rank}");
        }
        assert!(count("round") >= 1);
    }
}

#[test]
fn texts_about_a_process_set_say_whose_numbers_its_ranks_have() {
    ranks(3, Fabric::SharedMemory, &Options::default(), |hvd| {
        let rank = hvd.rank().index();
        let differ = |hvd: &Horovod, name: &str| {
            hvd.allreduce(name, vec![1.0f32; rank + 1], Op::Sum).unwrap_err().to_string()
        };
        let of_all = differ(hvd, "of all");
        assert!(of_all.contains("rank 0 submits") && !of_all.contains("global"), "{of_all}");
        let first = hvd.add_process_set(&[Rank::MAIN, Rank::new(1)]).unwrap();
        let last = hvd.add_process_set(&[Rank::new(1), Rank::new(2)]).unwrap();
        let numbered = "(ranks are numbered among global ranks 1, 2)";
        if let Some(first) = &first {
            let error = differ(first, "of the first");
            assert!(!error.contains("global"), "the numbers are the same: {error}");
        }
        if let Some(last) = &last {
            let error = differ(last, "of the last");
            assert!(error.contains("f32 [3] ") && error.contains(numbered), "{error}");
            if last.rank().is_main() {
                last.shutdown();
            } else {
                let error = last.allreduce("alone", [1.0f32], Op::Sum).unwrap_err().to_string();
                let expected = format!("rank 0 has shut Horovod down {numbered}");
                assert!(error.contains(&expected), "{error}");
            }
        }
        // Nobody leaves the other set before all are done with it.
        hvd.barrier().unwrap();
    });
}

#[test]
fn a_process_set_ends_apart_from_the_others() {
    ranks(3, Fabric::SharedMemory, &Options::default(), |hvd| {
        let members = [Rank::MAIN, Rank::new(2)];
        let set = hvd.add_process_set(&members).unwrap();
        let kept = set.clone();
        if let Some(set) = &set {
            assert!(set.is_initialized());
            assert_eq!(set.allreduce("x", [1.0f32], Op::Sum).unwrap().as_slice::<f32>().unwrap(), [2.0]);
        }
        hvd.remove_process_set(set).unwrap();
        if let Some(kept) = kept {
            assert!(!kept.is_initialized());
            assert!(
                kept.allreduce("x", [1.0f32], Op::Sum).unwrap_err().to_string().contains("shut Horovod down")
            );
        }
        assert_eq!(hvd.allreduce("x", [1.0f32], Op::Sum).unwrap().as_slice::<f32>().unwrap(), [3.0]);
        assert!(hvd.is_initialized());
    });
}

#[test]
fn who_has_joined_submits_nothing() {
    // When all have joined, names are taken again. So rank 0 joins when rank 1 has been refused one.
    let is_refused = Barrier::new(2);
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        if hvd.rank().is_main() {
            is_refused.wait();
            hvd.join().unwrap();
            return;
        }
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| hvd.join().unwrap());
            // Before the join comes, names are taken, and dropped handles hold up nobody.
            let refused = (0..).find_map(|index| {
                std::thread::sleep(Duration::from_millis(1));
                hvd.allreduce_async(&format!("late {index}"), [1.0f32], Op::Sum).map(drop).err()
            });
            is_refused.wait();
            let refused = refused.unwrap().to_string();
            assert!(refused.contains("while this rank waits in join"), "{refused}");
            joining.join().unwrap();
        });
    });
}

#[test]
fn a_timeline_begins_and_ends_when_the_program_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        let submit = |name: &str| drop(hvd.allreduce(name, [1.0f32; 4], Op::Sum).unwrap());
        submit("before");
        for number in ["1", "2"] {
            hvd.start_timeline(path(number)).unwrap();
            submit(&format!("during {number}"));
        }
        hvd.stop_timeline().unwrap();
        submit("after");
        hvd.barrier().unwrap();
    });
    for number in ["1", "2"] {
        let text = std::fs::read_to_string(path(number)).unwrap();
        assert!(text.contains(&format!("carry out during {number}")), "{text}");
        for other in ["before", "after", if number == "1" { "during 2" } else { "during 1" }] {
            assert!(!text.contains(other), "{number} has {other}");
        }
    }
}
