//! A linear layer that a plan may divide.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::super::division::Division;
use super::linear::linear_of_rows;

/// [`Linear`] that is whole until a [`TensorPlan`](super::TensorPlan) divides its outputs or its inputs among ranks. Its parameters have
/// Burn's names.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, activation::gelu};
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::parallel::tensor::{ParallelLinear, TensorGroup, TensorPlan};
///
/// #[derive(Module, Debug)]
/// struct FeedForward {
///     inner: ParallelLinear, // was: Linear
///     outer: ParallelLinear,
/// }
///
/// impl FeedForward {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.outer.forward(gelu(self.inner.forward(x)))
///     }
/// }
///
/// # fn show(group: &ProcessGroup) -> Result<()> {
/// let device = Device::flex().autodiff();
/// let layer = FeedForward {
///     inner: LinearConfig::new(8, 32).init(&device).into(),
///     outer: LinearConfig::new(32, 8).init(&device).into(),
/// };
/// let group = TensorGroup::new(group); // mesh.group("tensor")?
/// let layer = TensorPlan::new().column("inner").row("outer").divide(layer, &group)?;
/// let y = layer.forward(Tensor::ones([4, 8], &device)); // [4, 8], the same on every rank
/// # assert_eq!(y.dims(), [4, 8]);
/// # Ok(())
/// # }
/// # show(&ProcessGroup::alone()?)?;
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct ParallelLinear {
    /// `[d_input, d_output]`, or this rank's part of either.
    pub weight: Param<Tensor<2>>,
    /// `[d_output]`, or this rank's part if outputs are divided.
    pub bias: Option<Param<Tensor<1>>>,
}

impl From<Linear> for ParallelLinear {
    fn from(Linear { weight, bias }: Linear) -> Self {
        Self { weight, bias }
    }
}

impl ParallelLinear {
    /// The outputs for `x`, `[.., d_input]`. With divided outputs: this rank's part of them. With divided inputs: `x` is this rank's
    /// part, and every rank gets all outputs.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [y] = Self::forward_each([self], x);
        y
    }

    /// The outputs of each of `layers` for the same `x`, such as queries, keys and values. What is exchanged in the backward pass is
    /// exchanged once for all whose outputs are divided.
    pub fn forward_each<const N: usize, const D: usize>(layers: [&Self; N], x: Tensor<D>) -> [Tensor<D>; N] {
        let mut copied = None;
        layers.map(|layer| match layer.weight.reparameterization::<Division>() {
            Some(Division { group, span }) if span.dim == 0 => {
                let sum = group.reduce(linear_of_rows(x.clone(), layer.weight.val(), None));
                match &layer.bias {
                    Some(bias) => sum + bias.val().unsqueeze(),
                    None => sum,
                }
            }
            Some(Division { group, .. }) => {
                let x: &mut Tensor<D> = copied.get_or_insert_with(|| group.enter(x.clone()));
                layer.local(x.clone())
            }
            None => layer.local(x.clone()),
        })
    }

    fn local<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        linear_of_rows(x, self.weight.val(), self.bias.as_ref().map(|bias| bias.val()))
    }
}
