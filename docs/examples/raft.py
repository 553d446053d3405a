"""RAFT (Dong et al. 2023, arXiv:2304.06767): raise the likelihood of the best of several responses to each prompt."""

from prefect_rlhf import GRPO, Batch, Computed, Model, Prompts, Reward, computation
from prefect_rlhf import generate, losses, rlhf_flow, score, select, train_step


@computation("keep")
def best_first(rollout: Batch, scores: Batch, settings: GRPO) -> Computed:
    """Rank all rows by score: place 1 is the highest. `select` then keeps a single row of each group."""
    order_B = scores["scores"].argsort(descending=True, stable=True)
    return Computed({"keep": order_B.argsort() + 1})


@rlhf_flow("raft")
def raft(prompts: Prompts, actor: Model, reward: Reward, algo: GRPO = GRPO()) -> None:
    """One iteration: sample several responses to each prompt, and train on the best response to each."""
    size, group = algo.batch_size, algo.samples_per_prompt
    rollout = generate(actor, prompts, batch_size=size, samples=group, sampling=algo.sampling)
    kept = select(best_first, rollout, score(reward, rollout), per_group=1, settings=algo)
    train_step(actor, losses.nll(algo).on(kept), optimizer=algo.optimizer, update=algo.update)
