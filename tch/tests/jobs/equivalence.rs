//! Several processes with a part of the batch each train the model that one process trains with all of it.

use std::path::Path;
use std::time::Duration;

use phalanx::launch::{Event, Job, Outcome, Stream};
use phalanx::reducer::ReducerOptions;
use phalanx::{Error, ProcessGroup, Rank, Result};
use phalanx_tch::{DdpOptions, Optimizer, Rule};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, VarStore};
use tch::{Kind, Tensor};

use crate::common::{device, distance, floats, samples};

const STEPS: usize = 12;
const BATCH: usize = 4;

pub const TESTS: &[(&str, fn())] = &[
    ("two_and_three_processes_train_as_one", || check("plain", &[2, 3], HOST)),
    ("accumulated_batches_train_as_large_ones", || check("no_sync", &[2, 3], HOST)),
    ("parameters_that_some_ranks_do_not_use_train_as_in_one_process", || check("unused", &[2, 3], HOST)),
    ("a_static_graph_with_unused_parameters_trains_as_in_one_process", || check("static", &[2, 3], HOST)),
    ("averages_that_are_accumulated_with_unused_parameters_are_those_of_one_process", || {
        check("accumulated unused", &[2, 3], HOST);
        check("accumulated static", &[2, 3], HOST);
    }),
    ("a_parameter_that_a_synchronised_pass_does_not_use_is_still_averaged", || check("held", &[2], HOST)),
    ("an_unused_parameter_is_named_on_every_rank", || unused_is_named(HOST)),
    ("a_static_graph_that_changes_is_refused", || changed_graph_is_refused(HOST)),
    ("a_dead_peer_is_named", || dead_peer_is_named(HOST)),
    ("a_second_backward_pass_is_not_waited_for", || refused_backward_is_not_waited_for(HOST)),
];

/// The same, with gradients that NCCL averages on the device.
pub const OVER_NCCL: &[(&str, fn())] = &[
    ("over_nccl_two_and_three_processes_train_as_one", || check("plain", &[2, 3], NCCL)),
    ("over_nccl_accumulated_batches_train_as_large_ones", || check("no_sync", &[2, 3], NCCL)),
    ("over_nccl_parameters_that_some_ranks_do_not_use_train_as_in_one_process", || {
        check("unused", &[2, 3], NCCL);
        check("static", &[2, 3], NCCL);
    }),
    ("over_nccl_averages_that_are_accumulated_with_unused_parameters_are_those_of_one_process", || {
        check("accumulated unused", &[2, 3], NCCL);
        check("accumulated static", &[2, 3], NCCL);
    }),
    ("over_nccl_a_parameter_that_a_synchronised_pass_does_not_use_is_still_averaged", || {
        check("held", &[2], NCCL);
    }),
    ("over_nccl_an_unused_parameter_is_named_on_every_rank", || unused_is_named(NCCL)),
    ("over_nccl_a_static_graph_that_changes_is_refused", || changed_graph_is_refused(NCCL)),
    ("over_nccl_a_dead_peer_is_named", || dead_peer_is_named(NCCL)),
    ("over_nccl_a_second_backward_pass_is_not_waited_for", || refused_backward_is_not_waited_for(NCCL)),
];

/// The variable that has NCCL average gradients, and what it is set to.
const NCCL: &[(&str, &str)] = &[(crate::nccl::NCCL, "1")];
const HOST: &[(&str, &str)] = &[];

/// One of its experts answers; the last layer is never asked.
struct Experts {
    store: VarStore,
    stem: nn::Linear,
    experts: Vec<nn::Linear>,
}

impl Experts {
    fn new(experts: usize) -> Self {
        let store = VarStore::new(device());
        let root = store.root();
        let stem = nn::linear(&root / "stem", 8, 64, Default::default());
        let layer = |index| nn::linear(&root / format!("expert{index}"), 64, 3, Default::default());
        let experts = (0..experts).map(layer).collect();
        Self { store, stem, experts }
    }

    fn with_idle(experts: usize) -> Self {
        let this = Self::new(experts);
        nn::linear(this.store.root() / "idle", 3, 3, Default::default());
        this
    }

    fn loss(&self, expert: usize, (x, y): (Tensor, Tensor)) -> Tensor {
        (x.apply(&self.stem).tanh().apply(&self.experts[expert]) - y).square().mean(Kind::Float)
    }
}

fn model(case: &str, ranks: usize) -> Experts {
    if case.ends_with("unused") || case.ends_with("static") {
        Experts::with_idle(ranks)
    } else {
        Experts::new(ranks)
    }
}

/// The experts whose losses a rank adds up, in the micro-batches of one step; the last of these is synchronised.
fn asked(case: &str, step: usize, rank: usize, ranks: usize) -> Vec<Vec<usize>> {
    let all = || (0..ranks).collect::<Vec<_>>();
    match case {
        "plain" => vec![all()],
        "no_sync" => vec![all(), all(), all()],
        // In some steps no rank asks the last.
        "unused" if step.is_multiple_of(3) => vec![vec![(step + rank) % (ranks - 1)]],
        "unused" => vec![vec![(step + rank) % ranks]],
        "static" => vec![vec![rank]],
        // In the last pass of a step no rank asks the last; in the first each has another.
        "accumulated unused" => vec![vec![(step + rank) % ranks], vec![rank % (ranks - 1)], vec![0]],
        "accumulated static" => vec![vec![rank]; 3],
        // The last pass of each step uses one expert alone.
        "held" => vec![all(), vec![0]],
        other => panic!("no case {other}"),
    }
}

/// The mean loss of one micro-batch.
fn part(model: &Experts, experts: &[usize], from: usize) -> Tensor {
    let losses = experts.iter().map(|&expert| model.loss(expert, samples(from, from + BATCH)));
    losses.reduce(|a, b| a + b).unwrap()
}

fn from(step: usize, rank: usize, ranks: usize, micro: usize) -> usize {
    ((step * ranks + rank) * 3 + micro) * BATCH
}

fn options(case: &str) -> DdpOptions {
    let mut options = DdpOptions::default();
    let reducer = ReducerOptions::default().bucket_cap_mb(0.0005);
    options.reducer = match case {
        "unused" | "accumulated unused" => reducer.find_unused_parameters(true),
        "static" | "accumulated static" | "changed" => reducer.static_graph(true),
        _ => reducer,
    };
    options
}

/// What one process makes of the whole batches.
fn reference(case: &str, ranks: usize, start: &Path) -> Vec<Vec<f32>> {
    let mut model = model(case, ranks);
    model.store.load(start).unwrap();
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9)).unwrap();
    for step in 0..STEPS {
        let losses = (0..ranks).flat_map(|rank| {
            let micro = asked(case, step, rank, ranks).into_iter().enumerate();
            micro
                .map(|(index, experts)| part(&model, &experts, from(step, rank, ranks, index)))
                .collect::<Vec<_>>()
        });
        let loss = losses.reduce(|a, b| a + b).unwrap() / ranks as f64;
        optimizer.zero_grad().unwrap();
        loss.backward();
        optimizer.step(0.05).unwrap();
    }
    floats(&model.store)
}

fn check(case: &str, worlds: &[u32], variables: &[(&str, &str)]) {
    tch::set_num_threads(1);
    for &ranks in worlds {
        let folder = tempfile::tempdir().unwrap();
        let start = folder.path().join("start.safetensors");
        let fresh = model(case, ranks as usize);
        fresh.store.save(&start).unwrap();
        let expected = reference(case, ranks as usize, &start);
        assert!(distance(&expected, &floats(&fresh.store)) > 0.01, "the reference has not moved");
        let mut stderr = String::new();
        let job = job(case, ranks, folder.path(), variables);
        let report = crate::run(&job, |event| note(event, &mut stderr));
        assert!(matches!(report.outcome, Outcome::Succeeded), "{case}, {ranks} ranks: {stderr}");
        let of = |rank: u32| {
            let mut model = model(case, ranks as usize);
            model.store.load(folder.path().join(format!("{rank}.safetensors"))).unwrap();
            floats(&model.store)
        };
        for rank in 0..ranks {
            assert_eq!(of(rank), of(0), "{case}: rank {rank} has other bits than rank 0");
        }
        let apart = distance(&of(0), &expected);
        assert!(apart < 1e-5, "{case}: {ranks} ranks are {apart:e} away");
    }
}

fn job(case: &str, ranks: u32, folder: &Path, variables: &[(&str, &str)]) -> Job {
    let job = crate::job(&format!("equivalence {case}"), ranks, folder);
    // A real GPU's calls end some seconds after a rank has died.
    let job = if variables.is_empty() { job } else { job.grace(Duration::from_secs(30)) };
    variables.iter().fold(job, |job, (name, value)| job.variable(name, value))
}

pub fn note(event: &Event<'_>, stderr: &mut String) {
    if let Event::Line { stream: Stream::Stderr, text, rank, .. } = event {
        *stderr += &format!("{rank}: {}\n", String::from_utf8_lossy(text));
    }
}

/// What this program does as a worker.
pub fn play(case: &str, folder: &Path) -> Result<()> {
    let group = phalanx::init()?;
    let (rank, ranks) = (group.rank().index(), group.world_size().count());
    match case {
        "named" | "changed" | "dead" | "twice" => return fail(case, &group),
        _ => {}
    }
    let mut model = model(case, ranks);
    if group.rank().is_main() {
        // Only rank 0 has the model that counts.
        model.store.load(folder.join("start.safetensors")).unwrap();
    }
    let mut ddp = crate::nccl::ddp(&model.store, &group, options(case))?;
    let mut optimizer = Optimizer::new(&model.store, Rule::sgd(0.9))?;
    for step in 0..STEPS {
        optimizer.zero_grad()?;
        let micro = asked(case, step, rank, ranks);
        for (index, experts) in micro.iter().enumerate() {
            let sent = ddp.communicated_bytes();
            let loss = ddp.forward(|| part(&model, experts, from(step, rank, ranks, index)))?;
            if index + 1 < micro.len() && !case.starts_with("accumulated") {
                ddp.backward_no_sync(&loss)?;
                assert_eq!(ddp.communicated_bytes(), sent);
            } else {
                ddp.backward(&loss)?;
                assert!(ddp.communicated_bytes() > sent);
            }
        }
        if case.ends_with("unused") || case.ends_with("static") {
            let variables = model.store.variables();
            assert!(!variables["idle.weight"].grad().defined(), "nobody uses it");
        }
        optimizer.step(0.05)?;
    }
    assert!(ddp.replicas_identical()?);
    model.store.save(folder.join(format!("{rank}.safetensors"))).unwrap();
    Ok(())
}

/// A job that cannot go well.
fn fail(case: &str, group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size().count());
    let last = rank.index() + 1 == ranks;
    let model = Experts::new(2);
    let mut ddp = crate::nccl::ddp(&model.store, group, options(case))?;
    for step in 0..4 {
        let is_other = last && step == 2;
        if is_other && case == "dead" {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let experts: &[usize] = if is_other && case != "twice" { &[0] } else { &[0, 1] };
        let loss = ddp.forward(|| part(&model, experts, 0))?;
        ddp.backward(&loss)?;
        if is_other && case == "twice" {
            ddp.backward(&loss)?;
        }
    }
    // Calls of NCCL's that nobody has waited for may fail until here.
    ddp.replicas_identical()?;
    Err(Error::aborted("it went well"))
}

/// What the ranks say in the end.
fn failure(case: &str, ranks: u32, variables: &[(&str, &str)]) -> (Outcome, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut stderr = String::new();
    let report = crate::run(&job(case, ranks, folder.path(), variables), |event| note(event, &mut stderr));
    assert!(!stderr.contains("it went well"), "{stderr}");
    (report.outcome, stderr)
}

fn unused_is_named(variables: &[(&str, &str)]) {
    let (_, text) = failure("named", 3, variables);
    assert_each_says(3, &text, &["rank 2", "`expert1.weight`", "find_unused_parameters"]);
}

fn changed_graph_is_refused(variables: &[(&str, &str)]) {
    let (_, text) = failure("changed", 2, variables);
    assert_each_says(2, &text, &["rank 1", "`expert1.weight`"]);
}

fn dead_peer_is_named(variables: &[(&str, &str)]) {
    let (outcome, text) = failure("dead", 3, variables);
    assert!(matches!(&outcome, Outcome::Failed(failure) if failure.rank == Rank::new(2)), "{outcome:?}");
    assert_each_says(2, &text, &["rank 2"]);
}

fn refused_backward_is_not_waited_for(variables: &[(&str, &str)]) {
    let (_, text) = failure("twice", 2, variables);
    assert_each_says(2, &text, &["a second time"]);
}

/// The first `ranks` ranks each have a line with all of `words`.
pub fn assert_each_says(ranks: usize, text: &str, words: &[&str]) {
    for rank in 0..ranks {
        let mut own = text.lines().filter(|line| line.starts_with(&format!("{rank}: ")));
        assert!(own.any(|line| words.iter().all(|word| line.contains(word))), "rank {rank}: {text}");
    }
}
