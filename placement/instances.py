"""Which calls share one resident copy of weights."""

from __future__ import annotations

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Part, Placement


def instance_of(call: Call, placement: Placement) -> ModelInstance | None:
    """The copy of weights that `call` uses when placed so; None for compute calls, which use none."""
    if call.role is None:
        return None
    return ModelInstance(call.role, placement.engine, placement.mesh, placement.strategy, placement.order)


def instances(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, tuple[Call, ...]]:
    """Every instance that the plan asks for with the calls that share it, in the order of the graph's calls."""
    placements = plan.by_call
    users: dict[ModelInstance, tuple[Call, ...]] = {}
    for call in graph:
        instance = instance_of(call, placements[call.name])
        if instance is not None:
            users[instance] = (*users.get(instance, ()), call)
    return users


def trained_instance(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> ModelInstance | None:
    """The instance whose weights the role's train_step writes in place; None for a frozen role."""
    trainer = graph.trained_by(role)
    return None if trainer is None else instance_of(trainer, plan[trainer.name])


def built_version(graph: DataflowGraph, plan: ExecutionPlan, instance: ModelInstance, first_step: int) -> int:
    """The weight version that an instance holds when it is built, in a run that goes on at `first_step` (0: anew).

    A checkpoint holds what is trained, once; other copies of it are brought by the first reallocate.
    """
    return first_step if instance == trained_instance(graph, plan, instance.role) else 0


def offloaded_parts(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, Part]:
    """What of which instance leaves device memory whenever no call uses it; built, then offloaded before step 0."""
    placements = plan.by_call
    found: dict[ModelInstance, Part] = {}
    for instance, calls in instances(graph, plan).items():
        for part in (placements[call.name].offload for call in calls):
            if part != "none":
                found[instance] = part
    return found


def offloaded_instances(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[ModelInstance, ...]:
    """The instances that leave device memory as a whole whenever no call is using them."""
    return tuple(instance for instance, part in offloaded_parts(graph, plan).items() if part == "all")


def labels(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, str]:
    """A short name for each instance, unique within the plan: `actor.vllm`, with its placement when that is needed."""
    every = tuple(instances(graph, plan))
    short = [f"{instance.role}.{instance.engine}" for instance in every]
    return {
        instance: name if short.count(name) == 1 else instance.name.replace(" ", ".")
        for instance, name in zip(every, short, strict=True)
    }
