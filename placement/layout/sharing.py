"""Frozen weights named by several models: instances that split them alike on the same devices hold them once."""

from collections.abc import Mapping
from functools import lru_cache

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.layout import held_parts
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Weights
from prefect_rlhf.placement.plan import (
    EngineKind,
    ExecutionPlan,
    ModelInstance,
    Placement,
    instances,
    offloaded_parts,
)

Shared = Mapping[ModelInstance, Mapping[str, ModelInstance]]
"""For instances that hold only some of their weights: the instance that holds each of the others, by their name."""


def shared_weights(graph: DataflowGraph, plan: ExecutionPlan) -> Shared:
    """Return the weights that instances compute from but that an earlier instance of the plan holds.

    Both have the same engine, mesh, strategy and device order, so each rank needs the same regions. An instance with
    offloaded weights holds its own, because it is moved as a whole.
    """
    return _shared_weights(graph, plan) if _may_share(graph) else {}


def sharers(graph: DataflowGraph, plan: ExecutionPlan) -> Mapping[ModelInstance, tuple[str, ...]]:
    """Return, for each instance with weights that others use, its role and theirs, in the order of the graph's
    models.
    """
    found: dict[ModelInstance, set[str]] = {}
    for instance, held in shared_weights(graph, plan).items():
        for holder in held.values():
            found.setdefault(holder, {holder.role}).add(instance.role)
    return {
        holder: tuple(model.role for model in graph.models if model.role in roles) for holder, roles in found.items()
    }


def one_base(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[tuple[ModelInstance, ...], ...]:
    """Return the groups of instances that hold their common base once unless the plan offloads them."""
    return _one_base(graph, plan) if _may_share(graph) else ()


@lru_cache(maxsize=256)  # a check of each plan of a search asks for it
def _one_base(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[tuple[ModelInstance, ...], ...]:
    found: dict[object, list[ModelInstance]] = {}
    for instance in instances(graph, plan):
        frozen = _frozen(graph, instance.role, instance.engine) if TRAITS[instance.engine].shares_weights else []
        if frozen:
            ends = _ends(graph.model(instance.role), instance)
            found.setdefault((frozen[0].name, _place(instance), ends), []).append(instance)
    return tuple(tuple(alike) for alike in found.values() if len(alike) > 1)


@lru_cache(maxsize=256)  # a certificate, an estimate and a run ask for the same
def _shared_weights(graph: DataflowGraph, plan: ExecutionPlan) -> Shared:
    first: dict[object, ModelInstance] = {}
    found: dict[ModelInstance, dict[str, ModelInstance]] = {}
    offloaded = offloaded_parts(graph, plan)
    for instance in instances(graph, plan):
        if offloaded.get(instance) == "all" or not TRAITS[instance.engine].shares_weights:
            continue
        place = _place(instance)
        for own in _frozen(graph, instance.role, instance.engine):
            held_by = first.setdefault((own.name, place, _ends(graph.model(instance.role), instance)), instance)
            if held_by != instance:
                found.setdefault(instance, {})[own.name] = held_by
    return found


def storage_name(graph: DataflowGraph, call: Call, placement: Placement) -> str:
    """Return a name that is equal for calls that share some weights on equal meshes.

    A partly trained model may share its base, too.
    """
    role = call.role or ""
    if not _may_share(graph) or placement.offload == "all" or not TRAITS[placement.engine].shares_weights:
        return role
    frozen = _frozen(graph, role, placement.engine)
    return f"{frozen[0].name} {_ends(graph.model(role), placement)}" if frozen else role


@lru_cache(maxsize=16)  # asked for every option of a search
def _may_share(graph: DataflowGraph) -> bool:
    """Whether two models name the same weights."""
    return len(graph.all_weights()) < sum(len(graph.weights(model.role)) for model in graph.models)


def _place(instance: ModelInstance) -> object:
    return instance.engine, instance.mesh, instance.strategy, instance.device_order


def _frozen(graph: DataflowGraph, role: str, engine: EngineKind) -> list[Weights]:
    held = held_parts(graph.model(role), engine)
    return [own for own in graph.weights(role) if not own.trained and own.part in held]


def _ends(model: ModelSpec, placed: ModelInstance | Placement) -> bool:
    """Whether the last stage of a pipeline has a copy of the embedding, which is in the trunk."""
    return placed.strategy.pp > 1 and model.shape.tied_embeddings and "lm" in model.head
