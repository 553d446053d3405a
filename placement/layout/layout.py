"""Which hyper-rectangle of each global tensor each device of a model instance holds.

Names, shapes and regions are those of the Hugging Face checkpoint, whatever the engine fuses or interleaves; so
resharding, checkpoints and weight fingerprints know neither Megatron nor vLLM. An instance in host memory keeps its
device layout, and a sharded checkpoint keeps the layout of the instance that wrote it. Both keep that instance's
regions rank by rank, so they need no layout of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.layout.experts import experts_held, wrong_ep
from prefect_rlhf.placement.layout.regions import Region
from prefect_rlhf.placement.models.families.family import axis_length
from prefect_rlhf.placement.models.four_bits import BLOCK, cuts_a_block
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, adapted_weights, matrix_name, parts
from prefect_rlhf.placement.plan import EngineKind, ModelInstance


@dataclass(frozen=True)
class Layout:
    """The global shape of each parameter, and the region of it that each rank holds (absent: no region).

    A layout derived from `made_of` is pickled as `made_of`: otherwise a command to 128 ranks carries megabytes of
    regions.
    """

    shapes: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, Mapping[int, Region]]
    made_of: tuple[ModelSpec, EngineKind, Strategy, tuple[int, ...], tuple[str, ...]] | None = field(
        default=None, compare=False, repr=False
    )

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[Any, ...]]:
        return (Layout, (self.shapes, self.regions)) if self.made_of is None else (engine_layout, self.made_of)

    def of_rank(self, rank: int) -> dict[str, Region]:
        """Return the regions that a rank holds, by parameter."""
        return {name: regions[rank] for name, regions in self.regions.items() if rank in regions}

    def only(self, names: Collection[str]) -> Layout:
        """Return the layout of these parameters only."""
        regions = {name: regions for name, regions in self.regions.items() if name in names}
        return Layout({name: self.shapes[name] for name in regions}, regions)

    @cached_property
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        """Ranks with the same region of every parameter, in ascending order, by the first of them."""
        held: dict[int, list[tuple[str, Region]]] = {}
        for name, regions in self.regions.items():
            for rank, region in regions.items():
                held.setdefault(rank, []).append((name, region))
        copies: dict[tuple[tuple[str, Region], ...], list[int]] = {}
        for rank in sorted(held):
            copies.setdefault(tuple(held[rank]), []).append(rank)
        return {ranks[0]: tuple(ranks) for ranks in copies.values()}

    @cached_property
    def regions_without_copies(self) -> Mapping[str, Mapping[int, Region]]:
        """The `regions` of only the first rank of each group of `copies`."""
        return {
            name: {rank: region for rank, region in regions.items() if rank in self.copies}
            for name, regions in self.regions.items()
        }


def layout_of(
    instance: ModelInstance, model: ModelSpec, lease: DeviceMesh, only: tuple[str, ...] | None = None
) -> Layout:
    """Return an instance's layout or, with `only`, the layout of some parts of the model.

    A rank is the position of its device in `lease.devices()`.
    """
    position = {device: rank for rank, device in enumerate(lease.devices())}
    ranks = tuple(position[device] for device in instance.devices)
    held = held_parts(model, instance.engine) if only is None else only
    return engine_layout(model, instance.engine, instance.strategy, ranks, held)


def held_parts(model: ModelSpec, engine: EngineKind) -> tuple[str, ...]:
    """Return the parts of a model that an engine holds. For example, vLLM has no scalar head, because it only
    generates.
    """
    left_out = TRAITS[engine].leaves_out if "lm" in model.head else ()
    return tuple(part for part in parts(model) if part not in left_out)


@cache
def stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Divide layers over pipeline stages as evenly as possible; earlier stages get the extra layers.

    The last stage also has the output, which costs about as much as a layer or two, so it gets fewer layers. Layouts,
    engines and cost estimates follow this rule.

    >>> [len(layers) for layers in stages(30, 4)]
    [8, 8, 7, 7]
    """
    size, extra = divmod(num_layers, pp)
    starts = [stage * size + min(stage, extra) for stage in range(pp + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))


def wrong_tp(model: ModelSpec, engine: EngineKind, tp: int) -> str:
    """Return in words what tp should be instead; empty if tp can split the model.

    tp must divide everything that is split. It may exceed the number of key-value heads if it is a multiple of it:
    several ranks then hold copies of a head, as in Megatron and vLLM.
    """
    shape = model.shape
    columns = "columns of an expert" if shape.experts else "columns of the feed-forward layer"
    counts = {"attention heads": shape.num_attention_heads, columns: shape.intermediate_size}
    if TRAITS[engine].vocabulary_multiple is not None:  # pads without asking for tp
        counts["tokens of the padded vocabulary"] = padded_vocabulary(model, engine, 1)
    for what, count in counts.items():
        if count % tp:
            return f"a divisor of the {count} {what}"
    if not splits_key_value_heads(shape.num_kv_heads, tp):
        return f"a divisor or a multiple of the {shape.num_kv_heads} key-value heads"
    return wrong_blocks(model, tp)


def wrong_blocks(model: ModelSpec, tp: int) -> str:
    """Say which tp values cut no block of a four-bit matrix; empty if this tp cuts none."""
    needed = blocks_to_keep(model, tp)
    return needed and f"a tp with {needed}"


def blocks_to_keep(model: ModelSpec, tp: int) -> str:
    """Say which blocks of a four-bit matrix this tp would cut, which is not allowed; empty if it cuts none."""
    for weight in adapted_weights(model.shape) if model.base_dtype is not None else ():
        columns = axis_length(weight.axes[1], model.shape)
        if cuts_a_block(columns, tp if weight.split_axis == 1 else 1):
            return f"whole blocks of {BLOCK} of the {columns} columns of {matrix_name(weight)}"
    return ""


def splits_key_value_heads(num_kv_heads: int, tp: int) -> bool:
    """Whether tp ranks can divide the key-value heads, or hold copies of them in equal numbers.

    >>> [tp for tp in range(1, 13) if splits_key_value_heads(4, tp)]
    [1, 2, 4, 8, 12]
    """
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


def padded_vocabulary(model: ModelSpec, engine: EngineKind, tp: int) -> int:
    """Return the rows of the engine's embedding over all tp ranks; rows past the vocabulary are empty."""
    multiple = TRAITS[engine].vocabulary_multiple or tp
    return -(-model.shape.vocab_size // multiple) * multiple


def vocabulary_rows(model: ModelSpec, engine: EngineKind, tp: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of the vocabulary rows on tp rank `index`; empty if they are all padding.

    >>> from prefect_rlhf.placement.models.model import TransformerShape
    >>> model = ModelSpec("actor", "", "lm", TransformerShape(8, 8, 1, 4, 4, 2, 5, 9, 1e4, 1e-5, True))
    >>> [vocabulary_rows(model, "megatron", 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return _part(index, padded_vocabulary(model, engine, tp) // tp, model.shape.vocab_size)


@lru_cache(maxsize=32)  # a rank is told the same few with every move of weights
def engine_layout(
    model: ModelSpec,
    engine: EngineKind,
    strategy: Strategy,
    ranks: tuple[int, ...],
    only: tuple[str, ...] | None = None,
) -> Layout:
    """Split heads, feed-forward columns and vocabulary over tp, and layers over pp (see `stages`).

    The layout has all parts of the model that the engine holds, or `only` some. `ranks` are in the order of
    coordinates. With more tp ranks than key-value heads, neighbours hold copies of a head. For experts see
    `experts_held`. The vocabulary is padded before tp splits it, so the last ranks may hold less of it. The first stage
    has the embedding, the last the final norm and the output; with tied embeddings and a language-model head the last
    stage has a copy of the embedding too. Raises InvalidInput for degrees that do not suit the model or the engine.
    """
    if right := wrong_tp(model, engine, strategy.tp):
        raise InvalidInput("tp", strategy.tp, right)
    if right := wrong_ep(model, engine, strategy):
        raise InvalidInput("ep", strategy.ep, right)
    if not TRAITS[engine].pipelines and strategy.pp != 1:
        raise InvalidInput("pp", strategy.pp, f"1: {engine} runs no pipeline here")
    if strategy.pp > model.shape.num_layers:
        raise InvalidInput("pp", strategy.pp, f"at most {model.shape.num_layers}, the layers of {model.role}")
    coordinates = dict(zip(ranks, strategy.coordinates(), strict=True))
    vocabulary = padded_vocabulary(model, engine, strategy.tp)
    shapes: dict[str, tuple[int, ...]] = {}
    regions: dict[str, dict[int, Region]] = {}
    held = held_parts(model, engine) if only is None else only
    for parameter in (parameter for part in held for parameter in parts(model)[part]):
        shapes[parameter.name] = parameter.shape
        by_rank = {
            rank: _region(parameter, at, engine, strategy, vocabulary)
            for rank, at in coordinates.items()
            if _on_stage(parameter, at, strategy, model)
        }
        regions[parameter.name] = {
            rank: region for rank, region in by_rank.items() if all(start < stop for start, stop in region)
        }
    return Layout(shapes, regions, (model, engine, strategy, ranks, held))


def _region(parameter: Parameter, at: Coordinate, engine: EngineKind, strategy: Strategy, padded_vocab: int) -> Region:
    """Return the region of the rank at a coordinate; empty if all of it is padding."""
    region, index, tp = [(0, size) for size in parameter.shape], at.tp, strategy.tp
    if parameter.over_experts:
        (share, shares), (index, tp) = experts_held(engine, strategy, at)
        region[0] = _part(share, parameter.shape[0] // shares, parameter.shape[0])
    if parameter.split_axis is not None:
        size = parameter.shape[parameter.split_axis]
        parts = min(tp, parameter.most_parts or tp)
        part = (padded_vocab if parameter.over_vocabulary else size) // parts
        region[parameter.split_axis] = _part(index * parts // tp, part, size)
    return tuple(region)


def _part(index: int, part: int, size: int) -> tuple[int, int]:
    """Return (start, stop) of the index-th of equal parts, cut off at the real size."""
    return min(size, index * part), min(size, (index + 1) * part)


def _on_stage(parameter: Parameter, at: Coordinate, strategy: Strategy, model: ModelSpec) -> bool:
    last = strategy.pp - 1
    if parameter.layer is not None:
        return parameter.layer in stages(model.shape.num_layers, strategy.pp)[at.pp]
    if parameter.name == "model.embed_tokens.weight":
        return at.pp == 0 or (at.pp == last and "lm" in model.head and model.shape.tied_embeddings)
    return at.pp == last
