"""Weights of a vLLM model under their Hugging Face names."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.errors.errors import InvalidInput


def shards(model: Any) -> dict[str, Shard]:
    """Return every weight of a dense vLLM model as regions of its Hugging Face parameters.

    The views are slices of vLLM's storage, so a write to them changes the model. A tied lm_head is no parameter.
    """
    by_name: dict[str, Shard] = {}
    for name, module in model.named_modules():
        if name == "lm_head" and module.weight is model.model.embed_tokens.weight:
            continue
        by_name.update(_shards_of(name, module))
    _check_complete(model, by_name)
    return by_name


def _shards_of(name: str, module: nn.Module) -> Iterator[tuple[str, Shard]]:
    if isinstance(module, QKVParallelLinear):
        yield from _qkv(name.removesuffix("qkv_proj"), module)
    elif isinstance(module, MergedColumnParallelLinear):
        yield from _gate_up(name.removesuffix("gate_up_proj"), module)
    elif isinstance(module, RowParallelLinear):
        rows, columns = module.weight.shape
        start = module.tp_rank * columns
        yield f"{name}.weight", Shard(((0, rows), (start, start + columns)), module.weight.data)
    elif isinstance(module, VocabParallelEmbedding):  # also a ParallelLMHead
        start, stop = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        yield f"{name}.weight", _rows(start, module.weight.data[: stop - start])
    elif isinstance(module, RMSNorm | GemmaRMSNorm):
        yield f"{name}.weight", _rows(0, module.weight.data)


def _qkv(prefix: str, module: QKVParallelLinear) -> Iterator[tuple[str, Shard]]:
    """Yield the rows of a rank: its query, key and value heads (shared with neighbours if tp > kv heads)."""
    queries = module.num_heads * module.head_size
    keys = module.num_kv_heads * module.head_size
    kv_start = module.tp_rank // module.num_kv_head_replicas * keys
    starts = module.tp_rank * queries, kv_start, kv_start
    for kind, fused in (("weight", module.weight), ("bias", module.bias)):
        parts = () if fused is None else fused.data.split([queries, keys, keys])
        for name, start, part in zip("qkv", starts, parts, strict=False):  # no parts without a bias
            yield f"{prefix}{name}_proj.{kind}", _rows(start, part)


def _gate_up(prefix: str, module: MergedColumnParallelLinear) -> Iterator[tuple[str, Shard]]:
    """Yield the rows of a rank: its part of gate, its part of up."""
    for name, part in zip(("gate_proj", "up_proj"), module.weight.data.chunk(2), strict=True):
        yield f"{prefix}{name}.weight", _rows(module.tp_rank * len(part), part)


def _rows(start: int, part: Tensor) -> Shard:
    """Make a shard split along axis 0 only."""
    return Shard(((start, start + len(part)), *((0, size) for size in part.shape[1:])), part)


def _check_complete(model: nn.Module, by_name: dict[str, Shard]) -> None:
    """Raise InvalidInput for a parameter that no shard views: it would never be updated."""
    viewed = {shard.view.untyped_storage().data_ptr() for shard in by_name.values()}
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage().data_ptr() not in viewed:
            raise InvalidInput("model", name, "the parameters of a family that runs")
