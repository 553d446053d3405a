"""Is the certificate true? Bytes of calls, of CUDA's context, and of ranks of larger plans on a single GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.models import SHAPES, full_rows, random_engine, train
from benchmarks.gpu.peaks import cublas_bytes, empty, owners_at_peak, peak_bytes
from benchmarks.gpu.step import SEEN, Constant, Expected, Found, Machine, Step
from prefect_rlhf.errors.errors import OutOfDeviceMemory
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.memory.bytes import CONTEXT_BYTES, FRAGMENT_SHARE, MIB, WORKSPACE_BYTES

WORLDS = {
    "7B tp8": ("7B", Strategy(tp=8)),
    "7B dp8": ("7B", Strategy(dp=8)),
    "70B tp8 pp2": ("70B", Strategy(tp=8, pp=2)),
}
SIZES = ((1, 4096), (4, 4096), (16, 1024))
KINDS = ("train_step", "inference")
LADDER = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Bytes beyond a call's peak that torch may reserve, in MiB, until the call succeeds."""


def context_bytes(machine: Machine) -> Found:
    """Memory that the driver counts and torch does not: after the first tensor, after cuBLAS, after NCCL of size 1."""
    found = machine.found
    kept = torch.zeros(1, device="cuda")
    found["context_gib"] = _beyond_torch()
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    kept = kept + (square @ square).sum()
    torch.cuda.synchronize()
    found["context_and_cublas_gib"] = _beyond_torch()
    found["cublas_mib"] = cublas_bytes() / MIB
    from prefect_rlhf.engines.process_groups import ensure_world

    ensure_world()
    dist.all_reduce(kept)
    torch.cuda.synchronize()
    found["context_cublas_and_nccl_gib"] = _beyond_torch()
    found["context_bytes"] = found["context_cublas_and_nccl_gib"] * 2**30
    return found


class Calls:
    """Calls of a model of four layers, and the bytes that the certificate has for them."""

    def __init__(self, machine: Machine) -> None:
        self.shape = replace(SHAPES[machine.pick("1.3B", "tiny")], num_layers=machine.pick(4, 2))
        self.engine = random_engine(machine.folder, self.shape)
        self.sizes = ModelSizes.of(self.engine._spec)
        self.call("train_step", 1, machine.pick(4096, 16))()  # the optimizer has no moments before its first step

    def call(self, kind: str, rows: int, length: int) -> Callable[[], object]:
        """Return a call on rows that are already made; the engine is asked for them once per call, as in a run."""
        sequences, columns = full_rows(rows, length, self.shape.vocab_size)
        if kind == "train_step":
            return lambda: train(self.engine, sequences, columns, 1)
        return lambda: self.engine.infer(sequences, "logprobs", 1, 1.0)

    def certified(self, kind: str, rows: int, length: int) -> int:
        """Return the bytes of the model, of the call, and of cuBLAS."""
        work = CallWork(kind, rows, Workload.fixed(length // 2, length - length // 2))  # type: ignore[arg-type]
        active = call_bytes(work, Execution(Strategy()), self.sizes, stage=0).active
        return int(self.engine.device_bytes() + active + WORKSPACE_BYTES)


def bytes_of_calls(machine: Machine) -> Found:
    """Peak of each call over the certificate's bytes; the owners of a peak that is above them."""
    found = machine.found
    with machine.gpu():
        calls = Calls(machine)
        found["parameters"] = sum(shard.view.numel() for shard in calls.engine.weights().values())
        found["model_mib"] = calls.engine.device_bytes() / MIB
        for rows, length in machine.pick(SIZES, ((2, 16),)):
            for kind in KINDS:
                name, call = f"{kind}_{rows}x{length}", calls.call(kind, rows, length)
                certified = calls.certified(kind, rows, length)
                peak = peak_bytes(call)
                found[f"{name}: certified MiB"] = certified / MIB
                if machine.pretend:
                    continue
                found[f"{name}: measured MiB"] = peak / MIB
                found[f"{name}: reserved MiB"] = torch.cuda.max_memory_reserved() / MIB
                found[name] = peak / certified
                if peak > certified or rows == 1:
                    found[f"{name}: owners"] = owners_at_peak(call, machine.folder / f"{name}.pickle")
        if not machine.pretend:
            empty()
            held = torch.cuda.memory_allocated()
            found["cublas_bytes"] = cublas_bytes()
            found["nobodys_mib"] = (held - calls.engine.device_bytes() - found["cublas_bytes"]) / MIB
    return found


def unusable_bytes(machine: Machine, segments: str) -> Found:
    """Bytes beyond a call's peak that torch must be able to reserve for the call to succeed, call by call.

    That is what `fragments` of the certificate stands for: at its limit torch returns unused blocks to the driver, and
    gaps in used blocks remain. `segments` is "fixed" or "expandable", torch's `expandable_segments`.
    """
    found, total = machine.found, torch.cuda.get_device_properties(0).total_memory
    if segments == "expandable":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # type: ignore[attr-defined]
    calls = Calls(machine)
    for kind, rows, length in (("inference", 1, 4096), ("inference", 4, 4096), ("train_step", 4, 4096)):
        call = calls.call(kind, rows, length)
        peak = peak_bytes(call)
        for beyond in LADDER:
            torch.cuda.set_per_process_memory_fraction(min(1.0, (peak + beyond * MIB) / total))
            try:
                peak_bytes(call)
            except (torch.OutOfMemoryError, OutOfDeviceMemory):
                continue
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            found[f"{kind}_{rows}x{length}: MiB beyond its peak"] = beyond
            found[f"{kind}_{rows}x{length}: share of the device"] = beyond * MIB / total
            break
    found["share_of_the_device"] = max(value for name, value in found.items() if name.endswith("share of the device"))
    return found


def worlds_on_one_gpu(machine: Machine) -> Found:
    """Rank 0 of plans of 8 and 16 GPUs, with two layers a stage: build and train twice against the certificate.

    Torch's fake process group takes the place of the other ranks, so sums over them are wrong and shapes are right. The
    optimizer makes its moments at the end of the first step, so the peak is that of the second.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, (size, strategy) in WORLDS.items():
        shape = SHAPES[machine.pick(size, "tiny")]
        if machine.pretend:
            strategy = Strategy(dp=strategy.dp, tp=1, pp=strategy.pp)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=strategy.num_devices, store=FakeStore())
        with machine.gpu():
            _in_a_world(machine, name, replace(shape, num_layers=2 * strategy.pp), strategy)
            empty()  # the world's engine is in cycles
            machine.found[f"{name}: MiB left behind"] = 0 if machine.pretend else torch.cuda.memory_allocated() / MIB
    return machine.found


def _in_a_world(machine: Machine, name: str, shape: Any, strategy: Strategy) -> None:
    found = machine.found
    engine = random_engine(machine.folder, shape, strategy=strategy)
    found[f"{name}: GiB after build"] = engine.device_bytes() / 2**30
    if strategy.pp > 1:
        return  # nobody would send the activations of the other stage
    rows, length = machine.pick((4, 2048), (4, 16))
    sequences, columns = full_rows(rows, length, shape.vocab_size)
    work = CallWork("train_step", rows * strategy.dp, Workload.fixed(length // 2, length // 2))
    active = call_bytes(work, Execution(strategy), ModelSizes.of(engine._spec), stage=0).active
    for step in ("first", "second"):
        peak = peak_bytes(partial(train, engine, sequences, columns, 1))
        certified = engine.device_bytes() + active + WORKSPACE_BYTES
        found[f"{name}: GiB certified after the {step} step"] = certified / 2**30
        if not machine.pretend:
            found[f"{name}: GiB at the peak of the {step} step"] = peak / 2**30
    if not machine.pretend:
        found[f"{name}: ratio"] = peak / certified
        if peak > certified:
            call = partial(train, engine, sequences, columns, 1)
            found[f"{name}: owners"] = owners_at_peak(call, machine.folder / f"{name}.pickle")


def _beyond_torch() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**30


_OVER = "measured over certified"
STEPS_OF_MEMORY = (
    Step(
        "bytes_of_calls",
        2,
        120,
        bytes_of_calls,
        {
            **{f"{kind}_1x4096": Expected(0.9, 1.0, _OVER) for kind in KINDS},
            **{f"{kind}_{size}": Expected(0.94, 1.0, _OVER, SEEN) for kind in KINDS for size in ("4x4096", "16x1024")},
            "cublas_bytes": Expected(32 * MIB, WORKSPACE_BYTES),
            "nobodys_mib": Expected(-8, 8),
        },
        findings="D3, D6, D7",
        constants=(Constant("WORKSPACE_BYTES", "placement/memory/bytes.py", WORKSPACE_BYTES, "cublas_bytes"),),
    ),
    *(
        Step(
            f"unusable_bytes_{segments}",
            2,
            120,
            partial(unusable_bytes, segments=segments),
            {"share_of_the_device": Expected(0, FRAGMENT_SHARE["cuda"])},
            needs=frozenset({"hardware"}),
            findings="D3",
            constants=(
                Constant(
                    "FRAGMENT_SHARE[cuda]", "placement/memory/bytes.py", FRAGMENT_SHARE["cuda"], "share_of_the_device"
                ),
            )
            if segments == "fixed"
            else (),
        )
        for segments in ("fixed", "expandable")
    ),
    Step(
        "context_bytes",
        3,
        120,
        context_bytes,
        {"context_gib": Expected(0.3, 0.75), "context_cublas_and_nccl_gib": Expected(0.45, 1.0)},
        needs=frozenset({"hardware"}),
        findings="D2",
        constants=(Constant("CONTEXT_BYTES", "placement/memory/bytes.py", CONTEXT_BYTES, "context_bytes"),),
    ),
    Step(
        "worlds_on_one_gpu",
        3,
        120,
        worlds_on_one_gpu,
        {f"{name}: ratio": Expected(0.9, 1.0, _OVER) for name in ("7B tp8", "7B dp8")},
        findings="D6",
    ),
)
