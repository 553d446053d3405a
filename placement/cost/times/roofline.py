"""Layer times from a datasheet: a roofline of matrix products and memory traffic, with launches as a floor.

The time of a matrix product is its FLOPs over the peak or its weights over the memory bandwidth, the longer of the two
(Williams et al. 2009). Element-wise kernels take as long as their passes over memory, on CPU at a share of its
bandwidth. In forward and backward the host runs ahead of a GPU, so launches count only if the device would finish
sooner; on CPU they always count. A decoding step ends with a sampled token that the host waits for, and its kernels are
too short to hide launches, so there they add up.

An adapter adds two thin products to each of its matrices. The backward pass of its base forms no gradients of weights:
one product in place of two (Hu et al. 2021, section 4.2). A four-bit base is dequantised in every pass by torch's
kernels, which costs passes over memory and, in a decoding step, launches. Not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from prefect_rlhf.errors.errors import Missing
from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup, all_reduce_seconds, replicas_seconds
from prefect_rlhf.placement.cost.datasheets.hardware import FEW_ROWS, Hardware, Links
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import ModelCallKind
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.four_bits import AT_ONCE
from prefect_rlhf.placement.plan import EngineKind

LOGIT_PASSES = 4  # float32 logits: written, read for maximum and sum, read and written for the result
LOGIT_BYTES = 4
LAYER_LAUNCHES = 60  # kernels of an eager layer of Megatron's
MIXTURE_LAUNCHES = 2.5
"""Launches of a decoded layer of experts, relative to a dense layer: router, choice and sorting of tokens, two grouped
products. It follows from the public figures in docs/internals/cost_model.md."""
EXCHANGE_LAUNCHES = 10  # a batch of a send and a receive, what groups and awaits them, and Megatron's synchronisation
COPY_PASSES = 4  # over each copy of a token's hidden state that an expert gets: made and read, its result the same
ADAPTER_LAUNCHES = 3  # for each matrix of an adapter: products with A and B, and the sum with the result of the base
DECODED_ADAPTER_LAUNCHES = 2  # vLLM's kernel for B adds to the base's result
ADAPTER_PASSES = 2  # over the results of an adapted matrix: read, and written with what the adapter adds
DEQUANTIZED_BYTES = 12.5  # of a number in four bits: read, and its place in a table, a float32, each written and read
DEQUANTIZING_LAUNCHES, LAUNCHES_AT_ONCE = 60, 3  # of a layer's four weights, and of every part of these
ADAM_PASS_BYTES = 32  # per parameter: main weight, two moments, each read and written; gradient read for norm and step


@final
@hashed_once
@dataclass(frozen=True, slots=True)
class DatasheetTimes(HashedOnce):
    """Implements LayerTimes. `attended` is the share of all token pairs that attention computes: half, because it is
    causal.

    Arithmetic limits element-wise work on CPU (`is_host`), so there a float32 logit takes as long as an element of
    another format.
    """

    sizes: ModelSizes
    links: Links
    call_seconds: float
    flops: float  # reached FLOP/s
    passes: float
    graph_layer_seconds: float
    eager_layer_seconds: float
    is_host: bool = False
    elementwise_share: float = 1.0
    decoding_share: float = 1.0
    further_rows_share: float = 1.0
    attended: float = 0.5
    gradient_pass_bytes: float = 0.0
    makes_logits_again: bool = False
    host_step_seconds: float = 0.0
    host_row_seconds: float = 0.0
    taken_layer_seconds: float = 0.0
    attention: float = 1.0  # reached by long rows, relative to the FLOP/s of large products
    attention_half: float = 0.0

    @classmethod
    def of(cls, sizes: ModelSizes, hardware: Hardware, engine: EngineKind = "megatron") -> DatasheetTimes:
        """Return a model's times in an engine, by a datasheet.

        Raises InvalidInput for a measured kind, which has no datasheet.
        """
        device, reached, has_graphs = hardware.device, hardware.efficiency, TRAITS[engine].replays_graphs
        products = reached.matmul * device.product_share
        if device.measured:
            raise Missing("profile", f"a profile of {device.name}, which has no datasheet: run rlhf/profile")
        return cls(
            sizes,
            hardware.links(),
            reached.call_seconds,
            device.flops_per_second(sizes.dtype) * products,
            reached.graph_passes if has_graphs else reached.passes,
            reached.graph_layer_seconds,
            reached.eager_layer_seconds,
            device.is_host,
            device.elementwise_share,
            device.decoding_share,
            device.further_rows_share,
            gradient_pass_bytes=reached.gradient_pass_bytes,
            makes_logits_again=reached.makes_logits_again,
            host_step_seconds=reached.host_step_seconds if has_graphs else 0.0,
            host_row_seconds=reached.host_row_seconds if has_graphs else 0.0,
            taken_layer_seconds=reached.taken_layer_seconds,
            attention=reached.attention * device.attention_share / products or 1.0,
            attention_half=reached.attention_half,
        )

    def fixed(self, kind: ModelCallKind) -> float:
        """See LayerTimes. The same for every kind."""
        return self.call_seconds

    def forward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        return self._layer(rows, length, tp, split, ep, passes=1)

    def backward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """See LayerTimes. Twice the FLOPs and traffic of the forward (Narayanan et al. 2021, appendix)."""
        if self.sizes.adapter is not None:
            gradients: float = self.sizes.adapter.on(tp).elements
        else:
            gradients = (self.sizes.on(tp).layer_matrices + self.sizes.layer_experts / ep) / tp
        return self._layer(rows, length, tp, split, ep, passes=2) + self._added(gradients)

    def head_forward(self, tokens: float, tp: int) -> Seconds:
        """See LayerTimes. A scalar head costs almost no time."""
        return self._head(tokens, tp, passes=1)

    def head_backward(self, tokens: float, tp: int) -> Seconds:
        if "lm" not in self.sizes.head:
            return Seconds()
        product = self._head(tokens, tp, passes=1).compute
        again = product if self.makes_logits_again else 0.0
        if self.sizes.adapter is not None:  # a frozen table has no gradient
            return self._head(tokens, tp, passes=2) + Seconds(compute=again - product)
        return self._head(tokens, tp, passes=2) + Seconds(compute=again) + self._added(self.sizes.table / tp)

    def decode(self, rows: float, context: float, tp: int, cuda_graphs: bool, ep: int = 1) -> Seconds:
        """See LayerTimes. Weights and cache are read once per token: memory-bound (ReaL, section 8.4)."""
        sizes, bandwidth = self.sizes.on(tp), self.links.device
        weights = (sizes.layer_matrices / tp + self._experts_read(rows, tp, ep)) * sizes.item / bandwidth
        cache = rows * context * sizes.cache_bytes_per_token(tp) / bandwidth
        moved = self._moved_passes * rows * sizes.hidden * sizes.item / self.elementwise
        products = rows * 2 * (sizes.layer_products / tp + sizes.router) / self.flops * self._slower(rows)
        launches = self.graph_layer_seconds if cuda_graphs else self.eager_layer_seconds
        launches *= MIXTURE_LAUNCHES if sizes.num_experts else 1
        if sizes.adapter is not None:
            elements = sizes.adapter.on(tp).elements
            weights += elements * sizes.item / bandwidth
            products += rows * 2 * elements / self.flops * self._slower(rows)
            launches *= 1 + DECODED_ADAPTER_LAUNCHES * sizes.adapter.num_matrices / LAYER_LAUNCHES
        if sizes.base_dtype is not None:
            moved += self._dequantized(tp)
            parts = sizes.matrices / tp / AT_ONCE
            launches += self.eager_layer_seconds * (DEQUANTIZING_LAUNCHES + LAUNCHES_AT_ONCE * parts) / LAYER_LAUNCHES
        return Seconds(compute=max(0.0, products - weights), memory_traffic=weights + cache + moved, launch=launches)

    def sample(self, rows: float, tp: int) -> Seconds:
        weights = self.sizes.table / tp * self.sizes.item / self.links.device
        head = self._head(rows, tp, passes=1)
        return Seconds(head.compute * self._slower(rows), max(weights, head.memory_traffic))

    def exchange(self) -> float:
        """See LayerTimes: EXCHANGE_LAUNCHES kernel launches; a stage continues when its device reports the end."""
        return self.eager_layer_seconds * EXCHANGE_LAUNCHES / LAYER_LAUNCHES

    def adam(self, num_parameters: float) -> float:
        return num_parameters * ADAM_PASS_BYTES / self.links.device

    def written(self, num_parameters: float) -> float:
        return 0.0

    def packed(self, num_parameters: float) -> float:
        return 0.0

    def taken(self, num_layers: int) -> float:
        return num_layers * self.taken_layer_seconds

    def host_step(self, rows: float) -> float:
        return self.host_step_seconds + rows * self.host_row_seconds

    def all_reduce(self, num_bytes: float, group: CollectiveGroup) -> float:
        return all_reduce_seconds(num_bytes, group, self.links)

    def share(self, num_parameters: float, group: CollectiveGroup) -> float:
        return replicas_seconds(num_parameters, self.sizes.item, group, self.links)

    @property
    def elementwise(self) -> float:
        """Return the bytes per second of element-wise work."""
        return self.links.device * self.elementwise_share

    def _slower(self, rows: float) -> float:
        """Return how much longer products of a decoding step take than as a part of large products."""
        if rows <= FEW_ROWS:
            return 1 / self.decoding_share
        return (FEW_ROWS / self.decoding_share + (rows - FEW_ROWS) / self.further_rows_share) / rows

    @property
    def _moved_passes(self) -> float:
        """Passes over [tokens, hidden] outside of products, including the copies for experts."""
        return self.passes + COPY_PASSES * self.sizes.experts_per_token

    def _experts_read(self, tokens: float, tp: int, ep: int) -> float:
        """Elements of the router and of the experts on a device that `tokens` tokens of each of ep replicas need."""
        return self.sizes.experts_touched(tokens * ep) / ep * self.sizes.feed_forward / tp + self.sizes.router

    def _layer(self, rows: float, length: float, tp: int, split: int, ep: int, passes: int) -> Seconds:
        sizes, tokens = self.sizes.on(tp), rows * length
        pairs = 4 * self.attended * sizes.queries * (length + self.attention_half) / self.attention
        flops = tokens * (2 * sizes.layer_products + pairs) / tp
        compute = passes * (flops + tokens * 2 * sizes.router) / self.flops
        read = passes * sizes.layer_matrices / tp + passes * self._experts_read(tokens, tp, ep)
        weights = read * sizes.item / self.links.device
        moved = passes * self._moved_passes * tokens * sizes.hidden * sizes.item / split / self.elementwise
        launches = passes * self.eager_layer_seconds
        if sizes.adapter is not None:
            own, frozen = sizes.adapter.on(tp), (passes - 1) * sizes.layer_products / tp  # no gradients of weights
            compute += tokens * 2 * (passes * own.elements - frozen) / self.flops
            moved += passes * ADAPTER_PASSES * tokens * own.outputs * sizes.item / self.elementwise
            launches *= 1 + ADAPTER_LAUNCHES * sizes.adapter.num_matrices / LAYER_LAUNCHES
        moved += self._dequantized(tp)  # once, also in a backward pass
        traffic = moved + max(0.0, weights - compute)
        hidden = 0.0 if self.is_host else compute + traffic
        return Seconds(compute, traffic, max(0.0, launches - hidden))

    def _dequantized(self, tp: int) -> float:
        """Return how long it takes to dequantise a layer's matrices before they are read, in seconds."""
        if self.sizes.base_dtype is None:
            return 0.0
        return self.sizes.on(tp).matrices / tp * (DEQUANTIZED_BYTES + self.sizes.item) / self.links.device

    def _head(self, tokens: float, tp: int, passes: int) -> Seconds:
        if "lm" not in self.sizes.head:
            return Seconds()
        flops = 2 * tokens * self.sizes.table / tp
        logit_bytes = self.sizes.item if self.is_host else LOGIT_BYTES
        logits = LOGIT_PASSES * logit_bytes * tokens * self.sizes.vocab / tp
        return Seconds(passes * flops / self.flops, passes * logits / self.elementwise)

    def _added(self, gradients: float) -> Seconds:
        """Add the gradients of a micro-batch to their sums."""
        return Seconds(memory_traffic=gradients * self.gradient_pass_bytes / self.links.device)
