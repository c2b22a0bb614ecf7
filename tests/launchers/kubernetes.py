"""Replays what Kubernetes and its engines give to the pods of our manifests; see kubernetes.sh.

    kubernetes.py PHALANX LAUNCHED SCRATCH     in namespaces of its own: network, mounts, hostname, processes
"""

import itertools
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import yaml

PHALANX, LAUNCHED, SCRATCH = sys.argv[1:]
MANIFESTS = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
DNS = "10.79.255.254"
NAME_DELAY = 3  # Seconds from a pod's start until its name leads to it. Before, an earlier pod's address is found, or none.
LIMIT = 90
GRACE = 30  # Seconds that `phalanx run` gives to its workers.
numbers = itertools.count(1)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


class Dns(threading.Thread):
    """Answers for the names that it knows, and says that there is no other."""

    def __init__(self):
        super().__init__(daemon=True)
        self.addresses, self.asked_in_vain = {}, 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((DNS, 53))

    def run(self):
        while True:
            query, sender = self.socket.recvfrom(512)
            at, labels = 12, []
            while query[at]:
                labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
                at += 1 + query[at]
            question = query[12 : at + 5]
            (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
            address = self.addresses.get(".".join(labels))
            answer = b""
            if address and kind == 1:
                answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(address)
            elif not address:
                self.asked_in_vain += 1
            flags = 0x8580 | (0 if address else 3)
            self.socket.sendto(query[:2] + struct.pack(">HHHHH", flags, 1, 1 if answer else 0, 0, 0) + question + answer, sender)


def documents(name):
    return {document["kind"]: document for document in yaml.safe_load_all((MANIFESTS / name).read_text())}


def pods_in(value):
    """Each part of a manifest that says what a pod is."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from pods_in(item)


def check(name):
    """Pods may take longer to end than their workers, and all have one version of their image."""
    found = [pod for document in documents(name).values() for pod in pods_in(document)]
    assert found, f"{name} has no pod"
    for pod in found:
        assert pod["terminationGracePeriodSeconds"] > GRACE, name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag not in ("", "latest"), f"{name}: {container['image']} may become another one"


class Plan:
    """A pod: its names, its command and its variables. One of these is asked for its address."""

    def __init__(self, hostname, subdomain, index, container, extra=()):
        self.hostname = hostname
        self.name = f"{hostname}.{subdomain}" if subdomain else hostname
        self.index, self.command, self.variables = index, container["command"], dict(extra)
        self.wants_address = []
        for variable in container.get("env", []):
            if "value" in variable:
                self.variables[variable["name"]] = variable["value"]
            elif variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP":
                self.wants_address.append(variable["name"])
            else:
                assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                self.variables[variable["name"]] = str(index)
        if container.get("volumeMounts"):
            # What the init container has copied for the user.
            self.variables["PHALANX_JOB_KEY_FILE"] = f"{SCRATCH}/job.key"


def indexed(job, name, subdomain, extra=lambda index: {}):
    """The pods of an Indexed Job of this name."""
    spec = job["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] and spec["restartPolicy"] == "Never"
    (container,) = spec["containers"]
    pods = []
    for index in range(job["completions"]):
        common = {"JOB_COMPLETION_INDEX": str(index), **extra(index)}
        pods.append(Plan(f"{name}-{index}", subdomain, index, container, common))
    return pods


def plain(name):
    found = documents(name)
    service, job = found["Service"], found["Job"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    return indexed(job["spec"], job["metadata"]["name"], service["metadata"]["name"])


def jobset(name):
    found = documents(name)["JobSet"]
    (replicated,) = found["spec"]["replicatedJobs"]
    job = found["metadata"]["name"]
    return indexed(replicated["template"]["spec"], f"{job}-{replicated['name']}-0", job)


def trainjob(name):
    found = documents(name)
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and runtime["spec"]["mlPolicy"]["torch"] == {}
    trainer, job_name = job["spec"]["trainer"], job["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"
    # The operator puts these in, and JobSet makes an Indexed Job of it.
    container["command"] = trainer["command"]
    whole = {"completionMode": "Indexed", "parallelism": trainer["numNodes"], "completions": trainer["numNodes"], "template": template}
    return indexed(
        whole,
        f"{job_name}-node-0",
        job_name,
        lambda index: {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{job_name}-node-0-0.{job_name}",
            "PET_MASTER_PORT": "29500",
        },
    )


def pytorchjob(name):
    job = documents(name)["PyTorchJob"]
    spec, job_name = job["spec"], job["metadata"]["name"]
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(part["replicas"] for part in replicas.values())
    processes, master = spec["nprocPerNode"], f"{job_name}-master-0"
    pods = []
    for kind in ("Master", "Worker"):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        for index in range(replicas[kind]["replicas"]):
            rank = str(len(pods))
            variables = {
                "PYTHONUNBUFFERED": "1",
                "MASTER_PORT": "23456",
                "PET_MASTER_PORT": "23456",
                "MASTER_ADDR": master,
                "PET_MASTER_ADDR": master,
                "WORLD_SIZE": str(total * int(processes)),
                "RANK": rank,
                "PET_NODE_RANK": rank,
                "PET_NPROC_PER_NODE": processes,
                "PET_NNODES": str(total),
            }
            pods.append(Plan(f"{job_name}-{kind.lower()}-{index}", None, len(pods), container, variables))
    return pods


class Pod:
    """One start of a planned pod."""

    def __init__(self, cluster, plan):
        number = next(numbers)
        self.address, self.link = f"10.79.{number // 250}.{number % 250 + 1}", f"pod{number}"
        self.plan, self.cluster = plan, cluster
        program = f"exec {LAUNCHED} $WORLD_SIZE notice"
        words = {"phalanx": [PHALANX], "/app/train": ["sh", "-c", program]}
        command = [made for word in plan.command for made in words.get(word, [word])]
        variables = {"PATH": os.environ["PATH"], "HOSTNAME": plan.hostname, "KUBERNETES_SERVICE_HOST": "10.0.0.1", **plan.variables}
        variables |= {name: self.address for name in plan.wants_address}
        begin = f"read go; hostname {plan.hostname}; exec {PHALANX!r} \"$@\""
        own = ["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        assert command[0] == PHALANX
        self.log = open(f"{SCRATCH}/{self.link}.log", "w+b")
        self.process = subprocess.Popen(
            [*own, "sh", "-c", begin, "sh", *command[1:]], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, env=variables
        )
        holder = str(self.process.pid)
        wait("a network of its own", lambda: os.readlink(f"/proc/{holder}/ns/net") != os.readlink("/proc/self/ns/net"))
        inside = ["nsenter", "--target", holder, "--net", "ip"]
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", holder)
        ip("link", "set", self.link, "master", "nodes", "up")
        for rest in (["link", "set", "lo", "up"], ["addr", "add", f"{self.address}/16", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run([*inside, *rest], check=True)
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()
        threading.Timer(NAME_DELAY, self.name_it).start()

    def name_it(self):
        self.cluster.dns.addresses[f"{self.plan.name}.{DOMAIN}"] = self.address

    def first(self):
        """Process 1 in the pod, as it is called here."""
        return int(pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def said(self):
        self.log.flush()
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def lose(self):
        """As if the node's power were cut: nobody is told."""
        ip("link", "del", self.link)
        self.process.kill()
        self.process.wait()


def wait(what, condition, limit=LIMIT, meanwhile=lambda: None):
    begun = time.monotonic()
    while not condition():
        meanwhile()
        if time.monotonic() - begun > limit:
            raise SystemExit(f"FAILED: not {what} within {limit} s")
        time.sleep(0.1)
    return time.monotonic() - begun


class Cluster:
    """Replaces each pod that ends with an error, as the engine does; five times each."""

    def __init__(self, dns, plans):
        self.dns, self.pods, self.ended, self.plans = dns, [], [], plans
        dns.addresses.clear()
        for plan in plans:
            self.pods.append(Pod(self, plan))
        self.starts = [1] * len(plans)

    def replace(self, index):
        self.starts[index] += 1
        if self.starts[index] > 5:
            raise SystemExit(f"FAILED: pod {index} has been started five times")
        self.ended.append(self.pods[index])
        self.pods[index] = Pod(self, self.plans[index])

    def control(self):
        for index, pod in enumerate(self.pods):
            if pod.process.poll() not in (None, 0):
                self.replace(index)

    def count(self, line):
        return sum(pod.said().count(line) for pod in [*self.ended, *self.pods])

    def others(self, index):
        return [pod for pod in self.pods if pod.plan.index != index]

    def has_kept(self, kept):
        if not all(pod in self.pods and pod.process.poll() is None for pod in kept):
            raise SystemExit("FAILED: another pod than the lost one was replaced")

    def comes(self, line, times):
        seconds = wait(f'"{line}" {times} times', lambda: self.count(line) >= times, meanwhile=self.control)
        print(f"ok: {line}, for the {times}. time ({seconds:.1f} s)", flush=True)

    def finish(self):
        """The time limit comes: a signal to one pod's first process, and all ranks end in one step."""
        os.kill(self.pods[1].first(), signal.SIGUSR1)
        wait("the end of all pods", lambda: all(pod.process.poll() is not None for pod in self.pods))
        ranks = 2 * len(self.pods)
        if any(pod.process.returncode for pod in self.pods) or self.count(f"noticed, all {ranks} in the same step: true") != 1:
            raise SystemExit("FAILED: the pods did not end together and well")
        print("ok: all pods end together", flush=True)

    def show(self):
        for pod in [*self.ended, *self.pods]:
            print(f"--- {pod.plan.hostname} at {pod.address}:\n{pod.said()}")


def locals_of(pods):
    return "[" + ", ".join(["0, 1"] * pods) + "]"


def replay(dns, name, plans, is_elastic):
    print(f"== {name}", flush=True)
    dns.asked_in_vain = 0
    cluster = Cluster(dns, plans)
    four = f"one group of 8, local ranks {locals_of(4)}"
    three = f"one group of 6, local ranks {locals_of(3)}"
    try:
        cluster.comes(four, 1)
        # The names came late, and were asked for before.
        if not dns.asked_in_vain:
            raise SystemExit("FAILED: no name was asked for before it was known")
        # A pod is lost without a word. The others go on: as three at once, where the manifest lets them, or as four when it is back.
        kept = cluster.others(2)
        cluster.pods[2].lose()
        if is_elastic:
            lost, cluster.control = cluster.control, lambda: None
            seconds = wait(f'"{three}"', lambda: cluster.count(three) >= 1)
            cluster.control = lost
            print(f"ok: three go on without it ({seconds:.1f} s)", flush=True)
        cluster.comes(four, 2)
        cluster.has_kept(kept)
        print("ok: only the lost pod was replaced", flush=True)
        # A pod is told to end, as when its node is drained.
        kept = cluster.others(3)
        os.kill(cluster.pods[3].first(), signal.SIGTERM)
        cluster.comes(four, 3)
        cluster.has_kept(kept)
        print("ok: only the pod that was told to end was replaced", flush=True)
        # The one that serves the store. Its name leads to the old address for a while.
        before = cluster.others(0)
        cluster.pods[0].lose()
        cluster.comes(four, 4)
        if any(pod in cluster.pods for pod in before):
            raise SystemExit("FAILED: a pod lived on without the one that serves the store")
        print("ok: all were replaced with the one that serves the store", flush=True)
        cluster.finish()
    except BaseException:
        cluster.show()
        raise
    finally:
        for pod in cluster.pods:
            pod.process.kill()
            pod.process.wait()


def main():
    ip("link", "set", "lo", "up")
    # Without an address of its own a bridge takes that of a port, and loses it with the port.
    ip("link", "add", "nodes", "address", "02:00:00:00:79:01", "type", "bridge")
    ip("addr", "add", f"{DNS}/16", "dev", "nodes")
    ip("link", "set", "nodes", "up")
    resolver = pathlib.Path(SCRATCH) / "resolv.conf"
    resolver.write_text(f"search {DOMAIN} svc.cluster.local cluster.local\nnameserver {DNS}\noptions ndots:5\n")
    subprocess.run(["mount", "--bind", resolver, "/etc/resolv.conf"], check=True)
    subprocess.run([PHALANX, "keygen", f"{SCRATCH}/job.key"], check=True)
    dns = Dns()
    dns.start()
    kinds = [
        ("indexed-job.yaml", plain, False),
        ("elastic-job.yaml", plain, True),
        ("jobset.yaml", jobset, False),
        ("trainjob.yaml", trainjob, False),
        ("pytorchjob.yaml", pytorchjob, False),
    ]
    missing = {path.name for path in MANIFESTS.glob("*.yaml")} ^ {name for name, _, _ in kinds}
    assert not missing, f"not replayed, or not there: {missing}"
    for name, _, _ in kinds:
        check(name)
    for name, plan, is_elastic in kinds:
        replay(dns, name, plan(name), is_elastic)


main()
