"""The networks that come with the package: an actor and a critic for any nested observation space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from .distributions import DiagonalGaussian, Distribution, distribution_for
from .protocol import PolicyError, Tree

_ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {
    "tanh": (nn.Tanh, math.sqrt(2)),
    "relu": (nn.ReLU, math.sqrt(2)),
    "elu": (nn.ELU, math.sqrt(2)),
    "silu": (nn.SiLU, math.sqrt(2)),
}


class ActorCritic(nn.Module):
    """Distribution parameters and state values from encoders and fully connected layers, initialised orthogonally.

    hidden: widths of the fully connected layers, in the actor and in the critic alike.
    activation: "tanh", "relu", "elu" or "silu"; convolutions always use ReLU.
    critic: "separate" gives it layers of its own (Andrychowicz et al. 2021 found that better for small networks), and
        then only the actor travels to the workers; "shared" puts two heads on one trunk.
    distribution: defaults to the one for the action space.
    std: a Gaussian's standard deviations are "free" parameters, alike in all states, or outputs of the network
        through "softplus", as in arXiv 2509.24305.  Their logarithms start at ``log_std``, or near it.

    Observations: a tree of tensors with any leading batch dimensions.  Vectors are used as they are, images (uint8,
    rank 2 or 3, either channel order) pass convolutions, discrete kinds are one-hot.  Raises ``PolicyError`` for a
    space that has no such form, ``ValueError`` for bad settings.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        critic: Literal["separate", "shared"] = "separate",
        distribution: Distribution | None = None,
        log_std: float = 0.0,
        std: Literal["free", "softplus"] = "free",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not known; allowed: {', '.join(_ACTIVATIONS)}.")
        if critic not in ("separate", "shared"):
            raise ValueError(f"critic={critic!r} is not known; allowed: separate, shared.")
        if std not in ("free", "softplus"):
            raise ValueError(f"std={std!r} is not known; allowed: free, softplus.")
        if any(not isinstance(width, (int, np.integer)) or width < 1 for width in hidden):
            raise ValueError(f"hidden={tuple(hidden)!r}; expected widths that are whole numbers of at least 1.")
        self.distribution = distribution_for(action_space) if distribution is None else distribution
        self.trunk: nn.Module | None = None
        if critic == "shared":
            layers, features = _trunk(observation_space, hidden, activation)
            self.trunk = nn.Sequential(*layers)
            self.actor = nn.Sequential(_head(features, self.distribution, log_std, std))
            self.critic = nn.Sequential(_linear(features, 1, gain=1.0))
        else:
            layers, features = _trunk(observation_space, hidden, activation)
            self.actor = nn.Sequential(*layers, _head(features, self.distribution, log_std, std))
            layers, features = _trunk(observation_space, hidden, activation)
            self.critic = nn.Sequential(*layers, _linear(features, 1, gain=1.0))

    def forward(self, observations: Tree) -> Tensor:
        """Distribution parameters ``[..., P]``."""
        return self.actor(observations if self.trunk is None else self.trunk(observations))

    def value(self, observations: Tree) -> Tensor:
        """State values ``[...]``."""
        return self.critic(observations if self.trunk is None else self.trunk(observations)).squeeze(-1)

    def forward_and_value(self, observations: Tree) -> tuple[Tensor, Tensor]:
        """Both, through a shared trunk only once."""
        features = observations if self.trunk is None else self.trunk(observations)
        return self.actor(features), self.critic(features).squeeze(-1)

    def acting_parameters(self) -> Iterator[Tensor]:
        """What workers need: the trunk if there is one, and the actor."""
        if self.trunk is not None:
            yield from self.trunk.parameters()
        yield from self.actor.parameters()


class _GaussianHead(nn.Module):
    """Means from a linear layer, log std as free parameters; together the flat parameters."""

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__()
        self.mean = _linear(features, size, gain=0.01)
        self.log_std = nn.Parameter(torch.full((size,), float(log_std)))

    def forward(self, features: Tensor) -> Tensor:
        mean = self.mean(features)
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)


class _SoftplusHead(nn.Module):
    """Means and, through softplus, standard deviations from one linear layer; as flat parameters with log std."""

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__()
        self.outputs = _linear(features, 2 * size, gain=0.01)
        limit = DiagonalGaussian.LOG_STD_LIMIT
        std = math.exp(min(max(log_std, -limit), limit))
        assert isinstance(self.outputs.bias, Tensor)
        with torch.no_grad():
            self.outputs.bias[size:] = std + math.log(-math.expm1(-std))  # whose softplus is std

    def forward(self, features: Tensor) -> Tensor:
        mean, raw = self.outputs(features).chunk(2, -1)
        # Far below 0 softplus(x) is exp(x), and then nothing.
        return torch.cat((mean, torch.where(raw < -15.0, raw, softplus(raw.clamp_min(-15.0)).log())), -1)


class _Vector(nn.Module):
    """Any array, flattened behind the batch dimensions, as float32; uint8 is brought to [0, 1]."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        assert space.shape is not None
        self.rank = len(space.shape)
        self.features = math.prod(space.shape)
        self.scale = _scale(space)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        if self.scale != 1.0:
            x = x * self.scale
        return x.unsqueeze(-1) if self.rank == 0 else x.flatten(-self.rank) if self.rank > 1 else x


class _OneHot(nn.Module):
    """Discrete and MultiDiscrete of any start and shape: the one-hot vectors of all places, one after the other."""

    place: Tensor
    member: Tensor

    def __init__(self, nvec: Any, start: Any) -> None:
        super().__init__()
        nvec, start = np.broadcast_arrays(np.asarray(nvec, np.int64), np.asarray(start, np.int64))
        self.rank = nvec.ndim
        self.features = int(nvec.sum())
        pairs = [(i, s + k) for i, (n, s) in enumerate(zip(nvec.flat, start.flat, strict=True)) for k in range(n)]
        place, member = np.array(pairs, np.int64).T.copy()
        self.register_buffer("place", torch.from_numpy(place.copy()), persistent=False)
        self.register_buffer("member", torch.from_numpy(member.copy()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.int64)
        if self.rank == 0:
            x = x.unsqueeze(-1)
        else:
            x = (x.flatten(-self.rank) if self.rank > 1 else x).index_select(-1, self.place)
        return (x == self.member).to(torch.float32)


class _Image(nn.Module):
    """Convolutions over ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]`` (the smaller end of the shape is C).

    From 36 x 36 on the layers of Mnih et al. 2015 (Nature DQN), below that two of 3 x 3 as in MinAtar
    (Young, Tian 2019), the first of them strided where there is room.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.rank = len(space.shape)
        self.channels_last = self.rank == 3 and space.shape[2] <= space.shape[0]
        self.scale = _scale(space)
        channels, height, width = self._channels_first(torch.zeros(space.shape)).shape
        relu = math.sqrt(2)

        def conv(inputs: int, outputs: int, size: int, stride: int, padding: int = 0) -> nn.Module:
            return _orthogonal(nn.Conv2d(inputs, outputs, size, stride, padding), relu)

        if min(height, width) >= 36:
            layers = [conv(channels, 32, 8, 4), conv(32, 64, 4, 2), conv(64, 64, 3, 1)]
            self.features = 512
        else:
            stride = 2 if min(height, width) >= 16 else 1
            layers = [conv(channels, 16, 3, stride, padding=1), conv(16, 32, 3, stride, padding=1)]
            self.features = 128
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Flatten())
        with torch.no_grad():
            size = self.layers(torch.zeros(1, channels, height, width)).shape[1]
        self.layers.extend([_linear(size, self.features, relu), nn.ReLU()])

    def _channels_first(self, x: Tensor) -> Tensor:
        if self.rank == 2:
            return x.unsqueeze(-3)
        return x.movedim(-1, -3) if self.channels_last else x

    def forward(self, x: Tensor) -> Tensor:
        x = self._channels_first(x)
        batch = x.shape[:-3]
        features = self.layers(x.reshape(-1, *x.shape[-3:]).to(torch.float32) * self.scale)
        return features.reshape(*batch, self.features)


class _Join(nn.Module):
    """The parts of a Dict (in the space's order of keys) or Tuple, encoded and concatenated."""

    def __init__(self, keys: Sequence[Any], parts: Sequence[gymnasium.Space[Any]]) -> None:
        super().__init__()
        self.keys = tuple(keys)
        self.parts = nn.ModuleList(_encoder(part) for part in parts)
        self.features = sum(_features(part) for part in self.parts)

    def forward(self, tree: Tree) -> Tensor:
        return torch.cat([part(tree[key]) for key, part in zip(self.keys, self.parts, strict=True)], -1)


def _encoder(space: gymnasium.Space[Any]) -> nn.Module:
    if isinstance(space, spaces.Box):
        image = space.dtype == np.uint8 and len(space.shape) in (2, 3)
        return _Image(space) if image else _Vector(space)
    if isinstance(space, spaces.MultiBinary):
        return _Vector(space)
    if isinstance(space, spaces.Discrete):
        return _OneHot(space.n, space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return _OneHot(space.nvec, space.start)
    if isinstance(space, spaces.Dict):
        return _Join(list(space.spaces), list(space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return _Join(range(len(space.spaces)), space.spaces)
    raise PolicyError(
        f"ActorCritic cannot read observations of the space {space}; expected Box, Discrete, MultiDiscrete, "
        "MultiBinary, or Dict and Tuple of these. Wrap the environment, or pass a policy of your own."
    )


def _features(encoder: nn.Module) -> int:
    return int(encoder.features)  # type: ignore[arg-type]


def _scale(space: gymnasium.Space[Any]) -> float:
    """1/255 for uint8 arrays; more where the space's bounds say that they hold less than a byte."""
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and space.high.size:
        return 1.0 / max(1.0, float(space.high.max()))
    return 1.0


def _trunk(space: gymnasium.Space[Any], hidden: Sequence[int], activation: str) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    if isinstance(space, spaces.Box) and space.dtype == np.float32 and len(space.shape) == 1:
        features = space.shape[0]  # nothing to encode, and a worker's every step would pay for doing it
    else:
        encoder = _encoder(space)
        layers.append(encoder)
        features = _features(encoder)
    module, gain = _ACTIVATIONS[activation]
    for width in hidden:
        layers += [_linear(features, int(width), gain), module()]
        features = int(width)
    return layers, features


def _head(features: int, distribution: Distribution, log_std: float, std: str) -> nn.Module:
    if isinstance(distribution, DiagonalGaussian):
        head = _GaussianHead if std == "free" else _SoftplusHead
        return head(features, distribution.num_params // 2, log_std)
    return _linear(features, distribution.num_params, gain=0.01)


def _linear(inputs: int, outputs: int, gain: float) -> nn.Module:
    return _orthogonal(nn.Linear(inputs, outputs), gain)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
