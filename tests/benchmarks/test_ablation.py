"""The parts of the planner that the ablation leaves out."""

from benchmarks.planner.ablation import NAMES, NEEDED
from prefect_rlhf.placement.planner.best_plan import ALL_PARTS


def test_a_part_is_left_out_by_its_name_and_by_it_alone():
    """So no two parts have the same name, and the search that has the bound is not among those left out."""
    assert len(set(ALL_PARTS.names)) == len(ALL_PARTS.names)
    assert set(NAMES) == {*ALL_PARTS.names} - {NEEDED}
    for name in NAMES:
        assert [other for other in ALL_PARTS.names if other != name] == list(ALL_PARTS.without(name).names)
