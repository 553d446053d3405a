"""The old policy of a train_step: the log-probabilities that the ratio divides by."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.tasks.rl.importance import importance_weights
from prefect_rlhf.tasks.rl.rewards import compare_logprobs
from prefect_rlhf.tasks.rl.settings.online import PolicyGradient
from prefect_rlhf.tasks.tracing.calls import compute, inference
from prefect_rlhf.tasks.tracing.trace import RowsHandle


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """Handles of the old policy.

    `logprobs` has the log-probabilities of the old policy. `inputs` are inputs of the train_step: the rollout, its
    recomputed log-probabilities, and the tokens' weights. The ratio divides by the first log-probabilities among them.
    """

    logprobs: RowsHandle
    inputs: tuple[RowsHandle, ...]


def old_policy(actor: object, rollout: RowsHandle, algo: PolicyGradient) -> OldPolicy:
    """Add the calls that `algo.old_logprobs` and `algo.importance` ask for, and return the old policy.

    With `recompute`, the training engine computes the actor's log-probabilities before the actor is trained. A metric
    shows how far generation's are from these; with `importance` the difference also weights each token.
    """
    if algo.old_logprobs == "rollout":
        return OldPolicy(rollout, (rollout,))
    recomputed = inference(actor, rollout, output="logprobs", temperature=algo.temperature)
    if algo.importance is None:
        compute(compare_logprobs, rollout, recomputed, settings=algo)
        return OldPolicy(recomputed, (recomputed, rollout))
    weights = compute(importance_weights, rollout, recomputed, settings=algo.importance)
    return OldPolicy(recomputed, (recomputed, rollout, weights))
