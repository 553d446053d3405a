"""An author's flow: REINFORCE on groups of responses plus the likelihood of other rows, in one train_step."""

from __future__ import annotations

from prefect_rlhf import (
    GRPO,
    Model,
    Preferences,
    Prompts,
    compute,
    generate,
    grpo_advantages,
    inference,
    nll,
    policy_gradient,
    record_rollouts,
    rlhf_flow,
    train_step,
)

ALGO = GRPO()
PRETRAIN_ITEMS = 5  # pairs, so ten rows in a step: they divide neither by mini-batches nor by replicas


@rlhf_flow("with_pretraining")
def with_pretraining(prompts: Prompts, pretrain: Preferences, actor: Model, reward: Model, algo: GRPO = ALGO) -> None:
    """One iteration: two row sets, one gradient, one version."""
    rollout = generate(
        actor, prompts, batch_size=algo.batch_size, samples=algo.samples_per_prompt, sampling=algo.sampling
    )
    scores = inference(reward, rollout, output="scores")
    advantages = compute(grpo_advantages, rollout, scores, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    policy = policy_gradient(algo).on(rollout, advantages, mean_over="rows")
    likelihood = nll(algo).on(pretrain, batch_size=PRETRAIN_ITEMS, mean_over="tokens")
    train_step(actor, policy + 0.5 * likelihood, optimizer=algo.optimizer, update=algo.update)
