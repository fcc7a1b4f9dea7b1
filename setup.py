"""Which folders become packages; everything else about the distribution stands in setup.cfg.

conf/ and slurm/ lie at the top of the repository, where people look for them and where sbatch finds the
templates by hand.  In an installed package they lie inside it, as data, so that a wheel is complete.
"""

from setuptools import find_namespace_packages, setup

DATA_FOLDERS = {"clusterenv_hpc.conf": "conf", "clusterenv_hpc.slurm": "slurm"}
ALL_FILES = ["*", "**/*"]

setup(
    packages=[*find_namespace_packages(include=["clusterenv_hpc", "clusterenv_hpc.*"]), *DATA_FOLDERS],
    package_dir=DATA_FOLDERS,
    package_data={"clusterenv_hpc": ["py.typed"], **dict.fromkeys(DATA_FOLDERS, ALL_FILES)},
    exclude_package_data={name: ["**/__pycache__/*", "*.pyc"] for name in DATA_FOLDERS},
)
