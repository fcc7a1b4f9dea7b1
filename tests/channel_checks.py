"""What every channel must do, whatever carries the bytes: run by all ranks at once, over each transport.

A check is a generator that each of three ranks runs with its own channel; it yields where it waits.  In one process
they take turns (``run_together``); under MPI each rank drives its own (``python channel_checks.py``).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from clusterenv_hpc.comm.channel import Backoff, Channel, Deadline, SilenceError, wait_for

UP, DOWN, OTHER, BIG, MEET = 11, 12, 13, 14, 15
SIZE = 3
Waiting = Iterator[None]


def until(condition: Callable[[], Any], seconds: float = 8.0) -> Waiting:
    """Wait, but not for ever."""
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed, "waited in vain"
        yield


def taken(channel: Channel, tag: int, count: int, peer: int = -1) -> Iterator[None]:
    """Wait for ``count`` notes; returns them."""
    notes: list[tuple[int, bytes]] = []
    deadline = Deadline(8.0)
    while len(notes) < count:
        assert not deadline.passed, f"{len(notes)} of {count} notes came"
        note = channel.take_note(tag, peer)
        if note is None:
            yield
        else:
            notes.append(note)
    return notes  # type: ignore[return-value]


def together(channel: Channel) -> Waiting:
    """Wait until every rank is here."""
    if channel.rank == 0:
        yield from taken(channel, MEET, SIZE - 1)
        for rank in range(1, SIZE):
            channel.send_note(rank, MEET, b"")
    else:
        channel.send_note(0, MEET, b"")
        yield from taken(channel, MEET, 1)


def notes_keep_their_order_within_a_stream(channel: Channel) -> Waiting:
    if channel.rank == 0:
        notes = yield from taken(channel, UP, 200)
        for rank in (1, 2):
            mine = [int(data) for source, data in notes if source == rank]
            assert mine == list(range(100)), mine
    else:
        for i in range(100):
            channel.send_note(0, UP, str(i).encode())
            if i % 7 == 0:
                yield


def notes_of_every_size_arrive_whole(channel: Channel) -> Waiting:
    sizes = [0, 1, 2, 63, 64, 1000, 8191, 8192, 70_000, 1_000_003, 5 * 2**20]
    if channel.rank == 0:
        for rank in (1, 2):
            notes = yield from taken(channel, UP, len(sizes), rank)
            assert [source for source, _ in notes] == [rank] * len(sizes)
            for size, (_, data) in zip(sizes, notes, strict=True):
                assert type(data) is bytes and data == np.random.default_rng(size + rank).bytes(size)
                channel.send_note(rank, DOWN, data)
    else:
        for size in sizes:
            channel.send_note(0, UP, np.random.default_rng(size + channel.rank).bytes(size))
        back = yield from taken(channel, DOWN, len(sizes), 0)
        assert [len(data) for _, data in back] == sizes


def a_note_is_taken_from_whom_and_on_what_was_asked(channel: Channel) -> Waiting:
    if channel.rank == 0:
        yield from together(channel)
        second = yield from taken(channel, UP, 1, 2)
        assert second == [(2, b"up 2")]
        other = yield from taken(channel, OTHER, 2)
        assert sorted(other) == [(1, b"other 1"), (2, b"other 2")]
        first = yield from taken(channel, UP, 1)
        assert first == [(1, b"up 1")]
        assert channel.take_note(UP) is None and channel.take_note(UP, 1) is None
    else:
        channel.send_note(0, UP, f"up {channel.rank}".encode())
        channel.send_note(0, OTHER, f"other {channel.rank}".encode())
        yield from together(channel)


def ports_are_used_again_and_again(channel: Channel) -> Waiting:
    for size in (1, 64, 4096, 300_000):
        buffer = np.zeros(size, np.uint8)
        if channel.rank == 0:
            ports = {rank: channel.incoming(np.zeros(size, np.uint8), rank, UP) for rank in (1, 2)}
            buffers = {rank: np.zeros(size, np.uint8) for rank in (1, 2)}
            ports = {rank: channel.incoming(buffers[rank], rank, UP) for rank in (1, 2)}
            back = {rank: channel.outgoing(buffers[rank], rank, DOWN) for rank in (1, 2)}
            assert all(port.done() for port in (*ports.values(), *back.values())), "done before the first start"
            for i in range(40):
                for rank in (1, 2):
                    ports[rank].start()
                    yield from until(ports[rank].done)
                    assert ports[rank].done(), "done stays done"
                    assert (buffers[rank] == (i + rank) % 256).all()
                    back[rank].start()
                    yield from until(back[rank].done)
            for port in (*ports.values(), *back.values()):
                port.free()
        else:
            up, down = channel.outgoing(buffer, 0, UP), channel.incoming(buffer, 0, DOWN)
            for i in range(40):
                buffer[:] = (i + channel.rank) % 256
                down_buffer_before = buffer.copy()
                up.start()
                yield from until(up.done)
                buffer[:] = 255
                down.start()
                yield from until(down.done)
                assert (buffer == down_buffer_before).all()
            up.free()
            down.free()


def a_shorter_message_leaves_the_rest_of_the_buffer_alone(channel: Channel) -> Waiting:
    if channel.rank == 0:
        buffer = np.full(1000, 7, np.uint8)
        port = channel.incoming(buffer, 1, BIG)
        for used in (1000, 1, 999, 500, 0, 1000):
            buffer[:] = 7
            port.start()
            channel.send_note(1, DOWN, b"go")
            yield from until(port.done)
            assert (buffer[:used] == 9).all() and (buffer[used:] == 7).all()
        port.free()
    elif channel.rank == 1:
        block = np.full(1000, 9, np.uint8)
        for used in (1000, 1, 999, 500, 0, 1000):
            yield from taken(channel, DOWN, 1)
            handle = channel.post(block[:used], 0, BIG, synchronous=True)
            yield from until(handle.done)


def a_synchronous_send_is_done_when_it_is_taken_and_not_before(channel: Channel) -> Waiting:
    for size in (8, 100_000):
        if channel.rank == 0:
            yield from together(channel)
            yield from taken(channel, OTHER, 2)  # both have posted, and seen that it is not done
            for rank in (1, 2):
                buffer = np.zeros(size, np.uint8)
                port = channel.incoming(buffer, rank, BIG)
                for i in range(2):
                    port.start()
                    yield from until(port.done)
                    assert (buffer == 10 * rank + i).all()
                port.free()
        else:
            yield from together(channel)
            handles = [
                channel.post(np.full(size, 10 * channel.rank + i, np.uint8), 0, BIG, synchronous=True) for i in range(2)
            ]
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                assert not any(handle.done() for handle in handles)
                yield
            assert not channel.flush(Deadline(0.01))
            channel.send_note(0, OTHER, b"")
            yield from until(lambda: all(handle.done() for handle in handles))  # noqa: B023
        yield from together(channel)


def posted_receives_fill_in_the_order_of_their_posting(channel: Channel) -> Waiting:
    if channel.rank == 0:
        buffers = [np.zeros(5000, np.uint8) for _ in range(3)]
        ports = [channel.incoming(buffer, 1, BIG) for buffer in buffers]
        for port in ports:
            port.start()
        channel.send_note(1, DOWN, b"go")
        for i, (port, buffer) in enumerate(zip(ports, buffers, strict=True)):
            yield from until(port.done)
            assert (buffer == i + 1).all()
            port.free()
    elif channel.rank == 1:
        yield from taken(channel, DOWN, 1)
        handles = [channel.post(np.full(5000, i + 1, np.uint8), 0, BIG, synchronous=i % 2 == 0) for i in range(3)]
        yield from until(lambda: all(handle.done() for handle in handles))


def a_receive_that_was_given_up_takes_nothing(channel: Channel) -> Waiting:
    if channel.rank == 0:
        wrong, right = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
        port = channel.incoming(wrong, 1, BIG)
        port.start()
        assert not port.done()
        port.free()
        port.free()  # twice does no harm
        channel.send_note(1, DOWN, b"go")
        port = channel.incoming(right, 1, BIG)
        port.start()
        yield from until(port.done)
        assert (right == 3).all() and not wrong.any()
        port.free()
    elif channel.rank == 1:
        yield from taken(channel, DOWN, 1)
        handle = channel.post(np.full(100, 3, np.uint8), 0, BIG)
        yield from until(handle.done)


def large_messages_fill_the_buffers_started_first_and_leave_the_rest_alone(channel: Channel) -> Waiting:
    sizes = (3_000_000, 20, 0, 100_000)
    if channel.rank == 0:
        buffers = [np.full(3_000_000, 7, np.uint8) for _ in sizes]
        ports = [channel.arrival(buffer, 1, BIG) for buffer in buffers]
        given_up = channel.arrival(np.zeros(1, np.uint8), 1, BIG)
        given_up.start()
        assert not given_up.done() and not given_up.under_way
        given_up.free()
        given_up.free()  # twice does no harm
        assert all(port.done() for port in ports)  # nothing was started
        for port in ports:
            port.start()
        channel.send_note(1, DOWN, b"go")
        for i, (port, buffer, used) in enumerate(zip(ports, buffers, sizes, strict=True)):
            yield from until(port.done)
            assert not port.under_way
            assert (buffer[:used] == i).all() and (buffer[used:] == 7).all()
            port.free()
        channel.send_note(1, DOWN, b"seen")
    elif channel.rank == 1:
        yield from taken(channel, DOWN, 1)
        handles = [channel.post(np.full(size, i, np.uint8), 0, BIG, synchronous=True) for i, size in enumerate(sizes)]
        yield from until(lambda: all(handle.done() for handle in handles))
        yield from taken(channel, DOWN, 1)


def many_can_send_the_same_read_only_buffer(channel: Channel) -> Waiting:
    """A weight snapshot: one buffer, several sends under way, nobody may change it."""
    block = np.full(200_000, 5, np.uint8)
    block.flags.writeable = False
    if channel.rank == 0:
        handles = [channel.post(block, rank, BIG) for rank in (1, 2, 1, 2)]
        yield from until(lambda: all(handle.done() for handle in handles))
        yield from until(lambda: channel.flush(Deadline(0.01)))
    else:
        got = np.zeros(len(block), np.uint8)
        port = channel.incoming(got, 0, BIG)
        for _ in range(2):
            got[:] = 0
            port.start()
            yield from until(port.done)
            assert (got == block).all()
        port.free()


def tags_and_peers_do_not_mix(channel: Channel) -> Waiting:
    if channel.rank == 0:
        buffers = {(rank, tag): np.zeros(64, np.uint8) for rank in (2, 1) for tag in (OTHER, UP)}
        ports = {key: channel.incoming(buffer, *key) for key, buffer in buffers.items()}
        for port in ports.values():
            port.start()
        yield from together(channel)
        for (rank, tag), port in ports.items():
            yield from until(port.done)
            assert (buffers[rank, tag] == 10 * rank + tag % 10).all()
            port.free()
    else:
        yield from together(channel)
        for tag in (UP, OTHER):
            channel.post(np.full(64, 10 * channel.rank + tag % 10, np.uint8), 0, tag)
        yield from until(lambda: channel.flush(Deadline(0.01)))


def waiting_ends_at_the_deadline(channel: Channel) -> Waiting:
    began = time.monotonic()
    try:
        wait_for(lambda: False, channel, Backoff(), Deadline(0.15), lambda: f"rank {channel.rank} waited in vain")
    except SilenceError as error:
        assert str(error) == f"rank {channel.rank} waited in vain"
    else:
        raise AssertionError("no SilenceError")
    assert 0.15 <= time.monotonic() - began < 3.0
    yield


CHECKS: dict[str, Callable[[Channel], Waiting]] = {
    check.__name__: check
    for check in (
        notes_keep_their_order_within_a_stream,
        notes_of_every_size_arrive_whole,
        a_note_is_taken_from_whom_and_on_what_was_asked,
        ports_are_used_again_and_again,
        a_shorter_message_leaves_the_rest_of_the_buffer_alone,
        a_synchronous_send_is_done_when_it_is_taken_and_not_before,
        posted_receives_fill_in_the_order_of_their_posting,
        a_receive_that_was_given_up_takes_nothing,
        large_messages_fill_the_buffers_started_first_and_leave_the_rest_alone,
        many_can_send_the_same_read_only_buffer,
        tags_and_peers_do_not_mix,
        waiting_ends_at_the_deadline,
    )
}


def run_together(check: Callable[[Channel], Waiting], channels: list[Channel]) -> None:
    """All ranks of a check in one process, by turns."""
    running = [check(channel) for channel in channels]
    while running:
        for one in list(running):
            try:
                next(one)
            except StopIteration:
                running.remove(one)


def main() -> None:
    """One rank of all checks, under MPI."""
    from clusterenv_hpc.comm.mpi import MpiChannel

    channel = MpiChannel()
    for name, check in CHECKS.items():
        try:
            for _ in check(channel):
                channel.progress()
                time.sleep(20e-6)
            for _ in together(channel):
                time.sleep(20e-6)
        except BaseException:
            traceback.print_exc()
            print(f"rank {channel.rank}: {name} failed over {channel.transport}", file=sys.stderr, flush=True)
            channel.abort(1)
        if channel.rank == 0:
            print(f"passed {name}", flush=True)


if __name__ == "__main__":
    main()
