"""A kind of device described by hand, for clusters of devices without a datasheet here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, Missing, UnknownKey
from prefect_rlhf.files.yaml_text import parse_yaml, read_yaml
from prefect_rlhf.placement.cost.datasheets.hardware import GIB, Datasheet
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS

NEEDED = {"tflops": 1e12, "memory_gib": GIB, "memory_gb_per_s": 1e9, "link_gb_per_s": 1e9}
"""Required fields with their units: dense bfloat16, and bandwidths per device (a link's in a single direction)."""
OPTIONAL = {"float32_tflops": 1e12, "host_gb_per_s": 1e9}
DEFAULT_NAME = "custom"
HOST_GB_PER_S = 32.0  # PCIe 4 x16 in one direction
FLOAT32_SHARE = 1 / 16  # of the bfloat16 peak, as on A100 and H100
MOST = 1e9  # of any field
FORM = "tflops=989, memory_gib=80, memory_gb_per_s=3350, link_gb_per_s=450"


def read_device(text: str) -> Datasheet | None:
    """Return the device that `text` describes, or the YAML file of that name; None for empty text.

    Raises InvalidInput, at `device`, for a field that is unknown, missing, or not a number above 0.

    >>> read_device("name=mine, tflops=100, memory_gib=24, memory_gb_per_s=900, link_gb_per_s=32").memory_bytes >> 30
    24
    """
    if not text:
        return None
    fields = _fields(text) if "=" in text else read_yaml("device", Path(text).expanduser())
    if not isinstance(fields, dict):
        raise InvalidInput("device", text, f"the fields of a device, such as {FORM}, or a YAML file of them")
    keys = {"name": None, **NEEDED, **OPTIONAL}
    for key in fields:
        if key not in keys:
            raise UnknownKey(f"device.{key}", fields[key], f"the keys are {', '.join(keys)}")
    for key in NEEDED:
        if key not in fields:
            raise Missing(f"device.{key}", f"a value: {FORM}")
    name = _name(fields.get("name", DEFAULT_NAME))
    numbers = {key: _number(key, fields[key]) * unit for key, unit in (NEEDED | OPTIONAL).items() if key in fields}
    return Datasheet(
        name,
        bfloat16_flops=numbers["tflops"],
        float32_flops=numbers.get("float32_tflops", numbers["tflops"] * FLOAT32_SHARE),
        memory_bytes_per_second=numbers["memory_gb_per_s"],
        memory_bytes=int(numbers["memory_gib"]),
        link_bytes_per_second=numbers["link_gb_per_s"],
        host_bytes_per_second=numbers.get("host_gb_per_s", HOST_GB_PER_S * 1e9),
        source="described by hand",
    )


def _fields(text: str) -> Mapping[str, Any]:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key in fields:
            raise InvalidInput("device", part.strip(), f"fields such as {FORM}, each once")
        fields[key] = value if key == "name" else parse_yaml(f"device.{key}", value, value)
    return fields


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or set(value) & set("+:,"):
        raise InvalidInput("device.name", value, "a word to use in --cluster, as in 1x8:mine")
    if value.lower() in DATASHEETS:
        raise InvalidInput("device.name", value, f"another name: {value} has a datasheet")
    return value.strip().lower()


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        raise InvalidInput(f"device.{key}", value, f"a number above 0, at most {MOST:g}")
    return float(value)
