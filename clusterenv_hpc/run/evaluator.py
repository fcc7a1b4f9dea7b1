"""A rank set aside for evaluation: it plays whole episodes with the newest weights while the learner goes on learning.

    learner:    idle? --EVALUATE(version, weights)-->                         <--REPLY(version, returns)-- record
    evaluator:                                       episodes ... episodes -->

It is the last rank of the job, and no worker: it belongs to neither the training's communicator nor its messages.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import numpy as np
import torch

from clusterenv_hpc.comm.channel import Backoff, Channel, Deadline, WorkerError
from clusterenv_hpc.comm.codec import decode, encode
from clusterenv_hpc.comm.messages import Command, Report, Tag, note
from clusterenv_hpc.policies import flat_weights, load_flat_weights
from clusterenv_hpc.run.build import build_policy, spaces_of
from clusterenv_hpc.run.errors import describe
from clusterenv_hpc.run.evaluate import Evaluation, evaluate
from clusterenv_hpc.run.interrupt import ignore_stop_signals
from clusterenv_hpc.run.randomness import seeds_of
from clusterenv_hpc.run.schema import Config

GRACE_S = 5.0
LEARNER, EVALUATOR = 0, 1
"""Their ranks on the channel that they share."""


class Evaluating:
    """The learner's side.

    Args:
        channel: to the evaluator.
        sampled: whether actions are drawn, and so no greedy return is known.
    """

    def __init__(self, channel: Channel, sampled: bool) -> None:
        self._channel, self._sampled = channel, sampled
        self._busy = self._left = False
        self._asked = -1
        self.latest: Evaluation | None = None
        self.count = self.weight_bytes = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self._channel.world_rank(EVALUATOR)} (evaluator)"

    def exchange(self, policy: torch.nn.Module, version: int, env_steps: int) -> dict[str, Any]:
        """Between two updates, without waiting: take a result, and hand out ``policy`` if that is newer.

        Returns what is to be recorded: nothing, or the evaluation with the version and the steps it belongs to.

        Raises:
            WorkerError: the evaluation failed.
        """
        self._channel.progress()
        record: dict[str, Any] = {}
        if (arrived := self._channel.take_note(Tag.REPORT)) is not None:
            record = self._heard(arrived[1])
        if not self._busy and version != self._asked:
            weights = flat_weights(policy)
            body = encode([version, env_steps, weights])
            self._channel.send_note(EVALUATOR, Tag.COMMAND, note(Command.EVALUATE, body))
            self._busy, self._asked = True, version
            self.weight_bytes += weights.nbytes
        return record

    def _heard(self, data: bytes) -> dict[str, Any]:
        told = decode(data[1:])
        if data[0] == Report.ERROR:
            self._channel.send_note(EVALUATOR, Tag.COMMAND, note(Command.LEAVE))
            self._left = True
            message = f"{self.name[:-1]}, {told['host']}) failed: {told['cause']}"
            raise WorkerError(message, self._channel.world_rank(EVALUATOR), told["host"], told["traceback"])
        self._busy = False
        self.latest = Evaluation(told["returns"], told["lengths"], told["cut"])
        self.count += 1
        return {
            **self.latest.as_dict(),
            "eval_version": told["version"],
            "eval_env_steps": told["env_steps"],
            "eval_s": told["seconds"],
        }

    def passed(self, target: float) -> bool:
        """Whether the last evaluation was greedy, and its mean return ``target`` or more."""
        return not self._sampled and self.latest is not None and self.latest.mean >= target

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        return {"evaluations": self.count, "evaluation_weight_bytes": self.weight_bytes}

    def leave(self) -> None:
        """Send the evaluator home, from the middle of an episode if need be; end the job if it does not go."""
        if self._left:
            return
        self._left = True
        self._channel.send_note(EVALUATOR, Tag.COMMAND, note(Command.LEAVE))
        deadline, backoff = Deadline(GRACE_S), Backoff()
        while not deadline.passed:
            self._channel.progress()
            arrived = self._channel.take_note(Tag.REPORT)
            if arrived is not None and arrived[1][0] in (Report.LEFT, Report.ERROR):
                return
            backoff.wait()
        print(f"clusterenv-hpc: {self.name} did not leave within {GRACE_S:g} s", file=sys.stderr, flush=True)
        self._channel.abort(1)


def serve_evaluations(config: Config, channel: Channel) -> int:
    """The evaluator's life, with its ``channel`` to the learner.  Returns the exit code."""
    ignore_stop_signals(config.slurm.signal)
    torch.set_num_threads(1)
    evaluator = _Evaluator(config, channel)
    try:
        evaluator.run()
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        report = {"cause": describe(error), "host": channel.host, "traceback": trace[-20000:]}
        channel.send_note(LEARNER, Tag.REPORT, note(Report.ERROR, encode(report)))
        deadline, backoff = Deadline(GRACE_S), Backoff()
        while not evaluator.leaving() and not deadline.passed:
            backoff.wait()
        return 1
    channel.send_note(LEARNER, Tag.REPORT, note(Report.LEFT))
    channel.flush(Deadline(GRACE_S))
    return 0


class _Evaluator:
    def __init__(self, config: Config, channel: Channel) -> None:
        self._config, self._channel = config, channel
        self._leaving = False
        self._orders: list[bytes] = []

    def leaving(self) -> bool:
        """Look for messages; whether the learner has said to leave."""
        self._channel.progress()
        while (arrived := self._channel.take_note(Tag.COMMAND, LEARNER)) is not None:
            if arrived[1][0] == Command.LEAVE:
                self._leaving = True
            else:
                self._orders.append(arrived[1][1:])
        return self._leaving

    def run(self) -> None:
        config = self._config
        policy = build_policy(config.policy, *spaces_of(config.env), seeds_of(config.seed, 0)[0], config.algo).eval()
        backoff, deadline = Backoff(), Deadline(config.learner_timeout)
        while not self.leaving():
            if not self._orders:
                if deadline.passed:
                    raise TimeoutError(f"heard nothing from the learner (rank 0) for {deadline.seconds:g} s")
                backoff.wait()
                continue
            version, env_steps, weights = decode(self._orders.pop(0))
            load_flat_weights(policy, weights)
            began = time.perf_counter()
            result = evaluate(policy, config.env, config.eval, stop=self.leaving)
            if result is not None:
                told = {
                    "version": version, "env_steps": env_steps, "returns": np.asarray(result.returns),
                    "lengths": np.asarray(result.lengths), "cut": int(result.cut),
                    "seconds": time.perf_counter() - began,
                }  # fmt: skip
                self._channel.send_note(LEARNER, Tag.REPORT, note(Report.REPLY, encode(told)))
            backoff.reset()
            deadline.renew()
