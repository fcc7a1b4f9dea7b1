"""Sequentials of plain layers, called without the module machinery: the same functions on the same tensors.

At a worker's batch sizes a small network spends a third of its time between its layers: hooks are looked for,
attributes fetched, calls wrapped.  ``make_lean`` takes that out of every ``torch.nn.Sequential`` in a policy whose
layers nobody hooked into.  The results are equal to the bit, and weights are still read where the modules hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_PLAIN: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Tanh: torch.tanh,
    nn.ReLU: torch.relu,
    nn.Sigmoid: torch.sigmoid,
    nn.SiLU: nn.functional.silu,
    nn.ELU: nn.functional.elu,
    nn.GELU: nn.functional.gelu,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Lean(nn.Sequential):
    """A Sequential that calls the functions of its layers."""

    def __call__(self, x: Any) -> Any:
        for function in self.__dict__["_functions"]:
            x = function(x)
        return x


def make_lean(policy: nn.Module) -> None:
    """Change ``policy``, which must be this process's own copy, so that its Sequentials cost less to call.

    Left alone: Sequentials with hooks, and of a class of their own.  Layers that are not known here are called as
    before.  Adding hooks or exchanging layers has no effect until ``make_plain``; loading weights in place has.
    """
    if any(getattr(nn.modules.module, f"_global{name}", None) for name in _HOOKS):
        return
    for module in policy.modules():
        if type(module) is nn.Sequential and not _hooked(module):
            module.__dict__["_functions"] = [_function(layer) for layer in module]
            module.__class__ = _Lean


def make_plain(policy: nn.Module) -> None:
    """Undo ``make_lean``."""
    for module in policy.modules():
        if type(module) is _Lean:
            del module.__dict__["_functions"]
            module.__class__ = nn.Sequential  # type: ignore[assignment]


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _function(layer: nn.Module) -> Callable[[Any], Any]:
    if _hooked(layer):
        return layer
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return lambda x: linear(x, weight, bias)
    plain = getattr(layer, "alpha", 1.0) == 1.0 and getattr(layer, "approximate", "none") == "none"
    if not plain or getattr(layer, "inplace", False):
        return layer
    return _PLAIN.get(type(layer), layer)
