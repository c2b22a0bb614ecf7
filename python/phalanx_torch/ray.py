"""Phalanx under Ray: the groups of Ray Train's workers, and launchers of any program on the nodes of a Ray cluster.

A ``TorchTrainer`` trains over Phalanx with another configuration::

    from phalanx_torch.ray import TorchConfig

    trainer = TorchTrainer(train, torch_config=TorchConfig(), scaling_config=ScalingConfig(num_workers=4))

and a program of Rust, or any other that torchrun could start, is started on several nodes by::

    phalanx_torch.ray.run(["./train", "--epochs", "6"], nodes=2, processes_per_node=4)

Written for Ray Train V2, and tested with Ray 2.60. The package has to be installed on every node.
"""

# Without Ray, pyright takes this file for it.
# pyright: reportAttributeAccessIssue=false

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]
from ray.train import torch as ray_torch  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import (  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]

_PR_SET_PDEATHSIG = 1
# How long a launcher may take to end its workers before it is killed: its own grace period (30 s) and a little.
_GRACE = 35.0


@dataclass
class TorchConfig(ray_torch.TorchConfig):  # type: ignore[misc, unused-ignore]
    """Ray's configuration with ``backend="phalanx"``.

    With ``as_gloo`` the groups call themselves gloo, for libraries that know no other name: ``backend`` is then ``"gloo"``.
    """

    backend: str | None = None
    as_gloo: bool = False

    def __post_init__(self) -> None:
        wanted = "gloo" if self.as_gloo else "phalanx"
        if self.backend is None:
            self.backend = wanted
        elif wanted not in self.backend:
            raise ValueError(
                f"phalanx_torch.ray.TorchConfig: with as_gloo={self.as_gloo} the backend has to be {wanted}, and is {self.backend!r}; leave it "
                "out, or take ray.train.torch.TorchConfig for another"
            )

    @property
    def backend_cls(self) -> type:
        return _backend()


def _backend() -> type:
    # Ray has no public class of it: the one that its own configuration gives.
    base: type = ray_torch.TorchConfig().backend_cls

    class PhalanxBackend(base):  # type: ignore[misc]
        """Ray's, after the import in each worker."""

        def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
            worker_group.execute(_register, backend_config.as_gloo)
            super().on_start(worker_group, backend_config)

    return PhalanxBackend


def _register(is_gloo: bool) -> None:
    import phalanx_torch

    if is_gloo:
        phalanx_torch.as_gloo()


class LauncherError(RuntimeError):
    """A launcher has ended with an error, or is lost.

    ``node`` is the number of the first node whose launcher was seen to end so. ``code`` is that launcher's exit code, which is the exit code of the
    rank that failed first, on any node; None if the launcher is lost.
    """

    def __init__(self, message: str, node: int, code: int | None) -> None:
        super().__init__(message)
        self.node = node
        self.code = code


def run(
    command: Sequence[str],
    *,
    nodes: int,
    processes_per_node: int = 1,
    resources_per_node: Mapping[str, float] | None = None,
    options: Sequence[str] = (),
    max_failures: int = 0,
    start_timeout: float = 300.0,
    launcher: str = "phalanx",
) -> None:
    """Starts ``phalanx run`` on ``nodes`` nodes of the cluster, each with ``processes_per_node`` workers, and returns when all have ended with 0.

    Each node gives ``resources_per_node`` (``{"CPU": processes_per_node}``), and no two launchers share one. ``options`` are further
    options of ``phalanx run``. A failure ends the launchers on all nodes. They are then started again, up to ``max_failures`` times, on the
    nodes that the cluster has at that time. After the last time a failure is a :class:`LauncherError`. If the cluster has too few nodes for
    ``start_timeout`` seconds, it is a ``TimeoutError``.
    """
    if nodes < 1 or processes_per_node < 1 or max_failures < 0 or not command:
        raise ValueError("phalanx_torch.ray.run: give a command, at least one node and one process, and no negative max_failures")
    resources = dict(resources_per_node or {"CPU": float(processes_per_node)})
    for attempt in range(max_failures + 1):
        try:
            _run_once(command, nodes, processes_per_node, resources, options, start_timeout, launcher)
            return
        except LauncherError as error:
            if attempt == max_failures:
                raise
            print(f"phalanx: {error}; restart {attempt + 1} of {max_failures}", flush=True)


def _run_once(
    command: Sequence[str],
    nodes: int,
    processes: int,
    resources: dict[str, float],
    options: Sequence[str],
    start_timeout: float,
    launcher: str,
) -> None:
    group = placement_group([dict(resources)] * nodes, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout):
            raise TimeoutError(
                f"phalanx_torch.ray.run: the cluster has not {nodes} nodes with {resources} each that are free, within {start_timeout:.0f} s; "
                "ask for fewer, or give a longer start_timeout"
            )
        of_node = ray.remote(_Launcher)
        for node in range(nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            cpus = resources.get("CPU", 0.0)
            others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
            settings = of_node.options(
                num_cpus=cpus,
                num_gpus=resources.get("GPU", 0.0),
                memory=resources.get("memory", 0.0),
                resources=others,
                scheduling_strategy=strategy,
                max_concurrency=2,
            )
            actors.append(settings.remote())
        address, port = _get(actors[0].address.remote(), 0, start_timeout)
        key = secrets.token_hex(32)
        runs = {}
        for node, actor in enumerate(actors):
            arguments = [launcher, "run", "--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
            arguments += ["--nproc-per-node", str(processes), *options, "--", *command]
            runs[actor.run.remote(arguments, key)] = node
        waiting = list(runs)
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            node = runs[done]
            code = _get(done, node, None)
            if code != 0:
                raise LauncherError(f"the launcher of node {node} has ended with {code}: its output says why", node, code)
    finally:
        _end(actors)
        remove_placement_group(group)


def _get(reference: Any, node: int, timeout: float | None) -> Any:
    try:
        return ray.get(reference, timeout=timeout)
    except RayError as error:
        # What was raised in the other process, if that is it.
        reason = getattr(error, "cause", None) or error
        first = str(reason).strip().partition("\n")[0]
        raise LauncherError(f"node {node} is lost, or cannot start its launcher: {type(reason).__name__}: {first}", node, None) from error


def _end(actors: list[Any]) -> None:
    """Ends what still runs, and waits for it."""
    if actors:
        ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=_GRACE + 10)
    for actor in actors:
        ray.kill(actor)


class _Launcher:
    """On each node: one launcher, which does not outlive this."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._changes = threading.Lock()

    def address(self) -> tuple[str, int]:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call, unused-ignore]
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            return address, free.getsockname()[1]

    def run(self, arguments: list[str], key: str) -> int:
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        with tempfile.NamedTemporaryFile("w", prefix="phalanx-key-") as file:
            file.write(key + "\n")
            file.flush()
            with self._changes:
                if self._is_over:
                    return 1
                process = subprocess.Popen([*arguments[:2], "--job-key-file", file.name, *arguments[2:]], preexec_fn=with_parent)
                self._process = process
            return process.wait()

    def stop(self) -> None:
        with self._changes:
            self._is_over = True
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
