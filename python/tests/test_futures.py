"""Works and futures."""

import contextlib
import datetime
import gc
import math
import os
import resource
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from conftest import SINCE_2_15, needs_async_op, waiting
from torch.distributed import rpc

import phalanx_torch
from phalanx_torch import _ddp
from phalanx_torch.work import Work


def results(rank):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert future is work.get_future()
    assert future.wait()[0] is not None and tensor.tolist() == [2.0] * 3
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0].tolist() == [2.0] * 3
    # Of a work that has ended.
    assert work.get_future().then(lambda done: done.value()[0].sum().item()).wait() == 6.0
    # A result that is copied back is there when the future says so.
    matrix = torch.ones(2, 3).t()
    chained = dist.all_reduce(matrix, async_op=True).get_future().then(lambda done: matrix.sum().item())
    assert chained.wait() == 12.0
    gathered = [torch.zeros(2), torch.zeros(2)]
    work = dist.all_gather(gathered, torch.full((2,), float(rank)), async_op=True)
    # The tensors themselves, and not a list of their list: as gloo has them.
    assert work.get_future().wait()[1] is gathered[1] and work.result()[0] is gathered[0]
    assert [one.tolist() for one in gathered] == [[0.0, 0.0], [1.0, 1.0]]
    outputs = gathered if rank == 0 else None
    work = dist.gather(torch.full((2,), float(rank)), outputs, async_op=True)
    assert [one.tolist() for one in work.get_future().wait()] == ([[0.0, 0.0], [1.0, 1.0]] if rank == 0 else [])


def test_what_works_and_futures_say(ranks):
    ranks(2, results)


def ended(rank):
    group = dist.group.WORLD
    # What a caller that waits gets from the group itself: `dist.all_reduce` drops it.
    for tensor in (torch.ones(3), torch.ones(2, 3).t(), torch.ones(3, dtype=torch.int16)):
        before = group._get_sequence_number_for_group()
        work = group.allreduce([tensor], waiting())
        assert group._get_sequence_number_for_group() == work._get_sequence_number() == before + 1
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert work.wait(datetime.timedelta(seconds=1))
        work.synchronize()
        assert len(work.result()) == 1 and work.result()[0] is tensor and bool((tensor == 2).all())
        assert work.get_future() is work.get_future() and work.get_future().wait()[0] is tensor
        assert work.get_future().then(lambda done: done.value()[0].sum().item()).wait() == tensor.sum().item()
        with pytest.raises(RuntimeError, match="received from no rank"):
            work.source_rank()
        with pytest.raises(NotImplementedError):
            work.get_future_result()
        with pytest.raises(NotImplementedError, match="the call's options, or the group's"):
            work.timeout
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    dist.all_reduce(tensor)
    del tensor, work
    gc.collect()
    assert seen() is None


@needs_async_op
def test_a_work_that_has_ended_says_what_any_work_says(ranks):
    ranks(2, ended)


def nested(rank):
    # A group of their own: the order of the callbacks' calls and of this function's is not the same on both ranks.
    inner = dist.new_group()

    def wait_inside(done):
        other = torch.ones(2)
        dist.all_reduce(other, group=inner, async_op=True).get_future().wait()
        return other.sum().item()

    chained = [dist.all_reduce(torch.ones(1), async_op=True).get_future().then(wait_inside) for _ in range(3)]
    assert [one.wait() for one in chained] == [4.0] * 3


def test_a_callback_may_wait_for_another_operation(ranks):
    ranks(2, nested)


class Ended:
    """A native operation that has ended."""

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def error(self):
        return None

    def when_done(self, callback, always=False):
        return False


@contextlib.contextmanager
def no_more_threads():
    """No thread can be started meanwhile: this user has too many processes. There is no such limit for the superuser."""
    limits, users = resource.getrlimit(resource.RLIMIT_NPROC), os.getresuid()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, limits[1]))
    if users[1] == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if users[1] == 0:
            os.setresuid(*users)
        resource.setrlimit(resource.RLIMIT_NPROC, limits)


def without_a_thread(rank):
    if rank == 1:
        dist.barrier()
        return dist.send(torch.ones(1), 0)
    tensor = torch.zeros(1)
    work = dist.irecv(tensor, 1)
    with no_more_threads(), pytest.raises(phalanx_torch.Error, match="the thread that tells of the ends of operations could not be started"):
        work.get_future()
    # The group goes on, and so does the work.
    dist.barrier()
    assert work.get_future().wait()[0].item() == 1.0


def test_a_future_that_nobody_could_complete_is_an_error(ranks):
    ranks(2, without_a_thread)


def test_results_are_copied_back_before_anybody_learns_of_the_end():
    copied, begun = [], threading.Event()

    def finish():
        begun.set()
        time.sleep(0.5)
        copied.append(True)

    for learn in (Work.wait, Work.is_completed, Work.is_success, Work.result):
        copied.clear()
        begun.clear()
        work = Work(Ended(), [], finish)
        other = threading.Thread(target=work.wait)
        other.start()
        assert begun.wait(60)
        assert learn(work) is not False and copied == [True], learn
        other.join()
        assert copied == [True]


def test_a_failure_to_copy_back_is_told_every_time():
    def finish():
        raise KeyError("of the copy")

    work = Work(Ended(), [], finish)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the copy"):
            work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), KeyError)
    with pytest.raises(RuntimeError, match="of the copy"):
        work.get_future().wait()


def test_results_whose_copying_was_interrupted_are_no_results():
    def finish():
        raise KeyboardInterrupt

    work = Work(Ended(), [], finish, operation="all_reduce")
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    for learn in (Work.wait, Work.result):
        with pytest.raises(phalanx_torch.Error, match="all_reduce: KeyboardInterrupt has interrupted this rank") as caught:
            learn(work)
        assert caught.value.kind == "aborted"
    assert work.is_completed() and not work.is_success() and work.has_copied


def trained(rank, hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "BUILTIN":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook:
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.full((3, 8), float(rank + step))).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("hook", [None, "allreduce_hook", "fp16_compress_hook", "powerSGD"])
def test_ddp_and_its_hooks_keep_replicas_equal(ranks, hook):
    first, second = ranks(2, trained, hook)
    assert first == second


quantizes = pytest.mark.skipif(not SINCE_2_15, reason="this PyTorch's hook takes results in the form in which NCCL alone gives them")


def trained_in_buckets(rank, hook):
    """Several buckets of one length, whose hooks make calls in callbacks."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook, quantization_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001, static_graph="ZeRO" in hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if hook == "quantization":
        ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    elif "ZeRO" in hook:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.01, overlap_with_ddp=True)
        with_step = ddp_zero_hook.hook_with_zero_step if "step" in hook else ddp_zero_hook.hook_with_zero_step_interleaved
        ddp.register_comm_hook(None, with_step(default_hooks.allreduce_hook, ddp, optimizer))
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        inner = powerSGD_hook.powerSGD_hook
        ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(inner) if hook == "wrapped" else inner)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(5, 16, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("hook", ["powerSGD", "wrapped", pytest.param("quantization", marks=quantizes), "ZeRO", "step of ZeRO"])
def test_hooks_that_make_calls_in_callbacks_keep_replicas_equal(ranks, hook):
    first, second = ranks(2, trained_in_buckets, hook)
    assert first == second and all(map(math.isfinite, first))


def calls_in_callbacks(rank):
    store, passes = dist.group.WORLD.get_group_store(), [[]]

    def averaged(future):
        return dist.all_reduce(future.value()[0] / 4, async_op=True).get_future().wait()[0]

    def hook(_, bucket):
        passes[-1].append(bucket.index())
        if rank == 1:
            # So rank 0 has asked for the callback before there is anything to tell.
            store.wait([f"asked {len(passes)}"])
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(averaged)
        store.set(f"asked {len(passes)}", "")
        return future

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.00005)
    ddp.register_comm_hook(None, hook)
    # PyTorch divides the gradients as it is told from the second pass on.
    ddp(torch.ones(1, 4)).sum().backward()
    assert model[1].bias.grad.tolist() == [1.0] * 4
    passes.append([])
    with pytest.raises(RuntimeError, match="all_reduce: a communication hook .* in a callback"):
        ddp(torch.ones(1, 4)).sum().backward()
    assert "wait in the hook" in str(dist.group.WORLD.failure()) and passes == [[0], [0, 1]]


def test_calls_that_a_hook_makes_in_callbacks_are_refused_if_another_bucket_follows(ranks):
    ranks(2, calls_in_callbacks)


def calls_in_callbacks_of_two_models(rank):
    store, begun = dist.group.WORLD.get_group_store(), []

    def averaged(future):
        if rank == 0:
            # The hook of the other model has made its call, which this one may come before on another rank.
            store.wait(["both have called"])
        return dist.all_reduce(future.value()[0] / 2, async_op=True).get_future().wait()[0]

    def hook(_, bucket):
        assert bucket.is_last()
        begun.append(bucket.index())
        if rank == 1 and len(begun) == 1:
            # So rank 0 has asked for the callback before there is anything to tell.
            store.wait(["asked"])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        if rank == 0 and len(begun) == 2:
            store.set("both have called", "")
        future = work.get_future().then(averaged)
        store.set("asked", "")
        return future

    models = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="a communication hook .* in a callback"):
        sum(model(torch.ones(1, 4)).sum() for model in models).backward()
    assert "wait in the hook" in str(dist.group.WORLD.failure())


def test_calls_that_a_hook_makes_in_callbacks_are_refused_if_the_loss_goes_over_another_model(ranks):
    ranks(2, calls_in_callbacks_of_two_models)


class _Calling(torch.autograd.Function):
    """A layer that makes a call in backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(torch.zeros(20), group=ctx.group, async_op=True)
        if dist.get_rank() == 0:
            dist.group.WORLD.get_group_store().set("called", "")
        return gradient, None


def calls_in_callbacks_beside_a_layer(rank, has_own_group):
    store, group = dist.group.WORLD.get_group_store(), dist.new_group() if has_own_group else dist.group.WORLD

    def averaged(future):
        if rank == 0:
            # The layer has made its call, which this one may come before on another rank.
            store.wait(["called"])
        return dist.all_reduce(future.value()[0] / 4, async_op=True).get_future().wait()[0]

    def hook(_, bucket):
        if rank == 1:
            # So rank 0 has asked for the callback before there is anything to tell.
            store.wait(["asked"])
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(averaged)
        store.set("asked", "")
        return future

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp.register_comm_hook(None, hook)

    def step():
        ddp(_Calling.apply(torch.ones(1, 4, requires_grad=True), group)).sum().backward()
        dist.barrier()

    if has_own_group:
        step()
        assert ddp.module.bias.grad.tolist() == [1.0] * 4
        return
    with pytest.raises(RuntimeError, match="a communication hook .* in a callback"):
        step()


@pytest.mark.parametrize("has_own_group", [False, True])
def test_calls_that_a_hook_makes_in_callbacks_are_refused_beside_those_of_layers_in_the_same_group(ranks, has_own_group):
    ranks(2, calls_in_callbacks_beside_a_layer, has_own_group)


def calls_in_two_callbacks(rank):
    store = dist.group.WORLD.get_group_store()

    def again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    def hook(_, bucket):
        if rank == 1:
            # So rank 0 has asked for both callbacks before there is anything to tell.
            store.wait(["asked"])
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (bucket.buffer(), torch.ones_like(bucket.buffer()))]
        futures = [work.get_future().then(again) for work in works]
        store.set("asked", "")
        return torch.futures.collect_all(futures).then(lambda done: done.value()[0].value())

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="a communication hook .* in a callback"):
        ddp(torch.ones(1, 4)).sum().backward()
        dist.barrier()


def test_calls_that_a_hook_makes_in_two_callbacks_are_refused(ranks):
    ranks(2, calls_in_two_callbacks)


def calls_in_callbacks_of_two_models_in_turns(rank):
    def hook(_, bucket):
        def averaged(future):
            return dist.all_reduce(future.value()[0] / 4, async_op=True).get_future().wait()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(averaged)

    models = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(None, hook)
    for model in models * 2:
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        assert model.module.bias.grad.tolist() == [1.0] * 4
    assert dist.group.WORLD.failure() is None


def test_two_models_that_are_trained_in_turns_may_make_calls_in_callbacks_of_their_last_buckets(ranks):
    ranks(2, calls_in_callbacks_of_two_models_in_turns)


def alone_in_a_callback(rank):
    # As the thread is marked that runs such a callback.
    _ddp.calling_back[threading.get_ident()] = _ddp.Callback(-1, True)
    for is_asynchronous in (False, True):
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=is_asynchronous)
        assert work is None or work.wait()
    assert dist.group.WORLD.failure() is None


def test_calls_in_callbacks_have_an_order_where_one_rank_is_alone(ranks):
    ranks(1, alone_in_a_callback)


def calls_of_other_kinds(rank, call):
    _ddp.calling_back[threading.get_ident()] = _ddp.Callback(-1, True)
    with pytest.raises(phalanx_torch.Error, match="a communication hook .* in a callback"):
        call()
    assert "wait in the hook" in str(dist.group.WORLD.failure())


@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        lambda: dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=60)),
        lambda: phalanx_torch.all_gather_object([None] * 2, "object"),
        lambda: phalanx_torch.broadcast_object_list([None], 0),
    ],
    ids=["all_reduce of sparse tensors", "monitored_barrier", "all_gather_object", "broadcast_object_list"],
)
def test_calls_of_all_kinds_are_refused_in_callbacks(ranks, call):
    ranks(2, calls_of_other_kinds, call)


def test_a_builtin_hook_of_ddp_is_the_one_of_its_name(ranks):
    assert ranks(2, trained, "BUILTIN") == ranks(2, trained, "fp16_compress_hook")


def _join(rank, with_rpc):
    """Rank 1 has one batch more."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    ddp, gradients = torch.nn.parallel.DistributedDataParallel(model), []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            if with_rpc:
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [ddp(torch.full((1, 2), rank + 1.0)).sum()])
                    gradients.append(dist_autograd.get_gradients(context)[model.weight].tolist())
            else:
                ddp.zero_grad()
                ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
                gradients.append(model.weight.grad.tolist())
    return gradients


def _join_with_rpc(rank, url):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url))
    gradients = _join(rank, True)
    rpc.shutdown()
    return gradients


@pytest.mark.parametrize("with_rpc", [False, True])
def test_ddp_waits_in_backward_for_who_has_joined(ranks, tmp_path, with_rpc):
    # It has only the part in C++ of a work by then. Both have a batch first, and then rank 1 alone.
    gradients = ranks(2, _join_with_rpc, f"file://{tmp_path}/rpc") if with_rpc else ranks(2, _join, False)
    assert gradients == [[[[1.5, 1.5]]], [[[1.5, 1.5]], [[2.0, 2.0]]]]


def _calls_of_others(rank):
    """A hook of the program's own starts a call that the peer makes only after what this rank sends when backward has ended."""
    weight, works = torch.nn.Parameter(torch.ones(4)), []
    weight.register_post_accumulate_grad_hook(lambda parameter: works.append(dist.all_reduce(parameter.grad, async_op=True)))
    given = torch.ones(4)
    if rank == 0:
        (weight * 2).sum().backward()
        dist.send(given, 1)
    else:
        dist.recv(given, 0)
        (weight * given).sum().backward()
    for work in works:
        work.wait()
    return weight.grad.tolist()


def test_backward_does_not_wait_for_calls_that_are_not_of_ddp(ranks):
    assert ranks(2, _calls_of_others, timeout=20.0) == [[3.0] * 4] * 2
