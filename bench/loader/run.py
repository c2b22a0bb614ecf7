#!/usr/bin/env python3
"""Our DataLoader beside PyTorch's, in turn and on the same files: items a second and a processor, how long a step waits for its batch, and
memory.

    cargo build --release -p phalanx-data --features image,lmdb --example throughput
    python3 -m venv target/loader && target/loader/bin/pip install torch torchvision numpy pillow lmdb tokenizers
    target/loader/bin/python bench/loader/run.py --rounds 3

The works are the same for both; batches have 64 items, shuffled anew in each pass:

    memory   19,968 images of 3 x 64 x 64 bytes in memory become floats, (x / 255 - 0.5) / 0.25, and are stacked. In the lines "list" our
             collate function gets the list of a batch's images, as PyTorch's does, and else one after the other (`collate_each`)
    jpeg     2,000 JPEG files (files.py) are decoded, scaled to 224 x 224 with antialiasing, normalized, and stacked with their classes.
             PyTorch's lines are torchvision's decode_jpeg and transforms.v2 on tensors; "pillow" is torchvision's usual loader, and
             transforms.v2 on Pillow's images
    tokens   20,000 lines become tokens (a byte-level BPE of 8,000), padded to the longest of the batch. Both use the crate tokenizers,
             PyTorch by its Python package, and encode_batch_fast in the collate function
    lmdb     19,968 records of 12 KiB in an LMDB file become floats, as in memory. PyTorch reads by the package lmdb, one transaction a
             worker, without copies

Each program makes a pass that is not timed, which starts workers and warms caches, and `--passes` that are. Workers of PyTorch are persistent.
`items/s` are those of the timed passes by the clock. `CPU` is what processors worked for an item, user and system, of the process and
all workers, over all passes; a million by it is the items a second of a processor. `waits` is the mean wait for a batch, without those for the first four of a pass. With
`--compute 100` the loop sleeps so many ms a step, as if a GPU computed. `memory` is the most that the process and its workers had
together (Pss: what is shared counts once), in a run of its own with one timed pass, and what the process had before its first pass.
The checksums of both must agree: exactly, but for JPEG, where decoders round differently.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from files import make

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

from peers import machine

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
OURS = TARGET / "release" / "examples" / "throughput"
PEER = Path(__file__).with_name("peer.py")
WORKS = {
    "memory": {"phalanx": "memory", "list": "list", "pytorch": "memory"},
    "jpeg": {"phalanx": "jpeg", "pytorch": "jpeg", "pillow": "jpeg-pillow"},
    "tokens": {"phalanx": "tokens", "pytorch": "tokens"},
    "lmdb": {"phalanx": "lmdb", "pytorch": "lmdb"},
}
# By how much the sums of squares of the pixels may differ; scaling without antialiasing makes them a tenth larger.
JPEG_TOLERANCE = 0.01
LIMIT = 600


def command(name, work, files, workers, *options):
    program = [str(OURS)] if name in ("phalanx", "list") else [sys.executable, str(PEER)]
    return [*program, WORKS[work][name], str(files), str(workers), *map(str, options)]


def run(program):
    done = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(program)}\n{done.stderr}")
    return json.loads(done.stdout)


def children(process):
    """The process and those that it has started."""
    found = [process]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
        except OSError:
            continue  # It has ended.
    return found


def pss(process):
    """MiB, of which what several processes share counts once."""
    total = 0
    for one in children(process):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def memory(program):
    """The most memory, and what the program itself says that it had at its start."""
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        most, end = 0.0, time.monotonic() + LIMIT
        while process.poll() is None:
            most = max(most, pss(process.pid))
            time.sleep(0.05)
            if time.monotonic() > end:
                process.kill()
        text = process.stdout.read()
    if process.returncode != 0:
        sys.exit(f"{' '.join(program)} has failed")
    return {"peak": most, "start": json.loads(text)["start_mib"]}


def agree(work, sums):
    (ours, *others), tolerance = sums.values(), JPEG_TOLERANCE if work == "jpeg" else 1e-9
    if any(abs(other - ours) > tolerance * abs(ours) for other in others):
        sys.exit(f"{work}: the programs have not done the same work: {sums}")


def table(results):
    """A line for each work, program, number of workers and time of computing, with medians and what PyTorch has by ours."""
    print("| work | workers | computes | | items/s | by PyTorch's | CPU an item | by PyTorch's | waits | memory (at its start) |")
    print("|---|---|---|---|---|---|---|---|---|---|")

    def median(key, field):
        return statistics.median(one[field] for one in results["runs"][key])

    for key in results["runs"]:
        work, name, workers, compute = key.split()
        speed, cpu, waits = (median(key, field) for field in ("speed", "cpu_us", "waited_ms"))
        theirs = f"{work} pytorch {workers} {compute}"
        ratios = ("", "") if name == "pytorch" or theirs not in results["runs"] else (
            f"{speed / median(theirs, 'speed'):.2f}", f"{cpu / median(theirs, 'cpu_us'):.2f}")
        used = results["memory"].get(f"{work} {name} {workers}")
        used = f"{used['peak']:.0f} ({used['start']:.0f}) MiB" if used and compute == "0" else ""
        print(f"| {work} | {workers} | {compute} ms | {name} | {speed:,.0f} | {ratios[0]} | {cpu:,.1f} µs | {ratios[1]} "
              f"| {waits:.2f} ms | {used} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--compute", type=float, nargs="+", default=[0, 100], help="milliseconds that the loop sleeps a step")
    parser.add_argument("--passes", type=int, default=1, help="that are timed, behind one that is not")
    parser.add_argument("--steps", type=int, default=24, help="of a pass in which the loop sleeps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--files", type=Path, default=TARGET / "loader-files")
    parser.add_argument("--json", type=Path, help="all results; what is in the file already is kept, and counts, if it was measured on this machine")
    options = parser.parse_args()
    results = {"machine": machine(), "runs": {}, "memory": {}}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
        if results.get("machine") != machine():
            sys.exit(f"--json: {options.json} was measured on {results.get('machine', 'some machine')}, and this is {machine()}: name another file")
    make(options.files)
    for turn in range(options.rounds):
        for work in options.works:
            for compute in options.compute:
                for workers in options.workers:
                    if compute > 0 and workers == 0:
                        continue  # It waits for the whole load, as the lines without computing show.
                    sums = {}
                    # Each is the first in turn.
                    for name in list(WORKS[work])[:: -1 if turn % 2 else 1]:
                        extra = ["--compute", compute, "--steps", options.steps] if compute > 0 else []
                        extra += ["--passes", options.passes]
                        one = run(command(name, work, options.files, workers, *extra))
                        sums[name] = one["checksum"]
                        one["speed"] = one["items"] / one["seconds"]
                        results["runs"].setdefault(f"{work} {name} {workers} {compute:g}", []).append(one)
                        print(f"{work:<7} {name:<8} {workers} workers, {compute:g} ms: {one['speed']:,.0f} items/s, "
                              f"{one['cpu_us']:,.1f} µs of CPU an item, {one['waited_ms']:.2f} ms of waiting a step", flush=True)
                    # In a part of a pass each has other items.
                    if compute == 0:
                        agree(work, sums)
    if not options.no_memory:
        for work in options.works:
            for workers in options.workers:
                for name in WORKS[work]:
                    used = memory(command(name, work, options.files, workers, "--passes", 1))
                    results["memory"][f"{work} {name} {workers}"] = used
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    table(results)


if __name__ == "__main__":
    main()
