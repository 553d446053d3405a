"""Kernels by time, of a train_step and of an inference of our engine at the shape of the work; prints its findings.

The rows are those of a few micro-batches; weights are random. Without a GPU it times torch's operators.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.one_card.child import say
from benchmarks.one_card.rates import FORMULA, PEAK_FLOPS, forward_flops
from benchmarks.one_card.work import Work

SHOWN = 30
MICRO_BATCHES = 4
ROWS_AT_ONCE = {"0.5b": 16, "1.5b": 16, "3b": 4, "tiny": 2}  # of a micro-batch: as many as fit on 80 GB
GROUPS = (  # the first whose pattern is in a kernel's name
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("attention", r"flash|fmha|sdpa|attention|softmax_warp"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|::(add)?mm|::bmm|::linear"),
    ("norm", r"layer_?norm|rms_?norm|norm_kernel"),
    ("copies", r"memcpy|memset|copy|::_to_copy|fill|cat(array|_)|index|gather|scatter"),
    ("reductions", r"reduce|::sum|::mean|softmax|logsumexp|::max|norm"),
    ("elementwise", r"elementwise|triton_|::(mul|add|sub|div|neg|silu|sigmoid|exp|pow|rsqrt|where|cos|sin)"),
)


class Kernel(NamedTuple):
    """A kernel with its own time, in seconds, and how often it was launched."""

    name: str
    seconds: float
    count: int


def main() -> None:
    """Build the engine, time both calls, print their kernels."""
    import torch

    from benchmarks.gpu.models import random_engine, train
    from prefect_rlhf.engines.files.huggingface import read_shape

    work, began = Work.read(sys.argv[1]), time.monotonic()
    if work.kind == "cpu":
        torch.set_num_threads(1)
    rows = MICRO_BATCHES * ROWS_AT_ONCE[work.size]
    shape = read_shape("actor", work.model)
    with tempfile.TemporaryDirectory() as folder:
        engine = random_engine(Path(folder), shape, length=work.length, rows=rows)
        parameters = sum(shard.view.numel() for shard in engine.weights().values())
        say("engine built", seconds=round(time.monotonic() - began, 1), parameters=parameters, formula=FORMULA)
        sequences, columns = whole_rows(work, rows, shape.vocab_size)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "train_step": (3, lambda: train(engine, sequences, columns, MICRO_BATCHES)),
            "inference": (1, lambda: engine.infer(sequences, "logprobs", MICRO_BATCHES, 1.0)),
        }
        for name, (passes, call) in calls.items():
            wall = timed(name, work, parameters, rows, passes, call)
            kernels, profiled = kernels_of(call, work.kind)
            busy = sum(kernel.seconds for kernel in kernels)
            say(
                f"kernels of {name}",
                busy_seconds=round(busy, 4),
                profiled_seconds=round(profiled, 4),
                launches=sum(kernel.count for kernel in kernels),
                groups=grouped(kernels, wall),
                top=[[round(k.seconds * 1e3, 3), k.count, group_of(k.name), k.name[:120]] for k in kernels[:SHOWN]],
            )


def whole_rows(work: Work, rows: int, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """Return rows of the work's lengths, with an advantage per response token."""
    import torch

    from prefect_rlhf.engines.engine import Sequences

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocabulary, (rows, work.length), generator=generator)
    sequences = Sequences(tokens, torch.full((rows,), work.prompt_tokens), torch.full((rows,), work.length))
    mask = sequences.response_mask_BT()
    return sequences, {"mask": mask, "advantages": torch.randn(mask.shape, generator=generator)}


def timed(name: str, work: Work, parameters: int, rows: int, passes: int, call: Callable[[], object]) -> float:
    """Time three calls after a warm-up; print the fastest with MFU and peak memory, and return its seconds."""
    import torch

    cuda = work.kind == "cuda"
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    walls = []
    for _ in range(4):
        began = time.perf_counter()
        call()
        wait()
        walls.append(time.perf_counter() - began)
    wall = min(walls[1:])
    found: dict[str, Any] = {"tokens_per_second": round(rows * work.length / wall)}
    for words, attention in (("mfu", False), ("mfu_with_attention", True)):
        flops = passes * forward_flops(work, parameters, rows, attention=attention)
        found |= {words: round(flops / wall / PEAK_FLOPS, 4)} if cuda else {}
    found |= {"peak_gib": round(torch.cuda.max_memory_allocated() / (1 << 30), 3)} if cuda else {}
    shape = {"rows": rows, "tokens": work.length, "micro_batches": MICRO_BATCHES}
    say(name, **shape, seconds=round(wall, 4), walls=[round(each, 4) for each in walls], **found)
    return wall


def kernels_of(call: Callable[[], object], kind: str) -> tuple[list[Kernel], float]:
    """Return the kernels of a call, the longest first, and its wall seconds under the profiler."""
    import torch

    cuda = kind == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    found = [
        Kernel(event.key, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6, event.count)
        for event in profile.key_averages()
    ]
    return sorted((kernel for kernel in found if kernel.seconds > 0), key=lambda kernel: -kernel.seconds), wall


def group_of(name: str) -> str:
    """Return the group of a kernel by its name.

    >>> group_of("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT"), group_of("cudnn_generated_fort_native_sdpa_sm90_flash")
    ('matmul', 'attention')
    """
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def grouped(kernels: Iterable[Kernel], wall: float) -> dict[str, dict[str, float]]:
    """Return seconds, launches and share of the wall by group; `gaps` is the wall without any kernel, unprofiled."""
    seconds, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for kernel in kernels:
        seconds[group_of(kernel.name)] += kernel.seconds
        launches[group_of(kernel.name)] += kernel.count
    seconds["gaps"] = max(0.0, wall - sum(seconds.values()))
    return {
        group: {"seconds": round(value, 4), "launches": launches[group], "share": round(value / wall, 4)}
        for group, value in sorted(seconds.items(), key=lambda item: -item[1])
    }


if __name__ == "__main__":
    main()
