#!/usr/bin/env python3
"""A table of all_reduce in docs/benchmarks.md as rows for `phalanx plot`: a plot of what the page says, without measuring again.

    bench/table.py "Two ranks, AMD, 2026-11-25" --ranks 2 > rows.json
    phalanx plot rows.json -o docs/all_reduce.png

The first column has sizes, the others times in µs, and the last one a ratio, which is left out. A bare loop is drawn as a limit.
"""

import argparse
import json
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heading", help="of the table's section")
    parser.add_argument("--ranks", type=int, required=True, help="with how many it was measured")
    arguments = parser.parse_args()

    section = PAGE.read_text().partition(f"### {arguments.heading}\n")[2].partition("\n#")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    if len(lines) < 3 or lines[0][0] != "size":
        sys.exit(f"{PAGE} has no table of sizes below a heading {arguments.heading!r}")
    (_, *names, _), rows = lines[0], lines[2:]
    for name, column in zip(names, zip(*(row[1:-1] for row in rows))):
        for row, time in zip(rows, column):
            if time in ("", "–", "-"):
                continue
            number, unit = row[0].split()
            size = int(number) * UNITS[unit]
            measured = {"time_us": float(time.replace(",", "")), "limit": name.startswith("bare ")}
            print(json.dumps({"name": name, "collective": "all_reduce", "ranks": arguments.ranks, "bytes": size} | measured))


if __name__ == "__main__":
    main()
