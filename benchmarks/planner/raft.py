"""RAFT with a KL penalty (Dong et al. 2023, arXiv:2304.06767) as an author's flow: two inferences, little training."""

from prefect_rlhf import (
    GRPO,
    Batch,
    Computed,
    Model,
    Prompts,
    Settings,
    computation,
    generate,
    inference,
    losses,
    rlhf_flow,
    select,
    train_step,
)

SETTINGS = GRPO()
COEFFICIENT = 0.05


@computation("keep")
def best_penalised(rollout: Batch, scores: Batch, reference: Batch, settings: Settings) -> Computed:
    """Let each row stay in the order of its score less the penalty; the best has place 1 of all."""
    mask_BT = rollout.mask("logprobs")
    ratio_B = ((rollout["logprobs"] - reference["logprobs"]) * mask_BT).sum(dim=1)
    penalised_B = scores["scores"].float() - COEFFICIENT * ratio_B
    return Computed({"keep": penalised_B.argsort(descending=True, stable=True).argsort() + 1})


@rlhf_flow("raft")
def raft(prompts: Prompts, actor: Model, ref: Model, reward: Model, algo: GRPO = SETTINGS) -> None:
    """One iteration: the likelihood of the best response to each prompt."""
    count, group = algo.batch_size, algo.samples_per_prompt
    rollout = generate(actor, prompts, batch_size=count, samples=group, sampling=algo.sampling)
    scores = inference(reward, rollout, output="scores")
    reference = inference(ref, rollout, output="logprobs")
    kept = select(best_penalised, rollout, scores, reference, per_group=1, settings=algo)
    train_step(actor, losses.nll(algo).on(kept), optimizer=algo.optimizer, update=algo.update)
