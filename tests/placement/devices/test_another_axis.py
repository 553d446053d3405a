"""An axis that an engine begins to offer needs an entry in the table and fields of a strategy, and no other edit."""

import json
import subprocess
import sys

import pytest

from prefect_rlhf.placement.devices.axes import AXES, WITHIN_NODES, WITHIN_STEPS
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.planner.space.candidates import strategies_within_nodes

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def said():
    """What the product says of context parallelism in a process in which it is offered."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.placement.devices.offered_cp"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_axis_takes_devices_and_has_its_place_in_their_order(said):
    assert said["devices"] == [8, 4]
    assert said["strides"] == {"tp": 1, "cp": 2, "dp": 4}
    assert said["places"] == [[dp, cp, tp] for dp in (0, 1) for cp in (0, 1) for tp in (0, 1)]


def test_a_new_axis_is_written_read_and_checked_like_the_others(said):
    assert (said["text"], said["row"], said["file"], said["parameter"]) == ("dp2 tp2 cp2", "2", True, 2)
    seen = "dp 2 * tp 2 * pp 1 * cp 4 = 16"
    assert said["violation"] == f"plan.calls.ref_inference: got '{seen}', expected 8, the devices of mesh n0:0-7"


def test_searches_keep_axes_that_communicate_in_each_layer_on_a_node():
    assert (WITHIN_NODES, WITHIN_STEPS) == (("tp",), ("tp", "pp"))
    assert AXES["cp"].communicates == AXES["tp"].communicates  # so it will be kept there, too
    found = set(strategies_within_nodes(DeviceMesh(0, 2, 0, 2)))
    assert found == {Strategy(4), Strategy(2, 2), Strategy(2, 1, 2), Strategy(1, 2, 2), Strategy(1, 1, 4)}
