//! A module of whose parameters each rank has a shard.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::trace::Track;
use phalanx::{Error, Rank, Result};

use super::super::mixed;
use super::super::op::{ParallelOp, Source, Supply, Target};
use super::super::random::OwnNumbers;
use super::super::refuse_divided;
use super::collector::Collector;
use super::exchanges::{Exchanges, Place, Shard};
use super::group::ShardingGroup;
use super::inputs::{FloatMapper, UnitInputs};
use super::layout::FlatLayout;
use super::recompute::{Recomputed, Slots};
use super::statement::{Said, compare};
use super::whole::{Hollow, Role, Whole};
use crate::constants;
use crate::parameters::{self, Inventory, Select};
use crate::replicas;
use crate::tensor_bytes;
use crate::ties::Ties;

/// A module, such as a layer, of whose parameters each rank has a shard: PyTorch's `fully_shard(layer)`.
///
/// It takes the layer's place in a model. To compute with it, give [`forward`](Self::forward) the layer's inputs and what is done with
/// the whole layer:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use phalanx::{ProcessGroup, Result};
/// use phalanx_burn::parallel::fsdp::{FullySharded, ShardingGroup};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     layers: Vec<FullySharded<Linear>>, // was: Vec<Linear>
/// }
///
/// impl Model {
///     fn new(sharding: &ShardingGroup, device: &Device) -> Result<Self> {
///         // One layer is whole at a time.
///         let layer = |_| FullySharded::new(LinearConfig::new(8, 8).init(device), sharding);
///         Ok(Self { layers: (0..4).map(layer).collect::<Result<_>>()? })
///     }
///
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let one = |x, layer: &FullySharded<Linear>| layer.forward(x, |layer, x| layer.forward(x).tanh());
///         self.layers.iter().fold(x, one)
///     }
/// }
/// # let sharding = ShardingGroup::new(&ProcessGroup::alone()?)?;
/// # let device = Device::flex().autodiff();
/// # assert_eq!(Model::new(&sharding, &device)?.forward(Tensor::ones([2, 8], &device)).dims(), [2, 8]);
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// All the module's parameters that need a gradient stand in one row, which is divided evenly among the ranks. The unit's own parameters are
/// this rank's piece of each. A piece that is empty on this rank has one element, which stays zero. Units are not nested: a module of units is
/// no unit. An optimizer must treat each element by itself, as SGD and Adam
/// do; one that looks at a parameter's shape or norm, such as Adafactor or Burn's own gradient clipping, would take the piece for a
/// parameter. [`Fsdp::step`](super::Fsdp::step) refuses one that takes a norm. A parameter that gets no gradient on any rank has none here either.
///
/// If no parameter of the module needs a gradient, all are sharded likewise, and gradients go through the unit to what is before it. In a
/// module that is trained, frozen parameters stay whole on every rank, and tensors that are not floats do so in both.
///
/// Freeze a module before it becomes a unit. `Module::freeze` of a unit reaches its parameters, and not the layers in it: dropout there goes on.
///
/// # Errors
/// A forward pass cannot return one. If an exchange fails, or the device does not give the number of which the
/// [seed](super::ShardingOptions::seed) of a pass is made, the groups end with the cause, the output is NaN, and
/// [`Fsdp`](super::Fsdp)'s next call returns the cause.
#[doc(alias("fully_shard", "FSDPModule", "ZeRO"))]
#[derive(Module, Debug)]
pub struct FullySharded<M> {
    /// This rank's shard: its piece of each parameter.
    shard: Vec<Param<Tensor<1>>>,
    #[module(skip)]
    unit: Arc<Unit<M>>,
}

/// What does not change.
pub(super) struct Unit<M> {
    pub exchanges: Arc<Exchanges>,
    pub layout: Arc<FlatLayout>,
    /// The module, with parameters of no elements.
    hollow: Mutex<M>,
}

impl<M> fmt::Debug for Unit<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlatLayout { unit, elements, ranks, .. } = &*self.layout;
        write!(f, "Unit({unit}: {elements} elements among {ranks} ranks)")
    }
}

/// What a rank's module must have in common with the others'.
type Description = (usize, String, Vec<(String, Vec<usize>, String)>, Vec<(String, String)>);

impl<M: Module + 'static> FullySharded<M> {
    /// Keeps this rank's shard of rank 0's `module`. All ranks call it together, for their units in the same order.
    ///
    /// # Errors
    /// On every rank: if the ranks' modules or options differ; if the module has no parameter, parameters of
    /// different types, one id with different values in several places, running statistics, as batch norm has, a unit in it, or a parameter
    /// that is [divided](crate::parallel::tensor) among ranks; if it is not on a device with autodiff; if the groups of
    /// [`ShardingGroup::hybrid`] are no dimensions of one mesh. If the exchange fails.
    pub fn new(module: M, sharding: &ShardingGroup) -> Result<Self> {
        let exchanges = &sharding.exchanges;
        Self::sharded(module, exchanges).inspect_err(|error| exchanges.fail(error.clone()))
    }

    fn sharded(module: M, exchanges: &Arc<Exchanges>) -> Result<Self> {
        exchanges.check()?;
        let number = exchanges.units();
        if number == 0 {
            exchanges.check_groups()?;
        }
        let own = prepared(&module, number, exchanges);
        // Before what this rank's own module is found to be: the others wait here.
        let described: Said<Description> = match &own {
            Ok((inventory, _)) => {
                let is_frozen = |tensor: &parameters::Parameter| {
                    inventory.frozen.iter().any(|frozen| frozen.id == tensor.id)
                };
                let state = inventory.state.iter().map(|tensor| {
                    let frozen = if is_frozen(tensor) { "frozen " } else { "" };
                    (tensor.name.clone(), tensor.shape.clone(), format!("{frozen}{:?}", tensor.dtype))
                });
                Ok((number, format!("{:?}", exchanges.options), state.collect(), inventory.constants.clone()))
            }
            Err(error) => Err(error.to_string()),
        };
        let all = exchanges.gather_from_all(&described)?;
        let (inventory, mut layout) = own?;
        let remedy = "make the same units in the same order on every rank, with the same options";
        compare(&all, "cannot shard its module", difference, remedy)?;
        let module = replicas::from_rank(module, &exchanges.replicas, Rank::MAIN, Select::All)?;
        let module = replicas::from_rank(module, &exchanges.group, Rank::MAIN, Select::All)?;

        layout.frozen = frozen(&module, &layout)?;
        let size = layout.dtype.size();
        let mut shard = Vec::with_capacity(layout.parameters.len());
        let mut pieces: Vec<Option<TensorData>> = layout.parameters.iter().map(|_| None).collect();
        parameters::each(&module, &layout.indices, |index, tensor| {
            let Some(place) = layout.place(index) else { return Ok(()) };
            let own = layout.piece_bytes(index, exchanges.rank());
            let own = match own.is_empty() {
                // One element, which stays zero.
                true => vec![0; size],
                false => tensor.bytes[own.start - place.start..own.end - place.start].to_vec(),
            };
            pieces[index] = Some(tensor_bytes::tensor_data(&own, &[own.len() / size], layout.dtype));
            Ok(())
        })?;
        for data in pieces.into_iter().flatten() {
            let piece = Tensor::from_data(data, (&inventory.device, layout.dtype));
            shard.push(Param::initialized(ParamId::new(), piece.set_require_grad(layout.is_trained)));
        }
        let layout = Arc::new(layout);
        exchanges.add_unit(layout.clone(), shard.iter().map(|piece| piece.id));
        let hollow = Mutex::new(module.map(&mut Hollow(&layout)));
        let unit = Arc::new(Unit { exchanges: exchanges.clone(), layout, hollow });
        Ok(Self { shard, unit })
    }

    /// The output of `pass` for the whole module and `inputs`.
    ///
    /// All ranks must use the same units in the same order. With
    /// [`reshard_after_forward`](super::ShardingOptions::reshard_after_forward), `pass` runs again in the backward pass, and must compute
    /// the same. It is a closure that captures nothing, so that all it computes with is among `inputs`, and gets its gradient. This does
    /// not compile:
    ///
    /// ```compile_fail,E0308
    /// # use burn::{nn::Linear, tensor::Tensor};
    /// # use phalanx_burn::parallel::fsdp::FullySharded;
    /// fn residual(unit: &FullySharded<Linear>, x: Tensor<2>, skipped: Tensor<2>) -> Tensor<2> {
    ///     unit.forward(x, move |layer, x| layer.forward(x) + skipped.clone())
    /// }
    /// ```
    ///
    /// This does:
    ///
    /// ```
    /// # use burn::{nn::Linear, tensor::Tensor};
    /// # use phalanx_burn::parallel::fsdp::FullySharded;
    /// fn residual(unit: &FullySharded<Linear>, x: Tensor<2>, skipped: Tensor<2>) -> Tensor<2> {
    ///     unit.forward((x, skipped), |layer, (x, skipped)| layer.forward(x) + skipped)
    /// }
    /// ```
    pub fn forward<I: UnitInputs, const D: usize>(
        &self,
        inputs: I,
        pass: fn(&M, I) -> Tensor<D>,
    ) -> Tensor<D> {
        let Unit { exchanges, layout, .. } = &*self.unit;
        let pieces: Vec<_> = self.shard.iter().map(Param::val).collect();
        let shard: Shard = (layout.clone(), self.constants());
        let place = exchanges.enter(&shard);
        let whole = |role| self.unit.whole_or_nan(&shard, &place, exchanges.after(&place), role);
        let device = device_of(&shard);
        let is_trained = pieces.iter().any(|piece| piece.is_autodiff() && piece.is_tracked());
        // Backward comes through a frozen unit only to what it has computed with.
        let mut tracked = Tracked(false);
        let inputs = inputs.map_floats(&mut tracked);
        let is_passed = tracked.0 && device.is_autodiff() && exchanges.options.reshard_after_forward;
        if !is_trained && !is_passed {
            let module = whole(Role::Constant);
            return exchanges.traced(Track::Forward, layout, || pass(&module, inputs));
        }
        let collector = is_trained.then(|| Collector::new(exchanges, layout, &place));
        let anchor = match &collector {
            Some(collector) => collector.anchor(pieces, &device),
            None => Tensor::zeros([1], (&device, layout.dtype)).require_grad(),
        };
        if let (false, Some(collector)) = (exchanges.options.reshard_after_forward, &collector) {
            let mut behind = Behind { anchor, slots: None };
            let inputs = inputs.map_floats(&mut behind);
            let module = whole(Role::Behind(Box::new(behind.anchor), collector.clone()));
            return exchanges.traced(Track::Forward, layout, || pass(&module, inputs));
        }
        let constants = inputs.clone().map_floats(&mut Constants);
        let module = whole(Role::Constant);
        let own_numbers = match OwnNumbers::of(&device) {
            Ok(own_numbers) => own_numbers,
            Err(error) => return pass(&self.unit.failed(error, &shard, Role::Constant), constants),
        };
        let seed = exchanges.seed(&place, own_numbers.drawn());
        device.seed(seed);
        let output = exchanges.traced(Track::Forward, layout, || pass(&module, constants.clone()));
        drop((own_numbers, module));
        if output.is_autodiff() && output.is_tracked() {
            exchanges.fail(hidden(layout));
        }
        let slots = Slots::default();
        let mut behind = Behind { anchor, slots: Some(slots.clone()) };
        drop(inputs.map_floats(&mut behind));
        let again = Recomputed::new(&self.unit, (place, seed), (collector, slots), (shard, constants, pass));
        let output = output.autodiff().set_require_grad(false).into_dispatch();
        let target = Target(Arc::new(again));
        Tensor::from_dispatch(Dispatch::attached(output, behind.anchor.into_dispatch(), target))
    }

    /// The whole module, on every rank: to save it, or to use it without a group. All ranks call it together.
    ///
    /// # Errors
    /// If the exchange fails.
    pub fn gather(&self) -> Result<M> {
        let Unit { exchanges, layout, .. } = &*self.unit;
        exchanges.check()?;
        let shard = (layout.clone(), self.constants());
        // It may have been frozen or unfrozen since it was made.
        let is_trained = self.shard.iter().any(|piece| piece.is_require_grad());
        self.unit
            .whole(&shard, None, Vec::new(), Role::Apart(is_trained))
            .inspect_err(|error| exchanges.fail(error.clone()))
    }
}

impl<M: Module> FullySharded<M> {
    /// The number of elements of the whole module's parameters that are sharded: those that need a gradient, or, of a frozen unit, all.
    pub fn elements(&self) -> usize {
        self.unit.layout.elements
    }

    /// This rank's shard, without a graph.
    fn constants(&self) -> Vec<Tensor<1>> {
        self.shard.iter().map(|piece| piece.val().set_require_grad(false)).collect()
    }
}

impl<M: Module> Unit<M> {
    /// The whole module. `next` are the units that are used after it.
    pub fn whole(&self, shard: &Shard, place: Option<&Place>, next: Vec<Shard>, role: Role) -> Result<M> {
        let gathered = self.exchanges.gather(shard, place, next)?;
        Ok(self.filled(Whole::new(&self.layout, Some(gathered), role, device_of(shard))))
    }

    fn whole_or_nan(&self, shard: &Shard, place: &Place, next: Vec<Shard>, role: Role) -> M {
        self.whole(shard, Some(place), next, role.clone())
            .unwrap_or_else(|error| self.failed(error, shard, role))
    }

    /// The whole module with NaN in place of parameters, after `error`.
    fn failed(&self, error: Error, shard: &Shard, role: Role) -> M {
        self.exchanges.fail(error);
        self.filled(Whole::new(&self.layout, None, role, device_of(shard)))
    }

    fn filled(&self, mut whole: Whole<'_>) -> M {
        let hollow = self.hollow.lock().clone();
        // Without autodiff it is an evaluation.
        let hollow = if whole.device.is_autodiff() { hollow } else { hollow.valid() };
        hollow.map(&mut whole)
    }
}

/// The device of a unit's pieces, of which there is one at least.
pub(super) fn device_of(shard: &Shard) -> Device {
    shard.1.first().map_or_else(Device::flex, Tensor::device)
}

/// This rank's module, and its parameters in one row.
fn prepared<M: Module>(module: &M, number: usize, exchanges: &Exchanges) -> Result<(Inventory, FlatLayout)> {
    refuse_units(module, &exchanges.shards())?;
    refuse_divided(module, "FullySharded")?;
    let inventory = Inventory::or_frozen(module)?;
    if let Some(buffer) = inventory.state.iter().find(|tensor| inventory.buffers.contains(&tensor.id)) {
        return Err(Error::invalid_argument(format!(
            "`{}` is changed by forward passes, as running statistics are, and would see every batch twice",
            buffer.name
        ))
        .with_remedy("take a norm without running statistics, such as LayerNorm or GroupNorm"));
    }
    let is_trained = !inventory.parameters.is_empty();
    if !is_trained {
        // Each is sharded once, whatever stands in its other places.
        Ties::check_frozen(module)?;
    }
    let parameters = if is_trained { &inventory.parameters } else { &inventory.frozen };
    let mut layout = FlatLayout::new(number, parameters.clone(), exchanges.ranks())?;
    layout.is_trained = is_trained;
    Ok((inventory, layout))
}

/// A hash of what is not sharded.
fn frozen<M: Module>(module: &M, layout: &FlatLayout) -> Result<u64> {
    let sharded = layout.indices.keys().copied().collect();
    let tensors = parameters::read(module, Select::Except(&sharded))?;
    let words = tensors.iter().flat_map(|tensor| tensor.as_bytes().chunks(size_of::<u64>()));
    Ok(mixed(words.map(|word| {
        let mut bytes = [0; size_of::<u64>()];
        bytes[..word.len()].copy_from_slice(word);
        u64::from_le_bytes(bytes)
    })))
}

/// An error if `module` has a unit in it: each rank's shard would be taken for a parameter that all ranks have.
fn refuse_units<M: Module>(module: &M, shards: &HashMap<ParamId, usize>) -> Result<()> {
    shard_in(module, shards).map_or(Ok(()), |name| {
        Err(Error::invalid_argument(format!("`{name}` is the shard of a unit: units are not nested"))
            .with_remedy("make units of layers next to each other, and a module of them that is no unit"))
    })
}

/// The name of the first shard in `module`, if there is a unit in it.
pub(in crate::parallel) fn first_shard<M: Module>(module: &M) -> Option<String> {
    shard_in(module, &HashMap::new())
}

/// The same, where what is in `shards` is a shard, too, whatever it stands in.
fn shard_in<M: Module>(module: &M, shards: &HashMap<ParamId, usize>) -> Option<String> {
    let mut inner = InnerUnit { shards, path: Vec::new(), found: None };
    module.visit(&mut inner);
    inner.found
}

/// The type under which visitors see what is in a [`FullySharded`], as Burn's derive names a struct.
pub(crate) const UNIT: &str = "Struct:FullySharded";

/// The name of a unit's shard, from that of one of its pieces.
pub(super) fn unit_name(piece: &str) -> &str {
    piece.rsplit_once('.').map_or(piece, |(unit, _)| unit)
}

/// Finds a shard, of any group.
struct InnerUnit<'a> {
    shards: &'a HashMap<ParamId, usize>,
    path: Vec<(String, bool)>,
    found: Option<String>,
}

impl ModuleVisitor for InnerUnit<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push((name.to_owned(), container_type == UNIT));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.shards.contains_key(&param.id) || self.path.iter().any(|(_, is_unit)| *is_unit) {
            // Without the number of the piece.
            let names: Vec<&str> = self.path.iter().map(|(name, _)| name.as_str()).collect();
            let name = names.join(".");
            self.found.get_or_insert_with(|| unit_name(&name).to_owned());
        }
    }
}

/// What differs between two ranks' units.
fn difference(
    (here, (first, options, tensors, constants)): (&str, &Description),
    (there, (second, other_options, others, other_constants)): (&str, &Description),
) -> String {
    let cause = if first != second {
        format!("{here} makes unit {first}, and {there} unit {second}")
    } else if options != other_options {
        format!("{here} has the options {options}, and {there} {other_options}")
    } else if let (true, Some(cause)) =
        (tensors == others, constants::difference((here, constants), (there, other_constants)))
    {
        cause
    } else {
        let place = tensors.iter().zip(others).take_while(|(one, other)| one == other).count();
        let describe = |tensors: &[(String, Vec<usize>, String)]| match tensors.get(place) {
            Some((name, shape, dtype)) => format!("`{name}` {dtype} {shape:?}"),
            None => "none".to_owned(),
        };
        format!(
            "tensor {} of unit {first} is {} on {here}, and {} on {there}",
            place + 1,
            describe(tensors),
            describe(others)
        )
    };
    format!("the ranks' units differ: {cause}")
}

fn hidden(layout: &FlatLayout) -> Error {
    Error::invalid_argument(format!(
        "unit {} computes with a tensor that has a graph and is neither a parameter nor an input: its gradient would be lost",
        layout.unit
    ))
    .with_remedy("make it a Param of the module, or one of the inputs of FullySharded::forward, or detach it")
}

/// Whether any input has a graph.
struct Tracked(bool);

impl FloatMapper for Tracked {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0 |= tensor.is_autodiff() && tensor.is_tracked();
        tensor
    }
}

/// Inputs without their graph.
struct Constants;

impl FloatMapper for Constants {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        tensor.set_require_grad(false)
    }
}

/// Puts an anchor behind each input that has a gradient.
struct Behind {
    anchor: Tensor<1>,
    /// Where the gradients of inputs come from, if not from the graph itself.
    slots: Option<Slots>,
}

impl FloatMapper for Behind {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let is_tracked = tensor.is_autodiff() && tensor.is_tracked();
        let slot = self.slots.as_ref().and_then(|slots| slots.add(is_tracked));
        if !is_tracked {
            return tensor;
        }
        let supply = slot.map_or(Supply::Nothing, |slot| Supply::Gradient(Source(slot)));
        let anchor = self.anchor.clone().into_dispatch();
        self.anchor = Tensor::from_dispatch(Dispatch::behind(anchor, tensor.clone().into_dispatch(), supply));
        tensor
    }
}
