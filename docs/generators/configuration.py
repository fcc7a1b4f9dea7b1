"""docs/configuration.md: every key with its type, default, unit and meaning, from the schemas and from conf/."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import yaml

from clusterenv_hpc.jobs.config import LearnerNode, SlurmConfig
from clusterenv_hpc.run.config import GROUPS, choices, conf_dir
from clusterenv_hpc.run.schema import VARIANTS, Config, EnvConfig, PolicyConfig

UNITS = {
    "s": "seconds values timeout learner_timeout every_s signal_lead_s",
    "nats": "delta target_kl target_entropy",
    "steps": "total_steps max_steps num_steps horizon",
    "transitions": "capacity learning_starts batch_size",
    "samples": "minibatch_size",
    "episodes": "episodes window",
    "updates": "publish_every actor_every",
    "versions": "max_lag k",
    "states": "num_probes",
    "rewards": "n_step",
    "trajectories": "M M_init",
    "rollouts": "rollouts_per_update",
    "passes": "epochs",
    "ranks": "ranks workers eval_workers ntasks ntasks_per_node",
    "workers": "logical_workers m",
    "environments": "envs_per_worker",
    "nodes": "nodes",
    "jobs": "array_limit",
    "processors": "cpus_per_task learner_cpus",
    "threads": "threads",
    "restarts": "max_restarts",
    "checkpoints": "keep",
    "neurons": "hidden critic_hidden",
    "return": "target_return at_return",
}
PURE = {
    "learning rates": "learning_rate actor_learning_rate adam_eps max_grad_norm alpha alpha_power eta tau",
    "weights": "entropy_coef value_coef reward_scale gamma gae_lambda trace_decay temperature",
    "limits": "clip value_clip max_importance rho_bar c_bar huber target_noise_limit",
    "shares": "epsilon epsilon_exponent priority_exponent importance_exponent samples_per_step",
    "noise": "log_std exploration target_noise",
    "others": "factor nice seed",
}
"""Numbers without a unit."""

UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names.split()} | {
    name: "1" for names in PURE.values() for name in names.split()
}

HEAD = """\
<!-- Written by `python docs/generate.py configuration` from clusterenv_hpc/run/schema.py,
clusterenv_hpc/algorithms.py, clusterenv_hpc/jobs/config.py and conf/; change it there. -->
# Configuration

`clusterenv-hpc train GROUP=CHOICE KEY=VALUE ...`; so do `submit`, the templates in `slurm/` and
`clusterenv_hpc.launch`. The groups {groups} each name a file of `conf/`; where an environment and an
algorithm want values of their own together, a file of `conf/recipe/` has them. What the command line says comes
last, and wins. `clusterenv-hpc train --help` prints these keys, `--cfg` what a command line makes of them:

```bash
clusterenv-hpc train env=cartpole sync=always --cfg
```

An unknown key, a wrong type or a value out of range ends with one line that names the key, the value and what is
allowed, before anything starts. `null` means that the key is not set. Units: s is seconds; nats are of a
Kullback-Leibler divergence; steps are those of single environments.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD.format(groups=", ".join(f"`{group}`" for group in GROUPS))]
    lines += ["## Choices", "", "| group | default | choices |", "|---|---|---|"]
    defaults = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    chosen = {key: value for entry in defaults if isinstance(entry, dict) for key, value in entry.items()}
    lines += [
        f"| `{group}` | `{chosen[group]}` | {', '.join(f'`{name}`' for name in choices(group))} |" for group in GROUPS
    ]
    lines += ["", "## The run", "", *table(Config, "")]
    lines += ["", "## env", "", doc(EnvConfig), "", *table(EnvConfig, "env.")]
    lines += ["", *files("env")]
    lines += ["", "## policy", "", doc(PolicyConfig), "", *table(PolicyConfig, "policy."), "", *files("policy")]
    for group in ("sync", "algo"):
        _, variants = VARIANTS[group]
        for name, schema in variants.items():
            lines += ["", f"## {group}={name}", "", doc(schema), "", *table(schema, f"{group}.")]
        lines += ["", *files(group)]
    lines += ["", "## slurm", "", doc(SlurmConfig), "", "`slurm.learner`: " + small(doc(LearnerNode)), ""]
    lines += [*table(SlurmConfig, "slurm."), "", *files("slurm"), "", "## Recipes", "", *recipes()]
    return "\n".join(lines) + "\n"


def doc(schema: type) -> str:
    """The first paragraph of a schema's docstring."""
    return " ".join((schema.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")


def small(text: str) -> str:
    """Its first letter in lower case."""
    return text[0].lower() + text[1:]


def table(schema: Any, prefix: str) -> list[str]:
    """A row for each key, nested ones under their path."""
    lines = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for path, spec in keys(schema, prefix):
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        lines.append(
            f"| `{path}` | {allowed(spec)} | `{shown(default)}` | {unit(path, spec)} | {cell(spec.metadata['help'])} |"
        )
    return lines


def keys(schema: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The fields that have a meaning, with their paths; groups have their own tables."""
    nested = []
    for spec in dataclasses.fields(schema):
        if len(spec.metadata.get("choices", ())) == 1:
            continue  # the tag of a choice: the heading says it
        if "help" in spec.metadata:
            yield f"{prefix}{spec.name}", spec
        elif spec.default_factory is not dataclasses.MISSING and f"{prefix}{spec.name}" not in GROUPS:
            nested.append(spec)
    for spec in nested:
        yield from keys(spec.default_factory, f"{prefix}{spec.name}.")


def allowed(spec: Any) -> str:
    """The type, the words or the bounds."""
    kind = re.sub(r"\bNone\b", "null", str(spec.type)).replace(" | ", " or ").replace("Any", "any")
    if words := spec.metadata.get("choices"):
        also = " or null" if "null" in kind else ""
        return ", ".join(f"`{word}`" for word in words) + also
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{sign} {spec.metadata[name]}" for name, sign in signs.items() if spec.metadata.get(name) is not None]
    return f"{kind} {', '.join(bounds)}".strip()


def unit(path: str, spec: Any) -> str:
    """Of a number; every one must have been thought of."""
    if not re.search(r"\b(int|float)\b", str(spec.type)):
        return ""
    name = path.rpartition(".")[2]
    if name not in UNIT_OF:
        raise SystemExit(f"docs/generators/configuration.py: the unit of {path} is not known; add it to UNITS or PURE")
    return UNIT_OF[name]


def shown(value: Any) -> str:
    """A default as one writes it."""
    return {"None": "null", "True": "true", "False": "false", "???": "(needed)"}.get(str(value), str(value))


def cell(text: str) -> str:
    """Text that ends no cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def files(group: str) -> list[str]:
    """What each file of a group sets."""
    lines = [f"| `{group}=` | sets |", "|---|---|"]
    for name in choices(group):
        content = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text()) or {}
        lines.append(f"| `{name}` | {settings(content)} |")
    return lines


def recipes() -> list[str]:
    """What each recipe sets."""
    lines = [
        "For `env=E algo=A` the file `conf/recipe/E_A.yaml`, and for one sync rule `conf/recipe/sync/E_A_RULE.yaml`,",
        "where there is one:", "", "| recipe | sets |", "|---|---|",
    ]  # fmt: skip
    folder = conf_dir() / "recipe"
    for path in sorted(folder.glob("**/*.yaml")):
        content = yaml.safe_load(path.read_text()) or {}
        based = [f"as `{name}`" for name in content.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
        told = settings(content)
        lines.append(
            f"| `{path.relative_to(folder).with_suffix('')}` | {', '.join([*based, *([told] if told else [])])} |"
        )
    return lines


def settings(content: dict[str, Any], prefix: str = "") -> str:
    """The keys and values of a file on one line."""
    told = []
    for key, value in content.items():
        if isinstance(value, dict) and value and key not in ("kwargs", "eval_kwargs"):
            told.append(settings(value, f"{prefix}{key}."))
        else:
            told.append(f"`{prefix}{key}={shown(value)}`")
    return ", ".join(told)
