"""How good a reward model is on pairs that it was not trained on.

Shapes: B rows, P pairs (row 2p chosen, 2p+1 rejected).
"""

from __future__ import annotations

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.operations import computation
from prefect_rlhf.tasks.settings import Settings


@computation()
def pair_accuracy(scores: Batch, settings: Settings) -> Computed:
    """Share of pairs whose chosen answer has the higher score (a tie is a half), and by how much on average."""
    scores_B = scores["scores"].float()
    margins_P = scores_B[0::2] - scores_B[1::2]
    accuracy_P = (margins_P > 0).float() + 0.5 * (margins_P == 0).float()
    return Computed(
        metrics={
            "accuracy": float(accuracy_P.mean()),
            "margin": float(margins_P.mean()),
            "score": float(scores_B.mean()),
        }
    )
