"""The worker: steps its environments, acts with a local copy of the policy, and asks for weights when it has drifted.

``Worker.serve`` is a generator that yields whenever it would wait (False) or has done something (True).  Under MPI
``run_worker`` drives it with sleeps in between; in one process the learner does, whenever it waits itself.  So one
piece of code runs on both transports, without threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from .acting import Acting
from .collect import Collector, NotFiniteError
from .comm.channel import Backoff, Channel, Deadline
from .comm.codec import decode, encode
from .comm.messages import Command, Report, Tag, note, read_probe
from .envs.build import EnvError, EnvSource, build_vector_env, failing_row, misfit
from .envs.delays import slow_down
from .envs.group import LEAVE, Group
from .envs.spaces import encode_space
from .handshake import Hello, deal, plain_metadata, software_versions, this_process
from .policies import check_policy, distribution_of, make_lean, make_plain, num_weights
from .policies import weights_layout as policy_layout_of
from .stepping import Stepping
from .sync import SyncRule

NO_ENVIRONMENTS: dict[str, Any] = {
    "observation_space": b"",
    "action_space": b"",
    "autoreset_mode": "",
    "num_params": 0,
    "metadata": {},
    "render_mode": None,
}
"""What a worker says of its environments where it holds none."""

GRACE_S = 5.0
"""How long a failed worker leaves the learner to report the failure before it ends the job itself."""


@dataclass(frozen=True)
class WorkerSettings:
    """What every rank is told by the script: see ``ClusterEnv``'s arguments."""

    source: EnvSource
    num_envs: int
    config_hash: str
    seed: int | None
    num_probes: int
    timeout_s: float
    leave_on_close: bool


class Worker:
    """One worker's side of the wire.

    Args:
        channel: to the learner.
        settings: what to build.
        policy: the local copy; None without one.
        rule: when to ask for weights.
        group: the ranks that this worker's environments span; None: this one alone.
    """

    def __init__(
        self,
        channel: Channel,
        settings: WorkerSettings,
        policy: torch.nn.Module | None,
        rule: SyncRule | None,
        group: Group | None = None,
    ):
        self.channel, self.settings, self.policy, self.rule, self.group = channel, settings, policy, rule, group
        first, last = deal(settings.num_envs, channel.size - 1)[channel.rank - 1]
        self.rows = (first, last)
        self._collector: Collector | None = None
        self._stepping: Stepping | None = None
        self._acting: Acting | None = None
        self._leaving = False
        self.closed = False
        """Whether the environments are closed, so that the learner may stay silent for as long as it likes."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> Iterator[bool]:
        """Introduce itself, then do as it is told until it is told to leave."""
        try:
            self._build()
        except BaseException as error:
            if interrupted(error):
                raise
            yield from tell_failure(self.channel, self._describe(error))
            self._release()
            return
        try:
            while not self._leaving:
                if self._stepping is not None and self._stepping.arrived():
                    self._stepping.step()
                    yield True
                    continue
                arrived = self.channel.take_note(Tag.COMMAND, 0)
                if arrived is None:
                    yield False
                    continue
                data = arrived[1]
                if data[0] == Command.ROLLOUT and self._acting is not None:
                    yield from self._acting.rollout(*decode(data[1:]))
                elif data[0] == Command.STREAM and self._acting is not None:
                    yield from self._acting.stream(*decode(data[1:]))
                else:
                    self._obey(data)
                yield True
        except GeneratorExit:
            raise
        except BaseException as error:
            if interrupted(error):
                raise
            yield from tell_failure(self.channel, self._describe(error))
        finally:
            self._release()

    def _commands(self) -> bool:
        """Obey what has come, between two steps or while waiting; True if it is to leave."""
        while not self._leaving and (arrived := self.channel.take_note(Tag.COMMAND, 0)) is not None:
            self._obey(arrived[1])
        return self._leaving

    def _obey(self, data: bytes) -> None:
        """Commands that need no waiting."""
        command, body = data[0], data[1:]
        if command == Command.CLOSE:
            if self._collector is not None:
                self._collector.envs.close(**decode(body))
            self.closed = True
            self.channel.send_note(0, Tag.REPORT, note(Report.REPLY))
            self._leaving = self.settings.leave_on_close
        elif command == Command.LEAVE:
            self._leaving = True
        if self._acting is not None:
            if command == Command.PROBE:
                self._acting.see(*read_probe(body))
            elif command == Command.STOP:
                self._acting.stop()
        if self._stepping is not None:
            if command == Command.RESET:
                self._stepping.reset(*decode(body))
            elif command == Command.ACTIONS:
                self._stepping.advance(*decode(body))
            elif command == Command.CALL:
                self._stepping.call(*decode(body))
            elif command == Command.SET:
                self._stepping.set(*decode(body))

    def _build(self) -> None:
        settings, first, last = self.settings, *self.rows
        policy = self.policy
        hello: dict[str, Any] = {
            "rank": self.channel.rank,
            "world_rank": self.channel.world_rank(self.channel.rank),
            **this_process(),
            "rows": self.rows,
            "versions": software_versions(),
            "config_hash": settings.config_hash,
            "num_envs": settings.num_envs,
            "backend": settings.source.backend,
            "policy_layout": "" if policy is None else str(policy_layout_of(policy)),
            "num_weights": 0 if policy is None else num_weights(policy),
            "seed": settings.seed,
            "num_probes": settings.num_probes,
            "sync": {} if self.rule is None else self.rule.describe(),
            **NO_ENVIRONMENTS,
        }
        if last > first:
            envs = build_vector_env(settings.source, last - first, first, self.group)
            slow_down(envs, settings.source.delay.by_worker(self.channel.size - 1)[self.channel.rank - 1])
            distribution = None
            if policy is not None:
                policy.eval()
                be_worker: Callable[[int, int], None] | None = getattr(policy, "for_worker", None)
                if be_worker is not None:  # what it explores with may depend on who it is
                    be_worker(self.channel.rank - 1, self.channel.size - 1)
                check_policy(policy, envs.single_observation_space, envs.single_action_space)
                distribution = distribution_of(policy, envs.single_action_space)
                hello["num_params"] = distribution.num_params
                make_lean(policy)
            seed = np.random.SeedSequence(settings.seed, spawn_key=(first,)).generate_state(1, np.uint64)[0] >> 1
            self._collector = Collector(envs, policy, distribution, int(seed))
            hello |= {
                "observation_space": encode_space(envs.single_observation_space),
                "action_space": encode_space(envs.single_action_space),
                "autoreset_mode": self._collector.mode.value,
                "metadata": plain_metadata(envs.metadata),
                "render_mode": envs.render_mode,
            }
            self._stepping = stepping = Stepping(
                self.channel,
                self._collector,
                first,
                settings.source.backend,
                settings.timeout_s,
                self._describe,
                may_refuse=self.group is None,
            )
            if policy is not None and distribution is not None and self.rule is not None:
                self._acting = Acting(
                    self.channel,
                    self._collector,
                    policy,
                    distribution,
                    self.rule,
                    settings.num_probes,
                    settings.timeout_s,
                    self._commands,
                    stepping.tell_restarts,
                )
        self.channel.send_note(0, Tag.REPORT, note(Report.HELLO, Hello(**hello).pack()))

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """What the learner is told of an exception."""
        if isinstance(error.__cause__, StopIteration):  # which no generator lets through as it is
            error = error.__cause__
        row = getattr(error, "row", None)
        if row is None and self._collector is not None:
            row = failing_row(self._collector.envs, error.__traceback__)
        if row is not None and not isinstance(error, EnvError):
            row += self.rows[0]
        cause = str(error) if isinstance(error, (EnvError, NotFiniteError)) else f"{type(error).__name__}: {error}"
        if self._collector is not None and _in_concatenate(error):  # after the loop over environments
            found = misfit(self._collector.envs)
            if found is not None:
                row, cause = self.rows[0] + found[0], f"the environment gave {found[1]}"
        trace = "".join(traceback.format_exception(error))
        place = _place(error)
        return {"cause": cause, "row": row, "host": self.channel.host, "traceback": trace[-20000:], "place": place}

    def _release(self) -> None:
        for part in (self._stepping, self._acting):
            if part is not None:
                part.free()
        if self._collector is not None:
            with contextlib.suppress(Exception):  # whoever wanted to know asked to close
                self._collector.envs.close()
        if self.policy is not None:
            make_plain(self.policy)  # the script may go on with it
        if self.group is not None:
            self.group.tell(LEAVE)
        self.channel.flush(Deadline(GRACE_S / 2))  # first: the learner takes what is under way until it hears this
        self.channel.send_note(0, Tag.REPORT, note(Report.LEFT))


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C was pressed; where that is ignored, as on worker ranks, an environment has raised it itself."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _in_concatenate(error: BaseException) -> bool:
    """Whether Gymnasium could not put the environments' observations together."""
    return any("concatenate" in frame.name for frame in traceback.extract_tb(error.__traceback__))


def _place(error: BaseException) -> str:
    """Where in the user's code an exception came about, as a traceback prints it; empty if it was not there."""
    while error.__cause__ is not None:
        error = error.__cause__
    theirs = (os.path.dirname(__file__), os.path.dirname(gymnasium.__file__), os.path.dirname(torch.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(theirs)]
    return "".join(traceback.format_list(frames))


def tell_failure(channel: Channel, report: dict[str, Any]) -> Iterator[bool]:
    """Tell the learner of an exception, and wait until it lets this rank go; end the job if it does not.

    report: ``cause``, ``host`` and ``traceback`` at least.
    """
    channel.send_note(0, Tag.REPORT, note(Report.ERROR, encode(report)))
    deadline = Deadline(GRACE_S)
    while not deadline.passed:
        arrived = channel.take_note(Tag.COMMAND, 0)
        if arrived is not None and arrived[1][0] == Command.LEAVE:
            return
        yield False
    where = f"rank {channel.world_rank(channel.rank)} (worker, {channel.host})"
    told = f"clusterenv-hpc: {where} failed: {report['cause']}\n{report['traceback']}"
    print(told, file=sys.stderr, flush=True)
    channel.abort(1)


class Serving(Protocol):
    """A worker of some kind."""

    closed: bool
    """Whether the learner may stay silent for as long as it likes."""

    def serve(self) -> Iterator[bool]:
        """Work until told to leave; yields False where it would wait, and True when it has done something."""


def run_worker(worker: Serving, channel: Channel, backoff: Backoff, timeout_s: float) -> None:
    """Drive ``worker`` until it leaves.  If nothing is heard from the learner for ``timeout_s``, end the job."""
    deadline = Deadline(timeout_s)
    who = f"rank {channel.world_rank(channel.rank)} (worker, {channel.host})"
    for busy in worker.serve():
        channel.progress()
        if 0 in channel.lost:
            print(f"clusterenv-hpc: {who}: the learner is dead", file=sys.stderr)
            raise SystemExit(1)
        if busy or worker.closed:
            deadline.renew()
        if busy:
            backoff.reset()
            continue
        if deadline.passed:
            print(
                f"clusterenv-hpc: {who} heard nothing from the learner (rank 0) for "
                f"{timeout_s:g} s and ends the job; raise learner_timeout if it needs longer",
                file=sys.stderr,
                flush=True,
            )
            channel.abort(1)
        backoff.wait()
    channel.flush(Deadline(GRACE_S))
