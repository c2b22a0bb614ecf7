//! Linear layers whose weights are divided among ranks.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::module::linear;
use phalanx::{Error, Result};

use super::TensorGroup;

/// How activations lie on the ranks outside of divided layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Every rank has all of them.
    #[default]
    Replicated,
    /// Every rank has its part along the dimension 1 of `[batch, sequence, width]`: sequence parallelism. The same bytes are
    /// sent, and each rank keeps a part of the activations of norms and dropouts.
    Sequence,
}

/// The dimension along which [`Activations::Sequence`] divides.
pub(super) const SEQUENCE: usize = 1;

impl Activations {
    /// What a rank computes its own part of a layer with.
    pub(super) fn enter<const D: usize>(self, group: &TensorGroup, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Replicated => group.enter(x),
            Self::Sequence => along_sequence(group, x, |x| group.gather_sums(x, SEQUENCE)),
        }
    }

    /// The sum of the ranks' parts.
    pub(super) fn leave<const D: usize>(self, group: &TensorGroup, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Replicated => group.reduce(x),
            Self::Sequence => along_sequence(group, x, |x| group.reduce_scatter(x, SEQUENCE)),
        }
    }

    /// A parameter that is not divided, for use with such activations: where each rank uses it for other elements, its gradient is
    /// the sum of all ranks'.
    pub(super) fn shared<const D: usize>(self, group: &TensorGroup, parameter: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Replicated => parameter,
            Self::Sequence => group.copy(parameter),
        }
    }
}

/// `exchange` of `x` along its sequence. Without one, where several ranks would divide the width, the group ends, and the result is NaN.
fn along_sequence<const D: usize>(
    group: &TensorGroup,
    x: Tensor<D>,
    exchange: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    if D > SEQUENCE + 1 || group.ranks() == 1 {
        return exchange(x);
    }
    let error = Error::invalid_argument(format!(
        "Activations::Sequence divides the sequence of `[batch, sequence, width]`, and a tensor of shape {:?} has none",
        x.dims()
    ));
    group.abort(
        error.with_remedy("give the layer tensors of three dimensions, or take Activations::Replicated"),
    );
    Tensor::full(x.shape(), f64::NAN, (&x.device(), x.dtype()))
}

/// [`Linear`] whose outputs are divided among ranks: each has the weights of its own, and computes its part of them.
///
/// Megatron-LM's `ColumnParallelLinear`. A [`RowParallelLinear`] takes its output, so that two layers need one all_reduce in each
/// direction:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, activation::gelu};
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::parallel::tensor::{ColumnParallelLinear, RowParallelLinear, TensorGroup};
///
/// # fn show(group: &ProcessGroup) -> Result<()> {
/// let group = TensorGroup::new(group); // mesh.group("tensor")?
/// let device = Device::flex().autodiff();
/// let inner = ColumnParallelLinear::new(LinearConfig::new(8, 32).init(&device), &group)?;
/// let outer = RowParallelLinear::new(LinearConfig::new(32, 8).init(&device), &group)?;
/// let x = Tensor::<2>::ones([4, 8], &device);
/// let y = outer.forward(gelu(inner.forward(x))); // [4, 8], the same on every rank
/// # assert_eq!(y.dims(), [4, 8]);
/// # Ok(())
/// # }
/// # show(&ProcessGroup::alone()?)?;
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias = "ColwiseParallel")]
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    /// This rank's columns, `[d_input, d_output / ranks]`.
    pub weight: Param<Tensor<2>>,
    /// This rank's part, `[d_output / ranks]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    group: TensorGroup,
    #[module(skip)]
    activations: Activations,
}

impl ColumnParallelLinear {
    /// This rank's part of rank 0's `linear`. All ranks call it together.
    ///
    /// # Errors
    /// If the outputs cannot be divided evenly, or the exchange fails.
    pub fn new(linear: Linear, group: &TensorGroup) -> Result<Self> {
        Self::of(group.replicate(linear)?, group)
    }

    /// As [`new`](Self::new), of a layer that is the same on every rank.
    pub(super) fn of(linear: Linear, group: &TensorGroup) -> Result<Self> {
        let [_, outputs] = linear.weight.shape().dims();
        group.check_divides(outputs, "outputs of a linear layer")?;
        let Linear { weight, bias } = linear;
        Ok(Self {
            weight: group.shard(weight, 1)?,
            bias: bias.map(|bias| group.shard(bias, 0)).transpose()?,
            group: group.clone(),
            activations: Activations::Replicated,
        })
    }

    /// Takes activations that lie on the ranks in this way.
    #[must_use]
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = activations;
        self
    }

    /// This rank's part of the outputs, `[.., d_output / ranks]`, for `x` of shape `[.., d_input]`. To have all outputs on every rank,
    /// [gather](TensorGroup::gather) them.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.local(self.activations.enter(&self.group, x))
    }

    /// As [`forward`](Self::forward), for an input that several layers share and that has been copied.
    pub(super) fn local<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        linear_of_rows(x, self.weight.val(), self.bias.as_ref().map(|bias| bias.val()))
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<Linear> {
        let weight = self.group.gathered(&self.weight, 1)?;
        let bias = self.bias.as_ref().map(|bias| self.group.gathered(bias, 0)).transpose()?;
        Ok(Linear { weight, bias })
    }
}

/// Burn's `linear`, from all vectors of `x` as the rows of one matrix. If the length of `[samples, length, width]` is a multiple of 32, Burn 0.22
/// multiplies each sample on its own, and backward makes a gradient of the weights for each, as large as they are.
pub(super) fn linear_of_rows<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    if D < 3 {
        return linear(x, weight, bias);
    }
    let mut dims = x.dims();
    // Burn takes a 0 among the dimensions of `reshape` for the one that the tensor has there. So the empty dimension comes first; the result of
    // several has no graph, and none is missed.
    let empty: Vec<usize> = (0..D - 1).filter(|&side| dims[side] == 0).collect();
    match empty[..] {
        [] | [0] => {}
        [side] => return linear_of_rows(x.swap_dims(0, side), weight, bias).swap_dims(0, side),
        _ => {
            [_, dims[D - 1]] = weight.dims();
            return Tensor::zeros(dims, (&x.device(), x.dtype()));
        }
    }
    let width = dims[D - 1];
    let y = linear(x.reshape([dims[..D - 1].iter().product(), width]), weight, bias);
    [_, dims[D - 1]] = y.dims();
    y.reshape(dims)
}

/// [`Linear`] whose inputs are divided among ranks: each has the weights of its own inputs, and the partial sums are added up.
///
/// Megatron-LM's `RowParallelLinear`. It takes what a [`ColumnParallelLinear`] gives. The bias, which every rank has, is added once.
#[doc(alias = "RowwiseParallel")]
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    /// This rank's rows, `[d_input / ranks, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// All of it, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    group: TensorGroup,
    #[module(skip)]
    activations: Activations,
}

impl RowParallelLinear {
    /// This rank's part of rank 0's `linear`. All ranks call it together.
    ///
    /// # Errors
    /// If the inputs cannot be divided evenly, or the exchange fails.
    pub fn new(linear: Linear, group: &TensorGroup) -> Result<Self> {
        Self::of(group.replicate(linear)?, group)
    }

    /// As [`new`](Self::new), of a layer that is the same on every rank.
    pub(super) fn of(linear: Linear, group: &TensorGroup) -> Result<Self> {
        let [inputs, _] = linear.weight.shape().dims();
        group.check_divides(inputs, "inputs of a linear layer")?;
        Ok(Self {
            weight: group.shard(linear.weight, 0)?,
            bias: linear.bias,
            group: group.clone(),
            activations: Activations::Replicated,
        })
    }

    /// Gives activations that lie on the ranks in this way.
    #[must_use]
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = activations;
        self
    }

    /// The outputs, `[.., d_output]`, of all ranks' inputs together, for this rank's part of the inputs, `[.., d_input / ranks]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let sum = self.activations.leave(&self.group, linear_of_rows(x, self.weight.val(), None));
        match &self.bias {
            Some(bias) => sum + self.activations.shared(&self.group, bias.val()).unsqueeze(),
            None => sum,
        }
    }

    /// The undivided layer, on every rank. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<Linear> {
        Ok(Linear { weight: self.group.gathered(&self.weight, 0)?, bias: self.bias.clone() })
    }
}
