"""A step's log line: the run's progress, step time, learning metrics, remaining time."""

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import final

LONGEST_LINE = 100  # characters
NOT_OF_REWARDS = (".seconds", ".failed", ".unscored")  # metrics of a score that are no rewards
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
    """Formats a line for each step in a run of `num_steps`; `evaluations` are calls that do not run in every step."""

    def __init__(self, num_steps: int, evaluations: Collection[str] = ()) -> None:
        self._num_steps, self._evaluations = num_steps, frozenset(evaluations)
        self._seconds: deque[float] = deque(maxlen=STEPS_TIMED)

    def line(self, metrics: Mapping[str, float], phrase: str = "") -> str:
        """Return the line of the next step, at most 100 characters.

        `phrase` says what is wrong with the step; it comes after the first value.

        >>> metrics = {"step": 3, "seconds": 9.81, "score.exact": 0.5, "rewards.score": 0.41, "rewards.kl": 0.02}
        >>> StepLines(20).line(metrics)
        'step 3 of 20 · 9.8 s · reward 0.41 · kl 0.02 · 3 min left'
        >>> StepLines(3).line(metrics, "no group differs: nothing learnt")
        'step 3 of 3 · 9.8 s · reward 0.41 · no group differs: nothing learnt · kl 0.02'
        """
        self._seconds.append(metrics["seconds"])
        done = int(metrics["step"])
        left = (self._num_steps - done) * median(self._seconds)
        begin = [f"step {done} of {self._num_steps}", f"{metrics['seconds']:.1f} s"]
        end = [f"{duration(left)} left"] if done < self._num_steps else []
        first, *others = self.values(metrics) or [""]
        said = [phrase] if phrase else []
        for kept in range(len(others), -1, -1):
            if len(line := _joined(*begin, first, *said, *others[:kept], *end)) <= LONGEST_LINE:
                return line
        for line in (_joined(*begin, first, *said), _joined(*begin, *said, *end)):
            if len(line) <= LONGEST_LINE:
                return line
        return _joined(*begin, *said)

    def before_training(self, metrics: Mapping[str, float]) -> str:
        """Return the line of step 0, the evaluation before training.

        >>> StepLines(20, ["accuracy"]).before_training({"step": 0, "accuracy.accuracy": 0.25})
        'step 0 of 20 · before training · held-out accuracy 0.25'
        """
        return _joined(f"step 0 of {self._num_steps}", "before training", *self.values(metrics))

    def values(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the line's few metrics: the step's, then those of its evaluation."""
        evaluated = {name: value for name, value in metrics.items() if name.partition(".")[0] in self._evaluations}
        trained = {name: value for name, value in metrics.items() if name not in evaluated}
        return [*_values(trained), *(f"held-out {value}" for value in _values(evaluated))]


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _values(metrics: Mapping[str, float]) -> list[str]:
    values = [f"{label} {value:.3g}" for label, value in shown_metrics(metrics).items()]
    return ["no reward", *values] if _has_no_reward(metrics) else values


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the few metrics that a step's line shows, by their names in it.

    >>> shown_metrics({"step": 2, "rewards.score": 0.41, "rewards.kl": 0.02, "train.loss": 0.7})
    {'reward': 0.41, 'kl': 0.02}
    """
    scored = with_reward(metrics)
    found = {label: metrics[name] for label, words in SHOWN.items() if (name := _first(scored, words))}
    if "reward" in found or _has_no_reward(metrics):
        found.pop("loss", None)  # the size of a policy's loss is not informative
    return found


def _has_no_reward(metrics: Mapping[str, float]) -> bool:
    return _first(with_reward(metrics), SHOWN["reward"]) is None and any(is_unscored(name, metrics) for name in metrics)


def with_reward(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the scores of a call in which no row has a score, because no score is not a score of
    0.

    >>> with_reward({"a.score": 0.0, "a.unscored": 1.0, "a.kl": 0.5, "b.score": 0.0, "b.unscored": 0.5})
    {'a.unscored': 1.0, 'a.kl': 0.5, 'b.score': 0.0, 'b.unscored': 0.5}
    """
    without = {name.rpartition(".")[0] for name in metrics if is_unscored(name, metrics)}
    is_score = {name for name in metrics if name.rpartition(".")[2] in SHOWN["reward"]}
    return {
        name: value for name, value in metrics.items() if name not in is_score or name.rpartition(".")[0] not in without
    }


def is_unscored(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric says that no row of its call has a score."""
    return name.endswith(".unscored") and metrics[name] == 1


def _first(metrics: Mapping[str, float], words: Collection[str]) -> str | None:
    last = [name for name in metrics if name.rpartition(".")[2] in words and "." in name]
    of_call = [name for name in metrics if name.partition(".")[0] in words and not name.endswith(NOT_OF_REWARDS)]
    return next(iter([*last, *of_call]), None)


def duration(seconds: float) -> str:
    """Return a rounded duration in a single unit.

    >>> [duration(seconds) for seconds in (0.4, 40, 170, 9000)]
    ['1 s', '40 s', '3 min', '2.5 h']
    """
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
