"""What every rank of a gradient run is told by the script, and what must be the same on all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from clusterenv_hpc.envs import EnvSource
from clusterenv_hpc.gradients.checks import one_of, positive_float, positive_int, unit_fraction
from clusterenv_hpc.gradients.policy_gradient import BASELINES, ENDINGS


@dataclass(frozen=True)
class GradientSettings:
    """What every rank is told by the script.

    sources: the environments, one for all workers or one for each.  envs_per_worker: trajectories in one unit.
    horizon: H.  gamma: discount.  ending, baseline: see ``policy_gradient``.
    transport: ``p2p`` (every gradient to rank 0) or ``allreduce`` (sums stay with the workers, one reduction a round).
    seed: of all units.  compute_s, communication_s: injected delays by worker, in seconds of a unit and of
    a message; empty: none.  timeout_s: how long silence is borne.
    """

    sources: tuple[EnvSource, ...]
    horizon: int
    gamma: float = 0.99
    envs_per_worker: int = 1
    ending: str = "absorb"
    baseline: str = "none"
    transport: str = "p2p"
    seed: int = 0
    compute_s: tuple[float, ...] = ()
    communication_s: tuple[float, ...] = ()
    timeout_s: float = 600.0
    config_hash: str = ""

    def __post_init__(self) -> None:
        positive_int("horizon", self.horizon)
        positive_int("envs_per_worker", self.envs_per_worker)
        unit_fraction("gamma", self.gamma)
        positive_float("timeout_s", self.timeout_s)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        if not self.sources:
            raise ValueError("sources must name at least one environment")
        one_of("ending", self.ending, ENDINGS)
        one_of("baseline", self.baseline, BASELINES)
        one_of("transport", self.transport, ("p2p", "allreduce"))
        if self.baseline == "leave_one_out" and self.envs_per_worker < 2:
            raise ValueError("baseline=leave_one_out needs envs_per_worker of at least 2")
        for name in ("compute_s", "communication_s"):
            if any(not 0 <= seconds < math.inf for seconds in getattr(self, name)):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def check_workers(self, count: int) -> None:
        """Raises ``ValueError`` where something is listed by worker and there are not ``count``."""
        for name, allowed in (("sources", (1, count)), ("compute_s", (0, count)), ("communication_s", (0, count))):
            if len(getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must have {allowed[0]} or {count} entries, got {len(getattr(self, name))}")

    def source(self, worker: int) -> EnvSource:
        """The environment of ``worker`` (0 .. n - 1)."""
        return self.sources[worker if len(self.sources) > 1 else 0]

    def agreed(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        names = ("horizon", "gamma", "envs_per_worker", "ending", "baseline", "transport", "seed", "config_hash")
        return {name: getattr(self, name) for name in names}
