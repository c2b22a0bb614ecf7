//! Candle has no hooks. An identity operation on each parameter stands for one: its backward gets the finished gradient while that of
//! earlier layers is still to come. It copies the parameter, because an operation of candle makes new memory. Here for processors alone.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use crate::sink::Sink;

pub(crate) struct Hook {
    pub sink: Arc<Sink>,
    /// The forward pass.
    pub pass: u64,
    /// The parameter.
    pub index: usize,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "phalanx-candle hook"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if !layout.is_contiguous() || layout.start_offset() != 0 {
            bail!("parameter {} is a part of another tensor", self.sink.parameters[self.index].spec)
        }
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.sink.hooked(self.pass, self.index, gradient).map_err(candle_core::Error::wrap)
    }
}
