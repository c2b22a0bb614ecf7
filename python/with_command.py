"""What pip builds the package with: maturin, and before it the command `phalanx`, which the wheel carries as a script.

maturin packs a library or a program, and not both (PyO3/maturin#368), but also whatever lies in its folder for data.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import (  # noqa: F401
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

HERE = Path(__file__).resolve().parent
WORKSPACE = HERE.parent / "Cargo.toml"
SCRIPTS = HERE / maturin.get_config()["data"] / "scripts"
# maturin wants the folder for metadata already.
SCRIPTS.mkdir(parents=True, exist_ok=True)


def _add_command():
    """Builds `phalanx`, and puts it where maturin takes a wheel's scripts from."""
    if not WORKSPACE.exists():
        raise SystemExit(f"{WORKSPACE} is missing: build this package in a checkout of the whole repository")
    command = ["cargo", "build", "--release", "--locked", "--package", "phalanx-cli", "--bin", "phalanx"]
    command += ["--manifest-path", str(WORKSPACE), "--message-format", "json-render-diagnostics"]
    print("Running", " ".join(command), flush=True)
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.returncode)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages if message.get("executable")]
    shutil.copy(programs[-1], SCRIPTS / "phalanx")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _add_command()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _add_command()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("there is no source distribution: the command's sources lie outside of this folder; build a wheel")
