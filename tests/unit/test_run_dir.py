"""Where a run lies, how its name is claimed, and how it is found again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from clusterenv_hpc.run.config import ConfigError, compose
from clusterenv_hpc.run.run_dir import RunDir, claim, find, run_name


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(run: RunDir) -> RunDir:
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text("seed: 1\n")
    return run


def test_names_say_what_a_run_is() -> None:
    assert run_name(compose(["env=lunarlander"])) == "lunarlander-ppo-aps-s1"
    assert run_name(compose(["env=cartpole", "sync=every_k", "seed=3"])) == "cartpole-ppo-every_k-s3"
    assert run_name(compose(["env.id=Pendulum-v1"])) == "pendulum_v1-ppo-aps-s1"
    assert run_name(compose(["env.id=gymnasium.envs.classic_control:Acrobot-v1"])) == "acrobot_v1-ppo-aps-s1"
    assert run_name(compose(["name=mine"])) == "mine"


def test_a_name_that_is_taken_gets_a_number() -> None:
    config = compose(["env=cartpole"])
    claimed = [begin(claim(config)).path for _ in range(3)]
    assert claimed == [Path("runs", f"cartpole-ppo-aps-s1{end}") for end in ("", "-2", "-3")]
    assert claim(compose(["env=cartpole", "seed=2"])).path == Path("runs/cartpole-ppo-aps-s2")


def test_starts_at_the_same_moment_get_names_of_their_own() -> None:
    config, claimed = compose(["env=cartpole"]), []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        claimed.append(claim(config).path)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == 8


def test_a_claimed_name_is_given_back_only_while_nothing_is_in_it() -> None:
    config = compose(["env=cartpole"])
    first = claim(config)
    first.release_if_empty()
    second = claim(config)
    assert second.path == first.path
    begin(second).release_if_empty()
    assert second.holds_a_run()


def test_a_directory_of_ones_own(here: Path) -> None:
    run = claim(compose([f"run_dir={here}/deep/er"]))
    assert run.path == here / "deep/er" and run.path.is_dir() and not run.holds_a_run()
    assert claim(compose([f"run_dir={here}/deep/er"])).path == run.path  # still empty


def test_the_home_directory_may_be_written_short(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    run = begin(claim(compose(["run_dir='~/mine'"])))
    assert run.path == here / "mine" and find("~/mine").path == run.path


def test_a_run_is_never_overwritten(here: Path) -> None:
    run = begin(RunDir(here / "mine"))
    run.metrics.write_text("precious\n")
    with pytest.raises(ConfigError, match=r"run_dir=.*mine: holds a run.*resume=true"):
        claim(compose([f"run_dir={run.path}"]))
    assert run.metrics.read_text() == "precious\n" and sorted(os.listdir(run.path)) == ["config.yaml", "metrics.jsonl"]
    assert claim(compose([f"run_dir={run.path}", "resume=true"])).path == run.path


def test_resume_finds_the_run_by_its_name_and_starts_it_where_there_is_none() -> None:
    config = compose(["env=cartpole", "resume=true"])
    assert claim(config).path == Path("runs/cartpole-ppo-aps-s1")
    begin(claim(config))
    assert claim(config).path == Path("runs/cartpole-ppo-aps-s1")


def test_a_place_that_cannot_be_written_is_one_line(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir=.*file/run: cannot be made: "):
        claim(compose([f"run_dir={here}/file/run"]))
    with pytest.raises(ConfigError, match=r"^run_dir=.*file: cannot be made: "):
        claim(compose([f"run_dir={here}/file"]))
    (here / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir=runs/.*: cannot be made: "):
        claim(compose(["env=cartpole"]))


def test_a_directory_without_leave_to_write(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"cannot be written to"):
        claim(compose([f"run_dir={here}/mine"]))


def test_runs_are_found_by_path_name_start_and_age(here: Path) -> None:
    for name, age in (("cartpole-s1", 30), ("cartpole-s1-2", 10), ("lunar-s1", 20)):
        run = begin(RunDir(Path("runs", name)))
        os.utime(run.config, (1e9 - age, 1e9 - age))
    (here / "runs/empty").mkdir()
    begin(RunDir(here / "elsewhere"))
    assert find("runs/lunar-s1").path == Path("runs/lunar-s1")
    assert find(str(here / "elsewhere")).path == here / "elsewhere"
    assert find("cartpole-s1").path == Path("runs/cartpole-s1")  # whole names come first
    assert find("lunar").path == Path("runs/lunar-s1")
    assert find("latest").path == Path("runs/cartpole-s1-2")
    with pytest.raises(ConfigError, match=r"^cart: several runs begin so: cartpole-s1, cartpole-s1-2$"):
        find("cart")
    with pytest.raises(ConfigError, match=r"^nothing: no such run.*known: cartpole-s1, cartpole-s1-2, lunar-s1$"):
        find("nothing")
    with pytest.raises(ConfigError, match=r"holds no run"):
        find("runs/empty")
    begin(RunDir(Path("runs/sweep/0-seed-1")))
    begin(RunDir(Path("runs/sweep/0-seed-10")))
    assert find("0-seed-1").path == Path("runs/sweep/0-seed-1")
    with pytest.raises(ConfigError, match=r"several runs begin so: sweep/0-seed-1, sweep/0-seed-10$"):
        find("0-s")


def test_nothing_to_find() -> None:
    for text in ("latest", "x"):
        with pytest.raises(ConfigError, match=rf"^{text}: no such run"):
            find(text)
