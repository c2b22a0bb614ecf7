"""What pip builds the package with: maturin, and before it the command `phalanx`, which the wheel carries as a script.

maturin packs a library or a program, and not both (PyO3/maturin#368), but also whatever lies in its folder for data. Both are built
in one workspace, with the same features, so that the crates that they share are compiled once.
"""

import json
import os
import platform
import re
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
CONFIG = maturin.get_config()
# A source distribution has it elsewhere.
MANIFEST = HERE / CONFIG.get("manifest-path", "Cargo.toml")
SCRIPTS = HERE / CONFIG["data"] / "scripts"
# Rust's standard library runs on no earlier one.
OLDEST_GLIBC = (2, 17)
# rust-version of Cargo.toml.
OLDEST_RUST = (1, 95)
# maturin wants the folder for metadata already.
SCRIPTS.mkdir(parents=True, exist_ok=True)
# Arguments of maturin that say for which machine, and from where: the command and the library must agree on them.
WITH_VALUE = ("--target", "--config")
ALONE = ("--offline", "--frozen")


def _check_system(system=sys.platform, libc=platform.libc_ver()):
    """Ends where the package cannot run, before anything is compiled."""
    if system != "linux":
        raise SystemExit(
            f"Phalanx runs on Linux, and this is {system}: use a container or a virtual machine on macOS, or WSL 2 on Windows"
        )
    name, version = libc
    if name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        raise SystemExit(f"Phalanx needs glibc {_dotted(OLDEST_GLIBC)} or later, and this system has {version}: use a later one, or a container")


def _dotted(version):
    return ".".join(map(str, version))


def _check_rust():
    """Ends if Rust is too old, of which cargo says only that it does not understand a manifest."""
    # An earlier cargo cannot read the manifests, and an earlier compiler not the sources.
    for program in ("cargo", os.environ.get("RUSTC") or "rustc"):
        if not shutil.which(program):
            continue
        said = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True).stdout
        version = re.match(r"\S+ (\d+)\.(\d+)", said)
        if version and tuple(map(int, version.groups())) < OLDEST_RUST:
            raise SystemExit(
                f"Phalanx needs Rust {_dotted(OLDEST_RUST)} or later, and {program} is {_dotted(version.groups())}: `rustup update`, "
                "or install a later one (https://rustup.rs)"
            )


def _find_cargo():
    """Sees to it that there is a cargo, for the command and then for maturin."""
    if shutil.which("cargo"):
        _check_rust()
        return
    missing = f"cargo is not on PATH: install Rust {_dotted(OLDEST_RUST)} or later (https://rustup.rs)"
    if os.environ.get("MATURIN_NO_INSTALL_RUST"):
        raise SystemExit(missing)
    try:
        # maturin has asked pip for it, to get a Rust for this build alone.
        from puccinialin import setup_rust
    except ImportError:
        raise SystemExit(missing) from None
    os.environ.update(setup_rust())


def _shared(arguments):
    """Those of maturin's arguments that cargo takes, too, and that the command needs."""
    shared, rest = [], iter(arguments)
    for argument in rest:
        if argument in WITH_VALUE:
            shared += [argument, next(rest, "")]
        elif argument in ALONE or argument.startswith(tuple(f"{name}=" for name in WITH_VALUE)):
            shared.append(argument)
    return shared


def _add_command(config_settings):
    """Builds `phalanx`, and puts it where maturin takes a wheel's scripts from.

    What cargo reads from the environment (CARGO_BUILD_TARGET, CARGO_TARGET_DIR, RUSTFLAGS, ..) holds for both builds: the
    program is taken from where cargo says that it has put it.
    """
    _find_cargo()
    # With both packages named, the command's crates get the features that they have for the library, and maturin finds them built.
    command = ["cargo", "build", "--release", "--locked", "--package", "phalanx-torch", "--package", "phalanx-cli"]
    command += ["--bin", "phalanx", "--manifest-path", str(MANIFEST), "--message-format", "json-render-diagnostics"]
    command += _shared(maturin.get_maturin_pep517_args(config_settings))
    print("Running", " ".join(command), flush=True)
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.returncode)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    programs = {message["executable"] for message in messages if message.get("executable")}
    if len(programs) != 1:
        raise SystemExit(
            f"cargo has built {', '.join(sorted(programs)) or 'no program'}, where the wheel takes one, for one target: "
            "is build.target a list in cargo's configuration?"
        )
    # Whoever runs the one of an earlier build keeps it.
    (SCRIPTS / "phalanx").unlink(missing_ok=True)
    shutil.copy(programs.pop(), SCRIPTS / "phalanx")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _check_system()
    _add_command(config_settings)
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _check_system()
    _add_command(config_settings)
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    # With the crates of the repository on which the library and the command depend.
    return maturin.build_sdist(sdist_directory, config_settings)
