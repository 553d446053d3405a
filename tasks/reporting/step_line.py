"""The line of a step: progress of the run, duration of the step, metrics of learning, remaining time."""

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import final

LONGEST_LINE = 100  # characters
STEPS_TIMED = 5  # latest steps, whose median seconds give the remaining time
SHOWN: Mapping[str, tuple[str, ...]] = {
    "reward": ("score", "reward"),
    "accuracy": ("accuracy",),
    "kl": ("kl",),
    "loss": ("loss",),
}
"""Names on the line, in its order, and their metrics: the first metric with that last word, in the graph's order, or
else the first metric of a call with that name."""


@final
class StepLines:
    """Makes the line of each step of a run of `num_steps`; `evaluations` are calls that do not run in every step."""

    def __init__(self, num_steps: int, evaluations: Collection[str] = ()) -> None:
        self._num_steps, self._evaluations = num_steps, frozenset(evaluations)
        self._seconds: deque[float] = deque(maxlen=STEPS_TIMED)

    def line(self, metrics: Mapping[str, float]) -> str:
        """Return the line of the next step, at most 100 characters; steps are counted from 1.

        >>> metrics = {"step": 2, "seconds": 9.81, "score.exact": 0.5, "rewards.score": 0.41, "rewards.kl": 0.02}
        >>> StepLines(20).line(metrics)
        'step 3 of 20 · 9.8 s · reward 0.41 · kl 0.02 · 3 min left'
        """
        self._seconds.append(metrics["seconds"])
        done = int(metrics["step"]) + 1
        left = (self._num_steps - done) * median(self._seconds)
        begin = [f"step {done} of {self._num_steps}", f"{metrics['seconds']:.1f} s"]
        end = [f"{duration(left)} left"] if done < self._num_steps else []
        values = self.values(metrics)
        while values and len(" · ".join([*begin, *values, *end])) > LONGEST_LINE:
            values.pop()
        return " · ".join([*begin, *values, *end])

    def values(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the few metrics of the line: first the step's, then its evaluation's."""
        evaluated = {name: value for name, value in metrics.items() if name.partition(".")[0] in self._evaluations}
        trained = {name: value for name, value in metrics.items() if name not in evaluated}
        return [*_values(trained), *(f"held-out {value}" for value in _values(evaluated))]


def _values(metrics: Mapping[str, float]) -> list[str]:
    found = {label: name for label, words in SHOWN.items() if (name := _first(metrics, words))}
    if "reward" in found:
        found.pop("loss", None)  # the size of a policy's loss is not informative
    return [f"{label} {metrics[name]:.3g}" for label, name in found.items()]


def _first(metrics: Mapping[str, float], words: Collection[str]) -> str | None:
    last = [name for name in metrics if name.rpartition(".")[2] in words and "." in name]
    of_call = [
        name for name in metrics if name.partition(".")[0] in words and not name.endswith((".seconds", ".failed"))
    ]
    return next(iter([*last, *of_call]), None)


def duration(seconds: float) -> str:
    """Return a rounded duration in a single unit.

    >>> [duration(seconds) for seconds in (0.4, 40, 170, 9000)]
    ['1 s', '40 s', '3 min', '2.5 h']
    """
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
