"""Asynchronous aggregation of policy gradients: Rennala NIGT and Malenia NIGT, and what they are compared with.

Everything here but :mod:`~clusterenv_hpc.gradients.policy_gradient` is independent of reinforcement learning: the
aggregators and the optimizer serve any stochastic gradient, on a cluster or on the simulator's virtual time.
"""
