"""Plans made by search: before a run, for the leased mesh, and remembered; and plans that are measured."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware import profiles
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site_of
from prefect_rlhf.flows.hardware.node_hardware import RUNTIME, cost_sources
from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.training.choice import auto_plan as auto
from prefect_rlhf.flows.training.choice.choose_plan import choose_plan
from prefect_rlhf.flows.training.choice.measured_plan import (
    STEPS_MEASURED,
    PlanTrial,
    fastest,
    trial_rows,
    trials_json,
)
from prefect_rlhf.flows.training.choice.searched_plan import summary
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.run import predict_run
from prefect_rlhf.flows.training.spec.plan_choice import MOST_PLANS
from prefect_rlhf.flows.training.spec.run_spec import read_spec
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.step_groups import StepGroups
from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import LengthDistribution
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.fit import longest_rows
from prefect_rlhf.placement.planner.explain import next_best
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import parse_plan, read_plan
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.placement.schedule.estimate import without_evaluation
from prefect_rlhf.placement.search.driver import SearchOutcome
from tests.support.cases import first
from tests.support.strategies import GIB, TWO_DEVICES, dpo, ppo, remax

HELD = Lease("pool", "abc", TWO_DEVICES, TWO_DEVICES.whole, TWO_DEVICES.whole.devices())
WORK = longest_rows(remax(), 256)


def sources() -> CostSources:
    """What is known of the lease, where nobody measured anything."""
    return cost_sources(HELD, "cpu")


def question(graph=None, held=HELD, work=WORK) -> Question:
    return Question(graph or remax(), Site.of_lease(held, sources()), work)


def chosen_plan(asked):
    """The plan that the options of a request name."""
    return choose_plan(asked, asked.spec.plan)


def request(plan, held=HELD, dry_run=False) -> RunRequest:
    """A run that was read, as far as its plan depends on it."""
    spec = read_spec(RunOptions(plan=plan, dry_run=dry_run))
    return RunRequest(spec, held, inputs=None, graph=remax(), workload=WORK, checkpoint=None)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Plans that earlier runs left are not this test's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(auto, "EVALUATIONS", 50_000)
    return tmp_path


def test_auto_gives_a_legal_plan_that_its_certificate_passes():
    chosen = chosen_plan(request("auto"))
    assert check_plan(chosen.plan, remax(), HELD.mesh)
    assert certify_plan(chosen.plan, remax(), WORK, "cpu") == chosen.certificate and chosen.certificate.fits


def test_the_answer_states_estimate_bound_and_presets():
    """Estimate, bound, what binds, how the search ended, and every preset that these devices can have."""
    said: list[str] = []
    auto.auto_plan(question(), said.append)
    for words in ("s per iteration by the estimate", "above the bound", "binding constraint: ", "search: "):
        assert words in said[-1]
    possible = {name for name in PRESETS if f"\n{name} " in said[-1]}
    assert possible > {"flattening", "split"} and "expected a mesh" not in said[-1]


@pytest.mark.parametrize(
    ("bound", "words"),
    [(1.0, "proved: no searched plan is more than"), (0.8, "one between the bound and this plan may exist")],
)
def test_only_the_printed_plan_is_called_proved(found, bound, words):
    """A search that solved its own problem to the end proves its bound; where that is lower, not the plan."""
    solved = replace(found.search, outcome=SearchOutcome.OPTIMAL)
    text = summary(replace(found, search=solved, lower_bound_seconds=bound * found.seconds))
    assert words in text
    assert ("proved: " in text) == (bound == 1.0)


def test_a_plan_found_once_is_not_searched_again(monkeypatch):
    first = auto.auto_plan(question(), print)
    monkeypatch.setattr(auto, "plan_graph", lambda *_, **__: pytest.fail("searched again"))
    said: list[str] = []
    assert auto.auto_plan(question(), said.append) == first
    assert "stored plan: " in said[0] and "binding constraint" in said[0]


@pytest.mark.parametrize(
    ("graph", "held", "work"),
    first(
        2,
        [
            (dpo(), HELD, WORK),
            (remax(), replace(HELD, cluster=replace(TWO_DEVICES, device_memory_bytes=4 * GIB)), WORK),
            (remax(), replace(HELD, mesh=DeviceMesh(0, 1, 0, 1)), WORK),
            (remax(), HELD, longest_rows(remax(), 512)),
            (remax(), HELD, replace(WORK, prompts=LengthDistribution.of({64: 1, WORK.prompts.longest: 1}))),
        ],
    ),
    ids=["graph", "memory", "mesh", "longest row", "lengths"],
)
def test_another_question_is_searched_anew(home, graph, held, work):
    auto.auto_plan(question(), print)
    auto.auto_plan(question(graph, held, work), print)
    assert len(list((home / ".prefect-rlhf/plans").glob("*.yaml"))) == 2


def test_a_lease_of_the_same_devices_by_another_name_is_the_same_question(home, monkeypatch):
    """A run on the next lease finds the plan of the last."""
    first = auto.auto_plan(question(), print)
    monkeypatch.setattr(auto, "plan_graph", lambda *_, **__: pytest.fail("searched again"))
    assert auto.auto_plan(question(held=replace(HELD, id="def", pool="other")), print) == first


@pytest.mark.parametrize(
    "content",
    first(
        1, [b"name: auto\ncalls: {}\n", b"", b"\x93not text", b"name: [", b"name: auto\ncalls: {actor: {mesh: n7:0}}\n"]
    ),
    ids=["no calls", "empty", "not text", "not YAML", "other calls"],
)
def test_a_remembered_plan_that_somebody_broke_is_named_and_made_anew(home, content):
    first = auto.auto_plan(question(), print)
    (file,) = (home / ".prefect-rlhf/plans").glob("*.yaml")
    file.write_bytes(content)
    said: list[str] = []
    assert auto.auto_plan(question(), said.append) == first
    assert str(file) in said[0] and "a new search starts" in said[0]
    assert read_plan(file, TWO_DEVICES) == first[0]


def test_an_unknown_gpu_kind_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    held = replace(HELD, kind="cuda")
    with pytest.raises(InvalidInput, match="kind: got 'cuda', expected a machine with nvidia-smi"):
        chosen_plan(request("auto", held))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A file with a line for each time that the driver's tool was started; it names an H200."""
    tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    tool.write_text(
        f"#!/bin/sh\necho once >> {asked}\necho 0, GPU-1, NVIDIA H200, Disabled, 143771, 143000, 580.95.05\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return asked


@pytest.mark.parametrize("plan", ["auto", "measure(2)", "flattening"])
def test_the_driver_is_asked_and_profiles_are_read_once_a_run(monkeypatch, asked, plan):
    """However many ask for times: the search, the plans that are measured, the prediction."""
    read, real = [], profiles.read_profile
    monkeypatch.setattr(profiles, "read_profile", lambda subject: (read.append(subject), real(subject))[1])
    run = request(plan, replace(HELD, kind="cuda"), dry_run=True)
    assert predict_run(run, augment(run.graph, chosen_plan(run).plan, 2)) is not None
    assert asked.read_text().splitlines() == ["once"]
    assert len(read) == len({(model.shape, model.dtype) for model in run.graph.models})


@pytest.mark.usefixtures("asked")
def test_a_gpu_is_counted_by_its_datasheet():
    """The name is what the driver's tool prints."""
    (node,) = measured_sources([], replace(HELD, kind="cuda")).nodes
    assert (node.device.name, node.devices_per_node) == ("h200", 2)
    assert node.efficiency == RUNTIME


def test_a_stated_cluster_is_priced_like_a_leased_cluster():
    """Not as ReaL's runtime, whose calls take two seconds besides their layers."""
    (gpu,), (cpu,) = (site_of(parse_cluster(text)).sources.nodes for text in ("1x2:h200", "1x2:cpu"))
    assert gpu.efficiency == RUNTIME
    assert cpu == cost_sources(HELD, "cpu").nodes[0]
    assert cpu.efficiency.call_seconds == RUNTIME.call_seconds < 0.1 < Efficiency().call_seconds


def test_an_unknown_gpu_does_not_stop_a_given_plan(monkeypatch, tmp_path, caplog):
    """The run says in a line that it predicts nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    held = replace(HELD, kind="cuda")
    run = request("flattening", held)
    augmented = augment(run.graph, chosen_plan(run).plan, 2)
    with caplog.at_level("INFO", logger="prefect_rlhf.plan"):
        assert predict_run(run, augmented) is None
    assert "no predictions: kind: got 'cuda'" in caplog.text


@pytest.fixture(scope="module")
def found():
    return auto.plan_graph(question(ppo(evaluate_every=2)), 0.5)


@pytest.mark.parametrize("count", [1, 2, MOST_PLANS])
def test_the_plans_to_measure_differ_and_the_best_is_first(found, count):
    asked = question(ppo(evaluate_every=2))
    best = next_best(asked, found, count)
    assert len(best) == len({plan.placements for plan in best}) == len({plan.name for plan in best}) == count
    assert best[0].placements == found.plan.placements
    assert all(check_plan(plan, asked.graph, asked.site.mesh) and asked.fits(plan) for plan in best)
    presets = [asked.seconds(plan) for plan in best if not plan.name.startswith("other ")]
    assert presets == sorted(presets)


def test_a_measured_plan_runs_two_steps_without_evaluation_checkpoint_and_export(tmp_path):
    spec, inputs = read_spec(RunOptions(plan="flattening", checkpoint_every=1)), SimpleNamespace(sources={})
    asked = replace(request("flattening"), spec=spec, inputs=inputs, graph=ppo(evaluate_every=2))
    run = asked.trial_run(*without_evaluation(asked.graph, chosen_plan(asked).plan), STEPS_MEASURED, tmp_path)
    groups = StepGroups(run.graph, run.plan, run.num_steps, 2, run.finished, run.checkpoint_every, run.exports)
    measured = groups.next_group()
    assert {node.step for node in measured} == {1, 2} and groups.next_group() == ()
    assert not any(node.kind in ("checkpoint", "export") or (node.call and node.call.every) for node in measured)
    assert [node.id for node in measured if node.kind == "train_step" and node.step == 2]


PLANS = [replace(chosen_plan(request("flattening")).plan, name=name) for name in ("a", "b", "c")]
FAILED = PlanTrial(PLANS[1], 1.0, failure="OutOfDeviceMemory: rank 1")
TRIALS = [PlanTrial(PLANS[0], 2.0, 3.0), FAILED, PlanTrial(PLANS[2], 4.0, 2.5)]


def test_the_fastest_measured_plan_is_kept():
    assert fastest(TRIALS) is PLANS[2]


def test_when_every_plan_fails_the_line_says_why_of_each():
    with pytest.raises(InvalidInput) as error:
        fastest([replace(FAILED, plan=plan) for plan in PLANS[:2]])
    assert str(error.value) == (
        "plan: got 'measure(2)', expected at least one plan that runs (a: OutOfDeviceMemory: rank 1; "
        "b: OutOfDeviceMemory: rank 1)"
    )


def test_predicted_and_measured_seconds_stand_side_by_side_with_both_orders():
    rows = trial_rows(TRIALS)
    assert [(row["predicted order"], row["measured order"]) for row in rows] == [("1", "2"), ("", ""), ("2", "1")]
    assert [row["failure"] for row in rows] == ["", "OutOfDeviceMemory: rank 1", ""]
    assert rows[0]["ratio"] == "0.667" and rows[1]["measured s"] == ""


def test_measured_plans_are_written_and_read_back():
    written = json.loads(trials_json(TRIALS))["plans"]
    assert [one["chosen"] for one in written] == [False, False, True]
    assert [parse_plan(yaml.safe_load(one["plan"]), TWO_DEVICES) for one in written] == PLANS
