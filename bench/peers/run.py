"""Phalanx against gloo (PyTorch), OpenMPI and what the hardware allows: the same work, interleaved on one machine.

    cargo build --release -p phalanx-cli
    python bench/peers/run.py --json peers.json --plot peers.png

Each round times every size with one after the other. The table shows the medians of the rounds in microseconds, and
their ratios. What is not installed is left out, with a line that says how to install it. README.md says what is measured.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target"))
PHALANX = TARGET / "release" / "phalanx"
COLLECTIVES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
COLLECTIVES += ["send_recv", "barrier"]
SHARED = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}
# Names as `phalanx bench` gives them to its own curves, so that a later run replaces the right one.
FLOOR, REGISTERED, SHM, TCP = "bare loop", "Phalanx, shm, registered", "Phalanx, shm", "Phalanx, tcp"
RATIOS = [(REGISTERED, FLOOR), ("gloo", TCP), ("gloo", REGISTERED), ("OpenMPI", REGISTERED)]
SHORT = {REGISTERED: "registered", SHM: "shm", TCP: "tcp"}


def number(text: str) -> int:
    """A number of bytes such as 4, 64K or 1M."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    return int(text[:-1] if shift else text) << shift


def sizes(arguments: argparse.Namespace) -> list[int]:
    """In whole elements of every rank's share, as `phalanx bench` rounds them."""
    if arguments.collective == "barrier":
        return [0]
    unit = 4 * (arguments.ranks if arguments.collective in SHARED else 1)
    rounded, size = [], arguments.min_bytes
    while size <= arguments.max_bytes:
        rounded.append(-(-size // unit) * unit)
        size *= arguments.factor
    return sorted(set(rounded))


def commands(arguments: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """How to start each that can be: what it computes is an argument of all."""
    chosen: dict[str, list[str]] = {}

    def add(name: str, command: list[str], *needs: tuple[object, str]) -> None:
        missing = next((remedy for found, remedy in needs if not found), None)
        if missing is None:
            chosen[name] = command
        else:
            print(f"{name} is left out: {missing}", file=sys.stderr)

    collective, ranks = arguments.collective, str(arguments.ranks)
    listed = [str(size) for size in sizes(arguments)]
    wanted = {"floor", "registered", "shm", "tcp", "gloo", "openmpi"} - set(arguments.without)
    if "floor" in wanted and collective == "all_reduce" and ranks == "2":
        built = compile_c("cc", HERE / "floor.c", folder)
        add(FLOOR, [str(folder / "floor"), *listed], (built, "a C compiler is missing: apt install gcc"))
    ours = [str(PHALANX), "bench", collective, "--json=-", "--nproc-per-node", ranks]
    for flag in ("min_bytes", "max_bytes", "factor"):
        ours += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
    built = (PHALANX.exists(), "cargo build --release -p phalanx-cli")
    for short, name, kind, memory in [
        ("registered", REGISTERED, "shm", "registered"),
        ("shm", SHM, "shm", "ordinary"),
        ("tcp", TCP, "tcp", "ordinary"),
    ]:
        if short in wanted:
            add(name, [*ours, "--transport", kind, "--memory", memory], built)
    if "gloo" in wanted:
        torch = (importlib.util.find_spec("torch"), "pip install torch")
        add("gloo", [sys.executable, str(HERE / "gloo.py"), "--ranks", ranks, collective, *listed], torch)
    if "openmpi" in wanted:
        mpirun = ["mpirun", "-n", ranks]
        mpirun += ["--oversubscribe"] if arguments.ranks > (os.cpu_count() or 1) else []
        mpirun += ["--allow-run-as-root"] if os.getuid() == 0 else []
        found = (shutil.which("mpirun"), "apt install openmpi-bin libopenmpi-dev")
        if compile_c("mpicc", HERE / "openmpi.c", folder):
            add("OpenMPI", [*mpirun, str(folder / "openmpi"), collective, *listed], found)
        else:
            binding = (importlib.util.find_spec("mpi4py"), "apt install libopenmpi-dev, or pip install mpi4py numpy")
            add("OpenMPI", [*mpirun, sys.executable, str(HERE / "openmpi.py"), collective, *listed], found, binding)
    return chosen


def compile_c(compiler: str, source: Path, folder: Path) -> bool:
    if not shutil.which(compiler):
        return False
    command = [compiler, "-O3", "-march=native", "-o", str(folder / source.stem), str(source), "-lm"]
    return subprocess.run(command, check=False).returncode == 0


def times(name: str, command: list[str]) -> dict[int, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, env=environment)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}; leave it out with --without, or run it alone: {' '.join(command)}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if wrong := [row for row in rows if row["wrong"]]:
        sys.exit(f"{name} computed wrong elements: {wrong}")
    return {row["bytes"]: row["time_us"] for row in rows}


def readable(size: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def table(medians: dict[str, dict[int, float]], listed: list[int]) -> None:
    ratios = [(one, other) for one, other in RATIOS if one in medians and other in medians]
    titles = ["size", *medians, *(f"{SHORT.get(one, one)} / {SHORT.get(other, other)}" for one, other in ratios)]
    print(f"| {' | '.join(titles)} |\n|{'---:|' * len(titles)}")
    for size in listed:
        row = [readable(size), *(f"{median[size]:,.1f}" for median in medians.values())]
        row += [f"{medians[one][size] / medians[other][size]:.2f}" for one, other in ratios]
        print(f"| {' | '.join(row)} |")
    for (one, other), title in zip(ratios, titles[1 + len(medians) :]):
        values = [medians[one][size] / medians[other][size] for size in listed]
        print(f"\n{title}: median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-b", "--min-bytes", type=number, default=4, help="the smallest size, such as 4 or 64K")
    parser.add_argument("-e", "--max-bytes", type=number, default=64 << 20, help="the largest size, such as 256M")
    parser.add_argument("-f", "--factor", type=int, default=4, help="each size is this many times the one before")
    parser.add_argument(
        "--without", action="append", default=[], choices=["floor", "registered", "shm", "tcp", "gloo", "openmpi"]
    )
    parser.add_argument("--json", type=Path, help="write the medians, as `phalanx plot` and `bench --peers` read them")
    parser.add_argument("--plot", type=Path, help="draw the medians as a PNG")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        chosen, listed = commands(arguments, Path(folder)), sizes(arguments)
        rounds: list[dict[str, dict[int, float]]] = []
        for count in range(arguments.rounds):
            print(f"round {count + 1} of {arguments.rounds}", file=sys.stderr)
            rounds.append({name: times(name, command) for name, command in chosen.items()})
        medians = {
            name: {size: statistics.median(round[name][size] for round in rounds) for size in listed} for name in chosen
        }
        what = f"{arguments.collective}, f32, {arguments.ranks} ranks, {platform.machine()}, {os.cpu_count()} processors"
        print(f"{what}; medians of {arguments.rounds} interleaved rounds, µs\n")
        table(medians, listed)

        path = arguments.json or Path(folder) / "peers.json"
        rows = [
            {"name": name, "collective": arguments.collective, "ranks": arguments.ranks, "bytes": size}
            | {"time_us": round(median[size], 3), "limit": name == FLOOR}
            for name, median in medians.items()
            for size in listed
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if arguments.plot:
            subprocess.run([str(PHALANX), "plot", str(path), "-o", str(arguments.plot)], check=True)


if __name__ == "__main__":
    main()
