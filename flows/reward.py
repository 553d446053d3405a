"""A reward model from preferences (Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1)."""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Preferences
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.rl.evaluation.held_out import pair_accuracy
from prefect_rlhf.tasks.rl.losses import bradley_terry
from prefect_rlhf.tasks.rl.settings.online import Reward
from prefect_rlhf.tasks.tracing.calls import compute, inference, train_step


@rlhf_flow("reward")
def reward(pairs: Preferences, held_out: Preferences, reward: Model, algo: Reward = Reward()) -> None:
    """One iteration: train on a batch of pairs; at intervals, the accuracy on held-out pairs."""
    loss = bradley_terry(algo).on(pairs, batch_size=algo.batch_size)
    train_step(reward, loss, optimizer=algo.optimizer, update=algo.update)
    scores = inference(reward, held_out, output="scores", every=algo.evaluate_every, name="reward_evaluation")
    compute(pair_accuracy, scores, settings=algo, every=algo.evaluate_every)
