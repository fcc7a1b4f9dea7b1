"""The checks that other tests are trusted with must themselves fail where they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., str]:
    """Runs a small suite under our conftest, with or without CI=true; its value is what pytest printed."""
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs(*names): what the test needs\n")

    def run(body: str, *, ci: bool) -> str:
        (tmp_path / "test_it.py").write_text("import pytest\n" + textwrap.dedent(body))
        environ = {name: text for name, text in os.environ.items() if name != "CI"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environ, **({"CI": "true"} if ci else {})}, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "body",
    [
        "def test_a(): pytest.skip('no time')",
        "@pytest.mark.skip\ndef test_a(): pass",
        "@pytest.mark.skipif(True, reason='x')\ndef test_a(): pass",
        "def test_a(): pytest.importorskip('there_is_no_such_module')",
        "import pathlib\n@pytest.fixture\ndef f(): pytest.skip('in a fixture')\ndef test_a(f): pass",
    ],
)
def test_a_skip_is_a_failure_in_ci_and_only_there(suite: Callable[..., str], body: str) -> None:
    assert "1 skipped" in suite(body, ci=False)
    told = suite(body, ci=True)
    assert "1 failed" in told or "1 error" in told, told
    assert "CI lets nothing be skipped" in told


def test_a_skipped_module_is_an_error_in_ci(suite: Callable[..., str]) -> None:
    body = "pytest.skip('all of it', allow_module_level=True)\ndef test_a(): pass"
    assert "1 skipped" in suite(body, ci=False)
    assert "1 error" in suite(body, ci=True)


def test_what_ci_cannot_have_may_be_skipped_there(suite: Callable[..., str]) -> None:
    body = """
        import conftest
        conftest.NEEDS["gpu"] = (lambda: False, "a CUDA device")
        conftest.NEEDS["envpool"] = (lambda: False, "pip install it")
        @pytest.mark.needs("gpu")
        def test_gpu(): pass
        @pytest.mark.needs("envpool")
        def test_envpool(): pass
        """
    assert "2 skipped" in suite(body, ci=False)
    told = suite(body, ci=True)
    assert "1 skipped" in told
    assert "1 failed" in told or "1 error" in told, told
    assert "needs envpool: pip install it" in told


def test_an_unknown_need_is_refused(suite: Callable[..., str]) -> None:
    told = suite("@pytest.mark.needs('magic')\ndef test_a(): pass", ci=False)
    assert "needs('magic'): expected one of gpu, openmpi" in told
    assert "1 passed" not in told


def test_a_process_left_behind_is_an_error_and_is_ended(suite: Callable[..., str]) -> None:
    body = """
        import os, subprocess
        def test_a():
            process = subprocess.Popen(["setsid", "--fork", "sleep", "1234"])
            process.wait()
        """
    told = suite(body, ci=False)
    assert "1 passed, 1 error" in told, told
    assert "left behind, and now killed" in told
    assert "sleep 1234" in told
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x001234" in _read(path)]
    assert alive == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_ranks_that_hang_are_killed_and_told(suite: Callable[..., str]) -> None:
    body = """
        def test_a(mpiexec):
            mpiexec(2, "import sys, time\\nprint('here', flush=True)\\ntime.sleep(99)\\n", timeout=3)
        """
    told = suite(body, ci=False)
    assert "1 failed" in told, told
    assert "no end after 3 s" in told
    assert "here" in told
    assert "error" not in told.splitlines()[-1], "nothing is left for the orphan check"


def test_ranks_run(mpiexec: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ran = mpiexec(3, "from mpi4py import MPI\nprint(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, flush=True)\n")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "0 3", "1 3", "2 3"]


@pytest.mark.needs("openmpi")
def test_ranks_of_debians_open_mpi_run(mpiexec: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = "from mpi4py import MPI\nprint(MPI.get_vendor()[0], MPI.COMM_WORLD.size, flush=True)\n"
    ran = mpiexec(2, source, mpi="openmpi")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "Open MPI 2\nOpen MPI 2\n"
