"""Exports a Hugging Face folder from the ranks' shards by parameter, so that no rank holds the whole model twice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Engine, Shard
from prefect_rlhf.engines.files.huggingface import write_folder
from prefect_rlhf.engines.files.peft_export import merged, trained_parameters, write_adapter
from prefect_rlhf.engines.weights.send_receive import send_receive
from prefect_rlhf.engines.weights.views import within
from prefect_rlhf.files.model_folder import ADAPTER, MERGED
from prefect_rlhf.files.storage.publish import publish
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import Region, shape_of
from prefect_rlhf.placement.models.model import ModelSpec


def export(
    engine: Engine,
    spec: ModelSpec,
    layout: Layout,
    path: Path,
    tokenizer: str | Path,
    rank: int,
    ends: Sequence[int] | None = None,
    merge: bool = False,
) -> int:
    """Write folder `path` on the first rank of `layout`; the others send its missing regions. Return the bytes sent.

    `ends` are the tokens that end a response; for None see `write_folder`. For a model with an adapter, only trained
    weights are sent, for a PEFT folder. With `merge`, the whole model is written too, see `write_trained`.
    """
    if spec.adapter is not None:
        layout = layout.only({parameter.name for parameter in trained_parameters(spec)})
    shards = engine.weights()
    writer = min(rank for regions in layout.regions.values() for rank in regions)
    if rank == writer:
        write_trained(path, spec, _gathered(shards, layout, writer, spec), tokenizer, ends, merge)
        return 0
    return _send(shards, layout, writer, rank)


def write_trained(
    path: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: str | Path,
    ends: Sequence[int] | None = None,
    merge: bool = False,
) -> None:
    """Write a trained model: a Hugging Face folder, or a PEFT folder if the model has an adapter.

    With `merge`, a model with an adapter is also written as a whole Hugging Face folder; its name ends with MERGED.
    `tensors` are all parameters or, for a model with an adapter, the `trained_parameters`.
    """
    if spec.adapter is None:
        write_folder(path, spec, tensors, tokenizer, ends=ends)
        publish(path, last="config.json")
        return
    trained = dict(tensors)
    write_adapter(path, spec, trained, tokenizer)
    publish(path, last=ADAPTER)
    if merge:
        beside = path.with_name(path.name + MERGED)
        write_folder(beside, replace(spec, adapter=None, base_dtype=None), merged(spec, trained), tokenizer, ends=ends)
        publish(beside, last="config.json")


def holders(regions: Mapping[int, Region], writer: int) -> dict[Region, int]:
    """Return the rank that sends each distinct region: the writer itself if possible, else the lowest rank.

    >>> holders({0: ((0, 2),), 1: ((2, 4),), 2: ((0, 2),), 3: ((2, 4),)}, writer=0)
    {((0, 2),): 0, ((2, 4),): 1}
    """
    givers: dict[Region, int] = {}
    for rank in sorted(regions, key=lambda rank: (rank != writer, rank)):
        givers.setdefault(regions[rank], rank)
    return givers


def _gathered(
    shards: Mapping[str, Shard], layout: Layout, writer: int, spec: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    for name, regions in layout.regions.items():
        parts = holders(regions, writer)
        dtype = getattr(torch, spec.dtype)  # of all trained weights
        device = next(iter(shards.values())).view.device
        received = {
            region: torch.empty(shape_of(region), dtype=dtype, device=device)
            for region, rank in parts.items()
            if rank != writer
        }
        send_receive({}, {parts[region]: [tensor] for region, tensor in received.items()})
        yield name, _assembled(layout.shapes[name], parts, received, shards.get(name))


def _assembled(
    shape: tuple[int, ...], parts: Mapping[Region, int], received: Mapping[Region, Tensor], own: Shard | None
) -> Tensor:
    """Assemble a parameter in memory of its own: numpy prevents a resize of a storage, and so its offload."""
    pieces = {region: received[region] if region in received else _values(own) for region in parts}
    whole = torch.empty(shape, dtype=next(iter(pieces.values())).dtype)
    origin = tuple((0, size) for size in shape)
    for region, values in pieces.items():
        whole[within(region, origin)] = values.cpu()
    return whole


def _send(shards: Mapping[str, Shard], layout: Layout, writer: int, rank: int) -> int:
    sent = 0
    for name, regions in layout.regions.items():
        if rank in holders(regions, writer).values():
            values = _values(shards[name])
            send_receive({writer: [values]}, {})
            sent += values.nbytes
    return sent


def _values(shard: Shard | None) -> Tensor:
    assert shard is not None  # the layout names this rank as a holder
    return shard.view.reshape(shard.shape).contiguous()
