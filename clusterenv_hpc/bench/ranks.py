"""What each rank of a benchmark does: ``python -m clusterenv_hpc.bench.ranks REQUEST``, started by ``command``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from clusterenv_hpc.bench.command import Options
from clusterenv_hpc.comm.mpi import MPI

Comm = Any


def barrier(comm: Comm) -> None:
    """All ranks meet, without burning a core while they wait."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def say(text: str) -> None:
    """To the person who watches."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the benchmark that the request names; rank 0 writes the result."""
    from clusterenv_hpc.bench import learner, rollout, transport

    request = json.loads(sys.argv[1])
    options = Options(**request["options"])
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    try:
        result = {"rollout": rollout, "transport": transport, "learner": learner}[request["kind"]].run(comm, options)
        if comm.Get_rank() == 0:
            Path(request["result"]).write_text(json.dumps({"benchmark": request["kind"], **result}))
    except Exception as error:
        say(f"clusterenv-hpc: bench: rank {comm.Get_rank()} failed: {type(error).__name__}: {error}")
        comm.Abort(1)
    barrier(comm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
