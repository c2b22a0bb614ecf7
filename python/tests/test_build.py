"""The build of the wheel, with a cargo and a maturin that only note how they are called."""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "with_command.py"
CARGO = """#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print({version!r}))
json.dump(sys.argv[1:], open({called!r}, "w"))
print("not a message")
print(json.dumps({{"reason": "compiler-artifact", "executable": None}}))
for program in os.environ["BUILT"].split():
    print(json.dumps({{"reason": "compiler-artifact", "executable": program}}))
    print(json.dumps({{"reason": "compiler-artifact", "executable": program}}))
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """`with_command` with what it calls replaced; `build.cargo(programs)` puts a cargo on PATH that has built these."""
    maturin = types.ModuleType("maturin")
    maturin.get_config = lambda: {"data": str(tmp_path / "data")}
    maturin.get_maturin_pep517_args = lambda settings=None: (settings or {}).get("build-args", "").split()
    maturin.build_wheel = lambda *arguments: "the wheel"
    for name in ("requires_for_build_editable", "requires_for_build_sdist", "requires_for_build_wheel"):
        setattr(maturin, f"get_{name}", lambda settings=None: [])
    maturin.prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_wheel = None
    monkeypatch.setitem(sys.modules, "maturin", maturin)
    monkeypatch.setitem(sys.modules, "puccinialin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MATURIN_NO_INSTALL_RUST", raising=False)
    spec = importlib.util.spec_from_file_location("with_command", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def cargo(*programs, version="cargo 1.95.0 (0123456789 2026-04-14)"):
        for program in programs:
            Path(program).write_text(f"the program {program}")
        path = tmp_path / "cargo"
        path.write_text(CARGO.format(python=sys.executable, called=str(tmp_path / "called"), version=version))
        path.chmod(0o755)
        monkeypatch.setenv("BUILT", " ".join(map(str, programs)))

    module.cargo = cargo
    module.called = lambda: json.loads((tmp_path / "called").read_text())
    return module


def test_the_wheel_carries_what_cargo_says_it_has_built(build, tmp_path):
    program = tmp_path / "phalanx-elsewhere"
    build.cargo(program)
    for _ in range(2):
        assert build.build_wheel(str(tmp_path)) == "the wheel"
        assert (build.SCRIPTS / "phalanx").read_text() == f"the program {program}"
    called = build.called()
    assert "--target" not in called
    # With the features of maturin's own build, in its workspace: else the crates that both share would be compiled twice.
    packages = [value for name, value in zip(called, called[1:]) if name == "--package"]
    assert packages == ["phalanx-torch", "phalanx-cli"]
    assert called[called.index("--manifest-path") + 1] == str(SOURCE.parent / "Cargo.toml")
    settings = {"build-args": "--target aarch64-unknown-linux-gnu --strip --offline --config=a=1"}
    build.build_wheel(str(tmp_path), settings)
    assert build.called()[-4:] == ["--target", "aarch64-unknown-linux-gnu", "--offline", "--config=a=1"]


def test_other_programs_than_one_are_refused(build, tmp_path):
    build.cargo()
    with pytest.raises(SystemExit, match="cargo has built no program"):
        build.build_wheel(str(tmp_path))
    build.cargo(tmp_path / "one", tmp_path / "other")
    with pytest.raises(SystemExit, match="one, .*other, where the wheel takes one"):
        build.build_wheel(str(tmp_path))


@pytest.mark.parametrize(
    "system, libc, why",
    [
        ("darwin", ("", ""), "Phalanx runs on Linux, and this is darwin: use a container"),
        ("linux", ("glibc", "2.12"), "needs glibc 2.17 or later, and this system has 2.12"),
        ("linux", ("glibc", "2.17"), None),
        ("linux", ("glibc", "3.0"), None),
        ("linux", ("", ""), None),
    ],
)
def test_a_system_that_is_none_for_it_is_named(build, system, libc, why):
    if why is None:
        build._check_system(system, libc)
        return
    with pytest.raises(SystemExit, match=why):
        build._check_system(system, libc)


def test_a_rust_that_is_too_old_is_named_with_what_to_do(build, tmp_path, monkeypatch):
    manifest = SOURCE.with_name("Cargo.toml").read_text()
    assert f'rust-version = "{build.OLDEST_RUST[0]}.{build.OLDEST_RUST[1]}"\n' in manifest
    program = tmp_path / "phalanx-elsewhere"
    build.cargo(program, version="cargo 1.75.0 (1d8b05cdd 2023-11-20)")
    with pytest.raises(SystemExit, match="needs Rust 1.95 or later, and cargo is 1.75: `rustup update`"):
        build.build_wheel(str(tmp_path))
    # Debian's cargo and another compiler, or one that names no version.
    build.cargo(program)
    compiler = tmp_path / "compiler"
    for said, fits in [("rustc 1.94.1", False), ("rustc 2.0.0", True), ("wrapper", True)]:
        compiler.write_text(f"#!/bin/sh\necho '{said}'\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("RUSTC", str(compiler))
        if fits:
            assert build.build_wheel(str(tmp_path)) == "the wheel"
            continue
        with pytest.raises(SystemExit, match="compiler is 1.94: `rustup update`"):
            build.build_wheel(str(tmp_path))


def test_without_cargo_it_says_what_to_install(build, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="cargo is not on PATH: install Rust"):
        build.build_wheel(str(tmp_path))
    # As maturin does it: with a Rust for this build, unless that is forbidden.
    found = types.ModuleType("puccinialin")

    def setup_rust():
        build.cargo(tmp_path / "phalanx-elsewhere")
        return {"CARGO_HOME": str(tmp_path)}

    found.setup_rust = setup_rust
    monkeypatch.setitem(sys.modules, "puccinialin", found)
    monkeypatch.setenv("CARGO_HOME", "another")
    monkeypatch.setenv("MATURIN_NO_INSTALL_RUST", "1")
    with pytest.raises(SystemExit, match="cargo is not on PATH"):
        build.build_wheel(str(tmp_path))
    monkeypatch.delenv("MATURIN_NO_INSTALL_RUST")
    build.build_wheel(str(tmp_path))
    assert os.environ["CARGO_HOME"] == str(tmp_path) and (build.SCRIPTS / "phalanx").exists()
