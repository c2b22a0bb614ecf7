#!/usr/bin/env python3
"""Runs Horovod's own examples for torch, unchanged, over `phalanx_torch.horovod`, in two processes on the CPU, and says what came of each.

    run_horovod_examples.py PATH-OF-A-CHECKOUT-OF-HOROVOD-0.28

MNIST learns the digits of `data/mnist-10k`, once for each option that concerns the gradients; the synthetic benchmark has its smallest model.
What they need beside PyTorch: torchvision, packaging and filelock. It ends with 1 if one fails, or does not learn.
"""

import gzip
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

DIGITS = pathlib.Path(__file__).resolve().parent.parent / "data" / "mnist-10k"
# Of the 1,500 digits that are not trained on, in percent. Without training 10 are right.
LEAST_ACCURACY = 75.0
MNIST = ["pytorch_mnist.py", "--no-cuda", "--epochs", "2", "--log-interval", "1000"]
SYNTHETIC = ["pytorch_synthetic_benchmark.py", "--no-cuda", "--model", "resnet18", "--batch-size", "2", "--num-warmup-batches", "1"]
SYNTHETIC += ["--num-batches-per-iter", "1", "--num-iters", "3"]
RUNS = [
    (MNIST, []),
    (MNIST, ["--fp16-allreduce"]),
    (MNIST, ["--gradient-predivide-factor", "2"]),
    (MNIST, ["--use-adasum"]),
    (SYNTHETIC, []),
    (SYNTHETIC, ["--fp16-allreduce"]),
    (SYNTHETIC, ["--use-adasum"]),
]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    examples = pathlib.Path(sys.argv[1]).resolve() / "examples" / "pytorch"
    if not (examples / MNIST[0]).is_file():
        sys.exit(f"{examples / MNIST[0]} is missing: give the path of a checkout of github.com/horovod/horovod, tag v0.28.1")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        # Where torchvision looks for what it would download.
        raw = pathlib.Path(folder) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for file in DIGITS.glob("*.gz"):
            with gzip.open(file) as packed, open(raw / file.stem, "wb") as plain:
                shutil.copyfileobj(packed, plain)
        for example, options in RUNS:
            name = " ".join([example[0], *options])
            given = [str(examples / example[0]), *example[1:], *options, *(["--data-dir", folder] if example is MNIST else [])]
            succeeded, text = outcome(given)
            print(f"{name}: {text}", flush=True)
            failed += not succeeded
    sys.exit(1 if failed else 0)


def outcome(given):
    """Whether the example has ended well, and what it has said then."""
    command = [str(pathlib.Path(sys.executable).parent / "phalanx"), "run", "--nproc-per-node", "2", "--"]
    command += [sys.executable, "-m", "phalanx_torch.horovod", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    accuracies = re.findall(r"Accuracy: ([0-9.]+)%", done.stdout)
    speed = re.search(r"Total img/sec on 2 CPU\(s\): .*", done.stdout)
    learned = bool(accuracies) and float(accuracies[-1]) >= LEAST_ACCURACY
    if done.returncode != 0 or not (learned or speed):
        return False, f"FAILED with {done.returncode}\n{done.stdout}{done.stderr}"
    return True, f"accuracy {accuracies[-1]} %" if accuracies else speed[0]


if __name__ == "__main__":
    main()
