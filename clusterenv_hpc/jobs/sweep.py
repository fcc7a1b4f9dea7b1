"""All combinations of words such as ``seed=1,2,3``; as a program, the words of one of them, for a job array's script:

python -m clusterenv_hpc.jobs.sweep INDEX KEY=VALUE,VALUE ...
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from clusterenv_hpc.jobs.config import TEXT_KEYS, SlurmConfigError

MAX_ELEMENTS = 1000
"""Slurm's own limit on the size of an array is 1001 unless a site has raised it."""


@dataclass(frozen=True)
class Element:
    """One combination of a sweep: what varies, and all its overrides."""

    varied: tuple[str, ...]
    overrides: tuple[str, ...]


def expand(overrides: Sequence[str]) -> list[Element]:
    """All combinations of a sweep's words, the last one varying fastest, as Hydra's own sweeper orders them.

    Raises:
        SlurmConfigError: a word cannot be read, names a directory that all runs would share, or there are too many
            combinations.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, axes, size = OverridesParser.create(), [], 1
    for word in overrides:
        name = word.partition("=")[0]
        if name in TEXT_KEYS:
            axes.append([(False, word)])
            continue
        if name in ("run_dir", "resume"):
            raise SlurmConfigError(f"{word}: allowed outside of sweeps, where each run gets a directory of its own")
        try:
            parsed = parser.parse_override(word)
            if not parsed.is_sweep_override():
                axes.append([(False, word)])
                continue
            key = parsed.get_key_element()
            axes.append([(True, f"{key}={value}") for value in parsed.sweep_string_iterator()])
        except (HydraException, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise SlurmConfigError(f"{word}: cannot be read; expected KEY=VALUE,VALUE,... ({first})") from None
        size *= len(axes[-1])
        if size > MAX_ELEMENTS:
            raise SlurmConfigError(f"{word}: {size} combinations so far; allowed: at most {MAX_ELEMENTS} in one array")
    return [
        Element(tuple(word for varies, word in words if varies), tuple(word for _, word in words))
        for words in itertools.product(*axes)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the words of the element that the first argument counts, a line each; returns the exit code."""
    index, *words = sys.argv[1:] if argv is None else argv
    try:
        elements = expand(words)
        if not index.isdigit() or int(index) >= len(elements):
            raise SlurmConfigError(
                f"element {index}: the words make {len(elements)}; allowed: --array=0-{len(elements) - 1}"
            )
    except SlurmConfigError as error:
        print(f"clusterenv-hpc: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(elements[int(index)].overrides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
