"""Tolerances between devices, in units of rounding: a GPU's kernels add in another order, with another exponential.

A unit is the distance of neighbouring numbers of a type at 1. Tokens, bits and counts stay exact.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

KERNEL = 64
"""Units of a single kernel. Seen: torch's softmax on a CPU is up to 30 units from the exact one."""
MODEL = 1024
"""Units of a whole tiny model. Seen: 32 units between an H100 and a CPU."""


def within(units: float, expected: Any, dtype: torch.dtype = torch.float32, *, size: float = 1.0) -> Any:
    """Return what equals `expected` to within units of rounding of numbers of `dtype`.

    `size` is that of the numbers that the values were made of: a log-probability of -0.1 is the difference of two
    logits, and has their rounding. A value that is larger than `size` has its own.
    """
    unit = torch.finfo(dtype).eps
    values = expected.tolist() if isinstance(expected, torch.Tensor) else expected
    values = list(values) if isinstance(values, Sequence) else values
    return pytest.approx(values, rel=units * unit, abs=units * unit * size)
