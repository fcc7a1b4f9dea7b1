"""What docs/new_algorithm.md shows is run: the blocks, one after the other, as a reader would."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from clusterenv_hpc.settings import checked

PAGE = Path(__file__).parents[2] / "docs" / "new_algorithm.md"


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, Any]]:
    """The names that the page's Python makes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module = ModuleType("shown")
    sys.modules["shown"] = module  # dataclasses look there
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), vars(module))
    yield vars(module)
    del sys.modules["shown"]
    torch.set_num_threads(threads)


def test_the_algorithm_of_the_page_runs(shown: dict[str, Any]) -> None:
    assert shown["update"] == 19 and shown["envs"].closed
    assert set(shown["metrics"]) == {"learning_rate", "value_loss", "entropy", "grad_norm"}
    assert all(np.isfinite(value) for value in shown["metrics"].values())


def test_it_can_be_saved_and_its_settings_are_checked(shown: dict[str, Any]) -> None:
    file = io.BytesIO()
    torch.save(shown["learner"].state_dict(), file)
    file.seek(0)
    shown["learner"].load_state_dict(torch.load(file, weights_only=True))
    with pytest.raises(ValueError, match="gamma=2"):
        checked(shown["A2CConfig"](gamma=2.0))


@pytest.mark.parametrize(
    "path",
    re.findall(r"`((?:clusterenv_hpc|conf|tests)/[\w/]+\.(?:py|yaml))`", PAGE.read_text()),
)
def test_the_files_it_names_exist(path: str) -> None:
    assert "a2c" in path.lower() or "ENV" in path or (PAGE.parents[1] / path).exists()
