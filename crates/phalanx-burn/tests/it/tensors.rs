//! Collectives on tensors, against what each rank can work out by itself.

use crate::common::{Mlp, device, everywhere, plain, samples};
use burn::optim::SgdConfig;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, FloatDType, Int, IntDType, Tensor, TensorData};
use phalanx::join::JoinOptions;
use phalanx::{Rank, ReduceOp};
use phalanx_burn::{Collectives, Ddp};

fn floats<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

#[test]
fn floats_of_every_type_and_rank_are_combined_and_keep_shape_and_type() {
    everywhere(|group| {
        let (rank, world) = (group.rank().index() as f32, group.world_size().count() as f32);
        let dtypes = [FloatDType::F64, FloatDType::F32, FloatDType::F16, FloatDType::BF16];
        for dtype in dtypes.into_iter().filter(|dtype| plain().supports_dtype(*dtype)) {
            let own = Tensor::<3>::full([2, 3, 4], rank + 1.0, &plain()).cast(dtype);
            let sum = own.clone().all_reduce(&group, ReduceOp::Sum).unwrap();
            assert_eq!((sum.dims(), sum.dtype()), ([2, 3, 4], dtype.into()));
            assert_eq!(floats(sum), [f64::from(world * (world + 1.0) / 2.0); 24]);
            let last = own.clone().all_reduce(&group, ReduceOp::Max).unwrap();
            assert_eq!(floats(last), [f64::from(world); 24]);
            let average = own.all_reduce(&group, ReduceOp::Avg).unwrap();
            assert_eq!(floats(average), [f64::from((world + 1.0) / 2.0); 24]);
        }
        let one = Tensor::<1>::full([1], rank, &plain());
        assert_eq!(floats(one.all_reduce(&group, ReduceOp::Min).unwrap()), [0.0]);
        let none = Tensor::<2>::empty([0, 3], &plain());
        assert_eq!(none.all_reduce(&group, ReduceOp::Sum).unwrap().dims(), [0, 3]);
    });
}

#[test]
fn integers_and_truth_values_are_combined_and_what_has_no_sum_is_refused() {
    everywhere(|group| {
        let (rank, world) = (group.rank().index() as i64, group.world_size().count() as i64);
        let dtypes = [IntDType::I64, IntDType::I32, IntDType::I8, IntDType::U8];
        for dtype in dtypes.into_iter().filter(|dtype| plain().supports_dtype(*dtype)) {
            let own = Tensor::<2, Int>::full([3, 2], rank + 1, &plain()).cast(dtype);
            let sum = own.clone().all_reduce(&group, ReduceOp::Sum).unwrap();
            assert_eq!((sum.dims(), sum.dtype()), ([3, 2], dtype.into()));
            assert_eq!(floats(sum), [(world * (world + 1) / 2) as f64; 6]);
            if dtype != IntDType::U8 {
                // Signed: a byte that passed for unsigned would be the largest.
                let least = own.neg().all_reduce(&group, ReduceOp::Min).unwrap();
                assert_eq!(floats(least), [-world as f64; 6]);
            }
        }
        for dtype in [IntDType::U64, IntDType::U32].into_iter().filter(|dtype| plain().supports_dtype(*dtype))
        {
            let own = Tensor::<1, Int>::full([3], rank, &plain()).cast(dtype);
            let error = own.clone().all_reduce(&group, ReduceOp::Max).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains("cast"), "{error}");
            let gathered = own.all_gather(&group).unwrap();
            assert_eq!((gathered.dims(), gathered.dtype()), ([3 * world as usize], dtype.into()));
        }
        let data = TensorData::from([[rank == 0, true], [false, rank != 0]]);
        let own = Tensor::<2, Bool>::from_data(data, &plain());
        let any = own.clone().all_reduce(&group, ReduceOp::Max).unwrap();
        assert!(matches!(any.dtype(), DType::Bool(_)));
        assert_eq!(any.into_data().iter::<bool>().collect::<Vec<_>>(), [true, true, false, true]);
        let all = own.clone().all_reduce(&group, ReduceOp::Min).unwrap();
        assert_eq!(all.into_data().iter::<bool>().collect::<Vec<_>>(), [false, true, false, false]);
        assert!(own.all_reduce(&group, ReduceOp::Avg).unwrap_err().is_invalid_argument());
    });
}

#[test]
fn tensors_are_broadcast_gathered_reduced_and_scattered() {
    everywhere(|group| {
        let (rank, world) = (group.rank().index(), group.world_size().count());
        let last = Rank::new(world as u32 - 1);
        let device = plain();
        let own = Tensor::<2>::full([world, 2], rank as f32, &device);

        // A view that is not in a row, and memory that is shared with it.
        let wide = Tensor::<2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device) * rank as f32;
        let columns = wide.clone().transpose().broadcast(&group, Rank::new(1)).unwrap();
        assert_eq!((columns.dims(), floats(columns)), ([3, 2], vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        assert_eq!(floats(wide.slice([0..1, 0..1])), [rank as f64]);

        let expected: Vec<f64> = (0..world).flat_map(|rank| vec![rank as f64; 2 * world]).collect();
        let gathered = own.clone().all_gather(&group).unwrap();
        assert_eq!((gathered.dims(), floats(gathered)), ([world * world, 2], expected));

        // As many rows as the rank's number: rank 0 has none.
        let rows = Tensor::<3, Int>::full([rank, 1, 2], rank as i64, &device).all_gather(&group).unwrap();
        let expected: Vec<f64> = (0..world).flat_map(|rank| vec![rank as f64; 2 * rank]).collect();
        assert_eq!((rows.dims(), floats(rows)), ([world * (world - 1) / 2, 1, 2], expected));

        let sum = (world * (world - 1) / 2) as f64;
        let reduced = own.clone().reduce(&group, last, ReduceOp::Sum).unwrap();
        assert_eq!(reduced.is_some(), group.rank() == last);
        reduced.into_iter().for_each(|reduced| assert_eq!(floats(reduced), vec![sum; 2 * world]));

        let ramp = Tensor::<1, Int>::arange(0..2 * world as i64, &device).float().reshape([world, 2]);
        let part = ramp.clone().reduce_scatter(&group, ReduceOp::Sum).unwrap();
        let expected = [2 * rank, 2 * rank + 1].map(|value| (value * world) as f64).to_vec();
        assert_eq!((part.dims(), floats(part)), ([1, 2], expected));
        let odd = Tensor::<2>::zeros([world + 1, 2], &device);
        assert!(odd.reduce_scatter(&group, ReduceOp::Sum).unwrap_err().is_invalid_argument());
    });
}

#[test]
fn shapes_that_do_not_fit_are_an_error_that_names_the_rank() {
    everywhere(|group| {
        let width = 2 + group.rank().index() / (group.world_size().count() - 1);
        let error = Tensor::<2>::zeros([4, width], &plain()).all_gather(&group).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("[4, 3]"), "{error}");
    });
}

#[test]
fn element_types_that_differ_are_an_error_and_nothing_is_reinterpreted() {
    everywhere(|group| {
        let device = plain();
        let dtype = if group.rank().is_main() { IntDType::U32 } else { IntDType::I32 };
        let error = Tensor::<1, Int>::ones([2], &device).cast(dtype).all_gather(&group).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("type"), "{error}");
    });
}

/// Needs a device with integers of a byte: WGSL has none.
#[test]
fn bytes_of_other_types_are_an_error_and_nothing_is_reinterpreted() {
    everywhere(|group| {
        let device = plain();
        let error = match group.rank().is_main() {
            true => Tensor::<1, Bool>::from_data([true, false], &device).all_gather(&group).unwrap_err(),
            false => Tensor::<1, Int>::ones([2], &device).cast(IntDType::U8).all_gather(&group).unwrap_err(),
        };
        assert!(error.is_mismatch() && error.to_string().contains("type"), "{error}");
    });
    everywhere(|group| {
        let dtype = if group.rank().is_main() { IntDType::I8 } else { IntDType::U8 };
        let own = Tensor::<1, Int>::ones([2], &plain()).cast(dtype);
        // The root only sends, and may be through before anybody has looked.
        let outcome = own.broadcast(&group, Rank::MAIN);
        if let Ok(sent) = outcome {
            assert!(group.rank().is_main(), "{sent:?}");
            // Then its leaving tells, but between threads.
            let left = group.leave();
            assert!(left.as_ref().err().is_none_or(phalanx::Error::is_mismatch), "{left:?}");
        }
    });
}

#[test]
fn more_rows_than_memory_are_an_error() {
    everywhere(|group| {
        let error = match group.rank().is_main() {
            // What a rank says that brings as many rows as there are numbers.
            true => {
                let mut layouts = vec![0; 5 * group.world_size().count()];
                // Another rank may have ended the group already.
                let _told = group.all_gather(&[1_i64, 0, 0, i64::MAX, 2], &mut layouts);
                return;
            }
            false => Tensor::<2>::zeros([1, 2], &plain()).all_gather(&group).unwrap_err(),
        };
        assert!(error.to_string().contains("memory"), "{error}");
        assert!(group.failure().is_some(), "ranks with more memory would wait");
    });
}

#[test]
fn the_result_of_a_detached_tensor_is_part_of_no_graph_and_stays_on_its_device() {
    everywhere(|group| {
        let weight = Tensor::<1>::ones([2], &device()).require_grad();
        let product = weight.clone() * 3.0;
        let sum = product.clone().detach().all_reduce(&group, ReduceOp::Sum).unwrap();
        assert!(sum.device() == device() && !sum.is_tracked());
        let gradients = (product * sum).sum().backward();
        // That of the factor alone: the sum counts as a constant.
        let expected = 9.0 * group.world_size().count() as f64;
        assert_eq!(floats(weight.grad(&gradients).unwrap()), [expected; 2]);
    });
}

#[test]
fn losses_and_counts_of_all_ranks_become_one_number() {
    everywhere(|group| {
        let (rank, world) = (group.rank().index(), group.world_size().count());
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let loss = Tensor::<1>::full([1], rank as f32 + 0.5, &device());
        assert_eq!(ddp.mean(&loss).unwrap(), world as f64 / 2.0);
        assert_eq!(ddp.mean(loss.clone().detach().inner()).unwrap(), world as f64 / 2.0);
        assert_eq!(ddp.mean(rank as f32).unwrap(), (world - 1) as f64 / 2.0);
        assert_eq!(ddp.sum(rank).unwrap(), (world * (world - 1) / 2) as f64);
        assert!(ddp.mean(Tensor::<1>::zeros([2], &device())).unwrap_err().is_invalid_argument());

        // Where ranks have run out of data, the mean is that of the others.
        let mut optimizer = SgdConfig::new().init();
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..=rank {
                let loss = ddp.forward(|model| model.loss(samples(step, step + 2)))?;
                let with_data: Vec<usize> = (step..world).collect();
                let expected = with_data.iter().sum::<usize>() as f64 / with_data.len() as f64;
                assert_eq!(ddp.mean(rank)?, expected);
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, 0.1, gradients)?;
            }
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_mean_does_not_count_a_rank_that_is_done_behind_its_last_step() {
    everywhere(|group| {
        let rank = group.rank().index();
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
            for step in 0..=rank {
                // Before the step, which tells that another rank has no data for it.
                assert_eq!((ddp.mean(3.0f64)?, ddp.mean(-1i32)?), (3.0, -1.0));
                let loss = ddp.forward(|model| model.loss(samples(step, step + 2)))?;
                let gradients = ddp.backward(&loss)?;
                ddp.step(optimizer, 0.1, gradients)?;
            }
            Ok(())
        })
        .unwrap();
    });
}
