"""The most bytes that torch holds during a call, and who owns them."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

SHOWN, MIB = 10, 1 << 20
FOLDERS = ("/prefect_rlhf/", "/megatron/core/", "/benchmarks/", "/tests/")


def empty() -> None:
    """Free what no name holds: engines are in cycles, and torch keeps unused blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that torch had allocated during a call; nothing of an earlier one is left."""
    empty()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def cublas_bytes() -> int:
    """Return the bytes of cuBLAS' workspaces, which torch allocates per handle and stream; they are freed."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return int(before - torch.cuda.memory_allocated())


def owners_at_peak(call: Callable[[], object], file: Path) -> list[str]:
    """Return the lines of code whose tensors are the most bytes at a call's peak; torch's whole snapshot is in `file`.

    Only what the call itself allocates has a line. The rest was there before.
    """
    empty()
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python", context="alloc")
    try:
        call()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    file.write_bytes(pickle.dumps(snapshot))
    (trace,) = snapshot["device_traces"][:1]
    largest = live_at_peak(trace).most_common(SHOWN)
    return [f"{held / MIB:.1f} MiB: before the call", *(f"{size / MIB:.1f} MiB: {place}" for place, size in largest)]


def live_at_peak(trace: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the bytes by line of code at the moment of a trace when most are allocated.

    >>> mm = [{"filename": "/a/prefect_rlhf/engines/head.py", "line": 7}]
    >>> first = {"action": "alloc", "addr": 1, "size": 8, "frames": mm}
    >>> live_at_peak([first, {"action": "free_completed", "addr": 1, "size": 8}, {**first, "size": 2}])
    Counter({'engines/head.py:7': 8})
    """
    live: dict[int, tuple[str, int]] = {}
    total = most = 0
    at_peak: dict[int, tuple[str, int]] = {}
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    for turn in ("find", "copy"):  # a copy at each new peak would take as long as the square of the events
        live, total = {}, 0
        for event in events:
            if event["action"] == "alloc":
                live[event["addr"]] = _place(event.get("frames", ())), event["size"]
                total += event["size"]
            elif event["addr"] in live:
                total -= live.pop(event["addr"])[1]
            if turn == "find":
                most = max(most, total)
            elif total == most and event["action"] == "alloc":
                at_peak = dict(live)
                break
    sums: Counter[str] = Counter()
    for place, size in at_peak.values():
        sums[place] += size
    return sums


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of ours or of Megatron; the innermost of all if there is none."""
    frames = list(frames)
    for frame in frames:
        for folder in FOLDERS:
            if folder in frame["filename"]:
                return f"{frame['filename'].rpartition(folder)[2]}:{frame['line']}"
    return f"{frames[0]['filename'].rpartition('/')[2]}:{frames[0]['line']}" if frames else "no line of Python"
