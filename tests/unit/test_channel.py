"""The channel within one process: the same checks as over MPI (tests/mpi/test_channel_mpi.py), and its own."""

from __future__ import annotations

import time

import numpy as np
import pytest
from channel_checks import CHECKS, SIZE, run_together

from clusterenv_hpc.comm.channel import Backoff, ClusterError, Deadline, wait_for
from clusterenv_hpc.comm.local import LocalHub


@pytest.mark.parametrize("name", CHECKS)
def test_the_local_channel(name: str) -> None:
    hub = LocalHub(SIZE)
    run_together(CHECKS[name], [hub.channel(rank) for rank in range(SIZE)])


def test_a_message_longer_than_its_buffer_is_an_error() -> None:
    hub = LocalHub(2)
    port = hub.channel(0).incoming(np.zeros(10, np.uint8), 1, 3)
    port.start()
    with pytest.raises(ClusterError, match="11 bytes came where at most 10"):
        hub.channel(1).post(np.zeros(11, np.uint8), 0, 3)


def test_nobody_keeps_a_buffer_that_was_received() -> None:
    """The learner fills a buffer again when nobody holds arrays of it: so the channel must not hold it either."""
    import sys

    hub = LocalHub(2)
    sent, received = np.zeros(10, np.uint8), np.zeros(10, np.uint8)
    port = hub.channel(0).incoming(received, 1, 3)
    before = sys.getrefcount(sent), sys.getrefcount(received)
    for _ in range(3):
        port.start()
        handle = hub.channel(1).post(sent, 0, 3, synchronous=True)
        assert port.done() and handle.done()
    assert (sys.getrefcount(sent), sys.getrefcount(received)) == before


def test_workers_run_while_the_learner_waits_and_by_turns() -> None:
    hub = LocalHub(3)
    order: list[str] = []

    def worker(name: str, turns: int):
        for i in range(turns):
            order.append(f"{name}{i}")
            yield True

    hub.add_worker(1, worker("a", 2))
    hub.add_worker(2, worker("b", 3))
    channel = hub.channel(0)
    wait_for(lambda: len(order) == 5, channel, Backoff(), Deadline(5.0), lambda: "never")
    assert order == ["a0", "b0", "a1", "b1", "b2"]
    channel.progress()
    assert not channel.progress(), "all have ended"
    assert not hub.channel(1).progress(), "a worker that waits runs nobody"


def test_a_deadline_can_be_renewed() -> None:
    deadline = Deadline(0.05)
    assert not deadline.passed
    time.sleep(0.06)
    assert deadline.passed
    deadline.renew()
    assert not deadline.passed


def test_backoff_spins_then_sleeps_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backoff = Backoff(spin_s=1.0, first_s=0.1, longest_s=0.5)
    for _ in range(3):
        backoff.wait()
    assert slept == []
    now[0] += 1.0
    for _ in range(5):
        backoff.wait()
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    backoff.reset()
    backoff.wait()
    assert len(slept) == 5, "spins again"
    now[0] += 1.0
    backoff.wait()
    assert slept[5:] == pytest.approx([0.1])


@pytest.mark.parametrize("arguments", [(-1.0, 0.1, 0.2), (0.0, 0.0, 0.2), (0.0, 0.3, 0.2), (float("nan"), 0.1, 0.2)])
def test_a_backoff_that_cannot_be_is_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="spin_s >= 0 and 0 < first_s <= longest_s"):
        Backoff(*arguments)


def test_a_backoff_told_what_to_expect_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("clusterenv_hpc.comm.channel.time.sleep", slept.append)
    backoff = Backoff(spin_s=0.0, first_s=1e-3, longest_s=8e-3)
    backoff.expect(3e-3)
    backoff.wait()
    assert slept == [1e-3]  # not yet
    backoff.reset()
    for _ in range(3):
        backoff.wait()
    backoff.hurry(2e-3)
    backoff.wait()
    assert slept[1:] == [3e-3, 6e-3, 8e-3, 2e-3]
    backoff.expect(1.0)
    backoff.reset()
    backoff.wait()
    assert slept[-1] == 8e-3
