"""A run's metrics over time, for its curves: the most informative metrics, in a bounded number of steps."""

from collections.abc import Mapping
from typing import final

from prefect_rlhf.tasks.reporting.step_line import with_reward
from prefect_rlhf.tasks.rl.evaluation.sets import HIGH, LOW

WATCHED = (
    *("score", "reward", "accuracy", "margin", "kl", "loss"),
    *("response_tokens", "truncated", "learning_rate", "entropy", "explained_variance"),
)
"""The shown metrics, by their last word or their call's name, in this order."""
OF_SETS = ("avg@", "pass@", "maj@")
"""How metric names of named sets begin; such metrics are shown like scores."""
ENDS = (LOW, HIGH)
MOST_CURVES = 18
MOST_STEPS = 200  # the number of points that fit a panel


@final
class History:
    """Keeps watched metrics of every step; in a long run, of every second, fourth, ... step and the last step."""

    def __init__(self) -> None:
        self._steps: list[Mapping[str, float]] = []
        self._stride = 1
        self._last: Mapping[str, float] | None = None

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics, including `step`, in the order of the graph."""
        scored = with_reward(metrics)
        self._last = {name: value for name, value in scored.items() if name == "step" or _is_kept(name)}
        if metrics["step"] % self._stride == 0:
            self._steps.append(self._last)
        if len(self._steps) > MOST_STEPS:
            self._stride *= 2
            self._steps = [kept for kept in self._steps if kept["step"] % self._stride == 0]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curve of each watched metric, the most important first, at most eighteen."""
        found: dict[str, list[tuple[int, float]]] = {}
        for metrics in self._all():
            for name, value in metrics.items():
                if name != "step" and rank(name) is not None:
                    found.setdefault(name, []).append((int(metrics["step"]), value))
        order = sorted(found, key=lambda name: (rank(name), list(found).index(name)))
        return {name: found[name] for name in order[:MOST_CURVES]}

    def bands(self) -> dict[str, list[tuple[int, float, float]]]:
        """Return the interval of each watched metric that has an interval: steps, lower ends and upper ends."""
        found: dict[str, list[tuple[int, float, float]]] = {}
        for metrics in self._all():
            for name in metrics:
                low, high = (metrics.get(f"{name}{end}") for end in ENDS)
                if low is not None and high is not None:
                    found.setdefault(name, []).append((int(metrics["step"]), low, high))
        return found

    def _all(self) -> list[Mapping[str, float]]:
        """Return the kept steps, and the last step."""
        return self._steps if self._last in self._steps[-1:] else [*self._steps, *([self._last] if self._last else [])]


def _is_kept(name: str) -> bool:
    """Whether a metric is watched, or an end of the interval of one."""
    return any(rank(base) is not None for base in (name, *(name.removesuffix(end) for end in ENDS)))


def rank(name: str) -> int | None:
    """Return a metric's place among the watched metrics; None for other metrics.

    >>> rank("actor_train.loss"), rank("score.exact"), rank("evaluation_math.pass@4"), rank("actor_train.ratio")
    (5, 0, 0, None)
    """
    call, _, word = name.partition(".")
    if word.startswith(OF_SETS):
        return None if word.endswith(ENDS) else 0
    if word in ("seconds", "unscored"):  # of a score: its seconds are in the timeline, warnings count its rows
        return None
    return next((place for place, watched in enumerate(WATCHED) if watched in (word, call)), None)
