"""Dependencies point one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import clusterenv_hpc

PACKAGE = Path(clusterenv_hpc.__file__).parent

LAYERS = (
    {"comm", "envs", "files", "policies", "sync", "rollout", "stats", "settings"},
    {"collect", "handshake", "peer", "crew", "stepping", "acting", "worker", "detach", "roles", "plain", "cluster_env"},
    {"algorithms", "learners", "gradients", "adapters"},
    {"run", "bench"},
    {"cli", "__main__"},
)
"""From the bottom: a room imports from its own and from those before it.  ``jobs`` stands beside."""

UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True)
class Import:
    """``module`` (dotted, below the package) imports ``target`` (absolute); ``lazy``: once a function is called."""

    module: str
    target: str
    lazy: bool

    @property
    def room(self) -> str:
        return self.module.partition(".")[0]

    @property
    def target_room(self) -> str | None:
        """The room that is imported from, if it is one of this package."""
        first, *rest = self.target.split(".")
        return rest[0] if first == "clusterenv_hpc" and rest else None

    def __str__(self) -> str:
        return f"{self.module} imports {self.target}"


def imports() -> Iterator[Import]:
    """Every import statement of the package, those for type checkers included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        tree = ast.parse(path.read_text(), str(path))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        lazy = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # Level 1 is the module's own folder, also for an __init__.py.
                base = ("clusterenv_hpc", *parts)[: -node.level] if node.level else ()
                stem = ".".join([*base, *([node.module] if node.module else [])])
                targets = [f"{stem}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from (Import(".".join(parts), target, id(node) in lazy) for target in targets)


ALL = list(imports())


def layer(room: str) -> int | None:
    return next((level for level, rooms in enumerate(LAYERS) if room in rooms), None)


def test_every_room_has_its_place() -> None:
    rooms = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    rooms -= {"__init__", "__pycache__", "py", "conf", "slurm"}
    assert rooms - set().union(*LAYERS, {"jobs"}) == set(), "a new room: say in LAYERS where it belongs"


def test_imports_are_found() -> None:
    """Else the tests below would pass for nothing."""
    assert any(one.room == "cluster_env" and one.target_room == "comm" for one in ALL)
    assert any(one.room == "worker" and one.target_room == "comm" for one in ALL), "relative ones too"
    assert any(one.lazy for one in ALL)


def test_nobody_knows_a_room_above_its_own() -> None:
    upwards = [
        str(one)
        for one in ALL
        if (own := layer(one.room)) is not None and (other := layer(one.target_room or "")) is not None and other > own
    ]
    assert upwards == []


def test_the_core_knows_only_slurms_environment_of_jobs() -> None:
    wrong = [
        str(one)
        for one in ALL
        if one.target_room == "jobs"
        and (own := layer(one.room)) is not None
        and own < 3
        and not one.target.startswith("clusterenv_hpc.jobs.environment.")
    ]
    assert wrong == []


def test_jobs_stands_beside() -> None:
    """It may ask run/ for a config, a run directory or the machine's MPI, but only once it is called."""
    wrong = [
        str(one)
        for one in ALL
        if one.room == "jobs"
        and one.target_room not in (None, "files", "jobs")
        and not (one.lazy and one.target_room == "run")
    ]
    assert wrong == []


def test_only_one_module_imports_mpi4py() -> None:
    assert {one.module for one in ALL if one.target.split(".")[0] == "mpi4py"} == {"comm.mpi"}


def test_the_rank_guard_stands_alone() -> None:
    """It is run as a file, with neither this package nor site-packages on the path."""
    wrong = [str(one) for one in ALL if one.module == "run.guard" and one.target.startswith("clusterenv_hpc")]
    assert wrong == []
    assert {one.target.split(".")[0] for one in ALL if one.module == "run.guard"} <= {
        "__future__",
        *sys.stdlib_module_names,
    }


def test_nothing_that_runs_code_is_read_from_wire_or_disk() -> None:
    assert [str(one) for one in ALL if one.target.split(".")[0] in UNSAFE] == []


def test_no_module_is_called_utils() -> None:
    assert [str(path) for path in PACKAGE.rglob("*.py") if path.stem in ("utils", "util", "helpers", "misc")] == []


def loaded_by(program: str) -> set[str]:
    """The top-level modules that ``program`` has loaded, in a Python of its own."""
    tail = "; import sys; print('\\n', *sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", program + tail], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "mpi4py", "gymnasium", "matplotlib", "tensorboard", "submitit"}


def test_importing_the_package_loads_next_to_nothing() -> None:
    assert loaded_by("import clusterenv_hpc; clusterenv_hpc.APS; dir(clusterenv_hpc)") & HEAVY == set()


def test_jobs_load_neither_torch_nor_mpi() -> None:
    names = ", ".join(
        ".".join(("clusterenv_hpc", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted((PACKAGE / "jobs").rglob("*.py"))
    )
    assert names
    assert loaded_by(f"import {names}") & {"torch", "mpi4py"} == set()


@pytest.mark.parametrize("words", ["--help", "train --help", "doctor --help", "--version"])
def test_help_loads_neither_torch_nor_mpi(words: str) -> None:
    program = (
        f"from clusterenv_hpc.cli import main\ntry:\n    main({words.split()})\nexcept SystemExit:\n    pass\npass"
    )
    assert loaded_by(program) & {"torch", "mpi4py"} == set()


def test_importing_cluster_env_starts_no_mpi() -> None:
    assert "mpi4py" not in loaded_by("from clusterenv_hpc import ClusterEnv")


def test_public_names_are_there_and_no_others_are_promised() -> None:
    assert set(clusterenv_hpc.__all__) >= {
        "ClusterEnv",
        "APS",
        "Always",
        "EveryK",
        "Never",
        "Rollout",
        "launch",
        "__version__",
    }
    for name in clusterenv_hpc.__all__:
        assert getattr(clusterenv_hpc, name) is not None
        assert name in dir(clusterenv_hpc)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'; public are APS"):
        _ = clusterenv_hpc.nonsense
    with pytest.raises(ImportError):
        exec("from clusterenv_hpc import nonsense")


def test_type_checkers_see_the_names_that_are_given_lazily() -> None:
    seen = {one.target.rpartition(".")[::2] for one in ALL if one.module == "__init__" and one.target_room}
    given = {(home, name) for name, home in clusterenv_hpc._HOMES.items()}
    assert seen == given
    assert {name for _, name in given} | {"__version__"} == set(clusterenv_hpc.__all__)
