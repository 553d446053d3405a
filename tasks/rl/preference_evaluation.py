"""Measures how often, and by how much, a policy prefers the better to the worse answers in held-out data.

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
    """Measure how often the chosen answer has the higher implicit reward (a tie counts half), and the mean margin.

    The second input has the reference model's log-probabilities; pass it if the loss needs a reference.
    """
    reference_BT = reference[0]["logprobs"].float() if reference else None
    mask_BT = own_tokens("logprobs", logprobs, *reference)
    rewards_B = implicit_rewards(logprobs["logprobs"].float(), reference_BT, mask_BT, settings)
    margins_P = rewards_B[0::2] - rewards_B[1::2]
    return Computed(metrics={"accuracy": share_ahead(margins_P), "margin": float(margins_P.mean())})


@computation("tokens", "prompt_length", "mask")
def mismatched_answers(rows: Batch, settings: KTO) -> Computed:
    """Make new rows that pair each prompt with another row's answer, cut to the longest row's length.

    KTO compares an answer with how much the policy gains over the reference on these rows, on average.
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
    """Return the mean log-ratio of policy to reference on mismatched answers, at least 0, as [B] equal for all rows."""
    gain_B = row_sums((logprobs["logprobs"] - reference["logprobs"]).float(), rows["mask"].float())
    kl = gain_B.mean().clamp(min=0)
    return Computed({"kl": kl.expand(len(gain_B)).clone()}, {"kl": float(kl)})


@computation()
def label_accuracy(rows: Batch, logprobs: Batch, reference: Batch, settings: KTO) -> Computed:
    """Measure how often a good answer beats a bad answer in implicit reward (a tie counts half), and the margin."""
    gain_B = row_sums((logprobs["logprobs"] - reference["logprobs"]).float(), rows["mask"].float())
    good_G, bad_W = (settings.beta * gain_B[(rows["label"] > 0) == is_good] for is_good in (True, False))
    ahead_GW = good_G[:, None] - bad_W[None]
    return Computed(metrics={"accuracy": share_ahead(ahead_GW), "margin": mean_of(ahead_GW.flatten())})
