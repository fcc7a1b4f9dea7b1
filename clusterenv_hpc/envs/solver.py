"""External solvers: an executable that an environment starts and talks to over pipes, with a deadline for every answer.

    class Plate(gym.Env):
        def __init__(self):
            self.solver = Solver(["./heat", "64"], reply_s=30)
        def step(self, action):
            temperatures = np.array(self.solver.ask(f"step {action[0]:.17g}").split(), float)
            ...
        def close(self):
            self.solver.close()

A solver that dies, or does not answer in time, raises ``SolverError`` out of ``step`` or ``reset``: it is that
environment's failure, with the solver's last words in the message, and ``on_error="restart"`` starts both anew.

The solver does not see that it was started from an MPI rank: variables of the MPI world and of Slurm's task are taken
out of its environment (an MPI solver would else try to join this job's world), no descriptor of ours stays open in it,
and signals that workers ignore are not ignored there.  The start is a vfork and an exec, without Python code in
between: safe in a process that has MPI loaded.  If this process dies, the solver is terminated (Linux, where
util-linux's ``setpriv`` is installed), and its standard input ends.

As a Slurm step of its own (``Solver(command, srun=["--ntasks=4"])``) it runs on this node within the job's allocation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from ..jobs.environment import scrubbed_environment

CLOSE_S = 2.0
LONGEST_LINE = 2**26
LARGEST_OUTPUT = 2**30
"""Bytes; a solver that writes more than can be meant must not take this process's memory with it."""


class SolverError(RuntimeError):
    """An external solver could not be started, died, or did not answer in time."""


class Solver:
    """A running solver.

    Args:
        command: the program and its arguments.
        cwd: where it runs; default: here.
        env: variables to set on top of the scrubbed environment, such as ``OMP_NUM_THREADS``.
        srun: run it as a Slurm step of its own, with these options for srun; None: as a plain process.
        reply_s: seconds within which it must answer, or take what is sent to it, unless a call says otherwise.
        time_limit_s: seconds after which it is stopped in any case; None: no limit.
        tail: how many characters of its error output are kept for messages.

    Raises:
        SolverError: there is no such program, or no Slurm job for ``srun``.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        srun: Sequence[str] | None = None,
        reply_s: float = 60.0,
        time_limit_s: float | None = None,
        tail: int = 4000,
    ) -> None:
        self.command = [os.fspath(word) for word in command]
        if not self.command:
            raise ValueError("a solver needs a command: a program and its arguments")
        self._reply_s, self._limit_s, self._tail = reply_s, time_limit_s, tail
        self._out, self._said = bytearray(), bytearray()
        self._process: subprocess.Popen[bytes] | None = None  # until it is closed
        environ = {**scrubbed_environment(), **(env or {})}
        words = self._resolved(environ, cwd)
        if srun is not None:
            words = [*srun_step(srun), *words]
        try:
            with _default_signals():
                self._process = subprocess.Popen(
                    [*_leash(), *words], cwd=cwd, env=environ, bufsize=0, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
        except OSError as error:
            raise SolverError(f"the solver {self.name} cannot be started: {error}") from error
        self._began = time.monotonic()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _resolved(self, environ: Mapping[str, str], cwd: str | os.PathLike[str] | None) -> list[str]:
        program = self.command[0]
        if os.sep in program:
            found: str | None = os.path.abspath(os.path.join(cwd or ".", program))  # a link stays what it is
        else:
            found = shutil.which(program, path=environ.get("PATH"))
        if found is None or not os.access(found, os.X_OK) or os.path.isdir(found):
            raise SolverError(f"the solver {self.name} cannot be started: {program} is no program that can be run")
        return [found, *self.command[1:]]

    @property
    def name(self) -> str:
        """The command, for messages."""
        text = shlex.join(self.command)
        return text if len(text) <= 120 else text[:117] + "..."

    @property
    def pid(self) -> int:
        """Of the process (of srun, where that runs it)."""
        return self._open().pid

    @property
    def returncode(self) -> int | None:
        """How it ended: an exit code, or minus a signal's number; None while it runs."""
        return self._open().poll()

    # -- talking -----------------------------------------------------------------------------------------------------

    def ask(self, line: str, timeout_s: float | None = None) -> str:
        """Send a line of text, and give back the line that answers it.

        Raises:
            SolverError: it died, or did not answer in time (and was killed).
        """
        self.send(line.rstrip("\n").encode() + b"\n", timeout_s)
        return self.read_line(timeout_s)

    def read_line(self, timeout_s: float | None = None) -> str:
        """The next line, without its end.  Raises SolverError."""

        def end_of_line() -> int:
            found = self._out.find(b"\n") + 1
            if not found and len(self._out) > LONGEST_LINE:
                self._fail(f"sent more than {LONGEST_LINE} bytes without an end of line")
            return found

        return self._read(end_of_line, timeout_s).decode(errors="replace").rstrip("\r\n")

    def read(self, count: int, timeout_s: float | None = None) -> bytes:
        """The next ``count`` bytes, as for ``np.frombuffer(solver.read(8 * n))``.  Raises SolverError."""
        return self._read(lambda: count if len(self._out) >= count else 0, timeout_s)

    def send(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send ``data``.  Raises SolverError."""
        stdin, end = self._open().stdin, self._deadline(timeout_s)
        assert stdin is not None
        rest = memoryview(data)
        while rest:
            self._demand_bounds()
            if not self._wait(end, write=True):
                continue
            try:
                rest = rest[os.write(stdin.fileno(), rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._fail("ended, or closed its input, before it had taken what was sent to it")

    def _read(self, enough: Callable[[], int], timeout_s: float | None) -> bytes:
        """As many bytes as ``enough`` says, once it says so."""
        end = self._deadline(timeout_s)
        process = self._open()
        while not (count := enough()):
            if process.stdout is None or process.stdout.closed:
                self._fail("ended before it had answered")
            self._wait(end)
        data = bytes(self._out[:count])
        del self._out[:count]
        return data

    def _open(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise SolverError(f"the solver {self.name} is closed")
        return self._process

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._reply_s if timeout_s is None else timeout_s)

    def _wait(self, end: float, *, write: bool = False, at_most_s: float = 60.0) -> bool:
        """Wait until something can be done, and take what has come.  True: it takes input (if with ``write``)."""
        process = self._process
        assert process is not None and process.stdin and process.stdout and process.stderr
        now = time.monotonic()
        over = math.inf if self._limit_s is None else self._began + self._limit_s
        if now > over:
            self._fail(f"was stopped at its time limit of {self._limit_s:g} s")
        if now > end:
            self._fail("did not answer in time, and was stopped")
        poll = select.poll()
        watched = {pipe.fileno(): pipe for pipe in (process.stdout, process.stderr) if not pipe.closed}
        for number in watched:
            poll.register(number, select.POLLIN)
        if write:
            poll.register(process.stdin.fileno(), select.POLLOUT)
        writable = False
        for number, _ in poll.poll(1000 * min(end - now, over - now, at_most_s) + 1):
            if number not in watched:
                writable = True
                continue
            data = os.read(number, 2**16)
            if watched[number] is process.stdout:
                self._out += data
            else:
                self._hear(data)
            if not data:
                watched[number].close()
        return writable

    def _demand_bounds(self) -> None:
        if len(self._out) > LARGEST_OUTPUT:
            self._fail(f"wrote more than {LARGEST_OUTPUT} bytes that nobody had asked for, and was stopped")

    def _hear(self, data: bytes) -> None:
        self._said += data
        del self._said[: -self._tail]

    # -- ending ------------------------------------------------------------------------------------------------------

    def _fail(self, what: str) -> NoReturn:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that is just about to end says more by itself
            process.wait(0.2 if "before" in what else 0.0)
        code = process.poll()
        self._drain()
        self.close(grace_s=0.0)
        how = ""
        if code is not None and code < 0:
            how = f" (killed by {_signal_name(-code)})"
        elif code is not None:
            how = f" (exit code {code})"
        tail = self._said.decode(errors="replace").strip()
        words = f"; the end of its error output:\n{tail}" if tail else "; it wrote no error output"
        raise SolverError(f"the solver {self.name} {what}{how}{words}")

    def finish(self, timeout_s: float | None = None) -> bytes:
        """Close its input, and give back all that it still writes until it ends, 1 GiB at the most.

        Raises:
            SolverError: it ended with another exit code than 0, or not in time, or wrote more.
        """
        process, end = self._open(), self._deadline(timeout_s)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        while process.poll() is None:
            self._wait(end, at_most_s=0.001 if process.stdout.closed else 0.05)
            self._demand_bounds()
        self._drain()
        if process.returncode != 0:
            self._fail("failed")
        data = bytes(self._out)
        self.close()
        return data

    def _drain(self) -> None:
        """Take what an ended solver has left in its pipes."""
        process = self._process
        assert process is not None
        for pipe in (process.stdout, process.stderr):
            while pipe is not None and not pipe.closed:
                try:
                    data = os.read(pipe.fileno(), 2**16)
                except BlockingIOError:
                    break  # a child of its own holds it open
                if not data:
                    pipe.close()
                elif pipe is process.stdout:
                    self._out += data
                else:
                    self._hear(data)

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Close its input.  If it is not gone after ``grace_s`` it is asked to end, then killed, with its children."""
        process = self._process
        if process is None:
            return
        self._process = None
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        for number, patience in ((0, grace_s), (signal.SIGTERM, min(grace_s, 0.5)), (signal.SIGKILL, CLOSE_S)):
            if number:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):  # children that it left behind
            os.killpg(process.pid, signal.SIGKILL)

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close(grace_s=0.0)


def run_solver(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: bytes = b"",
    timeout_s: float = 60.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    srun: Sequence[str] | None = None,
) -> bytes:
    """Run a solver to its end, as for one step of a program that reads a file and writes another; its output.

    Raises:
        SolverError: it could not be started, ended with another exit code than 0, or not within ``timeout_s``, or
            wrote more than 1 GiB.
    """
    with Solver(command, cwd=cwd, env=env, srun=srun, reply_s=timeout_s, time_limit_s=timeout_s) as solver:
        if input:
            solver.send(input)
        return solver.finish()


def srun_step(options: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """The start of a command line that runs a program as a step of this job, on this node.

    One task, sharing the CPUs that the job's ranks have; ``options`` come last, and so can say otherwise.  Only the
    first task gets the standard input.

    Raises:
        SolverError: this process is not part of a Slurm job, or there is no srun.
    """
    environ = os.environ if environ is None else environ
    job, srun = environ.get("SLURM_JOB_ID"), shutil.which("srun", path=environ.get("PATH"))
    if not job or srun is None:
        missing = "this process is in no Slurm job" if not job else "there is no srun on PATH"
        raise SolverError(f"a solver as a Slurm step of its own: {missing}; leave srun out to start it as a process")
    node = environ.get("SLURMD_NODENAME")
    here = [f"--nodelist={node}"] if node else []
    return [
        srun, f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", *here, "--input=0", "--unbuffered",
        "--kill-on-bad-exit=1", *options,
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def _leash() -> tuple[str, ...]:
    """What ends the solver with this process, if this machine has it."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run([setpriv, "--help"], capture_output=True, text=True, timeout=10, check=False)
        if "--pdeathsig" in told.stdout:
            return (setpriv, "--pdeathsig", "TERM", "--")
    return ()


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
    """Signals ignored here would be ignored by what is started, and no request to stop would reach it.

    A handler that does nothing is as good as ignoring them here; exec sets handled signals back to their defaults.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    ignored = [number for number in ignored if number not in (signal.SIGPIPE, signal.SIGCHLD)]  # the first is restored
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
