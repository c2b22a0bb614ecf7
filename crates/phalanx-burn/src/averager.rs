//! A [`Ddp`] whose model is averaged every few steps.

use burn::module::Module;
use phalanx::Result;
use phalanx::reducer::hooks::Replica;

use crate::Ddp;

impl<M: Module> Replica for Ddp<M> {
    fn average_parameters(&mut self, averager: &str) -> Result<()> {
        self.average_by(Some(averager))
    }
}
