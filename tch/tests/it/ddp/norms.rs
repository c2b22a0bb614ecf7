//! The norm of gradients, to which they are clipped.

use std::sync::Barrier;

use super::*;

#[test]
fn clipped_gradients_have_the_norm_that_was_asked_for() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let loss = ddp.forward(|| model.loss(samples(0, 4)) * 100.0).unwrap();
        ddp.backward(&loss).unwrap();
        let before = ddp.clip_grad_norm(0.5).unwrap();
        let after = ddp.clip_grad_norm(1e9).unwrap();
        assert!(before > 0.5 && (after / 0.5 - 1.0).abs() < 1e-4, "{before} {after}");
        // The error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        if group.rank().is_main() {
            assert!(ddp.clip_grad_norm(f64::NAN).unwrap_err().is_invalid_argument());
        } else {
            let told = ddp.forward(|| model.loss(samples(0, 4))).and_then(|loss| ddp.backward(&loss));
            let error = told.unwrap_err().to_string();
            assert!(error.contains("rank 0") && error.contains("max_norm"), "{error}");
        }
        assert!(ddp.clip_grad_norm(0.0).is_err());
    });
}

/// f16 ends at 65,504, and two elements of 60,000 have a norm beyond that; bf16 has 8 bits.
#[test]
fn the_norm_of_halves_is_not_rounded_to_their_type() {
    for kind in [Kind::Half, Kind::BFloat16] {
        run(2, |group| {
            let mut store = nn::VarStore::new(device());
            drop(store.root().ones("one", &[2]));
            store.set_kind(kind);
            let one = &store.variables()["one"];
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let loss = ddp.forward(|| (one.to_kind(Kind::Float) * 60_000.0).sum(Kind::Float)).unwrap();
            ddp.backward(&loss).unwrap();
            assert_eq!(one.grad().kind(), kind);
            let squares = elements(&one.grad()).into_iter().map(|element| f64::from(element).powi(2));
            let expected = squares.sum::<f64>().sqrt();
            let norm = ddp.clip_grad_norm(2f64.sqrt()).unwrap();
            assert!((norm / expected - 1.0).abs() < 1e-5, "{kind:?}: {norm} {expected}");
            let clipped = elements(&one.grad());
            assert!(clipped.iter().all(|element| (element - 1.0).abs() < 1e-2), "{kind:?}: {clipped:?}");
        });
    }
}

#[test]
fn gradients_that_libtorch_leaves_in_one_memory_are_clipped_once() {
    // In a world of one they stay where backward has left them.
    for ranks in [1, 2] {
        run(ranks, |group| {
            let store = nn::VarStore::new(device());
            let (square, column) =
                (store.root().ones("square", &[2, 2]), store.root().ones("column", &[4, 1]));
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let factors = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).to_device(device());
            for _ in 0..3 {
                // Both have the factors as their gradient: libtorch gives each a view of one tensor, that of the sum.
                let loss = || ((square.view([4]) + column.view([4])) * &factors).sum(Kind::Float);
                let loss = ddp.forward(loss).unwrap();
                store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
                ddp.backward(&loss).unwrap();
                // 1 + 4 + 9 + 16, twice.
                assert!((ddp.clip_grad_norm(1.0).unwrap() - 60f64.sqrt()).abs() < 1e-5);
                let expected: Vec<f32> = (1..=4u8).map(|factor| f32::from(factor) / 60f32.sqrt()).collect();
                for gradient in [square.grad(), column.grad()] {
                    assert!(
                        distance(&[elements(&gradient)], std::slice::from_ref(&expected)) < 1e-5,
                        "{ranks} ranks: {gradient:?}"
                    );
                }
            }
        });
    }
}

#[test]
fn gradients_that_libtorch_leaves_in_one_memory_are_added_up_once() {
    for ranks in [1, 2] {
        run(ranks, |group| {
            let store = nn::VarStore::new(device());
            let (square, column) =
                (store.root().ones("square", &[2, 2]), store.root().ones("column", &[4, 1]));
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let factors = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]).to_device(device());
            let loss = || ((square.view([4]) + column.view([4])) * &factors).sum(Kind::Float);
            for passes in 0..3u8 {
                store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
                for _ in 0..passes {
                    let loss = ddp.forward(loss).unwrap();
                    ddp.backward_no_sync(&loss).unwrap();
                }
                let last = ddp.forward(loss).unwrap();
                ddp.backward(&last).unwrap();
                let expected: Vec<f32> = (1..=4u8).map(|factor| f32::from(factor * (passes + 1))).collect();
                for gradient in [square.grad(), column.grad()] {
                    assert_eq!(elements(&gradient), expected, "{ranks} ranks, {passes} passes before");
                }
            }
        });
    }
}

/// The squares of 1e20 are beyond f32.
#[test]
fn a_norm_whose_squares_are_beyond_f32_is_clipped() {
    run(2, |group| {
        let store = nn::VarStore::new(device());
        let one = store.root().ones("one", &[2]);
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let loss = ddp.forward(|| (&one * 1e20).sum(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        let norm = ddp.clip_grad_norm(2f64.sqrt()).unwrap();
        assert!((norm / (2f64.sqrt() * 1e20) - 1.0).abs() < 1e-5, "{norm}");
        let clipped = elements(&one.grad());
        assert!(clipped.iter().all(|element| (element - 1.0).abs() < 1e-5), "{clipped:?}");
        // One that is infinite has no norm to be clipped to.
        let loss = ddp.forward(|| (&one * f64::INFINITY).sum(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        assert!(ddp.clip_grad_norm(1.0).unwrap().is_infinite());
    });
}
