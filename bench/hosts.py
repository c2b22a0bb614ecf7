#!/usr/bin/env python3
"""Two hosts on one machine: what a collective takes over a link, and what it sends over it.

    cargo build --release -p phalanx-bench
    bench/hosts.py --rate 1gbit all_reduce -b 1M -e 16M -f 4
    bench/hosts.py --rate 1gbit all_reduce -b 1M -e 16M -f 4 --transport tcp
    bench/hosts.py --rate 1gbit --ranks 4,2 reduce_scatter
    bench/hosts.py --rate 10gbit --ranks 1 --floor 4 all_reduce -b 4 -e 64M -f 16

Two network namespaces, joined by a pair of virtual Ethernet devices, are the hosts; the ranks of one have the same
PHALANX_HOST_ID and so share memory, the ranks of different ones reach each other over the link alone. Bytes are those
that the devices count, with all headers: the difference between a run with many calls and one with few, for each call.

With --floor ROUNDS it times instead, in so many rounds in turn, with the clock of `phalanx bench`: this, and what bare sockets take for the same
(bench/peers/tcp_floor.c, which needs cc), as medians. `link` is the bytes of the call over the rate of the link.

Needs Linux with iproute2, and root or unprivileged user namespaces. Where that is missing it says so and ends with 77.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PHALANX_BENCH = TARGET / "release" / "phalanx-bench"
HOSTS = {"left": "10.77.0.1", "right": "10.77.0.2"}
PORT = 29500
SKIPPED = 77
# What distinguishes the run with few calls from the one with many.
FEW, WARM_UP = 1, 1


def skip(reason: str) -> None:
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(SKIPPED)


def become_root() -> None:
    """In a user namespace of our own, with a place for the names of network namespaces."""
    if os.getuid() == 0:
        return
    if subprocess.run(["unshare", "-Urnm", "true"], stderr=subprocess.DEVNULL).returncode:
        skip("not root, and user namespaces are not allowed (kernel.unprivileged_userns_clone, AppArmor)")
    inner = 'mount -t tmpfs tmpfs /run && exec "$0" "$@"'
    os.execvp("unshare", ["unshare", "-Urnm", "sh", "-c", inner, sys.executable, *sys.argv])


class Link:
    """Both namespaces and what joins them, for as long as it is entered."""

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        self.names = {host: f"phalanx-{host}-{os.getpid()}" for host in HOSTS}

    def __enter__(self) -> "Link":
        try:
            for name in self.names.values():
                ip("netns", "add", name)
            left, right = self.names.values()
            ip("link", "add", "wire", "netns", left, "type", "veth", "peer", "name", "wire", "netns", right)
            for host, address in HOSTS.items():
                inside = ["-n", self.names[host]]
                ip(*inside, "address", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    ip(*inside, "link", "set", device, "up")
                ip(*inside, "route", "add", "default", "dev", "wire")
                if self.rate:
                    shape = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
                    done(["tc", *inside, "qdisc", "add", "dev", "wire", *shape])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)

    def sent(self) -> list[int]:
        """Bytes that each host has sent so far."""
        counter = ["cat", "/sys/class/net/wire/statistics/tx_bytes"]
        return [int(done([*self.inside(host), *counter])) for host in HOSTS]

    def inside(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]


def ip(*arguments: str) -> None:
    done(["ip", *arguments])


def done(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        skip(f"{' '.join(command)}: {run.stderr.strip()}")
    return run.stdout


def bench(link: Link, options: list[str], counts: list[int], limit: float, is_bound: bool = False) -> list[dict]:
    """One run with so many ranks on each host; rank 0's rows. Each is bound to a processor of its own if `is_bound`."""
    places = [(host, local, count) for host, count in zip(HOSTS, counts, strict=True) for local in range(count)]
    ranks: list[subprocess.Popen] = []
    processors = sorted(os.sched_getaffinity(0))
    try:
        for rank, (host, local, count) in enumerate(places):
            variables = {"RANK": rank, "WORLD_SIZE": len(places), "MASTER_ADDR": HOSTS["left"], "MASTER_PORT": PORT}
            variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "PHALANX_HOST_ID": host}
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            bound = ["taskset", "-c", str(processors[rank])] if is_bound else []
            command = [*link.inside(host), *bound, str(PHALANX_BENCH), *options, "--json=-"]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
        end = time.monotonic() + limit
        text, _ = ranks[0].communicate(timeout=limit)
        codes = [rank.wait(timeout=max(0.1, end - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        sys.exit(f"not done after {limit:.0f} s; --limit allows more")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
                rank.wait()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return [json.loads(line) for line in text.splitlines()]


def floor(link: Link, collective: str, sizes: list[int], limit: float) -> list[float]:
    """What each size takes on bare sockets, in microseconds."""
    program = TARGET / "tcp_floor"
    source = ROOT / "bench" / "peers" / "tcp_floor.c"
    sources = [source, source.with_name("clock.h")]
    if not program.exists() or any(program.stat().st_mtime < each.stat().st_mtime for each in sources):
        done(["cc", "-O3", "-march=native", "-o", str(program), str(source), "-lm"])
    ranks = []
    try:
        for rank, host in enumerate(HOSTS):
            variables = {"FLOOR_RANK": rank, "FLOOR_ADDRESS": HOSTS["left"], "FLOOR_PORT": PORT}
            variables["FLOOR_CALL"] = collective
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            command = [*link.inside(host), str(program), "2", *map(str, sizes)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        text = ranks[0].communicate(timeout=limit)[0]
        if any(rank.wait(timeout=limit) for rank in ranks):
            sys.exit("bare sockets have failed")
    except subprocess.TimeoutExpired:
        sys.exit(f"not done after {limit:.0f} s; --limit allows more")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return [json.loads(line)["time_us"] for line in text.splitlines()]


def compare(link: Link, rounds: int, sizes: list[int], options: list[str], limit: float) -> None:
    """Prints what each size takes here and on bare sockets, and its bytes over the rate."""
    ours, bare = [], []

    def time_ours() -> None:
        # The bare sockets' processes bind themselves.
        runs = (bench(link, [*options, "-b", str(size), "-e", str(size)], [1] * len(HOSTS), limit, is_bound=True) for size in sizes)
        ours.append([rows[0]["time_us"] for rows in runs])

    def time_bare() -> None:
        bare.append(floor(link, options[0], sizes, limit))

    for turn in range(rounds):
        # Each is the first in turn.
        for time_them in (time_ours, time_bare) if turn % 2 == 0 else (time_bare, time_ours):
            time_them()
    print(f"{'bytes':>12} {'ours us':>12} {'bare us':>12} {'ours/bare':>10} {'ours/link':>10} {'bare/link':>10}")
    for size, mine, least in zip(sizes, zip(*ours), zip(*bare)):
        mine, least = statistics.median(mine), statistics.median(least)
        wire = size * 8e6 / bits(link.rate) if link.rate else None
        shares = [f"{time / wire:10.2f}" if wire and size >= 1 << 20 else f"{'':10}" for time in (mine, least)]
        print(f"{size:>12} {mine:>12.1f} {least:>12.1f} {mine / least:>10.2f} {' '.join(shares)}", flush=True)


def bits(rate: str) -> float:
    """Bits a second of a rate as `tc` writes it."""
    for unit, factor in {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    sys.exit(f"--floor takes a rate in kbit, mbit or gbit, not {rate}")


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def on_hosts(text: str) -> list[int]:
    """How many ranks each host has."""
    counts = [at_least_one(count) for count in text.split(",")]
    counts = counts * len(HOSTS) if len(counts) == 1 else counts
    if len(counts) != len(HOSTS):
        raise argparse.ArgumentTypeError(f"{text} is neither one number nor one for each of the {len(HOSTS)} hosts")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="what the link carries in each direction, such as 1gbit [default: all it can]")
    parser.add_argument("--ranks", type=on_hosts, default="2", metavar="N[,N]", help="ranks on each host, or on one and the other [default: 2]")
    parser.add_argument("--calls", type=at_least_one, default=20, help="timed calls of each size [default: 20]")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a run is given up [default: 120]")
    parser.add_argument("--floor", type=at_least_one, metavar="ROUNDS", help="time it beside bare sockets: all_reduce or send_recv, one rank on each host")
    parser.add_argument("collective")
    parser.add_argument("-b", "--min-bytes", default="1M", help="[default: 1M]")
    parser.add_argument("-e", "--max-bytes", default="16M", help="[default: 16M]")
    parser.add_argument("-f", "--factor", default="4", help="[default: 4]")
    arguments, rest = parser.parse_known_args()
    if not PHALANX_BENCH.exists():
        sys.exit(f"{PHALANX_BENCH} is missing: cargo build --release -p phalanx-bench")
    if arguments.floor and (arguments.collective not in ("all_reduce", "send_recv") or set(arguments.ranks) != {1}):
        sys.exit("--floor is for all_reduce and send_recv with --ranks 1")
    if arguments.floor and len(os.sched_getaffinity(0)) < 2:
        skip("--floor takes two processors: each host has one")
    if arguments.floor and arguments.rate:
        bits(arguments.rate)
    become_root()
    packages = {"ip": "iproute2", "tc": "iproute2"}
    if arguments.floor:
        packages |= {"taskset": "util-linux", "cc": "gcc"}
    for tool, package in packages.items():
        if not shutil.which(tool):
            skip(f"{tool} is missing (apt install {package})")

    # Ctrl-C and SIGTERM leave nothing behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    span = ["-b", arguments.min_bytes, "-e", arguments.max_bytes, "-f", arguments.factor]
    with Link(arguments.rate) as link:
        rows = bench(link, [arguments.collective, *span, "-n", "1", "-w", "0", *rest], arguments.ranks, arguments.limit)
        sizes = [row["bytes"] for row in rows]
        if arguments.floor:
            print(f"# {arguments.collective}, 2 hosts, 1 rank each, link {arguments.rate or 'unlimited'}, medians of {arguments.floor} rounds")
            compare(link, arguments.floor, sizes, [arguments.collective, *rest], arguments.limit)
            return
        print(f"# {rows[0]['name']}: {arguments.collective}, 2 hosts, {' and '.join(map(str, arguments.ranks))} ranks,", end=" ")
        print(f"link {arguments.rate or 'unlimited'}")
        print(f"{'bytes':>12} {'time ms':>10} {'left sends':>12} {'right sends':>12} {'of the size':>12}")
        for size in sizes:
            one = ["-b", str(size), "-e", str(size), "-w", str(WARM_UP), "-c", "0", *rest]
            before = link.sent()
            bench(link, [arguments.collective, *one, "-n", str(FEW)], arguments.ranks, arguments.limit)
            between = link.sent()
            calls = FEW + arguments.calls
            row = bench(link, [arguments.collective, *one, "-n", str(calls)], arguments.ranks, arguments.limit)[0]
            after = link.sent()
            sent = [(c - b - (b - a)) / arguments.calls for a, b, c in zip(before, between, after)]
            share = " + ".join(f"{bytes / max(size, 1):.2f}" for bytes in sent)
            print(f"{size:>12} {row['time_us'] / 1e3:>10.2f} {sent[0]:>12.0f} {sent[1]:>12.0f} {share:>12}", flush=True)


if __name__ == "__main__":
    main()
