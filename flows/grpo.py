"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its variants: group scores, no critic.

Dr. GRPO, RLOO, REINFORCE++, GDPO, DAPO, GSPO and CISPO are settings of this flow.
"""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.reward import Reward, check_reference, check_scorer, scored, with_reward_weights
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.rl.group_advantages import grpo_advantages, informative
from prefect_rlhf.tasks.rl.losses import grpo as grpo_loss
from prefect_rlhf.tasks.rl.moving_reference import move_reference
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.settings import Staleness
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step
from prefect_rlhf.tasks.tracing.select import select


@rlhf_flow("grpo")
def grpo(
    prompts: Prompts,
    held_out: Prompts,
    actor: Model,
    reward: Reward | None = None,
    ref: Model | None = None,
    algo: GRPO = GRPO(),
    staleness: Staleness = 0,
    play: Play | None = None,
) -> None:
    """One iteration: several responses to each prompt, each compared with the others of its group.

    The ratio is relative to the policy that made the responses, so it also corrects for `staleness`. With
    `over_sampling`, the step uses the first groups that are informative (Yu et al. 2025, DAPO, section 3.2, without its
    loop). With `play`, each response is a conversation, which the play scores.
    """
    check_scorer(reward, play, algo)
    check_reference(ref, algo.kl.coefficient)
    algo = with_reward_weights(algo, reward)
    group, size, sampling = algo.samples_per_prompt, algo.prompts_per_step, algo.sampling
    rollout = generate(
        actor, prompts, batch_size=size, samples=group, sampling=sampling, staleness=staleness, play=play
    )
    scores = scored(reward, rollout)
    if algo.over_sampling > 1:
        rollout = select(informative, rollout, scores, at_most=algo.batch_size, settings=algo)
    reference = [inference(ref, rollout, output="logprobs", temperature=algo.temperature)] if ref else []
    old = old_policy(actor, rollout, algo)
    penalties = [*reference, old.logprobs] if algo.kl.in_reward else []
    advantages = compute(grpo_advantages, rollout, scores, *penalties, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    inputs = [*old.inputs, advantages, *([] if algo.kl.in_reward else reference)]
    train_step(
        actor,
        grpo_loss(algo).on(*inputs, temperature=algo.temperature),
        optimizer=algo.optimizer,
        update=algo.update,
    )
    move_reference(ref, actor, algo.follow)
    every = algo.evaluate_every
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=every, play=play, name="actor_evaluation")
    greedy_scores = scored(reward, greedy, every=every, name="reward_evaluation")
    compute(record_evaluation, greedy, greedy_scores, settings=algo, every=every)
