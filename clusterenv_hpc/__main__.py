"""``python -m clusterenv_hpc``: the command line, where its script is not on PATH."""

from __future__ import annotations

from clusterenv_hpc.cli import run

if __name__ == "__main__":
    run()
