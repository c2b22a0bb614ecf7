//! What each collective computes.

use std::sync::Barrier;
use std::time::Duration;

use half::{bf16, f16};
use phalanx::testing::Fabric;
use phalanx::{Caller, DType, Element, Rank};
use phalanx_horovod::{Compression, Horovod, Op, Options, Reduction, Tensor};

use super::ranks;

/// Elements 1, 2, 3, ... times the rank plus one.
fn elements<T: Element>(length: usize, rank: usize, of: impl Fn(i64) -> T) -> Vec<T> {
    (0..length as i64).map(|index| of((index % 3 + 1) * (rank as i64 + 1))).collect()
}

fn check<T: Element + PartialEq + std::fmt::Debug>(hvd: &Horovod, of: impl Fn(i64) -> T + Copy) {
    let (rank, size, length) = (hvd.rank().index(), hvd.size() as i64, 37);
    let sum = (1..=size).sum::<i64>();
    let product: i64 = (1..=size).product();
    for (op, all) in [(Op::Sum, sum), (Op::Min, 1), (Op::Max, size)] {
        let name = format!("{op} {}", T::DTYPE);
        let result = hvd.allreduce(&name, elements(length, rank, of), op).unwrap();
        let expected: Vec<T> = (0..length as i64).map(|index| of((index % 3 + 1) * all)).collect();
        assert_eq!(result.as_slice::<T>().unwrap(), expected, "{name}");
    }
    let result = hvd.allreduce("product", [of(rank as i64 + 1); 5], Op::Product).unwrap();
    assert_eq!(result.as_slice::<T>().unwrap(), [of(product); 5]);
}

#[test]
fn every_operation_on_every_type_over_every_transport() {
    for (world, fabric) in [2, 3].into_iter().flat_map(|world| Fabric::ALL.map(|fabric| (world, fabric))) {
        ranks(world, fabric, &Options::default(), |hvd| {
            check::<f32>(hvd, |value| value as f32);
            check::<f64>(hvd, |value| value as f64);
            check::<f16>(hvd, |value| f16::from_f32(value as f32));
            check::<bf16>(hvd, |value| bf16::from_f32(value as f32));
            check::<i32>(hvd, |value| value as i32);
            check::<i64>(hvd, |value| value);
            check::<u8>(hvd, |value| value as u8);
            check::<i8>(hvd, |value| value as i8);
            let mean = hvd.average("mean", f64::from(hvd.rank().get())).unwrap();
            assert_eq!(mean, f64::from(hvd.size() - 1) / 2.0);
        });
    }
}

#[test]
fn tensors_that_ranks_submit_in_other_orders_are_reduced_and_fused() {
    const TENSORS: usize = 60;
    let results = ranks(3, Fabric::SharedMemory, &Options::default(), |hvd| {
        let rank = hvd.rank().index();
        let mut last = Vec::new();
        for step in 0..4 {
            let order = |index: usize| (index * 7 + step * 11 + rank * 23) % TENSORS;
            let submit = |tensor: usize| {
                let data = vec![(tensor + step) as f32 * 0.1 + rank as f32; 10 + tensor];
                (tensor, hvd.allreduce_async(&format!("t{tensor}"), data, Op::Average).unwrap())
            };
            let handles: Vec<_> = (0..TENSORS).map(|index| submit(order(index))).collect();
            last.clear();
            for (tensor, handle) in handles {
                let result = handle.synchronize().unwrap();
                let expected = (tensor + step) as f32 * 0.1 + 1.0;
                assert!(
                    result.as_slice::<f32>().unwrap().iter().all(|value| (value - expected).abs() < 1e-5)
                );
                assert_eq!(result.shape(), [10 + tensor]);
                last.push((tensor, result.as_slice::<f32>().unwrap().to_vec()));
            }
            last.sort_by_key(|(tensor, _)| *tensor);
        }
        let stats = hvd.stats();
        assert!(stats.batches < stats.names / 2, "{stats:?}");
        last
    });
    assert!(results.iter().all(|result| *result == results[0]), "the same bits on every rank");
}

#[test]
fn a_wait_without_end_waits_for_the_end_of_the_operation() {
    ranks(2, Fabric::InProcess, &Options::default(), |hvd| {
        if hvd.rank().is_main() {
            let handle = hvd.allreduce_async("x", [1.0f32], Op::Sum).unwrap();
            hvd.allreduce("ready", [1.0f32], Op::Sum).unwrap();
            assert!(handle.wait_for(Duration::MAX));
            assert_eq!(handle.synchronize().unwrap().as_slice::<f32>().unwrap(), [2.0]);
        } else {
            hvd.allreduce("ready", [1.0f32], Op::Sum).unwrap();
            hvd.allreduce("x", [1.0f32], Op::Sum).unwrap();
        }
    });
}

#[test]
fn in_the_steady_state_no_name_is_on_the_wire() {
    // A rank that leaves says so in a round: none does before both have looked.
    static LOOKED: Barrier = Barrier::new(2);
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        let step = || {
            let names = (0..20).map(|tensor| format!("t{tensor}"));
            let handles: Vec<_> =
                names.map(|name| hvd.allreduce_async(&name, [1.0f32; 8], Op::Sum).unwrap()).collect();
            handles.into_iter().for_each(|handle| drop(handle.synchronize().unwrap()));
        };
        step();
        let rounds = hvd.stats().rounds;
        (0..10).for_each(|_| step());
        let after = hvd.stats().rounds;
        LOOKED.wait();
        assert_eq!(after, rounds);
    });
}

#[test]
fn while_nobody_waits_cycles_are_rare() {
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        hvd.barrier().unwrap();
        let (before, begun) = (hvd.stats().cycles, std::time::Instant::now());
        std::thread::sleep(Duration::from_millis(500));
        let cycles = hvd.stats().cycles - before;
        // It may have slept for longer.
        let passed = begun.elapsed().as_millis() as u64;
        assert!(cycles < passed * 2 / 5, "{cycles} cycles of 1 ms in {passed} ms without work");
        let sum = hvd.allreduce("after a pause", [1.0f32], Op::Sum).unwrap();
        assert_eq!(sum.item::<f32>().unwrap(), 2.0);
    });
}

#[test]
fn ranks_that_compute_are_not_interrupted_by_cycles_that_bring_nothing() {
    const TENSORS: u64 = 20;
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        hvd.barrier().unwrap();
        let (before, begun) = (hvd.stats().cycles, std::time::Instant::now());
        let handles: Vec<_> = (0..TENSORS)
            .map(|index| {
                std::thread::sleep(Duration::from_millis(15)); // a layer's backward pass
                hvd.allreduce_async(&format!("{index}"), [1.0f32], Op::Sum).unwrap()
            })
            .collect();
        handles.into_iter().for_each(|handle| drop(handle.synchronize().unwrap()));
        let cycles = hvd.stats().cycles - before;
        // One when a rank submits, and perhaps another when the other one does.
        // It may have taken longer, with cycles in which nobody did anything.
        let passed = begun.elapsed().as_millis() as u64;
        assert!(cycles < passed / 3, "{cycles} cycles of 1 ms for {TENSORS} tensors in {passed} ms");
    });
}

#[test]
fn memory_for_what_is_combined_where_it_is_is_shared_and_comes_back() {
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        let registered = |elements, reduction: Reduction| {
            hvd.alloc(DType::F32, elements, reduction).unwrap().is_registered()
        };
        let large = 1 << 18;
        assert!(registered(large, Op::Average.into()));
        assert!(!registered(large - 1, Op::Average.into()), "it passes through the fusion buffer");
        assert!(!registered(large, Op::Adasum.into()));
        assert!(!registered(large, Reduction::new(Op::Sum).compression(Compression::Fp16)));
        let mut tensor = Tensor::from(hvd.alloc(DType::F32, large, Op::Average).unwrap());
        let place = tensor.as_bytes().as_ptr();
        for step in 0..3 {
            tensor.as_mut_slice::<f32>().unwrap().fill((step + hvd.rank().get()) as f32);
            tensor = hvd.allreduce("t", tensor, Op::Average).unwrap();
            assert!(tensor.as_slice::<f32>().unwrap().iter().all(|value| *value == step as f32 + 0.5));
            assert_eq!(tensor.as_bytes().as_ptr(), place);
        }
    });
}

#[test]
fn memory_that_there_is_not_is_an_error() {
    for fabric in [Fabric::SharedMemory, Fabric::InProcess] {
        ranks(2, fabric, &Options::default(), |hvd| {
            for op in [Op::Sum, Op::Adasum] {
                let error = hvd.alloc(DType::F64, 1 << 50, op).unwrap_err();
                assert!(error.is_out_of_memory(), "{error}");
            }
        });
    }
}

#[test]
fn halves_on_the_way_factors_and_a_small_fusion_buffer() {
    let large = (3 << 20) / 4 + 5; // more than a piece of the fusion buffer, in floats
    for threshold in [0, 100, 64 << 20] {
        let options = Options { fusion_threshold: threshold, ..Options::default() };
        ranks(2, Fabric::SharedMemory, &options, |hvd| {
            let rank = hvd.rank().get() as f32;
            for (compression, exact) in
                [(Compression::None, 5.003), (Compression::Fp16, 5.0), (Compression::Bf16, 5.0)]
            {
                let reduction = Reduction::new(Op::Sum).prescale(2.0).postscale(0.5).compression(compression);
                let submit = |name: &str, length| {
                    hvd.allreduce_async(name, vec![2.0 + rank * 1.003f32; length], reduction)
                };
                let handles: Vec<_> = [("a", 10), ("b", 1), ("c", large)]
                    .map(|(name, length)| submit(name, length).unwrap())
                    .into();
                for (handle, length) in handles.into_iter().zip([10, 1, large]) {
                    let result = handle.synchronize().unwrap();
                    assert_eq!(result.len(), length);
                    let far =
                        result.as_slice::<f32>().unwrap().iter().find(|value| (**value - exact).abs() > 0.02);
                    assert_eq!(far, None, "{compression:?} {threshold}");
                }
            }
            let ints = Reduction::new(Op::Sum).compression(Compression::Fp16);
            let result = hvd.allreduce("ints", [100_000i64; 3], ints).unwrap();
            assert_eq!(result.as_slice::<i64>().unwrap(), [200_000; 3], "integers travel as they are");
        });
    }
}

#[test]
fn rows_are_gathered_exchanged_and_scattered() {
    for fabric in [Fabric::Tcp, Fabric::SharedMemory] {
        ranks(3, fabric, &Options::default(), |hvd| {
            let rank = hvd.rank().index();
            // Rank r brings r rows of two.
            for _ in 0..2 {
                let rows = Tensor::from(vec![rank as i32; 2 * rank]).reshaped([rank, 2]).unwrap();
                let all = hvd.allgather("rows", rows).unwrap();
                assert_eq!(
                    (all.shape(), all.as_slice::<i32>().unwrap()),
                    (&[3, 2][..], &[1, 1, 2, 2, 2, 2][..])
                );
            }
            // The number of rows changes, although the name is known.
            let all =
                hvd.allgather("rows", Tensor::from(vec![rank as i32; 2]).reshaped([1, 2]).unwrap()).unwrap();
            assert_eq!(all.as_slice::<i32>().unwrap(), [0, 0, 1, 1, 2, 2]);
            let copied = hvd.broadcast("b", [rank as f64, 0.5], Rank::new(2)).unwrap();
            assert_eq!(copied.as_slice::<f64>().unwrap(), [2.0, 0.5]);
            // Rank r sends one row to rank 0, none to rank 1, r rows to rank 2.
            let mine = vec![rank as u8; 1 + rank];
            let received = hvd.alltoall("a", mine, Some(&[1, 0, rank])).unwrap();
            let expected: (&[u8], &[usize]) = match rank {
                0 => (&[0, 1, 2], &[1, 1, 1]),
                1 => (&[], &[0, 0, 0]),
                _ => (&[1, 2, 2], &[0, 1, 2]),
            };
            assert_eq!((received.tensor.as_slice::<u8>().unwrap(), &received.splits[..]), expected);
            // Other splits of as many rows under a name that is known.
            for turn in 0..3 {
                let mut splits = [0usize; 3];
                splits[turn] = 2;
                let received = hvd.alltoall("turns", [rank as i64; 2], Some(&splits)).unwrap();
                let expected: &[i64] = if rank == turn { &[0, 0, 1, 1, 2, 2] } else { &[] };
                assert_eq!(received.tensor.as_slice::<i64>().unwrap(), expected);
            }
            let even = hvd.alltoall("even", [rank as f32; 6], None).unwrap();
            assert_eq!(even.tensor.as_slice::<f32>().unwrap(), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
            for splits in [vec![2], vec![2, 0, 0, 0], vec![1, 0, 0], vec![usize::MAX, 3, 0]] {
                let error = hvd.alltoall("refused", [0u8; 2], Some(&splits[..])).unwrap_err();
                assert!(
                    error.is_invalid_argument() && error.to_string().contains("do not divide 2 rows"),
                    "{error}"
                );
            }
            let scalar = hvd.alltoall("refused", 1.0f32, None).unwrap_err();
            assert!(scalar.to_string().contains("a scalar: it needs a first dimension"), "{scalar}");
            // Seven rows of two: three, two and two.
            let rows =
                Tensor::from((0..14).map(|index| index as f32).collect::<Vec<_>>()).reshaped([7, 2]).unwrap();
            let shard = hvd.reducescatter("s", rows, Op::Average).unwrap();
            let (start, rows) = [(0, 3), (6, 2), (10, 2)][rank];
            assert_eq!(shard.shape(), [rows, 2]);
            let expected: Vec<f32> = (start..start + 2 * rows).map(|index| index as f32).collect();
            assert_eq!(shard.as_slice::<f32>().unwrap(), expected);
            let group =
                vec![Tensor::from([1.0f32; 3]), Tensor::from([rank as i64; 2]), Tensor::scalar(2.0f32)];
            let group = hvd.grouped_allreduce("g", group, Op::Sum).unwrap();
            assert_eq!(group[0].as_slice::<f32>().unwrap(), [3.0; 3]);
            assert_eq!(group[1].as_slice::<i64>().unwrap(), [3; 2]);
            assert_eq!((group[2].item::<f32>().unwrap(), group[2].shape().len()), (6.0, 0));
            let empty = hvd.grouped_allreduce("nothing", Vec::new(), Op::Sum).unwrap();
            assert!(empty.is_empty());
            hvd.barrier().unwrap();
        });
    }
}

#[test]
fn types_that_travel_as_one_are_told_apart() {
    ranks(2, Fabric::InProcess, &Options::default(), |hvd| {
        let of = |caller| {
            let mut tensor = Tensor::from(vec![hvd.rank().get() as u8; 4]);
            tensor.stand_for(caller);
            tensor
        };
        let own = if hvd.rank().is_main() { Caller::TensorsOfInt16 } else { Caller::TensorsOfUint16 };
        let error = hvd.broadcast("differ", of(own), Rank::MAIN).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        for what in ["tensors of int16 (u8 [4])", "tensors of uint16 (u8 [4])"] {
            assert!(error.to_string().contains(what), "{error}");
        }
        let same = hvd.broadcast("agree", of(Caller::TensorsOfInt16), Rank::new(1)).unwrap();
        assert_eq!(same.as_slice::<u8>().unwrap(), [1; 4]);
    });
}

#[test]
fn factors_of_integers_that_an_adapter_scales_are_compared_and_not_applied() {
    ranks(2, Fabric::InProcess, &Options::default(), |hvd| {
        let scaled = || {
            let mut tensor = Tensor::from(vec![3i64; 4]);
            tensor.stand_for(Caller::ScaledIntegers);
            tensor
        };
        let half = Reduction::new(Op::Sum).prescale(0.5).postscale(0.5);
        let sum = hvd.allreduce("sum", scaled(), half).unwrap();
        assert_eq!(sum.as_slice::<i64>().unwrap(), [6; 4]);
        let group = hvd.grouped_allreduce("group", vec![scaled(), scaled()], half).unwrap();
        assert_eq!(group[1].as_slice::<i64>().unwrap(), [6; 4], "through the fusion buffer");
        let shard = hvd.reducescatter("shard", scaled(), half).unwrap();
        assert_eq!(shard.as_slice::<i64>().unwrap(), [6; 2]);
        let own = if hvd.rank().is_main() { half } else { half.postscale(1.0) };
        let error = hvd.allreduce("differ", scaled(), own).unwrap_err();
        let expected =
            "rank 0 submits allreduce(sum, prescale 0.5, postscale 0.5) of scaled integers (i64 [4])";
        assert!(error.is_mismatch() && error.to_string().contains(expected), "{error}");
        // Without an adapter nobody would apply them.
        let error = hvd.allreduce("plain", [3i64; 4], half).unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("prescale is not defined"),
            "{error}"
        );
    });
}

#[test]
fn adasum_over_four_ranks_is_the_same_on_all() {
    let results = ranks(4, Fabric::SharedMemory, &Options::default(), |hvd| {
        let rank = hvd.rank().get() as f32;
        let one = hvd.allreduce_async("parallel", [1.0f32, 2.0, 3.0], Op::Adasum).unwrap();
        let mut orthogonal = [0.0f32; 4];
        orthogonal[hvd.rank().index()] = 1.0 + rank;
        let two = hvd.allreduce_async("orthogonal", orthogonal, Op::Adasum).unwrap();
        let result = (one.synchronize().unwrap(), two.synchronize().unwrap());
        (result.0.as_slice::<f32>().unwrap().to_vec(), result.1.as_slice::<f32>().unwrap().to_vec())
    });
    for (parallel, orthogonal) in results {
        assert_eq!(parallel, [1.0, 2.0, 3.0]);
        assert_eq!(orthogonal, [1.0, 2.0, 3.0, 4.0]);
    }
    let refused = ranks(3, Fabric::InProcess, &Options::default(), |hvd| {
        hvd.allreduce("a", [1.0f32], Op::Adasum).unwrap_err().to_string()
    });
    assert!(refused[0].contains("3 ranks"), "{}", refused[0]);
}

#[test]
fn grouped_rows_are_scattered_while_others_are_in_flight() {
    ranks(2, Fabric::SharedMemory, &Options::default(), |hvd| {
        let rank = hvd.rank().get();
        let start = |name: &str| {
            let tensors = vec![Tensor::from([1.0f32, 2.0]), Tensor::from([3i64, 4, 5])];
            hvd.grouped_reducescatter_async(name, tensors, Op::Sum).unwrap()
        };
        let (one, other) = (start("one"), start("other"));
        for handle in [other, one] {
            let shards = handle.synchronize().unwrap();
            assert_eq!(shards[0].as_slice::<f32>().unwrap(), [2.0 + 2.0 * rank as f32]);
            let expected: &[i64] = if rank == 0 { &[6, 8] } else { &[10] };
            assert_eq!(shards[1].as_slice::<i64>().unwrap(), expected);
        }
    });
}
