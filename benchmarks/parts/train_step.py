"""Processor seconds of a train_step and a checkpoint's copy of one Megatron rank; prints JSON as its last line.

    python -m benchmarks.parts.train_step [--model FOLDER] [--rows 16] [--prompt 6] [--response 24] [--steps 5]
        [--kernels]

`products` is the share of torch's matrix products in a profiled step, as seconds; `rest` is the remainder. `digest`
identifies the weights after all steps: two trees with the same digest compute the same, bit for bit. `--kernels` lists
operators by processor time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.profiler import ProfilerActivity, profile

from benchmarks.beside_trl.step_work import StepWork
from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Sequences, TrainingRows, TrainSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.files.training_state import HostCopy
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.weights.fingerprint import digest
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout
from prefect_rlhf.placement.models.model import OptimizerSpec
from prefect_rlhf.placement.plan import ModelInstance

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_")


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=StepWork.model)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=6, help="tokens of the longest prompt; others are shorter")
    parser.add_argument("--response", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    command = build_command(arguments.model)
    engine, copy = MegatronEngine(command, 0), HostCopy(command, 0)
    vocabulary = command.model.shape.vocab_size
    rows = training_rows(arguments.rows, arguments.prompt, arguments.response, vocabulary)

    def step() -> None:
        engine.train([rows], TrainSettings())

    seconds = [processor_seconds(step) for _ in range(arguments.steps + 1)]
    copies = []
    with TemporaryDirectory() as folder:
        for _ in range(3):
            copies.append(processor_seconds(lambda: copy.take(engine)))
            copy.write(Path(folder))  # a rank takes no other copy before
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    kernels = sorted(profiled.key_averages(), key=lambda kernel: -kernel.self_cpu_time_total)
    whole = sum(kernel.self_cpu_time_total for kernel in kernels)  # wall time: on busy cores only its shares count
    share = sum(kernel.self_cpu_time_total for kernel in kernels if kernel.key in PRODUCTS) / whole
    usual = median(seconds[1:])
    if arguments.kernels:
        for kernel in kernels[:40]:
            print(f"{kernel.self_cpu_time_total / 1e6:8.4f} s {kernel.count:6d} {kernel.key}")
    line = {
        "step": round(usual, 3),
        "least": round(min(seconds[1:]), 3),
        "products": round(share * usual, 3),
        "rest": round((1 - share) * usual, 3),
        "first_copy": round(copies[0], 3),
        "copy": round(min(copies[1:]), 3),
        "digest": f"{sum(digest(engine.weights()).values()) % 2**64:016x}",
    }
    print(json.dumps(line))


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this process's threads that work takes."""
    began = process_time()
    work()
    return process_time() - began


def build_command(folder: str) -> BuildCommand:
    """The actor of a run on one CPU rank."""
    spec = read_model_spec("actor", folder, "lm", optimizer=OptimizerSpec(lr=2e-5))
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 1), Strategy())
    layout = engine_layout(replace(spec, optimizer=None), "megatron", Strategy(), (0,))
    return BuildCommand(spec, instance, (0,), layout, 128, 64)


def training_rows(count: int, prompt: int, response: int, vocabulary: int) -> TrainingRows:
    """Rows of random tokens with an advantage for each token of a response."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(max(1, prompt - 4), prompt + 1, (count,), generator=generator)
    prompts[0] = prompt
    tokens = torch.randint(3, vocabulary, (count, prompt + response), generator=generator)
    sequences = Sequences(tokens, prompts, prompts + response)
    mask = sequences.response_mask_BT()
    columns = {"mask": mask, "advantages": torch.randn(mask.shape, generator=generator)}
    return TrainingRows(sequences, (LossTerm(loss, ("logprobs",)),), (columns,))


def loss(logprobs_BT: Tensor, batch: Any) -> LossValues:
    """A policy gradient with a curvature."""
    return LossValues(-(logprobs_BT + 0.01 * logprobs_BT**2) * batch["advantages"])


if __name__ == "__main__":
    main()
