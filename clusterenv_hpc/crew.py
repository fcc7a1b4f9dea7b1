"""The learner's conversation with its workers: hearing, asking, waiting under a deadline, and sending them home."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .comm.channel import Backoff, Channel, ClusterError, Deadline, SilenceError, WorkerError, wait_for
from .comm.codec import decode, encode
from .comm.messages import Command, Report, Tag, note
from .handshake import Hello, compare
from .peer import Peer
from .stats import Stats
from .worker import GRACE_S

CLOSE_S = 30.0
LOOK_EVERY_S = 0.1
"""How often a wait that others' messages end asks whether somebody has fallen silent."""

AWAY_S = 1.0
"""How long the learner may look elsewhere before that counts as its own silence, and not as the workers'."""


class Crew:
    """All workers, as the learner speaks to them.

    Args:
        channel: the learner's end.
        stats: where traffic is counted.
        timeout_s: seconds without a sign of life from the workers waited for that are taken for their death.
        backoff: how to wait.

    After any failure the crew is ``broken``: nothing is sent to any worker any more, except that it may leave.
    """

    def __init__(self, channel: Channel, stats: Stats, timeout_s: float, backoff: Backoff) -> None:
        self.channel, self.stats, self._timeout_s, self._backoff = channel, stats, timeout_s, backoff
        self.broken = False
        self.peers: list[Peer] = []
        self.active: list[Peer] = []
        """The workers that hold environments."""
        self._by_rank: dict[int, Peer] = {}
        self._left: set[int] = set()
        self.lost: list[Peer] = []
        """Workers that died while the run went on."""
        self._buried: frozenset[int] = frozenset()
        self._deadline = Deadline(timeout_s)
        self._looked = 0.0

    def meet(self, own: dict[str, Any]) -> Hello:
        """The handshake: hear every worker, check that all fit together (see ``handshake.compare``)."""
        channel, count = self.channel, self.channel.size - 1
        hellos: dict[int, Hello] = {}

        def heard() -> bool:
            while (arrived := channel.take_note(Tag.REPORT)) is not None:
                rank, data = arrived
                if data[0] == Report.HELLO:
                    hellos[rank] = Hello.unpack(data[1:])
                else:
                    self._hear(rank, data)
            return len(hellos) == count

        def complaint() -> str:
            silent = [str(channel.world_rank(rank)) for rank in range(1, count + 1) if rank not in hellos]
            return (
                f"rank 0 (learner, {channel.host}) heard nothing from rank {', '.join(silent)} within "
                f"{self._timeout_s:g} s at the start: do all ranks run the same script up to ClusterEnv, and can their "
                "environments be built in this time (else raise timeout)?"
            )

        try:
            self.wait(heard, complaint)
            reference = compare([hellos[rank] for rank in sorted(hellos)], own)
        except ClusterError:
            self.broken = True
            raise
        self.peers = [Peer(channel, hellos[rank]) for rank in sorted(hellos)]
        self.active = [peer for peer in self.peers if peer.num_envs]
        self._by_rank = {peer.rank: peer for peer in self.peers}
        return reference

    # -- waiting and hearing -----------------------------------------------------------------------------------------

    def wait(
        self,
        condition: Callable[[], bool],
        complaint: Callable[[], str],
        seconds: float | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """Poll until ``condition()``; any word from a worker renews the deadline.

        Raises:
            SilenceError: with ``complaint()``.  WorkerError: a worker reported its failure.
        """
        self._deadline = Deadline(self._timeout_s if seconds is None else seconds)
        try:
            wait_for(
                lambda: self._bury() or condition(), self.channel, backoff or self._backoff, self._deadline, complaint
            )
        except BaseException:  # an interruption too: an answer that is still to come must not be taken for the next one
            self.broken = True
            raise

    def _bury(self) -> bool:
        """Part with the workers that died since the last look; the others go on.  Always False."""
        if self.channel.lost <= self._buried:
            return False
        for peer in [peer for peer in self.peers if peer.rank in self.channel.lost - self._buried]:
            self.peers.remove(peer)
            if peer in self.active:
                self.active.remove(peer)
            self.lost.append(peer)
            print(
                f"clusterenv-hpc: {peer.name} is dead; the run goes on with {len(self.active)} workers, and without "
                f"environments {peer.rows.start} to {peer.rows.stop - 1}",
                file=sys.stderr,
                flush=True,
            )
        self._buried = self.channel.lost
        self._deadline.renew()
        if not self.active:
            raise ClusterError(
                f"every worker is dead; the last was {self.lost[-1].name}" if self.lost else "a rank died"
            )
        return False

    def demand_all(self, what: str) -> None:
        """For what needs every environment.

        Raises:
            WorkerError: a worker has died.
        """
        self._bury()
        if self.lost:
            peer = self.lost[0]
            self.broken = True
            raise WorkerError(f"{peer.name} is dead, and {what} needs every environment", peer.world_rank, peer.host)

    def listen(self) -> None:
        """Take every report that has come."""
        while (arrived := self.channel.take_note(Tag.REPORT)) is not None:
            self._hear(*arrived)

    def demand_life(self, what: str) -> None:
        """For a wait that others' messages end again and again.

        Raises:
            SilenceError: a worker was not heard of for the time that is taken for its death.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        if now - self._looked > AWAY_S:  # nobody could be heard
            for peer in self.active:
                peer.heard = now
        self._looked = now
        silent = [peer for peer in self.active if now - peer.heard > self._timeout_s and not peer.arrived()]
        if silent:
            raise SilenceError(self.silence(silent, what))

    def _failure(self, rank: int, report: dict[str, Any]) -> WorkerError:
        row, cause = report["row"], report["cause"]
        where = "" if row is None or f"environment {row}" in cause else f" in environment {row}"
        rank = self.channel.world_rank(rank)
        message = f"rank {rank} (worker, {report['host']}) failed{where}: {cause}"
        return WorkerError(message, rank, report["host"], report["traceback"], report["place"])

    def _hear(self, rank: int, data: bytes) -> None:
        kind, body = data[0], data[1:]
        self._deadline.renew()
        if kind == Report.ERROR:
            self.broken = True
            raise self._failure(rank, decode(body))
        if kind == Report.LEFT:
            self._left.add(rank)
            return
        peer = self._by_rank.get(rank)
        if peer is None:
            return
        peer.heard = time.monotonic()
        if kind in (Report.REPLY, Report.REFUSAL):
            peer.replies.append((kind == Report.REPLY, body))
        elif kind == Report.INFOS:
            self.stats.received["infos"].add(len(data))
            peer.infos.append(body)
        elif kind == Report.REQUEST:
            self.stats.received["request"].add(len(data))
            self.stats.requests[peer.world_rank] += 1
            peer.wants_weights = True
        elif kind == Report.RESTART:
            row, count, cause = decode(body)
            self.stats.restarts[peer.world_rank][row] = count
            text = f"{peer.name}: environment {row} was built anew (restart {count}): {cause}"
            print(f"clusterenv-hpc: {text}", file=sys.stderr, flush=True)
        elif kind == Report.STOPPED:
            peer.stopped = True

    def silence(self, peers: Sequence[Peer], what: str) -> str:
        """The complaint about workers that were not heard of while ``what``."""
        names = ", ".join(peer.name for peer in peers[:4]) + (", ..." if len(peers) > 4 else "")
        return (
            f"{names} gave no sign of life for {self._deadline.seconds:g} s while {what}: dead or stuck; "
            "raise timeout if it only needs longer"
        )

    # -- asking ------------------------------------------------------------------------------------------------------

    def command(self, peer: Peer, command: Command, body: bytes = b"") -> None:
        """Send one command."""
        data = note(command, body)
        self.stats.sent["control"].add(len(data))
        self.channel.send_note(peer.rank, Tag.COMMAND, data)

    def ask(
        self, peers: Sequence[Peer], command: Command, bodies: Sequence[bytes], what: str, seconds: float | None = None
    ) -> list[bytes]:
        """Send ``bodies[i]`` to ``peers[i]``; their replies.

        Raises:
            WorkerError: an environment could not do it; all go on as before.
        """
        for peer, body in zip(peers, bodies, strict=True):
            self.command(peer, command, body)

        def replied() -> bool:
            self.listen()
            return all(peer.replies or peer in self.lost for peer in peers)

        self.wait(replied, lambda: self.silence([peer for peer in peers if not peer.replies], what), seconds)
        replies = [(peer, *peer.replies.pop(0)) for peer in peers if peer not in self.lost]
        for peer, granted, body in replies:
            if not granted:
                raise self._failure(peer.rank, decode(body))
        return [body for _, _, body in replies]

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self, kwargs: dict[str, Any], leave: bool) -> None:
        """Have every worker close its environments with ``kwargs``; where they ``leave`` then, see them off."""
        self.ask(self.peers, Command.CLOSE, [encode(kwargs)] * len(self.peers), "closing the environments", CLOSE_S)
        for peer in self.peers:
            peer.free()
        if leave:
            self.wait(self._all_left, lambda: self.silence(self.peers, "leaving"), CLOSE_S)
        if self.channel.transport == "local":
            self.channel.close()

    def _all_left(self) -> bool:
        self.listen()
        return {peer.rank for peer in self.peers} <= self._left

    def abandon(self) -> None:
        """Nothing is asked of the workers any more: those of this process end now, others when they are dismissed."""
        self.broken = True
        if self.channel.transport == "local":
            self.channel.close()

    def dismiss(self) -> bool:
        """Tell every worker to leave its process; False if one did not confirm in time."""
        ranks = set(range(1, self.channel.size)) - self.channel.lost
        for rank in ranks - self._left:
            self.channel.send_note(rank, Tag.COMMAND, note(Command.LEAVE))
        deadline, backoff = Deadline(GRACE_S), Backoff()
        streaming = [peer for peer in self.active if peer.expects_rollouts]
        while not ranks - self.channel.lost <= self._left and not deadline.passed:
            arrived = self.channel.take_note(Tag.REPORT)
            for peer in streaming:  # what is under way has to be taken, or its sender cannot leave in peace
                if peer.arrived():
                    peer.take()
                    peer.replenish()
            if arrived is None:
                self.channel.progress()
                backoff.wait()
            elif arrived[1][0] == Report.LEFT:
                self._left.add(arrived[0])
        return ranks - self.channel.lost <= self._left
