"""Weights of a vLLM model under their Hugging Face names."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.vllm.adapter import SLOTS
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.adapter import AdapterSpec

MADE_OF_NO_WEIGHTS = frozenset(
    (
        "cos_sin_cache",  # of positions
        "cos_sin_cache_bf16",
        "normalizer",  # Gemma's embedding scale, the root of the hidden size
        "_q_scale",  # scales of attention are 1: no weight is quantised
        "_k_scale",
        "_v_scale",
        "_k_scale_cpu",
        "_v_scale_cpu",
        "_prob_scale",
        "kv_cache",  # emptied before each call
    )
)
"""The tensors, besides parameters, that vLLM keeps in modules without parameters for the families that run."""


def shards(model: Any, adapter: AdapterSpec | None = None) -> dict[str, Shard]:
    """Return every weight of a dense vLLM model as regions of its Hugging Face parameters.

    The views are slices of vLLM's storage, so a write to them changes the model. A tied lm_head is no parameter. An
    adapter's are the rows of its rank in the slot.
    """
    by_name: dict[str, Shard] = {}
    for name, module in model.named_modules():
        if name == "lm_head" and module.weight is model.model.embed_tokens.weight:
            continue
        if isinstance(module, BaseLayerWithLoRA):
            assert adapter is not None  # otherwise vLLM makes no such layers
            by_name.update(_adapter_shards(name, module, adapter))
        by_name.update(_shards_of(name.removesuffix(".base_layer"), module))
    if name := unwritten(model, by_name):
        raise InvalidInput("model", name, "the parameters of a family that runs")
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


def _adapter_shards(name: str, module: Any, adapter: AdapterSpec) -> Iterator[tuple[str, Shard]]:
    """Yield A [rank, inputs] and B [outputs, rank] of each adapted matrix of a layer, which may fuse several.

    Of a matrix that tp splits by inputs a rank has its columns of A, and all of B. Otherwise it has all of A, and the
    rows of B that belong to its outputs.
    """
    base, rank = module.base_layer, adapter.rank
    by_inputs = isinstance(base, RowParallelLinear)
    outputs = {own.removesuffix(".weight"): shard for own, shard in _shards_of(name, base) if own.endswith(".weight")}
    for (matrix, shard), a, b in zip(outputs.items(), module.lora_a_stacked, module.lora_b_stacked, strict=True):
        if matrix.rpartition(".")[2] in adapter.matrices:
            rows, columns = shard.region
            inputs = columns if by_inputs else (0, a.shape[-1])
            yield f"{matrix}.lora_A.weight", Shard(((0, rank), inputs), a[0, 0, :rank])
            yield f"{matrix}.lora_B.weight", Shard((rows, (0, rank)), b[0, 0, :, :rank])


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


def unwritten(model: nn.Module, written: Mapping[str, Shard]) -> str | None:
    """Return the name of a parameter that has memory of its own, which no write to the shards reaches, or None."""
    storages = _storages(written)
    for name, module in model.named_modules():
        for of_module, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage()._cdata not in storages:
                return f"{name}.{of_module}"
    return None


def kept_beside(model: nn.Module, written: Mapping[str, Shard]) -> str | None:
    """Return the name of a tensor that is kept next to parameters and may be made of them, or None.

    It may be packed, converted or cached. Copies inside of functions are not seen: `cpu.kernels` makes these anew. A
    slot of an adapter has only zeros beside its shards.
    """
    storages = _storages(written)
    for name, module in model.named_modules():
        for kept in _kept_tensors(module):
            if isinstance(module, BaseLayerWithLoRA) and kept in SLOTS:
                slots = (slot for slot in getattr(module, kept) if slot.untyped_storage()._cdata not in storages)
                if not any(bool(slot.any()) for slot in slots):
                    continue
            if module._parameters or kept not in MADE_OF_NO_WEIGHTS:
                return f"{name}.{kept}"
    return None


def _storages(written: Mapping[str, Shard]) -> set[int]:
    return {shard.view.untyped_storage()._cdata for shard in written.values()}


def _kept_tensors(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's tensors that are no parameters, also of its attention and its method."""
    yield from (name for name, buffer in module._buffers.items() if buffer is not None)
    for owner in (module, *(vars(module)[name] for name in ("impl", "quant_method") if name in vars(module))):
        yield from (name for name, value in vars(owner).items() if _is_made_of_tensors(value))


def _is_made_of_tensors(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor)
