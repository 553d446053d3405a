"""A word of a placement is one file: everything else reads the table of words."""

import re
from dataclasses import dataclass, replace

import pytest
from yaml import safe_load

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.placement import engine_traits
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.times.layer_times import LayerTimes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.memory.fit import longest_rows
from prefect_rlhf.placement.memory.savings import Savings, with_changes
from prefect_rlhf.placement.planner.explain import in_words
from prefect_rlhf.placement.planner.preset_plan import completed_preset, preset
from prefect_rlhf.placement.planner.space.candidates import CostContext, fitting_candidates
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import parse_plan, plan_yaml
from prefect_rlhf.placement.plans.stated_words import flags, with_words
from prefect_rlhf.placement.plans.switch import closed_instances
from prefect_rlhf.placement.words import table
from prefect_rlhf.placement.words.recompute import RECOMPUTE
from prefect_rlhf.placement.words.table import WORDS, register, stated
from prefect_rlhf.placement.words.word import Word
from prefect_rlhf.tasks.reporting.pictures.text import plan_rows
from prefect_rlhf.tasks.running.commands import operation_fields
from tests.house import files
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.strategies import GIB, TWO_DEVICES, ppo

pytestmark = pytest.mark.quick

TRAIN = "actor_train_step"
TILES = Word(
    name="tiles",
    default=1,
    type=int,
    description="Tiles of the logits of a train_step, which are made one by one.",
    calls=("train_step",),
    other_calls="keeps no logits",
    values=lambda call, placement, graph: (1, 2, 4),
    is_searched=True,
    saves="first",
    moves_nothing=True,
    phrase="{} tiles".format,
)


@dataclass(frozen=True, slots=True)
class TiledExecution(Execution):
    """The formulas of the made-up word: a train_step has the logits of one tile at a time, and takes longer."""

    def logit_bytes(self, logits: int, at_once: int, item_bytes: int) -> int:
        # two arguments of super(): the class of a dataclass with slots is made anew
        return super(TiledExecution, self).logit_bytes(logits, at_once, item_bytes) // TILES.of(self)

    def replicas_seconds(self, num_parameters: int, times: LayerTimes) -> float:
        return super(TiledExecution, self).replicas_seconds(num_parameters, times) * TILES.of(self)


@pytest.fixture
def tiles(monkeypatch):
    """The made-up word, which Megatron offers."""
    monkeypatch.setitem(engine_traits._TRAITS, "megatron", replace(TRAITS["megatron"], words=("tiles",)))
    register(TILES)
    yield
    del table._WORDS["tiles"]


def with_tiles(count=4):
    """A plan of PPO whose actor trains in tiles."""
    plan = preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    return with_changes(plan, [ppo().call(TRAIN)], tiles=count)


def test_one_file_adds_a_word_to_plan_files(tiles):
    plan = with_tiles()
    assert "tiles: 4" in plan_yaml(plan)
    read = parse_plan({"name": "mine", "calls": entries(plan)}, plan.cluster)
    assert read.placements == plan.placements
    with pytest.raises(InvalidInput, match=rf"^plan.calls.{TRAIN}.tiles: got 'four', expected a whole number"):
        parse_plan({"name": "mine", "calls": {**entries(plan), TRAIN: {**entries(plan)[TRAIN], "tiles": "four"}}}, None)


def entries(plan):
    return safe_load(plan_yaml(plan))["calls"]


def test_an_added_word_is_unknown_without_its_file():
    with pytest.raises(InvalidInput, match="plan.calls.a.tiles: unknown key"):
        parse_plan({"name": "mine", "calls": {"a": {"mesh": "n0:0", "engine": "megatron", "tiles": 2}}}, TWO_DEVICES)


def test_a_run_states_an_added_word(tiles):
    """`-p placement.actor_train_step.tiles=2`."""
    options = RunOptions.model_validate({"placement": {TRAIN: {"tiles": 2, "micro_batches": 1}}})
    assert options.stated_words == {TRAIN: {"tiles": 2, "micro_batches": 1}}
    assert options.model_dump(mode="json")["placement"] == {TRAIN: {"tiles": 2, "micro_batches": 1}}
    plan = preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    changed = with_words(plan, ppo(), options.stated_words)
    assert changed == with_tiles(2)
    assert flags(plan, changed, ppo()) == f"-p placement.{TRAIN}.tiles=2"


def test_an_added_word_is_refused_where_no_engine_or_call_has_it(tiles):
    graph, plan = ppo(), with_tiles()
    assert check_plan(plan, graph, plan.cluster.usable) is plan
    for name, wrong in (
        ("ref_inference", "tiles: 2 is not used: a call of kind inference keeps no logits"),
        (TRAIN, "tiles: 2 is not used: vllm does not offer it"),
    ):
        changed = with_changes(plan, [graph.call(name)], tiles=2)
        if name == TRAIN:
            changed = with_changes(changed, [graph.call(name)], engine="vllm")
        with pytest.raises(InvalidInput, match=wrong):
            check_plan(changed, graph, plan.cluster.usable)


def test_people_and_engines_read_an_added_word(tiles):
    plan, call = with_tiles(), ppo().call(TRAIN)
    assert in_words(plan[TRAIN]).endswith(", 4 tiles")
    assert [row["tiles"] for row in plan_rows(plan, ppo()) if row["call"] == TRAIN] == ["4"]
    assert TILES.of(operation_fields(call, plan[TRAIN])["train"]) == 4
    assert closed_instances(ppo(), plan, with_tiles(2)) == ()  # no engine is built anew for it


def test_an_evaluation_has_no_added_word(tiles):
    graph = ppo(evaluate_every=2)
    plan = completed_preset(
        "flattening", graph, TWO_DEVICES, TWO_DEVICES.whole, longest_rows(graph, 64), "cuda", {TRAIN: {"tiles": 2}}
    )
    assert [name for name, placement in plan.placements if stated(placement) == [TILES]] == [TRAIN]


def test_a_plan_that_does_not_fit_takes_an_added_word(tiles):
    savings = Savings(ppo(), longest_rows(ppo(), 64), "cpu")
    most = savings.all_of(with_tiles(1))[-1]
    assert [name for name, placement in most.placements if TILES.of(placement) == 4] == [TRAIN, "critic_train_step"]


def test_the_search_tries_each_value_of_an_added_word_by_its_formula(tiles):
    """More tiles need less memory and more time by the formulas, so no number of tiles is dominated."""
    asked = question(GRAPHS["dpo"], replace(TWO_DEVICES, device_memory_bytes=16 * GIB), Workload.fixed(1024, 3072))
    context = CostContext.of(asked, TiledExecution.of)
    found = fitting_candidates(context.graph.call(TRAIN), context)
    assert {TILES.of(each.placement) for each in found} == {1, 2, 4}


def test_a_word_cannot_have_the_name_of_another_or_of_a_key():
    for name in ("offload", "mesh", "dp", "order"):
        with pytest.raises(InvalidInput, match=f"^word: got '{name}', expected a name other than cache_gib, "):
            register(replace(TILES, name=name))
    register(WORDS["offload"])


def test_all_layers_as_a_number_have_every_smaller_number_before_them():
    """A plan file may count all layers of a stage in place of `all`."""
    graph = ppo()
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    call, layers = graph.call(TRAIN), graph.model("actor").shape.num_layers
    for value in (layers, "all"):
        assert RECOMPUTE.faster(call, replace(plan[TRAIN], recompute=value), graph) == list(range(layers))
    assert RECOMPUTE.faster(call, replace(plan[TRAIN], recompute=1), graph) == [0]


LIMITS = {"sequence_parallel": 7, "recompute": 9, "rows_first": 6}
"""Product files that may name a word: its own, the table, placements, engines, formulas, a search of its own."""
OTHERS = ("flows.forms.dictionary", "flows.commands.init", "flows.remax", "tasks.rl")
"""They translate options of other libraries, or set `old_logprobs: recompute`, which is no word of a placement."""


@pytest.mark.parametrize("word", LIMITS)
def test_few_files_name_a_word(word):
    named = [
        name
        for name, path in files().items()
        if not name.startswith(OTHERS) and re.search(rf"\b{word}\b", path.read_text())
    ]
    assert len(named) <= LIMITS[word], named
