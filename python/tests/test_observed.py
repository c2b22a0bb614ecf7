"""What PyTorch's tools see of a group's calls."""

import contextlib
import datetime
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import free_port, needs_dispatcher, processes
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode

import phalanx_torch
from phalanx_torch import observed


def _every_call(rank):
    """Makes each call once, checks what it gives, and returns their names in the profiler."""
    one, two = torch.ones(2), [torch.empty(2), torch.empty(2)]
    mine, both = torch.full((2,), float(rank)), torch.arange(4.0)
    dist.all_reduce(one)
    assert one.tolist() == [2, 2]
    dist.broadcast(mine, 1)
    assert mine.tolist() == [1, 1]
    dist.reduce(torch.ones(2), 0)
    dist.all_gather(two, mine)
    assert [each.tolist() for each in two] == [[1, 1], [1, 1]]
    dist.all_gather_into_tensor(torch.empty(4), mine)
    dist.gather(mine, two if rank == 0 else None, 0)
    dist.scatter(torch.empty(2), two if rank == 0 else None, 0)
    dist.reduce_scatter(torch.empty(2), two)
    dist.reduce_scatter_tensor(mine, both)
    assert mine.tolist() == [[0, 2], [4, 6]][rank]
    dist.all_to_all(two, [mine, mine])
    assert [each.tolist() for each in two] == [[0, 2], [4, 6]]
    dist.all_to_all_single(torch.empty(4), both)
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(mine, 0)
        assert mine.tolist() == [0, 2]
    if rank == 0:
        assert dist.recv(mine) == 1 and mine.tolist() == [5, 5]
    else:
        dist.send(torch.full((2,), 5.0), 0)
    dist.barrier()
    return [
        "all_reduce", "broadcast", "reduce", "all_gather", "_allgather_base", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
        "all_to_all", "all_to_all", *(["send", "recvAnySource"] if rank == 0 else ["recv", "send"]), "barrier",
    ]  # fmt: skip


def _profiled(rank):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        names = _every_call(rank)
        work = dist.all_reduce(torch.ones(3, 5), async_op=True)
        work.wait()
        dist.barrier()
    events = [event for event in profiled.events() if event.name.startswith("phalanx:")]
    assert [event.name for event in events] == [f"phalanx:{name}" for name in [*names, "all_reduce", "barrier"]]
    assert events[0].input_shapes == [[2]] and not events[0].is_async
    assert events[-2].input_shapes == [[3, 5]]
    # PyTorch's operations are there, too, as over gloo.
    operations = [event.name for event in profiled.events() if event.name.startswith("c10d::")]
    assert not observed.can_dispatch() or operations.count("c10d::allreduce_") == 2, operations


def test_the_profiler_sees_every_call(ranks):
    ranks(2, _profiled)


def _named_by_the_program(rank):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with dist.record_comm("the loss"):
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2), async_op=True).wait()
        dist.all_reduce(torch.ones(2))
    names = [event.name for event in profiled.events()]
    assert names.count("the loss") >= 2 and names.count("phalanx:all_reduce") == 1, names


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="this PyTorch has no record_comm")
def test_the_profiler_shows_the_name_that_a_program_has_given_to_its_calls(ranks):
    ranks(2, _named_by_the_program)


def _profiled_while_it_runs(rank):
    from torch.profiler import ProfilerActivity, profile

    store = dist.group.WORLD.get_group_store()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        # Rank 1 comes later, however long a profiler takes to begin.
        if rank == 1:
            store.wait(["called"])
            time.sleep(0.3)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        if rank == 0:
            store.set("called", "")
        between = torch.ones(5) + 1
        work.wait()
        after = between * 2
        # Of many, none may lack its end, though the last one ends just before the profiler.
        for _ in range(50):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
    assert after.tolist() == [4] * 5
    events = [event for event in profiled.events() if event.name == "phalanx:all_reduce"]
    assert len(events) == 51
    if rank == 0:
        assert events[0].is_async and 100_000 < events[0].time_range.elapsed_us() < 30_000_000
    end = max(event.time_range.end for event in profiled.events())
    # An event without an end lasts as long as the profile, or has none.
    assert all(0 < event.time_range.elapsed_us() < end - events[0].time_range.start for event in events[1:])
    for event in profiled.events():
        if event.name in ("aten::add", "aten::mul"):
            assert event.cpu_parent is None, (event.name, event.cpu_parent.name)
    # One that ends after the profiler does no harm.
    with profile(activities=[ProfilerActivity.CPU]):
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 1:
        time.sleep(0.1)
        work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()


def test_the_profiler_sees_when_a_call_has_ended_for_which_nobody_waits(ranks):
    ranks(2, _profiled_while_it_runs)


def _profiled_when_it_has_ended(rank):
    from torch.profiler import ProfilerActivity, profile

    end, has_ended = observed._end, []

    def end_later(record, work):
        deadline = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        has_ended.append(work.is_completed())
        end(record, work)

    observed._end = end_later
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(10):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.empty(2))
    events = [event for event in profiled.events() if event.name.startswith("phalanx:")]
    assert has_ended == [True] * 11 and len(events) == 11
    assert [event.is_async for event in events] == [True] * 11


def test_an_event_is_of_one_kind_however_soon_the_call_has_ended(ranks):
    ranks(2, _profiled_when_it_has_ended)


def _traced(rank, folder, backend, is_profiled):
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

    path = f"{folder}/{backend}-{rank}.json"
    # Before there is a group.
    observer = ExecutionTraceObserver().register_callback(path)
    if not is_profiled:
        observer.start()
    dist.init_process_group(
        backend, f"file://{folder}/{backend}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) if is_profiled else contextlib.nullcontext():
        _every_call(rank)
        dist.all_reduce(torch.ones(3, 5), async_op=True).wait()
        dist.all_gather_object([None, None], "text")
        if backend == "phalanx":
            phalanx_torch.all_gather_object([None, None], "text")
        dist.barrier()
    observer.stop()
    observer.unregister_callback()
    # Nobody watches any more.
    assert backend == "gloo" or not observed.is_watched(dist.group.WORLD)
    dist.destroy_process_group()
    with open(path) as file:
        nodes = json.load(file)["nodes"]
    nodes.sort(key=lambda node: next(attribute["value"] for attribute in node["attrs"] if attribute["name"] == "rf_id"))
    names = [node["name"].partition(":")[2] for node in nodes if node["name"].startswith(f"{backend}:")]

    def plain(values):
        """What is no number of a tensor."""
        return [value for value in values if isinstance(value, (bool, int, str))]

    calls = [
        (node["name"], *(node[side][what] for side in ("inputs", "outputs") for what in ("shapes", "types", "strides")), plain(node["inputs"]["values"]))
        for node in nodes
        if node["name"].startswith("c10d::")
    ]
    return names, calls


@needs_dispatcher
@pytest.mark.parametrize("is_profiled", [False, True])
def test_execution_traces_have_the_nodes_of_gloo(tmp_path, is_profiled):
    gloo = processes(2, _traced, tmp_path, "gloo", is_profiled)
    ours = processes(2, _traced, tmp_path, "phalanx", is_profiled)
    for (_, theirs), (names, calls) in zip(gloo, ours):
        # The package's own function for objects, before the last barrier.
        own = calls.pop(-2)
        assert own[0] == "c10d::_allgather_base_" and own[1][:2] == [[0], [len(pickle.dumps("text"))]]
        assert own[4][0] == [2 * len(pickle.dumps("text"))]
        assert calls == theirs
        assert names.count("all_gather_object") == 1 and names.count("all_reduce") == 2 and len(names) == len(calls) + 1


def _flown(rank, is_asked_for):
    dist.all_reduce(torch.ones(3, 5))
    dist.broadcast(torch.ones(4), 1)
    phalanx_torch.all_gather_object([None, None], "text")
    pair = dist.new_group([0, 1], group_desc="both")
    dist.all_reduce(torch.ones(2), group=pair)
    own = dist.split_group(split_ranks=[[0], [1]], group_desc="alone")
    dist.all_reduce(torch.ones(1), group=own)
    if rank == 0:
        dist.send(torch.ones(7), 1)
    else:
        dist.recv(torch.ones(7), 0)
    dist.barrier()
    assert observed.is_watched(dist.group.WORLD) == is_asked_for
    entries = json.loads(c10d._dump_fr_trace_json(backend="phalanx")).get("entries", [])
    expected = [
        ("default_pg", "phalanx:all_reduce", [[3, 5]]),
        ("default_pg", "phalanx:broadcast", [[4]]),
        ("default_pg", "phalanx:_all_gather_base", [[len(pickle.dumps("text"))]]),
        ("both", "phalanx:all_reduce", [[2]]),
        ("alone", "phalanx:all_reduce", [[1]]),
        ("default_pg", "phalanx:send 0->1" if rank == 0 else "phalanx:recv 1<-0", [[7]] if rank == 0 else []),
        ("default_pg", "phalanx:barrier", []),
    ]
    found = [(entry["process_group"][1], entry["profiling_name"], entry["input_sizes"]) for entry in entries]
    assert found == (expected if is_asked_for else []), found
    assert all(entry["retired"] for entry in entries)


@needs_dispatcher
@pytest.mark.parametrize("size", ["100", "0", None])
def test_the_flight_recorder_sees_the_calls_if_it_is_asked_for(ranks, monkeypatch, size):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    # That of NCCL's groups alone.
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "100")
    if size is not None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    ranks(2, _flown, size == "100")


def _in_backward(rank):
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        ddp(torch.ones(1, 3)).sum().backward()
    assert sum(event.name == "phalanx:all_reduce" for event in profiled.events()) == 1
    return [parameter.grad.tolist() for parameter in ddp.parameters()]


def test_the_profiler_sees_what_ddp_sends(ranks):
    first, second = ranks(2, _in_backward)
    assert first == second


def _counted(rank):
    ops = torch.ops.c10d
    with CommDebugMode() as mode:
        names = _every_call(rank)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))(torch.ones(1, 3)).sum().backward()
    counts = mode.get_comm_counts()
    # DDP's one bucket is one more, and so is what it compares and broadcasts at first.
    assert counts[ops.allreduce_] == 2 and counts[ops.broadcast_] >= 2, counts
    for operation in ("_allgather_base_", "reduce_", "gather_", "scatter_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_"):
        if getattr(ops, operation) in type(mode)().comm_registry or counts.get(getattr(ops, operation)):
            assert counts[getattr(ops, operation)] == 1, (operation, counts)
    assert len(names) == 14
    # Nobody watches any more.
    before = dict(counts)
    dist.all_reduce(torch.ones(1))
    assert dict(mode.get_comm_counts()) == before


@needs_dispatcher
def test_comm_debug_mode_counts_calls(ranks):
    ranks(2, _counted)


def _seen_by_a_mode(rank):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.seen.append(str(function))
            return function(*arguments, **(options or {}))

    with Mode() as outer, Mode():
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert type(work).__module__ == "phalanx_torch.work"
        work.wait()
        assert work.is_completed()
        _every_call(rank)
        # Our own errors, as they are.
        with pytest.raises(ValueError, match="all_to_all_single: the input split sizes"):
            dist.all_to_all_single(torch.empty(4), torch.empty(4), [2, 2], [1, 1])
    assert outer.seen.count("c10d.allreduce_.default") == 4
    assert outer.seen.count("c10d.recv_any_source_.default") == (2 if rank == 0 else 0)


@needs_dispatcher
def test_dispatch_modes_see_each_call_and_leave_works_and_errors_as_they_are(ranks):
    ranks(2, _seen_by_a_mode)


def _marked_while_seen(rank):
    from test_collectives import marked
    from torch.profiler import ProfilerActivity, profile

    with CommDebugMode():
        marked(rank, 2)
    with profile(activities=[ProfilerActivity.CPU]):
        marked(rank, 2)


def test_results_come_into_tensors_that_are_conjugated_when_they_are_read_also_while_a_tool_watches(ranks):
    ranks(2, _marked_while_seen)


def _without_memory(rank, how):
    from test_collectives import wrappers

    if how == "hook":
        dist.group.WORLD.register_pre_hook(1, lambda given: None)
    with CommDebugMode() if how == "mode" else contextlib.nullcontext():
        assert observed.is_watched(dist.group.WORLD)
        wrappers(rank, 2)
        with pytest.raises(ValueError, match=r"of layout torch.sparse_csr; to_dense\(\) makes one"):
            dist.all_reduce(torch.eye(2).to_sparse_csr())
        with pytest.raises(ValueError, match="only all_reduce takes them"):
            dist.broadcast(torch.eye(2).to_sparse(), 0)
        total = torch.eye(2).to_sparse()
        dist.all_reduce(total)
        assert torch.equal(total.to_dense(), 2 * torch.eye(2))


@needs_dispatcher
@pytest.mark.parametrize("how", ["mode", "hook", "recorder"])
def test_tensors_without_memory_are_refused_by_name_also_while_a_tool_watches(ranks, monkeypatch, how):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    if how == "recorder":
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    ranks(2, _without_memory, how)


def _recorded_frameworks(rank):
    import frameworks

    for name in ("FSDP2 (fully_shard)", "DTensor", "tensor parallel", "functional collectives"):
        frameworks.CASES[name](rank)
    assert observed.is_watched(dist.group.WORLD)
    entries = json.loads(c10d._dump_fr_trace_json(backend="phalanx"))["entries"]
    assert {"phalanx:_all_gather_base", "phalanx:_reduce_scatter_base", "phalanx:all_reduce"} <= {entry["profiling_name"] for entry in entries}


@needs_dispatcher
def test_what_is_built_on_functional_collectives_runs_with_the_flight_recorder(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    ranks(2, _recorded_frameworks)


def _fails_under_a_mode(rank):
    with CommDebugMode(), pytest.raises(phalanx_torch.Error) as caught:
        if rank == 0:
            dist.all_reduce(torch.zeros(3))
            dist.barrier()
        else:
            dist.broadcast(torch.zeros(4), 0)
            dist.barrier()
    assert caught.value.kind == "mismatch"


def test_failures_have_their_kind_under_a_mode(ranks):
    ranks(2, _fails_under_a_mode)


def _hooked(rank):
    group, called = dist.group.WORLD, []
    group.register_pre_hook(1, lambda given: called.append(("before", given.name.name, given.root)))
    group.register_post_hook(2, lambda given: called.append(("after", given.name.name, given.work is not None)))
    dist.broadcast(torch.ones(2), 1)
    assert called == [("before", "BROADCAST", 1), ("after", "BROADCAST", True)]
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.barrier()
    assert len(called) == 2
    # Calls take the short way again.
    assert not observed.is_watched(group)
    group.register_pre_hook(3, called.append)
    group.register_post_hook(3, called.append)
    group.unregister_pre_hook(3)
    assert observed.is_watched(group)
    group.unregister_post_hook(3)
    assert not observed.is_watched(group)


@needs_dispatcher
def test_hooks_before_and_after_a_call(ranks):
    ranks(2, _hooked)


def _refuses_hooks(rank):
    group = dist.group.WORLD
    for register in (group.register_pre_hook, group.register_post_hook):
        with pytest.raises(phalanx_torch.Error, match="^phalanx: register_(pre|post)_hook: PyTorch .* would not call the hooks"):
            register(1, print)
    assert not observed.is_watched(group)
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    with pytest.warns(RuntimeWarning, match="TORCH_DIST_NAN_CHECK=1 checks nothing here: PyTorch"):
        assert not observed.is_watched(type(group)(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60)))


def test_hooks_that_would_not_be_called_are_refused(ranks, monkeypatch):
    monkeypatch.setattr(observed, "can_dispatch", lambda: False)
    ranks(1, _refuses_hooks)


def _leaves_nothing(rank):
    group = dist.group.WORLD
    assert group._watched_backend() is not None
    tensor = torch.ones(2)
    # As PyTorch's C++ calls the part of a group that is for one device.
    torch.ops.c10d.allreduce_([tensor], group.boxed(), dist.ReduceOp(dist.ReduceOp.SUM).boxed(), None, True, -1)[1].wait()
    assert tensor.tolist() == [2, 2]
    with pytest.raises(ValueError, match="all_to_all_single: the input split sizes"):
        torch.ops.c10d.alltoall_base_(torch.empty(4), torch.empty(4), group.boxed(), [2, 2], [1, 1], True, -1)
    with CommDebugMode():
        dist.all_reduce(tensor)
    place = observed._place
    assert (place.group, place.options, place.work, place.error) == (None, None, None, None)


@needs_dispatcher
def test_a_call_leaves_nothing_behind(ranks):
    ranks(2, _leaves_nothing)


def _limited(rank):
    group, limits = dist.group.WORLD, []
    gather = group.allgather

    def spied(outputs, inputs, options):
        limits.append(options.timeout.total_seconds())
        return gather(outputs, inputs, options)

    group.allgather = spied
    options = c10d.AllgatherOptions()
    options.timeout = datetime.timedelta(seconds=17)
    outputs = [[torch.empty(2)], [torch.empty(2)]]
    with CommDebugMode():
        group.allgather_coalesced(outputs, [torch.full((2,), float(rank))], options).wait()
    assert limits == [17.0]
    assert [tensor.tolist() for tensor, in outputs] == [[0, 0], [1, 1]]


@needs_dispatcher
def test_a_watched_call_has_its_own_limit(ranks):
    ranks(2, _limited)


def _completed(rank):
    group, told, here = dist.group.WORLD, [], threading.Event()

    def hook(info):
        told.append((info.op_type.name, info.seq))
        assert info.active_duration.total_seconds() >= 0 and info.time_finished >= info.time_started
        if len(told) == 2:
            here.set()

    group._register_on_completion_hook(hook)
    assert group._has_hooks()
    with pytest.raises(phalanx_torch.Error, match="has a hook on completion already"):
        group._register_on_completion_hook(hook)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    assert here.wait(60.0)
    # Of what nobody waits for, before the group is left.
    dist.broadcast(torch.ones(1), 0, async_op=True)
    dist.destroy_process_group()
    assert [name for name, _ in told] == ["ALLREDUCE", "ALLREDUCE", "BROADCAST"]
    first = told[0][1]
    assert [number for _, number in told] == [first, first + 1, first + 2]


def test_hooks_on_completion(ranks):
    ranks(2, _completed)


def _finds_nan(rank):
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))


@needs_dispatcher
def test_the_check_for_nan(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    ranks(2, _finds_nan)


def test_a_group_that_was_watched_is_let_go(tmp_path):
    # In a process of its own, whose only group it is.
    program = f"""
        import gc, weakref
        import torch, torch.distributed as dist
        # Its functions have the world's group for default, if they are defined when there is one.
        import torch.distributed.nn
        from torch.profiler import profile
        dist.init_process_group("phalanx", init_method="tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        with profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            dist.all_reduce(torch.ones(1))
        reference = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        assert reference() is None
        print("gone")
    """
    done = subprocess.run(
        [sys.executable, "-c", "import phalanx_torch\n" + textwrap.dedent(program)], capture_output=True, text=True, timeout=90, env=dict(os.environ)
    )
    assert done.stdout == "gone\n", done.stderr
