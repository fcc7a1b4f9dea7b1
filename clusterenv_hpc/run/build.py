"""A configuration becomes objects: the policy, the sync rule, the learner, an environment to look at."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import torch

from clusterenv_hpc.algorithms import GradientMethod
from clusterenv_hpc.envs.build import EnvSource, Wrapper, build_vector_env
from clusterenv_hpc.envs.delays import Delay
from clusterenv_hpc.learners import DQN, PPO, SAC, TD3, Learner, PPOConfig, VTrace
from clusterenv_hpc.policies import ActorCritic, DeterministicActor, GaussianActor, QNetwork
from clusterenv_hpc.policies.distributions import DiagonalGaussian, Distribution, distribution_for
from clusterenv_hpc.run.config import ConfigError, named_object, wrapper_path
from clusterenv_hpc.run.schema import Config, EnvConfig, PolicyConfig
from clusterenv_hpc.run.tasks import task_of
from clusterenv_hpc.sync import APS, Always, EveryK, Never, SyncRule

SETTINGS = {"delta", "max_lag", "k"}
SYNC_RULES: dict[str, type[SyncRule]] = {"aps": APS, "always": Always, "every_k": EveryK, "never": Never}


def env_source(env: EnvConfig, *, evaluation: bool = False) -> EnvSource:
    """Where the workers' environments come from, or with ``evaluation`` those that a policy is judged in.

    One that spans ranks gets the communicator of this rank alone, wherever its worker's group gives it no other.
    """
    kwargs = {**env.kwargs, **(env.eval_kwargs if evaluation else {})}
    if env.ranks > 1:
        from clusterenv_hpc.comm.mpi import MPI

        kwargs["comm"] = MPI.COMM_SELF
    return EnvSource(
        env.id,
        kwargs,
        env.backend,
        on_error=env.on_error,
        max_restarts=env.max_restarts,
        wrappers=tuple(build_wrapper(entry) for entry in env.wrappers),
        delay=Delay(env.delay.scheme, env.delay.seconds, env.delay.factor, tuple(env.delay.values)),
    )


def build_wrapper(entry: Any) -> Wrapper:
    """The wrapper that an entry of ``env.wrappers`` describes."""
    path, kwargs = wrapper_path(entry)
    return partial(named_object(path), **kwargs)


def spaces_of(env: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """The observation and action space of the first worker's environment, built for this and closed again.

    Raises EnvError where it cannot be built.
    """
    envs = build_vector_env(env_source(task_of(env, 0)), 1)
    with contextlib.suppress(Exception):  # it was only looked at
        envs.close()
    return envs.single_observation_space, envs.single_action_space


def build_policy(
    policy: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    seed: int,
    algo: Any = None,
) -> torch.nn.Module:
    """The networks that workers act with, initialised from ``seed`` alone, so that all ranks and cores begin alike.

    algo: one of the algo schemas; what kind of network its learner trains.  None: an actor and a critic.
    Raises PolicyError or ConfigError where the spaces do not fit.
    """
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        name, sizes = getattr(algo, "name", "ppo"), (policy.hidden, policy.activation)
        if name not in ("dqn", "sac", "td3"):
            return _actor_critic(policy, observation_space, action_space, isinstance(algo, GradientMethod))
        try:
            if name == "dqn":
                ladder = (algo.dueling, algo.epsilon, algo.epsilon_exponent)
                return QNetwork(observation_space, action_space, *sizes, *ladder)  # type: ignore[arg-type]
            if name == "sac":
                return GaussianActor(observation_space, action_space, *sizes)  # type: ignore[arg-type]
            return DeterministicActor(observation_space, action_space, *sizes, algo.exploration)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"algo={name}: {error}") from error


def _actor_critic(
    policy: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    squashed: bool,
) -> ActorCritic:
    """squashed: whether tanh is the way to keep actions within bounds, where there are any and none is configured."""
    distribution: Distribution | None = None
    if isinstance(action_space, gymnasium.spaces.Box):
        squash = policy.squash or ("tanh" if squashed and action_space.is_bounded() else "clip")
        try:
            distribution = DiagonalGaussian(action_space, squash=squash)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"policy.squash={policy.squash}: {error}") from error
    return ActorCritic(
        observation_space,
        action_space,
        policy.hidden,
        policy.activation,
        critic=policy.critic,  # type: ignore[arg-type]
        distribution=distribution or distribution_for(action_space),
        log_std=policy.log_std,
        std=policy.std,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Orthogonal initialisation rounds differently with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_sync(sync: Any) -> SyncRule:
    """The rule that one of the sync schemas describes."""
    settings = {spec.name: getattr(sync, spec.name) for spec in dataclasses.fields(sync) if spec.name in SETTINGS}
    return SYNC_RULES[sync.rule](**settings)


def build_learner(
    algo: Any,
    policy: torch.nn.Module,
    action_space: gymnasium.Space[Any],
    device: torch.device,
    seed: int,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    num_envs: int = 1,
) -> Learner:
    """The learner that one of the algo schemas describes.

    observation_space: learners with networks of their own need it.  num_envs: of the whole run.
    """
    with one_thread():
        if algo.name == "vtrace":
            return VTrace(policy, algo, action_space, device, seed)
        if algo.name == "dqn":
            return DQN(policy, algo, action_space, num_envs, device, seed)
        if algo.name in ("sac", "td3"):
            assert observation_space is not None
            kind = SAC if algo.name == "sac" else TD3
            return kind(policy, algo, observation_space, action_space, num_envs, device, seed)
        settings = {spec.name: getattr(algo, spec.name) for spec in dataclasses.fields(PPOConfig)}
        return PPO(policy, PPOConfig(**settings), action_space, device, seed)


def choose_device(device: str) -> torch.device:
    """The learner's device; ``auto`` is a GPU where there is one.  Raises ConfigError where there is none such."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device}: torch sees {torch.cuda.device_count()} CUDA devices; allowed: auto, cpu")
    return chosen


def choose_threads(config: Config, policy: torch.nn.Module) -> int:
    """Torch threads of the learner: what is configured; else more than one only for networks that gain by it.

    Small layers are done before a second thread has woken up: on two busy cores two threads took twice the time of one.
    """
    if config.threads is not None:
        return config.threads
    wide = (
        any(isinstance(module, torch.nn.Conv2d) for module in policy.modules())
        or max(config.policy.hidden, default=0) >= 512
    )
    return min(4, len(os.sched_getaffinity(0))) if wide else 1
