"""The wire's own facts: where arrays lie in a message, and what a shorter message still holds."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import toy_envs as toy

from clusterenv_hpc.comm import messages
from clusterenv_hpc.comm.messages import (
    ALIGNMENT,
    Command,
    Layout,
    Leaf,
    Report,
    RolloutShape,
    Tag,
    actions_layout,
    note,
    probe_note,
    read_probe,
    step_layout,
    weights_layout,
)
from clusterenv_hpc.envs.spaces import leaves

KINDS = leaves(toy.Kinds.observation_space)


def shape(steps: int = 7, envs: int = 3, separate: bool = False, probes: int = 5) -> RolloutShape:
    return RolloutShape(KINDS, Leaf("", np.dtype("<i8"), (3,)), 9, steps, envs, probes, separate)


LAYOUTS = {
    "actions": actions_layout(leaves(toy.NestedActions.action_space), 3),
    "step": step_layout(KINDS, 3),
    "weights": weights_layout(1001),
    "no weights": weights_layout(0),
    "rollout": shape().layout(),
    "rollout of same step": shape(separate=True).layout(),
    "one step, one env": shape(1, 1, probes=1).layout(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fields_are_aligned_in_order_and_do_not_overlap(layout: Layout) -> None:
    end = 0
    for offset, dtype, field_shape in layout.fields.values():
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + int(np.prod(field_shape)) * dtype.itemsize
    assert end <= layout.nbytes < end + ALIGNMENT or layout.nbytes == end
    assert layout.allocate().nbytes == layout.nbytes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_views_share_the_buffer_and_nothing_else(layout: Layout) -> None:
    buffer = layout.allocate()
    assert not buffer.any() and buffer.dtype == np.uint8
    views = layout.views(buffer)
    assert list(views) == list(layout.fields)
    source = np.random.default_rng(0)
    wanted = {}
    for name, view in views.items():
        assert view.shape == layout.fields[name][2] and view.dtype == layout.fields[name][1]
        assert view.size == 0 or np.shares_memory(view, buffer)
        raw = source.integers(0, 256, view.nbytes, dtype=np.uint8)
        view[...] = raw.view(view.dtype).reshape(view.shape)
        wanted[name] = view.tobytes()
    copy = buffer.copy()  # as it arrives on the other side
    for name, view in layout.views(copy).items():
        assert view.tobytes() == wanted[name] == layout.view(copy, name).tobytes()


def test_a_view_of_a_read_only_buffer_is_read_only() -> None:
    layout = weights_layout(3)
    buffer = layout.allocate()
    buffer.flags.writeable = False
    assert not layout.view(buffer, "weights").flags.writeable


def test_both_sides_derive_the_same_layout() -> None:
    for make in (lambda: shape().layout(), lambda: step_layout(KINDS, 4), lambda: weights_layout(5)):
        one, other = make(), make()
        assert one.fields == other.fields and one.nbytes == other.nbytes


def test_a_rollout_cut_after_its_last_episode_holds_all_the_rest() -> None:
    for separate, steps, envs in itertools.product((False, True), (1, 7), (1, 3)):
        layout = shape(steps, envs, separate, probes=1).layout()
        assert list(layout.fields)[-1] == "episodes"
        assert layout.fields["episodes"][2] == (steps * envs,)  # each step of each environment may end one
        sent = layout.allocate()
        views = layout.views(sent)
        for i, view in enumerate(views.values()):
            view.view(np.uint8)[...] = i + 1
        used = 1
        offset, dtype, _ = layout.fields["episodes"]
        received = layout.allocate()
        received[: offset + used * dtype.itemsize] = sent[: offset + used * dtype.itemsize]
        for name, view in layout.views(received).items():
            expected = views[name] if name != "episodes" else views[name][:used]
            assert view[: len(expected)].tobytes() == expected.tobytes(), name


def test_observations_have_one_more_row_unless_successors_travel_themselves() -> None:
    shifted, separate = shape().layout().fields, shape(separate=True).layout().fields
    assert shifted["observation0"][2] == (8, 3, 2, 2) and "next_observation0" not in shifted
    assert separate["observation0"][2] == separate["next_observation0"][2] == (7, 3, 2, 2)
    assert {name for name in separate if name.startswith("next_observation")} == {
        f"next_observation{i}" for i in range(len(KINDS))
    }


def test_random_layouts() -> None:
    source = random.Random(0)
    for _ in range(200):
        fields = [
            (f"f{i}", np.dtype(source.choice(["?", "u1", "<f2", "<i4", "<f8", "<c16"])), shape)
            for i, shape in enumerate(
                tuple(source.randrange(4) for _ in range(source.randrange(4))) for _ in range(source.randrange(1, 8))
            )
        ]
        layout = Layout(fields)
        buffer = layout.allocate()
        views = layout.views(buffer)
        for i, view in enumerate(views.values()):
            view.reshape(-1).view(np.uint8)[...] = i + 1
        for i, view in enumerate(views.values()):
            assert (view.reshape(-1).view(np.uint8) == i + 1).all()


def test_notes_carry_their_kind_in_the_first_byte() -> None:
    assert note(Command.STOP) == bytes([Command.STOP])
    assert note(Report.REPLY, b"body")[1:] == b"body" and note(Report.REPLY, b"body")[0] == Report.REPLY
    for kinds in (Command, Report, Tag):
        values = [int(kind) for kind in kinds]
        assert len(set(values)) == len(values) and all(0 < value < 256 for value in values)


def test_probes() -> None:
    params = np.arange(12, dtype=np.float32).reshape(4, 3)
    data = probe_note(7, 2**40, params[::-1])
    assert data[0] == Command.PROBE
    version, sequence, got = read_probe(data[1:])
    assert (version, sequence) == (7, 2**40)
    assert got is not None and got.dtype == np.float32
    np.testing.assert_array_equal(got, params[::-1])
    assert read_probe(probe_note(3, -1, None)[1:]) == (3, -1, None)
    # 64 states of 4 logits: the size that APS rests on
    assert len(probe_note(1, 1, np.zeros((64, 4), np.float32))) <= 1024 + 64


def test_headers_and_fields_are_little_endian_whatever_the_machine() -> None:
    for dtype in (messages.STEP_HEADER, messages.ROLLOUT_HEADER, messages.WEIGHTS_HEADER, messages.PROBE_HEADER):
        for kind, _ in (dtype.fields or {}).values():
            assert kind.newbyteorder("<") == kind
