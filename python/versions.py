#!/usr/bin/env python3
"""Runs our tests with several versions of PyTorch and Python, all with one wheel of this package, and prints a table of what passed.

    python -m pip wheel --no-deps --wheel-dir target/wheels .
    python versions.py target/wheels/phalanx_torch-*.whl --python python3.10 python3.14 --torch 2.13 2.15
    python versions.py .. --torch-tests          PyTorch's own tests on two ranks too (run_torch_tests.py)
    python versions.py .. --only observed again  of ours only test_observed.py and test_again.py
    python versions.py .. --through "nice -n 5"  before each command

Each pair gets a virtual environment, which goes again. PyTorch comes from pip's index with the libraries of CUDA that it links to, which are
installed once for each version of it: some GB, or none where PIP_INDEX_URL names an index of PyTorch for CPUs.

Each file of tests is a process of its own. `tests/frameworks.py` and `tests/trainers.py` are left out, because they need libraries that
exist for few of the pairs; .ci/full python runs them with one. What is skipped is listed with its reason. The exit status is 0 if every
pair passes; one for which PyTorch has no wheel is in the table, and does not fail.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
# Of a file of tests, and of an installation and PyTorch's own tests: well above what they take on a busy machine.
LIMIT, LONG_LIMIT = 900.0, 3600.0
REQUIRED = "import importlib.metadata as of; print(*(name for name in of.requires('torch') if 'extra ==' not in name), sep='\\n')"
ITS = "import platform, torch; print(torch.__version__.split('+')[0], platform.python_version())"


class Failed(Exception):
    """What stops a pair, or fails it."""


def call(through, *command, log, limit=LIMIT):
    """Runs a command. Returns its status, None if it has not ended in time, and what it printed, which stands in the file `log` too."""
    with log.open("a+b") as file:
        file.write(f"$ {shlex.join(map(str, command))}\n".encode())
        file.flush()
        begin = file.tell()
        # In a session of its own, so that whatever it has started ends with it.
        process = subprocess.Popen([*through, *map(str, command)], stdout=file, stderr=file, cwd=log.parent, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(begin)
        return status, file.read().decode(errors="replace")


class Pair:
    """One version of PyTorch with one Python."""

    def __init__(self, arguments, python, torch):
        self.arguments, self.base, self.torch = arguments, python, torch
        self.through = shlex.split(arguments.through)
        self.folder = arguments.folder / f"torch-{torch}-{pathlib.Path(python).name}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.log = arguments.folder / f"{self.folder.name}.log"
        self.log.unlink(missing_ok=True)
        self.python = self.folder / "bin" / "python3"
        self.skipped = collections.Counter()

    def must(self, what, *command, limit=LIMIT):
        """Returns what a command prints, which has to succeed."""
        status, output = call(self.through, *command, log=self.log, limit=limit)
        if status != 0:
            last = (output.strip().splitlines() or ["no output"])[-1]
            raise Failed(f"{what}, status {status}: {last[:200]} ({self.log})")
        return output.strip()

    def pip(self, *what):
        return self.must("not installed", self.python, "-m", "pip", "install", "-q", *what, limit=LONG_LIMIT)

    def install(self):
        """Whether there is a PyTorch for this Python. If so, it is installed with our package and what the tests need."""
        self.must("no environment", self.base, "-m", "venv", self.folder)
        try:
            self.pip("--no-deps", "--only-binary", ":all:", f"torch=={self.torch}.*")
        except Failed as error:
            if "No matching distribution" in str(error):
                return False
            raise
        needed = self.must("no list of what PyTorch needs", self.python, "-c", REQUIRED).splitlines()
        # For GPUs; it compiles nothing here.
        needed = [name for name in needed if not name.startswith("triton")]
        cuda = [name for name in needed if name.startswith(("cuda-", "nvidia-"))]
        self.pip(*(name for name in needed if name not in cuda), "numpy", "pytest", "expecttest")
        self.pip("--no-deps", self.arguments.wheel)
        if cuda:
            libraries = self.arguments.folder / f"cuda-{self.torch}"
            if not libraries.exists():
                unfinished = libraries.with_suffix(".new")
                shutil.rmtree(unfinished, ignore_errors=True)
                self.pip("--target", unfinished, *cuda)
                unfinished.rename(libraries)
            place = self.must("no folder", self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
            link = pathlib.Path(place) / "nvidia"
            if not link.exists():
                link.symlink_to(libraries / "nvidia")
        self.versions = self.must("PyTorch does not load", self.python, "-c", ITS).splitlines()[-1].split()
        return True

    def our_tests(self):
        """Runs the files of tests. Returns the result in words."""
        counts, failed = collections.Counter(), []
        for file in sorted((HERE / "tests").glob("test_*.py")):
            if self.arguments.only is not None and file.stem.removeprefix("test_") not in self.arguments.only:
                continue
            report = self.folder / "report.xml"
            report.unlink(missing_ok=True)
            pytest = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
            before = len(failed)
            status, _ = call(self.through, *pytest, log=self.log)
            if not report.exists():
                failed.append(f"{file.name} ended with {status}")
                continue
            cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
            for case in cases:
                outcome = next((kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None), "passed")
                counts[outcome] += 1
                if outcome == "skipped":
                    self.skipped[f"{file.name}: {case.find('skipped').get('message')}"] += 1
                elif outcome != "passed":
                    failed.append(f"{file.name}::{case.get('name')}")
            # 5: no test is left of a file that skips itself.
            if len(failed) == before and not (status == 0 or status == 5 and cases):
                failed.append(f"{file.name} ended with {status}")
        if failed:
            raise Failed(f"{counts['passed']} pass, not {', '.join(failed)} ({self.log})")
        if not counts["passed"]:
            raise Failed("no test has run")
        return f"{counts['passed']} pass, {counts['skipped']} skipped"

    def torch_tests(self):
        """Runs PyTorch's tests over gloo and phalanx. Returns the result in words."""
        command = [self.python, HERE / "run_torch_tests.py", "--world", "2", "--log", self.log.with_name(f"{self.folder.name}.torch.log")]
        output = self.must("PyTorch's own tests", *command, limit=LONG_LIMIT)
        rows = re.findall(r"^(gloo|phalanx) +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
        return "; ".join(f"{name} {passed} pass, {failed} fail" for name, passed, failed, _ in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--python", nargs="+", required=True, help="interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.13", "2.14", "2.15"], help="minor versions")
    parser.add_argument("--torch-tests", action="store_true", help="PyTorch's own tests too")
    parser.add_argument("--only", nargs="*", help="names of our files of tests, without `test_`; with no name none of them is run")
    parser.add_argument("--through", default="", help="a command before each command, such as nice or taskset")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / "target" / "versions", help="for environments and logs")
    arguments = parser.parse_args()
    # As after Ctrl-C: what runs is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.wheel, arguments.folder = arguments.wheel.resolve(strict=True), arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = [("all of `tests`" if arguments.only is None else " ".join(arguments.only), Pair.our_tests)] if arguments.only != [] else []
    if arguments.torch_tests:
        runs.append(("`run_torch_tests.py`, 2 ranks", Pair.torch_tests))
    if not runs:
        parser.error("--only without a name, and no --torch-tests: nothing to run")
    rows, skipped = [], collections.defaultdict(list)

    def result(its, what, text):
        rows.append(f"| {' | '.join([*its, what, text])} |")
        print(rows[-1], flush=True)

    for torch in arguments.torch:
        for python in arguments.python:
            pair, its = Pair(arguments, python, torch), (torch, python)
            try:
                if not pair.install():
                    result(its, "nothing", "no wheel of PyTorch")
                    continue
                its = pair.versions
                for what, run in runs:
                    try:
                        result(its, what, run(pair))
                    except Failed as error:
                        result(its, what, f"FAILED: {error}")
            except Failed as error:
                result(its, "nothing", f"FAILED: {error}")
            finally:
                shutil.rmtree(pair.folder)
            for reason, count in pair.skipped.items():
                skipped[f"{reason} ({count})"].append("{} on {}".format(*its))
        shutil.rmtree(arguments.folder / f"cuda-{torch}", ignore_errors=True)
    print("\n| PyTorch | Python | run | result |\n|---|---|---|---|", *rows, "\nSkipped:", sep="\n")
    for reason, pairs in skipped.items():
        print(f"  {reason}: {', '.join(pairs)}")
    sys.exit(any("FAILED" in row for row in rows))


if __name__ == "__main__":
    main()
