"""all_reduce, f32 sum: Phalanx over TCP and shared memory against gloo (PyTorch), interleaved on one machine.

    pip install torch
    cargo build --release -p phalanx-cli
    python bench/peers/run.py

Each round times every size with one and then with the others. The table shows the medians of the rounds, and
their ratios. PyTorch's own call costs tens of microseconds before gloo is reached: the ratios of small sizes include it.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PHALANX = HERE.parent.parent / "target" / "release" / "phalanx"


def lines(command: list[str]) -> dict[int, float]:
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        sys.exit(f"{command[0]} computed wrong elements: {wrong}")
    return {row["bytes"]: row["time_us"] for row in rows}


def size(count: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count >> shift} {unit}"
    return f"{count} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    arguments = parser.parse_args()
    if not PHALANX.exists():
        sys.exit(f"{PHALANX} is missing: cargo build --release -p phalanx-cli")

    sizes = [4**power for power in range(1, 20) if 4**power <= arguments.max_bytes]
    ours = [str(PHALANX), "bench", "all_reduce", "--json", "-f", "4", "-b", "4", "-e", str(arguments.max_bytes)]
    ours += ["--nproc-per-node", str(arguments.ranks), "--transport"]
    gloo = [sys.executable, str(HERE / "gloo.py"), "--ranks", str(arguments.ranks), *map(str, sizes)]
    commands = {"tcp": [*ours, "tcp"], "shm": [*ours, "shm"], "gloo": gloo}
    rounds: list[dict[str, dict[int, float]]] = []
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        rounds.append({name: lines(command) for name, command in commands.items()})

    import torch

    print(f"all_reduce, f32 sum, {arguments.ranks} ranks, {platform.machine()}, PyTorch {torch.__version__},", end=" ")
    print(f"medians of {arguments.rounds} interleaved rounds, µs\n")
    print("| size | phalanx, TCP | phalanx, shared memory | gloo | gloo / TCP | gloo / shared memory |")
    print("|---:|---:|---:|---:|---:|---:|")
    ratios: dict[str, list[float]] = {"tcp": [], "shm": []}
    for count in sizes:
        times = {name: statistics.median(round[name][count] for round in rounds) for name in commands}
        for name, values in ratios.items():
            values.append(times["gloo"] / times[name])
        row = [f"{times[name]:,.1f}" for name in commands] + [f"{values[-1]:.1f}" for values in ratios.values()]
        print(f"| {size(count)} | {' | '.join(row)} |")
    for name, values in ratios.items():
        print(f"\ngloo / {name}: median {statistics.median(values):.2f}, lowest {min(values):.2f}")


if __name__ == "__main__":
    main()
