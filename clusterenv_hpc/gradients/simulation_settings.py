"""What ``clusterenv-hpc simulate`` can be asked for: ``key=value`` words into typed, checked settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv_hpc.gradients.checks import one_of, positive_float, positive_int
from clusterenv_hpc.gradients.methods import METHODS, Method
from clusterenv_hpc.gradients.simulator import JITTERS

PROBLEMS = ("quadratic", "wells", "two_tasks")
TIMES = ("equal", "sqrt", "linear", "straggler", "random")
COMMUNICATION = ("none", "equal", "same")


class SettingsError(ValueError):
    """A setting that is unknown or out of range; the message is one line for the person who typed it."""

    exit_code = 2


def setting(default: Any, help: str) -> Any:
    """A field with its meaning."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """All settings with their defaults; lists are written with commas, null is None."""

    problem: str = setting(
        "quadratic",
        "what is maximised: quadratic, wells (not concave), two_tasks (two kinds of workers want different things)",
    )
    size: int = setting(10, "parameters of it (two_tasks has 4)")
    sigma: float = setting(1.0, "standard deviation of a gradient's noise, over all entries together")
    epsilon: float = setting(0.05, "a run is timed until ||grad J|| is at most this")
    methods: tuple[str, ...] = setting(METHODS, "methods to compare")
    workers: tuple[int, ...] = setting((10, 30, 100), "numbers of workers")
    times: tuple[str, ...] = setting(
        ("equal", "sqrt", "straggler"),
        "compute times h_i: equal (1), sqrt (of i), linear (i), straggler (1, the last longer), random (0.02 to 2)",
    )
    straggler: float = setting(100.0, "compute time of the straggler, others have 1")
    jitter: str = setting("fixed", f"distribution of a single gradient's time: {', '.join(JITTERS)}")
    communication: str = setting("none", "communication times k_i: none (0), equal (1), or same as h_i")
    communication_scale: float = setting(1.0, "factor on them")
    transport: str = setting("p2p", "p2p or allreduce (afedpg has only p2p)")
    cancel: bool = setting(True, "whether work in flight is cancelled by a new point, or finished and dropped")
    M: int = setting(20, "gradients a round")
    M_init: int | None = setting(None, "of the first round; null: M")
    m: int | None = setting(None, "workers that m_sync_nigt waits for; null: half of them")
    eta: float = setting(0.1, "momentum of NIGT, in (0, 1]")
    alphas: tuple[float, ...] = setting(tuple(2.0**-k for k in range(1, 10)), "steps; each method has its best one")
    seeds: int = setting(5, "runs of each kind; the median counts")
    max_gradients: int = setting(100_000, "a run is given up after so many")
    out: str = setting("runs/simulate", "folder for results.json and figures; what is there already is not done again")

    def __post_init__(self) -> None:
        one_of("problem", self.problem, PROBLEMS)
        one_of("jitter", self.jitter, JITTERS)
        one_of("communication", self.communication, COMMUNICATION)
        one_of("transport", self.transport, ("p2p", "allreduce"))
        for name, allowed in (("methods", METHODS), ("times", TIMES)):
            for value in getattr(self, name):
                one_of(name, value, allowed)
        for name in ("methods", "times", "workers", "alphas"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(
                    f"{name} must have at least one entry and none twice, got {','.join(map(str, values))}"
                )
        for name in ("size", "M", "seeds", "max_gradients"):
            positive_int(name, getattr(self, name))
        for name in ("sigma", "epsilon", "straggler", "communication_scale"):
            positive_float(name, getattr(self, name))
        for count in self.workers:
            positive_int("workers", count)
            if "m_sync_nigt" in self.methods and self.m is not None and not 1 <= self.m <= count:
                raise ValueError(f"m must be from 1 to the number of workers, got m={self.m} with workers={count}")
        if "afedpg" in self.methods and self.transport == "allreduce":
            raise ValueError("afedpg has no all-reduce form: leave it out of methods, or use transport=p2p")
        if not self.out:
            raise ValueError("out must name a folder")
        for method in self.methods:
            for alpha in self.alphas:
                self.method(method, positive_float("alphas", alpha))

    def method(self, name: str, alpha: float) -> Method:
        """``name`` with these settings and a step."""
        return Method(name, M=self.M, M_init=self.M_init, m=self.m, eta=self.eta, alpha=alpha)

    def fixed(self) -> dict[str, Any]:
        """What must be the same for results to stand beside each other in one folder."""
        free = ("methods", "workers", "times", "out")
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in free}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def parse(words: Sequence[str]) -> Settings:
    """Settings from ``key=value`` words; raises ``SettingsError``."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SettingsError(f"{word}: expected key=value; the keys are {', '.join(fields)}")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingsError(f"{key}: no such key; {hint}allowed: {', '.join(fields)}")
        if key in given:
            raise SettingsError(f"{key}: given twice")
        kind = str(fields[key].type)
        try:
            given[key] = _READERS[kind](text)
        except ValueError:
            raise SettingsError(f"{key}={text}: expected {_WORDS[kind]}") from None
    try:
        return Settings(**given)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def describe() -> str:
    """Every key with its default and meaning, a line each."""
    lines = []
    for field in dataclasses.fields(Settings):
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in default)
        text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        lines.append(f"  {field.name}={text}\n      {field.metadata['help']}")
    return "\n".join(lines)


def folder(settings: Settings) -> Path:
    """Where the results go."""
    return Path(settings.out).expanduser()


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _fail()


def _fail() -> Any:
    raise ValueError


def _optional_int(text: str) -> int | None:
    return None if text.lower() in ("null", "none") else int(text)


def _list(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(read(part.strip()) for part in text.strip("[]").split(",") if part.strip())


_READERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _bool,
    "int | None": _optional_int,
    "tuple[str, ...]": _list(str),
    "tuple[int, ...]": _list(int),
    "tuple[float, ...]": _list(float),
}
_WORDS = {
    "str": "a word",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "int | None": "a whole number or null",
    "tuple[str, ...]": "words with commas between",
    "tuple[int, ...]": "whole numbers with commas between",
    "tuple[float, ...]": "numbers with commas between",
}
