#!/usr/bin/env python3
"""What `bench/all` has measured: which targets it misses, and docs/benchmarks.md with its tables.

    bench/report.py FOLDER            the targets: met, missed, not measured
    bench/report.py FOLDER --write    also puts the tables and plots of FOLDER into docs

FOLDER has a file PART.txt for each part that was run, and a folder PART.files with what the part's command wrote. On the page, what stands
between `<!-- bench/all PART -->` and `<!-- end -->` is a part's: machine, date, commit, command and what the command printed. Parts that were not run,
or failed, stay as they are, and so does all other text.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
MODELS = {"mlp": "MLP, 10.5 M parameters", "encoder": "transformer encoder, 22.7 M", "resnet": "ResNet-20, 0.27 M"}
# What belongs to a part on the page: its name, and what stands between the marks.
BLOCK = re.compile(r"^<!-- bench/all ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL | re.MULTILINE)
# What parts draw. The picture on the page has the same name.
PLOTS = {"peers-2": "all_reduce.png", "async": "async.png", "async-encoder": "async-encoder.png"}

# What a value is of, such as a size or a model, and the value.
Values = list[tuple[str, float]]


class Missing(Exception):
    """Why there is no value."""


@dataclass(frozen=True)
class Part:
    """A part's file: lines about it, each with `# ` before it, and what its command printed."""

    about: dict[str, str]
    output: str

    @staticmethod
    def read(folder: Path, name: str) -> "Part":
        path = folder / f"{name}.txt"
        if not path.exists():
            raise Missing("not run")
        head, _, output = path.read_text().partition("\n\n")
        about = dict(line.removeprefix("# ").split(": ", 1) for line in head.splitlines())
        if failure := re.search(r"^# failed: (.*)$", output, re.MULTILINE):
            raise Missing(f"failed: {failure[1]}")
        output, ended, _ = output.rpartition("\n# ended\n")
        if not ended:
            raise Missing("interrupted")
        return Part(about, output)


def files(folder: Path, part: str) -> Path:
    """Where a part's command has written."""
    return folder / f"{part}.files"


def lines_of_json(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def columns(text: str, titles: str) -> list[list[str]]:
    """The rows below a line of these titles, as words. The second is a number in each."""
    _, found, below = text.partition(titles)
    if not found:
        raise Missing(f"its output has no columns {titles!r}")
    rows = []
    for line in below.split("\n", 1)[-1].splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"[\d.]+", words[1]):
            break
        rows.append(words)
    return rows


def readable(size: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


# Steps of training


def steps(part: Part) -> dict[tuple[str, str], list[dict]]:
    """The runs of each model, of "phalanx" and of "pytorch"."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for row in lines_of_json(part.output):
        runs.setdefault((row.get("framework", "phalanx"), row["model"]), []).append(row)
    return runs


def both(runs: dict, model: str) -> tuple[list[dict], list[dict]]:
    ours, theirs = (runs.get((framework, model), []) for framework in ("phalanx", "pytorch"))
    if not ours or not theirs:
        raise Missing("PyTorch was not found")
    return ours, theirs


def beside_pytorch(part: Part, field: str) -> Values:
    runs, values = steps(part), []
    for model in MODELS:
        ours, theirs = both(runs, model)
        values.append((model, statistics.median(b[field] / a[field] for a, b in zip(ours, theirs))))
    return values


def cost_of_ddp(part: Part) -> Values:
    runs = steps(part)
    return [
        (model, statistics.median(run["step_ms"] / run["slower_ms"] for run in runs["phalanx", model]))
        for model in MODELS
        if ("phalanx", model) in runs
    ]


def table_of_steps(part: Part) -> str:
    runs = steps(part)
    lines = [
        "| model | alone | two ranks | ratio | launch | hidden | PyTorch: alone | two ranks | ratio | PyTorch's two ranks / ours |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model, title in MODELS.items():
        ours = runs.get(("phalanx", model), [])
        theirs = runs.get(("pytorch", model), [])
        if not ours:
            continue

        def median(rows: list[dict], value: Callable[[dict], float], shown: str) -> str:
            values = [value(row) for row in rows if value(row) is not None]
            return shown.format(statistics.median(values)) if values else "–"

        cells = [title]
        for rows in (ours, theirs):
            cells.append(median(rows, lambda row: row["alone_ms"], "{:.0f} ms"))
            cells.append(median(rows, lambda row: row["step_ms"], "{:.0f} ms"))
            cells.append(median(rows, lambda row: row["step_ms"] / row["slower_ms"], "{:.2f}"))
            if rows is ours:
                cells.append(median(rows, lambda row: row.get("launch_at"), "{:.0%}"))
                cells.append(median(rows, lambda row: row.get("hidden"), "{:.0%}"))
        ratios = [b["step_ms"] / a["step_ms"] for a, b in zip(ours, theirs)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cells.append(f"**{statistics.median(ratios):.2f}** ({each})" if ratios else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Collectives


def rows_of_peers(part: Part, folder: Path) -> dict[tuple[str, int, int], dict[str, tuple[float, bool]]]:
    """By collective, ranks and bytes: each program's time in microseconds, and whether it is a limit and no library."""
    name = part.about["part"]
    path = files(folder, name) / f"{name}.json"
    if not path.exists():
        raise Missing(f"{path.name} was not written")
    found: dict = {}
    for row in lines_of_json(path.read_text()):
        key = row["collective"], row["ranks"], row["bytes"]
        found.setdefault(key, {})[row["name"]] = row["time_us"], row["limit"]
    return found


def quickest_peer(part: Part, folder: Path) -> Values:
    found = []
    for (collective, ranks, size), times in rows_of_peers(part, folder).items():
        peers = [time for name, (time, limit) in times.items() if not limit and not name.lower().startswith("phalanx")]
        if peers and "Phalanx, shm" in times:
            found.append((f"{collective} of {readable(size)}, {ranks} ranks", min(peers) / times["Phalanx, shm"][0]))
    return found


def beside_limit(name: str, limit: str, most: int | None = None) -> Callable[[Part, Path], Values]:
    def values(part: Part, folder: Path) -> Values:
        return [
            (readable(size), times[name][0] / times[limit][0])
            for (_, _, size), times in rows_of_peers(part, folder).items()
            if name in times and limit in times and (most is None or size <= most)
        ]

    return values


def between_hosts(column: int, sizes: range) -> Callable[[Part], Values]:
    """A column of the tables of bench/hosts.py --floor, with the rate of the link."""

    def values(part: Part) -> Values:
        found = []
        for table in part.output.split("# ")[1:]:
            what = re.match(r"(\w+), .*, link (\w+)", table)
            if not what:
                continue
            for row in columns(table, "ours/bare"):
                if int(row[0]) in sizes and len(row) > column:
                    found.append((f"{what[1]} of {readable(int(row[0]))} at {what[2]}", float(row[column])))
        return found

    return values


def bandwidth(part: Part) -> Values:
    """GB/s of the tables of `phalanx bench --json`: of each size the median of the runs."""
    runs: dict[int, list[float]] = {}
    for row in lines_of_json(part.output):
        runs.setdefault(row["bytes"], []).append(row["bytes"] / row["time_us"] / 1e3)
    return [(readable(size), statistics.median(values)) for size, values in runs.items()]


def table_of_bandwidth(part: Part) -> str:
    lines = ["| size | GB/s |", "|---:|---:|"]
    return "\n".join([*lines, *(f"| {size} | {rate:.2f} |" for size, rate in bandwidth(part))])


def joined_tables(part: Part) -> str:
    """The tables of several collectives as one. As they were printed, if they do not have the same columns."""
    titles: set[str] = set()
    rows: list[str] = []
    rest: list[str] = []
    collective = ""
    for line in part.output.splitlines():
        shown = line
        if head := re.match(r"(\w+), (\w+, \d+ ranks, .*)", line):
            collective, shown = head[1], head[2]
        if shown.startswith("| size |"):
            titles.add(shown)
        elif shown.startswith("| "):
            rows.append(f"| `{collective}` {shown}")
        elif shown and not shown.startswith("|") and ": median " not in shown and shown not in rest:
            rest.append(shown)
    if len(titles) != 1:
        return text(part.output)
    title = titles.pop()
    return "\n".join([*text("\n".join(rest)).splitlines(), "", f"| collective {title}", f"|---{'|---:' * (title.count('|') - 1)}|", *rows])


def table_of_calls(part: Part) -> str:
    """The remote calls of bench/peers/rpc.py."""
    lines = ["| transport | size | time | p99 | calls/s | MB/s |", "|---|---:|---:|---:|---:|---:|"]
    for row in lines_of_json(part.output):
        numbers = f"{row['time_us']:.1f} | {row['p99_us']:.1f} | {row['calls_per_s']:.0f} | {row['mb_per_s']:.1f}"
        lines.append(f"| {row['transport']} | {readable(row['bytes'])} | {numbers} |")
    return "\n".join(lines)


# Loader, metadata beside NCCL, builds, faults


def waits(part: Part) -> Values:
    """The mean wait of a step that sleeps, in ms, with a worker or more."""
    found = []
    for line in part.output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 8 and cells[3] == "phalanx" and cells[1] != "0" and cells[2] != "0 ms" and cells[8].endswith(" ms"):
            found.append((f"{cells[0]}, {cells[1]} workers", float(cells[8].removesuffix(" ms"))))
    return found


def late_calls(part: Part) -> Values:
    """p99 of small calls of 4 KiB, in µs."""
    return [(row[0], float(row[3])) for row in columns(part.output, "phalanx p50") if row[1] == "4096"]


def beside_gloo(what: str) -> Callable[[Part], Values]:
    def values(part: Part) -> Values:
        pattern = rf"^ *({what}[^\n]*?) +[\d.]+ +[\d.]+ +([\d.]+)x$"
        return [(name, float(ratio)) for name, ratio in re.findall(pattern, part.output, re.MULTILINE)]

    return values


def figure(pattern: str) -> Callable[[Part], Values]:
    """The number in each line of a pattern, whose first group says what it is of and whose second is the number."""

    def values(part: Part) -> Values:
        return [(what.strip(), float(number.replace(",", ""))) for what, number in re.findall(pattern, part.output, re.MULTILINE)]

    return values


@dataclass(frozen=True)
class Target:
    what: str
    part: str
    values: Callable[..., Values]
    at_least: float | None = None
    at_most: float | None = None
    needs_folder: bool = False

    def bound(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def meets(self, value: float) -> bool:
        # As it is shown: a value that is printed as the bound meets it.
        value = round(value, 2)
        return value >= self.at_least if self.at_least is not None else value <= self.at_most

    def measured(self, folder: Path) -> Values:
        part = Part.read(folder, self.part)
        values = self.values(part, folder) if self.needs_folder else self.values(part)
        if not values:
            raise Missing("its output has no such figures")
        return values


TARGETS = [
    Target("a step of two ranks: PyTorch's DDP / ours", "scaling", lambda part: beside_pytorch(part, "step_ms"), at_least=1),
    Target("a step of two ranks / the slower of two that train alone", "scaling", cost_of_ddp, at_most=1.05),
    *(
        Target(f"{what}: the quickest peer / ordinary memory", part, quickest_peer, at_least=0.95, needs_folder=True)
        for what, part in (
            ("all_reduce, two ranks", "peers-2"),
            ("all_reduce, four ranks", "peers-4"),
            ("all_reduce, eight ranks", "peers-8"),
            ("all_reduce beside all peers", "peers-all"),
            ("other collectives, two ranks", "collectives"),
        )
    ),
    Target(
        "all_reduce, two ranks: ordinary memory / a bare loop that copies too",
        "peers-2",
        beside_limit("Phalanx, shm", "bare loop that copies"),
        at_most=2,
        needs_folder=True,
    ),
    Target(
        "all_reduce over TCP on one host / bare sockets, up to 4 KiB",
        "peers-all",
        beside_limit("Phalanx, tcp", "bare sockets", 4096),
        at_most=1.3,
        needs_folder=True,
    ),
    Target("between two hosts / bare sockets, up to 4 KiB", "hosts-floor", between_hosts(3, range(4097)), at_most=1.3),
    Target("between two hosts / bytes over the rate, from 1 MiB", "hosts-floor", between_hosts(4, range(1 << 20, 1 << 40)), at_most=1.15),
    Target("all_reduce over TLS, GB/s", "tls", bandwidth, at_least=1.35),
    Target("a step's wait for the loader, ms", "loader", waits, at_most=0.05),
    Target("beside NCCL: p99 of calls of 4 KiB, µs", "python-plane", late_calls, at_most=50),
    Target("beside NCCL: gloo / ours, all_gather_object", "python-plane", beside_gloo("all_gather_object"), at_least=5),
    Target("beside NCCL: gloo / ours, broadcast_object_list", "python-plane", beside_gloo("broadcast_object_list"), at_least=5),
    Target("beside NCCL: gloo / ours, new_group", "python-plane", beside_gloo("new_group"), at_least=1),
    Target("mnist's build / Burn's bare minimum, seconds of processor", "compile", figure(r"^(mnist) / .*?: ([\d.]+)$"), at_most=1.15),
    Target("all tests from nothing, seconds of processor", "compile", figure(r"^(all tests): ([\d.,]+) s of processor"), at_most=1400),
    Target("a changed program's build, seconds", "compile", figure(r"^(changed program): ([\d.]+) s"), at_most=5),
]


def report(folder: Path) -> int:
    """Prints how each target stands; how many are missed."""
    missed = 0
    print("targets:")
    for target in TARGETS:
        try:
            values = target.measured(folder)
        except Missing as reason:
            print(f"  not measured  {target.what}: {reason} (part {target.part})")
            continue
        bad = [(what, value) for what, value in values if not target.meets(value)]
        if bad:
            missed += 1
            worst = ", ".join(f"{what} {value:.2f}" for what, value in bad)
            print(f"  MISSED        {target.what}, {target.bound()}: {worst} ({len(bad)} of {len(values)})")
        else:
            ends = sorted(value for _, value in values)
            print(f"  met           {target.what}, {target.bound()}: {ends[0]:.2f} to {ends[-1]:.2f} ({len(values)} values)")
    return missed


def text(output: str) -> str:
    """What a command printed: its tables as they are, all else as preformatted."""
    blocks: list[tuple[bool, list[str]]] = []
    for line in output.strip("\n").splitlines():
        is_table = line.startswith("|")
        if not blocks or blocks[-1][0] != is_table:
            blocks.append((is_table, []))
        blocks[-1][1].append(line.rstrip())
    shown = []
    for is_table, lines in blocks:
        block = "\n".join(lines).strip("\n")
        if block:
            shown.append(block if is_table else f"```text\n{block}\n```")
    return "\n\n".join(shown)


def shown(command: str) -> str:
    """In shorter lines, which a shell reads as the same command."""
    return re.sub(r"(?:;|(?<= &&)) (?!do |done|\[|\})", "\n", command)


# Parts whose output is shown in another form than it was printed.
TABLES = {"scaling": table_of_steps, "tls": table_of_bandwidth, "collectives": joined_tables, "rpc-torch": table_of_calls}


def block(part: Part) -> str:
    about = part.about
    head = f"Machine: {about['machine']}. {about['date']}, commit {about['commit']}. Part `{about['part']}`:"
    command = f"```sh\n{shown(about['command'])}\n```"
    table = TABLES.get(about["part"])
    return f"{head}\n{command}\n{table(part) if table else text(part.output)}"


def rewritten(page: str, folder: Path) -> tuple[str, list[str]]:
    """The page with the tables of the parts in `folder`, and the names of these parts."""
    done = []

    def replace(found: re.Match) -> str:
        try:
            part = Part.read(folder, found[1])
        except Missing:
            return found[0]
        done.append(found[1])
        return f"<!-- bench/all {found[1]} -->\n{block(part)}\n\n<!-- end -->"

    return BLOCK.sub(replace, page), done


def write(folder: Path) -> None:
    page, done = rewritten(PAGE.read_text(), folder)
    PAGE.write_text(page)
    plots = [plot for part, name in PLOTS.items() if part in done and (plot := files(folder, part) / name).exists()]
    for plot in plots:
        shutil.copyfile(plot, PAGE.with_name(plot.name))
    shown = ", ".join(plot.name for plot in plots)
    print(f"{PAGE.name} has the tables of {', '.join(done) or 'no part'} now, and the plots {shown or '(none)'}")
    left = sorted(path.stem for path in folder.glob("*.txt") if path.stem not in done)
    if left:
        print(f"not on the page: {', '.join(left)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="which bench/all has written")
    parser.add_argument("--write", action="store_true", help="put its tables and plots into docs")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        sys.exit(f"{arguments.folder} is no folder: bench/all --out {arguments.folder}")
    report(arguments.folder)
    if arguments.write:
        write(arguments.folder)


if __name__ == "__main__":
    main()
