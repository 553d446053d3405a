"""Models and rows of the steps: a tiny Llama on disk, and large random models that are never on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prefect_rlhf.engines.commands import BuildCommand, Restore
from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.model import ModelSpec, OptimizerSpec, TransformerShape
from prefect_rlhf.placement.plan import ModelInstance

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, head width, vocabulary
    "1.3B": TransformerShape(2048, 8192, 24, 16, 16, 128, 50304, 32768, 1e4, 1e-5, False),
    "7B": TransformerShape(4096, 11008, 32, 32, 32, 128, 32000, 32768, 1e4, 1e-5, False),
    "70B": TransformerShape(8192, 28672, 80, 64, 8, 128, 128256, 32768, 5e5, 1e-5, False),
    "tiny": TransformerShape(64, 128, 2, 2, 1, 32, 512, 4096, 1e4, 1e-5, False),
}
OPTIMIZER = OptimizerSpec(lr=1e-3)


def random_engine(
    folder: Path,
    shape: TransformerShape,
    *,
    strategy: Strategy | None = None,
    trained: bool = True,
    length: int = 4096,
    rows: int = 8,
) -> MegatronEngine:
    """Build rank 0 of a model whose weights are drawn on the device, in bfloat16."""
    strategy = strategy or Strategy()
    spec = ModelSpec("actor", str(folder), "lm", shape, optimizer=OPTIMIZER if trained else None)
    ranks = tuple(range(strategy.num_devices))
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, len(ranks)), strategy)
    unread = Restore(folder, 0)  # so that the engine reads no checkpoint
    engine = MegatronEngine(BuildCommand(spec, instance, ranks, Layout({}, {}), length, rows, restore=unread), 0)
    with torch.no_grad():
        for name, shard in engine.weights().items():
            shard.view.fill_(1.0) if "norm" in name else shard.view.normal_(std=0.02)
    engine.weights_written()
    return engine


def full_rows(num_rows: int, length: int, vocab: int) -> tuple[Sequences, dict[str, torch.Tensor]]:
    """Return rows of `length` tokens, half of each a response, with an advantage per response token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocab, (num_rows, length), generator=generator)
    whole = torch.full((num_rows,), length)
    sequences = Sequences(tokens, whole // 2, whole)
    mask = sequences.response_mask_BT()
    return sequences, {"mask": mask, "advantages": torch.randn(mask.shape, generator=generator)}


def train(engine: Any, sequences: Sequences, columns: dict[str, torch.Tensor], micro_batches: int) -> dict[str, float]:
    """Take a step of REINFORCE."""
    from tests.engines.megatron_cases import Walk, loss, train_on

    return train_on(engine, sequences, columns, loss, Walk("logprobs", 1, micro_batches))
