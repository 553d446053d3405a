"""Authors' flows, from the public door alone: RAFT, DPO on the best and worst of a group, REINFORCE on two row sets."""

from prefect_rlhf import (
    DPO,
    GRPO,
    Batch,
    Computed,
    Model,
    Preferences,
    Prompts,
    Reward,
    Settings,
    computation,
    computations,
    compute,
    generate,
    inference,
    losses,
    rlhf_flow,
    score,
    select,
    train_step,
)

RAFT, PAIRED = GRPO(), DPO()
PRETRAIN_ITEMS = 5  # pairs, so ten rows in a step: they divide neither by mini-batches nor by replicas


@computation("keep")
def best(rollout: Batch, scores: Batch, settings: Settings) -> Computed:
    """Let each row stay in the order of its score; the best has place 1 of all."""
    return Computed({"keep": scores["scores"].argsort(descending=True, stable=True).argsort() + 1})


@computation("keep")
def best_and_worst(rollout: Batch, scores: Batch, settings: Settings) -> Computed:
    """Give the best of each group place 1 and the worst place 2; nothing stays where all are equal."""
    places_B = scores["scores"].new_zeros(len(rollout.groups))
    for group in rollout.groups.unique():
        rows = (rollout.groups == group).nonzero()[:, 0]
        scores_G = scores["scores"][rows]
        if scores_G.max() > scores_G.min():
            places_B[rows[scores_G.argmax()]], places_B[rows[scores_G.argmin()]] = 1, 2
    return Computed({"keep": places_B})


@computation("advantages")
def no_advantages(rollout: Batch, settings: Settings) -> Computed:
    """Fill a column of the recorded rollouts."""
    return Computed({"advantages": rollout.mask("logprobs") * 0})


@rlhf_flow("keeps_best")
def keeps_best(prompts: Prompts, actor: Model, reward: Reward, algo: GRPO = RAFT) -> None:
    """One iteration of RAFT (Dong et al. 2023): the likelihood of the best response to each prompt."""
    count, group = algo.batch_size, algo.samples_per_prompt
    rollout = generate(actor, prompts, batch_size=count, samples=group, sampling=algo.sampling)
    scores = score(reward, rollout)
    kept = select(best, rollout, scores, per_group=1, settings=algo)
    compute(computations.record_rollouts, kept, scores, compute(no_advantages, kept, settings=algo), settings=algo)
    train_step(actor, losses.nll(algo).on(kept), optimizer=algo.optimizer, update=algo.update)


@rlhf_flow("keeps_pairs")
def keeps_pairs(prompts: Prompts, actor: Model, ref: Model, reward: Reward, algo: DPO = PAIRED, group: int = 4) -> None:
    """One iteration of online DPO (Guo et al. 2024): the best response against the worst of a group."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, samples=group)
    scores = score(reward, rollout)
    pairs = select(best_and_worst, rollout, scores, per_group=2, settings=algo)
    compute(computations.record_rollouts, pairs, scores, compute(no_advantages, pairs, settings=algo), settings=algo)
    logprobs = inference(ref, pairs, output="logprobs")
    train_step(actor, losses.dpo(algo).on(pairs, logprobs), optimizer=algo.optimizer, update=algo.update)


@rlhf_flow("with_pretraining")
def with_pretraining(prompts: Prompts, pretrain: Preferences, actor: Model, reward: Model, algo: GRPO = RAFT) -> None:
    """One iteration of REINFORCE and the likelihood of other rows: two row sets, one gradient, one version."""
    rollout = generate(
        actor, prompts, batch_size=algo.batch_size, samples=algo.samples_per_prompt, sampling=algo.sampling
    )
    scores = inference(reward, rollout, output="scores")
    advantages = compute(computations.grpo_advantages, rollout, scores, settings=algo)
    compute(computations.record_rollouts, rollout, scores, advantages, settings=algo)
    policy = losses.policy_gradient(algo).on(rollout, advantages, mean_over="rows")
    likelihood = losses.nll(algo).on(pretrain, batch_size=PRETRAIN_ITEMS, mean_over="tokens")
    train_step(actor, policy + 0.5 * likelihood, optimizer=algo.optimizer, update=algo.update)
