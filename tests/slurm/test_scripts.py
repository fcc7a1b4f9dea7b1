"""Scripts of a user's own: with ClusterEnv under srun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm_cluster import Cluster, until

from clusterenv_hpc.jobs import slurm

pytestmark = [pytest.mark.needs("slurm", "namespaces", "openmpi"), pytest.mark.timeout(200)]

SCRIPT = """
import time
import torch
import clusterenv_hpc as ce

torch.manual_seed(1)
with ce.ClusterEnv("CartPole-v1", num_envs=12, policy=torch.nn.Linear(4, 2), seed=1) as envs:
    for update in range(100):
        envs.rollout(16)
        envs.publish()
        time.sleep(0.05)
        if update == 5:
            open("under_way", "w").close()
    print(envs.num_workers, "workers", flush=True)
"""
BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --time=5 --requeue --open-mode=append --output=out.txt
srun --mpi={mpi} {python} script.py
"""


def start(cluster: Cluster, folder: Path, mpi: str, python: str) -> str:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "job.sbatch").write_text(BATCH.format(mpi=mpi, python=python))
    return cluster.sbatch("job.sbatch", cwd=folder)


def test_a_script_runs_under_srun_and_again_when_it_is_requeued(cluster, tmp_path, debian_openmpi):
    """Killed in the middle, its ranks leave their shared memory behind; the same job's next ranks must not take it."""
    folders = {"pmi2": tmp_path / "mpich", "pmix": tmp_path / "openmpi"}
    jobs = {
        "pmi2": start(cluster, folders["pmi2"], "pmi2", sys.executable),
        "pmix": start(cluster, folders["pmix"], "pmix", debian_openmpi),
    }
    for mpi, job in jobs.items():
        out = folders[mpi] / "out.txt"
        until(lambda mpi=mpi: (folders[mpi] / "under_way").exists(), lambda out=out: out.read_text())
        slurm.requeue(job)
    for mpi, job in jobs.items():
        info = cluster.wait(job)
        printed = (folders[mpi] / "out.txt").read_text()
        assert (info.state, info.restarts) == ("COMPLETED", 1), printed
        assert printed.endswith("3 workers\n"), printed
