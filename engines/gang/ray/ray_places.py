"""A gang's places on different nodes of a Ray cluster, reserved together, with an agent on each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.gang.ray.node_agent import NodeAgent
from prefect_rlhf.engines.gang.ray.wires import reach
from prefect_rlhf.errors.errors import InvalidInput, RankLost

PLACE_SECONDS = 60.0
"""Time limit for an agent's start and answers, and for nodes that the cluster lacks."""
HELD_SECONDS = 86400.0
"""How long to wait for nodes that others hold."""
DEVICE_LABEL = "prefect-rlhf/device"
"""The label of Ray's nodes for their kind of device."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a node must have: `count` free CPUs or GPUs and, if `device` is set, that label."""

    count: int
    resource: str
    device: str = ""

    @property
    def label(self) -> dict[str, str]:
        """The labels that Ray requires of the node."""
        return {DEVICE_LABEL: self.device} if self.device else {}

    def is_in(self, node: Mapping[str, Any]) -> bool:
        """Whether a node, in Ray's description, would qualify if all its devices were free."""
        if self.device not in ("", node["Labels"].get(DEVICE_LABEL)):
            return False
        return bool(node["Resources"].get(self.resource, 0) >= self.count)

    def __str__(self) -> str:
        return f"{self.count} {self.resource}s" + (f" ({self.device})" if self.device else "")


def places_of(ranks_of_nodes: Sequence[int], device: str, node_devices: Sequence[str]) -> tuple[Place, ...]:
    """Return the requirements on each node, given its number of ranks; without `node_devices` any kind qualifies."""
    resource = "GPU" if device == "cuda" else "CPU"
    kinds = node_devices or ("",) * len(ranks_of_nodes)
    return tuple(Place(count, resource, kind) for count, kind in zip(ranks_of_nodes, kinds, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """An agent on each of several nodes, and the reservation that keeps the places."""

    group: Any
    agents: tuple[Any, ...]
    addresses: tuple[str, ...]

    @classmethod
    def on(cls, cluster: str, places: Sequence[Place], say: Callable[[str], object]) -> Placed:
        """Reserve places on different nodes.

        Raises InvalidInput if the cluster does not have such nodes, RankLost if it had them before.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # STRICT_SPREAD reserves every bundle on its own node, or no bundle at all: two runs that each hold half of
        # their nodes would wait for each other forever. The agents are scheduled into the group's bundles afterwards,
        # so the reservation outlives an agent that fails to start, and `release` can return it.
        group = placement_group(
            [{place.resource: place.count} for place in places],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[place.label for place in places],
        )
        try:
            _await_nodes(group, cluster, places, say)
        except BaseException:
            cls(group, (), ()).release()
            raise
        started: list[Any] = []
        try:
            for node, place in enumerate(places):
                options = {"num_gpus" if place.resource == "GPU" else "num_cpus": place.count}
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
                actor = ray.remote(_Agent).options(scheduling_strategy=strategy, max_restarts=0, **options)
                started.append(actor.remote())
            addresses = tuple(_answers("cluster", "start", [agent.address.remote() for agent in started]))
        except BaseException:
            cls(group, tuple(started), ()).release()
            raise
        return cls(group, tuple(started), addresses)

    def ask(
        self,
        question: str,
        arguments: Callable[[int], tuple[Any, ...]] = lambda node: (),
        seconds: float | None = None,
    ) -> list[Any]:
        """Call a method of every agent, with `arguments` by node and a limit of `seconds`; return the answers."""
        asked = [getattr(agent, question).remote(*arguments(node)) for node, agent in enumerate(self.agents)]
        return _answers(", ".join(self.addresses), question, asked, seconds)

    def release(self) -> None:
        """End the agents and return their places. A head that is gone has forgotten the reservation."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for agent in self.agents:
            ray.kill(agent, no_restart=True)
        if _head_answers():  # otherwise Ray would wait for the head for a minute
            with suppress(ray.exceptions.GetTimeoutError):
                remove_placement_group(self.group)


def _head_answers() -> bool:
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        reach((host, int(port))).close()
    except OSError:
        return False
    return True


def _await_nodes(group: Any, cluster: str, places: Sequence[Place], say: Callable[[str], object]) -> None:
    """Wait until the places are reserved: HELD_SECONDS for places that others hold, a minute for missing nodes.

    Raises InvalidInput afterwards, and RankLost if the cluster has lost nodes that the run needs: they may be back for
    the next attempt.
    """
    import ray

    wanted = f"{len(places)} nodes with {', '.join(map(str, places))}"
    until = time.monotonic() + HELD_SECONDS
    while not group.wait(PLACE_SECONDS):
        known = ray.nodes()
        nodes = [node for node in known if node["Alive"]]
        seen = f"{cluster}, whose nodes have {'; '.join(_in_words(node, places[0].resource) for node in nodes)}"
        if not _are_there(places, nodes):
            if _are_there(places, [*nodes, *_lost(known, places)]):
                raise RankLost(f"the Ray cluster has lost a node that the run needs ({wanted}): it is now {seen}")
            raise InvalidInput("cluster", seen, wanted)
        if time.monotonic() > until:
            raise InvalidInput("cluster", f"{seen}, held by others for {HELD_SECONDS:g} s", f"{wanted} free")
        say(f"waiting for {wanted} of the Ray cluster at {cluster}: held by others")


def _lost(known: Sequence[Mapping[str, Any]], places: Sequence[Place]) -> list[Mapping[str, Any]]:
    """Return the nodes that are gone and not back, with the size of the largest place: Ray forgets their own."""
    there = {node["NodeManagerAddress"] for node in known if node["Alive"]}
    # Ray drops the resources of a dead node from its list, so its size is unknown. It is assumed to be as large
    # as the largest place: the error then asks for a restart, which is harmless, and not for another cluster.
    last = {node["NodeManagerAddress"]: node for node in known if node["NodeManagerAddress"] not in there}
    had = {places[0].resource: max(place.count for place in places)}
    return [{**node, "Resources": had} for node in last.values()]


def _in_words(node: Mapping[str, Any], resource: str) -> str:
    place = Place(int(node["Resources"].get(resource, 0)), resource, node["Labels"].get(DEVICE_LABEL, ""))
    return f"{node['NodeManagerAddress']} {place}"


def _are_there(places: Sequence[Place], nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each place has a node of its own; the largest places choose first, and take the smallest fitting node."""
    left = sorted(nodes, key=lambda node: node["Resources"].get(places[0].resource, 0))
    for place in sorted(places, key=lambda place: place.count, reverse=True):
        fitting = next((node for node in left if place.is_in(node)), None)
        if fitting is None:
            return False
        left.remove(fitting)
    return True


class _Agent(NodeAgent):
    """A NodeAgent as a Ray actor, at Ray's address of its node."""

    def __init__(self) -> None:
        import ray

        super().__init__(str(ray.util.get_node_ip_address()))

    def address(self) -> str:
        """Return the node's address."""
        return self._address


def _answers(of: str, question: str, asked: Sequence[Any], seconds: float | None = None) -> list[Any]:
    """Wait for agents' answers. Raises RankLost for an agent that is gone, is silent or raises an error."""
    import ray

    try:
        return list(ray.get(list(asked), timeout=PLACE_SECONDS if seconds is None else seconds))
    except ray.exceptions.RayTaskError as error:
        reason = str(error.cause).splitlines()[0]
        raise RankLost(f"a node of {of} failed in {question}: {reason}") from error
    except ray.exceptions.RayError as error:  # the actor or its node died, or the limit is over
        raise RankLost(f"a node of {of} did not answer to {question}: {type(error).__name__}") from error
