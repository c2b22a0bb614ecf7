//! Gradients: where they lie, when they leave, and what is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};

use phalanx::join::{JoinGroup, JoinOptions};
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{
    CommHook, Compressed, GradBucket, HookState, Pending, PeriodicModelAverager, PowerSgd, PowerSgdOptions,
};
use phalanx::trace::Trace;
use phalanx::{
    Buffer, Caller, Communicator, DType, Error, GroupHandle, ProcessGroup, Rank, ReduceOp, Result, Work,
    WorldSize,
};
use phalanx_tch::{Ddp, DdpOptions, Optimizer, Rule};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

use crate::common::{Mlp, device, distance, elements, floats, load, on_device, run, samples};

const WIDTHS: [i64; 4] = [8, 32, 32, 3];

fn small_buckets() -> DdpOptions {
    let mut options = DdpOptions::default();
    options.reducer = ReducerOptions::default().bucket_cap_mb(0.001);
    options
}

#[test]
fn gradients_stay_in_their_buckets_from_step_to_step() {
    run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::with_options(&model.store, &group, small_buckets()).unwrap();
        assert!(ddp.bucket_bytes().len() > 2, "{:?}", ddp.bucket_bytes());
        let mut places = Vec::new();
        for step in 0..5 {
            let loss = ddp.forward(|| model.loss(samples(step, step + 4))).unwrap();
            model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            ddp.backward(&loss).unwrap();
            let place = |variable: &Tensor| variable.grad().data_ptr() as usize;
            places.push(model.store.trainable_variables().iter().map(place).collect::<Vec<_>>());
        }
        if device() == Device::Cpu {
            // The buckets are built anew in the order of the gradients after the first step.
            assert!(places[1..].iter().all(|step| step == &places[1]), "{places:?}");
            // All of one bucket are neighbours: the bias's end is the weight's beginning, or the other way round.
            let variables = model.store.trainable_variables();
            let sizes: Vec<usize> = variables.iter().map(|one| one.numel() * 4).collect();
            let last = sizes.len() - 1;
            let (a, b) = (places[1][last - 1], places[1][last]);
            assert!(a + sizes[last - 1] == b || b + sizes[last] == a, "the head's gradients are apart");
        } else {
            // libtorch's own memory is written to, and no other takes its place.
            assert!(places.iter().all(|step| step == &places[0]), "{places:?}");
            let is_there = |variable: &Tensor| variable.grad().device() == device();
            assert!(model.store.trainable_variables().iter().all(is_there));
        }

        // A gradient that the program keeps outlives the buckets.
        let kept = model.layers[0].ws.grad();
        let before = elements(&kept);
        drop((ddp, group, model));
        assert_eq!(elements(&kept), before);
    });
}

#[test]
fn gradients_that_are_accumulated_in_place_are_averaged_as_they_are() {
    // Never set to zero: what libtorch adds to is the last average, on every rank the same.
    let start = floats(&Mlp::new(&WIDTHS).store);
    let expected = {
        let model = Mlp::like(&WIDTHS, &start);
        for step in 0..3 {
            model.loss(samples(8 * step, 8 * step + 8)).backward();
        }
        model.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect::<Vec<_>>()
    };
    let ours = run(2, |group| {
        let model = Mlp::like(&WIDTHS, &start);
        let mut ddp = Ddp::with_options(&model.store, &group, small_buckets()).unwrap();
        for step in 0..3 {
            let from = 8 * step + 4 * group.rank().index();
            let loss = ddp.forward(|| model.loss(samples(from, from + 4))).unwrap();
            ddp.backward(&loss).unwrap();
        }
        model.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect::<Vec<_>>()
    });
    for gradients in &ours {
        assert!(distance(gradients, &expected) < 1e-5, "{:e}", distance(gradients, &expected));
    }
}

/// A group with a trace of its own.
#[derive(Clone)]
struct Traced(ProcessGroup, Trace);

impl Communicator for Traced {
    fn rank(&self) -> Rank {
        self.0.rank()
    }
    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }
    fn alloc(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        self.0.alloc(dtype, elements)
    }
    fn in_call(&self, caller: Caller) -> Arc<dyn Communicator> {
        Arc::new(Self(self.0.in_call(caller), self.1.clone()))
    }
    fn all_reduce_async(&self, buffer: Buffer, op: ReduceOp) -> Result<Work> {
        self.0.all_reduce_async(buffer, op)
    }
    fn broadcast_async(&self, buffer: Buffer, root: Rank) -> Result<Work> {
        self.0.broadcast_async(buffer, root)
    }
    fn reduce_scatter_v_async(&self, buffer: Buffer, counts: &[usize], op: ReduceOp) -> Result<Work> {
        self.0.reduce_scatter_v_async(buffer, counts, op)
    }
    fn all_gather_v_in_place_async(&self, buffer: Buffer, counts: &[usize]) -> Result<Work> {
        self.0.all_gather_v_in_place_async(buffer, counts)
    }
    fn abort(&self, cause: Error) {
        self.0.abort(cause);
    }
    fn failure(&self) -> Option<Error> {
        self.0.failure()
    }
    fn trace(&self) -> Trace {
        self.1.clone()
    }
}

#[test]
fn buckets_are_on_their_way_before_the_last_gradient_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let path = folder.path().join(format!("{}.json", group.rank()));
        let trace = Trace::to_file(&path, group.rank());
        let model = Mlp::new(&[8; 13]);
        let mut options = DdpOptions::default();
        options.reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
        let group = JoinGroup::new(Traced(group, trace.clone()));
        let mut ddp = Ddp::with_options(&model.store, group, options).unwrap();
        for _ in 0..2 {
            let loss = ddp.forward(|| model.forward(&samples(0, 4).0).square().mean(Kind::Float)).unwrap();
            ddp.backward(&loss).unwrap();
        }
        trace.flush();
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
        let at = |event: &serde_json::Value| event["ts"].as_f64().unwrap();
        let backward = named("backward");
        assert_eq!(backward.len(), 2);
        for pass in backward {
            let (start, end) = (at(pass), at(pass) + pass["dur"].as_f64().unwrap());
            let within = |name: &str| {
                let times = named(name).into_iter().map(at).filter(|time| (start..=end).contains(time));
                times.collect::<Vec<_>>()
            };
            let (ready, launched) = (within("ready"), within("launched"));
            assert!(ready.len() == launched.len() && ready.len() >= 6, "{ready:?} {launched:?}");
            let before_the_last = launched.iter().filter(|time| **time <= ready[ready.len() - 1]).count();
            assert!(before_the_last >= launched.len() - 1, "{launched:?} {ready:?}");
        }
    });
}

#[test]
fn parameters_with_channels_last_are_averaged() {
    let start = {
        let store = nn::VarStore::new(device());
        nn::conv2d(store.root(), 3, 4, 3, Default::default());
        floats(&store)
    };
    let x = |rank: usize| {
        Tensor::arange(2 * 3 * 5 * 5, on_device(Kind::Float)).reshape([2, 3, 5, 5]).sin()
            * (rank as f64 + 1.0)
    };
    let gradients = run(2, |group| {
        let store = nn::VarStore::new(device());
        let conv = nn::conv2d(store.root(), 3, 4, 3, Default::default());
        load(&store, &start);
        let mut weight = conv.ws.shallow_clone();
        // The same elements, channels last in memory.
        let last = weight.detach().permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        weight.set_data(&last);
        assert!(!conv.ws.is_contiguous());
        let mut ddp = Ddp::new(&store, &group).unwrap();
        for _ in 0..3 {
            let rank = group.rank().index();
            let loss = ddp.forward(|| x(rank).apply(&conv).square().mean(Kind::Float)).unwrap();
            // It reads, and backward can still run.
            assert!(ddp.replicas_identical().unwrap());
            store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            ddp.backward(&loss).unwrap();
        }
        elements(&conv.ws.grad())
    });
    let store = nn::VarStore::new(device());
    let conv = nn::conv2d(store.root(), 3, 4, 3, Default::default());
    load(&store, &start);
    let loss = (0..2).map(|rank| x(rank).apply(&conv).square().mean(Kind::Float) / 2.0).reduce(|a, b| a + b);
    loss.unwrap().backward();
    assert_eq!(gradients[0], gradients[1]);
    assert!(distance(&gradients[..1], &[elements(&conv.ws.grad())]) < 1e-5);
}

#[test]
fn parameters_of_several_types_without_elements_and_without_dimensions_are_averaged() {
    // With 0 each has a bucket of its own, also the one without elements.
    for bucket in [0.001, 0.0] {
        run(2, |group| {
            let store = nn::VarStore::new(device());
            let root = store.root();
            let (none, scalar) = (root.ones("none", &[0, 3]), root.ones("scalar", &[]));
            let wide = root.add("wide", Tensor::ones([2], on_device(Kind::Double)), true);
            let narrow = root.add("narrow", Tensor::ones([3], on_device(Kind::BFloat16)), true);
            let mut options = DdpOptions::default();
            options.reducer = ReducerOptions::default().bucket_cap_mb(bucket);
            let mut ddp = Ddp::with_options(&store, &group, options).unwrap();
            let mut optimizer = Optimizer::new(&store, Rule::ADAMW).unwrap();
            let mine = group.rank().index() as f64 + 1.0;
            for _ in 0..3 {
                let loss = || {
                    let all = [&none, &scalar, &wide, &narrow].map(|one| (one * mine).sum(Kind::Float));
                    all.into_iter().reduce(|a, b| a + b).unwrap()
                };
                let loss = ddp.forward(loss).unwrap();
                optimizer.zero_grad().unwrap();
                ddp.backward(&loss).unwrap();
                for one in [&none, &scalar, &wide, &narrow] {
                    let gradient = one.grad();
                    assert_eq!((gradient.kind(), gradient.size()), (one.kind(), one.size()));
                    assert_eq!(elements(&gradient), vec![1.5; one.numel()]);
                }
                let norm = ddp.clip_grad_norm(1.0).unwrap();
                assert!((norm - 1.5 * 6f64.sqrt()).abs() < 1e-5, "{norm}");
                optimizer.step(0.1).unwrap();
            }
            assert!(elements(&scalar)[0] < 1.0 && elements(&wide)[1] < 1.0 && elements(&narrow)[2] < 1.0);
            assert!(ddp.replicas_identical().unwrap());
        });
    }
}

#[test]
fn sparse_gradients_are_refused_by_name() {
    let new = || {
        let store = nn::VarStore::new(Device::Cpu);
        let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
        let table = nn::embedding(store.root() / "table", 10, 4, config);
        (store, table)
    };
    let loss = |table: &nn::Embedding| Tensor::from_slice(&[1i64, 3]).apply(table).sum(Kind::Float);
    let errors = run(2, |group| {
        let (store, table) = new();
        // The first rank's error ends the group, so the other may get it in an earlier call.
        let attempt = || {
            let mut ddp = Ddp::new(&store, &group)?;
            let loss = ddp.forward(|| loss(&table))?;
            ddp.backward(&loss)
        };
        attempt().unwrap_err().to_string()
    });
    // One process may train it, but by an optimizer of tch.
    let (store, table) = new();
    let mut ddp = Ddp::new(&store, &ProcessGroup::alone().unwrap()).unwrap();
    let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
    let loss = ddp.forward(|| loss(&table)).unwrap();
    ddp.backward(&loss).unwrap();
    let error = optimizer.step(0.1).unwrap_err().to_string();
    for error in errors.iter().chain([&error]) {
        assert!(error.contains("`table.weight`") && error.contains("sparse"), "{error}");
    }
}

#[test]
fn a_penalty_for_a_gradient_trains_as_in_one_process() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let gradients = |group: &ProcessGroup, batch: usize| {
        let model = Mlp::like(&WIDTHS, &start);
        let mut ddp = Ddp::with_options(&model.store, group, small_buckets()).unwrap();
        for step in 0..3 {
            let from = step * 8 + batch * group.rank().index();
            let penalty = || {
                let x = samples(from, from + batch).0.set_requires_grad(true);
                let output = model.forward(&x).square().sum(Kind::Float);
                let gradient = Tensor::run_backward(&[output], &[&x], true, true).remove(0);
                gradient.square().mean(Kind::Float)
            };
            let loss = ddp.forward(penalty).unwrap();
            model.store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
            ddp.backward(&loss).unwrap();
        }
        model.store.trainable_variables().iter().map(|one| elements(&one.grad())).collect::<Vec<_>>()
    };
    let expected = gradients(&ProcessGroup::alone().unwrap(), 8);
    for ours in run(2, |group| gradients(&group, 4)) {
        assert!(distance(&ours, &expected) < 1e-4, "{:e}", distance(&ours, &expected));
    }
}

#[test]
fn compressed_gradients_are_near_the_average_and_move_fewer_bytes() {
    let start = floats(&Mlp::new(&WIDTHS).store);
    let train = |group: &ProcessGroup, which: usize| {
        let model = Mlp::like(&WIDTHS, &start);
        let mut ddp = Ddp::new(&model.store, group).unwrap();
        match which {
            1 => ddp.register_comm_hook(Compressed::f16()).unwrap(),
            2 => ddp.register_comm_hook(Compressed::bf16()).unwrap(),
            3 => ddp
                .register_comm_hook(PowerSgd::new(PowerSgdOptions::default().start_iter(2)).unwrap())
                .unwrap(),
            _ => {}
        }
        // Without momentum, with which PowerSGD's delayed errors make so small a problem unstable.
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0)).unwrap();
        for step in 0..20 {
            let from = step * 8 + 4 * group.rank().index();
            let loss = ddp.forward(|| model.loss(samples(from, from + 4))).unwrap();
            optimizer.zero_grad().unwrap();
            ddp.backward(&loss).unwrap();
            optimizer.step(0.1).unwrap();
        }
        assert!(ddp.replicas_identical().unwrap());
        let loss = model.loss(samples(0, 160)).double_value(&[]);
        (floats(&model.store), ddp.communicated_bytes(), loss)
    };
    let runs: Vec<_> = (0..4).map(|which| run(2, |group| train(&group, which)).remove(0)).collect();
    let (plain, bytes, best) = &runs[0];
    assert!(distance(plain, &start) > 0.01, "nothing was learned");
    for (which, limit) in [(1, 1e-2), (2, 5e-2)] {
        let apart = distance(&runs[which].0, plain);
        assert!(apart > 0.0 && apart < limit, "hook {which} is {apart:e} away");
        assert_eq!(runs[which].1 * 2, *bytes);
    }
    // PowerSGD takes another way, which leads down as well.
    let before = Mlp::like(&WIDTHS, &start).loss(samples(0, 160)).double_value(&[]);
    let learned = (before - runs[3].2) / (before - best);
    assert!(
        learned > 0.8,
        "PowerSGD learned {learned:.2} of what plain averages did, from {before} to {best}"
    );
    assert!(runs[3].1 * 2 < *bytes);
}

#[test]
fn a_generator_and_a_discriminator_train_in_turns_as_in_one_process() {
    let (g0, d0) = (floats(&Mlp::new(&[3, 8, 8]).store), floats(&Mlp::new(&[8, 8, 1]).store));
    let train = |group: &ProcessGroup, batch: usize| {
        let (g, d) = (Mlp::like(&[3, 8, 8], &g0), Mlp::like(&[8, 8, 1], &d0));
        let (mut ddp_g, mut ddp_d) = (Ddp::new(&g.store, group).unwrap(), Ddp::new(&d.store, group).unwrap());
        let mut optimizer_g = nn::sgd(0.9, 0.0, 0.0, false).build(&g.store, 0.05).unwrap();
        let mut optimizer_d = nn::sgd(0.9, 0.0, 0.0, false).build(&d.store, 0.05).unwrap();
        for step in 0..10 {
            let from = step * 8 + batch * group.rank().index();
            let (real, noise) = (samples(from, from + batch).0, samples(7000 + from, 7000 + from + batch).1);
            let judged = |x: &Tensor, answer: f64| (d.forward(x) - answer).square().mean(Kind::Float);
            let fake = g.forward(&noise).detach();
            let loss = ddp_d.forward(|| judged(&real, 1.0) + judged(&fake, 0.0)).unwrap();
            optimizer_d.zero_grad();
            ddp_d.backward(&loss).unwrap();
            optimizer_d.step();
            let loss = ddp_g.forward(|| judged(&g.forward(&noise), 1.0)).unwrap();
            optimizer_g.zero_grad();
            ddp_g.backward(&loss).unwrap();
            optimizer_g.step();
        }
        [floats(&g.store), floats(&d.store)].concat()
    };
    let expected = train(&ProcessGroup::alone().unwrap(), 8);
    for ours in run(2, |group| train(&group, 4)) {
        assert!(distance(&ours, &expected) < 1e-4, "{:e}", distance(&ours, &expected));
    }
}

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

#[test]
fn ranks_with_fewer_batches_answer_the_others() {
    let ends = run(3, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::ADAMW).unwrap();
        let batches = 3 + 2 * group.rank().index();
        let (steps, last) = ddp
            .join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                for step in 0..batches {
                    let loss = ddp.forward(|| model.loss(samples(step, step + 4)))?;
                    optimizer.zero_grad()?;
                    ddp.backward(&loss)?;
                    optimizer.step(0.01)?;
                }
                Ok((batches, floats(&model.store)))
            })
            .unwrap();
        let joined = floats(&model.store);
        // One step more together: with other states of the optimizer, replicas would drift apart.
        let loss = ddp.forward(|| model.loss(samples(0, 4))).unwrap();
        optimizer.zero_grad().unwrap();
        ddp.backward(&loss).unwrap();
        optimizer.step(0.01).unwrap();
        (steps, last, joined, floats(&model.store))
    });
    assert_eq!(ends.iter().map(|end| end.0).collect::<Vec<_>>(), [3, 5, 7]);
    // All have what the rank with the most steps had at its end.
    assert_ne!(ends[0].1, ends[2].1);
    assert!(ends.iter().all(|end| end.2 == ends[2].1 && end.3 == ends[0].3));
}

#[test]
fn ranks_that_are_done_count_in_the_averages_or_do_not() {
    // The gradient is the input, so that the average can be told. A model without buffers may run outside of `forward`.
    for (divide, in_forward, expected) in [
        (true, true, [1.5, 1.0]),
        (false, true, [1.5, 2.0]),
        (true, false, [1.5, 1.0]),
        (false, false, [1.5, 2.0]),
    ] {
        let gradients = run(2, |group| {
            let store = nn::VarStore::new(device());
            let weight = store.root().zeros("weight", &[1]);
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
            let mut options = JoinOptions::default();
            options.divide_by_initial_world_size = divide;
            let value = group.rank().index() as f64 + 1.0;
            // Rank 1 has a batch more.
            let batches = 1 + group.rank().index();
            ddp.join(&mut optimizer, options, |ddp, optimizer| {
                let mut seen = Vec::new();
                for _ in 0..batches {
                    let pass = || (&weight * value).sum(Kind::Float);
                    let loss = if in_forward { ddp.forward(pass)? } else { pass() };
                    optimizer.zero_grad()?;
                    ddp.backward(&loss)?;
                    seen.push(elements(&weight.grad())[0]);
                }
                Ok(seen)
            })
            .unwrap()
        });
        assert_eq!(gradients[1], expected, "divide_by_initial_world_size: {divide}, forward: {in_forward}");
        assert_eq!(gradients[0], expected[..1]);
    }
}

#[test]
fn in_a_join_an_average_of_models_is_without_a_rank_that_was_done_before_it() {
    for has_averager in [false, true] {
        let ends = run(2, |group| {
            let store = nn::VarStore::new(device());
            let weight = store.root().var("weight", &[1], nn::Init::Const(1.0));
            let mut ddp = Ddp::new(&store, &group).unwrap();
            let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
            let mut averager = PeriodicModelAverager::new(1).unwrap();
            let joined = ddp.join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                let loss = ddp.forward(|| weight.sum(Kind::Float))?;
                ddp.backward(&loss)?;
                optimizer.step(0.01)?;
                match has_averager {
                    // It has made the step, and not the average.
                    _ if group.rank().is_main() => Ok(()),
                    true => averager.step(ddp).map(drop),
                    false => ddp.average_parameters(),
                }
            });
            joined.unwrap();
            elements(&weight)
        });
        // A sum of both, divided by two, would be half of it.
        assert!(ends.iter().all(|end| end[0] > 0.9), "{ends:?}");
    }
}

#[test]
fn in_a_join_small_batches_that_make_no_whole_step_are_in_no_average() {
    let ends = run(2, |group| {
        let store = nn::VarStore::new(device());
        let weight = store.root().zeros("weight", &[1]);
        let mut ddp = Ddp::new(&store, &group).unwrap();
        let mut optimizer = Optimizer::new(&store, Rule::sgd(0.0)).unwrap();
        let value = group.rank().index() as f64 + 1.0;
        let pass = || (&weight * value).sum(Kind::Float);
        // Two make a step. Rank 0 has three, and rank 1 four.
        let batches = 3 + group.rank().index();
        let seen = ddp
            .join(&mut optimizer, JoinOptions::default(), |ddp, optimizer| {
                let mut seen = Vec::new();
                for batch in 0..batches {
                    let loss = ddp.forward(pass)?;
                    if batch % 2 == 0 {
                        optimizer.zero_grad()?;
                        ddp.backward_no_sync(&loss)?;
                    } else {
                        ddp.backward(&loss)?;
                        seen.push(elements(&weight.grad())[0]);
                        optimizer.step(0.01)?;
                    }
                }
                Ok(seen)
            })
            .unwrap();
        // What rank 0 held is gone.
        assert_eq!(weight.grad().defined(), !group.rank().is_main());
        optimizer.zero_grad().unwrap();
        let loss = ddp.forward(pass).unwrap();
        ddp.backward(&loss).unwrap();
        (seen, elements(&weight.grad()), elements(&weight))
    });
    assert_eq!((&ends[0].0[..], &ends[1].0[..]), (&[3.0][..], &[3.0, 2.0][..]));
    assert!(ends.iter().all(|end| end.1 == [1.5] && end.2 == ends[0].2));
}

#[test]
fn the_first_rank_that_is_done_ends_a_join_that_is_to_end_early_also_outside_of_forward() {
    let errors = run(2, |group| {
        let model = Mlp::new(&WIDTHS);
        let mut ddp = Ddp::new(&model.store, &group).unwrap();
        let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.0)).unwrap();
        let mut options = JoinOptions::default();
        options.throw_on_early_termination = true;
        let joined = ddp.join(&mut optimizer, options, |ddp, _| {
            (0..=group.rank().index()).try_for_each(|step| ddp.backward(&model.loss(samples(step, step + 4))))
        });
        // The group goes on.
        group.barrier().unwrap();
        joined.unwrap_err().to_string()
    });
    assert!(errors.iter().all(|text| text.contains("rank 0 has no data left")), "{errors:?}");
}

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
