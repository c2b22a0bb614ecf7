#!/usr/bin/env python3
"""Trains with torchft's manager over Phalanx, kills replicas and starts them again, and measures what that costs the others.

    pip install torchft
    python tests/torchft_kills.py --seconds 300 --kills 10
    python tests/torchft_kills.py --backend gloo                # torchft's own group, to compare

A step is a pause of --work seconds, in place of a device's work, the backward pass of a small model, and torchft's quorum, all_reduce and
commit. Each replica writes a line for each step that it has committed, with the hash of its parameters. It fails if

* a step that was committed is lost: the numbers that the replicas have committed have a gap, or one goes back or does a step again;
* two replicas have other parameters after the same step;
* a survivor ends.

It prints how long survivors stood still at each kill, from the last commit before it to the first one after it, less one undisturbed step; and
how many steps the living replicas have committed, of those that they could have, had each taken as long as the mean (and the median) step of the
seconds in which nobody died or came back. A replica lives from its first commit to its death.
"""

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time


def replica(number, arguments, lighthouse, path):
    import logging

    import torch
    import torch.distributed as dist
    import torchft

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.backend == "phalanx":
        from phalanx_torch.torchft import ProcessGroupPhalanx as Group
    else:
        from torchft import ProcessGroupGloo as Group
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = datetime.timedelta(seconds=20)
    manager = torchft.Manager(
        pg=Group(timeout=limit),
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{number}-",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        use_async_quorum=True,
    )
    optimizer = torchft.Optimizer(manager, inner)
    parameters = list(model.parameters())
    with open(path, "a", buffering=1) as file:
        while True:
            optimizer.zero_grad()
            time.sleep(arguments.work)
            step = manager.current_step()
            generator = torch.Generator().manual_seed(1000 * step + number)
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            # torchft 0.2's DistributedDataParallel ends a survivor whose all_reduce on the CPU has failed, over gloo, too (`assert fut._fut`).
            gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
            manager.allreduce(gradients).wait()
            for parameter, mean in zip(parameters, gradients.split([parameter.numel() for parameter in parameters])):
                parameter.grad.copy_(mean.view_as(parameter))
            optimizer.step()
            if manager.current_step() > step:
                state = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
                line = {"at": time.time(), "step": manager.current_step(), "of": manager.num_participants(), "hash": hashlib.sha256(state).hexdigest()}
                file.write(json.dumps(line) + "\n")


def read(path):
    if not os.path.exists(path):
        return []
    with open(path) as file:
        # The last line of a replica that was killed may be cut off.
        return [json.loads(line) for line in file if line.endswith("\n")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--work", type=float, default=0.1)
    parser.add_argument("--heartbeat-timeout", type=int, default=500, help="ms without a sign after which torchft's lighthouse takes a replica for dead")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")
    random.seed(arguments.seed)
    context = multiprocessing.get_context("forkserver")
    # So that a replica that comes back does not first import PyTorch for seconds.
    context.set_forkserver_preload(["torch", "torchft", "phalanx_torch.torchft"])
    from torchft._torchft import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=20, heartbeat_timeout_ms=arguments.heartbeat_timeout
    )
    folder = tempfile.mkdtemp(prefix="torchft-")
    lives, living = [], {}

    def start(number):
        path = f"{folder}/{number}-{len(lives)}"
        process = context.Process(target=replica, args=(number, arguments, lighthouse.address(), path), daemon=True)
        process.start()
        lives.append({"number": number, "path": path, "process": process, "end": None})
        living[number] = lives[-1]

    def wait_until(ready, limit=60.0):
        deadline = time.monotonic() + limit
        while not ready():
            if time.monotonic() > deadline:
                raise SystemExit("replicas do not train")
            check()
            time.sleep(0.02)

    def check():
        for life in living.values():
            if not life["process"].is_alive():
                raise SystemExit(f"replica {life['number']}, which nobody has killed, has ended with {life['process'].exitcode}")

    def together():
        """Whether all replicas have committed a step with all others."""
        last = [read(life["path"])[-1:] for life in living.values()]
        return all(line and line[0]["of"] == arguments.replicas for line in last)

    kills = []
    try:
        for number in range(arguments.replicas):
            start(number)
        wait_until(together)
        begin = time.time()
        interval = arguments.seconds / (arguments.kills + 1)
        for kill in range(arguments.kills):
            while time.time() < begin + interval * (kill + 1):
                check()
                time.sleep(0.05)
            victim = living.pop(random.choice(sorted(living)))
            os.kill(victim["process"].pid, signal.SIGKILL)
            victim["process"].join(30)
            victim["end"] = time.time()
            kills.append((victim["end"], [life["path"] for life in living.values()]))
            start(victim["number"])
            wait_until(together)
        while time.time() < begin + arguments.seconds:
            check()
            time.sleep(0.05)
        end = time.time()
        check()
    finally:
        for life in lives:
            if life["process"].is_alive():
                life["process"].kill()
                life["process"].join(30)
        lighthouse.shutdown()
    sys.exit(report(arguments, begin, end, kills, lives))


def report(arguments, begin, end, kills, lives):
    logs = {life["path"]: read(life["path"]) for life in lives}
    failures = []
    # What was committed is there.
    hashes = {}
    for path, lines in logs.items():
        steps = [line["step"] for line in lines]
        if any(after <= before for before, after in zip(steps, steps[1:])):
            failures.append(f"{path}: a step was done again, or goes back")
        for line in lines:
            if hashes.setdefault(line["step"], line["hash"]) != line["hash"]:
                failures.append(f"step {line['step']}: other parameters in {path}")
    lost = sorted(set(range(1, max(hashes) + 1)) - set(hashes))
    if lost:
        failures.append(f"no replica has committed the steps {lost}")
    # What is undisturbed: the steps outside of the times from a kill to the first step with all again.
    every = [(line["at"], line["of"]) for lines in logs.values() for line in lines]
    disturbed = [(at, min((t for t, of in every if t > at + 0.5 and of == arguments.replicas), default=end) + 0.5) for at, _ in kills]
    usual = []
    for lines in logs.values():
        for before, after in zip(lines, lines[1:]):
            if begin <= before["at"] and not any(at < after["at"] and before["at"] < until for at, until in disturbed):
                usual.append(after["at"] - before["at"])
    step, mean = statistics.median(usual), statistics.mean(usual)
    pauses = []
    for at, paths in kills:
        for path in paths:
            times = [line["at"] for line in logs[path]]
            before, after = [t for t in times if t <= at][-1:], [t for t in times if t > at][:1]
            if not before or not after:
                failures.append(f"{path}: has not gone on after a kill")
            else:
                pauses.append(max(0.0, after[0] - before[0] - step))
    done = possible = 0
    for life in lives:
        times = [line["at"] for line in logs[life["path"]]]
        if not times:
            continue
        first, last = max(begin, times[0]), min(end, life["end"] or end)
        done += sum(first < t <= last for t in times)
        possible += last - first
    pauses.sort()
    print(
        f"{arguments.backend}: {len(kills)} kills in {end - begin:.0f} s, {arguments.replicas} replicas; {max(hashes)} steps committed, {len(lost)} lost; "
        f"an undisturbed step {1000 * step:.0f} ms (median of {len(usual)}, mean {1000 * mean:.0f}); survivors' pause: "
        f"p50 {statistics.median(pauses):.2f} s, most {pauses[-1]:.2f} s; "
        f"{100 * done * mean / possible:.1f} % of what the living replicas could do ({100 * done * step / possible:.1f} % by the median step)"
    )
    for failure in failures:
        print(f"FAILED: {failure}")
    return bool(failures)


if __name__ == "__main__":
    main()
