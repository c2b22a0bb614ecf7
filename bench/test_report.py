"""`python -m unittest discover bench` tests report.py, compile_time.py, loader/run.py and all; it needs Python and bash alone."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import compile_time
import report

# The command of each part of bench/all, as it stands there.
LIST = (Path(__file__).parent / "all").read_text().split("cat << 'END'\n")[1].split("\nEND\n")[0]
COMMANDS = {line.split(" | ")[0]: line.split("| ", 2)[2] for line in LIST.splitlines()}
HEAD = "# part: {}\n# machine: one\n# date: today\n# commit: abc\n# command: do it\n\n"
HOSTS = """\
# all_reduce, 2 hosts, 1 rank each, link 10gbit, medians of 4 rounds
       bytes      ours us      bare us  ours/bare  ours/link  bare/link
          64          3.5          2.5       1.41
     1048576        880.8        880.0       1.00       1.05       1.05
"""
PLANE = """\
3950 calls in random order, us
        call   bytes  phalanx p50       p99     gloo p50       p99  p50 ratio
   broadcast     100         26.2      70.1         95.4     155.6       3.6x
   broadcast    4096         28.3      90.2        100.8     175.2       3.6x
objects and groups, medians of 200, us
                                      phalanx       gloo    ratio
            all_gather_object, 100 B      141.7      439.8     3.1x
           all_gather_object, 4096 B      141.7      439.8     3.1x
                           new_group     1770.9      977.1     0.6x
"""


def step(framework: str | None, model: str, alone: float, two: float) -> str:
    row = {"framework": framework} if framework else {}
    return json.dumps(row | {"model": model, "alone_ms": alone, "slower_ms": alone, "step_ms": two}) + "\n"


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def part(self, name: str, output: str) -> None:
        (self.folder / f"{name}.txt").write_text(f"{HEAD.format(name)}{output}\n# ended\n")

    def report(self) -> dict[str, str]:
        """How each target stands, by what it is."""
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            report.report(self.folder)
        lines = shown.getvalue().splitlines()[1:]
        self.assertEqual(len(lines), len(report.TARGETS))
        return {target.what: line.strip() for target, line in zip(report.TARGETS, lines)}

    def test_what_was_not_run_is_not_measured(self) -> None:
        for line in self.report().values():
            self.assertTrue(line.startswith("not measured") and "not run" in line, line)

    def test_a_part_that_failed_is_not_measured(self) -> None:
        for end, why in (("\n# failed: exit code 3\n", "failed: exit code 3"), ("", "interrupted")):
            (self.folder / "hosts-floor.txt").write_text(HEAD.format("hosts-floor") + HOSTS + end)
            line = self.report()["between two hosts / bare sockets, up to 4 KiB"]
            self.assertIn(why, line)

    def test_targets_are_met_or_missed_by_name(self) -> None:
        self.part("hosts-floor", HOSTS)
        self.part("python-plane", PLANE)
        runs = [(model, two) for two in (104, 200, 103) for model in report.MODELS]
        self.part("scaling", "".join(step(None, model, 100, two) + step("pytorch", model, 90, 150) for model, two in runs))
        found = self.report()
        self.assertEqual(
            found["between two hosts / bare sockets, up to 4 KiB"],
            "MISSED        between two hosts / bare sockets, up to 4 KiB, at most 1.3: all_reduce of 64 B at 10gbit 1.41 (1 of 1)",
        )
        self.assertTrue(found["between two hosts / bytes over the rate, from 1 MiB"].startswith("met"))
        self.assertIn("broadcast 90.20 (1 of 1)", found["beside NCCL: p99 of calls of 4 KiB, µs"])
        self.assertIn("new_group 0.60 (1 of 1)", found["beside NCCL: gloo / ours, new_group"])
        # The medians: 150 / 104, and 104 / 100.
        self.assertIn("1.44 to 1.44 (3 values)", found["a step of two ranks: PyTorch's DDP / ours"])
        self.assertIn("1.04 to 1.04 (3 values)", found["a step of two ranks / the slower of two that train alone"])

    def test_a_peer_that_is_quicker_is_found_among_the_peers_alone(self) -> None:
        rows = [("bare loop", 1.0, True), ("Phalanx, shm", 10.0, False), ("Phalanx, tcp", 2.0, False), ("gloo", 9.0, False), ("MPICH", 20.0, False)]
        lines = [{"name": name, "collective": "all_reduce", "ranks": 2, "bytes": 4096, "time_us": time, "limit": limit} for name, time, limit in rows]
        (self.folder / "peers-2.files").mkdir()
        (self.folder / "peers-2.files/peers-2.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.part("peers-2", "")
        line = self.report()["all_reduce, two ranks: the quickest peer / ordinary memory"]
        self.assertIn("all_reduce of 4 KiB, 2 ranks 0.90 (1 of 1)", line)

    def test_only_the_parts_that_were_run_are_written(self) -> None:
        self.part("mnist", "    epoch\nepoch 1\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
        page = "before\n<!-- bench/all mnist -->\nold\n<!-- end -->\nbetween\n<!-- bench/all tls -->\nkept\n<!-- end -->\nbehind\n"
        written, done = report.rewritten(page, self.folder)
        self.assertEqual(done, ["mnist"])
        self.assertIn("kept", written)
        self.assertNotIn("old", written)
        self.assertIn("```text\n    epoch\nepoch 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", written)
        self.assertTrue(written.startswith("before\n") and written.endswith("behind\n") and "\nbetween\n" in written)
        # Once more gives the same.
        self.assertEqual(report.rewritten(written, self.folder)[0], written)

    def test_the_rates_of_tls_are_medians_of_the_runs(self) -> None:
        rows = [{"bytes": size, "time_us": time} for time in (1000, 500, 2000) for size in (1 << 20, 4 << 20)]
        self.part("tls", "".join(json.dumps(row) + "\n" for row in rows))
        page = "<!-- bench/all tls -->\nold\n<!-- end -->\n"
        written, _ = report.rewritten(page, self.folder)
        self.assertIn("```\n| size | GB/s |\n|---:|---:|\n| 1 MiB | 1.05 |\n| 4 MiB | 4.19 |\n\n<!-- end -->", written)

    def test_the_tables_of_several_collectives_are_one(self) -> None:
        def printed(collective: str, *peers: str) -> str:
            titles, cells = (" | ".join(words) for words in (("size", "Phalanx, shm", *peers), ("4 KiB", "0.3", *("0.7" for _ in peers))))
            line = f"{collective}, f32, 2 ranks, one; µs, medians of interleaved rounds: 2"
            return f"{line}\n\n| {titles} |\n|{'---:|' * (2 + len(peers))}\n| {cells} |\n\n" + "".join(
                f"{peer} / shm: median 2.02, from 2.02 to 2.02\n" for peer in peers
            )

        output = printed("broadcast", "Intel MPI") + printed("all_gather", "Intel MPI") + "Open MPI 5: not timed: no mpirun\n"
        shown = report.joined_tables(report.Part({}, output))
        head = "```text\nf32, 2 ranks, one; µs, medians of interleaved rounds: 2\nOpen MPI 5: not timed: no mpirun\n```\n\n"
        table = "| collective | size | Phalanx, shm | Intel MPI |\n|---|---:|---:|---:|\n"
        self.assertEqual(shown, f"{head}{table}| `broadcast` | 4 KiB | 0.3 | 0.7 |\n| `all_gather` | 4 KiB | 0.3 | 0.7 |")
        # No figure may come below another library's name.
        output = printed("broadcast", "Intel MPI") + printed("all_gather", "Open MPI 5")
        self.assertEqual(report.joined_tables(report.Part({}, output)), report.text(output))

    def test_remote_calls_of_pytorch_are_a_table(self) -> None:
        row = {"transport": "shm", "bytes": 4096, "time_us": 506.454, "p99_us": 621.4, "calls_per_s": 3589.95, "mb_per_s": 29.4088}
        shown = report.table_of_calls(report.Part({}, json.dumps(row) + "\n"))
        self.assertTrue(shown.endswith("|---:|\n| shm | 4 KiB | 506.5 | 621.4 | 3590 | 29.4 |"), shown)

    def test_a_long_command_is_shown_in_lines(self) -> None:
        command = 'a && for c in x y; do [ $c = x ] && [ -e $c ] || b $c; done; run() { b "$@"; }; run 1'
        lines = ["a &&", "for c in x y; do [ $c = x ] && [ -e $c ] || b $c; done", 'run() { b "$@"; }', "run 1"]
        self.assertEqual(report.shown(command), "\n".join(lines))

    def test_the_parts_of_the_page_and_of_the_targets_exist(self) -> None:
        marks = dict(report.BLOCK.findall(report.PAGE.read_text()))
        self.assertLessEqual(set(marks) | {target.part for target in report.TARGETS}, set(COMMANDS))
        self.assertLessEqual(set(report.PLOTS) | set(report.TABLES), set(marks))
        self.assertTrue(marks)

    def test_the_page_shows_the_command_that_bench_all_runs(self) -> None:
        for part, text in report.BLOCK.findall(report.PAGE.read_text()):
            with self.subTest(part):
                shown = text.partition("```sh\n")[2].partition("\n```")[0]
                self.assertEqual(shown, report.shown(COMMANDS[part]))


class Compile(unittest.TestCase):
    def test_the_bare_crate_has_what_mnist_has_of_burn(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            compile_time.make_bare(Path(folder) / "bare")
            manifest = (Path(folder) / "bare/Cargo.toml").read_text()
        self.assertIn('burn-flex = { version = "', manifest)
        self.assertIn('features = ["x86-v4"] }', manifest)
        self.assertIn("[profile.dev.package.burn-flex]\nopt-level = 3", manifest)
        self.assertNotIn("phalanx", manifest)


    def test_the_program_is_made_by_its_name_where_it_is_built(self) -> None:
        built = []

        def spent(command: list[str], folder: Path, target: Path) -> tuple[float, float]:
            if "init" in command:
                # What `phalanx init` takes as a name.
                self.assertRegex(command[-1], r"^[A-Za-z][A-Za-z0-9_-]*$")
                (folder / command[-1] / "src").mkdir(parents=True)
                (folder / command[-1] / "src/main.rs").write_text('println!("loss {:.4}", loss);\n')
                (folder / command[-1] / "Cargo.toml").write_text("[package]\n")
            elif command[1] == "build":
                built.append((folder / "src/main.rs").read_text())
            return 1.0, 1.0

        shown = io.StringIO()
        with tempfile.TemporaryDirectory() as work, mock.patch.object(compile_time, "spent", spent), contextlib.redirect_stdout(shown):
            compile_time.program(Path(work))
        self.assertEqual(len(set(built)), 1 + compile_time.CHANGES)
        self.assertIn("changed program: 1.0 s, 1.0 s of processor", shown.getvalue())


class Loader(unittest.TestCase):
    def test_times_of_another_machine_are_not_mixed_in(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder) / "loader.json"
            for text in ('{"machine": "a faster one", "runs": {}, "memory": {}}', '{"runs": {}, "memory": {}}'):
                times.write_text(text)
                command = [sys.executable, str(Path(report.__file__).parent / "loader/run.py"), "--files", f"{folder}/files", "--json", str(times)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
                self.assertEqual((done.returncode, times.read_text()), (1, text))
                self.assertIn("name another file", done.stderr)
                self.assertFalse((Path(folder) / "files").exists())


class All(unittest.TestCase):
    def all(self, *options: str, **variables: str) -> subprocess.CompletedProcess:
        command = [str(Path(report.__file__).with_name("all")), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables)

    def test_a_part_is_one_of_the_list_by_its_whole_name(self) -> None:
        for name in ("zero", "zero-.", ".*", "zero-2 | ", "-2", ""):
            with self.subTest(name):
                done = self.all("--dry-run", "zero-2", name)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
        done = self.all("--dry-run", "--out", "/nowhere", "zero-2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"zero-2: {COMMANDS['zero-2']}", done.stdout)

    def test_what_an_earlier_run_has_left_is_not_gone_on_with(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # In place of cargo, which the part starts. It leaves a checkpoint, as a training does, from which another start would go on.
            cargo = Path(folder) / "cargo"
            cargo.write_text('#!/bin/sh\n[ "$(ls "$out")" = "" ] && mkdir -p "$out/run/checkpoints"\n')
            cargo.chmod(0o755)
            out = Path(folder) / "out"
            # What is not a part's stays.
            (out / "zero-2").mkdir(parents=True)
            for _ in range(2):
                done = self.all("--out", str(out), "zero-2", PATH=f"{folder}:{os.environ['PATH']}")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertTrue((out / "zero-2.txt").read_text().endswith("\n# ended\n"))
                self.assertTrue((out / "zero-2.files/run/checkpoints").is_dir())
            self.assertTrue((out / "zero-2").is_dir())

    def test_a_part_that_was_named_and_is_left_out_is_a_failure(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "out")
            # In place of Python: it has no phalanx_torch.
            done = self.all("--out", out, "python-plane", PYTHON="false")
            self.assertIn("left out: python-plane: false has no phalanx_torch", done.stdout)
            self.assertEqual(done.returncode, 1, done.stderr)
            done = self.all("--dry-run", "--out", out, "python-plane", PYTHON="false")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_no_part_takes_programs_that_cargo_has_not_built(self) -> None:
        for part, command in COMMANDS.items():
            self.assertNotIn("target/release", command, f"{part}: cargo builds into CARGO_TARGET_DIR, if it is set")

    def test_no_loop_hides_a_command_that_fails_in_it(self) -> None:
        for part, command in COMMANDS.items():
            self.assertNotRegex(command, r"(done|\}) +(&&|\|\|)", f"{part}: `bash -e` ignores what fails in a loop before && or ||")


if __name__ == "__main__":
    unittest.main()
