"""PyTorch's DataLoader with the works of run.py, each as its users write it when it is to be quick. `peer.py WORK FILES WORKERS ...` prints
what examples/throughput.rs prints.

One thread a process for PyTorch's own operations, as its documentation advises for workers; persistent workers; no timeout.
"""

import argparse
import json
import resource
import struct
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from files import RECORDS

SIDE, BATCH = 224, 64
# Steps of a pass whose waits do not count: the workers have just begun.
FIRST = 4


def normalized(image):
    return (image.float() / 255.0 - 0.5) / 0.25


class Memory(Dataset):
    def __init__(self, _):
        row = (torch.arange(3 * 64 * 64) * 7).to(torch.uint8)
        self.images = [row + (n * 31) % 256 for n in range(RECORDS)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, n):
        return normalized(self.images[n])


class Lmdb(Dataset):
    """Opened in the worker; one transaction, whose values are not copied."""

    def __init__(self, files):
        self.path, self.transaction = str(files / "lmdb"), None

    def __len__(self):
        return RECORDS

    def __getitem__(self, n):
        if self.transaction is None:
            import lmdb

            env = lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)
            self.transaction = env.begin(buffers=True)
        return normalized(torch.frombuffer(self.transaction.get(struct.pack(">Q", n)), dtype=torch.uint8))


def pictures(files, decoder):
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    to_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    resize = v2.Resize((SIDE, SIDE), v2.InterpolationMode.BILINEAR, antialias=True)
    if decoder == "pillow":

        def load(path):
            with Image.open(path) as image:
                return image.convert("RGB")

        steps = [resize, v2.PILToTensor(), *to_floats]
    else:

        def load(path):
            return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)

        steps = [resize, *to_floats]
    return ImageFolder(str(files / "jpeg"), transform=v2.Compose(steps), loader=load)


class Lines(Dataset):
    def __init__(self, files):
        self.lines = (files / "lines.txt").read_text().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, n):
        return self.lines[n]


def padded(files):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>")

    def collate(lines):
        return torch.tensor([line.ids for line in tokenizer.encode_batch_fast(lines, add_special_tokens=False)])

    return collate


def floats(batch):
    return len(batch), batch[:, 17].double().square().sum().item()


def jpeg_sum(batch):
    images, classes = batch
    return len(images), images.flatten(1)[:, ::1001].double().square().sum().item() + classes.sum().item()


def tokens_sum(batch):
    return len(batch), float(batch.sum().item())


def work(name, files):
    """The data set, the collate function and what is read of a batch."""
    if name in ("memory", "lmdb"):
        return {"memory": Memory, "lmdb": Lmdb}[name](files), None, floats
    if name == "tokens":
        return Lines(files), padded(files), tokens_sum
    return pictures(files, "pillow" if name == "jpeg-pillow" else "torchvision"), None, jpeg_sum


def cpu():
    """Seconds of processors that this process and the workers that have ended have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def pss():
    """MiB of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("files", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("--compute", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1 << 60)
    parser.add_argument("--passes", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset, collate, read = work(options.work, options.files)
    workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=collate, **workers)
    start = pss()
    processor, total, checksum = cpu(), 0, 0.0
    items, steps, seconds, waited = 0, 0, 0.0, 0.0
    # The first pass warms up, and starts the workers.
    for number in range(options.passes + 1):
        begin, passed, taken, waits = time.perf_counter(), 0, 0, 0.0
        batches = iter(loader)
        while taken < options.steps:
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits += (time.perf_counter() - asked) * (taken >= FIRST)
            some, total_of_batch = read(batch)
            passed, taken, checksum = passed + some, taken + 1, checksum + total_of_batch
            if options.compute > 0:
                time.sleep(options.compute / 1e3)
        total += passed
        if number > 0:
            items, steps = items + passed, steps + taken - FIRST
            seconds, waited = seconds + time.perf_counter() - begin, waited + waits
    # Ends the workers, whose time counts then.
    del batches, loader
    print(json.dumps({
        "items": items,
        "seconds": seconds,
        "waited_ms": waited * 1e3 / steps,
        "cpu_us": (cpu() - processor) * 1e6 / total,
        "checksum": checksum / total,
        "start_mib": start,
    }))


if __name__ == "__main__":
    main()
