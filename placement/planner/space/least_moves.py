"""The least time to move a role's weights between two calls, for any position of their meshes: for the search's bound.

A device's links work at once (`cost.moves`), so the least time is that of the busiest: the bytes that a device
receives, the bytes that the devices of the trained copy send, and the bytes that must cross the network because no
device of a node has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import stages
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.space.candidates import Candidate

Numbers = NDArray[np.float64]


def least_move_seconds(
    trained: Sequence[Candidate], readers: Sequence[Candidate], sizes: ModelSizes, sources: CostSources
) -> Numbers:
    """Return the least time of a weight move, [3, trained, readers]: on disjoint, overlapping and equal meshes.

    It holds for any order of the readers' devices. A device that holds a part of at most s bytes receives the bytes
    that its own part of t bytes has in addition, and copies the rest. The devices of the trained copy share the sending
    of all bytes that the readers receive.
    """
    held, _, have = _parts(trained, sizes)
    need, mean, want = _parts(readers, sizes)
    sends, (receives, copies) = _ways(trained, sources)[0][:, None], _ways(readers, sources)[:2][:, None, :]
    common = np.minimum(have[:, None], want[None, :])
    total = (want * mean)[None, :]
    apart = np.maximum(need[None, :] / receives, total / have[:, None] / sends)
    received = np.maximum(need[None, :] - held[:, None], 0) / receives
    sent = np.maximum(total - common * held[:, None], 0) / have[:, None] / sends
    over = np.maximum(np.maximum(received, sent), need[None, :] / (receives + copies))
    crossing = _network_seconds(trained, readers, sizes, sources, apart=False)
    on_whole_nodes = np.logical_or.outer(_have_whole_nodes(trained, sources), _have_whole_nodes(readers, sources))
    all_crossing = _network_seconds(trained, readers, sizes, sources, apart=True)
    over_network = np.stack([np.where(on_whole_nodes, all_crossing, crossing), crossing, crossing])
    least: Numbers = np.maximum(np.stack([apart, over, over]), over_network)
    return least


def _have_whole_nodes(options: Sequence[Candidate], sources: CostSources) -> NDArray[np.bool_]:
    """Whether the mesh of each option has all devices of its nodes: disjoint meshes are then on other nodes."""
    meshes = [option.placement.mesh for option in options]
    return np.array([mesh.devices_per_node == sources.nodes[mesh.first_node].devices_per_node for mesh in meshes])


def _network_seconds(
    trained: Sequence[Candidate], readers: Sequence[Candidate], sizes: ModelSizes, sources: CostSources, apart: bool
) -> Numbers:
    """[trained, readers]: the least time for bytes that must cross the network; `apart`: the meshes share no node."""
    (trained_spreads, source), (reader_spreads, target) = _alike(trained), _alike(readers)
    layers = _network_table(trained_spreads, reader_spreads, sizes.num_layers, apart)
    parts, experts = np.array([(s.tp, s.tp * s.ep) for s in (reader.placement.strategy for reader in readers)]).T
    crossing = layers[source][:, target]
    num_bytes = crossing / parts * sizes.layer_matrices * sizes.item
    num_bytes = num_bytes + crossing / experts * sizes.layer_experts * sizes.item
    rates = np.minimum.outer(_ways(trained, sources)[2], _ways(readers, sources)[2])
    seconds: Numbers = np.divide(num_bytes, rates, out=np.zeros_like(num_bytes), where=rates > 0)
    return seconds


class Spread(NamedTuple):
    """Pipeline stages, the devices of each, and how many devices share a node."""

    pp: int
    group: int
    per_node: int

    @classmethod
    def of(cls, placement: Placement) -> Spread:
        strategy = placement.strategy
        return cls(strategy.pp, strategy.dp * strategy.tp, placement.mesh.devices_per_node)


def _alike(options: Sequence[Candidate]) -> tuple[list[Spread], NDArray[np.int64]]:
    """The distinct spreads, and the index of each option's own spread."""
    numbers: dict[Spread, int] = {}
    index = [numbers.setdefault(Spread.of(option.placement), len(numbers)) for option in options]
    return list(numbers), np.array(index)


def _network_table(sources: Sequence[Spread], targets: Sequence[Spread], num_layers: int, apart: bool) -> Numbers:
    """[sources, targets]: `network_layers` of each with each."""
    by_stages: dict[int, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        by_stages[target.pp].append(index)
    table = np.zeros((len(sources), len(targets)))
    for columns in by_stages.values():
        alike = tuple(targets[column] for column in columns)
        for row, source in enumerate(sources):
            table[row, columns] = network_layers(source, alike, num_layers, apart)
    return table


@lru_cache(maxsize=1 << 16)  # a question poses several problems, of the same options
def network_layers(source: Spread, targets: tuple[Spread, ...], num_layers: int, apart: bool = False) -> Numbers:
    """Return the least that a device of each target receives, or sends, over the network: layers, of its tp part.

    The targets have equally many pipeline stages, all of them. The source's devices are in the plain order, which gives
    a node successive stages; the targets' devices are in any order. A node that has a part of a stage is assumed to
    have all of it. Of a stage's layers, only devices on its nodes need nothing over the network, and its holders share
    the rest. If source and targets are `apart`, without a common node, all layers cross the network.
    """
    (target_pp,) = {target.pp for target in targets}
    held, wanted = _layers(source.pp, num_layers), _layers(target_pp, num_layers)
    nodes = np.arange(max(1, source.pp * source.group // source.per_node)) * source.per_node
    first, last = nodes // source.group, (nodes + source.per_node - 1) // source.group
    on_node = _common(wanted, np.stack([held[first, 0], held[last, 1]], axis=1)).max(axis=1)
    on_node = np.zeros_like(on_node) if apart else on_node
    received = (wanted[:, 1] - wanted[:, 0] - on_node).max()
    begin = np.arange(source.pp) * source.group
    num_nodes = (begin + source.group - 1) // source.per_node - begin // source.per_node + 1
    group, per_node = (
        np.array(sizes)[:, None, None] for sizes in zip(*(target[1:] for target in targets), strict=True)
    )
    near = num_nodes * per_node - np.arange(target_pp)[:, None] * group
    far = group - np.minimum(np.maximum(0 if apart else near, 0), group)
    sent = (_needed(source.pp, target_pp, num_layers) * far).sum(axis=1).max(axis=1) / source.group
    layers: Numbers = np.maximum(received, sent)
    return layers


@cache
def _needed(source_pp: int, target_pp: int, num_layers: int) -> NDArray[np.int64]:
    """[target stage, stage]: the layers of a stage that each of the target's stages needs, the most first."""
    needed: NDArray[np.int64] = -np.sort(
        -_common(_layers(target_pp, num_layers), _layers(source_pp, num_layers)), axis=0
    )
    return needed


@cache
def _layers(pp: int, num_layers: int) -> NDArray[np.int64]:
    """[stage, 2]: its first layer, and the layer after its last."""
    return np.array([(layers.start, layers.stop) for layers in stages(num_layers, pp)])


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of layers that each range of the first list shares with each range of the second."""
    stop, start = np.minimum.outer(one[:, 1], other[:, 1]), np.maximum.outer(one[:, 0], other[:, 0])
    shared: NDArray[np.int64] = np.maximum(stop - start, 0)
    return shared


def _ways(options: Sequence[Candidate], sources: CostSources) -> Numbers:
    """[3, options]: the most bytes per second that a device of each mesh gets from others, copies in its memory, and
    gets over the network."""
    by_mesh: dict[DeviceMesh, tuple[float, float, float]] = {}
    for option in options:
        mesh = option.placement.mesh
        if mesh not in by_mesh:
            nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
            of_each_kind = {sources.nodes[node]: node for node in nodes}.values()
            links = [sources.links((replace(mesh, first_node=node, num_nodes=1),)) for node in of_each_kind]
            received = max(max(of_node.node, of_node.network) for of_node in links)
            copied, network = max(of_node.device for of_node in links), max(of_node.network for of_node in links)
            by_mesh[mesh] = received, copied, network
    return np.array([by_mesh[option.placement.mesh] for option in options]).T


def _parts(options: Sequence[Candidate], sizes: ModelSizes) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of the fullest device of each option, of a device on average, and the number of devices."""
    by_strategy: dict[Strategy, tuple[float, float, float]] = {}
    for option in options:
        strategy = option.placement.strategy
        if strategy not in by_strategy:
            stages = [sizes.stage_parameters(strategy, stage) * sizes.item for stage in range(strategy.pp)]
            by_strategy[strategy] = max(stages), sum(stages) / len(stages), strategy.num_devices
    columns = np.array([by_strategy[option.placement.strategy] for option in options])
    return columns[:, 0], columns[:, 1], columns[:, 2]
