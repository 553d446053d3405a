"""Measures how a host's devices slow each other down: the same work on 1, 2, 4, ... and all of them at once."""

from collections.abc import Sequence
from statistics import mean, median

from prefect_rlhf.engines.rank.profiling.profiling_rank import ProfilingRank
from prefect_rlhf.placement.cost.contention import SharedWork, SlowDown
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.tasks.profiling.bench import REPEATS, Bench, PassMethod, Sizes

MOST_ROWS = 8  # of a probe
_CALLS: tuple[tuple[SharedWork, EngineKind, PassMethod], ...] = (
    ("inference", "megatron", ProfilingRank.infer),
    ("train_step", "megatron", ProfilingRank.train),
    ("generate", "megatron", ProfilingRank.generate),
    ("generate", "vllm", ProfilingRank.generate),
)


def numbers_busy(num_devices: int) -> tuple[int, ...]:
    """Return how many devices are busy in each measurement.

    >>> numbers_busy(6), numbers_busy(4)
    ((1, 2, 4, 6), (1, 2, 4))
    """
    return (*(1 << power for power in range((num_devices - 1).bit_length())), num_devices)


def number_of_probes(num_devices: int) -> int:
    """Return how many measurements `time_contention` makes."""
    return (len(_CALLS) + 1) * len(numbers_busy(num_devices)) if num_devices > 1 else 0


def time_contention(bench: Bench, sizes: Sizes) -> tuple[SlowDown, ...]:
    """Time each kind of call, and a move of weights within a device, on more and more devices; empty for a single
    device.
    """
    if bench.gang.size == 1:
        return ()
    rows, length = min(MOST_ROWS, sizes.rows[-1]), sizes.lengths[-1]
    busy = numbers_busy(bench.gang.size)
    moves = _slow_down("move", "megatron", busy, [_busy_move(bench, count) for count in busy])  # before any training
    calls = (
        _slow_down(work, engine, busy, [bench.busy_call(method, engine, rows, length, count) for count in busy])
        for work, engine, method in _CALLS
    )
    return (moves, *calls)


def _slow_down(
    work: SharedWork, engine: EngineKind, busy: tuple[int, ...], timed: Sequence[tuple[float, float]]
) -> SlowDown:
    """The slow-down from (seconds until the last device has finished, mean) for each number of busy devices."""
    return SlowDown(work, engine, busy, tuple(last for last, _ in timed), timed[-1][1])


def _busy_move(bench: Bench, busy: int) -> tuple[float, float]:
    """Time copying trained weights to vLLM on each of the first devices concurrently, as `busy_call` times a call."""
    bench.step(f"weights within a device on {busy} devices at once")
    commands = {rank: (bench.move(rank, rank, "vllm", "model"),) for rank in range(busy)}
    moved = [bench.call(ProfilingRank.reallocate, commands) for _ in range(REPEATS)]
    seconds = [[report.seconds - report.fingerprint_seconds for report in reports] for reports in moved]
    return median(map(max, seconds)), median(map(mean, seconds))
