"""Kinds of devices: their numbers beside other people's tables, and the products that belong to each."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.kinds import (
    _PRODUCTS,
    ATTENTION_SHARES,
    DATASHEETS,
    GPUS,
    HOST_GIB,
    NO_BFLOAT16,
    OF_ROCM,
    PRODUCT_SHARES,
    datasheet,
)

pytestmark = pytest.mark.quick

# Dense bfloat16 TFLOP/s in `_DEVICE_FLOPS` of verl/utils/flops_counter.py, verl 0.9.1.
OF_VERL = {
    "gb200": 2500, "b200": 2250, "mi300x": 1307, "mi355x": 2500, "h100": 989, "h800": 989, "h200": 989, "a100-80": 312,
    "a800": 312, "l40s": 362.05, "l40": 181.05, "a40": 149.7, "h20": 148,
}  # fmt: skip
# Dense (bfloat16, float32) TFLOP/s, from `_CUDA_FLOPS` in lightning/fabric/utilities/throughput.py of Lightning 2.6.6.
# For NVL and workstation cards Lightning has other numbers than dense tensor cores reach, so these are left out.
OF_LIGHTNING = {
    "h100": (989.4, 66.9), "h100-pcie": (756, 51.2), "a100-pcie-40": (312, 19.5), "l4": (121, 30.3), "l40": (181, 90.5),
    "a10": (125, 31.2),
}  # fmt: skip
OF_LIGHTNING_FLOAT32 = {"rtx3090": 35.6, "rtx4090": 82.6, "rtx-a6000": 38.7, "a40": 37.4, "t4": 8.1}
# What torch counts on a card: "GPU 0 has a total capacity of ..." in public reports, in GiB.
COUNTED_BY_TORCH = {
    "rtx5090": 31.37,  # github.com/Wan-Video/Wan2.1/issues/465
    "l40": 44.40,  # github.com/QwenLM/Qwen3-VL/issues/2097
    "h100-nvl": 93.00,  # github.com/ali-vilab/VACE/issues/56
    "rtx4090": 23.64,  # github.com/3DTopia/Phidias-Diffusion/issues/8
    "a100-80": 79.25,  # github.com/levihsu/OOTDiffusion/issues/235
}


def test_peaks_are_those_of_verl_and_lightning():
    ours = {name: DATASHEETS[name].bfloat16_flops / 1e12 for name in OF_VERL}
    assert ours == pytest.approx(OF_VERL, rel=2e-3)
    both = {
        name: (DATASHEETS[name].bfloat16_flops / 1e12, DATASHEETS[name].float32_flops / 1e12) for name in OF_LIGHTNING
    }
    assert both == {name: pytest.approx(peaks, rel=5e-3) for name, peaks in OF_LIGHTNING.items()}
    full = {name: DATASHEETS[name].float32_flops / 1e12 for name in OF_LIGHTNING_FLOAT32}
    assert full == pytest.approx(OF_LIGHTNING_FLOAT32, rel=5e-3)


@pytest.mark.parametrize("name", COUNTED_BY_TORCH)
def test_a_kind_has_no_more_memory_than_torch_counts_and_nearly_as_much(name):
    assert 0.99 * COUNTED_BY_TORCH[name] <= DATASHEETS[name].memory_bytes / 2**30 <= COUNTED_BY_TORCH[name]


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-SXM-80GB", "h100"),
        ("h100-80", "h100"),
        ("A100 40G", "a100-40"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM3-32GB", "v100-32"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("RTX5090", "rtx5090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X OAM", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_product_is_of_its_kind_and_of_no_shorter_name(product, name):
    """The names are as drivers report them, or as people write them."""
    assert datasheet(product) is DATASHEETS[name]


@pytest.mark.parametrize(
    "product",
    [
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100D-80C",
        "NVIDIA H20-3e",
        "NVIDIA H800 PCIe",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA A10M",
        "Tesla V100-PCIE-16GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000D Blackwell Workstation Edition",
        "Quadro RTX 6000",
        "NVIDIA",
        "",
    ],
)
def test_a_product_that_is_another_is_refused(product):
    """With the numbers of the board of the same family a plan would be wrong without a word."""
    with pytest.raises(InvalidInput, match="one of h100"):
        datasheet(product)


def test_each_gpu_has_product_names_and_each_table_knows_its_kinds():
    assert set(_PRODUCTS) == set(GPUS)
    assert {*HOST_GIB, *PRODUCT_SHARES, *ATTENTION_SHARES, *NO_BFLOAT16, *OF_ROCM} <= set(GPUS)
    assert all(datasheet(name.upper()) is sheet for name, sheet in DATASHEETS.items())
