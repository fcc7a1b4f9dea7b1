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
    epochs: int = key(1, "passes over each batch; the correction is computed anew at every step", ge=1)
    minibatch_size: int = key(512, "about how many steps go into a gradient step; whole rollouts of environments", ge=1)
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
    samples_per_step: float = key(4.0, "how often each environment step is replayed: fixes the gradient steps", gt=0)
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
        if self.learning_starts > self.capacity:
            return f"algo.learning_starts={self.learning_starts}: allowed: at most algo.capacity={self.capacity}"
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
