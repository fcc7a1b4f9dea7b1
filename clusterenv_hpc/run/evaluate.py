"""How good a policy is: one whole episode for each of a list of seeds, so that short episodes count as much as long."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from clusterenv_hpc.envs.build import EnvError
from clusterenv_hpc.envs.restart import FAILURES, fresh_seed
from clusterenv_hpc.envs.single import single_maker
from clusterenv_hpc.policies import as_tensors, distribution_of
from clusterenv_hpc.run.build import build_policy, env_source, spaces_of
from clusterenv_hpc.run.checkpoint import CheckpointStore
from clusterenv_hpc.run.config import ConfigError, load, with_values
from clusterenv_hpc.run.run_dir import find
from clusterenv_hpc.run.schema import EnvConfig, EvalConfig
from clusterenv_hpc.run.tasks import tasks_of
from clusterenv_hpc.run.video import check_path, record

SLOTS = 32
"""Environments stepped side by side, to share the policy's forward passes."""


@dataclass(frozen=True)
class Evaluation:
    """``returns`` and ``lengths`` of each episode ``[E]``, in the order of the seeds; ``cut``: how many had no end.

    by_task: mean return in each environment, where workers have environments of their own.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    cut: int
    by_task: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns over the episodes."""
        return float(self.returns.std())

    def describe(self, sampled: bool) -> str:
        """One sentence."""
        text = f"{'sampled' if sampled else 'greedy'} return {self.mean:.1f} +- {self.std:.1f}"
        text += f" ({self.returns.min():.1f} to {self.returns.max():.1f}) over {len(self.returns)} episodes"
        return text + (f", {self.cut} of them cut off after eval.max_steps" if self.cut else "")

    def as_dict(self) -> dict[str, Any]:
        """For summaries."""
        return {
            "eval_return_mean": self.mean,
            "eval_return_std": self.std,
            "eval_return_min": float(self.returns.min()),
            "eval_return_max": float(self.returns.max()),
            "eval_length_mean": float(self.lengths.mean()),
            "eval_episodes": len(self.returns),
            "eval_cut": self.cut,
            **({"eval_return_by_task": list(self.by_task)} if self.by_task else {}),
        }


@dataclass
class _Slot:
    """An environment, the episode it plays, and what it shows; ``make`` makes another one, ``restarts`` times.

    seed: of the episode.  failures: of the environment, and within the episode.
    """

    make: Callable[[], gymnasium.Env[Any, Any]]
    restarts: int
    env: gymnasium.Env[Any, Any]
    episode: int = -1
    seed: int = 0
    observation: Any = None
    failures: int = 0
    in_episode: int = 0

    def begin(self, episode: int, seed: int) -> None:
        """Reset, for ``episode``."""
        self.episode, self.seed, self.in_episode = episode, seed, 0
        self._reset()

    def again(self, error: BaseException) -> None:
        """The episode from its beginning, in another environment than the one that failed."""
        self._renew(error)
        self._reset()

    def _reset(self) -> None:
        while True:
            # Where a failure depends on the seed, that of the episode leads to it again and again.
            seed = self.seed if self.in_episode < 2 else fresh_seed(self.seed, self.in_episode)
            try:
                self.observation, _ = self.env.reset(seed=seed)
                return
            except FAILURES as error:
                self._renew(error)

    def _renew(self, error: BaseException) -> None:
        """Another environment; raises where none is wanted any more."""
        if not self.restarts:
            raise error
        if self.failures >= self.restarts:
            told = f"an environment failed in an evaluation once more than env.max_restarts={self.restarts} allows"
            raise EnvError(f"{told}: {type(error).__name__}: {error}") from error
        self.failures += 1
        self.in_episode += 1
        with contextlib.suppress(*FAILURES):
            self.env.close()
        self.env = self.make()


def evaluate(
    policy: torch.nn.Module, env: EnvConfig, settings: EvalConfig, stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Plays ``settings.episodes`` episodes, at least one, with seeds counting up from ``settings.seed``.

    Where workers have environments of their own (``env.per_worker``), as many in each that differs.
    Greedy unless ``settings.sampled``; no random state outside is touched, so that training goes on undisturbed.
    With ``env.on_error=restart`` an episode whose environment fails is played again, in a new one; where it fails a
    second time, from another seed, made of its own.
    Returns None where ``stop`` says so on the way.  Raises what the environment raises.
    """
    if env.per_worker:
        parts = [evaluate(policy, task, settings, stop) for task in tasks_of(env)]
        return joined([part for part in parts if part is not None]) if None not in parts else None
    count = settings.episodes
    returns, lengths, cut = np.zeros(count), np.zeros(count, dtype=np.int64), 0
    device = next(policy.parameters()).device
    generator = torch.Generator().manual_seed(settings.seed)
    make = single_maker(env_source(env, evaluation=True))
    restarts = env.max_restarts if env.on_error == "restart" else 0
    slots = [_Slot(make, restarts, make()) for _ in range(min(SLOTS, count))]
    space = slots[0].env.observation_space
    distribution = distribution_of(policy, slots[0].env.action_space)
    waiting = iter(range(count))
    try:
        playing = list(slots)
        for slot in playing:
            slot.begin(i := next(waiting), settings.seed + i)
        while playing:
            if stop():
                return None
            into: Any = create_empty_array(space, len(playing))
            batch = concatenate(space, [slot.observation for slot in playing], into)
            with torch.inference_mode():
                params = policy(as_tensors(batch, device)).cpu()
                noise = distribution.noise((len(playing),), generator) if settings.sampled else None
                drawn = distribution.mode(params) if noise is None else distribution.sample(params, noise)
            still = []
            for slot, action in zip(playing, distribution.env_actions(drawn.numpy()), strict=True):
                try:
                    slot.observation, reward, terminated, truncated, _ = slot.env.step(action)
                except FAILURES as error:
                    slot.again(error)
                    returns[slot.episode], lengths[slot.episode] = 0.0, 0
                    still.append(slot)
                    continue
                returns[slot.episode] += float(reward)
                lengths[slot.episode] += 1
                ended = bool(terminated or truncated)
                if not ended and lengths[slot.episode] >= settings.max_steps:
                    ended, cut = True, cut + 1
                if ended:
                    following = next(waiting, None)
                    if following is None:
                        continue
                    slot.begin(following, settings.seed + following)
                still.append(slot)
            playing = still
    finally:
        for slot in slots:
            with contextlib.suppress(Exception):  # all is played
                slot.env.close()
    return Evaluation(returns, lengths, cut)


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Several evaluations as one."""
    returns, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("returns", "lengths"))
    return Evaluation(returns, lengths, sum(part.cut for part in parts), tuple(part.mean for part in parts))


def main(argv: list[str]) -> int:
    """``clusterenv-hpc eval``."""
    parser = argparse.ArgumentParser(
        prog="clusterenv-hpc eval",
        description="Play whole episodes with the newest checkpoint of a run; one episode for each seed.",
        epilog="Example: clusterenv-hpc eval lunarlander episodes=20 video=lander.gif",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run's directory, its name below runs/ or the start of it, or latest"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="episodes=, seed=, max_steps=, see train --help; video=NAME.gif or NAME.mp4: a film of the first episode",
    )
    parser.add_argument(
        "--sampled", action="store_true", help="draw actions from the policy, rather than take its mode"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    args = parser.parse_args(argv)
    run = find(args.run)
    films = [Path(word.removeprefix("video=")).expanduser() for word in args.settings if word.startswith("video=")]
    for film in films:
        check_path(film)
    settings = [word if word.startswith("eval.") else f"eval.{word}" for word in args.settings if word[:6] != "video="]
    config = with_values(load(run.config), settings)
    config.eval.sampled |= args.sampled
    if config.eval.episodes == 0:
        raise ConfigError("episodes=0: allowed: an integer >= 1")
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    if not store.paths():
        raise ConfigError(f"{run.path}: there is no checkpoint yet; expected a run that has saved one")
    torch.set_num_threads(1)
    policy = build_policy(config.policy, *spaces_of(config.env), seed=config.seed, algo=config.algo)
    loaded = store.load_latest(lambda state: policy.load_state_dict(state["learner"]["policy"]))
    assert loaded is not None
    for line in loaded.damaged:
        print(f"warning: {line}; using {loaded.path.name}", file=sys.stderr)
    result = evaluate(policy.eval(), config.env, config.eval)
    assert result is not None
    if args.json:
        print(json.dumps({"run": str(run.path), "checkpoint": loaded.path.name, **result.as_dict()}))
    else:
        print(f"{run.path} ({loaded.path.stem}, {config.env.id}): {result.describe(config.eval.sampled)}")
    for film in films:
        told = record(policy, config.env, config.eval, film).describe(config.eval.seed)
        print(told, file=sys.stderr if args.json else sys.stdout)
    return 0
