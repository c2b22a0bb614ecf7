//! The memory of a bucket on the device, in which gradients lie.

use std::sync::Arc;

use phalanx::Result;
use phalanx::reducer::hooks::GradientPlace;
use tch::{Kind, TchError, Tensor};

use super::power_sgd::{LowRank, LowRankBucket};
use crate::shim;
use crate::tensors::{Named, torch};

/// A bucket's memory, which it keeps.
pub(super) struct Bucket {
    pub gradients: Arc<[GradientPlace]>,
    pub memory: Tensor,
    /// The places of the gradients in it.
    pub places: Vec<Tensor>,
    /// What it held in this step before it was averaged, if that may be averaged again.
    pub kept: Option<Tensor>,
    /// What is sent of it, if that has another type.
    pub compressed: Option<Tensor>,
    /// If its matrices are sent as products.
    pub low_rank: Option<LowRankBucket>,
    /// What the program's hook has sent of it last, and what has come back if that is memory of its own.
    pub own: Vec<Tensor>,
    /// Whether other memory takes the place of this.
    pub is_abandoned: bool,
}

impl Bucket {
    pub fn new(parameters: &[Named], gradients: Arc<[GradientPlace]>) -> std::result::Result<Self, TchError> {
        let _guard = tch::no_grad_guard();
        let len = gradients.iter().map(|place| place.elements.end).max().unwrap_or(0);
        let like = gradients.first().map_or(0, |place| place.parameter);
        let like = &parameters[like].tensor;
        let memory = Tensor::f_empty(i64::try_from(len).unwrap_or(i64::MAX), (like.kind(), like.device()))?;
        let place = |place: &GradientPlace| {
            let (start, count) = (place.elements.start as i64, place.elements.len() as i64);
            let shape = parameters[place.parameter].tensor.size();
            // No view for autograd: `zero_grad` of libtorch's optimizers detaches gradients in place, which views refuse.
            memory.f_narrow(0, start, count)?.f_view(shape.as_slice())?.f_detach()
        };
        let places = gradients.iter().map(place).collect::<std::result::Result<_, _>>()?;
        let (kept, compressed, low_rank, own) = (None, None, None, Vec::new());
        Ok(Self { gradients, memory, places, kept, compressed, low_rank, own, is_abandoned: false })
    }

    /// Takes other memory.
    pub fn renew(&mut self, parameters: &[Named]) -> Result<()> {
        let fresh = Self::new(parameters, self.gradients.clone()).map_err(torch)?;
        *self = Self { kept: self.kept.take(), ..fresh };
        Ok(())
    }

    /// Copies what is kept into its memory.
    pub fn take_back(&self) -> Result<()> {
        let Some(kept) = &self.kept else { return Ok(()) };
        tch::no_grad(|| self.memory.shallow_clone().f_copy_(kept)).map(drop).map_err(torch)
    }

    /// What is to be sent: what it holds, divided by the number of `ranks` and rounded to `kind`, whose sum over ranks is the average.
    pub fn compress(&mut self, kind: Kind, ranks: f64) -> std::result::Result<Tensor, TchError> {
        let _guard = tch::no_grad_guard();
        let scaled = self.memory.f_mul_scalar(f64::from(1.0 / ranks as f32))?;
        let place = match self.compressed.take() {
            Some(place) if place.kind() == kind => place,
            _ => Tensor::f_empty(scaled.size(), (kind, scaled.device()))?,
        };
        let place = self.compressed.insert(place);
        place.f_copy_(&scaled)?;
        Ok(place.shallow_clone())
    }

    /// What PowerSGD sends first of it; none if it has no matrix.
    pub fn first_message(&mut self, all: &mut LowRank) -> Result<Option<Tensor>> {
        if self.low_rank.is_none() {
            self.low_rank = all.bucket(&self.gradients, &self.memory)?;
        }
        self.low_rank.as_ref().map(|low_rank| all.first(low_rank)).transpose()
    }

    /// It holds what was sent in another type, if anything was.
    pub fn widen(&self) -> Result<()> {
        let Some(average) = &self.compressed else { return Ok(()) };
        tch::no_grad(|| self.memory.shallow_clone().f_copy_(average)).map(drop).map_err(torch)
    }

    /// The gradients of its parameters lie in it from now on.
    pub fn place(&self, parameters: &[Named]) -> Result<()> {
        let mut places = self.gradients.iter().zip(&self.places);
        places.try_for_each(|(gradient, place)| {
            shim::set_gradient(&parameters[gradient.parameter].tensor, Some(place))
        })
    }

    /// Copies gradients that do not lie in their place there, and zeros for those that are not there.
    pub fn fill(&self, parameters: &[Named]) -> Result<()> {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for (gradient, place) in self.gradients.iter().zip(&self.places) {
            let own = parameters[gradient.parameter].tensor.grad();
            if !own.defined() {
                drop(tch::no_grad(|| place.shallow_clone().f_zero_()).map_err(torch)?);
            } else if own.data_ptr() != place.data_ptr() || !own.is_contiguous() {
                to.push(place.shallow_clone());
                from.push(own);
            }
        }
        shim::copy_all(&to, &from)
    }
}
