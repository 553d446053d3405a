"""The allocations that torch makes during a call, on this process or on a rank."""

import json
from pathlib import Path

import megatron_cases as cases
import torch
from torch.profiler import ProfilerActivity, profile

from prefect_rlhf.engines.engine import Sequences


def make_rows(count: int, length: int) -> tuple[Sequences, dict[str, torch.Tensor]]:
    """Rows of one length, half of it the response."""
    tokens = torch.randint(1, cases.VOCAB, (count, length))
    sequences = Sequences(tokens, torch.full((count,), length // 2), torch.full((count,), length))
    mask = sequences.response_mask_BT()
    return sequences, {"mask": mask, "advantages": torch.randn(mask.shape)}


def peak_allocated(function, path) -> int:
    """The most bytes that were allocated at once while `function` ran, less those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def train_peak(rank: int, case: cases.Case, settings: cases.Walk, rows: int, length: int, folder: str) -> int:
    """The most bytes that a second train_step of a rank allocates at once."""
    engine = case.build(rank)
    torch.manual_seed(0)  # every shard has the same rows
    cases.train_on(engine, *make_rows(2, 8), cases.loss, settings)  # the moments are made in the first step
    sequences, batch = make_rows(rows, length)
    return peak_allocated(
        lambda: cases.train_on(engine, sequences, batch, cases.loss, settings), Path(folder, f"{rank}.json")
    )
