"""The doctor against a real Slurm: which ``--mpi=`` fits which MPI, and a world that is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("slurm", "namespaces")
DEVCLUSTER = Path(__file__).parents[2] / "slurm" / "devcluster"
PROGRAM = "import sys; from clusterenv_hpc.cli import main; sys.exit(main())"
DOCTOR = [sys.executable, "-c", PROGRAM, "doctor"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of two nodes of its own; its value is the environment that reaches it."""
    folder = Path(tempfile.mkdtemp(prefix="clusterenv-hpc-slurm-"))
    folder.chmod(0o755)  # munge refuses a socket below a folder that others cannot enter
    own = {"DEVCLUSTER_DIR": f"{folder}/lab", "DEVCLUSTER_NODES": "2", "DEVCLUSTER_NET": "10.231.41"}
    environ = {**os.environ, **own}
    subprocess.run([DEVCLUSTER / "up", "netns"], env=environ, check=True, capture_output=True, timeout=60)
    try:
        shell = f'eval "$({DEVCLUSTER}/env)" && env -0'
        out = subprocess.run(["bash", "-c", shell], env=environ, check=True, capture_output=True, timeout=20).stdout
        yield dict(entry.split("=", 1) for entry in out.decode().split("\0") if "=" in entry)
    finally:
        subprocess.run([DEVCLUSTER / "down"], env=environ, check=True, capture_output=True, timeout=60)
        shutil.rmtree(folder)


def run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    test_id = {"CLUSTERENV_HPC_TEST_ID": os.environ["CLUSTERENV_HPC_TEST_ID"]}
    done = subprocess.run(command, env={**environ, **test_id}, cwd=folder, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mpi", "expected"),
    [("mpich", "use --mpi=pmi2"), pytest.param("openmpi", "use --mpi=pmix", marks=pytest.mark.needs("openmpi"))],
)
def test_the_fitting_plugin_is_found(
    cluster: dict[str, str], tmp_path: Path, mpi: str, expected: str, request: pytest.FixtureRequest
) -> None:
    own = request.getfixturevalue("openmpi_environ") if mpi == "openmpi" else {}
    assert expected in run([*DOCTOR, "--srun"], {**cluster, **own}, tmp_path)


def test_singletons_are_told_and_one_world_is_too(cluster: dict[str, str], tmp_path: Path) -> None:
    srun = ["srun", "--nodes=2", "--ntasks=2", "--time=2"]
    told = run([*srun, "--mpi=none", *DOCTOR], cluster, tmp_path)
    assert "2 tasks were started, but MPI sees a world of 1" in told
    assert "use --mpi=pmi2" in told
    told = run([*srun, "--mpi=pmi2", *DOCTOR], cluster, tmp_path)
    assert "ok    this world     2 ranks" in told, told
    assert "3 ranks make one world" in told, "its own ranks start inside of a step too"
