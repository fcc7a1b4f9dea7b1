"""Jobs that come to their end: submit, heterogeneous jobs, arrays, templates by hand, and the commands on jobs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from slurm_cluster import FAST, REPOSITORY, SLOW, Submitted, until

from clusterenv_hpc.jobs import record, slurm

pytestmark = [pytest.mark.needs("slurm", "namespaces", "openmpi"), pytest.mark.timeout(300)]
SPREAD = ("slurm.nodes=3", "slurm.ntasks_per_node=2", "slurm.time=5:00")
HOSTS = ["node1", "node2", "node3"]


def test_three_nodes_with_each_mpi_and_launcher(cluster, tmp_path, debian_openmpi):
    """MPICH's wheel through srun and through its own mpiexec, and Debian's Open MPI through srun."""
    by_hand = cluster.submit(*FAST, *SPREAD, "slurm.launcher=mpiexec", "name=mpiexec", cwd=tmp_path)
    runs = {
        "MPICH": cluster.submit(*FAST, *SPREAD, "name=mpich", cwd=tmp_path),
        "Open MPI": cluster.submit(*FAST, *SPREAD, "name=openmpi", cwd=tmp_path, python=debian_openmpi),
    }
    for vendor, run in {**runs, "MPICH ": by_hand}.items():
        summary = cluster.completed(run).summary
        assert summary["env_steps"] == 2000 and summary["workers"] == 5, "five workers and a learner are six ranks"
        assert sorted(set(summary["hosts"])) == HOSTS and len(summary["hosts"]) == 6
        assert vendor.strip() in summary["transport"]
        run.check_continuous()


def test_a_heterogeneous_job_is_one_world(cluster, tmp_path):
    words = ("slurm=hetjob", "slurm.nodes=2", "slurm.ntasks_per_node=2", "slurm.learner_cpus=2", "slurm.time=5:00")
    run = cluster.submit(*FAST, *words, "slurm.learner.partition=gpu", cwd=tmp_path)
    template, env = str(REPOSITORY / "slurm/train_hetjob.sbatch"), {"PYTHON": sys.executable}
    by_hand = cluster.sbatch(template, *FAST, cwd=tmp_path, env=env)
    summary = cluster.completed(run).summary
    assert summary["workers"] == 4 and summary["hosts"][0] == "node1" and summary["env_steps"] == 2000
    assert cluster.wait(by_hand).state == "COMPLETED"
    assert Submitted(by_hand, tmp_path / f"runs/train-{by_hand}").summary["workers"] == 4


def test_an_array_of_four(cluster, tmp_path):
    words = ("slurm.ntasks=2", "slurm.time=5:00", "slurm.array_limit=3")
    sweep = cluster.submit(*FAST, *words, "-m", "seed=1,2", "sync=aps,always", cwd=tmp_path)
    table = [line.split("\t") for line in (sweep.directory / "sweep.tsv").read_text().splitlines()]
    assert table[0] == ["element", "job", "run", "overrides"] and len(table) == 5
    assert cluster.wait(sweep.job).state == "COMPLETED"
    seen = []
    for _, job, name, varied in table[1:]:
        run = Submitted(job, sweep.directory / name)
        summary = run.summary
        seen.append((summary["seed"], summary["sync"]))
        assert varied == f"seed={summary['seed']} sync={summary['sync']}" and summary["exit_reason"] == "completed"
        assert record.find(job, tmp_path / "runs").directory == run.directory
    assert seen == [(1, "aps"), (1, "always"), (2, "aps"), (2, "always")]
    shown = cluster.command("watch", sweep.job, cwd=tmp_path).stdout
    assert "4 COMPLETED" in shown and "2,000/2,000 steps" in shown


def test_templates_by_hand(cluster, tmp_path):
    shutil.copytree(REPOSITORY / "slurm", tmp_path / "slurm", ignore=shutil.ignore_patterns("devcluster"))
    env = {"PYTHON": sys.executable}
    train = cluster.sbatch("--nodes=3", "--time=5", "slurm/train.sbatch", *FAST, "seed=3", cwd=tmp_path, env=env)
    sweep = cluster.sbatch("--array=0-1", "--ntasks=2", "slurm/sweep.sbatch", *FAST, "seed=4,5", cwd=tmp_path, env=env)
    assert cluster.wait(train).state == "COMPLETED", (tmp_path / f"slurm-{train}.out").read_text()
    run = Submitted(train, tmp_path / f"runs/train-{train}")
    assert run.summary["seed"] == 3 and sorted(set(run.summary["hosts"])) == HOSTS
    again = cluster.sbatch("slurm/eval.sbatch", str(run.directory), "eval.episodes=2", cwd=tmp_path, env=env)
    # A run finds its job, and a job its run, though neither was submitted through us.
    shown = cluster.command("watch", run.directory.name, cwd=tmp_path).stdout
    assert "COMPLETED" in shown and "env_steps=2000" in shown
    assert f"train-{train}" in cluster.command("watch", train, cwd=tmp_path).stdout
    assert "has made all its steps" in cluster.command("logs", train, cwd=tmp_path).stdout
    assert cluster.wait(sweep).state == "COMPLETED"
    seeds = [Submitted(sweep, tmp_path / f"runs/sweep-{sweep}/{element}").summary["seed"] for element in range(2)]
    assert seeds == [4, 5]
    assert cluster.wait(again).state == "COMPLETED"
    assert "2 episodes" in (tmp_path / f"slurm-{again}.out").read_text()


def test_commands_on_a_running_job(cluster, tmp_path):
    words = ("slurm.ntasks=2", "slurm.time=5:00", "name=my-run")
    run = cluster.submit(*SLOW, "total_steps=1000000", *words, cwd=tmp_path)
    until(lambda: (run.directory / "metrics.jsonl").exists() and run.metrics, run.printed)
    row = cluster.command("list", cwd=tmp_path).stdout.splitlines()[1].split()
    assert row[0] == run.job and row[1] == "RUNNING" and row[-1] == "runs/my-run"
    shown = cluster.command("watch", "my-run", "--once", cwd=tmp_path).stdout
    assert "RUNNING on node" in shown and "elapsed" in shown and " left" in shown and "steps/s" in shown
    assert "starts: slow_env" in cluster.command("logs", "my-run", cwd=tmp_path).stdout
    assert f"job {run.job} cancelled" in cluster.command("cancel", "my-run", cwd=tmp_path).stdout
    info = cluster.wait(run.job, 30)
    assert info.state == "CANCELLED" and not info.restarts
    # The learner has saved within the grace period, and stopped where it stood.
    assert run.summary["exit_reason"] == "SIGTERM"
    assert run.checkpoints[-1].name == f"update-{run.summary['updates']:09}.pt"
    run.check_continuous()
    assert "over already: CANCELLED" in cluster.command("cancel", run.job, cwd=tmp_path).stdout
    watched = cluster.command("watch", run.job, cwd=tmp_path, check=False)
    assert watched.returncode == 1 and "exit_reason=SIGTERM" in watched.stdout


def test_a_refusal_is_shown_as_it_came(cluster, tmp_path):
    done = cluster.command("submit", *FAST, "slurm.partition=nowhere", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "sbatch: error: Batch job submission failed: Invalid partition name specified\n" in done.stderr
    assert not list(Path(tmp_path).glob("runs/*")), "no directory is left of a job that never was"
    assert slurm.mine() == []


def test_a_dry_run_submits_nothing(cluster, tmp_path):
    done = cluster.command("submit", *FAST, *SPREAD, "--dry-run", cwd=tmp_path)
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=cartpole") and "--mpi=pmi2" in done.stdout
    assert not (tmp_path / "runs").exists() and slurm.mine() == []


def test_singletons_are_told_apart_from_a_world(cluster, tmp_path):
    words = (sys.executable, "-m", "clusterenv_hpc.cli", "train", *FAST)
    done = cluster.run("srun", "--mpi=none", "--ntasks=2", "--time=2", *words, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "srun started 2 tasks, but each is alone" in done.stderr and "--mpi=pmi2" in done.stderr
