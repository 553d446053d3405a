"""A call gets an engine that computes heads of its model's width, or is refused in one line before devices are used."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement import engine_traits
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.engine_traits import HeadWidths
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.candidates import CostContext, fitting_candidates
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.presets import PRESETS
from tests.support.strategies import GIB, placed, ppo

pytestmark = pytest.mark.quick

CLUSTER = ClusterShape("desk", 1, 8, 64 * GIB)
GENERATE = "actor_generate"
TAKEN, REFUSED = ("cpu", "float32", 48), ("cpu", "bfloat16", 16)
CPU_WIDTHS = "32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256 or 512"


def graph(width: int, dtype: str = "bfloat16"):
    """PPO of models whose heads are so wide, in rows that eight devices share."""
    plain = ppo(evaluate_every=2)
    models = tuple(replace(m, dtype=dtype, shape=replace(m.shape, head_dim=width)) for m in plain.models)
    return replace(plain, models=models, calls=tuple(replace(c, num_rows=32) for c in plain))


@pytest.mark.parametrize(
    ("backend", "dtype", "width", "taken"),
    [
        ("cpu", "bfloat16", 16, CPU_WIDTHS),
        ("cpu", "float32", 300, CPU_WIDTHS),
        ("cuda", "bfloat16", 12, "8, 16, 24, or 32 and more"),
        ("cuda", "float32", 16, "32 and more"),
    ],
)
def test_an_unsupported_head_width_is_refused_with_a_remedy_in_one_line(backend, dtype, width, taken):
    small, cluster = graph(width, dtype), replace(CLUSTER, backend=backend)
    good = preset("flattening", small, cluster, cluster.whole, 64, backend)
    assert good[GENERATE].engine == "megatron"
    assert check_plan(good, small, cluster.whole) is good
    with pytest.raises(InvalidInput) as caught:
        check_plan(placed(good, GENERATE, engine="vllm"), small, cluster.whole)
    assert str(caught.value) == (
        f"plan.calls.{GENERATE}.engine: got 'vllm', expected megatron for actor (/models/actor): "
        f"a head is {width} wide, and vllm on {backend} in {dtype} takes {taken}"
    )


@pytest.mark.parametrize(("backend", "dtype", "width"), [TAKEN, ("cuda", "bfloat16", 8), ("cuda", "float32", 300)])
def test_a_supported_head_width_is_accepted(backend, dtype, width):
    good = graph(width, dtype)
    plan = preset("flattening", good, replace(CLUSTER, backend=backend), CLUSTER.whole, 64, backend)
    assert plan[GENERATE].engine == "vllm"
    assert check_plan(plan, good, CLUSTER.whole) is plan


@pytest.mark.parametrize("name", [name for name, each in PRESETS.items() if each.engine is None])
@pytest.mark.parametrize(("case", "engine"), [(TAKEN, "vllm"), (REFUSED, "megatron")])
def test_a_preset_generates_with_the_first_engine_that_takes_the_model(name, case, engine):
    """Also where it evaluates."""
    backend, dtype, width = case
    plan = preset(name, graph(width, dtype), replace(CLUSTER, backend=backend), CLUSTER.whole, 64, backend)
    assert {plan[call.name].engine for call in graph(width) if call.kind == "generate"} == {engine}


@pytest.mark.parametrize(("case", "engines"), [(TAKEN, {"vllm", "megatron"}), (REFUSED, {"megatron"})])
def test_a_search_considers_no_engine_that_does_not_take_the_model(case, engines):
    backend, dtype, width = case
    asked = graph(width, dtype)
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 8), 1)
    site = Site(CLUSTER, CLUSTER.whole, sources, backend)
    context = CostContext.of(Question(asked, site, Workload.fixed(32, 32)))
    found = fitting_candidates(context.graph.call(GENERATE), context)
    assert {candidate.placement.engine for candidate in found} == engines


def test_a_model_that_no_engine_takes_says_so(monkeypatch):
    only = replace(engine_traits.TRAITS["megatron"], head_widths=(HeadWidths("cpu", ("bfloat16",), least=64),))
    monkeypatch.setitem(engine_traits._TRAITS, "megatron", only)
    cluster = replace(CLUSTER, backend="cpu")
    with pytest.raises(InvalidInput, match=r"expected another model for actor \(/models/actor\): a head is 16 wide"):
        preset("flattening", graph(16), cluster, cluster.whole, 64, "cpu")
