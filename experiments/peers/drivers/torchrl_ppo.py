"""TorchRL: its multi-process synchronous collector, its PPO loss and its advantage estimator."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl import collectors
from torchrl.envs import GymEnv, SerialEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from work import ENVS_PER_WORKER, HIDDEN, TASKS, WORKERS, Returns, Task, answer, request, timed

MultiSync = getattr(collectors, "MultiSyncCollector", None) or collectors.MultiSyncDataCollector


class Maker:
    """Makes one worker's environments; an object of a class, so that it can be sent to a process."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self) -> SerialEnv:
        """Environments one by one in the worker's process, as in the other systems."""
        torch.set_num_threads(1)
        env_id = self.task.env_id
        envs = SerialEnv(ENVS_PER_WORKER, lambda: GymEnv(env_id, device="cpu"))
        return envs


def networks(task: Task, seed: int) -> tuple[ProbabilisticActor, ValueOperator]:
    """Separate 64-64 tanh actor and critic."""
    torch.manual_seed(seed)
    example = GymEnv(task.env_id)
    inputs, outputs = example.observation_spec["observation"].shape[-1], example.action_spec.shape[-1]
    shape = {"num_cells": [HIDDEN, HIDDEN], "activation_class": nn.Tanh}
    actor_net = MLP(in_features=inputs, out_features=outputs, **shape)
    critic_net = MLP(in_features=inputs, out_features=1, **shape)
    for net, gain in ((actor_net, 0.01), (critic_net, 1.0)):
        linears = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
        for layer in linears:
            nn.init.orthogonal_(layer.weight, gain if layer is linears[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    actor = ProbabilisticActor(
        TensorDictModule(actor_net, in_keys=["observation"], out_keys=["logits"]), spec=example.action_spec,
        in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )  # fmt: skip
    example.close()
    return actor, ValueOperator(critic_net, in_keys=["observation"])


def main() -> None:
    """One measurement."""
    asked = request()
    task = TASKS[asked["env"]]
    torch.set_num_threads(1)
    actor, critic = networks(task, asked["seed"])
    collector = MultiSync(
        [Maker(task)] * WORKERS, actor, frames_per_batch=task.batch, total_frames=-1, device="cpu",
        storing_device="cpu", cat_results=0, use_buffers=True,
    )  # fmt: skip
    collector.set_seed(asked["seed"])
    batches = iter(collector)
    if asked["what"] == "collect":
        answer(timed(lambda: next(batches).numel(), asked["seconds"]))
    else:
        answer(train(collector, batches, actor, critic, task, asked["seconds"]))
    collector.shutdown()


def train(collector, batches, actor, critic, task: Task, limit_s: float) -> dict:
    """PPO until the target or the limit."""
    advantage = GAE(gamma=task.gamma, lmbda=task.gae_lambda, value_network=critic, average_gae=False)
    loss_of = ClipPPOLoss(
        actor, critic, clip_epsilon=task.clip, entropy_coeff=task.entropy, critic_coeff=task.value_weight,
        normalize_advantage=True, loss_critic_type="l2",
    )  # fmt: skip
    weights = list(loss_of.parameters())
    optimizer = torch.optim.Adam(weights, lr=task.learning_rate, eps=task.adam_eps)
    returns, steps = Returns(task.target), 0
    running = torch.zeros(WORKERS * ENVS_PER_WORKER)
    while returns.seconds < limit_s:
        batch = next(batches)
        steps += batch.numel()
        ended = []
        for reward, done in zip(
            batch["next", "reward"].squeeze(-1).unbind(1), batch["next", "done"].squeeze(-1).unbind(1), strict=True
        ):
            running = running + reward
            ended += running[done].tolist()
            running = running * ~done
        if returns.add(ended, steps):
            break
        batch["next", "reward"] = batch["next", "reward"] * task.reward_scale
        with torch.no_grad():
            advantage(batch)
        flat = batch.reshape(-1)
        for _ in range(task.epochs):
            for index in torch.randperm(len(flat)).split(task.minibatch):
                losses = loss_of(flat[index])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, task.max_grad_norm)
                optimizer.step()
        collector.update_policy_weights_()
    return returns.told(steps)


if __name__ == "__main__":
    main()
