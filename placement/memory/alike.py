"""Values by class of device: equal devices of a plan are counted once, not device by device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance, Placement

Ints = NDArray[np.int64]
Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Spread(Generic[Value]):
    """A value for each of some devices: device `numbers[i]` has the value `values[kinds[i]]`.

    A cluster's devices are numbered node by node.
    """

    numbers: Ints
    kinds: Ints
    values: tuple[Value, ...]

    def column(self, num_devices: int) -> Ints:
        """Return a column by device number: 1 plus the kind of the device's value, or 0 if it has none."""
        column = np.zeros(num_devices, dtype=np.int64)
        column[self.numbers] = self.kinds + 1
        return column


def spread_by_replica(
    placed: Placement | ModelInstance, per_node: int, replicas: Sequence[Key], value: Callable[[Key, int], Value]
) -> Spread[Value]:
    """Return each replica's and pipeline stage's value on their devices; replicas with equal keys have equal values.

    A node has `per_node` devices.
    """
    alike = {key: number for number, key in enumerate(dict.fromkeys(replicas))}
    pp, (replica, _, stage) = placed.strategy.pp, coordinates(placed.strategy)
    kind_of = np.array([alike[key] for key in replicas], dtype=np.int64)
    values = tuple(value(key, number) for key in alike for number in range(pp))
    return Spread(device_numbers(placed, per_node), kind_of[replica] * pp + stage, values)


def spread_on(meshes: Iterable[DeviceMesh], per_node: int, value: Value) -> Spread[Value]:
    """Return the same value on all devices of these meshes."""
    numbers = np.unique(np.concatenate([mesh_numbers(mesh, per_node) for mesh in meshes]))
    return Spread(numbers, np.zeros(len(numbers), dtype=np.int64), (value,))


def classes(columns: Iterable[Ints], num_devices: int) -> tuple[Ints, Ints]:
    """Return each class's first device, and each device's class; devices with equal columns share a class."""
    codes = np.zeros(num_devices, dtype=np.int64)
    for column in columns:
        _, codes = np.unique(codes * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
    return first, codes


@lru_cache(maxsize=512)
def device_numbers(placed: Placement | ModelInstance, per_node: int) -> Ints:
    """Return a placement's device numbers, in the order of its coordinates."""
    numbers = mesh_numbers(placed.mesh, per_node)
    return numbers[list(placed.device_order)] if placed.device_order else numbers


@lru_cache(maxsize=1024)
def mesh_numbers(mesh: DeviceMesh, per_node: int) -> Ints:
    """Return a mesh's device numbers in ascending order."""
    nodes = np.arange(mesh.first_node, mesh.first_node + mesh.num_nodes, dtype=np.int64)
    devices = np.arange(mesh.first_device, mesh.first_device + mesh.devices_per_node, dtype=np.int64)
    return np.add.outer(nodes * per_node, devices).ravel()


@cache
def coordinates(strategy: Strategy) -> tuple[Ints, Ints, Ints]:
    """Return replica, tp part and stage for each coordinate of a strategy, in order.

    >>> [axis.tolist() for axis in coordinates(Strategy(dp=2, pp=2))]
    [[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]
    """
    places = np.array([(at.dp, at.tp, at.pp) for at in strategy.coordinates()], dtype=np.int64)
    return places[:, 0], places[:, 1], places[:, 2]


def summed(numbers: Ints, amounts: Sequence[int] | Ints, length: int) -> Ints:
    """Add up the amounts for each number below `length`."""
    sums = np.zeros(length, dtype=np.int64)
    np.add.at(sums, numbers, np.asarray(amounts, dtype=np.int64))
    return sums
