//! References to objects on other ranks.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::registry::{Registry, plain};
use super::{PendingCall, Rpc, Shared};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::rpc::{Kind, ObjectId};

/// The function with which a holder makes another rank a holder too.
const LEND: &str = "phalanx.lend";

/// Whether `name` is a function of ours. They are short and wait for nothing, and so need not wait for the program's handlers.
pub(super) fn is_builtin(name: &[u8]) -> bool {
    name == LEND.as_bytes()
}

/// A reference to an object that another rank keeps, or this one.
///
/// The owner keeps the object as long as any rank holds a reference; clones on one rank are one. When the last is dropped,
/// the owner is told, without waiting. It drops the object in a handler's thread, when the calls on it have ended. A rank that
/// dies, or shuts down its calls, holds nothing any more.
///
/// ```
/// use std::sync::atomic::{AtomicI64, Ordering};
/// use phalanx::asynchronous::{RemoteRef, Rpc};
/// use phalanx::ProcessGroup;
/// let rpc = Rpc::builder()
///     .object("counter", |_, start: i64| Ok(AtomicI64::new(start)))
///     .method("add", |_, counter: &AtomicI64, by: i64| Ok(counter.fetch_add(by, Ordering::Relaxed) + by))
///     .start(&ProcessGroup::alone()?)?;
/// let counter: RemoteRef<AtomicI64> = rpc.remote(rpc.rank(), "counter", &10i64)?;
/// assert_eq!(counter.call::<_, i64>("add", &5i64)?, 15);
/// assert_eq!(rpc.objects(), 1);
/// drop(counter);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(alias = "RRef")]
pub struct RemoteRef<T> {
    held: Arc<Held>,
    _type: PhantomData<fn() -> T>,
}

/// This rank's hold on an object.
struct Held {
    rpc: Rpc,
    owner: Rank,
    object: ObjectId,
}

/// A [reference](RemoteRef) on its way to another rank: what [`RemoteRef::lend`] gives, and [`Rpc::accept`] takes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The number of the [`Rpc`] that lent it: another one may have an object of the same number.
    calls: u64,
    owner: Rank,
    object: ObjectId,
    to: Rank,
}

impl Rpc {
    /// Calls the [object](super::RpcBuilder::object) function `name` on the rank `to`, which keeps its result. Waits until it
    /// is made.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn remote<A: Serialize + ?Sized, T>(&self, to: Rank, name: &str, args: &A) -> Result<RemoteRef<T>> {
        let number = self.shared.last_object.fetch_add(1, Ordering::Relaxed) + 1;
        let object = ObjectId { creator: self.rank(), number };
        // From here on the object is released, even if the call fails.
        let reference = self.reference(to, object);
        self.request::<A, ()>(to, Kind::Make, name, object, args)?.wait()?;
        Ok(reference)
    }

    /// The reference that another rank has [lent](RemoteRef::lend) to this one. A ticket is good for one reference.
    ///
    /// # Errors
    /// If it was lent to another rank, or by another [`Rpc`].
    pub fn accept<T>(&self, ticket: Ticket) -> Result<RemoteRef<T>> {
        if ticket.calls != self.shared.number {
            return Err(Error::invalid_argument(
                "the reference was lent by another Rpc: it may name another object here",
            )
            .with_remedy("accept it with the Rpc that came from the same RpcBuilder::start on this rank"));
        }
        if ticket.to != self.rank() {
            return Err(Error::invalid_argument(format!(
                "the reference was lent to rank {}, not to rank {}",
                ticket.to,
                self.rank()
            ))
            .with_remedy("lend it to this rank, or accept it on the other one"));
        }
        Ok(self.reference(ticket.owner, ticket.object))
    }

    fn reference<T>(&self, owner: Rank, object: ObjectId) -> RemoteRef<T> {
        // A reference does not keep the calls going.
        let rpc = Self { _guard: None, ..self.clone() };
        RemoteRef { held: Arc::new(Held { rpc, owner, object }), _type: PhantomData }
    }
}

impl<T> RemoteRef<T> {
    /// The rank that keeps the object.
    pub fn owner(&self) -> Rank {
        self.held.owner
    }

    /// Calls the [method](super::RpcBuilder::method) `name` of the object where it is.
    ///
    /// # Errors
    /// As [`Rpc::call`], and if the owner has no such object for this rank or it is of another type.
    pub fn call<A: Serialize + ?Sized, R: DeserializeOwned>(&self, name: &str, args: &A) -> Result<R> {
        self.call_async(name, args)?.wait()
    }

    /// As [`call`](Self::call), without waiting for the result.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn call_async<A: Serialize + ?Sized, R: DeserializeOwned>(
        &self,
        name: &str,
        args: &A,
    ) -> Result<PendingCall<R>> {
        let Held { rpc, owner, object } = &*self.held;
        rpc.request(*owner, Kind::Method, name, *object, args)
    }

    /// Makes the rank `to` a holder. The ticket is for [`Rpc::accept`] there, as an argument or a result of a call. One that is
    /// not accepted holds the object until that rank ends.
    ///
    /// # Errors
    /// As [`Rpc::call`] of the owner.
    pub fn lend(&self, to: Rank) -> Result<Ticket> {
        let Held { rpc, owner, object } = &*self.held;
        rpc.call::<_, ()>(*owner, LEND, &(object, to))?;
        Ok(Ticket { calls: rpc.shared.number, owner: *owner, object: *object, to })
    }
}

impl Registry {
    /// With the functions that every rank has.
    pub(super) fn with_builtins(mut self) -> Result<Self> {
        let lend = plain(LEND, |context, (object, to): (ObjectId, Rank)| {
            let shared = &context.rpc().shared;
            shared.objects.lend(object, context.caller(), to)?;
            // If it has left before, no other event would release what it holds.
            if let Some(failure) = shared.link(to).map_or_else(Some, |link| link.failure()) {
                shared.discard(shared.objects.release_all(to));
                return Err(failure);
            }
            Ok(())
        });
        self.add(LEND, lend)?;
        Ok(self)
    }
}

impl Shared {
    /// This rank no longer holds `object`. A thread of the pool tells the owner, so dropping a reference does not wait.
    fn release(self: &Arc<Self>, owner: Rank, object: ObjectId) {
        if owner == self.rank {
            return self.discard(self.objects.release(object, owner));
        }
        if self.link(owner).is_ok_and(|link| link.release(object)) {
            let shared = self.clone();
            self.pool.push_internal(move || shared.send_releases(owner));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.rpc.shared.release(self.owner, self.object);
    }
}

impl<T> Clone for RemoteRef<T> {
    fn clone(&self) -> Self {
        Self { held: self.held.clone(), _type: PhantomData }
    }
}

impl<T> std::fmt::Debug for RemoteRef<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteRef({} on rank {})", std::any::type_name::<T>(), self.owner())
    }
}
