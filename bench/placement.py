#!/usr/bin/env python3
"""How far apart this machine's two processors are, again and again, and what that does to a message and to a collective.

    cargo build --release -p phalanx-bench
    bench/placement.py target/release

The processors of a virtual machine may move: for a while they are neighbours, and then they are not. Each round measures how long a cache line
takes from one to the other (bench/hop.c), then `send_recv` of 64 KiB and `all_gather` of 1 MiB. The table has the rounds by that time, the
shortest first. A comparison of two programs is fair only if the processors were at the same places for both.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Nothing takes so many seconds, unless it hangs.
LIMIT = 60
COLLECTIVES = (("send_recv", "64K", "2000"), ("all_gather", "1M", "500"))


def microseconds(folder: Path, collective: str, size: str, times: str) -> float:
    command = [folder / "phalanx-bench", collective, "-b", size, "-e", size, "-n", times, "--bind"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout.splitlines()
    # Size and unit, elements, time.
    return float(lines[-1].split()[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the folder with phalanx-bench")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        hop = Path(folder) / "hop"
        source = Path(__file__).resolve().parent / "hop.c"
        if subprocess.run(["cc", "-O2", "-pthread", "-o", hop, source], check=False).returncode != 0:
            sys.exit("bench/hop.c needs a C compiler: apt install gcc")
        for _ in range(options.rounds):
            way = float(subprocess.run([hop], check=True, capture_output=True, text=True, timeout=LIMIT).stdout)
            rounds.append((way, *(microseconds(options.build.resolve(), *collective) for collective in COLLECTIVES)))
            time.sleep(0.5)
    print("| a cache line, ns | send_recv of 64 KiB, µs | all_gather of 1 MiB, µs |")
    print("|---:|---:|---:|")
    for way, message, gathered in sorted(rounds):
        print(f"| {way:.0f} | {message:.1f} | {gathered:.1f} |")


if __name__ == "__main__":
    main()
