"""vLLM and Megatron hold a frozen base once: see docs/adr/0067."""

import megatron_cases as cases
import one_base
import pytest
from family_cases import OPTIONS, make_family
from megatron_cases import Case
from one_base import WORK, planned

from prefect_rlhf.placement.layout.lending import lent_parameters
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.models.layer_adapter import QUERIES_KEYS_VALUES
from prefect_rlhf.placement.models.weights import parts
from tests.support.cases import combinations

pytestmark = pytest.mark.slow
HELD = 1.02


def expected(case):
    """The parameters of the base that both engines have once."""
    graph, _ = planned(case)
    every = (lent_parameters(own, graph.model("ref"), "megatron", "vllm", case.tp) for own in graph.weights("ref"))
    return {name for names in every for name in names}


def check(case, found):
    graph, plan = planned(case)
    base = {each.name for own in parts(graph.model("ref")).values() for each in own}
    for of_rank in found:
        assert of_rank.common == dict.fromkeys(("ref.megatron", "actor.megatron"), expected(case))
        assert of_rank.common_in_megatron == base
        (certified,) = {size for _, size in certify_plan(plan, graph, WORK, "cpu").most_resident}
        assert of_rank.device_bytes <= certified <= HELD * of_rank.device_bytes


@pytest.mark.parametrize(
    ("family", "dtype"), combinations(OPTIONS, ("float32", "bfloat16"), briefly=[("qwen2", "bfloat16")])
)
def test_both_engines_make_the_bits_that_each_makes_alone(tmp_path, family, dtype):
    """Every family makes the same tokens, log-probabilities, losses and weights in two steps as with two bases.

    The reference is vLLM's and the actor's base at the same addresses, also after a train_step, and after the optimizer
    was away. A rank keeps the certified bytes.
    """
    case = Case(make_family(tmp_path / "model", family, kv_heads=2), dtype=dtype)
    shared, apart = (one_base.run(0, case, together, tmp_path / str(together)) for together in (True, False))
    check(case, [shared])
    own = {each.name for each in parts(planned(case)[0].model("ref"))["trunk"]} - expected(case)
    assert own and all(name.split(".")[-2] in QUERIES_KEYS_VALUES for name in own)
    assert not any(apart.common.values())
    assert (shared.made, shared.digests) == (apart.made, apart.digests)
    assert shared.device_bytes < apart.device_bytes


@pytest.fixture(scope="module")
def two(world):
    """Ranks that have vLLM, so that no build waits for its import."""
    world.run((0, 1), one_base.load_vllm)
    return world


LAYOUTS = {"tp2": {"ranks": (0, 1), "tp": 2}, "dp2": {"ranks": (0, 1), "dp": 2}}
MODELS = {
    "a head on a rank": {"kv_heads": 2, "vocab": 512},
    "copies of a head": {"kv_heads": 1, "vocab": 512},
    "another cut of the vocabulary": {"kv_heads": 4, "vocab": 481, "tied": False},
    "padding alike": {"kv_heads": 4, "vocab": 511},
}


@pytest.mark.parametrize(
    ("layout", "model"),
    combinations(LAYOUTS, MODELS, briefly=[("tp2", "a head on a rank")]),
)
def test_every_rank_holds_a_base_once(two, tmp_path, layout, model):
    """With a key-value head on a rank, queries, keys and values too. A vocabulary that is cut elsewhere is not lent."""
    case = Case(cases.make_folder(tmp_path / "model", layers=3, **MODELS[model]), **LAYOUTS[layout])
    shared, apart = (
        two.run(case.ranks, one_base.run, case, together, tmp_path / str(together)) for together in (True, False)
    )
    check(case, shared)
    assert [(one.made, one.digests) for one in shared] == [(one.made, one.digests) for one in apart]


@pytest.mark.all  # test_shared_bases.py resumes one
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_base_is_held_once(two, tmp_path, layout):
    """The checkpoint has the adapter alone."""
    case = Case(cases.make_folder(tmp_path / "model", layers=3), **LAYOUTS[layout])
    two.run(case.ranks, one_base.run, case, True, tmp_path / "stored")
    assert {path.name for path in (tmp_path / "stored").iterdir()} == {"actor.adapter"}
    shared, apart = (
        two.run(case.ranks, one_base.run, case, together, tmp_path, tmp_path / "stored") for together in (True, False)
    )
    check(case, shared)
    assert [(one.made, one.digests) for one in shared] == [(one.made, one.digests) for one in apart]
