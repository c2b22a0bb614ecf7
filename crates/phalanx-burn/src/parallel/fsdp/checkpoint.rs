//! Shards in checkpoints: any number of ranks goes on with what any number has saved.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType as BurnDType};
use burn_pack::Scalar;
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::{Error, Rank, Result};
use serde::{Deserialize, Serialize};

use super::Fsdp;
use super::layout::FlatLayout;
use crate::optimizer::{Key, OptimizerState, unknown};
use crate::parameters::{self, Parameter, Select};
use crate::state::model::{self, Entry};
use crate::state::{Layout, fit};
use crate::tensor_bytes;

/// What all ranks have of an optimizer's state besides shards.
#[derive(Serialize, Deserialize)]
struct Index {
    tensors: Vec<(Key, BurnDType)>,
    scalars: Vec<(Key, Scalar)>,
    paths: Vec<(usize, String)>,
    /// The parameters of all units, one after the other.
    units: Vec<Entry>,
    /// By unit: a hash of what is frozen in it.
    frozen: Vec<u64>,
}

/// The name of what is in no unit.
fn rest_of(name: &str) -> String {
    format!("{name}.whole")
}

impl<M: Module> Fsdp<M> {
    /// Adds this rank's shards and their part of the state of `optimizer` to a sharded checkpoint, under names that begin with `name`:
    /// every rank calls it in [`save_sharded`](phalanx::checkpoint::Checkpoints::save_sharded). Nothing is gathered. Each unit is one
    /// tensor of one dimension, with all its parameters in their order. Rank 0 adds what is in no unit. What is frozen inside a unit is
    /// not saved, but compared: [`FullySharded::new`](super::FullySharded::new) must get it.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::optim::ModuleOptimizer;
    /// use phalanx::Result;
    /// use phalanx::checkpoint::Checkpoints;
    /// use phalanx_burn::parallel::fsdp::Fsdp;
    ///
    /// fn save<M: Module>(checkpoints: &Checkpoints, step: u64, fsdp: &Fsdp<M>, optimizer: &ModuleOptimizer) -> Result<()> {
    ///     checkpoints.save_sharded(step, |snapshot| fsdp.save(optimizer, snapshot, "model"))
    /// }
    ///
    /// fn load<M: Module>(checkpoints: &Checkpoints, fsdp: &mut Fsdp<M>, optimizer: &mut ModuleOptimizer) -> Result<()> {
    ///     match checkpoints.newest()? {
    ///         Some(saved) => fsdp.load(optimizer, &saved, "model"), // on any number of ranks
    ///         None => Ok(()),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// If the state cannot be read, or is not elementwise; or as [`Snapshot::slice`].
    pub fn save(&self, optimizer: &ModuleOptimizer, snapshot: &mut Snapshot, name: &str) -> Result<()> {
        let OptimizerState { tensors, scalars, paths } =
            OptimizerState::of(optimizer, self.ddp.parameters())?;
        let rank = self.exchanges.rank();
        // Replicas have the same.
        if self.exchanges.replicas.rank() != Rank::MAIN {
            return Ok(());
        }
        if rank == 0 {
            let tensors = tensors.iter().map(|(key, layout, _)| (key.clone(), layout.dtype)).collect();
            snapshot.value(
                name,
                &Index { tensors, scalars, paths, units: self.entries()?, frozen: self.frozen()? },
            )?;
            let shards = self.units.keys().copied().collect();
            let rest = (self.model(), Select::Except(&shards));
            model::save(rest, &self.rest(), snapshot, &rest_of(name))?;
        }
        parameters::each(self.model(), &self.indices(), |index, shard| {
            let unit = self.unit(index)?;
            self.slice(snapshot, &self.name(name, index, None)?, &unit, shard.dtype, shard.bytes)
        })?;
        tensors.into_iter().try_for_each(|(key, layout, elements)| {
            let unit = self.unit(key.index)?;
            if layout.shape != [unit.shard] {
                return Err(Error::invalid_argument(format!(
                    "the optimizer keeps `{}` of shape {:?} for a shard of {} elements: its state cannot be divided",
                    key.field, layout.shape, unit.shard
                ))
                .with_remedy("take an optimizer that treats each element by itself, such as AdamW"));
            }
            let name = self.name(name, key.index, Some(&key.field))?;
            self.slice(snapshot, &name, &unit, layout.dtype, &elements)
        })
    }

    /// Loads this rank's shards, what is in no unit, and their part of the state of `optimizer`, from what any number of ranks have
    /// [saved](Self::save) under `name`.
    ///
    /// # Errors
    /// If it does not exist, cannot be read, or is that of another model or optimizer: then nothing has changed.
    pub fn load(&mut self, optimizer: &mut ModuleOptimizer, saved: &Saved, name: &str) -> Result<()> {
        let Index { tensors, scalars, paths, units, frozen } = saved.value(name)?;
        model::compare(&self.entries()?, &units)?;
        let other = self.frozen()?.iter().zip(&frozen).position(|(here, saved)| here != saved);
        if let Some(unit) = other.and_then(|unit| self.ddp.parameters().get(unit)) {
            return Err(Error::mismatch(format!(
                "the frozen tensors in the unit of `{}` have other values than when the state was saved",
                unit.name
            ))
            .with_remedy("give FullySharded::new the module with those values, as from a file of its own"));
        }
        let rest = model::read(&self.rest(), saved, &rest_of(name))?;
        let shards = (0..self.ddp.parameters().len()).map(|index| {
            let unit = self.unit(index)?;
            self.read(saved, &self.name(name, index, None)?, &unit, unit.dtype)
        });
        let shards = shards.collect::<Result<Vec<_>>>()?;
        let shapes = tensors.iter().map(|(key, dtype)| {
            Ok((key.clone(), Layout { dtype: *dtype, shape: vec![self.unit(key.index)?.shard] }, ()))
        });
        let index = OptimizerState {
            tensors: shapes.collect::<Result<_>>()?,
            scalars: scalars.clone(),
            paths: paths.clone(),
        };
        fit::check(optimizer, (self.model(), self.ddp.parameters()), &index)?;
        let tensors = tensors.into_iter().map(|(key, dtype)| {
            let unit = self.unit(key.index)?;
            let name = self.name(name, key.index, Some(&key.field))?;
            let elements = Bytes::from_bytes_vec(self.read(saved, &name, &unit, dtype)?);
            Ok((key, Layout { dtype, shape: vec![unit.shard] }, elements))
        });
        let state = OptimizerState { tensors: tensors.collect::<Result<_>>()?, scalars, paths };
        *optimizer = state.load(optimizer, self.ddp.parameters())?;
        let indices = self.indices();
        let ids = self.units.keys().copied().collect();
        self.ddp.map(|model| {
            let model = model::loaded(model, Select::Except(&ids), rest);
            parameters::replaced(model, &indices, |index| shards.get(index).map(|shard| shard.as_slice()))
        });
        Ok(())
    }

    /// The parameters of all units, with the names of their units before them.
    fn entries(&self) -> Result<Vec<Entry>> {
        let mut all = Vec::new();
        for (index, shard) in self.ddp.parameters().iter().enumerate() {
            let unit = self.unit(index)?;
            let named = |parameter: &Parameter| Parameter {
                name: format!("{}.{}", shard.name, parameter.name),
                ..parameter.clone()
            };
            all.extend(unit.parameters.iter().map(named));
        }
        Ok(model::entries(&all))
    }

    /// By unit, a hash of what is frozen in it.
    fn frozen(&self) -> Result<Vec<u64>> {
        (0..self.ddp.parameters().len()).map(|index| Ok(self.unit(index)?.frozen)).collect()
    }

    /// What is in no unit.
    fn rest(&self) -> Vec<Parameter> {
        let tensors = self.ddp.state().iter();
        tensors.filter(|tensor| !self.units.contains_key(&tensor.id)).cloned().collect()
    }

    fn indices(&self) -> HashMap<ParamId, usize> {
        let parameters = self.ddp.parameters().iter().enumerate();
        parameters.map(|(index, parameter)| (parameter.id, index)).collect()
    }

    fn unit(&self, index: usize) -> Result<Arc<FlatLayout>> {
        let parameter = self.ddp.parameters().get(index).ok_or_else(|| unknown(index))?;
        let unit = self.units.get(&parameter.id).and_then(|&unit| self.exchanges.unit(unit));
        unit.ok_or_else(|| unknown(index))
    }

    fn name(&self, prefix: &str, index: usize, field: Option<&str>) -> Result<String> {
        let parameter = self.ddp.parameters().get(index).ok_or_else(|| unknown(index))?;
        let field = field.map_or(String::new(), |field| format!(".{field}"));
        Ok(format!("{prefix}.{}{field}", parameter.name))
    }

    /// This rank's elements of a unit, without padding.
    fn own(&self, unit: &FlatLayout) -> Range<usize> {
        unit.own(self.exchanges.rank())
    }

    fn slice(
        &self,
        snapshot: &mut Snapshot,
        name: &str,
        unit: &FlatLayout,
        dtype: BurnDType,
        shard: &[u8],
    ) -> Result<()> {
        let own = self.own(unit);
        let Some(elements) = shard.get(..own.len() * dtype.size()).filter(|_| !own.is_empty()) else {
            return Ok(()); // nothing but padding
        };
        let place: (&[usize], &[usize]) = (&[own.start], &[own.len()]);
        snapshot.slice_bytes(name, tensor_bytes::dtype(dtype)?, &[unit.elements], place, elements.to_vec())
    }

    /// The elements of this rank's shard, with padding.
    fn read(&self, saved: &Saved, name: &str, unit: &FlatLayout, dtype: BurnDType) -> Result<Vec<u8>> {
        let tensor = saved.tensor(name)?;
        if tensor.shape() != [unit.elements] || tensor.dtype() != tensor_bytes::dtype(dtype)? {
            return Err(Error::mismatch(format!(
                "the state is that of another model: `{name}` is {} {:?} there, and {dtype:?} [{}] here",
                tensor.dtype(),
                tensor.shape(),
                unit.elements
            ))
            .with_remedy("make the model of the same units as when it was saved"));
        }
        let own = self.own(unit);
        let mut elements = match own.is_empty() {
            true => Vec::new(),
            false => tensor.slice(&[own.start], &[own.len()])?.bytes()?.into_owned(),
        };
        elements.resize(unit.shard * dtype.size(), 0);
        Ok(elements)
    }
}
