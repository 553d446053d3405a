"""The kinds of devices that can be planned, each with its printed numbers, and the product names that drivers report.

A product belongs to a kind only if every word of its name is known: a laptop's GPU, a MIG slice or a card with another
link has other numbers, so it is refused rather than taken for the board of the same family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import GIB, Datasheet

HOST_DEVICES = 8
HOST_GIB: Mapping[str, int] = MappingProxyType(
    {
        "h100": 2048,  # NVIDIA DGX H100 datasheet: 2 TB of system memory
        "h100-nvl": 2560,  # Azure NC H100 v5: 640 GiB for 2
        "h200": 2048,  # NVIDIA DGX H200 datasheet: 2 TB
        "h800": 2048,  # as the H100's
        "h20": 2048,  # as the H100's: servers have the same board of eight
        "gh200": 3576,  # 480 GB for each
        "b200": 2048,  # NVIDIA DGX B200 datasheet: 2 TB, up to 4 TB
        "b300": 2048,  # NVIDIA DGX B300 datasheet: 2 TB, up to 4 TB
        "gb200": 1788,  # NVIDIA GB200 NVL72: 480 GB for 2
        "a100-80": 2048,  # NVIDIA DGX A100 datasheet, 640GB: 2 TB
        "a100-40": 1024,  # NVIDIA DGX A100 datasheet, 320GB: 1 TB
        "a100-pcie-80": 1760,  # Azure NC A100 v4: 880 GiB for 4
        "a800": 2048,  # as the A100's
        "v100-32": 512,  # NVIDIA DGX-1 datasheet: 512 GB
        "v100-16": 512,  # the same
        "l4": 768,  # AWS g6.48xlarge, 8 L4: 768 GiB
        "l40s": 1536,  # AWS g6e.48xlarge, 8 L40S: 1,536 GiB
        "a10": 768,  # as the A10G's
        "a10g": 768,  # AWS g5.48xlarge, 8 A10G: 768 GiB
        "rtx-pro-6000": 2048,  # AWS g7e.48xlarge, 8 RTX PRO 6000: 2,048 GiB
        "t4": 384,  # AWS g4dn.metal, 8 T4: 384 GiB
        "mi300x": 1850,  # Azure ND MI300X v5, 8 MI300X: 1,850 GiB
    }
)
"""Host memory of a node with HOST_DEVICES devices, in GiB. Kinds that are not here have no usual host."""
HOST_SHARE = 0.75
"""How much of a host's memory plans may use if it is not stated. An assumption; the rest is for the system, ranks,
rows and libraries."""


def usual_host_bytes(device: Datasheet, devices_per_node: int) -> int:
    """Return the host memory that plans may use on a node if it is not stated; 0 (no limit) if unknown.

    A usual host's memory is known for eight devices; a smaller node gets its share.
    """
    return int(devices_per_node * device.host_bytes * HOST_SHARE)


PRODUCT_SHARES: Mapping[str, float] = MappingProxyType({"mi300x": 0.6, "mi325x": 0.6, "mi355x": 0.6})
"""Products of the MI300X reach some 45% of its peak, in all formats, its memory 81% (aiweekly.co/alerts/
amd-mi300x-hits-only-45-of-peak-flops-in-practice, of a paper): 0.6 of our 0.77. Its successors are assumed to reach as
much."""
_ATTENTION_SHARE = 0.35
ATTENTION_SHARES: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("a100-80", "a100-40", "a100-pcie-80", "a100-pcie-40", "a800"), 0.65),
        **dict.fromkeys(("a10", "a10g", "a40", "rtx-a6000", "rtx3090"), 0.65),
        **dict.fromkeys(("l4", "l40", "l40s", "rtx4090", "rtx6000-ada"), 0.65),
        **dict.fromkeys(("h20", "rtx5090", "rtx-pro-6000"), 0.65),
        **dict.fromkeys(("b200", "b300", "gb200"), 0.15),
    }
)
"""Flash attention 2 reaches 50% to 73% of the peak of the GPUs that it was written for (arXiv:2307.08691) and 35% on an
H100 (arXiv:2407.08608). Products of an H20, an RTX 5090 and an RTX PRO 6000 are no faster than its instructions, so
these count as the former. On others it is assumed to be as fast as on an H100."""


def _printed(
    name: str, half: float, full: float, memory: float, gib: float, link: float, host: float, source: str
) -> Datasheet:
    """Read TFLOP/s and GB/s as datasheets print them, links per direction, and the GiB that its driver reports."""
    return Datasheet(
        name,
        half * 1e12,
        full * 1e12,
        memory * 1e9,
        int(gib * GIB),
        link * 1e9,
        host * 1e9,
        source,
        host_bytes=HOST_GIB.get(name, 0) * GIB // HOST_DEVICES,
        product_share=PRODUCT_SHARES.get(name, 1.0),
        attention_share=ATTENTION_SHARES.get(name, _ATTENTION_SHARE),
    )


# Bridges between PCIe cards are not counted: few hosts have them, and they join two or four cards at most.
_KINDS = (
    _printed("h100", 989, 67, 3350, 79.1, 450, 64, "NVIDIA H100 datasheet, SXM5: NVLink 4, PCIe 5 x16"),
    _printed("h100-pcie", 756, 51, 2000, 79.1, 64, 64, "NVIDIA H100 datasheet, PCIe: PCIe 5 x16"),
    _printed("h100-nvl", 835, 60, 3900, 93.0, 64, 64, "NVIDIA H100 datasheet, NVL: PCIe 5 x16"),
    _printed("h200", 989, 67, 4800, 139.7, 450, 64, "NVIDIA H200 datasheet, SXM: NVLink 4, PCIe 5 x16"),
    _printed("h200-nvl", 835, 60, 4800, 139.7, 64, 64, "NVIDIA H200 datasheet, NVL: PCIe 5 x16"),
    _printed("h800", 989, 67, 3350, 79.1, 200, 64, "NVIDIA H800, SXM5: an H100 with 400 GB/s of NVLink"),
    _printed("h20", 148, 44, 4000, 95.0, 450, 64, "NVIDIA H20, SXM5: NVLink 4, PCIe 5 x16"),
    _printed("gh200", 990, 67, 4000, 94.5, 450, 450, "NVIDIA GH200 datasheet, 96 GB: NVLink 4, NVLink-C2C"),
    _printed("b200", 2250, 75, 8000, 178.4, 900, 64, "NVIDIA DGX B200 datasheet: NVLink 5, PCIe 5 x16"),
    _printed("b300", 2250, 75, 8000, 267.0, 900, 64, "NVIDIA DGX B300 datasheet: NVLink 5"),
    _printed("gb200", 2500, 80, 8000, 184.0, 900, 225, "NVIDIA GB200 NVL72 datasheet: NVLink 5, NVLink-C2C for 2"),
    _printed("a100-80", 312, 19.5, 2039, 79.1, 300, 32, "NVIDIA A100 80GB datasheet, SXM: NVLink 3, PCIe 4"),
    _printed("a100-40", 312, 19.5, 1555, 39.4, 300, 32, "NVIDIA A100 40GB datasheet, SXM: NVLink 3, PCIe 4"),
    _printed("a100-pcie-80", 312, 19.5, 1935, 79.1, 32, 32, "NVIDIA A100 80GB datasheet, PCIe: PCIe 4 x16"),
    _printed("a100-pcie-40", 312, 19.5, 1555, 39.4, 32, 32, "NVIDIA A100 40GB datasheet, PCIe: PCIe 4 x16"),
    _printed("a800", 312, 19.5, 2039, 79.1, 200, 32, "NVIDIA A800 80GB, SXM: an A100 with 400 GB/s of NVLink"),
    _printed("v100-32", 125, 15.7, 900, 31.7, 150, 16, "NVIDIA V100 datasheet, SXM2 32GB: NVLink 2, PCIe 3"),
    _printed("v100-16", 125, 15.7, 900, 15.7, 150, 16, "NVIDIA V100 datasheet, SXM2 16GB: NVLink 2, PCIe 3"),
    Datasheet("cpu", 0.0, 0.0, 0.0, 0, 0.0, 0.0, "measured by a profile only", measured=True),
    _printed("l4", 121, 30.3, 300, 22.0, 32, 32, "NVIDIA L4 datasheet: PCIe 4 x16"),
    _printed("l40", 181, 90.5, 864, 44.3, 32, 32, "NVIDIA L40 datasheet: PCIe 4 x16, no NVLink"),
    _printed("l40s", 362, 91.6, 864, 44.5, 32, 32, "NVIDIA L40S datasheet: PCIe 4 x16, no NVLink"),
    _printed("a10", 125, 31.2, 600, 22.0, 32, 32, "NVIDIA A10 datasheet: PCIe 4 x16, no NVLink"),
    _printed("a10g", 70, 35, 600, 22.0, 32, 32, "NVIDIA A10G datasheet: PCIe 4 x16, no NVLink"),
    _printed("a40", 149.7, 37.4, 696, 44.3, 32, 32, "NVIDIA A40 datasheet: PCIe 4 x16"),
    _printed("t4", 65, 8.1, 320, 14.5, 16, 16, "NVIDIA T4 datasheet: PCIe 3 x16, no NVLink"),
    _printed("rtx3090", 71, 35.6, 936, 23.5, 32, 32, "NVIDIA Ampere GA102 whitepaper, RTX 3090: PCIe 4 x16"),
    _printed("rtx4090", 165, 82.6, 1008, 23.5, 32, 32, "NVIDIA Ada architecture whitepaper, RTX 4090: PCIe 4 x16"),
    _printed("rtx5090", 209.5, 104.8, 1792, 31.3, 64, 64, "NVIDIA RTX Blackwell whitepaper, RTX 5090: PCIe 5 x16"),
    _printed("rtx-a6000", 154.8, 38.7, 768, 47.4, 32, 32, "NVIDIA Ampere GA102 whitepaper, RTX A6000: PCIe 4 x16"),
    _printed("rtx6000-ada", 364.2, 91.1, 960, 47.3, 32, 32, "NVIDIA Ada whitepaper, RTX 6000 Ada: PCIe 4 x16"),
    _printed("rtx-pro-6000", 480, 120, 1597, 94.9, 64, 64, "NVIDIA RTX PRO 6000 Blackwell, Server Edition: PCIe 5 x16"),
    _printed("mi300x", 1307, 163.4, 5300, 191.5, 448, 64, "AMD Instinct MI300X data sheet: 7 Infinity Fabric links"),
    _printed("mi325x", 1307, 163.4, 6000, 255.5, 448, 64, "AMD Instinct MI325X data sheet: 7 Infinity Fabric links"),
    _printed("mi355x", 2500, 157.3, 8000, 287.5, 537, 64, "AMD Instinct MI355X data sheet: 7 Infinity Fabric links"),
)
DATASHEETS: Mapping[str, Datasheet] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Dense peaks; memory is what CUDA reports, somewhat less than what is sold. V100 and T4 have no bfloat16: their tensor
cores' float16 peak stands for every format of two bytes."""
NO_BFLOAT16: Mapping[str, str] = MappingProxyType({"v100-32": "7.0", "v100-16": "7.0", "t4": "7.5"})
"""Kinds that can be planned and that a run refuses, with their compute capability (`files.gpus.LEAST_CAPABILITY`). No
library lists them by name: torch and vLLM ask the device, and a plan has none."""
OF_ROCM = ("mi300x", "mi325x", "mi355x")
"""Kinds that can be planned, whose engines would need builds that our pins don't have."""
GPUS: Mapping[str, Datasheet] = MappingProxyType({k: kind for k, kind in DATASHEETS.items() if not kind.measured})
"""The datasheets of GPUs."""

_MAKERS = frozenset(["nvidia", "geforce", "tesla", "amd", "instinct", "oam"])
_PRODUCTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "h100": ("h100", "80gb hbm3 sxm sxm5"),
        "h100-pcie": ("h100 pcie", "80gb hbm2e"),
        "h100-nvl": ("h100 nvl", "94gb hbm3"),
        "h200": ("h200", "141gb hbm3e sxm sxm5"),
        "h200-nvl": ("h200 nvl", "141gb hbm3e"),
        "h800": ("h800", "80gb hbm3 sxm sxm5"),
        "h20": ("h20", "96gb hbm3 sxm sxm5"),
        "gh200": ("gh200", "96gb 120gb 480gb hbm3"),  # 120 and 480 are its host's
        "b200": ("b200", "180gb 192gb hbm3e sxm sxm6"),
        "b300": ("b300", "270gb 288gb hbm3e sxm sxm6 ac"),
        "gb200": ("gb200", "nvl72 186gb 192gb"),
        "a100-80": ("a100 80gb", "sxm sxm4 hbm2e"),
        "a100-40": ("a100 40gb", "sxm sxm4 hbm2"),
        "a100-pcie-80": ("a100 80gb pcie", "hbm2e"),
        "a100-pcie-40": ("a100 40gb pcie", "hbm2"),
        "a800": ("a800 80gb", "sxm sxm4"),
        "v100-32": ("v100 32gb", "sxm sxm2 sxm3"),
        "v100-16": ("v100 16gb", "sxm sxm2"),
        "l4": ("l4", "24gb"),
        "l40": ("l40", "48gb"),
        "l40s": ("l40s", "48gb"),
        "a10": ("a10", "24gb"),
        "a10g": ("a10g", "24gb"),
        "a40": ("a40", "48gb"),
        "t4": ("t4", "16gb"),
        "rtx3090": ("rtx 3090", "24gb"),
        "rtx4090": ("rtx 4090", "24gb"),
        "rtx5090": ("rtx 5090", "32gb"),
        "rtx-a6000": ("a6000", "rtx 48gb"),
        "rtx6000-ada": ("rtx 6000 ada", "generation 48gb"),
        "rtx-pro-6000": ("rtx pro 6000", "blackwell server workstation edition 96gb"),
        "mi300x": ("mi300x", "192gb"),
        "mi325x": ("mi325x", "256gb"),
        "mi355x": ("mi355x", "288gb"),
    }
)
"""The words that a kind's product names have, and the words that they may have besides `_MAKERS`."""


def datasheet(name: str, field: str = "device", among: Mapping[str, Datasheet] = DATASHEETS) -> Datasheet:
    """Return the datasheet with that name or full product name. Raises InvalidInput for an unknown name.

    >>> datasheet("H100-SXM-80GB").name, datasheet("a100-SXM4-40GB").name, datasheet("NVIDIA GeForce RTX 4090").name
    ('h100', 'a100-40', 'rtx4090')
    >>> datasheet("NVIDIA H100 80GB HBM3 MIG 1g.10gb")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    prefect_rlhf.errors.errors.InvalidInput: device: got 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', ...
    """
    plain = name.strip().lower()
    if plain in among:
        return among[plain]
    words = set(re.findall(r"[a-z0-9.]+", re.sub(r"\brtx(?=\d|a\d)", "rtx ", plain))) - _MAKERS
    words = {re.sub(r"^(\d{2,3})(g|gb)?$", r"\1gb", word) for word in words}  # 80 and 80g are 80gb
    for kind, (needed, possible) in _PRODUCTS.items():
        if kind in among and set(needed.split()) <= words <= {*needed.split(), *possible.split()}:
            return among[kind]
    raise InvalidInput(field, name, f"one of {', '.join(among)}, or a product name with its memory in GB")
