"""The all_reduce of sparse tensors."""

from typing import TYPE_CHECKING

import torch

from phalanx_torch import _ddp
from phalanx_torch._errors import described
from phalanx_torch.work import Work

if TYPE_CHECKING:
    from phalanx_torch.process_group import How, Op, ProcessGroup


def all_reduce_sparse(group: "ProcessGroup", tensor: torch.Tensor, op: "Op", how: "How") -> Work:
    """Adds up tensors in coordinate format: every rank gets the elements of all. Returns when that is done."""
    if op[0] != 0:
        raise ValueError("all_reduce: sparse tensors can only be summed")
    if not tensor.is_cpu:
        # Before the first exchange: the other ranks would wait for the next one.
        raise TypeError(f"this tensor is on {tensor.device}; phalanx moves tensors on the CPU: use a group of NCCL's for this one")
    _ddp.check_order(group, "all_reduce")
    native, size = group._native, group.size()
    how = (how[0], True)
    own = tensor.detach().coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    sizes = torch.tensor([indices.size(1), *tensor.shape], device="cpu")
    all_sizes = torch.empty(size, sizes.numel(), dtype=sizes.dtype, device="cpu")
    native.all_gather_single(all_sizes, sizes, how, True)
    if (all_sizes[:, 1:] != sizes[1:]).any():
        raise ValueError(f"all_reduce: the sparse tensors have different shapes: {all_sizes[:, 1:].tolist()}")
    counts = all_sizes[:, 0].tolist()
    try:
        all_indices = [indices.new_empty(count, indices.size(0)) for count in counts]
        native.all_gather(all_indices, indices.t().contiguous(), how)
        all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
        native.all_gather(all_values, values, how)
    except BaseException as error:
        # Of memory that is not there, or Ctrl-C: the other ranks would wait in the rest.
        if native.failure() is None:
            native.abort(f"all_reduce of a sparse tensor: rank {group.rank()} could not go on: {described(error)}")
        raise
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, device="cpu", check_invariants=True
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    group._sequence += 1
    return Work(None, [tensor], None, group._sequence, "all_reduce")
