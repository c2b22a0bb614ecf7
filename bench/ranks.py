#!/usr/bin/env python3
"""How long a job of many ranks on one host takes to start: from the command until the last rank has the result of its all_reduce.

    cargo build --release -p phalanx-cli -p phalanx-bench
    bench/ranks.py target/release
    bench/ranks.py ../before/target/release target/release
    bench/ranks.py --ranks 264 512 --per-host 8 target/release

Of several builds each start is made in turn. With --per-host N, each N ranks take themselves for a host of their own, and share no memory with the
others. `phalanx bench startup` does the same for up to 64 ranks.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

# What `phalanx-bench startup --worker` prints before the time at which it was done, in nanoseconds of this clock.
DONE = re.compile(r"phalanx-startup (\d+)")
# Nothing takes so many seconds, unless it hangs.
START_LIMIT = 600


def start(folder: Path, ranks: int, transport: str, per_host: int | None) -> float:
    """Seconds of one start."""
    # What `phalanx run` would set, and say each time.
    variables = os.environ | {"PHALANX_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    worker = [folder / "phalanx-bench", "startup", "--worker"]
    if per_host:
        worker = ["sh", "-c", f'export PHALANX_HOST_ID=host-$((RANK / {per_host})); exec "$0" "$@"', *worker]
    command = [folder / "phalanx", "run", "--nproc-per-node", str(ranks), "--", *worker]
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=variables, timeout=START_LIMIT)
    done = [int(nanoseconds) for nanoseconds in DONE.findall(job.stdout)]
    if job.returncode != 0 or len(done) != ranks:
        sys.exit(f"{folder}: of {ranks} ranks over {transport} {len(done)} have reported, and the command has ended with {job.returncode}")
    return (max(done) - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", type=Path, nargs="+", help="folders with phalanx and phalanx-bench")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--times", type=int, default=5, help="starts of each kind")
    parser.add_argument("--per-host", type=int, help="ranks that share memory; by default all of them")
    options = parser.parse_args()
    # Ranks of several hosts cannot all share memory.
    transports = ("auto" if options.per_host else "shm", "tcp")
    builds = [build.resolve() for build in options.builds]
    names = ["" if len(builds) == 1 else f", {build}" for build in options.builds]
    print("".join(f"| {column} " for column in ("ranks", *(t + name for t in transports for name in names))) + "|")
    print("|---:" * (1 + len(transports) * len(builds)) + "|", flush=True)
    for ranks in options.ranks:
        kinds = [(build, transport) for transport in transports for build in builds]
        times: dict[tuple[Path, str], list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.times):
            for build, transport in kinds:
                times[build, transport].append(start(build, ranks, transport, options.per_host))
        print(f"| {ranks} " + "".join(f"| {statistics.median(times[kind]):.2f} " for kind in kinds) + "|", flush=True)


if __name__ == "__main__":
    main()
