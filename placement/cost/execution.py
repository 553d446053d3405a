"""Everything in a call's execution that decides its time and memory: strategy, nodes, cuts, recomputation."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup
from prefect_rlhf.placement.cost.datasheets.hardware import LinkSpan
from prefect_rlhf.placement.cost.times.layer_times import LayerTimes
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.engine_constants import GRADIENT_BYTES
from prefect_rlhf.placement.plan import EngineKind, Placement, Recompute
from prefect_rlhf.placement.words.table import stated

Tokens = TypeVar("Tokens", int, float)


@hashed_once
@dataclass(frozen=True, slots=True)
class Execution(HashedOnce):
    """How our engines run a call on a mesh of `num_nodes` x `devices_per_node` devices.

    To estimate another system, derive from it and override whatever that system does differently.

    `recompute` is the number of layers of each stage that keep only their input in training, and run forward again.
    With `tokens_over_tp`, tp divides the tokens of a train_step between products. `cache_bytes` is the size of a paged
    key-value cache on each device, which rows in flight fill (None: room for all rows). `engine` names the engine that
    a profile has measured. `registered` are a placement's words that other packages registered, for formulas that read
    them.
    """

    gradient_bytes: ClassVar[int] = GRADIENT_BYTES
    """Bytes of an element while gradients are summed."""
    row_step_seconds: ClassVar[float] = 0.0
    """Seconds that the host of a replica spends on each row at each decoding step, while the devices wait."""

    strategy: Strategy
    num_nodes: int = 1
    devices_per_node: int = 1
    micro_batches: int = 1
    recompute: Recompute = 0
    tokens_over_tp: bool = False
    cache_bytes: int | None = None
    engine: EngineKind = "megatron"
    registered: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> Self:
        """Return the execution that a plan's placement states."""
        effects: dict[str, Any] = {}
        for word in stated(placement):
            effects |= word.effect(placement)
        return cls(
            placement.strategy,
            placement.mesh.num_nodes,
            placement.mesh.devices_per_node,
            engine=placement.engine,
            registered=placement.registered,
            **effects,
        )

    def pieces(self, items: float, train: bool) -> tuple[int, int]:
        """Return the number of consecutive portions, and of micro-batches in each that fill the pipeline, for `items`
        items.

        >>> Execution(Strategy(pp=4), micro_batches=8).pieces(64, train=True)
        (1, 8)
        """
        return 1, at_most(self.micro_batches, items)

    @property
    def replays_graphs(self) -> bool:
        """Whether a decoding step replays CUDA graphs: vLLM's does; our Megatron engine launches every kernel."""
        return TRAITS[self.engine].replays_graphs

    @property
    def sequence_split(self) -> int:
        """Into how many parts [tokens, hidden] is split outside of matrix products."""
        return self.strategy.tp if self.tokens_over_tp else 1

    @property
    def boundary_split(self) -> int:
        """Into how many parts a stage's devices split [tokens, hidden] when they send it to the next stage."""
        return self.sequence_split

    @property
    def copies_split(self) -> int:
        """How many devices share a token's copies for experts: tp with vLLM; with Megatron each device sends all."""
        return self.strategy.tp if TRAITS[self.engine].experts_over_tp else 1

    def head_tokens(self, prompt: Tokens, response: Tokens) -> Tokens:
        """Return how many of a row's tokens reach the head, given the tokens of its prompt and its response."""
        return response

    def logit_bytes(self, logits: int, at_once: int, item_bytes: int) -> int:
        """Return the bytes of a forward pass's logits: `at_once` at a time in float32, and as many more.

        The second half is for their softmax, or for the previous slice while the next is computed in the compute
        format.
        """
        several = logits > at_once and item_bytes < 4
        return min(logits, at_once) * (2 * 4 + (item_bytes if several else 0))

    def replicas_seconds(self, num_parameters: int, times: LayerTimes) -> float:
        """Return the seconds to sum gradients, each replica a share, and to give every replica the new weights."""
        return times.share(num_parameters, self.dp_group())

    def tp_group(self) -> CollectiveGroup:
        return self._group(self.strategy.tp, self.strategy.stride("tp"))

    def dp_group(self) -> CollectiveGroup:
        return self._group(self.strategy.dp, self.strategy.stride("dp"))

    def ep_group(self) -> CollectiveGroup:
        """Return the devices of a stage that divide its experts: replicas' equal tp parts, with vLLM all devices."""
        if TRAITS[self.engine].experts_over_tp:
            return self._group(self.strategy.dp * self.strategy.tp, 1)
        return self._group(self.strategy.ep, self.strategy.stride("dp"))

    def same_experts_group(self) -> CollectiveGroup:
        """Return the replicas of a stage that hold the same experts."""
        return self._group(self.strategy.dp // self.strategy.ep, self.strategy.stride("dp") * self.strategy.ep)

    def pp_span(self) -> LinkSpan:
        """Return the link between neighbouring stages."""
        return "node" if self.strategy.num_devices <= self.devices_per_node else "network"

    def _group(self, size: int, stride: int) -> CollectiveGroup:
        if size * stride <= self.devices_per_node or self.num_nodes == 1:
            return CollectiveGroup(size, "node", size)
        return CollectiveGroup(size, "network", max(1, self.devices_per_node // stride))


def at_most(count: int, items: float) -> int:
    """Return the number of pieces: `count`, or the number of items if that is smaller."""
    return max(1, min(count, int(items)))
