"""A device that a person describes: its fields, from flags or a file, and every mistake in one line."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site_of
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.placement.cost.datasheets.hardware import GIB

pytestmark = pytest.mark.quick

TEXT = "name=Mine, tflops=362, memory_gib=45, memory_gb_per_s=864, link_gb_per_s=32"


def test_a_described_device_is_priced_by_its_description(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT.replace("=", ": ").replace(", ", "\n"))
    device = read_device(TEXT)
    assert device == read_device(str(file))
    site = site_of(parse_cluster("2x8:mine", device))
    assert site.cluster.device_memory_bytes == 45 * GIB
    assert {node.device.bfloat16_flops for node in site.sources.nodes} == {362e12}


def test_no_text_describes_no_device():
    assert read_device("") is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tflops=362", "device.memory_gib: missing; expected a value: tflops="),
        (f"{TEXT}, speed=3", r"device.speed: unknown key \(got 3\); the keys are name, tflops, memory_gib"),
        (TEXT.replace("362", "many"), "device.tflops: got 'many', expected a number above 0"),
        (TEXT.replace("362", "0"), "device.tflops: got 0, expected a number above 0"),
        (TEXT.replace("362", ".inf"), "device.tflops: got inf, expected a number above 0"),
        (TEXT.replace("362", "true"), "device.tflops: got True, expected a number above 0"),
        (f"{TEXT}, tflops=3", "device: got 'tflops=3', expected fields such as .*, each once"),
        (TEXT.replace("Mine", "h100"), "device.name: got 'h100', expected another name"),
        (TEXT.replace("Mine", "a:b"), "device.name: got 'a:b', expected a word"),
        ("nowhere.yaml", "device: got 'nowhere.yaml', expected a readable file"),
    ],
)
def test_a_mistake_in_a_device_is_one_line(text, line):
    with pytest.raises(InvalidInput, match=line) as raised:
        read_device(text)
    assert "\n" not in str(raised.value)


def test_a_device_that_no_node_has_is_refused():
    with pytest.raises(
        InvalidInput, match="cluster: got '1x8:h100', expected nodes of the described device, such as 1x8:mine"
    ):
        parse_cluster("1x8:h100", read_device(TEXT))
