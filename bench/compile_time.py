#!/usr/bin/env python3
"""What it takes to compile: the first example beside Burn alone, a user's program, and the tests.

    bench/compile_time.py                      all, 40 minutes on two processors
    bench/compile_time.py --what mnist program

mnist    `cargo build -p mnist` from nothing, beside a program that trains one layer with what mnist has of Burn and nothing of ours,
         with the same profile
program  the crate that `phalanx init` makes, from nothing; then again after a line of it has changed
tests    `cargo test --workspace` from nothing: what compiling takes, and what the tests take

Seconds are those of processors, user and system, of cargo and all that it starts; of the changed program also those of the clock, the
median of five. What is downloaded is downloaded before. Everything is built in a folder that is empty before and gone afterwards.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES = 5
BARE = """\
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor};

fn main() {
    let device = Device::flex().autodiff();
    let mut model: Linear = LinearConfig::new(4, 1).init(&device);
    let mut optimizer = AdamWConfig::new().init();
    for _ in 0..100 {
        let x = Tensor::<2>::random([64, 4], Distribution::Default, &device);
        let loss = model.forward(x.clone()).sub(x.sum_dim(1)).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    println!("{}", model.num_params());
}
"""


def spent(command: list[str], folder: Path, target: Path) -> tuple[float, float]:
    """Seconds of processors and of the clock that a command takes."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(target)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    if done.returncode:
        sys.exit(f"{' '.join(command)} has failed:\n" + "\n".join(done.stdout.splitlines()[-30:]))
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, end - begin


def section(manifest: str, name: str) -> str:
    """What a manifest has below `[name]`."""
    found = re.search(rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[|\Z)", manifest, re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"the manifest has no [{name}]")
    return found[1]


def make_bare(folder: Path) -> None:
    """A crate with the lines about Burn of mnist's manifest, and the workspace's versions and profile."""
    workspace = (ROOT / "Cargo.toml").read_text()
    versions = section(workspace, "workspace.dependencies")
    dependencies = []
    for line in section((ROOT / "examples/mnist/Cargo.toml").read_text(), "dependencies").splitlines():
        if name := re.match(r"burn[\w-]*(?= = )", line):
            known = re.search(rf"^{name[0]} = \{{ (version.*?) \}}", versions, re.MULTILINE)[1]
            features = re.search(r"features = \[.*?\]", line)[0]
            dependencies.append(f"{name[0]} = {{ {re.sub(r', features = .*', '', known)}, {features} }}")
    # Without what it says of our own packages.
    profile = workspace[workspace.index("[profile.dev]") : workspace.index("# Much of Burn is compiled in those")]
    (folder / "src").mkdir(parents=True)
    (folder / "src/main.rs").write_text(BARE)
    package = '[package]\nname = "bare"\nversion = "0.1.0"\nedition = "2024"\n\n[workspace]\n\n[dependencies]\n'
    (folder / "Cargo.toml").write_text(package + "\n".join(dependencies) + "\n\n" + profile)
    # The versions of everything else, as here; cargo takes out of it what is not needed.
    (folder / "Cargo.lock").write_text((ROOT / "Cargo.lock").read_text())


def mnist(work: Path) -> None:
    bare = work / "bare"
    make_bare(bare)
    spent(["cargo", "fetch"], bare, work / "none")
    spent(["cargo", "fetch", "--locked"], ROOT, work / "none")
    theirs, _ = spent(["cargo", "build"], bare, work / "target-bare")
    ours, _ = spent(["cargo", "build", "-p", "mnist", "--locked"], ROOT, work / "target-mnist")
    print(f"Burn's bare minimum: {theirs:.0f} s of processor\nmnist: {ours:.0f} s of processor")
    print(f"mnist / Burn's bare minimum: {ours / theirs:.2f}", flush=True)


def program(work: Path) -> None:
    command = ["cargo", "run", "--quiet", "--locked", "--manifest-path", str(ROOT / "Cargo.toml"), "-p", "phalanx-cli", "--bin", "phalanx", "--"]
    # It makes the folder where it is started.
    spent([*command, "init", "--path", str(ROOT), "digits"], work, work / "target-cli")
    crate, target = work / "digits", work / "target-digits"
    # It lies within this one's folder here, and does not belong to it.
    with (crate / "Cargo.toml").open("a") as manifest:
        manifest.write("\n[workspace]\n")
    spent(["cargo", "fetch"], crate, target)
    first, _ = spent(["cargo", "build"], crate, target)
    print(f"new program: {first:.0f} s of processor")
    source, taken = crate / "src/main.rs", []
    for change in range(CHANGES):
        text, count = re.subn(r"loss( \d)? \{:\.4\}", f"loss {change} {{:.4}}", source.read_text())
        if count != 1:
            sys.exit(f"{source} has no line that can be changed")
        source.write_text(text)
        taken.append(spent(["cargo", "build"], crate, target))
    processor, clock = (statistics.median(each) for each in zip(*taken))
    print(f"changed program: {clock:.1f} s, {processor:.1f} s of processor", flush=True)


def tests(work: Path) -> None:
    spent(["cargo", "fetch", "--locked"], ROOT, work / "none")
    target = work / "target-tests"
    built, _ = spent(["cargo", "test", "--workspace", "--locked", "--no-run"], ROOT, target)
    run, _ = spent(["cargo", "test", "--workspace", "--locked"], ROOT, target)
    print(f"all tests: {built + run:,.0f} s of processor, {built:,.0f} of them to compile", flush=True)


WHAT = {"mnist": mnist, "program": program, "tests": tests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    arguments = parser.parse_args()
    place = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compile-", dir=place) as work:
        for what in arguments.what:
            WHAT[what](Path(work))


if __name__ == "__main__":
    main()
