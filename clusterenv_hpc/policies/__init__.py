"""Policies: networks, action distributions over flat parameters, and weights in the form that travels."""

from .continuous import DeterministicActor, GaussianActor, TwinCritic
from .distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    distribution_for,
)
from .epsilon_greedy import EpsilonGreedy, QNetwork
from .lean import make_lean, make_plain
from .networks import ActorCritic
from .protocol import PolicyError, acting_parameters, as_tensors, check_policy, distribution_of, evaluate
from .weights import flat_weights, load_flat_weights, num_weights, weights_layout

__all__ = [
    "ActorCritic",
    "Bernoulli",
    "Categorical",
    "DeterministicActor",
    "DiagonalGaussian",
    "Distribution",
    "EpsilonGreedy",
    "GaussianActor",
    "MultiCategorical",
    "PolicyError",
    "QNetwork",
    "TwinCritic",
    "acting_parameters",
    "as_tensors",
    "check_policy",
    "distribution_for",
    "distribution_of",
    "evaluate",
    "flat_weights",
    "load_flat_weights",
    "make_lean",
    "make_plain",
    "num_weights",
    "weights_layout",
]
