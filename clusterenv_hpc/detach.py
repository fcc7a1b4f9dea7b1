"""DETACH on the learner's side: policy versions, weights on request, probes, rollouts in lockstep or as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from .comm.channel import Backoff
from .comm.codec import encode
from .comm.messages import (
    EPISODE,
    ROLLOUT_HEADER,
    Buffer,
    Command,
    Leaf,
    RolloutShape,
    Tag,
    probe_note,
    weights_layout,
)
from .crew import Crew
from .envs.spaces import join, leaves
from .peer import RING, Peer, Store, copy_probe_states
from .policies import as_tensors, distribution_of, flat_weights, num_weights
from .rollout import Episodes, Rollout
from .sync import SyncRule

SENDING_S = 200e-6
"""The longest sleep while a rollout is on its way, in seconds."""

GAP_WEIGHT = 0.2
"""Of the newest gap between two rollouts, in their running mean."""


class Detached:
    """The learner's end of workers that act by themselves.

    Args:
        crew: the workers.
        policy: the learner's own.
        rule: what the workers decide by; says whether probes are wanted.
        spaces: of a single environment: observation, action.
        num_probes: states of each rollout on which the divergence is measured.
        separate_next: see ``RolloutShape``.
        version: the number of the weights before the first ``publish``.
    """

    def __init__(
        self,
        crew: Crew,
        policy: torch.nn.Module,
        rule: SyncRule,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
        num_probes: int,
        separate_next: bool,
        version: int,
    ) -> None:
        self._crew, self._policy, self._rule, self._num_probes = crew, policy, rule, num_probes
        self._separate_next, self.version = separate_next, version
        self._space = spaces[0]
        self._leaves = leaves(self._space)
        self._distribution = distribution_of(policy, spaces[1])
        self._device = next((tensor.device for tensor in policy.parameters()), torch.device("cpu"))
        self._snapshot: Buffer | None = None
        self._batches: list[Store] = []
        self._batch_shape = (0, 0)
        self.streaming = False
        self._streams = self._turn = 0

    # -- versions and weights ----------------------------------------------------------------------------------------

    def publish(self) -> int:
        """Snapshot the policy as the next version, and let the workers know."""
        self.version += 1
        self._take_snapshot()
        self._send_probes()
        if self.streaming:
            self._listen()
        return self.version

    def poll(self) -> int:
        """Hear the workers without waiting; how many of their rollouts are there to be taken."""
        if self._snapshot is not None:
            self._listen()
        return sum(peer.waiting for peer in self._crew.active)

    def _take_snapshot(self) -> None:
        layout = weights_layout(num_weights(self._policy))
        buffer = layout.allocate()
        views = layout.views(buffer)
        flat_weights(self._policy, out=views["weights"])
        views["header"]["version"], views["header"]["count"] = self.version, len(views["weights"])
        buffer.flags.writeable = False  # several sends may hold it, long after the next version exists
        self._snapshot = buffer

    def _listen(self) -> None:
        """Take reports, and answer weight requests with the newest weights: the only way that weights travel."""
        self._crew.listen()
        assert self._snapshot is not None
        for peer in self._crew.active:
            if peer.wants_weights:
                peer.wants_weights = False
                self._crew.channel.post(self._snapshot, peer.rank, Tag.WEIGHTS)
                self._crew.stats.sent["weights"].add(len(self._snapshot))

    def _send_probes(self) -> None:
        """Tell each worker the new version and, for APS, the new distributions at states of its own latest rollout."""
        probes = {peer.rank: peer.probe for peer in self._crew.active if peer.probe is not None}
        params: dict[int, NDArray[np.float32]] = {}
        if probes:
            states = [np.concatenate(blocks) for blocks in zip(*(blocks for _, blocks in probes.values()), strict=True)]
            flat = self._evaluate(join(self._space, states))
            ends = np.cumsum([len(blocks[0]) for _, blocks in probes.values()])
            params = dict(zip(probes, np.split(flat, ends[:-1]), strict=True))
        for peer in self._crew.active:
            sequence = probes[peer.rank][0] if peer.rank in probes else -1
            data = probe_note(self.version, sequence, params.get(peer.rank))
            self._crew.stats.sent["probe"].add(len(data))
            self._crew.channel.send_note(peer.rank, Tag.COMMAND, data)

    def _evaluate(self, observations: Any) -> NDArray[np.float32]:
        training = [module for module in self._policy.modules() if module.training]  # some may be frozen
        self._policy.eval()
        try:
            with torch.inference_mode():
                return np.asarray(self._policy(as_tensors(observations, self._device)).float().cpu().numpy())
        finally:
            for module in training:
                module.training = True

    # -- lockstep ----------------------------------------------------------------------------------------------------

    def rollout(self, num_steps: int) -> Rollout:
        """One rollout of all environments; see ``ClusterEnv.rollout``."""
        crew = self._crew
        self._expect(num_steps, 1)
        for peer in crew.active:
            crew.command(peer, Command.ROLLOUT, encode([num_steps, self.version]))

        def came() -> bool:
            self._listen()
            return all(peer.arrived() for peer in crew.active)

        what = f"collecting {num_steps} steps"
        crew.wait(came, lambda: crew.silence([peer for peer in crew.active if not peer.arrived()], what))
        parts = [(peer, self._take(peer)) for peer in crew.active]
        return self._single(*parts[0]) if len(parts) == 1 else self._merged(parts, num_steps)

    def _merged(self, parts: list[tuple[Peer, dict[str, NDArray[Any]]]], num_steps: int) -> Rollout:
        """The workers' rollouts side by side, in the order of rows."""
        rows = np.concatenate([np.arange(peer.rows.start, peer.rows.stop) for peer, _ in parts])
        whole = self._batch_views(num_steps, len(rows))
        first = 0  # not peer.rows.start: a dead worker's environments leave no gap
        for peer, views in parts:
            for name, part in views.items():
                if part.ndim > 1:  # the others are not per environment
                    whole[name][:, first : first + peer.num_envs] = part
            first += peer.num_envs
        versions = np.concatenate([_spread(views["versions"], peer.num_envs) for peer, views in parts], axis=1)
        ranks = np.concatenate([np.full(peer.num_envs, peer.world_rank) for peer, _ in parts])
        episodes = [_episodes(views, peer.rows.start) for peer, views in parts]
        merged = Episodes(
            *(np.concatenate([getattr(part, key) for part in episodes]) for key in ("returns", "lengths", "rows"))
        )
        return self._build(whole, versions, rows, ranks, merged)

    def _batch_views(self, num_steps: int, total: int) -> dict[str, NDArray[Any]]:
        """Arrays for a whole rollout, in a buffer that nobody holds any more (or a new one)."""
        layout = self._shape(num_steps, total).layout()
        if self._batch_shape != (num_steps, total):
            self._batches, self._batch_shape = [], (num_steps, total)
        batch = next((batch for batch in self._batches if not batch.in_use), None)
        if batch is None:
            batch = Store(layout)
            self._batches = [*self._batches[-RING:], batch]  # the oldest live on without us, with whoever kept them
        return layout.views(batch.buffer)

    # -- as they arrive ----------------------------------------------------------------------------------------------

    def stream(self, num_steps: int, demand_open: Callable[[], None]) -> Generator[Rollout, None, None]:
        """Rollouts of single workers; see ``ClusterEnv.rollouts``.  Begins when the first one is asked for."""
        crew = self._crew
        demand_open()
        self._streams += 1
        number = self._streams
        self._expect(num_steps, RING)
        for peer in crew.active:
            peer.stopped = False
            crew.command(peer, Command.STREAM, encode([num_steps, self.version]))
        self.streaming = True
        ready: list[Peer] = []
        # Nobody waits for the learner here, and its cores may be the workers' too: look up seldom, some two times for
        # each rollout; but often once one has begun to come, which may need both sides to move.
        patience = Backoff(spin_s=0.0, first_s=50e-6, longest_s=5e-3)
        gap_s, last = 0.0, time.perf_counter()

        def came() -> bool:
            self._listen()
            crew.demand_life(f"collecting {num_steps} steps")
            active = crew.active
            for i in range(len(active)):  # start after the one served last, so that none is preferred
                peer = active[(self._turn + i) % len(active)]
                if peer.arrived():
                    self._turn = (self._turn + i + 1) % len(active)
                    ready.append(peer)
                    return True
            if any(peer.sending for peer in active):
                patience.hurry(SENDING_S)
            return False

        try:
            while self.streaming and number == self._streams:
                crew.wait(came, lambda: crew.silence(crew.active, f"collecting {num_steps} steps"), backoff=patience)
                peer = ready.pop()
                now = time.perf_counter()
                gap_s, last = gap_s + GAP_WEIGHT * (now - last - gap_s), now
                patience.expect(max(gap_s * (0.8 if len(crew.active) > 1 else 0.5), 50e-6))
                yield self._single(peer, self._take(peer))
                if self.streaming and number == self._streams:
                    peer.replenish()
        finally:
            if number == self._streams:  # not a newer one, that began when this one was stopped
                self.stop()

    def stop(self) -> None:
        """Stop the stream, if there is one: the workers finish what they are at, and it is dropped and counted."""
        crew = self._crew
        if not self.streaming:
            return
        self.streaming = False
        if crew.broken:
            return
        for peer in crew.active:
            crew.command(peer, Command.STOP)

        def quiet() -> bool:
            self._listen()
            for peer in crew.active:
                while peer.arrived():
                    peer.take()
                    crew.stats.rollouts_dropped += 1
                if not peer.stopped:
                    peer.replenish()
            return all(peer.stopped for peer in crew.active)

        crew.wait(quiet, lambda: crew.silence([peer for peer in crew.active if not peer.stopped], "stopping"))
        for peer in crew.active:
            peer.forget_rollouts()

    # -- one rollout -------------------------------------------------------------------------------------------------

    def _shape(self, num_steps: int, num_envs: int) -> RolloutShape:
        leaf = Leaf("", self._distribution.action_dtype, self._distribution.action_shape)
        probes = min(self._num_probes, num_steps * num_envs)
        return RolloutShape(
            self._leaves, leaf, self._distribution.num_params, num_steps, num_envs, probes, self._separate_next
        )

    def _expect(self, num_steps: int, count: int) -> None:
        if self._snapshot is None:
            self._take_snapshot()
        for peer in self._crew.active:
            peer.expect_rollouts(self._shape(num_steps, peer.num_envs), count)

    def _take(self, peer: Peer) -> dict[str, NDArray[Any]]:
        """The rollout that has come from ``peer``, counted."""
        layout, stats = peer.layout, self._crew.stats
        views = layout.views(peer.take())
        header = dict(zip(ROLLOUT_HEADER.names or (), views["header"].item(), strict=True))
        stats.received["rollout"].add(layout.fields["episodes"][0] + header["episodes"] * EPISODE.itemsize)
        stats.env_steps[peer.world_rank] += int(np.count_nonzero(views["valid"]))
        seconds = stats.seconds[peer.world_rank]
        for stage in ("env", "policy", "wait"):
            seconds[stage] += header[f"seconds_{stage}"]
        if header["kl_count"]:
            stats.kl_sum += header["kl_sum"]
            stats.kl_count += header["kl_count"]
            stats.kl_last = header["kl_last"]
        versions = views["versions"]
        oldest = int(versions[0])  # a worker's version never falls
        stats.lag_sum += self.version - (oldest if versions[-1] == oldest else float(versions.mean()))
        stats.lag_count += 1
        stats.lag_max = max(stats.lag_max, self.version - oldest)
        if self._rule.needs_divergence:
            peer.probe = copy_probe_states(views, self._leaves)
        return views

    def _single(self, peer: Peer, views: dict[str, NDArray[Any]]) -> Rollout:
        versions = _spread(views["versions"], peer.num_envs)
        return self._build(views, versions, peer.row_numbers, peer.rank_numbers, _episodes(views, peer.rows.start))

    def _build(self, views: Any, versions: Any, rows: Any, ranks: Any, episodes: Episodes) -> Rollout:
        count, steps = len(self._leaves), len(views["rewards"])
        now = [views[f"observation{i}"] for i in range(count)]
        after = [views[f"next_observation{i}"] for i in range(count)] if self._separate_next else [a[1:] for a in now]
        return Rollout(
            observations=join(self._space, [array[:steps] for array in now]),
            next_observations=join(self._space, after),
            actions=views["actions"],
            behaviour_params=views["behaviour_params"],
            rewards=views["rewards"],
            terminated=views["terminated"],
            truncated=views["truncated"],
            valid=views["valid"],
            versions=versions,
            rows=rows,
            ranks=ranks,
            episodes=episodes,
            version=self.version,
        )


def _spread(versions: NDArray[np.int64], num_envs: int) -> NDArray[np.int64]:
    """``[T]`` as ``[T, N]``, without a copy: all environments of a worker share its policy."""
    spread = np.ndarray((len(versions), num_envs), versions.dtype, versions, strides=(versions.itemsize, 0))
    spread.flags.writeable = False
    return spread


def _episodes(views: dict[str, NDArray[Any]], first_row: int) -> Episodes:
    ended = views["episodes"][: int(views["header"]["episodes"][0])]
    return Episodes(ended["return"].copy(), ended["length"].copy(), ended["row"] + first_row)
