"""Holdings: the bytes that a model instance keeps on each device between calls, tensor by tensor as in its engine.

They include memory that a layout does not show: fused and padded buffers, vocabulary padding, vLLM's tables and, on
CPU, its packed copies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import lcm

from prefect_rlhf.placement.cost.paged_cache import whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.mesh import Backend, Device
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS, slot_rank
from prefect_rlhf.placement.layout.layout import padded_vocabulary
from prefect_rlhf.placement.layout.lending import unlike
from prefect_rlhf.placement.memory.alike import Spread, spread_by_replica
from prefect_rlhf.placement.models.engine_constants import (
    ADAM_BYTES,
    GRADIENT_BYTES,
    ITEM_BYTES,
    MAIN_WEIGHT_BYTES,
)
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.layer_adapter import GATES, QUERIES_KEYS_VALUES
from prefect_rlhf.placement.models.model import QUERY_BIASES, ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, parts
from prefect_rlhf.placement.plan import EngineKind, ModelInstance, OffloadPart

OPTIMIZER_PART = frozenset({"gradients", "optimizer"})
"""The bytes that `offload: optimizer` moves, and that the offload of weights leaves."""

_START = 64  # elements: Megatron aligns each weight in its flat buffer to this
_BUCKET = 128  # and the buffer's end to a multiple of this and of dp
_STEP_BYTES = 4  # Adam counts its steps for each weight
_NORMALIZER_BYTES = 4  # vLLM's factor of scaled embeddings
_SCALE_BYTES = 16  # vLLM's four scales of a layer's attention


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """`num_bytes` of a kind (`what`) that an instance keeps on a device.

    If other instances compute from them too, `base` says in words which weights they are.
    """

    device: Device
    instance: ModelInstance
    what: str
    num_bytes: int
    base: str = ""

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.base or self.what

    def moves_with(self, part: OffloadPart) -> bool:
        """Whether an offload of `part` removes these bytes from the device."""
        return moves_with(self.what, part)


def moves_with(what: str, part: OffloadPart) -> bool:
    """Whether an offload of `part` removes bytes of the kind `what` from the device."""
    return part == "all" or (part == "optimizer") == (what in OPTIMIZER_PART)


Kept = tuple[tuple[str, int], ...]
"""The bytes that an instance keeps on a device, by kind."""
Elsewhere = tuple[tuple[str, EngineKind], ...]
"""Frozen parts of a model that another instance holds, each with the engine of that instance."""


@lru_cache(maxsize=256)  # many of the plans that a question compares have the same
def kept_bytes(
    instance: ModelInstance,
    trained: bool,
    model: ModelSpec,
    max_length: int,
    backend: Backend,
    per_node: int,
    rows: tuple[int, ...],
    cache_bytes: int | None = None,
    elsewhere: Elsewhere = (),
) -> Spread[Kept]:
    """Count all bytes of an instance by kind of device; `max_length` is the longest row's tokens.

    `rows` are the most rows that each replica has at once. vLLM's cache takes `cache_bytes` of each device, or has room
    for these rows at maximum length. Nodes have `per_node` devices. Parts in `elsewhere` are held by another instance,
    except for tensors that differ between its engine and the holder's.
    """

    def of_cache(of_replica: int, stage: int) -> Kept:
        whole = whole_cache_bytes(of_replica, max_length, ModelSizes.of(model), instance.strategy.tp)
        kept = _vllm(model, instance.strategy, whole if cache_bytes is None else cache_bytes, backend)
        return tuple((what, size) for what, size in (*kept, main(stage)) if size)

    def of_stage(_: int, stage: int) -> Kept:
        kept = _megatron(model, instance, stage, trained, elsewhere)
        return tuple((what, size) for what, size in (*kept, main(stage)) if size)

    def main(stage: int) -> tuple[str, int]:
        sizes = ModelSizes.of(model).held_by(instance.engine)
        return "main weights", sizes.stage_main_bytes(instance.strategy, stage)

    if TRAITS[instance.engine].paged_cache:
        return spread_by_replica(instance, per_node, rows, of_cache)
    return spread_by_replica(instance, per_node, (0,) * instance.strategy.dp, of_stage)


@cache
def _megatron(
    model: ModelSpec, instance: ModelInstance, stage: int, trained: bool, elsewhere: Elsewhere
) -> tuple[tuple[str, int], ...]:
    """Weights; with training in flat buffers, whose padding counts, and optimizer states shared out over dp.

    An instance may compute from frozen parts that another instance holds. Experts have a buffer of their own, whose
    states those replicas share out that hold the same. With an adapter, its base has no buffer.
    """
    sizes, strategy = ModelSizes.of(model), instance.strategy
    tensors = list(_tensors(sizes, strategy.tp, padded_vocabulary(model, "megatron", strategy.tp), strategy.pp, stage))
    experts = list(_expert_tensors(sizes, strategy, stage))
    adapter = list(_adapter_tensors(sizes, strategy, stage))
    frozen = sum(_further_tensors(sizes, sizes.frozen, strategy, stage))
    if adapter or not trained:
        whole = sum(tensors) + sum(experts) + frozen + sum(adapter)
        there = sum(
            _elements_of(part, model, strategy, stage, whole) - _unlike_elements(part, model, strategy, holder)
            for part, holder in elsewhere
        )
        parts_elsewhere = [part for part, _ in elsewhere]
        own = 0 if "adapter" in parts_elsewhere else sum(adapter)
        saved = sizes.stage_layers(strategy.pp, stage) * sizes.four_bits_save(strategy.tp)
        saved = 0 if "trunk" in parts_elsewhere else saved
        if not trained:
            return ("weights", (whole - there - own) * sizes.item - saved), ("adapter", own * sizes.item)
        learning = [*adapter, *_further_tensors(sizes, sizes.further, strategy, stage)]
        learning += [sizes.hidden] if stage == strategy.pp - 1 and "scalar" in sizes.head else []
        base = (whole - there - sum(learning)) * sizes.item - saved
        return ("weights", base), *_in_buffer("adapter", learning, model, strategy.dp)
    ends = [_padded(size, _START) for size in tensors]
    buckets = [sum(ends)]
    if strategy.pp > 1 and sizes.tied and "lm" in sizes.head and stage in (0, strategy.pp - 1):
        table = ends[0 if stage == 0 else -1]  # an embedding tied over the pipeline has a bucket of its own
        after = ends[-2] if "scalar" in sizes.head and stage > 0 else 0  # and so have the tensors after it
        buckets = [sum(ends) - table - after, table, after]
    buffer = sum(_padded(size, lcm(strategy.dp, _BUCKET)) for size in buckets)
    replicas = strategy.dp // strategy.ep
    of_experts = _padded(sum(_padded(size, _START) for size in experts), lcm(replicas, _BUCKET))
    state = ADAM_BYTES + (MAIN_WEIGHT_BYTES if model.dtype != "float32" else 0)
    states = buffer * state // strategy.dp + of_experts * state // replicas
    return (
        ("weights", (buffer + of_experts + frozen) * sizes.item),
        ("gradients", (buffer + of_experts) * GRADIENT_BYTES),
        ("optimizer", states + _STEP_BYTES * (len(tensors) + len(experts))),
    )


def _in_buffer(name: str, tensors: Sequence[int], model: ModelSpec, dp: int) -> Kept:
    """The bytes of trained tensors in one flat buffer, which have a name, and of what training adds to them."""
    buffer = _padded(sum(_padded(size, _START) for size in tensors), lcm(dp, _BUCKET))
    state = ADAM_BYTES + (MAIN_WEIGHT_BYTES if model.dtype != "float32" else 0)
    return (
        (name, buffer * ITEM_BYTES[model.dtype]),
        ("gradients", buffer * GRADIENT_BYTES),
        ("optimizer", buffer * state // dp + _STEP_BYTES * len(tensors)),
    )


@cache
def _vllm(model: ModelSpec, strategy: Strategy, cache_bytes: int, backend: Backend) -> tuple[tuple[str, int], ...]:
    """Weights with rotary tables, slots of an adapter, the cache, and on CPU the copies that products are made from."""
    sizes, shape, tp = ModelSizes.of(model).held_by("vllm"), model.shape, strategy.tp
    vocabulary = padded_vocabulary(model, "vllm", tp)
    experts = sum(_expert_tensors(sizes, strategy, 0))
    tensors = sum(_tensors(sizes, tp, vocabulary, 1, 0)) + experts
    tensors += sum(_further_tensors(sizes, sizes.frozen, strategy, 0))
    bases = 1 if shape.window is None else 2
    tables = bases * shape.max_position_embeddings * shape.head_dim * sizes.item + _SCALE_BYTES * sizes.num_layers
    tables += _NORMALIZER_BYTES if FAMILIES[shape.family].scaled_embedding else 0
    linear = sizes.num_layers * sizes.on(tp).matrices // tp + experts + vocabulary // tp * sizes.hidden
    packed = linear * sizes.item if backend == "cpu" else 0
    adapter = sizes.num_layers * _slot_elements(sizes, tp) * sizes.item
    return (
        ("weights", tensors * sizes.item + tables),
        ("adapter", adapter),
        ("packed weights", packed),
        ("key-value cache", cache_bytes),
    )


def _slot_elements(sizes: ModelSizes, tp: int) -> int:
    """Elements of a layer's adapter slots: an A and a B for each matrix of a fused layer, if any is adapted."""
    adapter, on_device = sizes.adapter, sizes.on(tp)
    if adapter is None:
        return 0
    rows = {
        QUERIES_KEYS_VALUES: 3 * sizes.hidden + (on_device.queries + 2 * on_device.keys) // tp,
        ("o_proj",): sizes.queries // tp + sizes.hidden,
        GATES: 2 * sizes.hidden + 2 * sizes.inner // tp,
        ("down_proj",): sizes.inner // tp + sizes.hidden,
    }
    slot = slot_rank("vllm", adapter.rank) or adapter.rank  # a plan with a higher rank is refused
    return slot * sum(each for matrices, each in rows.items() if adapter.count(*matrices))


def _tensors(sizes: ModelSizes, tp: int, vocabulary: int, pp: int, stage: int) -> Iterator[int]:
    """Elements in each of a stage's tensors on a device; queries, keys and values are fused, and so are gate and up."""
    first, last, sizes = stage == 0, stage == pp - 1, sizes.on(tp)
    table = vocabulary // tp * sizes.hidden
    if first:
        yield table
    for _ in range(sizes.stage_layers(pp, stage)):
        yield from (sizes.hidden,) * (4 if sizes.norms_after else 2)
        yield from (sizes.head_dim,) * (2 if sizes.qk_norm else 0)
        yield from sizes.bias_tensors(tp)
        yield from ((sizes.queries + 2 * sizes.keys) * sizes.hidden // tp, sizes.queries * sizes.hidden // tp)
        if sizes.num_experts:
            yield sizes.router
        else:
            yield from (2 * sizes.inner * sizes.hidden // tp, sizes.inner * sizes.hidden // tp)
    yield from _further_tensors(sizes, sizes.further, Strategy(tp=tp, pp=pp), stage)
    if last:
        yield sizes.hidden
        if "scalar" in sizes.head:
            yield sizes.hidden
        if "lm" in sizes.head and not (sizes.tied and first):
            yield table


def _elements_of(part: str, model: ModelSpec, strategy: Strategy, stage: int, whole: int) -> int:
    """Count a frozen part's elements on a device of a stage, which holds `whole` elements of the model."""
    sizes, is_last = ModelSizes.of(model), stage == strategy.pp - 1
    if part == "adapter":
        return sum(_adapter_tensors(sizes, strategy, stage))
    if part == "trunk":  # all but the others
        others = (each for each in parts(model) if each != "trunk")
        return whole - sum(_elements_of(each, model, strategy, stage, whole) for each in others)
    if part == "scalar_head":
        return sizes.hidden if is_last else 0
    if part == "lm_head":
        return padded_vocabulary(model, "megatron", strategy.tp) // strategy.tp * sizes.hidden if is_last else 0
    return sum(_further_tensors(sizes, parts(model)[part], strategy, stage))


def _unlike_elements(part: str, model: ModelSpec, strategy: Strategy, holder: EngineKind) -> int:
    """Count a part's elements on a device that Megatron holds differently from its holder's engine, and so itself."""
    sizes, different = ModelSizes.of(model), unlike(model, "megatron", holder, strategy.tp)
    table = padded_vocabulary(model, "megatron", strategy.tp) // strategy.tp * sizes.hidden
    found = table if "vocabulary" in different else 0
    if part == "trunk" and "heads" in different:
        found += sizes.num_layers * _heads(sizes.on(strategy.tp), strategy.tp)
    return found


def _heads(sizes: ModelSizes, tp: int) -> int:
    """Elements of a layer's queries, keys and values on each of tp devices, with their biases."""
    biased = not set(QUERY_BIASES).isdisjoint(sizes.biases)
    return (sizes.queries + 2 * sizes.keys) * sizes.hidden // tp + (sizes.bias_tensors(tp)[0] if biased else 0)


def _further_tensors(sizes: ModelSizes, further: Iterable[Parameter], strategy: Strategy, stage: int) -> Iterator[int]:
    """Elements in the tensors of further parts that a stage has on a device; they are not fused."""
    for parameter in sizes.on_stage(further, strategy.pp, stage):
        yield parameter.elements_of(strategy.tp)


def _adapter_tensors(sizes: ModelSizes, strategy: Strategy, stage: int) -> Iterator[int]:
    """Elements in each adapter tensor that a stage has on a device."""
    if sizes.adapter is not None:
        for _ in range(sizes.stage_layers(strategy.pp, stage)):
            yield from sizes.adapter.on(strategy.tp).tensors


def _expert_tensors(sizes: ModelSizes, strategy: Strategy, stage: int) -> Iterator[int]:
    """Elements in each tensor of a stage's experts on a device: gate and up share a tensor, down has its own."""
    column = sizes.inner * sizes.hidden // strategy.tp
    for _ in range(sizes.stage_layers(strategy.pp, stage) * (sizes.num_experts // strategy.ep)):
        yield from (2 * column, column)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
