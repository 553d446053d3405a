"""The traits of each engine: what it serves, holds and splits. Code asks for a trait, never for an engine's name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prefect_rlhf.placement.graph import CallKind
from prefect_rlhf.placement.plan import EngineKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Differences between engines that plans, layouts, costs and memory depend on.

    The default of each trait is the simplest engine: it holds weights and has no special ability.
    """

    serves: tuple[CallKind, ...]
    """The kinds of call that it runs."""
    holds_weights: bool = True
    """Whether its calls have a model; computations have no model and run on the host CPU."""
    micro_batches: bool = False
    """Whether a call runs in the micro-batches of its placement."""
    pipelines: bool = False
    """Whether a model may be split over pp."""
    paged_cache: bool = False
    """Whether it allocates a key-value cache of a fixed size when it is built, which limits the rows in flight."""
    sleeps_on_cuda: bool = False
    """Whether an offload on cuda unmaps its memory: the devices compute nothing meanwhile, and each process can offload
    a single instance."""
    replays_graphs: bool = False
    """Whether a decoding step on cuda replays captured CUDA graphs, which hold memory."""
    packs_weights: bool = False
    """Whether it packs weights into another format for its products after each move of weights."""
    drops_scalar_head: bool = False
    """Whether it leaves out the scalar head of a language model."""
    vocabulary_multiple: int | None = None
    """The vocabulary is padded to a multiple of this before tp splits it; None: to a multiple of tp."""
    experts_over_tp: bool = False
    """Whether expert parallelism divides whole experts over all dp * tp devices. Otherwise ep divides them over
    replicas, and tp splits each expert."""


TRAITS: Mapping[EngineKind, EngineTraits] = MappingProxyType(
    {
        "vllm": EngineTraits(
            serves=("generate",),
            paged_cache=True,
            sleeps_on_cuda=True,
            replays_graphs=True,
            packs_weights=True,
            drops_scalar_head=True,
            vocabulary_multiple=64,
            experts_over_tp=True,
        ),
        "megatron": EngineTraits(serves=("generate", "inference", "train_step"), micro_batches=True, pipelines=True),
        "python": EngineTraits(serves=("compute",), holds_weights=False),
    }
)
"""Every engine. Of engines that serve the same kind of call, the usual engine comes first."""
