//! The reducer's averages as gradients of the model.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use phalanx::reducer::Reducer;
use phalanx::{BufferPart, Result};

use crate::bridge;
use crate::view;

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
    reducer: &mut Reducer,
    places: &HashMap<ParamId, usize>,
    handover: Handover,
) -> Result<GradientsParams> {
    let source = match handover.view {
        true => Source::Taken(reducer.take_gradients()?),
        false => Source::Reducer(reducer),
    };
    let mut averages =
        Averages { source, places, scale: handover.scale, gradients: Ok(GradientsParams::new()) };
    model.visit(&mut averages);
    averages.gradients
}

enum Source<'a> {
    Reducer(&'a Reducer),
    Taken(Vec<Option<BufferPart>>),
}

struct Averages<'a> {
    source: Source<'a>,
    places: &'a HashMap<ParamId, usize>,
    scale: f64,
    gradients: Result<GradientsParams>,
}

impl Averages<'_> {
    fn data(&mut self, index: usize, shape: &[usize], dtype: DType) -> Result<Option<TensorData>> {
        Ok(match &mut self.source {
            Source::Reducer(reducer) => {
                reducer.gradient(index)?.map(|average| bridge::tensor_data(average, shape, dtype))
            }
            Source::Taken(parts) => {
                let part = parts.get_mut(index).and_then(Option::take);
                part.map(|part| view::tensor_data(part, shape, dtype))
            }
        })
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
                let scale = self.scale;
                gradients.register(param.id, if scale == 1.0 { average } else { average * scale });
            }
            (Err(failure), Ok(_)) => self.gradients = Err(failure),
            _ => {}
        }
    }
}
