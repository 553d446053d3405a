"""Measured memory beside the certificate: the most of all reports, and a line for devices beyond their certificate."""

import json
from dataclasses import replace

import pytest

from prefect_rlhf.engines.commands import GpuMemory, RankReport
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.reporting.memory import MeasuredMemory
from prefect_rlhf.tasks.running.outcome import outcome_of
from tests.placement.planner.test_planner import WORKLOAD
from tests.support.strategies import GIB, dpo

TWO = ClusterShape("two", 1, 2, 80 * GIB)
PLAN = preset("flattening", dpo(), TWO, TWO.whole)


def certificate(kind):
    return certify_plan(PLAN, dpo(), WORKLOAD, kind)


def measured(kind):
    return MeasuredMemory(certificate(kind), Lease("p", "1", TWO, TWO.whole, TWO.whole.devices(), kind))


def reports(*kept, gpu=None):
    """Reports of ranks 0 and on, which keep so many bytes; `gpu` is the memory of each GPU."""
    return outcome_of(
        {
            rank: RankReport(seconds=1.0, device_bytes=num, resident_bytes=num, store_bytes=0, gpu=gpu)
            for rank, num in enumerate(kept)
        }
    )


def gpu(used, free=GIB):
    return GpuMemory(used - 2 * GIB, used - GIB, used, free)


def test_on_cpu_the_tensors_that_engines_keep_are_compared():
    memory, (_, resident) = measured("cpu"), certificate("cpu").most_resident[0]
    memory.add(reports(resident - 1, 5), "build")
    memory.add(reports(resident, 4), "train")
    memory.add(reports(7), "infer")
    assert [(d.device, d.measured_bytes, d.at) for d in memory.devices] == [
        ("n0:0", resident, "train"),
        ("n0:1", 5, "build"),
    ]
    assert memory.excess() is None


def test_on_a_gpu_the_whole_device_is_compared_with_its_peak():
    memory, peak = measured("cuda"), certificate("cuda").peaks[0].num_bytes
    memory.add(reports(1, gpu=gpu(peak, 9 * GIB)), "build")
    assert memory.excess() is None
    memory.add(reports(1, gpu=gpu(peak - GIB, 3 * GIB)), "train")
    (device,) = memory.devices
    assert (device.measured_bytes, device.at, device.is_beyond) == (peak, "build", False)
    assert device.gpu == {**gpu(peak)._asdict(), "free_bytes": 3 * GIB}
    assert list(device.row()) == ["device", "certified", "measured", "at", "allocated", "reserved", "used", "free"]


def test_a_device_beyond_its_certificate_is_named_once():
    memory, peak = measured("cuda"), certificate("cuda").peaks[0].num_bytes
    memory.add(reports(1, 1, gpu=gpu(peak + 1)), "actor.train_step · step 0")
    line = memory.excess()
    assert line.startswith("n0:0 held ") and "at actor.train_step · step 0" in line and "; 1 other device" in line
    memory.add(reports(1, gpu=gpu(peak + GIB)), "actor.train_step · step 1")
    assert memory.excess() is None
    kept = json.loads(memory.to_json())["devices"]
    assert kept[0]["measured_bytes"] == peak + GIB and kept[0]["certified_bytes"] == peak


def test_after_a_switch_the_numbers_of_earlier_plans_stay_in_the_file():
    """So that the file which a warning names has its numbers, however many plans follow."""
    first = measured("cuda")
    first.add(reports(1, gpu=gpu(70 * GIB)), "actor.train_step · step 0")
    memory, lease = first, Lease("p", "1", TWO, TWO.whole, TWO.whole.devices(), "cuda")
    for name in ("second", "third"):
        memory = MeasuredMemory(replace(certificate("cuda"), plan=name), lease, memory)
    memory.add(reports(1, gpu=gpu(3 * GIB)), "actor.train_step · step 9")
    kept = json.loads(memory.to_json())
    assert (kept["plan"], kept["devices"][0]["measured_bytes"]) == ("third", 3 * GIB)
    assert [(of["plan"], [d["at"] for d in of["devices"]]) for of in kept["earlier_plans"]] == [
        (PLAN.name, ["actor.train_step · step 0"]),
        ("second", []),
    ]


def test_a_device_without_a_model_has_no_certificate_and_is_left_out():
    alone = Lease("p", "1", TWO, TWO.whole, TWO.whole.devices(), "cuda")
    small = ClusterShape("small", 1, 1, 80 * GIB)
    on_first = certify_plan(preset("flattening", dpo(), small, small.whole), dpo(), WORKLOAD, "cuda")
    memory = MeasuredMemory(on_first, alone)
    memory.add(reports(1, 1, gpu=gpu(3 * GIB)), "build")
    assert [device.device for device in memory.devices] == ["n0:0"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_reports_there_is_no_row(kind):
    assert measured(kind).rows() == []
