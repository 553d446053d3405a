"""Devices that are alike share a lane, and no lane hides one that is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.mesh import DeviceMesh, lanes

pytestmark = pytest.mark.quick

DEVICES = DeviceMesh(0, 3, 0, 4).devices()


@given(values=st.dictionaries(st.sampled_from(DEVICES), st.booleans()))
def test_every_device_is_in_a_lane_of_equal_devices(values):
    found = lanes(values)
    assert sorted(device for lane in found for device in lane.devices()) == sorted(values)
    assert all(len({values[device] for device in lane.devices()}) == 1 for lane in found)


def test_equal_nodes_form_a_lane_in_any_device_order():
    assert lanes(dict.fromkeys(reversed(DEVICES))) == [DeviceMesh(0, 3, 0, 4)]


def test_the_same_devices_of_nodes_that_do_not_follow_each_other_are_lanes_of_their_own():
    ends = {device: "busy" for device in DEVICES if device.node != 1}
    assert [lane.name for lane in lanes(ends)] == ["n0:0-3", "n2:0-3"]


def test_halves_of_nodes_are_lanes_in_the_order_of_the_devices():
    assert [lane.name for lane in lanes({device: device.index < 2 for device in DEVICES[:8]})] == [
        "n0:0-1",
        "n0:2-3",
        "n1:0-1",
        "n1:2-3",
    ]
