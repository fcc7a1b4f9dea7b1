"""``ClusterEnv``: environments on many machines behind the Gymnasium API; the learner's side of the wire."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from .comm.channel import Backoff, ClusterError
from .comm.world import Ending, default_backoff, release_world
from .crew import Crew
from .detach import Detached
from .envs.build import EnvSource, Wrapper
from .envs.delays import Delay
from .envs.spaces import decode_space
from .handshake import software_versions
from .plain import Plain
from .policies import PolicyError, acting_parameters, num_weights
from .policies import weights_layout as policy_layout
from .roles import local_channel, open_channel, serve
from .rollout import Rollout
from .stats import Stats
from .sync import Always, SyncRule
from .worker import WorkerSettings


class ClusterEnv(VectorEnv[Any, Any, Any]):
    """A vector environment whose parts run on the worker ranks of an MPI job, or in this process if there is one rank.

    Every rank runs the same script.  On rank 0 (the learner) the constructor returns; on the others it serves, and
    leaves the process by ``SystemExit`` when the learner is done.  Row i is env i, always.

    Args:
        env: a Gymnasium id, or a callable (or ``"module:name"``, which names one) that makes one environment from
            ``env_kwargs`` (with ``backend="vector"``: a vector environment from ``num_envs`` and ``env_kwargs``).
        num_envs: in all; dealt out over the workers in contiguous blocks.
        policy: a module that follows ``clusterenv_hpc.policies.protocol``; for ``rollout`` and ``rollouts``.
        sync: when a worker asks for weights; default ``Always()``, which is safe for any on-policy code.
        env_kwargs: for the environment.
        comm: an mpi4py communicator; default ``COMM_WORLD`` under an MPI launcher, else none.
        seed: of the first reset, if that is given none, and of the action noise until a reset is given one.
        backend: ``sync`` (bit-equal to ``SyncVectorEnv``), ``vector`` or ``envpool``.
        autoreset_mode: for ``step``, as in Gymnasium (``sync`` backend only; the others have their own).
        num_workers: workers within this process where there is one rank; default 1.
        env_ranks: how many ranks each environment spans, if it is an MPI program itself: a worker is then a group of
            ranks, and every rank of it builds the environment with the group's communicator as ``comm``.
        num_probes: how many states of a rollout the divergence is measured on.
        timeout: seconds without any sign of life from a worker that are taken for its death.
        learner_timeout: seconds without word from the learner after which a worker ends the job.
        on_error: ``"abort"``: an environment that fails ends the job.  ``"restart"``: it is rebuilt in place and its
            episode ends as truncated (``sync`` backend, one rank for each environment; see ``envs.restart``).
        max_restarts: how often each environment may be rebuilt before its failure ends the job all the same.
        wrappers: callables ``env -> env``, applied to each environment, the first innermost (``sync`` backend).
        delay: makes workers slow, for experiments with unequal ones.
        on_worker_loss: ``"abort"``: a worker's death ends the job (so do most MPIs by themselves).  ``"continue"``:
            rollouts go on with the workers left, and without the dead one's environments; needs an MPI with ULFM.
        exit_workers: if False, the constructor returns a closed object on workers when the learner has closed.
        config_hash: compared between ranks.
        first_version: of the policy's weights before the first ``publish``; a resumed run goes on counting.
        backoff: how waiting is done.

    Raises:
        HandshakeError: the ranks do not fit together.
        WorkerError: a worker could not build its environments.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        num_envs: int,
        *,
        policy: torch.nn.Module | None = None,
        sync: SyncRule | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        comm: Any = None,
        seed: int | None = None,
        backend: str = "sync",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        num_workers: int | None = None,
        env_ranks: int = 1,
        num_probes: int = 64,
        timeout: float = 600.0,
        learner_timeout: float = 3600.0,
        on_error: str = "abort",
        max_restarts: int = 10,
        wrappers: Sequence[Wrapper] = (),
        delay: Delay | None = None,
        on_worker_loss: str = "abort",
        exit_workers: bool = True,
        config_hash: str = "",
        first_version: int = 0,
        backoff: Backoff | None = None,
    ) -> None:
        super().__init__()
        self.closed = False
        self.num_envs = _whole("num_envs", num_envs)
        _whole("num_probes", num_probes)
        _seconds("timeout", timeout)
        _seconds("learner_timeout", learner_timeout)
        if seed is not None:
            seed = _whole("seed", seed, least=0)
        if policy is not None and not isinstance(policy, torch.nn.Module):
            raise TypeError(f"policy must be a torch.nn.Module (an object, not its class), got {policy!r}")
        if sync is not None and policy is None:
            raise ValueError("a sync rule needs a policy: pass policy=..., or leave sync out")
        if sync is not None and not isinstance(sync, SyncRule):
            raise TypeError(f"sync must be APS(...), Always(), EveryK(...) or Never(), got {sync!r}")
        rule = (sync or Always()) if policy is not None else None
        mode = _autoreset_mode(autoreset_mode)
        source = EnvSource(
            env, dict(env_kwargs or {}), backend, mode, on_error, max_restarts, tuple(wrappers), delay or Delay()
        )
        if on_error == "restart" and env_ranks != 1:
            raise ValueError(f"on_error='restart' needs environments of one rank each, got env_ranks={env_ranks}")
        settings = WorkerSettings(source, self.num_envs, config_hash, seed, num_probes, timeout, not exit_workers)
        if on_worker_loss not in ("abort", "continue"):
            raise ValueError(f"on_worker_loss must be 'abort' or 'continue', got {on_worker_loss!r}")
        channel, group = open_channel(comm, num_workers, _whole("env_ranks", env_ranks), on_worker_loss == "continue")
        if channel is None and group is None:
            workers = 1 if num_workers is None else _whole("num_workers", num_workers)
            channel = local_channel(workers, settings, policy, rule)
        self.backend, self.stats = backend, Stats()
        self.is_learner = channel is not None and channel.rank == 0
        if channel is None or channel.rank:
            self.closed = True
            serve(channel, group, comm, settings, policy, rule, backoff, learner_timeout)
            return
        self._comm, self._exit_workers = comm, exit_workers
        self._crew = crew = Crew(channel, self.stats, timeout, backoff or default_backoff(channel))
        self._ending = Ending(channel, "learner", self._leave) if channel.transport != "local" else None
        own = {
            "rank": 0,
            "host": channel.host,
            "versions": software_versions(),
            "config_hash": config_hash,
            "num_envs": self.num_envs,
            "seed": seed,
            "num_probes": num_probes,
            "policy_layout": "" if policy is None else str(policy_layout(policy)),
            "num_weights": 0 if policy is None else num_weights(policy),
            "sync": {} if rule is None else rule.describe(),
        }
        reference = crew.meet(own)
        self.single_observation_space = decode_space(reference.observation_space)
        self.single_action_space = decode_space(reference.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        mode = AutoresetMode(reference.autoreset_mode)
        self.metadata = {**reference.metadata, "autoreset_mode": mode}
        self.render_mode = reference.render_mode
        spaces = (self.single_observation_space, self.single_action_space)
        self._plain = Plain(crew, spaces, self.num_envs, mode, backend, seed)
        self._detached: Detached | None = None
        self._policy = policy
        self._policy_shapes = [] if policy is None else _shapes(policy)
        if policy is not None and rule is not None:
            separate_next = mode is not AutoresetMode.NEXT_STEP
            self._detached = Detached(crew, policy, rule, spaces, num_probes, separate_next, first_version)

    # -- the world ---------------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._crew.channel.size - 1

    @property
    def transport(self) -> str:
        """What carries the messages: ``"local"`` or the MPI library."""
        return self._crew.channel.transport

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [self._crew.channel.host, *(peer.host for peer in self._crew.peers)]

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments on every worker; ``kwargs`` are for their ``close``."""
        if not self.is_learner:
            return
        if self._crew.broken:
            self._crew.abandon()
        else:
            self._stop()
            leave = not self._exit_workers and self._ending is not None
            self._crew.close(kwargs, leave)
            if leave and self._ending is not None:  # the script goes on everywhere, and may build the next one
                self._ending.withdraw()
                release_world(self._comm)

    def abort(self) -> None:
        """After a failure: send the workers home at once, and end the job if one does not go."""
        self.closed = True
        self._crew.abandon()
        if self._ending is not None:
            self._ending.end(clean=False)

    def _leave(self, clean: bool) -> bool:
        """The process ends: close if that was not done, and send everybody home.  False if somebody did not go."""
        if clean and not self.closed and not self._crew.broken:
            try:
                self.close()
            except ClusterError as error:
                print(f"clusterenv-hpc: {error}", file=sys.stderr, flush=True)
        return self._crew.dismiss()

    def __enter__(self) -> ClusterEnv:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the exception goes on; whoever ends the process sends the workers home
            self.closed = True
            self._crew.abandon()

    def _demand_open(self, method: str) -> None:
        if self.closed or self._crew.broken:
            raise ClusterError(f"{method}() was called after close(), or after a failure or an interruption")
        if method in ("reset", "step", "call", "set_attr"):
            self._crew.demand_all(method)
        if method not in ("publish", "poll"):
            self._stop()

    def _stop(self) -> None:
        if self._detached is not None:
            self._detached.stop()

    # -- plain Gymnasium ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As ``SyncVectorEnv.reset``: ``seed`` may be a list; ``options["reset_mask"]`` resets only those."""
        self._demand_open("reset")
        return self._plain.reset(seed, options)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """As ``SyncVectorEnv.step``: ``actions`` for all environments, row by row.

        Raises:
            ResetNeeded: there was no ``reset`` yet.
            ValueError: ``actions`` are too few or too many, or one cannot be meant; the environments are as before.
        """
        self._demand_open("step")
        return self._plain.step(actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call (or get) ``name`` of every environment; results in the order of rows.  All of it travels as data."""
        self._demand_open("call")
        return self._plain.call(name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute ``name`` of every environment."""
        return self.call(name)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's generator, as ``SyncVectorEnv`` gives it."""
        return self.get_attr("np_random_seed")

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute ``name``: a list or tuple holds one value for each environment, else it is for all."""
        self._demand_open("set_attr")
        self._plain.set(name, values)

    def render(self) -> tuple[Any, ...] | None:
        """The rendered frames of every environment."""
        return self.call("render")

    # -- DETACH ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest policy version."""
        return self._demand_policy("version").version

    def publish(self) -> int:
        """Snapshot the policy as the next version, and let the workers know.  Returns the version.

        Raises:
            PolicyError: the policy has other layers than when this was built; the workers' copies have not.
        """
        self._demand_open("publish")
        detached = self._demand_policy("publish")
        self._demand_same_weights()
        return detached.publish()

    def rollout(self, num_steps: int) -> Rollout:
        """One rollout ``[T, N, ...]`` of all environments, in lockstep: same seeds give bit-equal rollouts.

        A worker that asked for weights gets the newest before it starts.

        Raises:
            WorkerError: a worker failed.  SilenceError: a worker gave no sign of life for ``timeout`` seconds.
        """
        return self._begin("rollout", num_steps).rollout(int(num_steps))

    def rollouts(self, num_steps: int) -> Generator[Rollout, None, None]:
        """Rollouts of single workers ``[T, n, ...]`` in the order they arrive, without end; workers never wait.

        Leaving the loop, or any call but ``publish`` and ``poll``, stops the workers; what was under way is dropped and
        counted.
        """
        return self._begin("rollouts", num_steps).stream(int(num_steps), lambda: self._demand_open("rollouts"))

    def poll(self) -> int:
        """Without waiting, let messages move and answer weight requests: for within updates that take long.

        Returns how many rollouts have come that were not taken yet.

        Raises:
            WorkerError: a worker failed.
        """
        self._demand_open("poll")
        return self._demand_policy("poll").poll()

    def _begin(self, method: str, num_steps: int) -> Detached:
        self._demand_open(method)
        detached = self._demand_policy(method)
        _whole("num_steps", num_steps)
        self._demand_same_weights()
        if not self._plain.was_reset:
            self.reset()
        return detached

    def _demand_same_weights(self) -> None:
        assert self._policy is not None
        if (shapes := _shapes(self._policy)) != self._policy_shapes:
            was, now = (sum(map(math.prod, them)) for them in (self._policy_shapes, shapes))
            raise PolicyError(
                f"the policy's acting parameters are {len(shapes)} tensors of {now:,} numbers, but were "
                f"{len(self._policy_shapes)} of {was:,} when ClusterEnv was built, as on the workers: build the policy "
                "whole, on every rank, before ClusterEnv"
            )

    def _demand_policy(self, method: str) -> Detached:
        if self._detached is None:
            raise ValueError(f"{method} needs a policy that the workers act with: ClusterEnv(..., policy=...)")
        return self._detached


def _shapes(policy: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in acting_parameters(policy)]


def _whole(key: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{key} must be a whole number, at least {least}; got {value!r}")
    return int(value)


def _seconds(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{key} must be a positive number of seconds, got {value!r}")


def _autoreset_mode(value: Any) -> AutoresetMode:
    try:
        return AutoresetMode(value)
    except ValueError:
        allowed = ", ".join(mode.value for mode in AutoresetMode)
        raise ValueError(f"autoreset_mode must be one of {allowed}; got {value!r}") from None
