"""A process that builds rank 0 of large plans with tensors that have no memory; it prints its bytes, as JSON.

Torch's fake process group takes the place of the other ranks, and FakeTensorMode that of the tensors' content.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.models import SHAPES, random_engine
from prefect_rlhf.engines.megatron import engine
from prefect_rlhf.placement.devices.strategy import Strategy


def settle() -> None:
    """Let groups be made of real numbers, and modules and messages take tensors without content."""
    build_groups = engine.build_groups

    def with_numbers(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return build_groups(*arguments)

    def gather(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    engine.build_groups = with_numbers  # type: ignore[attr-defined]
    torch.nn.Module._apply = moved  # type: ignore[assignment]  # its own swaps the content of tensors
    dist.all_gather_object = gather


def moved(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    for child in module.children():
        moved(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
            module._parameters[name].__dict__.update(parameter.__dict__)  # type: ignore[union-attr]
    return module


def bytes_of(folder: Path, size: str, strategy: Strategy) -> dict[str, int]:
    """Bytes of rank 0 after its build, and with the moments that Adam's first step makes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=strategy.num_devices, store=FakeStore())
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = random_engine(folder, SHAPES[size], strategy=strategy)
        before = built.device_bytes()
        built.begin_after(1)
        return {"built": before, "trained": built.device_bytes()}


if __name__ == "__main__":
    settle()
    torch.set_num_threads(1)
    folder, size, degrees = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3].split(","))
    (folder / "bytes.json").write_text(json.dumps(bytes_of(folder, size, Strategy(*degrees))))
