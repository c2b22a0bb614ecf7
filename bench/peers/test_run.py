"""What run.py does with peers that are missing, wrong or slow, and with a file that it goes on with.

    python -m unittest discover bench/peers
"""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import run
from peers import PEERS, Case, Missing, Peer, Start

SIZES = (4, 64)


def program(*statements: str) -> Start:
    return Start([sys.executable, "-c", "\n".join(("import json, sys, time", *statements))])


def row(size: int, wrong: int = 0, time_us: float = 1.5) -> str:
    return f"print(json.dumps({{'bytes': {size}, 'time_us': {time_us}, 'wrong': {wrong}}}), flush=True)"


def missing(_: Case) -> Start:
    raise Missing("install it")


FAKES = {
    "good": Peer("good", lambda _: program("print('a greeting')", *map(row, SIZES))),
    "gone": Peer("gone", missing),
    "false": Peer("false", lambda _: program(row(4), row(64, wrong=1))),
    "broken": Peer("broken", lambda _: program("sys.exit('no such device')")),
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

    def test_a_run_goes_on_where_the_file_ends(self) -> None:
        self.run_with("--rounds", "1", "--peers", "good")
        self.run_with("--rounds", "2", "--peers", "good", "--append")
        self.run_with("--rounds", "1", "--peers", "good", "--append", "--ranks", "4")
        self.assertEqual(self.rows()[("good", 4)], [1.5])  # of four ranks, which come last
        counts = [len(json.loads(line)["rounds_us"]) for line in self.file.read_text().splitlines()]
        self.assertEqual(counts, [2, 2, 1, 1])

    def test_times_of_another_machine_are_not_mixed_in(self) -> None:
        self.run_with("--rounds", "1", "--peers", "good")
        self.file.write_text(self.file.read_text().replace(run.machine(), "a faster one"))
        text, code = self.run_with("--rounds", "1", "--peers", "good", "--append")
        self.assertEqual(code, 1)
        self.assertIn("a faster one", text)


if __name__ == "__main__":
    unittest.main()
