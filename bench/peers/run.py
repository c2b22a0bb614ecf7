"""Phalanx against other libraries and what the hardware allows: the same work, interleaved on one machine.

    cargo build --release -p phalanx-bench
    python bench/peers/setup.py
    python bench/peers/run.py --json peers.json --plot peers.png

Each round times every size with one after the other. The table shows the medians of the rounds in microseconds, and their
ratios. What cannot be timed is named, with the reason. README.md says what is measured.

A file of --json has all that is measured as soon as it is measured. With --append the run goes on where the file ends:
after an interruption, or in several windows of a machine that is quiet for a while only (--for).
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import ARRAYS, COLLECTIVES, COPYING_FLOOR, FLOOR, FOLDER, MPI_ARRAYS, PEERS, PHALANX_BENCH, PYTHON, REGISTERED, SHM, TCP, TCP_FLOOR
from peers import Case, Missing, Start, chosen, machine

OURS = {REGISTERED: "registered", SHM: "shm", TCP: "tcp", PYTHON: PYTHON, ARRAYS: ARRAYS}
LIMITS = {peer.name for peer in PEERS.values() if peer.limit}
# What the shared memory of libraries is called that leave it behind where they are ended.
SEGMENTS = ("mpich_shm_*", "Intel_MPI_*", "vader_segment.*", "sm_segment.*", "deepspeed_allreduce_buffer_*", "phalanx-peers-*")
SHARED = Path("/dev/shm")
# A program that has been told to end has so many seconds for it.
GRACE = 5.0

Times = dict[int, float]


class Failed(Exception):
    """Why a program's times are not used."""


class Measured:
    """The times of every round, in microseconds, and the file that keeps them."""

    def __init__(self, path: Path | None, append: bool) -> None:
        self.path, self.machine = path, machine()
        self.rounds: dict[tuple[str, str, int, int], list[float]] = {}
        if not (path and append and path.exists()):
            return
        for row in map(json.loads, path.read_text().splitlines()):
            if row["machine"] != self.machine:
                sys.exit(f"--append: {path} was measured on {row['machine']}, and this is {self.machine}")
            self.rounds[row["name"], row["collective"], row["ranks"], row["bytes"]] = row["rounds_us"]

    def add(self, case: Case, name: str, times: Times) -> None:
        for size, value in times.items():
            self.rounds.setdefault((name, case.collective, case.ranks, size), []).append(round(value, 3))
        if self.path:
            # Replaced as a whole: whenever this is ended, the file can be read.
            new = self.path.with_name(f".{self.path.name}.new")
            new.write_text("".join(json.dumps(row) + "\n" for row in self.rows()))
            new.replace(self.path)

    def rows(self, case: Case | None = None) -> list[dict[str, object]]:
        """As `phalanx plot` and `phalanx bench --peers` read them."""
        return [
            {"name": name, "collective": collective, "ranks": ranks, "bytes": size}
            | {"time_us": round(statistics.median(rounds), 3), "limit": name in LIMITS}
            | {"rounds_us": rounds, "machine": self.machine}
            for (name, collective, ranks, size), rounds in self.rounds.items()
            if case is None or (collective, ranks) == (case.collective, case.ranks)
        ]

    def count(self, case: Case, name: str) -> int:
        """Rounds of this work so far."""
        key = (name, case.collective, case.ranks)
        return max(len(self.rounds.get((*key, size), [])) for size in case.sizes())

    def medians(self, case: Case) -> dict[str, Times]:
        sizes, medians = set(case.sizes()), {}
        for row in self.rows(case):
            if row["bytes"] in sizes:
                medians.setdefault(row["name"], {})[row["bytes"]] = row["time_us"]
        return {peer.name: medians[peer.name] for peer in PEERS.values() if peer.name in medians}


def times(start: Start, limit: float) -> tuple[Times, str | None]:
    """Runs a program. If it takes longer than `limit` seconds, what it printed until then, and a note."""
    environment, pipe, note = os.environ | start.environment, subprocess.PIPE, None
    before = segments()
    process = subprocess.Popen(
        start.command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit)
        ended = process.returncode
    except subprocess.TimeoutExpired as late:
        # One that has ended itself, of which something lives on that holds its output, says how it ended.
        ended = process.poll()
        output, errors = ((text or b"").decode(errors="replace") for text in (late.output, late.stderr))
        note = f"ended after {limit:.0f} s (--limit allows more)"
    finally:
        stop(process)
        left = segments() - before
        for segment in left and left - held():
            segment.unlink(missing_ok=True)
    if ended:
        last = "".join(f"\n    {line}" for line in (errors or output).strip().splitlines()[-5:])
        raise Failed(f"it ended with {ended}: {' '.join(start.command)}{last}")
    # Some libraries greet on standard output.
    lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    rows = [json.loads(line) for line in lines]
    if wrong := [row["bytes"] for row in rows if row["wrong"]]:
        raise Failed(f"it computed wrong elements at {', '.join(map(readable, wrong))}")
    if not rows and note is None:
        raise Failed(f"it has printed no times: {' '.join(start.command)}")
    return {row["bytes"]: row["time_us"] for row in rows}, note


def segments() -> set[Path]:
    """Those of this user."""
    found = set()
    for segment in (path for pattern in SEGMENTS for path in SHARED.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            if segment.stat().st_uid == os.getuid():
                found.add(segment)
    return found


def held() -> set[Path]:
    """The shared memory that a process has open or mapped: another job's, which began meanwhile."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        # One that ends meanwhile, or is another user's.
        with contextlib.suppress(OSError):
            held |= {Path(os.readlink(file)) for file in (process / "fd").iterdir()}
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            held |= {Path(line.split(maxsplit=5)[5]) for line in lines if str(SHARED) in line}
    return held


def stop(process: subprocess.Popen) -> None:
    """Ends the program and what it has started, whichever of them still runs."""
    signals, end = [signal.SIGTERM, signal.SIGKILL], 0.0
    while signals:
        # The leader first: as long as nobody has asked for its end, it counts as there.
        process.poll()
        try:
            os.killpg(process.pid, signals.pop(0) if time.monotonic() >= end else 0)
        except ProcessLookupError:
            break
        if len(signals) == 1 and not end:
            end = time.monotonic() + GRACE
        time.sleep(0.01)
    process.wait()


def measure(arguments: argparse.Namespace, case: Case, measured: Measured) -> dict[str, str]:
    """Rounds until each peer has its number of them; what there is to say about peers, by their names."""
    starts, notes = {}, {}
    for key in arguments.peers:
        try:
            starts[key] = PEERS[key].start(case)
        except Missing as missing:
            notes[PEERS[key].name] = f"not timed: {missing}"
    for name, note in notes.items():
        print(f"{name}: {note}", file=sys.stderr)
    end = time.monotonic() + (arguments.seconds or float("inf"))
    while starts:
        # The one with the fewest rounds; among equals the first of the table.
        key = min(starts, key=lambda key: measured.count(case, PEERS[key].name))
        name = PEERS[key].name
        done = measured.count(case, name)
        if done >= arguments.rounds:
            return notes
        if time.monotonic() > end:
            notes["stopped"] = f"after {arguments.seconds:.0f} s; the same command with --append goes on"
            return notes
        print(f"round {done + 1} of {arguments.rounds}: {name}", file=sys.stderr)
        try:
            found, note = times(starts[key], arguments.limit)
        except Failed as failed:
            found, note = {}, f"failed: {failed}"
        measured.add(case, name, found)
        if note:
            notes[name] = note
            print(f"{name}: {note}", file=sys.stderr)
        if not found:
            del starts[key]
    return notes


def readable(size: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def table(medians: dict[str, Times], sizes: list[int]) -> None:
    """Times, and the quickest of the others in terms of ours; then each other's ratio over all sizes."""
    others = [name for name in medians if name not in OURS and name not in LIMITS]
    ours = next((name for name in (SHM, PYTHON, ARRAYS) if name in medians), None)
    titles = ["size", *medians, *([f"quickest peer / {OURS[ours]}"] if ours and others else [])]
    print(f"| {' | '.join(titles)} |\n|{'---:|' * len(titles)}")
    for size in sizes:
        row = [readable(size), *(f"{median[size]:,.1f}" if size in median else "–" for median in medians.values())]
        if len(titles) > len(row):
            there = [(medians[name][size], name) for name in others if size in medians[name]]
            both = there and size in medians[ours]
            row.append(f"{min(there)[0] / medians[ours][size]:.2f} {min(there)[1]}" if both else "–")
        print(f"| {' | '.join(row)} |")
    print()
    pairs = [(REGISTERED, FLOOR), (SHM, COPYING_FLOOR), (TCP, TCP_FLOOR), ("gloo", TCP)]
    pairs += [(name, ours) for ours in (SHM, REGISTERED, PYTHON) for name in others]
    pairs.append((MPI_ARRAYS, ARRAYS))
    for one, other in pairs:
        both = [size for size in sizes if size in medians.get(one, {}) and size in medians.get(other, {})]
        if both:
            values = [medians[one][size] / medians[other][size] for size in both]
            span = f"median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}"
            print(f"{OURS.get(one, one)} / {OURS.get(other, other)}: {span}")


def number(text: str) -> int:
    """A number of bytes such as 4, 64K or 1M."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    return int(text[:-1] if shift else text) << shift


def at_least(least: int, kind=int):
    def parse(text: str):
        if (value := kind(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return parse


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), help="[default: 5]")
    parser.add_argument("-b", "--min-bytes", type=at_least(4, number), help="the smallest size, such as 64K [default: 4]")
    parser.add_argument("-e", "--max-bytes", type=at_least(4, number), help="the largest size, such as 256M [default: 64M]")
    parser.add_argument("-f", "--factor", type=at_least(2), help="each size is this many times the one before [default: 4]")
    parser.add_argument("--quick", action="store_true", help="one round of a few sizes: --rounds 1 -e 4M -f 16")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which of {', '.join(PEERS)} [default: all]")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where setup.py has installed them [default: target/peers]")
    limit = "seconds that a program may take for its sizes; then those that it has are used [default: 120]"
    parser.add_argument("--limit", type=at_least(1, float), default=120, help=limit)
    window = "start no program after so many seconds; --append goes on another time"
    parser.add_argument("--for", dest="seconds", type=at_least(1, float), metavar="SECONDS", help=window)
    parser.add_argument("--json", type=Path, help="write the times, as `phalanx plot` and `bench --peers` read them")
    parser.add_argument("--append", action="store_true", help="go on with what the file of --json has, also of other ranks")
    parser.add_argument("--plot", type=Path, help="draw the medians as a PNG")
    arguments = parser.parse_args()
    try:
        arguments.peers = chosen(arguments.peers)
    except ValueError as error:
        parser.error(f"--peers: {error}")
    if arguments.append and not arguments.json:
        parser.error("--append needs --json FILE")
    quick = {"rounds": 1, "min_bytes": 4, "max_bytes": 4 << 20, "factor": 16}
    usual = {"rounds": 5, "min_bytes": 4, "max_bytes": 64 << 20, "factor": 4}
    for name, value in (quick if arguments.quick else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.min_bytes > arguments.max_bytes:
        parser.error("-b is larger than -e")
    return arguments


def main() -> None:
    arguments = options()
    sizes = (arguments.min_bytes, arguments.max_bytes, arguments.factor)
    case = Case(arguments.collective, arguments.ranks, *sizes, arguments.folder)
    measured = Measured(arguments.json, arguments.append)
    # As Ctrl-C: what has been measured is shown.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        notes = measure(arguments, case, measured)
    except KeyboardInterrupt:
        notes = {"interrupted": "only what had been measured is shown"}

    medians, sizes = measured.medians(case), case.sizes()
    # Of each size: a file may have more rounds of some.
    counts = {len(row["rounds_us"]) for row in measured.rows(case) if row["bytes"] in sizes} or {0}
    rounds = f"{max(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    what = f"{case.collective}, f32, {case.ranks} ranks, {measured.machine}"
    print(f"{what}; µs, medians of interleaved rounds: {rounds}\n")
    if medians:
        table(medians, sizes)
    for name, note in notes.items():
        print(f"{name}: {note}")
    if arguments.plot and medians:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "peers.json"
            rows.write_text("".join(json.dumps(row) + "\n" for row in measured.rows(case)))
            subprocess.run([str(PHALANX_BENCH), "plot", str(rows), "-o", str(arguments.plot)], check=True)
    if any(note.startswith("failed") for note in notes.values()) or "interrupted" in notes:
        sys.exit(1)


if __name__ == "__main__":
    main()
