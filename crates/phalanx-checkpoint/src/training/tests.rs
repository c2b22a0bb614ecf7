use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use phalanx_core::elastic::Parts;
use phalanx_core::testing::{Fabric, run};

use super::*;

/// A rank with a hook that keeps a tensor of its own of this parameter.
struct Keeping {
    group: ProcessGroup,
    parameter: usize,
    /// How often all that the hook keeps was read.
    reads: AtomicUsize,
    /// Whether it cannot be read.
    is_lost: bool,
    /// Whether gradients are held.
    is_held: bool,
    /// Whether the hook keeps nothing.
    is_empty: bool,
}

impl Keeping {
    fn new(group: ProcessGroup, parameter: usize) -> Self {
        Self { group, parameter, reads: AtomicUsize::new(0), is_lost: false, is_held: false, is_empty: false }
    }
}

impl TrainingState for Keeping {
    const AVERAGE: &'static str = "average()";

    fn steps(&self) -> u64 {
        0
    }

    fn place(&self) -> (Rank, WorldSize) {
        (self.group.rank(), self.group.world_size())
    }

    fn group(&self) -> Option<ProcessGroup> {
        Some(self.group.clone())
    }

    fn hook_state(&self) -> Result<Option<HookState>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if self.is_lost {
            return Err(Error::aborted("the device is lost"));
        }
        if self.is_empty {
            return Ok(Some(HookState::default()));
        }
        let loss = self.group.rank().get() as f32;
        Ok(Some(HookState::default().own("loss", self.parameter, vec![loss; 2])))
    }

    fn common_hook_state(&self) -> Result<Option<HookState>> {
        Ok(Some(HookState::default()))
    }

    fn hook_name(&self) -> String {
        "hook".to_owned()
    }

    fn parameter_names(&self) -> Vec<&str> {
        vec!["a", "b"]
    }

    fn replicas_identical(&self) -> Result<bool> {
        self.group.barrier().map(|()| true)
    }

    fn check_nothing_held(&self) -> Result<()> {
        if self.is_held { Err(Error::invalid_argument("gradients are held")) } else { Ok(()) }
    }

    fn write(&self, _: &mut impl StateWriter) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_checkpoint_reads_what_a_hook_keeps_once_and_a_commit_only_what_ranks_have_in_common() {
    let folder = tempfile::tempdir().unwrap();
    let group = ProcessGroup::alone().unwrap();
    let state = Keeping::new(group.clone(), 1);
    save_common(&state, &mut Parts::default(), 0).unwrap();
    assert_eq!(state.reads.load(Ordering::Relaxed), 0);
    let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
    checkpoint(&state, &checkpoints).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(state.reads.load(Ordering::Relaxed), 1);
    let saved = checkpoints.newest().unwrap().unwrap();
    let loaded = load_hook(&state, &saved).unwrap().unwrap();
    assert_eq!(loaded.tensors()[0].elements, [0.0; 2]);
    checkpoints.save_sharded(1, |snapshot| save_shard_to(&state, snapshot, &group)).unwrap();
    checkpoints.finish().unwrap();
    assert_eq!(state.reads.load(Ordering::Relaxed), 2);
}

#[test]
fn a_hook_that_cannot_be_read_on_one_rank_is_an_error_on_every_rank() {
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let errors = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let state = Keeping { is_lost: group.rank() != Rank::MAIN, ..Keeping::new(group, 0) };
                    checked_hook(&state, &state.group).unwrap_err().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(errors.iter().all(|error| error.contains("the device is lost")), "{errors:?}");
}

#[test]
fn gradients_that_one_rank_alone_holds_are_an_error_on_every_rank() {
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let checkpoints = Checkpoints::open(path, &group).unwrap();
                let is_held = group.rank() != Rank::MAIN;
                let state = Keeping { is_held, ..Keeping::new(group, 0) };
                let error = checkpoint(&state, &checkpoints).unwrap_err().to_string();
                assert!(error.contains("gradients are held"), "{error}");
            });
        }
    });
}

#[test]
fn a_state_that_one_rank_alone_cannot_load_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        assert!(!resume(&checkpoints, |_| Err(Error::aborted("there is none"))).unwrap());
        checkpoints.save(3, |snapshot| snapshot.value("step", &3)).unwrap();
        checkpoints.finish().unwrap();
        let outcome = resume(&checkpoints, |saved| match group.rank().is_main() {
            true => saved.value::<i32>("step").map(drop),
            false => Err(Error::mismatch("the model is another")),
        });
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("the model is another"), "{error}");
        assert_eq!(error.peer(), group.rank().is_main().then_some(Rank::new(1)), "{error}");
        // Nothing has failed but this call.
        assert!(resume(&checkpoints, |_| Ok(())).unwrap());
    });
}

#[test]
fn a_state_whose_loading_panics_on_one_rank_is_an_error_on_the_others() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        checkpoints.save(3, |snapshot| snapshot.value("step", &3)).unwrap();
        checkpoints.finish().unwrap();
        let load = |_: &Saved| if group.rank().is_main() { Ok(()) } else { panic!("a shape is another") };
        // The program catches it, and keeps the group.
        match catch_unwind(AssertUnwindSafe(|| resume(&checkpoints, load))) {
            Ok(outcome) => {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("rank 1 panicked: a shape is another"), "{error}");
            }
            Err(_) => assert!(!group.rank().is_main()),
        }
        assert!(group.failure().is_none());
    });
}

#[test]
fn ranks_whose_samplers_differ_are_told_before_they_begin() {
    let folder = tempfile::tempdir().unwrap();
    run(2, Fabric::InProcess, |group| {
        let impatient = group.with_timeout(Duration::from_millis(100));
        let checkpoints = Checkpoints::open(folder.path(), &impatient).unwrap();
        let sampler = |seed| ElasticSampler::new(100).seed(seed);
        let mut ahead = sampler(1);
        ahead.set_epoch(group.rank().get().into());
        if group.rank().is_main() {
            // It makes its data ready, and the other one waits longer than the group does.
            std::thread::sleep(Duration::from_millis(500));
        }
        check_progress_of_ranks(&ahead, &checkpoints).unwrap();
        let other = sampler(group.rank().get().into());
        let error = check_progress_of_ranks(&other, &checkpoints).unwrap_err();
        let said = error.to_string();
        assert!(error.is_mismatch() && said.contains("seed 0") && said.contains("seed 1"), "{said}");
        assert!(group.failure().is_none());
        // What else a program keeps may be each rank's own.
        check_progress_of_ranks(&group.rank().get(), &checkpoints).unwrap();
    });
}

#[test]
fn a_hook_that_no_rank_can_read_ends_no_group() {
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let ranks = groups.into_iter().map(|group| {
        std::thread::spawn(move || {
            let mut state = Keeping { is_lost: true, ..Keeping::new(group, 0) };
            let error = checked_hook(&state, &state.group).unwrap_err().to_string();
            assert!(error.contains("the device is lost"), "{error}");
            assert!(state.group.failure().is_none());
            // The program has caught the error, and goes on.
            state.is_lost = false;
            assert!(checked_hook(&state, &state.group).unwrap().is_some());
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn ranks_whose_hooks_keep_other_tensors_are_refused_and_others_are_gathered_by_rank() {
    for parameters in [[1, 1], [0, 1]] {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(parameters)
            .map(|(group, parameter)| {
                std::thread::spawn(move || {
                    let state = Keeping::new(group, parameter);
                    checked_hook(&state, &state.group)?
                        .map(|hook| own_of_all(&hook, &state.group))
                        .transpose()
                })
            })
            .collect();
        let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        if parameters == [1, 1] {
            let all = outcomes[0].as_ref().unwrap().as_ref().unwrap();
            let losses: Vec<_> = all.iter().map(|state| state.tensors()[0].elements[0]).collect();
            assert_eq!(losses, [0.0, 1.0]);
            assert!(outcomes[1].as_ref().unwrap().as_ref().unwrap().is_empty());
        } else {
            for outcome in outcomes {
                let error = outcome.unwrap_err();
                assert!(
                    error.is_mismatch() && error.to_string().contains("on rank 1 than on rank 0"),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn a_share_of_a_state_is_saved_among_the_ranks_that_train_it_alone() {
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let checkpoints = Checkpoints::open(path, &group).unwrap();
                // Each rank has a model of its own.
                let state = Keeping::new(ProcessGroup::alone().unwrap(), 0);
                let save = |snapshot: &mut Snapshot| save_shard_to(&state, snapshot, &group);
                let error = checkpoints.save_sharded(1, save).unwrap_err();
                let said = error.to_string();
                assert!(error.is_invalid_argument() && said.contains("its group has world size 1"), "{said}");
                assert!(checkpoints.newest().unwrap().is_none());
            });
        }
    });
}

#[test]
fn what_each_rank_keeps_is_saved_by_no_rank_alone_and_no_other_waits_for_it() {
    run(2, Fabric::InProcess, |group| {
        let state = Keeping::new(group.clone(), 0);
        if group.rank().is_main() {
            let error = checked_hook(&state, &ProcessGroup::alone().unwrap()).unwrap_err();
            assert!(error.to_string().contains("for each of 2 ranks"), "{error}");
        }
        group.barrier().unwrap();
    });
}

#[test]
fn a_share_of_a_state_is_saved_among_any_ranks_that_train_it_together() {
    type Color = fn(u32) -> u32;
    // Of four ranks: those that train together, and those that save together.
    let cases: [(Color, Color, bool); 4] = [
        (|rank| rank, |_| 0, false),
        // As many, but of two models.
        (|rank| rank / 2, |rank| rank % 2, false),
        // As on disks of two hosts, and of each rank.
        (|_| 0, |rank| rank / 2, true),
        (|_| 0, |rank| rank, true),
    ];
    for (trains, saves, is_saved) in cases {
        let folder = tempfile::tempdir().unwrap();
        run(4, Fabric::InProcess, |all| {
            let own = all.rank().get();
            let part = |color: Color| all.split(Some(color(own)), 0).unwrap().unwrap();
            let state = Keeping { is_empty: true, ..Keeping::new(part(trains), 0) };
            let (group, path) = (part(saves), folder.path().join(saves(own).to_string()));
            let checkpoints = Checkpoints::open(path, &group).unwrap();
            let saved = checkpoints.save_sharded(1, |snapshot| save_shard_to(&state, snapshot, &group));
            assert!(saved.is_ok() == is_saved, "{saved:?}");
            assert!(
                saved
                    .err()
                    .is_none_or(|error| error.to_string().contains("do not all train this model together"))
            );
            checkpoints.finish().unwrap();
            assert_eq!(checkpoints.newest().unwrap().is_some(), is_saved);
        });
    }
}

#[test]
fn a_hook_that_keeps_nothing_on_one_rank_alone_is_an_error_on_every_rank() {
    let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
    let ranks = groups.into_iter().map(|group| {
        std::thread::spawn(move || {
            let state = Keeping { is_empty: group.rank() == Rank::MAIN, ..Keeping::new(group, 0) };
            let error = checked_hook(&state, &state.group).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("on rank 1 than on rank 0"), "{error}");
            assert!(state.group.failure().is_none());
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn progress_that_could_only_be_written_is_refused() {
    #[derive(Serialize, Deserialize)]
    #[serde(tag = "kind")]
    enum Tagged {
        WarmUp { steps: u32 },
    }

    #[derive(Serialize, Deserialize)]
    struct Skipping {
        #[serde(skip_serializing_if = "Option::is_none")]
        best: Option<u32>,
        epoch: u32,
    }

    check_readable(&(3_u64, "text".to_owned(), f32::NAN), "progress").unwrap();
    check_readable(&ElasticSampler::new(10), "progress").unwrap();
    check_readable(&Skipping { best: Some(1), epoch: 2 }, "progress").unwrap();
    let refused = [
        check_readable(&Tagged::WarmUp { steps: 3 }, "progress"),
        check_readable(&Skipping { best: None, epoch: 2 }, "progress"),
        check_readable(&serde_json::json!({ "epoch": 2 }), "progress"),
    ];
    for outcome in refused {
        let error = outcome.unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("not be loaded again"), "{error}");
    }
}
