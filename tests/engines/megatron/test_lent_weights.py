"""Frozen weights that two roles name are held once by the ranks: one storage, and both compute from it."""

import lent_weights
import pytest
import two_heads
from megatron_cases import Case

from tests.support.cases import first

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": {"ranks": (0,)},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
    "dp2": {"ranks": (0, 1), "dp": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": two_heads.make_two_heads(root / "tied", layers=3, hidden=64),
        "untied": two_heads.make_two_heads(root / "untied", layers=3, hidden=64, tied=False, vocab=481),
    }


@pytest.mark.parametrize(
    ("kind", "layout"), first(2, [("tied", "tp2 pp2"), ("untied", "one"), ("untied", "tp2 pp2"), ("tied", "dp2")])
)
def test_roles_with_equal_frozen_weights_share_storage(world, folders, kind, layout):
    """Both use the same addresses and give equal bits in the memory of one copy. The second may close first."""
    case = Case(folders[kind], head="lm+scalar", **LAYOUTS[layout])
    found = world.run(case.ranks, lent_weights.lend, case)
    heads = set()
    for of_rank in found:
        assert of_rank.common and of_rank.own <= {"score.weight"}
        assert of_rank.same_outputs and of_rank.same_digests
        assert of_rank.device_bytes == of_rank.bytes_of_one + of_rank.bytes_of_own
        assert of_rank.left_bytes == of_rank.bytes_of_one
        heads |= of_rank.own
    assert heads == {"score.weight"}, "the judge's own"
