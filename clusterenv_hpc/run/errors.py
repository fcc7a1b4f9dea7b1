"""How an exception is told to the person who started the program: in one line."""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

from clusterenv_hpc.comm.channel import LAST_WORDS_S

OUT_OF_MEMORY = ("MemoryError: ", "DefaultCPUAllocator: ", "CUDA out of memory")
"""What NumPy on another rank, and torch, say when they get none."""

HUNGRY = ("algo.num_steps", "algo.capacity", "algo.minibatch_size", "policy.hidden")
"""Keys that memory use grows with."""


def describe(error: BaseException) -> str:
    """One line on ``error``.  Errors of our own are made to be read; of others the kind and the place are told too."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY):
        text = text or "no memory is left"
        return f"{text}; less is needed with fewer envs_per_worker, or smaller {', '.join(HUNGRY)}"
    if type(error).__module__.startswith("clusterenv_hpc.") and text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text or 'no message'}{place}; CLUSTERENV_HPC_TRACEBACK=1 shows where it came from"


def exit_code(error: BaseException) -> int:
    """What the process ends with: an error may say so itself (2: asked for what cannot be), else 1."""
    return int(getattr(error, "exit_code", 1))


def abort_world(comm: Any, code: int) -> None:
    """End every rank with ``code``.  A launcher that is aborted at once may lose what this rank has just said."""
    time.sleep(LAST_WORDS_S)
    comm.Abort(code)


def wants_traceback() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get("CLUSTERENV_HPC_TRACEBACK") == "1"
