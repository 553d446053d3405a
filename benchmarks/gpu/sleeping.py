"""vLLM's sleeping memory beside Megatron's tensors, with a full cache of torch's allocator."""

from __future__ import annotations

import torch

from benchmarks.gpu.step import Expected, Found, Machine, Step


def sleep_and_wake(machine: Machine) -> Found:
    """Sleep and wake twenty times; before each, torch has cached most of the device."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator, failures = CuMemAllocator.get_instance(), 0
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.arange(1 << 30, dtype=torch.int32, device="cuda")
    expected = int(weights[::4096].sum())
    for _ in range(20):
        allocator.sleep(offload_tags=("weights",))
        free, _ = torch.cuda.mem_get_info()
        blocks = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(int(free * 0.9) >> 28)]
        del blocks  # they stay in torch's cache
        try:
            allocator.wake_up()
        except RuntimeError:
            failures += 1
            break
        failures += int(weights[::4096].sum()) != expected
    return {"failures": failures}


STEPS_OF_SLEEPING = (
    Step(
        "sleep_and_wake",
        6,
        60,
        sleep_and_wake,
        {"failures": Expected(0, 0)},
        needs=frozenset({"hardware", "vllm"}),
        findings="A4, A5, N14",
    ),
)
