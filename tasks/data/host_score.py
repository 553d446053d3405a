"""Scores rows with Python functions: worker processes call them with a rank's rows as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from prefect_rlhf.engines.compute import Computed, Context
from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.scores import MOST_SCORE, SCORES, mean
from prefect_rlhf.engines.functions.scoring.pool import HostFunctionFailed, HostPool
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.in_short import one_line
from prefect_rlhf.tasks.data.rollouts import text_columns
from prefect_rlhf.tasks.host_rewards import HostRewards

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostScore:
    """A host call's computation.

    Makes `scores` [B], the weighted sum over the functions. A score is NaN if the row failed or no function applies. A
    row also fails if its sum exceeds the bound on scores. With several functions, each function's values are a key too.
    Metrics: each function's mean and further metrics, the shares of failed rows and of rows without a score, and the
    total seconds.
    """

    settings: str
    """A HostRewards as JSON."""
    own_prompts: bool = False
    """Whether an earlier call made the prompts, so that functions see their text instead of the dataset's."""
    call: str = "score"
    """The call's name."""
    answers: bool = False
    """Whether the key `answer` has a number for each row: equal for equal answers, negative without an answer."""

    def __call__(self, rollout: Batch, context: Context, state: object = None) -> Computed:
        """Score all rows. Raises what HostPool.score raises, also for too many sums beyond the bound."""
        del state  # a reward has no state
        rows, pool = plain_rows(rollout, self.own_prompts), pool_of(self.settings)
        doing = f"{self.call} · step {context.step}"
        made = pool.score(rows, doing)
        values = {name: [_number(value) for value in column] for name, column in made.values.items()}
        sums = weighted_sums(values, {function.name: function.weight for function in pool.functions})
        beyond = [row for row, total in enumerate(sums) if abs(total) > MOST_SCORE]
        failed, of_failed = {*beyond, *(failure.row for failure in made.failures)}, pool.settings.value_of_failed
        if beyond and len(failed) > pool.settings.most_failed * len(rows):
            raise _beyond_bound(doing, pool.functions, values, beyond)
        known = {name: [value for value in column if not math.isnan(value)] for name, column in values.items()}
        metrics = {name: mean(column) for name, column in known.items() if column}
        without = failed if math.isnan(of_failed) else frozenset(beyond)
        columns = {"scores": _column([of_failed if row in without else total for row, total in enumerate(sums)])}
        metrics["unscored"] = float(columns["scores"].isnan().float().mean())
        if len(values) > 1:
            columns |= {name: _column(column) for name, column in values.items()}
        if self.answers:
            columns["answer"] = _numbered(made.answers)
        metrics |= made.metrics
        return Computed(columns, {**metrics, "failed": len(failed) / len(rows), "seconds": made.seconds})


@lru_cache(maxsize=8)
def pool_of(settings: str) -> HostPool:
    """Return this process's worker pool for a HostRewards; the workers end with the process."""
    rewards = HostRewards.model_validate_json(settings)
    return HostPool(rewards.host_functions, rewards.host_settings)


def plain_rows(rollout: Batch, own_prompts: bool) -> list[Mapping[str, Any]]:
    """Return each row as plain values: every column of its dataset, `prompt` and `response`.

    `prompt` is the dataset's, possibly a chat; with `own_prompts`, it is the text that the model read.
    """
    text = text_columns(rollout)
    ids = {"response_ids": _response_ids(rollout)}
    columns = text | {name: rollout.values_of(name) for name in rollout.dataset_columns} | ids
    columns |= text if own_prompts else {"response": text["response"]}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def weighted_sums(values: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Return each row's weighted sum over the functions that apply; NaN if no function applies.

    A function that returns NaN does not apply.

    >>> weighted_sums({"exact": [1.0, math.nan], "short": [0.5, math.nan]}, {"exact": 2.0, "short": 1.0})
    [2.5, nan]
    """
    sums = []
    for row in zip(*values.values(), strict=True):
        terms = [weights[name] * value for name, value in zip(values, row, strict=True) if not math.isnan(value)]
        sums.append(math.fsum(terms) if terms else math.nan)
    return sums


def _beyond_bound(
    doing: str, functions: Sequence[HostFunction], values: Mapping[str, Sequence[float]], rows: Sequence[int]
) -> HostFunctionFailed:
    """Return the error of rows whose weighted sums are beyond the bound; it shows the terms of the first row."""
    of_row = [(function, values[function.name][rows[0]]) for function in functions]
    terms = [(function, value) for function, value in of_row if not math.isnan(value)]
    shown = " + ".join(f"{function.weight:g} * {value:g} of {function.name}" for function, value in terms)
    largest, _ = max(terms, key=lambda term: abs(term[0].weight * term[1]))
    return HostFunctionFailed(
        one_line(
            f"{doing}: the weighted sum of rewards is beyond its bound on {len(rows)} of"
            f" {len(values[largest.name])} rows; row {rows[0]}: {shown}, expected {SCORES}; lower the weight of"
            f" {largest.name} ({largest.function})"
        )
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _column(values: Sequence[float]) -> Tensor:
    import torch  # only here: a flow that scores by functions is traced, and planned, without it

    return torch.tensor(values, dtype=torch.float32)


def _numbered(answers: Sequence[str | None]) -> Tensor:
    """Return a number of 62 bits for each answer, a hash, since other ranks number the answers of other rows."""
    import torch  # only here, as above

    digests = (None if one is None else blake2b(one.encode(), digest_size=8).digest() for one in answers)
    numbers = [-1 if one is None else int.from_bytes(one, "little") >> 2 for one in digests]
    return torch.tensor(numbers, dtype=torch.int64)


def _response_ids(rollout: Batch) -> list[list[int]]:
    tokens, lengths = rollout.columns["tokens"], rollout.columns["prompt_length"]
    return [row[int(length) :].tolist() for row, length in zip(tokens, lengths, strict=True)]
