"""Measured memory of a device beside its certificate, in GiB, by what it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 1 << 30


def memory_finding(devices: Sequence[Mapping[str, Any]], proof: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measured memory of the device beside the certificate, by what it is of."""
    held = devices[0] if devices else {}
    gpu = {name.removesuffix("_bytes"): rounded(value / GIB) for name, value in held.get("gpu", {}).items()}
    return {
        "measured_gib": rounded(held.get("measured_bytes", 0) / GIB),
        "measured_at": held.get("at"),
        "gpu_gib": gpu,
        "certified_for_it_gib": rounded(held.get("certified_bytes", 0) / GIB),
        **certified(proof),
    }


def certified(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Return the certified peak, its node, and its bytes by what they are."""
    peak, terms = proof["peaks"][0], dict[str, float]()
    for share in peak["shares"]:
        name = f"{share['owner'].partition(' ')[0]} {share['what']}".replace("device ", "")
        terms[name] = rounded(terms.get(name, 0.0) + share["num_bytes"] / GIB, 4)
    return {
        "peak_gib": rounded(peak["num_bytes"] / GIB),
        "device_gib": rounded(peak["device_bytes"] / GIB),
        "node": peak["node"],
        "terms_gib": terms,
    }


def rounded(value: float | None, digits: int = 4) -> Any:
    """Return a number for a reader."""
    return None if value is None else round(value, digits)
