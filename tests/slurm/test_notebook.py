"""A notebook on the real cluster: its job is interrupted once while the notebook waits, and ends with its result."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from notebooks import execute
from slurm_cluster import SLOW, Cluster, Submitted, under_way, until

from clusterenv_hpc.jobs import record, slurm

pytestmark = [pytest.mark.needs("slurm", "namespaces", "notebook"), pytest.mark.timeout(280)]
TOTAL_STEPS = 4000


class Reader(threading.Thread):
    """Somebody who runs the notebook, cell after cell."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.error = folder, None
        self.shown: dict[str, str] = {}

    def run(self) -> None:
        words = [*SLOW, f"total_steps={TOTAL_STEPS}"]
        try:
            self.shown = execute("slurm_launch.ipynb", self.folder, 240, WORDS=words)
        except Exception as error:
            self.error = error

    def jobs(self) -> list[Submitted]:
        """What was launched so far, the first one first."""
        found = [(record.read(path.parent), path.parent) for path in self.folder.glob("runs/*/job.json")]
        return sorted((Submitted(jobs[-1]["job"], path) for jobs, path in found if jobs), key=lambda run: run.job)

    def first(self) -> list[Submitted]:
        """The first job, once it is there; raises what a cell has raised."""
        if self.error is not None:
            raise self.error
        return self.jobs()


def test_the_launch_notebook_outlives_an_interruption(cluster: Cluster, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.start()
    try:
        (run, *_) = until(reader.first, "the notebook's first job")
        under_way(run)
        slurm.cancel([run.job], signal="USR2")
        until(lambda: slurm.look(run.job).restarts == 1, lambda: run.log, 30)
        assert slurm.look(run.job).active, "the notebook is waiting for it"
        cluster.wait(run.job)
        reader.join(240)
    finally:
        cluster.jobs += [one.job for one in reader.jobs()]
    assert not reader.is_alive()
    if reader.error is not None:
        raise reader.error
    summary, shown = run.summary, reader.shown
    assert shown["import shutil"] == "'slurm'"
    assert (summary["env_steps"], summary["exit_reason"]) == (TOTAL_STEPS, "completed")
    assert summary["workers"] == 3 and len(set(summary["hosts"])) == 2
    assert "stopped by SIGUSR2; all is saved" in run.log
    run.check_continuous()
    result = shown["summary = job.result(timeout_s=1800)"]
    assert f"{TOTAL_STEPS} steps in {summary['updates']} updates, completed" in result
    assert re.search(r"resumed from: update-\d+\.pt", result)
    assert "return.png" in shown["from IPython.display import Image"]
    # The array: one number, two elements, two runs that came to their end.
    one, other = sorted((each for each in reader.jobs() if "_" in each.job), key=lambda each: each.job)
    assert one.job.partition("_")[0] == other.job.partition("_")[0]
    assert [each.summary["seed"] for each in (one, other)] == [1, 2]
    assert all(each.summary["env_steps"] == TOTAL_STEPS for each in (one, other))
    (cancelled,) = (text for line, text in shown.items() if line.startswith("unwanted = "))
    assert cancelled == "'CANCELLED'"
