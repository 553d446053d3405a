"""Compares expected with measured turns of plays: the planner's assumption, and the run's measurement."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from prefect_rlhf.placement.graph import DataflowGraph, PlayBounds


def turn_rows(graph: DataflowGraph, steps: Iterable[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return table rows: three for each generate call with a play that trains. Measured values are means over
    `steps`.
    """
    steps = list(steps)
    return [row for call in graph if call.every is None for row in _rows_of(call.name, call.play, steps)]


def _rows_of(call: str, play: PlayBounds | None, steps: list[Mapping[str, float]]) -> Iterator[dict[str, str]]:
    if play is None:
        return
    expected = {
        "turns": ("turns of a row", play.turns),
        "observed_tokens": ("tokens of a row's answers", play.observed),
        "answer_seconds": ("seconds of an answer", play.seconds),
    }
    for metric, (what, value) in expected.items():
        seen = [step[f"{call}.{metric}"] for step in steps if f"{call}.{metric}" in step]
        yield {"call": call, "what": what, "expected": _short(value), "measured": _short(fmean(seen)) if seen else ""}


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
