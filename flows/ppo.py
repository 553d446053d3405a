"""PPO (Schulman et al. 2017, arXiv:1707.06347) with a reward model or functions and a KL penalty (Ouyang et al. 2022).

Six calls to models, as in figure 1 of ReaL (Mei et al. 2024), and computations on their rows. Without a critic, a
scalar head on the actor's trunk computes the values, and a single train_step trains both (APP: Xiao et al. 2023).
"""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.critic import check_critic
from prefect_rlhf.flows.forms.reward import Reward, check_scorer, scored
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.rl.gae import gae
from prefect_rlhf.tasks.rl.losses import ppo_clip, value_clip
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.rewards import kl_penalised_rewards
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.settings import Staleness
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step


@rlhf_flow("ppo")
def ppo(
    prompts: Prompts,
    held_out: Prompts,
    actor: Model,
    *,
    critic: Model | None = None,
    ref: Model,
    reward: Reward | None = None,
    algo: PPO = PPO(),
    staleness: Staleness = 0,
    play: Play | None = None,
) -> None:
    """One iteration: respond, score, estimate advantages, train policy and values; evaluate at intervals.

    The ratio is relative to the policy that made the responses, so it also corrects for `staleness`. With `play`, each
    response is a conversation, which the play scores; the values are of the model's own tokens.
    """
    check_scorer(reward, play)
    check_critic(actor, critic, algo)
    rollout = generate(
        actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling, staleness=staleness, play=play
    )
    scores, masked = scored(reward, rollout), () if play is None else (rollout,)
    ref_logprobs = inference(ref, rollout, output="logprobs", temperature=algo.temperature)
    values = inference(critic or actor, rollout, output="values", name=None if critic else "actor_values")
    old = old_policy(actor, rollout, algo)
    rewards = compute(kl_penalised_rewards, old.logprobs, ref_logprobs, scores, settings=algo)
    advantages = compute(gae, rewards, values, *masked, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    policy_loss = ppo_clip(algo).on(*old.inputs, advantages, temperature=algo.temperature)
    value_loss = value_clip(algo).on(rollout, values, advantages)
    if critic is None:
        policy_loss += algo.value_weight * value_loss
    train_step(actor, policy_loss, optimizer=algo.actor_optimizer, update=algo.update)
    if critic is not None:
        train_step(critic, value_loss, optimizer=algo.critic_optimizer, update=algo.update)
    every = algo.evaluate_every
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=every, play=play, name="actor_evaluation")
    greedy_scores = scored(reward, greedy, every=every, name="reward_evaluation")
    compute(record_evaluation, greedy, greedy_scores, settings=algo, every=every)
