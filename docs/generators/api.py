"""docs/api.md: the public names with their signatures and docstrings, read from the source without running it."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "clusterenv_hpc"

SECTIONS = (
    ("clusterenv_hpc", "What most programs need.", None),
    ("clusterenv_hpc.stats", "What crossed the wire: `envs.stats`.", ("Stats", "Traffic")),
    ("clusterenv_hpc.rollout", "With :class:`Rollout`, of the episodes that ended within.", ("Episodes",)),
    ("clusterenv_hpc.jobs.launch", "What :func:`launch` returns and raises.", ("LaunchedJob", "JobFailed")),
    ("clusterenv_hpc.policies.protocol", None, ("check_policy", "distribution_of", "PolicyError")),
    ("clusterenv_hpc.policies", None, None),
    ("clusterenv_hpc.learners", None, None),
    ("clusterenv_hpc.learners.base", None, ("LearnerBase",)),
    ("clusterenv_hpc.gradients", None, None),
    ("clusterenv_hpc.adapters.sb3", None, ("SB3VecEnv",)),
    ("clusterenv_hpc.adapters.torchrl", None, ("batches", "as_batch")),
    ("clusterenv_hpc.envs.solver", None, ("Solver", "run_solver", "SolverError")),
    ("clusterenv_hpc.envs.delays", None, ("Delay",)),
    ("clusterenv_hpc.run.checkpoint", None, ("CheckpointStore", "CheckpointError")),
    (
        "clusterenv_hpc.comm.channel",
        "What goes wrong, in `ClusterEnv`'s methods.",
        ("ClusterError", "HandshakeError", "WorkerError", "SilenceError"),
    ),
)
"""Module, an introduction (None: its docstring), and which names (None: its ``__all__``)."""

HEAD = """\
<!-- Written by `python docs/generate.py api` from the docstrings; change it there. -->
# API

The public names. `import clusterenv_hpc as ce` loads neither torch nor MPI; each name is imported when it is first
used. Names that are not here may change between two releases. Shapes of arrays: `T` steps, `N` environments, `P`
parameters of an action distribution, `M` rows.
"""


@dataclass(frozen=True)
class Found:
    """A definition and the source that it stands in."""

    node: ast.stmt
    source: str
    after: ast.stmt | None  # the statement that follows: a constant's docstring


def page() -> str:
    """The whole page."""
    lines, told = [HEAD], set[str]()
    for module, introduction, names in SECTIONS:
        tree, _ = parsed(module)
        entries: list[str] = []
        for name in names or public(tree):
            if name in told or name.startswith("__"):
                continue
            told.add(name)
            entries += entry(name, find(module, name))
        if not entries:
            continue
        lines += [f"## {module}", "", markdown(introduction or ast.get_docstring(tree) or ""), "", *entries]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def path_of(module: str) -> Path:
    """The file of a module."""
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def parsed(module: str) -> tuple[ast.Module, str]:
    """Syntax tree and source."""
    source = path_of(module).read_text()
    return ast.parse(source), source


def public(tree: ast.Module) -> list[str]:
    """The names in ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise SystemExit("docs/generators/api.py: a module of SECTIONS without names has no __all__")


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Those of the module and of its TYPE_CHECKING blocks, each with the one after it."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for body in bodies:
        yield from zip(body, [*body[1:], None], strict=True)


def find(module: str, name: str) -> Found:
    """Where ``module.name`` is defined, through imports."""
    tree, source = parsed(module)
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    overloads = 0
    for node, after in statements(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = package.split(".")
                    base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                    return find(".".join(filter(None, (base, node.module))), alias.name)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            if any(getattr(decorator, "id", "") == "overload" for decorator in node.decorator_list):
                overloads += 1
                continue
            return Found(node, source, None)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == name:
                return Found(node, source, after)
    raise SystemExit(f"docs/generators/api.py: {module} has no {name}")


def entry(name: str, found: Found) -> list[str]:
    """Heading, signature, docstring, and a class's members."""
    node = found.node
    lines = [f"### {name}", ""]
    if isinstance(node, ast.ClassDef):
        return lines + class_entry(node, found.source)
    if isinstance(node, ast.FunctionDef):
        return [*lines, *fenced(signature(node, found.source)), "", markdown(documented(node, name)), ""]
    text = ""
    if isinstance(found.after, ast.Expr) and isinstance(found.after.value, ast.Constant):
        text = str(found.after.value.value)
    return [*lines, markdown(textwrap.dedent(text)), ""]


def class_entry(node: ast.ClassDef, source: str) -> list[str]:
    """A class: how it is made, its docstring, its public methods and properties."""
    lines: list[str] = []
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    dataclass_like = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    init = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if init is not None:
        lines += fenced(signature(init, source, node.name))
    elif dataclass_like:
        lines += fenced([f"class {node.name}{f'({bases})' if bases else ''}:", *fields(node)])
    lines += ["", markdown(documented(node, node.name)), ""]
    for part in node.body:
        if not isinstance(part, ast.FunctionDef) or part.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in part.decorator_list}
        if any("setter" in decorator for decorator in decorators):
            continue
        if not (text := markdown(ast.get_docstring(part) or "")):
            continue  # as the base class says it
        if decorators & {"property", "functools.cached_property", "cached_property"}:
            returns = f" → `{ast.unparse(part.returns)}`" if part.returns else ""
            lines += [f"**`{node.name}.{part.name}`**{returns}", "", text, ""]
        else:
            lines += [f"**`{node.name}.{part.name}`**", "", *fenced(signature(part, source)), "", text, ""]
    return lines


def documented(node: ast.ClassDef | ast.FunctionDef, name: str) -> str:
    """The docstring; every public name must have one."""
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"docs/generators/api.py: {name} has no docstring")
    return text


def signature(node: ast.FunctionDef, source: str, name: str | None = None) -> list[str]:
    """As it stands in the source, without ``self``; for a constructor under the class's name."""
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    text = textwrap.dedent("\n".join(lines)).rstrip()
    text = re.sub(r"(\.\.\.)?\s*#.*$", "", text).rstrip().removesuffix(":")
    text = re.sub(
        r"\(\s*(self|cls)\s*(,\s*|(?=\)))", lambda found: "(" + ("\n    " if "\n" in found[0] else ""), text, count=1
    )
    if name is not None:
        text = re.sub(r"^def __init__", name, text).removesuffix(" -> None")
    return text.splitlines()


def fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, defaults of ``key(...)`` and ``field(...)`` made plain."""
    lines = []
    for part in node.body:
        if not isinstance(part, ast.AnnAssign) or "ClassVar" in ast.unparse(part.annotation):
            continue
        default = ""
        if isinstance(part.value, ast.Call) and getattr(part.value.func, "id", "") == "key":
            default = f" = {ast.unparse(part.value.args[0])}"
        elif isinstance(part.value, ast.Call) and getattr(part.value.func, "id", "") == "field":
            default = " = ..."
        elif part.value is not None:
            default = f" = {ast.unparse(part.value)}"
        lines.append(f"    {ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}")
    return lines or ["    ..."]


def fenced(lines: list[str]) -> list[str]:
    """A block that is shown, not run."""
    return ["```text", *lines, "```"]


ITEM = re.compile(r"^(\s*)(?!None:)(\*{0,2}\w[\w.*]*(?:\([^)]*\))?(?:, \*{0,2}\w[\w.*]*)*): +(\S.*)$")
SEVERAL = re.compile(r"(?<=\.)  (?=[\w*]+(?:, [\w*]+)*: )")
HEADING = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")


def markdown(docstring: str) -> str:
    """A docstring's paragraphs, argument lists and indented blocks, as Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join("\n".join(block(part.splitlines())) for part in blocks)


def block(lines: list[str]) -> list[str]:
    """One paragraph of a docstring."""
    if lines and HEADING.match(lines[0].strip()):
        return [f"{lines[0].strip()}", "", *items(textwrap.dedent("\n".join(lines[1:])).splitlines())]
    if lines and all(line.startswith("    ") for line in lines):
        return fenced(textwrap.dedent("\n".join(lines)).splitlines())
    if sum(bool(ITEM.match(line)) for line in lines) and ITEM.match(lines[0]):
        return items(lines)
    return [line.strip() for line in lines]


def items(lines: list[str]) -> list[str]:
    """``name: what it is`` lines as a list; lines without a name go on with the one before."""
    out: list[str] = []
    for line in SEVERAL.sub("\n", "\n".join(lines)).splitlines():
        found = ITEM.match(line)
        if found and not found[1]:
            out.append(f"- `{found[2]}`: {found[3]}")
        elif out:
            out[-1] += f" {line.strip()}"
        else:
            out.append(line.strip())
    return out
