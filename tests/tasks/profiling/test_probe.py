"""A probe of two real ranks: every speed is measured, and engines that are not asked for are not built."""

import pytest

from prefect_rlhf.flows.hardware.node_hardware import CPU
from prefect_rlhf.tasks.profiling.probe import probe

pytestmark = [pytest.mark.slow, pytest.mark.all]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_probe_measures_every_speed(num_devices):
    speeds = probe("cpu", num_devices, "float32", ("megatron", "vllm"), CPU)
    assert speeds.dtype == "float32" and 0 <= speeds.busy < 1
    assert 1e8 < speeds.product_flops < 1e14
    assert 1e8 < speeds.decoding_flops <= speeds.further_rows_flops < 1e15
    assert 1e7 < speeds.elementwise_bytes_per_second <= speeds.memory_bytes_per_second
    assert speeds.megatron_layer_seconds < 1 and speeds.vllm_layer_seconds < 1
    assert (speeds.link_bytes_per_second is None) == (num_devices == 1)


def test_only_requested_engines_are_timed():
    speeds = probe("cpu", 1, "bfloat16", (), CPU)
    assert speeds.megatron_layer_seconds is None and speeds.vllm_layer_seconds is None
    assert speeds.elementwise_bytes_per_second is None
