"""A model's sizes in closed form: a layer and the ends of the pipeline, whole and per device.

`state_bytes` adds up the training state that each device's rank copies for a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.layout import stages
from prefect_rlhf.placement.models.engine_constants import ADAM_BYTES, ITEM_BYTES, MAIN_WEIGHT_BYTES
from prefect_rlhf.placement.models.four_bits import BLOCK, nested_scales
from prefect_rlhf.placement.models.layer_adapter import LayerAdapter, LayerElements
from prefect_rlhf.placement.models.model import (
    NO_BIASES,
    QUERY_BIASES,
    BaseDtype,
    Dtype,
    FollowSpec,
    Head,
    ModelSpec,
    TransformerShape,
)
from prefect_rlhf.placement.models.weights import Parameter, further_parameters
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan, ModelInstance, device_coordinates, stored_instance


@hashed_once
@dataclass(frozen=True, slots=True)
class ModelSizes(HashedOnce):
    """The sizes that every cost formula needs, computed once. Counts are elements; `queries` and `keys` are widths."""

    hidden: int
    inner: int
    """With experts, the width of an expert."""
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    head: Head
    dtype: Dtype
    biases: tuple[str, ...] = NO_BIASES
    qk_norm: bool = False
    norms_after: bool = False
    window: int | None = None
    num_experts: int = 0
    """0 in a dense model."""
    experts_per_token: int = 0
    further: tuple[Parameter, ...] = ()
    """Parameters of parts other than the trunk, the heads and the adapter."""
    frozen: tuple[Parameter, ...] = ()
    """Others of them, which a train_step does not write."""
    adapter: LayerAdapter | None = None
    """With it, a train_step writes only the adapter, a scalar head and `further` parameters."""
    base_dtype: BaseDtype | None = None
    """The format of the layers' matrices, if it is another."""
    follows: FollowSpec | None = None
    """A model that follows another is written as if it were trained."""

    @classmethod
    def of(cls, model: ModelSpec) -> ModelSizes:
        """Return the sizes of a role's model."""
        sizes = cls.of_shape(model.shape, model.head, model.dtype)
        further, frozen = (further_parameters(model, learning) for learning in (True, False))
        if model.adapter is not None:
            sizes = replace(sizes, adapter=LayerAdapter.of(model))
        if model.base_dtype is not None:
            sizes = replace(sizes, base_dtype=model.base_dtype)
        if model.follows is not None:
            sizes = replace(sizes, follows=model.follows)
        return replace(sizes, further=further, frozen=frozen) if further or frozen else sizes

    @classmethod
    def of_shape(cls, shape: TransformerShape, head: Head = "lm", dtype: Dtype = "bfloat16") -> ModelSizes:
        """Return the sizes of a model shape with this `head`."""
        return cls(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_layers,
            shape.num_attention_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.vocab_size,
            shape.tied_embeddings,
            head,
            dtype,
            shape.biases,
            shape.qk_norm,
            shape.norms_after,
            None if shape.window is None else shape.window.tokens,
            *((shape.experts.count, shape.experts.per_token) if shape.experts else ()),
        )

    def held_by(self, engine: EngineKind) -> ModelSizes:
        """Return the sizes of the parts of the model that an engine holds; see `held_parts`."""
        left_out = "scalar_head" in TRAITS[engine].leaves_out
        return replace(self, head="lm") if left_out and self.head == "lm+scalar" else self

    def on(self, tp: int) -> ModelSizes:
        """Return the sizes per device if tp devices divide the tensors that tp splits.

        With more devices than key-value heads, each device has a copy of a head, as if the model had tp heads.
        """
        return self if tp <= self.kv_heads else replace(self, kv_heads=tp)

    @property
    def base(self) -> ModelSizes:
        """The sizes of the model alone, without its adapter, in its own format."""
        if self.adapter is None and self.follows is None and self.base_dtype is None:
            return self
        return replace(self, adapter=None, follows=None, base_dtype=None)

    @property
    def item(self) -> int:
        """Bytes per element in the compute format."""
        return ITEM_BYTES[self.dtype]

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Elements of a layer's matrices, without its experts."""
        return 2 * self.hidden * (self.queries + self.keys) + (0 if self.num_experts else self.feed_forward)

    @property
    def feed_forward(self) -> int:
        """Elements of the feed-forward layer, or of a single expert."""
        return 3 * self.hidden * self.inner

    @property
    def layer_experts(self) -> int:
        """Elements of all experts of a layer, which tp splits and ep shares out."""
        return self.num_experts * self.feed_forward

    @property
    def router(self) -> int:
        """Elements of a layer's router, which every device has."""
        return self.num_experts * self.hidden

    @property
    def layer_products(self) -> int:
        """Elements of a layer that tp splits and that each token is multiplied with."""
        return self.layer_matrices + self.experts_per_token * self.feed_forward

    def experts_touched(self, tokens: float) -> float:
        """Return how many of a layer's experts `tokens` tokens need on average, if all experts are equally likely.

        A token does not use a given expert with probability 1 - k / E.
        """
        if not self.num_experts:
            return 0.0
        left_out: float = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - left_out)

    @property
    def layer_matrices(self) -> int:
        """Elements of a layer's matrices and of biases on their rows; tp splits them, except experts' biases."""
        split = sum(rows for name, rows in self._rows.items() if name in self.biases) if self.biases else 0
        return self.matrices + split

    @property
    def layer_norms(self) -> int:
        """Elements that every tp rank holds: a layer's norms, its router, and biases on sums over tp ranks."""
        norms = (4 if self.norms_after else 2) * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return norms + self.router + self.hidden * len({"self_attn.o_proj", "mlp.down_proj"} & set(self.biases))

    def bias_tensors(self, tp: int) -> tuple[int, ...]:
        """Return the elements of a layer's biases on each of tp devices, fused like the matrices."""
        rows = {name: size // tp for name, size in self._rows.items()}
        rows |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), self.hidden)
        fused = (QUERY_BIASES, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
        sums = (sum(rows[name] for name in names if name in self.biases) for names in fused)
        return tuple(size for size in sums if size)

    @property
    def keys_and_values(self) -> int:
        """Elements of the key and value matrices, with their biases."""
        biases = sum(name in self.biases for name in QUERY_BIASES[1:])
        return self.keys * (2 * self.hidden + biases)

    @property
    def _rows(self) -> dict[str, int]:
        """The rows of the matrices whose rows tp splits."""
        widths = (self.queries, self.keys, self.keys, self.inner, self.inner)
        return dict(zip((*QUERY_BIASES, "mlp.gate_proj", "mlp.up_proj"), widths, strict=True))

    @property
    def table(self) -> int:
        """Elements of the embedding; the output matrix is equally large."""
        return self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """All elements of the model."""
        ends = self.table + self.hidden + (self.hidden if "scalar" in self.head else 0)
        output = self.table if "lm" in self.head and not self.tied else 0
        ends += sum(parameter.num_elements for parameter in (*self.further, *self.frozen))
        layer = self.layer_matrices + self.layer_experts + self.layer_norms + self.layer_adapter()
        return self.num_layers * layer + ends + output

    @property
    def num_trained(self) -> int:
        """All elements that the model's train_step writes."""
        if not self.adapter:
            return self.num_parameters - sum(parameter.num_elements for parameter in self.frozen)
        head = self.hidden if "scalar" in self.head else 0
        return self.num_layers * self.layer_adapter() + head + sum(each.num_elements for each in self.further)

    @property
    def moved_layer(self) -> LayerElements:
        """Elements of a layer outside its experts that a move brings, because a train_step writes them."""
        if self.adapter is None:
            return LayerElements(self.layer_matrices, self.keys_and_values, self.layer_norms)
        return self.adapter.layer_elements

    @property
    def moved_experts(self) -> int:
        """Elements of a layer's experts that a move brings."""
        return 0 if self.adapter else self.layer_experts

    def layer_adapter(self, tp: int = 1) -> int:
        """Elements of a layer's adapter on each of tp devices."""
        return 0 if self.adapter is None else self.adapter.on(tp).elements

    def stage_layers(self, pp: int, stage: int = 0) -> int:
        """Return the number of layers in a pipeline stage; see `stages`."""
        return len(stages(self.num_layers, pp)[stage])

    def stage_parameters(self, strategy: Strategy, stage: int) -> int:
        """Count the elements on a device of a pipeline stage.

        The first stage has the embedding; the last has the final norm and the head, which is a copy if the embedding is
        tied.
        """
        return _stage_parameters(self, strategy, stage)

    def four_bits_save(self, tp: int) -> int:
        """Return how many bytes a layer's matrices save on each of tp devices if they have four bits; 0 in the model's
        format.

        A number takes half a byte, and a block's scale a byte. Each device has the scales of a matrix's scales, in
        float32.
        """
        if self.base_dtype is None:
            return 0
        widths = (self.queries, self.queries, self.keys, self.keys, self.inner, self.inner, self.inner)
        nested = sum(nested_scales(width * self.hidden // BLOCK) for width in widths)
        elements = self.on(tp).matrices // tp
        return elements * self.item - elements // 2 - elements // BLOCK - 4 * nested

    def stage_bytes(self, strategy: Strategy, stage: int) -> int:
        """Return the bytes of the elements on a device of a pipeline stage."""
        saved = self.stage_layers(strategy.pp, stage) * self.four_bits_save(strategy.tp)
        return self.stage_parameters(strategy, stage) * self.item - saved

    def on_stage(self, parameters: Iterable[Parameter], pp: int, stage: int) -> Iterator[Parameter]:
        """Yield the further parameters of a pipeline stage; the last stage has all that belong to no layer."""
        layers = stages(self.num_layers, pp)[stage]
        for parameter in parameters:
            if stage == pp - 1 if parameter.layer is None else parameter.layer in layers:
                yield parameter

    def stage_trained(self, strategy: Strategy, stage: int) -> int:
        """Count the elements on a device of a pipeline stage that the model's train_step writes."""
        tp, pp = strategy.tp, strategy.pp
        if self.adapter:
            head = self.hidden if stage == pp - 1 and "scalar" in self.head else 0
            further = sum(parameter.elements_of(tp) for parameter in self.on_stage(self.further, pp, stage))
            return self.stage_layers(pp, stage) * self.layer_adapter(tp) + head + further
        parameters = self.stage_parameters(strategy, stage)
        if not self.frozen:
            return parameters
        return parameters - sum(parameter.elements_of(tp) for parameter in self.on_stage(self.frozen, pp, stage))

    def stage_trained_experts(self, strategy: Strategy, stage: int) -> int:
        """Count the elements of `stage_trained` that belong to experts: zero with an adapter, because the base is
        frozen.
        """
        return 0 if self.adapter else self.stage_experts(strategy, stage)

    def most_trained(self, strategy: Strategy) -> int:
        """Count the elements that a train_step writes per device, on the stage with most."""
        return max(self.stage_trained(strategy, stage) for stage in (0, strategy.pp - 1))

    def stage_main_bytes(self, strategy: Strategy, stage: int) -> int:
        """Return the bytes of a follower's float32 main weights on a device of a pipeline stage."""
        keeps = self.follows is not None and self.follows.has_main_weights(self.dtype)
        return self.stage_trained(strategy, stage) * MAIN_WEIGHT_BYTES if keeps else 0

    def largest_moved(self, tp: int) -> int:
        """Count the elements, on each of tp devices, of the largest weight that a move brings."""
        if self.adapter is not None:
            return self.adapter.on(tp).elements
        return max(-(-self.vocab // tp) * self.hidden, self.layer_matrices // tp, self.layer_experts // tp)

    def stage_experts(self, strategy: Strategy, stage: int) -> int:
        """Count the elements of experts on a device of a pipeline stage: of every ep-th expert, its tp-th part."""
        return self.stage_layers(strategy.pp, stage) * -(-self.layer_experts // (strategy.tp * strategy.ep))

    def fullest_stage(self, strategy: Strategy) -> int:
        """Return the stage that holds most per device: the first has the embedding, the last the head."""
        return max((0, strategy.pp - 1), key=lambda stage: self.stage_parameters(strategy, stage))

    def fullest_stage_parameters(self, strategy: Strategy) -> int:
        """Count the elements on a device of the fullest stage."""
        return self.stage_parameters(strategy, self.fullest_stage(strategy))

    def cache_bytes_per_token(self, tp: int) -> int:
        """Return the bytes of a token's keys and values per layer and device. A head is never split."""
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * self.item


def copied_bytes(graph: DataflowGraph, plan: ExecutionPlan) -> Counter[Device]:
    """Return, by device, the bytes that a checkpoint of all roles with a state copies: the peak in host memory.

    Weights that all tensor-parallel devices hold, such as norms, count on each device, although only one device writes
    them.
    """
    copied: Counter[Device] = Counter()
    for model in graph.models:
        instance = stored_instance(graph, plan, model.role)
        if instance is not None:
            copied.update(instance_copied_bytes(instance, ModelSizes.of(model)))
    return copied


def instance_copied_bytes(instance: ModelInstance, sizes: ModelSizes) -> dict[Device, int]:
    """Return, by device, the bytes that a trained instance's ranks copy: main weights and moments, shared by replicas.

    A follower's weights are copied from its first replica, and have no moments.
    """
    strategy, per_element = instance.strategy, MAIN_WEIGHT_BYTES + ADAM_BYTES
    if sizes.follows is not None:
        return {
            device: sizes.stage_trained(strategy, at.pp) * MAIN_WEIGHT_BYTES if at.dp < strategy.ep else 0
            for device, at in device_coordinates(instance)
        }

    @cache
    def elements(stage: int) -> int:
        experts = sizes.stage_trained_experts(strategy, stage)
        others = sizes.stage_trained(strategy, stage) - experts
        return -(-others // strategy.dp) + -(-experts * strategy.ep // strategy.dp)

    return {device: elements(at.pp) * per_element for device, at in device_coordinates(instance)}


@lru_cache(maxsize=4096)  # planning requests the same few hundred strategies for every number of micro-batches
def _stage_parameters(sizes: ModelSizes, strategy: Strategy, stage: int) -> int:
    first, last = stage == 0, stage == strategy.pp - 1
    layers = sizes.stage_layers(strategy.pp, stage)
    elements = layers * (-(-sizes.on(strategy.tp).layer_matrices // strategy.tp) + sizes.layer_norms)
    elements += sizes.stage_experts(strategy, stage) + layers * sizes.layer_adapter(strategy.tp)
    table = -(-sizes.vocab // strategy.tp) * sizes.hidden
    if first:
        elements += table
    if last:
        elements += sizes.hidden + (sizes.hidden if "scalar" in sizes.head else 0)
        if "lm" in sizes.head and not (sizes.tied and first):
            elements += table
    further = sizes.on_stage((*sizes.further, *sizes.frozen), strategy.pp, stage)
    return elements + sum(parameter.elements_of(strategy.tp) for parameter in further)
