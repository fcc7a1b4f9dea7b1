"""Action distributions over one flat parameter array ``[..., P]``.

A distribution object holds the shape of an action space and nothing that changes.  Every method takes the parameters
explicitly, so the same object reads the behaviour policy's numbers off the wire and the learner's off its network.
Leading dimensions are free everywhere; nothing is ever summed or averaged over them.

Sampling is split in two.  :meth:`Distribution.noise` draws all the randomness of a whole rollout at once, and
:meth:`Distribution.sample` turns one step's share of it into actions without touching a generator: the worker's
inner loop makes two small torch calls per step, and a rollout depends on its noise alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus


class Distribution(ABC):
    """A family of action distributions, indexed by flat parameters ``[..., num_params]``.

    num_params: P, the parameters of one state's distribution.
    noise_size: K, the random numbers that one sample needs.
    action_shape, action_dtype: of one stored action, as it travels in a rollout.
    """

    num_params: int
    noise_size: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]

    @abstractmethod
    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw ``[*shape, noise_size]`` float32: what ``sample`` needs for actions of leading shape ``shape``.

        On the generator's device.
        """

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Actions ``[..., *action_shape]``: a deterministic function of ``params [..., P]`` and ``noise [..., K]``."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """The greedy action ``[..., *action_shape]``."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """``log pi(actions)``, ``[...]``: actions ``[..., *action_shape]`` as stored."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats, ``[...]``."""

    @abstractmethod
    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """``KL(p || q)`` in nats per state, ``[...]``; never negative, infinite where p goes where q cannot."""

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once; a subclass overrides this where they share work."""
        return self.log_prob(params, actions), self.entropy(params)

    def env_actions(self, actions: NDArray[Any]) -> NDArray[Any]:
        """What ``env.step`` gets for stored actions ``[..., *action_shape]``: the same array wherever possible."""
        return actions

    def proper(self, params: Tensor) -> Tensor:
        """``[...]`` bool: whether the parameters define a distribution at all."""
        return params.isfinite().all(-1)

    def describe(self) -> str:
        """What ``num_params`` consists of, for error messages."""
        return f"{self.num_params} parameters"


# Categorical kinds share these.  Logits are [..., C]; -inf marks a masked choice and must never become NaN.


def _gumbel(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """The *negative* of Gumbel noise: ``log E`` with E exponential, so that a sample is ``argmax(logits - noise)``."""
    noise = torch.empty(tuple(shape), dtype=torch.float32, device=_device(generator))
    noise.exponential_(generator=generator)
    # A zero would become -inf, and choose a masked (-inf) logit as NaN.
    return noise.clamp_(min=torch.finfo(torch.float32).tiny).log_()


def _entropy(logp: Tensor) -> Tensor:
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)
    return -(logp.exp() * finite).sum(-1)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    p = logp.exp()
    possible = p > 0
    return (p * torch.where(possible, logp - torch.where(possible, logq, 0.0), 0.0)).sum(-1)


def _proper_logits(logits: Tensor) -> Tensor:
    return (logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)  # comparisons with NaN are False


class Categorical(Distribution):
    """One of ``n`` choices, counted from ``start``; params are logits, of which some may be -inf (masked).

    Sampling is the Gumbel-max trick (Maddison, Tarlow, Minka 2014): exact, and one subtraction and one argmax a step.
    """

    def __init__(self, n: int, start: int = 0, dtype: Any = np.int64) -> None:
        self.num_params = self.noise_size = int(n)
        self.start = int(start)
        self.action_shape = ()
        self.action_dtype = np.dtype(dtype)
        self._torch_dtype = _torch_dtype(self.action_dtype)

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        return _gumbel((*shape, self.noise_size), generator)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return self._members((params - noise).argmax(-1))

    def mode(self, params: Tensor) -> Tensor:
        return self._members(params.argmax(-1))

    def _members(self, index: Tensor) -> Tensor:
        if self.start:
            index = index + self.start
        return index if self._torch_dtype is torch.int64 else index.to(self._torch_dtype)

    def _log_prob(self, logp: Tensor, actions: Tensor) -> Tensor:
        index = actions.to(torch.int64)  # first: a narrow dtype could overflow in the subtraction
        if self.start:
            index = index - self.start
        return logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return self._log_prob(params.log_softmax(-1), actions)

    def entropy(self, params: Tensor) -> Tensor:
        return _entropy(params.log_softmax(-1))

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logp = params.log_softmax(-1)
        return self._log_prob(logp, actions), _entropy(logp)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return _kl(p.log_softmax(-1), q.log_softmax(-1)).clamp(min=0)

    def proper(self, params: Tensor) -> Tensor:
        return _proper_logits(params)

    def describe(self) -> str:
        return f"{self.num_params} logits, one per action"


class MultiCategorical(Distribution):
    """Independent choices, ``nvec[i]`` of them in place i; ``nvec`` may have any number of dimensions.

    Params are the logits of all places one after the other, in C order of ``nvec``: ``P = nvec.sum()``.
    Inside, every place is padded to the widest one, so that no loop runs over places.
    """

    def __init__(self, nvec: Any, start: Any = None, dtype: Any = np.int64) -> None:
        nvec = np.asarray(nvec, dtype=np.int64)
        self.nvec = nvec
        self.action_shape = nvec.shape
        self.action_dtype = np.dtype(dtype)
        self._torch_dtype = _torch_dtype(self.action_dtype)
        flat = nvec.reshape(-1)
        self._places, self._width = flat.size, int(flat.max())
        self.num_params = int(flat.sum())
        self.noise_size = self._places * self._width
        starts = np.zeros_like(flat) if start is None else np.broadcast_to(np.asarray(start, np.int64), nvec.shape)
        self._start = torch.from_numpy(starts.reshape(-1).copy())
        self._shifted = bool(starts.any())
        # Where the padded [places, width] array takes its logits from; padding repeats its place's first logit.
        column = np.arange(self._width)
        padding = column >= flat[:, None]
        source = np.where(padding, 0, column) + (np.cumsum(flat) - flat)[:, None]
        self._padding = torch.from_numpy(padding)
        self._source = torch.from_numpy(source.reshape(-1)) if padding.any() else None

    def _pad(self, params: Tensor) -> Tensor:
        """``[..., P] -> [..., places, width]``, padding holding copies of a real logit."""
        if self._source is not None:
            params = params.index_select(-1, self._source.to(params.device))
        return params.reshape((*params.shape[:-1], self._places, self._width))

    def _logits(self, params: Tensor) -> Tensor:
        padded = self._pad(params)
        return padded if self._source is None else padded.masked_fill(self._padding.to(params.device), -torch.inf)

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        noise = _gumbel((*shape, self._places, self._width), generator)
        # Infinite noise means that padding is never chosen, at no cost in the worker's loop.
        return noise.masked_fill_(self._padding.to(noise.device), torch.inf).flatten(-2)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        padded = self._pad(params)
        return self._members((padded - noise.view(padded.shape)).argmax(-1))

    def mode(self, params: Tensor) -> Tensor:
        return self._members(self._logits(params).argmax(-1))

    def _members(self, index: Tensor) -> Tensor:
        if self._shifted:
            index = index + self._start.to(index.device)
        return index.to(self._torch_dtype).reshape((*index.shape[:-1], *self.action_shape))

    def _log_prob(self, logp: Tensor, actions: Tensor) -> Tensor:
        index = actions.to(torch.int64).reshape(logp.shape[:-1])
        if self._shifted:
            index = index - self._start.to(index.device)
        return logp.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return self._log_prob(self._logits(params).log_softmax(-1), actions)

    def entropy(self, params: Tensor) -> Tensor:
        return _entropy(self._logits(params).log_softmax(-1)).sum(-1)

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logp = self._logits(params).log_softmax(-1)
        return self._log_prob(logp, actions), _entropy(logp).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return _kl(self._logits(p).log_softmax(-1), self._logits(q).log_softmax(-1)).sum(-1).clamp(min=0)

    def proper(self, params: Tensor) -> Tensor:
        return _proper_logits(self._logits(params)).all(-1)

    def describe(self) -> str:
        return f"{self.num_params} logits, those of all {self._places} choices one after the other"


class Bernoulli(Distribution):
    """Independent bits of any shape; params are their logits, ``P`` = the number of bits; +-inf is a fixed bit."""

    def __init__(self, shape: int | Sequence[int], dtype: Any = np.int8) -> None:
        self.action_shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(s) for s in shape)
        self.num_params = self.noise_size = math.prod(self.action_shape)
        self.action_dtype = np.dtype(dtype)
        self._torch_dtype = _torch_dtype(self.action_dtype)

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(
            (*shape, self.noise_size), generator=generator, device=_device(generator), dtype=torch.float32
        )
        return uniform.logit_(eps=2.0**-25)  # logistic: P(noise < logit) = sigmoid(logit); never infinite

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return self._bits(params > noise)

    def mode(self, params: Tensor) -> Tensor:
        return self._bits(params > 0)

    def _bits(self, bits: Tensor) -> Tensor:
        return bits.to(self._torch_dtype).reshape((*bits.shape[:-1], *self.action_shape))

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return logsigmoid(torch.where(actions.reshape(params.shape) != 0, params, -params)).sum(-1)

    def _both(self, params: Tensor) -> Tensor:
        return torch.stack((logsigmoid(params), logsigmoid(-params)), -1)

    def entropy(self, params: Tensor) -> Tensor:
        return _entropy(self._both(params)).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        return _kl(self._both(p), self._both(q)).sum(-1).clamp(min=0)

    def proper(self, params: Tensor) -> Tensor:
        return ~params.isnan().any(-1)

    def describe(self) -> str:
        return f"{self.num_params} logits, one per bit"


class DiagonalGaussian(Distribution):
    """A Gaussian with diagonal covariance over a Box of any shape; params are D means, then D log std.

    The stored action is always the raw Gaussian sample ``u``.  With ``squash="clip"`` the env gets u clipped to the
    bounds, which it treats as its own business: log_prob, entropy and KL are those of u.  With ``squash="tanh"``
    the env gets ``a = mid + scale tanh(u)``, and log_prob and entropy are those of a (Haarnoja et al. 2018,
    appendix C); KL is the same for u and a.  Log std is read as clamped to [-20, 20], beyond which float32
    arithmetic on variances ends.
    """

    LOG_STD_LIMIT: ClassVar[float] = 20.0

    def __init__(self, space: spaces.Box, squash: Literal["clip", "tanh"] = "clip") -> None:
        if squash not in ("clip", "tanh"):
            raise ValueError(f"squash={squash!r} is not known; allowed: 'clip', 'tanh'.")
        self.squash = squash
        self.action_shape = space.shape
        self._size = self.noise_size = math.prod(space.shape)
        self.num_params = 2 * self._size
        # Integers and half floats would round the very sample whose log-probability is meant.
        self._env_dtype = np.dtype(space.dtype or np.float32)
        self.action_dtype = np.dtype(np.float64 if self._env_dtype == np.float64 else np.float32)
        self._torch_dtype = _torch_dtype(self.action_dtype)
        low, high = (self._bound(bound) for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        if squash == "tanh" and not bounded.all():
            raise ValueError(f"squash='tanh' needs finite bounds in every dimension, but the action space is {space}.")
        self._unbounded = bool((np.isneginf(low) & np.isposinf(high)).all())
        exact = np.float64 if self._env_dtype.kind in "iu" else self.action_dtype
        self._low, self._high = low.astype(exact), high.astype(exact)
        if squash == "tanh":
            scale = (high - low) / 2
            self._mid, self._scale = (low + scale).astype(exact), scale.astype(exact)
            # A dimension without extent (low == high) adds nothing to the density.
            log_scale = np.log(np.where(scale > 0, scale, 1.0))
            self._log_scale = float(log_scale.sum())

    def _bound(self, bound: NDArray[Any]) -> NDArray[np.float64]:
        values = bound.astype(np.float64)
        if self._env_dtype.kind in "iu" and self._env_dtype.itemsize == 8:
            # The largest float64 that an int64 (uint64) can hold; the limit itself rounds up to one too many.
            values = np.minimum(values, np.nextafter(2.0 ** (64 if self._env_dtype.kind == "u" else 63), 0.0))
        return values

    def split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., P] -> mean [..., D], log std [..., D]`` (clamped)."""
        mean, log_std = params[..., : self._size], params[..., self._size :]
        return mean, log_std.clamp(-self.LOG_STD_LIMIT, self.LOG_STD_LIMIT)

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(
            (*shape, self.noise_size), generator=generator, device=_device(generator), dtype=torch.float32
        )

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self.split(params)
        return self._shaped(torch.addcmul(mean, log_std.exp(), noise))

    def mode(self, params: Tensor) -> Tensor:
        """The mean; for tanh its image, which is the median of the squashed action."""
        return self._shaped(params[..., : self._size])

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.to(self._torch_dtype).reshape((*flat.shape[:-1], *self.action_shape))

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = self.split(params)
        flat = actions.reshape(mean.shape).to(mean.dtype)
        z = (flat - mean) * (-log_std).exp()
        logp = -0.5 * (z.square().sum(-1) + self._size * math.log(2 * math.pi)) - log_std.sum(-1)
        if self.squash == "tanh":
            logp = logp - _log_tanh_slope(flat).sum(-1) - self._log_scale
        return logp

    def entropy(self, params: Tensor) -> Tensor:
        mean, log_std = self.split(params)
        entropy = log_std.sum(-1) + 0.5 * self._size * (1 + math.log(2 * math.pi))
        if self.squash == "tanh":
            entropy = entropy + self._mean_log_slope(mean, log_std.exp()).sum(-1) + self._log_scale
        return entropy

    def _mean_log_slope(self, mean: Tensor, std: Tensor) -> Tensor:
        """``E[log(1 - tanh(u)^2)]`` per dimension; without closed form, so by the trapezoidal rule on +-6.4 std.

        For an analytic integrand it converges exponentially: the error is below 1e-5 nats for std <= 2, 1e-3 for
        std <= 3, 0.1 for std <= 10.
        """
        z = torch.linspace(-6.4, 6.4, 33, dtype=mean.dtype, device=mean.device)
        weights = (-0.5 * z.square()).softmax(-1)
        return (_log_tanh_slope(mean.unsqueeze(-1) + std.unsqueeze(-1) * z) * weights).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        mean_p, log_p = self.split(p)
        mean_q, log_q = self.split(q)
        gap = log_p - log_q
        # KL = sum (exp(2 gap) - 1)/2 - gap + (difference of means / std_q)^2 / 2; expm1 keeps small ones exact.
        means = ((mean_p - mean_q) * (-log_q).exp()).square()
        return (0.5 * (torch.expm1(2 * gap) + means) - gap).sum(-1).clamp(min=0)

    def env_actions(self, actions: NDArray[Any]) -> NDArray[Any]:
        if self.squash == "tanh":
            actions = self._mid + self._scale * np.tanh(actions)
        elif self._unbounded:
            return actions.astype(self._env_dtype, copy=False)
        if self._env_dtype.kind in "iu":
            actions = np.rint(actions)
        # After tanh too: mid + scale may round to just outside.
        return np.clip(actions, self._low, self._high).astype(self._env_dtype, copy=False)

    def describe(self) -> str:
        return f"{self._size} means, then {self._size} logarithms of standard deviations"


def _log_tanh_slope(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)``, stable for any u."""
    return 2 * (math.log(2) - u - softplus(-2 * u))


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def distribution_for(action_space: gymnasium.Space[Any]) -> Distribution:
    """The distribution that fits an action space; ``ValueError`` for a space that has none."""
    if isinstance(action_space, spaces.Discrete):
        return Categorical(int(action_space.n), int(action_space.start), action_space.dtype)
    if isinstance(action_space, spaces.MultiDiscrete):
        return MultiCategorical(action_space.nvec, action_space.start, action_space.dtype)
    if isinstance(action_space, spaces.MultiBinary):
        return Bernoulli(action_space.shape, action_space.dtype)
    if isinstance(action_space, spaces.Box):
        return DiagonalGaussian(action_space)
    raise ValueError(
        f"No action distribution for the action space {action_space}: expected Discrete, MultiDiscrete, MultiBinary "
        "or Box. Wrap the environment so that its actions are one of these, or give the policy a `distribution` "
        "attribute of its own (a subclass of clusterenv_hpc.policies.Distribution)."
    )
