"""Runs an MPI launcher and its ranks to their end, and leaves none behind.

The ranks live in a session of their own, so that a Ctrl-C at the terminal reaches this process alone, which hands it
to the learner: it finishes its update, saves, and ends everybody.  What is not gone after a grace period is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from clusterenv_hpc.run import guard
from clusterenv_hpc.run.banners import Banners

MARK = "CLUSTERENV_HPC_LAUNCH_ID"
"""Environment variable that every process of one launch carries."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which the ranks must end within the grace period."""

FORWARDED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
TICK_S, HOLD_S, SWEEP_S, LAST_WORDS_S = 0.1, 0.25, 5.0, 2.0
CLEANUP_S = 5.0  # what a launcher takes to end the others when one is gone
PIPE_BYTES = 4096  # what a pipe or terminal takes without blocking once it is writable
BACKLOG_BYTES = 1 << 16


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended: of itself with ``code``, or of ``signal``, when it was process ``pid``; ``at``: seconds."""

    rank: int
    pid: int
    code: int | None
    signal: int | None
    at: float = 0.0

    @property
    def exit_code(self) -> int:
        """As a shell would give it: 128 + s for signal s."""
        return 128 + (self.signal or 0) if self.code is None else self.code


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    code: the exit code to pass on.  ranks: in the order in which they ended, without those that were killed for it.
    stopped_by: the signal that asked this process to stop, if any.  killed: patience ran out, and the rest was killed.
    spoken: the last bytes that the ranks wrote to the error stream.  launcher_words: the launcher's own.
    """

    code: int
    ranks: tuple[RankEnd, ...] = ()
    stopped_by: int | None = None
    killed: bool = False
    spoken: bytes = b""
    launcher_words: bytes = b""

    @property
    def failed(self) -> RankEnd | None:
        """The rank that ended badly before all others, if any did."""
        return self._deserter() or next((end for end in self.ranks if end.exit_code != 0), None)

    def _deserter(self) -> RankEnd | None:
        """A worker that left with exit code 0 while the learner was at work, for which the launcher ended the rest."""
        left = next((end for end in self.ranks if end.rank and end.exit_code == 0), None)
        if left is None or self.code == 0 or self.stopped_by is not None:
            return None
        learner = next((end for end in self.ranks if end.rank == 0), None)
        if learner is None:  # killed together with its guard, which is what launchers do
            return left
        killed = learner.exit_code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
        return left if killed and learner.at - left.at < CLEANUP_S else None


@dataclass
class _Stream:
    """From one pipe of the launcher to one of ours."""

    source: int
    target: int
    filter: Banners = field(default_factory=Banners)
    backlog: bytes = b""
    held_since: float | None = None
    broken: bool = False

    def take(self, data: bytes, now: float, end: bool = False) -> None:
        self.backlog += self.filter.feed(data, end=end)
        self.held_since = (self.held_since or now) if self.filter.undecided else None

    def give(self) -> None:
        """One write that does not block; called when the target is writable."""
        if self.broken:
            self.backlog = b""
            return
        try:
            self.backlog = self.backlog[os.write(self.target, self.backlog[:PIPE_BYTES]) :]
        except OSError:  # nobody reads any more
            self.broken, self.backlog = True, b""


def marked_processes(mark: str) -> list[int]:
    """The pids of all live processes of a launch, wherever they hang in the tree."""
    needle, found = f"{MARK}={mark}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, or another user's
            if needle not in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                continue
            if Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX":
                found.append(int(name))
    return found


def kill_marked(mark: str, within_s: float = SWEEP_S) -> list[int]:
    """Kill every process of a launch; the pids that are still there after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while left := marked_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


@contextlib.contextmanager
def _catching(into: list[int]) -> Iterator[None]:
    """Collect signals instead of dying of them; those that were ignored (nohup) stay ignored."""

    def note(number: int, _frame: FrameType | None) -> None:
        into.append(number)

    before = {number: signal.getsignal(number) for number in FORWARDED}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)


def supervise(
    command: Callable[[Sequence[str]], Sequence[str]],
    environ: Mapping[str, str],
    *,
    grace_s: float,
    timeout_s: float | None = None,
) -> Ended:
    """Run an MPI launcher until all of its ranks are gone.

    Args:
        command: gives the launcher's command line; its argument is to be put before the ranks' program.
        environ: the launcher's environment; a mark is added.
        grace_s: seconds between a request to stop, or a rank's failure, or the learner's end, and the end of patience
            with the others.
        timeout_s: seconds after which the ranks are asked to stop, as by SIGTERM.

    Output is passed on as it comes.  SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to rank 0; a second SIGINT
    kills.  Nobody reading our output any more counts as SIGTERM.  Call from the main thread.

    Raises:
        OSError: the launcher cannot be started.
    """
    mark, signals = uuid.uuid4().hex, list[int]()
    with (
        tempfile.TemporaryDirectory(prefix="clusterenv-hpc-", ignore_cleanup_errors=True) as folder,
        _catching(signals),
    ):
        this = os.getpid()
        process = subprocess.Popen(
            command([sys.executable, "-I", "-S", guard.__file__, folder]), env={**environ, MARK: mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=lambda: guard.follow(this),
        )  # fmt: skip
        try:
            return _Watch(process, mark, Path(folder), grace_s, timeout_s, signals).run()
        finally:
            kill_marked(mark)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


class _Watch:
    """The state of one launch while it is watched."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        mark: str,
        folder: Path,
        grace_s: float,
        timeout_s: float | None,
        signals: list[int],
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.process, self.mark, self.folder, self.grace_s, self.signals = process, mark, folder, grace_s, signals
        self.time_is_up = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.out, self.err = _Stream(process.stdout.fileno(), 1), _Stream(process.stderr.fileno(), 2)
        self.reading = [self.out, self.err]
        self.to_forward: list[int] = []
        self.stopped_by: int | None = None
        self.patience_ends: float | None = None
        self.killed = False
        self.ends: tuple[RankEnd, ...] = ()

    def run(self) -> Ended:
        launcher_gone: float | None = None
        while True:
            now = time.monotonic()
            self._heed_signals(now)
            self._forward_signals()
            self._heed_failures(now)
            self._move_bytes(now)
            if self.process.poll() is not None:
                launcher_gone = launcher_gone or now
                # Whoever still holds the pipes has outlived its launcher: hear what it said, then let it be killed.
                if now - launcher_gone > 1.0 or not self.reading:
                    break
            elif not self.reading:
                time.sleep(TICK_S)
        if not self.killed:  # what the killing does to the rest is not how they ended
            self.ends = self._rank_ends()
        kill_marked(self.mark)
        self._last_words()
        words = self.out.filter.text + self.err.filter.text
        return Ended(self._code(), self.ends, self.stopped_by, self.killed, self.err.filter.last, words)

    def _heed_signals(self, now: float) -> None:
        arrived, self.signals[:] = list(self.signals), []
        unread = any(stream.broken for stream in (self.out, self.err))
        if self.stopped_by is None and (unread or now > self.time_is_up):
            arrived.append(signal.SIGTERM)
        for number in arrived:
            self.to_forward.append(number)
            if number in STOPPING:
                again = self.stopped_by is not None and number == signal.SIGINT
                self.stopped_by = self.stopped_by or number
                self.patience_ends = now if again else self.patience_ends or now + self.grace_s
        if self.patience_ends is not None and now >= self.patience_ends and not self.killed:
            self.killed, self.ends = True, self._rank_ends()
            kill_marked(self.mark)

    def _forward_signals(self) -> None:
        learner = self.folder / "0.pid"
        if self.to_forward and learner.exists():
            for number in self.to_forward:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(learner.read_text()), number)
            self.to_forward = []

    def _heed_failures(self, now: float) -> None:
        """A rank that is gone may be waited for by others; not every launcher ends them."""
        if self.patience_ends is None and any(end.exit_code != 0 or end.rank == 0 for end in self._rank_ends()):
            self.patience_ends = now + self.grace_s

    def _rank_ends(self) -> tuple[RankEnd, ...]:
        ends = []
        for path in self.folder.glob("*.end"):
            status, when = path.read_text().split()
            code = os.waitstatus_to_exitcode(int(status))
            pid = int(path.with_suffix(".pid").read_text())
            own, killed_by = (code, None) if code >= 0 else (None, -code)
            ends.append(RankEnd(int(path.stem), pid, own, killed_by, float(when)))
        return tuple(sorted(ends, key=lambda end: end.at))

    def _move_bytes(self, now: float) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in self.reading:
                if len(stream.backlog) < BACKLOG_BYTES:
                    selector.register(stream.source, selectors.EVENT_READ, stream)
            for stream in (self.out, self.err):
                if stream.backlog:
                    try:
                        selector.register(stream.target, selectors.EVENT_WRITE, stream)
                    except PermissionError:  # a regular file: always writable, and not to be waited for
                        while stream.backlog:
                            stream.give()
            ready = selector.select(TICK_S) if selector.get_map() else []
        for key, event in ready:
            stream = key.data
            if event & selectors.EVENT_WRITE:
                stream.give()
            elif data := os.read(stream.source, BACKLOG_BYTES):
                stream.take(data, now)
            else:
                stream.take(b"", now, end=True)
                self.reading.remove(stream)
        for stream in (self.out, self.err):
            if stream.held_since is not None and now - stream.held_since > HOLD_S:
                stream.take(b"", now, end=True)

    def _last_words(self) -> None:
        """Print what is left, as long as somebody takes it."""
        deadline, self.reading = time.monotonic() + LAST_WORDS_S, []
        for stream in (self.out, self.err):
            stream.take(b"", 0.0, end=True)
        while any(stream.backlog for stream in (self.out, self.err)) and time.monotonic() < deadline:
            self._move_bytes(time.monotonic())

    def _code(self) -> int:
        """The learner's word where it had one; else that of the rank that failed, the signal, or the launcher."""
        learner = next((end for end in self.ends if end.rank == 0), None)
        failed = next((end for end in self.ends if end.exit_code != 0), None)
        if failed is not None:
            return learner.exit_code if learner and learner.exit_code and self.stopped_by else failed.exit_code
        if self.killed:
            return 128 + (self.stopped_by or signal.SIGTERM) if learner is None else learner.exit_code
        code = self.process.returncode
        return 128 - code if code < 0 else code
