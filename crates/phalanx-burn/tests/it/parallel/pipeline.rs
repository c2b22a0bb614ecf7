//! A pipeline's loss and gradients are those of one process.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Int, Tensor, TensorData};
use phalanx::pipeline::Schedule;
use phalanx::testing::{self, Fabric};
use phalanx::{Error, ProcessGroup};
use phalanx_burn::parallel::pipeline::{Pipeline, PipelineStep, Stage, StageOutput, TiedParameter};
use phalanx_burn::{Ddp, parallel};

use super::model::{Batch, Part, Whole, gradients_for, gradients_of, rows, scalar};
use crate::common::{device, distance, floats, run};

/// Layers of the model, which 2, 3 and 4 ranks can divide, with one or two stages each.
const LAYERS: usize = 12;
/// Rows of a micro-batch.
const ROWS: usize = 2;

fn batches(count: usize) -> Vec<Batch> {
    (0..count).map(|index| rows(index * ROWS, (index + 1) * ROWS)).collect()
}

fn alone() -> ProcessGroup {
    ProcessGroup::alone().unwrap()
}

/// What one process has: the mean of the micro-batches' losses, and its gradients.
fn expected(count: usize) -> (f64, Vec<Vec<f32>>) {
    let whole = Whole::new(LAYERS);
    let losses = batches(count).into_iter().map(|batch| whole.loss(batch));
    let loss = losses.reduce(|sum, loss| sum + loss).unwrap() / count as f64;
    (scalar(&loss), gradients_of(&whole, &loss.backward()))
}

/// This rank's stages, and what they have after a step.
fn parts<const D: usize>(pipeline: &Pipeline<D>) -> Vec<Part> {
    pipeline.own_stages().map(|stage| Part::new(LAYERS, stage, pipeline.stages())).collect()
}

/// The tensors of the whole model, from those of each rank's stages.
fn whole(ranks: Vec<Vec<Vec<Vec<f32>>>>) -> Vec<Vec<f32>> {
    let each = ranks[0].len();
    (0..each).flat_map(|place| ranks.iter().flat_map(move |stages| stages[place].clone())).collect()
}

/// By stage of this rank.
fn gradients(ddp: &Ddp<Vec<Part>>, step: &PipelineStep) -> Vec<Vec<Vec<f32>>> {
    ddp.model().iter().map(|part| gradients_for(part, &step.gradients)).collect()
}

fn check(ranks: u32, schedule: Schedule, microbatches: usize, recompute: bool, fabric: Fabric) {
    let what = format!("{ranks} ranks, {schedule:?}, {microbatches} micro-batches, {fabric:?}");
    let (expected_loss, expected) = expected(microbatches);
    let ours = testing::run(ranks, fabric, |group| {
        let mut pipeline = Pipeline::new(&group, schedule, microbatches).unwrap();
        if recompute {
            pipeline = pipeline.with_recomputation(7);
        }
        let mut ddp = Ddp::new(parts(&pipeline), &alone()).unwrap();
        // Shapes are told in the first step alone.
        let first = pipeline.train(&mut ddp, &batches(microbatches)).unwrap();
        let second = pipeline.train(&mut ddp, &batches(microbatches)).unwrap();
        assert_eq!(first.loss, second.loss, "{what}");
        assert!((first.loss - expected_loss).abs() < 1e-6, "{what}: {} {expected_loss}", first.loss);
        assert_eq!(gradients(&ddp, &first), gradients(&ddp, &second), "{what}");
        // An evaluation before, between or after steps.
        let valid = ddp.model().clone().valid();
        let (tokens, classes): (Vec<_>, Vec<_>) = batches(microbatches).into_iter().unzip();
        let inner = tokens.into_iter().map(Tensor::inner).zip(classes.into_iter().map(Tensor::inner));
        let evaluated = pipeline.evaluate(&valid, &inner.collect::<Vec<_>>()).unwrap();
        assert!((evaluated - expected_loss).abs() < 1e-6, "{what}: {evaluated} {expected_loss}");
        assert!((0.0..1.0).contains(&first.bubble) && first.busy > Duration::ZERO);
        gradients(&ddp, &first)
    });
    let apart = distance(&whole(ours), &expected);
    assert!(apart < 1e-5, "{what}: {apart}");
}

#[test]
fn every_schedule_is_one_process() {
    for (ranks, microbatches) in [(1, 2), (2, 1), (2, 4), (3, 5), (4, 4)] {
        check(ranks, Schedule::GPipe, microbatches, false, Fabric::InProcess);
        check(ranks, Schedule::OneForwardOneBackward, microbatches, false, Fabric::InProcess);
    }
    for (ranks, microbatches, stages_per_rank) in [(1, 2, 3), (2, 4, 2), (2, 2, 3), (3, 3, 2)] {
        check(ranks, Schedule::Interleaved { stages_per_rank }, microbatches, false, Fabric::InProcess);
    }
}

#[test]
fn so_it_is_over_tcp_and_shared_memory() {
    for fabric in [Fabric::Tcp, Fabric::SharedMemory, Fabric::TwoHosts] {
        check(2, Schedule::OneForwardOneBackward, 3, false, fabric);
        check(2, Schedule::Interleaved { stages_per_rank: 2 }, 4, false, fabric);
    }
}

#[test]
fn so_it_is_with_activations_computed_again() {
    for schedule in
        [Schedule::GPipe, Schedule::OneForwardOneBackward, Schedule::Interleaved { stages_per_rank: 2 }]
    {
        check(2, schedule, 4, true, Fabric::InProcess);
    }
}

#[test]
fn a_pipeline_trains_as_one_process_does_and_its_norm_is_the_whole_one() {
    const STEPS: usize = 6;
    let step_batches = |step: usize| -> Vec<Batch> {
        (0..4).map(|index| rows((4 * step + index) * ROWS, (4 * step + index + 1) * ROWS)).collect()
    };
    let (mut model, mut optimizer) = (Whole::new(LAYERS), AdamWConfig::new().init());
    let mut curve = Vec::new();
    for step in 0..STEPS {
        let losses = step_batches(step).into_iter().map(|batch| model.loss(batch));
        let loss = losses.reduce(|sum, loss| sum + loss).unwrap() / 4.0;
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let norm = phalanx_burn::clip_grad_norm(&model, &mut gradients, 0.3).unwrap();
        curve.push((scalar(&loss), norm));
        model = optimizer.step(3e-3, model, gradients);
    }
    let ours = run(2, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::OneForwardOneBackward, 4).unwrap();
        let mut ddp = Ddp::new(parts(&pipeline), &alone()).unwrap();
        let mut optimizer = AdamWConfig::new().init();
        for (step, (loss, norm)) in curve.iter().enumerate() {
            let mut result = pipeline.train(&mut ddp, &step_batches(step)).unwrap();
            let ours =
                parallel::clip_grad_norm(ddp.model(), &mut result.gradients, 0.3, None, Some(&group), &[])
                    .unwrap();
            assert!((result.loss / loss - 1.0).abs() < 1e-4, "step {step}: {} {loss}", result.loss);
            assert!((ours / norm - 1.0).abs() < 1e-3, "step {step}: {ours} {norm}");
            ddp.step(&mut optimizer, 3e-3, result.gradients).unwrap();
        }
        ddp.model().iter().map(floats).collect::<Vec<_>>()
    });
    let apart = distance(&whole(ours), &floats(&model));
    assert!(apart < 1e-2, "{apart}");
}

#[test]
fn stages_that_are_clipped_to_different_norms_are_an_error_on_every_rank() {
    let all_are_here = Barrier::new(2);
    for (other, said) in [(2.0, "the mean over all ranks is 1.5"), (0.0, "max_norm is 0")] {
        let errors = run(2, |group| {
            let mut pipeline = Pipeline::new(&group, Schedule::OneForwardOneBackward, 2).unwrap();
            let mut ddp = Ddp::new(parts(&pipeline), &alone()).unwrap();
            let mut step = pipeline.train(&mut ddp, &batches(2)).unwrap();
            let max_norm = if group.rank().is_main() { 1.0 } else { other };
            // An error ends the group, in whose step the other rank may still be.
            all_are_here.wait();
            parallel::clip_grad_norm(ddp.model(), &mut step.gradients, max_norm, None, Some(&group), &[])
                .unwrap_err()
                .to_string()
        });
        assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
    }
}

#[test]
fn the_norm_of_some_stages_is_refused() {
    run(2, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::OneForwardOneBackward, 2).unwrap();
        let mut ddp = Ddp::new(parts(&pipeline), &alone()).unwrap();
        let mut step = pipeline.train(&mut ddp, &batches(2)).unwrap();
        let error = ddp.clip_grad_norm(&mut step.gradients, 1e-6).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("some stages"), "{error}");
        assert!(error.remedy().unwrap().contains("parallel::clip_grad_norm"), "{error}");
        // Nothing has been scaled, and the group goes on.
        let (model, gradients) = (ddp.model(), &mut step.gradients);
        let norm = parallel::clip_grad_norm(model, gradients, 1e9, None, Some(&group), &[]).unwrap();
        assert!(norm > 1e-5, "{norm}");
    });
    // One rank has all stages.
    let mut pipeline = Pipeline::new(&alone(), Schedule::OneForwardOneBackward, 2).unwrap();
    let mut ddp = Ddp::new(parts(&pipeline), &alone()).unwrap();
    let mut step = pipeline.train(&mut ddp, &batches(2)).unwrap();
    ddp.clip_grad_norm(&mut step.gradients, 1e9).unwrap();
}

/// A stage that takes a known time: it sleeps in its forward pass, and again when that is repeated for the backward pass.
#[derive(Module, Debug)]
struct Sleeper {
    layer: Linear,
    is_last: bool,
}

impl Stage<2> for Sleeper {
    type Batch = Tensor<2>;

    fn forward(&self, input: Option<Tensor<2>>, x: &Tensor<2>) -> StageOutput<2> {
        std::thread::sleep(Duration::from_millis(40));
        let x = self.layer.forward(input.unwrap_or_else(|| x.clone()));
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

#[test]
fn stages_in_one_ddp_are_refused_in_the_first_step() {
    let errors = run(2, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
        let layer = LinearConfig::new(2, 2).init(&device());
        // It cannot know that these are two stages, and gives both ranks those of rank 0.
        let stage = Sleeper { layer, is_last: !group.rank().is_main() };
        let mut ddp = Ddp::new(vec![stage], &group).unwrap();
        let batch = vec![Tensor::<2>::ones([1, 2], &device()); 2];
        pipeline.train(&mut ddp, &batch).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("ranks 0 and 1 of the pipeline have different stages"), "{error}");
        assert!(error.contains("mesh.group(\"data\")"), "{error}");
    }
}

/// A stage that panics if its micro-batch says so.
#[derive(Module, Debug)]
struct Fragile {
    layer: Linear,
    is_last: bool,
}

impl Stage<2> for Fragile {
    type Batch = (Tensor<2>, bool);

    fn forward(&self, input: Option<Tensor<2>>, (x, panics): &Self::Batch) -> StageOutput<2> {
        assert!(!panics, "this micro-batch is broken");
        let x = self.layer.forward(input.unwrap_or_else(|| x.clone()));
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

/// What has come of it would be taken for the next step's.
#[test]
fn nothing_goes_on_after_a_step_that_a_panic_has_cut_off() {
    let errors = run(2, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
        let is_last = !group.rank().is_main();
        let layer = LinearConfig::new(2, 2).init(&device());
        let mut ddp = Ddp::new(vec![Fragile { layer, is_last }], &alone()).unwrap();
        let mut step = |panics: bool| {
            let x = Tensor::<2>::ones([1, 2], &device());
            pipeline.train(&mut ddp, &[(x.clone(), panics), (x, false)]).map(|step| step.loss)
        };
        step(false).unwrap();
        if is_last {
            // A program that leaves out a batch.
            assert!(catch_unwind(AssertUnwindSafe(|| step(true))).is_err());
        }
        (0..2).find_map(|_| step(false).err()).map(|error| error.to_string())
    });
    for error in errors {
        assert!(error.is_some_and(|error| error.contains("a stage of a pipeline has panicked")));
    }
}

/// Nobody waits for a single rank, whose program may leave out a batch.
#[test]
fn a_step_that_a_panic_has_cut_off_leaves_no_gradients_for_the_next_one() {
    run(1, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::OneForwardOneBackward, 2).unwrap();
        let layer = LinearConfig::new(2, 2).init(&device());
        let mut ddp = Ddp::new(vec![Fragile { layer, is_last: true }], &alone()).unwrap();
        let mut bias = |panics: bool| {
            let x = Tensor::<2>::ones([1, 2], &device());
            let gradients = pipeline.train(&mut ddp, &[(x.clone(), false), (x, panics)]).unwrap().gradients;
            let bias = ddp.model()[0].layer.bias.as_ref().unwrap();
            gradients.get::<1>(bias.id).unwrap().into_data().try_to_vec::<f32>().unwrap()
        };
        let expected = bias(false);
        assert!(catch_unwind(AssertUnwindSafe(|| bias(true))).is_err());
        assert_eq!(bias(false), expected);
    });
}

#[test]
fn the_bubble_is_the_formula_s() {
    for (ranks, microbatches) in [(2, 4), (3, 3)] {
        let (p, m) = (f64::from(ranks), microbatches as f64);
        let formula = (p - 1.0) / (m + p - 1.0);
        // Other work on the machine makes some steps longer.
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let bubbles = bubbles(ranks, microbatches);
            assert!(bubbles.iter().all(|rank| *rank == bubbles[0]), "the same on every rank");
            let nearest = bubbles[0].iter().map(|bubble| (bubble - formula).abs()).fold(1.0, f64::min);
            if nearest < 0.06 {
                break;
            }
            assert!(Instant::now() < deadline, "{ranks} ranks: {bubbles:?}, by formula {formula}");
        }
    }
}

/// The bubbles of some steps, by rank.
fn bubbles(ranks: u32, microbatches: usize) -> Vec<Vec<f64>> {
    run(ranks, |group| {
        let mut pipeline =
            Pipeline::new(&group, Schedule::GPipe, microbatches).unwrap().with_recomputation(0);
        let is_last = group.rank().index() + 1 == ranks as usize;
        let layer = LinearConfig::new(2, 2).init(&device());
        let mut ddp = Ddp::new(vec![Sleeper { layer, is_last }], &alone()).unwrap();
        let batch = vec![Tensor::<2>::ones([1, 2], &device()); microbatches];
        let step = |_| {
            group.barrier().unwrap();
            pipeline.train(&mut ddp, &batch).unwrap().bubble
        };
        (0..4).map(step).collect()
    })
}

/// The first stage embeds tokens, the last scores them with a copy of the same vectors.
#[derive(Module, Debug)]
struct Tied {
    vectors: Param<Tensor<2>>,
    is_last: bool,
}

impl Stage<3> for Tied {
    type Batch = Tensor<2, Int>;

    fn forward(&self, input: Option<Tensor<3>>, tokens: &Self::Batch) -> StageOutput<3> {
        let vectors = self.vectors.val();
        match input {
            None => StageOutput::Hidden(burn::tensor::module::embedding(vectors, tokens.clone()).tanh()),
            Some(x) => StageOutput::Loss(x.matmul(vectors.transpose().unsqueeze()).powi_scalar(2).mean()),
        }
    }
}

/// As [`Tied`], with a stage between the two that multiplies by vectors of its own.
#[derive(Module, Debug)]
struct Middle {
    tied: Tied,
}

impl Stage<3> for Middle {
    type Batch = Tensor<2, Int>;

    fn forward(&self, input: Option<Tensor<3>>, tokens: &Self::Batch) -> StageOutput<3> {
        match input {
            Some(x) if !self.tied.is_last => {
                let vectors = self.tied.vectors.val();
                StageOutput::Hidden(x.matmul((vectors.clone().transpose().matmul(vectors)).unsqueeze()))
            }
            input => self.tied.forward(input, tokens),
        }
    }
}

#[test]
fn tied_parameters_stay_equal_and_are_one_process_s() {
    let vectors = |phase: f32| {
        let wave: Vec<f32> = (0..7 * 4).map(|i| (1.1 * i as f32 + phase).sin()).collect();
        Param::from_tensor(Tensor::<2>::from_data(TensorData::new(wave, [7, 4]), &device()))
    };
    let tokens = || vec![Tensor::<2, Int>::from_ints([[0, 3, 6], [1, 1, 2]], &device()); 2];
    let whole = vectors(0.0);
    let x = burn::tensor::module::embedding(whole.val(), tokens()[0].clone()).tanh();
    let loss = x.matmul(whole.val().transpose().unsqueeze()).powi_scalar(2).mean();
    let expected: Vec<f32> = whole.val().grad(&loss.backward()).unwrap().into_data().iter::<f32>().collect();
    let expected_norm = expected.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let ours = run(2, |group| {
        let rank = group.rank().index();
        let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
        let (tied, vectors) = TiedParameter::new(Some(vectors(rank as f32)), &group).unwrap();
        let mut ddp =
            Ddp::new(vec![Tied { vectors: vectors.unwrap(), is_last: rank == 1 }], &alone()).unwrap();
        let mut step = pipeline.train(&mut ddp, &tokens()).unwrap();
        let vectors = ddp.model()[0].vectors.clone();
        tied.sum(&vectors, &mut step.gradients).unwrap();
        // One copy counts, and nothing is scaled.
        let copies = [(&tied, vectors.id)];
        let norm =
            parallel::clip_grad_norm(ddp.model(), &mut step.gradients, 1e9, None, Some(&group), &copies)
                .unwrap();
        assert!((norm / expected_norm - 1.0).abs() < 1e-5, "{norm} {expected_norm}");
        let gradient: Vec<f32> =
            step.gradients.get::<2>(vectors.id).unwrap().into_data().iter::<f32>().collect();
        let mut optimizer = AdamWConfig::new().init();
        ddp.step(&mut optimizer, 0.1, step.gradients).unwrap();
        (gradient, floats(ddp.model()))
    });
    assert_eq!(ours[0], ours[1]);
    assert!(distance(&[ours[0].0.clone()], &[expected]) < 1e-5);
    let (tied, none) = TiedParameter::new::<2>(None, &alone()).unwrap();
    assert!(none.is_none());
    assert!(tied.sum(&vectors(0.0), &mut GradientsParams::new()).unwrap_err().is_invalid_argument());
}

/// Stages may have optimizers of their own, but for what they share.
#[test]
fn copies_that_stages_have_changed_otherwise_are_an_error_on_every_rank_that_has_one() {
    for other in [0.1, 0.2] {
        let errors = run(2, |group| {
            let rank = group.rank().index();
            let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
            let wave: Vec<f32> = (0..7 * 4).map(|i| (1.1 * i as f32).sin()).collect();
            let vectors =
                Param::from_tensor(Tensor::<2>::from_data(TensorData::new(wave, [7, 4]), &device()));
            let (tied, vectors) = TiedParameter::new(Some(vectors), &group).unwrap();
            let mut ddp =
                Ddp::new(vec![Tied { vectors: vectors.unwrap(), is_last: rank == 1 }], &alone()).unwrap();
            let mut optimizer = AdamWConfig::new().init();
            let tokens = vec![Tensor::<2, Int>::from_ints([[0, 3, 6], [1, 1, 2]], &device()); 2];
            let mut step = || {
                let mut step = pipeline.train(&mut ddp, &tokens)?;
                let vectors = ddp.model()[0].vectors.clone();
                tied.sum(&vectors, &mut step.gradients)?;
                ddp.step(&mut optimizer, if rank == 0 { 0.1 } else { other }, step.gradients)
            };
            let ended = (0..35).find_map(|number| Some((number, step().err()?)));
            ended.map(|(number, error)| (number, error.to_string()))
        });
        for ended in errors {
            let Some((number, error)) = ended else {
                assert_eq!(other, 0.1);
                continue;
            };
            assert_eq!((number, other), (1, 0.2), "{error}");
            assert!(error.contains("the copies of a tied parameter on the ranks 0 and 1 differ"), "{error}");
        }
    }
}

#[test]
fn copies_of_another_shape_with_as_many_elements_are_refused_on_every_rank_that_has_one() {
    let errors = run(2, |group| {
        let shape = if group.rank().is_main() { [7, 4] } else { [4, 7] };
        let vectors = Param::from_tensor(Tensor::<2>::ones(shape, &device()));
        TiedParameter::new(Some(vectors), &group).map(drop).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(error.is_mismatch() && text.contains("[7, 4]") && text.contains("[4, 7]"), "{error}");
        assert!(error.remedy().unwrap().contains("transpose"), "{error}");
    }
}

/// Two of three ranks have it, as if both had read the same record.
#[test]
fn copies_on_two_ranks_are_refused_unless_they_are_tied() {
    let step = |group: &ProcessGroup, is_tied: bool| {
        let rank = group.rank().index();
        let vectors = Tensor::<2>::ones([7, 4], &device()).require_grad();
        let id = if rank == 0 { 1 } else { 2 };
        let mut vectors = Param::initialized(ParamId::from(id), vectors);
        if is_tied {
            let (_, copy) = TiedParameter::new((rank > 0).then(|| vectors.clone()), group)?;
            vectors = copy.unwrap_or(vectors);
        }
        let mut pipeline = Pipeline::new(group, Schedule::GPipe, 1)?;
        let mut ddp = Ddp::new(vec![Middle { tied: Tied { vectors, is_last: rank == 2 } }], &alone())?;
        let tokens = vec![Tensor::<2, Int>::from_ints([[0, 3, 6], [1, 1, 2]], &device())];
        pipeline.train(&mut ddp, &tokens).map(drop)
    };
    for fabric in [Fabric::InProcess, Fabric::Tcp] {
        for error in testing::run(3, fabric, |group| step(&group, false).unwrap_err()) {
            assert!(error.is_invalid_argument(), "{error}");
            let text = error.to_string();
            assert!(text.contains("`tied.vectors` of stage 1, on rank 1"), "{text}");
            assert!(text.contains("`tied.vectors` of stage 2, on rank 2"), "{text}");
            assert!(error.remedy().unwrap().contains("TiedParameter::new"), "{text}");
        }
        testing::run(3, fabric, |group| step(&group, true).unwrap());
    }
}

#[test]
fn what_is_no_pipeline_is_refused_on_every_rank() {
    let refused = |schedules: [(Schedule, usize); 2], cause: &str| {
        let errors = run(2, |group| {
            let (schedule, microbatches) = schedules[group.rank().index()];
            Pipeline::<2>::new(&group, schedule, microbatches).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
    };
    refused([(Schedule::GPipe, 2), (Schedule::GPipe, 3)], "the ranks disagree on the pipeline");
    refused(
        [(Schedule::GPipe, 2), (Schedule::OneForwardOneBackward, 2)],
        "the ranks disagree on the pipeline",
    );
    let errors = run(2, |group| match group.rank().is_main() {
        true => Pipeline::<2>::new(&group, Schedule::GPipe, 2).unwrap_err().to_string(),
        false => Pipeline::<3>::new(&group, Schedule::GPipe, 2).unwrap_err().to_string(),
    });
    assert!(errors.iter().all(|error| error.contains("tensors of 2 dimensions, rank 1")), "{errors:?}");
    refused([(Schedule::Interleaved { stages_per_rank: 2 }, 3); 2], "no multiple of the ranks");
}

/// Fails in the micro-batches that say so.
#[derive(Module, Debug)]
struct Failing {
    layer: Linear,
}

impl Stage<2> for Failing {
    type Batch = bool;

    fn forward(&self, _: Option<Tensor<2>>, fails: &bool) -> StageOutput<2> {
        let x = self.layer.forward(Tensor::ones([1, 2], &device()));
        if *fails { StageOutput::Hidden(x) } else { StageOutput::Loss(x.sum()) }
    }
}

#[test]
fn gradients_of_a_step_that_failed_are_dropped() {
    for world in [1, 2] {
        run(world, |data| {
            let layer = LinearConfig::new(2, 2).with_bias(false).init(&device());
            let mut ddp = Ddp::new(vec![Failing { layer }], &data).unwrap();
            let mut train = |batches: [bool; 2]| {
                let mut pipeline = Pipeline::new(&alone(), Schedule::OneForwardOneBackward, 2)?;
                let step = pipeline.train(&mut ddp, &batches)?;
                Ok::<_, Error>(gradients_for(ddp.model(), &step.gradients))
            };
            // The first micro-batch has run backward when the second fails.
            assert!(train([false, true]).unwrap_err().to_string().contains("gives no loss"));
            assert_eq!(train([false, false]).unwrap(), [[1.0; 4]], "world of {world}");
        });
    }
}

/// Gives what it is told to give.
#[derive(Module, Debug)]
struct Odd {
    layer: Linear,
    gives_loss: bool,
}

impl Stage<2> for Odd {
    /// The rows of the micro-batch.
    type Batch = usize;

    fn forward(&self, input: Option<Tensor<2>>, rows: &usize) -> StageOutput<2> {
        let x = input.unwrap_or_else(|| Tensor::ones([*rows, 2], &device()));
        let x = self.layer.forward(x);
        if self.gives_loss { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

#[test]
fn an_error_on_one_rank_is_every_rank_s() {
    let failed = |gives_loss: [bool; 2], rows: &[usize], stages: usize, cause: &str| {
        let all_are_here = Barrier::new(2);
        let errors: Vec<Error> = run(2, |group| {
            let rank = group.rank().index();
            let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
            let odd = || Odd { layer: LinearConfig::new(2, 2).init(&device()), gives_loss: gives_loss[rank] };
            let own = if rank == 0 { stages } else { 1 };
            let mut ddp = Ddp::new((0..own).map(|_| odd()).collect::<Vec<_>>(), &alone()).unwrap();
            // An error that a rank finds by itself ends the group, in which the other may still make its pipeline.
            all_are_here.wait();
            pipeline.train(&mut ddp, rows).unwrap_err()
        });
        assert!(errors.iter().all(|error| error.to_string().contains(cause)), "{errors:?}");
    };
    failed([false, true], &[3, 4], 1, "make all micro-batches equally large");
    // Of one rank, too: the mean over micro-batches would count the samples of the smaller one for more.
    let of_one = || Pipeline::new(&alone(), Schedule::Interleaved { stages_per_rank: 2 }, 2).unwrap();
    let stage = |gives_loss| Odd { layer: LinearConfig::new(2, 2).init(&device()), gives_loss };
    let mut ddp = Ddp::new(vec![stage(false), stage(true)], &alone()).unwrap();
    let error = of_one().train(&mut ddp, &[3, 4]).unwrap_err().to_string();
    assert!(error.contains("make all micro-batches equally large"), "{error}");
    let mut ddp = Ddp::new(vec![stage(false).no_grad(), stage(true)], &alone()).unwrap();
    let error = of_one().train(&mut ddp, &[3, 3]).unwrap_err().to_string();
    assert!(error.contains("stage 0 computes its output with nothing that is trained"), "{error}");
    failed([true, true], &[3, 3], 1, "stage 0 gives a loss");
    failed([false, false], &[3, 3], 1, "stage 1 gives no loss");
    failed([false, true], &[3, 3], 2, "has 1 of 2 stages, and its model 2");
    let all_are_here = Barrier::new(2);
    let errors = run(2, |group| {
        let mut pipeline = Pipeline::new(&group, Schedule::GPipe, 2).unwrap();
        let odd = Odd { layer: LinearConfig::new(2, 2).init(&device()), gives_loss: !group.rank().is_main() };
        let mut ddp = Ddp::new(vec![odd], &alone()).unwrap();
        let rows = vec![1; 2 + group.rank().index()];
        all_are_here.wait();
        pipeline.train(&mut ddp, &rows).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("3 micro-batches, where the pipeline was made for 2")),
        "{errors:?}"
    );
}

/// Takes its input out of the graph in the micro-batches that say so.
#[derive(Module, Debug)]
struct Detaching {
    layer: Linear,
    is_last: bool,
}

impl Stage<2> for Detaching {
    type Batch = bool;

    fn forward(&self, input: Option<Tensor<2>>, detaches: &bool) -> StageOutput<2> {
        let x = input.unwrap_or_else(|| Tensor::ones([1, 2], &device()));
        let x = self.layer.forward(if *detaches { x.detach() } else { x });
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

/// The stage before would wait for the gradient until the time-out.
#[test]
fn a_stage_that_computes_without_its_input_is_an_error_on_every_rank() {
    let cause = "stage 1 computes micro-batch 1 without its input";
    let stage = |is_last| Detaching { layer: LinearConfig::new(2, 2).init(&device()), is_last };
    for schedule in [Schedule::GPipe, Schedule::OneForwardOneBackward] {
        let errors = run(2, |group| {
            let mut pipeline = Pipeline::new(&group, schedule, 2).unwrap();
            let mut ddp = Ddp::new(vec![stage(!group.rank().is_main())], &alone()).unwrap();
            pipeline.train(&mut ddp, &[false, true]).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
    }
    let mut pipeline = Pipeline::new(&alone(), Schedule::Interleaved { stages_per_rank: 2 }, 2).unwrap();
    let mut ddp = Ddp::new(vec![stage(false), stage(true)], &alone()).unwrap();
    let error = pipeline.train(&mut ddp, &[false, true]).unwrap_err().to_string();
    assert!(error.contains(cause), "{error}");
}

/// Notes of each pass of a micro-batch whether it has a graph.
#[derive(Module, Debug)]
struct Noting {
    layer: Linear,
}

impl Stage<2> for Noting {
    type Batch = RefCell<Vec<bool>>;

    fn forward(&self, _: Option<Tensor<2>>, has_graph: &Self::Batch) -> StageOutput<2> {
        let x: Tensor<2> = self.layer.forward(Tensor::ones([1, 2], &device()));
        has_graph.borrow_mut().push(x.is_tracked());
        StageOutput::Loss(x.sum())
    }
}

/// Burn keeps a graph that was given up, with all activations, until a backward pass.
#[test]
fn a_pass_that_is_repeated_has_no_graph_the_first_time() {
    for world in [1, 2] {
        run(world, |data| {
            let mut pipeline = Pipeline::new(&alone(), Schedule::GPipe, 4).unwrap().with_recomputation(1);
            let layer = LinearConfig::new(2, 2).with_bias(false).init(&device());
            let mut ddp = Ddp::new(vec![Noting { layer }], &data).unwrap();
            let batches = vec![RefCell::new(Vec::new()); 4];
            let step = pipeline.train(&mut ddp, &batches).unwrap();
            // Backward may follow the last pass at once.
            for has_graph in &batches[..2] {
                assert_eq!(*has_graph.borrow(), [false, true], "world of {world}");
            }
            assert_eq!(gradients_for(ddp.model(), &step.gradients), [[1.0; 4]]);
        });
    }
}

/// Gives one row more each time that it computes a micro-batch.
#[derive(Module, Debug)]
struct Growing {
    layer: Linear,
    is_last: bool,
}

impl Stage<2> for Growing {
    type Batch = Cell<usize>;

    fn forward(&self, input: Option<Tensor<2>>, rows: &Cell<usize>) -> StageOutput<2> {
        let x = input.unwrap_or_else(|| Tensor::ones([rows.replace(rows.get() + 1), 2], &device()));
        let x = self.layer.forward(x);
        if self.is_last { StageOutput::Loss(x.mean()) } else { StageOutput::Hidden(x) }
    }
}

/// The gradients would be NaN, without a word.
#[test]
fn a_stage_whose_repeated_pass_gives_another_shape_is_an_error_on_every_rank() {
    let cause = "stage 0 gave an output of shape [3, 2] for micro-batch 0, and when it was repeated";
    let errors = run(2, |group| {
        let mut pipeline =
            Pipeline::new(&group, Schedule::OneForwardOneBackward, 2).unwrap().with_recomputation(1);
        let layer = LinearConfig::new(2, 2).init(&device());
        let mut ddp = Ddp::new(vec![Growing { layer, is_last: !group.rank().is_main() }], &alone()).unwrap();
        pipeline.train(&mut ddp, &[Cell::new(3), Cell::new(3)]).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains(cause)), "{errors:?}");
}
