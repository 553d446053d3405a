"""A run, a dry run and a question complete a preset to the same plan, and keep the words that a person states."""

import inspect
from dataclasses import replace
from itertools import product

import pytest

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.forms.check import checked_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware.node_hardware import cost_sources
from prefect_rlhf.flows.training.choice import auto_plan
from prefect_rlhf.flows.training.choice.choose_plan import choose_plan
from prefect_rlhf.flows.training.choice.plans_by_step import choose_plans
from prefect_rlhf.flows.training.request import RunRequest, check_may_switch, check_names
from prefect_rlhf.flows.training.spec.plan_choice import PresetPlan
from prefect_rlhf.flows.training.spec.run_spec import read_spec
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.fit import longest_rows
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.preset_plan import preset_result
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.plans.presets import PRESETS
from tests.support.cases import combinations, first
from tests.support.strategies import dpo, ppo, remax

GRAPHS = {
    graph.name: replace(graph, calls=tuple(replace(call, num_rows=32) for call in graph))
    for graph in (ppo(), remax(), dpo())
}
SHAPES = ((1, 1), (1, 4), (2, 2))
BRIEFLY = [*((name, (1, 1)) for name in GRAPHS), ("dpo", (1, 4))]
SIZES = (6, 12, 24, 48, 96)  # MiB of a device


def leased(nodes: int, devices: int, mebibytes: int) -> Lease:
    cluster = ClusterShape("small", nodes, devices, mebibytes << 20, backend="cpu")
    return Lease("pool", "abc", cluster, cluster.whole, cluster.whole.devices())


def request(plan, held: Lease, graph: str = "ppo", dry_run: bool = False, flags: str = "") -> RunRequest:
    """A run that was read, as far as its plan depends on it, with options from a command line."""
    values = read_parameters(None, flags.replace("-p ", "").split()) | {"plan": plan, "dry_run": dry_run}
    spec = read_spec(RunOptions(**checked_parameters(inspect.Signature(RunOptions.signature()), values)))
    work = longest_rows(GRAPHS[graph], 128)
    return RunRequest(spec, held, inputs=None, graph=GRAPHS[graph], workload=work, checkpoint=None)


def of_run(asked: RunRequest) -> ExecutionPlan | None:
    """The run's plan; None if it is refused."""
    try:
        chosen = choose_plan(asked, asked.spec.plan)
    except InvalidInput:
        return None
    assert chosen.certificate.fits
    return chosen.plan


@pytest.mark.parametrize(("graph", "shape"), combinations(GRAPHS, SHAPES, briefly=BRIEFLY), ids=str)
def test_a_preset_is_the_same_plan_in_a_run_a_dry_run_and_a_question(graph, shape):
    """For every preset and size of device, and where one refuses, the others do."""
    found = 0
    for mebibytes, name in product(SIZES, PRESETS):
        held = leased(*shape, mebibytes)
        plan = of_run(request(name, held, graph))
        assert of_run(request(name, held, graph, dry_run=True)) == plan
        work = longest_rows(GRAPHS[graph], 128)
        asked = Question(GRAPHS[graph], Site.of_lease(held, cost_sources(held, "cpu")), work)
        assert preset_result(asked, name).plan == plan
        if plan is not None:
            found += 1
            assert certify_plan(plan, GRAPHS[graph], work, "cpu").fits
    assert found


def test_the_table_of_a_search_has_the_presets_of_runs():
    held = leased(1, 2, 40)
    asked = Question(GRAPHS["ppo"], Site.of_lease(held, cost_sources(held, "cpu")), longest_rows(GRAPHS["ppo"], 128))
    rows = {row.name: row.plan for row in plan_graph(asked, evaluations=1_000, proves=False).presets}
    assert rows == {name: of_run(request(name, held)) for name in PRESETS}


def test_the_default_only_adds_micro_batches_if_that_suffices():
    held = leased(1, 1, 30)
    plan = of_run(request(RunOptions().plan, held, "dpo"))
    train = plan["actor_train_step"]
    assert train.micro_batches > 1
    assert (train.recompute, train.offload) == (0, "none")


def test_a_plan_with_room_keeps_a_single_micro_batch():
    plan = of_run(request(RunOptions().plan, leased(1, 2, 4096)))
    assert all(
        (each.micro_batches, each.recompute, each.offload, each.cache_gib) == (1, 0, "none", None)
        for _, each in plan.placements
    )


def test_a_stated_word_is_kept_and_the_rest_completed_around_it():
    held = leased(1, 1, 24)
    plan = of_run(request("flattening", held, "dpo", flags="-p placement.actor_train_step.recompute=2"))
    assert plan["actor_train_step"].recompute == 2
    assert plan["actor_train_step"].micro_batches > 1


MORE = "actor_train_step.micro_batches=1"


@pytest.mark.parametrize("mebibytes", [12, 16, 24, 30])
@pytest.mark.parametrize("word", ["micro_batches=1", "micro_batches=2", f"recompute=0 placement.{MORE}"])
def test_the_flags_of_a_refusal_make_it_fit(mebibytes, word):
    """What the line says is put on the command line in place of the stated word, and the run has a plan."""
    held, stated = leased(1, 1, mebibytes), f"-p placement.actor_train_step.{word}"
    try:
        choose_plan(request("flattening", held, "dpo", flags=stated), PresetPlan("flattening"))
        return  # it fits
    except PlanDoesNotFit as error:
        if "it fits with " not in str(error):
            assert of_run(request("flattening", held, "dpo")) is None
            return
        helps = str(error).partition("it fits with ")[2]
    for flag in helps.replace("-p ", "").split():
        name = flag.partition("=")[0]
        kept = [each for each in stated.replace("-p ", "").split() if not each.startswith(f"{name}=")]
        stated = " ".join([*kept, flag])
    assert of_run(request("flattening", held, "dpo", flags=stated)) is not None


def test_stated_words_replace_the_plan_files(tmp_path):
    held = leased(1, 1, 4096)
    file = tmp_path / "mine.yaml"
    file.write_text(plan_yaml(of_run(request("flattening", held))))
    plan = of_run(request(str(file), held, flags="-p placement.actor_train_step.micro_batches=4"))
    assert plan["actor_train_step"].micro_batches == 4


TRAIN = "actor_train_step."
WRONG = {
    "another word": (f"{TRAIN}microbatches=2", f"{TRAIN}microbatches: unknown key .*micro_batches"),
    "another call": ("actor_trian.tp=2", "placement: got 'actor_trian', expected a call of flow ppo: actor_generate"),
    "a word that the engine lacks": ("actor_generate.micro_batches=2", ".micro_batches: 2 is not used: vllm has no"),
    "more micro-batches than rows": (f"{TRAIN}micro_batches=99", f"{TRAIN}micro_batches: got 99, expected at most 16"),
    "no number": (f"{TRAIN}micro_batches=many", f"{TRAIN}micro_batches: got 'many', expected"),
    "no word": (f"{TRAIN}recompute=some", f"{TRAIN}recompute: got 'some', expected all, or the number of layers"),
    "degrees beyond the mesh": (f"{TRAIN}tp=3", "actor_train_step: got 'tp3', expected degrees .* product is 2"),
    "a mesh outside": (f"{TRAIN}mesh=n0:2", f"{TRAIN}mesh: got 'n0:2', expected"),
    "recomputation without a backward": ("ref_inference.recompute=all", "ref_inference.recompute: 'all' is not used"),
    "a reload of what stays": ("ref_inference.prefetch=false", "ref_inference.prefetch: False is not used"),
    "two values of a copy": (
        "critic_inference.offload=all placement.critic_train_step.offload=none",
        "critic_train_step.offload: got 'none', expected all, as placement.critic_inference.offload",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_word_gives_a_line_with_valid_values(wrong):
    flags, line = WRONG[wrong]
    with pytest.raises(InvalidInput, match=line) as error:
        asked = request("flattening", leased(1, 2, 4096), flags=f"-p placement.{flags}")
        check_names(asked.spec, asked.graph)
        choose_plan(asked, PresetPlan("flattening"))
    assert "\n" not in str(error.value)


def test_a_word_with_measured_plans_is_refused():
    asked = request("measure(2)", leased(1, 2, 4096), flags="-p placement.actor_train_step.micro_batches=2")
    with pytest.raises(InvalidInput, match=r"_train_step\.micro_batches: got 2, expected no value with plan"):
        choose_plan(asked, asked.spec.plan)


@pytest.mark.parametrize("word", first(1, ["micro_batches=2", "mesh=n0:1"]))
def test_a_searched_plan_of_a_run_keeps_the_stated_words_and_is_stored_with_them(word, monkeypatch, tmp_path):
    """As `prefect-rlhf plan` does: a run without the word does not find the stored plan."""
    monkeypatch.setattr(auto_plan, "EVALUATIONS", 1_000)
    monkeypatch.setattr(auto_plan, "PLANS", tmp_path)
    held, flag = leased(1, 2, 4096), f"-p placement.actor_train_step.{word}"
    monkeypatch.setattr(RunRequest, "cost_sources", property(lambda asked: cost_sources(asked.lease, "cpu")))
    stated = of_run(request("auto", held, flags=flag))
    assert of_run(request("auto", held, flags=flag)) == stated
    assert len(list(tmp_path.iterdir())) == 1
    placed, (name, value) = stated["actor_train_step"], word.split("=")
    assert str(placed.mesh.name if name == "mesh" else placed.micro_batches) == value
    of_run(request("auto", held))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_word_with_a_steps_whole_plan_is_refused(tmp_path):
    held = leased(1, 1, 4096)
    content = plan_yaml(of_run(request("flattening", held))).replace("\n", "\n  ")
    file = tmp_path / "plans.yaml"
    file.write_text(f"1:\n  {content}")
    asked = request(str(file), held, flags="-p placement.actor_train_step.micro_batches=2")
    with pytest.raises(InvalidInput, match=r"expected no value: plan\.1 states the whole plan"):
        choose_plans(asked)


def test_a_word_in_a_switching_run_is_refused():
    asked = request(
        "flattening", leased(1, 2, 4096), flags="-p placement.actor_train_step.micro_batches=2 replan=switch"
    )
    with pytest.raises(InvalidInput, match=r"replan: got 'switch', expected say or off with placement\."):
        check_may_switch(asked.spec, asked.graph)


def test_a_job_without_a_plan_gets_the_proof_and_a_sufficient_device_count():
    held = leased(1, 1, 5)
    with pytest.raises(PlanDoesNotFit, match=r"no plan fits these devices: .* needs .*; \d+ devices are enough, as"):
        choose_plan(request("flattening", held, "dpo"), PresetPlan("flattening"))


def test_the_answer_of_a_search_has_the_stated_words():
    held = leased(1, 2, 4096)
    asked = Question(GRAPHS["ppo"], Site.of_lease(held, cost_sources(held, "cpu")), longest_rows(GRAPHS["ppo"], 128))
    words = {"actor_train_step": {"micro_batches": 4}}
    found = plan_graph(asked, evaluations=1_000, proves=False, words=words)
    assert found.plan.name == "auto" and found.plan["actor_train_step"].micro_batches == 4
    assert all(row.plan["actor_train_step"].micro_batches == 4 for row in found.presets if row.plan)
