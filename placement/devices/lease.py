"""A lease: the devices of a cluster that only one flow run may use at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from prefect_rlhf.errors.errors import DeviceOutsideLease, InvalidInput
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, Device, DeviceMesh

ENVIRONMENT_VARIABLE = "RLHF_LEASE"


@dataclass(frozen=True, slots=True)
class Lease:
    """The devices that a flow run leases.

    >>> cluster = ClusterShape("desk", 1, 2, 8 << 30)
    >>> lease = Lease("mesh-pool", "8c1f", cluster, cluster.whole, cluster.whole.devices())
    >>> lease == Lease.from_json(lease.to_json())
    True
    >>> lease.require(DeviceMesh(0, 1, 2, 2), "actor.generate")
    Traceback (most recent call last):
        ...
    prefect_rlhf.errors.errors.DeviceOutsideLease: actor.generate: n0:2 is outside lease 8c1f (n0:0-1 of desk)
    """

    pool: str
    """The work pool; `local` for a run without a worker."""
    id: str
    cluster: ClusterShape
    mesh: DeviceMesh
    devices: tuple[Device, ...]
    """Those of `mesh`. A dry run has the mesh that it would get and no devices, since it may plan but not use any."""
    kind: Backend = "cpu"
    min_devices: int = 0
    """With so many the run may continue after a loss of nodes; 0 means only with all."""
    shows_only_its_gpus: bool = False
    """Whether the run's processes see only the leased GPUs, and count them from 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", replace(self.cluster, backend=self.kind, leased=self.mesh))

    @property
    def devices_of_nodes(self) -> tuple[int, ...]:
        """The number of leased devices on each of its nodes, in order."""
        nodes = Counter(device.node for device in self.devices)
        return tuple(nodes[node] for node in sorted(nodes))

    @property
    def node_devices(self) -> tuple[str, ...]:
        """The kind of device on each node of its mesh, in order; empty if the cluster does not state it."""
        first = self.mesh.first_node
        return self.cluster.node_devices[first : first + self.mesh.num_nodes]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The ranks' GPUs in order, as numbers in the list of the process that has the lease."""
        if self.shows_only_its_gpus:
            return tuple(range(len(self.devices)))
        return tuple(device.index for device in self.devices)

    def require(self, mesh: DeviceMesh, doing: str) -> None:
        """Raise DeviceOutsideLease if `mesh`, which `doing` is about to use, has a device outside the lease."""
        outside = next((device for device in mesh.devices() if device not in self.devices), None)
        if outside is not None:
            leased = f"{self.mesh.name} of {self.cluster.name}" if self.devices else "a dry run: no devices"
            raise DeviceOutsideLease(f"{doing}: {outside} is outside lease {self.id} ({leased})")

    def to_json(self) -> str:
        devices = [device._asdict() for device in self.devices]
        return json.dumps(asdict(self) | {"devices": devices}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, field: str = ENVIRONMENT_VARIABLE) -> Lease:
        """Read what `to_json` wrote. Raises InvalidInput for any other text."""
        try:
            values = json.loads(text)
            written = {key: x for key, x in values["cluster"].items() if key != "leased"}  # it is `mesh`
            shape: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in written.items()}
            values["cluster"] = ClusterShape(**shape)
            values["mesh"] = DeviceMesh(**values["mesh"])
            values["devices"] = tuple(Device(**device) for device in values["devices"])
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(field, text, "the JSON of a lease, as the gpu-mesh worker writes it") from error

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Lease | None:
        """Return the lease that a worker gave to the process with this environment; None without a worker."""
        text = environment.get(ENVIRONMENT_VARIABLE)
        return None if text is None else cls.from_json(text)
