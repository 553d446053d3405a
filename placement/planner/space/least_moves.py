"""Lower bounds on the time to move a role's weights between two calls, for any position of their meshes.

A device's links work at once (`cost.moves`), so the least time is that of the busiest: the bytes that a device
receives, the bytes that the devices of the trained copy send, and the bytes that must cross the network because no
device of a node has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
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
Ints = NDArray[np.int64]


def least_move_seconds(
    trained: Sequence[Candidate], readers: Sequence[Candidate], sizes: ModelSizes, sources: CostSources
) -> Numbers:
    """Return a lower bound on a weight move's time, [3, trained, readers]: on disjoint, overlapping and equal meshes.

    It holds for any order of the readers' devices. A device that holds a part of at most s bytes receives the bytes
    that its own part of t bytes has in addition (and of matrices `_received_elements`), and copies the rest. The
    devices of the trained copy share the sending of all bytes that the readers receive. A device receives from its own
    node and from others at once only if the trained copy is on several nodes, and sends likewise.
    """
    held, _, have = _parts(trained, sizes)
    need, mean, want = _parts(readers, sizes)
    sends, receives = _rates(trained, readers, sources), _rates(readers, trained, sources).T
    copies = _ways(readers, sources)[1]
    common = np.minimum(have[:, None], want[None, :])
    total = (want * mean)[None, :]
    apart = np.maximum(need[None, :] / receives, total / have[:, None] / sends)
    matrices = _received_elements(trained, readers, sizes) * sizes.item
    received = np.maximum(need[None, :] - held[:, None], matrices) / receives
    sent = np.maximum(total - common * held[:, None], 0) / have[:, None] / sends
    over = np.maximum(np.maximum(received, sent), need[None, :] / (receives + copies))
    all_crossing, overlapping, crossing = _network_seconds(trained, readers, sizes, sources)
    on_whole_nodes = np.logical_or.outer(_have_whole_nodes(trained, sources), _have_whole_nodes(readers, sources))
    over_network = np.stack([np.where(on_whole_nodes, all_crossing, crossing), overlapping, crossing])
    least: Numbers = np.maximum(np.stack([apart, over, over]), over_network)
    return least


def _have_whole_nodes(options: Sequence[Candidate], sources: CostSources) -> NDArray[np.bool_]:
    """Whether the mesh of each option has all devices of its nodes: disjoint meshes are then on other nodes."""
    meshes = [option.placement.mesh for option in options]
    return np.array([mesh.devices_per_node == sources.nodes[mesh.first_node].devices_per_node for mesh in meshes])


def _network_seconds(
    trained: Sequence[Candidate], readers: Sequence[Candidate], sizes: ModelSizes, sources: CostSources
) -> Numbers:
    """[3, trained, readers]: the least time for bytes that must cross the network, as `network_layers`."""
    rates = np.minimum.outer(_ways(trained, sources)[2], _ways(readers, sources)[2])
    seconds = np.zeros((3, *rates.shape))
    by_chain: dict[tuple[Chain, float], list[int]] = defaultdict(list)
    for index, reader in enumerate(readers):
        by_chain[Chain.of(sizes.held_by(reader.placement.engine), reader.placement.strategy.ep)].append(index)
    for (chain, layer_bytes), columns in by_chain.items():
        alike = [readers[column] for column in columns]
        (trained_spreads, source), (reader_spreads, target) = _alike(trained), _alike(alike)
        layers = _network_table(trained_spreads, reader_spreads, chain)[:, source][:, :, target]
        num_bytes = layers * layer_bytes / np.array([reader.placement.strategy.tp for reader in alike])
        there = np.broadcast_to(rates[:, columns], num_bytes.shape)
        seconds[:, :, columns] = np.divide(num_bytes, there, out=np.zeros_like(num_bytes), where=there > 0)
    return seconds


class Chain(NamedTuple):
    """The parts that a pipeline divides: layers, and the tables before the first and after the last, in units of
    layers.
    """

    num_layers: int
    embedding: float = 0.0
    head: float = 0.0

    @classmethod
    def of(cls, sizes: ModelSizes, ep: int) -> tuple[Chain, float]:
        """Return a copy's chain, and the bytes of a layer that tp splits (of experts, the ep-th part).

        A table that both ends share is left out.
        """
        layer = sizes.moved_layer.split + sizes.moved_experts / ep
        has_head, table = "lm" in sizes.head and not sizes.adapter, 0 if sizes.adapter else sizes.table / layer
        embedding, head = table * (not (has_head and sizes.tied)), table * (has_head and not sizes.tied)
        return cls(sizes.num_layers, embedding, head), layer * sizes.item


class Spread(NamedTuple):
    """Pipeline stages, the devices of each, and how many devices share a node."""

    pp: int
    group: int
    per_node: int

    @classmethod
    def of(cls, placement: Placement) -> Spread:
        strategy = placement.strategy
        return cls(strategy.pp, strategy.stride("pp"), placement.mesh.devices_per_node)


def _alike(options: Sequence[Candidate]) -> tuple[list[Spread], NDArray[np.int64]]:
    """The distinct spreads, and the index of each option's own spread."""
    numbers: dict[Spread, int] = {}
    index = [numbers.setdefault(Spread.of(option.placement), len(numbers)) for option in options]
    return list(numbers), np.array(index)


def _network_table(sources: Sequence[Spread], targets: Sequence[Spread], chain: Chain) -> Numbers:
    """[3, sources, targets]: `network_layers` of each with each."""
    by_stages: dict[int, list[int]] = defaultdict(list)
    for index, target in enumerate(targets):
        by_stages[target.pp].append(index)
    table = np.zeros((3, len(sources), len(targets)))
    for columns in by_stages.values():
        alike = tuple(targets[column] for column in columns)
        for row, source in enumerate(sources):
            table[:, row, columns] = network_layers(source, alike, chain)
    return table


@lru_cache(maxsize=1 << 16)  # a question poses several problems, of the same options
def network_layers(source: Spread, targets: tuple[Spread, ...], chain: Chain) -> Numbers:
    """Return a lower bound on the layers, of its tp part, that a device of each target receives or sends over the
    network.

    The shape is [3, targets]: without a common node, so that all layers cross the network; on meshes that overlap but
    are not equal; and with any common nodes. All targets have the same number of pipeline stages. The source's devices
    are in the plain order, which puts successive stages on a node; the targets' devices are in any order. A node that
    has a part of a stage is assumed to have all of it. Only devices on a stage's nodes get its layers without the
    network, and its holders share the sending of the rest. A target's stage that fills several nodes has a device on
    the last of them, ranked by how much of it they have. Of all positions of the target's nodes, the cheapest counts.
    """
    (target_pp,) = {target.pp for target in targets}
    held, wanted = _layers(source.pp, chain), _layers(target_pp, chain)
    group, per_node = np.array([target[1:] for target in targets]).T
    begin = np.arange(source.pp) * source.group
    first, stop = begin // source.per_node, (begin + source.group - 1) // source.per_node + 1  # nodes of each stage
    near = np.arange((stop - first).max() + 1) * per_node[:, None, None]
    near = near - np.multiply.outer(group, np.arange(target_pp))[:, :, None]
    far = group[:, None, None] - np.clip(near, 0, group[:, None, None])
    sends = _needed(source.pp, target_pp, chain).T @ far / source.group  # [target, stage, common nodes]
    nodes, num_nodes = np.arange(stop[-1]) * source.per_node, np.maximum(target_pp * group // per_node, 1)
    ends = np.stack([held[nodes // source.group, 0], held[(nodes + source.per_node - 1) // source.group, 1]], axis=1)
    held_there, whole = _common(wanted, ends), wanted[:, 1] - wanted[:, 0]

    def sent(begin: Ints) -> Numbers:
        """For [target, position] of its first node, in nodes behind the source's: of the least position."""
        behind = begin[..., None]
        common = np.minimum(stop, behind + num_nodes[:, None, None]) - np.maximum(first, behind)
        at = np.arange(len(targets))[:, None, None], np.arange(source.pp), np.maximum(common, 0)
        least: Numbers = sends[at].max(axis=2).min(axis=1)
        return least

    def received(held_there: Numbers) -> Numbers:
        most_first = np.hstack([-np.sort(-held_there, axis=1), np.zeros((len(whole), 1))])
        covered = most_first[:, np.minimum(-(-group // per_node) - 1, held_there.shape[1])]
        most: Numbers = (whole[:, None] - covered).max(axis=0)
        return most

    all_layers = np.maximum(whole.max(), sends[:, :, 0].max(axis=1))
    common = np.maximum(received(held_there), sent(_inside(len(nodes), num_nodes)))
    aside = np.minimum(received(held_there[:, 1:]), received(held_there[:, :-1]))
    aside = np.maximum(aside, sent(np.array([[-1, 1]] * len(targets))))
    return np.stack([all_layers, np.where((num_nodes == len(nodes)) & (num_nodes > 1), aside, common), common])


def _inside(num_nodes: int, wanted: Ints) -> Ints:
    """[target, position]: the first nodes of targets of so many nodes inside a source, or from its first node on.

    No other position shares more nodes.
    """
    most: Ints = np.maximum(num_nodes - wanted, 0)
    return np.minimum(np.arange(most.max() + 1), most[:, None])


@cache
def _needed(source_pp: int, target_pp: int, chain: Chain) -> Numbers:
    """[target stage, stage]: the layers of a stage that each of the target's stages needs, the most first."""
    return -np.sort(-_common(_layers(target_pp, chain), _layers(source_pp, chain)), axis=0)


@cache
def _layers(pp: int, chain: Chain) -> Numbers:
    """[stage, 2]: the bytes before its first layer, and before the layer that follows its last."""
    bounds = [0.0, *(chain.embedding + layers.stop for layers in stages(chain.num_layers, pp))]
    bounds[-1] += chain.head
    return np.array(list(pairwise(bounds)))


def _common(one: Numbers, other: Numbers) -> Numbers:
    """Numbers of layers that each range of the first list shares with each range of the second."""
    stop, start = np.minimum.outer(one[:, 1], other[:, 1]), np.maximum.outer(one[:, 0], other[:, 0])
    shared: Numbers = np.maximum(stop - start, 0.0)
    return shared


def _rates(ours: Sequence[Candidate], theirs: Sequence[Candidate], sources: CostSources) -> Numbers:
    """[ours, theirs]: the most bytes per second between a device of ours and all devices of theirs."""
    node, _, network = _ways(ours, sources)[:, :, None]
    several = np.array([option.placement.mesh.num_nodes > 1 for option in theirs])
    rates: Numbers = np.where(several, node + network, np.maximum(node, network))
    return rates


def _received_elements(trained: Sequence[Candidate], readers: Sequence[Candidate], sizes: ModelSizes) -> Numbers:
    """[trained, readers]: elements of layers' matrices that some device of the readers gets from others, at least.

    It keeps what its stage shares with the stage that it holds: of some layers, and of each the narrower of both parts.
    Keys and values count unless devices have copies of them.
    """
    (pp, tp, ep), (to_pp, to_tp, to_ep) = (
        np.array([(s.pp, s.tp, s.ep) for s in (option.placement.strategy for option in options)]).T
        for options in (trained, readers)
    )
    (pps, source), (to_pps, target) = (np.unique(each, return_inverse=True) for each in (pp, to_pp))
    layers = np.array(
        [[_most_lacking(one, other, sizes.num_layers) for other in to_pps.tolist()] for one in pps.tolist()]
    )
    wanted, kept = np.moveaxis(layers[source][:, target], -1, 0)
    narrower, of_experts = np.maximum.outer(tp, to_tp), np.maximum.outer(tp * ep, to_tp * to_ep)
    layer = sizes.moved_layer
    matrices = layer.split - np.where(narrower > sizes.kv_heads, layer.keys_and_values, 0)
    experts = sizes.moved_experts * (wanted / (to_tp * to_ep) - kept / of_experts)
    elements: Numbers = matrices * (wanted / to_tp - kept / narrower) + experts
    return elements


@cache
def _most_lacking(source_pp: int, target_pp: int, num_layers: int) -> tuple[float, float]:
    """The target stage's layers that share few with any source stage, and the most that it shares."""
    wanted, held = (_layers(pp, Chain(num_layers)) for pp in (target_pp, source_pp))
    layers, shared = wanted[:, 1] - wanted[:, 0], _common(wanted, held).max(axis=1)
    stage = int(np.argmax(layers - shared))
    return float(layers[stage]), float(shared[stage])


def _ways(options: Sequence[Candidate], sources: CostSources) -> Numbers:
    """[3, options]: the most bytes per second that a device of each mesh gets from its node, copies in its memory, and
    gets over the network."""
    by_mesh: dict[DeviceMesh, tuple[float, float, float]] = {}
    for option in options:
        mesh = option.placement.mesh
        if mesh not in by_mesh:
            nodes = range(mesh.first_node, mesh.first_node + mesh.num_nodes)
            of_each_kind = {sources.nodes[node]: node for node in nodes}.values()
            links = [sources.links((replace(mesh, first_node=node, num_nodes=1),)) for node in of_each_kind]
            by_mesh[mesh] = (
                max(of_node.node for of_node in links),
                max(of_node.device for of_node in links),
                max(of_node.network for of_node in links),
            )
    return np.array([by_mesh[option.placement.mesh] for option in options]).T


def _parts(options: Sequence[Candidate], sizes: ModelSizes) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of the fullest device of each option, of a device on average, and the number of devices."""
    by_strategy: dict[Strategy, tuple[float, float, float]] = {}
    for option in options:
        strategy = option.placement.strategy
        if strategy not in by_strategy:
            stages = [sizes.stage_trained(strategy, stage) * sizes.item for stage in range(strategy.pp)]
            by_strategy[strategy] = max(stages), sum(stages) / len(stages), strategy.num_devices
    columns = np.array([by_strategy[option.placement.strategy] for option in options])
    return columns[:, 0], columns[:, 1], columns[:, 2]
