"""NIGT for the parameters of a torch module, used as torch's own optimizers are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clusterenv_hpc.gradients.nigt import NIGT, DivergedError, Schedule, Step


class TorchNIGT:
    """NIGT over torch parameters; descends, or ascends with ``maximize=True``, as torch's optimizers do.

    Between steps the parameters stand at the *extrapolated* point, because that is where the next gradient must be
    sampled and differentiated.  To evaluate or save the solution, enter :meth:`at_iterate`.

        optimizer = TorchNIGT(model.parameters(), alpha=0.01, eta=0.1)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        with optimizer.at_iterate():
            evaluate(model)

    The step is normalised over all parameters together.  The state is float64 on the CPU, whatever the parameters are.
    A parameter without a gradient counts as having gradient zero; a step with no gradient at all is refused.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter | torch.Tensor],
        *,
        alpha: Schedule,
        eta: Schedule = 0.1,
        maximize: bool = False,
    ) -> None:
        self.params = list(params)
        if not self.params:
            raise ValueError("params must hold at least one parameter, got none")
        for index, param in enumerate(self.params):
            if not isinstance(param, torch.Tensor) or not param.is_floating_point():
                kind = param.dtype if isinstance(param, torch.Tensor) else type(param).__name__
                raise ValueError(f"params[{index}] must be a floating-point tensor, got {kind}")
        self._sign = 1.0 if maximize else -1.0
        self._core = NIGT(_gather(self.params), alpha=alpha, eta=eta, dtype=np.float64)

    @property
    def updates(self) -> int:
        """How many updates have been made."""
        return self._core.updates

    def zero_grad(self) -> None:
        """Forget the gradients of the last backward pass."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> Step:
        """One update from the parameters' ``grad``; raises ``ValueError``, changing nothing, if not all finite,
        and ``DivergedError`` where the parameters cannot hold the next point."""
        if all(param.grad is None for param in self.params):
            raise ValueError("no parameter has a gradient: call backward() before step()")
        gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]
        done = self._core.step(self._sign * _gather(gradients))
        self._scatter(self._core.point)
        return done

    @contextmanager
    def at_iterate(self) -> Iterator[None]:
        """Within: the parameters hold theta_t.  Afterwards they stand at the extrapolated point again."""
        self._scatter(self._core.iterate)
        try:
            yield
        finally:
            self._scatter(self._core.point)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Plain tensors, the iterate included; no hyper-parameters."""
        return self._core.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state``; the parameters are set to its extrapolated point."""
        self._core.load_state_dict(state)
        self._scatter(self._core.point)

    @torch.no_grad()
    def _scatter(self, flat: NDArray[Any]) -> None:
        offset = 0
        for param in self.params:
            part = torch.from_numpy(np.array(flat[offset : offset + param.numel()]))
            if part.numel() and float(part.abs().max()) > torch.finfo(param.dtype).max:
                raise DivergedError(
                    f"an entry of {float(part.abs().max()):.3g} does not fit into {param.dtype} after {self.updates} "
                    "updates; choose a smaller alpha, or a larger eta"
                )
            param.copy_(part.view(param.shape))
            offset += param.numel()


def _gather(tensors: Iterable[torch.Tensor]) -> NDArray[np.float64]:
    parts = [tensor.detach().reshape(-1).to(device="cpu", dtype=torch.float64).numpy() for tensor in tensors]
    return np.concatenate(parts)
