"""What run.py does with peers that are missing, wrong or slow, and with a file that it goes on with.

    python -m unittest discover bench/peers
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import peers
import run
from peers import PEERS, Case, Missing, Peer, Start

SIZES = (4, 64)


def program(*statements: str) -> Start:
    return Start([sys.executable, "-c", "\n".join(("import json, sys, time", *statements))])


def row(size: int, wrong: int = 0, time_us: float = 1.5) -> str:
    return f"print(json.dumps({{'bytes': {size}, 'time_us': {time_us}, 'wrong': {wrong}}}), flush=True)"


def missing(_: Case) -> Start:
    raise Missing("install it")


# Does not end when told, holds the program's output, and says who it is.
CHILD = f"""
import subprocess
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
child = subprocess.Popen([{sys.executable!r}, "-c", sleep], stdout=subprocess.PIPE)
child.stdout.readline()
sys.stderr.write(f"child {{child.pid}}\\n")
"""

FAKES = {
    "good": Peer("good", lambda _: program("print('a greeting')", *map(row, SIZES))),
    "gone": Peer("gone", missing),
    "false": Peer("false", lambda _: program(row(4), row(64, wrong=1))),
    "broken": Peer("broken", lambda _: program("sys.exit('no such device')")),
    "silent": Peer("silent", lambda _: program("print('a greeting')")),
    "orphaned": Peer("orphaned", lambda _: program(row(4), CHILD, "sys.exit('a rank is gone')")),
    "slow": Peer("slow", lambda _: program(row(4), "time.sleep(60)")),
}


class Runs(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name) / "peers.json"
        for change in (mock.patch.dict(PEERS, FAKES, clear=True), mock.patch.object(run, "GRACE", 1.0)):
            change.start()
            self.addCleanup(change.stop)

    def run_with(self, *options: str) -> tuple[str, int]:
        """What is printed, and the exit code."""
        given = ["run.py", "-b", "4", "-e", "64", "-f", "16", "--json", str(self.file), *options]
        output = io.StringIO()
        with mock.patch.object(sys, "argv", given), contextlib.redirect_stdout(output):
            with contextlib.redirect_stderr(io.StringIO()):
                try:
                    run.main()
                except SystemExit as end:
                    return output.getvalue() + str(end.code), end.code if isinstance(end.code, int) else 1
        return output.getvalue(), 0

    def rows(self) -> dict[tuple[str, int], list[float]]:
        rows = map(json.loads, self.file.read_text().splitlines())
        return {(row["name"], row["bytes"]): row["rounds_us"] for row in rows}

    def test_a_missing_peer_is_named_and_the_others_are_timed(self) -> None:
        text, code = self.run_with("--rounds", "2", "--peers", "good,gone")
        self.assertEqual(code, 0)
        self.assertIn("gone: not timed: install it", text)
        self.assertEqual(self.rows(), {("good", 4): [1.5, 1.5], ("good", 64): [1.5, 1.5]})

    def test_wrong_elements_and_failures_end_the_run_with_1_and_leave_no_times(self) -> None:
        text, code = self.run_with("--rounds", "2", "--peers", "good,false,broken")
        self.assertEqual(code, 1)
        self.assertIn("false: failed: it computed wrong elements at 64 B", text)
        self.assertIn("no such device", text)
        self.assertEqual({name for name, _ in self.rows()}, {"good"})

    def test_a_slow_peer_is_ended_and_keeps_what_it_has(self) -> None:
        text, code = self.run_with("--rounds", "1", "--peers", "slow", "--limit", "1")
        self.assertEqual(code, 0)
        self.assertIn("slow: ended after 1 s", text)
        self.assertEqual(self.rows(), {("slow", 4): [1.5]})

    def test_one_that_prints_no_times_has_failed(self) -> None:
        text, code = self.run_with("--rounds", "1", "--peers", "silent")
        self.assertEqual(code, 1)
        self.assertIn("silent: failed: it has printed no times", text)

    def test_a_launcher_that_fails_while_a_child_lives_on_has_failed_and_the_child_is_ended(self) -> None:
        text, code = self.run_with("--rounds", "1", "--peers", "orphaned", "--limit", "1")
        self.assertEqual(code, 1)
        self.assertIn("orphaned: failed: it ended with 1", text)
        self.assertIn("a rank is gone", text)
        self.assertFalse(self.file.exists() and self.rows())
        child = Path("/proc") / re.search(r"child (\d+)", text)[1] / "stat"
        with contextlib.suppress(FileNotFoundError):
            self.assertIn(") Z ", child.read_text())

    def test_only_segments_of_nobody_are_removed(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(run, "SHARED", Path(folder)):
            names = ["open", "mapped", "left"]
            opened, mapped, left = (Path(folder) / f"mpich_shm_{name}" for name in names)
            make = [f"open('{path}', 'w').write('x')" for path in (opened, mapped, left)]
            hold = (
                f"import mmap; opened = open('{opened}'); file = open('{mapped}', 'r+'); "
                "map = mmap.mmap(file.fileno(), 1); file.close(); print('ready', flush=True); time.sleep(60)"
            )
            # In a session of its own: another job.
            other = f"import subprocess; other = subprocess.Popen([{sys.executable!r}, '-c', {'import time; ' + hold!r}], "
            other += "stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True); other.stdout.readline()"
            pid = Path(folder) / "pid"
            run.times(program(*make, other, f"open('{pid}', 'w').write(str(other.pid))", row(4)), 30.0)
            try:
                self.assertEqual([path.exists() for path in (opened, mapped, left)], [True, True, False])
            finally:
                os.kill(int(pid.read_text()), signal.SIGKILL)

    def test_a_run_goes_on_where_the_file_ends(self) -> None:
        self.run_with("--rounds", "1", "--peers", "good")
        self.run_with("--rounds", "2", "--peers", "good", "--append")
        self.run_with("--rounds", "1", "--peers", "good", "--append", "--ranks", "4")
        self.assertEqual(self.rows()[("good", 4)], [1.5])  # of four ranks, which come last
        counts = [len(json.loads(line)["rounds_us"]) for line in self.file.read_text().splitlines()]
        self.assertEqual(counts, [2, 2, 1, 1])

    def test_the_caption_has_the_rounds_of_each_size(self) -> None:
        self.run_with("--rounds", "2", "--peers", "good")
        small, large = map(json.loads, self.file.read_text().splitlines())
        large["rounds_us"].pop()
        self.file.write_text(f"{json.dumps(small)}\n{json.dumps(large)}\n")
        text, _ = self.run_with("--rounds", "1", "--peers", "good", "--append")
        self.assertIn("medians of interleaved rounds: 1 to 2\n", text)

    def test_times_of_another_machine_are_not_mixed_in(self) -> None:
        self.run_with("--rounds", "1", "--peers", "good")
        self.file.write_text(self.file.read_text().replace(run.machine(), "a faster one"))
        text, code = self.run_with("--rounds", "1", "--peers", "good", "--append")
        self.assertEqual(code, 1)
        self.assertIn("a faster one", text)


class Package(unittest.TestCase):
    def test_a_package_that_is_older_than_its_sources_is_not_timed(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(peers, "PHALANX_TORCH", Path(folder) / "python"):
            files = ["python/Cargo.lock", "python/src/lib.rs", "python/phalanx_torch/work.py", "crates/phalanx-core/src/group/work.rs"]
            others = ["crates/phalanx-burn/src/lib.rs", "python/phalanx_torch/__pycache__/work.pyc"]
            package = Path(folder) / "torch/lib/python3.11/site-packages/phalanx_torch"
            for number, name in enumerate([*files, *others, str(package / "_native.abi3.so")]):
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text('[[package]]\nname = "phalanx-core"\n' if number == 0 else "")
                os.utime(path, (1000, 1000))
            case = Case("all_reduce", 2, 4, 64, 16, Path(folder))
            peers.python_package(case, Path(folder) / "torch", "phalanx_torch")
            for name in others:
                os.utime(Path(folder) / name, (2000, 2000))
            peers.python_package(case, Path(folder) / "torch", "phalanx_torch")
            for name in files:
                with self.subTest(name):
                    os.utime(Path(folder) / name, (2000, 2000))
                    with self.assertRaisesRegex(Missing, f"phalanx_torch is older than .*{name}: .*setup.py .*--peers phalanx-torch"):
                        peers.python_package(case, Path(folder) / "torch", "phalanx_torch")
                    os.utime(Path(folder) / name, (1000, 1000))


if __name__ == "__main__":
    unittest.main()
