"""The program as its users start it: `python3 -m unittest`."""

import subprocess
import sys
import unittest
from pathlib import Path

PROGRAM = Path(__file__).with_name("train.py")


class Train(unittest.TestCase):
    def test_two_ranks_learn(self) -> None:
        command = ["phalanx", "run", "--nproc-per-node", "2", "--", sys.executable, str(PROGRAM)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(line.split("loss ")[1]) for line in done.stdout.splitlines() if "loss " in line]
        self.assertLess(losses[-1], losses[0] / 10, done.stdout)


if __name__ == "__main__":
    unittest.main()
