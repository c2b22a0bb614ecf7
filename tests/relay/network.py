#!/usr/bin/env python3
"""A slow, lossy and interrupted network between two hosts of this machine, and jobs that start, live and end on it.

    network.py --phalanx target/debug/phalanx [PART..] [--rtt MS..] [--loss PERCENT..] [--times N] --program PROGRAM ARGUMENTS..

Two network namespaces are joined by a pair of TUN devices. What one of them sends, this program gives to the other after half of the
round-trip time, or not at all. On each namespace `phalanx run` starts two ranks of PROGRAM, `phalanx-bench startup --worker`. The parts:

start   jobs start, at each round-trip time with each loss
outage  nothing passes for a while: jobs survive --survived, and end after --ending with an error that names the network
death   a rank and a launcher of the other host are killed, and named soon, in much less than a time-out; one is stopped, and named as a process
live    jobs run for --seconds without a false death

It needs root, iproute2 and /dev/net/tun.
"""

import argparse
import collections
import fcntl
import os
import random
import re
import select
import signal
import statistics
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
        self.is_cut = False
        self.random = random.Random(1)
        self.sent = self.lost = 0
        self.devices = []
        try:
            self.make()
        except BaseException:
            self.remove()
            raise
        self.ending, self.end = os.pipe()
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    def make(self):
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
                    if self.is_cut or self.random.random() < self.loss:
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
        self.remove()

    def remove(self):
        """The namespaces that are there, with all that runs in them."""
        for name in self.names:
            if not os.path.exists(f"/run/netns/{name}"):
                continue
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", name])


class Run:
    """One job on both hosts."""

    def __init__(self, network, options, key, *arguments):
        self.network = network
        self.outputs = [tempfile.TemporaryFile() for _ in network.names]
        self.began = time.monotonic()
        self.nodes = []
        for node, (name, output) in enumerate(zip(network.names, self.outputs)):
            command = [
                "ip", "netns", "exec", name, options.phalanx, "run", "--job-key-file", key, "--nnodes", "2",
                "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--nproc-per-node", "2", "--", *options.program, *arguments,
            ]
            # Namespaces of one kernel have one boot id: without a name of its own each would share memory with the other.
            environment = {**os.environ, "PHALANX_HOST_ID": name}
            self.nodes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )

    def wait(self, limit):
        """The exit codes, and the seconds until both launchers have ended."""
        codes = []
        for node in self.nodes:
            try:
                codes.append(node.wait(max(0.1, self.began + limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                node.terminate()
                codes.append("late")
        return codes, time.monotonic() - self.began

    def text(self, node=None):
        said = []
        for output in self.outputs if node is None else [self.outputs[node]]:
            # The launcher writes at its own offset.
            length = os.fstat(output.fileno()).st_size
            said.append(os.pread(output.fileno(), length, 0).decode(errors="replace"))
        return "\n".join(said)

    def await_text(self, node, pattern, limit):
        """The moment at which the node shows it; none if it does not."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            if re.search(pattern, self.text(node)):
                return time.monotonic()
            time.sleep(0.005)
        return None

    def await_start(self, limit):
        until = time.monotonic() + limit
        while started(self.text())[1] < 4 and time.monotonic() < until:
            time.sleep(0.01)
        return started(self.text())[1] == 4

    def processes(self, node, is_launcher):
        """The processes of a node's launcher, or of its workers."""
        pids = subprocess.run(["ip", "netns", "pids", self.network.names[node]], capture_output=True, text=True).stdout.split()
        found = []
        for pid in map(int, pids):
            try:
                words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
            except OSError:
                continue
            # The guard of a worker has its launcher's command line.
            if is_launcher and pid == self.nodes[node].pid or not is_launcher and b"--worker" in words and b"run" not in words:
                found.append(pid)
        return found


def started(said):
    """The clock at which the last rank was connected, and the number of ranks: the worker prints it."""
    times = [int(line.split("phalanx-startup ")[1]) for line in said.splitlines() if "phalanx-startup " in line]
    return max(times, default=0) / 1e9, len(times)


class Parts:
    """What is tried, a table each. `wrong` counts what went wrong."""

    def __init__(self, network, options, key):
        self.network, self.options, self.key, self.wrong = network, options, key, 0

    def run(self, *arguments):
        return Run(self.network, self.options, self.key, *arguments)

    def fail(self, *why):
        print(*why, sep="\n", flush=True)
        self.wrong += 1

    def start(self):
        options = self.options
        print("round trip  loss  starts right  median start  slowest start  slowest end", flush=True)
        for loss in options.loss:
            for rtt in options.rtt:
                self.network.set(rtt, loss)
                limit = options.limit if loss else 2 + options.trips * rtt / 1000
                right, starts, ends = 0, [], 0.0
                for _ in range(options.times):
                    run = self.run()
                    codes, end = run.wait(2 * options.limit)
                    clock, ranks = started(run.text())
                    start = clock - run.began
                    starts.append(start)
                    ends = max(ends, end)
                    if codes != [0, 0] or ranks != 4 or (start > limit and not options.lenient):
                        self.fail(f"codes {codes}, {ranks} ranks started within {start:.1f} s of {limit:.1f}", run.text())
                    else:
                        right += 1
                middle, aim = statistics.median(starts), 5 + options.trips * rtt / 1000
                if loss and middle > aim and not options.lenient:
                    missed = f"the median of the starts is {middle:.1f} s, more than {aim:.1f}"
                    # The aim is for a machine on which nothing else runs.
                    if middle > 1.5 * aim:
                        self.fail(missed)
                    else:
                        print(missed, flush=True)
                print(
                    f"{rtt:7.0f} ms  {loss:3.0f} %  {right:5} of {options.times}"
                    f"  {middle:10.2f} s  {max(starts):11.2f} s  {ends:9.1f} s",
                    flush=True,
                )

    def outage(self):
        options = self.options
        print("round trip  loss  outage    right", flush=True)
        for loss in options.loss:
            for rtt in options.rtt:
                self.network.set(rtt, loss)
                for outage in options.survived:
                    print(f"{rtt:7.0f} ms  {loss:3.0f} %  {outage:4.1f} s  {self.survived(outage)} survived", flush=True)
                for outage in options.ending:
                    print(f"{rtt:7.0f} ms  {loss:3.0f} %  {outage:4.1f} s  {self.ended(outage)}", flush=True)

    def survived(self, outage):
        """How many of these outages, one after the other, a job survives."""
        # After each, TCP may be silent for as long again.
        rest, times = 2 * outage + 2, self.options.times
        run = self.run("--seconds", str(times * (outage + rest) + 2))
        if not run.await_start(2 * self.options.limit):
            self.fail("the job did not start", run.text())
        survived = 0
        for _ in range(times):
            time.sleep(self.network.random.random())
            self.cut(outage)
            time.sleep(rest - 1)
            survived += all(node.poll() is None for node in run.nodes)
        codes, _ = run.wait(time.monotonic() - run.began + 2 * self.options.limit)
        if codes != [0, 0]:
            self.fail(f"codes {codes}", run.text())
        return f"{survived} of {times}"

    def ended(self, outage):
        """When a job ends in an outage, and whether it says why."""
        run = self.run("--seconds", "1000")
        if not run.await_start(2 * self.options.limit):
            self.fail("the job did not start", run.text())
        since = time.monotonic()
        cutting = threading.Thread(target=self.cut, args=(outage,))
        cutting.start()
        seen = [run.await_text(node, "the network is silent", outage + 5) for node in (0, 1)]
        codes, end = run.wait(since - run.began + outage + 30)
        cutting.join()
        if 0 in codes or "late" in codes or None in seen:
            self.fail(f"codes {codes}, named after {[at and at - since for at in seen]}", run.text())
            return "wrong"
        return f"named after {max(seen) - since:.1f} s, ended after {end - (since - run.began):.1f} s"

    def cut(self, seconds):
        self.network.is_cut = True
        time.sleep(seconds)
        self.network.is_cut = False

    def death(self):
        options = self.options
        print("round trip  loss  what                  named after  ended after", flush=True)
        cases = [
            ("rank killed", 1, False, signal.SIGKILL, "rank [23] .*(was lost|died)", 5),
            ("launcher killed", 1, True, signal.SIGKILL, "rank [23] .*(was lost|died)", 5),
            ("launcher 0 killed", 0, True, signal.SIGKILL, "rank [01] .*(was lost|died)|node 0 .*is gone", 5),
            ("rank stopped", 1, False, signal.SIGSTOP, "rank [23] .*(is frozen|is stopped)", 20),
        ]
        for loss in options.loss:
            for rtt in options.rtt:
                self.network.set(rtt, loss)
                for what, node, is_launcher, number, pattern, limit in cases:
                    for _ in range(options.times):
                        run = self.run("--seconds", "1000")
                        if not run.await_start(2 * options.limit):
                            self.fail("the job did not start", run.text())
                        time.sleep(0.5 + self.network.random.random())
                        victims = run.processes(node, is_launcher)
                        # Both ranks of a host: one would be seen to be stopped by the other.
                        victims = victims if number == signal.SIGSTOP else victims[:1]
                        since = time.monotonic()
                        for pid in victims:
                            os.kill(pid, number)
                        seen = run.await_text(1 - node, pattern, limit + 10 * rtt / 1000)
                        run.nodes[1 - node].wait(60)
                        ended = time.monotonic() - since
                        for pid in victims if number == signal.SIGSTOP else []:
                            try:
                                os.kill(pid, signal.SIGCONT)
                            except ProcessLookupError:
                                pass
                        codes, _ = run.wait(since - run.began + 60)
                        if seen is None or 0 in codes:
                            self.fail(f"{what}: codes {codes}", run.text())
                        named = f"{seen - since:.2f}" if seen else "not"
                        print(f"{rtt:7.0f} ms  {loss:3.0f} %  {what:20}  {named:>9} s  {ended:9.1f} s", flush=True)

    def live(self):
        options = self.options
        for loss in options.loss:
            for rtt in options.rtt:
                self.network.set(rtt, loss)
                run = self.run("--seconds", str(options.seconds))
                codes, end = run.wait(options.seconds + 4 * options.limit)
                if codes != [0, 0]:
                    self.fail(f"codes {codes} after {end:.1f} s", run.text())
                print(f"{rtt:7.0f} ms  {loss:3.0f} %  {options.seconds:.0f} s  codes {codes}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["start"], help="start, outage, death, live")
    parser.add_argument("--phalanx", required=True)
    parser.add_argument("--rtt", type=float, nargs="+", default=[5, 50, 100, 200, 400])
    parser.add_argument("--loss", type=float, nargs="+", default=[0, 1, 5])
    parser.add_argument("--times", type=int, default=3, help="starts, outages or deaths of each kind")
    parser.add_argument("--limit", type=float, default=30, help="seconds for each start with loss")
    parser.add_argument("--trips", type=float, default=10, help="round trips that a start may take beside 2 s, and the median with loss beside 5 s")
    parser.add_argument("--survived", type=float, nargs="*", default=[0.5, 1, 2], help="seconds of an outage that a job survives")
    parser.add_argument("--ending", type=float, nargs="*", default=[15], help="seconds of an outage that ends a job")
    parser.add_argument("--seconds", type=float, default=300, help="how long a job lives")
    parser.add_argument("--lenient", action="store_true", help="only wrong ends are failures, not late starts")
    parser.add_argument("--program", nargs=argparse.REMAINDER, required=True, help="the rank and its arguments, last")
    options = parser.parse_args()
    if unknown := set(options.parts) - {"start", "outage", "death", "live"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: start, outage, death, live")
    # As Ctrl-C: nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    network, wrong = Network(), 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            key = os.path.join(folder, "key")
            subprocess.run([options.phalanx, "keygen", key], check=True, stdout=subprocess.DEVNULL)
            parts = Parts(network, options, key)
            for part in options.parts:
                {"start": parts.start, "outage": parts.outage, "death": parts.death, "live": parts.live}[part]()
            wrong = parts.wrong
    finally:
        network.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
