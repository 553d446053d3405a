"""Predicted beside measured: rows worked out by hand, from a prediction and spans that know nothing of each other."""

import json
from dataclasses import replace

import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.tasks.reporting.comparison import ORCHESTRATION, compare, comparison_rows
from prefect_rlhf.tasks.reporting.pictures.plan import schedule_bars
from prefect_rlhf.tasks.reporting.pictures.timeline import timeline_svg
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan, read_spans
from tests.support.strategies import TWO_DEVICES, dpo

WORKED = {"ref_inference": 2.0, "actor_train_step": 3.0}
AUGMENTED = augment(dpo(), preset("flattening", dpo(), TWO_DEVICES, TWO_DEVICES.whole), 4)
SCHEDULE = schedule(AUGMENTED, lambda node: WORKED.get(subject_of(node.id), 0.0))
PREDICTED = Prediction(SCHEDULE, WORKED, orchestration_seconds=0.25)


def span(call: str, kind: str, step: int, start: float, end: float, seconds: float) -> TaskRunSpan:
    memory: dict[str, dict[str, int]] = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
    where = ("", "", ("n0:0",))
    awaited = AUGMENTED.node(f"{call}@{step}").depends_on if call in WORKED else ()
    here = (f"{call}@{step}", call, kind, call, step, *where, start, end)
    return TaskRunSpan(*here, depends_on=awaited, seconds=seconds, **memory)


def spans(num_steps: int = 4) -> list[TaskRunSpan]:
    """Inference worked 1 s and held its devices 1.5 s; training 4 and 4.5 s; the first step took thrice as long."""
    made, now = [], 1000.0
    for step in range(1, num_steps + 1):
        slower = 3.0 if step == 1 else 1.0
        for call, kind, seconds in (("ref_inference", "inference", 1.0), ("actor_train_step", "train_step", 4.0)):
            end = now + slower * (seconds + 0.5)
            made.append(span(call, kind, step, now, end, slower * seconds))
            now = end
    return made


def test_each_call_has_its_predicted_and_measured_seconds_and_their_ratio():
    rows = {row.subject: row for row in compare(PREDICTED, spans())}
    assert list(rows) == ["ref_inference", "actor_train_step", ORCHESTRATION, "step"]
    train = rows["actor_train_step"]
    assert (train.num_runs, train.predicted_seconds, train.measured_seconds, train.wall_seconds) == (3, 3.0, 4.0, 4.5)
    assert train.ratio == 0.75


def test_the_step_compares_steady_states():
    step = compare(PREDICTED, spans())[-1]
    assert (step.predicted_seconds, step.measured_seconds) == (5.0, pytest.approx(6.0))


def test_nodes_without_a_prediction_have_no_ratio():
    extra = span("held_out", "inference", 2, 1030.0, 1031.0, 1.0)
    row = next(row for row in comparison_rows(compare(PREDICTED, [*spans(), extra])) if row["node"] == "held_out")
    assert (row["predicted s"], row["measured s"], row["ratio"], row["predicted order"]) == ("", "1", "", "")


def test_the_table_ranks_nodes_by_predicted_and_by_measured_time():
    rows = {row["node"]: row for row in comparison_rows(compare(PREDICTED, spans()))}
    orders = {node: (row["predicted order"], row["measured order"]) for node, row in rows.items()}
    assert orders == {
        "ref_inference": ("2", "2"),
        "actor_train_step": ("1", "1"),
        ORCHESTRATION: ("", ""),
        "step": ("", ""),
    }


def test_orchestration_is_time_not_explained_by_work_or_other_task_runs():
    """Training begins when inference ends and works 4 of the 4.5 s until its own end."""
    row = next(row for row in compare(PREDICTED, spans()) if row.subject == ORCHESTRATION)
    assert (row.predicted_seconds, row.measured_seconds) == (0.25, pytest.approx(0.5))


def test_a_single_step_is_compared_without_leaving_it_out():
    assert compare(PREDICTED, spans(1))[0].measured_seconds == 3.0
    assert compare(PREDICTED, []) == []


def test_the_journal_records_predictions_and_their_absence(tmp_path):
    """What no source of times knows is not predicted to take no time; what is written reads back equal."""
    journal = Journal(tmp_path, PREDICTED.worked_seconds)
    known = spans(1)[0]
    unknown = replace(known, node="export.actor@4", kind="export")
    journal.record(known)
    journal.record(unknown)
    lines = [json.loads(line) for line in (tmp_path / "task_runs.jsonl").read_text().splitlines()]
    assert [line["predicted_seconds"] for line in lines] == [2.0, None]
    assert read_spans(tmp_path) == (replace(known, predicted_seconds=2.0), unknown)


def test_the_predicted_timeline_shows_nodes_that_take_time():
    bars = schedule_bars(SCHEDULE, 2)
    assert [(bar.kind, bar.start, bar.end) for bar in bars] == [
        ("inference", 0.0, 2.0),
        ("train_step", 2.0, 5.0),
        ("inference", 5.0, 7.0),
        ("train_step", 7.0, 10.0),
    ]
    assert timeline_svg(bars).count("<title>") == len(bars)
