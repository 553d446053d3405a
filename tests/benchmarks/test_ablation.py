"""The parts of the planner that the ablation switches off."""

import pytest

from benchmarks.planner.ablation import PARTS


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_in_its_module(name):
    """A part that has another name by now would fail only when its turn comes."""
    assert hasattr(PARTS[name].module, PARTS[name].name)
