"""ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE with the greedy response's score as baseline; no critic."""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.reward import Reward, check_reference, check_scorer, scored
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.rl.gae import remax_advantages
from prefect_rlhf.tasks.rl.losses import policy_gradient, weighted_policy_gradient
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.rewards import kl_penalised_rewards
from prefect_rlhf.tasks.rl.settings.online import ReMax
from prefect_rlhf.tasks.settings import Staleness
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step


@rlhf_flow("remax")
def remax(
    prompts: Prompts,
    held_out: Prompts,
    actor: Model,
    reward: Reward | None = None,
    ref: Model | None = None,
    algo: ReMax = ReMax(),
    staleness: Staleness = 0,
    play: Play | None = None,
) -> None:
    """One iteration: two generations with the same weight version, three inferences, one train_step.

    The paper's estimator has no importance ratio. With `staleness`, each token is weighted by the ratio to the policy
    that sampled it, capped at `algo.max_ratio`. With `play`, each response is a conversation, which the play
    scores; the baseline is the score of a play of the same group with greedy turns.
    """
    check_scorer(reward, play)
    check_reference(ref, algo.kl.coefficient)
    rollout = generate(
        actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling, staleness=staleness, play=play
    )
    baseline = generate(
        actor,
        prompts,
        batch_size=algo.batch_size,
        sampling=algo.sampling.greedy(),
        staleness=staleness,
        play=play,
        name="actor_baseline",
    )
    scores, masked = scored(reward, rollout), () if play is None else (rollout,)
    baseline_scores = scored(reward, baseline, name="reward_baseline")
    old = old_policy(actor, rollout, algo)
    reference = inference(ref, rollout, output="logprobs", temperature=algo.temperature) if ref else old.logprobs
    rewards = compute(kl_penalised_rewards, old.logprobs, reference, scores, settings=algo)
    advantages = compute(remax_advantages, rewards, baseline_scores, *masked, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    off_policy = staleness > 0 or algo.old_logprobs == "recompute"
    loss = (weighted_policy_gradient if off_policy else policy_gradient)(algo)
    train_step(actor, loss.on(*old.inputs, advantages, temperature=algo.temperature), optimizer=algo.optimizer)
    every = algo.evaluate_every
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=every, play=play, name="actor_evaluation")
    greedy_scores = scored(reward, greedy, every=every, name="reward_evaluation")
    compute(record_evaluation, greedy, greedy_scores, settings=algo, every=every)
