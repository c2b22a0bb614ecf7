//! A model with its optimizer in checkpoints, and in one group after another.

mod hooks;
mod optimizer;
mod schedule;

use std::fs;
use std::path::Path;

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Int, Tensor};
use phalanx::checkpoint::{Checkpoints, Snapshot};
use phalanx::elastic::{Parts, State};
use phalanx::reducer::hooks::{
    AllReduce, CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::{Communicator, ProcessGroup, Rank};
use phalanx_burn::{
    DdpOptions, FusedAdamWConfig, FusedSgdConfig, PeriodicModelAverager, TrainState, ZeroRedundancyOptimizer,
};
use serde::{Deserialize, Serialize};

use crate::common::{LOADS, device, floats, run, samples};

/// Something of each kind: parameters, frozen ones, running statistics, whole numbers.
#[derive(Module, Debug)]
struct Mixed {
    first: Linear,
    norm: BatchNorm,
    frozen: Linear,
    last: Linear,
    seen: Param<Tensor<1, Int>>,
}

impl Mixed {
    fn new(width: usize) -> Self {
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        Self {
            first: layer(8, width),
            norm: BatchNormConfig::new(width).init(&device()),
            frozen: layer(width, width).no_grad(),
            last: layer(width, 3),
            seen: Param::initialized(ParamId::new(), Tensor::from_ints([1, 2, 3], &device())),
        }
    }

    /// The same values, with running statistics of its own: clones have them in common, which ranks that are threads must not.
    fn of_own(&self) -> Self {
        let width = self.norm.gamma.dims()[0];
        Self { norm: BatchNormConfig::new(width).init(&device()), ..self.clone() }
    }

    fn loss(&self, (x, y): (Tensor<2>, Tensor<2>)) -> Tensor<1> {
        let x = self.norm.forward(self.first.forward(x).tanh());
        (self.last.forward(self.frozen.forward(x).tanh()) - y).powi_scalar(2).mean()
    }
}

type Training = TrainState<Mixed, usize>;

/// Takes the next step of `training` on this rank's part of the batch.
fn step(training: &mut Training, part: usize, parts: usize) {
    let width = 24 / parts;
    let from = 24 * training.progress + width * part;
    let loss = training.model.forward(|model| model.loss(samples(from, from + width))).unwrap();
    let gradients = training.model.backward(&loss).unwrap();
    training.step(0.05, gradients).unwrap();
    training.progress += 1;
}

fn bits(training: &Training) -> Vec<Vec<u32>> {
    drop(training.model.model().valid()); // Applies what running statistics have put off.
    floats(training.model.model()).iter().map(|tensor| tensor.iter().map(|x| x.to_bits()).collect()).collect()
}

fn fresh(optimizer: &ModuleOptimizer) -> Training {
    TrainState::new(Mixed::new(6), optimizer.clone(), 0).unwrap()
}

/// The files of the checkpoint of `training` in `folder`.
fn saved(training: &Training, folder: &Path) -> Vec<Vec<u8>> {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
    checkpoints.save(training.progress as u64, |snapshot| training.save_to(snapshot)).unwrap();
    checkpoints.finish().unwrap();
    let newest = checkpoints.newest().unwrap().unwrap();
    let files = ["tensors.safetensors", "model.part", "optimizer.part", "steps.part", "progress.part"];
    files.iter().map(|file| fs::read(newest.folder().join(file)).unwrap()).collect()
}

fn load(training: &mut Training, folder: &Path) -> phalanx::Result<()> {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
    training.load_from(&checkpoints.newest().unwrap().unwrap())
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 4] {
    let momentum = || Some(MomentumConfig::new());
    [
        ("AdamW", AdamWConfig::new().init()),
        ("SGD", SgdConfig::new().with_momentum(momentum()).init()),
        ("FusedAdamW", FusedAdamWConfig::new().init()),
        ("FusedSgd", FusedSgdConfig::new().with_momentum(momentum()).init()),
    ]
}

#[test]
fn ranks_that_load_other_states_are_an_error_on_every_rank() {
    let optimizer = || FusedAdamWConfig::new().init();
    let mut earlier = fresh(&optimizer());
    let folders = [(); 2].map(|()| {
        let folder = tempfile::tempdir().unwrap();
        step(&mut earlier, 0, 1);
        saved(&earlier, folder.path());
        folder
    });
    for (loads, is_error) in LOADS {
        let errors = run(2, |group| {
            let mut training = fresh(&optimizer()).with_group(&group).unwrap();
            let saved = folders.each_ref().map(|folder| {
                let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
                checkpoints.newest().unwrap().unwrap()
            });
            for which in loads[group.rank().index()] {
                training.load_from(&saved[*which]).unwrap();
            }
            let mut step = || {
                let loss = training.model.forward(|model| model.loss(samples(0, 12)))?;
                let gradients = training.model.backward(&loss)?;
                training.step(0.05, gradients)
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
fn another_process_goes_on_from_a_checkpoint_bit_for_bit() {
    for (name, optimizer) in optimizers() {
        let folder = tempfile::tempdir().unwrap();
        let mut original = fresh(&optimizer);
        (0..3).for_each(|_| step(&mut original, 0, 1));
        let files = saved(&original, folder.path());

        // Other numbers, and other ids of parameters.
        let mut restored = fresh(&optimizer);
        step(&mut restored, 0, 1);
        assert_ne!(bits(&restored), bits(&original));
        load(&mut restored, folder.path()).unwrap();
        assert_eq!((restored.progress, bits(&restored)), (3, bits(&original)), "{name}");
        assert_eq!(saved(&restored, &folder.path().join("again")), files, "{name}");

        for training in [&mut original, &mut restored] {
            (0..2).for_each(|_| step(training, 0, 1));
        }
        assert_eq!(bits(&restored), bits(&original), "{name}");
    }
}

#[test]
fn what_is_saved_before_the_first_step_leads_back_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = AdamWConfig::new().init();
    let mut training = fresh(&optimizer);
    let before = (bits(&training), saved(&training, folder.path()));
    (0..2).for_each(|_| step(&mut training, 0, 1));
    load(&mut training, folder.path()).unwrap();
    // The moments are gone, and what the running statistics had put off.
    assert_eq!((bits(&training), saved(&training, &folder.path().join("again"))), before);
}

#[test]
fn another_model_is_refused_by_name_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = AdamWConfig::new().init();
    saved(&fresh(&optimizer), folder.path());
    let mut wider = TrainState::new(Mixed::new(7), optimizer, 5).unwrap();
    let before = bits(&wider);
    let error = load(&mut wider, folder.path()).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("first.weight F32 [8, 6]"), "{error}");
    assert_eq!((wider.progress, bits(&wider)), (5, before));
}

#[test]
fn frozen_parameters_stay_frozen_and_gradients_are_still_wanted() {
    let mut training = fresh(&AdamWConfig::new().init());
    let mut parts = Parts::default();
    training.save(&mut parts).unwrap();
    training.load(&parts).unwrap();
    let frozen = floats(&training.model.model().frozen);
    let trained = floats(&training.model.model().last);
    step(&mut training, 0, 1);
    assert_eq!(floats(&training.model.model().frozen), frozen);
    assert_ne!(floats(&training.model.model().last), trained);
}

#[test]
fn ranks_that_enter_a_group_train_alike_and_leave_it_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = FusedAdamWConfig::new().init();
    saved(&fresh(&optimizer), folder.path());
    let states = run(3, |group| {
        let mut training = fresh(&optimizer);
        load(&mut training, folder.path()).unwrap();
        training.enter(&group).unwrap();
        let (rank, world) = (group.rank().index(), group.world_size().count());
        (0..3).for_each(|_| step(&mut training, rank, world));
        // Until here the running statistics are each rank's own.
        training.agree().unwrap();
        let mine = saved(&training, &folder.path().join(rank.to_string()));
        training.leave();
        assert_eq!(saved(&training, &folder.path().join(format!("{rank}-later"))), mine);
        step(&mut training, 0, 1); // Alone.
        mine
    });
    assert_eq!(states[1], states[0]);
    assert_eq!(states[2], states[0]);
}

#[test]
fn ranks_that_divide_the_writing_save_what_one_would() {
    let optimizer = AdamWConfig::new().init();
    let (root, alone) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let sharded = root.path().join("sharded");
    let states = run(3, |group| {
        let mut training = fresh(&optimizer).with_group(&group).unwrap();
        let (rank, world) = (group.rank().index(), group.world_size().count());
        (0..3).for_each(|_| step(&mut training, rank, world));
        training.agree().unwrap();
        let checkpoints = Checkpoints::open(&sharded, &group).unwrap();
        training.checkpoint_sharded(&checkpoints).unwrap();
        checkpoints.finish().unwrap();
        saved(&training, &root.path().join(rank.to_string()))
    });
    let newest = Checkpoints::open(&sharded, &alone).unwrap().newest().unwrap().unwrap();
    let length = |rank: usize| {
        let file = format!("rank-{rank:05}-of-00003.safetensors");
        fs::metadata(newest.folder().join(file)).unwrap().len()
    };
    // A file without a tensor has a few bytes.
    assert!((0..3).all(|rank| length(rank) > 200), "{:?}", [0, 1, 2].map(length));
    for world in [1, 2, 4] {
        let resumed = run(world, |group| {
            let mut training = fresh(&optimizer).with_group(&group).unwrap();
            let checkpoints = Checkpoints::open(&sharded, &group).unwrap();
            assert!(training.resume(&checkpoints).unwrap());
            assert_eq!(training.steps(), 3);
            saved(&training, &root.path().join(format!("{world}-{}", group.rank())))
        });
        assert!(resumed.iter().all(|resumed| *resumed == states[0]), "{world} ranks");
    }
}

#[test]
fn gradients_from_before_a_load_or_another_group_are_refused() {
    let mut training = fresh(&SgdConfig::new().init());
    let folder = tempfile::tempdir().unwrap();
    saved(&training, folder.path());
    let gradients = |training: &mut Training| {
        let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
        training.model.backward(&loss).unwrap()
    };
    let before = gradients(&mut training);
    load(&mut training, folder.path()).unwrap();
    let error = training.step(0.1, before).unwrap_err();
    assert!(error.is_invalid_argument() && error.to_string().contains("loaded"), "{error}");

    let before = gradients(&mut training);
    training.enter(&ProcessGroup::alone().unwrap()).unwrap();
    assert!(training.step(0.1, before).unwrap_err().is_invalid_argument());
    let now = gradients(&mut training);
    training.step(0.1, now).unwrap();
}

#[test]
fn options_hold_wherever_they_are_given() {
    let grouped = |options_first: bool| {
        run(2, |group| {
            let mut options = DdpOptions::default();
            options.broadcast_buffers = false;
            let state = fresh(&SgdConfig::new().init());
            let mut training = match options_first {
                true => state.with_options(options).unwrap().with_group(&group).unwrap(),
                false => state.with_group(&group).unwrap().with_options(options).unwrap(),
            };
            (0..3).for_each(|_| step(&mut training, group.rank().index(), 2));
            drop(training.model.model().valid());
            // The running mean: each rank's own.
            floats(&training.model.model().norm)[2].clone()
        })
    };
    for options_first in [true, false] {
        let means = grouped(options_first);
        assert_ne!(means[0], means[1], "options first: {options_first}");
    }
}

#[test]
fn without_elastic_workers_all_take_over_the_first_rank() {
    let states = run(2, |group| {
        let mut training = TrainState::new(Mixed::new(6), AdamWConfig::new().init(), 0).unwrap();
        training = training.with_group(&group).unwrap();
        step(&mut training, group.rank().index(), 2);
        training.agree().unwrap();
        bits(&training)
    });
    assert_eq!(states[0], states[1]);
}

#[test]
fn two_states_have_parts_of_their_own() {
    let mut parts = Parts::default();
    let networks = ["generator", "discriminator"].map(|name| fresh(&AdamWConfig::new().init()).named(name));
    networks.iter().for_each(|network| network.save(&mut parts).unwrap());
    let mut other = fresh(&AdamWConfig::new().init()).named("discriminator");
    other.load(&parts).unwrap();
    assert_eq!(bits(&other), bits(&networks[1]));
    assert!(fresh(&AdamWConfig::new().init()).load(&parts).unwrap_err().is_mismatch());
}

#[test]
fn ranks_with_other_models_are_told_so() {
    let errors = run(2, |group| {
        let width = 5 + group.rank().index();
        let mut training = TrainState::new(Mixed::new(width), AdamWConfig::new().init(), 0_usize).unwrap();
        training.enter(&group).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("first.weight")), "{errors:?}");
}

#[test]
fn every_rank_evaluates_with_rank_0_s_running_statistics() {
    for ranks in [1, 2, 3] {
        for broadcast in [true, false] {
            let start = Mixed::new(6);
            let results = run(ranks, |group| {
                let mut options = DdpOptions::default();
                options.broadcast_buffers = broadcast;
                let training = TrainState::new(start.of_own(), SgdConfig::new().init(), 0).unwrap();
                let mut training = training.with_options(options).unwrap().with_group(&group).unwrap();
                // Rank 0's mean, by hand: 0.9 of the old one and 0.1 of the batch's, in each step.
                let mut mean = vec![0.0; 6];
                for _ in 0..5 {
                    let from = 24 * training.progress;
                    let (x, _) = samples(from, from + 24 / ranks as usize);
                    let hidden = training.model.model().first.forward(x).tanh();
                    let batch: Vec<f32> = hidden.mean_dim(0).into_data().iter::<f32>().collect();
                    mean.iter_mut().zip(batch).for_each(|(mean, batch)| *mean = 0.9 * *mean + 0.1 * batch);
                    step(&mut training, group.rank().index(), ranks as usize);
                }
                let own = training.model.buffers_identical().unwrap();
                let (x, _) = samples(1000, 1010);
                let (answer, agreed) = training
                    .model
                    .evaluate(|model| {
                        let hidden = model.norm.forward(model.first.forward(x.clone().inner()).tanh());
                        let answer: Vec<f32> = hidden.into_data().iter::<f32>().collect();
                        (answer, floats(&model.norm)[2].clone())
                    })
                    .unwrap();
                // Nothing has changed for the training.
                assert_eq!(training.model.buffers_identical().unwrap(), own);
                assert_eq!(own, ranks == 1, "after a step they are each rank's own");
                (answer, agreed, mean)
            });
            let (answer, agreed, mean) = &results[0];
            for (other, theirs, _) in &results {
                assert_eq!((other, theirs), (answer, agreed), "{ranks} ranks, broadcast: {broadcast}");
            }
            let distance =
                agreed.iter().zip(mean).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap();
            assert!(distance < 1e-5, "{ranks} ranks: {agreed:?} {mean:?}");
        }
    }
}

#[test]
fn the_example_of_a_whole_training_run_stays_short() {
    let program = include_str!("../../../../examples/mnist_short/src/main.rs");
    let code = program.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    let lines = code.count();
    println!("examples/mnist_short: {lines} lines of code");
    assert!(lines <= 60, "{lines} lines of code; at most 60 were promised");
}

#[test]
fn ranks_with_disks_of_their_own_load_the_state_of_one_run() {
    let optimizer = || FusedAdamWConfig::new().init();
    // Two runs after one step, and the first one on another rank, with running statistics and a progress of its own.
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut runs = [(); 2].map(|()| fresh(&optimizer()));
    let files = [0, 1].map(|number| {
        step(&mut runs[number], 0, 1);
        saved(&runs[number], folders[number].path())
    });
    drop(runs[0].model.forward(|model| model.loss(samples(90, 100))).unwrap());
    runs[0].progress += 1;
    assert_ne!(saved(&runs[0], folders[2].path())[0], files[0][0]);
    for (loads, is_error) in [([0, 0], false), ([0, 2], false), ([0, 1], true)] {
        let errors = run(2, |group| {
            let mut training = fresh(&optimizer()).with_group(&group).unwrap();
            load(&mut training, folders[loads[group.rank().index()]].path()).unwrap();
            let mut step = || {
                let loss = training.model.forward(|model| model.loss(samples(0, 12)))?;
                let gradients = training.model.backward(&loss)?;
                training.step(0.05, gradients)
            };
            (0..40).find_map(|_| step().err()).map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), is_error, "{loads:?}: {error:?}");
            assert!(error.is_none_or(|error| error.contains("or that of another step or run")));
        }
        // Also if the state is changed before it comes into the group, or has come from an elastic job.
        for case in ["", "changed", "elastic"] {
            let errors = run(2, |group| {
                let mut training = fresh(&optimizer());
                if case == "elastic" {
                    training.enter(&group).unwrap();
                    training.leave();
                }
                load(&mut training, folders[loads[group.rank().index()]].path()).unwrap();
                if case == "changed" {
                    training = training.with_options(DdpOptions::default()).unwrap();
                }
                training.with_group(&group).map(drop).err().map(|error| error.to_string())
            });
            for error in errors {
                assert_eq!(error.is_some(), is_error, "{loads:?}, {case}: {error:?}");
                let said = "the loaded state of rank 0 is that after step 1";
                assert!(error.is_none_or(|error| error.contains(said)));
            }
        }
    }
}

#[test]
fn an_averager_that_is_given_after_the_group_is_compared_by_its_averages() {
    for (other, expected) in [(4, false), (5, true)] {
        let errors = run(2, |group| {
            let period = if group.rank().is_main() { 4 } else { other };
            let training = fresh(&SgdConfig::new().init()).with_group(&group).unwrap();
            let mut training = training.with_averager(PeriodicModelAverager::new(period).unwrap());
            let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
            let gradients = training.model.backward(&loss).unwrap();
            training.step(0.05, gradients).err()
        });
        for error in errors {
            assert_eq!(error.is_some(), expected, "{error:?}");
            let said = |said: &str| said.contains("period: 4") && said.contains("period: 5");
            assert!(error.is_none_or(|error| error.is_mismatch() && said(&error.to_string())));
        }
    }
}

#[test]
fn ranks_that_average_their_models_after_other_numbers_of_steps_are_refused() {
    let errors = run(2, |group| {
        let period = if group.rank().is_main() { 4 } else { 5 };
        let averager = PeriodicModelAverager::new(period).unwrap();
        let training = fresh(&AdamWConfig::new().init()).with_averager(averager);
        training.with_group(&group).map(drop).unwrap_err()
    });
    for error in errors {
        let said = error.to_string();
        assert!(error.is_mismatch() && said.contains("period: 4") && said.contains("period: 5"), "{said}");
    }
}

#[test]
fn progress_that_could_not_be_loaded_again_is_not_saved() {
    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Phase {
        Steps(u64),
        Name(String),
    }
    let (folder, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
    for phase in [Phase::Steps(3), Phase::Name("warm-up".to_owned())] {
        let training = TrainState::new(Mixed::new(4), AdamWConfig::new().init(), phase).unwrap();
        let outcomes = [
            training.checkpoint(&checkpoints),
            training.checkpoint_sharded(&checkpoints),
            checkpoints.save(1, |snapshot| training.save_to(snapshot)),
        ];
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("\"progress\"") && error.contains("not be loaded again"), "{error}");
        }
    }
    checkpoints.finish().unwrap();
    assert!(checkpoints.newest().unwrap().is_none());
}
