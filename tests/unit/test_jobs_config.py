"""The slurm group: types, ranges, pairs."""

from __future__ import annotations

import pytest

from clusterenv_hpc.jobs.config import SlurmConfig, SlurmConfigError, make_config, seconds


def test_an_unknown_key_lists_the_valid_ones():
    with pytest.raises(SlurmConfigError, match=r"slurm\.partitoin: no such key; allowed: .*partition.*learner_cpus"):
        make_config({"partitoin": "x"})
    with pytest.raises(SlurmConfigError, match=r"slurm\.learner\.gpu: no such key; allowed: partition, gpus"):
        make_config({"learner": {"gpu": 1}})


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": "many"},
        {"nodes": 0},
        {"nodes": -1},
        {"signal": "KILL"},
        {"signal_lead_s": -1},
        {"signal_lead_s": 70000},
        {"launcher": "ssh"},
        {"mem": "16 GB"},
        {"mem": "16G", "mem_per_cpu": "1G"},
        {"time": "2 hours"},
        {"time": "7200"},
        {"time": "0"},
        {"time": "0:00"},
        {"time": "0-0"},
        {"partition": ""},
        {"partition": "a\nb"},
        {"job_name": "x\x1b[2J"},
        {"setup": ["ok", "two\nlines"]},
        {"env": {"A-B": "1"}},
        {"env": {"A": "1\n2"}},
        {"sbatch": ["partition=x"]},
        {"sbatch": ["--array=0-3"]},
        {"sbatch": ["--out=x"]},
        {"sbatch": ["-o out"]},
        {"nodes": 4, "ntasks": 3},
        {"nodes": 2, "ntasks_per_node": 2, "ntasks": 6},
        {"learner_cpus": 8, "launcher": "mpiexec"},
        {"learner": {"gpus": "1"}, "ntasks": 1},
        {"mpi": "pmi2; rm -rf /"},
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values):
    with pytest.raises(SlurmConfigError) as caught:
        make_config(values)
    text = str(caught.value)
    assert text.startswith("slurm.") and "\n" not in text and ("allowed" in text or "could not" in text), text


def test_the_time_that_yaml_reads_as_a_number_is_explained():
    with pytest.raises(SlurmConfigError, match="YAML reads 2:00:00"):
        make_config({"time": 7200})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 1800), ("10:00", 600), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-2:30:15", 95415),
        ("UNLIMITED", None), ("", None), (None, None), ("00:00:42", 42),
    ],
)  # fmt: skip
def test_time_limits_in_seconds(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("values", "workers", "ranks"),
    [
        ({}, 2, 3),
        ({"nodes": 4}, 2, 4),
        ({"nodes": 4}, 7, 8),
        ({"nodes": 3, "ntasks_per_node": 2}, 2, 6),
        ({"ntasks": 9}, 2, 9),
        ({"learner_cpus": 4}, 2, 3),
        ({"learner_cpus": 4, "nodes": 2, "ntasks_per_node": 3}, 2, 7),
        ({"learner_cpus": 4, "ntasks": 9}, 2, 9),
        ({"learner": {"gpus": "1"}, "nodes": 4}, 2, 5),
    ],
)
def test_how_many_ranks_a_job_has(values, workers, ranks):
    assert make_config(values).ranks(workers) == ranks


def test_a_learner_like_the_others_makes_no_heterogeneous_job():
    assert not make_config({"learner_cpus": 2, "cpus_per_task": 2}).heterogeneous
    assert not make_config({"learner_cpus": 1}).heterogeneous
    assert make_config({"learner_cpus": 2}).heterogeneous
    assert make_config({"learner": {"partition": "gpu"}}).heterogeneous


def test_the_signal_comes_in_the_second_half_of_a_short_job():
    assert make_config({"time": "1:00"}).lead_s == 30
    assert make_config({"time": "1:00:00"}).lead_s == 120
    assert SlurmConfig().lead_s == 120


def test_every_key_says_what_it_means():
    import dataclasses

    assert all(spec.metadata.get("help") for spec in dataclasses.fields(SlurmConfig) if spec.name != "learner")
