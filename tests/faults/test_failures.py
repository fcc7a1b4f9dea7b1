"""Every way a job of several ranks can fail: it ends soon, with a code that is not 0 and one message that says why.

Real ranks.  Each script prints when its failure begins; ``Failure`` counts from there.  The ``mpiexec`` fixture asserts
that no rank is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = str(Path(__file__).parents[1])
HEAD = f"""
import os, signal, sys, time
began = time.monotonic()
sys.path.insert(0, {TESTS!r})
import numpy as np
import toy_envs as toy
from toy_policy import Linear
import clusterenv_hpc as ce
ce.ClusterEnv
os.write(1, f"imports took {{time.monotonic() - began}}\\n".encode())

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1")))

def now(what="failing"):
    os.write(1, f"{{what}} at {{time.monotonic()}}\\n".encode())

def policy(env=toy.Walk):
    return Linear(env.observation_space, env.action_space)
"""
OURS = re.compile(r"^clusterenv-hpc: .*$", re.MULTILINE)
BOTH_MPIS = ["mpich", pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))]
USUAL_IMPORTS_S = 4.0
"""How long three ranks need to import torch on two idle cores, at most."""


def works(openmpi: str, **cases: str) -> Any:
    """What the learner is doing when it happens; all under MPICH, and the case ``openmpi`` under Open MPI as well."""
    params = [pytest.param(work, "mpich", id=f"{name}-mpich") for name, work in cases.items()]
    params.append(pytest.param(cases[openmpi], "openmpi", id=f"{openmpi}-openmpi", marks=pytest.mark.needs("openmpi")))
    return pytest.mark.parametrize(("work", "mpi"), params)


class Failure:
    """How a script with real ranks failed."""

    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.ended = time.monotonic()
        self.code, self.stdout, self.stderr = returncode, stdout, stderr

    def seconds(self) -> float:
        """From the failure to the end; the same work takes longer on a busy machine, which the imports tell."""
        began = min(float(at) for at in re.findall(r"^failing at ([0-9.]+)$", self.stdout, re.MULTILINE))
        imports = max(float(took) for took in re.findall(r"^imports took ([0-9.]+)$", self.stdout, re.MULTILINE))
        return (self.ended - began) / max(1.0, imports / USUAL_IMPORTS_S)

    def check(self, *words: str, code: int | None = None, within_s: float = 10.0) -> Failure:
        """Ended in time, not with success, and with one message of ours in which the ``words`` (patterns) follow."""
        told = f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        assert "failing at" in self.stdout, told
        assert self.seconds() < within_s, told
        assert self.code != 0 if code is None else self.code == code, told
        messages = OURS.findall(self.stderr)
        assert len(messages) == (1 if words else 0), told
        if words:
            assert re.search(".*".join(words), messages[0]), f"{'.*'.join(words)!r} is not in\n{messages[0]}\n{told}"
        return self


Fail = Callable[..., Failure]


@pytest.fixture
def fail(mpiexec: Callable[..., Any]) -> Fail:
    """``fail(script, ranks=3)`` runs the script after ``HEAD`` on real ranks."""

    def run(script: str, ranks: int = 3, mpi: str = "mpich", timeout: float = 60.0) -> Failure:
        ran = mpiexec(ranks, HEAD + textwrap.dedent(script), mpi=mpi, timeout=timeout)
        return Failure(ran.returncode, ran.stdout, ran.stderr)

    return run


HERE = r"\(worker, [^)]+\)"


# -- environments and policies --


def test_an_environment_that_cannot_be_built_on_one_rank(fail: Fail) -> None:
    fail(
        """
        def make():
            if RANK == 2:
                now()
                raise ValueError("no such level")
            return toy.Walk()

        with ce.ClusterEnv(make, 4) as envs:
            print("never")
        """
    ).check(rf"rank 2 {HERE} failed", "environment 2", "could not be built: ValueError: no such level")


def test_an_environment_that_cannot_be_built_on_any_rank(fail: Fail) -> None:
    fail(
        """
        now()
        with ce.ClusterEnv("NoSuchThing-v0", 4) as envs:
            print("never")
        """
    ).check(rf"rank [12] {HERE} failed", "NoSuchThing-v0", "could not be built")


@works(
    openmpi="rollout",
    step="for _ in range(1000): envs.step(np.zeros(4, np.int64))",
    rollout="for _ in range(1000): envs.rollout(5)",
    rollouts="for batch in envs.rollouts(5): time.sleep(0.01)",
)
def test_an_environment_that_raises_in_step(fail: Fail, work: str, mpi: str) -> None:
    failure = fail(
        f"""
        class Breaks(toy.Faulty):
            def step(self, action):
                if self.mine and self.steps == 29:
                    now()
                return super().step(action)

        with ce.ClusterEnv(Breaks, 4, policy=policy(), env_kwargs={{"where": "step", "seed": 12, "after": 30}}) as envs:
            envs.reset(seed=10)
            {work}
        """,
        mpi=mpi,
    )
    failure.check(rf"rank 2 {HERE} failed in environment 2: ZeroDivisionError: the simulator broke")
    assert "toy_envs.py" in failure.stderr, "where in the environment it happened"


def test_an_environment_that_raises_in_reset(fail: Fail) -> None:
    fail(
        """
        with ce.ClusterEnv(toy.Faulty, 4, env_kwargs={"where": "reset", "seed": 13}) as envs:
            now()
            envs.reset(seed=10)
        """
    ).check(rf"rank 2 {HERE} failed in environment 3: ValueError: cannot reset")


def test_an_observation_that_is_not_a_number(fail: Fail) -> None:
    fail(
        """
        with ce.ClusterEnv(toy.Faulty, 4, policy=policy(), env_kwargs={"where": "nan", "seed": 11}) as envs:
            envs.reset(seed=10)
            now()
            envs.rollout(20)
        """
    ).check(rf"rank 1 {HERE} failed in environment 1: the environment gave an observation that is not a finite number")


def test_a_policy_that_does_not_fit(fail: Fail) -> None:
    fail(
        """
        now()
        with ce.ClusterEnv(toy.Walk, 4, policy=policy(toy.BinaryActions)) as envs:
            print("never")
        """
    ).check(rf"rank [12] {HERE} failed: PolicyError: Linear")


def test_an_environment_that_exits(fail: Fail) -> None:
    fail(
        """
        with ce.ClusterEnv(toy.Faulty, 2, env_kwargs={"where": "exit", "seed": 11}) as envs:
            envs.reset(seed=10)
            now()
            for _ in range(10): envs.step(np.zeros(2, np.int64))
        """
    ).check(rf"rank 2 {HERE} failed in environment 1: SystemExit: 3")


@pytest.mark.parametrize("raises", ["KeyboardInterrupt()", "StopIteration()"])
@pytest.mark.parametrize("work", ["envs.step(np.zeros(4, np.int64))", "envs.rollout(5)"], ids=["step", "rollout"])
def test_an_environment_that_raises_what_means_something_to_python(fail: Fail, work: str, raises: str) -> None:
    """Ctrl-C is the learner's to answer, so an interrupt on a worker is the environment's own."""
    fail(
        f"""
        class Breaks(toy.Walk):
            def step(self, action):
                if RANK == 2:
                    now()
                    raise {raises}
                return super().step(action)

        with ce.ClusterEnv(Breaks, 4, policy=policy()) as envs:
            envs.reset(seed=10)
            for _ in range(1000): {work}
        """
    ).check(rf"rank 2 {HERE} failed in environment 2: {raises[:-2]}")


# -- ranks that do not fit together --


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("ce.ClusterEnv(toy.Walk if RANK < 2 else toy.Image, 4)", "the observation space is Box.*on rank 1.*on rank 2"),
        ("ce.ClusterEnv(toy.Walk, 4 if RANK < 2 else 6)", "num_envs is 4 on rank 0.*but 6 on rank 2"),
        (
            "ce.ClusterEnv(toy.Walk, 4, policy=policy(toy.Walk if RANK != 1 else toy.Image))",
            "failed on a batch|policy's number of weights is .* on rank 0 .* on rank 1",
        ),
        ("ce.ClusterEnv(toy.Walk, 4, seed=RANK)", "the seed is 0 on rank 0.*but 1 on rank 1"),
        (
            "ce.ClusterEnv(toy.Walk, 4, policy=policy(), sync=ce.APS(0.1 * (1 + RANK // 2)))",
            "the sync rule is .*0.1.* on rank 0.*0.2.* on rank 2",
        ),
    ],
    ids=["spaces", "num_envs", "policy", "seed", "rule"],
)
def test_ranks_that_do_not_fit_together(fail: Fail, call: str, message: str) -> None:
    fail(
        f"""
        now()
        with {call} as envs:
            print("never")
        """
    ).check(message)


def test_a_rank_that_never_comes(fail: Fail) -> None:
    fail(
        """
        def make():
            if RANK == 2:
                time.sleep(60)
            return toy.Walk()

        now()
        ce.ClusterEnv(make, 4, timeout=2.0)
        """,
        timeout=30,
    ).check(r"rank 0 \(learner, [^)]+\) heard nothing from rank 2 within 2 s")


# -- the learner's own end --


@works(
    openmpi="full_stream",
    idle="",
    rollout="envs.rollout(5)",
    publish="envs.rollout(5); policy_.shift(0.1); envs.publish()",
    stream="next(envs.rollouts(5))",
    full_stream="stream = envs.rollouts(5); [next(stream) for _ in range(9)]; time.sleep(0.2)",
)
def test_a_learner_that_raises_in_the_body(fail: Fail, work: str, mpi: str) -> None:
    failure = fail(
        f"""
        policy_ = policy()
        with ce.ClusterEnv(toy.Walk, 4, policy=policy_) as envs:
            {work}
            now()
            raise KeyError("my own mistake")
        """,
        mpi=mpi,
    )
    failure.check(r"rank 0 \(learner, [^)]+\) failed: KeyError: 'my own mistake'", within_s=8.0)
    assert failure.stderr.count("Traceback") == 1 and failure.code == 1


def test_a_learner_that_exits_with_a_code(fail: Fail) -> None:
    fail(
        """
        with ce.ClusterEnv(toy.Walk, 4, policy=policy()) as envs:
            envs.rollout(5)
            now()
            sys.exit(3)
        """
    ).check(code=3, within_s=8.0)


def test_a_learner_that_exits_without_one(fail: Fail) -> None:
    fail(
        """
        envs = ce.ClusterEnv(toy.Walk, 4, policy=policy())
        for batch in envs.rollouts(5):
            now()
            sys.exit()
        """
    ).check(code=0, within_s=8.0)


def test_an_error_that_is_caught_outside_ends_the_job_well(fail: Fail) -> None:
    failure = fail(
        """
        try:
            with ce.ClusterEnv(toy.Walk, 4, policy=policy()) as envs:
                raise KeyError("handled")
        except KeyError:
            print("handled", flush=True)
        now()
        """
    )
    failure.check(code=0, within_s=8.0)
    assert failure.stdout.count("handled") == 1


# -- silence and death --


@works(
    openmpi="rollouts",
    step="for _ in range(100): envs.step(np.zeros(4, np.int64))",
    rollout="for _ in range(100): envs.rollout(5)",
    rollouts="for batch in envs.rollouts(5): pass",
)
def test_a_step_that_hangs(fail: Fail, work: str, mpi: str) -> None:
    """With ``timeout=2``: two seconds of silence, and what it takes to end the rank that does not answer."""
    fail(
        f"""
        class Hangs(toy.Faulty):
            def step(self, action):
                if self.mine and self.steps == 29:
                    now()
                return super().step(action)

        kwargs = {{"where": "hang", "seed": 12, "after": 30}}
        with ce.ClusterEnv(Hangs, 4, policy=policy(), env_kwargs=kwargs, timeout=2.0) as envs:
            envs.reset(seed=10)
            {work}
        """,
        mpi=mpi,
    ).check(rf"rank 2 {HERE} gave no sign of life for 2 s while")


@pytest.mark.parametrize("mpi", BOTH_MPIS)
def test_a_worker_that_is_killed(fail: Fail, mpi: str) -> None:
    """The launcher ends the job and says so; nothing of ours is left to speak, or to wait."""
    failure = fail(
        """
        class Dies(toy.Walk):
            def step(self, action):
                if RANK == 2 and self.time == 3:
                    now()
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step(action)

        with ce.ClusterEnv(Dies, 4, policy=policy(), timeout=8.0) as envs:
            while True:
                envs.rollout(5)
        """,
        mpi=mpi,
    )
    assert failure.code != 0 and failure.seconds() < 10.0
    said = failure.stdout + failure.stderr
    assert re.search(r"signal 9|SIGNAL: 9|Killed", said), said
    assert len(OURS.findall(failure.stderr)) <= 1


def test_a_worker_that_is_slow_is_not_taken_for_dead(mpiexec: Callable[..., Any]) -> None:
    """Each rollout takes longer than ``timeout``, and no step does."""
    ran = mpiexec(
        2,
        HEAD
        + textwrap.dedent(
            """
            with ce.ClusterEnv(toy.Slow, 1, policy=policy(), env_kwargs={"delay_s": 0.25}, timeout=2.0) as envs:
                print("rollout", envs.rollout(14).num_steps)
                for batch in envs.rollouts(14):
                    print("stream", batch.num_steps)
                    break
            """
        ),
    ).check()
    assert "rollout 14" in ran.stdout and "stream 14" in ran.stdout and not OURS.findall(ran.stderr)


def test_a_learner_that_falls_silent(fail: Fail) -> None:
    fail(
        """
        with ce.ClusterEnv(toy.Walk, 4, learner_timeout=2.0) as envs:
            now()
            time.sleep(60)
        """,
        ranks=2,
    ).check(rf"rank 1 {HERE} heard nothing from the learner \(rank 0\) for 2 s")


@works(
    openmpi="rollout",
    idle="time.sleep(60)",
    rollout="[envs.rollout(5) for _ in range(10**6)]",
    rollouts="[time.sleep(0.01) for _ in envs.rollouts(5)]",
)
def test_an_interrupt_from_the_keyboard(
    tmp_path: Path, mpi: str, work: str, no_orphans: Callable[[], list[int]], request: pytest.FixtureRequest
) -> None:
    """Ctrl-C reaches the launcher and all ranks at once, as in a terminal."""
    command, environ = launcher(request, mpi)
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + textwrap.dedent(
            f"""
            with ce.ClusterEnv(toy.Walk, 4, policy=policy()) as envs:
                envs.rollout(5)
                now("ready")
                {work}
            """
        )
    )
    process = subprocess.Popen(
        [*command, sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    while "ready" not in said:
        assert process.poll() is None
        said += process.stdout.readline()
    time.sleep(0.2)
    said += f"failing at {time.monotonic()}\n"
    for pid in {process.pid, *no_orphans()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    failure = Failure(process.returncode, said, stderr)
    assert failure.code != 0 and failure.seconds() < 10.0
    assert len(OURS.findall(stderr)) <= 1 and "Traceback" not in stderr, stderr


def launcher(request: pytest.FixtureRequest, mpi: str) -> tuple[list[str], dict[str, str]]:
    """The command line that the ``mpiexec`` fixture uses, and its environment."""
    conftest = next(
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if str(getattr(plugin, "__file__", "")).endswith("tests/conftest.py")
    )
    command, settings = conftest.mpi_command(3, mpi)
    return command, {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
