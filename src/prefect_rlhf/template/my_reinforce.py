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
    rlhf_flow,
    score,
    train_step,
)


class Reinforce(Settings):
    """What a run may set under `algo`, with defaults; the form of a deployment shows it."""

    batch_size: int = 8
    sampling: Sampling = Sampling(max_new_tokens=8)
    optimizer: Optimizer = Optimizer(lr=1e-5)


@computation("advantages")
def centred_scores(rollout: Batch, scores: Batch, settings: Reinforce) -> Computed:
    """Each response's score less the batch's mean, at each of its tokens: [B, T]."""
    scores_B = scores["scores"]
    advantages_BT = (scores_B - scores_B.mean())[:, None] * rollout.mask("logprobs")
    return Computed({"advantages": advantages_BT}, metrics={"score": float(scores_B.mean())})


@rlhf_flow("reinforce")
def reinforce(prompts: Prompts, actor: Model, reward: Reward, algo: Reinforce = Reinforce()) -> None:
    """One iteration: respond, score, train on what was better than the mean."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    scores = score(reward, rollout)
    advantages = compute(centred_scores, rollout, scores, settings=algo)
    train_step(actor, policy_gradient(algo).on(rollout, advantages), optimizer=algo.optimizer)


def exact(row: Mapping[str, Any]) -> float:
    """A reward as a plain function: 1 where the response has the answer in it, a column of prompts.jsonl."""
    return float(row["answer"] in row["response"])
