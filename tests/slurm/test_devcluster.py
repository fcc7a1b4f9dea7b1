"""The development cluster itself: up, down, twice, at once, killed, side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("slurm", "namespaces")
DEVCLUSTER = Path(__file__).parents[2] / "slurm/devcluster"


class Lab:
    """One cluster's folder, and the scripts on it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        # Not the test's own mark: daemons live longer than the call that starts them.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERENV_HPC_TEST")}
        self.environ = {**plain, "DEVCLUSTER_DIR": str(folder), **settings}

    def __call__(self, *words: str, check: bool = True) -> str:
        """Runs a script; what it said."""
        done = self.start(*words)
        out, _ = done.communicate(timeout=100)
        assert not check or done.returncode == 0, out
        return out

    def start(self, script: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [DEVCLUSTER / script, *words], env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def shell(self, line: str) -> str:
        """A shell line after ``eval "$(slurm/devcluster/env)"``."""
        done = subprocess.run(
            ["bash", "-c", f'eval "$({DEVCLUSTER}/env)"; {line}'], env=self.environ, cwd="/", capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> list[str]:
        """What runs with this cluster's folder in its command line or as its slurm.conf."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path("/proc", entry, "cmdline").read_bytes()
                environ = Path("/proc", entry, "environ").read_bytes()
            except OSError:
                continue
            if str(self.folder).encode() + b"/" in words + environ:
                found.append(f"{entry}: {words!r}")
        return found


@pytest.fixture
def labs() -> Iterator[Path]:
    """A folder for clusters; whatever is still up in it at the end is taken down."""
    parent = Path(tempfile.mkdtemp(prefix="clusterenv-hpc-labs-"))
    parent.chmod(0o755)
    yield parent
    for folder in parent.glob("*/.devcluster"):
        Lab(folder.parent)("down", check=False)
    shutil.rmtree(parent)


def test_from_nothing_to_nothing(labs):
    lab = Lab(labs / "a", DEVCLUSTER_NODES="2")
    assert "down" in lab("status", check=False)
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    assert "2 nodes" in lab("up", "netns")
    assert "already up" in lab("up", "netns")
    assert "up: 2 of 2 nodes" in lab("status")
    assert sorted(lab.shell("srun --nodes=2 hostname").split()) == ["node1", "node2"]
    # From within a job the cluster is reached too, and the working directory is that of the shell.
    inner = lab.shell("srun --nodes=1 --chdir=/usr sh -c 'squeue --noheader --format=%i | wc -l; pwd'").split()
    assert inner == ["1", "/usr"]
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == before
    assert "down" in lab("down") and "already down" in lab("down")
    assert not (labs / "a").exists() and not lab.processes()


def test_two_at_once_and_side_by_side(labs):
    first, second = Lab(labs / "a", DEVCLUSTER_NODES="1"), Lab(labs / "b", DEVCLUSTER_NODES="1")
    started = [lab.start("up", "netns") for lab in (first, first, second)]
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert sum("already up" in text for text in said) == 1
    first("down")
    assert second.shell("srun hostname").split() == ["node1"] and not first.processes()


def test_a_killed_cluster_is_cleaned_and_started_again(labs):
    lab = Lab(labs / "a", DEVCLUSTER_NODES="1")
    lab("up", "netns")
    job = lab.shell("sbatch --parsable --output=/dev/null --wrap 'sleep 1000'").strip()
    lab.shell(f"until [ $(squeue --noheader --format=%t --job={job}) = R ]; do sleep 0.1; done")
    for path in (labs / "a/run").glob("*.pid"):
        subprocess.run(["kill", "-9", path.read_text().strip()], capture_output=True)
    assert "dead" in lab("status", check=False)
    assert "up: 1 nodes" in lab("up", "netns")
    assert lab.shell("squeue --noheader") == ""
    lab("down")
    assert not lab.processes()


def test_a_node_dies_and_comes_back(labs):
    lab = Lab(labs / "a", DEVCLUSTER_NODES="2")
    lab("up", "netns")
    assert "node2 killed" in lab("node", "kill", "2") and "dead already" in lab("node", "kill", "2")
    assert "node2 started" in lab("node", "start", "2")
    lab.shell("until [ $(sinfo -h -N -o %t | grep -c idle) -ge 2 ]; do sleep 0.1; done")
    assert sorted(lab.shell("srun --nodes=2 hostname").split()) == ["node1", "node2"]


def test_without_namespaces(labs):
    lab = Lab(labs / "a", DEVCLUSTER_NODES="2", DEVCLUSTER_PORT="27817")
    lab("up", "multi")
    assert sorted(lab.shell("srun --nodes=2 sh -c 'echo $SLURMD_NODENAME'").split()) == ["node1", "node2"]
    lab("down")
    assert not lab.processes()


@pytest.mark.needs("accounts")
def test_with_accounts_a_job_is_known_after_the_controller_has_forgotten_it(labs):
    lab = Lab(labs / "a", DEVCLUSTER_NODES="1", DEVCLUSTER_SACCT="1")
    lab("up", "netns")
    jobs = [lab.shell(f"sbatch --parsable --output=/dev/null --wrap 'exit {code}'").strip() for code in (0, 3)]
    lab.shell('while [ -n "$(squeue --noheader)" ]; do sleep 0.1; done')
    program = f"from clusterenv_hpc.jobs import slurm; print(*(slurm.from_accounts(job).state for job in {jobs}))"
    deadline = time.monotonic() + 20
    while (states := lab.shell(f'{sys.executable} -c "{program}"').split()) != ["COMPLETED", "FAILED"]:
        assert time.monotonic() < deadline, states
    lab("down")
    assert not lab.processes()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"DEVCLUSTER_NODES": "0"}, "DEVCLUSTER_NODES"),
        ({"DEVCLUSTER_PORT": "x"}, "DEVCLUSTER_PORT"),
        ({"DEVCLUSTER_NET": "10.1"}, "DEVCLUSTER_NET"),
        ({"DEVCLUSTER_AUTH": "ldap"}, "DEVCLUSTER_AUTH"),
        ({"DEVCLUSTER_DIR": "/tmp/a b"}, "DEVCLUSTER_DIR"),
    ],
)
def test_bad_settings_are_named(labs, settings, told):
    said = Lab(labs / "a", **settings)("up", "netns", check=False)
    assert told in said and len(said.splitlines()) == 1


def test_a_folder_with_something_else_in_it_is_left_alone(labs):
    (labs / "a").mkdir()
    (labs / "a/mine").write_text("x")
    lab = Lab(labs / "a")
    assert "holds something else" in lab("up", "netns", check=False)
    assert "not a cluster of ours" in lab("down", check=False)
    assert (labs / "a/mine").read_text() == "x"
