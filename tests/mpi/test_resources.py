"""What ranks use: memory that does not grow, and no core while they wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
import toy_envs as toy
from toy_policy import Linear
import clusterenv_hpc as ce

def pids(envs):
    return [os.getpid(), *(peer.pid for peer in envs._crew.peers)]

def rss_mib(pid):
    return int(open(f"/proc/{{pid}}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def cpu_s(pid):
    fields = open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

policy = Linear(toy.VectorWalk(1).single_observation_space, toy.VectorWalk(1).single_action_space, 0.0)

def build(**changes):
    return ce.ClusterEnv(toy.VectorWalk, 2, backend="vector", policy=policy, sync=ce.APS(0.001), **changes)
"""
BOTH_MPIS = ["mpich", pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))]

MEMORY = """
LOOK = (2_000, 10_000)
found = {}
with build() as envs:
    def look(count):
        if count in LOOK:
            found[count] = [rss_mib(pid) for pid in pids(envs)]
    if sys.argv[1] == "rollout":
        for count in range(1, LOOK[-1] + 1):
            envs.rollout(3)
            if count % 10 == 0:
                policy.shift(0.3 if count % 20 else -0.3)
                envs.publish()
            look(count)
    else:
        for count, batch in enumerate(envs.rollouts(3), 1):
            if count % 10 == 0:
                policy.shift(0.3 if count % 20 else -0.3)
                envs.publish()
            look(count)
            if count == LOOK[-1]:
                break
    assert envs.stats.weight_messages > 100, envs.stats.weight_messages
print(json.dumps([found[count] for count in LOOK]))
"""


@pytest.mark.parametrize(
    ("kind", "mpi"),
    [
        ("rollout", "mpich"),
        ("rollouts", "mpich"),
        pytest.param("rollouts", "openmpi", marks=pytest.mark.needs("openmpi")),
    ],
)
def test_memory_is_flat_over_ten_thousand_rollouts(mpiexec: Callable[..., Any], kind: str, mpi: str) -> None:
    """On every rank: 200 bytes leaked by each rollout or its messages would show."""
    ran = mpiexec(3, HEAD + MEMORY, kind, mpi=mpi, timeout=110).check()
    before, after = json.loads(ran.stdout)
    grown = [late - early for early, late in zip(before, after, strict=True)]
    assert max(grown) < 1.5, f"MiB by rank: {before} -> {after}"


IDLE = """
with build(env_kwargs={"base": 1000}) as envs:
    def used_while(wait):
        before = [cpu_s(pid) for pid in pids(envs)]
        wait()
        return [cpu_s(pid) - early for pid, early in zip(pids(envs), before)]

    idle = used_while(lambda: time.sleep(2.0))[1:]
    envs.rollout(3)
    between = used_while(lambda: time.sleep(2.0))[1:]
    stream = envs.rollouts(3)
    next(stream)
    time.sleep(0.5)  # the workers fill what there is
    full = used_while(lambda: time.sleep(2.0))[1:]
    stream.close()
print(json.dumps([*idle, *between, *full]))
"""

WAITING = """
with ce.ClusterEnv(toy.Slow, 2, policy=Linear(toy.Slow.observation_space, toy.Slow.action_space),
                   env_kwargs={"delay_s": 1.0, "mean_length": 100}) as envs:
    envs.reset(seed=0)
    before = cpu_s(os.getpid())
    envs.rollout(2)
    print(json.dumps([cpu_s(os.getpid()) - before]))
"""


@pytest.mark.parametrize("mpi", BOTH_MPIS)
@pytest.mark.parametrize("script", [IDLE, WAITING], ids=["workers", "learner"])
def test_waiting_burns_no_core(mpiexec: Callable[..., Any], mpi: str, script: str) -> None:
    """Seconds of CPU within two seconds of waiting for the other side."""
    used = json.loads(mpiexec(3, HEAD + script, mpi=mpi).check().stdout)
    assert max(used) < 0.4, used
