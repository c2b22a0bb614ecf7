//! What is refused, and panics.

use phalanx::GroupHandle;
use phalanx::reducer::hooks::{CommHook, GradBucket, HookState, Pending};

use super::*;

#[test]
fn misuse_is_refused() {
    let alone = ProcessGroup::alone().unwrap();
    let refused = |store: &nn::VarStore| Ddp::new(store, &alone).unwrap_err().to_string();
    assert!(refused(&nn::VarStore::new(device())).contains("no variables"));
    let mut frozen = Mlp::new(&WIDTHS);
    frozen.store.freeze();
    assert!(refused(&frozen.store).contains("no parameter of the model needs a gradient"));

    // The first rank's error ends the group, so the other may get it in an earlier call.
    run(2, |group| {
        let attempt = || {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group)?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward(&loss)?;
            // libtorch's own error, and nobody waits for this rank.
            ddp.backward(&loss)
        };
        let error = attempt().unwrap_err().to_string();
        assert!(error.contains("backward through the graph a second time"), "{error}");
    });
    // A loss without a graph on one rank; the other one waits for its gradients.
    let errors = run(2, |group| {
        let attempt = || {
            let model = Mlp::new(&WIDTHS);
            let mut ddp = Ddp::new(&model.store, &group)?;
            let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
            ddp.backward(&if group.rank().is_main() { loss } else { loss.detach() })
        };
        attempt().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("does not depend on any parameter")), "{errors:?}");
    let errors = run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let first = Ddp::new(&model.store, &group);
        first.and_then(|_first| Ddp::new(&model.store, &group)).unwrap_err().to_string()
    });
    assert!(
        errors.iter().any(|text| text.contains("`0.") && text.contains("drop the other Ddp")),
        "{errors:?}"
    );
    // Dropped, it leaves the parameters to the next.
    run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        drop(Ddp::new(&model.store, &group).unwrap());
        drop(Ddp::new(&model.store, &group).unwrap());
    });
    let errors = run(2, |group| {
        let model = Mlp::new(&[8, 4 + i64::from(group.rank().get()), 3]);
        Ddp::new(&model.store, &group).unwrap_err()
    });
    assert!(
        errors.iter().all(|error| error.is_mismatch() && error.to_string().contains("`0.bias`")),
        "{errors:?}"
    );
}

#[test]
fn a_backward_pass_that_averages_nothing_is_the_error_of_the_next_call() {
    for next in ["forward", "backward", "backward_no_sync"] {
        run(2, |group| {
            let attempt = || {
                let model = Mlp::new(&WIDTHS);
                let mut ddp = Ddp::new(&model.store, &group)?;
                // Without a forward pass of the `Ddp` its parameters are anybody's.
                model.loss(samples(0, 4)).backward();
                let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&model.store, 0.05).unwrap();
                optimizer.zero_grad();
                let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
                let second = model.loss(samples(4, 8));
                optimizer.backward_step(&loss);
                match next {
                    "forward" => ddp.forward(|| ()),
                    "backward" => ddp.backward(&second),
                    _ => ddp.backward_no_sync(&second),
                }
            };
            // The first rank's error ends the group, so the other may get it in an earlier call.
            let error = attempt().unwrap_err().to_string();
            assert!(error.contains("call ddp.backward(&loss) instead"), "{next}: {error}");
        });
    }
    // The loss of another `Ddp` may go through this one between its forward and its backward pass.
    run(2, |group| {
        let (g, d) = (Mlp::new(&[3, 8, 8]), Mlp::new(&[8, 8, 1]));
        let (mut ddp_g, mut ddp_d) =
            (Ddp::new(&g.store, &group).unwrap(), Ddp::new(&d.store, &group).unwrap());
        let judged = |x: &Tensor| d.forward(x).square().mean(Kind::Float);
        let own = ddp_d.forward(|| judged(&samples(0, 4).0)).unwrap();
        let through = ddp_g.forward(|| judged(&g.forward(&samples(0, 4).1))).unwrap();
        ddp_g.backward(&through).unwrap();
        d.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        ddp_d.backward(&own).unwrap();
    });
}

#[test]
fn two_models_of_one_loss_with_a_ddp_each_are_refused() {
    run(2, |group| {
        let (encoder, decoder) = (Mlp::new(&[8, 8]), Mlp::new(&[8, 3]));
        // The first rank's error ends the group, so the other may get it in an earlier call.
        let attempt = || {
            let mut ddp_e = Ddp::new(&encoder.store, &group)?;
            let mut ddp_d = Ddp::new(&decoder.store, &group)?;
            for step in 0..2 {
                let (x, y) = samples(step, step + 4);
                let code = ddp_e.forward(|| encoder.forward(&x))?;
                let loss = ddp_d.forward(|| decoder.loss((code, y)))?;
                ddp_e.backward(&loss)?;
            }
            Ok::<_, Error>(())
        };
        let error = attempt().unwrap_err().to_string();
        assert!(error.contains("`0.") && error.contains("one VarStore, with one Ddp"), "{error}");
    });
}

#[test]
fn a_handle_that_leads_to_another_group_by_now_is_refused() {
    run(2, |group| {
        let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &handle).unwrap();
        let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
        handle.rebind(group.clone());
        let outcomes =
            [ddp.backward(&loss), ddp.average_parameters(), ddp.evaluate(|| ()), ddp.forward(|| ())];
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("a group of 2 ranks by now"), "{error}");
        }
        drop(ddp);
        let mut ddp = Ddp::new(&model.store, &handle).unwrap();
        let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
        ddp.backward(&loss).unwrap();
    });
}

type Call = fn(&mut Ddp) -> Result<()>;

#[test]
fn what_needs_the_same_models_is_refused_in_a_group_whose_models_are_not_compared() {
    let calls: [Call; 2] = [Ddp::average_parameters, |ddp| ddp.evaluate(|| ())];
    for call in calls {
        run(2, |group| {
            let handle = GroupHandle::new(group.clone());
            let store = nn::VarStore::new(device());
            let _norm = nn::batch_norm1d(store.root(), 8, Default::default());
            let mut ddp = Ddp::new(&store, &handle).unwrap();
            handle.rebind(group.split(Some(0), 0).unwrap().unwrap());
            let error = call(&mut ddp).unwrap_err().to_string();
            assert!(error.contains("leads to another group"), "{error}");
        });
    }
    // Of a model without buffers nothing is exchanged, and nothing ends.
    run(2, |group| {
        let handle = GroupHandle::new(group.clone());
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &handle).unwrap();
        handle.rebind(group.split(Some(0), 0).unwrap().unwrap());
        let error = ddp.evaluate(|| ()).unwrap_err().to_string();
        assert!(error.contains("leads to another group"), "{error}");
        handle.rebind(group);
        ddp.evaluate(|| ()).unwrap();
    });
}

#[test]
fn a_panic_of_a_hook_is_an_error_of_backward() {
    /// It panics within backward, or when a bucket has arrived.
    struct Panics {
        late: bool,
    }
    impl CommHook for Panics {
        fn describe(&self) -> String {
            "panics".into()
        }
        fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
            assert!(self.late, "the hook's own");
            let work = group.all_reduce_async(bucket.buffer, ReduceOp::Avg)?;
            Ok(Pending::then(work, |_, _| panic!("the hook's own")))
        }
        fn adopt(&mut self, _: &dyn Communicator, _: Rank) -> Result<()> {
            Ok(())
        }

        fn state(&self) -> Result<HookState> {
            Ok(HookState::default())
        }

        fn load(&mut self, state: HookState) -> Result<()> {
            state.nothing()
        }
    }
    for late in [false, true] {
        run(2, |group| {
            let model = Mlp::new(&WIDTHS);
            // The first rank's error ends the group, so the other may get it in an earlier call.
            let attempt = || {
                let mut ddp = Ddp::new(&model.store, &group)?;
                ddp.register_comm_hook(Panics { late })?;
                let loss = ddp.forward(|| model.loss(samples(0, 4)))?;
                let outcome = ddp.backward(&loss);
                assert!(ddp.forward(|| ()).unwrap_err().to_string().contains("the hook's own"));
                outcome
            };
            let error = attempt().unwrap_err().to_string();
            assert!(error.contains("the hook's own"), "late {late}: {error}");
        });
    }
}

#[test]
fn a_variable_whose_type_changed_is_refused() {
    let errors = run(2, |group| {
        let mut model = Mlp::new(&WIDTHS);
        // The first rank's error ends the group, so the other may get it in an earlier call.
        let mut attempt = || {
            let mut ddp = Ddp::new(&model.store, &group)?;
            model.store.half();
            let (x, _) = samples(0, 4);
            let loss = ddp.forward(|| model.forward(&x.to_kind(Kind::Half)).sum(Kind::Float))?;
            ddp.backward(&loss)
        };
        attempt().unwrap_err().to_string()
    });
    let named = |text: &String| text.contains("type changed since Ddp::new") && text.contains("Half");
    assert!(errors.iter().all(named), "{errors:?}");
}
