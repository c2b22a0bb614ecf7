#!/usr/bin/env python3
"""Runs Horovod's own tests for torch over `phalanx_torch.horovod`, and says what passes, what fails, and why.

    run_horovod_tests.py PATH-OF-A-CHECKOUT-OF-HOROVOD-0.28 [--ranks 2 4] [--only NAME] [--limit SECONDS]

Each test has processes of its own, forked from one that has imported PyTorch. What it needs beside PyTorch, NumPy and pytest: packaging
and cloudpickle. It ends with 1 if a test fails that `EXPECTED` does not name, if one passes that it names, and if none passes.
"""

import argparse
import importlib.util
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
import types
import unittest
import unittest.mock

# The package that is installed, and not its sources, which lie beside this file without the native part.
HERE = pathlib.Path(__file__).resolve().parent
sys.path = [place for place in sys.path if place != str(HERE)] + [str(HERE / "tests")]

from ports import free_port

FORK = multiprocessing.get_context("fork")

# Tests that fail, on how many ranks (None: any number), and why.
_JOINED = "it wants an error; here a rank that has joined takes part in it"
EXPECTED = {
    "test_horovod_join_allgather": (None, _JOINED),
    # On more ranks it names several roots, which is an error.
    "test_horovod_join_broadcast": (2, _JOINED),
    "test_broadcast_state_no_grad": (None, "it wants a gradient of zeros from broadcast_optimizer_state, which makes none here"),
}


def _load(checkout):
    """The class of tests."""
    import torch

    import phalanx_torch.horovod as hvd

    path = checkout / "test" / "parallel" / "test_torch.py"
    if not path.is_file():
        sys.exit(f"{path} is missing: give the path of a checkout of github.com/horovod/horovod, tag v0.28.1")
    hvd.install()
    # What the tests import and do not need here: a package for mocks, which Python has, and threads of `horovod.run`.
    threads = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None
    for name in ("horovod.runner", "horovod.runner.util"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[threads.__name__] = threads
    sys.modules.setdefault("mock", unittest.mock)
    # Later than these tests, which give every optimizer of PyTorch's a bias: this one refuses them.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "not for these tests"
    spec = importlib.util.spec_from_file_location("test_torch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.TorchTests


def _rank(tests, name, rank, ranks, port, pipe):
    import torch

    torch.set_num_threads(1)
    place = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    os.environ.update({f"HOROVOD_{key}": str(value) for key, value in place.items()})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    result = unittest.TestResult()
    try:
        tests(name).run(result)
        texts = [text for _, text in result.failures + result.errors]
        skips = [reason for _, reason in result.skipped]
        pipe.send(("failed", texts[0]) if texts else ("skipped", skips[0]) if skips else ("passed", ""))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    pipe.close()


def _run(tests, name, ranks, limit):
    """How a test ended, over all ranks, and why."""
    port, started = free_port(), []
    for rank in range(ranks):
        mine, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(tests, name, rank, ranks, port, theirs))
        process.start()
        theirs.close()
        started.append((process, mine))
    deadline, ends = time.monotonic() + limit, []
    for rank, (_, pipe) in enumerate(started):
        end = ("failed", f"rank {rank} has not ended within {limit} s")
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                end = pipe.recv()
        except EOFError:
            end = ("failed", f"rank {rank} has died")
        ends.append(end)
    for process, _ in started:
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()
    for kind in ("failed", "skipped"):
        reasons = [reason for one, reason in ends if one == kind]
        if reasons:
            # The first cause, and not what the other ranks heard of it.
            return kind, min(reasons, key=lambda reason: "Error: rank " in reason)
    return "passed", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=120.0)
    arguments = parser.parse_args()
    tests = _load(arguments.checkout)
    names = [name for name in unittest.TestLoader().getTestCaseNames(tests) if arguments.only in name]
    if not names:
        sys.exit(f"no test has {arguments.only!r} in its name")
    unexpected = []
    for ranks in arguments.ranks:
        counts = {"passed": 0, "failed": 0, "skipped": 0}
        print(f"| test, on {ranks} ranks | | why |\n|---|---|---|", flush=True)
        for name in names:
            # Marks of pytest mean nothing to unittest.
            marks = [mark for mark in getattr(getattr(tests, name), "pytestmark", []) if mark.name == "skip"]
            if marks:
                kind, reason = "skipped", f"Horovod skips it: {marks[0].kwargs.get('reason', '')}"
            else:
                kind, reason = _run(tests, name, ranks, arguments.limit)
            counts[kind] += 1
            why = reason.strip().splitlines()[-1] if reason.strip() else ""
            where, known = EXPECTED.get(name, (None, None))
            known = known if where in (None, ranks) else None
            if kind == "failed" and known:
                why = f"{known} ({why})"
            if (kind == "failed") != (known is not None) and kind != "skipped":
                unexpected.append(f"{name} on {ranks} ranks: {kind}")
                if kind == "failed":
                    print(reason, file=sys.stderr)
            print(f"| {name} | {kind} | {why} |", flush=True)
        print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", on {ranks} ranks\n", flush=True)
        # Tests that do not run show nothing.
        if not counts["passed"]:
            unexpected.append(f"no test passes on {ranks} ranks")
    if unexpected:
        sys.exit("not as expected: " + "; ".join(unexpected))


if __name__ == "__main__":
    main()
