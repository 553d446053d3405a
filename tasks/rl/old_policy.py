"""The policy that made the responses, as a train_step needs it: whose log-probabilities the ratio divides by."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.tasks.calls import compute, inference
from prefect_rlhf.tasks.rl.hyperparameters import PolicyGradient
from prefect_rlhf.tasks.rl.importance import importance_weights
from prefect_rlhf.tasks.rl.rewards import compare_logprobs
from prefect_rlhf.tasks.trace import RowsHandle


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """Handles of the old policy.

    `logprobs` has its log-probabilities; `inputs` are what a train_step reads of it: the rollout, what was recomputed
    of it, and the weights of its tokens. The first log-probabilities among them are those that the ratio divides by.
    """

    logprobs: RowsHandle
    inputs: tuple[RowsHandle, ...]


def old_policy(actor: object, rollout: RowsHandle, algo: PolicyGradient) -> OldPolicy:
    """Add the calls that `algo.old_logprobs` and `algo.importance` ask for, and return the old policy.

    With `recompute` the actor's training engine computes the log-probabilities before it is trained; how far they are
    from generation's is a metric, and with `importance` a weight of each token.
    """
    if algo.old_logprobs == "rollout":
        return OldPolicy(rollout, (rollout,))
    recomputed = inference(actor, rollout, output="logprobs", temperature=algo.temperature)
    if algo.importance is None:
        compute(compare_logprobs, rollout, recomputed, settings=algo)
        return OldPolicy(recomputed, (recomputed, rollout))
    weights = compute(importance_weights, rollout, recomputed, settings=algo.importance)
    return OldPolicy(recomputed, (recomputed, rollout, weights))
