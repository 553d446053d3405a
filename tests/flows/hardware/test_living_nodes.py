"""Where nodes of a lease are gone: what a run that may make do with fewer devices goes on with."""

from dataclasses import replace

import pytest

from prefect_rlhf.flows.hardware.living_nodes import on_living_nodes
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.tasks.ray_nodes import KnownNode

ALIKE = ClusterShape("rack", 3, 2, 8 << 30)
KINDS = replace(ALIKE, node_devices=("new", "old", "old"))
HEAD = KnownNode("10.0.0.254", True, 0, 0)


def nodes(*devices):
    """Nodes with two devices; one whose name begins with a minus is gone."""
    named = enumerate(devices)
    return (HEAD, *(KnownNode(f"10.0.0.{n}", not name.startswith("-"), 2, 0, name.strip("-")) for n, name in named))


@pytest.mark.parametrize(
    ("cluster", "there", "least", "goes_on_with"),
    [
        (ALIKE, nodes("", "", ""), 2, "n0-2:0-1"),
        (ALIKE, nodes("", "-", ""), 2, "n0-1:0-1"),
        (ALIKE, nodes("any", "-", ""), 2, "n0-1:0-1"),
        (ALIKE, nodes("", "-"), 2, "n0:0-1"),
        (ALIKE, nodes("", "-"), 4, "n0-2:0-1"),
        (ALIKE, nodes("", "", "-"), 0, "n0-2:0-1"),
        (ALIKE, nodes(), 2, "n0-2:0-1"),
        (KINDS, nodes("old", "new", "old"), 2, "n0-2:0-1"),
        (KINDS, nodes("-new", "old", "old"), 2, "n1-2:0-1"),
        (KINDS, nodes("old", "new", "-old"), 2, "n0-1:0-1"),
        (KINDS, nodes("new", "-old", "-old"), 2, "n0:0-1"),
    ],
)
def test_the_largest_part_with_living_nodes_is_leased(monkeypatch, cluster, there, least, goes_on_with):
    """Of each kind as many; never fewer devices than asked for, and without `min_devices` the lease as it is."""
    monkeypatch.setattr("prefect_rlhf.tasks.ray_nodes.known_nodes", lambda: there)
    leased = Lease("mesh", "1", cluster, cluster.whole, cluster.whole.devices(), min_devices=least)
    said = []
    part = on_living_nodes(leased, said.append)
    mesh = DeviceMesh.parse(goes_on_with)
    assert (part.mesh, part.devices) == (mesh, mesh.devices())
    assert len(said) == (part != leased) and all(f"continuing on {goes_on_with}" in line for line in said)


def test_a_node_with_too_few_devices_does_not_count(monkeypatch):
    monkeypatch.setattr(
        "prefect_rlhf.tasks.ray_nodes.known_nodes", lambda: (*nodes("", ""), KnownNode("10.0.0.9", True, 1, 0))
    )
    leased = Lease("mesh", "1", ALIKE, ALIKE.whole, ALIKE.whole.devices(), min_devices=2)
    assert on_living_nodes(leased, print).mesh.name == "n0-1:0-1"


def test_ray_is_not_asked_for_a_lease_of_one_node_or_a_dry_run(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.tasks.ray_nodes.known_nodes", lambda: pytest.fail("it was asked"))
    one = DeviceMesh.parse("n1:0-1")
    for mesh, devices in ((one, one.devices()), (ALIKE.whole, ())):
        leased = Lease("mesh", "1", ALIKE, mesh, devices, min_devices=1)
        assert on_living_nodes(leased, print) is leased
