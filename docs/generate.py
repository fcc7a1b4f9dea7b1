"""Writes what the documentation repeats from elsewhere, so that it cannot go stale:

    python docs/generate.py configuration     docs/configuration.md, from the schemas and conf/
    python docs/generate.py api               docs/api.md, from the public docstrings
    python docs/generate.py results           the tables of docs/results.md and of experiments/*/README.md
    python docs/generate.py                   all of them
    python docs/generate.py --check           changes nothing; exit code 1 where a page is stale

A test runs the check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

Pages = dict[Path, str]
"""What each file ought to hold."""


def configuration() -> Pages:
    """The reference of every key."""
    from generators import configuration

    return {HERE / "configuration.md": configuration.page()}


def api() -> Pages:
    """The reference of every public name."""
    from generators import api

    return {HERE / "api.md": api.page()}


def results() -> Pages:
    """Pages whose tables are drawn from stored results."""
    from generators import results

    return results.pages()


PAGES: dict[str, Callable[[], Pages]] = {"configuration": configuration, "api": api, "results": results}


def main(argv: list[str]) -> int:
    """Writes, or compares; 1 where a page is stale, 2 for what is not understood."""
    check = "--check" in argv
    names = [word for word in argv if word != "--check"]
    if unknown := [name for name in names if name not in PAGES]:
        print(f"docs/generate.py: {unknown[0]}: allowed: {', '.join(PAGES)}, --check", file=sys.stderr)
        return 2
    stale = 0
    for name in names or PAGES:
        for path, text in PAGES[name]().items():
            if path.is_file() and path.read_text() == text:
                continue
            shown = path.relative_to(HERE.parent)
            if check:
                stale += 1
                print(f"{shown} is stale; to renew it: python docs/generate.py {name}", file=sys.stderr)
            else:
                path.write_text(text)
                print(f"wrote {shown}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
