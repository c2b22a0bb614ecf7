"""An optimizer whose gradients are those of all ranks."""

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from phalanx_torch import _warnings
from phalanx_torch._errors import Error
from phalanx_torch.horovod._job import HorovodInternalError, ProcessSet, global_process_set
from phalanx_torch.horovod._operations import (
    Adasum,
    Average,
    Op,
    Sum,
    _op,
    _refusing,
    _sparse_allreduce_async,
    allreduce_async_,
    grouped_allreduce_async_,
    synchronize,
)
from phalanx_torch.horovod.compression import Compression, Compressor

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    # The optimizer's own class comes after it.
    _Base = object

_Grouping: TypeAlias = Callable[[list[torch.Tensor]], list[list[torch.Tensor]]]
_Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]


class _Distributed(_Base):
    """What a wrapped optimizer has before its own class."""

    def _begin(
        self,
        named_parameters: _Named | None,
        compression: type[Compressor],
        passes: int,
        op: Op,
        predivide: float,
        groups: _Grouping,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self._parameter_names = self._names(named_parameters)
        self._reduced = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._groups: list[list[torch.Tensor]] = []
        self._group_of: dict[torch.Tensor, int] = {}
        for members in groups(self._reduced):
            for p in members:
                self._group_of[p] = len(self._groups)
            self._groups.append(members)
        self.backward_passes_per_step = passes
        self._left: dict[torch.Tensor, int] = {}
        # A pass has made gradients that no `synchronize` has averaged yet.
        self._has_passed = False
        # Which parameters' gradients are on their way, and what waits for each.
        self._waits: dict[torch.Tensor, Callable[[], None] | None] = {}
        # The gradients whose averages are on their way, with how often each had been written to.
        self._lent: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._ready: dict[int, list[torch.Tensor]] = {}
        # Of parameters that have had a sparse gradient.
        self._sparse_dims: dict[torch.Tensor, int] = {}
        # The first error of a step all of whose waits have not ended yet.
        self._failure: Exception | None = None
        # What was refused since the last step, by name: the other ranks have been told, and know of one call for a step.
        self._refused: dict[str, Exception] = {}
        self._synchronized, self._should_synchronize = False, True
        self._hooks: list[Any] = []
        self._is_shared = process_set._native is not None and process_set.size() > 1
        if self._is_shared:
            for p in self._reduced:
                self._watch(p)

    def _watch(self, p: torch.Tensor) -> None:
        """Lets the passes that make this parameter's gradient be counted."""
        self._left[p] = self.backward_passes_per_step
        # Not all versions of PyTorch have annotated it.
        register: Any = p.register_post_accumulate_grad_hook
        self._hooks.append(register(self._passed))

    def _watch_later_ones(self) -> None:
        """Takes the parameters that were frozen when the optimizer was made, and those of groups that were added to it since."""
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self._left:
                    self._parameter_names.setdefault(p, _unnamed(i, j))
                    self._watch(p)

    def _names(self, named_parameters: _Named | None) -> dict[torch.Tensor, str]:
        every = [p for group in self.param_groups for p in group["params"]]
        if named_parameters is None:
            return {p: _unnamed(i, j) for i, group in enumerate(self.param_groups) for j, p in enumerate(group["params"])}
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
            )
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
        named = {id(p) for _, p in pairs}
        unnamed = sum(id(p) not in named for p in every)
        if unnamed:
            raise ValueError(
                f"named_parameters was specified, but {unnamed} of the optimizer's {len(every)} parameters were not named; name all, "
                "or pass none"
            )
        return {p: name for name, p in pairs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own. The options and the state stay the objects that schedules, and the optimizer that was wrapped, have. Passes of a step whose
        gradients are not on their way yet count no longer, as with Horovod."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        if self.param_groups is not groups:
            for group, loaded in zip(groups, self.param_groups):
                group.clear()
                group.update(loaded)
            self.param_groups = groups
        if self.state is not state:
            loaded_state = dict(self.state)
            state.clear()
            state.update(loaded_state)
            self.state = state
        if not self._waits:
            self._begin_step()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many passes add to the gradients until they are averaged."""
        if self._waits:
            raise AssertionError("backward_passes_per_step changes between steps, and not while gradients are on their way")
        self.backward_passes_per_step = _whole("backward_passes_per_step", passes)
        self._left = dict.fromkeys(self._left, self.backward_passes_per_step)

    def _begin_step(self) -> None:
        """The next pass is the first of a step."""
        self._left = dict.fromkeys(self._left, self.backward_passes_per_step)
        self._has_passed = False
        self._refused = {}

    def _passed(self, p: torch.Tensor) -> None:
        if p in self._waits or self._left[p] <= 0:
            # This is the error of what the pass has added.
            self._lent.pop(p, None)
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[p] -= 1
        self._has_passed = True
        # An Adasum is one of changes, which only the step makes.
        if self._left[p] == 0 and self._op is not Adasum:
            self._submit(p)

    def _submit(self, p: torch.Tensor) -> None:
        group = self._group_of.get(p)
        if group is None:
            self._waits[p] = self._allreduce([p], self._parameter_names[p])
            return
        ready = self._ready.setdefault(group, [])
        ready.append(p)
        self._waits[p] = None
        if len(ready) == len(self._groups[group]):
            self._submit_group(group)

    def _submit_group(self, group: int) -> None:
        """Starts the average of the gradients of a group that are ready."""
        members = [p for p in self._groups[group] if p in self._waits]
        self._waits[members[0]] = self._allreduce(members, f"group.{group}.{self._parameter_names[members[0]]}")
        # What was refused in a backward pass is refused again in the step.
        del self._ready[group]

    def _allreduce(self, parameters: list[torch.Tensor], name: str) -> Callable[[], None]:
        """Starts the average of gradients, and returns what waits for it. What was refused once in a step is refused again."""
        if name in self._refused:
            raise self._refused[name]
        try:
            return self._started(parameters, name)
        except Exception as error:
            self._refused[name] = error
            raise

    def _started(self, parameters: list[torch.Tensor], name: str) -> Callable[[], None]:
        native = self._process_set._here()
        with _refusing(native, f"{'allreduce' if len(parameters) == 1 else 'grouped_allreduce'}.{name}"):
            for p in parameters:
                if p.grad is None:
                    # Another rank may have made one.
                    p.grad = self._no_gradient(p)
                elif p.grad.is_sparse:
                    self._sparse_dims[p] = p.grad.sparse_dim()
            is_sparse = any(_gradient(p).is_sparse for p in parameters) and not self._sparse_as_dense
            if is_sparse and (self._predivide != 1.0 or self._compression is not Compression.none or len(parameters) > 1):
                raise NotImplementedError(
                    f"the gradient of {name} is sparse: gradient_predivide_factor, compression and groups are for dense ones; pass "
                    "sparse_as_dense=True, or leave these out"
                )
            gradients = [] if is_sparse else [_gradient(p) for p in parameters]
            dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
            lent = [self._compression.compress(gradient) for gradient in dense]
        self._lent.update((p, (_gradient(p), _times_written(_gradient(p)))) for p in parameters)
        if is_sparse:
            return self._allreduce_sparse(parameters[0], name)
        compressed, contexts = zip(*lent)
        before, after, op = 1.0, 1.0, self._op
        if self._predivide != 1.0:
            before, after, op = 1.0 / self._predivide, self._predivide / self._process_set.size(), Sum
        how: dict[str, Any] = dict(op=op, prescale_factor=before, postscale_factor=after, process_set=self._process_set)
        if len(parameters) == 1:
            handle = allreduce_async_(compressed[0], name=name, **how)
        else:
            handle = grouped_allreduce_async_(list(compressed), name=name, **how)

        def wait() -> None:
            averaged = synchronize(handle)
            for p, tensor, context in zip(parameters, averaged if len(parameters) > 1 else [averaged], contexts):
                tensor = self._compression.decompress(tensor, context)
                own = _gradient(p)
                if own.is_sparse:
                    # As the optimizer expects it.
                    p.grad = tensor.to_sparse(own.sparse_dim())
                # Usually it is the gradient's own memory.
                elif tensor.data_ptr() != own.data_ptr():
                    own.detach().copy_(tensor)

        return wait

    def _no_gradient(self, p: torch.Tensor) -> torch.Tensor:
        """What stands for the gradient of a parameter that no pass of this rank has used: zeros, sparse if those before were."""
        sparse_dim = self._sparse_dims.get(p)
        if sparse_dim is None:
            return torch.zeros_like(p)
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=p.device)
        return torch.sparse_coo_tensor(indices, p.new_empty((0, *p.shape[sparse_dim:])), p.shape, device=p.device, check_invariants=True)

    def _allreduce_sparse(self, p: torch.Tensor, name: str) -> Callable[[], None]:
        # The name of a dense one: if other ranks have that, they are told so.
        result = _sparse_allreduce_async(_gradient(p), f"allreduce.{name}", self._op, self._process_set)

        def wait() -> None:
            p.grad = result()

        return wait

    def synchronize(self) -> None:
        """Waits until all gradients are those of all ranks. Those that this rank has not made count as zeros.

        After an error none is on its way any more, and the next pass begins a step. With Adasum there is nothing to wait for: gradients stay a rank's own.
        """
        if self._op is Adasum:
            return
        # What Ctrl-C leaves is waited for by the next call.
        if self._failure is None:
            try:
                self._submit_others()
            except Exception as error:
                self._failure = error
        # Before the first wait, which may write to its gradient.
        self._failure = self._failure or self._changed()
        for p in list(self._waits):
            wait = self._waits[p]
            if wait is not None:
                try:
                    wait()
                except Exception as error:
                    # A mismatch is of this gradient alone, and the others are still written to.
                    self._failure = self._failure or error
            del self._waits[p]
        self._ready = {}
        self._begin_step()
        failure, self._failure = self._failure, None
        # One rank gathers, and another reduces.
        if isinstance(failure, Error) and failure.kind == "mismatch" and "allgather of" in str(failure) and "allreduce(" in str(failure):
            why = "this gradient is sparse on some ranks only, and one that no pass has made counts as dense until it was sparse once"
            raise HorovodInternalError(f"{failure}. {why}: pass sparse_as_dense=True", failure.kind, failure.peer) from failure
        if failure is not None:
            raise failure
        self._synchronized = True

    def _changed(self) -> AssertionError | None:
        """The error of a gradient that the program has changed while its average was on its way, or None. It is looked for once."""
        lent, self._lent = self._lent, {}
        for p, (gradient, times) in lent.items():
            # One that was taken away has an error of its own.
            if p.grad is not None and (p.grad is not gradient or _times_written(gradient) != times):
                return AssertionError(
                    f"the gradient of {self._parameter_names[p]} was changed after loss.backward() but before optimizer.synchronize(), while its average was "
                    f"on its way. {_SYNCHRONIZE_FIRST}"
                )
        # PyTorch does not count what it writes. Averages that the program has waited for may be divided, and averaged once more.
        is_averaged = self._synchronized and not self._has_passed
        if lent and not is_averaged and _is_called_by_scaler():
            return AssertionError(
                "torch.amp.GradScaler has divided the gradients by its scale before optimizer.synchronize(), while their averages were on their way. "
                f"{_SYNCHRONIZE_FIRST}"
            )
        return None

    def _submit_others(self) -> None:
        """Submits the gradients that no pass of this rank has made."""
        if self._is_shared:
            self._watch_later_ones()
        failure: Exception | None = None
        for p in self._left:
            # One that is frozen now is so on every rank.
            if p not in self._waits and p.requires_grad:
                try:
                    self._submit(p)
                except Exception as error:
                    # The other ranks wait for the next ones all the same.
                    failure = failure or error
        # Groups some of whose parameters are frozen. These get no gradient: by one of zeros, decay and momentum would change them.
        for group in list(self._ready):
            try:
                self._submit_group(group)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For a ``step`` of gradients that ``synchronize`` has been called for, and that the program has changed since."""
        if self._op is Adasum:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients, and makes a step."""
        if self._op is Adasum and self._is_shared:
            return self._step_by_changes(closure)
        evaluate = closure

        def synchronized() -> Any:
            loss = evaluate() if evaluate is not None else None
            self._wait_unless_skipped()
            return loss

        if evaluate is None and self._is_shared:
            self._wait_unless_skipped()
        stepped = super().step() if evaluate is None else super().step(synchronized)
        self._synchronized = False
        return stepped

    def _wait_unless_skipped(self) -> None:
        if not self._should_synchronize:
            if self._has_passed or self._waits:
                raise AssertionError(
                    "optimizer.step() was called in optimizer.skip_synchronize() after loss.backward() but before optimizer.synchronize(): it would step "
                    "with gradients of this rank alone. Call optimizer.synchronize() first."
                )
            return
        # By the program, also in a closure.
        if self._synchronized and self._is_shared:
            if self._op is Sum and not self._has_passed:
                raise AssertionError(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): it would add up the sums of all "
                    "ranks once more. Call it in `with optimizer.skip_synchronize():`."
                )
            _warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
                "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code."
            )
        self.synchronize()
        self._synchronized = False

    def _step_by_changes(self, closure: Callable[[], Any] | None) -> Any:
        """Makes a step with this rank's gradients, and moves the parameters by the Adasum of all ranks' changes in its place."""
        self._watch_later_ones()
        # One that is frozen now is so on every rank.
        moved = [p for p in self._left if p.requires_grad]
        begins = [p.detach().clone() for p in moved]
        stepped = super().step() if closure is None else super().step(closure)
        failure: Exception | None = None
        started: list[tuple[torch.Tensor, torch.Tensor, Any, int]] = []
        for p, begin in zip(moved, begins):
            name = self._parameter_names[p]
            try:
                with _refusing(self._process_set._here(), f"allreduce.{name}"):
                    change, context = self._compression.compress(p.detach() - begin)
                handle = allreduce_async_(change, name=name, op=Adasum, process_set=self._process_set)
                started.append((p, begin, context, handle))
            except Exception as error:
                # The other ranks wait for the next ones all the same.
                failure = failure or error
            # As it was, until all ranks' changes are there.
            p.detach().copy_(begin)
        for p, begin, context, handle in started:
            try:
                p.detach().copy_(begin + self._compression.decompress(synchronize(handle), context))
            except Exception as error:
                # A mismatch is of this parameter alone.
                failure = failure or error
        self._begin_step()
        if failure is not None:
            raise failure
        return stepped

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """Forgets the gradients; not between the passes of a step, nor while they are on their way."""
        if self._waits:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). This "
                "is prohibited as it can cause a race condition."
            )
        if self._has_passed:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(): the gradients of this step's "
                "passes would be lost. Call it once for each step, before the first of its backward_passes_per_step passes."
            )
        self._synchronized = False
        return super().zero_grad(*arguments, **named)


# PyTorch puts the calls of a step's hooks into each class's `step`, where it has not. The optimizer's own, which this one calls, has them.
vars(_Distributed.step)["hooked"] = True


def _gradient(p: torch.Tensor) -> torch.Tensor:
    # Zeros, if no pass has made one.
    if p.grad is None:
        raise AssertionError(
            "a gradient was taken away after loss.backward() but before optimizer.step() or optimizer.synchronize(), while its average was on its "
            "way. Call optimizer.zero_grad(), or model.zero_grad(), before loss.backward()."
        )
    return p.grad


_SYNCHRONIZE_FIRST = (
    "Call optimizer.synchronize() before gradients are clipped, or before scaler.unscale_(optimizer), and make the step in "
    "`with optimizer.skip_synchronize():`."
)


def _is_called_by_scaler() -> bool:
    """Whether ``scaler.step(optimizer)`` makes this step, and the scaler is enabled. A schedule may have put a function of its own between them."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.amp.grad_scaler":
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals.get("self")
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()


def _times_written(tensor: torch.Tensor) -> int:
    """How often PyTorch has written to the tensor in place. It does not count that of tensors of inference mode.

    Of those that lie in one memory it counts the writes together, also what a pass adds to the gradients of other parameters, as of those that a model
    concatenates. These count as never written to.
    """
    is_part = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
    return 0 if tensor.is_inference() or is_part else tensor._version


def _unnamed(group: int, index: int) -> str:
    """The name of a parameter that has none, by its place."""
    return f"allreduce.noname.{group}.{index}"


def _whole(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, and is {value!r}")
    return value


def _grouping(
    num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None, optimizer: torch.optim.Optimizer
) -> _Grouping:
    """What divides the parameters with gradients into groups."""
    if not isinstance(num_groups, int):
        raise ValueError(f"num_groups is {num_groups!r}: it is the number of groups")
    if groups is None and not num_groups:
        return lambda parameters: []
    if isinstance(groups, int):
        num_groups, groups = groups, None
    if groups is None:
        if num_groups < 0:
            raise ValueError(f"num_groups is {num_groups}: there cannot be fewer than none")

        def even(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            count = min(num_groups, len(parameters))
            quotient, rest = divmod(len(parameters), count) if count else (0, 0)
            starts = [index * quotient + min(index, rest) for index in range(count + 1)]
            return [parameters[start:end] for start, end in zip(starts, starts[1:])]

        return even
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = _lists(groups)
    flat = [id(p) for members in groups for p in members]
    if any(one not in known for one in flat) or len(set(flat)) < len(flat):
        raise ValueError("groups: lists of this optimizer's parameters are expected, each in one group at most")
    return lambda parameters: [
        kept for members in groups if (kept := [p for p in members if any(p is other for other in parameters)])
    ]


def _lists(groups: Any) -> list[list[torch.Tensor]]:
    lists: list[Any] = list(groups) if isinstance(groups, Iterable) and not isinstance(groups, (torch.Tensor, str)) else [None]
    # A tensor has rows, and they are none of an optimizer's parameters.
    if not all(isinstance(members, Iterable) and not isinstance(members, (torch.Tensor, str)) for members in lists):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor")
    return [list(members) for members in lists]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: _Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the class of ``optimizer``, with its parameters, options and state, whose gradients are averaged over all ranks.

    The average of a gradient begins when the last of ``backward_passes_per_step`` passes has made it, and ``step`` waits for all.
    ``op`` is ``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``. The last combines what a step with a rank's own gradients changes, when ``step`` is called;
    ``groups`` and ``sparse_as_dense`` are then ignored. With ``gradient_predivide_factor`` a part of the division comes before the sum.
    ``num_groups`` and ``groups`` let gradients travel together. On ranks that are not in ``process_set`` it is as ``optimizer``.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"DistributedOptimizer: a torch.optim.Optimizer is expected, and not {type(optimizer).__name__}")
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"DistributedOptimizer: process_set is {process_set!r}: hvd.add_process_set makes one")
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise ValueError(f"DistributedOptimizer: compression is {compression!r}: pass hvd.Compression.none or hvd.Compression.fp16")
    op = _op(op, None)
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer: op is {op}, and gradients are combined with hvd.Average, hvd.Sum or hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not 0 < gradient_predivide_factor < math.inf:
        raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}: it must be more than 0, and finite")
    if isinstance(optimizer, _Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is one already")
    process_set._members()
    passes = _whole("backward_passes_per_step", backward_passes_per_step)
    grouping = _grouping(num_groups, groups, optimizer)
    base = type(optimizer)
    wrapped: Any = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    distributed = wrapped.__new__(wrapped)
    # The same parameters, options and state, so that schedules of learning rates that know the optimizer go on. Such a schedule may have
    # put a step of its own into it, which is bound to it.
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    vars(distributed).update(kept)
    distributed._begin(
        named_parameters, compression, passes, op, float(gradient_predivide_factor), grouping, sparse_as_dense, process_set
    )
    return distributed
