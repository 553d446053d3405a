"""REINFORCE (Williams 1992) and a reward of your own: an algorithm to start from."""

from prefect_rlhf import Batch, Computed, Model, Optimizer, Prompts, Reward, Sampling, Settings
from prefect_rlhf import computation, computations, compute, generate, losses, rlhf_flow, score, train_step


def answer_alone(row: dict[str, str]) -> float:
    """1 for the right number alone, 0.5 for another number, 0 for words; `answer` is a column of prompts.jsonl."""
    response = row["response"].strip().removesuffix(".")
    return 1.0 if response == row["answer"] else 0.5 * response.isdecimal()


class Reinforce(Settings):
    """What a run may set under `algo`, with defaults; the form of a deployment shows it."""

    batch_size: int = 32
    sampling: Sampling = Sampling(max_new_tokens=8, stop=("\n",))
    optimizer: Optimizer = Optimizer(lr=1e-5)
    evaluate_every: int = 10


@computation("advantages")
def centred_scores(rollout: Batch, scores: Batch, settings: Reinforce) -> Computed:
    """Each response's score less the batch's mean, at each of its tokens: [B, T]."""
    scores_B = scores["scores"]
    advantages_BT = (scores_B - scores_B.mean())[:, None] * rollout.mask("logprobs")
    return Computed({"advantages": advantages_BT}, metrics={"score": float(scores_B.mean())})


@rlhf_flow("reinforce")
def reinforce(prompts: Prompts, held_out: Prompts, actor: Model, reward: Reward, algo: Reinforce = Reinforce()) -> None:
    """One iteration: answer, score, train on what was better than the mean, and at times answer held-out prompts."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    scores = score(reward, rollout)
    advantages = compute(centred_scores, rollout, scores, settings=algo)
    compute(computations.record_rollouts, rollout, scores, advantages, settings=algo)
    loss = losses.policy_gradient(algo).on(rollout, advantages, temperature=algo.sampling.temperature)
    train_step(actor, loss, optimizer=algo.optimizer)
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=algo.evaluate_every, name="evaluation")
    greedy_scores = score(reward, greedy, every=algo.evaluate_every, name="evaluation_score")
    compute(computations.record_evaluation, greedy, greedy_scores, settings=algo, every=algo.evaluate_every)
