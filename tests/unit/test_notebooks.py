"""The notebooks: stored clean, and the local one run from its first cell to its last."""

from __future__ import annotations

import json
import re

import pytest
from notebooks import FOLDER, execute

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_without_a_machines_paths(path):
    text = path.read_text()
    assert not re.search(r"/(home|root|work|tmp|scratch|Users)\b", text)
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert [cell["metadata"].get("tags") for cell in code].count(["parameters"]) == 1
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert len([cell for cell in cells if cell["cell_type"] == "markdown"]) * 2 >= len(code), "it shall teach"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_the_text_links_to_is_there(path):
    repository = FOLDER.parents[1]
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    for page in re.findall(r"`(docs/\w+\.md)`", text):
        assert (repository / page).is_file(), page
    for other in re.findall(r"`(\w+\.ipynb)`", text):
        assert (FOLDER / other).is_file(), other


@pytest.mark.needs("notebook")
def test_quickstart_runs(tmp_path):
    shown = execute("quickstart.ipynb", tmp_path, 100, TOTAL_STEPS=20_000, EPISODES=4)
    (training,) = (text for line, text in shown.items() if line.startswith("job = ce.launch"))
    assert "'env_steps': 20000" in training and "'completed'" in training
    assert "greedy return" in shown["import subprocess"] and "over 4 episodes" in shown["import subprocess"]
    assert "return.png" in shown["import pandas"]
