"""How a job's ranks are started where the configuration leaves it open: what this MPI and this Slurm share."""

from __future__ import annotations

from clusterenv_hpc.jobs.config import SlurmConfig, SlurmConfigError
from clusterenv_hpc.jobs.render import Launch

WANTED = {"hydra": ("pmi2", "cray_shasta"), "openmpi": ("pmix",)}
"""What an MPI of each family understands of ``srun --mpi=``, best first."""


def choose_launch(config: SlurmConfig) -> Launch:
    """The launch that ``slurm.launcher`` and ``slurm.mpi`` ask for, with what they leave out found on this machine.

    Raises:
        SlurmConfigError: this MPI cannot be started so.
        LaunchError: there is no MPI, or no launcher that belongs to it.
    """
    if config.launcher == "srun" and config.mpi is not None:
        return Launch(mpi=config.mpi)
    from clusterenv_hpc.run.mpi_launcher import HYDRA, find_launcher, find_mpi

    mpi = find_mpi()
    if config.launcher == "srun":
        return Launch(mpi=_plugin(str(mpi), mpi.family))
    if config.launcher == "ulfm" and (mpi.family == HYDRA or mpi.version[0] < 5):
        raise SlurmConfigError(
            f"slurm.launcher=ulfm: mpi4py loads {mpi} here; expected Open MPI 5 or later: "
            f"a virtual environment with the package openmpi instead of mpich"
        )
    return Launch(program=find_launcher(mpi), openmpi=mpi.family != HYDRA)


def _plugin(mpi: str, family: str | None) -> str | None:
    """The first of the plugins that this MPI understands which srun offers."""
    from clusterenv_hpc.run.srun_probe import mpi_plugins

    offered, wanted = mpi_plugins(), WANTED.get(family or "", ())
    if not offered or not wanted:
        return wanted[0] if wanted else None
    for name in wanted:
        if name in offered:
            return name
    raise SlurmConfigError(
        f"slurm.mpi=null: {mpi} needs srun --mpi={' or '.join(wanted)}, this Slurm has {', '.join(offered)}; "
        f"allowed: slurm.launcher=mpiexec, or slurm.mpi=NAME if you know better"
    )
