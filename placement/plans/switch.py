"""A run's switch between plans: instances that end and begin, and training states that move."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.sharing import in_build_order, shared_weights
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, instances, trained_instance
from prefect_rlhf.placement.words.table import WORDS


@dataclass(frozen=True, slots=True)
class PlanAt:
    """A plan that a run uses from `step` on."""

    step: int
    plan: ExecutionPlan


def closed_instances(graph: DataflowGraph, plan: ExecutionPlan, other: ExecutionPlan) -> tuple[ModelInstance, ...]:
    """Return the instances of `plan` that end in a switch to `other`.

    An instance stays only if its calls, its cache, its offloading and the weights that it gets from others stay the
    same. With swapped arguments, this returns the instances to build.
    """
    stay = _as_used(graph, other)
    return tuple(instance for instance, used in _as_used(graph, plan).items() if stay.get(instance) != used)


def moving_roles(graph: DataflowGraph, plan: ExecutionPlan, other: ExecutionPlan) -> frozenset[str]:
    """Return the roles with a state that moves if a run switches from `plan` to `other`: trained roles and followers.

    A follower's state moves to every instance that the switch builds.
    """
    closed, built = closed_instances(graph, plan, other), closed_instances(graph, other, plan)
    trained = {model.role for model in graph.models if trained_instance(graph, plan, model.role) in closed}
    return frozenset(trained | {instance.role for instance in built if graph.model(instance.role).follows})


def _as_used(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, object]:
    """Return everything that decides how each instance's engine is built, in the order of the builds."""

    def use(call: Call) -> object:
        placement = plan[call.name]
        return call.name, *(word.of(placement) for word in WORDS.values() if word.rebuilds)

    speeds, shared = plan.cluster.node_speeds, shared_weights(graph, plan)
    users = instances(graph, plan)
    own = {instance: (speeds, *map(use, users[instance])) for instance in in_build_order(graph, plan)}

    def used(instance: ModelInstance) -> object:
        """With all that its holders are built for: one of them may take weights from another."""
        return own[instance], {name: (holder, used(holder)) for name, holder in shared.get(instance, {}).items()}

    return {instance: used(instance) for instance in own}
