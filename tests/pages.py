"""What the pages of the documentation show: their commands, their Python, their links; and how to run them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!--\s*not run: (.+?)\s*-->\s*$", re.S)
FILE_NAME = re.compile(r"# ([\w/]+\.py)\n")
PROGRAMS = ("clusterenv-hpc", "python", "mpiexec", "srun", "sbatch", "make", "pip")

SHORT = ["total_steps=2000", "eval.episodes=2", "log.progress=lines"]
SHORTER = ["total_steps=500", "eval.episodes=1", "log.progress=lines", "log.tensorboard=false", "checkpoint.every_s=0"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and why it is not run if the page says so."""

    language: str
    text: str
    not_run: str | None

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first line names one."""
        found = FILE_NAME.match(self.text) if self.language == "python" else None
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"\s#\s.*", "", line).strip() for line in lines) if line]


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(text):
        reason = NOT_RUN.search(text[: match.start()])
        found.append(Block(match[1], match[2], reason[1] if reason else None))
    return found


def indented_commands(text: str) -> list[str]:
    """Commands that stand indented, outside of fences."""
    lines = FENCE.sub("", text).replace("\\\n", " ").splitlines()
    words = [re.sub(r"\s+#\s.*", "", line).strip() for line in lines if re.match(r" {4,}\S", line)]
    return [line for line in words if line.split()[0] in PROGRAMS]


def shortened(command: str, *, train: bool = True) -> tuple[list[str], dict[str, str]]:
    """The words after ``clusterenv-hpc`` and the environment's variables, for a run of seconds.

    train: if False, a training is only composed and checked.
    """
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    name, rest = words[1], words[2:]
    asks = {"--help", "-h", "--cfg"} & set(rest)
    if name == "train" and not asks:
        rest += [word for word in SHORTER if not word.startswith("log.progress")] if train else ["--cfg"]
        if train:  # of what the page sets and SHORTER too, the last one counts
            rest += ["log.progress=lines"]
    elif name == "submit" and "--dry-run" not in rest:
        rest.append("--dry-run")  # submitted for real in tests/slurm
    elif name == "bench" and not asks:
        rest += ["repeats=1", "seconds=0.05", *(["env=cartpole"] if "transport" not in rest else [])]
    elif name == "eval" and not asks:
        rest += ["episodes=1", "max_steps=20"]
    elif name == "simulate" and not asks:
        rest += [] if any(word.startswith("workers=") for word in rest) else ["workers=5", "seeds=1"]
    return [name, *rest], variables


def slugs(text: str) -> set[str]:
    """The anchors that a page's headings get."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", FENCE.sub("", text), re.M):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower()
        slug = base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found


def links(text: str) -> list[str]:
    """Targets of links and pictures, code left out."""
    bare = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return re.findall(r"\]\(([^()\s]+)\)", bare)


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    skipped = {".venv", ".git", ".cache", "runs", "build", "node_modules"}
    return sorted(
        path
        for path in REPOSITORY.rglob("*.md")
        if not any(part in skipped or part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
    )
