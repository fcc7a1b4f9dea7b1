"""What all tests share: real MPI ranks, no process left behind, and no test skipped unseen.

A test that needs more than a bare machine says so: ``@pytest.mark.needs("openmpi")``.  Where that is missing it is
skipped, with a line that says how to get it; where CI=true, a skip is a failure, but for ``ABSENT_IN_CI``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

IN_CI = os.environ.get("CI") == "true"
ABSENT_IN_CI = {"gpu"}
"""Needs that the machine of CI cannot meet.  Keep it short: what is named here is not tested there."""

TEST_ID = "CLUSTERENV_HPC_TEST_ID"
"""Environment variable by which the processes that a test has started are found again."""

LINGERING = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Helpers that Python itself keeps until the test session ends."""


def _debian_openmpi() -> str | None:
    """Debian's Open MPI library, where its launcher is installed too."""
    libraries = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
    return str(libraries[0]) if libraries and shutil.which("mpirun.openmpi") else None


def _has_commands(*names: str) -> bool:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return all(shutil.which(name, path=path) for name in names)


def _has_namespaces() -> bool:
    unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"]
    return os.geteuid() == 0 and shutil.which("unshare") is not None and not subprocess.run(unshare).returncode


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _package(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (_has_gpu, "a CUDA device"),
    "openmpi": (lambda: _debian_openmpi() is not None, "apt install openmpi-bin"),
    "setpriv": (lambda: shutil.which("setpriv") is not None, "apt install util-linux"),
    "compiler": (lambda: shutil.which("cc") is not None, "apt install gcc libc6-dev"),
    "slurm": (lambda: _has_commands("slurmctld", "slurmd", "srun", "munged"), "as root: slurm/devcluster/install"),
    "accounts": (lambda: _has_commands("slurmdbd", "mariadbd"), "as root: slurm/devcluster/install --sacct"),
    "namespaces": (_has_namespaces, "root, outside of a user namespace"),
    "envpool": (_package("envpool"), "pip install 'clusterenv_hpc[envpool]'"),
    "mujoco": (_package("mujoco"), "pip install 'clusterenv_hpc[mujoco]'"),
    "atari": (_package("ale_py"), "pip install 'clusterenv_hpc[atari]'"),
    "minigrid": (_package("minigrid"), "pip install 'clusterenv_hpc[minigrid]'"),
    "video": (_package("imageio_ffmpeg"), "pip install 'clusterenv_hpc[video]'"),
    "tensordict": (_package("tensordict"), "pip install 'clusterenv_hpc[tensordict]'"),
    "sb3": (_package("stable_baselines3"), "pip install 'clusterenv_hpc[sb3]'"),
    "notebook": (_package("nbclient"), "pip install 'clusterenv_hpc[notebook]'"),
}
_met: dict[str, bool] = {}


def missing(need: str) -> str | None:
    """How to get ``need``, where this machine does not have it."""
    if need not in NEEDS:
        raise pytest.UsageError(f"needs({need!r}): expected one of {', '.join(NEEDS)}")
    probe, remedy = NEEDS[need]
    if need not in _met:
        _met[need] = probe()
    return None if _met[need] else f"needs {need}: {remedy}"


REAL_MACHINES = ("slurm", "mpi", "faults", "learning")
"""Folders of tests that start ranks or a cluster: they come first, so that the quick ones fill what time is left."""


def stream_of(nodeid: str) -> str:
    """Which tests run one after the other where several processes share the suite.

    One stream for the cluster, and one for all that counts seconds and ranks, so that two of it never share the cores.
    """
    path = nodeid.partition("::")[0]
    folder = Path(path).parent.name
    return path if folder not in REAL_MACHINES else "cluster" if folder == "slurm" else "ranks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return REAL_MACHINES.index(folder) if folder in REAL_MACHINES else len(REAL_MACHINES)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the suite out by ``stream_of``; see the Makefile."""
    from xdist.scheduler import LoadScopeScheduling

    class Streams(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return stream_of(nodeid)

    return Streams(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for need in mark.args:
            if remedy := missing(need):
                pytest.skip(remedy)


def _may_be_skipped(item: pytest.Item) -> bool:
    needed = {need for mark in item.iter_markers("needs") for need in mark.args}
    return any(missing(need) for need in needed & ABSENT_IN_CI)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not _may_be_skipped(item):
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI lets nothing be skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole module skipped, and CI lets nothing be skipped: {report.longrepr}"
    return report


def _processes_with(mark: str) -> list[int]:
    """Live processes that were started with ``mark`` in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() not in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                continue
            if not any(helper in Path("/proc", name, "cmdline").read_bytes() for helper in LINGERING):
                found.append(int(name))
    return [pid for pid in found if pid != os.getpid()]


def _children() -> set[int]:
    """This process's own live children."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                state = Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()[0]
                command = Path("/proc", pid, "cmdline").read_bytes()
                if state != b"Z" and not any(helper in command for helper in LINGERING):
                    found.add(int(pid))
    return found


def _commands(pids: Sequence[int]) -> str:
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
            lines.append(f"{pid}: {b' '.join(words).decode(errors='replace')}")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Fails a test that leaves a process behind, and ends that process.

    Its value is a function that gives the processes that live at the moment because of this test.
    """
    mark, before = f"{TEST_ID}={uuid.uuid4().hex}", _children()
    monkeypatch.setenv(*mark.split("="))

    def living() -> list[int]:
        return sorted({*_processes_with(mark), *(_children() - before)})

    yield living
    deadline = time.monotonic() + 3.0
    while (left := living()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        told = _commands(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left behind, and now killed:\n{told}", pytrace=False)


@dataclass(frozen=True)
class Ran:
    """How a command ended: exit code (negative: by that signal), both outputs as text, wall time in seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> Ran:
        """This, if the exit code is 0; else an assertion with all that was said."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


def run_marked(command: Sequence[str], environ: Mapping[str, str], timeout: float, cwd: Path) -> Ran:
    """Run a command to its end; after ``timeout`` seconds kill all that it started.  Asserts that nothing is left."""
    mark = f"CLUSTERENV_HPC_TEST_RUN={uuid.uuid4().hex}"
    environ = {**environ, **dict([mark.split("=")])}
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    late = False
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        deadline = time.monotonic() + (0.0 if late else 3.0)
        while (left := _processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        told = _commands(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if late:
        out, err = process.communicate(timeout=10)
        pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{out}\n{err}\nstill there:\n{told}", pytrace=False)
    assert not left, f"processes left after {' '.join(command)}, now killed:\n{told}"
    return Ran(process.returncode, out, err, time.monotonic() - began)


def mpi_command(n: int, mpi: str) -> tuple[list[str], dict[str, str]]:
    """Launcher and environment for ``n`` ranks of this Python under the ``mpich`` wheel or Debian's ``openmpi``."""
    if mpi == "mpich":
        launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        assert launcher, "the mpich wheel is not installed beside this Python: make setup"
        return [launcher, "-n", str(n)], {
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
            "UCX_LOG_LEVEL": "error",
            "FI_LOG_LEVEL": "error",
        }
    assert mpi == "openmpi", f"expected mpich or openmpi, got {mpi}"
    if remedy := missing("openmpi"):
        pytest.skip(remedy)
    return ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", str(n)], {
        "MPI4PY_LIBMPI": _debian_openmpi() or "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


@pytest.fixture
def openmpi_environ() -> dict[str, str]:
    """What makes mpi4py load Debian's Open MPI instead of the wheel's MPICH."""
    return mpi_command(1, "openmpi")[1]


@pytest.fixture
def mpiexec(tmp_path: Path) -> Callable[..., Ran]:
    """``mpiexec(n, script, *args, mpi="mpich", timeout=110, env=None)`` runs real MPI ranks, and gives their ``Ran``.

    ``script``: the path of a Python script, its source (of more than one line), or an argv after ``python``.
    """

    def run(
        n: int, script: str | Path | Sequence[str], *args: str, mpi: str = "mpich", timeout: float = 110.0,
        env: Mapping[str, str] | None = None,
    ) -> Ran:  # fmt: skip
        if isinstance(script, str) and "\n" in script:
            path = tmp_path / f"ranks-{uuid.uuid4().hex[:8]}.py"
            path.write_text(textwrap.dedent(script))
            script = path
        argv = [str(script)] if isinstance(script, str | Path) else list(script)
        launcher, settings = mpi_command(n, mpi)
        environ = {**os.environ, **settings, "OMP_NUM_THREADS": "1", **(env or {})}
        environ.pop("PYTHONUNBUFFERED", None)  # it makes several writes of one print, and ranks print at once
        return run_marked([*launcher, sys.executable, *argv, *args], environ, timeout, tmp_path)

    return run
