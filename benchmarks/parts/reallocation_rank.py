"""A rank of `benchmarks.parts.reallocation`: it holds two copies of a model and moves the one into the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.commands import MoveWeightsCommand
from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.weights.move_weights import Moved, WeightMover, fetch
from prefect_rlhf.engines.weights.send_receive import send_receive
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import Region
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.plan import EngineKind

SHAPE = TransformerShape(1024, 4096, 6, 16, 4, 64, 32768, 2048, 1e4, 1e-5, tied_embeddings=True)  # 125M parameters
SPEC = ModelSpec("actor", "", "lm", SHAPE, dtype="bfloat16")
DTYPE = torch.bfloat16


class Copy:
    """An engine's storage without the engine: weights fused as Megatron or vLLM fuse them, as shards."""

    def __init__(self, layout: Layout, engine: EngineKind, rank: int, *, filled: bool) -> None:
        self._shards: dict[str, Shard] = {}
        held = layout.of_rank(rank)
        for name, region in held.items():
            if name not in self._shards:
                self._shards.update(self._fused(name, region, held, engine))
        for name, shard in self._shards.items() if filled else ():
            shard.view.copy_(values(name, shard.region).view(shard.view.shape))

    def weights(self) -> Mapping[str, Shard]:
        return self._shards

    def weights_written(self) -> None:
        """Nothing here depends on weights."""

    def wrong(self) -> list[str]:
        """Names of weights that are not what they should be."""
        found = self._shards.items()
        return [name for name, s in found if not torch.equal(s.view.reshape(s.shape), values(name, s.region))]

    def _fused(self, name: str, region: Region, held: Mapping[str, Region], engine: EngineKind) -> dict[str, Shard]:
        sizes = [stop - start for start, stop in region]
        if not name.endswith(".q_proj.weight"):
            return {name: Shard(region, torch.zeros(sizes, dtype=DTYPE))}
        names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        regions = [held[part] for part in names]
        rows = [stop - start for (start, stop), _ in regions]
        if engine == "vllm":  # queries, then keys, then values
            whole = torch.zeros(sum(rows), sizes[1], dtype=DTYPE)
            views: tuple[Tensor, ...] = whole.split(rows)
        else:  # the same for each key-value head
            heads = rows[1] // SHAPE.head_dim
            whole = torch.zeros(heads, sum(rows) // heads, sizes[1], dtype=DTYPE)
            views = whole.split([size // heads for size in rows], dim=1)
        return {part: Shard(r, view) for part, r, view in zip(names, regions, views, strict=True)}


def values(name: str, region: Region) -> Tensor:
    """What a region of a parameter holds: numbers that differ by row, column and name."""
    axes = [torch.arange(start, stop) for start, stop in region]
    index = axes[0] if len(axes) == 1 else axes[0][:, None] * 8191 + axes[1][None]
    return ((index + crc32(name.encode())) % 16381).to(DTYPE)


class Mover:
    """A rank that holds two copies of a model and moves the one into the other."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def prepare(self, command: MoveWeightsCommand) -> None:
        """Allocate both copies, and the messages of the raw transport; touch all of it."""
        self.command, self.mover = command, WeightMover(self.rank)
        self.source = Copy(command.source_layout, command.source.engine, self.rank, filled=True)
        self.target = Copy(command.target_layout, command.target.engine, self.rank, filled=False)
        sent: Counter[tuple[int, int]] = Counter()
        for piece in reshard(command.source_layout, command.target_layout, command.devices).moved:
            sent[piece.source, piece.target] += piece.num_elements * DTYPE.itemsize
        self.outgoing = {t: [torch.ones(n, dtype=torch.uint8)] for (s, t), n in sent.items() if s == self.rank}
        self.incoming = {s: [torch.zeros(n, dtype=torch.uint8)] for (s, t), n in sent.items() if t == self.rank}

    def raw(self) -> float:
        """Seconds of sending and receiving as many bytes."""
        dist.barrier()
        began = time.perf_counter()
        send_receive(self.outgoing, self.incoming)
        return time.perf_counter() - began

    def exchange(self) -> float:
        """Seconds of bringing what goes between ranks from the one copy's storage into the other's."""
        transfers = self.mover.transfers(self.source, self.target, self.command)  # type: ignore[arg-type]  # all that it uses
        dist.barrier()
        began = time.perf_counter()
        fetch(transfers)
        return time.perf_counter() - began

    def move(self) -> tuple[float, Moved]:
        """Seconds of all of it, with what is copied within this rank; and what it moved."""
        dist.barrier()
        began = time.perf_counter()
        moved = self.mover.move(self.source, self.target, self.command)  # type: ignore[arg-type]  # all that it uses
        return time.perf_counter() - began, moved

    def wrong(self) -> list[str]:
        """Names of weights that did not arrive as they were sent."""
        return self.target.wrong()
