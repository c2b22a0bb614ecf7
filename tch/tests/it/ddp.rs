//! Gradients: where they lie, and when they leave.

mod evaluate;
mod joins;
mod norms;
mod refused;

use std::sync::Arc;

use phalanx::join::JoinGroup;
use phalanx::reducer::ReducerOptions;
use phalanx::reducer::hooks::{Compressed, PowerSgd, PowerSgdOptions};
use phalanx::trace::Trace;
use phalanx::{
    Buffer, Caller, Communicator, DType, Error, ProcessGroup, Rank, ReduceOp, Result, Work, WorldSize,
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
