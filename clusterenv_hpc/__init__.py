"""Distributed reinforcement learning on MPI ranks: one learner, many environment workers.

The public names, and nothing else.  Each is imported when it is first asked for, so that importing the package, or
the help of its command, starts no MPI and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterenv_hpc.cluster_env import ClusterEnv as ClusterEnv
    from clusterenv_hpc.jobs.launch import launch as launch
    from clusterenv_hpc.rollout import Rollout as Rollout
    from clusterenv_hpc.sync import APS as APS
    from clusterenv_hpc.sync import Always as Always
    from clusterenv_hpc.sync import EveryK as EveryK
    from clusterenv_hpc.sync import Never as Never

__version__ = "0.1.0"

__all__ = ["APS", "Always", "ClusterEnv", "EveryK", "Never", "Rollout", "__version__", "launch"]

_HOMES = {
    "ClusterEnv": "clusterenv_hpc.cluster_env",
    "Rollout": "clusterenv_hpc.rollout",
    "APS": "clusterenv_hpc.sync",
    "Always": "clusterenv_hpc.sync",
    "EveryK": "clusterenv_hpc.sync",
    "Never": "clusterenv_hpc.sync",
    "launch": "clusterenv_hpc.jobs.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
