"""Lets tests import what lies beside their folders: ``toy_envs`` and ``exact``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
