"""List scheduling in a given order: of the jobs that wait for resources the earliest goes first.

A later one may pass only where they share nothing: what a run's device locks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TimesLonger = Callable[[Sequence[int]], Sequence[float]]
"""Asked of the jobs that run at once, how many times longer than by itself each of them takes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A node as the rule knows it: bits of the resources it occupies, its time, positions of the jobs it awaits."""

    resources: int
    seconds: float
    after: tuple[int, ...] = ()


def list_schedule(jobs: Sequence[Job]) -> list[float]:
    """Return the start times of jobs, of which each waits for others and none for itself; earlier ones go first.

    >>> first, other, second = Job(0b01, 2.0), Job(0b10, 3.0), Job(0b11, 1.0, after=(0,))
    >>> list_schedule([first, other, second])
    [0.0, 0.0, 3.0]
    """
    return [span.start for span in job_spans(jobs)]


class Span(NamedTuple):
    """Seconds at which a job starts and ends."""

    start: float
    end: float


def job_spans(jobs: Sequence[Job], times_longer: TimesLonger | None = None) -> list[Span]:
    """Return when jobs start and end, while those that run at once slow each other as `times_longer` says.

    >>> job_spans([Job(0b01, 2.0), Job(0b10, 3.0)], lambda running: [len(running)] * len(running))
    [Span(start=0.0, end=4.0), Span(start=0.0, end=5.0)]
    """
    spans = [Span(0.0, 0.0)] * len(jobs)
    waiting = _Waiting(jobs)
    queue = sorted(waiting.ready())
    running: dict[int, _Running] = {}
    busy, now = 0, 0.0
    while queue or running:
        begun = _may_start(queue, jobs, busy)
        for index in sorted(begun):
            running[index] = _Running(now, now + jobs[index].seconds)
            busy |= jobs[index].resources
        queue = [index for index in queue if index not in begun]
        if times_longer is not None:
            now_running = tuple(running)
            for index, longer in zip(now_running, times_longer(now_running), strict=True):
                running[index] = running[index].slowed(now, longer)
        now = min(job.end for job in running.values())
        for index in [index for index, job in running.items() if job.end <= now]:
            spans[index] = Span(running.pop(index).start, now)
            busy &= ~jobs[index].resources
            queue.extend(waiting.ended(index))
        queue.sort()
    return spans


class _Running(NamedTuple):
    """A job that runs: its start, its end if nothing changes, and how many times longer it takes now."""

    start: float
    end: float
    longer: float = 1.0

    def slowed(self, now: float, longer: float) -> _Running:
        """The job from now on; what is left of it takes so many times longer than by itself."""
        if longer == self.longer:
            return self
        return _Running(self.start, now + (self.end - now) / self.longer * longer, longer)


def critical_path_seconds(jobs: Sequence[Job]) -> float:
    """Return the length of the longest chain of jobs that wait for each other: no schedule is shorter."""
    ends: list[float] = []
    for job in jobs:
        ends.append(max((ends[before] for before in job.after), default=0.0) + job.seconds)
    return max(ends, default=0.0)


class _Waiting:
    """Counts down what each job still waits for."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = [len(set(job.after)) for job in jobs]
        self._followers: list[list[int]] = [[] for _ in jobs]
        for index, job in enumerate(jobs):
            for before in set(job.after):
                self._followers[before].append(index)

    def ready(self) -> Iterator[int]:
        """Yield the jobs that wait for none."""
        yield from (index for index, left in enumerate(self._left) if left == 0)

    def ended(self, job: int) -> Iterator[int]:
        """Yield the jobs that only waited for this one still."""
        for follower in self._followers[job]:
            self._left[follower] -= 1
            if self._left[follower] == 0:
                yield follower


def _may_start(queue: Iterable[int], jobs: Sequence[Job], busy: int) -> set[int]:
    """The queued jobs whose resources are free and wanted by no earlier one that waits."""
    begun = set()
    for index in queue:
        if not jobs[index].resources & busy:
            begun.add(index)
        busy |= jobs[index].resources  # taken now, or kept for it
    return begun
