"""Evaluation on a named set of prompts: records its rows, and computes metrics with intervals.

Shapes: B rows, P prompts, N samples to each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.functions.scores import MOST_SCORE
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.data.rollouts import lists, play_columns, shown_columns, write_rows
from prefect_rlhf.tasks.rl.masked import response_mask, unscored
from prefect_rlhf.tasks.rl.score_shaping import named_rewards, truncated_rows
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import computation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from prefect_rlhf.tasks.rl.evaluation.estimators import Floats

PREFIX = "evaluation_"  # of the calls that record sets, and so of their metrics
MOST_SAMPLES = 4096
K = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
ANSWER = "answer"  # a key of scores: equal numbers are equal answers
LOW, HIGH = "_low", "_high"
"""Suffixes of metrics that are the ends of an interval."""


class SetSettings(Settings):
    """How a named set is recorded."""

    folder: str = Field(description="Folder of its rows in the folder of the run.")
    samples: int = Field(1, ge=1, le=MOST_SAMPLES, description="Responses to each prompt.")
    pass_at: tuple[K, ...] = Field(
        (), strict=False, max_length=64, description="Each k of pass@k; empty: powers of two."
    )
    right_score: float = Field(1.0, ge=-MOST_SCORE, le=MOST_SCORE, description="Least score of a right response.")
    max_new_tokens: int = Field(ge=1, le=1 << 20, description="Longest response, in tokens.")

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k for pass@k."""
        return self.pass_at or powers_of_two(self.samples)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that do not depend on the reward.

        >>> SetSettings(folder="math", samples=2, max_new_tokens=8).metrics[:4]
        ('avg@2', 'avg@2_low', 'avg@2_high', 'pass@1')
        """
        means = (f"avg@{self.samples}", *(f"pass@{k}" for k in self.ks), "response_tokens", "truncated")
        return (*(f"{name}{end}" for name in means for end in ("", LOW, HIGH)), "unscored")

    @property
    def perhaps(self) -> tuple[str, ...]:
        """Prefixes of metric names that depend on the reward: votes on answers, and named rewards."""
        return (f"maj@{self.samples}", "score_")


@computation()
def record_set(rollout: Batch, scores: Batch, settings: SetSettings, context: Context) -> Computed:
    """Write `FOLDER/step-000010.parquet`: a set's responses and scores; metrics are means over its prompts.

    Each mean has a 95% interval, `_low` to `_high`. `avg@N` is the mean score of the N samples, `pass@k` the chance
    that one of k samples is right, `maj@N` the score of the answer that most samples gave, if the reward has answers.
    Samples without a score are left out; `unscored` is their share.
    """
    from prefect_rlhf.tasks.rl.evaluation.estimators import avg  # here: a flow is traced without numpy

    scores_B, tokens_B = scores["scores"].float(), response_mask(rollout).sum(1)
    truncated_B = truncated_rows(rollout, settings.max_new_tokens)
    columns = shown_columns(rollout, scores) | {
        "tokens": lists(rollout, "tokens"),
        "sample": [row % settings.samples for row in range(len(scores_B))],
        "reward": scores_B.tolist(),
        "response_tokens": tokens_B.tolist(),
        "truncated": truncated_B.tolist(),
        **({ANSWER: scores[ANSWER].tolist()} if ANSWER in scores.columns else {}),
        **play_columns(rollout),
    }
    write_rows(columns, settings.folder, context)
    plain = {"scores": scores_B, "response_tokens": tokens_B, "truncated": truncated_B}
    values = {name: _by_prompt(each_B, settings.samples) for name, each_B in plain.items()}
    named = {f"score_{name}": _by_prompt(each_B, settings.samples) for name, each_B in named_rewards(scores).items()}
    answers = scores[ANSWER].numpy().reshape(-1, settings.samples) if ANSWER in scores.columns else None
    found = {
        **prompt_values(values["scores"], answers, settings),
        **{name: avg(each_PN) for name, each_PN in (named | values).items() if name != "scores"},
    }
    return Computed(metrics={**interval_metrics(found), "unscored": unscored(scores_B)})


def prompt_values(scores_PN: Floats, answers_PN: NDArray[np.int64] | None, settings: SetSettings) -> dict[str, Floats]:
    """Return values of shape [P]: each prompt's avg@N, every pass@k and, if there are answers, maj@N."""
    from prefect_rlhf.tasks.rl.evaluation.estimators import avg, maj, pass_at  # here, as in record_set

    values = {f"avg@{settings.samples}": avg(scores_PN)}
    values |= {f"pass@{k}": pass_at(scores_PN, k, settings.right_score) for k in settings.ks}
    if answers_PN is not None:
        values[f"maj@{settings.samples}"] = maj(scores_PN, answers_PN)
    return values


def interval_metrics(values: Mapping[str, Floats]) -> dict[str, float]:
    """Return each value's mean over the prompts, and the ends of its interval. A metric without a value is left out."""
    from prefect_rlhf.tasks.rl.evaluation.intervals import interval  # here, as in record_set

    metrics: dict[str, float] = {}
    for name, each_P in values.items():
        if (found := interval(each_P)) is not None:
            metrics |= {name: found.mean, f"{name}{LOW}": found.low, f"{name}{HIGH}": found.high}
    return metrics


def _by_prompt(values_B: Tensor, samples: int) -> Floats:
    """Return [P, N]: the samples of a prompt are adjacent rows."""
    values_PN: Floats = values_B.double().numpy().reshape(-1, samples)
    return values_PN


def powers_of_two(samples: int) -> tuple[int, ...]:
    """Return the usual k of pass@k for a number of samples: 1, 2, 4, ..., and the number of samples.

    >>> powers_of_two(1), powers_of_two(6)
    ((1,), (1, 2, 4, 6))
    """
    return tuple(sorted({*(1 << bits for bits in range(samples.bit_length())), samples}))
