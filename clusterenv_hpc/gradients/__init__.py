"""Asynchronous aggregation of policy gradients: Rennala NIGT and Malenia NIGT, and what they are compared with.

Optimizers and aggregation rules serve any stochastic gradient, on a cluster or on the simulator's virtual time:

    nigt, torch_nigt      NIGT and plain ascent on flat vectors; NIGT on torch parameters
    aggregators           when to stop collecting gradients, and how to average them
    methods               which rule goes with which optimizer, by name
    simulator, theory     a cluster on virtual time, and what the theory expects of it; ``simulate`` is the command
    policy_gradient       gradients of fixed-length trajectories
    gradient_cluster      workers that return them, over MPI or in one process
"""

from clusterenv_hpc.gradients.aggregators import (
    Aggregate,
    Aggregator,
    Malenia,
    MSynchronous,
    PerArrival,
    Rennala,
    Synchronous,
    Tally,
    Verdict,
)
from clusterenv_hpc.gradients.methods import METHODS, Method
from clusterenv_hpc.gradients.nigt import NIGT, Ascent, Optimizer, Step
from clusterenv_hpc.gradients.torch_nigt import TorchNIGT

__all__ = [
    "METHODS",
    "NIGT",
    "Aggregate",
    "Aggregator",
    "Ascent",
    "MSynchronous",
    "Malenia",
    "Method",
    "Optimizer",
    "PerArrival",
    "Rennala",
    "Step",
    "Synchronous",
    "Tally",
    "TorchNIGT",
    "Verdict",
]
