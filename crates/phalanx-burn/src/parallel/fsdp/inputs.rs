//! What a unit computes with, besides its parameters.

use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor};

/// The inputs of a [unit](super::FullySharded): tensors of floats, through which gradients go to the units before it, and of integers
/// and booleans; numbers; options, vectors and tuples of these; or nothing.
pub trait UnitInputs: Clone + Send + 'static {
    /// The same inputs after `change` of each tensor of floats, in a fixed order.
    #[must_use]
    fn map_floats(self, change: &mut impl FloatMapper) -> Self;
}

/// Changes tensors of floats, whatever their number of dimensions.
pub trait FloatMapper {
    /// What takes the place of `tensor`.
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
}

impl<const D: usize> UnitInputs for Tensor<D> {
    fn map_floats(self, change: &mut impl FloatMapper) -> Self {
        change.map(self)
    }
}

macro_rules! without_floats {
    ($($kind:ty),*) => {$(
        impl<const D: usize> UnitInputs for Tensor<D, $kind>
        where
            $kind: Basic,
        {
            fn map_floats(self, _: &mut impl FloatMapper) -> Self {
                self
            }
        }
    )*};
}
without_floats!(Int, Bool);

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl UnitInputs for $number {
            fn map_floats(self, _: &mut impl FloatMapper) -> Self {
                self
            }
        }
    )*};
}
numbers!(bool, usize, u64, u32, i64, i32, f64, f32);

impl<I: UnitInputs> UnitInputs for Option<I> {
    fn map_floats(self, change: &mut impl FloatMapper) -> Self {
        self.map(|inputs| inputs.map_floats(change))
    }
}

impl<I: UnitInputs> UnitInputs for Vec<I> {
    fn map_floats(self, change: &mut impl FloatMapper) -> Self {
        self.into_iter().map(|inputs| inputs.map_floats(change)).collect()
    }
}

macro_rules! tuples {
    ($(($($name:ident),*)),*) => {$(
        impl<$($name: UnitInputs),*> UnitInputs for ($($name,)*) {
            #[allow(non_snake_case, clippy::unused_unit, reason = "the names are those of the types; a tuple may be empty")]
            fn map_floats(self, _change: &mut impl FloatMapper) -> Self {
                let ($($name,)*) = self;
                ($($name.map_floats(_change),)*)
            }
        }
    )*};
}
tuples!((), (A, B), (A, B, C), (A, B, C, D));
