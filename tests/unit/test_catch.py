"""The game that comes with the package: its rules, and that both forms of it are one game."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from clusterenv_hpc.envs.catch import CatchEnv, CatchVectorEnv


def towards(board: np.ndarray) -> int:
    """The action that moves the paddle towards the ball."""
    ball, paddle = int(board[:-1].max(0).argmax()), int(board[-1].argmax())
    return 1 + int(np.sign(ball - paddle))


def test_it_is_a_gymnasium_environment() -> None:
    env = gym.make("clusterenv_hpc.envs.catch:Catch-v0", rows=5, columns=4)
    check_env(env.unwrapped)
    assert env.observation_space.shape == (5, 4)


@pytest.mark.parametrize(("move", "reward"), [(1, 1.0), (-1, -1.0)])
def test_whoever_goes_to_the_ball_catches_it_and_whoever_flees_does_not(move: int, reward: float) -> None:
    env = CatchEnv(rows=10, columns=9)
    for seed in range(20):
        board, _ = env.reset(seed=seed)
        rewards, over = [], False
        while not over:
            assert (board == 255).sum() == 2 and board.dtype == np.uint8
            chosen = towards(board)
            if move < 0:
                chosen = 2 - chosen if chosen != 1 else 0
            board, got, over, truncated, _ = env.step(chosen)
            rewards.append(got)
            assert not truncated
        assert rewards == [0.0] * 8 + [reward]


def test_many_games_at_once_are_the_same_game() -> None:
    """Row by row, the vectorised rules give what the single game gives for the same start and actions."""
    games = CatchVectorEnv(7, rows=6, columns=5)
    assert games.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    boards, _ = games.reset(seed=3)
    singles = [CatchEnv(rows=6, columns=5) for _ in range(7)]
    actions = np.random.default_rng(0)

    def align(which: np.ndarray) -> None:
        for i in np.flatnonzero(which):
            singles[i].reset()
            singles[i]._games._ball[0] = games._ball[i]

    align(np.ones(7, bool))
    ended = np.zeros(7, bool)
    for _ in range(40):
        chosen = actions.integers(0, 3, 7)
        boards, rewards, terminated, truncated, _ = games.step(chosen)
        align(ended)
        for i, single in enumerate(singles):
            if ended[i]:
                assert rewards[i] == 0 and not terminated[i] and boards[i][0].max() == 255
                continue
            board, reward, over, _, _ = single.step(chosen[i])
            np.testing.assert_array_equal(board, boards[i])
            assert (reward, over) == (rewards[i], terminated[i])
        assert not truncated.any()
        ended = terminated


def test_some_can_be_reset_alone() -> None:
    games = CatchVectorEnv(3)
    games.reset(seed=0)
    games.step(np.ones(3, int))
    boards, _ = games.reset(options={"reset_mask": np.array([True, False, True])})
    assert [int(board.max(1).argmax()) for board in boards] == [0, 1, 0]


def test_balls_fall_everywhere_and_seeds_repeat() -> None:
    games = CatchVectorEnv(1000, columns=6)
    balls = [games.reset(seed=5)[0][:, 0].argmax(1) for _ in range(2)]
    np.testing.assert_array_equal(*balls)
    counts = np.bincount(balls[0], minlength=6)
    assert counts.min() > 100  # 167 expected, deviation 12


def test_it_can_be_drawn() -> None:
    env = gym.make("Catch-v0", render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == (160, 160, 3)


def test_a_board_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 2 rows and 2 columns, got rows=1, columns=10"):
        CatchVectorEnv(1, rows=1)
