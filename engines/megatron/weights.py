"""This rank's weights under their Hugging Face names, as views into Megatron's storage.

Megatron fuses per rank: qkv holds, for each group of query heads, its queries, key and value; fc1 holds gate above up.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.files.initial_adapter import fill_adapter
from prefect_rlhf.engines.files.quantized_base import fill_quantized
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.engines.megatron.adapters.four_bits import FourBitLinear, stored_tensors
from prefect_rlhf.engines.megatron.adapters.linear import adapted_matrices
from prefect_rlhf.engines.megatron.adapters.linear_layers import LINEAR_LAYERS, QUERIES_KEYS_VALUES, LinearLayer
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.model import Transformer
from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.placement.layout.layout import stages, vocabulary_rows
from prefect_rlhf.placement.models.families.family import Part
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import matrix_name


def shards(model: Transformer, spec: ModelSpec, groups: Groups) -> dict[str, Shard]:
    """Return every parameter on this rank. Views stay valid until the model's storage moves."""
    return dict(_shards(model, spec, groups))


def by_storage(weights: Mapping[str, Shard]) -> dict[int, frozenset[str]]:
    """Group parameters by the storage that their views are in; a fused tensor has several."""
    found: dict[int, set[str]] = defaultdict(set)
    for name, shard in weights.items():
        found[shard.view.untyped_storage()._cdata].add(name)
    return {storage: frozenset(names) for storage, names in found.items()}


def lent(own: Tensor, pairs: Sequence[tuple[Shard, Shard]], doing: str) -> Tensor:
    """Return another engine's tensor in place of `own`; `pairs` are the parameters in it, each with the other's.

    Raises EngineFailed if the other holds another region of them, or sorts their elements differently.
    """
    first = min((theirs.view for _, theirs in pairs), key=_first_byte)
    for mine, theirs in pairs:
        view = theirs.view.view(mine.view.shape)
        in_one = view.untyped_storage()._cdata == first.untyped_storage()._cdata and view.dtype == mine.view.dtype
        begins = _first_byte(mine.view) - _first_byte(own) == _first_byte(view) - _first_byte(first)
        if not (in_one and begins and mine.region == theirs.region and _steps(mine.view) == _steps(view)):
            raise EngineFailed(f"{doing} is sorted otherwise, expected the same tensor")
    start = first.view(own.dtype)
    return start.as_strided(own.shape, own.stride(), start.storage_offset())


def _first_byte(view: Tensor) -> int:
    return int(view.storage_offset()) * view.element_size()


def _steps(view: Tensor) -> list[tuple[int, int]]:
    """The size and stride of each axis with several elements."""
    return [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]


def load(weights: dict[str, Shard], spec: ModelSpec, seed: int) -> None:
    """Fill the views from the checkpoint folder; a new adapter is drawn by `seed`.

    Only this rank's region of each tensor is read, except for four-bit matrices, which are read completely because
    their scales need it.
    """
    filled = fill_adapter(weights, spec, seed)
    with OpenTensors(spec.path, f"{spec.role}.path") as checkpoint, torch.no_grad():
        filled |= fill_quantized(weights, spec, checkpoint)
        for name, shard in ((name, shard) for name, shard in weights.items() if name not in filled):
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
    """Yield the rows that are tokens; no row if all of them are padding."""
    start, stop = vocabulary_rows(spec, "megatron", groups.strategy.tp, groups.coordinate.tp)
    if start < stop:
        yield name, Shard(((start, stop), (0, weight.shape[1])), weight.detach()[: stop - start])


def _layer_shards(layer: Any, spec: ModelSpec, groups: Groups) -> Iterator[tuple[str, Shard]]:
    """Yield a layer's parts under the names that the model's family gives them."""
    weights, biases = dict[tuple[Part, str], Shard](_parts(layer, spec, groups)), {}
    if layer.self_attention.linear_qkv.bias is not None:
        biases = dict(_qkv(layer.self_attention.linear_qkv.bias, spec, groups))
    for weight in FAMILIES[spec.shape.family].layer:
        for (part, end), shard in weights.items():
            if part == weight.part:
                yield f"{weight.name}.weight{end}", shard
        if weight.name in spec.shape.biases:
            yield f"{weight.name}.bias", biases[weight.part]
    bases = {matrix_name(weight): weight for weight in FAMILIES[spec.shape.family].layer}
    for matrix, a, b in adapted_matrices(layer):
        (rows, columns), ranks = weights[bases[matrix].part, ""].region, (0, a.shape[0])
        if spec.base_dtype is not None:  # pairs of numbers
            columns = (2 * columns[0], 2 * columns[1])
        yield f"{bases[matrix].name}.lora_A.weight", Shard((ranks, columns), a.detach())
        yield f"{bases[matrix].name}.lora_B.weight", Shard((rows, ranks), b.detach())


def _parts(layer: Any, spec: ModelSpec, groups: Groups) -> Iterator[tuple[tuple[Part, str], Shard]]:
    """Yield a layer's parts; in four bits, a matrix has several tensors, by the end of their names."""
    attention, mlp = layer.self_attention, layer.mlp
    norms: dict[Part, Any] = {
        "norm_before_attention": layer.input_layernorm,
        "norm_before_feed_forward": layer.pre_mlp_layernorm,
    }
    if spec.shape.qk_norm:
        norms |= {"query_norm": attention.q_layernorm, "key_norm": attention.k_layernorm}
    if spec.shape.norms_after:
        norms |= {"norm_after_attention": attention.linear_proj.norm, "norm_after_feed_forward": mlp.linear_fc2.norm}
    for part, norm in norms.items():
        yield (part, ""), _whole(norm.weight)
    for linear in LINEAR_LAYERS:
        yield from _matrices(linear, linear.of(layer), spec, groups)


def _matrices(
    linear: LinearLayer, module: Any, spec: ModelSpec, groups: Groups
) -> Iterator[tuple[tuple[Part, str], Shard]]:
    for end, fused in stored_tensors(module):
        if linear is QUERIES_KEYS_VALUES:
            yield from (((part, end), shard) for part, shard in _qkv(fused, spec, groups))
        else:
            matrices = fused.detach().chunk(len(linear.matrices))  # GATES has two of equal rows
            for part, matrix in zip(linear.matrices, matrices, strict=True):
                yield (part, end), _split(matrix, linear.split_axis, groups)
    if isinstance(module, FourBitLinear):
        for part, scales in zip(linear.matrices, module.nested(), strict=True):
            yield (part, ".nested_absmax"), _whole(scales)


def _qkv(fused: Tensor, spec: ModelSpec, groups: Groups) -> Iterator[tuple[Part, Shard]]:
    """Yield queries, keys and values out of a fused weight or bias: [groups, rows of a group, ...] sliced by rows.

    With more tp ranks than key-value heads, several hold the same head.
    """
    shape, (tp, index) = spec.shape, (groups.strategy.tp, groups.coordinate.tp)
    queries = shape.num_attention_heads // max(shape.num_kv_heads, tp) * shape.head_dim
    grouped = fused.detach().view(-1, queries + 2 * shape.head_dim, *fused.shape[1:])
    views = torch.split(grouped, [queries, shape.head_dim, shape.head_dim], dim=1)
    first_heads = shape.num_attention_heads * index // tp, *(shape.num_kv_heads * index // tp,) * 2
    for part, view, first in zip(QUERIES_KEYS_VALUES.matrices, views, first_heads, strict=True):
        start, rows = first * shape.head_dim, view.shape[0] * view.shape[1]
        yield part, Shard(((start, start + rows), *((0, size) for size in fused.shape[1:])), view)


def _split(weight: Tensor, axis: int, groups: Groups) -> Shard:
    """Return the part of a weight that is split evenly over tp along `axis`."""
    start = groups.coordinate.tp * weight.shape[axis]
    held = (start, start + weight.shape[axis])
    region = tuple(held if a == axis else (0, size) for a, size in enumerate(weight.shape))
    return Shard(region, weight.detach())


def _whole(weight: Tensor) -> Shard:
    return Shard(tuple((0, size) for size in weight.shape), weight.detach())
