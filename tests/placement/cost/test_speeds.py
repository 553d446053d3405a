"""Probed speeds: what a node reaches with them, which of two probes counts, and which files are refused."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.node_hardware import CPU, node_hardware
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.speeds import KnownSpeeds, Speeds
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES

pytestmark = pytest.mark.quick

SPEEDS = Speeds(
    dtype="bfloat16",
    product_flops=5e11,
    memory_bytes_per_second=8e9,
    host_bytes_per_second=5e9,
    link_bytes_per_second=9e8,
    link_latency_seconds=2e-4,
    megatron_layer_seconds=1.5e-3,
    vllm_layer_seconds=0.3e-3,
    elementwise_bytes_per_second=2e9,
)
KNOWN = KnownSpeeds("cpu-2-abc", (SPEEDS,))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_node_reaches_exactly_the_probed_speeds(device):
    """The estimate multiplies a peak by its reached share, so the share must cancel."""
    hardware = SPEEDS.on(node_hardware(device, 2, None))
    times = DatasheetTimes.of(ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"]), hardware)
    links = hardware.links()
    assert (times.flops, links.device, times.elementwise) == pytest.approx((5e11, 8e9, 2e9))
    assert (links.node, links.host, links.latency_seconds) == pytest.approx((9e8, 5e9, 2e-4))
    assert times.decode(1, 8, 1, cuda_graphs=False).launch == 1.5e-3
    assert times.decode(1, 8, 1, cuda_graphs=True).launch == 0.3e-3


def test_unmeasured_constants_stay_unchanged():
    bare = Speeds(dtype="bfloat16", product_flops=1e11, memory_bytes_per_second=1e9, host_bytes_per_second=1e9)
    node = bare.on(CPU)
    assert node.device.link_bytes_per_second == CPU.device.link_bytes_per_second
    assert node.device.float32_flops == CPU.device.float32_flops
    assert node.efficiency == CPU.efficiency


def test_of_two_probes_each_number_is_the_better():
    busy = replace(SPEEDS, product_flops=1e11, link_bytes_per_second=2e9, megatron_layer_seconds=4e-3, busy=0.7)
    better = replace(SPEEDS, link_bytes_per_second=2e9)
    assert busy.better(SPEEDS) == SPEEDS.better(busy) == better


def test_of_two_speeds_of_element_wise_work_the_less_busy_probe_counts():
    """It is a difference of measurements: on busy cores it may be too high as well as too low."""
    for speed in (1e9, 7e9):
        busy = replace(SPEEDS, elementwise_bytes_per_second=speed, busy=0.7)
        assert busy.better(SPEEDS) == SPEEDS.better(busy) == SPEEDS


def test_a_number_that_a_single_probe_has_is_kept():
    assert SPEEDS.better(replace(SPEEDS, elementwise_bytes_per_second=None)) == SPEEDS
    assert replace(SPEEDS, vllm_layer_seconds=None).better(SPEEDS) == SPEEDS


def test_speeds_survive_json():
    assert KnownSpeeds.from_json(KNOWN.to_json(), "speeds.json") == KNOWN


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"dtype"', '"format"', "speeds.json.by_dtype.0.dtype"),
        ("500000000000.0", "-1", "speeds.json.by_dtype.0.product_flops"),
        ("500000000000.0", '"fast"', "speeds.json.by_dtype.0.product_flops"),
        ('"machine"', '"machines"', "speeds.json.machine"),
        ("}", "", "speeds.json"),
    ],
)
def test_a_damaged_speeds_file_is_refused_by_field_in_one_line(old, new, field):
    with pytest.raises(InvalidInput) as caught:
        KnownSpeeds.from_json(KNOWN.to_json().replace(old, new, 1), "speeds.json")
    assert str(caught.value).startswith(f"{field}: got ") and "\n" not in str(caught.value)


def test_on_cpu_a_micro_batch_costs_the_launches_of_its_layers():
    """Otherwise pipelines of many tiny micro-batches look three times as fast as they are."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    cpu, gpu = (DatasheetTimes.of(sizes, SPEEDS.on(node_hardware(device, 2, None))) for device in ("cpu", "h100"))
    for times, launches in ((cpu, 1.5e-3), (gpu, 0.0)):
        assert times.forward(64, 128, 1).launch == launches
        assert times.backward(64, 128, 1).launch == 2 * launches


def test_on_cpu_element_wise_work_takes_as_long_as_its_own_speed_says():
    """Kernels that compute on each element are far slower than copies, and only there."""
    sizes, copied = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"]), replace(SPEEDS, elementwise_bytes_per_second=8e9)
    slow, fast = (DatasheetTimes.of(sizes, speeds.on(CPU)).forward(64, 128, 1) for speeds in (SPEEDS, copied))
    assert slow.memory_traffic == pytest.approx(4 * fast.memory_traffic)
    assert (slow.compute, slow.launch) == (fast.compute, fast.launch)
    assert DatasheetTimes.of(sizes, node_hardware("h100", 1, None)).elementwise_share == 1


def test_products_of_a_decoding_step_have_a_speed_of_their_own():
    """Some processors multiply many tokens of bfloat16 faster in float32, but not a few tokens."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    slower = replace(SPEEDS, decoding_flops=SPEEDS.product_flops / 2)
    same, slow = (DatasheetTimes.of(sizes, speeds.on(CPU)) for speeds in (SPEEDS, slower))
    assert slow.forward(64, 128, 1) == same.forward(64, 128, 1)
    assert slow.sample(2048, 1).compute == pytest.approx(2 * same.sample(2048, 1).compute)
    layers = [times.decode(2048, 0, 1, cuda_graphs=False) for times in (same, slow)]
    products = 2048 * 2 * sizes.layer_products / SPEEDS.product_flops
    assert layers[1].compute - layers[0].compute == pytest.approx(products)


def test_further_rows_of_a_decoding_step_may_be_faster():
    """Priced like the first 32, a generation of 128 rows seemed to take half as long again as it does."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    probed = replace(SPEEDS, decoding_flops=SPEEDS.product_flops / 2, further_rows_flops=SPEEDS.product_flops / 1.25)
    times = DatasheetTimes.of(sizes, probed.on(CPU))
    of_a_row = times.sample(1, 1).compute
    for rows, as_many in ((8, 8), (32, 32), (64, 32 + 32 / 1.6), (128, 32 + 96 / 1.6)):
        assert times.sample(rows, 1).compute == pytest.approx(as_many * of_a_row)
    added = times.decode(8192, 0, 1, cuda_graphs=False).compute - times.decode(4096, 0, 1, cuda_graphs=False).compute
    assert added == pytest.approx(4096 * 2 * sizes.layer_products / probed.further_rows_flops)


def test_further_rows_are_never_slower_than_the_first():
    """Otherwise a step would seem to gain by parts, which only repeat the constant part of its products."""
    probed = replace(SPEEDS, decoding_flops=2e11, further_rows_flops=1e11)
    assert probed.on(CPU).device.further_rows_share == probed.on(CPU).device.decoding_share


@pytest.mark.parametrize("rows", [0.4, 7, 32, 33.7, 100.3, 4096])
def test_on_gpus_every_row_of_a_decoding_step_takes_as_long(rows):
    times = DatasheetTimes.of(ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"]), node_hardware("h100", 1, None))
    assert times.sample(rows, 1).compute == times.head_forward(rows, 1).compute


def test_each_micro_batch_of_ours_adds_its_gradients_and_makes_its_logits_again():
    """ReaL's products added gradients, and its heads kept logits."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    real = DatasheetTimes.of(sizes, Hardware(DATASHEETS["h100"], 1))
    for device, bandwidth in (("cpu", 8e9), ("h100", 8e9)):
        ours = DatasheetTimes.of(sizes, SPEEDS.on(node_hardware(device, 2, None)))
        assert ours.backward(64, 128, 1).memory_traffic == pytest.approx(
            2 * ours.forward(64, 128, 1).memory_traffic + 12 * sizes.layer_matrices / bandwidth
        )
        assert ours.head_backward(64, 1).compute == pytest.approx(3 * ours.head_forward(64, 1).compute)
    assert real.backward(64, 128, 1).memory_traffic == 2 * real.forward(64, 128, 1).memory_traffic
    assert real.head_backward(64, 1).compute == 2 * real.head_forward(64, 1).compute


def test_attention_over_short_rows_reaches_less_of_the_peak():
    """On the H100 attention over 64 rows of 640 tokens took 12.9 ms of an inference in 28 layers."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["qwen2.5-1.5b"])
    times = DatasheetTimes.of(sizes, node_hardware("h100", 1, None))
    products = 64 * 640 * 2 * sizes.layer_products / times.flops
    assert 28 * (times.forward(64, 640, 1).compute - products) == pytest.approx(12.9e-3, rel=0.1)
    longer = DatasheetTimes.of(sizes, node_hardware("a100-80", 1, None))
    assert longer.attention > times.attention


def test_the_host_of_a_decoding_step_works_while_the_devices_wait():
    """In an engine that replays graphs; the constants of Megatron's decoding include its host."""
    sizes, node = ModelSizes.of_shape(KNOWN_SHAPES["qwen2.5-1.5b"]), node_hardware("h100", 1, None)
    assert DatasheetTimes.of(sizes, node, "vllm").host_step(256) == pytest.approx(1.4e-3 + 256 * 42e-6)
    assert DatasheetTimes.of(sizes, node, "megatron").host_step(256) == 0
    assert DatasheetTimes.of(sizes, SPEEDS.on(node), "vllm").host_step(1) > 0  # a probe measures the layers alone


def test_products_of_an_mi300x_reach_less_of_its_peak_unless_a_probe_measured_them():
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
    node = node_hardware("mi300x", 1, None)
    assert DatasheetTimes.of(sizes, node).flops == pytest.approx(0.6 * 0.77 * 1307e12)
    assert DatasheetTimes.of(sizes, SPEEDS.on(node)).flops == pytest.approx(SPEEDS.product_flops)
