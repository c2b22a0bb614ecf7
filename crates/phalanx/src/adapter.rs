//! The interface for adapters, which bring a tensor framework to this crate: what they call, and in which order.
//!
//! This crate knows no tensors. An adapter gives it bytes and parameters' names, and gets averages back. `phalanx-burn` does so for Burn
//! and `phalanx-tch` for libtorch; `examples/candle`, for candle, is the shortest, and uses nothing but what is documented here.
//!
//! # The order of calls
//!
//! All ranks make the calls with collectives together, in the same order. "Agrees" marks those that compare ranks, and whose error
//! is the same on every rank.
//!
//! | when | call | |
//! |---|---|---|
//! | once | [`JoinGroup::from`](crate::join::JoinGroup) the user's group | the handle through which all collectives of the adapter go; it costs nothing outside of `join` |
//! | | [`verify_state`] | agrees: names, shapes and types of all tensors, in one order. If the framework lists them in none, sort them by name |
//! | | [`Reducer::new`] | agrees: parameters with a gradient, and options; plans the buckets |
//! | | [`broadcast_state`] | every rank gets rank 0's values |
//! | | [`HookedReducer::new`] | if hooks of backward reach the reducer: it keeps the error that backward cannot return |
//! | each step | [`JoinGroup::step`](crate::join::JoinGroup::step) | which ranks still have data |
//! | | [`Reducer::start_with`], [`start_weighted_with`](Reducer::start_weighted_with) | before backward. [`StepWeight`] adds up the weights of a step's passes, and refuses those that cannot be |
//! | | [`Reducer::ready`], [`ready_with`](Reducer::ready_with), [`ready_void`](Reducer::ready_void) | the gradient sink: once a parameter, when its gradient is finished; a full bucket leaves at once |
//! | | [`Reducer::finish`] | after backward: waits; agrees on parameters without a gradient |
//! | | [`Reducer::gradient`], [`take_gradients`](Reducer::take_gradients), [`gradient_view`](Reducer::gradient_view) | the averages: copied, given away, or where they lie |
//! | | sums of several passes, factors, halves for the way | [`elements`], and [`with_element!`](crate::with_element) for what else depends on the type |
//! | | the norm | [`check_max_norm`], [`clip_factor`]: no collective, all ranks have the same averages, and clip alike; [`Reducer::clipped`] compares by which factor. Sharded ones need an all_reduce of the sum of squares |
//! | | [`Reducer::stepped`] | if the adapter makes the optimizer's step: learning rates and settings, which the ranks compare after the first step and every 32 steps |
//! | at times | [`states_identical`] | agrees: whether replicas are the same bits |
//! | | [`broadcast_state`] | buffers that ranks compute for themselves, before an evaluation |
//! | at the end of uneven inputs | [`JoinGroup::join`](crate::join::JoinGroup::join), then [`Reducer::adopt`] and [`broadcast_state`] if [`uneven`](crate::join::Joined) | from the rank that took part to the end; the optimizer's state too; for calls that are none of the group's: [`join_elsewhere`](crate::join::JoinGroup::join_elsewhere) |
//! | to save and load | [`StateWriter`], [`StateReader`] | one pair of functions serves [`Checkpoints`](crate::checkpoint::Checkpoints) and [elastic](crate::elastic) jobs. [`checkpoint::training`](crate::checkpoint::training) saves and loads a `TrainState` whole, with what a hook keeps for each rank |
//! | | [`LoadedHook`](crate::reducer::hooks::LoadedHook) | a loaded state waits in it for the communication hook that continues from it |
//!
//! Gradients of passes without communication (`no_sync`) are added up by the adapter, and given with those of the next averaged pass.
//! Averages are multiplied by [`JoinGroup::average_scale`](crate::join::JoinGroup::average_scale), which inside of `join` may not be 1, as
//! far as [`Reducer::scale_in_step`] says.
//!
//! # What users must not hit
//!
//! - **An error on one rank alone**: the others would wait for it. [`HookedReducer::attempt`] ends the group with the error; elsewhere
//!   [`Communicator::abort`] does.
//! - **A gradient that is given twice or too early**: of a tied weight the sum of all uses is its gradient. The reducer refuses the second.
//! - **A missing gradient that becomes zero**: an optimizer moves a parameter with a zero gradient. [`Reducer::gradient`] gives `None`
//!   if no rank had one; leave it so.
//! - **A state without the gradients that are held** for a step of several backward passes: refuse to save it then, and drop them when a
//!   state is loaded.
//! - **A collective without the user's call**: give each public function's collectives its [`Caller`] with [`Communicator::in_call`].
//!   The variants `Ddp*` are for this. Errors name the call, and ranks that make different calls get a mismatch.
//!
//! # Errors and warnings
//!
//! [`Error::invalid_argument`], [`Error::mismatch`] and [`Error::aborted`] make errors of the kinds of this crate, so that a user's
//! [`Error::is_invalid_argument`] and [`Error::is_mismatch`] hold for adapters as well. A framework's own error is [`Error::other`]. Add the
//! remedy with [`Error::with_remedy`], and the rank to blame with [`Error::with_peer`].
//!
//! [`Error::invalid_argument`]: crate::Error::invalid_argument
//! [`Error::mismatch`]: crate::Error::mismatch
//! [`Error::aborted`]: crate::Error::aborted
//! [`Error::is_invalid_argument`]: crate::Error::is_invalid_argument
//! [`Error::is_mismatch`]: crate::Error::is_mismatch
//! [`Error::other`]: crate::Error::other
//! [`Error::with_remedy`]: crate::Error::with_remedy
//! [`Error::with_peer`]: crate::Error::with_peer

pub use phalanx_core::buffer::{copy_of, has_room, with_room};
#[doc(hidden)]
pub use phalanx_core::group::WeakGroup;
pub use phalanx_core::group::{Communicator, GroupHandle};
pub use phalanx_core::host::{id as host_id, name as host_name};
pub use phalanx_core::join::{ComparedCalls, Comparison, Elsewhere, ElsewhereCall, ElsewhereOp, JoinGroup};
#[doc(hidden)]
pub use phalanx_core::notice::Aside;
pub use phalanx_core::notice::warn;
pub use phalanx_core::reducer::{
    HookedReducer, ParameterSpec, Reducer, ReducerOptions, StateTensor, StepWeight, broadcast_state,
    check_weight, check_weight_sum, states_identical, verify_state, verify_state_on,
};
pub use phalanx_core::state::{StateReader, StateWriter};
pub use phalanx_proto::caller::Caller;
pub use phalanx_proto::elements;
pub use phalanx_proto::reducer::clip::{check_max_norm, clip_factor};
