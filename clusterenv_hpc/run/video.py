"""An episode as a film: a GIF (pillow) or an MP4 (the extra ``video``)."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from clusterenv_hpc.envs.single import single_maker
from clusterenv_hpc.policies import as_tensors, distribution_of
from clusterenv_hpc.run.build import env_source
from clusterenv_hpc.run.config import ConfigError
from clusterenv_hpc.run.schema import EnvConfig, EvalConfig

KINDS = {".gif": ("PIL", "pip install pillow"), ".mp4": ("imageio_ffmpeg", "pip install 'clusterenv_hpc[video]'")}
"""Endings of a film's name, with the module that writes it and how to get that."""

MOST_FRAMES = 1500
WIDEST = 480
"""Pixels; a GIF's frames are kept in memory until the end, and larger pictures are made smaller by a whole number."""

SMALLEST = 160
"""Pixels; smaller pictures are made larger by a whole number."""


@dataclass(frozen=True)
class Film:
    """What was recorded: the episode's undiscounted return, its steps, and whether it was cut before its end."""

    path: Path
    episode_return: float
    steps: int
    cut: bool

    def describe(self, seed: int) -> str:
        """One sentence."""
        cut = ", cut before its end" if self.cut else ""
        return f"{self.path}: the episode of seed {seed}, return {self.episode_return:.1f} in {self.steps} steps{cut}"


def check_path(path: Path) -> None:
    """Raises ConfigError where no film can be written to ``path``."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"video={path}: allowed: a name that ends with {' or '.join(KINDS)}")
    if importlib.util.find_spec(kind[0]) is None:
        raise ConfigError(f"video={path}: needs the package {kind[0]}; {kind[1]}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"video={path}: there is no folder {path.resolve().parent}")


def record(policy: torch.nn.Module, env: EnvConfig, settings: EvalConfig, path: Path) -> Film:
    """Play the episode of ``settings.seed``, greedy unless ``settings.sampled``, and write what it looks like.

    An environment that cannot render, but is seen as an image, is shown as the policy sees it.

    Raises:
        ConfigError: neither is possible, or nothing that writes such a file is installed.
    """
    check_path(path)
    one = _drawable(env)
    try:
        show = Episode(policy, one, settings)
        rate = float(one.metadata.get("render_fps") or 30)
        aside = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            (_write_gif if path.suffix.lower() == ".gif" else _write_mp4)(aside, _frames(show, env), rate)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    finally:
        one.close()
    return Film(path, show.total, show.steps, not show.over)


class Episode:
    """One episode, step by step."""

    def __init__(self, policy: torch.nn.Module, env: gymnasium.Env[Any, Any], settings: EvalConfig) -> None:
        self.policy, self.env, self.settings = policy, env, settings
        self.device = next(policy.parameters()).device
        self.distribution = distribution_of(policy, env.action_space)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.observation, _ = env.reset(seed=settings.seed)
        self.total, self.steps, self.over = 0.0, 0, False

    def step(self) -> None:
        """Choose, and act."""
        space = self.env.observation_space
        into: Any = create_empty_array(space, 1)
        batch = concatenate(space, [self.observation], into)
        with torch.inference_mode():
            params = self.policy(as_tensors(batch, self.device)).cpu()
            noise = self.distribution.noise((1,), self.generator) if self.settings.sampled else None
            drawn = self.distribution.mode(params) if noise is None else self.distribution.sample(params, noise)
        action = next(iter(self.distribution.env_actions(drawn.numpy())))
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        self.total, self.steps, self.over = self.total + float(reward), self.steps + 1, bool(terminated or truncated)


def _drawable(env: EnvConfig) -> gymnasium.Env[Any, Any]:
    """The environment, set to render pictures if it can."""
    source = env_source(env, evaluation=True)
    plain = single_maker(source)()
    modes = plain.metadata.get("render_modes") or []
    if "rgb_array" in modes:
        plain.close()
        drawing = dataclasses.replace(source, kwargs={**source.kwargs, "render_mode": "rgb_array"})
        return single_maker(drawing)()
    if _picture(np.zeros(plain.observation_space.shape or (), plain.observation_space.dtype)) is not None:
        return plain
    plain.close()
    raise ConfigError(
        f"video: {env.id} draws no pictures (its render modes: {', '.join(map(str, modes)) or 'none'}; needed: "
        "rgb_array), and its observations are no images"
    )


def _frames(show: Episode, env: EnvConfig) -> Iterator[NDArray[np.uint8]]:
    limit = min(show.settings.max_steps, MOST_FRAMES - 1)
    yield _frame(show, env)
    while not show.over and show.steps < limit:
        show.step()
        yield _frame(show, env)


def _frame(show: Episode, env: EnvConfig) -> NDArray[np.uint8]:
    """``[H, W, 3]`` of a size that can be looked at, both even."""
    if show.env.render_mode == "rgb_array":
        try:
            picture: Any = show.env.render()
        except Exception as error:
            hint = " (without a screen: MUJOCO_GL=egl or osmesa)" if "mujoco" in str(show.env.spec) else ""
            raise ConfigError(f"video: {env.id} cannot be drawn here: {type(error).__name__}: {error}{hint}") from error
    else:
        picture = show.observation
    image = _picture(np.asarray(picture))
    if image is None:
        raise ConfigError(f"video: {env.id} drew something of shape {np.shape(picture)}; expected a picture [H, W, 3]")
    wide = max(image.shape[:2])
    image = image[:: -(-wide // WIDEST), :: -(-wide // WIDEST)]
    if (factor := -(-SMALLEST // wide)) > 1:
        image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.ascontiguousarray(image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2])


def _picture(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """``[H, W, 3]`` of a picture in any of the usual forms; of stacked ones the newest.  None: it is no picture."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or min(array.shape[:2]) < 1:
        return None
    if array.ndim == 3:
        if array.shape[2] in (3, 4) and array.shape[2] <= array.shape[0]:
            return array[..., :3]
        array = array[..., -1] if array.shape[2] <= array.shape[0] else array[-1]
    return np.repeat(array[..., None], 3, axis=2)


def _write_gif(path: Path, frames: Iterator[NDArray[np.uint8]], rate: float) -> None:
    from PIL import Image

    pictures = [Image.fromarray(frame).quantize(colors=128) for frame in frames]
    duration = max(20, round(1000 / rate))  # ms; viewers show anything shorter far too slowly
    first, *rest = pictures
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=duration, loop=0)


def _write_mp4(path: Path, frames: Iterator[NDArray[np.uint8]], rate: float) -> None:
    import imageio_ffmpeg

    first = next(frames)
    size = (first.shape[1], first.shape[0])
    writer = imageio_ffmpeg.write_frames(
        str(path), size, fps=rate, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    try:
        writer.send(first)
        for frame in frames:
            writer.send(frame)
    finally:
        writer.close()
