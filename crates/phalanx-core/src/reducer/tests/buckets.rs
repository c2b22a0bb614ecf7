//! Which averages are taken, in which order, and what a trace shows of them.

use std::path::Path;

use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_of_gradients_on_any_rank_gives_the_average_in_the_same_order_of_buckets(
        sizes in prop::collection::vec(0usize..20, 1..12),
        ranks in 1u32..5,
        cap in 1usize..40,
        shuffles in prop::collection::vec(any::<prop::sample::Selector>(), 15),
    ) {
        let launches = run(ranks, |group| {
            let rank = group.rank();
            let mut reducer = Reducer::new(group.clone(), parameters(&sizes), buckets_of(cap)).unwrap();
            let mut buckets = vec![reducer.bucket_bytes()];
            for step in 0..3 {
                let mut left: Vec<usize> = (0..sizes.len()).collect();
                let mut order = Vec::new();
                while !left.is_empty() {
                    let next = *shuffles[rank.index() * 3 + step].select(&left);
                    left.retain(|&index| index != next);
                    order.push(next);
                }
                one_step(&mut reducer, rank, step, &order).unwrap();
                for (index, &size) in sizes.iter().enumerate() {
                    assert_eq!(floats(&reducer, index), expected(ranks, index, step, size));
                }
                buckets.push(reducer.bucket_bytes());
            }
            assert_eq!(buckets[2], buckets[3], "rebuilt once");
            let expected: Vec<usize> = buckets[1..].concat();
            let launched: Vec<usize> = averages(&group).iter().map(|call| call.elements * 4).collect();
            assert_eq!(launched, if ranks == 1 { Vec::new() } else { expected });
            group.calls()
        });
        prop_assert!(launches.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn buckets_are_rebuilt_once_in_the_order_of_rank_0_and_their_memory_is_kept() {
    let allocations = run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[1, 2, 3, 4]), buckets_of(5)).unwrap();
        assert_eq!(reducer.bucket_bytes(), [16, 20, 4]);
        let order = if rank.is_main() { [0, 1, 2, 3] } else { [3, 2, 1, 0] };
        let mut allocations = Vec::new();
        for step in 0..20 {
            one_step(&mut reducer, rank, step, &order).unwrap();
            allocations.push(group.allocations());
        }
        assert_eq!(reducer.bucket_bytes(), [12, 12, 16]);
        allocations
    });
    for allocations in allocations {
        // Three buckets and the order that rank 0 sends.
        assert_eq!(allocations[1] - allocations[0], 4);
        assert!(allocations[1..].windows(2).all(|pair| pair[0] == pair[1]), "{allocations:?}");
    }
}

#[test]
fn buckets_leave_while_backward_still_runs() {
    let group = FakeGroup::world(2).swap_remove(0);
    let plan = parameters(&[8, 8, 8]);
    // The second rank never answers, which only a wait would notice.
    let mut reducer = without_verification(group.clone(), plan, buckets_of(8));
    reducer.start().unwrap();
    give(&mut reducer, Rank::MAIN, 0, &[1]).unwrap();
    assert_eq!(averages(&group).len(), 0, "the plan's first bucket holds parameter 2");
    give(&mut reducer, Rank::MAIN, 0, &[2]).unwrap();
    assert_eq!(averages(&group).len(), 2);
}

#[test]
fn types_travel_apart_and_each_is_averaged() {
    use half::f16;
    run(2, |group| {
        let spec = |name: &str, dtype| ParameterSpec::new(name, [3], dtype);
        let specs =
            vec![spec("a", DType::F32), spec("b", DType::F16), spec("c", DType::F64), spec("d", DType::F32)];
        let value = group.rank().index() as f32 + 1.0;
        let mut reducer = Reducer::new(group, specs, ReducerOptions::default()).unwrap();
        assert_eq!(reducer.bucket_bytes().len(), 3);
        for _ in 0..3 {
            reducer.start().unwrap();
            reducer.ready(0, bytemuck::bytes_of(&[value; 3])).unwrap();
            reducer.ready(1, bytemuck::bytes_of(&[f16::from_f32(value); 3])).unwrap();
            reducer.ready(2, bytemuck::bytes_of(&[f64::from(value); 3])).unwrap();
            reducer
                .ready_with(3, |memory| {
                    memory.copy_from_slice(bytemuck::bytes_of(&[2.0 * value; 3]));
                    Ok(())
                })
                .unwrap();
            reducer.finish().unwrap();
            assert_eq!(floats(&reducer, 0), [1.5; 3]);
            assert_eq!(reducer.gradient(1).unwrap().unwrap(), bytemuck::bytes_of(&[f16::from_f32(1.5); 3]));
            assert_eq!(reducer.gradient(2).unwrap().unwrap(), bytemuck::bytes_of(&[1.5f64; 3]));
            assert_eq!(floats(&reducer, 3), [3.0; 3]);
        }
    });
}

#[test]
fn a_trace_shows_each_bucket_and_backward() {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: u32| folder.path().join(format!("{rank}.json"));
    run(2, |group| {
        let rank = group.rank();
        let group = group.traced(Trace::to_file(path(rank.get()), rank));
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(4)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
    });
    for rank in 0..2 {
        check_trace(&path(rank));
    }
}

fn check_trace(path: &Path) {
    let document: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let find = |name: &str, bucket: Option<u64>| {
        let is_it =
            |event: &&serde_json::Value| event["name"] == name && event["args"]["bucket"].as_u64() == bucket;
        events.iter().find(is_it).unwrap_or_else(|| panic!("{name} of bucket {bucket:?} is missing"))
    };
    let time = |event: &serde_json::Value| event["ts"].as_f64().unwrap();
    let backward = find("backward", None);
    for bucket in [Some(0), Some(1)] {
        let all_reduce = find("all_reduce", bucket);
        assert!(time(backward) <= time(find("ready", bucket)));
        assert!(time(find("ready", bucket)) <= time(all_reduce));
        assert_eq!(time(find("launched", bucket)), time(all_reduce));
        assert_eq!(all_reduce["args"]["bytes"], 16);
        assert_eq!(all_reduce["args"]["parameters"], 1);
    }
    find("wait for gradients", None);
}
