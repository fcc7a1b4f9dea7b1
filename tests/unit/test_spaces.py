"""Spaces: their leaves, taking values apart and together, and a description that compares and restores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import toy_envs as toy
from exact import assert_same
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from clusterenv_hpc.envs.infos import array_leaves, check_actions, slice_actions
from clusterenv_hpc.envs.spaces import SpaceError, decode_space, encode_space, join, leaves, map_tree, split

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(0, 255, (4, 5, 3), np.uint8),
    spaces.Box(np.array([-1.0, -np.inf]), np.array([np.inf, 2.0]), dtype=np.float64),
    spaces.Box(-(2**40), 2**40, (2,), np.int64),
    spaces.Box(0, np.inf, (2,), np.int64),
    spaces.Box(-np.inf, np.inf, (2,), np.int32),
    spaces.Box(0, 1, (2,), np.bool_),
    spaces.Box(0.0, 1.0, (), np.float16),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.Discrete(4, dtype=np.int32),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([[3, 4], [5, 6]], dtype=np.int32, start=[[0, 1], [-1, 7]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 3)),
    spaces.MultiBinary([4]),
    spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 1, (2,)))))),
    spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Dict({"k": spaces.Box(0, 1, (2, 2))}))]),
    toy.Kinds.observation_space,
    toy.NestedActions.action_space,
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_description_restores_the_space(space: spaces.Space[Any]) -> None:
    restored = decode_space(encode_space(space))
    assert restored == space
    assert repr(restored) == repr(space)
    assert encode_space(restored) == encode_space(space)
    assert [leaf.dtype for leaf in leaves(restored)] == [leaf.dtype for leaf in leaves(space)]
    restored.seed(3)
    space.seed(3)
    assert_same(restored.sample(), space.sample())
    assert batch_space(restored, 3) == batch_space(space, 3)


def test_different_spaces_have_different_descriptions() -> None:
    different = [
        *SPACES,
        spaces.Box(-1.0, 1.0, (3,), np.float64),
        spaces.Box(-1.0, 1.5, (3,), np.float32),
        spaces.Discrete(5),
        spaces.Discrete(4, start=1),
        spaces.MultiBinary(4),
        spaces.Dict([("a", spaces.Dict({"k": spaces.Box(0, 1, (2, 2))})), ("z", spaces.Discrete(2))]),
    ]
    descriptions = {encode_space(space) for space in different}
    assert len(descriptions) == len(different)


def test_leaves_name_every_array_in_order() -> None:
    assert [(leaf.path, leaf.dtype.str, leaf.shape) for leaf in leaves(toy.Kinds.observation_space)] == [
        ("['apple'][0]", "<f8", (2, 2)),  # Gymnasium sorts a plain dict's keys
        ("['apple'][1]", "<i8", ()),
        ("['apple'][2]['bits']", "|i1", (2, 3)),
        ("['apple'][2]['one']", "|i1", (4,)),
        ("['flag']", "<i4", ()),
        ("['half']", "<f2", (2,)),
        ("['many']", "<i8", (2,)),
        ("['matrix']", "<i4", (2, 2)),
        ("['scalar']", "<f4", ()),
        ("['zebra']", "|u1", (4, 5, 3)),
    ]
    assert [leaf.path for leaf in leaves(spaces.Discrete(2))] == [""]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_split_and_join_are_inverse_and_share_memory(space: spaces.Space[Any]) -> None:
    space.seed(0)
    batch = concatenate(space, [space.sample() for _ in range(3)], create_empty_array(space, 3))
    arrays = split(space, batch)
    for array, leaf in zip(arrays, leaves(space), strict=True):
        assert array.dtype == leaf.dtype and array.shape == (3, *leaf.shape)
    assert_same(join(space, arrays), batch)
    again = split(space, join(space, arrays))
    assert all(one is other for one, other in zip(arrays, again, strict=True))


def test_map_tree_keeps_the_structure() -> None:
    assert map_tree(lambda x: x + 1, {"a": (1, {"b": 2}), "c": 3}) == {"a": (2, {"b": 3}), "c": 4}


@pytest.mark.parametrize(
    ("space", "path"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), spaces.Text(5)))}), r"Text.*\['a'\]\[1\]"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "OneOf"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_spaces_without_a_fixed_shape_are_refused(space: spaces.Space[Any], path: str) -> None:
    for function in (leaves, encode_space):
        with pytest.raises(SpaceError, match=path) as caught:
            function(space)
        assert "expected Box, Discrete" in str(caught.value)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_slices_of_actions_are_those_of_gymnasium(space: spaces.Space[Any]) -> None:
    space.seed(1)
    batched = batch_space(space, 5)
    actions = concatenate(space, [space.sample() for _ in range(5)], create_empty_array(space, 5))
    check_actions(space, actions, 5)
    everyone = list(iterate(batched, actions))
    for first, end in ((0, 2), (2, 5)):
        part = slice_actions(space, actions, first, end)
        check_actions(space, part, end - first)
        assert_same(list(iterate(batch_space(space, end - first), part)), everyone[first:end])
    arrays = array_leaves(space, actions)
    assert arrays is not None
    assert all(one is other for one, other in zip(arrays, split(space, actions), strict=True))


def test_actions_that_are_not_arrays_are_noticed() -> None:
    assert array_leaves(spaces.Discrete(2), [0, 1]) is None
    assert array_leaves(spaces.Discrete(2), (0, 1)) is None
    pair = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
    assert array_leaves(pair, (np.zeros(2, int), [0, 1])) is None
    assert len(array_leaves(pair, (np.zeros(2, int), np.ones(2, int))) or ()) == 2
    assert slice_actions(pair, ([0, 1, 1], (0, 1, 2)), 1, 3) == ([1, 1], (1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"gear": a["gear"][:3]}, r"actions\['gear'\] must be for num_envs=4 environments.*got 3"),
        (lambda a: a | {"pair": (a["pair"][0], [])}, r"actions\['pair'\]\[1\] must be for num_envs=4.*list \[\]"),
        (lambda a: a | {"pair": (a["pair"][0],)}, r"actions\['pair'\] have no part 1"),
        (lambda a: {"gear": a["gear"]}, "actions have no part 'pair'"),
        (lambda a: 3, "actions have no part 'gear'"),
        (lambda a: a | {"gear": 2}, r"actions\['gear'\] must be for num_envs=4 environments.*got int 2"),
    ],
)
def test_actions_for_another_number_of_environments_are_refused(change: Any, message: str) -> None:
    space = toy.NestedActions.action_space
    with pytest.raises(ValueError, match=message):
        check_actions(space, change(batch_space(space, 4).sample()), 4)
