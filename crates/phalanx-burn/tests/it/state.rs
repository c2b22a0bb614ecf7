//! A model with its optimizer in checkpoints, and in one group after another.

mod hooks;

use std::fs;
use std::path::Path;

use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use phalanx::checkpoint::{Checkpoints, Snapshot};
use phalanx::elastic::{Parts, State};
use phalanx::reducer::hooks::{
    CommHook, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::sampler::{ElasticSampler, Tail};
use phalanx::{Communicator, ProcessGroup, Rank};
use phalanx_burn::{
    DdpOptions, FusedAdamWConfig, FusedSgdConfig, PeriodicModelAverager, TrainState, ZeroRedundancyOptimizer,
};

use crate::common::{LOADS, device, floats, plain, projecting, run, samples};

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
        let errors = run(2, |group| {
            let mut training = fresh(&optimizer());
            load(&mut training, folders[loads[group.rank().index()]].path()).unwrap();
            training.with_group(&group).map(drop).err().map(|error| error.to_string())
        });
        for error in errors {
            assert_eq!(error.is_some(), is_error, "{loads:?}: {error:?}");
            assert!(
                error.is_none_or(|error| error.contains("the loaded state of rank 0 is that after step 1"))
            );
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

/// `tensor` of another type.
fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    Tensor::from_data(tensor.into_data().convert_dtype(dtype), (&device(), dtype))
}

#[test]
fn an_optimizer_s_state_keeps_its_type_or_is_refused() {
    let usual = Tensor::<1>::zeros([1], &Device::default()).dtype();
    let is_there = |dtype: &DType| {
        *dtype != usual && plain().supports_dtype(*dtype) && Device::default().supports_dtype(*dtype)
    };
    for dtype in [DType::F64, DType::BF16].into_iter().filter(is_there) {
        let layer = || {
            let mut layer = LinearConfig::new(8, 3).with_bias(false).init(&device());
            layer.weight = layer.weight.map(|weight| cast(weight, dtype).require_grad());
            layer
        };
        let fresh =
            |optimizer: &ModuleOptimizer| TrainState::new(layer(), optimizer.clone(), 0_usize).unwrap();
        let step = |training: &mut TrainState<Linear, usize>| {
            let (x, y) = samples(8 * training.progress, 8 * training.progress + 8);
            let apart = |layer: &Linear| layer.forward(cast(x, dtype)) - cast(y, dtype);
            let loss = training.model.forward(|layer| {
                let apart = apart(layer);
                (apart.clone() * apart).mean()
            });
            let gradients = training.model.backward(&loss.unwrap()).unwrap();
            training.step(0.05, gradients).unwrap();
            training.progress += 1;
        };
        let weight = |training: &TrainState<Linear, usize>| -> Vec<u8> {
            training.model.model().weight.val().into_data().as_bytes().to_vec()
        };
        // The newest checkpoint has the state after three steps.
        let saved = |training: &mut TrainState<Linear, usize>, folder: &Path| {
            (0..3).for_each(|_| step(training));
            let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
            checkpoints.save(3, |snapshot| training.save_to(snapshot)).unwrap();
            checkpoints.finish().unwrap();
            checkpoints.newest().unwrap().unwrap()
        };
        let momentum = Some(MomentumConfig::new());
        for optimizer in [
            FusedAdamWConfig::new().with_epsilon(1e-3).init(),
            FusedSgdConfig::new().with_momentum(momentum.clone()).init(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let mut original = fresh(&optimizer);
            let saved = saved(&mut original, folder.path());
            let mut restored = fresh(&optimizer);
            restored.load_from(&saved).unwrap();
            assert_eq!(weight(&restored), weight(&original), "{dtype:?}");
            for training in [&mut original, &mut restored] {
                (0..2).for_each(|_| step(training));
            }
            assert_eq!(weight(&restored), weight(&original), "{dtype:?}");
        }
        let fused = [
            FusedAdamWConfig::new().with_epsilon(1e-3).init(),
            FusedSgdConfig::new().with_momentum(momentum.clone()).init(),
        ];
        let burns = [
            AdamWConfig::new().with_epsilon(1e-3).init(),
            SgdConfig::new().with_momentum(momentum.clone()).init(),
        ];
        let said = format!("of `weight` in the optimizer's state is {dtype:?}");
        for (fused, burns) in fused.iter().zip(&burns) {
            let folder = tempfile::tempdir().unwrap();
            // What was saved with the types kept is not loaded without them.
            let saved = saved(&mut fresh(fused), folder.path());
            let mut restored = fresh(burns);
            let before = weight(&restored);
            let error = restored.load_from(&saved).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(&said), "{error}");
            assert_eq!((restored.progress, weight(&restored)), (0, before));
            // What could not be loaded is not saved.
            let mut original = fresh(burns);
            (0..3).for_each(|_| step(&mut original));
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
            let error = checkpoints.save(3, |snapshot| original.save_to(snapshot)).unwrap_err();
            assert!(error.to_string().contains(&said), "{error}");
        }
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
fn a_step_that_is_refused_leaves_the_scheduler_where_it_is() {
    let scheduler = LinearLrSchedulerConfig::new(0.1, 0.01, 10).init().unwrap();
    let mut training = fresh(&SgdConfig::new().init()).with_scheduler(scheduler);
    let gradients = |training: &mut Training| {
        let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
        training.model.backward(&loss).unwrap()
    };
    let foreign = gradients(&mut fresh(&SgdConfig::new().init()));
    assert!(training.scheduled_step(foreign).unwrap_err().is_invalid_argument());
    assert_eq!(training.steps(), 0);
    let own = gradients(&mut training);
    let first = training.scheduled_step(own).unwrap();
    assert!((first - 0.1).abs() < 1e-9 && training.steps() == 1, "{first}");
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

/// A step of a job that draws its samples from the progress, and its learning rates from the scheduler.
fn scheduled(training: &mut TrainState<Mixed, ElasticSampler>, group: &ProcessGroup) {
    let batch = loop {
        match training.progress.next_batch(4, group.rank(), group.world_size()) {
            Some(batch) => break batch,
            None => training.progress.next_epoch(),
        }
    };
    let parts: Vec<_> = batch.iter().map(|sample| samples(*sample, sample + 1)).collect();
    let (x, y): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let part = (Tensor::cat(x, 0), Tensor::cat(y, 0));
    let loss = training.model.forward(|model| model.loss(part)).unwrap();
    let gradients = training.model.backward(&loss).unwrap();
    training.scheduled_step(gradients).unwrap();
}

/// Warm-up, and then a decay.
fn rates() -> ModuleLrScheduler {
    let warm_up = LinearLrSchedulerConfig::new(0.01, 0.1, 4);
    let decay = CosineAnnealingLrSchedulerConfig::new(0.1, 20);
    SequentialLrSchedulerConfig::new(vec![warm_up.into(), decay.into()], vec![4]).init().unwrap()
}

#[test]
fn a_job_goes_on_in_the_middle_of_an_epoch_with_the_next_learning_rate() {
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let start = Mixed::new(6);
        let new = |group: &ProcessGroup| {
            let sampler = ElasticSampler::new(50).seed(7).tail(Tail::Repeat);
            let optimizer = AdamWConfig::new().init();
            let training = TrainState::new(start.clone(), optimizer, sampler).unwrap();
            training.with_scheduler(rates()).with_group(group).unwrap()
        };
        let whole = run(ranks, |group| {
            let mut training = new(&group);
            (0..9).for_each(|_| scheduled(&mut training, &group));
            training
        });
        let resumed = run(ranks, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = new(&group);
            assert!(!training.resume(&checkpoints).unwrap());
            (0..5).for_each(|_| scheduled(&mut training, &group));
            training.checkpoint(&checkpoints).unwrap();
            checkpoints.finish().unwrap();

            let mut training = new(&group);
            assert!(training.resume(&checkpoints).unwrap());
            assert_eq!(training.steps(), 5);
            (0..4).for_each(|_| scheduled(&mut training, &group));
            training
        });
        for (resumed, whole) in resumed.iter().zip(&whole) {
            assert_eq!((resumed.steps(), &resumed.progress), (9, &whole.progress));
            assert_eq!(floats(resumed.model.model()), floats(whole.model.model()), "{ranks} ranks");
        }
    }
}

#[test]
fn a_sampler_of_another_order_is_refused_and_changes_nothing() {
    let (folder, group) = (tempfile::tempdir().unwrap(), ProcessGroup::alone().unwrap());
    let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
    let new = |sampler: ElasticSampler| {
        TrainState::new(Mixed::new(6), SgdConfig::new().init(), sampler).unwrap().with_scheduler(rates())
    };
    let mut training = new(ElasticSampler::new(100));
    scheduled(&mut training, &group);
    training.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    for (sampler, said) in [
        (ElasticSampler::new(150), "`samples` was 100 and is 150"),
        (ElasticSampler::new(100).tail(Tail::Repeat), "`tail` was Split and is Repeat"),
    ] {
        let mut other = new(sampler.clone());
        let before = floats(other.model.model());
        let error = other.resume(&checkpoints).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        assert_eq!((other.steps(), &other.progress, floats(other.model.model())), (0, &sampler, before));
    }
    // One that is saved in the place of the first is what the next run must have.
    assert!(training.resume(&checkpoints).unwrap());
    training.progress = training.progress.with_samples(150);
    scheduled(&mut training, &group);
    training.checkpoint(&checkpoints).unwrap();
    checkpoints.finish().unwrap();
    let mut larger = new(ElasticSampler::new(150));
    assert!(larger.resume(&checkpoints).unwrap());
    assert_eq!((larger.steps(), &larger.progress), (2, &training.progress));
}

#[test]
fn learning_rates_are_part_of_commits_and_another_scheduler_is_refused() {
    let group = ProcessGroup::alone().unwrap();
    let new = |rates: ModuleLrScheduler| {
        let (optimizer, sampler) = (SgdConfig::new().init(), ElasticSampler::new(50));
        TrainState::new(Mixed::new(6), optimizer, sampler).unwrap().with_scheduler(rates)
    };
    let mut training = new(rates());
    (0..6).for_each(|_| scheduled(&mut training, &group));
    let mut parts = Parts::default();
    training.save(&mut parts).unwrap();
    let mut other = new(rates());
    other.load(&parts).unwrap();
    let next =
        |training: &mut TrainState<Mixed, ElasticSampler>| training.scheduler.as_mut().unwrap().step().base();
    assert_eq!(next(&mut other).to_bits(), next(&mut training).to_bits());
    assert_eq!(other.steps(), 6);

    let mut constant = new(ConstantLr::new(0.1).into());
    let error = constant.load(&parts).unwrap_err();
    assert!(error.is_mismatch() && error.to_string().contains("scheduler"), "{error}");
    let mut none = TrainState::new(Mixed::new(6), SgdConfig::new().init(), ElasticSampler::new(50)).unwrap();
    let loss = none.model.forward(|model| model.loss(samples(0, 4))).unwrap();
    let gradients = none.model.backward(&loss).unwrap();
    assert!(none.scheduled_step(gradients).unwrap_err().to_string().contains("with_scheduler"));
}

#[test]
fn another_optimizer_is_refused_by_the_names_of_what_is_missing() {
    let sgd = |momentum: Option<MomentumConfig>| SgdConfig::new().with_momentum(momentum).init();
    let with = || Some(MomentumConfig::new());
    let adamw = AdamWConfig::new().init();
    let amsgrad = AdamWConfig::new().with_amsgrad(true).init();
    let refused = [
        (sgd(None), adamw.clone(), &["lacks", "`first.weight.momentum.moment_1`", "needs"][..]),
        (
            sgd(with()),
            adamw.clone(),
            &["`first.weight.momentum.moment_1`", "`first.weight.momentum.velocity`", "does not take"],
        ),
        (
            adamw.clone(),
            sgd(with()),
            &["lacks `first.weight.momentum.velocity`", "more, which this optimizer does not take"],
        ),
        (sgd(None), sgd(with()), &["lacks `first.weight.momentum.velocity`, "]),
        (sgd(with()), sgd(None), &["it has `first.weight.momentum.velocity`, "]),
        (adamw.clone(), amsgrad.clone(), &["lacks `first.weight.momentum.max_moment_2`"]),
        (amsgrad, adamw.clone(), &["it has `first.weight.momentum.max_moment_2`"]),
        (sgd(with()), FusedAdamWConfig::new().init(), &["moment_1"]),
        (adamw.clone(), AdafactorConfig::new().init(), &["does not take"]),
    ];
    for (saving, loading, said) in refused {
        let folder = tempfile::tempdir().unwrap();
        let mut training = fresh(&saving);
        step(&mut training, 0, 1);
        saved(&training, folder.path());
        let mut other = fresh(&loading);
        let before = bits(&other);
        let error = load(&mut other, folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && said.iter().all(|said| text.contains(said)), "{text}");
        assert_eq!((other.progress, bits(&other)), (0, before));
        // Before the first step there is nothing that could be missing.
        saved(&fresh(&saving), folder.path());
        load(&mut other, folder.path()).unwrap();
    }
    // Those with the same fields go on from each other's, and an optimizer from its own.
    let accepted = [
        (adamw.clone(), FusedAdamWConfig::new().init()),
        (FusedSgdConfig::new().with_momentum(with()).init(), sgd(with())),
        (AdafactorConfig::new().init(), AdafactorConfig::new().init()),
        (sgd(None), sgd(None)),
    ];
    for (saving, loading) in accepted {
        let folder = tempfile::tempdir().unwrap();
        let mut training = fresh(&saving);
        step(&mut training, 0, 1);
        saved(&training, folder.path());
        load(&mut fresh(&loading), folder.path()).unwrap();
    }
}

#[test]
fn steps_without_an_optimizer_s_state_are_refused_by_one_that_needs_some() {
    let folder = tempfile::tempdir().unwrap();
    // Another optimizer does the steps, such as one that is divided among ranks.
    let mut training = fresh(&AdamWConfig::new().init());
    let mut other = AdamWConfig::new().init();
    std::mem::swap(&mut training.optimizer, &mut other);
    step(&mut training, 0, 1);
    std::mem::swap(&mut training.optimizer, &mut other);
    saved(&training, folder.path());
    let mut resumed = fresh(&AdamWConfig::new().init());
    let error = load(&mut resumed, folder.path()).unwrap_err();
    let said = error.to_string();
    assert!(error.is_mismatch() && said.contains("lacks `first.weight.momentum.moment_1`"), "{said}");
    assert_eq!(resumed.progress, 0);
    // Plain SGD keeps nothing of the kind, and may be followed by another one.
    load(&mut fresh(&SgdConfig::new().init()), folder.path()).unwrap();
}

#[test]
fn a_parameter_that_never_had_a_gradient_has_no_moments_to_miss() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = AdamWConfig::new().init();
    let mut training = fresh(&optimizer);
    let loss = training.model.forward(|model| model.last.weight.val().powi_scalar(2).mean()).unwrap();
    let gradients = training.model.backward(&loss).unwrap();
    training.step(0.1, gradients).unwrap();
    saved(&training, folder.path());
    let mut other = fresh(&optimizer);
    load(&mut other, folder.path()).unwrap();
    assert_eq!(bits(&other), bits(&training));
}

#[test]
fn a_scheduler_on_one_side_alone_is_refused() {
    let plain = || TrainState::new(Mixed::new(6), SgdConfig::new().init(), ()).unwrap();
    let scheduled = || plain().with_scheduler(rates());
    for (saving, loading, said) in [
        (
            scheduled(),
            plain(),
            "the saved state has a learning-rate scheduler, `scheduler`, and this TrainState has none",
        ),
        (
            plain(),
            scheduled(),
            "this TrainState has a learning-rate scheduler, and the saved state lacks `scheduler`",
        ),
    ] {
        let (mut parts, mut loading) = (Parts::default(), loading);
        saving.save(&mut parts).unwrap();
        let error = loading.load(&parts).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
    }
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
fn ranks_whose_optimizers_differ_are_refused() {
    use burn::grad_clipping::GradientClippingConfig as Clipping;

    let adamw = || AdamWConfig::new().with_epsilon(1e-8);
    let momentum = |decay: f64| MomentumConfig::new().with_momentum(decay);
    let sgd = |decay: f64| SgdConfig::new().with_momentum(Some(momentum(decay))).init();
    let pairs: Vec<(ModuleOptimizer, ModuleOptimizer)> = vec![
        (adamw().init(), sgd(0.9)),
        (sgd(0.9), sgd(0.8)),
        (adamw().init(), adamw().with_beta_1(0.8).init()),
        (adamw().init(), adamw().with_beta_2(0.99).init()),
        (adamw().init(), adamw().with_epsilon(1e-5).init()),
        (adamw().init(), adamw().with_weight_decay(0.01).init()),
        (adamw().init(), adamw().with_grad_clipping(Some(Clipping::Value(1.0))).init()),
        (sgd(0.9), SgdConfig::new().with_gradient_clipping(Some(Clipping::Norm(1.0))).init()),
    ];
    let attempt = |group: &ProcessGroup, optimizer: &ModuleOptimizer| {
        let layer = LinearConfig::new(8, 3).init(&device());
        TrainState::new(layer, optimizer.clone(), ()).unwrap().with_group(group).err()
    };
    for (first, second) in &pairs {
        let errors = run(3, |group| attempt(&group, if group.rank().index() == 2 { second } else { first }));
        for error in errors {
            let error = error.unwrap();
            assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 2"), "{error}");
        }
        assert!(run(2, |group| attempt(&group, first)).iter().all(Option::is_none));
    }
    // The first commit in each group of an elastic job compares them, too: the loop may set them.
    let (first, second) = &pairs[5];
    run(2, |group| {
        let mut training = fresh(if group.rank().is_main() { first } else { second });
        training.enter(&group).unwrap();
        let error = training.agree().unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        training.optimizer = first.clone();
        training.agree().unwrap();
    });
    // So does the first step, in a loop that has not committed yet.
    run(2, |group| {
        let mut training = fresh(if group.rank().is_main() { first } else { second });
        training.enter(&group).unwrap();
        let loss = training.model.forward(|model| model.loss(samples(0, 4))).unwrap();
        let gradients = training.model.backward(&loss).unwrap();
        let error = training.step(0.1, gradients).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        assert_eq!(training.steps(), 0);
    });
}

#[test]
fn ranks_whose_moments_differ_take_over_those_of_rank_0() {
    for (name, optimizer) in optimizers() {
        let (start, folder) = (Mixed::new(6), tempfile::tempdir().unwrap());
        let states = run(2, |group| {
            let rank = group.rank().index();
            let mut training = TrainState::new(start.of_own(), optimizer.clone(), 0).unwrap();
            // Alone, each with other samples.
            (0..2).for_each(|_| step(&mut training, rank, 2));
            let mut training = training.with_group(&group).unwrap();
            (0..2).for_each(|_| step(&mut training, rank, 2));
            training.agree().unwrap();
            assert!(training.model.replicas_identical().unwrap(), "{name}");
            saved(&training, &folder.path().join(rank.to_string()))
        });
        assert_eq!(states[1], states[0], "{name}");
    }
}

#[test]
fn ranks_that_have_done_other_numbers_of_steps_are_refused() {
    let errors = run(2, |group| {
        let mut training = fresh(&AdamWConfig::new().init());
        // As if it alone had loaded a checkpoint.
        let steps = if group.rank().is_main() { 3 } else { 0 };
        (0..steps).for_each(|_| step(&mut training, 0, 1));
        training.with_group(&group).map(drop).unwrap_err()
    });
    for error in errors {
        let said = "the number of steps of rank 0 is 3, and that of rank 1 is 0";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
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
fn an_optimizer_that_panics_with_small_parameters_trains_and_goes_on_from_a_checkpoint() {
    let optimizer = projecting();
    let folder = tempfile::tempdir().unwrap();
    let mut original = fresh(&optimizer);
    (0..3).for_each(|_| step(&mut original, 0, 1));
    saved(&original, folder.path());
    let mut restored = fresh(&optimizer);
    load(&mut restored, folder.path()).unwrap();
    for training in [&mut original, &mut restored] {
        step(training, 0, 1);
    }
    assert_eq!(bits(&restored), bits(&original));

    // Several ranks take it, unless another one does not panic.
    let attempt = |group: &ProcessGroup, optimizer: &ModuleOptimizer| {
        let layer = LinearConfig::new(8, 3).init(&device());
        TrainState::new(layer, optimizer.clone(), ()).unwrap().with_group(group).err()
    };
    assert!(run(2, |group| attempt(&group, &optimizer)).iter().all(Option::is_none));
    let other = AdamWConfig::new().init();
    for panics in 0..2 {
        let errors =
            run(2, |group| attempt(&group, if group.rank().get() == panics { &optimizer } else { &other }));
        for error in errors {
            let error = error.unwrap();
            assert!(error.is_mismatch() && error.to_string().contains("the optimizer of rank 1"), "{error}");
        }
    }
}
