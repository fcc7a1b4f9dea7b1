"""The channel against raw MPI from Python: round trips, and a flood in one direction, of the same bytes.

A round trip goes as a step does: fixed ports, both sides polling through the channel's own waiting.  There are two
floods: through ports, for any size; and as rollouts travel, synchronous sends that are received once they have been
announced, for what is as large as a rollout.  Each keeps two messages under way, and raw MPI sends from and receives
into two buffers in turn as well: nobody can fill a buffer that is still being sent, and two fill twice the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterenv_hpc.bench.command import Options
from clusterenv_hpc.bench.ranks import barrier, say
from clusterenv_hpc.comm.channel import Backoff, Channel, Deadline, Handle, wait_for
from clusterenv_hpc.comm.messages import Tag
from clusterenv_hpc.comm.mpi import MPI, MpiChannel

SIZES = (64, 1024, 4096, 65536, 350_000, 1 << 20, 4 << 20)
"""Bytes: from a step's actions to a rollout of 64 environments and beyond."""

ROLLOUT_BYTES = 65536
"""From here on the flood of rollouts is measured too."""

IN_FLIGHT = 2


def _wait(channel: Channel, backoff: Backoff, deadline: Deadline, condition: Callable[[], bool]) -> None:
    deadline.renew()
    wait_for(condition, channel, backoff, deadline, lambda: "the other rank of the benchmark fell silent")


def channel_round_trips(channel: Channel, size: int, count: int) -> float:
    """Seconds for each round trip through ports."""
    rank, buffer = channel.rank, np.zeros(size, dtype=np.uint8)
    out = channel.outgoing(buffer, 1 - rank, Tag.ECHO)
    back = channel.incoming(np.zeros(size, dtype=np.uint8), 1 - rank, Tag.ECHO)
    backoff, deadline = Backoff(spin_s=1e-3), Deadline(60.0)
    began = time.perf_counter()
    for _ in range(count):
        back.start()
        if rank == 0:
            out.start()
        _wait(channel, backoff, deadline, back.done)
        if rank == 1:
            out.start()
        _wait(channel, backoff, deadline, out.done)
    seconds = time.perf_counter() - began
    out.free()
    back.free()
    return seconds / count


def raw_round_trips(comm: Any, size: int, count: int) -> float:
    """Seconds for each round trip through Send and Recv."""
    rank, buffer = comm.Get_rank(), np.zeros(size, dtype=np.uint8)
    began = time.perf_counter()
    for _ in range(count):
        if rank == 0:
            comm.Send([buffer, MPI.BYTE], 1, 7)
            comm.Recv([buffer, MPI.BYTE], 1, 7)
        else:
            comm.Recv([buffer, MPI.BYTE], 0, 7)
            comm.Send([buffer, MPI.BYTE], 0, 7)
    return (time.perf_counter() - began) / count


def port_flood(channel: Channel, size: int, count: int) -> float:
    """Seconds for each message from rank 1 to rank 0 through ports."""
    backoff, deadline = Backoff(spin_s=1e-3), Deadline(60.0)
    end = channel.outgoing if channel.rank == 1 else channel.incoming
    ports = [end(np.zeros(size, dtype=np.uint8), 1 - channel.rank, Tag.ECHO) for _ in range(IN_FLIGHT)]
    began = time.perf_counter()
    for i in range(count + IN_FLIGHT):
        port = ports[i % IN_FLIGHT]
        _wait(channel, backoff, deadline, port.done)
        if i < count:
            port.start()
    seconds = time.perf_counter() - began
    for port in ports:
        port.free()
    return seconds / count


def rollout_flood(channel: Channel, size: int, count: int) -> float:
    """Seconds for each message from rank 1 to rank 0, as rollouts travel."""
    backoff, deadline = Backoff(spin_s=1e-3), Deadline(60.0)
    buffers = [np.zeros(size, dtype=np.uint8) for _ in range(IN_FLIGHT)]
    began = time.perf_counter()
    if channel.rank == 1:
        handles: list[Handle | None] = [None] * IN_FLIGHT
        for i in range(count):
            slot = i % IN_FLIGHT
            if (handle := handles[slot]) is not None:
                _wait(channel, backoff, deadline, handle.done)
            handles[slot] = channel.post(buffers[slot], 0, Tag.ROLLOUT, synchronous=True)
        for handle in handles:
            if handle is not None:
                _wait(channel, backoff, deadline, handle.done)
    else:
        ports = [channel.arrival(buffer, 1, Tag.ROLLOUT) for buffer in buffers]
        for port in ports[:count]:
            port.start()
        for i in range(count):
            port = ports[i % IN_FLIGHT]
            _wait(channel, backoff, deadline, port.done)
            if i + IN_FLIGHT < count:
                port.start()
        for port in ports:
            port.free()
    return (time.perf_counter() - began) / count


def raw_flood(comm: Any, size: int, count: int) -> float:
    """Seconds for each message from rank 1 to rank 0 through Send and Recv."""
    messages = [[np.zeros(size, dtype=np.uint8), MPI.BYTE] for _ in range(IN_FLIGHT)]
    began = time.perf_counter()
    for i in range(count):
        if comm.Get_rank() == 1:
            comm.Send(messages[i % IN_FLIGHT], 0, 8)
        else:
            comm.Recv(messages[i % IN_FLIGHT], 1, 8)
    return (time.perf_counter() - began) / count


def run(comm: Any, options: Options) -> dict[str, Any]:
    """All sizes, raw and channel in turn; medians over the repeats."""
    channel = MpiChannel(comm)
    results = {}
    for size in SIZES:
        count = max(20, min(2000, int(2e8) // (size + 20_000)))
        measured: dict[str, tuple[Callable[[Any, int, int], float], Any]] = {
            "raw_trip": (raw_round_trips, comm),
            "trip": (channel_round_trips, channel),
            "raw_flood": (raw_flood, comm),
            "flood": (port_flood, channel),
        }
        if size >= ROLLOUT_BYTES:
            measured["rollouts"] = (rollout_flood, channel)
        times: dict[str, list[float]] = {kind: [] for kind in measured}
        for _ in range(2 * options.repeats):
            for kind, (measure, end) in measured.items():
                barrier(comm)
                times[kind].append(measure(end, size, count))
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        row = {
            "round_trip_us": medians["trip"] * 1e6,
            "raw_round_trip_us": medians["raw_trip"] * 1e6,
            "latency_ratio": medians["trip"] / medians["raw_trip"],
            "bandwidth_mb_per_s": size / medians["flood"] / 1e6,
            "raw_bandwidth_mb_per_s": size / medians["raw_flood"] / 1e6,
            "bandwidth_ratio": medians["raw_flood"] / medians["flood"],
        }
        if "rollouts" in medians:
            row["rollout_bandwidth_mb_per_s"] = size / medians["rollouts"] / 1e6
            row["rollout_bandwidth_ratio"] = medians["raw_flood"] / medians["rollouts"]
        results[str(size)] = row
        if comm.Get_rank() == 0:
            rollouts = f", as rollouts {row['rollout_bandwidth_ratio']:.2f}" if "rollouts" in medians else ""
            say(
                f"{size:>8} B: round trip {row['round_trip_us']:8.1f} us ({row['latency_ratio']:.2f} of raw), "
                f"flood {row['bandwidth_mb_per_s']:8.0f} MB/s ({row['bandwidth_ratio']:.2f} of raw{rollouts})"
            )
    rows = results.values()
    return {
        "latency_ratio": max(row["latency_ratio"] for row in rows),
        "bandwidth_ratio": min(row["bandwidth_ratio"] for row in rows),
        "rollout_bandwidth_ratio": min(row.get("rollout_bandwidth_ratio", np.inf) for row in rows),
        "mpi": channel.transport,
        "results": results,
    }
