"""Which world this process belongs to, and how it leaves it: one channel, and no rank left behind.

A rank must not run into MPI's finalisation while others still work: several MPIs burn a core there, and a dead rank
would be waited for without end.  So the learner tells the workers when it leaves, whatever the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from .channel import Backoff, Channel, ClusterError

AGAIN_S = 1.0
"""How long after an interrupt another one is taken for the same, in seconds."""


def world_size(comm: Any) -> int:
    """How many ranks ``comm`` (``COMM_WORLD`` for None) has."""
    from .mpi import MPI

    return int((MPI.COMM_WORLD if comm is None else comm).Get_size())


def claim_world(comm: Any) -> None:
    """See ``mpi.claim``."""
    from .mpi import claim

    claim(comm)


def release_world(comm: Any) -> None:
    """See ``mpi.release``."""
    from .mpi import release

    release(comm)


def default_backoff(channel: Channel) -> Backoff:
    """How to wait on ``channel``: where ranks share cores, the one that has work needs them sooner."""
    return Backoff(spin_s=20e-6 if channel.oversubscribed else 100e-6)


def open_mpi_channel(comm: Any, survive: bool = False) -> Channel:
    """A channel over ``comm`` (``COMM_WORLD`` for None); starts MPI if nobody has.  Collective.

    Args:
        survive: outlive the death of a rank; needs an MPI that can.
    """
    return _channel(survive)(comm)


def open_groups(comm: Any, group_size: int, survive: bool = False) -> tuple[Channel | None, tuple[Any, Channel] | None]:
    """The same where each worker is a group of ranks.

    Returns this rank's channel to the learner (None on a group's followers), and its group's communicator with a
    channel over it (None on the learner).
    """
    from .mpi import MPI, MpiChannel, split

    world = MPI.COMM_WORLD if comm is None else comm
    outer, inner = split(world, group_size)
    channel = None if outer is None else _channel(survive)(outer, world)
    return channel, None if inner is None else (inner, MpiChannel(inner, world))


def set_aside(comm: Any) -> tuple[Any, Channel | None]:
    """Take the last rank of ``comm`` out of the training.  Collective.

    Returns ``(the communicator of all others, None on the last rank; a channel between rank 0 and the last, None
    elsewhere)``.
    """
    from .mpi import MpiChannel
    from .mpi import set_aside as split_off

    others, pair = split_off(comm)
    return others, None if pair is None else MpiChannel(pair, comm)


def _channel(survive: bool) -> Callable[..., Channel]:
    if survive:
        from .ulfm import UlfmChannel

        return UlfmChannel
    from .mpi import MpiChannel

    return MpiChannel


def ignore_interrupts() -> Callable[[], None]:
    """Ctrl-C reaches every rank, but the learner answers for all; a handler that the script has set is left alone.

    Returns what undoes this.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        return lambda: None
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return heed_interrupts


def heed_interrupts_once() -> Callable[[], None]:
    """For the learner: one press of Ctrl-C may arrive twice, from the terminal and from the launcher that passes it on.

    The second of two within ``AGAIN_S`` would break into the end that the first began.  A handler that the script has
    set is left alone.  Returns what undoes this.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        return lambda: None
    last = float("-inf")

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > AGAIN_S:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)

    def heed_all() -> None:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return heed_all


class Ending:
    """Sees to it that this rank's end is the job's end.

    An exception that nobody catches is printed once, by this rank, and then ``leave(False)`` is called; a normal end
    calls ``leave(True)``.  ``leave`` returns whether everybody left; if not, the job is aborted.
    """

    def __init__(self, channel: Channel, role: str, leave: Callable[[bool], bool]) -> None:
        self._channel, self._role, self._leave = channel, role, leave
        self._over = False
        self._heed_all = heed_interrupts_once() if role == "learner" else lambda: None
        self._previous = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._exits)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(ValueError):  # of another thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass on what the terminal has sent already
        if isinstance(error, ClusterError):
            print(f"{getattr(error, 'place', '')}clusterenv-hpc: {error}", file=sys.stderr, flush=True)
        elif issubclass(kind, KeyboardInterrupt):
            print(
                f"clusterenv-hpc: interrupted (rank {self._channel.rank}, {self._channel.host})",
                file=sys.stderr,
                flush=True,
            )
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            print(
                f"{text}clusterenv-hpc: rank {self._channel.rank} ({self._role}, {self._channel.host}) failed: "
                f"{kind.__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
        self.end(clean=False)

    def _exits(self) -> None:
        self.end(clean=True)

    def end(self, clean: bool) -> None:
        """Leave the world now (once)."""
        if self._over:
            return
        self._over = True
        if not self._leave(clean):
            self._channel.abort(1)

    def withdraw(self) -> None:
        """This rank has left in another way."""
        self._over = True
        self._heed_all()
        atexit.unregister(self._exits)
        if sys.excepthook == self._failed:
            sys.excepthook = self._previous
