#!/usr/bin/env python3
"""Runs PyTorch's own tests of groups that change in place over phalanx, and over gloo.

    run_reconfigure_tests.py PATH-OF-A-CHECKOUT-OF-PYTORCH [--only NAME]

A checkout of the version that is installed, 2.15 or later: PyTorch's packages do not have these tests. It ends with 1 if a test fails over
phalanx, also one that fails over gloo or that gloo skips.
"""

import argparse
import importlib.util
import os
import pathlib
import sys
import unittest

# The package that is installed, and not its sources, which lie beside this file without the native part.
sys.path = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]


class Name(str):
    """The backend's name. Tests that ask which it is expect that its groups fail after a time-out or an abort, as nccl2's do."""

    def __eq__(self, other):
        return str.__eq__(self, other) or other == "nccl2"

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def outcomes(module, backend, only):
    import torch

    made = module._make_fault_tolerance_test_class(backend, "cpu")

    class Tests(made):
        def _spawn_processes(self):
            # From this process, so that PyTorch is not imported again for each rank of each test.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    if backend == "phalanx":
        Tests.backend_name = Name(backend)
    names = [name for name in unittest.TestLoader().getTestCaseNames(Tests) if only in name]
    result = unittest.TestResult()
    unittest.TestSuite(Tests(name) for name in names).run(result)
    found = dict.fromkeys(names, ("pass", ""))
    found |= {test._testMethodName: ("skip", why) for test, why in result.skipped}
    for test, text in result.errors + result.failures:
        lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
        found[test._testMethodName] = ("FAIL", lines[-1])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    arguments = parser.parse_args()
    path = arguments.checkout / "test" / "distributed" / "test_c10d_fault_tolerance.py"
    if not path.is_file():
        sys.exit(f"{path} is missing: give the path of a checkout of github.com/pytorch/pytorch, of the version that is installed")
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120")
    import phalanx_torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("test_c10d_fault_tolerance", path)
    module = importlib.util.module_from_spec(spec)
    # The ranks find the class of tests by the module's name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    gloo, ours = (outcomes(module, backend, arguments.only) for backend in ("gloo", "phalanx"))
    for name, (outcome, why) in ours.items():
        print(f"{name}: gloo {gloo[name][0]}, phalanx {outcome} {why[:200]}")
    if not any(outcome == "pass" for outcome, _ in gloo.values()):
        sys.exit("no test passes on gloo")
    sys.exit(any(outcome != "pass" for outcome, _ in ours.values()))


if __name__ == "__main__":
    main()
