"""The test of ray.sh: ray_cluster.py PHALANX LAUNCHED SCRATCH"""

import concurrent.futures
import os
import pathlib
import sys
import threading
import time

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DEDUP_LOGS"] = "0"
# Ray starts workers with a niceness of 15: beside a build they would take minutes.
os.environ["RAY_worker_niceness"] = "0"
# A node is dead when it has not been heard of for this long; the default is half a minute.
os.environ["RAY_health_check_period_ms"] = "1000"
os.environ["RAY_health_check_failure_threshold"] = "3"

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import phalanx_torch.ray as phalanx_ray

PHALANX, LAUNCHED, SCRATCH = sys.argv[1:]


def train(config):
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(group).__module__.startswith("phalanx_torch"), type(group)
    assert dist.get_backend() == config["backend"], dist.get_backend()
    total = torch.ones(1000) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((1000,), 3.0)), total
    nodes = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    assert len(set(nodes)) == 2, nodes
    flag = pathlib.Path(config["scratch"], "met")
    if config["is_long"] and not flag.exists():
        dist.barrier()
        if dist.get_rank() == 1:
            flag.write_text(ray.get_runtime_context().get_node_id())
        for _ in range(1200):
            dist.all_reduce(total)
            time.sleep(0.05)
        raise AssertionError("nobody has died")
    pathlib.Path(config["scratch"], f"trained-{dist.get_rank()}").write_text(config["name"])
    ray.train.report({"sum": float(total[0])})


def trainer(name, is_long=False, failures=0, torch_config=None):
    torch_config = torch_config or phalanx_ray.TorchConfig()
    return TorchTrainer(
        train,
        train_loop_config={"scratch": SCRATCH, "name": name, "is_long": is_long, "backend": torch_config.backend},
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "trains": 1}, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name=name, storage_path=f"{SCRATCH}/results", failure_config=FailureConfig(max_failures=failures)),
    )


def trains(name, **options):
    """It ends without an error, and both ranks have come to their ends."""
    trainer(name, **options).fit()
    assert [pathlib.Path(SCRATCH, f"trained-{rank}").read_text() for rank in (0, 1)] == [name] * 2


def when(flag, action):
    """Does it once the file is there."""

    def wait():
        for _ in range(1200):
            if pathlib.Path(SCRATCH, flag).exists():
                time.sleep(1)
                action()
                return
            time.sleep(0.1)
        print(f"FAILED: {flag} has not come", flush=True)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def fails(what, run, *wanted):
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        assert any(word in text for word in wanted), f"{what}: {text}"
        print(f"ok: {what}: {time.monotonic() - begun:.0f} s, {text.splitlines()[0][:160]}", flush=True)
        return
    raise AssertionError(f"{what}: no error")


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    node = {"num_cpus": 2, "resources": {"trains": 1}}
    nodes = [cluster.add_node(**node), cluster.add_node(**node)]
    ray.init(address=cluster.address)
    print("Ray", ray.__version__, flush=True)

    def die():
        """Of the nodes that take part: the flag names one of them."""
        (lost,) = [node for node in nodes if node.node_id == flag.read_text()]
        nodes.remove(lost)
        cluster.remove_node(lost, allow_graceful=False)

    def come():
        nodes.append(cluster.add_node(**node))

    flag = pathlib.Path(SCRATCH, "met")
    share = {"nodes": 2, "resources_per_node": {"CPU": 1, "trains": 1}, "launcher": PHALANX}
    trains("plain")
    print("ok: TorchTrainer over Phalanx, on two nodes", flush=True)
    trains("gloo", torch_config=phalanx_ray.TorchConfig(as_gloo=True))
    print("ok: as gloo", flush=True)

    come()
    killer = when("met", die)
    trains("again", is_long=True, failures=1)
    killer.join()
    print("ok: a node dies, and FailureConfig starts the job again on another", flush=True)
    flag.unlink()
    come()
    killer = when("met", die)
    fails("a node dies, and the job ends", trainer("ends", is_long=True).fit, "WorkerGroupError: ")
    killer.join()
    flag.unlink()

    phalanx_ray.run([LAUNCHED, "4"], processes_per_node=2, **share)
    print("ok: launchers of a program on two nodes", flush=True)
    fails("a rank that fails", lambda: phalanx_ray.run([LAUNCHED, "4", "3"], processes_per_node=2, **share), "has ended with 7")
    # No other process sleeps for 301 s.
    script = f"[ ! -e {flag} ] || exit 0; {LAUNCHED} 2; [ $RANK = 0 ] || touch {flag}; exec sleep 301"

    def lose_one(failures):
        """Ray starts nodes in the main thread alone, so `run` is in another."""
        ended = concurrent.futures.Future()

        def run():
            try:
                ended.set_result(phalanx_ray.run(["sh", "-c", script], max_failures=failures, **share))
            except Exception as error:
                ended.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        for _ in range(600):
            if flag.exists() or ended.done():
                break
            time.sleep(0.1)
        assert flag.exists() and not ended.done(), ended
        # On each node a launcher and its worker: what is to find nothing at the end finds them.
        assert wait_until(lambda: len(running(script)) >= 4), running(script)
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        if failures:
            come()
        ended.result(timeout=120)

    absent = {**share, "launcher": "no-such-launcher"}
    fails("no launcher is installed", lambda: phalanx_ray.run([LAUNCHED, "2"], **absent), "FileNotFoundError: [Errno 2] No such file or directory: 'no-such")

    # Both take part: there are no others.
    assert len(nodes) == 2, nodes
    lose_one(1)
    print("ok: a node dies, and all launchers are started again", flush=True)
    flag.unlink()
    fails("a node dies, and run ends", lambda: lose_one(0), "LauncherError: ")
    fails("too few nodes", lambda: phalanx_ray.run([LAUNCHED, "2"], start_timeout=5, **share), "TimeoutError: phalanx_torch.ray.run: the cluster has not 2")
    assert wait_until(lambda: not running(script)), running(script)
    print("ok: no launcher is left", flush=True)
    ray.shutdown()
    cluster.shutdown()


def running(script):
    """Launchers of the script, and its workers."""
    commands = {path.parent.name: text_of(path) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")}
    return {process: command for process, command in commands.items() if f"--\0sh\0-c\0{script}" in command or command == "sleep\x00301\x00"}


def wait_until(is_so):
    for _ in range(400):
        if is_so():
            return True
        time.sleep(0.1)
    return False


def text_of(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


main()
