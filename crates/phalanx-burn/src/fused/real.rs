//! The element types that kernels are written for.

use std::ops::{Add, Div, Mul, Sub};

use burn::tensor::Element;
use bytemuck::Pod;

/// `f32` and `f64`.
pub trait Real:
    Element
    + Pod
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + sealed::Sealed
{
    /// The nearest value of this type.
    fn of(value: f64) -> Self;

    /// The square root, correctly rounded.
    #[must_use]
    fn root(self) -> Self;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

impl Real for f32 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Real for f64 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }
}
