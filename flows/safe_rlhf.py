"""Safe RLHF (Dai et al. 2023, arXiv:2310.12773): PPO on a reward while a cost stays under its limit.

Nine calls to models: the reward's models have counterparts for the cost, a cost model and a value model, and a Lagrange
multiplier weighs the cost against the reward.
"""

from __future__ import annotations

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.reward import Reward
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.rl.gae import gae
from prefect_rlhf.tasks.rl.losses import nll, ppo_clip, value_clip
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.rewards import kl_penalised_rewards
from prefect_rlhf.tasks.rl.safety import (
    kl_penalised_costs,
    lagrange_advantages,
    lagrange_multiplier,
    record_safe_evaluation,
)
from prefect_rlhf.tasks.rl.settings.safety import SafeRLHF
from prefect_rlhf.tasks.settings import Staleness
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, score, train_step


@rlhf_flow("safe-rlhf")
def safe_rlhf(
    prompts: Prompts,
    held_out: Prompts,
    pretrain: Chats,
    actor: Model,
    critic: Model,
    cost_critic: Model,
    ref: Model,
    reward: Reward,
    cost: Reward,
    algo: SafeRLHF = SafeRLHF(),
    staleness: Staleness = 0,
) -> None:
    """One iteration: respond, score, weigh cost against reward, train policy and both values; evaluate at intervals."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling, staleness=staleness)
    scores, costs = score(reward, rollout), score(cost, rollout, name="cost_score")
    ref_logprobs = inference(ref, rollout, output="logprobs", temperature=algo.temperature)
    values, cost_values = inference(critic, rollout, output="values"), inference(cost_critic, rollout, output="values")
    old = old_policy(actor, rollout, algo)
    rewards = compute(kl_penalised_rewards, old.logprobs, ref_logprobs, scores, settings=algo)
    token_costs = compute(kl_penalised_costs, old.logprobs, ref_logprobs, costs, settings=algo)
    gained = compute(gae, rewards, values, settings=algo.of_each_side)
    spent = compute(gae, token_costs, cost_values, settings=algo.of_each_side, name="cost_gae")
    multiplier = compute(lagrange_multiplier, costs, settings=algo)
    advantages = compute(lagrange_advantages, gained, spent, multiplier, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    policy_loss = ppo_clip(algo).on(*old.inputs, advantages, temperature=algo.temperature)
    ptx_loss = nll(algo).on(pretrain, batch_size=algo.ptx_batch_size)
    train_step(actor, policy_loss + algo.ptx * ptx_loss, optimizer=algo.actor_optimizer, update=algo.update)
    value_loss, cost_loss = (value_clip(algo).on(rollout, *of) for of in ((values, gained), (cost_values, spent)))
    train_step(critic, value_loss, optimizer=algo.critic_optimizer, update=algo.update)
    train_step(cost_critic, cost_loss, optimizer=algo.cost_critic_optimizer, update=algo.update)
    every = algo.evaluate_every
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=every, name="actor_evaluation")
    greedy_scores = score(reward, greedy, every=every, name="reward_evaluation")
    greedy_costs = score(cost, greedy, every=every, name="cost_evaluation")
    compute(record_safe_evaluation, greedy, greedy_scores, greedy_costs, settings=algo, every=every)
