"""Runs of clusterenv-hpc under Hydra's own multirun and launchers, for those who have sweepers or launchers of Hydra's.

    python hydra_sweep.py -m +env=cartpole +seed=1,2 hydra/launcher=submitit_slurm hydra.launcher.nodes=2 \
        hydra.launcher.tasks_per_node=2 '+hydra.launcher.srun_args=["--mpi=pmi2"]'

The words are those of `clusterenv-hpc train`, each with a + before it.  Every task of a job runs this; together they
are one MPI world.  Hydra waits until all its jobs have ended; `clusterenv-hpc submit -m` does not.
"""

import hydra
from hydra.core.hydra_config import HydraConfig

from clusterenv_hpc.jobs.launch import TrainRank


@hydra.main(config_path=None, version_base="1.3")
def main(_):
    words = [word.lstrip("+") for word in HydraConfig.get().overrides.task]  # of this element of the sweep
    return TrainRank([*words, f"run_dir={HydraConfig.get().runtime.output_dir}", "resume=true"])()


if __name__ == "__main__":
    main()
