"""Distributions over discrete kinds of action: one choice, several independent choices, bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .distribution import Distribution, device_of, torch_dtype

# Categorical kinds share these.  Logits are [..., C]; -inf marks a masked choice and must never become NaN.


def _gumbel(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """The *negative* of Gumbel noise: ``log E`` with E exponential, so that a sample is ``argmax(logits - noise)``."""
    noise = torch.empty(tuple(shape), dtype=torch.float32, device=device_of(generator))
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
        self._torch_dtype = torch_dtype(self.action_dtype)

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
        self._torch_dtype = torch_dtype(self.action_dtype)
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
        self._torch_dtype = torch_dtype(self.action_dtype)

    def noise(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(
            (*shape, self.noise_size), generator=generator, device=device_of(generator), dtype=torch.float32
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
