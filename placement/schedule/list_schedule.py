"""List scheduling in a given order: of the jobs that wait for resources, the earliest goes first.

A later job may pass an earlier job only if they share no resource, which is also the rule of a run's device locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TimesLonger = Callable[[Sequence[int]], Sequence[float]]
"""Given the jobs that run at the same time, how many times longer each takes than it would alone."""


@dataclass(frozen=True, slots=True)
class Job:
    """A node as this rule sees it: bits of the resources it occupies, its time, positions of the jobs it waits for."""

    resources: int
    seconds: float
    after: tuple[int, ...] = ()


class Span(NamedTuple):
    """When a job starts and ends, in seconds."""

    start: float
    end: float


def job_spans(jobs: Sequence[Job], times_longer: TimesLonger | None = None) -> list[Span]:
    """Return when jobs start and end, if concurrent jobs slow each other by `times_longer`; earlier jobs go first.

    >>> first, other, second = Job(0b01, 2.0), Job(0b10, 3.0), Job(0b11, 1.0, after=(0,))
    >>> [span.start for span in job_spans([first, other, second])]
    [0.0, 0.0, 3.0]
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
    """A running job: its start, its end if no other job starts or ends, and its present slow-down."""

    start: float
    end: float
    longer: float = 1.0

    def slowed(self, now: float, longer: float) -> _Running:
        """The job from now on; the rest of it takes `times_longer` times its undisturbed seconds."""
        if longer == self.longer:
            return self
        return _Running(self.start, now + (self.end - now) / self.longer * longer, longer)


class _Waiting:
    """Counts the unfinished dependencies of each job."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = [len(set(job.after)) for job in jobs]
        self._followers: list[list[int]] = [[] for _ in jobs]
        for index, job in enumerate(jobs):
            for before in set(job.after):
                self._followers[before].append(index)

    def ready(self) -> Iterator[int]:
        """Yield the jobs without dependencies."""
        yield from (index for index, left in enumerate(self._left) if left == 0)

    def ended(self, job: int) -> Iterator[int]:
        """Yield the jobs whose last unfinished dependency was this job."""
        for follower in self._followers[job]:
            self._left[follower] -= 1
            if self._left[follower] == 0:
                yield follower


def _may_start(queue: Iterable[int], jobs: Sequence[Job], busy: int) -> set[int]:
    """The queued jobs whose resources are free and not requested by an earlier waiting job."""
    begun = set()
    for index in queue:
        if not jobs[index].resources & busy:
            begun.add(index)
        busy |= jobs[index].resources  # taken now, or kept for it
    return begun
