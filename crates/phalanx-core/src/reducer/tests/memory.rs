//! Whose the memory of averages is, and for how long.

use super::*;

#[test]
fn averages_that_are_taken_out_are_their_owners() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4]), buckets_of(8)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
        one_step(&mut reducer, rank, 1, &[1, 0]).unwrap();
        let allocations = group.allocations();
        let mut gradients = reducer.take_gradients().unwrap();
        assert!(reducer.gradient(1).is_err() && reducer.take_gradients().is_err());
        let gradient = gradients[1].as_mut().unwrap();
        one_step(&mut reducer, rank, 2, &[1, 0]).unwrap();
        assert_eq!(group.allocations(), allocations + 1, "memory is taken anew");
        let floats =
            |bytes: &[u8]| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect::<Vec<f32>>();
        assert_eq!(floats(gradient.as_bytes()), expected(2, 1, 1, 4));
        gradient.as_bytes_mut().fill(0);
        assert_eq!(floats(reducer.gradient(1).unwrap().unwrap()), expected(2, 1, 2, 4));
        reducer.release();
        assert!(reducer.gradient(1).is_err());
        one_step(&mut reducer, rank, 3, &[1, 0]).unwrap();
        assert_eq!(group.allocations(), allocations + 2);
    });
}

#[test]
fn averages_that_are_lent_leave_their_memory_to_the_next_step() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group.clone(), parameters(&[4, 4]), buckets_of(8)).unwrap();
        let mut step = 0;
        let mut lend = |reducer: &mut Reducer| {
            step += 1;
            one_step(reducer, rank, step, &[1, 0]).unwrap();
            let gradients = reducer.lend_gradients().unwrap();
            assert!(reducer.gradient(1).is_err() && reducer.lend_gradients().is_err());
            let gradient: &[u8] = gradients[1].as_ref().unwrap().as_bytes();
            assert_eq!(bytemuck::cast_slice::<u8, f32>(gradient), expected(2, 1, step, 4));
            gradients
        };
        drop(lend(&mut reducer));
        drop(lend(&mut reducer)); // In new buckets, in the order of the gradients.
        let allocations = group.allocations();
        drop(lend(&mut reducer));
        assert_eq!(group.allocations(), allocations);
        let (first, second) = (lend(&mut reducer), lend(&mut reducer));
        assert_eq!(group.allocations(), allocations + 1, "only what was kept needs other memory");
        drop((lend(&mut reducer), first, second));
        assert_eq!(group.allocations(), allocations + 2);

        // Somebody who keeps gradients for the third time gets copies from then on.
        let mut kept = Vec::new();
        for _ in 0..6 {
            kept = lend(&mut reducer);
        }
        assert_eq!(group.allocations(), allocations + 3);
        reducer.release();
        drop(lend(&mut reducer));
        assert_eq!(group.allocations(), allocations + 4, "released memory is gone");
        drop(kept);
    });
}

#[test]
fn a_view_is_a_gradient_s_place_from_step_to_step() {
    run(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, parameters(&[4, 4]), buckets_of(8)).unwrap();
        one_step(&mut reducer, rank, 0, &[1, 0]).unwrap();
        one_step(&mut reducer, rank, 1, &[1, 0]).unwrap();
        let mut keepers = Vec::new();
        let mut place = |reducer: &mut Reducer| {
            let (bytes, keeper) = reducer.gradient_view(1).unwrap().unwrap();
            keepers.push(keeper);
            bytes.as_ptr()
        };
        let first = place(&mut reducer);
        one_step(&mut reducer, rank, 2, &[1, 0]).unwrap();
        assert_eq!(place(&mut reducer), first);
        assert_eq!(floats(&reducer, 1), expected(2, 1, 2, 4));
        // What backward has written there itself is averaged as it is.
        reducer.start().unwrap();
        give(&mut reducer, rank, 3, &[0]).unwrap();
        let write = |memory: &mut [u8]| {
            assert_eq!(memory.as_ptr(), first);
            Ok(())
        };
        reducer.ready_with(1, write).unwrap();
        reducer.finish().unwrap();
        assert_eq!(floats(&reducer, 1), expected(2, 1, 2, 4));
        // Released, the memory is taken anew; the kept one is nobody else's.
        reducer.release();
        assert!(reducer.gradient_view(1).is_err());
        one_step(&mut reducer, rank, 4, &[1, 0]).unwrap();
        assert_ne!(place(&mut reducer), first);
    });
}
