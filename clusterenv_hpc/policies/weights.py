"""A policy's acting parameters as one flat float32 array: the form in which weights cross the wire."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .protocol import PolicyError, acting_parameters


def num_weights(policy: nn.Module) -> int:
    """How many float32 numbers ``flat_weights`` has; tied parameters count once."""
    return sum(tensor.numel() for tensor in acting_parameters(policy))


def weights_layout(policy: nn.Module) -> str:
    """One line ``name shape dtype`` per tensor, in wire order: two ranks whose texts agree can exchange weights."""
    names = {id(tensor): name for name, tensor in (*policy.named_buffers(), *policy.named_parameters())}
    return "\n".join(
        f"{names.get(id(tensor), '?')} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in acting_parameters(policy)
    )


def flat_weights(policy: nn.Module, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The acting parameters as contiguous float32 ``[num_weights]``.

    Without ``out`` the array is new and read-only, so it may be shared as a snapshot.  Half precision survives the
    round trip exactly; float64 is rounded.  Raises ``ValueError`` if ``out`` does not fit.
    """
    tensors = acting_parameters(policy)
    size = sum(tensor.numel() for tensor in tensors)
    flat = np.empty(size, np.float32) if out is None else out
    _check(flat, size, "out")
    if out is not None and not (flat.flags.writeable and flat.flags.c_contiguous):
        raise ValueError("out must be a writeable, contiguous array.")
    if tensors:
        with torch.no_grad():
            # One concatenation on the parameters' own device, then one copy off it.
            pieces = [tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors]
            if all(piece.device.type == "cpu" for piece in pieces):
                torch.cat(pieces, out=torch.from_numpy(flat))
            else:
                np.copyto(flat, torch.cat(pieces).cpu().numpy())
    if out is None:
        flat.setflags(write=False)
    return flat


def load_flat_weights(policy: nn.Module, flat: NDArray[np.float32]) -> None:
    """Write ``flat`` into the acting parameters, in place; raises ``ValueError`` unless it is float32 of their size."""
    tensors = acting_parameters(policy)
    _check(flat, sum(tensor.numel() for tensor in tensors), "the flat weights")
    on_cpu = [tensor for tensor in tensors if _numpy_can_view(tensor)]
    staged = None if len(on_cpu) == len(tensors) else torch.tensor(flat)
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            stop = start + tensor.numel()
            if staged is None:
                # NumPy may read a read-only snapshot without a copy; torch may not.
                np.copyto(tensor.detach().numpy(), flat[start:stop].reshape(tensor.shape), casting="same_kind")
            else:
                tensor.copy_(staged[start:stop].view(tensor.shape), non_blocking=True)
            start = stop


def _numpy_can_view(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64, torch.float16)


def _check(flat: NDArray[np.float32], size: int, what: str) -> None:
    if not isinstance(flat, np.ndarray) or flat.dtype != np.float32 or flat.shape != (size,):
        got = f"{flat.dtype} {flat.shape}" if isinstance(flat, np.ndarray) else type(flat).__name__
        raise PolicyError(
            f"Expected {what} as a float32 array of shape ({size},), got {got}; "
            "the policy on the two sides must be built alike."
        )
