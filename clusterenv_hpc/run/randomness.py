"""What is random in a run: the seeds it is made of, and the generators' states that a checkpoint carries."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seeds_of(seed: int, update: int) -> tuple[int, int, int]:
    """Seeds of the policy, the learner and the environments, for a start at ``update``."""
    policy, learner = np.random.SeedSequence(seed).generate_state(2)
    (envs,) = np.random.SeedSequence([seed, update, 1]).generate_state(1)
    return int(policy), int(learner), int(envs >> 1)


def seed_everything(seed: int) -> None:
    """The global generators, for whatever draws from them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """The states of the global generators, as plain things."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """What ``random_states`` gave; generators of GPUs that are not here are left out."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
