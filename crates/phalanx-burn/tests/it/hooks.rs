//! Communication hooks and views of buckets, against training without them.

use crate::common::{Mlp, floats, run, samples};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{
    CommHook, Compressed, GradBucket, HookState, Pending, PostLocalSgd, PowerSgd, PowerSgdOptions,
};
use phalanx::{Communicator, ProcessGroup, Rank, ReduceOp, Result};
use phalanx_burn::{Ddp, DdpOptions, PeriodicModelAverager};

const STEPS: usize = 20;
const GLOBAL_BATCH: usize = 16;
const WIDTHS: [usize; 4] = [8, 32, 32, 3];

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

fn reference(start: &Mlp, mut optimizer: ModuleOptimizer) -> Vec<Vec<f32>> {
    let mut model = start.clone();
    for step in 0..STEPS {
        let loss = model.loss(samples(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    floats(&model)
}

/// Trains with each rank's part of the batch; `after` comes after each step.
fn train(ddp: &mut Ddp<Mlp>, mut optimizer: ModuleOptimizer, mut after: impl FnMut(&mut Ddp<Mlp>)) {
    let (rank, part) = (ddp.rank().index(), GLOBAL_BATCH / ddp.world_size().count());
    for step in 0..STEPS {
        let from = step * GLOBAL_BATCH + rank * part;
        let loss = ddp.forward(|model| model.loss(samples(from, from + part))).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        ddp.step(&mut optimizer, 0.05, gradients).unwrap();
        after(ddp);
    }
}

/// The largest difference of an element; NaN if there is one.
fn farthest(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap()
}

fn check(start: &Mlp, most: f32, least_saved: f64, register: impl Fn(&mut Ddp<Mlp>) + Sync) {
    let expected = reference(start, sgd());
    for ranks in [2, 4] {
        let trained = run(ranks, |group: ProcessGroup| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            register(&mut ddp);
            train(&mut ddp, sgd(), |_| {});
            assert!(ddp.replicas_identical().unwrap());
            (floats(ddp.model()), ddp.communicated_bytes())
        });
        let plain = 4 * STEPS as u64 * expected.iter().map(Vec::len).sum::<usize>() as u64;
        for (ours, bytes) in &trained {
            assert_eq!(ours, &trained[0].0);
            let distance = farthest(ours, &expected);
            assert!(distance < most, "{ranks} ranks: {distance:e}");
            assert!(*bytes as f64 <= plain as f64 / least_saved, "{bytes} of {plain} B");
        }
    }
}

#[test]
fn no_hook_trains_as_one_process() {
    // The weights are drawn anew each time, and 20 steps round differently; what the hooks below change is much more.
    check(&Mlp::new(&WIDTHS), 4e-6, 1.0, |_| {});
}

#[test]
fn half_precision_trains_nearly_as_one_process_with_half_the_bytes() {
    let start = Mlp::new(&WIDTHS);
    check(&start, 2e-3, 2.0, |ddp| ddp.register_comm_hook(Compressed::f16()).unwrap());
    check(&start, 8e-3, 2.0, |ddp| ddp.register_comm_hook(Compressed::bf16()).unwrap());
}

#[test]
fn power_sgd_trains_about_as_one_process_with_a_quarter_of_the_bytes() {
    let options = PowerSgdOptions::default().start_iter(2);
    check(&Mlp::new(&WIDTHS), 0.1, 4.0, |ddp| {
        ddp.register_comm_hook(PowerSgd::new(options).unwrap()).unwrap();
    });
}

#[test]
fn local_sgd_sends_no_gradients_and_its_averages_make_replicas_equal() {
    let start = Mlp::new(&WIDTHS);
    for ranks in [2, 4] {
        let trained = run(ranks, |group| {
            let mut ddp = Ddp::new(start.clone(), &group).unwrap();
            ddp.register_comm_hook(PostLocalSgd::new(4)).unwrap();
            let mut averager = PeriodicModelAverager::new(3).unwrap().warmup_steps(4);
            let (mut averaged, mut drifted) = (0, 0);
            train(&mut ddp, sgd(), |ddp| {
                let due = averager.step(ddp).unwrap();
                let identical = ddp.replicas_identical().unwrap();
                averaged += usize::from(due);
                drifted += usize::from(!identical);
                assert!(identical || !due);
            });
            let parameters: usize = floats(ddp.model()).iter().map(Vec::len).sum();
            assert_eq!(ddp.communicated_bytes(), 4 * 4 * parameters as u64);
            (averaged, drifted)
        });
        assert!(trained.iter().all(|counts| *counts == (6, 10)), "{trained:?}");
    }
    assert!(PeriodicModelAverager::new(0).is_err());
}

#[test]
fn views_of_buckets_train_to_the_same_bits() {
    let start = Mlp::new(&WIDTHS);
    for ranks in [2, 3, 4] {
        for optimizer in [sgd(), AdamWConfig::new().init()] {
            let trained = run(ranks, |group| {
                let of = |view: bool| {
                    let mut options = DdpOptions::default();
                    options.gradient_as_bucket_view = view;
                    options.reducer = ReducerOptions::default().bucket_cap_mb(0.002);
                    let mut ddp = Ddp::with_options(start.clone(), &group, options).unwrap();
                    let mut kept = Vec::new();
                    let mut optimizer = optimizer.clone();
                    for step in 0..STEPS {
                        let from = (step * 4 + group.rank().index()) * 4;
                        let loss = ddp.forward(|model| model.loss(samples(from, from + 4))).unwrap();
                        let gradients = ddp.backward(&loss).unwrap();
                        // A gradient that outlives its step is not overwritten by the next.
                        let id = ddp.model().layers[1].weight.id;
                        let gradient = gradients.get::<2>(id).unwrap();
                        kept.push((gradient.clone(), gradient.into_data()));
                        ddp.step(&mut optimizer, 0.05, gradients).unwrap();
                    }
                    for (gradient, at_the_time) in kept {
                        gradient.into_data().assert_eq(&at_the_time, true);
                    }
                    assert!(ddp.replicas_identical().unwrap());
                    floats(ddp.model())
                };
                assert_eq!(of(true), of(false));
            });
            assert_eq!(trained.len(), ranks as usize);
        }
    }
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
        run(2, |group: ProcessGroup| {
            // The first rank's error ends the group, so the other may get it in an earlier call.
            let attempt = || {
                let mut ddp = Ddp::new(Mlp::new(&WIDTHS), &group)?;
                ddp.register_comm_hook(Panics { late })?;
                let loss = ddp.forward(|model| model.loss(samples(0, 4)))?;
                ddp.backward(&loss).map(drop)
            };
            let error = attempt().unwrap_err().to_string();
            assert!(error.contains("the hook's own"), "late {late}: {error}");
        });
    }
}
