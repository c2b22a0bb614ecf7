//! A `Ddp` whose handle leads to another group by now.

use burn::optim::SgdConfig;
use phalanx::{GroupHandle, ProcessGroup, Result};
use phalanx_burn::Ddp;

use super::Normed;
use crate::common::{Mlp, run, samples};

#[test]
fn a_handle_that_leads_to_another_group_by_now_is_refused() {
    run(2, |group| {
        let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &handle).unwrap();
        drop(ddp.forward(|model| model.loss(samples(0, 4))).unwrap());
        handle.rebind(group);
        let loss = ddp.forward(|model| model.loss(samples(0, 4)));
        for outcome in [loss.map(drop), ddp.average_parameters(), ddp.evaluate(|_| ())] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("a group of 2 ranks by now"), "{error}");
        }
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &handle).unwrap();
        drop(ddp.forward(|model| model.loss(samples(0, 4))).unwrap());
        // Nothing would be averaged.
        handle.rebind(ProcessGroup::alone().unwrap());
        let error = ddp.forward(|model| model.loss(samples(0, 4))).unwrap_err().to_string();
        assert!(error.contains("leads to another group"), "{error}");
    });
}

type Call = fn(&mut Ddp<Normed>) -> Result<()>;

#[test]
fn what_needs_the_same_models_is_refused_in_a_group_whose_models_are_not_compared() {
    let calls: [Call; 2] = [Ddp::average_parameters, |ddp| ddp.evaluate(|_| ())];
    for call in calls {
        run(2, |group| {
            let handle = GroupHandle::new(group.clone());
            let mut ddp = Ddp::new(Normed::new(), &handle).unwrap();
            handle.rebind(group.split(Some(0), 0).unwrap().unwrap());
            let error = call(&mut ddp).unwrap_err().to_string();
            assert!(error.contains("leads to another group"), "{error}");
        });
    }
    // Of a model without buffers nothing is exchanged, and nothing ends.
    run(2, |group| {
        let handle = GroupHandle::new(group.clone());
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &handle).unwrap();
        handle.rebind(group.split(Some(0), 0).unwrap().unwrap());
        let error = ddp.evaluate(|_| ()).unwrap_err().to_string();
        assert!(error.contains("leads to another group"), "{error}");
        handle.rebind(group);
        ddp.evaluate(|_| ()).unwrap();
    });
}

#[test]
fn one_rank_evaluates_the_model_alone_after_a_training_of_several() {
    run(2, |group| {
        let handle = GroupHandle::new(group);
        let mut ddp = Ddp::new(Normed::new(), &handle).unwrap();
        handle.rebind(ProcessGroup::alone().unwrap());
        assert_eq!(ddp.evaluate(|_| 7).unwrap(), 7);
    });
}

#[test]
fn an_error_of_a_step_ends_the_group_to_which_the_handle_of_a_world_of_one_leads() {
    run(2, |group| {
        let handle = GroupHandle::new(ProcessGroup::alone().unwrap());
        let mut ddp = Ddp::new(Mlp::new(&[8, 3]), &handle).unwrap();
        let mut other = Ddp::new(Mlp::new(&[8, 3]), &ProcessGroup::alone().unwrap()).unwrap();
        handle.rebind(group.clone());
        if group.rank().is_main() {
            let loss = other.forward(|model| model.loss(samples(0, 4))).unwrap();
            let foreign = other.backward(&loss).unwrap();
            let error = ddp.step(&mut SgdConfig::new().init(), 0.1, foreign).unwrap_err();
            assert!(error.to_string().contains("another replicated model"), "{error}");
        }
        let error = group.barrier().unwrap_err().to_string();
        assert!(error.contains("another replicated model"), "{error}");
    });
}
