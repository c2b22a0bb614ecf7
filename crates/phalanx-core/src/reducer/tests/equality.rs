//! What ranks compare and make equal before they average.

use super::*;

#[test]
fn different_models_and_options_are_named_on_every_rank() {
    let name = |rank: Rank| ParameterSpec::new("head.weight", [10, 4 + rank.index()], DType::F32);
    let failed = |make: &(dyn Fn(Rank) -> (Vec<ParameterSpec>, ReducerOptions) + Sync), parts: &[&str]| {
        let errors = run(3, |group| {
            let (parameters, options) = make(group.rank());
            Reducer::new(group, parameters, options).err().unwrap()
        });
        for error in errors {
            assert!(error.is_mismatch(), "{error}");
            let message = error.to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            assert!(message.contains("rank 0") && message.contains("rank 1"), "{message}");
        }
    };
    let options = ReducerOptions::default();
    failed(
        &|rank| ([parameters(&[3]), vec![name(rank)]].concat(), ReducerOptions::default()),
        &["parameter 1", "`head.weight` (f32 [10, 4])", "`head.weight` (f32 [10, 5])"],
    );
    let some_have_more = |rank: Rank| parameters(&[3, 4][..if rank.get() == 1 { 1 } else { 2 }]);
    failed(
        &|rank| (some_have_more(rank), options.clone()),
        &["`p1` (f32 [4])", "none (it has 1 parameters)"],
    );
    let none_on_one = |rank: Rank| if rank.get() == 1 { Vec::new() } else { parameters(&[3]) };
    failed(&|rank| (none_on_one(rank), options.clone()), &["none (it has 0 parameters)"]);
    let wide = |rank: Rank| if rank.is_main() { DType::F32 } else { DType::F64 };
    failed(&|rank| (vec![ParameterSpec::new("p", [1], wide(rank))], options.clone()), &["f32", "f64"]);
    failed(
        &|rank| (parameters(&[3]), options.clone().bucket_cap_mb(f64::from(rank.get().min(1)) + 1.0)),
        &["bucket_cap_mb", "is 1 on", "and 2 on"],
    );
}

#[test]
fn kinds_of_devices_that_differ_are_named_on_every_rank() {
    let errors = run(3, |group| {
        let device = if group.rank().get() == 2 { "wgpu" } else { "flex" };
        // What a device has another type for is not the cause that is named.
        let bool_size = if device == "flex" { DType::U8 } else { DType::I32 };
        let mask = vec![ParameterSpec::new("mask", [2], bool_size)];
        verify_state_on(&*group, device, mask, &[]).unwrap_err()
    });
    for error in errors {
        assert!(error.is_mismatch(), "{error}");
        assert!(error.to_string().contains("flex on rank 0 and wgpu on rank 2"), "{error}");
    }
    run(3, |group| verify_state_on(&*group, "flex", parameters(&[3]), &[]).unwrap());
}

#[test]
fn state_becomes_that_of_rank_0() {
    let sizes =
        [(DType::F32, 70_000_000), (DType::I64, 24), (DType::F32, 0), (DType::U8, 5), (DType::F32, 12)];
    let calls = run(2, |group| {
        let value = group.rank().get() as u8 + 1;
        let mut memory: Vec<Vec<u8>> = sizes.iter().map(|&(_, len)| vec![value; len]).collect();
        let types = sizes.iter().map(|&(dtype, _)| dtype);
        let mut tensors: Vec<_> =
            memory.iter_mut().zip(types).map(|(bytes, dtype)| StateTensor { dtype, bytes }).collect();
        broadcast_state(&*group, Rank::MAIN, &mut tensors).unwrap();
        assert!(memory.iter().flatten().all(|&byte| byte == 1));
        group.calls()
    });
    let largest = calls[0].iter().map(|call| call.elements * call.dtype.size()).max();
    assert_eq!(calls[0].len(), 5);
    assert_eq!(largest, Some(25 << 20));

    let errors = run(2, |group| {
        let mut bytes = vec![0; if group.rank().is_main() { 7 } else { 8 }];
        broadcast_state(&*group, Rank::MAIN, &mut [StateTensor { dtype: DType::F32, bytes: &mut bytes }])
            .unwrap_err()
    });
    assert!(errors.iter().all(Error::is_invalid_argument), "{errors:?}");
}

#[test]
fn a_rank_that_lacks_memory_for_an_exchange_ends_the_group_and_nobody_waits_for_it() {
    let exchanges: [fn(&dyn Communicator) -> Error; 3] = [
        |group| states_identical(group, [&[1u8][..]]).unwrap_err(),
        |group| broadcast_bytes(group, Rank::MAIN, &[1, 2], 16).unwrap_err(),
        |group| {
            let mut bytes = [0; 8];
            let tensors = &mut [StateTensor { dtype: DType::F32, bytes: &mut bytes }];
            broadcast_state(group, Rank::MAIN, tensors).unwrap_err()
        },
    ];
    for exchange in exchanges {
        let errors = run(3, |group| match group.rank().get() {
            1 => exchange(&group.without_memory()),
            _ => exchange(&*group),
        });
        assert!(errors.iter().all(Error::is_out_of_memory), "{errors:?}");
    }
}
