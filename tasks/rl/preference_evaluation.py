"""How often, and by how much, a policy prefers the better answers of held-out data to the worse answers.

Shapes: B rows, T response tokens, P pairs (row 2p chosen, 2p+1 rejected), G good answers, W worse answers.
"""

from __future__ import annotations

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.masked import mean_of, own_tokens, row_sums, share_ahead
from prefect_rlhf.tasks.rl.preference_losses import implicit_rewards
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO
from prefect_rlhf.tasks.tracing.operations import computation


@computation()
def preference_accuracy(logprobs: Batch, *reference: Batch, settings: DPO) -> Computed:
    """Measure the share of pairs whose chosen answer has the higher implicit reward (a tie is a half), and the margin.

    The second input has the reference model's log-probabilities; it is present if the loss needs a reference.
    """
    reference_BT = reference[0]["logprobs"].float() if reference else None
    mask_BT = own_tokens("logprobs", logprobs, *reference)
    rewards_B = implicit_rewards(logprobs["logprobs"].float(), reference_BT, mask_BT, settings)
    margins_P = rewards_B[0::2] - rewards_B[1::2]
    return Computed(metrics={"accuracy": share_ahead(margins_P), "margin": float(margins_P.mean())})


@computation("tokens", "prompt_length", "mask")
def mismatched_answers(rows: Batch, settings: KTO) -> Computed:
    """Make new rows: each answer of the step after the next row's prompt, cut to the longest row's length.

    The policy's mean gain over the reference on these rows is KTO's point of comparison.
    """
    tokens, masks = rows.columns["tokens"], rows.columns["mask"]
    lengths = [int(length) for length in rows.columns["prompt_length"]]
    longest = max(map(len, tokens), default=0)
    made, made_masks = [], []
    for row, length in enumerate(lengths):
        answer = tokens[row - 1][lengths[row - 1] :][: longest - length]
        made.append(tokens[row][:length].new_tensor([*tokens[row][:length].tolist(), *answer.tolist()]))
        made_masks.append(masks[row - 1][: len(answer)])
    return Computed({"tokens": made, "prompt_length": rows["prompt_length"], "mask": made_masks})


@computation("kl")
def kto_kl(rows: Batch, logprobs: Batch, reference: Batch, settings: KTO) -> Computed:
    """Return [B], equal for all rows: the mean log-ratio of policy to reference on mismatched answers, at least 0."""
    gain_B = row_sums((logprobs["logprobs"] - reference["logprobs"]).float(), rows["mask"].float())
    kl = gain_B.mean().clamp(min=0)
    return Computed({"kl": kl.expand(len(gain_B)).clone()}, {"kl": float(kl)})


@computation()
def label_accuracy(rows: Batch, logprobs: Batch, reference: Batch, settings: KTO) -> Computed:
    """Measure how often a good answer has a higher implicit reward than a bad answer (tie: a half), and the margin."""
    gain_B = row_sums((logprobs["logprobs"] - reference["logprobs"]).float(), rows["mask"].float())
    good_G, bad_W = (settings.beta * gain_B[(rows["label"] > 0) == is_good] for is_good in (True, False))
    ahead_GW = good_G[:, None] - bad_W[None]
    return Computed(metrics={"accuracy": share_ahead(ahead_GW), "margin": mean_of(ahead_GW.flatten())})
