"""Slurm: what its environment says, scripts for it, the commands that speak to it, signals, requeue, notebooks.

Nothing here imports torch or MPI.
"""
