//! Layers on several ranks, by hand: tensors that go to another rank, and gradients that come back.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor, TensorData};
use parking_lot::Mutex;
use phalanx::adapter::WeakGroup;
use phalanx::{Error, ProcessGroup, Rank, Result};

use super::message::{Header, Kind, Layout};
use super::op::{GradientSource, GradientTarget, ParallelOp, Source, Target};
use crate::device;
use crate::tensor_bytes::{self, TensorBytes};

/// The way to a rank that has the layers before or after this rank's. A loss on the last rank gives gradients on the first.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use phalanx::{ProcessGroup, Rank, Result};
/// use phalanx_burn::parallel::StageLink;
///
/// /// One step of a model whose first layer is on rank 0, and whose second is on rank 1.
/// fn step(link: &StageLink, is_first: bool, layer: &Linear, x: Tensor<2>) -> Result<Tensor<1>> {
///     if is_first {
///         link.send_forward(layer.forward(x)) // what it gives stands for the loss
///     } else {
///         let x: Tensor<2> = link.recv_forward(&x.device())?;
///         Ok(layer.forward(x).powi_scalar(2).mean())
///     }
/// }
///
/// fn train(group: ProcessGroup) -> Result<()> {
///     let device = Device::flex().autodiff();
///     let layer = LinearConfig::new(3, 3).init(&device);
///     let is_first = group.rank().is_main();
///     let link = StageLink::new(&group, Rank::new(if is_first { 1 } else { 0 }))?; // once, for all steps
///     let loss = step(&link, is_first, &layer, Tensor::ones([4, 3], &device))?;
///     let gradients = loss.backward(); // on both ranks: the gradient goes from rank 1 to rank 0
///     assert!(layer.weight.grad(&gradients).is_some());
///     group.failure().map_or(Ok(()), Err)
/// }
/// # std::thread::scope(|scope| {
/// #     let groups = ProcessGroup::in_process(phalanx::WorldSize::new(2)?)?;
/// #     let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| train(group))).collect();
/// #     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// # })?;
/// # Ok::<(), phalanx::Error>(())
/// ```
///
/// Every rank runs backward from what it has: the last from the loss, the others from what
/// [`send_forward`](Self::send_forward) gave, or from the sum if it was called several times. A tensor that was received must
/// have a part in that, or the rank that sent it waits for its gradient until the time-out; unless it takes none, as a mask or the output of
/// frozen layers. The link, or another handle to its group, must live until backward has returned. Clones are the same link. Make one for
/// each pair of ranks and keep it, however many tensors go over it: gradients find their tensors in any order. With a second link of
/// the same group between the same ranks, a gradient that comes for the other one is an error that says so.
///
/// Clip with [`parallel::clip_grad_norm`](super::clip_grad_norm), and give it the group of the links as `pipeline`.
/// [`Ddp::clip_grad_norm`](crate::Ddp::clip_grad_norm) and [`Fsdp::clip_grad_norm`](super::fsdp::Fsdp::clip_grad_norm) are an error after a backward
/// pass in which a gradient has gone over a link. [`clip_grad_norm`](crate::clip_grad_norm) does not see a link: each rank would take the norm of its layers.
///
/// Links are for chains, in which tensors go from each rank to the next. Backward sends a gradient and waits until it is taken, and each
/// rank's order is that of its own graph: with a connection that skips ranks, or an output that returns to an earlier rank, ranks may
/// wait for each other until the time-out. Such a model needs a backward pass of its own for each way.
///
/// It is also the way of a [`Ddp`](crate::Ddp) over the ranks that have the same layers: `ddp.forward(|model| ..)` returns
/// what stands for the loss, and `ddp.backward` takes it. With `ddp.backward_weighted` all ranks of a chain give the same weight, because
/// the gradients of all come from the last one's loss.
///
/// # Errors
/// Backward cannot return an error. If a gradient cannot be had, all groups of this rank are ended with the cause
/// ([`ProcessGroup::abort_all`]), gradients are NaN, and the next call on a group returns the cause, as [`ProcessGroup::failure`]
/// does.
///
/// A long tensor is sent while the other rank receives it: two ranks that both send first wait for each other. Ranks that are
/// threads of one process must each make their own parameters: Burn locks a graph while it runs backward, and tensors that
/// share a parameter share a graph.
#[derive(Clone)]
pub struct StageLink {
    inner: Inner,
}

#[derive(Clone)]
struct Inner {
    group: ProcessGroup,
    peer: Rank,
    /// The links of this process have different ones. Each counts its own tensors, and all links between two ranks have one line of
    /// messages: by the numbers alone a gradient of another link's tensor would be taken for one of this link's.
    id: u64,
    state: Arc<Mutex<State>>,
}

thread_local! {
    /// Whether a gradient has gone over a link in the backward pass that runs in this thread.
    static IS_LINKED: Cell<bool> = const { Cell::new(false) };
}

/// What `backward` gives, and whether it has sent a gradient over a link, or received one: other ranks have layers of the model then. A forward pass
/// does not tell: a program may receive a tensor before it, and send what it gives.
pub(crate) fn with_links<T>(backward: impl FnOnce() -> T) -> (T, bool) {
    // Also after one that a panic has cut off.
    IS_LINKED.set(false);
    let output = backward();
    (output, IS_LINKED.get())
}

/// The number of the next link of this process.
static NEXT_LINK: AtomicU64 = AtomicU64::new(1);

#[derive(Default)]
struct State {
    sent: u64,
    received: u64,
    /// The link of the peer whose tensors come here, once one has come.
    theirs: Option<u64>,
    /// Gradients that came before they were asked for, by the number of their tensor.
    early: HashMap<u64, (Layout, TensorData)>,
}

impl StageLink {
    /// The link with the rank `peer` of `group`.
    ///
    /// # Errors
    /// If `peer` is this rank or no rank of the group.
    pub fn new(group: &ProcessGroup, peer: Rank) -> Result<Self> {
        if peer == group.rank() || !group.world_size().ranks().any(|rank| rank == peer) {
            return Err(Error::invalid_argument(format!(
                "rank {} of {} has no link with rank {peer}",
                group.rank(),
                group.world_size().count()
            ))
            .with_peer(peer)
            .with_remedy("give the rank of another stage"));
        }
        let id = NEXT_LINK.fetch_add(1, Ordering::Relaxed);
        Ok(Self { inner: Inner { group: group.clone(), peer, id, state: Arc::default() } })
    }

    /// Sends `tensor` to the peer, which must call [`recv_forward`](Self::recv_forward). Gives what stands for the loss on this
    /// rank: a zero, of shape `[1]`, from which backward runs with the gradient that the peer's backward sends.
    ///
    /// If nothing that is trained has a part in the tensor, such as a mask or what frozen layers give, the peer sends no gradient. Then, and without
    /// autodiff, as in an evaluation, the zero has no further use.
    ///
    /// # Errors
    /// If the tensor is no float of 16, 32 or 64 bits, has more than eight dimensions or is on no supported device, or as
    /// [`ProcessGroup::send`].
    pub fn send_forward<const D: usize>(&self, tensor: Tensor<D>) -> Result<Tensor<1>> {
        let number = next(&mut self.inner.state.lock().sent);
        let shape = tensor.dims();
        let is_tracked = tensor.is_autodiff() && tensor.is_tracked();
        let kind = if is_tracked { Kind::Activation } else { Kind::Constant };
        let layout = tensor_bytes::with_bytes(tensor.clone(), |bytes| {
            self.inner.send(kind, number, self.inner.id, bytes, &shape)?;
            Ok::<_, Error>(Layout::of(bytes, &shape))
        });
        // The peer waits for it.
        let layout = layout.flatten().inspect_err(|error| self.inner.group.abort_all(error.clone()))?;
        let source = Source(Arc::new(Awaited { link: self.inner.downgrade(), number, layout }));
        Ok(Tensor::from_dispatch(Dispatch::rooted(tensor.into_dispatch(), source)))
    }

    /// Receives the tensor that the peer [sends](Self::send_forward), on `device`. If that is one with autodiff, backward sends
    /// the tensor's gradient to the peer, unless the peer's tensor takes none.
    ///
    /// # Errors
    /// If the tensor has another number of dimensions, if there is no memory for it, if this build does not know the device, or as
    /// [`ProcessGroup::recv`].
    pub fn recv_forward<const D: usize>(&self, device: &Device) -> Result<Tensor<D>> {
        device::check(device).inspect_err(|error| self.inner.group.abort_all(error.clone()))?;
        let number = next(&mut self.inner.state.lock().received);
        let Inner { group, peer, .. } = &self.inner;
        let header = Header::receive(group, *peer).inspect_err(|error| group.abort_all(error.clone()))?;
        let is_gradient = header.kind == Kind::Gradient;
        if is_gradient || (header.number, header.layout.shape.len()) != (number, D) {
            return Err(self.inner.unexpected(&header, &format!("tensor {number}, of {D} dimensions")));
        }
        let of = header.link;
        if *self.inner.state.lock().theirs.get_or_insert(of) != of {
            return Err(self.inner.of_another_link(&header));
        }
        // The peer waits until its tensor is taken.
        let data = self.inner.receive(&header.layout).inspect_err(|error| group.abort_all(error.clone()))?;
        let tensor = Tensor::<D>::from_data(data, (device, header.layout.dtype));
        // The peer would not take a gradient: it would lie in front of the next message, and a long one would wait until the time-out.
        if !device.is_autodiff() || header.kind == Kind::Constant {
            return Ok(tensor);
        }
        let target = Target(Arc::new(Returned { link: self.inner.downgrade(), number, of }));
        Ok(Tensor::from_dispatch(Dispatch::delivered(tensor.require_grad().into_dispatch(), target)))
    }
}

impl fmt::Debug for StageLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageLink(rank {} to rank {})", self.inner.group.rank(), self.inner.peer)
    }
}

fn next(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

/// A link in a graph, which may never run backward: it does not keep the group.
struct WeakLink {
    group: WeakGroup,
    peer: Rank,
    id: u64,
    state: Arc<Mutex<State>>,
}

impl WeakLink {
    fn upgrade(&self) -> Result<Inner> {
        let Self { group, peer, id, state } = self;
        Ok(Inner { group: group.upgrade()?, peer: *peer, id: *id, state: state.clone() })
    }
}

impl Inner {
    fn downgrade(&self) -> WeakLink {
        let Self { group, peer, id, state } = self;
        WeakLink { group: group.downgrade(), peer: *peer, id: *id, state: state.clone() }
    }

    /// `link` is that of the rank that has sent the tensor.
    fn send(
        &self,
        kind: Kind,
        number: u64,
        link: u64,
        tensor: TensorBytes<'_>,
        shape: &[usize],
    ) -> Result<()> {
        let header = Header { kind, number, link, layout: Layout::of(tensor, shape) };
        self.group.send(&header.encode()?, self.peer)?;
        self.group.send(tensor.bytes, self.peer)
    }

    fn receive(&self, layout: &Layout) -> Result<TensorData> {
        let mut memory = layout.memory()?;
        self.group.recv(memory.as_mut_slice::<u8>()?, self.peer)?;
        Ok(layout.data(&memory))
    }

    /// Gradients come in the order in which the peer's backward finishes them, and are taken in the order of this rank's.
    fn gradient(&self, number: u64, expected: &Layout) -> Result<TensorData> {
        let unexpected = |header: &Header| {
            let Layout { dtype, shape } = expected;
            let expected = format!("the gradient of tensor {number}, of shape {shape:?} and type {dtype:?}");
            self.unexpected(header, &expected)
        };
        loop {
            let early = self.state.lock().early.remove(&number);
            if let Some((layout, gradient)) = early {
                if layout == *expected {
                    return Ok(gradient);
                }
                return Err(unexpected(&Header { kind: Kind::Gradient, number, link: self.id, layout }));
            }
            let header = Header::receive(&self.group, self.peer)?;
            if header.kind == Kind::Gradient && header.link != self.id {
                return Err(self.of_another_link(&header));
            }
            let is_due = {
                let state = self.state.lock();
                // A second one of a tensor is of a second backward pass: the first must be taken before.
                header.number < state.sent && !state.early.contains_key(&header.number)
            };
            let fits = header.number != number || header.layout == *expected;
            if header.kind != Kind::Gradient || !is_due || !fits {
                return Err(unexpected(&header));
            }
            let gradient = self.receive(&header.layout)?;
            self.state.lock().early.insert(header.number, (header.layout, gradient));
        }
    }

    /// The error if something else comes than this rank waits for; it ends the group.
    fn unexpected(&self, header: &Header, expected: &str) -> Error {
        let Header { kind, number, layout, .. } = header;
        let what = named(*kind);
        let error = Error::mismatch(format!(
            "rank {} has sent {what} {number}, of shape {:?} and type {:?}, where rank {} waits for {expected}",
            self.peer,
            layout.shape,
            layout.dtype,
            self.group.rank()
        ))
        .with_peer(self.peer)
        .with_remedy(
            "each send_forward needs its recv_forward in the same order, and each loss one backward pass",
        );
        self.group.abort_all(error.clone());
        error
    }

    /// The error if what comes belongs to another link between the same ranks; it ends the group.
    fn of_another_link(&self, header: &Header) -> Error {
        let error = Error::mismatch(format!(
            "rank {} has sent {} {} of another StageLink between it and rank {}",
            self.peer,
            named(header.kind),
            header.number,
            self.group.rank()
        ))
        .with_peer(self.peer)
        .with_remedy(
            "make one StageLink for each pair of ranks, and give clones of it to all who send or receive",
        );
        self.group.abort_all(error.clone());
        error
    }
}

/// What a message has, before the number of the tensor.
fn named(kind: Kind) -> &'static str {
    match kind {
        Kind::Activation | Kind::Constant => "tensor",
        Kind::Gradient => "the gradient of tensor",
    }
}

/// The gradient that the peer sends.
struct Awaited {
    link: WeakLink,
    number: u64,
    /// Of the tensor, and so of its gradient.
    layout: Layout,
}

impl GradientSource for Awaited {
    fn gradient(&self, _shape: &[usize]) -> Option<TensorData> {
        IS_LINKED.set(true);
        let gradient = self.link.upgrade().and_then(|link| link.gradient(self.number, &self.layout));
        gradient.map_err(|error| self.link.group.abort_all(error)).ok()
    }
}

/// The gradient that goes back to the peer.
struct Returned {
    link: WeakLink,
    number: u64,
    /// The link of the peer that has sent the tensor.
    of: u64,
}

impl GradientTarget for Returned {
    fn deliver(&self, gradient: TensorBytes<'_>, shape: &[usize]) -> Result<()> {
        IS_LINKED.set(true);
        self.link.upgrade()?.send(Kind::Gradient, self.number, self.of, gradient, shape)
    }

    fn fail(&self, error: Error) {
        self.link.group.abort_all(error);
    }
}
