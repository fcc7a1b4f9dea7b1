"""Adam on many small parameters as fast as on one large one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam (Kingma, Ba 2015) with a global gradient-norm clip, computed on one flat copy of all parameters.

    A network of a few layers has a dozen parameters of a few KiB each; for these the cost of a step is that of
    *calling* a kernel per parameter and operation.  Here gradients are joined once, norm, clip and Adam each run
    once, and the result is written back: at equal results, about 70 of 700 microseconds less per step of PPO's 64-64
    networks than ``torch.optim.Adam(fused=True)`` behind a separate clip.  Parameters of less than 32 bits are
    trained in float32 and rounded on the way back.

    parameters: tensors on one device; each counts once.  max_grad_norm: None for no clip.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, eps: float, max_grad_norm: float | None
    ) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.max_grad_norm = max_grad_norm
        dtype = torch.float32
        for parameter in self.parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        self._flat = nn.Parameter(_join(self.parameters).to(dtype))
        sizes = [parameter.numel() for parameter in self.parameters]
        pieces = self._flat.detach().split(sizes)
        self._pieces = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        self._adam = torch.optim.Adam([self._flat], lr=learning_rate, eps=eps, fused=True)

    @torch.no_grad()
    def start(self, learning_rate: float) -> None:
        """Take up the parameters as they are now, whoever changed them; call before the first step of an update."""
        torch._foreach_copy_(self._pieces, self.parameters)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate

    def step(self, loss: Tensor) -> Tensor:
        """Minimise ``loss`` by one step; returns the gradient's norm before the clip, as a tensor nobody waited for.

        Parameters that the loss does not depend on have gradient 0.  ``.grad`` is neither read nor written.
        """
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            gradient = _join(gradients).to(self._flat.dtype)
            norm = torch.linalg.vector_norm(gradient)
            if self.max_grad_norm is not None:
                gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp_(max=1.0))
            self._flat.grad = gradient
            self._adam.step()
            torch._foreach_copy_(self.parameters, self._pieces)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count, as a snapshot of plain tensors and numbers."""
        return copy.deepcopy(self._adam.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave; the parameters themselves are the module's to restore."""
        self._adam.load_state_dict(copy.deepcopy(state))


def _join(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
