"""Parses lengths of prompts and responses (a number, shares, or an earlier run's rollouts), and turns of plays."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import finished_lines
from prefect_rlhf.files.remote_path import is_remote
from prefect_rlhf.placement.cost.workload import LengthDistribution
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

Segment = Literal["prompt", "response"]
"""A segment of a row."""

MOST_LENGTHS = 16  # per distribution: the cost model evaluates each
LENGTHS_FORM = "tokens such as 1024, shares such as 512:3,1024:1, or the Parquet files of a run's rollouts"


def parse_lengths(text: str, field: str, segment: Segment) -> LengthDistribution:
    """Return the length distribution that `text` states for a segment of a row. Raises InvalidInput for any other text.

    >>> [parse_lengths(text, "prompt_length", "prompt").mean for text in ("1024", "512:3,1024:1")]
    [1024.0, 640.0]
    """
    if names_rollouts(text):
        return rollout_lengths(text, field, segment)
    shares: dict[int, float] = {}
    for entry in text.split(","):
        length, _, share = entry.partition(":")
        with refusing(ValueError, field, text, LENGTHS_FORM, most=0):
            shares[int(length)] = float(share or 1)
    if min(shares) < 1 or not 0 <= min(shares.values()) <= sum(shares.values()) < float("inf"):
        raise InvalidInput(field, text, "lengths of 1 or more with shares of 0 or more")
    return LengthDistribution.of(shares)


def rollout_lengths(path: str, field: str, segment: Segment) -> LengthDistribution:
    """Read prompt or response lengths from a run's rollouts; `field` names the option with the file or folder."""
    stored = StoredRows(field, path)
    responses = [len(logprobs) for logprobs in stored.read("logprobs")]
    if segment == "response":
        return distribution(responses)
    rows = zip(stored.read("tokens"), responses, strict=True)
    return distribution([len(tokens) - response for tokens, response in rows])


def names_rollouts(text: str) -> bool:
    """Whether a text is the path of rollouts instead of lengths."""
    return Path(text).suffix == ".parquet" or is_remote(text) or Path(text).is_dir()


@dataclass(frozen=True, slots=True)
class PlayedTurns:
    """Means over played rows: turns, tokens of all answers, and seconds to answer (None: unknown)."""

    turns: float
    observed: float
    seconds: float | None


def rollout_turns(path: str, field: str) -> PlayedTurns | None:
    """Read the turns of plays from the rollouts of a run; None without plays. A failed play does not count.

    Seconds come from `metrics.jsonl` beside the folder of the rollouts, if it is there.
    """
    stored = StoredRows(field, path)
    if not {"turns", "mask"} <= set(stored.names):
        return None
    rows = [row for row in zip(stored.read("turns"), stored.read("mask"), strict=True) if any(row[1])]
    if not rows:
        return None
    turns, masks = zip(*rows, strict=True)
    return PlayedTurns(fmean(turns), fmean(len(mask) - sum(mask) for mask in masks), _answer_seconds(Path(path)))


def _answer_seconds(rollouts: Path) -> float | None:
    """Return how long an answer takes on average over steps, in seconds, for the generates that train."""
    folder = rollouts.parent if rollouts.suffix == ".parquet" else rollouts
    steps, evaluations = (
        finished_lines("response_length", folder.parent / f"{name}.jsonl") for name in ("metrics", "evaluation")
    )
    evaluated = {name for line in evaluations for name in line}
    seen = [
        value
        for step in steps
        for name, value in step.items()
        if name.endswith(".answer_seconds") and name not in evaluated
    ]
    return fmean(seen) if seen else None


def distribution(lengths: Sequence[int]) -> LengthDistribution:
    """Summarise lengths as a distribution of at most 16.

    With more than 16 different lengths, rows are divided into 16 equal parts, each represented by its longest row.

    >>> distribution([3, 5]).shares, distribution(range(1, 65)).shares[:2]
    (((3, 0.5), (5, 0.5)), ((4, 0.0625), (8, 0.0625)))
    """
    ordered = sorted(lengths)
    size = ceil(len(ordered) / MOST_LENGTHS) if len(set(ordered)) > MOST_LENGTHS else 1
    counts = Counter(ordered[min(len(ordered), (index // size + 1) * size) - 1] for index in range(len(ordered)))
    return LengthDistribution.of({length: float(count) for length, count in counts.items()})


def together(prompts: LengthDistribution, answers: LengthDistribution) -> LengthDistribution:
    """Return the lengths of whole rows, if prompt and answer lengths are independent.

    >>> together(LengthDistribution.fixed(10), LengthDistribution.of({1: 1, 2: 1})).shares
    ((11, 0.5), (12, 0.5))
    """
    shares: dict[int, float] = defaultdict(float)
    for prompt, prompt_share in prompts.shares:
        for answer, answer_share in answers.shares:
            shares[prompt + answer] += prompt_share * answer_share
    return LengthDistribution.of(dict(shares))
