"""The channel over real MPI: the checks of ``channel_checks`` on three ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from channel_checks import CHECKS

SCRIPT = Path(__file__).parents[1] / "channel_checks.py"


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.needs("openmpi"))])
def test_the_mpi_channel(mpiexec: Callable[..., Any], mpi: str) -> None:
    ran = mpiexec(3, SCRIPT, mpi=mpi, timeout=60).check()
    assert ran.stdout.split() == [word for name in CHECKS for word in ("passed", name)]
