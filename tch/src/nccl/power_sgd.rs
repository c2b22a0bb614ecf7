//! PowerSGD on the device, as operations of libtorch.
//!
//! The algorithm, its settings and what it keeps are those of [`PowerSgd`](phalanx::reducer::hooks::PowerSgd), which works in the host's memory: a
//! checkpoint of the one goes on with the other. Of each bucket
//!
//! 1. when it is full, on the stream of backward: gradients are added to the losses of earlier steps, which gives `M`, and `P = M·Q`. `P`, and the
//!    gradients that are no matrices, are the first message;
//! 2. after backward, behind the average of that, on the program's stream: the columns of `P` become orthonormal, and `Q = Mᵀ·P` is the second message;
//! 3. behind its average: the gradient is `P·Qᵀ`, and `M − P·Qᵀ` is the loss.
//!
//! **Nothing here waits for the device or reads from it.** What depends on elements, such as a column of zeros or an average that is not finite, is
//! chosen by masks. Random columns are copied to the device when the hook is registered: where the host's PowerSGD draws others after zeros, or after an
//! average that is not finite, these are taken again.
//!
//! A program may run backward within `tch::autocast`, where libtorch would multiply the matrices in f16, whose range some of them leave.
//!
//! Matrices of one shape are computed together, since a device wants few large operations: they have one tensor for their losses, and one for their
//! factors. `P` and `Q` lie as in the host's messages, column by column: as `rank` rows.
//!
//! Replicas stay equal to the last bit because all ranks make the same of the same averages: `P` is made orthonormal on each of them. So their
//! devices must be of one model, for sums are in another order on another; [`Ddp::register_comm_hook`](crate::Ddp::register_comm_hook) compares them.

use std::collections::BTreeMap;

use phalanx::reducer::hooks::{GradientPlace, HookState, LowRankMatrix, PowerSgdOptions};
use phalanx::{DType, Error, Result};
use tch::{Device, Kind, TchError, Tensor};

use crate::shim;
use crate::tensors::{Named, torch};

type Torch<T> = std::result::Result<T, TchError>;

/// A column that has lost so much of its length depends on those before it, and what is left is rounding. As on the host.
const DEPENDENT: f64 = 1e-6;

/// What is kept from step to step, by parameter, because buckets may be made anew.
pub(super) struct LowRank {
    options: PowerSgdOptions,
    kept: BTreeMap<usize, Kept>,
    /// Buckets between their first message and the end: their losses are not those of a step.
    under_way: usize,
}

/// Of a gradient that is compressed. The tensors are parts of those of a [`Group`], once there is one.
struct Kept {
    matrix: LowRankMatrix,
    /// What takes the place of a column of zeros.
    random: Tensor,
    /// `Q` of the last step.
    factor: Tensor,
    losses: Option<Tensor>,
    /// Whether it has been compressed, here or in the checkpoint that was loaded.
    is_begun: bool,
}

/// The matrices of one bucket, and its messages.
pub(super) struct LowRankBucket {
    groups: Vec<Group>,
    /// What is sent as it is: its places in the first message, and in the bucket.
    others: (Vec<Tensor>, Vec<Tensor>),
    first: Tensor,
    second: Tensor,
}

/// The matrices of one shape: so many times `rows` by `columns`.
struct Group {
    /// By number: the index of its parameter, and its place in the bucket.
    places: Vec<(usize, Tensor)>,
    /// The losses; `M` from the first message to the end of the step.
    losses: Tensor,
    random: Tensor,
    factors: Tensor,
    /// Their places in the messages, each with `rank` rows.
    p: Tensor,
    q: Tensor,
}

impl LowRank {
    /// For these parameters, with losses and factors that begin anew after so many `steps`.
    pub fn new(options: PowerSgdOptions, parameters: &[Named], steps: u64) -> Result<Self> {
        let mut kept = BTreeMap::new();
        for (index, Named { spec, tensor }) in parameters.iter().enumerate() {
            let Some(matrix) = options.matrix(&spec.shape).filter(|_| spec.dtype == DType::F32) else {
                continue;
            };
            let begin =
                |steps| upload(&options.first_factor(index, matrix, steps), matrix.rank, tensor.device());
            // The same after a checkpoint as without one.
            let (random, factor) = (begin(0)?, begin(steps)?);
            kept.insert(index, Kept { matrix, random, factor, losses: None, is_begun: false });
        }
        Ok(Self { options, kept, under_way: 0 })
    }

    /// For a bucket of these gradients, whose memory that is; none if it has no matrix.
    pub fn bucket(&mut self, gradients: &[GradientPlace], memory: &Tensor) -> Result<Option<LowRankBucket>> {
        let _guard = tch::no_grad_guard();
        let (mut shapes, mut others) = (BTreeMap::<_, Vec<_>>::new(), Vec::new());
        for GradientPlace { parameter, elements, .. } in gradients {
            let part = memory.f_narrow(0, elements.start as i64, elements.len() as i64).map_err(torch)?;
            match self.kept.get(parameter) {
                Some(kept) => shapes.entry(kept.matrix).or_default().push((*parameter, part)),
                None => others.push(part),
            }
        }
        if shapes.is_empty() {
            return Ok(None);
        }
        self.lay_out(shapes, others, memory).map(Some).map_err(torch)
    }

    fn lay_out(
        &mut self,
        shapes: BTreeMap<LowRankMatrix, Vec<(usize, Tensor)>>,
        others: Vec<Tensor>,
        memory: &Tensor,
    ) -> Torch<LowRankBucket> {
        let of = |side: fn(&LowRankMatrix) -> usize| {
            shapes.iter().map(|(matrix, places)| matrix.rank * side(matrix) * places.len()).sum::<usize>()
        };
        let (left, right) = (of(|matrix| matrix.rows), of(|matrix| matrix.columns));
        let whole: usize = others.iter().map(Tensor::numel).sum();
        let options = (Kind::Float, memory.device());
        let first = Tensor::f_empty((left + whole) as i64, options)?;
        let second = Tensor::f_empty(right as i64, options)?;
        let (mut groups, mut p_end, mut q_end) = (Vec::new(), 0, 0);
        for (matrix, places) in shapes {
            let [count, rows, columns, rank] =
                [places.len(), matrix.rows, matrix.columns, matrix.rank].map(|side| side as i64);
            let p = part(&first, &mut p_end, &[count, rank, rows])?;
            let q = part(&second, &mut q_end, &[count, rank, columns])?;
            let losses = Tensor::f_zeros([count, rows, columns], options)?;
            let (random, factors) = (q.f_empty_like()?, q.f_empty_like()?);
            let views = places.into_iter().map(|(index, place)| Ok((index, place.f_view([rows, columns])?)));
            let group = Group { places: views.collect::<Torch<_>>()?, losses, random, factors, p, q };
            for (number, (index, _)) in group.places.iter().enumerate() {
                if let Some(kept) = self.kept.get_mut(index) {
                    kept.move_to(&group, number as i64)?;
                }
            }
            groups.push(group);
        }
        let in_message = others.iter().map(|other| part(&first, &mut p_end, &[other.numel() as i64]));
        let others = (in_message.collect::<Torch<_>>()?, others);
        Ok(LowRankBucket { groups, others, first, second })
    }

    /// The first message of `bucket`.
    pub fn first(&mut self, bucket: &LowRankBucket) -> Result<Tensor> {
        self.under_way += 1;
        let _guard = tch::no_grad_guard();
        bucket.used_here()?;
        let options = &self.options;
        tch::autocast(false, || bucket.groups.iter().try_for_each(|group| group.first(options)))
            .map_err(torch)?;
        shim::copy_all(&bucket.others.0, &bucket.others.1)?;
        Ok(bucket.first.shallow_clone())
    }

    /// The second message, when the first is averaged.
    pub fn second(&self, bucket: &LowRankBucket) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        bucket.used_here()?;
        let epsilon = f64::from(self.options.epsilon());
        tch::autocast(false, || bucket.groups.iter().try_for_each(|group| group.second(epsilon)))
            .map_err(torch)?;
        Ok(bucket.second.shallow_clone())
    }

    /// The bucket has its averages, when the second message is averaged. Those over ranks with data are `scale` times as large.
    pub fn finish(&mut self, bucket: &LowRankBucket, scale: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        bucket.used_here()?;
        let options = &self.options;
        bucket.groups.iter().try_for_each(|group| group.finish(options, scale)).map_err(torch)?;
        shim::copy_all(&bucket.others.1, &bucket.others.0)?;
        for (index, _) in bucket.groups.iter().flat_map(|group| &group.places) {
            if let Some(kept) = self.kept.get_mut(index) {
                kept.is_begun = true;
            }
        }
        self.under_way = self.under_way.saturating_sub(1);
        Ok(())
    }

    /// What a checkpoint has of it; or, without the losses, which are as large as the gradients, what all ranks have in common.
    ///
    /// # Errors
    /// If a step was cut off.
    pub fn state(&self, step: u64, with_losses: bool) -> Result<HookState> {
        if self.under_way != 0 {
            return Err(Error::aborted(
                "a step was cut off, and what PowerSGD keeps on the device is that of no step",
            )
            .with_remedy("go on from the last checkpoint"));
        }
        let begun = || self.kept.iter().filter(|(_, kept)| kept.is_begun);
        let mut state = HookState::default().number("step", step);
        for (index, kept) in begun() {
            state = state.common("factors", *index, download(&kept.factor)?);
        }
        let has_losses = with_losses && self.options.has_error_feedback();
        for (index, kept) in begun().filter(|_| has_losses) {
            if let Some(losses) = &kept.losses {
                state = state.own("losses", *index, download(losses)?);
            }
        }
        Ok(state)
    }

    /// Factors and losses are those of `state`, after so many `steps`; buckets are to be made anew.
    ///
    /// # Errors
    /// If they are those of other gradients. Then nothing changes.
    pub fn load(&mut self, state: &mut HookState, steps: u64) -> Result<()> {
        let (mut factors, mut losses) = (state.take("factors"), state.take("losses"));
        for (index, kept) in &self.kept {
            let [factor, losses] = [&factors, &losses].map(|saved| saved.get(index).map(Vec::as_slice));
            kept.matrix.check_saved(*index, factor, losses)?;
        }
        for (index, kept) in &mut self.kept {
            let LowRankMatrix { rows, rank, .. } = kept.matrix;
            let device = kept.random.device();
            let factor = factors.remove(index);
            kept.is_begun = factor.is_some();
            let factor = factor.unwrap_or_else(|| self.options.first_factor(*index, kept.matrix, steps));
            kept.factor = upload(&factor, rank, device)?;
            let losses = losses.remove(index);
            kept.losses = losses.map(|losses| upload(&losses, rows, device)).transpose()?;
            kept.is_begun |= kept.losses.is_some();
        }
        self.under_way = 0;
        Ok(())
    }
}

impl Kept {
    /// It is that of a matrix of `group` from now on.
    fn move_to(&mut self, group: &Group, number: i64) -> Torch<()> {
        let place = |all: &Tensor| all.f_select(0, number);
        let copy = |to: &Tensor, from: &Tensor| {
            // Its memory may be that of another stream, which must not use it again before it is copied here.
            shim::used_here(from).map_err(|error| TchError::Torch(error.to_string()))?;
            to.shallow_clone().f_copy_(&from.f_view_as(to)?)
        };
        let (random, factor, losses) = (place(&group.random)?, place(&group.factors)?, place(&group.losses)?);
        copy(&random, &self.random)?;
        copy(&factor, &self.factor)?;
        if let Some(before) = &self.losses {
            copy(&losses, before)?;
        }
        (self.random, self.factor, self.losses) = (random, factor, Some(losses));
        Ok(())
    }
}

impl LowRankBucket {
    /// The current stream uses its memory, which was perhaps made on another.
    fn used_here(&self) -> Result<()> {
        let of_group = |group: &Group| {
            [&group.losses, &group.random, &group.factors].into_iter().try_for_each(shim::used_here)
        };
        self.groups.iter().try_for_each(of_group)?;
        [&self.first, &self.second].into_iter().try_for_each(shim::used_here)
    }
}

impl Group {
    fn first(&self, options: &PowerSgdOptions) -> Torch<()> {
        if !options.has_error_feedback() {
            drop(self.losses.shallow_clone().f_zero_()?);
        }
        for (number, (_, gradient)) in self.places.iter().enumerate() {
            drop(self.losses.f_select(0, number as i64)?.f_add_(gradient)?);
        }
        let q = orthonormal(&self.factors, Some(&self.random), f64::from(options.epsilon()))?;
        self.p.shallow_clone().f_copy_(&q.f_bmm(&self.losses.f_transpose(1, 2)?)?)
    }

    fn second(&self, epsilon: f64) -> Torch<()> {
        let p = orthonormal(&self.p, None, epsilon)?;
        self.p.shallow_clone().f_copy_(&p)?;
        self.q.shallow_clone().f_copy_(&p.f_bmm(&self.losses)?)
    }

    fn finish(&self, options: &PowerSgdOptions, scale: f64) -> Torch<()> {
        for (number, (_, place)) in self.places.iter().enumerate() {
            let (p, q) = (self.p.f_select(0, number as i64)?, self.q.f_select(0, number as i64)?);
            let mut place = place.shallow_clone();
            drop(place.f_zero_()?);
            // Element by element: each rank has the same bits.
            for column in 0..p.size()[0] {
                let (p, q) = (p.f_select(0, column)?.f_unsqueeze(1)?, q.f_narrow(0, column, 1)?);
                drop(place.f_addcmul_(&p, &q)?);
            }
            let sent = if scale == 1.0 { place } else { place.f_mul_scalar(scale)? };
            drop(self.losses.f_select(0, number as i64)?.f_sub_(&sent)?);
        }
        // Every rank sees this. A NaN would stay in every later step.
        let is_finite = |all: &Tensor| all.f_isfinite()?.f_all_dims([1i64, 2].as_slice(), true);
        let is_finite = is_finite(&self.p)?.f_logical_and(&is_finite(&self.q)?)?;
        if options.has_error_feedback() {
            drop(self.losses.shallow_clone().f_masked_fill_(&is_finite.f_logical_not()?, 0.0)?);
        }
        let factors = self.q.f_where_self(&is_finite, &self.random)?;
        self.factors.shallow_clone().f_copy_(&factors)
    }
}

/// The rows of each matrix of `all`, orthonormal (Gram-Schmidt, modified); one that depends on those before it is zero, or what `random` has in its
/// place. As `orthogonalize` and `Matrix::begin` of the host.
fn orthonormal(all: &Tensor, random: Option<&Tensor>, epsilon: f64) -> Torch<Tensor> {
    let mut done: Vec<Tensor> = Vec::new();
    for row in 0..all.size()[1] {
        let mut current = direction(all.f_narrow(1, row, 1)?, &done, epsilon)?;
        if let Some(random) = random {
            // The power method never leaves zero: nothing would be sent in this direction any more.
            let nothing = dot(&current, &current)?.f_eq(0.0)?;
            let other = direction(random.f_narrow(1, row, 1)?, &done, epsilon)?;
            current = other.f_where_self(&nothing, &current)?;
        }
        done.push(current);
    }
    Tensor::f_cat(&done, 1)
}

/// What `current` has beside the rows that are `done`, of length 1; or zero.
fn direction(mut current: Tensor, done: &[Tensor], epsilon: f64) -> Torch<Tensor> {
    let before = dot(&current, &current)?.f_sqrt()?;
    for other in done {
        let share = dot(&current, other)?;
        current = current.f_sub(&share.f_mul(other)?)?;
    }
    let norm = dot(&current, &current)?.f_sqrt()?;
    // The rest of a dependent row is rounding; as a direction it would be noise.
    let counts = norm.f_gt_tensor(&before.f_mul_scalar(DEPENDENT)?)?;
    let factor = norm.f_add_scalar(epsilon)?.f_reciprocal()?;
    let factor = factor.f_where_self(&counts, &factor.f_zeros_like()?)?;
    current.f_mul(&factor)
}

fn dot(a: &Tensor, b: &Tensor) -> Torch<Tensor> {
    a.f_mul(b)?.f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Float)
}

/// The next elements of `message` behind `end`, in this shape.
fn part(message: &Tensor, end: &mut i64, shape: &[i64]) -> Torch<Tensor> {
    let (start, count) = (*end, shape.iter().product::<i64>());
    *end += count;
    message.f_narrow(0, start, count)?.f_view(shape)
}

/// Copies `elements`, as so many `rows`, to a device. It waits for that.
fn upload(elements: &[f32], rows: usize, device: Device) -> Result<Tensor> {
    let upload = || Tensor::f_from_slice(elements)?.f_view([rows as i64, -1])?.f_to_device(device);
    tch::no_grad(upload).map_err(torch)
}

/// The elements of a tensor of a device.
fn download(tensor: &Tensor) -> Result<Vec<f32>> {
    let download = || tensor.f_to_device(Device::Cpu)?.f_reshape([-1i64].as_slice());
    let here = tch::no_grad(download).map_err(torch)?;
    Vec::try_from(&here).map_err(torch)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use phalanx::reducer::ParameterSpec;

    use super::*;

    #[test]
    fn what_was_saved_of_a_gradient_of_another_shape_is_refused_and_changes_nothing() {
        let options = PowerSgdOptions::default().min_compression_rate(0.1);
        let parameter = |name: &str, shape: [usize; 2]| Named {
            spec: ParameterSpec::new(name, shape, DType::F32),
            tensor: Tensor::zeros(shape.map(|side| side as i64), (Kind::Float, Device::Cpu)),
        };
        let parameters = [parameter("first", [4, 5]), parameter("second", [2, 3])];
        let mut low_rank = LowRank::new(options, &parameters, 0).unwrap();
        let saved = |losses: usize, factor: usize| {
            let first = HookState::default().number("step", 7).common("factors", 0, vec![1.0; 5]);
            first.common("factors", 1, vec![0.5; factor]).own("losses", 1, vec![0.5; losses])
        };
        low_rank.load(&mut saved(6, 3), 7).unwrap();
        let before = low_rank.state(7, true).unwrap();
        assert_eq!(before, saved(6, 3));
        let other =
            [(saved(7, 3), "what 7 elements of parameter number 1"), (saved(6, 4), "a factor of 4 elements")];
        for (mut state, words) in other {
            let error = low_rank.load(&mut state, 7).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
            assert_eq!(low_rank.state(7, true).unwrap(), before);
        }
    }
}
