"""Execution plans as YAML or JSON files that a person can write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from prefect_rlhf.errors.errors import InvalidInput, SeveralMistakes
from prefect_rlhf.files.yaml_text import read_yaml
from prefect_rlhf.placement.devices.axes import OFFERED, ORDER
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan, Placement
from prefect_rlhf.placement.plans.file_words import mistakes_of
from prefect_rlhf.placement.words.entries import Entries, with_words
from prefect_rlhf.placement.words.table import WORDS, having
from prefect_rlhf.placement.words.word import MOST


def _or_registered(engine: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Accept the name of a registered engine, which the type does not know."""
    return engine if isinstance(engine, str) and engine in TRAITS else validate(engine)


@with_words
class CallEntry(Entries):
    """A call in a plan file. Each word has a field, which the table of words adds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mesh: str
    engine: Annotated[EngineKind, WrapValidator(_or_registered)]
    order: list[Annotated[int, Field(ge=0, lt=MOST)]] = Field(default_factory=list)

    def placement(self, field: str, cluster: ClusterShape) -> Placement:
        """Return the placement it describes; its mesh must lie in the usable part of `cluster`."""
        mesh = leased_mesh(self.mesh, cluster, f"{field}.mesh")
        strategy = Strategy(**{axis: getattr(self, axis) for axis in OFFERED})
        placed = Placement(mesh, strategy, self.engine, device_order=tuple(self.order))
        return having(placed, {name: getattr(self, name) for name in WORDS})

    @classmethod
    def of(cls, placement: Placement, cluster: ClusterShape) -> CallEntry:
        values = {
            "mesh": name_in_lease(placement.mesh, cluster),
            "engine": placement.engine,
            "order": list(placement.device_order),
            **placement.strategy.degrees,
            **{name: word.of(placement) for name, word in WORDS.items()},
        }
        return cls.model_validate(values)

    def line(self) -> str:
        """Return the entry on one line, without default or inapplicable fields."""
        plain = {axis for axis in OFFERED if axis not in ORDER and getattr(self, axis) == 1}
        plain |= set() if self.order else {"order"}
        for name, word in WORDS.items():
            if getattr(self, name) == word.default and not (word.is_written and word.is_offered(self.engine)):
                plain.add(name)
        content = self.model_dump(mode="json", exclude=plain)
        return yaml.safe_dump(content, default_flow_style=True, sort_keys=False, width=10_000).strip()


class PlanFile(BaseModel):
    """A plan file: its name and a placement for each call.

    `mesh` counts devices from the first device of the lease: `n0:0` is `n0:1` if that device was leased. `order` lists
    the mesh's devices, by position, in the order of coordinates: tp varies fastest, then dp, then pp. Without it a run
    chooses the order that moves the fewest weights. `ep` divides dp: `ep` neighbouring replicas divide the experts of a
    mixture. The other keys of a call are words, each with its default (`placement/words/`; docs/plans.md explains
    them). `node_speeds` are the relative speeds of each node's leased devices: replicas get rows in proportion. Without
    them all devices are equally fast.

    `figures` are the estimates of `prefect-rlhf plan` for the plan (`plan.json`); they are ignored when the plan is
    read.

    ```yaml
    name: mine
    calls:
      actor_generate: {mesh: "n0:0-1", engine: vllm, dp: 2}
      actor_train: {mesh: "n0:0-1", engine: megatron, dp: 2, micro_batches: 2}
    ```
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    node_speeds: list[Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=list)
    calls: dict[str, CallEntry] = Field(min_length=1)
    figures: dict[str, Any] = Field(default_factory=dict)


def leased_mesh(name: str, cluster: ClusterShape, field: str = "mesh") -> DeviceMesh:
    """Return the devices that a plan file calls `name`. Raises InvalidInput unless they are an aligned part of the
    lease.

    >>> cluster = ClusterShape("desk", 1, 4, 8 << 30, leased=DeviceMesh(0, 1, 2, 2))
    >>> leased_mesh("n0:0", cluster).name, name_in_lease(DeviceMesh(0, 1, 2, 1), cluster)
    ('n0:2', 'n0:0')
    >>> leased_mesh("n0:2", cluster)
    Traceback (most recent call last):
        ...
    prefect_rlhf.errors.errors.InvalidInput: mesh: got 'n0:2', expected devices of the lease n0:2-3, counted from \
its first: n0:0-1
    """
    named, leased = DeviceMesh.parse(name, field), cluster.usable
    counted = _moved(leased, -leased.first_node, -leased.first_device)
    if leased != cluster.whole and not counted.contains(named):
        right = f"devices of the lease {leased.name}, counted from its first: {counted.name}"
        raise InvalidInput(field, name, right)
    part = replace(cluster, num_nodes=leased.num_nodes, devices_per_node=leased.devices_per_node)
    return _moved(part.check_mesh(named, field), leased.first_node, leased.first_device)


def name_in_lease(mesh: DeviceMesh, cluster: ClusterShape) -> str:
    """Return a mesh's name in a plan file for the usable part of `cluster`."""
    return _moved(mesh, -cluster.usable.first_node, -cluster.usable.first_device).name


def _moved(mesh: DeviceMesh, nodes: int, devices: int) -> DeviceMesh:
    return replace(mesh, first_node=mesh.first_node + nodes, first_device=mesh.first_device + devices)


def _with_speeds(cluster: ClusterShape, speeds: Sequence[float]) -> ClusterShape:
    """Return the cluster with these speeds of the leased nodes; nodes outside of the lease run no call."""
    leased = cluster.usable
    part = replace(cluster, num_nodes=leased.num_nodes).with_speeds(speeds, "plan.node_speeds")
    after = cluster.num_nodes - leased.first_node - leased.num_nodes
    return replace(cluster, node_speeds=(1.0,) * leased.first_node + part.node_speeds + (1.0,) * after)


def _speeds(cluster: ClusterShape) -> tuple[float, ...]:
    """Return the speeds of the leased nodes; empty if all nodes are equally fast."""
    leased = cluster.usable
    return cluster.node_speeds[leased.first_node : leased.first_node + leased.num_nodes]


def read_plan(path: Path | str, cluster: ClusterShape) -> ExecutionPlan:
    """Read a plan for the usable part of `cluster` from a YAML or JSON file.

    Raises InvalidInput, which lists every wrong key.
    """
    return parse_plan(read_yaml("plan", Path(path)), cluster)


def parse_plan(content: Any, cluster: ClusterShape) -> ExecutionPlan:
    """Return the plan in a file's content. Raises InvalidInput, which lists every wrong key."""
    if not isinstance(content, dict):
        raise InvalidInput("plan", content, "a mapping with the keys name and calls")
    try:
        file = PlanFile.model_validate(content)
    except ValidationError as error:
        keys = [name for name in PlanFile.model_fields if name != "figures"]  # no person writes them
        mistakes = mistakes_of(error, keys, list(CallEntry.model_fields))
        raise SeveralMistakes.of(mistakes) from error
    if file.node_speeds:
        cluster = _with_speeds(cluster, file.node_speeds)
    placements, refused = [], []
    for name, entry in file.calls.items():
        try:
            placements.append((name, entry.placement(f"plan.calls.{name}", cluster)))
        except InvalidInput as error:
            refused.append(error)
    if refused:
        raise SeveralMistakes.of(refused)
    return ExecutionPlan(file.name, cluster, tuple(placements))


def plan_json(plan: ExecutionPlan, figures: Mapping[str, Any]) -> str:
    """Return the plan as JSON with `figures`; `read_plan` returns an equal plan for the same cluster."""
    cluster, speeds = plan.cluster, list(_speeds(plan.cluster))
    calls = {name: CallEntry.of(placement, cluster).model_dump(mode="json") for name, placement in plan.placements}
    content = {"name": plan.name} | ({"node_speeds": speeds} if speeds else {}) | {"calls": calls, "figures": figures}
    return json.dumps(content, indent=1)


def plan_yaml(plan: ExecutionPlan) -> str:
    """Return the plan as YAML, a line per call; `read_plan` returns an equal plan for the same cluster."""
    speeds = _speeds(plan.cluster)
    lines = [f"name: {yaml.safe_dump(plan.name, default_flow_style=True).splitlines()[0]}"]
    lines += [f"node_speeds: {list(speeds)}"] if speeds else []
    lines.append("calls:")
    lines += [f"  {name}: {CallEntry.of(placement, plan.cluster).line()}" for name, placement in plan.placements]
    return "\n".join(lines) + "\n"
