//! Buffers, and evaluations.

use std::panic::{AssertUnwindSafe, catch_unwind};

use phalanx::GroupHandle;
use phalanx::join::JoinOptions;

use super::*;

#[test]
fn buffers_are_rank_0_s() {
    let means = run(2, |group| {
        let store = nn::VarStore::new(device());
        let norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let mut seen = Vec::new();
        for step in 0..3 {
            let x = samples(100 * group.rank().index() + step, 100 * group.rank().index() + step + 4).0;
            let loss = ddp
                .forward(|| {
                    seen.push(elements(&norm.running_mean));
                    x.apply_t(&norm, true).square().mean(Kind::Float)
                })
                .unwrap();
            ddp.backward(&loss).unwrap();
        }
        seen
    });
    assert_eq!(means[0], means[1]);
    assert_ne!(means[0][1], means[0][0]);
}

#[test]
fn a_rank_that_alone_would_keep_its_buffers_is_named_on_every_rank() {
    let errors = run(2, |group| {
        let store = nn::VarStore::new(device());
        let _norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut options = DdpOptions::default();
        options.broadcast_buffers = group.rank().is_main();
        Ddp::with_options(&store, &group, options).unwrap_err().to_string()
    });
    let said = "the option broadcast_buffers is true on rank 0 and false on rank 1";
    assert!(errors.iter().all(|text| text.contains(said)), "{errors:?}");
}

#[test]
fn a_buffer_that_is_a_frozen_parameter_on_another_rank_is_named() {
    let errors = run(2, |group| {
        let store = nn::VarStore::new(device());
        let _weight = store.root().zeros("weight", &[2]);
        // Of one size: one rank's would become the other's.
        let [buffer, frozen] = if group.rank().is_main() { ["x", "y"] } else { ["y", "x"] };
        let _buffer = store.root().zeros_no_train(buffer, &[2]);
        let _frozen = store.root().zeros(frozen, &[2]).set_requires_grad(false);
        Ddp::new(&store, &group).err().unwrap().to_string()
    });
    for error in errors {
        assert!(error.contains("`x (a buffer)`") && error.contains("on rank 1"), "{error}");
    }
}

#[test]
fn a_loss_outside_of_forward_is_refused_if_the_model_has_buffers() {
    let errors = run(2, |group| {
        // The first rank's error ends the group, so the other may get it in an earlier call.
        let attempt = || {
            let store = nn::VarStore::new(device());
            let norm = nn::batch_norm1d(store.root(), 8, Default::default());
            let mut ddp = Ddp::new(&store, &group)?;
            ddp.backward(&samples(0, 4).0.apply_t(&norm, true).square().mean(Kind::Float))
        };
        attempt().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("outside of Ddp::forward")), "{errors:?}");
}

#[test]
fn an_evaluation_gives_the_same_on_every_rank() {
    for broadcast_buffers in [true, false] {
        let ends = run(2, |group| {
            let store = nn::VarStore::new(device());
            let norm = nn::batch_norm1d(store.root(), 8, Default::default());
            let mut options = DdpOptions::default();
            options.broadcast_buffers = broadcast_buffers;
            let mut ddp = Ddp::with_options(&store, &group, options).unwrap();
            let x = samples(500, 510).0;
            let alone = || elements(&tch::no_grad(|| x.apply_t(&norm, false)));
            let train = |ddp: &mut Ddp, step: usize, averages: bool| {
                let from = 100 * group.rank().index() + step;
                let loss = ddp
                    .forward(|| samples(from, from + 4).0.apply_t(&norm, true).square().mean(Kind::Float))
                    .unwrap();
                if averages { ddp.backward(&loss) } else { ddp.backward_no_sync(&loss) }.unwrap();
            };
            let evaluate = |ddp: &mut Ddp| {
                ddp.evaluate(|| {
                    let output = x.apply_t(&norm, false);
                    assert!(!output.requires_grad());
                    elements(&output)
                })
                .unwrap()
            };
            (0..5).for_each(|step| train(&mut ddp, step, true));
            let (own, evaluated, after) = (alone(), evaluate(&mut ddp), alone());
            assert!(ddp.replicas_identical().unwrap() && !ddp.buffers_identical().unwrap());
            // Passes that average nothing leave each rank its own statistics, too.
            train(&mut ddp, 5, false);
            let own_again = alone();
            (own, evaluated, after, own_again, evaluate(&mut ddp))
        });
        let [main, other] = &ends[..] else { unreachable!() };
        assert_ne!(main.0, other.0, "it would be each rank's own");
        assert!(main.1 == main.0 && other.1 == main.0);
        // Each rank has its own again.
        assert!(main.2 == main.0 && other.2 == other.0);
        assert_ne!(main.3, other.3);
        assert!(main.4 == main.3 && other.4 == main.3);
    }
    // Alone there is nobody to agree with.
    let model = Mlp::new(&WIDTHS);
    let mut ddp = Ddp::new(&model.store, &ProcessGroup::alone().unwrap()).unwrap();
    assert!(!ddp.evaluate(|| model.loss(samples(0, 4)).requires_grad()).unwrap());
}

#[test]
fn a_model_that_has_drifted_apart_in_the_join_of_another_one_is_not_evaluated() {
    let errors = run(2, |group| {
        let group = JoinGroup::new(group);
        let rank = group.rank().index();
        let model = Mlp::new(&WIDTHS);
        let store = nn::VarStore::new(device());
        let norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut other = Ddp::new(&store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0)).unwrap();
        let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, _| {
            for step in 0..=rank {
                let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
                ddp.backward(&loss)?;
                let pass = || samples(step, step + 4).0.apply_t(&norm, true).square().mean(Kind::Float);
                let loss = other.forward(pass)?;
                other.backward(&loss)?;
            }
            Ok(())
        });
        joined.unwrap();
        other.evaluate(|| ()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("1 to 2 by now")), "{errors:?}");
}

/// A program that catches it trains on.
#[test]
fn a_panic_in_an_evaluation_leaves_each_rank_its_own_buffers_and_gradients() {
    let means = run(2, |group| {
        let store = nn::VarStore::new(device());
        let norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let from = 100 * group.rank().index();
        let pass = || samples(from, from + 4).0.apply_t(&norm, true).square().mean(Kind::Float);
        let loss = ddp.forward(pass).unwrap();
        ddp.backward(&loss).unwrap();
        let own = elements(&norm.running_mean);
        let fails = || assert!(elements(&norm.running_mean).is_empty(), "no such file");
        let outcome = catch_unwind(AssertUnwindSafe(|| ddp.evaluate(fails)));
        assert!(outcome.is_err());
        assert_eq!(elements(&norm.running_mean), own);
        assert!(samples(0, 4).0.apply_t(&norm, false).requires_grad());
        own
    });
    assert_ne!(means[0], means[1]);
}

#[test]
fn an_evaluation_on_one_rank_alone_is_named_on_both() {
    let errors = run(2, |group| {
        let store = nn::VarStore::new(device());
        let norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let loss = ddp.forward(|| samples(0, 4).0.apply_t(&norm, true).square().mean(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        let outcome = if group.rank().is_main() { ddp.evaluate(|| ()) } else { ddp.forward(|| ()) };
        // The root of a broadcast need not wait for the others.
        outcome.and_then(|()| ddp.replicas_identical()).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(
            error.is_mismatch() && text.contains("Ddp::evaluate") && text.contains("Ddp::forward"),
            "{text}"
        );
    }
}

#[test]
fn one_rank_evaluates_the_model_alone_after_a_training_of_several() {
    run(2, |group| {
        let handle = GroupHandle::new(group);
        let store = nn::VarStore::new(device());
        let _norm = nn::batch_norm1d(store.root(), 8, Default::default());
        let mut ddp = Ddp::new(&store, &handle).unwrap();
        handle.rebind(ProcessGroup::alone().unwrap());
        assert_eq!(ddp.evaluate(|| 7).unwrap(), 7);
    });
}
