//! An optimizer whose state is spread over the ranks, against one whose is not.

use std::sync::Barrier;

use crate::common::{LOADS, Mlp, distance, floats, run, samples};
use burn::module::Module;
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, OptimizerRecord, SgdConfig};
use burn::tensor::Bytes;
use parking_lot::Mutex;
use phalanx::checkpoint::{Checkpoints, Saved, Snapshot};
use phalanx::elastic::State;
use phalanx::mesh::DeviceMesh;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::Compressed;
use phalanx::testing::{self, Fabric};
use phalanx::{Error, GroupHandle, ProcessGroup, Rank, Result};
use phalanx_burn::{
    Ddp, DdpOptions, SyncedGradients, TrainState, ZeroRedundancyOptimizer, clip_grad_norm, parallel,
};

const STEPS: usize = 12;
const WIDTHS: [usize; 5] = [8, 24, 16, 24, 3];

fn gradients(ddp: &mut Ddp<Mlp>, step: usize) -> SyncedGradients {
    let from = (step * 4 + ddp.rank().index()) * 4;
    let loss = ddp.forward(|model| model.loss(samples(from, from + 4))).unwrap();
    ddp.backward(&loss).unwrap()
}

#[test]
fn gradients_from_before_parameters_were_sharded_are_refused() {
    let all_are_here = Barrier::new(2);
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let before = gradients(&mut ddp, 0);
        let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
        // The first error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        let error = zero.step(&mut ddp, 0.01, before).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("sharded"), "{error}");
    });
}

fn check(optimizer: ModuleOptimizer) {
    let start = Mlp::new(&WIDTHS);
    for ranks in [1, 2, 3, 4] {
        let checkpoint = Mutex::new(Vec::new());
        let sizes = run(ranks, |group| {
            let mut plain = Ddp::new(start.clone(), &group).unwrap();
            let mut whole = optimizer.clone();
            let mut zero = Ddp::new(start.clone(), &group).unwrap();
            let mut sharded = ZeroRedundancyOptimizer::new(optimizer.clone(), &mut zero).unwrap();
            for step in 0..STEPS {
                let averages = gradients(&mut plain, step);
                plain.step(&mut whole, 0.01, averages).unwrap();
                let averages = gradients(&mut zero, step);
                sharded.step(&mut zero, 0.01, averages).unwrap();
                assert_eq!(floats(plain.model()), floats(zero.model()), "step {step}");
                if step == STEPS / 2 {
                    // A checkpoint: consolidated, and sharded again.
                    let last = Rank::new(ranks - 1);
                    let consolidated = sharded.consolidate(&zero, last).unwrap();
                    assert_eq!(consolidated.is_some(), zero.rank() == last);
                    if let Some(consolidated) = consolidated {
                        assert_eq!(consolidated.to_record().len(), whole.to_record().len());
                    }
                }
            }
            assert!(zero.replicas_identical().unwrap());
            let elements = sharded.own_elements(&zero);
            if let Some(consolidated) = sharded.consolidate(&zero, Rank::MAIN).unwrap() {
                assert_eq!(content(&consolidated), content(&whole));
                *checkpoint.lock() = consolidated.into_bytes().unwrap().to_vec();
            }
            group.barrier().unwrap();
            // Another run goes on with the whole state, of which each rank drops what is not its own.
            let record =
                OptimizerRecord::from_bytes(Bytes::from_bytes_vec(checkpoint.lock().clone())).unwrap();
            let mut resumed = Ddp::new(zero.into_model(), &group).unwrap();
            let whole_again = optimizer.clone().load_record(record);
            let mut sharded = ZeroRedundancyOptimizer::new(whole_again, &mut resumed).unwrap();
            assert_eq!(sharded.own_elements(&resumed), elements);
            let averages = gradients(&mut plain, STEPS);
            plain.step(&mut whole, 0.01, averages).unwrap();
            let averages = gradients(&mut resumed, STEPS);
            sharded.step(&mut resumed, 0.01, averages).unwrap();
            assert_eq!(floats(plain.model()), floats(resumed.model()));
            elements
        });
        let total: usize = floats(&start).iter().map(Vec::len).sum();
        assert_eq!(sizes.iter().sum::<usize>(), total);
        let largest = floats(&start).iter().map(Vec::len).max().unwrap();
        assert!(sizes.iter().all(|&size| size <= (total / ranks as usize).max(largest) + largest / 2));
    }
}

type Content = (Vec<(String, Vec<u8>)>, Vec<String>, Vec<(String, String)>);

/// All that a state consists of.
fn content(optimizer: &ModuleOptimizer) -> Content {
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let scalars = reader.scalars().iter().map(|(name, value)| format!("{name} {value:?}")).collect();
    let paths = reader.metadata().iter().map(|(id, path)| (id.clone(), path.clone())).collect();
    let tensors = reader.into_tensors().unwrap().into_iter();
    let mut tensors: Vec<_> =
        tensors.map(|tensor| (tensor.name.clone(), tensor.into_bytes().unwrap().to_vec())).collect();
    tensors.sort();
    (tensors, scalars, paths)
}

#[test]
fn any_number_of_ranks_goes_on_with_what_any_number_has_saved() {
    let start = Mlp::new(&WIDTHS);
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = run(ranks, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
            for step in 0..4 {
                let averages = gradients(&mut ddp, step);
                zero.step(&mut ddp, 0.01, averages).unwrap();
            }
            checkpoints.save_sharded(4, |snapshot| zero.save(&ddp, snapshot, "optimizer")).unwrap();
            checkpoints.finish().unwrap();
            let whole = zero.consolidate(&ddp, Rank::MAIN).unwrap().map(|whole| content(&whole));
            (whole, ddp.into_model())
        });
        let (whole, model) = outcomes.into_iter().next().unwrap();
        for world in [1, 2, 4] {
            let wholes = run(world, |group| {
                let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
                let mut ddp = Ddp::new(model.clone(), &group).unwrap();
                let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
                zero.load(&ddp, &saved, "optimizer").unwrap();
                let whole = zero.consolidate(&ddp, Rank::MAIN).unwrap().map(|whole| content(&whole));
                let error = zero.load(&ddp, &saved, "other").unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains("other-0"), "{error}");
                let mut other = Ddp::new(model.clone(), &group).unwrap();
                let mut plain = ZeroRedundancyOptimizer::new(SgdConfig::new().init(), &mut other).unwrap();
                // A rank may own no parameter.
                if plain.own_elements(&other) > 0 {
                    let error = plain.load(&other, &saved, "optimizer").unwrap_err().to_string();
                    assert!(
                        error.contains(".momentum.moment_1`") && error.contains("does not take"),
                        "{error}"
                    );
                }
                let averages = gradients(&mut ddp, 4);
                zero.step(&mut ddp, 0.01, averages).unwrap();
                assert!(ddp.replicas_identical().unwrap());
                whole
            });
            assert!(whole.is_some() && wholes[0] == whole, "{ranks} to {world}");
        }
    }
}

#[test]
fn the_state_of_replicas_that_are_some_of_the_ranks_is_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    // Two models of two replicas each, in one checkpoint.
    run(4, |group| {
        let mesh = DeviceMesh::new(&group, &[("model", 2), ("data", 2)]).unwrap();
        let name = format!("optimizer-of-{}", mesh.coordinate("model").unwrap());
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), mesh.group("data").unwrap()).unwrap();
        let adamw = || AdamWConfig::new().init();
        let mut zero = ZeroRedundancyOptimizer::new(adamw(), &mut ddp).unwrap();
        for step in 0..3 {
            let averages = gradients(&mut ddp, step);
            zero.step(&mut ddp, 0.01, averages).unwrap();
        }
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(3, |snapshot| zero.save(&ddp, snapshot, &name)).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let whole = |zero: &ZeroRedundancyOptimizer, ddp: &Ddp<Mlp>| {
            zero.consolidate(ddp, Rank::MAIN).unwrap().map(|whole| content(&whole))
        };
        let expected = whole(&zero, &ddp);
        let mut ddp = Ddp::new(ddp.into_model(), mesh.group("data").unwrap()).unwrap();
        let mut again = ZeroRedundancyOptimizer::new(adamw(), &mut ddp).unwrap();
        again.load(&ddp, &saved, &name).unwrap();
        assert_eq!(whole(&again, &ddp), expected);
    });
}

#[test]
fn ranks_that_load_other_states_are_an_error_on_every_rank() {
    let start = Mlp::new(&WIDTHS);
    let adamw = || AdamWConfig::new().init();
    for (loads, is_error) in LOADS {
        let folder = tempfile::tempdir().unwrap();
        let errors = run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut zero = ZeroRedundancyOptimizer::new(adamw(), &mut ddp).unwrap();
            let averages = gradients(&mut ddp, 0);
            zero.step(&mut ddp, 0.01, averages).unwrap();
            let saved = [1, 2].map(|step| {
                checkpoints.save_sharded(step, |snapshot| zero.save(&ddp, snapshot, "optimizer")).unwrap();
                checkpoints.finish().unwrap();
                checkpoints.newest().unwrap().unwrap()
            });
            // Another run goes on.
            let mut ddp = Ddp::new(ddp.into_model(), &group).unwrap();
            let mut zero = ZeroRedundancyOptimizer::new(adamw(), &mut ddp).unwrap();
            for which in loads[group.rank().index()] {
                zero.load(&ddp, &saved[*which], "optimizer").unwrap();
            }
            let mut step = || {
                let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                let averages = ddp.backward(&loss)?;
                zero.step(&mut ddp, 0.01, averages)
            };
            (0..40).find_map(|_| step().err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), is_error, "{loads:?}: {error:?}");
            assert!(error.is_none_or(|error| error.contains("one rank alone has loaded a state")));
        }
    }
}

#[test]
fn gradients_that_are_held_would_be_missing_in_a_saved_state() {
    let folder = tempfile::tempdir().unwrap();
    run(1, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
        let loss = ddp.forward(|model| model.loss(samples(0, 4))).unwrap();
        ddp.backward_no_sync(&loss).unwrap();
        let save = |ddp: &Ddp<Mlp>| checkpoints.save(1, |snapshot| zero.save(ddp, snapshot, "optimizer"));
        let error = save(&ddp).unwrap_err().to_string();
        assert!(error.contains("in the middle of a step"), "{error}");
        ddp.drop_accumulated();
        save(&ddp).unwrap();
        checkpoints.finish().unwrap();
    });
}

#[test]
fn steps_without_a_state_are_refused_by_an_optimizer_that_needs_some() {
    let start = Mlp::new(&WIDTHS);
    for step in [0, 5] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            // Whatever took the steps, this one did not, and has nothing.
            let plain = ZeroRedundancyOptimizer::new(SgdConfig::new().init(), &mut ddp).unwrap();
            checkpoints.save_sharded(step, |snapshot| plain.save(&ddp, snapshot, "optimizer")).unwrap();
            checkpoints.finish().unwrap();
        });
        // There are eight parameters: a rank that owns none refuses with the others.
        run(9, |group| {
            let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let mut adamw = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
            let loaded = adamw.load(&ddp, &saved, "optimizer");
            if step == 0 {
                loaded.unwrap();
            } else {
                let error = loaded.unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains(".momentum.moment_1`"), "{error}");
            }
        });
    }
}

/// The error of each call of an optimizer that needs the parts of all ranks of `ddp`.
fn refused(zero: &mut ZeroRedundancyOptimizer, ddp: &Ddp<Mlp>, saved: &Saved) -> Vec<Error> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
    let saving = checkpoints.save(9, |snapshot| zero.save(ddp, snapshot, "optimizer"));
    vec![
        zero.consolidate(ddp, Rank::MAIN).err().unwrap(),
        saving.unwrap_err(),
        zero.load(ddp, saved, "optimizer").unwrap_err(),
    ]
}

#[test]
fn a_part_of_the_state_is_not_taken_for_the_whole_after_the_group_has_changed() {
    let start = Mlp::new(&WIDTHS);
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let handle = GroupHandle::new(group.clone());
        let mut ddp = Ddp::new(start.clone(), &handle).unwrap();
        let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
        let averages = gradients(&mut ddp, 0);
        zero.step(&mut ddp, 0.01, averages).unwrap();
        checkpoints.save_sharded(1, |snapshot| zero.save(&ddp, snapshot, "optimizer")).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let averages = gradients(&mut ddp, 1);
        handle.rebind(ProcessGroup::alone().unwrap());
        let mut errors = refused(&mut zero, &ddp, &saved);
        errors.push(zero.step(&mut ddp, 0.01, averages).unwrap_err());
        errors.extend(ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).err());
        assert_eq!(errors.len(), 5);
        for error in errors {
            assert!(error.to_string().contains("leads to another group"), "{error}");
        }
    });
}

#[test]
fn a_part_of_the_state_is_not_taken_for_the_whole_after_a_round_of_an_elastic_job() {
    let (start, folder) = (Mlp::new(&WIDTHS), tempfile::tempdir().unwrap());
    let adamw = || AdamWConfig::new().init();
    run(2, |group| {
        let mut state = TrainState::new(start.clone(), adamw(), ()).unwrap();
        State::enter(&mut state, &group).unwrap();
        let mut zero = ZeroRedundancyOptimizer::new(adamw(), &mut state.model).unwrap();
        let averages = gradients(&mut state.model, 0);
        zero.step(&mut state.model, 0.01, averages).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save_sharded(1, |snapshot| zero.save(&state.model, snapshot, "optimizer")).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        // Alone, a rank would go on without the moments that the other has.
        State::leave(&mut state);
        let before = floats(state.model.model());
        let averages = gradients(&mut state.model, 1);
        let mut errors = refused(&mut zero, &state.model, &saved);
        errors.push(zero.step(&mut state.model, 0.01, averages).unwrap_err());
        for error in errors {
            assert!(error.to_string().contains("before it changed its group"), "{error}");
        }
        assert_eq!(floats(state.model.model()), before);
        let mut anew = ZeroRedundancyOptimizer::new(adamw(), &mut state.model).unwrap();
        anew.load(&state.model, &saved, "optimizer").unwrap();
        let averages = gradients(&mut state.model, 1);
        anew.step(&mut state.model, 0.01, averages).unwrap();
    });
}

#[test]
fn a_checkpoint_that_would_lack_the_state_of_a_divided_optimizer_is_refused() {
    let start = Mlp::new(&WIDTHS);
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        run(ranks, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let state = TrainState::new(start.clone(), AdamWConfig::new().init(), 0_u64).unwrap();
            let mut state = state.with_group(&group).unwrap();
            let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut state.model).unwrap();
            let averages = gradients(&mut state.model, 0);
            zero.step(&mut state.model, 0.01, averages).unwrap();
            // AdamW would take it, which is of step 0, and begin with moments of zero.
            for outcome in [state.checkpoint(&checkpoints), state.checkpoint_sharded(&checkpoints)] {
                let error = outcome.unwrap_err();
                assert!(error.is_invalid_argument(), "{error}");
                assert!(error.to_string().contains("which the checkpoint would lack"), "{error}");
                assert!(error.remedy().unwrap().contains("save_shard_to"), "{error}");
            }
            let save = |snapshot: &mut Snapshot| {
                state.save_shard_to(snapshot, &group)?;
                zero.save(&state.model, snapshot, "zero")
            };
            checkpoints.save_sharded(1, save).unwrap();
            checkpoints.finish().unwrap();
            assert_eq!(checkpoints.newest().unwrap().unwrap().step(), 1);
        });
    }
}

/// What is called with the optimizer of another model.
#[derive(Clone, Copy)]
enum Wrong {
    Step,
    Consolidate,
}

fn with_another_on_rank_0(calls: Wrong) {
    let (start, all_are_here) = (Mlp::new(&WIDTHS), Barrier::new(2));
    run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let mut other = Ddp::new(start.clone(), &group).unwrap();
        let new = |ddp: &mut Ddp<Mlp>| ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), ddp).unwrap();
        let (mut own, mut of_other) = (new(&mut ddp), new(&mut other));
        let averages = gradients(&mut ddp, 0);
        own.step(&mut ddp, 0.01, averages).unwrap();
        let before = floats(ddp.model());
        let averages = gradients(&mut ddp, 1);
        // The first error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        let outcome = match (group.rank().is_main(), calls) {
            (true, Wrong::Step) => of_other.step(&mut ddp, 0.01, averages),
            (true, Wrong::Consolidate) => of_other.consolidate(&ddp, Rank::MAIN).map(drop),
            // The other rank has the right one, and waits for rank 0's part.
            (false, Wrong::Step) => own.step(&mut ddp, 0.01, averages),
            (false, Wrong::Consolidate) => own.consolidate(&ddp, Rank::MAIN).map(drop),
        };
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("another Ddp"), "{error}");
        if group.rank().is_main() {
            assert!(error.is_invalid_argument(), "{error}");
            assert_eq!(floats(ddp.model()), before);
        } else {
            assert!(error.to_string().contains("rank 0"), "{error}");
        }
    });
}

#[test]
fn the_optimizer_of_another_model_on_one_rank_is_an_error_on_every_rank() {
    with_another_on_rank_0(Wrong::Step);
    with_another_on_rank_0(Wrong::Consolidate);
}

/// As a generator and its discriminator in one model: each loss has gradients of one of them.
#[test]
fn two_optimizers_of_one_model_step_in_turns() {
    type Both = (Mlp, Mlp);
    let start = (Mlp::new(&WIDTHS), Mlp::new(&WIDTHS));
    run(2, |group| {
        let mut options = DdpOptions::default();
        options.reducer = ReducerOptions::default().find_unused_parameters(true);
        let new = || Ddp::with_options(start.clone(), &group, options.clone()).unwrap();
        let gradients = |ddp: &mut Ddp<Both>, step: usize| {
            let from = (step * 4 + group.rank().index()) * 4;
            let pass = |(one, other): &Both| [one, other][step % 2].loss(samples(from, from + 4));
            let loss = ddp.forward(pass).unwrap();
            ddp.backward(&loss).unwrap()
        };
        let (mut whole, mut parts) = (new(), new());
        let mut optimizers = [AdamWConfig::new().init(), SgdConfig::new().init()];
        let zeros = optimizers.clone().map(|optimizer| ZeroRedundancyOptimizer::new(optimizer, &mut parts));
        let mut zeros = zeros.map(Result::unwrap);
        for step in 0..STEPS {
            let averages = gradients(&mut whole, step);
            whole.step(&mut optimizers[step % 2], 0.01, averages).unwrap();
            let averages = gradients(&mut parts, step);
            zeros[step % 2].step(&mut parts, 0.01, averages).unwrap();
            assert_eq!(floats(whole.model()), floats(parts.model()), "step {step}");
        }
        let all = zeros[0].consolidate(&parts, Rank::MAIN).unwrap();
        assert_eq!(all.is_some(), group.rank().is_main());
        assert!(all.is_none_or(|all| content(&all) == content(&optimizers[0])));
    });
}

/// With its moments it goes on where it was, once it is trained again.
#[test]
fn what_is_frozen_by_now_keeps_its_moments() {
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let averages = gradients(&mut ddp, 0);
        ddp.step(&mut optimizer, 0.01, averages).unwrap();
        let parameters = optimizer.to_record().len();
        let mut model = ddp.into_model();
        model.layers[1] = model.layers[1].clone().no_grad();
        let mut ddp = Ddp::new(model, &group).unwrap();
        let mut zero = ZeroRedundancyOptimizer::new(optimizer, &mut ddp).unwrap();
        let averages = gradients(&mut ddp, 1);
        zero.step(&mut ddp, 0.01, averages).unwrap();
        let whole = zero.consolidate(&ddp, Rank::MAIN).unwrap();
        assert_eq!(whole.is_some(), group.rank().is_main());
        assert!(whole.is_none_or(|whole| whole.to_record().len() == parameters));
    });
}

#[test]
fn a_state_goes_to_no_rank_that_there_is_not() {
    run(2, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
        // Every rank would get nothing, and the program save nothing.
        let error = zero.consolidate(&ddp, Rank::new(2)).err().unwrap();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("rank 2 is outside a world of 2"), "{error}");
        assert_eq!(zero.consolidate(&ddp, Rank::new(1)).unwrap().is_some(), !group.rank().is_main());
        // Each rank would give its own to the other, and neither have all.
        let error = zero.consolidate(&ddp, Rank::new(1 - group.rank().get())).err().unwrap();
        assert!(error.is_mismatch(), "{error}");
        let both = "of rank 0 is 1, and that of rank 1 is 0";
        assert!(error.to_string().contains(both), "{error}");
        let only = Rank::new(if group.rank().is_main() { 7 } else { 0 });
        assert!(zero.consolidate(&ddp, only).err().unwrap().is_mismatch());
    });
}

#[test]
fn a_sharded_adamw_takes_the_same_steps_to_the_last_bit() {
    check(AdamWConfig::new().init());
}

#[test]
fn so_do_optimizers_without_state_and_those_that_look_at_whole_matrices() {
    check(SgdConfig::new().init());
    check(AdafactorConfig::new().init());
}

/// Large enough for rings: one parameter of 256 KiB, in a bucket with small ones.
const WIDE: [usize; 4] = [8, 256, 256, 3];

/// The parameters after some steps, the norms that were clipped, and the bytes that were sent.
type Trained = (Vec<Vec<f32>>, Vec<f64>, u64);

/// Trains with clipped gradients, plain and sharded; gives both models, the norms, and what was sent for gradients.
fn both(group: &ProcessGroup, start: &Mlp, view: bool) -> Result<[Trained; 2]> {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.27);
    options.gradient_as_bucket_view = view;
    let mut outcome = [false, true].map(|_| (Vec::new(), Vec::new(), 0));
    for (spread, (weights, norms, bytes)) in [false, true].into_iter().zip(&mut outcome) {
        let mut ddp = Ddp::with_options(start.clone(), group, options.clone())?;
        let mut whole = AdamWConfig::new().init();
        let mut zero = match spread {
            true => Some(ZeroRedundancyOptimizer::new(whole.clone(), &mut ddp)?),
            false => None,
        };
        for step in 0..4 {
            let mut averages = gradients(&mut ddp, step);
            norms.push(ddp.clip_grad_norm(&mut averages, 0.05)?);
            match &mut zero {
                Some(zero) => zero.step(&mut ddp, 0.01, averages)?,
                None => ddp.step(&mut whole, 0.01, averages)?,
            }
        }
        assert!(ddp.replicas_identical()?);
        *bytes = ddp.communicated_bytes();
        *weights = floats(ddp.model());
    }
    Ok(outcome)
}

#[test]
fn large_buckets_too_give_the_same_bits_where_sums_are_added_up_alike() {
    let start = Mlp::new(&WIDE);
    let exact =
        [(Fabric::SharedMemory, 2), (Fabric::SharedMemory, 3), (Fabric::SharedMemory, 4), (Fabric::Tcp, 2)];
    for (fabric, ranks) in exact {
        for view in [false, true] {
            testing::run(ranks, fabric, |group| {
                let [plain, zero] = both(&group, &start, view).unwrap();
                assert!(plain == zero, "{ranks} ranks over {fabric:?}: {:?} {:?}", plain.1, zero.1);
            });
        }
    }
    // A ring of three and more adds up in another order.
    for (fabric, ranks) in [(Fabric::Tcp, 3), (Fabric::TwoHosts, 4)] {
        testing::run(ranks, fabric, |group| {
            let [plain, zero] = both(&group, &start, false).unwrap();
            assert!(distance(&plain.0, &zero.0) < 1e-4, "{:e}", distance(&plain.0, &zero.0));
            assert_eq!(plain.2, zero.2, "as many bytes");
            for (ours, theirs) in zero.1.iter().zip(&plain.1) {
                assert!((ours / theirs - 1.0).abs() < 1e-6, "{ours} {theirs}");
            }
        });
    }
}

#[test]
fn a_hook_averages_whole_buckets_and_the_parameters_come_on_top() {
    let start = Mlp::new(&WIDTHS);
    let bytes: usize = floats(&start).iter().map(|values| 4 * values.len()).sum();
    run(3, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        ddp.register_comm_hook(Compressed::bf16()).unwrap();
        let mut zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
        for step in 0..3 {
            let averages = gradients(&mut ddp, step);
            zero.step(&mut ddp, 0.01, averages).unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
        assert_eq!(ddp.communicated_bytes(), 3 * (bytes / 2 + bytes / 2) as u64);
    });
}

#[test]
fn a_plain_step_with_sharded_gradients_is_an_error_on_every_rank() {
    let start = Mlp::new(&WIDTHS);
    let all_are_here = Barrier::new(2);
    let errors = run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let _zero = ZeroRedundancyOptimizer::new(optimizer.clone(), &mut ddp).unwrap();
        let averages = gradients(&mut ddp, 0);
        // The first error ends the group, in which the other rank may still wait for the average.
        all_are_here.wait();
        let refused = ddp.step(&mut optimizer, 0.01, averages).unwrap_err().to_string();
        [refused, ddp.forward(|model| model.loss(samples(0, 4))).unwrap_err().to_string()]
    });
    assert!(errors.iter().flatten().all(|error| error.contains("ZeroRedundancyOptimizer")), "{errors:?}");
}

#[test]
fn the_norm_of_some_parameters_is_not_taken_for_the_model_s() {
    type Clips = fn(&Ddp<Mlp>, &mut SyncedGradients) -> Result<f64>;
    let clips: [Clips; 2] = [
        |ddp, gradients| clip_grad_norm(ddp.model(), gradients, 0.05),
        |ddp, gradients| parallel::clip_grad_norm(ddp.model(), gradients, 0.05, None, None, &[]),
    ];
    let start = Mlp::new(&WIDTHS);
    for ranks in [1, 2] {
        let norms = run(ranks, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            let _zero = ZeroRedundancyOptimizer::new(AdamWConfig::new().init(), &mut ddp).unwrap();
            for clip in clips {
                let mut averages = gradients(&mut ddp, 0);
                let Err(error) = clip(&ddp, &mut averages) else {
                    assert_eq!(ranks, 1, "one rank has all of them");
                    continue;
                };
                assert!(ranks == 2 && error.is_invalid_argument(), "{error}");
                assert!(error.to_string().contains("of some parameters only"), "{error}");
                assert!(error.remedy().unwrap().contains("Ddp::clip_grad_norm"), "{error}");
            }
            let mut averages = gradients(&mut ddp, 0);
            ddp.clip_grad_norm(&mut averages, 0.05).unwrap().to_bits()
        });
        assert!(norms.iter().all(|norm| *norm == norms[0]));
    }
}

#[test]
fn ranks_whose_optimizers_differ_are_refused() {
    let errors = run(3, |group| {
        let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group).unwrap();
        let epsilon = if group.rank().index() == 2 { 1e-8 } else { 1e-5 };
        let optimizer = AdamWConfig::new().with_epsilon(epsilon).init();
        ZeroRedundancyOptimizer::new(optimizer, &mut ddp).err().unwrap()
    });
    for error in errors {
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 2"), "{error}");
    }
}

#[test]
fn ranks_of_which_one_alone_has_a_state_are_refused() {
    let start = Mlp::new(&WIDTHS);
    let errors = run(2, |group| {
        let mut ddp = Ddp::new(start.clone(), &group).unwrap();
        let mut trained = AdamWConfig::new().init();
        let averages = gradients(&mut ddp, 0);
        ddp.step(&mut trained, 0.01, averages).unwrap();
        let optimizer = if group.rank().is_main() { trained } else { AdamWConfig::new().init() };
        ZeroRedundancyOptimizer::new(optimizer, &mut ddp).err().unwrap()
    });
    for error in errors {
        assert!(error.is_mismatch() && error.to_string().contains("have different states"), "{error}");
    }
}
