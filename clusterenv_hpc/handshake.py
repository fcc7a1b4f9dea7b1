"""What the ranks tell each other before the first step, and what must be the same everywhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np

from .comm.channel import HandshakeError
from .comm.codec import EncodeError, decode, encode

PROTOCOL = 1
"""Raised whenever a message's meaning changes."""


@dataclass(frozen=True)
class Hello:
    """One worker's introduction.  ``rows`` are the environments it holds; none: it idles and has no spaces."""

    rank: int
    host: str
    pid: int
    rows: tuple[int, int]
    versions: dict[str, str]
    config_hash: str
    num_envs: int
    observation_space: bytes
    action_space: bytes
    autoreset_mode: str
    backend: str
    policy_layout: str
    num_weights: int
    seed: int | None
    num_probes: int
    num_params: int
    sync: dict[str, Any]
    metadata: dict[str, Any]
    render_mode: str | None
    world_rank: int | None = None
    """The rank in the whole job, where that is another."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank if self.world_rank is None else self.world_rank} ({self.host})"

    def pack(self) -> bytes:
        """As a note's body."""
        return encode(vars(self), "the handshake")

    @staticmethod
    def unpack(body: bytes) -> Hello:
        """From a note's body."""
        fields = decode(body)
        try:
            return Hello(**fields)
        except TypeError as error:
            raise HandshakeError(
                f"rank {fields.get('rank', '?')} on {fields.get('host', '?')} speaks another version of clusterenv_hpc "
                f"({fields.get('versions', {}).get('clusterenv_hpc', 'unknown')}): {error}"
            ) from None


def software_versions() -> dict[str, str]:
    """What must agree between ranks for rollouts and weights to mean the same."""
    from clusterenv_hpc import __version__

    return {
        "clusterenv_hpc": __version__,
        "protocol": str(PROTOCOL),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__.split(".")[0],
    }


def this_process() -> dict[str, Any]:
    """Host and process id."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def plain_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """The entries of an environment's metadata that can be sent."""
    plain = {}
    for key, value in metadata.items():
        if isinstance(value, Enum):
            continue
        try:
            encode(value)
        except EncodeError:
            continue
        plain[key] = value
    return plain


def deal(num_envs: int, num_workers: int) -> list[tuple[int, int]]:
    """Rows ``[first, last)`` of each worker: contiguous, in rank order, the first ones holding one more if uneven."""
    share, extra = divmod(num_envs, num_workers)
    bounds = [worker * share + min(worker, extra) for worker in range(num_workers + 1)]
    return list(pairwise(bounds))


def _differ(what: str, mine: Any, my_name: str, theirs: Any, their_name: str, advice: str) -> HandshakeError:
    return HandshakeError(
        f"the ranks do not fit together: {what} is {mine} on {my_name} but {theirs} on {their_name}; {advice}"
    )


def compare(hellos: Sequence[Hello], own: dict[str, Any]) -> Hello:
    """Check that all workers and the learner fit together, and give back the reference worker's introduction.

    Args:
        hellos: one for each worker.
        own: the learner's ``rank, host``, and whatever of ``Hello`` must be the same on every rank.

    Raises:
        HandshakeError: with the ranks, the hosts, and both values.
    """
    me = f"rank {own['rank']} ({own['host']}, learner)"
    one_script = "every rank must run the same script with the same arguments"
    for hello in hellos:
        you = hello.name
        for package, version in own["versions"].items():
            if hello.versions.get(package) != version:
                raise _differ(
                    f"the version of {package}", version, me, hello.versions.get(package), you,
                    "install the same environment on every node",
                )  # fmt: skip
        for key, what, advice in (
            ("config_hash", "the configuration's hash", one_script),
            ("num_envs", "num_envs", one_script),
            ("seed", "the seed", one_script),
            ("num_probes", "num_probes", one_script),
            ("sync", "the sync rule", one_script),
        ):
            if getattr(hello, key) != own[key]:
                raise _differ(what, _short(own[key]), me, _short(getattr(hello, key)), you, advice)
    reference = next(hello for hello in hellos if hello.rows[1] > hello.rows[0])
    for hello in hellos:
        if hello.rows[1] == hello.rows[0]:
            continue
        for key, what in (
            ("observation_space", "the observation space"),
            ("action_space", "the action space"),
            ("autoreset_mode", "the autoreset mode"),
            ("backend", "the backend"),
            ("num_params", "the number of distribution parameters"),
        ):
            mine, theirs = getattr(reference, key), getattr(hello, key)
            if mine != theirs:
                raise _differ(
                    what, _show(key, mine), reference.name,
                    _show(key, theirs), hello.name,
                    "the same environment must be built on every rank",
                )  # fmt: skip
    for hello in hellos:  # after the spaces, since a policy is built for them
        for key, what in (
            ("num_weights", "the policy's number of weights"),
            ("policy_layout", "the policy's layout"),
        ):
            if getattr(hello, key) != own[key]:
                raise _differ(
                    what, _short(own[key]), me, _short(getattr(hello, key)), hello.name,
                    "build the policy the same way on every rank",
                )  # fmt: skip
    return reference


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _show(key: str, value: Any) -> str:
    if key.endswith("_space"):
        from .envs.spaces import decode_space

        return str(decode_space(value))
    return str(value)
