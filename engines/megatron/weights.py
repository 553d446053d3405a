"""This rank's weights under their Hugging Face names, as views into Megatron's storage.

Megatron fuses per rank: qkv holds for each group of query heads its queries, key and value; fc1 holds gate above up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.model import Transformer
from prefect_rlhf.placement.layout.layout import stages, vocabulary_rows
from prefect_rlhf.placement.model import ModelSpec


def shards(model: Transformer, spec: ModelSpec, groups: Groups) -> dict[str, Shard]:
    """Return every parameter this rank holds. Views stay valid until the model's storage moves."""
    return dict(_shards(model, spec, groups))


def load(weights: dict[str, Shard], spec: ModelSpec) -> None:
    """Fill the views from the checkpoint folder, reading of each tensor only this rank's region."""
    with OpenTensors(spec.path, f"{spec.role}.path") as checkpoint, torch.no_grad():
        for name, shard in weights.items():
            if name == "score.weight" and spec.new_head and name not in checkpoint:
                shard.view.zero_()
                continue
            shard.view.copy_(checkpoint.read(name, shard.region).view(shard.view.shape))


def _shards(model: Transformer, spec: ModelSpec, groups: Groups) -> Iterator[tuple[str, Shard]]:
    embedding = model.embedding.word_embeddings.weight if groups.is_first_stage else None
    tied = "lm" in spec.head and spec.shape.tied_embeddings
    if groups.is_last_stage and tied and embedding is None:
        embedding = model.output_layer.weight  # the last stage's own copy
    if embedding is not None:
        yield from _vocabulary("model.embed_tokens.weight", embedding, spec, groups)
    numbers = stages(spec.shape.num_layers, groups.strategy.pp)[groups.coordinate.pp]
    for number, layer in zip(numbers, model.decoder.layers, strict=True):
        for name, shard in _layer_shards(layer, spec, groups):
            yield f"model.layers.{number}.{name}", shard
    if groups.is_last_stage:
        yield "model.norm.weight", _whole(model.decoder.final_layernorm.weight)
        if "scalar" in spec.head:
            yield "score.weight", _whole(model.head_weight("scalar"))
        if "lm" in spec.head and not tied:
            yield from _vocabulary("lm_head.weight", model.output_layer.weight, spec, groups)


def _vocabulary(name: str, weight: Tensor, spec: ModelSpec, groups: Groups) -> Iterator[tuple[str, Shard]]:
    """Yield the rows that are tokens; nothing where all of them are padding."""
    start, stop = vocabulary_rows(spec, "megatron", groups.strategy.tp, groups.coordinate.tp)
    if start < stop:
        yield name, Shard(((start, stop), (0, weight.shape[1])), weight.detach()[: stop - start])


def _layer_shards(layer: torch.nn.Module, spec: ModelSpec, groups: Groups) -> Iterator[tuple[str, Shard]]:
    attention, mlp = layer.self_attention, layer.mlp
    yield "input_layernorm.weight", _whole(layer.input_layernorm.weight)  # type: ignore[union-attr, arg-type]
    yield from _attention_shards(attention.linear_qkv.weight, spec, groups)  # type: ignore[union-attr, arg-type]
    yield "self_attn.o_proj.weight", _split(attention.linear_proj.weight, 1, groups)  # type: ignore[union-attr, arg-type]
    yield "post_attention_layernorm.weight", _whole(layer.pre_mlp_layernorm.weight)  # type: ignore[union-attr, arg-type]
    gate, up = mlp.linear_fc1.weight.detach().chunk(2)  # type: ignore[union-attr, operator]
    yield "mlp.gate_proj.weight", _split(gate, 0, groups)
    yield "mlp.up_proj.weight", _split(up, 0, groups)
    yield "mlp.down_proj.weight", _split(mlp.linear_fc2.weight, 1, groups)  # type: ignore[union-attr, arg-type]


def _attention_shards(qkv: Tensor, spec: ModelSpec, groups: Groups) -> Iterator[tuple[str, Shard]]:
    """Yield queries, keys and values out of the fused weight: [groups, rows of one group, hidden] sliced by rows."""
    shape = spec.shape
    per_group = shape.num_attention_heads // shape.num_kv_heads * shape.head_dim
    grouped = qkv.detach().view(-1, per_group + 2 * shape.head_dim, shape.hidden_size)
    for name, view in zip("qkv", torch.split(grouped, [per_group, shape.head_dim, shape.head_dim], dim=1), strict=True):
        rows = view.shape[0] * view.shape[1]
        start = groups.coordinate.tp * rows
        yield f"self_attn.{name}_proj.weight", Shard(((start, start + rows), (0, shape.hidden_size)), view)


def _split(weight: Tensor, axis: int, groups: Groups) -> Shard:
    """Return the part of a weight that is split evenly over tp along `axis`."""
    start = groups.coordinate.tp * weight.shape[axis]
    held = (start, start + weight.shape[axis])
    region = tuple(held if a == axis else (0, size) for a, size in enumerate(weight.shape))
    return Shard(region, weight.detach())


def _whole(weight: Tensor) -> Shard:
    return Shard(tuple((0, size) for size in weight.shape), weight.detach())
