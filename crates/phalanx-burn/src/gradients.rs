//! The reducer's averages as gradients of the model.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{AllocationProperty, Bytes, DType, Tensor, TensorData};
use phalanx::reducer::Reducer;
use phalanx::{Buffer, Result};

use crate::bridge;

/// How averages become tensors.
#[derive(Clone, Copy)]
pub(crate) struct Handover {
    /// What they are multiplied by.
    pub scale: f64,
    /// Do they stay in their buckets?
    pub view: bool,
}

/// Collects the averages under the ids of `model`'s parameters, whose places in the reducer `places` knows.
pub(crate) fn averages<M: Module>(
    model: &M,
    reducer: &Reducer,
    places: &HashMap<ParamId, usize>,
    handover: Handover,
) -> Result<GradientsParams> {
    let mut averages = Averages { reducer, places, handover, gradients: Ok(GradientsParams::new()) };
    model.visit(&mut averages);
    averages.gradients
}

struct Averages<'a> {
    reducer: &'a Reducer,
    places: &'a HashMap<ParamId, usize>,
    handover: Handover,
    gradients: Result<GradientsParams>,
}

impl Averages<'_> {
    fn data(&self, index: usize, shape: &[usize], dtype: DType) -> Result<Option<TensorData>> {
        if self.handover.view {
            let view = self.reducer.gradient_view(index)?;
            return Ok(view.map(|(bucket, range)| viewed(bucket, range, shape, dtype)));
        }
        Ok(self.reducer.gradient(index)?.map(|average| bridge::tensor_data(average, shape, dtype)))
    }
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.places.get(&param.id) else { return };
        let dtype = param.dtype();
        let data = self.data(index, param.shape().as_slice(), dtype);
        match (data, &mut self.gradients) {
            (Ok(Some(data)), Ok(gradients)) => {
                let average = Tensor::<D>::from_data(data, (&param.device().inner(), dtype));
                let scale = self.handover.scale;
                gradients.register(param.id, if scale == 1.0 { average } else { average * scale });
            }
            (Err(failure), Ok(_)) => self.gradients = Err(failure),
            _ => {}
        }
    }
}

/// Tensor data that stands on a bucket's memory. Burn copies it before it would write to it.
fn viewed(bucket: Arc<Buffer>, range: Range<usize>, shape: &[usize], dtype: DType) -> TensorData {
    struct Owner(Arc<Buffer>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    let bytes = bytes::Bytes::from_owner(Owner(bucket)).slice(range);
    TensorData::from_bytes(Bytes::from_shared(bytes, AllocationProperty::Native), shape.to_vec(), dtype)
}
