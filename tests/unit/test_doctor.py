"""``clusterenv-hpc doctor``: real ranks and folders; a fake srun for what a real one does only on a broken site."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterenv_hpc.run import doctor, srun_probe
from clusterenv_hpc.run.mpi_launcher import LaunchError


def run_doctor(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from clusterenv_hpc.cli import main; sys.exit(main())"
    environ = {"SLURM_CONF": "/nonexistent", **environ}
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", *args], cwd=folder, env={**os.environ, **environ},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_a_sound_machine_gets_ok_lines_and_exit_code_0(tmp_path: Path) -> None:
    done = run_doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line[6:20].strip(): line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    for name in ("python", "clusterenv_hpc", "mpi", "launcher", "ranks", "cores", "gpu", "run folder"):
        assert lines[name] == "ok", done.stdout
    assert set(lines.values()) <= {"ok", "note"}
    assert "3 ranks make one world" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing of the trial is left"


def test_json_is_the_same_report(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--json")
    checks = json.loads(done.stdout)
    assert {check["status"] for check in checks} <= {"ok", "note", "fix"}
    assert next(check for check in checks if check["name"] == "ranks")["found"].startswith("3 ranks make one world")


def test_a_missing_mpi_is_told_with_the_remedy_and_exit_code_1(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert done.returncode == 1
    assert "fix   mpi" in done.stdout
    assert "pip install 'clusterenv_hpc[mpich]'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = doctor.check_folder(tmp_path / "file" / "runs", {})
    assert (check.status, check.name) == ("fix", "run folder")
    assert "Not a directory" in check.found


def test_more_threads_than_cores_is_told() -> None:
    cores = doctor.available_cores()
    assert next(doctor.check_cores({"OMP_NUM_THREADS": str(cores + 1)})).status == "fix"
    assert next(doctor.check_cores({"OMP_NUM_THREADS": str(cores)})).status == "ok"


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    done = run_doctor(tmp_path, "--jsno")
    assert done.returncode == 2
    assert "--jsno" in done.stderr
    assert "Traceback" not in done.stderr


LIST = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
OLD_LIST = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\nsrun: pmix_v3\n"


def fake_srun(folder: Path, monkeypatch: pytest.MonkeyPatch, *, plugins: str = LIST, **behaviour: str) -> Path:
    """An ``srun`` that knows ``plugins`` and runs a line of shell for each --mpi=; returns the file with its calls."""
    cases = "\n".join(f"*--mpi={name}*) {line} ;;" for name, line in behaviour.items())
    (folder / "list").write_text(plugins)
    (folder / "srun").write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/calls\ncase "$*" in\n*--mpi=list*) cat {folder}/list >&2 ;;\n{cases}\n'
        "*) echo 'srun: error: Couldn'\\''t find the specified plugin name' >&2; exit 1 ;;\nesac\n"
    )
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "calls"


def fake_sinfo(folder: Path) -> None:
    """A ``sinfo`` that knows one partition."""
    text = "#!/bin/sh\ncase $1 in --version) echo slurm 99.1 ;; *) echo 'debug* up 3 1:00:00' ;; esac\n"
    (folder / "sinfo").write_text(text)
    (folder / "sinfo").chmod(0o755)


WORLD, SINGLETONS = "echo world of 2; echo world of 2", "echo world of 1; echo world of 1"


def test_the_plugin_that_makes_one_world_is_found_and_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_srun(tmp_path, monkeypatch, pmix=WORLD, pmi2=SINGLETONS)
    found = doctor.find_mpi_plugin(options=["--partition=short"])
    assert found.name == "pmix"
    assert list(found.tried) == ["pmi2", "pmix"], "MPICH: pmi2 first"
    assert "singletons" in found.tried["pmi2"]
    assert "one world of 2" in found.tried["pmix"]
    assert "--partition=short" in calls.read_text()
    assert "--mpi=none" not in calls.read_text()


def test_no_plugin_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, pmix="echo 'srun: boom' >&2; exit 3", pmi2="echo world of 2")
    found = srun_probe.find_mpi_plugin()
    assert found.name is None
    assert "srun: boom" in found.tried["pmix"]
    assert "worlds of [2]" in found.tried["pmi2"]
    fake_sinfo(tmp_path)
    _, check = doctor.check_slurm({"SLURM_JOB_ID": "1"}, False, [])
    assert check.status == "fix"
    assert "srun: boom" in check.found


def test_a_step_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_srun(tmp_path, monkeypatch, pmix="trap '' TERM; sleep 60 & wait; sleep 60", pmi2="sleep 60")
    began = time.monotonic()
    found = srun_probe.find_mpi_plugin(timeout_s=1.0, all_within_s=3.0)
    assert time.monotonic() - began < 20
    assert found.name is None
    assert "no answer within 1 s" in found.tried["pmi2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(LIST, ["pmix", "pmi2"]), (OLD_LIST, ["pmi2", "openmpi", "pmix_v3"]), ("", []), ("\x00\xff nonsense: 7\n", [])],
)
def test_plugin_lists_of_several_releases_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]
) -> None:
    fake_srun(tmp_path, monkeypatch, plugins=text)
    assert srun_probe.mpi_plugins() == expected


def test_without_srun_the_question_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no srun"):
        doctor.find_mpi_plugin()


def test_outside_of_an_allocation_nothing_is_submitted_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_srun(tmp_path, monkeypatch, pmi2=WORLD)
    fake_sinfo(tmp_path)
    slurm, plugin = doctor.check_slurm({}, False, [])
    assert (slurm.status, plugin.status) == ("ok", "note")
    assert "debug* (up, 3 nodes, limit 1:00:00)" in slurm.found
    assert not calls.exists()
    assert list(doctor.check_slurm({}, True, []))[1].found.startswith("use --mpi=pmi2")


def test_a_slurm_that_does_not_answer_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'sinfo: error: first' >&2; echo 'sinfo: fatal: last' >&2; exit 1\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (check,) = doctor.check_slurm({}, True, [])
    assert (check.status, check.name) == ("note", "slurm")
    assert "sinfo: fatal: last" in check.remedy
