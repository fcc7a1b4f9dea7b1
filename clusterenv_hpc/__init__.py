"""Distributed reinforcement learning on MPI ranks: one learner, many environment workers."""

from __future__ import annotations

__version__ = "0.1.0"
