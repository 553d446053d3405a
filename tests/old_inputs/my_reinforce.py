"""REINFORCE (Williams 1992): an algorithm to start from. `prefect-rlhf graph my_reinforce.py:reinforce` draws it."""

from collections.abc import Mapping
from typing import Any

from prefect_rlhf import (
    Batch,
    Computed,
    Model,
    Optimizer,
    Prompts,
    Reward,
    Sampling,
    Settings,
    computation,
    compute,
    generate,
    policy_gradient,
    record_evaluation,
    record_rollouts,
    rlhf_flow,
    score,
    train_step,
)


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
    """One iteration: respond, score, train on what was better than the mean."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    scores = score(reward, rollout)
    advantages = compute(centred_scores, rollout, scores, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    train_step(actor, policy_gradient(algo).on(rollout, advantages), optimizer=algo.optimizer)

    every = algo.evaluate_every
    greedy = generate(actor, held_out, sampling=algo.sampling.greedy(), every=every, name="evaluation")
    greedy_scores = score(reward, greedy, every=every, name="evaluation_score")
    compute(record_evaluation, greedy, greedy_scores, settings=algo, every=every)


def answer_alone(row: Mapping[str, Any]) -> float:
    """A reward as a plain function: 1 for the right number and nothing else, 0.5 for another number, 0 for words."""
    response = row["response"].strip().removesuffix(".")
    if response == row["answer"]:  # a column of prompts.jsonl
        return 1.0
    return 0.5 if response.isdecimal() else 0.0
