"""A reference and two roles with adapters on one base hold that base once, and the reference stays what it was."""

import pytest
import shared_bases
import two_heads
from megatron_cases import Case

from tests.support.cases import combinations

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": {"ranks": (0,)},
    "tp2": {"ranks": (0, 1), "tp": 2},
    "pp2": {"ranks": (2, 3), "pp": 2},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
}
ORDERS = {"reference first": ("ref", "actor", "critic"), "actor first": ("actor", "ref", "critic")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_heads.make_two_heads(tmp_path_factory.mktemp("models") / "two", layers=3, hidden=128)


@pytest.mark.parametrize(
    ("layout", "order"),
    combinations(LAYOUTS, ORDERS, briefly=[("tp2", "reference first"), ("pp2", "actor first")]),
)
def test_a_base_of_three_roles_is_held_once(world, folder, layout, order):
    """The same addresses after a train_step too. An untrained adapter gives the reference's bits: their KL is 0.0."""
    case = Case(folder, **LAYOUTS[layout])
    for found in world.run(case.ranks, shared_bases.lend, case, ORDERS[order]):
        assert found.in_common == dict.fromkeys(ORDERS[order], True)
        assert found.is_reference and found.reference_stays and found.actor_moves
        trained = found.bytes_of_own
        needed = found.bytes_of_one + 2 * trained  # the weights and their gradients; moments come with the first step
        assert needed <= found.device_bytes <= needed + (64 << 10)


@pytest.mark.parametrize(
    ("layout", "order", "base_dtype"),
    combinations(
        LAYOUTS,
        ORDERS,
        (None, "nf4"),
        briefly=[("tp2", "reference first", None), ("pp2", "actor first", "nf4")],
    ),
)
def test_a_base_of_three_roles_is_held_once_after_a_resume(world, folder, layout, order, base_dtype, tmp_path):
    """And after the optimizer was away. The checkpoint has the adapters alone, and every weight is what it was."""
    case = Case(folder, base_dtype=base_dtype, **LAYOUTS[layout])
    saved = world.run(case.ranks, shared_bases.save, case, ORDERS[order], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"actor.adapter", "critic.adapter", "critic.scalar_head"}
    lent = world.run(case.ranks, shared_bases.lend, case, ORDERS[order])
    resumed = world.run(case.ranks, shared_bases.resume, case, ORDERS[order], tmp_path)
    for digests, fresh, (found, before, after, num_bytes) in zip(saved, lent, resumed, strict=True):
        assert before == after == dict.fromkeys(ORDERS[order], True)
        assert found == digests
        moments = 2 * fresh.bytes_of_own
        assert fresh.device_bytes <= num_bytes <= fresh.device_bytes + moments + (64 << 10)
