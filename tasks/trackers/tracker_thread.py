"""The thread of a tracker: a tracker that fails or is slow loses its own lines, and never delays the run."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from prefect_rlhf.errors.blame import described
from prefect_rlhf.tasks.trackers.names import tracked_values
from prefect_rlhf.tasks.trackers.samples import read_samples
from prefect_rlhf.tasks.trackers.tracker import Opener, TrackedRun, TrackedStep
from prefect_rlhf.tasks.trackers.tracking import Tracking

MOST_WAITING = 1000  # lines; further lines are dropped

Line = Mapping[str, float]


class TrackerThread:
    """Opens a tracker and passes lines to it, beginning with the lines `before` its start.

    `warn` is called at most once, from within `tell` or `wait`: as soon as an error is known, else at the end.
    """

    def __init__(
        self,
        name: str,
        opener: Callable[[], Opener],
        run: TrackedRun,
        tracking: Tracking,
        warn: Callable[[str], None],
        before: Sequence[Line] = (),
    ) -> None:
        self.name = name
        self._opener, self._run, self._tracking, self._warn = opener, run, tracking, warn
        now = time.time()
        self._waiting: deque[tuple[float, Line]] = deque((now, line) for line in before)
        self._most = len(before) + MOST_WAITING
        self._dropped: list[int] = []
        self._doing: int | None = None  # the step that the tracker is processing
        self._error: BaseException | None = None
        self._has_warned = False
        self._is_closed, self._has_failed = False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tell(self, line: Line) -> None:
        """Queue a line of metrics, or drop it if the queue is full or the tracker has failed; returns at once."""
        with self._changed:
            if self._error is not None or len(self._waiting) >= self._most:
                self._dropped.append(int(line["step"]))
            else:
                self._waiting.append((time.time(), line))
                self._changed.notify()
            error, lost = self._error, self._lost()
        if error is not None:
            self._warn_once(f"{self.name} lacks step {min(lost)} and later steps: {described(error)}")

    def end(self, *, has_failed: bool) -> None:
        """Close the queue; `has_failed` is true if an error ended the run."""
        with self._changed:
            self._is_closed, self._has_failed = True, has_failed
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until all lines are shown, then abandon the tracker; warns about lines that it
        lacks.
        """
        self._thread.join(max(0.0, seconds))
        with self._changed:
            error, lost = self._error, self._lost()
            is_whole = not lost and error is None and not self._thread.is_alive()
            self._waiting.clear()
        if not is_whole:
            self._warn_once(f"{self.name} {lacks(lost)}: {described(error) if error else 'it is slower than the run'}")

    def _lost(self) -> list[int]:
        in_hand = [] if self._doing is None else [self._doing]
        return [*in_hand, *(int(line["step"]) for _, line in self._waiting), *self._dropped]

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{text}; the run is not affected, metrics.jsonl has every step")

    def _work(self) -> None:
        try:
            tracker = self._opener()(self._run)
            while (item := self._next()) is not None:
                tracker.add(self._tracked(*item))
            tracker.close(has_failed=self._has_failed)
        except BaseException as error:  # noqa: BLE001  for any error of a tracker, the run continues
            with self._changed:
                self._error = error

    def _next(self) -> tuple[float, Line] | None:
        """Wait for a line; None after the last line."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            item = self._waiting.popleft() if self._waiting else None
            self._doing = int(item[1]["step"]) if item else None
            return item

    def _tracked(self, at: float, line: Line) -> TrackedStep:
        step, tracking = int(line["step"]), self._tracking
        is_due = (step - 1) % tracking.samples_every == 0  # the first step too
        samples = read_samples(self._run.run_dir, step, tracking.samples, of_rollouts=is_due)
        return TrackedStep(step, at, tracked_values(line, tracking.names), samples)


def lacks(steps: Sequence[int]) -> str:
    """Describe the steps that are not shown.

    >>> lacks([3, 4, 9]), lacks([3]), lacks([])
    ('lacks 3 steps (of 3 to 9)', 'lacks step 3', 'may lack its last step')
    """
    if len(steps) > 1:
        return f"lacks {len(steps)} steps (of {min(steps)} to {max(steps)})"
    return f"lacks step {steps[0]}" if steps else "may lack its last step"
