"""The device of tests with the marker `gpu`: RLHF_TEST_DEVICE says cpu (the default), cuda, or pretend.

`pretend` is the pretend GPU of tests/support/pretend_gpu: it shows that such a test mixes no devices, without a GPU.
"""

import os

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.engine_builds import why_no_gpu

VARIABLE = "RLHF_TEST_DEVICE"
CHOICES = ("cpu", "cuda", "pretend")
CHOSEN = os.environ.get(VARIABLE, "cpu")
DEVICE = "cpu" if CHOSEN == "cpu" else "cuda"
"""As torch names it."""

on_hardware = pytest.mark.skipif(CHOSEN == "pretend", reason="other processes do not see the pretend GPU")
"""A mark of tests that start processes."""


def check_choice() -> None:
    """Raise InvalidInput for a device that this process does not have."""
    if CHOSEN not in CHOICES:
        raise InvalidInput(VARIABLE, CHOSEN, f"one of {', '.join(CHOICES)}")
    if CHOSEN == "cuda" and (why := why_no_gpu()):
        raise InvalidInput(VARIABLE, CHOSEN, f"cpu or pretend: {why}")
