"""Scripts for sbatch: golden files, and what their shell lines do with words of every kind.

After a change on purpose: UPDATE_GOLDEN=1 pytest tests/unit/test_jobs_render.py, and read the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterenv_hpc.jobs.config import SlurmConfigError, make_config
from clusterenv_hpc.jobs.render import Launch, Run, hydra_override, render, render_array

GOLDEN = Path(__file__).parent / "golden"
SLURM = Path(__file__).parents[2] / "slurm"
EVERYTHING = {
    "job_name": "my job", "partition": "long", "account": "lab", "qos": "high", "reservation": "week", "nodes": 4,
    "constraint": "avx512&ib", "ntasks_per_node": 8, "cpus_per_task": 2, "time": "1-12:00:00", "mem": "16G",
    "gpus": "a100:2", "gpus_per_node": "1", "gres": "nvme:1", "exclusive": True, "nodelist": "n[1-4]", "exclude": "n9",
    "mail_type": "END,FAIL", "mail_user": "me@example.org", "dependency": "afterok:12", "begin": "now+1hour", "nice": 5,
    "distribution": "cyclic", "cpu_bind": "cores", "mpi": "pmix", "signal": "USR1", "signal_lead_s": 300,
    "modules": ["gcc/13", "openmpi/5"], "setup": ["ulimit -n 4096"], "env": {"UCX_TLS": "rc,sm", "NOTE": "it's $HOME"},
    "sbatch": ["--switches=1", "--comment='two words'"], "srun_args": ["--unbuffered"], "python": "/opt/py/bin/python",
    "max_restarts": 5,
}  # fmt: skip
HETJOB = {
    "nodes": 3, "ntasks_per_node": 16, "cpus_per_task": 1, "learner_cpus": 8, "time": "2:00:00", "partition": "cpu",
    "account": "lab", "learner": {"partition": "gpu", "gpus": "1", "mem": "32G", "exclusive": True},
}  # fmt: skip
SCRIPTS = {
    "null": ({}, Launch()),
    "plain": ({"nodes": 3, "ntasks_per_node": 2, "time": "1:00:00", "cpus_per_task": 1}, Launch(mpi="pmi2")),
    "everything": (EVERYTHING, Launch(mpi="pmix")),
    "hetjob": (HETJOB, Launch(mpi="pmi2")),
    "mpiexec": ({"ntasks": 5, "launcher": "mpiexec"}, Launch(program="/opt/venv/bin/mpiexec")),
    "mpirun": ({"ntasks": 5, "launcher": "mpiexec"}, Launch(program="/usr/bin/mpirun", openmpi=True)),
    "ulfm": ({"nodes": 3, "ntasks_per_node": 2, "launcher": "ulfm"}, Launch(program="/opt/venv/bin/mpirun")),
    "no_requeue": ({"requeue": False, "signal_lead_s": 0}, Launch(mpi="pmi2")),
}


def run_of(directory: str = "/scratch/me/runs/cartpole-s1", words: tuple[str, ...] = ("env=cartpole", "seed=1")) -> Run:
    path = Path(directory)
    return Run(path.name, path, (*words, hydra_override("run_dir", directory), "resume=true"))


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def syntax_is_right(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden(name):
    values, launch = SCRIPTS[name]
    text = render(make_config(values), run_of(), launch, python="/opt/venv/bin/python", workers=2)
    check_golden(name, text)
    syntax_is_right(text)


def test_golden_array():
    runs = [run_of(f"/scratch/me/runs/sweep/{number}", ("env=cartpole", f"seed={number}")) for number in range(3)]
    config = make_config({"ntasks": 3, "array_limit": 2})
    text = render_array(
        config,
        "sweep",
        Path("/scratch/me/runs/sweep"),
        runs,
        Launch(mpi="pmi2"),
        python="/opt/venv/bin/python",
        workers=2,
    )
    check_golden("array", text)
    syntax_is_right(text)


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.stem)
def test_templates_are_shell_and_say_all_to_sbatch_first(path):
    text = path.read_text()
    syntax_is_right(text)
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    last_option = max(number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH"))
    assert text.splitlines().index(code[0]) > last_option, "sbatch reads no options behind the first command"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "run_dir=runs/train-7"),
        (["name=two words"], "run_dir=runs/two words-7"),
        (["name=mine", "run_dir=there"], "run_dir=there"),
        (["run_dir=there", "name=mine"], "run_dir=there"),
    ],
)
@pytest.mark.parametrize("template", ["train", "train_hetjob"])
def test_templates_put_a_run_where_its_name_says(tmp_path, template, words, expected):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "true", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train",
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK_HET_GROUP_0": "1",
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "1",
    }  # fmt: skip
    command = ["bash", str(SLURM / f"{template}.sbatch"), "env=cartpole", *words]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True).stdout
    assert next(line for line in said.splitlines() if line.startswith("run_dir=")) == expected


def test_null_keys_are_not_printed():
    text = render(make_config(), run_of(), Launch(), python="python", workers=2)
    options = [line.split()[1].partition("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == ["--job-name", "--output", "--open-mode", "--requeue", "--signal", "--ntasks"]
    assert "--mpi" not in text and "--cpus-per-task" not in text


def test_srun_is_told_the_processors():
    text = render(make_config({"cpus_per_task": 3}), run_of(), Launch("pmi2"), python="python", workers=2)
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--cpus-per-task=3" in line


WEIRD = (
    "policy.hidden=[64,64]",
    "a='b c'",
    'c="$HOME `id` \\ "',
    "d=x;y&z|w>(v)",
    "e=*?[a]",
    "f=~",
    "g=!h",
    "-x",
    "ü=é",
    "",
)


def execute(text: str, tmp_path: Path, *, environ: dict[str, str] | None = None) -> tuple[list[list[str]], int]:
    """Runs a script with a srun, mpiexec and python that write down their words; returns those, and the exit code."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    log = tmp_path / "calls"
    note = f'#!/bin/sh\nprintf "%s\\0" "${{0##*/}}" "$@" >>"{log}"; printf "\\n\\0" >>"{log}"; exit ${{FAKE_CODE:-0}}\n'
    for name in ("srun", "mpiexec", "python"):
        (tools / name).write_text(note)
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **(environ or {})}
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert not done.stderr, done.stderr
    return [call.split("\0")[:-1] for call in log.read_text().split("\n\0") if call], done.returncode


def test_every_word_reaches_the_program_as_it_is(tmp_path):
    directory = '/scratch/it\'s 100 %/"q" $x'
    run = run_of(directory, WEIRD)
    config = make_config({"cpus_per_task": 2})
    text = render(config, run, Launch("pmi2"), python=str(tmp_path / "tools/python"), workers=2)
    calls, code = execute(text, tmp_path)
    program = [str(tmp_path / "tools/python"), "-m", "clusterenv_hpc.cli", "train"]
    assert calls[0] == ["srun", "--cpus-per-task=2", "--kill-on-bad-exit=1", "--mpi=pmi2", *program, *run.words]
    assert calls[1][:5] == ["python", "-m", "clusterenv_hpc.jobs.aftermath", "0", directory]
    assert code == 0


def test_hydra_reads_the_run_directory_that_was_meant():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for path in ("/a/b", "/a b/c=d", "it's", "a\\b", "{x: [1]}", "null", "1.5", 'say "x"', "ü", "a\\'b"):
        override = OverridesParser.create().parse_override(hydra_override("run_dir", path))
        assert str(override.value()) == path
    with pytest.raises(SlurmConfigError):
        hydra_override("run_dir", "${oc.env:HOME}")


def test_an_array_element_gets_its_own_words(tmp_path):
    runs = [run_of(f"/r/{number} x", (f"seed={number}", "t='a b'")) for number in range(3)]
    text = render_array(
        make_config({"ntasks": 2}),
        "s",
        Path("/r"),
        runs,
        Launch("pmi2"),
        python=str(tmp_path / "tools/python"),
        workers=1,
    )
    calls, _ = execute(text, tmp_path, environ={"SLURM_ARRAY_TASK_ID": "1"})
    assert tuple(calls[0][-len(runs[1].words) :]) == runs[1].words and calls[1][4] == "/r/1 x"


def test_the_exit_code_of_the_ranks_reaches_the_aftermath(tmp_path):
    for launcher in ("srun", "mpiexec"):
        config = make_config({"launcher": launcher, "ntasks": 2})
        text = render(config, run_of("/r"), Launch(), python=str(tmp_path / "tools/python"), workers=1)
        calls, _ = execute(text, tmp_path, environ={"FAKE_CODE": "9", "TMPDIR": str(tmp_path)})
        assert calls[-1][3:5] == ["9", "/r"]
        (tmp_path / "calls").unlink()


def test_slurms_signal_becomes_a_notice_where_the_launcher_would_die_of_it(tmp_path):
    config = make_config({"launcher": "mpiexec", "ntasks": 2})
    text = render(config, run_of("/r"), Launch(), python="true", workers=1)
    tools = tmp_path / "tools"
    tools.mkdir()
    waiting = 'for i in $(seq 100); do [ -s "$CLUSTERENV_HPC_NOTICE" ] && break; sleep 0.05; done'
    script = f"#!/bin/bash\nkill -USR2 $PPID; {waiting}\n"
    (tools / "mpiexec").write_text(script + 'cp "$CLUSTERENV_HPC_NOTICE" seen; exit 3\n')
    (tools / "mpiexec").chmod(0o755)
    text = text.replace('exec "$python" -m clusterenv_hpc.jobs.aftermath', "echo")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert (tmp_path / "seen").read_text() == "USR2\n"
    assert done.stdout.split()[:2] == ["3", "/r"]
    assert not list(tmp_path.glob("*.notice"))


def test_a_launcher_that_outlasts_the_learner_is_ended(tmp_path):
    text = render(make_config({"launcher": "ulfm", "ntasks": 2}), run_of("/r"), Launch(), python="true", workers=1)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "mpiexec").write_text('#!/bin/sh\ntouch "$CLUSTERENV_HPC_NOTICE.over"; exec sleep 60\n')
    (tools / "mpiexec").chmod(0o755)
    text = text.replace('exec "$python" -m clusterenv_hpc.jobs.aftermath', "echo").replace("patience=15", "patience=1")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert done.stdout.split()[:2] == ["137", "/r"] and not list(tmp_path.glob("*.over"))


def test_values_cannot_end_their_line():
    with pytest.raises(SlurmConfigError, match="control"):
        render(make_config(), run_of(words=("a=1\nrm -rf /",)), Launch(), python="python", workers=1)
    with pytest.raises(SlurmConfigError, match="control"):
        render(make_config(), Run("x\n#SBATCH --uid=0", Path("/r"), ()), Launch(), python="python", workers=1)


def test_there_are_no_arrays_of_heterogeneous_jobs():
    with pytest.raises(SlurmConfigError, match="heterogeneous"):
        render_array(make_config(HETJOB), "s", Path("/r"), [run_of()], Launch(), python=sys.executable, workers=1)
