//! Of which units a model is made, and of what besides.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ParamId};
use phalanx::{Error, Result};

use super::super::refuse_divided;
use super::exchanges::Exchanges;
use super::unit::unit_name;
use crate::constants;
use crate::parameters::{Inventory, Parameter};

/// What a model is made of.
pub(super) struct Units {
    /// The numbers of its units, in its order, each with the name of its shard.
    pub order: Vec<(usize, String)>,
    /// The same, by the pieces of their shards.
    pub numbers: HashMap<ParamId, usize>,
    /// What is in no unit, and whether layers there, such as dropout, train.
    rest: Vec<Parameter>,
    /// What of Burn's layers outside of units are no tensors.
    constants: Vec<(String, String)>,
}

/// What a rank's model must have in common with the others': numbers of units, other tensors, and numbers of other layers.
pub(super) type Description = (Vec<usize>, Vec<String>, Vec<(String, String)>);

impl Units {
    pub fn of<M: Module>(model: &M, exchanges: &Exchanges) -> Result<Self> {
        refuse_divided(model, "Fsdp")?;
        let known = exchanges.shards();
        let (mut order, mut seen) = (Vec::new(), HashSet::new());
        let inventory = Inventory::of(model)?;
        let Inventory { parameters, state, .. } = &inventory;
        if let Some(parameter) = parameters.iter().find(|parameter| !known.contains_key(&parameter.id)) {
            return Err(Error::invalid_argument(format!(
                "the parameter `{}` is in no unit of this ShardingGroup",
                parameter.name
            ))
            .with_remedy("put the module that has it into FullySharded::new, or freeze it"));
        }
        let trained: HashSet<ParamId> = parameters.iter().map(|piece| piece.id).collect();
        let mut is_unit_trained = HashMap::new();
        for piece in state {
            let Some(&unit) = known.get(&piece.id) else { continue };
            if seen.insert(unit) {
                order.push((unit, unit_name(&piece.name).to_owned()));
            }
            // A unit's pieces are numbered one after the other.
            let is_trained = trained.contains(&piece.id);
            if *is_unit_trained.entry(unit).or_insert(is_trained) != is_trained {
                return Err(Error::invalid_argument(format!(
                    "a part of the unit of `{}` needs a gradient, and another part does not",
                    unit_name(&piece.name)
                ))
                .with_remedy("freeze parameters before FullySharded::new, or freeze the whole unit"));
            }
        }
        refuse_shared(&order, &is_unit_trained, state, exchanges)?;
        let rest =
            inventory.compared().into_iter().filter(|tensor| !known.contains_key(&tensor.id)).collect();
        let numbers = known.into_iter().filter(|(_, unit)| seen.contains(unit)).collect();
        Ok(Self { order, numbers, rest, constants: inventory.constants })
    }

    pub fn described(&self) -> Description {
        let rest = self.rest.iter();
        let rest = rest.map(|Parameter { name, dtype, shape, .. }| format!("`{name}` {dtype:?} {shape:?}"));
        (self.order.iter().map(|(unit, _)| *unit).collect(), rest.collect(), self.constants.clone())
    }
}

/// An error if a parameter that is trained stands in two units, or in one and outside of units: each would train it for itself.
fn refuse_shared(
    order: &[(usize, String)],
    is_unit_trained: &HashMap<usize, bool>,
    state: &[Parameter],
    exchanges: &Exchanges,
) -> Result<()> {
    let mut places: HashMap<ParamId, (String, bool)> = HashMap::new();
    let mut note = |id: ParamId, place: String, is_trained: bool| {
        match places.get(&id) {
        Some((first, was_trained)) if is_trained || *was_trained => Err(Error::invalid_argument(format!(
            "one parameter stands at `{first}` and at `{place}`: units are sharded and trained each by itself"
        ))
        .with_remedy(
            "put the layers that share it into one unit, as a module of both; or give one of them an id of its own: \
             Param::from_tensor(param.val().detach())",
        )),
        Some(_) => Ok(()),
        None => {
            places.insert(id, (place, is_trained));
            Ok(())
        }
    }
    };
    for (number, name) in order {
        let Some(unit) = exchanges.unit(*number) else { continue };
        // It may have been frozen or unfrozen since it was made.
        let is_trained = is_unit_trained.get(number) == Some(&true);
        for parameter in &unit.parameters {
            note(parameter.id, whole_name(name, parameter), is_trained)?;
        }
    }
    state.iter().try_for_each(|tensor| note(tensor.id, tensor.name.clone(), false))
}

/// The name in the whole model of a parameter of the unit whose shard has this name.
pub(super) fn whole_name(shard: &str, parameter: &Parameter) -> String {
    // Of `layer.shard`, the field is the unit's own.
    let unit = shard.rsplit_once('.').map(|(unit, _)| unit);
    let parameter = Some(parameter.name.as_str()).filter(|name| !name.is_empty());
    unit.into_iter().chain(parameter).collect::<Vec<_>>().join(".")
}

/// What differs between two ranks' models.
pub(super) fn difference(
    (here, (first, rest, constants)): (&str, &Description),
    (there, (second, other_rest, other_constants)): (&str, &Description),
) -> String {
    if first != second {
        return format!("{here}'s model has the units {first:?}, and {there}'s {second:?}");
    }
    let numbers = constants::difference((here, constants), (there, other_constants));
    if let Some(cause) = numbers.filter(|_| rest == other_rest) {
        return format!("the ranks' models differ: {cause}");
    }
    let place = rest.iter().zip(other_rest).take_while(|(one, other)| one == other).count();
    let describe = |rest: &[String]| rest.get(place).cloned().unwrap_or_else(|| "none".to_owned());
    format!(
        "tensor {} that is in no unit is {} in {here}'s model, and {} in {there}'s",
        place + 1,
        describe(rest),
        describe(other_rest)
    )
}
