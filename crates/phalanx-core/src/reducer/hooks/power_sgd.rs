//! Gradients as products of two thin matrices.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rand_mt::Mt;

use super::linear::{dot, orthogonalize, outer, times, transposed_times};
use super::spares::Spares;
use super::{AllReduce, BuiltInHook, CommHook, GradBucket, GradientPlace, HookState, Pending};
use crate::buffer::{Buffer, copy_of};
use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group::Communicator;
use crate::rank::Rank;

/// Settings of [`PowerSgd`]. Names and defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerSgdOptions {
    rank: usize,
    start_iter: u64,
    min_compression_rate: f32,
    error_feedback: bool,
    warm_start: bool,
    orthogonalization_epsilon: f32,
    seed: u32,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self {
            rank: 1,
            start_iter: 1000,
            min_compression_rate: 2.0,
            error_feedback: true,
            warm_start: true,
            orthogonalization_epsilon: 0.0,
            seed: 0,
        }
    }
}

impl PowerSgdOptions {
    /// The columns of the thin matrices: 1 by default. More send more and lose less.
    pub fn rank(mut self, rank: usize) -> Self {
        self.rank = rank;
        self
    }

    /// The steps that are averaged uncompressed before: 1000 by default, because early gradients change fast.
    pub fn start_iter(mut self, steps: u64) -> Self {
        self.start_iter = steps;
        self
    }

    /// A matrix is compressed if that makes it smaller by more than this factor: 2 by default.
    pub fn min_compression_rate(mut self, rate: f32) -> Self {
        self.min_compression_rate = rate;
        self
    }

    /// Whether the error of the compression is added to the next step's gradient. True by default.
    pub fn error_feedback(mut self, feedback: bool) -> Self {
        self.error_feedback = feedback;
        self
    }

    /// Whether a step begins with the factors of the last one, in place of random ones. True by default.
    pub fn warm_start(mut self, warm: bool) -> Self {
        self.warm_start = warm;
        self
    }

    /// Added to the norms that orthogonalisation divides by: 0 by default.
    pub fn orthogonalization_epsilon(mut self, epsilon: f32) -> Self {
        self.orthogonalization_epsilon = epsilon;
        self
    }

    /// Where the random factors come from; the same on every rank.
    pub fn seed(mut self, seed: u32) -> Self {
        self.seed = seed;
        self
    }

    /// Whether gradients of a step are compressed, after so many others. For what does it [where gradients lie](CommHook::built_in), as all that
    /// follows.
    pub fn compresses_at(&self, steps: u64) -> bool {
        steps >= self.start_iter
    }

    /// Whether [`error_feedback`](Self::error_feedback) is on.
    pub fn has_error_feedback(&self) -> bool {
        self.error_feedback
    }

    /// Whether [`warm_start`](Self::warm_start) is on.
    pub fn has_warm_start(&self) -> bool {
        self.warm_start
    }

    /// What [`orthogonalization_epsilon`](Self::orthogonalization_epsilon) has set.
    pub fn epsilon(&self) -> f32 {
        self.orthogonalization_epsilon
    }

    /// How a gradient of this shape is compressed; None if it is sent as it is.
    pub fn matrix(&self, shape: &[usize]) -> Option<LowRankMatrix> {
        let elements: usize = shape.iter().product();
        let rows = shape.first().copied().unwrap_or(1);
        let columns = elements.checked_div(rows).unwrap_or(0);
        let rank = self.rank.min(rows).min(columns);
        let compressed = (rows + columns) as f32 * rank as f32;
        let pays = compressed * self.min_compression_rate < elements as f32;
        (shape.len() >= 2 && pays).then_some(LowRankMatrix { rows, columns, rank })
    }

    /// The columns of `Q`, one behind the other, with which the parameter at `index` begins in the first step after so many others that is compressed.
    /// The same on every rank.
    pub fn first_factor(&self, index: usize, matrix: LowRankMatrix, steps: u64) -> Vec<f32> {
        random(matrix.columns * matrix.rank, self.seed, steps.max(self.start_iter), index)
    }

    /// The orthonormal columns of `Q` with which the parameter at `index` begins the step after so many others, from those that the last one left, if it
    /// did. A column in which there was nothing is a random one. The same on every rank.
    pub fn next_factor(
        &self,
        index: usize,
        matrix: LowRankMatrix,
        last: Option<Vec<f32>>,
        steps: u64,
    ) -> Vec<f32> {
        let LowRankMatrix { columns, rank, .. } = matrix;
        let random = || self.first_factor(index, matrix, steps);
        let mut q = last.filter(|q| q.len() == columns * rank).unwrap_or_else(random);
        self.orthogonalize(&mut q, columns);
        let nothing = |column: &[f32]| dot(column, column) == 0.0;
        if q.chunks_exact(columns).any(nothing) {
            // The power method never leaves zero: nothing would be sent in this direction any more.
            for (column, fresh) in q.chunks_exact_mut(columns).zip(random().chunks_exact(columns)) {
                if nothing(column) {
                    column.copy_from_slice(fresh);
                }
            }
            self.orthogonalize(&mut q, columns);
        }
        q
    }

    /// Makes columns, one behind the other, each of this `length`, orthonormal. One that depends on those before it becomes zero.
    pub fn orthogonalize(&self, columns: &mut [f32], length: usize) {
        orthogonalize(columns, length, self.orthogonalization_epsilon);
    }
}

/// A gradient as the matrix `M`, which a product of two matrices of `rank` columns approximates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct LowRankMatrix {
    /// The rows of `M` and of `P`.
    pub rows: usize,
    /// The columns of `M`, and the rows of `Q`.
    pub columns: usize,
    /// The columns of `P` and of `Q`.
    pub rank: usize,
}

impl LowRankMatrix {
    /// An error if the factor or the losses that a state has of the parameter at `index` are those of another gradient.
    ///
    /// # Errors
    /// If they have another number of elements.
    pub fn check_saved(&self, index: usize, factor: Option<&[f32]>, losses: Option<&[f32]>) -> Result<()> {
        let (of_factor, all) = (self.columns * self.rank, self.rows * self.columns);
        let cause = match (factor.map(<[f32]>::len), losses.map(<[f32]>::len)) {
            (Some(saved), _) if saved != of_factor => format!(
                "PowerSGD was given a factor of {saved} elements for parameter number {index}, whose factor has {of_factor}"
            ),
            (_, Some(saved)) if saved != all => format!(
                "PowerSGD was given what {saved} elements of parameter number {index} have lost, and its gradient has {all} elements"
            ),
            _ => return Ok(()),
        };
        Err(Error::mismatch(cause).with_remedy("load the hook's state with the model that it was saved with"))
    }
}

/// PowerSGD (Vogels et al., *PowerSGD: Practical Low-Rank Gradient Compression*, 2019).
///
/// A gradient of at least two dimensions is seen as a matrix `M` of `shape[0]` rows. One step of the power method
/// approximates the average over the ranks by `P·Qᵀ`: the ranks average `P = M·Q`, make its columns orthonormal, and
/// average `Q = Mᵀ·P`. The error on this rank, `M − P·Qᵀ`, is added to its next gradient. Vectors, small
/// matrices and other types than f32 are sent uncompressed. A direction of `Q` in which there was nothing is replaced by a
/// random one, so that a gradient that was zero for a step is not lost for ever.
///
/// After a step whose average is not finite, the losses and factors of that gradient begin anew, on every rank: a program
/// that leaves out such a step continues as if it had not been.
///
/// A checkpoint of a training has the step, the factors and every rank's losses, and a run that continues from it with as many ranks has
/// the same bits as one that was never interrupted. With another number of ranks the losses begin anew, as PyTorch's do.
///
/// Inside a [`join`](crate::join) in which some ranks are done, the error is `M − s·P·Qᵀ`, where `s` is world size / ranks with data: together it is what
/// the sum of all gradients has lost. What a rank has not yet made up for when it is done is left out.
///
/// It takes memory for the losses (as much as the gradients), for the factors, and for what it sends.
#[doc(alias("PowerSGD", "powerSGD_hook"))]
pub struct PowerSgd {
    options: PowerSgdOptions,
    step: u64,
    memory: Arc<Mutex<PowerSgdState>>,
    messages: Spares,
}

/// The state that is kept from step to step, by parameter, because buckets may be rebuilt.
#[derive(Default)]
struct PowerSgdState {
    factors: BTreeMap<usize, Vec<f32>>,
    losses: BTreeMap<usize, Vec<f32>>,
    /// Buckets that have begun and not come to their end, whose factors may not be here.
    under_way: usize,
}

impl PowerSgd {
    /// A hook with these settings.
    ///
    /// # Errors
    /// If the rank is 0.
    pub fn new(options: PowerSgdOptions) -> Result<Self> {
        if options.rank == 0 {
            return Err(Error::invalid_argument("the rank of PowerSGD's matrices is 0")
                .with_remedy("set PowerSgdOptions::rank to 1 or more"));
        }
        Ok(Self { options, step: 0, memory: Arc::default(), messages: Spares::default() })
    }
}

impl CommHook for PowerSgd {
    fn describe(&self) -> String {
        let PowerSgdOptions {
            rank,
            start_iter,
            min_compression_rate: rate,
            error_feedback,
            warm_start,
            orthogonalization_epsilon: epsilon,
            seed,
        } = self.options;
        // Checkpoints have it: an option that is added later is only named where it is not what it was before there was one.
        format!(
            "PowerSGD (rank: {rank}, start_iter: {start_iter}, min_compression_rate: {rate}, error_feedback: {error_feedback}, \
             warm_start: {warm_start}, orthogonalization_epsilon: {epsilon}, seed: {seed})"
        )
    }

    fn start(&mut self, group: &dyn Communicator, bucket: GradBucket) -> Result<Pending> {
        let step = self.step;
        // A saved number may be any.
        self.step = step.saturating_add(u64::from(bucket.is_last));
        if step < self.options.start_iter || bucket.buffer.dtype() != DType::F32 {
            return AllReduce.start(group, bucket);
        }
        let layout = MessageLayout::new(&bucket.gradients, &self.options);
        if layout.matrices.is_empty() {
            return AllReduce.start(group, bucket);
        }
        let GradBucket { index, mut buffer, .. } = bucket;
        let (options, memory, messages) = (self.options, self.memory.clone(), self.messages.share());
        memory.lock().under_way += 1;
        let mut first = messages.take(group, (index, 0), DType::F32, layout.left + layout.whole)?;
        {
            let mut memory = memory.lock();
            let gradients = buffer.as_mut_slice::<f32>()?;
            let (left, whole) = first.as_mut_slice::<f32>()?.split_at_mut(layout.left);
            for matrix in &layout.matrices {
                let m = &mut gradients[matrix.elements.clone()];
                let (factor, losses) =
                    (memory.factors.get(&matrix.parameter), memory.losses.get(&matrix.parameter));
                matrix.shape.check_saved(
                    matrix.parameter,
                    factor.map(Vec::as_slice),
                    losses.map(Vec::as_slice),
                )?;
                if let Some(loss) = losses {
                    m.iter_mut().zip(loss).for_each(|(m, loss)| *m += loss);
                }
                let known = memory.factors.remove(&matrix.parameter);
                let known = known.filter(|_| options.warm_start);
                let q = options.next_factor(matrix.parameter, matrix.shape, known, step);
                times(m, matrix.shape.columns, &q, &mut left[matrix.left()]);
            }
            layout.gather(gradients, whole);
        }
        let work = group.all_reduce_async(first, ReduceOp::Avg)?;
        Ok(Pending::then(work, move |mut first, group| {
            let (left, whole) = first.as_mut_slice::<f32>()?.split_at_mut(layout.left);
            let mut second = messages.take(group, (index, 1), DType::F32, layout.right)?;
            let right = second.as_mut_slice::<f32>()?;
            let gradients = buffer.as_mut_slice::<f32>()?;
            layout.scatter(whole, gradients);
            for matrix in &layout.matrices {
                let p = &mut left[matrix.left()];
                options.orthogonalize(p, matrix.shape.rows);
                let m = &gradients[matrix.elements.clone()];
                transposed_times(m, matrix.shape.columns, p, &mut right[matrix.right()]);
            }
            let work = group.all_reduce_async(second, ReduceOp::Avg)?;
            Ok(Pending::then(work, move |second, group| {
                let scale = group.active_scale() as f32;
                layout.finish((&first, &second), &mut buffer, scale, &options, &mut memory.lock())?;
                messages.keep((index, 0), first);
                messages.keep((index, 1), second);
                Ok(Pending::ready(buffer))
            }))
        }))
    }

    fn built_in(&self) -> Option<BuiltInHook> {
        Some(BuiltInHook::PowerSgd(self.options))
    }

    /// Factors and losses begin anew, and the step is the root's.
    fn adopt(&mut self, group: &dyn Communicator, root: Rank) -> Result<()> {
        self.step = super::super::verify::share(group, root, &self.step)?;
        *self.memory.lock() = PowerSgdState::default();
        self.messages.clear(); // The buckets may become others.
        Ok(())
    }

    fn state(&self) -> Result<HookState> {
        let state = self.common_state()?;
        let memory = self.memory.lock();
        let mut losses = memory.losses.iter();
        losses.try_fold(state, |state, (index, loss)| Ok(state.own("losses", *index, copy_of(loss)?)))
    }

    /// An error after a step that was cut off.
    fn common_state(&self) -> Result<HookState> {
        let state = HookState::default().number("step", self.step);
        let memory = self.memory.lock();
        if memory.under_way != 0 {
            return Err(Error::aborted("a step was cut off, and what PowerSGD keeps is that of no step")
                .with_remedy("go on from the last checkpoint"));
        }
        let mut factors = memory.factors.iter();
        factors
            .try_fold(state, |state, (index, factor)| Ok(state.common("factors", *index, copy_of(factor)?)))
    }

    /// The number of steps, from the beginning on.
    fn keeps_state(&self) -> Result<bool> {
        Ok(true)
    }

    fn load(&mut self, mut state: HookState) -> Result<()> {
        self.step = state.get("step")?;
        let (factors, losses) = (state.take("factors"), state.take("losses"));
        *self.memory.lock() = PowerSgdState { factors, losses, under_way: 0 };
        self.messages.clear();
        Ok(())
    }
}

/// Which gradients of a bucket are compressed, and where their factors lie in the messages.
struct MessageLayout {
    matrices: Vec<Matrix>,
    /// The ranges that are sent uncompressed.
    others: Vec<std::ops::Range<usize>>,
    /// Elements of all `P`, of all `Q`, and of what is sent uncompressed.
    left: usize,
    right: usize,
    whole: usize,
}

struct Matrix {
    parameter: usize,
    elements: std::ops::Range<usize>,
    shape: LowRankMatrix,
    /// Where its `P` and its `Q` begin in the messages.
    left: usize,
    right: usize,
}

impl Matrix {
    fn left(&self) -> std::ops::Range<usize> {
        self.left..self.left + self.shape.rows * self.shape.rank
    }

    fn right(&self) -> std::ops::Range<usize> {
        self.right..self.right + self.shape.columns * self.shape.rank
    }
}

impl MessageLayout {
    fn new(gradients: &[GradientPlace], options: &PowerSgdOptions) -> Self {
        let mut layout = Self { matrices: Vec::new(), others: Vec::new(), left: 0, right: 0, whole: 0 };
        for GradientPlace { parameter, shape, elements } in gradients {
            let Some(shape) = options.matrix(shape) else {
                layout.others.push(elements.clone());
                layout.whole += elements.len();
                continue;
            };
            let (left, right) = (layout.left, layout.right);
            layout.left += shape.rows * shape.rank;
            layout.right += shape.columns * shape.rank;
            let (parameter, elements) = (*parameter, elements.clone());
            layout.matrices.push(Matrix { parameter, elements, shape, left, right });
        }
        layout
    }

    /// Packs what is sent uncompressed.
    fn gather(&self, gradients: &[f32], mut whole: &mut [f32]) {
        for elements in &self.others {
            let (piece, rest) = whole.split_at_mut(elements.len());
            piece.copy_from_slice(&gradients[elements.clone()]);
            whole = rest;
        }
    }

    fn scatter(&self, mut whole: &[f32], gradients: &mut [f32]) {
        for elements in &self.others {
            let (piece, rest) = whole.split_at(elements.len());
            gradients[elements.clone()].copy_from_slice(piece);
            whole = rest;
        }
    }

    /// Puts the products of the averaged factors in the place of the gradients, and keeps what was lost: the difference from the average over the ranks
    /// with data, which is `scale` times as large.
    fn finish(
        &self,
        (first, second): (&Buffer, &Buffer),
        buffer: &mut Buffer,
        scale: f32,
        options: &PowerSgdOptions,
        memory: &mut PowerSgdState,
    ) -> Result<()> {
        let (first, second) = (first.as_slice::<f32>()?, second.as_slice::<f32>()?);
        let gradients = buffer.as_mut_slice::<f32>()?;
        for matrix in &self.matrices {
            let m = &mut gradients[matrix.elements.clone()];
            let (p, q) = (&first[matrix.left()], &second[matrix.right()]);
            if !p.iter().chain(q).all(|x| x.is_finite()) {
                // Every rank sees this. A NaN would stay in every later step.
                outer(p, q, matrix.shape.columns, m);
                memory.losses.remove(&matrix.parameter);
                continue;
            }
            if options.error_feedback {
                let loss = memory.losses.entry(matrix.parameter).or_default();
                loss.clear();
                loss.try_reserve_exact(m.len()).map_err(|error| {
                    let lost = format!("no memory for what {} elements lose by PowerSGD", m.len());
                    Error::out_of_memory(lost).with_source(error).with_remedy(
                        "make less of it, or start fewer ranks on this host; without PowerSgdOptions::error_feedback nothing is kept",
                    )
                })?;
                loss.extend_from_slice(m);
                outer(p, q, matrix.shape.columns, m);
                loss.iter_mut().zip(&*m).for_each(|(loss, m)| *loss -= scale * m);
            } else {
                outer(p, q, matrix.shape.columns, m);
            }
            if options.warm_start {
                memory.factors.insert(matrix.parameter, q.to_vec());
            }
        }
        memory.under_way = memory.under_way.saturating_sub(1);
        Ok(())
    }
}

/// Numbers from the normal distribution, the same on every rank.
fn random(count: usize, seed: u32, step: u64, parameter: usize) -> Vec<f32> {
    let step = (step as u32).wrapping_mul(0x9e37_79b9);
    let parameter = (parameter as u32).wrapping_mul(0x85eb_ca6b);
    let mut source = Mt::new(seed ^ step ^ parameter.rotate_left(16));
    let mut uniform = || (f64::from(source.next_u32()) + 0.5) / 4_294_967_296.0;
    // Box and Muller's pairs, of which one is used.
    (0..count)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect()
}
