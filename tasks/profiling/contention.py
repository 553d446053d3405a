"""Measuring how devices of a host slow each other: the same work on 1, 2, 4, ... of them at once, and on all."""

from __future__ import annotations

from statistics import mean, median

from prefect_rlhf.engines.commands import RankReport
from prefect_rlhf.placement.cost.contention import SharedWork, SlowDown
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.tasks.profiling.bench import REPEATS, Bench, Sizes

MOST_ROWS = 8  # of a probe
_CALLS: tuple[tuple[SharedWork, EngineKind, str], ...] = (
    ("inference", "megatron", "infer"),
    ("train_step", "megatron", "train"),
    ("generate", "megatron", "generate"),
    ("generate", "vllm", "generate"),
)


def numbers_busy(num_devices: int) -> tuple[int, ...]:
    """Return how many devices are busy at once in each measurement.

    >>> numbers_busy(6), numbers_busy(4)
    ((1, 2, 4, 6), (1, 2, 4))
    """
    return (*(1 << power for power in range((num_devices - 1).bit_length())), num_devices)


def number_of_probes(num_devices: int) -> int:
    """Return how many measurements `time_contention` makes."""
    return (len(_CALLS) + 1) * len(numbers_busy(num_devices)) if num_devices > 1 else 0


def time_contention(bench: Bench, sizes: Sizes) -> tuple[SlowDown, ...]:
    """Time each kind of call, and a move of weights within a device, on ever more devices; nothing where one is all."""
    if bench.gang.size == 1:
        return ()
    rows, length = min(MOST_ROWS, sizes.rows[-1]), sizes.lengths[-1]
    busy = numbers_busy(bench.gang.size)
    moves = tuple(_move_seconds(bench, count) for count in busy)  # before weights are trained unseen
    calls = (
        SlowDown(work, engine, busy, tuple(bench.call_seconds(method, engine, rows, length, count) for count in busy))
        for work, engine, method in _CALLS
    )
    return (SlowDown("move", "megatron", busy, moves), *calls)


def _move_seconds(bench: Bench, busy: int) -> float:
    """The seconds to bring trained weights to vLLM on each of the first devices at once."""
    bench.step(f"weights within a device on {busy} devices at once")
    commands = {rank: (bench.move(rank, rank, "vllm", "model"),) for rank in range(busy)}
    moved: list[list[RankReport]] = [bench.call("reallocate", commands) for _ in range(REPEATS)]
    return median(mean(report.seconds - report.fingerprint_seconds for report in reports) for reports in moved)
