"""Films of episodes: what they show, and what cannot be filmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image
from toy_policy import Linear

from clusterenv_hpc import cli
from clusterenv_hpc.run import video
from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.schema import EnvConfig, EvalConfig
from clusterenv_hpc.run.video import record


class Bars(gym.Env[Any, Any]):
    """Draws step k with a bar of brightness 10 k; ends after ``length`` steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 7, render_mode: str | None = None, broken: bool = False) -> None:
        self.length, self.render_mode, self.broken = length, render_mode, broken

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return np.zeros(2, np.float32), 1.5, self.time == self.length, False, {}

    def render(self) -> Any:
        if self.broken:
            raise OSError("no display")
        return np.full((90, 201, 3), 10 * self.time, np.uint8)


class Words(Bars):
    """Draws nothing."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012


class Seen(Words):
    """Draws nothing, but is seen as four stacked images; the newest is as bright as the step."""

    observation_space = gym.spaces.Box(0, 255, (4, 20, 20), np.uint8)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return np.zeros((4, 20, 20), np.uint8), {}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        stack = np.zeros((4, 20, 20), np.uint8)
        stack[-1] = 10 * self.time
        return (stack, *rest)


def policy(env: type[Bars] = Bars) -> Linear:
    return Linear(env.observation_space, env.action_space)


def config(name: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(id=f"{__name__}:{name}", kwargs=kwargs)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def brightness(path: Path) -> list[int]:
    with Image.open(path) as film:
        shades = []
        for k in range(getattr(film, "n_frames", 1)):
            film.seek(k)
            shades.append(int(np.asarray(film.convert("L")).mean().round()))
        return shades


def test_a_gif_shows_every_state_once(tmp_path: Path) -> None:
    film = record(policy(), config("Bars"), EvalConfig(seed=5), tmp_path / "bars.gif")
    assert brightness(tmp_path / "bars.gif") == [10 * k for k in range(8)]
    with Image.open(tmp_path / "bars.gif") as picture:
        assert picture.size == (200, 90) and picture.info["duration"] == 100
    assert (film.episode_return, film.steps, film.cut) == (10.5, 7, False)
    assert film.describe(5) == f"{tmp_path / 'bars.gif'}: the episode of seed 5, return 10.5 in 7 steps"
    assert [path.name for path in tmp_path.iterdir()] == ["bars.gif"]


def test_what_cannot_draw_is_shown_as_the_policy_sees_it(tmp_path: Path) -> None:
    record(policy(Seen), config("Seen"), EvalConfig(), tmp_path / "seen.gif")
    assert brightness(tmp_path / "seen.gif") == [10 * k for k in range(8)]
    with Image.open(tmp_path / "seen.gif") as picture:
        assert picture.size == (160, 160), "made larger"


def test_an_episode_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = record(policy(), config("Bars", length=10**9), EvalConfig(max_steps=5), tmp_path / "a.gif")
    assert film.cut and film.steps == 5 and "cut before its end" in film.describe(1)
    monkeypatch.setattr(video, "MOST_FRAMES", 4)
    film = record(policy(), config("Bars", length=10**9), EvalConfig(), tmp_path / "a.gif")
    assert film.steps == 3 and len(brightness(tmp_path / "a.gif")) == 4


@pytest.mark.needs("video")
def test_an_mp4(tmp_path: Path) -> None:
    import imageio_ffmpeg

    record(policy(), config("Bars"), EvalConfig(), tmp_path / "bars.mp4")
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "bars.mp4"))
    assert frames == 8 and seconds == pytest.approx(0.8)
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "bars.mp4"))
    assert next(reader)["size"] == (200, 90)
    shades = [np.frombuffer(frame, np.uint8).mean() for frame in reader]
    np.testing.assert_allclose(shades, [10 * k for k in range(8)], atol=3)


@pytest.mark.parametrize(
    ("env", "name", "part"),
    [
        (config("Words"), "a.gif", "Words draws no pictures (its render modes: ansi; needed: rgb_array), and its obs"),
        (config("Bars", broken=True), "a.gif", "Bars cannot be drawn here: OSError: no display"),
        (config("Bars"), "a.avi", "allowed: a name that ends with .gif or .mp4"),
        (config("Bars"), "nowhere/a.gif", "there is no folder"),
    ],
)
def test_what_cannot_be_filmed(env: EnvConfig, name: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        record(policy(), env, EvalConfig(), tmp_path / name)
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package imageio_ffmpeg; pip install 'clusterenv_hpc\[video\]'"):
        record(policy(), config("Bars"), EvalConfig(), tmp_path / "a.mp4")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = "env=catch workers=0 total_steps=500 log.progress=none log.tensorboard=false eval.episodes=0 run_dir=run"
    assert cli.main(["train", *words.split()]) == 0
    assert cli.main(["eval", "run", "episodes=2", "video=catch.gif"]) == 0
    said = capsys.readouterr().out
    assert "over 2 episodes" in said and "catch.gif: the episode of seed 1000000, return" in said
    assert len(brightness(tmp_path / "catch.gif")) == 10
    assert cli.main(["eval", "run", "video=catch.png"]) == 2
    assert "allowed: a name that ends with .gif or .mp4" in capsys.readouterr().err
