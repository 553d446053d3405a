"""Is the certificate true? Bytes of calls, of CUDA's context, and of ranks of larger plans on a single GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.models import SHAPES, full_rows, random_engine, train
from benchmarks.gpu.step import Constant, Expected, Found, Machine, Step
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.memory.bytes import CONTEXT_BYTES, FRAGMENT_SHARE

WORLDS = {
    "7B tp8": ("7B", Strategy(tp=8)),
    "7B dp8": ("7B", Strategy(dp=8)),
    "70B tp8 pp2": ("70B", Strategy(tp=8, pp=2)),
}


def context_bytes(machine: Machine) -> Found:
    """Memory that the driver counts and torch does not: after the first tensor, after cuBLAS, after NCCL of size 1."""
    found = {}
    kept = torch.zeros(1, device="cuda")
    found["context_gib"] = _beyond_torch()
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    kept = kept + (square @ square).sum()
    torch.cuda.synchronize()
    found["context_and_cublas_gib"] = _beyond_torch()
    from prefect_rlhf.engines.process_groups import ensure_world

    ensure_world()
    dist.all_reduce(kept)
    torch.cuda.synchronize()
    found["context_cublas_and_nccl_gib"] = _beyond_torch()
    found["context_bytes"] = found["context_cublas_and_nccl_gib"] * 2**30
    return found


def bytes_of_calls(machine: Machine) -> Found:
    """Peak of a train_step and of an inference over the certificate's bytes, for three sizes of micro-batch."""
    found: dict[str, Any] = {}
    shape = SHAPES["1.3B"]
    shape = type(shape)(**{**_fields(shape), "num_layers": 4})
    engine = random_engine(machine.folder, shape)
    sizes = ModelSizes.of(engine._spec)
    worst = 0.0
    for rows, length in ((1, 4096), (4, 4096), (16, 1024)):
        sequences, columns = full_rows(rows, length, shape.vocab_size)
        for kind in ("train_step", "inference"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if kind == "train_step":
                train(engine, sequences, columns, 1)
            else:
                engine.infer(sequences, "logprobs", 1, 1.0)
            torch.cuda.synchronize()
            work = CallWork(kind, rows, Workload.fixed(length // 2, length - length // 2))  # type: ignore[arg-type]
            active = call_bytes(work, Execution(Strategy()), sizes, stage=0).active
            predicted = engine.device_bytes() + active
            found[f"{kind}_{rows}x{length}"] = torch.cuda.max_memory_allocated() / predicted
            worst = max(worst, torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1)
    found["reserved_beyond_allocated"] = worst
    return found


def worlds_on_one_gpu(machine: Machine) -> Found:
    """Rank 0 of plans of 8 and 16 GPUs, with two layers a stage: build and train against the certificate.

    Torch's fake process group takes the place of the other ranks, so sums over them are wrong and shapes are right.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: dict[str, Any] = {}
    for name, (size, strategy) in WORLDS.items():
        shape = SHAPES[machine.pick(size, "tiny")]
        if machine.pretend:
            strategy = Strategy(dp=strategy.dp, tp=1, pp=strategy.pp)
        layers = 2 * strategy.pp
        shape = type(shape)(**{**_fields(shape), "num_layers": layers})
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=strategy.num_devices, store=FakeStore())
        with machine.gpu():
            engine = random_engine(machine.folder, shape, strategy=strategy)
            found[f"{name}: GiB after build"] = engine.device_bytes() / 2**30
            if strategy.pp > 1:
                continue  # nobody would send the activations of the other stage
            rows, length = machine.pick((4, 2048), (4, 16))
            sequences, columns = full_rows(rows, length, shape.vocab_size)
            if not machine.pretend:
                torch.cuda.reset_peak_memory_stats()
            train(engine, sequences, columns, 1)
            if not machine.pretend:
                work = CallWork("train_step", rows * strategy.dp, Workload.fixed(length // 2, length // 2))
                active = call_bytes(work, Execution(strategy), ModelSizes.of(engine._spec), stage=0).active
                found[f"{name}: ratio"] = torch.cuda.max_memory_allocated() / (engine.device_bytes() + active)
            del engine
    return found


def _fields(shape: Any) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def _beyond_torch() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**30


STEPS_OF_MEMORY = (
    Step(
        "bytes_of_calls",
        2,
        180,
        bytes_of_calls,
        {
            **{
                f"{kind}_{size}": Expected(0.9, 1.05, "measured over certified")
                for kind in ("train_step", "inference")
                for size in ("1x4096", "4x4096", "16x1024")
            },
            "reserved_beyond_allocated": Expected(0, 0.03),
        },
        needs=frozenset({"hardware"}),
        findings="D3, D6, D7",
        constants=(
            Constant(
                "FRAGMENT_SHARE[cuda]", "placement/memory/bytes.py", FRAGMENT_SHARE["cuda"], "reserved_beyond_allocated"
            ),
        ),
    ),
    Step(
        "context_bytes",
        3,
        180,
        context_bytes,
        {"context_gib": Expected(0.3, 0.75), "context_cublas_and_nccl_gib": Expected(0.45, 1.0)},
        needs=frozenset({"hardware"}),
        findings="D2",
        constants=(Constant("CONTEXT_BYTES", "placement/memory/bytes.py", CONTEXT_BYTES, "context_bytes"),),
    ),
    Step(
        "worlds_on_one_gpu",
        3,
        300,
        worlds_on_one_gpu,
        {f"{name}: ratio": Expected(0.9, 1.05, "measured over certified") for name in ("7B tp8", "7B dp8")},
        findings="D6",
    ),
)
