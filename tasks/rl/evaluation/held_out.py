"""Evaluation on held-out data: policies by a reward model or by answers, reward models by pairs.

Shapes: B rows, T response tokens, P pairs (row 2p chosen, 2p+1 rejected).
"""

from __future__ import annotations

from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.data.rollouts import EVALUATION, lists, play_columns, shown_columns, write_rows
from prefect_rlhf.tasks.rl.masked import masked_mean, means, response_mask, share_ahead, unscored
from prefect_rlhf.tasks.rl.score_shaping import named_rewards
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation


@computation()
def record_evaluation(rollout: Batch, scores: Batch, settings: Settings, context: Context) -> Computed:
    """Write `evaluation/step-000010.parquet` with the responses to held-out prompts. Metrics are means over them.

    If you name several rewards, each also has a metric. Means leave out responses without a score; `unscored` is their
    share. A mean over no response is left out.
    """
    scores_B = scores["scores"].float()
    columns = shown_columns(rollout, scores) | {
        "tokens": lists(rollout, "tokens"),
        "reward": scores_B.tolist(),
        **play_columns(rollout),
    }
    write_rows(columns, EVALUATION, context)
    metrics = {"unscored": unscored(scores_B), "response_tokens": float(response_mask(rollout).sum(1).mean())}
    named = {f"score_{name}": rewards_B for name, rewards_B in named_rewards(scores).items()}
    return Computed(metrics=means({"score": scores_B, **named}) | metrics)


@computation()
def pair_accuracy(scores: Batch, settings: Settings) -> Computed:
    """Measure how often the chosen answer scores higher (a tie counts half), and by how much on average.

    Only pairs in which both answers have a score count.
    """
    scores_B = scores["scores"].float()
    margins_P = scores_B[0::2] - scores_B[1::2]
    known_P = margins_P[margins_P.isfinite()]
    accuracy = {"accuracy": share_ahead(known_P)} if len(known_P) else {}
    return Computed(metrics=accuracy | means({"margin": known_P, "score": scores_B}))


@computation()
def token_loss(rows: Batch, logprobs: Batch, settings: Settings) -> Computed:
    """Measure the mean negative log-probability per trained token, in nats."""
    mask_BT = response_mask(rows) if "mask" in rows.columns else logprobs.mask("logprobs")
    loss = -masked_mean(logprobs["logprobs"].float(), mask_BT)
    return Computed(metrics={"loss": float(loss), "tokens": float(mask_BT.sum())})
