"""Horovod's functions for PyTorch, carried out by Phalanx.

In place of ``import horovod.torch as hvd``::

    import phalanx_torch.horovod as hvd

or, for programs that are to stay as they are, :func:`install`, ``PHALANX_AS_HOROVOD=1``, or
``python -m phalanx_torch.horovod PROGRAM``. Tensors are on the CPU. There is no elastic training and no ``horovod.run``.
"""

from phalanx_torch._horovod import NoAttribute, install, refused
from phalanx_torch.horovod._functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from phalanx_torch.horovod._job import (
    HorovodInternalError,
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    get_process_set_ids_and_ranks,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from phalanx_torch.horovod._operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from phalanx_torch.horovod._optimizer import DistributedOptimizer
from phalanx_torch.horovod._sync_batch_norm import SyncBatchNorm
from phalanx_torch.horovod.compression import Compression

__all__ = sorted(name for name in dir() if not name.startswith("_") and name not in ("NoAttribute", "compression", "refused"))


def __getattr__(name):
    if name in ("elastic", "run"):
        raise refused(f"hvd.{name}", NoAttribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
