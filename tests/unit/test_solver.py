"""External solvers: what they are asked and answer, how they are kept apart from MPI and Slurm, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from toy_policy import Linear

from clusterenv_hpc.cluster_env import ClusterEnv
from clusterenv_hpc.comm.channel import WorkerError
from clusterenv_hpc.envs import solver as module
from clusterenv_hpc.envs.solver import Solver, SolverError, run_solver, srun_step

TESTS = Path(__file__).parents[1]
PYTHON = [sys.executable, str(TESTS / "solver.py")]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The C solver."""
    program = tmp_path_factory.mktemp("solver") / "rod"
    subprocess.run(["cc", "-O1", "-o", str(program), str(TESTS / "solver.c")], check=True, timeout=60)
    return str(program)


@pytest.fixture(params=[pytest.param("c", marks=pytest.mark.needs("compiler")), "python"])
def rod(request: pytest.FixtureRequest) -> Iterator[Solver]:
    command = [request.getfixturevalue("compiled")] if request.param == "c" else [*PYTHON, "rod"]
    with Solver([*command, "6"], reply_s=30) as solver:
        yield solver


@pytest.fixture
def c(compiled: str) -> Iterator[Solver]:
    with Solver([compiled, "6"], reply_s=30) as solver:
        yield solver


def diffused(steps: list[float], n: int = 6) -> np.ndarray:
    """The rod, in NumPy."""
    rod = np.zeros(n)
    for temperature in steps:
        rod[0] = temperature
        right = np.append(rod[2:], rod[-1])
        rod[1:] += 0.25 * (rod[:-1] - 2 * rod[1:] + right)
    return rod


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


# -- talking ---------------------------------------------------------------------------------------------------------


def test_line_by_line(rod: Solver) -> None:
    assert rod.ask("reset") == "0 0 0 0 0 0"
    for steps in ([1.0], [1.0, 0.25], [1.0, 0.25, -3.5]):
        got = np.array(rod.ask(f"step {steps[-1]:.17g}").split(), float)
        np.testing.assert_allclose(got, diffused(steps), rtol=1e-15)


@pytest.mark.needs("compiler")
def test_binary(c: Solver) -> None:
    c.ask("step 2.5")
    c.send(b"binary\nstep 1\n")
    np.testing.assert_array_equal(np.frombuffer(c.read(48)), diffused([2.5]))
    np.testing.assert_allclose(np.array(c.read_line().split(), float), diffused([2.5, 1.0]), rtol=1e-15)


def test_more_than_any_pipe_holds_both_ways() -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    with Solver([*PYTHON, "echo"], reply_s=60) as solver:
        solver.send(data)  # nobody reads the answers meanwhile
        assert solver.read(len(data)) == data


def test_run_to_the_end() -> None:
    assert run_solver([*PYTHON, "rod", "3"], input=b"step 4\nstate\n").decode().splitlines() == ["4 1 0", "4 1 0"]
    with pytest.raises(SolverError, match=r"solver.py rod 3 failed \(exit code 5\)"):
        run_solver([*PYTHON, "rod", "3"], input=b"die 5\n")


# -- kept apart ------------------------------------------------------------------------------------------------------


def test_nothing_of_mpi_and_slurm_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_ID", "PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
    for name in (*leaks, "SLURM_CONF", "MINE"):
        monkeypatch.setenv(name, "1")
    seen = run_solver([*PYTHON, "environ"], env={"OMP_NUM_THREADS": "3"}).decode().split()
    assert not set(leaks) & set(seen) and {"SLURM_CONF", "MINE", "PATH", "OMP_NUM_THREADS"} <= set(seen)


def test_neither_ignored_signals_nor_descriptors_are_passed_on() -> None:
    number = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(number, True)
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        ignored, *descriptors = run_solver([*PYTHON, "status"]).decode().split()
        assert all(signal.getsignal(name) is signal.SIG_IGN for name in names), "still ignored here"
    finally:
        os.close(number)
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
    assert not any(int(ignored) >> (name - 1) & 1 for name in names)
    assert descriptors == ["0", "1", "2", "3"]  # 3 reads the folder


@pytest.mark.needs("setpriv")
def test_it_does_not_outlive_us() -> None:
    program = (
        "import os, signal, sys; from clusterenv_hpc.envs.solver import Solver; "
        f"solver = Solver({[*PYTHON, 'sleep']!r}); print(solver.read_line(), flush=True); os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == -9, ran.stderr
    assert gone(int(ran.stdout))


def test_a_link_to_a_program_stays_a_link(tmp_path: Path) -> None:
    """The Python of a virtual environment is one, and knows its environment by it."""
    (tmp_path / "named").symlink_to("/bin/sh")
    assert run_solver(["./named", "-c", 'echo "$0"'], cwd=tmp_path).decode().strip() == str(tmp_path / "named")


def test_as_a_slurm_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SolverError, match="this process is in no Slurm job; leave srun out"):
        srun_step([], {"PATH": str(tmp_path)})
    with pytest.raises(SolverError, match="there is no srun on PATH"):
        srun_step([], {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"})
    fake = tmp_path / "srun"
    fake.write_text(
        '#!/bin/sh\necho "$@" > "$0.argv"; env > "$0.environ"\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "77"), ("SLURMD_NODENAME", "node3"), ("SLURM_NTASKS", "9")):
        monkeypatch.setenv(name, value)
    with Solver([*PYTHON, "rod", "2"], srun=["--ntasks=4", "--mpi=pmi2"], reply_s=30) as solver:
        assert solver.ask("step 8") == "8 2"
    words = (tmp_path / "srun.argv").read_text().split()
    assert words[:4] == ["--jobid=77", "--overlap", "--nodes=1", "--ntasks=1"] and "--nodelist=node3" in words
    assert words.index("--ntasks=4") > words.index("--ntasks=1"), "the caller's word is the last"
    assert words[-4:] == [*PYTHON, "rod", "2"] and "--mpi=pmi2" in words
    assert not re.search(r"^SLURM_(NTASKS|JOB_ID)", (tmp_path / "srun.environ").read_text(), re.M)


# -- how they end ----------------------------------------------------------------------------------------------------


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "die 3",
            r"rod 6 ended before it had answered \(exit code 3\); the end of its error output:\nout of licences$",
        ),
        ("crash", r"ended before it had answered \(killed by SIGSEGV\); it wrote no error output"),
        ("silent", r"ended before it had answered; it wrote no error output"),
    ],
)
def test_its_death_is_told(c: Solver, line: str, told: str) -> None:
    c.ask("reset")
    pid = c.pid
    with pytest.raises(SolverError, match=told):
        c.ask(line)
    assert gone(pid)
    with pytest.raises(SolverError, match="rod 6 is closed"):
        c.ask("reset")


@pytest.mark.needs("compiler")
def test_its_death_is_told_where_it_is_found_when_sending(c: Solver) -> None:
    c.send(b"die 4\n")
    with pytest.raises(SolverError, match=r"\(exit code 4\)"):
        for _ in range(1000):
            c.send(b"step 1\n" * 100)
            time.sleep(0.01)


@pytest.mark.needs("compiler")
def test_who_does_not_answer_is_stopped(c: Solver) -> None:
    c.ask("reset")
    pid, began = c.pid, time.monotonic()
    with pytest.raises(SolverError, match="did not answer in time, and was stopped; it wrote no error output"):
        c.ask("hang", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 10 and gone(pid)


@pytest.mark.needs("compiler")
def test_who_takes_nothing_is_stopped(c: Solver) -> None:
    c.send(b"hang\n")
    with pytest.raises(SolverError, match="did not answer in time"):
        c.send(b"x" * 10_000_000, timeout_s=0.2)


@pytest.mark.needs("compiler")
def test_the_time_limit_holds_for_all_of_it(compiled: str) -> None:
    with (
        Solver([compiled, "6"], time_limit_s=0.5, reply_s=60) as solver,
        pytest.raises(SolverError, match=r"was stopped at its time limit of 0\.5 s"),
    ):
        for _ in range(10_000):
            solver.ask("step 1")
            time.sleep(0.01)
    with pytest.raises(SolverError, match=r"time limit of 0\.3 s|did not answer in time"):
        run_solver([compiled, "6"], input=b"hang\n", timeout_s=0.3)


@pytest.mark.needs("compiler")
def test_much_error_output_neither_blocks_nor_fills_memory(compiled: str) -> None:
    with Solver([compiled, "6"], tail=50, reply_s=60) as solver:
        for _ in range(3):
            assert solver.ask("chatter 500000") == "0 0 0 0 0 0"
        with pytest.raises(SolverError) as caught:
            solver.ask("die 1")
    assert str(caught.value).endswith("out of licences") and len(str(caught.value).partition(":\n")[2]) <= 50


def test_output_without_end_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_OUTPUT", 1_000_000)
    with pytest.raises(SolverError, match="yes wrote more than 1000000 bytes"):
        run_solver(["yes"], timeout_s=30)
    flood = Solver(["sh", "-c", "yes & sleep 60"], reply_s=30)
    with pytest.raises(SolverError, match="more than 1000000 bytes that nobody had asked for"):
        flood.send(b"x" * 10_000_000)


def test_closing_ends_it_and_its_children() -> None:
    solver = Solver([*PYTHON, "stubborn"], reply_s=30)
    child, pid = int(solver.read_line()), solver.pid
    began = time.monotonic()
    solver.close(grace_s=0.2)
    solver.close()
    assert gone(pid) and gone(child) and time.monotonic() - began < 10


def test_who_is_forgotten_is_closed() -> None:
    solver = Solver([*PYTHON, "sleep"], reply_s=30)
    pid = int(solver.read_line())
    del solver
    assert gone(pid)


def test_what_ends_by_itself_is_not_hurried() -> None:
    solver = Solver(["/bin/sh", "-c", "read line; sleep 0.3; exit 7"])
    process = solver._process
    solver.close(grace_s=20)
    assert process is not None and process.returncode == 7


@pytest.mark.parametrize("command", [["no-such-program"], ["/nowhere/program"], ["/tmp"], ["./README.md"]])
def test_what_cannot_be_started(command: list[str]) -> None:
    with pytest.raises(SolverError, match=rf"{command[0]} cannot be started: {command[0]} is no program"):
        Solver(command)


def test_a_command_is_needed() -> None:
    with pytest.raises(ValueError, match="a program and its arguments"):
        Solver([])


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE", 10_000)
    with (
        Solver(["/bin/sh", "-c", "head -c 1000000 /dev/zero; sleep 60"], reply_s=30) as solver,
        pytest.raises(SolverError, match="sent more than 10000 bytes without an end of line"),
    ):
        solver.read_line()


# -- in an environment -----------------------------------------------------------------------------------------------


class RodEnv(gym.Env[Any, Any]):
    """Heat one end of the rod.  The solver dies in step ``dies`` of its life."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, program: list[str], dies: int = 0) -> None:
        self.solver = Solver([*program, "4"], reply_s=30)
        self.dies, self.steps = dies, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array(self.solver.ask("reset").split(), float), {"pid": self.solver.pid}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        rod = np.array(self.solver.ask("die 9" if self.steps == self.dies else f"step {action}").split(), float)
        return rod, float(rod[-1]), False, False, {}

    def close(self) -> None:
        self.solver.close()


@pytest.mark.needs("compiler")
def test_an_environment_with_a_solver(compiled: str) -> None:
    policy = Linear(RodEnv.observation_space, RodEnv.action_space)
    with ClusterEnv(RodEnv, 3, policy=policy, num_workers=2, env_kwargs={"program": [compiled]}) as envs:
        _, infos = envs.reset(seed=1)
        pids = infos["pid"].tolist()
        assert len(set(pids)) == 3 and all(map(alive, pids))
        rollout = envs.rollout(12)
        for i in range(3):
            np.testing.assert_allclose(
                rollout.next_observations[-1, i], diffused(rollout.actions[:, i].astype(float).tolist(), 4), rtol=1e-12
            )
    assert all(map(gone, pids))


@pytest.mark.needs("compiler")
def test_its_death_is_the_environments_failure(compiled: str) -> None:
    policy = Linear(RodEnv.observation_space, RodEnv.action_space)
    kwargs = {"program": [compiled], "dies": 5}
    with ClusterEnv(RodEnv, 2, policy=policy, env_kwargs=kwargs) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerError, match=r"(?s)failed in environment 0: SolverError: .*exit code 9.*licences"):
            envs.rollout(8)
    with ClusterEnv(RodEnv, 2, policy=policy, env_kwargs=kwargs, on_error="restart") as envs:
        _, infos = envs.reset(seed=1)
        first = infos["pid"].tolist()
        rollout = envs.rollout(12)
        assert rollout.valid[:, 0].tolist() == [True] * 4 + [False] + [True] * 4 + [False] + [True] * 2
        assert (rollout.observations[5] == 0).all() and envs.stats.restarts == {1: {0: 2, 1: 2}}
        assert all(map(gone, first))
