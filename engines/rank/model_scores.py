"""A model's scores for rows, within the allowed range: a row beyond it has no score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand
from prefect_rlhf.engines.functions.scores import MOST_SCORE, SCORES
from prefect_rlhf.errors.errors import BeyondBound

MOST_FAILED = 0.1
"""Largest share of a replica's rows that a model may give no score; the same as the default of reward functions."""


def within_bound(command: CallCommand, scores: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Return the scores, with NaN in place of scores beyond the allowed range, and the share of such rows.

    Raises BeyondBound if they are more than MOST_FAILED of the rows: the model's head is broken, or its dtype too
    narrow.
    """
    failed = [row for row, score in enumerate(scores) if not abs(float(score)) <= MOST_SCORE]
    if len(failed) > MOST_FAILED * len(scores):
        seen, row = f"{float(scores[failed[0]]):g}", command.rows[failed[0]]
        role = command.instance.role if command.instance else command.call.name
        raise BeyondBound(
            f"{command.doing}: {role} gave no score to {len(failed)} of {len(scores)} rows, at most {MOST_FAILED:.0%}"
            f" may; row {row}: got {seen}, expected {SCORES}"
        )
    kept = list(scores)
    for row in failed:
        kept[row] = torch.full_like(kept[row], torch.nan)
    return kept, len(failed) / max(len(scores), 1)
