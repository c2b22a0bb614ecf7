//! What was saved on a mesh of one shape goes on in another.

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::Tensor;
use phalanx::checkpoint::Checkpoints;
use phalanx::mesh::DeviceMesh;
use phalanx::pipeline::Schedule;
use phalanx::{DType, GroupHandle, ProcessGroup};
use phalanx_burn::Ddp;
use phalanx_burn::parallel::pipeline::{Pipeline, Stage, StageOutput};
use phalanx_burn::parallel::tensor::{
    Activations, ColumnParallelLinear, ParallelEncoder, TensorGroup, VocabParallelEmbedding,
};
use phalanx_burn::parallel::{ShardedState, StateNames};

use super::model::{Batch, Part, Whole, loss, rows};
use crate::common::{device, floats, run};

const LAYERS: usize = 2;
/// Rows of a step, over all replicas.
const ROWS: usize = 8;
const RATE: f64 = 1e-2;
/// Steps before the checkpoint, and after it.
const BEFORE: usize = 3;
const AFTER: usize = 4;

/// Ranks along data, pipeline and tensor.
type Shape = (usize, usize, usize);

const SHAPES: [Shape; 6] = [(1, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 4)];

/// One of several stages, whose layers are divided.
#[derive(Module, Debug)]
struct Piece {
    tokens: Option<VocabParallelEmbedding>,
    encoder: ParallelEncoder,
    head: Option<Linear>,
}

impl Stage<3> for Piece {
    type Batch = Batch;

    fn forward(&self, input: Option<Tensor<3>>, (tokens, classes): &Batch) -> StageOutput<3> {
        let x = match (input, &self.tokens) {
            (None, Some(embedding)) => embedding.forward(tokens.clone()),
            (Some(x), _) => x,
            (None, None) => unreachable!("the first stage begins with tokens"),
        };
        let x = self.encoder.forward(x, None, None);
        match &self.head {
            None => StageOutput::Hidden(x),
            Some(head) => StageOutput::Loss(loss(head, x, classes.clone())),
        }
    }
}

/// A training on a mesh.
struct Training {
    mesh: DeviceMesh,
    pipeline: Pipeline<3>,
    ddp: Ddp<Vec<Piece>>,
    optimizer: ModuleOptimizer,
    state: ShardedState,
}

impl Training {
    fn new(group: &ProcessGroup, (data, stages, parts): Shape) -> Self {
        let dimensions = [("data", data), ("pipeline", stages), ("tensor", parts)];
        let mesh = DeviceMesh::new(group, &dimensions).unwrap();
        let tensor = TensorGroup::new(mesh.group("tensor").unwrap());
        let pipeline =
            Pipeline::new(mesh.group("pipeline").unwrap(), Schedule::OneForwardOneBackward, 2).unwrap();
        let piece = |stage| {
            let Part { tokens, encoder, head } = Part::new(LAYERS, stage, stages);
            Piece {
                tokens: tokens.map(|tokens| VocabParallelEmbedding::new(tokens, &tensor).unwrap()),
                encoder: ParallelEncoder::new(encoder, &tensor, Activations::Replicated).unwrap(),
                head: head.map(|head| tensor.replicate(head).unwrap()),
            }
        };
        let pieces: Vec<Piece> = pipeline.own_stages().map(piece).collect();
        let ddp = Ddp::new(pieces, mesh.group("data").unwrap()).unwrap();
        let names = StateNames::new(|path| {
            let (stage, path) = pipeline.stage_path(path).unwrap();
            in_whole(stage * LAYERS / stages, path)
        });
        let state = ShardedState::new(&ddp, group, Some(&tensor), &names).unwrap();
        drop(names);
        Self { mesh, pipeline, ddp, optimizer: AdamWConfig::new().init(), state }
    }

    /// The losses of these steps.
    fn steps(&mut self, steps: std::ops::Range<usize>) -> Vec<f64> {
        let replica = self.mesh.coordinate("data").unwrap();
        let own = ROWS / self.mesh.size("data").unwrap();
        let step = |step: usize| {
            let from = step * ROWS + replica * own;
            let batches = [rows(from, from + own / 2), rows(from + own / 2, from + own)];
            let done = self.pipeline.train(&mut self.ddp, &batches).unwrap();
            self.ddp.step(&mut self.optimizer, RATE, done.gradients).unwrap();
            self.ddp.mean(done.loss).unwrap()
        };
        steps.map(step).collect()
    }

    fn save(&self, checkpoints: &Checkpoints) {
        let saved = checkpoints
            .save_sharded(1, |snapshot| self.state.save(&self.ddp, &self.optimizer, snapshot, "training"));
        saved.and_then(|()| checkpoints.finish()).unwrap();
    }

    fn load(&mut self, checkpoints: &Checkpoints) {
        let saved = checkpoints.newest().unwrap().unwrap();
        self.state.load(&mut self.ddp, &mut self.optimizer, &saved, "training").unwrap();
    }
}

/// The path in [`Whole`] of a tensor of a stage that begins with layer `first`.
fn in_whole(first: usize, path: &str) -> String {
    match path.strip_prefix("encoder.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => {
            format!("encoder.layers.{}.{rest}", first + layer.parse::<usize>().unwrap())
        }
        None => path.to_owned(),
    }
}

fn ranks((data, stages, parts): Shape) -> u32 {
    (data * stages * parts) as u32
}

/// All tensors of the checkpoint in a folder.
fn contents(folder: &Path) -> Vec<(String, DType, Vec<usize>, Vec<u8>)> {
    let checkpoints = Checkpoints::open(folder, &ProcessGroup::alone().unwrap()).unwrap();
    let saved = checkpoints.newest().unwrap().unwrap();
    let tensors = saved.tensors().map(|(name, tensor)| {
        (name.to_owned(), tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().unwrap().into_owned())
    });
    tensors.collect()
}

#[test]
fn every_mesh_goes_on_with_what_any_other_has_saved() {
    // Without the state of the optimizer it would be another curve: what is compared depends on it.
    let curve = run(1, |group| {
        let mut training = Training::new(&group, (1, 1, 1));
        let before = training.steps(0..BEFORE);
        let mut forgetful = Training::new(&group, (1, 1, 1));
        forgetful.ddp = Ddp::new(training.ddp.model().clone(), &group).unwrap();
        let after = training.steps(BEFORE..BEFORE + AFTER);
        let forgotten = forgetful.steps(BEFORE..BEFORE + AFTER);
        let apart = after.iter().zip(&forgotten).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(apart > 1e-2, "{after:?} {forgotten:?}");
        [before, after].concat()
    })
    .remove(0);
    let near = |losses: &[f64], from: usize, what: &str| {
        for (step, (ours, expected)) in losses.iter().zip(&curve[from..]).enumerate() {
            assert!((ours / expected - 1.0).abs() < 1e-4, "{what}, step {step}: {ours} and not {expected}");
        }
    };
    for from in SHAPES {
        let folder = tempfile::tempdir().unwrap();
        let uninterrupted = run(ranks(from), |group| {
            let mut training = Training::new(&group, from);
            near(&training.steps(0..BEFORE), 0, &format!("{from:?}"));
            training.save(&Checkpoints::open(folder.path(), &group).unwrap());
            training.steps(BEFORE..BEFORE + AFTER)
        });
        let saved = contents(folder.path());
        // Parameters, and two moments of each, as in one process.
        assert_eq!(saved.len(), 3 * floats(&Whole::new(LAYERS)).len(), "{from:?}");
        for to in SHAPES {
            let (what, again) = (format!("{from:?} -> {to:?}"), tempfile::tempdir().unwrap());
            let losses = run(ranks(to), |group| {
                let mut training = Training::new(&group, to);
                training.load(&Checkpoints::open(folder.path(), &group).unwrap());
                training.save(&Checkpoints::open(again.path(), &group).unwrap());
                training.steps(BEFORE..BEFORE + AFTER)
            });
            assert!(contents(again.path()) == saved, "{what}: a tensor has changed on the way");
            near(&losses[0], BEFORE, &what);
            assert!(from != to || losses == uninterrupted, "{what}: {losses:?} {uninterrupted:?}");
        }
    }
}

#[test]
fn one_process_has_no_need_of_divided_layers() {
    let folder = tempfile::tempdir().unwrap();
    run(4, |group| {
        let mut training = Training::new(&group, (1, 2, 2));
        training.steps(0..1);
        training.save(&Checkpoints::open(folder.path(), &group).unwrap());
    });
    run(1, |group| {
        let mut ddp = Ddp::new(Whole::new(LAYERS), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let state = ShardedState::new(&ddp, &group, None, &StateNames::same()).unwrap();
        let saved = Checkpoints::open(folder.path(), &group).unwrap().newest().unwrap().unwrap();
        state.load(&mut ddp, &mut optimizer, &saved, "training").unwrap();
        assert_ne!(floats(ddp.model()), floats(&Whole::new(LAYERS)), "a step was taken");
        let loss = ddp.forward(|model| model.loss(rows(ROWS, 2 * ROWS))).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        ddp.step(&mut optimizer, RATE, gradients).unwrap();
    });
}

/// As a program does whose ranks all have the whole model, and which may go on with divided layers.
#[test]
fn rank_0_saves_a_whole_model_for_a_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let losses = run(2, |group| {
        let mut ddp = Ddp::new(Whole::new(LAYERS), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let own = ROWS / 2;
        let step = |ddp: &mut Ddp<Whole>, optimizer: &mut ModuleOptimizer, step: usize| {
            let from = step * ROWS + group.rank().index() * own;
            let loss = ddp.forward(|model| model.loss(rows(from, from + own))).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(optimizer, RATE, gradients).unwrap();
            ddp.mean(&loss).unwrap()
        };
        step(&mut ddp, &mut optimizer, 0);
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let saved = checkpoints.save(1, |snapshot| {
            let alone = ProcessGroup::alone()?;
            let whole = Ddp::new(ddp.model().clone(), &alone)?;
            let state = ShardedState::new(&whole, &alone, None, &StateNames::same())?;
            state.save(&whole, &optimizer, snapshot, "training")
        });
        saved.and_then(|()| checkpoints.finish()).unwrap();
        step(&mut ddp, &mut optimizer, 1)
    });
    run(4, |group| {
        let mut training = Training::new(&group, (1, 2, 2));
        training.load(&Checkpoints::open(folder.path(), &group).unwrap());
        let loss = training.steps(1..2)[0];
        assert!((loss / losses[0] - 1.0).abs() < 1e-4, "{loss} and not {}", losses[0]);
    });
}

#[test]
fn a_state_that_one_rank_alone_loads_or_cannot_load_is_an_error_on_every_rank() {
    for shape in [(2, 1, 1), (1, 2, 1), (1, 1, 2)] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let mut training = Training::new(&group, shape);
            training.steps(0..1);
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            training.save(&checkpoints);
            let saved = checkpoints.newest().unwrap().unwrap();

            let mut other = Training::new(&group, shape);
            let before = floats(other.ddp.model());
            let name = if group.rank().is_main() { "training" } else { "another" };
            let loaded = other.state.load(&mut other.ddp, &mut other.optimizer, &saved, name);
            let error = loaded.unwrap_err().to_string();
            assert!(error.contains("another"), "{error}");
            assert!(!group.rank().is_main() || error.contains("rank 1 has not loaded its part"), "{error}");
            assert_eq!(floats(other.ddp.model()), before);
            // The group goes on, until one rank makes another call.
            other.load(&checkpoints);
            let outcome = match group.rank().is_main() {
                true => other.state.load(&mut other.ddp, &mut other.optimizer, &saved, "training"),
                false => group.barrier(),
            };
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("ShardedState::load"), "{error}");
        });
    }
}

#[test]
fn parts_of_the_states_of_different_steps_are_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let mut training = Training::new(&group, (1, 2, 1));
        training.steps(0..1);
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let saved = [1, 2].map(|step| {
            let Training { ddp, optimizer, state, .. } = &training;
            checkpoints
                .save_sharded(step, |snapshot| state.save(ddp, optimizer, snapshot, "training"))
                .unwrap();
            checkpoints.finish().unwrap();
            checkpoints.newest().unwrap().unwrap()
        });
        let before = floats(training.ddp.model());
        let Training { ddp, optimizer, state, .. } = &mut training;
        let own = group.rank().index();
        let error = state.load(ddp, optimizer, &saved[own], "training").unwrap_err();
        let said = format!("and rank {own} that of step {}", own + 1);
        assert!(error.is_mismatch() && error.to_string().contains(&said), "{error}");
        assert_eq!(floats(ddp.model()), before);
        state.load(ddp, optimizer, &saved[0], "training").unwrap();
    });
}

#[test]
fn parts_of_the_states_of_two_runs_after_one_step_are_an_error_on_every_rank() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    run(2, |group| {
        let mut training = Training::new(&group, (1, 2, 1));
        let saved = [0, 1].map(|number| {
            training.steps(number..number + 1);
            let checkpoints = Checkpoints::open(folders[number].path(), &group).unwrap();
            let Training { ddp, optimizer, state, .. } = &training;
            checkpoints.save_sharded(1, |snapshot| state.save(ddp, optimizer, snapshot, "training")).unwrap();
            checkpoints.finish().unwrap();
            checkpoints.newest().unwrap().unwrap()
        });
        let before = floats(training.ddp.model());
        let Training { ddp, optimizer, state, .. } = &mut training;
        let own = group.rank().index();
        let error = state.load(ddp, optimizer, &saved[own], "training").unwrap_err();
        let said = "load the states of two runs, both after step 1";
        assert!(error.is_mismatch() && error.to_string().contains(said), "{error}");
        assert_eq!(floats(ddp.model()), before);
        state.load(ddp, optimizer, &saved[0], "training").unwrap();
    });
}

#[test]
fn another_model_s_state_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        Training::new(&group, (1, 2, 1)).save(&checkpoints);
        let mut ddp = Ddp::new(Whole::new(LAYERS + 1), &group).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let state = ShardedState::new(&ddp, &group, None, &StateNames::same()).unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let error = state.load(&mut ddp, &mut optimizer, &saved, "training").unwrap_err();
        let text = error.to_string();
        assert!(error.is_mismatch() && text.contains("here it is encoder.layers.2.mha.key.bias"), "{text}");
        assert_eq!(floats(ddp.model()), floats(&Whole::new(LAYERS + 1)));
        let other = Ddp::new(Whole::new(LAYERS), &group).unwrap();
        let error = checkpoints
            .save_sharded(2, |snapshot| state.save(&other, &optimizer, snapshot, "training"))
            .unwrap_err();
        assert!(error.to_string().contains("not the one for which ShardedState::new was called"), "{error}");
    });
}

/// With its moments it goes on where it was, once it is trained again.
#[test]
fn what_is_frozen_by_now_keeps_its_moments() {
    let folder = tempfile::tempdir().unwrap();
    let layer = || -> Linear { LinearConfig::new(4, 4).init(&device()) };
    run(2, |group| {
        let mut ddp = Ddp::new((layer(), layer()), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        let x = Tensor::<2>::ones([2, 4], &device());
        let loss = ddp.forward(|(one, other)| other.forward(one.forward(x)).mean()).unwrap();
        let gradients = ddp.backward(&loss).unwrap();
        ddp.step(&mut optimizer, RATE, gradients).unwrap();
        let (one, other) = ddp.into_model();
        let ddp = Ddp::new((one.no_grad(), other), &group).unwrap();
        let new =
            |ddp: &Ddp<(Linear, Linear)>| ShardedState::new(ddp, &group, None, &StateNames::same()).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let state = new(&ddp);
        let saved =
            checkpoints.save_sharded(1, |snapshot| state.save(&ddp, &optimizer, snapshot, "training"));
        saved.and_then(|()| checkpoints.finish()).unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        let mut again = Ddp::new((layer().no_grad(), layer()), &group).unwrap();
        let mut loaded = AdamWConfig::new().init();
        new(&again).load(&mut again, &mut loaded, &saved, "training").unwrap();
        assert_eq!(loaded.to_record().len(), optimizer.to_record().len());
        assert_eq!(floats(again.model()), floats(ddp.model()));
    });
}

/// As [`a_group_without_some_ranks_of_the_mesh_is_refused`], found later.
#[test]
fn replicas_that_are_not_in_the_group_any_more_are_missed() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let handle = GroupHandle::new(group.clone());
        let ddp = Ddp::new(LinearConfig::new(4, 4).init(&device()), &handle).unwrap();
        let state = ShardedState::new(&ddp, &group, None, &StateNames::same()).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        handle.rebind(ProcessGroup::alone().unwrap());
        let optimizer = SgdConfig::new().init();
        let saved =
            checkpoints.save_sharded(1, |snapshot| state.save(&ddp, &optimizer, snapshot, "training"));
        let error = saved.unwrap_err().to_string();
        assert!(error.contains("leads to another group"), "{error}");
    });
}

/// Replicas save in turns, and what others would have saved were missing.
#[test]
fn a_group_without_some_ranks_of_the_mesh_is_refused() {
    run(2, |group| {
        let ddp = Ddp::new(LinearConfig::new(4, 4).init(&device()), &group).unwrap();
        let alone = ProcessGroup::alone().unwrap();
        let error = ShardedState::new(&ddp, &alone, None, &StateNames::same()).unwrap_err();
        let said = ["no rank of the group would save `weight`", "no rank of the group would save `bias`"];
        let said = said[group.rank().index()];
        assert!(error.is_invalid_argument() && error.to_string().contains(said), "{error}");
        ShardedState::new(&ddp, &group, None, &StateNames::same()).unwrap();
    });
    run(2, |group| {
        let tensor = TensorGroup::new(&group);
        let layer = ColumnParallelLinear::new(LinearConfig::new(4, 4).init(&device()), &tensor).unwrap();
        let alone = ProcessGroup::alone().unwrap();
        let ddp = Ddp::new(layer, &alone).unwrap();
        let error = ShardedState::new(&ddp, &alone, Some(&tensor), &StateNames::same()).unwrap_err();
        assert!(error.to_string().contains("no rank of the group would save `bias`"), "{error}");
    });
}

#[test]
fn steps_without_an_optimizer_s_state_are_refused_by_one_that_needs_some() {
    for step in [0, 5] {
        let folder = tempfile::tempdir().unwrap();
        run(2, |group| {
            let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
            let mut training = Training::new(&group, (1, 2, 1));
            // Whatever took the steps, this one did not, and has nothing.
            training.optimizer = SgdConfig::new().init();
            let Training { ddp, optimizer, state, .. } = &training;
            checkpoints
                .save_sharded(step, |snapshot| state.save(ddp, optimizer, snapshot, "training"))
                .unwrap();
            checkpoints.finish().unwrap();
            let saved = checkpoints.newest().unwrap().unwrap();
            let mut other = Training::new(&group, (1, 2, 1));
            let before = floats(other.ddp.model());
            let loaded = other.state.load(&mut other.ddp, &mut other.optimizer, &saved, "training");
            if step == 0 {
                loaded.unwrap();
            } else {
                let error = loaded.unwrap_err();
                assert!(error.is_mismatch() && error.to_string().contains(".momentum.moment_1`"), "{error}");
                assert_eq!(floats(other.ddp.model()), before);
            }
            other.state.load(&mut other.ddp, &mut SgdConfig::new().init(), &saved, "training").unwrap();
        });
    }
}

/// A parameter that two stages have, and one that each has for itself.
#[derive(Module, Debug)]
struct Tied {
    shared: Param<Tensor<2>>,
    own: Linear,
}

impl Tied {
    fn new(own: usize) -> Self {
        Self {
            shared: Param::from_tensor(Tensor::ones([3, 2], &device())),
            own: LinearConfig::new(2, own).init(&device()),
        }
    }
}

#[test]
fn what_stages_share_is_saved_once_and_only_if_it_was_named() {
    let folder = tempfile::tempdir().unwrap();
    run(2, |group| {
        let alone = ProcessGroup::alone().unwrap();
        let rank = group.rank().index();
        let mut ddp = Ddp::new(Tied::new(2 + rank), &alone).unwrap();
        let path = |path: &str| path.replace("own.", &format!("own{rank}."));
        let error = ShardedState::new(&ddp, &group, None, &StateNames::new(path)).unwrap_err().to_string();
        assert!(error.contains("`shared` is on ranks 0 and 1, which are no replicas"), "{error}");
        // A name that each rank gives to a tensor of its own.
        let error = ShardedState::new(&ddp, &group, None, &StateNames::same().tied("shared"));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains(
                "`own.weight` is F32 [2, 2] (not divided) on rank 0, and F32 [2, 3] (not divided) on rank 1"
            ),
            "{error}"
        );
        let error = ShardedState::new(&ddp, &group, None, &StateNames::new(|_| "same".to_owned()));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`same` is F32 [3, 2]") || error.contains("are `same`"), "{error}");

        let state = ShardedState::new(&ddp, &group, None, &StateNames::new(path).tied("shared")).unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &group).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        for step in 1..=2 {
            let loss =
                ddp.forward(|model| model.own.forward(model.shared.val()).powi_scalar(2).sum()).unwrap();
            let gradients = ddp.backward(&loss).unwrap();
            ddp.step(&mut optimizer, 0.1, gradients).unwrap();
            let saved =
                checkpoints.save_sharded(step, |snapshot| state.save(&ddp, &optimizer, snapshot, "x"));
            saved.and_then(|()| checkpoints.finish()).unwrap();
        }
        let expected = group.all_gather_object(&floats(ddp.model())).unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        state.load(&mut ddp, &mut optimizer, &saved, "x").unwrap();
        let loaded = floats(ddp.model());
        assert_eq!(
            (&loaded[0], &loaded[1..]),
            (&expected[0][0], &expected[rank][1..]),
            "the first copy, and its own"
        );
    });
}
