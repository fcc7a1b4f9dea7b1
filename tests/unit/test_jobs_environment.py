"""What SLURM_* and MPI launchers say, against environments recorded on Slurm 22.05."""

from __future__ import annotations

import time

import pytest

from clusterenv_hpc.comm.start import clear_leftovers
from clusterenv_hpc.jobs.environment import (
    SlurmEnvironmentError,
    expand_nodelist,
    launched_ranks,
    read_slurm,
    scrubbed_environment,
    world_problem,
)

JOB = {
    "SLURM_JOB_ID": "56018558",
    "SLURM_JOBID": "56018558",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_PARTITION": "debug",
    "SLURM_JOB_NAME": "b.sh",
    "SLURM_CLUSTER_NAME": "dev",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_NTASKS": "6",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURMD_NODENAME": "node1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6"}
PMI2 = STEP | {"SLURM_MPI_TYPE": "pmi2", "PMI_SIZE": "6", "PMI_RANK": "0", "PMI_FD": "11", "PMI_JOBID": "56018558.0"}
PMIX = STEP | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.56018558.0"}
# Under mpiexec the step is the launcher's own: one helper on each node.
HYDRA = JOB | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "PMI_SIZE": "6", "PMI_RANK": "4"}
ORTED_LOCAL = JOB | {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
ORTED_REMOTE = ORTED_LOCAL | {"SLURM_STEP_ID": "4", "SLURM_STEP_NUM_TASKS": "2"}
HETJOB = JOB | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "56018558",
    "SLURM_JOB_ID_HET_GROUP_1": "56018559",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_MPI_TYPE": "pmix",
}


def test_outside_of_a_job_there_is_none():
    assert read_slurm({}) is None
    assert read_slurm({"SLURM_CONF": "/x", "SLURM_JOB_ID": ""}) is None


def test_a_batch_script_is_read():
    job = read_slurm(JOB)
    assert job is not None
    assert (job.job_id, job.label, job.ntasks, job.cpus_per_task) == (56018558, "56018558", 6, 2)
    assert job.nodes == ("node1", "node2", "node3") and job.node == "node1"
    assert job.step_id is None and job.step_tasks is None and job.array_job_id is None and job.het_size is None
    assert job.restart_count == 0 and job.end_time is None and job.time_left(0.0) is None
    assert job.partition == "debug"


def test_an_array_element_is_named_by_array_and_index():
    # The last element has the array's own number: requeueing that would requeue all of them.
    job = read_slurm(JOB | {"SLURM_ARRAY_JOB_ID": "56018558", "SLURM_ARRAY_TASK_ID": "0"})
    assert job is not None and job.label == "56018558_0"


def test_a_heterogeneous_job_is_read():
    job = read_slurm(HETJOB)
    assert job is not None and job.het_size == 2 and job.het_job_ids == (56018558, 56018559) and job.step_tasks == 5


def test_time_left_and_restarts():
    job = read_slurm(JOB | {"SLURM_JOB_END_TIME": "1000", "SLURM_RESTART_COUNT": "2"})
    assert job is not None and job.restart_count == 2
    assert job.time_left(400.0) == 600.0 and job.time_left(2000.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"SLURM_JOB_ID": "12a"}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "0"}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "-4"}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "9" * 5000}, "SLURM_JOB_ID"),
        ({"SLURM_JOBID": "7"}, "SLURM_JOBID"),
        ({"SLURM_NTASKS": "six"}, "SLURM_NTASKS"),
        ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_JOB_ID"),
        ({"SLURM_ARRAY_JOB_ID": "1"}, "SLURM_ARRAY_TASK_ID"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "2"}, "SLURM_PROCID"),
        ({"SLURM_JOB_NODELIST": "node[1-"}, "SLURM_JOB_NODELIST"),
        ({"SLURM_RESTART_COUNT": "1.5"}, "SLURM_RESTART_COUNT"),
    ],
)
def test_malformed_and_contradictory_values_are_named(changes, word):
    with pytest.raises(SlurmEnvironmentError, match=word):
        read_slurm(JOB | changes)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b-2.c", ["a", "b-2.c"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3-4]x,y", ["r1n3x", "r1n4x", "r2n3x", "r2n4x", "y"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodelist(text) == names


@pytest.mark.parametrize(
    "text", ["n[", "n]", "n[1", "a,,b", ",", "n[3-1]", "n[a-b]", "n[1-999999999]", "a b", "n[[1]]"]
)
def test_node_lists_that_are_none(text):
    with pytest.raises(SlurmEnvironmentError, match="node list"):
        expand_nodelist(text)


def test_a_product_of_ranges_does_not_fill_the_memory():
    with pytest.raises(SlurmEnvironmentError, match="more than"):
        expand_nodelist("a[1-9999]b[1-9999]c[1-9999]")


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, None),
        (JOB, None),
        (STEP, 6),
        (PMI2, 6),
        (PMIX, 6),
        (HYDRA, 6),
        (ORTED_LOCAL, 6),
        (ORTED_REMOTE, 6),
        (HETJOB, 5),
    ],
)
def test_how_many_were_launched(environ, ranks):
    assert launched_ranks(environ) == ranks
    assert world_problem(ranks or 1, environ) is None


@pytest.mark.parametrize(
    ("environ", "vendor", "fix"),
    [
        (STEP, None, "--mpi=pmi2 .* or --mpi=pmix"),
        (STEP, "MPICH", "--mpi=pmi2"),
        (PMI2, "Open MPI", "srun --mpi=pmix"),
        (PMI2, None, "srun --mpi=pmix"),
        (PMIX, "MPICH", "srun --mpi=pmi2"),
        (PMIX | {"SLURM_MPI_TYPE": "pmix_v4"}, None, "does not speak --mpi=pmix[.]"),
        (HETJOB, "MPICH", "--mpi=pmi2"),
        (HYDRA, "Open MPI", "came with Open MPI"),
        (ORTED_LOCAL, "MPICH", "came with MPICH"),
    ],
)
def test_singletons_are_explained(environ, vendor, fix):
    import re

    problem = world_problem(1, environ, vendor)
    assert problem is not None and re.search(fix, problem), problem


def test_a_world_of_another_size_is_explained():
    assert "6 tasks" in str(world_problem(3, PMI2)) and "3 ranks" in str(world_problem(3, PMI2))
    assert "6 processes" in str(world_problem(3, HYDRA))


def test_a_plain_start_is_no_problem():
    assert world_problem(1, {}) is None
    assert world_problem(1, JOB) is None  # python in the batch script
    assert world_problem(1, STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None  # srun --pty bash
    with pytest.raises(SlurmEnvironmentError):
        world_problem(1, {"PMI_SIZE": "many"})


def test_scrubbing_takes_the_job_and_leaves_the_user():
    users = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PMIX_MCA_gds": "hash",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
    }
    jobs = {
        **HETJOB,
        **HYDRA,
        **ORTED_LOCAL,
        **PMI2,
        "SBATCH_PARTITION": "x",
        "OMPI_MCA_orte_launch": "1",
        "HYDI_X": "1",
    }
    assert scrubbed_environment({**jobs, **users}) == users


def test_outside_of_a_job_sbatchs_own_variables_are_a_users():
    environ = {"SBATCH_ACCOUNT": "me", "SLURM_NTASKS": "4", "SLURM_CONF": "/c"}
    assert scrubbed_environment(environ) == {"SBATCH_ACCOUNT": "me", "SLURM_CONF": "/c"}


def test_shared_memory_of_an_earlier_life_is_removed_and_no_other(tmp_path):
    # Names that MPICH 5.0 was seen to give: the job's and step's number, hashed, and the node's.
    first = {"PMI_JOBID": "56022980.0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "2"}
    other = {**first, "SLURM_LOCALID": "1"}
    names = ["mpich_shm_482fd07c_1", "mpich_shm_492fd20f_0", "mpich_shm_492fd20f_1"]
    for name in names:
        (tmp_path / name).touch()
    for environ in ({}, {**first, "PMI_JOBID": "../x"}, {**first, "SLURM_RESTART_COUNT": "0"}):
        assert clear_leftovers(environ, tmp_path) == []
    began = time.monotonic()
    assert clear_leftovers(other, tmp_path, wait_s=0.2) == [] and time.monotonic() - began >= 0.2
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert clear_leftovers(first, tmp_path) == [tmp_path / names[2]]
    assert sorted(path.name for path in tmp_path.glob("mpich*")) == names[:2]
    clear_leftovers(other, tmp_path, wait_s=60.0)  # does not wait: the first task has been here
    assert time.monotonic() - began < 30
    assert clear_leftovers({**first, "SLURM_RESTART_COUNT": "3"}, tmp_path) == []
    assert len(list(tmp_path.glob("clusterenv-hpc-*"))) == 1, "the note of the life before is gone"
