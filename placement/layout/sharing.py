"""Frozen weights named by several models: instances that split them alike on the same devices hold them once.

An instance of an engine that lends its weights holds them for instances of other engines too; see `lending`.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.layout import held_parts
from prefect_rlhf.placement.layout.lending import LENT_PARTS
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
    """Return the weights that instances compute from but that an instance built before them holds.

    Both have the same mesh, strategy and device order, so each rank needs the same regions. If the holder's engine is
    another, an instance has the tensors that differ itself (`lent_parameters`), and later instances of its own engine
    take all from it. An instance with offloaded weights holds its own, because it is moved as a whole.
    """
    return _shared_weights(graph, plan) if _may_share(graph) else {}


def sharers(graph: DataflowGraph, plan: ExecutionPlan) -> Mapping[ModelInstance, tuple[str, ...]]:
    """Return, for each instance with weights that others use, its role and theirs, in the order of the graph's
    models.
    """
    found: dict[ModelInstance, set[str]] = {}
    shared = shared_weights(graph, plan)
    for instance, held in shared.items():
        for holder in held.values():
            for each in (holder, *shared.get(holder, {}).values()):  # of another engine, if the holder has a part
                found.setdefault(each, {each.role}).add(instance.role)
    return {
        holder: tuple(model.role for model in graph.models if model.role in roles) for holder, roles in found.items()
    }


def borrowers(graph: DataflowGraph, plan: ExecutionPlan) -> Mapping[ModelInstance, ModelInstance]:
    """Map each instance that uses another engine's weights to the instance that lends them."""
    shared = shared_weights(graph, plan)
    return {user: holder for user, held in shared.items() for holder in held.values() if holder.engine != user.engine}


def in_build_order(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[ModelInstance, ...]:
    """Return the plan's instances, those first whose weights an instance of another engine uses."""
    lenders = set(borrowers(graph, plan).values())
    return tuple(sorted(instances(graph, plan), key=lambda instance: instance not in lenders))


def one_base(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[tuple[ModelInstance, ...], ...]:
    """Return the groups of instances that hold their common base once unless the plan offloads them.

    An instance that lends it to other engines comes first.
    """
    return _one_base(graph, plan) if _may_share(graph) else ()


@lru_cache(maxsize=256)  # a check of each plan of a search asks for it
def _one_base(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[tuple[ModelInstance, ...], ...]:
    found: dict[object, list[ModelInstance]] = {}
    for instance in _able(graph, plan):
        frozen = _frozen(graph, instance.role, instance.engine)
        if frozen:
            found.setdefault((frozen[0].name, _place(graph, instance)), []).append(instance)
    return tuple(tuple(alike) for alike in found.values() if len(alike) > 1)


@lru_cache(maxsize=256)  # a certificate, an estimate and a run ask for the same
def _shared_weights(graph: DataflowGraph, plan: ExecutionPlan) -> Shared:
    holders: dict[object, ModelInstance] = {}
    found: dict[ModelInstance, dict[str, ModelInstance]] = {}
    offloaded = offloaded_parts(graph, plan)
    for instance in _able(graph, plan):
        if offloaded.get(instance) == "all":
            continue
        for own in _frozen(graph, instance.role, instance.engine):
            key = own.name, _place(graph, instance)
            held_by = holders.get(key)
            if held_by is None or held_by.engine != instance.engine:
                holders[key] = instance  # of its engine, it has what the other engine holds differently
            if held_by is not None and (held_by.engine == instance.engine or own.part in LENT_PARTS):
                found.setdefault(instance, {})[own.name] = held_by
    return found


def _able(graph: DataflowGraph, plan: ExecutionPlan) -> Iterator[ModelInstance]:
    """Yield the instances that hold frozen weights for others or use those of others, lenders first."""
    every = instances(graph, plan)
    yield from (instance for instance in every if _lends(graph, instance.role, instance))
    yield from (instance for instance in every if TRAITS[instance.engine].shares_weights)


def storage_name(graph: DataflowGraph, call: Call, placement: Placement) -> str:
    """Return a name that is equal for calls that share some weights on equal meshes with equal strategies.

    A partly trained model may share its base, too.
    """
    role = call.role or ""
    able = TRAITS[placement.engine].shares_weights or _lends(graph, role, placement)
    if _may_share(graph) and placement.offload != "all" and able:
        for own in _frozen(graph, role, placement.engine)[:1]:
            ends, engine = _fitting(graph.model(role), placement)
            return f"{own.name} {ends} {engine}"
    return f"{role} {placement.engine}"


@lru_cache(maxsize=16)  # asked for every option of a search
def _may_share(graph: DataflowGraph) -> bool:
    """Whether two models name the same weights, or calls of one model have frozen weights and perhaps two engines."""
    if len(graph.all_weights()) < sum(len(graph.weights(model.role)) for model in graph.models):
        return True
    return any(
        len({call.kind for call in graph if call.role == model.role}) > 1
        and not all(own.trained for own in graph.weights(model.role))
        for model in graph.models
    )


def _place(graph: DataflowGraph, instance: ModelInstance) -> object:
    """Return a value that is equal for instances that may hold some frozen weights once."""
    fitting = _fitting(graph.model(instance.role), instance)
    return fitting, instance.mesh, instance.strategy, instance.device_order


def _fitting(model: ModelSpec, placed: ModelInstance | Placement) -> tuple[bool, EngineKind | None]:
    """Return what must be equal beside mesh and strategy: the copies of the embedding, and perhaps the engine.

    Engines lend no experts, which each splits in its own way, and no stages of a pipeline.
    """
    is_alone = placed.strategy.pp > 1 or model.shape.experts is not None
    return _ends(model, placed), placed.engine if is_alone else None


@lru_cache(maxsize=64)
def _lending_role(graph: DataflowGraph, name: str) -> str | None:
    """Return the role whose instances lend these weights to other engines: the first that generates from them."""
    generating = {call.role for call in graph if call.kind == "generate"}
    roles = (model.role for model in graph.models if model.role in generating)
    return next((role for role in roles if name in (own.name for own in graph.weights(role))), None)


def _lends(graph: DataflowGraph, role: str, placed: ModelInstance | Placement) -> bool:
    if not TRAITS[placed.engine].lends_weights:
        return False
    return any(_lending_role(graph, own.name) == role for own in _frozen(graph, role, placed.engine)[:1])


def _frozen(graph: DataflowGraph, role: str, engine: EngineKind) -> list[Weights]:
    held = held_parts(graph.model(role), engine)
    return [own for own in graph.weights(role) if not own.trained and own.part in held]


def _ends(model: ModelSpec, placed: ModelInstance | Placement) -> bool:
    """Whether the last stage of a pipeline has a copy of the embedding, which is in the trunk."""
    return placed.strategy.pp > 1 and model.shape.tied_embeddings and "lm" in model.head
