"""Collecting rollouts on a worker: environments stepped with the local policy, straight into a message.

The inner loop is the hot path of the whole toolkit.  Everything that does not depend on the step is done
before or after it, over the whole rollout at once: noise is drawn in bulk, validity, episodes and checks are
vectorised, and every row that is written was sliced beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from .comm.channel import Handle
from .comm.messages import Buffer, Layout, Leaf, RolloutShape, pick
from .envs.build import SyncEnvs, autoreset_mode_of
from .envs.spaces import join, leaves, map_tree, split
from .policies.distributions import Distribution

POLL_EVERY_S = 0.02
"""How often a long rollout looks up from its work."""


class NotFiniteError(ValueError):
    """A number that is not one, in what an environment or the policy gave; ``row`` is the environment's row here."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class Slot:
    """One rollout's message, with every row the inner loop writes sliced beforehand."""

    def __init__(self, shape: RolloutShape, layout: Layout, space: Any) -> None:
        self.layout = layout
        self.buffer: Buffer = layout.allocate()
        self.arrays = layout.views(self.buffer)
        self.handle: Handle | None = None
        count = len(shape.observation_leaves)
        blocks = [self.arrays[f"observation{i}"] for i in range(count)]
        self.observations: list[list[NDArray[Any]]] = [list(row) for row in zip(*blocks, strict=True)]
        self.trees: list[Any] = [map_tree(torch.from_numpy, join(space, row)) for row in self.observations]
        self.next_blocks = [self.arrays[f"next_observation{i}"] for i in range(count)] if shape.separate_next else None
        # Successors shifted by one live in the same block, so its last row only exists there.
        self.actions, self.params = list(self.arrays["actions"]), list(self.arrays["behaviour_params"])
        self.all_params = torch.from_numpy(self.arrays["behaviour_params"])
        self.rewards = list(self.arrays["rewards"])
        self.terminated, self.truncated = list(self.arrays["terminated"]), list(self.arrays["truncated"])
        self.steps = range(shape.num_steps)
        after = self.observations[1:] if not shape.separate_next else self.observations
        flags = (self.rewards, self.terminated, self.truncated)
        self.rows = list(zip(self.trees[: len(after)], self.actions, after, *flags, strict=True))
        """What step t reads and writes, unpacked at once: an index for each would cost more than the copies."""


class Collector:
    """The environments of one worker and where they are: what steps and rollouts both continue from.

    Args:
        envs: the vector environment.
        policy: the local policy, ``observations -> [N, P]``; None if only ``step`` is used.
        distribution: of the policy's actions.
        seed: of the action noise until the first seeded reset.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        policy: torch.nn.Module | None,
        distribution: Distribution | None,
        seed: int,
    ) -> None:
        self.envs, self.policy, self.distribution = envs, policy, distribution
        self.mode = autoreset_mode_of(envs)
        self.space = envs.single_observation_space
        self.leaves = leaves(self.space)
        self.flat = len(self.leaves) == 1 and not self.leaves[0].path
        n = envs.num_envs
        self.observation: list[NDArray[Any]] = []
        self.done = np.zeros(n, dtype=bool)  # ended in the last step, so that the next one only resets
        self.generator = torch.Generator().manual_seed(seed)
        self.probe_random = np.random.default_rng(seed)
        self.carry_returns, self.carry_lengths = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.version = -1
        self._reuses_output = policy is not None and _reuses_output(policy, self.space)
        self.seconds_env = self.seconds_policy = 0.0

    @property
    def started(self) -> bool:
        """Whether the environments were ever reset."""
        return bool(self.observation)

    def rollout_shape(self, num_steps: int, num_probes: int) -> RolloutShape:
        """What fixes the layout of a rollout of ``num_steps`` here."""
        assert self.distribution is not None
        return RolloutShape(
            observation_leaves=self.leaves,
            action_leaf=Leaf("", self.distribution.action_dtype, self.distribution.action_shape),
            num_params=self.distribution.num_params,
            num_steps=num_steps,
            num_envs=self.envs.num_envs,
            num_probes=min(num_probes, num_steps * self.envs.num_envs),
            separate_next=self.mode is not AutoresetMode.NEXT_STEP,
        )

    def seed_noise(self, seed: int) -> None:
        """Fix the action noise from here on."""
        low, high = np.random.SeedSequence([seed & (2**64 - 1), 0x616374]).generate_state(2, np.uint64)
        self.generator.manual_seed(int(low) & (2**63 - 1))
        self.probe_random = np.random.default_rng(int(high))

    # -- plain Gymnasium ---------------------------------------------------------------------------------------------

    def reset(self, seed: Any, options: dict[str, Any] | None) -> dict[str, Any]:
        """Reset; the new observation is ``self.observation``.  Returns the vector environment's infos."""
        mask = None if options is None else options.get("reset_mask")
        observation, infos = self.envs.reset(seed=seed, options=options)
        self._took(observation)
        if mask is None:
            self.done[:] = False
            self.carry_returns[:] = 0.0
            self.carry_lengths[:] = 0
        else:
            self.done[mask] = False
            self.carry_returns[mask] = 0.0
            self.carry_lengths[mask] = 0
        return infos

    def step(self, actions: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One step; the new observation is ``self.observation``."""
        observation, rewards, terminated, truncated, infos = self.envs.step(actions)
        self._took(observation)
        began = self.done if self.mode is AutoresetMode.NEXT_STEP else np.zeros_like(self.done)
        done = np.logical_or(terminated, truncated)
        self.carry_returns[:] = np.where(done | began, 0.0, self.carry_returns + rewards)
        self.carry_lengths[:] = np.where(done | began, 0, self.carry_lengths + 1)
        self.done = done
        return rewards, terminated, truncated, infos

    def _took(self, observation: Any) -> None:
        self.observation = [np.array(leaf) for leaf in split(self.space, observation)]

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def collect(self, slot: Slot, num_steps: int, poll: Callable[[], None]) -> None:
        """Fill ``slot`` with ``num_steps`` steps of every environment, chosen by the local policy.

        Args:
            poll: called every ``POLL_EVERY_S`` seconds between steps; may load weights and change ``version``.

        Raises:
            NotFiniteError: an observation, a reward or a distribution parameter is not a number.
        """
        if isinstance(self.envs, SyncEnvs):
            self.envs.begin_rollout()
        try:
            if self.mode is AutoresetMode.NEXT_STEP:
                self._collect_next_step(slot, num_steps, poll)
            else:
                self._collect_same_step(slot, num_steps, poll)
        except NotFiniteError:
            raise
        except Exception:
            self._check_observations(slot)  # an action drawn from NaN is refused by the environment first
            raise
        finally:
            if isinstance(self.envs, SyncEnvs):
                self.envs.end_rollout()

    def _collect_next_step(self, slot: Slot, num_steps: int, poll: Callable[[], None]) -> None:
        policy, distribution, envs = self.policy, self.distribution, self.envs
        clock, copyto = time.perf_counter, np.copyto
        assert policy is not None and distribution is not None
        sample, step, env_actions, flat = distribution.sample, envs.step, distribution.env_actions, self.flat
        observations, versions = slot.observations, slot.arrays["versions"]
        reset_only = self.done.copy()
        spent_env = spent_policy = 0.0
        self._place(observations[0], self.observation)
        versions[:] = self.version
        kept: list[Tensor] = []
        reuses = self._reuses_output
        with torch.inference_mode():
            noise = distribution.noise((num_steps, envs.num_envs), self.generator).unbind(0)
            next_poll = clock() + POLL_EVERY_S
            stepped = clock()
            for t, row, noise_row in zip(slot.steps, slot.rows, noise, strict=True):
                tree, action_row, after, reward_row, terminated_row, truncated_row = row
                params = policy(tree)
                actions = sample(params, noise_row).numpy()
                if reuses:
                    params = params.clone()
                kept.append(params)
                copyto(action_row, actions)
                chosen = clock()
                observation, reward, terminated, truncated, _ = step(env_actions(actions))
                spent_policy += chosen - stepped
                stepped = clock()
                spent_env += stepped - chosen
                if flat:
                    copyto(after[0], observation)
                else:
                    self._place(after, split(self.space, observation))
                copyto(reward_row, reward)
                copyto(terminated_row, terminated)
                copyto(truncated_row, truncated)
                if stepped > next_poll:
                    poll()
                    versions[t + 1 :] = self.version
                    next_poll = clock() + POLL_EVERY_S
            torch.stack(kept, out=slot.all_params)  # in one call: a copy each step would cost five times as much
        self.observation = [leaf.copy() for leaf in observations[num_steps]]
        self._finish(slot, reset_only)
        self.seconds_env, self.seconds_policy = spent_env, spent_policy

    def _collect_same_step(self, slot: Slot, num_steps: int, poll: Callable[[], None]) -> None:
        """For environments that reset within the step that ends an episode, or that must be told to."""
        policy, distribution, clock = self.policy, self.distribution, time.perf_counter
        assert policy is not None and distribution is not None and slot.next_blocks is not None
        spent_env = spent_policy = 0.0
        if self.mode is AutoresetMode.DISABLED and self.done.any():
            self._reset_done(self.done)
        next_poll = clock() + POLL_EVERY_S
        with torch.inference_mode():
            noise = distribution.noise((num_steps, self.envs.num_envs), self.generator).unbind(0)
            for t in range(num_steps):
                began = clock()
                self._place(slot.observations[t], self.observation)
                params = policy(slot.trees[t])
                actions = distribution.sample(params, noise[t]).numpy()
                slot.params[t][...] = params.numpy()
                slot.actions[t][...] = actions
                slot.arrays["versions"][t] = self.version
                chosen = clock()
                observation, reward, terminated, truncated, infos = self.envs.step(distribution.env_actions(actions))
                spent_policy, spent_env = spent_policy + chosen - began, spent_env + clock() - chosen
                slot.rewards[t][...], slot.terminated[t][...], slot.truncated[t][...] = reward, terminated, truncated
                arrays = split(self.space, observation)
                for block, array in zip(slot.next_blocks, arrays, strict=True):
                    block[t] = array
                done = np.logical_or(terminated, truncated)
                self._took(observation)
                if done.any():
                    if self.mode is AutoresetMode.DISABLED:
                        self._reset_done(done)
                    else:
                        self._place_final(slot.next_blocks, t, done, infos)
                if clock() > next_poll:
                    poll()
                    next_poll = clock() + POLL_EVERY_S
        self.done[:] = False
        self._finish(slot, None)
        self.seconds_env, self.seconds_policy = spent_env, spent_policy

    def _reset_done(self, done: NDArray[np.bool_]) -> None:
        observation, _ = self.envs.reset(options={"reset_mask": done.copy()})
        self._took(observation)

    def _place_final(self, blocks: list[NDArray[Any]], t: int, done: NDArray[np.bool_], infos: dict[str, Any]) -> None:
        final = infos.get("final_obs")
        for row in np.flatnonzero(done):
            if final is None or final[row] is None:
                raise ValueError(
                    "the environment resets within the step that ends an episode, but its infos carry no 'final_obs': "
                    "the final observation is needed to bootstrap truncated episodes"
                )
            for block, leaf in zip(blocks, split(self.space, final[row]), strict=True):
                block[t, row] = leaf

    @staticmethod
    def _place(rows: list[NDArray[Any]], arrays: list[NDArray[Any]]) -> None:
        for row, array in zip(rows, arrays, strict=True):
            np.copyto(row, array, casting="same_kind")

    def _finish(self, slot: Slot, reset_only: NDArray[np.bool_] | None) -> None:
        """What does not depend on the step: validity, checks, episodes, probe states."""
        arrays = slot.arrays
        rewards, terminated, truncated, valid = (arrays[k] for k in ("rewards", "terminated", "truncated", "valid"))
        failed = self.envs.failed_steps() if isinstance(self.envs, SyncEnvs) else []
        cut = self._cut_episodes(arrays, failed)
        if reset_only is None:
            valid[...] = True
            for t, row in failed:
                valid[t, row] = False
            np.logical_and(truncated, valid, out=truncated)
        else:
            valid[0] = ~reset_only
            for t, row in failed:
                valid[0, row] &= t > 0
            np.logical_or(terminated[:-1], truncated[:-1], out=valid[1:])
            np.logical_not(valid[1:], out=valid[1:])
            self.done = np.logical_or(terminated[-1], truncated[-1])
            # Gymnasium zeroes these itself; a vector environment of someone else's may not.
            np.multiply(rewards, valid, out=rewards)
            np.logical_and(terminated, valid, out=terminated)
            np.logical_and(truncated, valid, out=truncated)
            self.done &= valid[-1]
        self._check(slot)
        self._count_episodes(arrays, cut)
        index = np.flatnonzero(valid)
        probe_index = arrays["probe_index"]
        count = min(len(probe_index), len(index))
        probe_index[:count] = self.probe_random.choice(index, size=count, replace=False, shuffle=False)
        arrays["header"]["probes"] = count

    def _cut_episodes(
        self, arrays: dict[str, NDArray[Any]], failed: list[tuple[int, int]]
    ) -> list[tuple[float, int, int]]:
        """Where a step failed, its episode was truncated before it.  Returns those that ended before this rollout."""
        cut = []
        for t, row in failed:
            if t > 0:
                arrays["truncated"][t - 1, row] |= not arrays["terminated"][t - 1, row]
            elif self.carry_lengths[row]:
                cut.append((float(self.carry_returns[row]), int(self.carry_lengths[row]), row))
                self.carry_returns[row], self.carry_lengths[row] = 0.0, 0
        return cut

    def _check(self, slot: Slot) -> None:
        """Everything must be a number.  A sum of squares tells at once; if it is none, the culprit is looked for."""
        distribution = self.distribution
        assert distribution is not None
        self._check_observations(slot)
        rewards, params = slot.arrays["rewards"], slot.arrays["behaviour_params"]
        if not np.isfinite(_squares(rewards)):
            self._demand(np.isfinite(rewards), "a reward", "the environment")
        if not np.isfinite(_squares(params)):  # not wrong as such: a masked choice has a logit of minus infinity
            proper = distribution.proper(torch.from_numpy(params)).numpy()
            self._demand(proper, f"an action distribution (policy version {self.version})", "the policy")

    def _check_observations(self, slot: Slot) -> None:
        for i, leaf in enumerate(self.leaves):
            if leaf.dtype.kind not in "fc":
                continue
            for name in (f"observation{i}", f"next_observation{i}"):
                if name in slot.arrays and np.isnan(_squares(slot.arrays[name])):
                    self._demand(~np.isnan(slot.arrays[name]), f"an observation{leaf.path}", "the environment")

    @staticmethod
    def _demand(good: NDArray[np.bool_], what: str, whose: str) -> None:
        if good.all():
            return
        t, row = np.argwhere(~good)[0][:2]
        raise NotFiniteError(f"{whose} gave {what} that is not a finite number, in step {t} of a rollout", int(row))

    def _count_episodes(self, arrays: dict[str, NDArray[Any]], cut: list[tuple[float, int, int]]) -> None:
        """Cut each environment's steps into episodes, and sum over the pieces; ``cut`` ended before the first step."""
        steps, n = arrays["rewards"].shape
        rewards, valid = arrays["rewards"].T.ravel(), arrays["valid"].T.ravel()  # environment by environment
        ended = np.logical_or(arrays["terminated"], arrays["truncated"]).T.ravel()
        begins = np.zeros(n * steps, dtype=bool)
        begins[1:] = ended[:-1]
        begins[::steps] = True
        first = np.flatnonzero(begins)
        last = np.append(first[1:], n * steps) - 1
        returns = np.add.reduceat(rewards, first)
        lengths = np.add.reduceat(valid, first, dtype=np.int64)
        carried = first % steps == 0
        returns[carried] += self.carry_returns
        lengths[carried] += self.carry_lengths
        over = ended[last]
        count = int(np.count_nonzero(over))
        episodes = arrays["episodes"][:count]
        episodes["return"], episodes["length"], episodes["row"] = returns[over], lengths[over], first[over] // steps
        for place, episode in enumerate(cut, start=count):
            arrays["episodes"][place] = episode
        arrays["header"]["episodes"] = count + len(cut)
        goes_on = last % steps == steps - 1
        self.carry_returns = np.where(over, 0.0, returns)[goes_on]
        self.carry_lengths = np.where(over, 0, lengths)[goes_on]


def _reuses_output(policy: torch.nn.Module, space: Any) -> bool:
    """Whether the policy writes each output into the same memory as the one before."""
    observation = map_tree(
        torch.from_numpy, join(space, [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in leaves(space)])
    )
    with torch.inference_mode():
        first, second = policy(observation), policy(observation)
    return bool(first.data_ptr() == second.data_ptr())


@np.errstate(over="ignore")
def _squares(array: NDArray[Any]) -> Any:
    flat = array.ravel()
    return np.dot(flat, flat)


class ProbeStates:
    """The probe states of the last few rollouts, kept until the learner's answer comes."""

    KEEP = 5
    """The one a probe speaks of, two behind it that the learner has not looked at, and two that it has not taken."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, sequence: int, slot: Slot, space: Any) -> None:
        """Remember the states that ``slot``'s probe index names."""
        arrays = slot.arrays
        index = arrays["probe_index"][: int(arrays["header"]["probes"][0])]
        blocks = [pick(arrays[f"observation{i}"], index) for i in range(len(slot.observations[0]))]
        self._kept[sequence] = map_tree(torch.from_numpy, join(space, blocks))
        while len(self._kept) > self.KEEP:
            del self._kept[min(self._kept)]

    def divergence(
        self, policy: torch.nn.Module, distribution: Distribution, sequence: int, learner_params: NDArray[np.float32]
    ) -> float | None:
        """Mean over the states of rollout ``sequence`` of KL(local || learner) in nats; None if they are gone."""
        states = self._kept.get(sequence)
        if states is None or not len(learner_params):
            return None
        with torch.inference_mode():
            local: Tensor = policy(states)
            return float(distribution.kl(local, torch.from_numpy(learner_params.copy())).mean())
