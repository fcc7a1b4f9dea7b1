"""The ``slurm`` group: every key that a job can be given, typed, with what it means.

A key that is null is not printed into the script, so that the site's own default holds.  Keys keep sbatch's names
wherever sbatch has one.
"""

from __future__ import annotations

import dataclasses
import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREEMPTION_SIGNALS = ("USR2", "USR1", "TERM", "HUP", "INT")


class SlurmConfigError(ValueError):
    """A key or value of the slurm group that cannot be; the message is one line and says what is allowed."""

    exit_code = 2


def key(default: Any, help: str, *, choices: tuple[str, ...] = (), **bounds: float) -> Any:
    """A field with its default, its meaning, and the values allowed: a set of words, or bounds named ge, gt, le, lt."""
    return field(default=default, metadata={"help": help, "choices": choices, **bounds})


def about(help: str) -> dict[str, Any]:
    """The metadata of a list or a dict."""
    return {"help": help, "choices": ()}


@dataclass
class LearnerNode:
    """Where the learner's wants differ from the workers'; any of them makes the job heterogeneous."""

    partition: str | None = key(None, "partition of the learner's component")
    gpus: str | None = key(None, "GPUs for the learner: 1, or a100:1")
    gres: str | None = key(None, "other generic resources for the learner, as in --gres")
    mem: str | None = key(None, "memory on the learner's node: 16G")
    constraint: str | None = key(None, "features that the learner's node must have")
    exclusive: bool | None = key(None, "whether the learner has its node to itself")
    account: str | None = key(None, "account of the learner's component")
    qos: str | None = key(None, "quality of service of the learner's component")


@dataclass
class SlurmConfig:
    """One job: what to ask Slurm for, how to start the ranks, and what to do when the time is up."""

    job_name: str | None = key(None, "the job's name; null: the run's")
    partition: str | None = key(None, "--partition")
    account: str | None = key(None, "--account")
    qos: str | None = key(None, "--qos")
    reservation: str | None = key(None, "--reservation")
    constraint: str | None = key(None, "--constraint: features that the nodes must have")
    nodes: int | None = key(None, "--nodes", ge=1)
    ntasks: int | None = key(
        None, "--ntasks: ranks, the learner among them; null: nodes x ntasks_per_node, or workers + 1", ge=1
    )
    ntasks_per_node: int | None = key(None, "--ntasks-per-node", ge=1)
    cpus_per_task: int | None = key(None, "--cpus-per-task, told to srun as well", ge=1)
    learner_cpus: int | None = key(
        None, "processors for the learner; other than cpus_per_task: a component of the job of its own", ge=1
    )
    time: str | None = key(None, "--time: MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS; a bare number: minutes, up to 1440")
    mem: str | None = key(None, "--mem: memory on each node: 16G")
    mem_per_cpu: str | None = key(None, "--mem-per-cpu")
    gpus: str | None = key(None, "--gpus of the job: 1, or a100:1")
    gpus_per_node: str | None = key(None, "--gpus-per-node")
    gres: str | None = key(None, "--gres: other generic resources")
    exclusive: bool | None = key(None, "--exclusive: whole nodes")
    nodelist: str | None = key(None, "--nodelist: node1,node[3-4]")
    exclude: str | None = key(None, "--exclude")
    mail_type: str | None = key(None, "--mail-type: END,FAIL,REQUEUE,...")
    mail_user: str | None = key(None, "--mail-user")
    dependency: str | None = key(None, "--dependency: afterok:123")
    begin: str | None = key(None, "--begin: the earliest start")
    nice: int | None = key(None, "--nice")
    array_limit: int | None = key(None, "how many elements of a sweep may run at once", ge=1)
    distribution: str | None = key(None, "srun --distribution: block, cyclic, plane=4, ...")
    cpu_bind: str | None = key(None, "srun --cpu-bind: cores, none, ...")
    launcher: str = key(
        "srun",
        "who starts the ranks: srun, the MPI's own mpiexec, or Open MPI 5's mpirun such that dead workers are survived",
        choices=("srun", "mpiexec", "ulfm"),
    )
    mpi: str | None = key(None, "srun --mpi: pmi2 for MPICH, pmix for Open MPI; null: found out when submitting")
    signal: str = key("USR2", "the signal that Slurm sends before the time is up", choices=PREEMPTION_SIGNALS)
    signal_lead_s: int = key(
        120, "seconds between that signal and the time limit, at most half of it; 0: none is sent", ge=0, le=65535
    )
    requeue: bool = key(True, "a job that was interrupted, or lost a rank, goes back to the queue by itself")
    max_restarts: int = key(20, "the job gives up when a rank is lost and it was restarted so often already", ge=0)
    learner: LearnerNode = field(default_factory=LearnerNode)
    modules: list[str] = field(default_factory=list, metadata=about("environment modules to load, in order"))
    setup: list[str] = field(default_factory=list, metadata=about("shell lines to run before the ranks are started"))
    env: dict[str, str] = field(default_factory=dict, metadata=about("environment variables for all ranks"))
    sbatch: list[str] = field(
        default_factory=list, metadata=about('further #SBATCH options: ["--comment=mine","--switches=1"]')
    )
    srun_args: list[str] = field(default_factory=list, metadata=about("further options of srun, or of mpiexec"))
    python: str | None = key(None, "the Python to start on the nodes; null: the one that submits")

    @property
    def lead_s(self) -> int:
        """``signal_lead_s``, but at most half of the time limit: a job must get somewhere before it is stopped."""
        limit = seconds(self.time)
        return self.signal_lead_s if limit is None else min(self.signal_lead_s, int(limit / 2))

    @property
    def heterogeneous(self) -> bool:
        """Whether the learner gets a component of the job of its own."""
        own = any(value is not None for value in dataclasses.asdict(self.learner).values())
        return own or self.learner_cpus not in (None, self.cpus_per_task or 1)

    def ranks(self, workers: int) -> int:
        """How many ranks the job has; ``workers`` counts where neither tasks nor nodes say it."""
        if self.heterogeneous:
            return 1 + self.worker_tasks(workers)
        return self.ntasks or self._by_nodes() or max(workers + 1, self.nodes or 1)

    def worker_tasks(self, workers: int) -> int:
        """Of a heterogeneous job: how many tasks its second component has."""
        if self.ntasks is not None:
            return self.ntasks - 1
        return self._by_nodes() or max(workers, self.nodes or 1)

    def _by_nodes(self) -> int | None:
        return self.nodes * self.ntasks_per_node if self.nodes and self.ntasks_per_node else None


PATTERNS = {
    "time": (r"\d+|\d+(:\d{1,2}){1,2}|\d+-\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE", "HH:MM:SS, D-HH:MM:SS or minutes"),
    "mem": (r"\d+[KMGT]?", "a number with K, M, G or T, such as 16G"),
    "mem_per_cpu": (r"\d+[KMGT]?", "a number with K, M, G or T, such as 2G"),
    "mpi": (r"[a-z0-9_]+", "a name that srun --mpi=list shows"),
    "gpus": (r"([\w.-]+:)?\d+(,([\w.-]+:)?\d+)*", "a number, or type:number"),
    "gpus_per_node": (r"([\w.-]+:)?\d+(,([\w.-]+:)?\d+)*", "a number, or type:number"),
    "mail_type": (r"[A-Z_0-9]+(,[A-Z_0-9]+)*", "words such as END,FAIL,REQUEUE"),
}
TEXT_KEYS = frozenset(f"slurm.{spec.name}" for spec in dataclasses.fields(SlurmConfig) if spec.type == "str | None")
"""Keys in whose values a comma is text, as sbatch writes its lists: nodelist=node1,node2 or mail_type=END,FAIL."""

SET_HERE = ("job-name", "output", "error", "open-mode", "array", "requeue", "no-requeue", "signal")
SET_HERE_SHORT = re.compile(r"-[Joea]")
"""Options that the script sets itself, and that a job could not be found or resumed without."""


def make_config(values: Mapping[str, Any] | None = None) -> SlurmConfig:
    """A checked configuration of ``values``, which may name any key of SlurmConfig.

    Raises:
        SlurmConfigError: an unknown key (the message lists the valid ones) or a value that cannot be.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SlurmConfig), dict(values or {})))
    except ConfigKeyError as error:
        prefix, _, name = f"slurm.{error.full_key}".rpartition(".")
        owner = LearnerNode if prefix == "slurm.learner" else SlurmConfig
        allowed = ", ".join(spec.name for spec in dataclasses.fields(owner))
        raise SlurmConfigError(f"{prefix}.{name}: no such key; allowed: {allowed}") from None
    except OmegaConfBaseException as error:
        text = str(error).strip().splitlines()[0]
        raise SlurmConfigError(f"slurm.{getattr(error, 'full_key', None) or '?'}: {text}") from None
    assert isinstance(config, SlurmConfig)
    return check(config)


def check(config: SlurmConfig) -> SlurmConfig:
    """``config`` itself, once every value can go into a script and no two contradict each other.

    Raises:
        SlurmConfigError: one line that names the key, the value and what is allowed.
    """
    for path, value, metadata in _values(config):
        _check_text(path, value)
        name = path.rpartition(".")[2]
        if value is None:
            continue
        if (words := metadata.get("choices")) and value not in words:
            raise SlurmConfigError(f"{path}={value}: allowed: {', '.join(words)}")
        if isinstance(value, int) and not metadata.get("ge", value) <= value <= metadata.get("le", value):
            raise SlurmConfigError(f"{path}={value}: allowed: an integer of at least {metadata.get('ge')}")
        if name in PATTERNS and not re.fullmatch(PATTERNS[name][0], str(value)):
            raise SlurmConfigError(f"{path}={value}: allowed: {PATTERNS[name][1]}")
    if config.time is not None and config.time.isdigit() and not 0 < int(config.time) <= 1440:
        raise SlurmConfigError(
            f"slurm.time={config.time}: a bare number means minutes, 1 to 1440 (YAML reads 2:00:00 without quotes as "
            f"7200); allowed: '2:00:00', '1-12:00:00'"
        )
    if seconds(config.time) == 0:
        raise SlurmConfigError(f"slurm.time={config.time}: allowed: more than 0, or UNLIMITED, as Slurm takes a 0")
    for name in config.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise SlurmConfigError(f"slurm.env.{name}: allowed: names of environment variables")
    for line in config.sbatch:
        if not re.match(r"--?[A-Za-z]", line):
            raise SlurmConfigError(f"slurm.sbatch={line}: allowed: options, such as --comment=mine")
        if _set_here(line):
            raise SlurmConfigError(f"slurm.sbatch={line}: the script sets this itself; allowed: other options")
    _check_pairs(config)
    return config


def _set_here(line: str) -> bool:
    """Whether an option is one of SET_HERE, be it shortened, as sbatch lets it be."""
    if (found := re.match(r"--([\w-]+)", line)) is not None:
        return any(name.startswith(found[1]) for name in SET_HERE)
    return SET_HERE_SHORT.match(line) is not None


def _check_pairs(config: SlurmConfig) -> None:
    if config.mem is not None and config.mem_per_cpu is not None:
        raise SlurmConfigError(f"slurm.mem={config.mem}: slurm.mem_per_cpu is set too; allowed: one of them")
    if config.ntasks and config.nodes and config.ntasks < config.nodes + config.heterogeneous:
        raise SlurmConfigError(f"slurm.ntasks={config.ntasks}: allowed: at least one for each of {config.nodes} nodes")
    if config.ntasks and (spread := config._by_nodes()) and config.ntasks - config.heterogeneous > spread:
        raise SlurmConfigError(
            f"slurm.ntasks={config.ntasks}: allowed: at most nodes x ntasks_per_node = {spread}, or leave one out"
        )
    if config.heterogeneous and config.launcher != "srun":
        raise SlurmConfigError(
            f"slurm.launcher={config.launcher}: only srun starts one world over a heterogeneous job; allowed: srun, or "
            f"leave slurm.learner and slurm.learner_cpus out"
        )
    if config.heterogeneous and config.ntasks == 1:
        raise SlurmConfigError("slurm.ntasks=1: a heterogeneous job needs a worker; allowed: at least 2")


def _values(config: Any, prefix: str = "slurm") -> Any:
    for spec in dataclasses.fields(config):
        value, path = getattr(config, spec.name), f"{prefix}.{spec.name}"
        if dataclasses.is_dataclass(value):
            yield from _values(value, path)
        else:
            yield path, value, spec.metadata


def _check_text(path: str, value: Any) -> None:
    """No value may end the line it is written on."""
    for text in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (not text.strip() or re.search(r"[\x00-\x08\x0a-\x1f\x7f]", text)):
            raise SlurmConfigError(f"{path}={text!r}: allowed: text on one line, or null")


def seconds(time: str | None) -> float | None:
    """A time limit as Slurm writes it, in seconds; None for no limit and what cannot be read."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?", time or "")
    if not found:
        return None
    days, *clock = found.groups()
    parts = [int(part) for part in clock if part is not None]
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 1:
        hours, minutes, secs = 0, parts[0], 0
    else:  # MM:SS, HH:MM:SS
        hours, minutes, secs = (0, *parts)[-3:]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs)


def signal_number(name: str) -> signals.Signals:
    """The signal that the key ``signal`` means."""
    return signals.Signals[f"SIG{name}"]
