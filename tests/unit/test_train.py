"""The training loop in one process: exact counters, bit-equal repeats, resume, signals, and how failures end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_slurm import FakeSlurm

from clusterenv_hpc import cli
from clusterenv_hpc.run import owner
from clusterenv_hpc.run.checkpoint import CheckpointError, CheckpointStore, read
from clusterenv_hpc.run.config import load
from clusterenv_hpc.run.interrupt import Interrupted, StopSignals
from clusterenv_hpc.run.randomness import random_states, seeds_of, set_random_states

CLOCK = {"wall_s", "steps_per_s", "collect_s", "learn_s", "idle_share"}
REQUIRED = [
    "env_id", "algo", "sync", "seed", "workers", "num_envs", "env_steps", "updates", "wall_s", "steps_per_s",
    "return_mean", "return_std", "episodes", "weight_messages", "weight_bytes", "weight_requests", "probe_bytes",
    "rollout_bytes", "lag_mean", "lag_max", "kl_mean", "resumed_from", "exit_reason",
]  # fmt: skip
SMALL = [
    "env=cartpole", "workers=0", "envs_per_worker=4", "algo.num_steps=32", "algo.minibatch_size=64", "algo.epochs=2",
    "eval.episodes=2", "log.progress=none", "log.tensorboard=false", "total_steps=2000",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


def train(*words: str) -> int:
    return cli.main(["train", *SMALL, *words])


def summary(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "summary.json").read_text())


def metrics(run: str, *, clock: bool = True) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in one.items() if clock or name not in CLOCK} for one in records]


def weights(run: str) -> torch.Tensor:
    state = read(CheckpointStore(Path(run, "checkpoints"), 1).paths()[-1])
    return torch.cat([tensor.reshape(-1) for tensor in state["learner"]["policy"].values()])


# -- a whole run ---------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("log.tensorboard=true") == 0
    run = "runs/cartpole-ppo-aps-s1"
    told, lines = summary(run), metrics(run)
    assert [name for name in REQUIRED if name not in told] == []
    assert told["env_steps"] == 2000 and told["updates"] == len(lines) and told["exit_reason"] == "completed"
    assert (told["env_id"], told["workers"], told["num_envs"], told["resumed_from"]) == ("CartPole-v1", 0, 8, None)
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["env_steps"] == 2000
    assert all(after["env_steps"] > before["env_steps"] for before, after in itertools.pairwise(lines))
    for name in ("weight_messages", "weight_bytes", "probe_bytes", "episodes", "rollout_bytes"):
        assert told[name] == lines[-1][name]
    assert told["eval_episodes"] == 2 and told["eval_return_mean"] >= 8
    names = {path.name for path in Path(run).iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "log.txt", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert load(Path(run, "config.yaml")).total_steps == 2000
    out = capsys.readouterr().out
    for part in (f"clusterenv-hpc plot {run}", f"run_dir={run} resume=true", "greedy return", str(Path(run).resolve())):
        assert part in out


def test_the_same_seed_gives_the_same_run_bit_by_bit() -> None:
    assert train("run_dir=a") == 0
    # Neither the clock nor what is looked at on the way enters the training.
    assert train("run_dir=b", "checkpoint.every_s=0", "log.every_s=0.001", "log.progress=lines") == 0
    assert train("run_dir=c", "seed=2") == 0
    assert metrics("a", clock=False) == metrics("b", clock=False)
    assert torch.equal(weights("a"), weights("b"))
    assert not torch.equal(weights("a"), weights("c"))
    assert summary("a")["eval_return_mean"] == summary("b")["eval_return_mean"]


def test_a_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run_dir=a", "total_steps=300") == 0
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    assert train("run_dir=a", "total_steps=300", "seed=2") == 2
    assert {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()} == before
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first run's opening line, and this refusal


def test_a_task_that_is_solved_ends_early_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("stop.at_return=12", "log.window=5", "run_dir=a", "total_steps=100000", "eval.episodes=5") == 0
    told = summary("a")
    assert told["exit_reason"] == "solved" and told["env_steps"] < 50_000
    assert told["return_mean"] >= 12 and told["eval_return_mean"] >= 12
    # What it says of going on does go on.
    assert "train run_dir=a resume=true stop.at_return=null\n" in capsys.readouterr().out
    goes_on = ["stop.at_return=null", f"total_steps={told['env_steps'] + 500}"]
    assert cli.main(["train", "run_dir=a", "resume=true", *goes_on]) == 0
    assert summary("a")["env_steps"] == told["env_steps"] + 500


def test_an_evaluation_that_a_signal_breaks_off_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import clusterenv_hpc.run.learner_run as module

    def interrupted(*args: Any, stop: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()

    monkeypatch.setattr(module, "evaluate", interrupted)
    assert train("run_dir=a") == 0  # the training itself is complete and saved
    assert "the evaluation was broken off; clusterenv-hpc eval a plays it again" in capsys.readouterr().out
    assert summary("a")["exit_reason"] == "completed" and "eval_return_mean" not in summary("a")


def test_a_return_that_greedy_episodes_do_not_confirm_ends_nothing() -> None:
    assert train("stop.at_return=501", "log.window=1", "run_dir=a") == 0  # no episode of CartPole reaches that
    assert summary("a")["exit_reason"] == "completed" and summary("a")["env_steps"] == 2000


# -- resume --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_every_step_once() -> None:
    assert train("run_dir=a", "total_steps=1500") == 0
    first = metrics("a")
    assert cli.main(["train", "run_dir=a", "resume=true", "total_steps=3000"]) == 0
    lines, told = metrics("a"), summary("a")
    assert lines[: len(first)] == first
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert told["env_steps"] == lines[-1]["env_steps"] == 3000
    assert told["resumed_from"] == f"update-{len(first):09d}.pt"
    assert told["episodes"] > first[-1]["episodes"] and told["wall_s"] > first[-1]["wall_s"]
    assert told["weight_messages"] > first[-1]["weight_messages"]
    assert lines[len(first)]["version"] == first[-1]["version"] + 1
    # The learning rate is on its way to 0 at the new end, not at the old.
    assert lines[len(first)]["learning_rate"] == pytest.approx(load(Path("a/config.yaml")).algo.learning_rate / 2)


def test_a_run_that_another_process_works_on_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run_dir=a", "total_steps=500") == 0
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    parent = os.getppid()
    other = dataclasses.replace(owner.this_process(), pid=parent, began=owner._began(parent))
    record = json.dumps(dataclasses.asdict(other))
    Path("a", owner.FILE).write_text(record)
    assert cli.main(["train", "run_dir=a", "resume=true", "total_steps=1000"]) == 2
    assert f"run_dir=a: process {parent} on" in capsys.readouterr().err
    Path("a", owner.FILE).unlink()

    def lose(self: CheckpointStore, state: Any, update: int) -> Path:
        Path("a", owner.FILE).write_text(record)
        raise owner.TakenOverError("gone")

    with monkeypatch.context() as losing:
        losing.setattr(CheckpointStore, "save", lose)
        assert cli.main(["train", "run_dir=a", "resume=true", "total_steps=1000"]) == 1
    assert Path("a", owner.FILE).read_text() == record
    for name in ("summary.json", "checkpoints"):
        assert all(path.read_bytes() == before[path] for path in before if name in str(path))


def test_two_resumes_of_one_checkpoint_are_bit_equal() -> None:
    assert train("run_dir=a", "total_steps=1000") == 0
    shutil.copytree("a", "b")
    for run in ("a", "b"):
        assert cli.main(["train", f"run_dir={run}", "resume=true", "total_steps=2000"]) == 0
    assert metrics("a", clock=False) == metrics("b", clock=False) and torch.equal(weights("a"), weights("b"))


def test_nothing_left_to_do_changes_nothing() -> None:
    assert train("run_dir=a") == 0
    before = metrics("a"), weights("a")
    assert cli.main(["train", "run_dir=a", "resume=true"]) == 0
    assert metrics("a") == before[0] and torch.equal(weights("a"), before[1])
    assert summary("a")["exit_reason"] == "completed"


def test_the_whole_state_of_the_learner_is_in_a_checkpoint() -> None:
    assert train("run_dir=a", "total_steps=1000") == 0
    state = read(CheckpointStore(Path("a/checkpoints"), 1).paths()[-1])
    optimizer = state["learner"]["optimizer"]["state"]
    assert optimizer and all({"exp_avg", "exp_avg_sq", "step"} <= set(one) for one in optimizer.values())
    assert {"generator", "policy"} <= set(state["learner"]) and state["random"]["torch"].numel() > 0


def test_a_resume_without_a_checkpoint_starts() -> None:
    assert train("run_dir=a", "resume=true") == 0
    assert summary("a")["resumed_from"] is None and summary("a")["env_steps"] == 2000


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run_dir=a", "checkpoint.every_s=0") == 0
    paths = CheckpointStore(Path("a/checkpoints"), 1).paths()
    paths[-1].write_bytes(paths[-1].read_bytes()[:-1000])
    capsys.readouterr()
    assert cli.main(["train", "run_dir=a", "resume=true"]) == 0
    told = capsys.readouterr().err
    assert paths[-1].name in told and "damaged" in told and f"{paths[-2].name}, the one before, is used" in told
    assert summary("a")["resumed_from"] == paths[-2].name and summary("a")["env_steps"] == 2000
    assert [line["update"] for line in metrics("a")] == list(range(1, summary("a")["updates"] + 1))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda state: state.clear(), "'learner' is missing"),
        (lambda state: state["learner"].pop("optimizer"), "'optimizer' is missing"),
        (lambda state: state["learner"]["policy"].popitem(), "does not fit this run: Error"),
        (lambda state: state["learner"].update(policy={k: v[..., :1] for k, v in state["learner"]["policy"].items()}),
         "does not fit this run: Error"),
        (lambda state: state["tally"].pop("lengths"), "'lengths' is missing"),
        (lambda state: state.update(random=3), "does not fit this run"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_lacks_something_is_stepped_over(
    spoil: Callable[[Any], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run_dir=a", "checkpoint.every_s=0", "total_steps=1000") == 0
    paths = CheckpointStore(Path("a/checkpoints"), 1).paths()
    state = read(paths[-1])
    spoil(state)
    torch.save(state, paths[-1])
    capsys.readouterr()
    assert cli.main(["eval", "a", "episodes=1"]) == 0
    assert cli.main(["train", "run_dir=a", "resume=true"]) == 0
    told = capsys.readouterr().err
    assert f"{paths[-1].name}: damaged: " in told and said in told
    assert summary("a")["resumed_from"] == paths[-2].name and summary("a")["env_steps"] == 1000
    returns = read(CheckpointStore(Path("a/checkpoints"), 1).paths()[-1])["tally"]["returns"]
    assert len(returns) == min(100, summary("a")["episodes"]), "none is counted twice"


def test_only_damaged_checkpoints_are_one_line_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run_dir=a") == 0
    for path in CheckpointStore(Path("a/checkpoints"), 1).paths():
        path.write_bytes(b"x")
    metrics, told = Path("a/metrics.jsonl").read_bytes(), json.loads(Path("a/summary.json").read_text())
    capsys.readouterr()
    assert cli.main(["train", "run_dir=a", "resume=true"]) == 1
    assert "every checkpoint in a/checkpoints is damaged" in capsys.readouterr().err
    assert Path("a/metrics.jsonl").read_bytes() == metrics
    now = json.loads(Path("a/summary.json").read_text())
    assert now.pop("exit_reason").startswith("failed: ") and told.pop("exit_reason") == "completed"
    assert now == told, "the numbers stand"


def test_random_states_are_put_back() -> None:
    import random

    import numpy as np

    saved = random_states()

    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))

    first = draw()
    draw()
    set_random_states(saved)
    assert draw() == first


def test_seeds_differ_by_purpose_run_and_place() -> None:
    seeds = [seed for run in (0, 1, 2**32 - 1) for update in (0, 1) for seed in seeds_of(run, update)[2:]]
    seeds += [seed for run in (0, 1) for seed in seeds_of(run, 0)[:2]]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    assert seeds_of(1, 0)[:2] == seeds_of(1, 7)[:2]


# -- signals -------------------------------------------------------------------------------------------------------


def when_it_trains(run: str, number: int) -> threading.Thread:
    """Sends ``number`` to this process once ``run`` has made an update."""

    def wait_and_send() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            path = Path(run, "metrics.jsonl")
            if path.exists() and path.stat().st_size:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR2, 0)]
)
def test_a_signal_ends_the_update_saves_and_leaves(number: signal.Signals, code: int) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    thread = when_it_trains("a", number)
    assert train("run_dir=a", "total_steps=10000000") == code
    thread.join()
    told = summary("a")
    assert told["exit_reason"] == number.name and 0 < told["env_steps"] < 10_000_000
    newest = CheckpointStore(Path("a/checkpoints"), 1).paths()[-1]
    assert newest.name == f"update-{told['updates']:09d}.pt" and len(metrics("a")) == told["updates"]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)] == handlers
    assert cli.main(["train", "run_dir=a", "resume=true", f"total_steps={told['env_steps'] + 500}"]) == 0
    assert summary("a")["env_steps"] == told["env_steps"] + 500


def test_slurm_may_end_a_job_while_it_is_asked_to_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSlurm(tmp_path / "bin", monkeypatch)
    fake.job("RUNNING")
    scontrol = fake.folder / "scontrol"
    ending = f'case "$1" in requeue) kill -TERM {os.getpid()}; /bin/sleep 0.3 ;; esac\n'
    scontrol.write_text(scontrol.read_text().replace("printf", ending + "printf", 1))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 3600)))
    thread = when_it_trains("a", signal.SIGUSR2)
    assert train("run_dir=a", "total_steps=10000000") == 0
    thread.join()
    assert fake.calls[-1] == "scontrol requeue 7"
    assert "stopped by SIGUSR2; all is saved; job 7 is back in the queue" in Path("a", "log.txt").read_text()


def test_the_signal_slurm_sends_is_a_setting() -> None:
    thread = when_it_trains("a", signal.SIGUSR1)
    assert train("run_dir=a", "total_steps=10000000", "slurm.signal=USR1") == 0
    thread.join()
    assert summary("a")["exit_reason"] == "SIGUSR1"


def test_before_the_training_a_signal_acts_at_once_and_within_it_waits() -> None:
    with StopSignals().listening() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # at once: the same press of Ctrl-C, perhaps
            assert stop.reason == "SIGTERM"
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert caught.value.exit_code == 143
    with StopSignals().listening() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_hangups_that_nohup_has_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals().listening() as stop, stop.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = CheckpointStore.save

    def save(self: CheckpointStore, state: Any, update: int) -> Path:
        if update > 2:
            raise CheckpointError(f"{self.directory}: cannot write the checkpoint: No space left on device")
        return real(self, state, update)

    with monkeypatch.context() as full:
        full.setattr(CheckpointStore, "save", save)
        assert train("run_dir=a", "checkpoint.every_s=0") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("clusterenv-hpc: ") and "No space left" in line
    assert [path.name for path in CheckpointStore(Path("a/checkpoints"), 1).paths()][-1] == "update-000000002.pt"
    assert "No space left" in summary("a")["exit_reason"]
    assert cli.main(["train", "run_dir=a", "resume=true"]) == 0 and summary("a")["env_steps"] == 2000


def test_learning_that_diverges_is_one_line_and_keeps_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["algo.learning_rate=1e30", "algo.max_grad_norm=null", "run_dir=a", "checkpoint.every_s=0"]
    assert train(*words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "finite" in lines[1] and "Traceback" not in lines[1]
    assert summary("a")["exit_reason"].startswith("failed: ")
    assert "Traceback" in Path("a/log.txt").read_text()  # where somebody may want to look


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.id=toy_envs:Faulty", "env.kwargs={where: infinite, after: 40}", "env.backend=sync"],
         r"environment \d+ \(rank \d\) gave an infinite observation in step \d+ of a rollout.* bound it"),
        (["algo.reward_scale=1e300"], r"rewards times reward_scale=1e\+300, .* hold NaN or infinity"),
        (["algo.num_steps=2000000000"], r"^clusterenv-hpc: algo\.num_steps=2000000000: .* allowed: less than"),
    ],
)  # fmt: skip
def test_what_makes_learning_impossible_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*words, "run_dir=a") in (1, 2)
    assert re.search(said, capsys.readouterr().err.splitlines()[-1])


def test_an_environment_that_cannot_be_closed_does_not_keep_a_run_from_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = ["env.id=toy_envs:Faulty", "env.kwargs={where: close}", "env.backend=sync"]
    assert train(*env, "run_dir=a", "total_steps=500") == 0
    assert "OSError: cannot close; all steps are made and saved" in capsys.readouterr().err
    assert summary("a")["exit_reason"] == "completed" and summary("a")["eval_episodes"] == 2


def test_an_environment_that_exits_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    env = ["env.id=toy_envs:Faulty", "env.backend=sync"]
    assert train(*env, "env.kwargs={where: exit}", "run_dir=a") == 1
    assert train(*env, "env.kwargs={where: exit_at_once}", "run_dir=b") == 1
    told = capsys.readouterr().err
    assert "failed in environment 0: SystemExit: 3" in told
    assert "environment 0 (toy_envs:Faulty) could not be built: SystemExit: 4" in told


def test_an_environment_that_cannot_be_built_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("env.kwargs.no_such_argument=1") == 1
    line = capsys.readouterr().err.splitlines()
    assert len(line) == 1 and "CartPole-v1" in line[0] and "no_such_argument" in line[0]
    assert list(Path("runs").iterdir()) == []
