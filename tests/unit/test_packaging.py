"""The distribution."""

from __future__ import annotations

import re

import clusterenv_hpc


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", clusterenv_hpc.__version__)
