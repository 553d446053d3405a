"""Online DPO (Guo et al. 2024, arXiv:2402.04792): the best response to a prompt against the worst."""

from prefect_rlhf import DPO, Batch, Computed, Model, Prompts, Reward, Sampling, computation
from prefect_rlhf import follow, generate, inference, losses, rlhf_flow, score, select, train_step


class OnlineDPO(DPO):
    """Settings of DPO, and of the samples that make the pairs."""

    samples_per_prompt: int = 4
    sampling: Sampling = Sampling()


@computation("keep")
def chosen_and_rejected(rollout: Batch, scores: Batch, settings: OnlineDPO) -> Computed:
    """Give the best row of each group place 1 and the worst place 2; drop groups with equal scores."""
    scores_B, places_B = scores["scores"], scores["scores"] * 0
    for group in rollout.groups.unique():
        rows = (rollout.groups == group).nonzero()[:, 0]
        best, worst = rows[scores_B[rows].argmax()], rows[scores_B[rows].argmin()]
        if scores_B[best] > scores_B[worst]:
            places_B[best], places_B[worst] = 1, 2
    return Computed({"keep": places_B})


@rlhf_flow("online_dpo")
def online_dpo(prompts: Prompts, actor: Model, ref: Model, reward: Reward, algo: OnlineDPO = OnlineDPO()) -> None:
    """One iteration: sample several responses to each prompt, pair the best with the worst, and train on the pairs."""
    size, group = algo.batch_size, algo.samples_per_prompt
    rollout = generate(actor, prompts, batch_size=size, samples=group, sampling=algo.sampling)
    pairs = select(chosen_and_rejected, rollout, score(reward, rollout), per_group=2, settings=algo)
    reference = inference(ref, pairs, output="logprobs")
    train_step(actor, losses.dpo(algo).on(pairs, reference), optimizer=algo.optimizer, update=algo.update)
    if algo.follow.every is not None:
        follow(ref, actor, every=algo.follow.every, share=algo.follow.share)
