#!/usr/bin/env python3
"""A slow and lossy network between two hosts of this machine, and jobs that start on it.

    network.py --phalanx target/debug/phalanx [--rtt 5 50 100 200 400] [--loss 0 1 5] [--starts N] -- PROGRAM ARGUMENTS..

Two network namespaces are joined by a pair of TUN devices. What one of them sends, this program gives to the other after half of the
round-trip time, or not at all. On each namespace `phalanx run` starts two ranks of PROGRAM. A start is right if both launchers end with
code 0. It needs root, iproute2 and /dev/net/tun.
"""

import argparse
import collections
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
ADDRESSES = ("10.97.0.1", "10.97.0.2")


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class Network:
    """Two namespaces, and the thread that carries packets between them."""

    def __init__(self):
        self.names = [f"phr{os.getpid()}{end}" for end in "ab"]
        self.delay = self.loss = 0.0
        self.random = random.Random(1)
        self.sent = self.lost = 0
        self.devices = []
        for name in self.names:
            ip("netns", "add", name)
        for name, address in zip(self.names, ADDRESSES):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up", "mtu", "1400", "txqueuelen", "5000")
            ip("-n", name, "link", "set", "lo", "up")
            self.devices.append(device)
        self.ending, self.end = os.pipe()
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    def carry(self):
        # One delay for all packets of a network, so each direction is a queue.
        queues = {device: collections.deque() for device in self.devices}
        other = dict(zip(self.devices, reversed(self.devices)))
        while True:
            now = time.monotonic()
            due = [queue[0][0] for queue in queues.values() if queue]
            wait = max(0, min(due) - now) if due else None
            readable = select.select([*self.devices, self.ending], [], [], wait)[0]
            if self.ending in readable:
                return
            for device in readable:
                for _ in range(100):
                    try:
                        packet = os.read(device, 2048)
                    except BlockingIOError:
                        break
                    self.sent += 1
                    if self.random.random() < self.loss:
                        self.lost += 1
                        continue
                    queues[other[device]].append((time.monotonic() + self.delay, packet))
            now = time.monotonic()
            for device, queue in queues.items():
                while queue and queue[0][0] <= now:
                    try:
                        os.write(device, queue.popleft()[1])
                    except OSError:
                        pass

    def set(self, rtt_ms, loss_percent):
        self.delay, self.loss = rtt_ms / 2000, loss_percent / 100

    def close(self):
        os.write(self.end, b"x")
        self.thread.join()
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", name])


class Run:
    """One job on both hosts."""

    def __init__(self, network, options, key):
        self.outputs = [tempfile.TemporaryFile() for _ in network.names]
        self.began = time.monotonic()
        self.nodes = []
        for node, (name, output) in enumerate(zip(network.names, self.outputs)):
            command = [
                "ip", "netns", "exec", name, options.phalanx, "run", "--job-key-file", key, "--nnodes", "2",
                "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--nproc-per-node", "2", "--", *options.program,
            ]
            # Namespaces of one kernel have one boot id: without a name of its own each would share memory with the other.
            # A packet that is lost twice at a round trip of 400 ms is more than a second of silence: the default would be a false death.
            environment = {"PHALANX_HEARTBEAT_TIMEOUT": "10", **os.environ, "PHALANX_HOST_ID": name}
            self.nodes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )

    def wait(self, limit):
        """The exit codes, the seconds until the last rank printed `started`, and those until both launchers have ended."""
        codes = []
        for node in self.nodes:
            try:
                codes.append(node.wait(max(0.1, self.began + limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                node.terminate()
                codes.append("late")
        return codes, time.monotonic() - self.began

    def text(self):
        said = []
        for output in self.outputs:
            output.seek(0)
            said.append(output.read().decode(errors="replace"))
        return said


def started(said):
    """The clock at which the last rank was connected: the worker prints it."""
    times = [int(line.split("phalanx-startup ")[1]) for line in said.splitlines() if "phalanx-startup " in line]
    return max(times, default=0) / 1e9, len(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--phalanx", required=True)
    parser.add_argument("--rtt", type=float, nargs="+", default=[5, 50, 100, 200, 400])
    parser.add_argument("--loss", type=float, nargs="+", default=[0, 1, 5])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--limit", type=float, default=30, help="seconds for a start with loss; without loss it is 2 s and --trips round trips")
    parser.add_argument("--trips", type=float, default=15, help="round trips that a start without loss may take beside 2 s")
    parser.add_argument("--lenient", action="store_true", help="only wrong ends are failures, not late starts")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    network, wrong = Network(), 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            key = os.path.join(folder, "key")
            subprocess.run([options.phalanx, "keygen", key], check=True, stdout=subprocess.DEVNULL)
            print("round trip  loss  starts right  slowest start  slowest end", flush=True)
            for loss in options.loss:
                for rtt in options.rtt:
                    network.set(rtt, loss)
                    limit = options.limit if loss else 2 + options.trips * rtt / 1000
                    right, slowest, ends = 0, 0.0, 0.0
                    for _ in range(options.starts):
                        run = Run(network, options, key)
                        codes, end = run.wait(2 * options.limit)
                        said = run.text()
                        clock, ranks = started("".join(said))
                        start = clock - run.began
                        slowest, ends = max(slowest, start), max(ends, end)
                        if codes != [0, 0] or ranks != 4 or (start > limit and not options.lenient):
                            print(f"codes {codes}, {ranks} ranks started within {start:.1f} s of {limit:.1f}", *said, sep="\n")
                            wrong += 1
                        else:
                            right += 1
                    print(f"{rtt:7.0f} ms  {loss:3.0f} %  {right:5} of {options.starts}  {slowest:11.1f} s  {ends:9.1f} s", flush=True)
    finally:
        network.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
