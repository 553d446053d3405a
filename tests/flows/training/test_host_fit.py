"""A host that cannot hold a run on CPU is refused before a device is used, in a line; a host that may is not."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.host_memory import FreeMemory
from prefect_rlhf.flows.training import host_fit
from prefect_rlhf.flows.training.host_fit import check_host, refuse_what_does_not_fit
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.processes import host_needs
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.placement.planner.test_planner import WORKLOAD
from tests.support.strategies import TWO_DEVICES, dpo

CERTIFICATE = certify_plan(preset("flattening", dpo(), TWO_DEVICES, TWO_DEVICES.whole), dpo(), WORKLOAD, "cpu")


def lease(kind="cpu"):
    return Lease("p", "1", TWO_DEVICES, TWO_DEVICES.whole, TWO_DEVICES.whole.devices(), kind)


def test_the_line_names_bytes_host_and_remedy(monkeypatch):
    (need,) = host_needs(CERTIFICATE).values()
    monkeypatch.setattr(host_fit.socket, "gethostname", lambda: "small")
    with pytest.raises(InvalidInput) as refused:
        refuse_what_does_not_fit(need, FreeMemory(1 << 20, "memory.max of /sys/fs/cgroup"))
    line = str(refused.value)
    assert line.startswith("memory of the host: got 'at least ")
    for words in ("1.00 MiB that small has left (memory.max of /sys/fs/cgroup)", "fewer devices, bfloat16"):
        assert words in line
    assert "\n" not in line


def test_a_host_with_the_lowest_estimate_is_not_refused():
    (need,) = host_needs(CERTIFICATE).values()
    refuse_what_does_not_fit(need, FreeMemory(need.least_bytes, "x"))
    with pytest.raises(InvalidInput):
        refuse_what_does_not_fit(need, FreeMemory(need.least_bytes - 1, "x"))


def test_only_cpu_runs_are_checked_for_host_memory(monkeypatch):
    lines = []
    monkeypatch.setattr(host_fit, "log_info", lines.append)
    monkeypatch.setattr(host_fit, "free_memory", lambda: FreeMemory(0, "x"))
    check_host([CERTIFICATE], lease("cuda"))
    assert lines == []
    with pytest.raises(InvalidInput):
        check_host([CERTIFICATE], lease())
    monkeypatch.setattr(host_fit, "free_memory", lambda: FreeMemory(1 << 50, "x"))
    check_host([CERTIFICATE], lease())
    assert len(lines) == 1 and lines[0].startswith("memory of the run's processes: about ")
