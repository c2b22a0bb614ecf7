#!/usr/bin/env python3
"""How long strangers hold up the start of a group: of one version, or of several in turn.

    cargo build --release -p phalanx-cli -p phalanx-bench
    bench/strangers.py target/release
    bench/strangers.py --times 20 ../before/target/release target/release

Rank 0 of three starts and serves the store. Then strangers come, each with a connection that stays open. Then ranks 1
and 2 start. Measured is the time from their start until the last of the three has the result of an all_reduce:

    alone     no strangers
    key       1000 strangers who say nothing, or a beginning of something, and up to 500 more a second
    tls       the job has TLS too; 400 strangers who say nothing

The job has a key in all three.

A folder holds `phalanx` and `phalanx-bench`. Needs Linux; traffic stays on the loopback.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

RANKS = 3
MARK = "phalanx-startup "
# Beginnings of what a store understands: its own greeting, a rank's, and those of PyTorch's clients.
BEGINNINGS = [b"", b"PHXS\x01\0\0\0", b"PHXH\x04\0\x01\0", b"\0\xce\xf7\x85\x3c", b"\0\xce\xf7\x85\x3c\x06\xff\xff\xff\xff"]
CASES = {"alone": (0, False), "key": (1000, True), "tls": (400, False)}
# Seconds.
START_LIMIT, BETWEEN = 60, 1 / 500
# Of descriptors, soft and hard, as the shell gives it. The strangers, which are this process, need more; the ranks get no more than users have.
USUAL = resource.getrlimit(resource.RLIMIT_NOFILE)


def stranger(port: int, number: int, silent: bool) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=START_LIMIT)
    if not silent:
        connection.sendall(BEGINNINGS[number % len(BEGINNINGS)])
    return connection


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for_store(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.005)
    sys.exit("rank 0 serves no store")


@contextmanager
def strangers(port: int, count: int, more: bool, silent: bool):
    """So many at once, and with `more` others that come and go."""
    over, held = threading.Event(), []

    def go_on() -> None:
        number = 0
        while not over.wait(BETWEEN):
            try:
                held.append(stranger(port, number, silent))
            except (ConnectionError, TimeoutError):
                # Rank 0 has ended.
                return
            number += 1
            if len(held) > 2 * count:
                held.pop(0).close()

    try:
        for number in range(count):
            held.append(stranger(port, number, silent))
        thread = threading.Thread(target=go_on, daemon=True)
        if more:
            thread.start()
        yield
    finally:
        over.set()
        if more:
            thread.join()
        for connection in held:
            connection.close()


def start(program: Path, case: str, files: Path) -> float:
    """The milliseconds until the last rank has its result."""
    count, more = CASES[case]
    port = unused_port()
    # A launcher's variables would count.
    common = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    common |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["PHALANX_JOB_KEY_FILE"] = str(files / "job.key")
    if case == "tls":
        common |= {"PHALANX_TLS_CA": str(files / "ca.pem")}
        common |= {"PHALANX_TLS_CERT": str(files / "node0.pem"), "PHALANX_TLS_KEY": str(files / "node0.key")}
    with ExitStack() as stack:
        def rank(number: int) -> subprocess.Popen:
            process = subprocess.Popen(
                [program / "phalanx-bench", "startup", "--worker"],
                env=common | {"RANK": str(number)}, stdout=subprocess.PIPE, text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, USUAL)
            return process

        processes = [rank(0)]
        wait_for_store(port, processes[0])
        stack.enter_context(strangers(port, count, more, silent=case == "tls"))
        # So that rank 0 has met those that are there.
        time.sleep(0.1)
        began = time.monotonic_ns()
        processes += [rank(number) for number in range(1, RANKS)]
        outputs = [process.communicate(timeout=START_LIMIT)[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit(f"{program}, {case}: a rank has failed")
    return max(int(output.split(MARK)[1]) - began for output in outputs) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="starts of each version and case")
    parser.add_argument("folders", type=Path, nargs="+", help="with `phalanx` and `phalanx-bench`")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL[1], USUAL[1]))
    with tempfile.TemporaryDirectory() as name:
        files, command = Path(name), options.folders[-1].resolve() / "phalanx"
        for arguments in (["keygen", "job.key"], ["certgen", ".", "node0"]):
            subprocess.run([command, *arguments], cwd=files, check=True, stdout=subprocess.DEVNULL)
        times = {(folder, case): [] for case in CASES for folder in options.folders}
        for _ in range(options.times):
            for folder, case in times:
                times[folder, case].append(start(folder.resolve(), case, files))
    print("milliseconds: median, most")
    for (folder, case), values in times.items():
        print(f"{case:6} {statistics.median(values):8.1f} {max(values):8.1f}  {folder}")


if __name__ == "__main__":
    main()
