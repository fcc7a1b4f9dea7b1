"""What each asynchronous algorithm can be told: the keys of ``algo`` and of the learners, in one place.

Apart from their learners, so that a command line is read without loading torch.  Lockstep PPO has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterenv_hpc.settings import key


@dataclass
class Arrivals:
    """How rollouts come: from single workers, in the order they arrive, while the workers go on."""

    num_steps: int = key(32, "steps of each environment in one rollout of a worker", ge=1)
    rollouts_per_update: int = key(1, "rollouts, from whichever workers come first, that make up one update", ge=1)
    publish_every: int = key(1, "updates between two versions that workers can hear of", ge=1)

    def misfit(self, num_envs: int, envs_per_worker: int) -> str | None:
        """What does not fit so many environments, as one line; None if all does."""
        return None


@dataclass
class VTraceConfig(Arrivals):
    """Actor-critic with V-trace (IMPALA): one pass over each batch, lag corrected by importance weights."""

    name: str = key("vtrace", "which learner", choices=("vtrace",))
    epochs: int = key(1, "passes over each batch; the correction is computed anew for each", ge=1)
    minibatch_size: int = key(512, "about how many shuffled steps go into a gradient step", ge=1)
    learning_rate: float = key(1e-3, "Adam's step size at the start", gt=0)
    lr_schedule: str = key("linear", "falling to 0 at total_steps, or not at all", choices=("linear", "constant"))
    adam_eps: float = key(1e-5, "Adam's epsilon", gt=0)
    gamma: float = key(0.99, "discount", ge=0, le=1)
    trace_decay: float = key(1.0, "lambda: shortens the traces further than the importance weights do", ge=0, le=1)
    rho_bar: float = key(1.0, "truncation of the weights: which policy the values are those of", gt=0)
    c_bar: float = key(1.0, "truncation of the traces: how far corrections reach back, at most rho_bar", gt=0)
    entropy_coef: float = key(0.01, "weight of the mean entropy", ge=0)
    value_coef: float = key(0.5, "weight of the mean squared value error", ge=0)
    max_grad_norm: float | None = key(0.5, "norm that gradients are cut to; null: no limit", gt=0)
    reward_scale: float = key(1.0, "rewards are multiplied by this, for learning only", gt=0)
    scale_advantages: bool = key(True, "divide advantages by their root mean square over a gradient step's batch")


@dataclass
class Replaying(Arrivals):
    """What learners from a replay have in common."""

    num_steps: int = key(16, "steps of each environment in one rollout of a worker", ge=1)
    capacity: int = key(100_000, "transitions that the replay holds, over all environments", ge=1)
    learning_starts: int = key(1_000, "transitions in the replay before learning begins", ge=1)
    batch_size: int = key(256, "transitions in a gradient step", ge=1)
    samples_per_step: float = key(
        4.0, "how often each environment step is replayed: fixes the gradient steps", gt=0, le=100_000
    )
    n_step: int = key(1, "rewards that are summed before the bootstrap", ge=1)
    learning_rate: float = key(1e-3, "Adam's step size at the start", gt=0)
    lr_schedule: str = key("constant", "falling to 0 at total_steps, or not at all", choices=("linear", "constant"))
    adam_eps: float = key(1e-8, "Adam's epsilon", gt=0)
    gamma: float = key(0.99, "discount", ge=0, le=1)
    reward_scale: float = key(1.0, "rewards are multiplied by this, for learning only", gt=0)
    max_grad_norm: float | None = key(None, "norm that gradients are cut to; null: no limit", gt=0)
    tau: float = key(0.005, "how far the target network follows at each gradient step", gt=0, le=1)
    checkpoint_replay: bool = key(True, "checkpoints hold the replay too; if not, a resumed run fills it anew")

    def misfit(self, num_envs: int, envs_per_worker: int) -> str | None:
        """What does not fit so many environments, as one line; None if all does."""
        # Room for a rollout in which every step ends an episode, and for its successor.
        if self.capacity < (least := num_envs * (2 * self.num_steps + 2)):
            return (
                f"algo.capacity={self.capacity}: allowed: at least {least}, for {num_envs} environments and rollouts "
                f"of algo.num_steps={self.num_steps}"
            )
        for name in ("learning_starts", "batch_size"):
            if getattr(self, name) > self.capacity:
                return f"algo.{name}={getattr(self, name)}: allowed: at most algo.capacity={self.capacity}"
        if self.n_step > (share := self.capacity // num_envs):
            return (
                f"algo.n_step={self.n_step}: allowed: at most {share}, what {num_envs} environments each have of "
                f"algo.capacity={self.capacity}"
            )
        return None


@dataclass
class DQNConfig(Replaying):
    """Q-learning: double, dueling, n-step, prioritized replay, a ladder of epsilons over the workers (Ape-X)."""

    name: str = key("dqn", "which learner", choices=("dqn",))
    n_step: int = key(3, "rewards that are summed before the bootstrap", ge=1)
    learning_rate: float = key(5e-4, "Adam's step size at the start", gt=0)
    max_grad_norm: float | None = key(10.0, "norm that gradients are cut to; null: no limit", gt=0)
    double: bool = key(True, "the learner's network chooses the action that the target network judges")
    dueling: bool = key(True, "a network with separate heads for the state's value and the actions' advantages")
    prioritized: bool = key(True, "replay what surprised most more often")
    priority_exponent: float = key(0.6, "alpha: how much more often; 0: not at all", ge=0, le=1)
    importance_exponent: float = key(0.4, "beta at the start, 1 at the end: how far that is weighed out", ge=0, le=1)
    epsilon: float = key(0.4, "exploration of the first worker: the share of actions drawn at random", ge=0, le=1)
    epsilon_exponent: float = key(7.0, "the last worker explores with epsilon to the power of 1 + this", ge=0)
    huber: float = key(1.0, "error beyond which the loss grows linearly", gt=0)


@dataclass
class SACConfig(Replaying):
    """Soft actor-critic for continuous actions: twin critics, a tanh-Gaussian, and a temperature that sets itself."""

    name: str = key("sac", "which learner", choices=("sac",))
    actor_learning_rate: float = key(3e-4, "the actor's step size", gt=0)
    temperature: float = key(1.0, "weight of the entropy, or where it begins", gt=0)
    adapt_temperature: bool = key(True, "move it so that the policy keeps the target entropy")
    target_entropy: float | None = key(None, "in nats, of actions scaled to [-1, 1]; null: minus their dimensions")
    critic_hidden: int = key(256, "units in each of the critics' two layers", ge=1)


@dataclass
class TD3Config(Replaying):
    """TD3 for continuous actions: a deterministic actor, twin critics, smoothed targets, delayed actor steps."""

    name: str = key("td3", "which learner", choices=("td3",))
    actor_learning_rate: float = key(1e-3, "the actor's step size", gt=0)
    exploration: float = key(0.1, "deviation of the workers' noise, in halves of the actions' ranges", gt=0)
    target_noise: float = key(0.2, "deviation of the noise on target actions, in the same unit", ge=0)
    target_noise_limit: float = key(0.5, "where that noise is cut", ge=0)
    actor_every: int = key(2, "critic steps for each step of the actor and the targets", ge=1)
    critic_hidden: int = key(256, "units in each of the critics' two layers", ge=1)


MOST = 2**31 - 1
"""A count beyond this is a slip of the finger."""


@dataclass
class GradientMethod:
    """Workers return gradients of fixed-length trajectories, and the learner averages them (arXiv 2509.24305).

    The keys that several of these methods share; ``gradients.*`` says how gradients travel.
    """

    horizon: int = key(200, "H: steps of a trajectory, whatever happens in it", ge=1, le=MOST)
    ending: str = key(
        "absorb", "an episode that ends before: no more rewards, or another follows", choices=("absorb", "reset")
    )
    gamma: float = key(0.99, "discount, from the trajectory's first step on", gt=0, le=1)
    baseline: str = key(
        "leave_one_out",
        "taken off the rewards to go: the mean over a worker's other envs_per_worker - 1 trajectories, or nothing",
        choices=("leave_one_out", "none"),
    )
    alpha: float = key(0.1, "length of a step of the weights", gt=0)
    alpha_schedule: str = key(
        "constant",
        "over the updates t: alpha; falling to a hundredth over the total_steps / (M x horizon) updates expected; or "
        "alpha / (t + 1)^alpha_power",
        choices=("constant", "linear", "power"),
    )
    alpha_power: float = key(0.5, "for alpha_schedule=power", ge=0)

    def misfit(self, num_envs: int, envs_per_worker: int) -> str | None:
        """What does not fit so many environments, as one line; None if all does."""
        if self.baseline == "leave_one_out" and envs_per_worker < 2:
            return "algo.baseline=leave_one_out: allowed: none, or envs_per_worker of at least 2"
        workers, m = num_envs // envs_per_worker, getattr(self, "m", None)
        if m is not None and m > workers:
            return f"algo.m={m}: allowed: at most the number of workers, {workers}"
        return None


@dataclass
class RoundMethod(GradientMethod):
    """Methods that make an update of many gradients."""

    M: int = key(20, "trajectories in an update; what envs_per_worker brings beyond is used too", ge=1, le=MOST)
    M_init: int | None = key(None, "of the first update; null: M", ge=1, le=MOST)


@dataclass
class NIGTMethod(RoundMethod):
    """Normalised steps with implicit gradient transport."""

    eta: float = key(0.1, "weight of a new estimate in the direction; 1: no momentum", gt=0, le=1)


@dataclass
class RennalaNIGTConfig(NIGTMethod):
    """An update of the first M gradients, whoever they come from."""

    name: str = key("rennala_nigt", "which method", choices=("rennala_nigt",))


@dataclass
class MaleniaNIGTConfig(NIGTMethod):
    """Every worker's mean has the same weight, and the harmonic mean of the counts reaches M / n: for unlike tasks."""

    name: str = key("malenia_nigt", "which method", choices=("malenia_nigt",))


@dataclass
class SyncNIGTConfig(NIGTMethod):
    """Every worker computes M / n gradients, and all wait for the slowest."""

    name: str = key("sync_nigt", "which method", choices=("sync_nigt",))


@dataclass
class MSyncNIGTConfig(NIGTMethod):
    """The m workers that are done first, with M / m gradients each."""

    name: str = key("m_sync_nigt", "which method", choices=("m_sync_nigt",))
    m: int | None = key(None, "workers to wait for; null: half of them", ge=1)


@dataclass
class RennalaPGConfig(RoundMethod):
    """An update of the first M gradients; plain ascent, alpha times the gradient as it is."""

    name: str = key("rennala_pg", "which method", choices=("rennala_pg",))
    alpha: float = key(0.01, "what the gradient is multiplied by", gt=0)


@dataclass
class AFedPGConfig(GradientMethod):
    """An update at every arrival, however stale (arXiv 2404.08003)."""

    name: str = key("afedpg", "which method", choices=("afedpg",))
    eta: float = key(0.1, "weight of a new gradient in the direction; 1: no momentum", gt=0, le=1)
