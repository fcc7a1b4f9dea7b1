"""The channel over MPI; the only module that imports mpi4py.

Ports are persistent requests: in a round trip of a few bytes they cost less than half of a blocking
Send and Recv from Python, because nothing is parsed again.  The communicator is a duplicate, so no other
traffic of the script can match ours, and after the start nothing is collective: a dead rank blocks nobody.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import mpi4py

from .channel import (
    ANY_PEER,
    LAST_WORDS_S,
    Arriving,
    Backoff,
    Channel,
    ClusterError,
    Deadline,
    Handle,
    HandshakeError,
    Port,
)
from .messages import Buffer
from .start import starting

mpi4py.rc.threads = False  # one thread per rank speaks MPI; full thread support would cost a lock per call
with starting():
    from mpi4py import MPI


class MpiPort:
    """A persistent request and its buffer; ``start`` and ``done`` are the request's own methods."""

    __slots__ = ("_active_receive", "_buffer", "_request", "done", "start")

    def __init__(self, request: MPI.Prequest, buffer: Buffer, receives: bool) -> None:
        self._request, self._buffer, self._active_receive = request, buffer, receives
        self.start = request.Start
        self.done = request.Test

    def free(self) -> None:
        if self._request == MPI.REQUEST_NULL:
            return
        if not self._request.Test():
            if not self._active_receive:
                return  # a send that nobody takes: freeing it could pull the buffer from under MPI
            self._request.Cancel()
            self._request.Wait()  # local: a cancelled receive completes without its peer
        self._request.Free()


class MpiArrival:
    """A receive that is posted only when its message has begun to come, so that the poller knows.

    What does not go through in one copy moves piece by piece while both sides poll: whoever waits for it must not
    sleep as long as one who waits for the next message.
    """

    __slots__ = ("_armed", "_channel", "_place", "_request")

    def __init__(self, channel: MpiChannel, buffer: Buffer, peer: int, tag: int) -> None:
        self._channel, self._place = channel, (buffer, peer, tag)
        self._armed = False
        self._request: MPI.Request | None = None

    def start(self) -> None:
        self._armed = True

    def done(self) -> bool:
        if not self._armed:
            return True
        if self._request is None:
            buffer, peer, tag = self._place
            self._request = self._channel.match(buffer, peer, tag)
            if self._request is None:
                return False
        if not self._request.Test():
            return False
        self._armed, self._request = False, None
        return True

    @property
    def under_way(self) -> bool:
        return self._request is not None

    def free(self) -> None:
        self._armed = False
        if self._request is not None and not self._request.Test():
            self._channel.abandon(self._request)  # it holds the buffer, into which MPI may still write
        self._request = None


class MpiHandle:
    """A one-off send; the outbox keeps the buffer alive until it is done."""

    __slots__ = ("_request", "buffer", "finished")

    def __init__(self, request: MPI.Request, buffer: Any) -> None:
        self._request, self.buffer, self.finished = request, buffer, False

    def done(self) -> bool:
        if not self.finished and self._request.Test():
            self.finished = True
        return self.finished


class MpiChannel(Channel):
    """See ``channel.Channel``.

    Args:
        comm: the communicator to duplicate (collective: every rank of it must do the same); rank 0 is the learner.
        world: the communicator of the whole job, where ``comm`` is a part of it.
    """

    def __init__(self, comm: Any = None, world: Any = None) -> None:
        parent = MPI.COMM_WORLD if comm is None else comm
        self._world = parent if world is None else world
        self._comm = parent.Dup()
        ranks = list(range(parent.Get_size()))
        self._world_ranks = MPI.Group.Translate_ranks(parent.Get_group(), ranks, self._world.Get_group())
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.host = socket.gethostname()
        name, version = MPI.get_vendor()
        self.transport = f"{name} {'.'.join(map(str, version))}"
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.oversubscribed = node.Get_size() > len(os.sched_getaffinity(0))
        node.Free()
        self._outbox: list[MpiHandle] = []
        self._abandoned: list[MPI.Request] = []

    def world_rank(self, rank: int) -> int:
        return int(self._world_ranks[rank])

    def incoming(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return MpiPort(self._comm.Recv_init([buffer, MPI.BYTE], peer, tag), buffer, receives=True)

    def arrival(self, buffer: Buffer, peer: int, tag: int) -> Arriving:
        return MpiArrival(self, buffer, peer, tag)

    def match(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request | None:
        """Begin to receive the message of ``peer`` that has been announced, if there is one."""
        message = self._comm.Improbe(peer, tag)
        return None if message is None else message.Irecv([buffer, MPI.BYTE])

    def abandon(self, request: MPI.Request) -> None:
        """Keep a receive that can neither be cancelled nor waited for, with its buffer."""
        self._abandoned.append(request)

    def outgoing(self, buffer: Buffer, peer: int, tag: int) -> Port:
        return MpiPort(self._comm.Send_init([buffer, MPI.BYTE], peer, tag), buffer, receives=False)

    def post(self, buffer: Buffer, peer: int, tag: int, *, synchronous: bool = False) -> Handle:
        self._reap()
        send = self._comm.Issend if synchronous else self._comm.Isend
        handle = MpiHandle(send([buffer, MPI.BYTE], peer, tag), buffer)
        self._outbox.append(handle)
        return handle

    def send_note(self, peer: int, tag: int, data: bytes) -> None:
        self._reap()
        self._outbox.append(MpiHandle(self._comm.Isend([data, MPI.BYTE], peer, tag), data))

    def take_note(self, tag: int, peer: int = ANY_PEER) -> tuple[int, bytes] | None:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE if peer == ANY_PEER else peer, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        request = message.Irecv([data, MPI.BYTE])
        backoff, deadline = Backoff(), Deadline(60.0)
        while not request.Test():
            if deadline.passed:
                raise ClusterError(
                    f"rank {self.rank} on {self.host}: a note of {len(data)} bytes from rank {status.Get_source()} "
                    "began and never ended; that rank is probably dead"
                )
            backoff.wait()
        return status.Get_source(), bytes(data)

    def _reap(self) -> None:
        if self._outbox:
            self._outbox = [handle for handle in self._outbox if not self._finished(handle)]

    def _finished(self, handle: MpiHandle) -> bool:
        return handle.done()

    def progress(self) -> bool:
        self._reap()
        return False

    def flush(self, deadline: Deadline) -> bool:
        backoff = Backoff()
        while True:
            self._reap()
            if not self._outbox:
                return True
            if deadline.passed:
                return False
            backoff.wait()

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LAST_WORDS_S)
        self._world.Abort(code)
        os._exit(code)  # some return from Abort, and end only when the launcher has heard of it

    def close(self) -> None:
        # The duplicate is not freed: that is collective in some MPIs, and a dead rank would never come.
        self._reap()


_CLAIMED = MPI.Comm.Create_keyval()


def claim(comm: Any) -> None:
    """Note on ``comm`` that its ranks serve.

    Raises:
        ClusterError: they do already, so that nobody would come to another start.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    if comm.Get_attr(_CLAIMED):
        raise ClusterError(
            "a second ClusterEnv, but the ranks of this communicator still serve the first: give the first one "
            "exit_workers=False and close it before; or keep the second one in this process, with comm=MPI.COMM_SELF"
        )
    comm.Set_attr(_CLAIMED, True)


def release(comm: Any) -> None:
    """The ranks of ``comm`` go on with the script, and may serve again."""
    comm = MPI.COMM_WORLD if comm is None else comm
    if comm.Get_attr(_CLAIMED):
        comm.Delete_attr(_CLAIMED)


def set_aside(comm: Any) -> tuple[Any, Any]:
    """Take the last rank out.  Collective over ``comm``.

    Returns ``(the communicator of all others, one of rank 0 and the last)``; None for what this rank is not part of.
    """
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    others = comm.Split(MPI.UNDEFINED if rank == last else 0, rank)
    pair = comm.Split(0 if rank in (0, last) else MPI.UNDEFINED, rank)
    return (None if rank == last else others), (pair if rank in (0, last) else None)


def split(comm: Any, group_size: int) -> tuple[Any, Any]:
    """Deal the ranks behind rank 0 out into groups of ``group_size``.  Collective over ``comm``.

    Returns ``(learner and the first rank of each group, this rank's group)``; None for what this rank is not part of.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if size < 2 or (size - 1) % group_size:
        raise HandshakeError(
            f"environments that span {group_size} ranks need 1 + W * {group_size} ranks (one learner, W workers), "
            f"but the job has {size}; start another number of ranks"
        )
    leads = rank == 0 or (rank - 1) % group_size == 0
    outer = comm.Split(0 if leads else MPI.UNDEFINED, rank)
    inner = comm.Split(MPI.UNDEFINED if rank == 0 else (rank - 1) // group_size, rank)
    return (outer if leads else None), (inner if rank else None)
