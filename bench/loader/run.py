#!/usr/bin/env python3
"""Our DataLoader beside PyTorch's, in turn: items a second, and how long a step waits for its batch.

    cargo build --release -p phalanx-data --features lmdb --example throughput
    python3 -m venv target/torch && target/torch/bin/pip install torch numpy
    target/torch/bin/python bench/loader/run.py --workers 0 2 4 --rounds 3

The work is the same: 20,000 images of 3 x 64 x 64 bytes in memory, shuffled; each becomes floats, (x / 255 - 0.5) / 0.25; batches of 64
are stacked. Here `collate_each` does it, and in the lines "list" a collate function that gets the list of a batch's images. PyTorch does it
with its own operations, one thread a worker, as its documentation advises. `--compute` has the loop sleep for so many milliseconds a step, as
if a GPU computed: what it waits then is what a training run waits.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
OURS = TARGET / "release" / "examples" / "throughput"
BYTES, ITEMS, BATCH = 3 * 64 * 64, 20_000, 64


def theirs(workers, compute):
    import torch
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)

    class Images(Dataset):
        def __init__(self):
            row = (torch.arange(BYTES) * 7).to(torch.uint8)
            self.images = [row + (n * 31) % 256 for n in range(ITEMS)]

        def __len__(self):
            return ITEMS

        def __getitem__(self, n):
            return (self.images[n].float() / 255.0 - 0.5) / 0.25

    loader = DataLoader(Images(), batch_size=BATCH, shuffle=True, num_workers=workers, drop_last=True)
    begin, waited, items, checksum = time.perf_counter(), 0.0, 0, 0.0
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        items += BATCH
        checksum += batch[0].flatten()[17].item()
        if compute > 0:
            time.sleep(compute / 1e3)
    taken = time.perf_counter() - begin
    print(f"{items / taken:.0f} items/s, {waited * 1e3 * BATCH / items:.3f} ms of waiting a step, {items} items, "
          f"checksum {checksum:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--compute", type=float, default=0.0, help="milliseconds that the loop sleeps a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.theirs is not None:
        return theirs(options.theirs, options.compute)
    for _ in range(options.rounds):
        for workers in options.workers:
            programs = {
                "phalanx": [OURS, "memory", str(workers), str(options.compute)],
                "list": [OURS, "list", str(workers), str(options.compute)],
                "pytorch": [sys.executable, __file__, "--theirs", str(workers), "--compute", str(options.compute)],
            }
            for name, program in programs.items():
                done = subprocess.run(program, capture_output=True, text=True, check=True)
                print(f"{name:<8} {workers} workers  {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
