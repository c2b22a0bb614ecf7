//! Shards in checkpoints: any number of ranks goes on with what any number has saved.

use std::collections::{HashMap, HashSet, hash_map};
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType as BurnDType};
use burn_pack::Scalar;
use phalanx::adapter::{copy_of, with_room};
use phalanx::checkpoint::{Saved, Snapshot};
use phalanx::reducer::LoadedState;
use phalanx::{Error, Rank, Result};
use serde::{Deserialize, Serialize};

use super::Fsdp;
use super::layout::FlatLayout;
use super::units::whole_name;
use crate::optimizer::{Key, OptimizerState, unknown};
use crate::parameters::{self, Parameter, Select};
use crate::state::model::{self, Entry};
use crate::state::{Begun, Layout, fit};
use crate::tensor_bytes;

/// What all ranks have of the state of an optimizer besides shards, of which every parameter has its own. The index of a [`Key`] is the
/// parameter's number among those of all units, trained or not: other units may be frozen when it is loaded.
#[derive(Serialize, Deserialize)]
struct StateIndex {
    tensors: Vec<(Key, BurnDType)>,
    scalars: Vec<(Key, Scalar)>,
}

/// What all ranks have of the model.
#[derive(Serialize, Deserialize)]
struct Index {
    /// The state of an optimizer that had one of each unit as a whole, as in checkpoints of version 0.2.0; empty since.
    tensors: Vec<(Key, BurnDType)>,
    scalars: Vec<(Key, Scalar)>,
    paths: Vec<(usize, String)>,
    /// The parameters of all units, one after the other.
    units: Vec<Entry>,
    /// By unit: a hash of what is frozen in it.
    frozen: Vec<u64>,
}

/// The name of the [`StateIndex`].
fn state_of(name: &str) -> String {
    format!("{name}.state")
}

/// The name of what is in no unit.
fn rest_of(name: &str) -> String {
    format!("{name}.whole")
}

impl<M: Module> Fsdp<M> {
    /// Adds this rank's shards and their part of the state of `optimizer` to a sharded checkpoint, under names that begin with `name`:
    /// every rank calls it in [`save_sharded`](phalanx::checkpoint::Checkpoints::save_sharded). Nothing is gathered. Each unit is one
    /// tensor of one dimension, with all its parameters in their order, and so is each tensor of the state of a parameter, also of one that is frozen
    /// by now. Rank 0 adds what is in no unit. What is frozen inside a unit that is trained is not saved, but compared:
    /// [`FullySharded::new`](super::FullySharded::new) must get it.
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
    /// If the state cannot be read, or is not elementwise; in the middle of a step, where gradients of
    /// [`backward_no_sync`](Self::backward_no_sync) would be missing; or as [`Snapshot::slice`].
    pub fn save(&self, optimizer: &ModuleOptimizer, snapshot: &mut Snapshot, name: &str) -> Result<()> {
        self.ddp.check_nothing_held()?;
        let all = self.all_pieces()?;
        let state = OptimizerState::of(optimizer, &all)?;
        state.check_types(optimizer, &all)?;
        let OptimizerState { tensors, scalars, paths: _ } = state;
        // Replicas have the same.
        if self.exchanges.replicas.rank() != Rank::MAIN {
            return Ok(());
        }
        self.ddp.settle_buffers();
        let rank = self.exchanges.rank();
        if rank == 0 {
            let tensors = tensors.iter().map(|(key, layout, _)| (key.clone(), layout.dtype)).collect();
            snapshot.value(&state_of(name), &StateIndex { tensors, scalars })?;
            let (tensors, scalars, paths) = Default::default();
            let index = Index { tensors, scalars, paths, units: self.entries()?, frozen: self.frozen()? };
            snapshot.value(name, &index)?;
            let pieces = self.units.keys().copied().collect();
            let rest = (self.model(), Select::Except(&pieces));
            model::save(rest, &self.rest(), snapshot, &rest_of(name))?;
        }
        let mut rows: HashMap<usize, Vec<u8>> = HashMap::new();
        parameters::each(self.model(), &self.pieces(), |piece, bytes| {
            let (unit, index) = self.place(piece)?;
            let row = match rows.entry(unit.unit) {
                hash_map::Entry::Occupied(row) => row.into_mut(),
                hash_map::Entry::Vacant(place) => {
                    place.insert(with_room(unit.own(rank).len() * unit.dtype.size())?)
                }
            };
            row.extend_from_slice(&bytes.bytes[..unit.piece_bytes(index, rank).len()]);
            Ok(())
        })?;
        for (number, shard) in &self.order {
            let (unit, row) = (self.layout(*number)?, rows.remove(number).unwrap_or_default());
            let own = unit.own(rank);
            add(snapshot, &format!("{name}.{shard}"), unit.dtype, (unit.elements, own), row)?;
        }
        tensors.into_iter().try_for_each(|(key, layout, elements)| {
            let (unit, index) = self.place(key.index)?;
            if layout.shape != [unit.piece_elements(index, rank)] {
                return Err(Error::invalid_argument(format!(
                    "the optimizer keeps `{}` of shape {:?} for a shard of {} elements: its state cannot be divided",
                    key.field,
                    layout.shape,
                    unit.piece_elements(index, rank)
                ))
                .with_remedy("take an optimizer that treats each element by itself, such as AdamW"));
            }
            let (whole, own) = part(&unit, index, rank);
            let bytes = copy_of(elements.get(..own.len() * layout.dtype.size()).unwrap_or_default())?;
            add(snapshot, &self.field(name, &key)?, layout.dtype, (whole, own), bytes)
        })
    }

    /// Loads this rank's shards, what is in no unit, and their part of the state of `optimizer`, from what any number of ranks have
    /// [saved](Self::save) under `name`. Every rank calls it: if one has not, or with
    /// the checkpoint of another step or run, that is an error within 32 steps on every rank.
    ///
    /// # Errors
    /// If it does not exist, cannot be read, or is that of another model or optimizer: then nothing has changed. A checkpoint after a step
    /// above 0 without anything of an optimizer is that of another one, unless this one keeps nothing.
    pub fn load(&mut self, optimizer: &mut ModuleOptimizer, saved: &Saved, name: &str) -> Result<()> {
        let Index { tensors, scalars, paths: _, units, frozen } = saved.value(name)?;
        model::compare(&self.entries()?, &units)?;
        let other = self.frozen()?.iter().zip(&frozen).position(|(here, saved)| here != saved);
        if let Some((_, shard)) = other.and_then(|unit| self.order.get(unit)) {
            return Err(Error::mismatch(format!(
                "the frozen tensors in the unit of `{shard}` have other values than when the state was saved"
            ))
            .with_remedy("give FullySharded::new the module with those values, as from a file of its own"));
        }
        let rest = model::read(&self.rest(), saved, &rest_of(name))?;
        let rank = self.exchanges.rank();
        let mut rows = HashMap::new();
        for (number, shard) in &self.order {
            let unit = self.layout(*number)?;
            let row = read(saved, &format!("{name}.{shard}"), unit.dtype, (unit.elements, unit.own(rank)))?;
            rows.insert(*number, row);
        }
        let is_of_each = saved.part_names().any(|part| part == state_of(name));
        let index = if is_of_each { saved.value(&state_of(name))? } else { StateIndex { tensors, scalars } };
        let all = self.all_pieces()?;
        let state = match is_of_each {
            true => self.state(saved, name, index, &all)?,
            false => self.state_of_units(saved, name, index, &all)?,
        };
        fit::check(optimizer, (self.model(), &all), &state.index(), Begun::after(saved.step()))?;
        let loaded = state.load(optimizer, &all)?;
        let places = self.pieces();
        let mut pieces = Vec::new();
        for piece in 0..places.len() {
            let (unit, index) = self.place(piece)?;
            let (own, piece) = (unit.own(rank), unit.piece(index, rank));
            let size = unit.dtype.size();
            let row = rows.get(&unit.unit).map_or(&[][..], Vec::as_slice);
            let elements = match piece.is_empty() {
                true => vec![0; size],
                false => copy_of(&row[(piece.start - own.start) * size..(piece.end - own.start) * size])?,
            };
            pieces.push(elements);
        }
        let ids = self.units.keys().copied().collect();
        // From here on nothing fails.
        *optimizer = loaded;
        // Deferred updates of forward passes would overwrite the loaded values.
        self.ddp.settle_buffers();
        self.drop_accumulated();
        self.ddp.map(|model| {
            let model = model::loaded(model, Select::Except(&ids), rest);
            parameters::replaced(model, &places, |piece| pieces.get(piece).map(|piece| piece.as_slice()))
        });
        self.ddp.note_load(LoadedState { step: saved.step(), checksum: saved.checksum() });
        Ok(())
    }

    /// The state of an optimizer, of which every parameter has its own.
    fn state(
        &self,
        saved: &Saved,
        name: &str,
        StateIndex { tensors, scalars }: StateIndex,
        all: &[Parameter],
    ) -> Result<OptimizerState> {
        let rank = self.exchanges.rank();
        let mut state = without_tensors(scalars, all);
        for (key, dtype) in tensors {
            let (unit, index) = self.place(key.index)?;
            let elements = read(saved, &self.field(name, &key)?, dtype, part(&unit, index, rank))?;
            state.tensors.push(tensor(key, dtype, elements, unit.piece_elements(index, rank)));
        }
        Ok(state)
    }

    /// The state of an optimizer that took each unit for one parameter, by the units' numbers: each of its parameters has the same.
    fn state_of_units(
        &self,
        saved: &Saved,
        name: &str,
        StateIndex { tensors, scalars }: StateIndex,
        all: &[Parameter],
    ) -> Result<OptimizerState> {
        let rank = self.exchanges.rank();
        let (mut pieces, mut tensors_of) = (Vec::new(), Vec::new());
        for (key, scalar) in scalars {
            let (first, unit) = self.unit(key.index)?;
            for index in 0..unit.parameters.len() {
                pieces.push((Key { index: first + index, field: key.field.clone() }, scalar));
            }
        }
        for (Key { index: number, field }, dtype) in tensors {
            let (first, unit) = self.unit(number)?;
            let shard = self.order.get(number).map_or("", |(_, shard)| shard.as_str());
            let own = unit.own(rank);
            let row = read(saved, &format!("{name}.{shard}.{field}"), dtype, (unit.elements, own.clone()))?;
            for index in 0..unit.parameters.len() {
                let piece = unit.piece(index, rank);
                let size = dtype.size();
                let elements = match piece.is_empty() {
                    true => Vec::new(),
                    false => copy_of(&row[(piece.start - own.start) * size..(piece.end - own.start) * size])?,
                };
                let key = Key { index: first + index, field: field.clone() };
                tensors_of.push(tensor(key, dtype, elements, unit.piece_elements(index, rank)));
            }
        }
        Ok(OptimizerState { tensors: tensors_of, ..without_tensors(pieces, all) })
    }

    /// The parameters of all units, with the names of their units before them.
    fn entries(&self) -> Result<Vec<Entry>> {
        let mut all = Vec::new();
        for (number, shard) in &self.order {
            let unit = self.layout(*number)?;
            let named = |parameter: &Parameter| Parameter {
                name: format!("{shard}.{}", parameter.name),
                ..parameter.clone()
            };
            all.extend(unit.parameters.iter().map(named));
        }
        Ok(model::entries(&all))
    }

    /// By unit, a hash of what is frozen in it, and not sharded.
    fn frozen(&self) -> Result<Vec<u64>> {
        self.order.iter().map(|(number, _)| Ok(self.layout(*number)?.frozen)).collect()
    }

    /// What is in no unit.
    fn rest(&self) -> Vec<Parameter> {
        let tensors = self.ddp.state().iter();
        tensors.filter(|tensor| !self.units.contains_key(&tensor.id)).cloned().collect()
    }

    /// The pieces of all units, numbered in the order of the model.
    fn pieces(&self) -> HashMap<ParamId, usize> {
        let mut pieces = HashMap::new();
        for tensor in self.ddp.state().iter().filter(|tensor| self.units.contains_key(&tensor.id)) {
            let next = pieces.len();
            pieces.entry(tensor.id).or_insert(next);
        }
        pieces
    }

    /// The unit of a piece by its number, and which of the unit's parameters it is of.
    fn place(&self, piece: usize) -> Result<(Arc<FlatLayout>, usize)> {
        let mut left = piece;
        for (number, _) in &self.order {
            let unit = self.layout(*number)?;
            if left < unit.parameters.len() {
                return Ok((unit, left));
            }
            left -= unit.parameters.len();
        }
        Err(unknown(piece))
    }

    /// The name of the shard of a piece by its number, and the parameter that it is of.
    fn parameter(&self, piece: usize) -> Result<(&str, Parameter)> {
        let (unit, index) = self.place(piece)?;
        let shard = self.order.iter().find(|(number, _)| *number == unit.unit);
        let (Some((_, shard)), Some(parameter)) = (shard, unit.parameters.get(index)) else {
            return Err(unknown(piece));
        };
        Ok((shard.as_str(), parameter.clone()))
    }

    /// The pieces of all units by their numbers, under the names that an optimizer sees. It may have a state of one that is frozen by now.
    fn all_pieces(&self) -> Result<Vec<Parameter>> {
        let places = self.pieces();
        let mut all: Vec<Parameter> = Vec::with_capacity(places.len());
        for tensor in self.ddp.state() {
            // Of several places, the first.
            if places.get(&tensor.id) == Some(&all.len()) {
                let (shard, parameter) = self.parameter(all.len())?;
                all.push(Parameter { name: whole_name(shard, &parameter), ..tensor.clone() });
            }
        }
        Ok(all)
    }

    /// The number of the first piece of a unit, by the unit's place in the model's order.
    fn unit(&self, place: usize) -> Result<(usize, Arc<FlatLayout>)> {
        let mut first = 0;
        for (number, _) in self.order.iter().take(place) {
            first += self.layout(*number)?.parameters.len();
        }
        let (number, _) = self.order.get(place).ok_or_else(|| unknown(place))?;
        Ok((first, self.layout(*number)?))
    }

    fn layout(&self, number: usize) -> Result<Arc<FlatLayout>> {
        self.exchanges.unit(number).ok_or_else(|| unknown(number))
    }

    /// What a field of a parameter's state is called.
    fn field(&self, name: &str, key: &Key) -> Result<String> {
        let (shard, parameter) = self.parameter(key.index)?;
        Ok(format!("{name}.{shard}.{}.{}", parameter.name, key.field))
    }
}

/// A state of `all` pieces that has these numbers alone.
fn without_tensors(scalars: Vec<(Key, Scalar)>, all: &[Parameter]) -> OptimizerState {
    let known: HashSet<usize> = scalars.iter().map(|(key, _)| key.index).collect();
    let paths = all.iter().enumerate().filter(|(index, _)| known.contains(index));
    let paths = paths.map(|(index, piece)| (index, piece.name.clone())).collect();
    OptimizerState { tensors: Vec::new(), scalars, paths }
}

/// The elements of a parameter, and those that `rank` has.
fn part(unit: &FlatLayout, index: usize, rank: usize) -> (usize, Range<usize>) {
    let (place, piece) = (unit.place_of(index), unit.piece(index, rank));
    let start = piece.start.saturating_sub(place.start).min(place.len());
    (place.len(), start..start + piece.len())
}

/// Of a whole tensor of one dimension and so many elements, the slice that this rank has.
type Part = (usize, Range<usize>);

fn add(
    snapshot: &mut Snapshot,
    name: &str,
    dtype: BurnDType,
    (whole, own): Part,
    bytes: Vec<u8>,
) -> Result<()> {
    if own.is_empty() {
        return Ok(()); // nothing but padding
    }
    let place: (&[usize], &[usize]) = (&[own.start], &[own.len()]);
    snapshot.slice_bytes(name, tensor_bytes::dtype(dtype)?, &[whole], place, bytes)
}

fn read(saved: &Saved, name: &str, dtype: BurnDType, (whole, own): Part) -> Result<Vec<u8>> {
    if own.is_empty() {
        return Ok(Vec::new());
    }
    let tensor = saved.tensor(name)?;
    if tensor.shape() != [whole] || tensor.dtype() != tensor_bytes::dtype(dtype)? {
        return Err(Error::mismatch(format!(
            "the state is that of another model: `{name}` is {} {:?} there, and {dtype:?} [{whole}] here",
            tensor.dtype(),
            tensor.shape(),
        ))
        .with_remedy("make the model of the same units as when it was saved"));
    }
    Ok(tensor.slice(&[own.start], &[own.len()])?.bytes()?.into_owned())
}

/// A tensor of the state of a piece, which has one element at least.
fn tensor(key: Key, dtype: BurnDType, mut elements: Vec<u8>, length: usize) -> (Key, Layout, Bytes) {
    elements.resize(length * dtype.size(), 0);
    (key, Layout { dtype, shape: vec![length] }, Bytes::from_bytes_vec(elements))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::nn::{Linear, LinearConfig};
    use burn::optim::AdamWConfig;
    use burn::tensor::{Device, Tensor};
    use phalanx::ProcessGroup;
    use phalanx::checkpoint::Checkpoints;

    use super::super::{FullySharded, ShardingGroup};
    use super::*;

    type Unit = Fsdp<FullySharded<Linear>>;

    fn unit() -> Unit {
        let sharding = ShardingGroup::new(&ProcessGroup::alone().unwrap()).unwrap();
        let layer = LinearConfig::new(4, 3).init(&Device::flex().autodiff());
        Fsdp::new(FullySharded::new(layer, &sharding).unwrap(), &sharding).unwrap()
    }

    /// Weights, moments and counts of steps.
    type Content = (Vec<f32>, Vec<(Key, Vec<u8>)>, String);

    fn content(fsdp: &Unit, optimizer: &ModuleOptimizer) -> Content {
        let Linear { weight, bias } = fsdp.model().gather().unwrap();
        let mut floats: Vec<f32> = weight.val().into_data().iter().collect();
        floats.extend(bias.unwrap().val().into_data().iter::<f32>());
        let OptimizerState { tensors, scalars, .. } =
            OptimizerState::of(optimizer, fsdp.ddp.parameters()).unwrap();
        let mut moments: Vec<_> = tensors.into_iter().map(|(key, _, bytes)| (key, bytes.to_vec())).collect();
        moments.sort();
        let mut scalars: Vec<_> = scalars.iter().map(|scalar| format!("{scalar:?}")).collect();
        scalars.sort();
        (floats, moments, scalars.join(" "))
    }

    /// Saves as version 0.2.0 did, whose optimizers had one state of a whole unit.
    fn save_of_unit(fsdp: &Unit, optimizer: &ModuleOptimizer, snapshot: &mut Snapshot) -> Result<()> {
        let state = OptimizerState::of(optimizer, fsdp.ddp.parameters())?;
        let first = |key: &Key| key.index == 0;
        let mut rows: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for (key, _, elements) in &state.tensors {
            rows.entry(key.field.clone()).or_default().extend_from_slice(elements);
        }
        let fields = rows.keys().map(|field| (Key { index: 0, field: field.clone() }, BurnDType::F32));
        let index = Index {
            tensors: fields.collect(),
            scalars: state.scalars.into_iter().filter(|(key, _)| first(key)).collect(),
            paths: vec![(0, "shard".to_owned())],
            units: fsdp.entries()?,
            frozen: fsdp.frozen()?,
        };
        snapshot.value("old", &index)?;
        let pieces = fsdp.units.keys().copied().collect();
        model::save((fsdp.model(), Select::Except(&pieces)), &fsdp.rest(), snapshot, &rest_of("old"))?;
        let mut row = Vec::new();
        parameters::each(fsdp.model(), &fsdp.pieces(), |_, piece| {
            row.extend_from_slice(piece.bytes);
            Ok(())
        })?;
        rows.into_iter()
            .map(|(field, row)| (format!("old.shard.{field}"), row))
            .chain([("old.shard".to_owned(), row)])
            .try_for_each(|(name, row)| add(snapshot, &name, BurnDType::F32, (15, 0..15), row))
    }

    #[test]
    fn a_state_of_whole_units_becomes_one_of_each_parameter() {
        let (mut fsdp, mut optimizer) = (unit(), AdamWConfig::new().init());
        for _ in 0..2 {
            let x = Tensor::<2>::ones([2, 4], &Device::flex().autodiff());
            let loss =
                fsdp.forward(|unit| unit.forward(x, |layer, x| layer.forward(x)).powi_scalar(2).mean());
            let gradients = fsdp.backward(&loss.unwrap()).unwrap();
            fsdp.step(&mut optimizer, 0.1, gradients).unwrap();
        }
        let expected = content(&fsdp, &optimizer);
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), &ProcessGroup::alone().unwrap()).unwrap();
        let save = |snapshot: &mut Snapshot| {
            fsdp.save(&optimizer, snapshot, "new")?;
            save_of_unit(&fsdp, &optimizer, snapshot)
        };
        checkpoints.save_sharded(1, save).unwrap();
        checkpoints.finish().unwrap();
        let saved = checkpoints.newest().unwrap().unwrap();
        for name in ["new", "old"] {
            let (mut again, mut optimizer) = (unit(), AdamWConfig::new().init());
            again.load(&mut optimizer, &saved, name).unwrap();
            assert_eq!(content(&again, &optimizer), expected, "{name}");
        }
    }
}
