"""Benchmarks: what the transport, the rollouts and the learner cost, as ratios measured in one run.

clusterenv-hpc bench rollout     steps/s of workers and a receiving learner against workers nobody listens to
clusterenv-hpc bench transport   the channel's round trips and floods against raw MPI Send and Recv
clusterenv-hpc bench learner     microseconds for each rollout message at rank 0, and how many workers that serves
"""
