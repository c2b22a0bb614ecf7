"""Installs what run.py compares Phalanx with, each in a virtual environment in one folder, and tries each once.

    apt install g++ openmpi-bin libopenmpi-dev
    python bench/peers/setup.py
    python bench/peers/setup.py --folder /somewhere --peers gloo,intel-mpi

All takes some five minutes and 6 GB, nearly all of it PyTorch. Nothing outside the folder is changed, and what is there
already is not installed again, but for phalanx_torch, which is built from this tree. README.md says what each is.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from peers import FOLDER, PEERS, PHALANX_TORCH, VLLM, Case, Missing, avx512, chosen
from run import Failed, times


def install(folder: Path, keys: list[str]) -> None:
    environments: dict[str, set[str]] = {}
    for key in keys:
        if PEERS[key].packages:
            name, packages = PEERS[key].packages
            environments.setdefault(name, set()).update(packages)
    for name, packages in environments.items():
        where = folder / name
        if not (where / "bin/pip").exists():
            venv.create(where, with_pip=True)
        pip(where, *sorted(packages))
        if name == "torch" and "vllm" in keys and avx512():
            # Its dependencies are all that a server of language models needs, its operators need none of them.
            pip(where, "--no-deps", VLLM)
        if name == "torch" and {"phalanx-torch", "phalanx-arrays"} & set(keys):
            # This tree's, as it is now.
            pip(where, "--no-deps", "--force-reinstall", str(PHALANX_TORCH))


def pip(where: Path, *packages: str) -> None:
    print(f"{where.name}: {' '.join(packages)}", flush=True)
    command = [str(where / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", *packages]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"{where.name} is not installed; pip says why. All others: --peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to [default: target/peers]")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, such as gloo,intel-mpi [default: all]")
    arguments = parser.parse_args()
    try:
        keys = chosen(arguments.peers)
    except ValueError as error:
        parser.error(str(error))

    install(arguments.folder, keys)
    case = Case("all_reduce", 2, 4, 4096, 1024, arguments.folder)
    lacking = 0
    for key in keys:
        try:
            # The first start of DeepSpeed builds its operator.
            times(PEERS[key].start(case), limit=600)
            print(f"{key}: ready")
        except (Missing, Failed) as error:
            lacking += 1
            print(f"{key}: {error}")
    if lacking:
        sys.exit(f"{lacking} of {len(keys)} cannot be timed here; run.py leaves them out, and says so")


if __name__ == "__main__":
    main()
