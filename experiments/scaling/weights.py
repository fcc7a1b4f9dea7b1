"""What a version costs the learner for each worker, against the policy's size:  python weights.py HIDDEN [json=FILE]

Lockstep rollouts of four steps of CartPole, a new version after each, under three sync rules: ``never`` (the worker
only hears of the version), ``aps`` with a delta that is never reached (a probe goes out as well), ``always`` (the
weights go out as well).  What the learner's process spends more than under ``never``, probes and weights cost it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from clusterenv_hpc.bench.command import circumstances

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line, settings

WORKERS, ROUNDS, REPEATS = 2, 100, 3


def loop(comm: Any, rule: Any, hidden: int) -> dict[str, float]:
    """The learner's processor time for a worker and version, in microseconds."""
    import gymnasium
    import torch

    import clusterenv_hpc as ce
    from clusterenv_hpc.policies import ActorCritic

    torch.manual_seed(0)
    example = gymnasium.make("CartPole-v1")
    policy = ActorCritic(example.observation_space, example.action_space, hidden=(hidden, hidden))
    envs = ce.ClusterEnv(
        "CartPole-v1", 16 * WORKERS, policy=policy, sync=rule, backend="vector", comm=comm, seed=1, exit_workers=False
    )
    if not envs.is_learner:
        return {}
    for _ in range(20):
        envs.rollout(4)
        envs.publish()
    began, cpu = time.perf_counter(), time.process_time()
    sent = envs.stats.weight_messages
    for _ in range(ROUNDS):
        envs.rollout(4)
        envs.publish()
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    told = {"us": spent / ROUNDS / WORKERS * 1e6, "cpu_us": cpu / ROUNDS / WORKERS * 1e6}
    told |= {"messages": float(envs.stats.weight_messages - sent)}
    told |= {"weight_bytes": envs.stats.weight_bytes / max(1, envs.stats.weight_messages)}
    envs.close()
    return told


def ranks(hidden: int, file: Path) -> None:
    """On every rank; rank 0 writes."""
    import torch

    import clusterenv_hpc as ce
    from clusterenv_hpc.bench.ranks import barrier
    from clusterenv_hpc.comm.mpi import MPI

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    rules = {"never": ce.Never(), "aps": ce.APS(delta=1e9, max_lag=None), "always": ce.Always()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in rules}
    for _ in range(REPEATS):
        for name, rule in rules.items():
            barrier(comm)
            rows[name].append(loop(comm, rule, hidden))
    if comm.Get_rank() == 0:
        medians = {
            name: {key: statistics.median(row[key] for row in told) for key in told[0]} for name, told in rows.items()
        }
        file.write_text(json.dumps(medians))
    barrier(comm)


def main() -> int:
    """Starts the ranks, or is one."""
    parser = command_line(__doc__)
    parser.add_argument("hidden", type=int, help="units in each of the policy's two hidden layers")
    parser.add_argument("words", nargs="*", metavar="json=FILE", help="the file to write (default: weights.json)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hidden < 1:
        parser.error(f"hidden={given.hidden}: expected at least 1")
    file = settings(parser, given.words, json=Path("weights.json"))["json"]
    if given.rank:
        ranks(given.hidden, file)
        return 0
    from clusterenv_hpc.run.launch import launch_program

    program = [sys.executable, __file__, str(given.hidden), f"json={file}", "--rank"]
    code = launch_program(program, WORKERS + 1).code
    if code:
        return code
    facts = circumstances([])
    facts["command"] = f"python experiments/scaling/weights.py {given.hidden}"
    file.write_text(json.dumps({"hidden": given.hidden, **json.loads(file.read_text()), **facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
