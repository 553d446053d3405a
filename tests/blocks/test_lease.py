"""The lease that a flow run finds: given in the same process, by a worker in the environment, or its own."""

import pytest

from prefect_rlhf.blocks.lease import ONE_DEVICE, dry_lease, given_lease, leased_devices, running_on
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape

pytestmark = pytest.mark.quick

DESK = ClusterShape("desk", 1, 2, 8 << 30)
OURS, WORKERS = (Lease("local", name, DESK, DESK.whole, DESK.whole.devices()) for name in ("ours", "workers"))


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Neither a worker's lease nor another program's devices."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_run_of_the_same_process_gets_the_lease_as_a_value():
    with running_on(OURS), leased_devices() as leased:
        assert leased is OURS
    assert given_lease() is None


def test_a_worker_gives_it_through_the_environment(monkeypatch):
    """What the process itself leases comes first."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, WORKERS.to_json())
    with leased_devices() as leased:
        assert leased == WORKERS
    with running_on(OURS), leased_devices() as leased:
        assert leased is OURS


def test_without_a_lease_a_run_gets_a_device_and_a_dry_run_does_not():
    with leased_devices() as leased:
        assert (leased.cluster, len(leased.devices)) == (ONE_DEVICE, 1)
    with leased_devices(dry_run=True) as leased:
        assert leased == dry_lease(ONE_DEVICE) and leased.devices == ()
