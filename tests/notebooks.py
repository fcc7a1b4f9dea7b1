"""Running the notebooks of experiments/notebooks/ as a reader would, with other values in their first code cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "experiments/notebooks"


def execute(name: str, cwd: Path, timeout_s: float, **values: Any) -> dict[str, str]:
    """Runs a notebook in a kernel of its own, started in ``cwd``; what each code cell has shown, by its first line.

    ``values`` replace those of the cell tagged ``parameters``.  Raises CellExecutionError where a cell does.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / name, as_version=4)
    (place,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    lines = [f"{key} = {value!r}" for key, value in values.items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(["# by the test", *lines])))
    where = {"metadata": {"path": str(cwd)}}
    NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=where).execute()
    return {
        cell.source.splitlines()[0]: "".join(map(_shown, cell.outputs))
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def _shown(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
