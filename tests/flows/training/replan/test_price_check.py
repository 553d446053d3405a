"""The check of a run's plan by its measured seconds: its line, its files, and when there is none."""

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prefect_rlhf.files.processes.lifeline import CONTROLLER_GONE
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.replan import price_check as checks
from prefect_rlhf.flows.training.replan import recheck_process
from prefect_rlhf.flows.training.replan.price_check import (
    BETTER_PLAN,
    RECHECKED,
    STEPS_AWAITED,
    PriceCheck,
    price_check,
    way_to_switch,
)
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.run_spec import read_spec
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.placement.schedule.estimate import predict
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan
from tests.flows.hardware.test_probes import DESK, HELD
from tests.flows.test_algorithms import traced
from tests.support.strategies import SMOLLM2, model

GRAPH = traced(ppo)
GRAPH = replace(GRAPH, models=tuple(model(one.role, one.head, SMOLLM2) for one in GRAPH.models))
WORKLOAD = Workload.fixed(20, 40)
PLAN = preset("flattening", GRAPH, DESK, DESK.whole, WORKLOAD.longest, "cpu")
SLOW_LINK = Correction(compute=0.15, link=5.0)
DEADLINE_SECONDS = 300.0


@pytest.fixture(autouse=True)
def short_search(own_home, monkeypatch):
    """With the priority of other tests: else it would wait for them."""
    monkeypatch.setattr(checks, "EVALUATIONS", 50_000)
    monkeypatch.setattr(recheck_process, "_YIELD", "")


def request(checkpoint=None, **options):
    given = {"plan": "auto", "steps": 20, "checkpoint_every": 5} | options
    return RunRequest(read_spec(RunOptions(**given)), HELD, SimpleNamespace(), GRAPH, WORKLOAD, checkpoint)


def predicted(asked, plan=PLAN):
    return predict(augment(GRAPH, plan, STEPS_AWAITED), WORKLOAD, asked.cost_sources)


def ran(asked, folder, correction=SLOW_LINK):
    """The journal of the first steps of a run whose nodes take what the corrected constants say."""
    journal, augmented = Journal(folder), augment(GRAPH, PLAN, STEPS_AWAITED)
    costs = NodeCosts(GRAPH, PLAN, WORKLOAD, corrected(asked.question, correction).site.sources)
    now, memory = 0.0, {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
    for node in augmented:
        seconds = costs.cost(node).worked * (5 if node.step == 1 else 1)
        call = node.call.name if node.call else None
        where = ("", "", ("n0:0",))
        span = (node.id, node.title, node.kind, call, node.step, *where, now, now + seconds)
        journal.record(TaskRunSpan(*span, seconds=seconds, **memory))
        now += seconds
    return journal


def checked(asked, journal):
    """The line of a check that has had all the time that it needs."""
    check = price_check(asked, PLAN, predicted(asked))
    assert isinstance(check, PriceCheck)
    try:
        lines = [check.step_ended(journal) for _ in range(STEPS_AWAITED)]
        wait_for(check._process)
        return next(filter(None, [*lines, check.step_ended(journal)]), None), check
    finally:
        check.close()


def wait_for(process):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while process is not None and not process.ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def continued(run_dir, step=5):
    return SimpleNamespace(folder=run_dir / "checkpoints" / f"step-{step:06}", step=step)


@pytest.mark.all  # test_recheck.py finds it
def test_a_better_plan_is_a_file_and_a_line_with_its_gain_and_the_way_to_it_once(tmp_path):
    """Neither the resumed run nor a run under the better plan repeats the check; a run under a third plan does."""
    asked, run_dir = request(), tmp_path / "run"
    line, check = checked(asked, ran(asked, run_dir))
    better = run_dir / BETTER_PLAN
    record = json.loads((run_dir / RECHECKED).read_text())
    gain = 1 - record["best_seconds"] / record["seconds"]
    assert gain > 0.1
    assert line.startswith("by constants of the measured steps: compute ") and "link " in line
    assert f"{gain:.0%} less than flattening" in line and "\n" not in line
    assert line.endswith(
        "to switch, stop this run after its checkpoint of step 10 and resume it with "
        f"-p plan={better} -p resume_from={run_dir}"
    )
    assert check.step_ended(Journal(run_dir)) is None

    plan = aligned(check_plan(read_plan(better, DESK), GRAPH, DESK.whole), GRAPH)
    resumed = request(continued(run_dir))
    assert price_check(resumed, PLAN, predicted(resumed)) is None
    assert price_check(resumed, plan, predicted(resumed, plan)) is None
    other = preset("split", GRAPH, DESK, DESK.whole, WORKLOAD.longest, "cpu")
    assert price_check(resumed, other, predicted(resumed, other)) is not None


@pytest.mark.parametrize("options", [{"checkpoint_every": None}, {"checkpoint_every": 20}, {"steps": 10}])
def test_a_run_without_later_checkpoints_learns_the_plan_for_the_next_run(tmp_path, options):
    way = way_to_switch(tmp_path, request(**options).spec, done=5)
    assert way == f"to use it in the next run: -p plan={tmp_path / BETTER_PLAN}"


def test_constants_that_the_steps_confirm_keep_the_answer_of_a_search(tmp_path):
    asked = request()
    line, _ = checked(asked, ran(asked, tmp_path, Correction()))
    assert line is None
    assert not (tmp_path / BETTER_PLAN).exists()
    assert json.loads((tmp_path / RECHECKED).read_text())["better_plan"] is None


def test_steps_that_deviate_under_measured_times_name_a_way_to_compare_plans(tmp_path):
    """A profile measured the model itself: there is no constant to correct."""
    asked = request()
    journal = ran(asked, tmp_path)
    prediction = predicted(asked)
    asked.__dict__["cost_sources"] = replace(asked.cost_sources, profiles=("a profile",))
    check = price_check(asked, PLAN, prediction)
    lines = [check.step_ended(journal) for _ in range(STEPS_AWAITED + 1)]
    assert [line is not None for line in lines] == [False, False, False, True, False]
    assert "than predicted, most of it in " in lines[3]
    assert lines[3].endswith("; plan: measure(3) compares plans by measured steps")


@pytest.mark.parametrize("options", [{"replan": "off"}, {"steps": STEPS_AWAITED}], ids=["off", "too short"])
def test_a_run_without_a_check(options):
    asked = request(**options)
    assert price_check(asked, PLAN, predicted(asked)) is None


def test_a_run_without_predictions_is_not_checked():
    assert price_check(request(), PLAN, None) is None


def test_false_is_off_since_yaml_reads_the_word_so():
    assert RunOptions(replan=False).replan == "off"


def test_a_damaged_result_of_an_earlier_check_is_ignored(tmp_path):
    (tmp_path / RECHECKED).write_text("{")
    resumed = request(continued(tmp_path))
    assert price_check(resumed, PLAN, predicted(resumed)) is not None


def test_a_process_that_fails_is_a_line_and_the_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(recheck_process, "_PROGRAM", "raise SystemExit('no memory')")
    asked = request()
    line, _ = checked(asked, ran(asked, tmp_path))
    assert line == "the plan was not compared with others by measured seconds (no memory)"


def test_the_process_ends_with_the_run(tmp_path, monkeypatch):
    """The kernel closes the pipe of a killed run."""
    monkeypatch.setattr(checks, "EVALUATIONS", 10**12)
    asked = request()
    journal, check = ran(asked, tmp_path), price_check(asked, PLAN, predicted(asked))
    for _ in range(STEPS_AWAITED):
        check.step_ended(journal)
    process = check._process
    os.close(process._life)
    process._life = os.open(os.devnull, os.O_RDONLY)
    wait_for(process)
    assert process._process.returncode == CONTROLLER_GONE
    check.close()
