"""Seconds of TRL's steps and of the calls within them, taken from outside of its trainers."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback


class Stopwatch(TrainerCallback):
    """Seconds of each step, which is `updates` optimizer steps, and of what is timed in it; the rest is training."""

    def __init__(self, updates: int = 1) -> None:
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] = defaultdict(float)
        self.began = 0.0
        self._updates, self._updated = updates, 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._updated += 1
        if self._updated % self._updates:
            return
        now = time.perf_counter()
        step = now - self.began
        self.steps.append({**self.current, "train": step - sum(self.current.values()), "step": step})
        self.current, self.began = defaultdict(float), now

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the block's seconds to `name` of this step."""
        began = time.perf_counter()
        yield
        self.current[name] += time.perf_counter() - began

    def median(self, name: str) -> float:
        """The median over all steps but the first, which warms up."""
        return statistics.median(step.get(name, 0.0) for step in self.steps[1:])

    def watch(self, names: Callable[..., str | None], function: Callable[..., Any]) -> Callable[..., Any]:
        """Time `function` under the name that `names` gives its first argument; not at all when that is None."""

        def timed(*arguments: Any, **named: Any) -> Any:
            name = names(*arguments[:1])
            if name is None:
                return function(*arguments, **named)
            with self.timing(name):
                return function(*arguments, **named)

        return timed
