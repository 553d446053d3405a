"""How long a switch between plans takes: engines start one after another, then states reach their new devices."""

from collections.abc import Mapping
from types import MappingProxyType

from prefect_rlhf.placement.cost.moves import DISK_BYTES_PER_SECOND, host_seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes, instance_copied_bytes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan, has_state
from prefect_rlhf.placement.plans.switch import closed_instances

NOT_MEASURED: Mapping[EngineKind, float] = MappingProxyType({})


def switch_seconds(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    other: ExecutionPlan,
    sources: CostSources,
    starts: Mapping[EngineKind, float] = NOT_MEASURED,
) -> float:
    """Return how long the switch from `plan` to `other` takes, in seconds.

    Each new instance costs its engine's start, and reading its weights from a disk. A trained instance gets its trained
    weights and its optimizer over the host link instead. The copies to host memory before the switch are nodes of the
    last step. `starts` are measured start-up times in seconds, which replace the engine's trait.
    """
    seconds = sources.orchestration_seconds
    for instance in closed_instances(graph, other, plan):
        sizes, strategy = ModelSizes.of(graph.model(instance.role)), instance.strategy
        seconds += starts.get(instance.engine, TRAITS[instance.engine].start_seconds)
        weights = sizes.held_by(instance.engine).fullest_stage_parameters(strategy) * sizes.item
        if has_state(graph, other, instance):
            state, own = max(instance_copied_bytes(instance, sizes).values()), sizes.most_trained(strategy) * sizes.item
            seconds += host_seconds(2 * own + state, sources.links((instance.mesh,)))
            weights -= own  # a base is read
        seconds += weights / DISK_BYTES_PER_SECOND
    return seconds


def assumed_starts(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    other: ExecutionPlan,
    starts: Mapping[EngineKind, float] = NOT_MEASURED,
) -> tuple[str, ...]:
    """Return a line for each engine that a switch starts without a measured start-up time in `starts`."""
    engines = dict.fromkeys(instance.engine for instance in closed_instances(graph, other, plan))
    return tuple(f"{name} starts in {TRAITS[name].start_seconds:g} s" for name in engines if name not in starts)
