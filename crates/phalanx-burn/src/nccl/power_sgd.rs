//! PowerSGD where NCCL averages: products on the device, as operations of Burn's on CubeCL's own backend.
//!
//! The algorithm, its settings and what it keeps are those of [`PowerSgd`](phalanx::reducer::hooks::PowerSgd), which works in the host's memory: a
//! checkpoint of the one goes on with the other. Of each bucket
//!
//! 1. when it is full: gradients are added to the losses of earlier steps, which gives `M`, and `P = M·Q`. `P`, and the gradients that are no
//!    matrices, are the first message;
//! 2. after backward: the columns of the averaged `P` become orthonormal, and `Q = Mᵀ·P` is the second message;
//! 3. when that is averaged: the gradient is `P·Qᵀ`, and `M − P·Qᵀ` is the loss.
//!
//! **Factors are made orthonormal in the host's memory**, by the host's own code. They are small, and the program's thread waits for the messages in any
//! case. On the device it would be a sum for each pair of columns, and CubeCL's autotuning may sum in another order on another rank: every rank must
//! have the same bits. For the same reason `P·Qᵀ` is computed element by element, and not by a product of matrices.
//!
//! `P` and `Q` lie as in the host's messages, column by column: as `rank` rows.

use std::collections::BTreeMap;

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType as BurnDType, Shape, Slice, TensorData};
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use phalanx::adapter::copy_of;
use phalanx::reducer::hooks::{GradientPlace, HookState, LowRankMatrix, PowerSgdOptions};
use phalanx::{Error, Result};

use super::BucketMemory;
use crate::read_back::ReadBack;

/// What is kept from step to step, by parameter, because buckets may be made anew.
pub(super) struct LowRank {
    options: PowerSgdOptions,
    /// The columns of `Q` that the last step has left.
    factors: BTreeMap<usize, Vec<f32>>,
    losses: BTreeMap<usize, CubeTensor>,
    /// Losses of a checkpoint, row by row, until they are used.
    loaded: BTreeMap<usize, Vec<f32>>,
    /// Buckets between their first message and the end: factors and losses are not those of a step.
    under_way: usize,
}

/// A gradient of a bucket that is under way.
pub(super) struct Matrix {
    parameter: usize,
    of: LowRankMatrix,
    /// `M`, as `rows` rows.
    sum: CubeTensor,
    /// `P`, when the first message is averaged.
    left: Option<CubeTensor>,
    is_finite: bool,
}

impl LowRank {
    pub fn new(options: PowerSgdOptions) -> Self {
        let (factors, losses, loaded) = Default::default();
        Self { options, factors, losses, loaded, under_way: 0 }
    }

    /// The matrices of a bucket and its first message: `P` of each, and then what is sent as it is. `own` are this rank's gradients, and `steps`
    /// were before.
    ///
    /// # Errors
    /// If a factor or losses that were loaded are those of another gradient.
    pub fn first(
        &mut self,
        gradients: &[GradientPlace],
        own: Vec<Option<CubeTensor>>,
        device: &CubeDevice,
        steps: u64,
    ) -> Result<(Vec<Matrix>, BucketMemory)> {
        self.under_way += 1;
        let (mut matrices, mut message, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (place, own) in gradients.iter().zip(own) {
            let Some(of) = self.options.matrix(&place.shape) else {
                others.push((own, place.elements.len()));
                continue;
            };
            let parameter = place.parameter;
            let sum = self.sum(parameter, of, own, device)?;
            let last = self.factors.remove(&parameter).filter(|_| self.options.has_warm_start());
            let q = upload(self.options.next_factor(parameter, of, last, steps), of.rank, device);
            let p = CubeBackend::float_matmul(q, CubeBackend::float_swap_dims(sum.clone(), 0, 1));
            message.push((Some(p), of.rank * of.rows));
            matrices.push(Matrix { parameter, of, sum, left: None, is_finite: true });
        }
        message.extend(others);
        Ok((matrices, BucketMemory::of(message, device, BurnDType::F32)))
    }

    /// The second message, when the `first` is averaged: `Q` of each matrix.
    pub fn second(
        &self,
        matrices: &mut [Matrix],
        first: &BucketMemory,
        device: &CubeDevice,
    ) -> Result<BucketMemory> {
        let averaged = read(first, matrices.len())?;
        let mut message = Vec::new();
        for (matrix, place) in matrices.iter_mut().zip(&first.places) {
            let LowRankMatrix { rows, columns, rank, .. } = matrix.of;
            let mut p = averaged[place.clone()].to_vec();
            self.options.orthogonalize(&mut p, rows);
            matrix.is_finite = is_finite(&p);
            let p = upload(p, rank, device);
            matrix.left = Some(p.clone());
            message.push((Some(CubeBackend::float_matmul(p, matrix.sum.clone())), rank * columns));
        }
        Ok(BucketMemory::of(message, device, BurnDType::F32))
    }

    /// The averages of the bucket's `gradients`, with their parameters, when the second message is averaged, too. That over ranks with data is `scale`
    /// times as large.
    pub fn finish(
        &mut self,
        matrices: Vec<Matrix>,
        gradients: &[GradientPlace],
        scale: f64,
        (first, second): (&BucketMemory, &BucketMemory),
    ) -> Result<Vec<(usize, CubeTensor)>> {
        let averaged = read(second, matrices.len())?;
        let whole = first.places.iter().skip(matrices.len());
        let others = gradients.iter().filter(|place| self.options.matrix(&place.shape).is_none());
        let others =
            others.zip(whole).map(|(place, range)| (place.parameter, first.part(range, &place.shape)));
        let mut averages: Vec<_> = others.collect();
        let shapes = gradients.iter().filter(|place| self.options.matrix(&place.shape).is_some());
        for ((matrix, place), range) in matrices.into_iter().zip(shapes).zip(&second.places) {
            let Matrix { parameter, of, sum, left, is_finite: left_is_finite } = matrix;
            let Some(p) = left else { return Err(Error::aborted("a matrix of PowerSGD has no factor")) };
            let q = averaged[range.clone()].to_vec();
            let product = outer(&p, &second.part(range, &[of.rank, of.columns]), of);
            if !left_is_finite || !is_finite(&q) {
                // Every rank sees this. A NaN would stay in every later step.
                self.losses.remove(&parameter);
            } else {
                if self.options.has_error_feedback() {
                    let sent = product.clone();
                    let sent =
                        if scale == 1.0 { sent } else { CubeBackend::float_mul_scalar(sent, scale.into()) };
                    let loss = CubeBackend::float_sub(sum, sent);
                    self.losses.insert(parameter, loss);
                }
                if self.options.has_warm_start() {
                    self.factors.insert(parameter, q);
                }
            }
            let shape = Shape::from(place.shape.clone());
            averages.push((parameter, CubeBackend::float_reshape(product, shape)));
        }
        self.under_way = self.under_way.saturating_sub(1);
        Ok(averages)
    }

    /// What a checkpoint has of it, after so many steps; or, without the losses, which are as large as the gradients, what all ranks have in common.
    ///
    /// # Errors
    /// If a step was cut off, or the device does not give it.
    pub fn state(&self, step: u64, with_losses: bool) -> Result<HookState> {
        if self.under_way != 0 {
            return Err(Error::aborted("a step was cut off, and what PowerSGD keeps is that of no step")
                .with_remedy("go on from the last checkpoint"));
        }
        let mut state = HookState::default().number("step", step);
        for (index, factor) in &self.factors {
            state = state.common("factors", *index, copy_of(factor)?);
        }
        if !with_losses {
            return Ok(state);
        }
        for (index, loss) in &self.loaded {
            state = state.own("losses", *index, copy_of(loss)?);
        }
        for (index, loss) in &self.losses {
            state = state.own("losses", *index, download(loss.clone())?);
        }
        Ok(state)
    }

    /// Factors and losses are those of `state`.
    pub fn load(&mut self, state: &mut HookState) {
        (self.factors, self.loaded) = (state.take("factors"), state.take("losses"));
        self.losses.clear();
        self.under_way = 0;
    }

    /// `M` of a parameter: this rank's gradient, or zeros if it has none, with the loss of earlier steps.
    fn sum(
        &mut self,
        parameter: usize,
        of: LowRankMatrix,
        own: Option<CubeTensor>,
        device: &CubeDevice,
    ) -> Result<CubeTensor> {
        let [factor, losses] =
            [&self.factors, &self.loaded].map(|saved| saved.get(&parameter).map(Vec::as_slice));
        of.check_saved(parameter, factor, losses)?;
        let shape = Shape::new([of.rows, of.columns]);
        let gradient = match own {
            // A gradient that backward has spread has one element for several places.
            Some(gradient) => into_contiguous_aligned(CubeBackend::float_reshape(gradient, shape)),
            None => CubeBackend::float_zeros(shape, device, BurnDType::F32.into()),
        };
        Ok(match self.loss(parameter, of, device) {
            Some(loss) => CubeBackend::float_add(gradient, loss),
            None => gradient,
        })
    }

    /// The loss of earlier steps, which stays until this one is over.
    fn loss(&mut self, parameter: usize, of: LowRankMatrix, device: &CubeDevice) -> Option<CubeTensor> {
        if let Some(loaded) = self.loaded.remove(&parameter) {
            self.losses.insert(parameter, upload(loaded, of.rows, device));
        }
        self.losses.get(&parameter).cloned()
    }
}

/// `P·Qᵀ`, where `p` and `q` have the columns of the factors as rows. Element by element: each rank has the same bits.
fn outer(p: &CubeTensor, q: &CubeTensor, of: LowRankMatrix) -> CubeTensor {
    let row = |all: &CubeTensor, number: usize, length: usize| {
        CubeBackend::float_slice(all.clone(), &[Slice::from(number..number + 1), Slice::from(0..length)])
    };
    let term = |number: usize| {
        let p = CubeBackend::float_reshape(row(p, number, of.rows), Shape::new([of.rows, 1]));
        CubeBackend::float_mul(p, row(q, number, of.columns))
    };
    (1..of.rank).fold(term(0), |sum, number| CubeBackend::float_add(sum, term(number)))
}

fn is_finite(factor: &[f32]) -> bool {
    factor.iter().all(|element| element.is_finite())
}

/// The elements of the first `parts` of a message, and what is between them. It waits for the device.
fn read(message: &BucketMemory, parts: usize) -> Result<Vec<f32>> {
    let end = message.places.iter().take(parts).map(|place| place.end).max().unwrap_or(0);
    download(message.part(&(0..end), &[end]))
}

/// The elements of a tensor of f32, row by row. It waits for the device.
fn download(tensor: CubeTensor) -> Result<Vec<f32>> {
    let read = ReadBack::of_computed(tensor).wait(|elements| {
        elements.bytes.chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned::<f32>).collect()
    });
    read.map_err(|lost| lost.of("a factor or a loss of PowerSGD"))
}

/// A tensor of so many `rows`. Nobody waits.
fn upload(elements: Vec<f32>, rows: usize, device: &CubeDevice) -> CubeTensor {
    let columns = elements.len() / rows.max(1);
    CubeBackend::float_from_data(TensorData::new(elements, [rows, columns]), device)
}

#[cfg(all(test, feature = "cpu"))]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use burn::backend::Cube;
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::read_back::Computed;

    fn device() -> CubeDevice {
        let probe = Tensor::<1>::zeros([1], &Device::cpu()).try_into_primitive::<Cube>().unwrap();
        Cube::computed(probe).device.clone()
    }

    #[test]
    fn a_product_of_factors_is_that_of_the_definition() {
        let of = PowerSgdOptions::default().rank(2).min_compression_rate(0.1).matrix(&[3, 4]).unwrap();
        let wave = |count: usize| -> Vec<f32> { (0..count).map(|i| (i as f32).sin()).collect() };
        let (device, p, q) = (device(), wave(6), wave(8));
        let product = outer(&upload(p.clone(), 2, &device), &upload(q.clone(), 2, &device), of);
        let product = download(product).unwrap();
        assert_eq!(product.len(), 12);
        for (place, found) in product.into_iter().enumerate() {
            let (row, column) = (place / 4, place % 4);
            let expected = p[row] * q[column] + p[3 + row] * q[4 + column];
            assert!((found - expected).abs() < 1e-6, "{row}, {column}: {found} for {expected}");
        }
    }

    #[test]
    fn a_checkpoint_has_losses_that_were_loaded_and_a_step_that_was_cut_off_has_none() {
        let options = PowerSgdOptions::default().min_compression_rate(0.1);
        let mut low_rank = LowRank::new(options);
        let saved = || {
            let state = HookState::default().number("step", 7);
            state.common("factors", 0, vec![1.0, 0.0, 0.0]).own("losses", 0, vec![0.5; 6])
        };
        low_rank.load(&mut saved());
        assert_eq!(low_rank.state(7, true).unwrap(), saved());
        assert_eq!(low_rank.state(7, false).unwrap(), saved().without_own());
        let device = device();
        let of = options.matrix(&[2, 3]).unwrap();
        // Used once, they lie on the device.
        assert_eq!(download(low_rank.sum(0, of, None, &device).unwrap()).unwrap(), [0.5; 6]);
        assert_eq!(low_rank.state(7, true).unwrap(), saved());
        assert_eq!(low_rank.state(7, false).unwrap(), saved().without_own());
        low_rank.under_way = 1;
        let error = low_rank.state(8, true).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
    }

    #[test]
    fn what_was_saved_of_a_gradient_of_another_shape_is_refused() {
        let options = PowerSgdOptions::default().min_compression_rate(0.1);
        let (of, device) = (options.matrix(&[2, 3]).unwrap(), device());
        let saved = || HookState::default().number("step", 7);
        let other = [
            (saved().own("losses", 4, vec![0.5; 7]), "what 7 elements of parameter number 4"),
            (saved().common("factors", 4, vec![0.5; 7]), "a factor of 7 elements"),
        ];
        for (mut state, words) in other {
            let mut low_rank = LowRank::new(options);
            low_rank.load(&mut state);
            let error = low_rank.sum(4, of, None, &device).err().unwrap();
            assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
        }
    }
}
