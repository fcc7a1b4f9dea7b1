"""``clusterenv-hpc doctor``: what this machine can do, and for each thing that it cannot, what to do."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import clusterenv_hpc
from clusterenv_hpc.jobs.environment import in_mpi_world
from clusterenv_hpc.run.launch import launch_program
from clusterenv_hpc.run.mpi_launcher import (
    LaunchError,
    available_cores,
    find_launcher,
    find_mpi,
    world_rank,
)
from clusterenv_hpc.run.srun_probe import MpiPlugin, ask, find_mpi_plugin

__all__ = ["Check", "MpiPlugin", "examine", "find_mpi_plugin", "main"]

OK, NOTE, FIX = "ok", "note", "fix"
"""Works; works without something optional; does not work."""

EXTRAS = {"box2d": "Box2D", "mujoco": "mujoco", "atari": "ale_py", "envpool": "envpool"}
RANKS = 3
WRITE_SIZE = """
import os, sys
from clusterenv_hpc.comm.mpi import MPI
with open(os.path.join(sys.argv[1], str(MPI.COMM_WORLD.rank)), "w") as file:
    file.write(str(MPI.COMM_WORLD.size))
"""


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, how it stands, what was found, and what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


def check_python() -> Iterator[Check]:
    """The interpreter and this package."""
    yield Check("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Check("clusterenv_hpc", OK, f"{clusterenv_hpc.__version__} ({Path(clusterenv_hpc.__file__).parent})")


def check_mpi() -> Iterator[Check]:
    """The library, its launcher, and whether both make one world."""
    try:
        mpi = find_mpi()
    except LaunchError as error:
        yield Check("mpi", FIX, "none", str(error))
        return
    yield Check("mpi", OK, f"{mpi}, mpi4py {mpi.mpi4py} ({mpi.library})")
    try:
        yield Check("launcher", OK, find_launcher(mpi))
    except LaunchError as error:
        yield Check("launcher", FIX, "none that belongs to this MPI", str(error))
        return
    yield check_ranks()


def check_ranks() -> Check:
    """Really start ranks, and compare their world with what was asked for."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clusterenv-hpc-") as folder:
        try:
            ended = launch_program([sys.executable, "-c", WRITE_SIZE, folder], RANKS, timeout_s=60.0)
        except LaunchError as error:
            return Check("ranks", FIX, "cannot be started", str(error))
        sizes = {path.name: path.read_text() for path in Path(folder).iterdir()}
    took = f"{time.monotonic() - began:.1f} s"
    if ended.code == 0 and sizes == {str(rank): str(RANKS) for rank in range(RANKS)}:
        return Check("ranks", OK, f"{RANKS} ranks make one world, started in {took}")
    words = " ".join((ended.spoken + ended.launcher_words).decode(errors="replace").split())[-400:]
    return Check(
        "ranks", FIX, f"asked for {RANKS}, worlds of {sorted(sizes.values())}, exit code {ended.code} after {took}",
        "launcher and library belong to different MPIs, or the launcher fails here; use the MPI of a wheel in a fresh "
        f"environment: pip install 'clusterenv_hpc[mpich]'. It said: {words or 'nothing'}",
    )  # fmt: skip


def check_own_world(environ: Mapping[str, str]) -> Iterator[Check]:
    """Started by srun or mpiexec: the world that this very process is in."""
    from clusterenv_hpc.comm.mpi import MPI

    size, asked = MPI.COMM_WORLD.Get_size(), environ.get("SLURM_STEP_NUM_TASKS") or environ.get("PMI_SIZE") or ""
    if asked.isdigit() and int(asked) != size:
        yield Check(
            "this world", FIX, f"{asked} tasks were started, but MPI sees a world of {size}",
            "srun and MPI do not speak the same protocol: start it with the --mpi= named above",
        )  # fmt: skip
    else:
        yield Check("this world", OK, f"{size} ranks")


def check_slurm(environ: Mapping[str, str], try_srun: bool, options: Sequence[str]) -> Iterator[Check]:
    """Whether there is a Slurm, who answers, and which of its MPI plugins fits."""
    if shutil.which("sinfo") is None:
        yield Check("slurm", NOTE, "none on this machine", "only needed to submit jobs")
        return
    conf = environ.get("SLURM_CONF", "")
    if conf and not Path(conf).exists():  # its commands would look for it for a minute
        yield Check(
            "slurm", NOTE, f"SLURM_CONF={conf} does not exist", "only needed for jobs: name your site's slurm.conf"
        )
        return
    partitions = ask(["sinfo", "--noheader", "--format=%P %a %D %l"], 10.0)
    if partitions.code != 0:
        said = next(reversed(partitions.err.strip().splitlines()), "no word why")
        yield Check("slurm", NOTE, "installed, but no controller answers", f"only needed for jobs; it said: {said}")
        return
    version = ask(["sinfo", "--version"], 10.0)
    rows = [line.split() for line in partitions.out.splitlines() if len(line.split()) == 4]
    shown = ", ".join(f"{name} ({up}, {nodes} nodes, limit {limit})" for name, up, nodes, limit in rows)
    yield Check("slurm", OK, f"{version.out.strip()}: {shown or 'no partitions'}")
    if "SLURM_JOB_ID" not in environ and not try_srun:
        yield Check("srun --mpi", NOTE, "not tried outside of an allocation", "clusterenv-hpc doctor --srun tries it")
        return
    try:
        plugin = find_mpi_plugin(options=options)
    except LaunchError as error:
        yield Check("srun --mpi", FIX, "cannot be tried", str(error))
        return
    if plugin.name is not None:
        yield Check("srun --mpi", OK, f"use --mpi={plugin.name} ({plugin})")
    else:
        remedy = (
            "start ranks with this MPI's own launcher inside the allocation, or use another MPI (doctor says which)"
        )
        yield Check("srun --mpi", FIX, str(plugin) or "srun --mpi=list names none", remedy)


def check_cores(environ: Mapping[str, str]) -> Iterator[Check]:
    """Cores, and whether threads would fight for them."""
    cores, threads = available_cores(), environ.get("OMP_NUM_THREADS", "")
    found = f"{cores} for this process" + (f" of {os.cpu_count()}" if os.cpu_count() != cores else "")
    if threads.isdigit() and int(threads) > cores:
        yield Check(
            "cores", FIX, f"{found}, OMP_NUM_THREADS={threads}", "unset it: a worker takes one thread by itself"
        )
    else:
        yield Check("cores", OK, found + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def check_gpu() -> Iterator[Check]:
    """Whether torch can use what is there."""
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Check("gpu", OK, f"{names}; torch {torch.__version__}")
    elif Path("/dev/nvidiactl").exists():
        yield Check(
            "gpu", FIX, f"a driver is loaded, but torch {torch.__version__} cannot use it",
            "install a torch built for CUDA, or ask for a GPU (slurm: --gpus=1)",
        )  # fmt: skip
    else:
        yield Check("gpu", OK, f"none; the learner computes on the CPU (torch {torch.__version__})")


def check_folder(folder: Path, environ: Mapping[str, str]) -> Iterator[Check]:
    """What checkpoints need of the file system: write, sync, move into place; and that other nodes see it."""
    began, made = time.monotonic(), not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-", delete=False) as file:
            file.write(b"x" * (1 << 20))
            file.flush()
            os.fsync(file.fileno())
        final = Path(file.name + ".moved")
        os.replace(file.name, final)
        try:
            whole, free = final.stat().st_size == 1 << 20, shutil.disk_usage(folder).free
            unseen = _nodes_without(final, environ)
        finally:
            final.unlink()
            if made:
                folder.rmdir()
    except OSError as error:
        yield Check(
            "run folder", FIX, f"{folder}: {error.strerror or error}", "choose another: run_dir=... on a disk you own"
        )
        return
    took = f"{time.monotonic() - began:.2f} s"
    found = f"{folder.resolve()}: 1 MiB written, synced and moved in {took}, {free >> 30} GiB free"
    if not whole:
        yield Check("run folder", FIX, f"{folder}: a synced file came back short", "use another file system")
    elif unseen:
        yield Check("run folder", FIX, f"{folder} is not seen by every node: {unseen}", "use a shared file system")
    else:
        yield Check("run folder", OK, found)


def _nodes_without(path: Path, environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_NNODES", "1")
    if "SLURM_JOB_ID" not in environ or nodes == "1":
        return ""
    look = [
        "srun",
        "--overlap",
        "--mpi=none",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "test",
        "-e",
        str(path.resolve()),
    ]
    said = ask(look, 20.0)
    return "" if said.code == 0 else " ".join(said.err.split()) or f"exit code {said.code}"


def check_extras() -> Iterator[Check]:
    """Optional environments and backends."""
    there = {name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()}
    absent = [name for name, installed in there.items() if not installed]
    found = ", ".join(name for name, installed in there.items() if installed) or "none installed"
    remedy = f"for more environments: pip install 'clusterenv_hpc[{','.join(absent)}]'" if absent else ""
    yield Check("environments", NOTE if absent else OK, f"gymnasium {_version('gymnasium')}; extras: {found}", remedy)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def examine(folder: Path, *, try_srun: bool = False, options: Sequence[str] = ()) -> Iterator[Check]:
    """All checks, each as soon as it is known; none takes longer than its own deadline."""
    environ = dict(os.environ)
    checks: list[Callable[[], Iterator[Check]]] = [
        check_python,
        check_mpi,
        lambda: check_slurm(environ, try_srun, options),
        lambda: check_cores(environ),
        check_gpu,
        lambda: check_folder(folder, environ),
        check_extras,
        # Last, since with the wrong protocol some MPIs end the process that starts them.
        *([lambda: check_own_world(environ)] if in_mpi_world(environ) else []),
    ]
    for check in checks:
        yield from check()


def main(argv: Sequence[str]) -> int:
    """The command; returns 0 where nothing needs to be done, else 1."""
    parser = argparse.ArgumentParser(
        prog="clusterenv-hpc doctor",
        description="What this machine can do; for each thing that it cannot, what to do.",
        epilog="With srun options after --srun, e.g.: clusterenv-hpc doctor --srun --partition=short --account=me",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--run-dir", default="runs", metavar="DIR", help="the folder to try (default: %(default)s)")
    parser.add_argument("--srun", action="store_true", help="find the --mpi= of srun outside of an allocation too")
    known, options = parser.parse_known_args(list(argv))
    if options and not known.srun:
        parser.error(f"unknown: {' '.join(options)} (options of srun need --srun)")
    if in_mpi_world() and (world_rank(os.environ) or 0) > 0:
        list(check_own_world(os.environ))  # the others only join the world; rank 0 speaks
        return 0
    checks = []
    for check in examine(Path(known.run_dir), try_srun=known.srun, options=options):
        checks.append(check)
        if not known.json:
            print(f"{check.status:<5} {check.name:<14} {check.found}", flush=True)
            if check.remedy:
                print(f"{'':<5} {'':<14} -> {check.remedy}", flush=True)
    if known.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    return int(any(check.status == FIX for check in checks))
