#!/usr/bin/env python3
"""Runs PyTorch's own tests of a backend, as they are in its wheel, on phalanx and on gloo, and prints where they differ.

    python run_torch_tests.py                       worlds of 2, 3 and 4 ranks
    python run_torch_tests.py --world 2 --only send_recv

The tests are ``torch.testing._internal.distributed.distributed_test.DistributedTest``. Which of them apply is decided as for
gloo, and in a second pass as for MPI, for what gloo skips as it has no such collective. They run without a GPU. The exit
status is 0 if phalanx passes every test that gloo passes, and gloo passes any.

Needs, beside PyTorch and this package, ``expecttest`` and ``numpy``.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

# The package that is installed, and not its sources, which lie beside this file without the native part.
sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]

# Differences that are meant, with the reason; docs/python-package.md says more.
MEANT = {}
if tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2]) < (2, 14):
    MEANT |= dict.fromkeys(
        ("test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"),
        "before 2.14 PyTorch itself refuses dist.monitored_barrier to all backends but gloo",
    )


def check_profiler(module):
    """Lets the tests check what the profiler sees of phalanx, as they do for gloo."""
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(module, name).append("phalanx")
    events_of, base = module.get_profiling_event, module.DistributedTest._DistTestBase
    call = base.call_dist_op

    def events_of_waiting(*arguments, **options):
        found = events_of(*arguments, **options)
        for event in found:
            event.is_async = True
        return found

    def call_and_check(test, title, is_async, *arguments, **options):
        # Over gloo the event of each call ends on another thread. Here that of a collective that waits does not.
        module.get_profiling_event = events_of if is_async else events_of_waiting
        try:
            call(test, title, is_async, *arguments, **options)
        finally:
            module.get_profiling_event = events_of

    base.call_dist_op = call_and_check


def child(backend, rules, world, only, result):
    """Runs the tests on one backend, and writes a dictionary from tests to outcomes into the file `result`."""
    os.environ.update(
        BACKEND=rules,
        WORLD_SIZE=str(world),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120",
    )
    os.environ.pop("INIT_METHOD", None)
    import torch
    from torch.testing._internal.distributed import distributed_test as module

    if backend == "phalanx":
        import phalanx_torch  # noqa: F401

    class Name(str):
        """The backend's name; for tests that ask which it is, gloo's."""

        def __eq__(self, other):
            return str.__eq__(self, other) or other == rules

        def __ne__(self, other):
            return not self == other

        __hash__ = str.__hash__

    # What applies has been decided; from here on this is the backend.
    module.BACKEND = Name(backend)
    if backend == "phalanx":
        check_profiler(module)
    os.environ["BACKEND"] = backend

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # From this process, so that PyTorch is not imported again for each rank of each test.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    outcomes = {}

    class Result(unittest.TestResult):
        def startTest(self, test):
            super().startTest(test)
            self.begin = time.monotonic()
            outcomes[test._testMethodName] = "pass"

        def _note(self, test, outcome, why):
            outcomes[test._testMethodName] = outcome
            lines = str(why).strip().splitlines()
            last = [line for line in lines if "Error" in line][-1:] or lines[-1:]
            if outcome == "FAIL":
                print(f"--- {test._testMethodName}\n{why}", flush=True)
            details[test._testMethodName] = last[0] if last else ""

        def stopTest(self, test):
            super().stopTest(test)
            seconds = time.monotonic() - self.begin
            print(f"{backend} {world} {test._testMethodName}: {outcomes[test._testMethodName]} {seconds:.1f} s", flush=True)

        def addSkip(self, test, reason):
            self._note(test, "skip", reason)

        def addError(self, test, error):
            self._note(test, "FAIL", self._exc_info_to_string(error, test))

        addFailure = addError

        def addSubTest(self, test, part, error):
            if error is not None:
                self.addError(test, error)

    details = {}
    names = [name for name in unittest.TestLoader().getTestCaseNames(Tests) if name in only or not only]
    names = [name for name in names if not any(part in name for part in ("cuda", "nccl", "gpu"))]
    unittest.TestSuite(Tests(name) for name in names).run(Result())
    with open(result, "w") as file:
        json.dump({"outcomes": outcomes, "details": details}, file)


def run(backend, rules, world, only, log):
    """Runs `child` in a process of its own."""
    if only == []:
        return {}, {}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", backend, rules, str(world), result.name, *(only or [])]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TEMP_DIR": folder})
        text = result.read()
    if not text:
        raise SystemExit(f"the tests of {backend} with {world} ranks ended early: see {log.name}")
    found = json.loads(text)
    return found["outcomes"], found["details"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 3, 4], help="world sizes")
    parser.add_argument("--only", help="tests whose name contains this")
    log = pathlib.Path(__file__).resolve().parent / "target" / "torch-tests.log"
    parser.add_argument("--log", type=pathlib.Path, default=log, help="what the tests print [default: %(default)s]")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    with open(arguments.log, "w") as log:
        for world in arguments.world:
            only = None
            if arguments.only:
                os.environ.setdefault("BACKEND", "gloo")
                os.environ.setdefault("WORLD_SIZE", str(world))
                from torch.testing._internal.distributed import distributed_test as module

                tests = dir(module.DistributedTest._DistTestBase)
                only = [name for name in tests if name.startswith("test") and arguments.only in name]
            gloo, gloo_details = run("gloo", "gloo", world, only, log)
            ours, details = run("phalanx", "gloo", world, only, log)
            more = [name for name, outcome in gloo.items() if outcome == "skip" and "MPI" in gloo_details.get(name, "")]
            as_mpi, mpi_details = run("phalanx", "mpi", world, more, log)
            ours.update(as_mpi)
            details.update(mpi_details)
            failed |= report(world, gloo, ours, gloo_details, details)
            # Tests that do not run show nothing. A few that are chosen may be such that gloo skips them all.
            if "pass" not in [*gloo.values(), *(ours.values() if only else [])]:
                print(f"no test passes on gloo with {world} ranks: see {log.name}")
                failed = True
    sys.exit(failed)


def report(world, gloo, ours, gloo_details, details):
    """Prints the table of one world size. Returns whether phalanx fails what gloo passes, or what it alone runs."""
    count = lambda outcomes, outcome: sum(value == outcome for value in outcomes.values())  # noqa: E731
    print(f"\n{world} ranks    {'pass':>6} {'fail':>6} {'skip':>6}")
    for name, outcomes in (("gloo", gloo), ("phalanx", ours)):
        print(f"{name:10} {count(outcomes, 'pass'):6} {count(outcomes, 'FAIL'):6} {count(outcomes, 'skip'):6}")
    differences = [name for name in sorted(gloo) if gloo[name] != ours.get(name)]
    failed = False
    for name in differences:
        meant = MEANT.get(name)
        why = meant or (details.get(name) if ours.get(name) == "FAIL" else gloo_details.get(name)) or ""
        print(f"  {name}: gloo {gloo[name]}, phalanx {ours.get(name, 'absent')}: {why[:150]}")
        failed |= not meant and (gloo[name] == "pass" or ours.get(name) == "FAIL")
    print(flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), set(sys.argv[6:]), sys.argv[5])
    else:
        main()
