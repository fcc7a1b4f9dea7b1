"""Every configuration key: its type, its default, its range and what it means, in one place.

The help text, the range checks and the type errors are all read from here.  Values come from the YAML files in
``conf/`` and from the command line; what a file leaves out keeps the default written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from clusterenv_hpc.algorithms import (
    AFedPGConfig,
    Arrivals,
    DQNConfig,
    MaleniaNIGTConfig,
    MSyncNIGTConfig,
    RennalaNIGTConfig,
    RennalaPGConfig,
    SACConfig,
    SyncNIGTConfig,
    TD3Config,
    VTraceConfig,
)
from clusterenv_hpc.jobs.config import SlurmConfig
from clusterenv_hpc.settings import about, key


@dataclass
class DelayConfig:
    """Sleeps that make the workers' steps slow, for experiments; i = 1 is the first worker."""

    scheme: str = key(
        "none",
        "equal: seconds; sqrt: seconds x sqrt(i); linear: seconds x i; straggler: seconds, the last one's x factor; "
        "list: values",
        choices=("none", "equal", "sqrt", "linear", "straggler", "list"),
    )
    seconds: float = key(
        0.0,
        "under env.delay of one step of a worker's environments, all of them together (for the gradient methods: at "
        "least so long); under gradients.communication of one message",
        ge=0,
    )
    factor: float = key(10.0, "how much longer the straggler takes", ge=0)
    values: list[float] = field(default_factory=list, metadata=about("seconds for each worker, with scheme=list"))


@dataclass
class EnvConfig:
    """The environment, the same on every worker."""

    id: str = key(MISSING, "Gymnasium id, or module:Id where importing the module registers it, or module:Class")
    name: str | None = key(None, "short name, used for the run's directory; null: made from the id")
    kwargs: dict[str, Any] = field(default_factory=dict, metadata=about("keyword arguments of gymnasium.make"))
    eval_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=about("what of them evaluations change, such as clipped rewards")
    )
    wrappers: list[Any] = field(
        default_factory=list,
        metadata=about("of each, the innermost first: module:Class, or {wrapper: module:Class, kwargs: {}}"),
    )
    backend: str = key("sync", "how a worker steps its environments", choices=("sync", "vector", "envpool"))
    ranks: int = key(
        1,
        "MPI ranks that each environment spans: all of them build it, with their communicator as keyword argument comm",
        ge=1,
    )
    on_error: str = key("abort", "when one fails: end the run, or build it anew", choices=("abort", "restart"))
    max_restarts: int = key(10, "how often each environment may be built anew", ge=0)
    delay: DelayConfig = field(default_factory=DelayConfig)
    per_worker: list[Any] = field(
        default_factory=list,
        metadata=about("gradient methods: what each worker's environment has of its own, {id, kwargs, wrappers} or {}"),
    )
    target_return: float | None = key(None, "mean return at which the task counts as solved; null: not known")


@dataclass
class PPOAlgo:
    """PPO, as clusterenv_hpc.learners.PPOConfig has it; a batch is workers x envs_per_worker x num_steps."""

    name: str = key("ppo", "which learner", choices=("ppo",))
    num_steps: int = key(128, "steps that each environment takes between two updates", ge=1)
    epochs: int = key(4, "passes over each batch", ge=1)
    minibatch_size: int = key(128, "samples in a gradient step, at most the batch", ge=1)
    learning_rate: float = key(3e-4, "Adam's step size at the start", gt=0)
    lr_schedule: str = key("linear", "falling to 0 at total_steps, or not at all", choices=("linear", "constant"))
    adam_eps: float = key(1e-5, "Adam's epsilon", gt=0)
    gamma: float = key(0.99, "discount", ge=0, le=1)
    gae_lambda: float = key(0.95, "trace decay of the advantages", ge=0, le=1)
    clip: float = key(0.2, "how far the ratio new / proximal policy counts", gt=0, lt=1)
    value_clip: float | None = key(None, "the same for values, in scaled returns; null: no limit", gt=0)
    entropy_coef: float = key(0.01, "weight of the mean entropy", ge=0)
    value_coef: float = key(0.5, "weight of the mean squared value error", ge=0)
    max_grad_norm: float | None = key(0.5, "norm that gradients are cut to; null: no limit", gt=0)
    target_kl: float | None = key(None, "no further epoch once an update has moved so far, in nats; null: never", gt=0)
    reward_scale: float = key(1.0, "rewards are multiplied by this, for learning only", gt=0)
    normalize_advantages: bool = key(True, "to mean 0 and deviation 1 over a batch")
    objective: str = key(
        "decoupled", "decoupled, or PPO's own, which stalls under aps", choices=("decoupled", "coupled")
    )
    max_importance: float = key(2.0, "truncation of the ratio proximal / behaviour policy", gt=0)

    def misfit(self, num_envs: int, envs_per_worker: int) -> str | None:
        """What does not fit so many environments, as one line; None if all does."""
        return self._too_large(f"{num_envs} environments", num_envs)

    def _too_large(self, source: str, envs: int) -> str | None:
        if self.minibatch_size <= (batch := envs * self.num_steps):
            return None
        return (
            f"algo.minibatch_size={self.minibatch_size}: allowed: at most the batch, {batch} = {source} x "
            f"algo.num_steps={self.num_steps}"
        )


@dataclass
class APPOAlgo(Arrivals, PPOAlgo):
    """PPO on rollouts in the order they arrive; a batch is envs_per_worker x num_steps x rollouts_per_update."""

    name: str = key("appo", "which learner", choices=("appo",))
    num_steps: int = key(64, "steps of each environment in one rollout of a worker", ge=1)
    rollouts_per_update: int = key(2, "rollouts, from whichever workers come first, that make up one update", ge=1)

    def misfit(self, num_envs: int, envs_per_worker: int) -> str | None:
        """What does not fit so many environments, as one line; None if all does."""
        count = self.rollouts_per_update
        return self._too_large(f"{count} x {envs_per_worker} environments", count * envs_per_worker)


@dataclass
class PolicyConfig:
    """The networks of actor and critic; images pass convolutions first, whatever the choice."""

    name: str = key("mlp", "a word for it")
    hidden: list[int] = field(default_factory=lambda: [64, 64], metadata=about("units of each fully connected layer"))
    activation: str = key("tanh", "between those layers", choices=("tanh", "relu", "elu", "silu"))
    critic: str = key(
        "separate", "with layers of its own, or on one trunk with the actor", choices=("separate", "shared")
    )
    log_std: float = key(0.0, "continuous actions: logarithm of the standard deviation at the start")
    std: str = key(
        "free",
        "continuous actions: standard deviations as parameters of their own, or from the network through softplus",
        choices=("free", "softplus"),
    )
    squash: str | None = key(
        None,
        "continuous actions: how they are kept within their bounds; null: clip, for the gradient methods tanh",
        choices=("clip", "tanh"),
    )


@dataclass
class APSSync:
    """Ask for weights when mean KL(local || learner) exceeds delta (Adaptive Policy Synchronization)."""

    rule: str = key("aps", "which rule", choices=("aps",))
    delta: float = key(0.5, "mean KL divergence above which a worker asks for weights, in nats", ge=0)
    max_lag: int | None = key(100, "versions behind beyond which a worker asks in any case; null: no limit", ge=1)
    num_probes: int = key(64, "states of a worker's rollout on which the divergence is measured", ge=1)


@dataclass
class AlwaysSync:
    """Ask for weights after every rollout."""

    rule: str = key("always", "which rule", choices=("always",))


@dataclass
class EveryKSync:
    """Ask for weights once the learner is k versions ahead."""

    rule: str = key("every_k", "which rule", choices=("every_k",))
    k: int = key(10, "versions between two requests", ge=1)


@dataclass
class NeverSync:
    """Never ask: the workers keep the first policy (a lower bound to compare with)."""

    rule: str = key("never", "which rule", choices=("never",))


@dataclass
class GradientsConfig:
    """How the workers of the gradient methods give back what they have; of no use to other algorithms."""

    transport: str = key(
        "p2p",
        "every gradient goes to the learner, or only counts do and a round ends with one sum over all",
        choices=("p2p", "allreduce"),
    )
    communication: DelayConfig = field(default_factory=DelayConfig)


@dataclass
class CheckpointConfig:
    """When the run's state is saved."""

    every_s: float = key(60.0, "seconds between checkpoints; 0: after every update", ge=0)
    keep: int = key(3, "newest checkpoints kept", ge=1)


@dataclass
class EvalConfig:
    """The evaluation at the end, and of `clusterenv-hpc eval`: one episode for each of the seeds."""

    episodes: int = key(100, "episodes; 0: no evaluation", ge=0)
    seed: int = key(1_000_000, "seed of the first episode; the next ones count up from it", ge=0)
    sampled: bool = key(False, "draw actions from the policy, rather than take its mode")
    max_steps: int = key(100_000, "steps after which an episode without an end is cut", ge=1)


@dataclass
class StopConfig:
    """When a run ends before total_steps."""

    at_return: float | None = key(
        None, "end when the recent mean return passes this and a greedy evaluation confirms it; null: never"
    )


@dataclass
class LogConfig:
    """What is written while training."""

    every_s: float = key(5.0, "seconds between plain progress lines and writings of summary.json", gt=0)
    window: int = key(100, "episodes in the recent mean return", ge=1)
    progress: str = key(
        "auto", "bar on a terminal and lines elsewhere, or always one of them", choices=("auto", "bar", "lines", "none")
    )
    tensorboard: bool = key(True, "write TensorBoard events")


@dataclass
class Config:
    """One training run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    algo: Any = MISSING
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sync: Any = MISSING
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    workers: int | None = key(
        None, "worker ranks; 0: all in one process; null: 2, or under srun or mpiexec all ranks but the learner's", ge=0
    )
    eval_workers: int = key(
        0, "ranks set aside to evaluate the newest policy all the time, so that the learner need not", ge=0, le=1
    )
    envs_per_worker: int = key(16, "environments of each worker", ge=1)
    logical_workers: int = key(2, "with workers=0: as how many workers the one process acts", ge=1)
    total_steps: int = key(1_000_000, "environment steps of the run (steps that only reset are not counted)", ge=1)
    seed: int = key(1, "seed of everything random", ge=0, le=2**32 - 1)
    name: str | None = key(None, "the run's name; null: made of env, algo, sync and seed")
    run_dir: str | None = key(None, "the run's directory; null: runs/<name>, with -2, -3, ... where that is taken")
    resume: bool = key(False, "go on from the run's last checkpoint; where there is none, start")
    device: str = key("auto", "the learner's device: auto, cpu, cuda or cuda:N")
    threads: int | None = key(
        None, "the learner's threads; null: 1, for wide or convolutional networks up to 4", ge=1, le=1024
    )
    timeout: float = key(600.0, "seconds without a sign of life from a worker that are taken for its death", gt=0)
    learner_timeout: float = key(3600.0, "seconds without word from the learner until a worker ends the job", gt=0)
    on_worker_loss: str | None = key(
        None,
        "when a worker dies: end the run, or go on without it (MPI with ULFM); null: as slurm.launcher says",
        choices=("abort", "continue"),
    )
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def worker_count(self) -> int:
        """Workers, real or logical; with ``workers: null`` as many as a plain start would make."""
        if self.workers is None:
            return DEFAULT_WORKERS
        return self.workers or self.logical_workers

    @property
    def other_ranks(self) -> int:
        """Ranks beside the learner's; a worker is a group of ``env.ranks`` of them."""
        return self.worker_count * self.env.ranks + self.eval_workers

    @property
    def num_envs(self) -> int:
        """Environments of the whole run."""
        return self.worker_count * self.envs_per_worker


DEFAULT_WORKERS = 2

VARIANTS: dict[str, tuple[str, dict[str, type]]] = {
    "algo": (
        "name",
        {
            "ppo": PPOAlgo,
            "appo": APPOAlgo,
            "vtrace": VTraceConfig,
            "dqn": DQNConfig,
            "sac": SACConfig,
            "td3": TD3Config,
            "rennala_nigt": RennalaNIGTConfig,
            "malenia_nigt": MaleniaNIGTConfig,
            "sync_nigt": SyncNIGTConfig,
            "m_sync_nigt": MSyncNIGTConfig,
            "rennala_pg": RennalaPGConfig,
            "afedpg": AFedPGConfig,
        },
    ),
    "sync": ("rule", {"aps": APSSync, "always": AlwaysSync, "every_k": EveryKSync, "never": NeverSync}),
}
"""Groups whose keys depend on the choice: the key that names the choice, and the schema of each."""
