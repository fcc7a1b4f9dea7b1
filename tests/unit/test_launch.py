"""The launcher, with real MPI ranks of small programs: what comes through, who is blamed, who is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from clusterenv_hpc.comm.channel import LAST_WORDS_S
from clusterenv_hpc.jobs.environment import in_mpi_world
from clusterenv_hpc.run import mpi_launcher
from clusterenv_hpc.run.banners import Banners
from clusterenv_hpc.run.launch import rank_environment
from clusterenv_hpc.run.mpi_launcher import Mpi, job_facts, launch_command, worker_threads
from clusterenv_hpc.run.supervise import Ended, RankEnd

PARENT = """
import sys
from pathlib import Path
from clusterenv_hpc.run.launch import describe, launch_program
ended = launch_program([sys.executable, *sys.argv[3:]], int(sys.argv[1]), grace_s=float(sys.argv[2]))
print(describe(ended, "run"), file=sys.stderr)
sys.exit(ended.code)
"""

RANK_HEAD = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
def say(text):
    os.write(1, f"{text}\\n".encode())
def sleep(seconds=30.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
"""

BOTH_MPIS = [pytest.param("mpich"), pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))]


class Launch:
    """One parent process with its ranks, started in an empty folder."""

    def __init__(self, folder: Path, environ: Mapping[str, str], ranks: int, grace_s: float, body: str) -> None:
        (folder / "parent.py").write_text(PARENT)
        (folder / "rank.py").write_text(RANK_HEAD + textwrap.dedent(body))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "parent.py", str(ranks), str(grace_s), "rank.py"],
            cwd=folder, env={**environ, "TMPDIR": str(folder)},  # a parent that is killed cannot tidy up
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def wait_for_files(self, pattern: str, count: int, timeout: float = 30.0) -> list[Path]:
        deadline = time.monotonic() + timeout
        while len(found := sorted(self.folder.glob(pattern))) < count:
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, f"only {found} after {timeout} s"
            time.sleep(0.02)
        return found

    def end(self, timeout: float = 30.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches = []

    def start(body: str, ranks: int = 3, grace_s: float = 8.0, mpi: str = "mpich", **environ: str) -> Launch:
        library = next(Path("/usr/lib").glob("*/libmpi.so.40"), None) if mpi == "openmpi" else None
        own = {"MPI4PY_LIBMPI": str(library)} if library else {}
        launches.append(Launch(tmp_path, {**os.environ, **own, **environ}, ranks, grace_s, body))
        return launches[-1]

    yield start
    for one in launches:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_ranks_form_one_world_and_know_their_roles(launch: Callable[..., Launch], mpi: str) -> None:
    body = "say(f\"{rank}/{size} {os.environ.get('OMP_NUM_THREADS', 'unset')}\")"
    code, out, err = launch(body, ranks=4, mpi=mpi, OMP_NUM_THREADS="7").end()
    assert (code, sorted(out.split("\n")), err.strip()) == (0, ["", *(f"{rank}/4 7" for rank in range(4))], "")


def test_a_worker_gets_one_thread_and_the_learner_is_left_to_choose(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    _, out, _ = launch("say(f\"{rank} {os.environ.get('OMP_NUM_THREADS', 'unset')}\")").end()
    assert sorted(out.split("\n")) == ["", "0 unset", "1 1", "2 1"]


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_output_comes_through_byte_for_byte(launch: Callable[..., Launch], mpi: str) -> None:
    body = r"""
        blob = bytes(range(256)) * 3000 + b"\n" + b"-" * 80 + b"\n" + b"=" * 80 + b"\n=   BAD idea\n\r" + b"=" * 30
        if rank == 1:
            view = memoryview(blob)
            while view:
                view = view[os.write(1, view[:7001]):]
            os.write(2, b"Abort(ed) nothing\n[mpi" + blob[-300:])
        """
    started = launch(body, mpi=mpi)
    out, err = started.process.communicate(timeout=40)
    blob = bytes(range(256)) * 3000 + b"\n" + b"-" * 80 + b"\n" + b"=" * 80 + b"\n=   BAD idea\n\r" + b"=" * 30
    assert started.process.returncode == 0
    assert out == blob
    assert err == b"Abort(ed) nothing\n[mpi" + blob[-300:] + b"\n"  # and the parent's own empty line


@pytest.mark.parametrize(
    ("mpi", "victim"),
    [("mpich", 0), ("mpich", 1), ("mpich", 2), pytest.param("openmpi", 1, marks=pytest.mark.needs("openmpi"))],
)
def test_a_killed_rank_is_named_once_and_the_checkpoint_with_it(
    launch: Callable[..., Launch], mpi: str, victim: int
) -> None:
    body = """
        open(f"pid-{rank}", "w").write(str(os.getpid()))
        sleep()
        """
    started = launch(body, mpi=mpi)
    (started.folder / "run" / "checkpoints").mkdir(parents=True)
    for update in (3, 12):
        (started.folder / "run" / "checkpoints" / f"update-{update:09d}.pt").touch()
    files = started.wait_for_files("pid-*", 3)
    time.sleep(0.2)
    pid = int(files[victim].read_text())
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    code, out, err = started.end()
    assert time.monotonic() - began < 10
    assert code == 128 + 9
    role = "worker" if victim else "learner"
    assert err.count("clusterenv-hpc: ") == 1
    assert f"clusterenv-hpc: rank {victim} ({role}) on {os.uname().nodename}, pid {pid}, was killed by signal 9" in err
    assert "update-000000012.pt" in err
    assert "clusterenv-hpc train run_dir=run resume=true" in err
    for banner in ("BAD TERMINATION", "mpirun", "Primary job", "EXIT STRING", "====", "----"):
        assert banner not in out + err


def test_a_crash_in_compiled_code_is_blamed_on_the_right_rank(launch: Callable[..., Launch]) -> None:
    body = """
        comm.Barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        sleep()
        """
    code, _, err = launch(body).end()
    assert code == 128 + 11
    assert re.search(r"rank 2 \(worker\) on \S+, pid \d+, was killed by signal 11 \(SIGSEGV", err)


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_the_learners_exit_code_is_passed_on(launch: Callable[..., Launch], mpi: str) -> None:
    code, _, err = launch("sys.exit(77 if rank == 0 else 0)", mpi=mpi).end()
    assert code == 77
    assert err.strip() == ""


@pytest.mark.parametrize(
    ("left_with", "mpi"), [(5, "mpich"), (0, "mpich"), pytest.param(0, "openmpi", marks=pytest.mark.needs("openmpi"))]
)
def test_a_worker_that_leaves_without_a_word_ends_the_job_and_is_named(
    launch: Callable[..., Launch], left_with: int, mpi: str
) -> None:
    body = f"""
        comm.Barrier()
        if rank == 1:
            os._exit({left_with})
        sleep()
        """
    began = time.monotonic()
    code, _, err = launch(body, grace_s=1.0, mpi=mpi).end()
    assert code == left_with or (left_with == 0 and code != 0)
    assert time.monotonic() - began < 10
    assert re.search(rf"rank 1 \(worker\) on \S+, pid \d+, ended with exit code {left_with} and no word why", err)


def test_a_learner_that_is_killed_after_its_workers_went_home_is_named_itself() -> None:
    """In the evaluation at the end, most likely; a worker that left in mid-run is followed at once."""
    workers = (RankEnd(2, 12, 0, None, 100.0), RankEnd(1, 11, 0, None, 100.1))
    late, soon = (RankEnd(0, 10, None, signal.SIGKILL, at) for at in (130.0, 101.0))
    assert Ended(137, (*workers, late)).failed == late
    assert Ended(137, (workers[0], soon)).failed == workers[0]
    assert Ended(0, workers).failed is None
    own_words = RankEnd(0, 10, 3, None, 101.0)
    assert Ended(3, (*workers, own_words)).failed == own_words


def test_a_rank_that_tells_its_error_itself_is_not_repeated(launch: Callable[..., Launch]) -> None:
    """With the pause that our channel makes as well: without it the launcher may lose what was written last."""
    body = """
        comm.Barrier()
        if rank == 1:
            os.write(2, b"clusterenv-hpc: rank 1 on here: the environment raised\\n")
            time.sleep(LAST_WORDS_S)
            comm.Abort(4)
        sleep()
        """.replace("LAST_WORDS_S", str(LAST_WORDS_S))
    code, _, err = launch(body).end()
    assert code == 4
    assert err.strip() == "clusterenv-hpc: rank 1 on here: the environment raised"


SAVING = """
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: stop.append(number) if rank == 0 else None)
    open(f"ready-{rank}", "w")
    while not stop and not os.path.exists("saved"):
        time.sleep(0.02)
    if rank == 0:
        sleep(0.3)
        open("saved", "w")
        say(f"saved after {stop[0]}")
        sys.exit(0 if stop[0] == signal.SIGUSR2 else 128 + stop[0])
    """


@pytest.mark.parametrize(
    ("mpi", "number"),
    [
        ("mpich", signal.SIGINT),
        ("mpich", signal.SIGTERM),
        ("mpich", signal.SIGUSR2),
        pytest.param("openmpi", signal.SIGTERM, marks=pytest.mark.needs("openmpi")),
    ],
)
def test_a_signal_reaches_the_learner_which_saves_and_ends(
    launch: Callable[..., Launch], mpi: str, number: signal.Signals
) -> None:
    started = launch(SAVING, mpi=mpi)
    started.wait_for_files("ready-*", 3)
    started.process.send_signal(number)
    code, out, err = started.end()
    assert (out, code) == (f"saved after {number:d}\n", 0 if number == signal.SIGUSR2 else 128 + number)
    assert err.strip() == ""


DEAF = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open(f"ready-{rank}", "w")
    sleep()
    """


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(
    launch: Callable[..., Launch], mpi: str, no_orphans: Callable[[], list[int]]
) -> None:
    started = launch(DEAF, mpi=mpi, grace_s=1.0)
    started.wait_for_files("ready-*", 3)
    began = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    code, _, err = started.end()
    assert 0.9 < time.monotonic() - began < 8
    assert code == 128 + 15
    assert "did not stop in time after SIGTERM and were killed" in err
    assert no_orphans() == []


def test_a_second_interrupt_does_not_wait(launch: Callable[..., Launch], no_orphans: Callable[[], list[int]]) -> None:
    started = launch(DEAF, grace_s=60.0)
    started.wait_for_files("ready-*", 3)
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGINT)
    code, _, _ = started.end(timeout=10)
    assert code == 128 + 2
    assert no_orphans() == []


def launch_directly(folder: Path, program: list[str], settings: str) -> str:
    """The end of a launch of two ranks that do not use MPI, as text."""
    source = (
        "from clusterenv_hpc.run.launch import describe, launch_program\n"
        f"ended = launch_program({program!r}, 2, {settings})\n"
        "print(ended.code, ended.stopped_by, ended.failed, describe(ended, None))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=40)
    return done.stdout + done.stderr


def test_workers_that_stay_when_the_learner_has_ended_are_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    told = launch_directly(tmp_path, ["sh", "-c", "[ $PMI_RANK = 0 ] || sleep 60"], "grace_s=1.0")
    assert time.monotonic() - began < 20
    assert told.startswith("0 None None "), "the learner had the last word"
    assert "the learner has ended, but its workers did not and were killed" in told


def test_a_launch_has_a_deadline_if_asked_for(tmp_path: Path) -> None:
    began = time.monotonic()
    told = launch_directly(tmp_path, ["sleep", "60"], "grace_s=1.0, timeout_s=1.0")
    assert time.monotonic() - began < 20
    assert told.startswith("143 15 RankEnd(rank=0"), told


def test_a_program_that_does_not_exist_is_told(tmp_path: Path) -> None:
    told = launch_directly(tmp_path, ["/there/is/none"], "grace_s=1.0")
    assert "cannot start /there/is/none: No such file or directory" in told
    assert "127 None RankEnd(rank=" in told


def test_an_early_interrupt_ends_without_a_traceback(launch: Callable[..., Launch]) -> None:
    started = launch("signal.signal(signal.SIGINT, signal.SIG_DFL); open(f'ready-{rank}', 'w'); sleep()")
    started.wait_for_files("ready-*", 3)
    started.process.send_signal(signal.SIGINT)
    code, _, err = started.end()
    assert code == 128 + 2
    assert "Traceback" not in err
    assert "stopped by SIGINT\n" in err


@pytest.mark.parametrize("mpi", BOTH_MPIS)
@pytest.mark.parametrize("which", ["parent", "launcher"])
def test_no_rank_outlives_a_killed_parent_or_launcher(
    launch: Callable[..., Launch], mpi: str, which: str, no_orphans: Callable[[], list[int]]
) -> None:
    started = launch(DEAF, mpi=mpi)
    started.wait_for_files("ready-*", 3)
    children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(started.process.pid if which == "parent" else int(children[0]), signal.SIGKILL)
    began = time.monotonic()
    code, _, err = started.end()
    while no_orphans() and time.monotonic() - began < 6:
        time.sleep(0.05)
    assert no_orphans() == []
    if which == "launcher":
        assert code == 128 + 9
        assert "clusterenv-hpc: " in err


def test_ranks_end_when_nobody_reads_their_output(launch: Callable[..., Launch]) -> None:
    body = """
        while True:
            say("x" * 1000)
            time.sleep(0.001)
        """
    started = launch(body, grace_s=1.0)
    assert started.process.stdout is not None
    started.process.stdout.read(5000)
    started.process.stdout.close()
    assert started.process.wait(timeout=15) != 0


def test_a_bar_comes_through_a_terminal_as_it_is_drawn(tmp_path: Path) -> None:
    """A carriage return must not wait for a newline, and rank 0 must learn that there is a terminal."""
    (tmp_path / "parent.py").write_text(PARENT)
    body = """
        if rank == 0:
            tty, columns = os.environ["CLUSTERENV_HPC_TTY"], os.environ["CLUSTERENV_HPC_COLUMNS"]
            os.write(2, f"terminal {tty} of {columns}".encode())
            for step in range(4):
                os.write(2, f"\\r{step}/4 |--------------------------------|".encode())
                while not os.path.exists(f"seen-{step}"):
                    time.sleep(0.01)
            os.write(2, b"\\ndone\\n")
        comm.Barrier()
        """
    (tmp_path / "rank.py").write_text(RANK_HEAD + textwrap.dedent(body))
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 93, 0, 0))
    command = [sys.executable, "parent.py", "2", "2", "rank.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen, step, deadline = b"", 0, time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            if select.select([controller], [], [], 0.1)[0]:
                try:
                    seen += os.read(controller, 1000)
                except OSError:  # the last end of the terminal has been closed
                    break
            if f"\r{step}/4 |-----".encode() in seen:
                (tmp_path / f"seen-{step}").touch()
                step += 1
    finally:
        process.terminate() if step < 4 else None
        process.wait(timeout=20)
        os.close(controller)
    assert step == 4, seen
    assert b"terminal 1 of 93" in seen
    assert b"done" in seen


def feed(pieces: list[bytes]) -> tuple[bytes, bytes]:
    banners = Banners()
    out = b"".join([*map(banners.feed, pieces), banners.feed(b"", end=True)])
    return out, banners.text


HYDRA_BANNER = (
    b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    b"=   PID 7 RUNNING AT vm\n=   EXIT CODE: 9\n"
    b"=   CLEANING UP REMAINING PROCESSES\n=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n" + b"=" * 83 + b"\n"
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"This typically refers to a problem with your application.\nPlease see the FAQ page for debugging suggestions\n"
)
OPENMPI_BANNER = (
    b"-" * 74
    + b"\nmpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n"
    + b"-" * 74
    + b"\n"
)


@pytest.mark.parametrize("banner", [HYDRA_BANNER, OPENMPI_BANNER], ids=["hydra", "openmpi"])
@pytest.mark.parametrize("size", [1_000_000, 61, 40])
def test_banners_are_taken_out_wherever_the_chunks_break(banner: bytes, size: int) -> None:
    text = b"before\n\r 12% |####" + banner + b"after\n"
    start = text.index(banner)
    pieces = [text[:start], *(text[i : i + size] for i in range(start, len(text), size))]
    assert feed(pieces) == (b"before\n\r 12% |####after\n", banner)


@pytest.mark.parametrize(
    "text",
    [
        b"-" * 74 + b"\nname   value\n" + b"-" * 74 + b"\n",
        b"=" * 83 + b"\n= 3 passed\n",
        b"Abort(1) on node 0 (rank 0 in comm 0): Fatal error in internal_Recv: Other MPI error\n",
        b"-" * 74,
        b"YOUR APP",
        b"\r  3% |=====================================",
        b"",
        b"\n\n\n",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_only_looks_like_a_banner_passes(text: bytes, size: int) -> None:
    assert feed([text[i : i + size] for i in range(0, len(text), size)]) == (text, b"")


def test_a_plain_partial_line_passes_at_once() -> None:
    assert Banners().feed(b"\r 3% |####     |") == b"\r 3% |####     |"


SLURM_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False),  # the batch script itself
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),  # sbatch sets SLURM_PROCID too
        (SLURM_STEP, True),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # the shell of srun --pty
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "2", "PMI_SIZE": "3"}, True),  # mpiexec within it
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, True),
        ({"PMIX_RANK": "0"}, True),
        ({"PMI_RANK": ""}, False),
    ],
)
def test_in_mpi_world(environ: dict[str, str], expected: bool) -> None:
    assert in_mpi_world(environ) is expected


def test_mpi_is_throttled_only_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launcher, "available_cores", lambda: 4)
    throttle = "MPIR_CVAR_CH4_PROGRESS_THROTTLE"
    assert throttle not in rank_environment({}, ranks=4)
    crowded = rank_environment({}, ranks=5)
    assert (crowded[throttle], crowded[f"{throttle}_NO_PROGRESS_COUNT"]) == ("1", "16")
    assert throttle not in rank_environment({throttle: "0"}, ranks=5), "what the user set stays"
    assert throttle in rank_environment({"SLURM_STEP_TASKS_PER_NODE": "5(x3)"})
    assert throttle not in rank_environment({"MPI_LOCALNRANKS": "3"})
    assert throttle not in rank_environment({})
    no_barrier = "OMPI_MCA_async_mpi_finalize"
    assert no_barrier not in crowded and rank_environment({"OMPI_MCA_mpi_ft_enable": "1"})[no_barrier] == "1"


def test_threads_follow_the_role() -> None:
    assert rank_environment({"PMI_RANK": "3"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in rank_environment({"PMI_RANK": "0"})
    assert worker_threads({"OMP_NUM_THREADS": "2"}) == {}


def test_the_job_is_told_to_the_ranks_but_not_the_layout_of_its_tasks() -> None:
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "9", "SLURM_CONF": "/etc/s.conf",
        "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4",
        "PATH": "/bin",
    }  # fmt: skip
    told = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "9", "SLURM_CONF": "/etc/s.conf"}
    assert job_facts(environ) == told
    mpich = Mpi("MPICH", (5, 0, 2), "/x/lib/libmpi.so.12", "4.1.2")
    own = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "MKL_NUM_THREADS": "2"}
    command = " ".join(launch_command(mpich, "mpiexec", ["prog"], 3, own))
    assert command == "mpiexec -n 1 -env SLURM_JOB_ID 7 prog : -n 2 -env SLURM_JOB_ID 7 prog"
    launcher_sees = mpi_launcher.launcher_environment(mpich, 3, {**environ, "PMI_FD": "9", "PMIX_RANK": "0"})
    assert {name for name in launcher_sees if name.startswith(("SLURM", "PM"))} == {"SLURM_CONF"}


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("mpiexec", "mpiexec (Open MPI) 4.1.4"), ("mpirun", "garbage")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{words}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(mpi_launcher.LaunchError, match=r"loads MPICH 4.3.0 .*no launcher.*openmpi 4.1.4.*pip install"):
        mpi_launcher.find_launcher(Mpi("MPICH", (4, 3, 0), "", "4.1"))
    with pytest.raises(mpi_launcher.LaunchError, match=r"Open MPI 5\.0\.1"):
        mpi_launcher.find_launcher(Mpi("Open MPI", (5, 0, 1), "", "4.1"))
    assert mpi_launcher.find_launcher(Mpi("Open MPI", (4, 1, 1), "", "4.1")) == str(tmp_path / "mpiexec")
    with pytest.raises(mpi_launcher.LaunchError, match="no launcher of Cray MPI is known"):
        mpi_launcher.find_launcher(Mpi("Cray MPI", (8, 1), "", "4.1"))


def test_no_mpi_library_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mpi_launcher.LaunchError, match=r"cannot load an MPI library .*pip install"):
        mpi_launcher.find_mpi({**os.environ, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})


def test_the_launcher_beside_the_library_is_found() -> None:
    mpi = mpi_launcher.find_mpi()
    assert (mpi.vendor, mpi.family) == ("MPICH", mpi_launcher.HYDRA)
    assert Path(mpi_launcher.find_launcher(mpi)).parent == Path(sys.prefix, "bin")


@pytest.mark.needs("openmpi")
def test_debians_open_mpi_gets_its_own_launcher(openmpi_environ: dict[str, str]) -> None:
    mpi = mpi_launcher.find_mpi({**os.environ, **openmpi_environ})
    assert mpi.vendor == "Open MPI"
    assert mpi_launcher.find_launcher(mpi).startswith("/usr/bin/mpi")
