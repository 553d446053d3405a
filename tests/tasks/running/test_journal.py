"""The journal: what a step's lines say, and where its time went, by hand."""

import json
from dataclasses import replace

import pytest

from prefect_rlhf.placement.graph import Call, DataflowGraph, Dataset, Operation, Port
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.tasks.reporting.report import timeline_markdown, values_by_call
from prefect_rlhf.tasks.running.journal import (
    STEPS_KEPT,
    Journal,
    TaskRunSpan,
    call_metrics,
    covered_seconds,
    read_spans,
    time_shares,
)
from tests.support.runs import read_lines

pytestmark = pytest.mark.quick

NO_MEMORY = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}


def span(kind, start, end, seconds=None, step=1, **more):
    more = {"seconds": end - start if seconds is None else seconds, **NO_MEMORY, **more}
    return TaskRunSpan(f"{kind}@{step}", kind, kind, kind, step, "pool", "lease", ("n0:0",), start, end, **more)


def test_time_outside_of_model_function_calls_is_orchestration():
    """10 s of wall time; calls work 4 s and 3 s; the rest, a transfer included, is orchestration."""
    spans = [span("generate", 0.0, 5.0, 4.0), span("transfer", 5.0, 6.0), span("train_step", 6.0, 10.0, 3.0)]
    assert time_shares(spans)["orchestration_share"] == pytest.approx(0.3)


def test_overlapping_calls_count_once():
    assert covered_seconds([(0.0, 4.0), (1.0, 3.0), (3.5, 5.0)]) == 5.0


def test_metrics_are_named_after_their_call(tmp_path):
    journal = Journal(tmp_path)
    journal.record(span("train_step", 0.0, 2.0, metrics={"loss": 0.5}, fingerprint_seconds=0.1))
    journal.record(span("generate", 2.0, 4.0, step=2))
    journal.finish_step(1)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 1,
        "train_step.loss": 0.5,
        "seconds": 2.0,
        "orchestration_share": 0.0,
        "fingerprint_share": 0.05,
    }
    assert len((tmp_path / "task_runs.jsonl").read_text().splitlines()) == 2
    assert [s.step for s in journal.last_steps(1)] == [2]


def test_metrics_of_parts_combine_to_the_whole_calls():
    """A mean over tokens by the tokens of each part, a mean over rows by its rows."""
    of_part = {"metrics": {"kept_mass": 1.0, "solved": 1.0}, "metric_rows": {"solved": 1}, "num_tokens": 30}
    of_other = {"metrics": {"kept_mass": 0.5, "solved": 0.0}, "metric_rows": {"solved": 3}, "num_tokens": 10}
    parts = [span("generate", 0.0, 1.0, **of_part), span("generate", 1.0, 2.0, **of_other)]
    assert call_metrics(parts) == {"generate.kept_mass": 0.875, "generate.solved": 0.25}


def call(name, every=None):
    rows = RowSet("prompts", "prompts")
    return Call(name, "compute", None, (Port("rows", "prompts", ()),), (), Operation("x"), rows, 1, every)


GRAPH = DataflowGraph("some", (), (Dataset("prompts", (), 1),), (call("critic"), call("actor"), call("held_out", 2)))


def test_metrics_have_a_line_for_each_step_and_evaluations_a_file_of_their_own(tmp_path):
    """The evaluation before training, step 0, is no step; steps are integers, and calls in the graph's order."""
    journal = Journal(tmp_path, graph=GRAPH)
    followed = []
    journal.follow(followed.append)
    for step in range(4):
        calls = ["actor", "critic"] * (step > 0) + ["held_out"] * (step in (0, 2, 3))
        for name in calls:
            journal.record(replace(span("compute", 0.0, 1.0, step=step, metrics={"loss": 0.5}), call=name))
        journal.finish_step(step)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in followed] == [0, 1, 2, 3] and "held_out.loss" in followed[0]
    assert all(type(line["step"]) is int for line in lines)
    assert [list(line)[:4] for line in lines[:2]] == [
        ["step", "critic.loss", "actor.loss", "seconds"],
        ["step", "critic.loss", "actor.loss", "held_out.loss"],
    ]
    evaluations = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert evaluations == [{"step": step, "held_out.loss": 0.5} for step in (0, 2, 3)]


@pytest.mark.parametrize("own", [True, False])
def test_a_resumed_run_has_a_line_for_each_earlier_step(tmp_path, own):
    """In its own folder, or from that of another run."""
    journal = Journal(tmp_path / "run", graph=GRAPH)
    for step in range(4):
        journal.record(replace(span("compute", 0.0, 1.0, step=step, metrics={"loss": 0.5}), call="held_out"))
        journal.finish_step(step)
    folder = tmp_path / ("run" if own else "later")
    assert [line["step"] for line in Journal(folder).go_on_after(2, tmp_path / "run")] == [0, 1, 2]
    for name, steps in (("metrics.jsonl", [1, 2]), ("evaluation.jsonl", [0, 1, 2])):
        assert [line["step"] for line in read_lines(folder / name)] == steps


def test_what_a_run_does_after_a_kill_behind_its_last_step_is_shown(tmp_path):
    """It has no step to do again, only the export."""
    journal = Journal(tmp_path, graph=GRAPH)
    journal.record(span("export", 0.0, 1.0, step=4))
    assert journal.last_steps(STEPS_KEPT) == read_spans(tmp_path)
    assert timeline_markdown(journal.last_steps(STEPS_KEPT)).startswith("Steps 4 to 4")


def test_a_commit_that_ends_after_its_step_left_memory_is_only_in_the_file(tmp_path):
    journal = Journal(tmp_path, graph=GRAPH)
    for step in range(1, STEPS_KEPT + 2):
        journal.record(span("compute", 0.0, 1.0, step=step))
        journal.finish_step(step)
    journal.record(span("commit", 0.0, 1.0, step=1))
    assert {each.step for each in journal.last_steps(STEPS_KEPT)} == {*range(2, STEPS_KEPT + 2)}
    assert read_spans(tmp_path)[-1].node == "commit@1"


def test_a_run_restarted_from_step_0_evaluates_before_training_again(tmp_path):
    """It had no checkpoint, so nothing of its record stays."""
    journal = Journal(tmp_path, graph=GRAPH)
    for step in range(2):
        journal.record(replace(span("compute", 0.0, 1.0, step=step, metrics={"loss": 0.5}), call="held_out"))
        journal.finish_step(step)
    assert Journal(tmp_path).go_on_after(0, tmp_path) == [] and read_spans(tmp_path) == ()
    assert read_lines(tmp_path / "metrics.jsonl") == [] and not (tmp_path / "evaluation.jsonl").exists()


@pytest.mark.parametrize("own", [True, False])
def test_steps_without_a_line_after_a_kill_are_rebuilt_from_task_runs(tmp_path, own):
    """Their metrics and evaluations are those that the run would have written."""
    whole, killed = (Journal(tmp_path / name, graph=GRAPH) for name in ("whole", "killed"))
    for step in range(4):
        for journal in (whole, killed):
            journal.record(span("train_step", 2.0 * step, 2.0 * step + 1, step=step, metrics={"loss": float(step)}))
            if step % 2 == 0:
                evaluated = replace(span("compute", 0.0, 1.0, step=step, metrics={"score": 1.0}), call="held_out")
                journal.record(evaluated)
        whole.finish_step(step)
    for step in (0, 1):
        killed.finish_step(step)
    folder = tmp_path / ("killed" if own else "next")
    Journal(folder, graph=GRAPH).go_on_after(3, tmp_path / "killed")
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        assert read_lines(folder / name) == read_lines(tmp_path / "whole" / name)


def test_a_step_is_shown_with_each_value_under_its_calls_name():
    metrics = {"step": 12345, "rewards.kl": 0.02, "critic.loss": 0.5, "actor.loss": 2, "actor.initial_loss": 1.0}
    assert values_by_call(metrics) == ["step 1.234e+04", "rewards.kl 0.02", "critic.loss 0.5", "actor.loss 2"]


def test_a_long_run_keeps_the_newest_steps_in_memory(tmp_path):
    """A step's task runs stay until its metrics are written, whatever began before; on disk all of them are."""
    journal = Journal(tmp_path)
    for step in range(1, 31):
        journal.record(span("generate", step, step + 1.0, step=step))
        if step > 1:
            assert journal.finish_step(step - 1)["seconds"] == 1.0
        assert len(journal._by_step) <= STEPS_KEPT + 1
    assert [run.step for run in journal.last_steps(3)] == [28, 29, 30]
    assert [run.step for run in read_spans(tmp_path)] == list(range(1, 31))


def test_a_switch_is_in_the_next_steps_timeline_but_in_no_step_time(tmp_path):
    journal = Journal(tmp_path)
    journal.record(span("generate", 0.0, 1.0))
    journal.finish_step(1)
    journal.record(span("switch", 1.0, 5.0, step=2))
    journal.record(span("generate", 5.0, 7.0, step=2))
    assert journal.finish_step(2)["seconds"] == 2.0
    assert [run.kind for run in journal.last_steps(1, with_switches=True)] == ["switch", "generate"]
    assert [run.kind for run in journal.last_steps(1)] == ["generate"]


def test_lines_of_task_runs_are_flat(tmp_path):
    """Benchmarks read them by these keys."""
    Journal(tmp_path).record(span("generate", 0.0, 1.0, metrics={"loss": 0.5}, device_bytes={"0": 7}))
    (line,) = (tmp_path / "task_runs.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "node": "generate@1", "title": "generate", "kind": "generate", "call": "generate", "step": 1, "pool": "pool",
        "lease": "lease", "devices": ["n0:0"], "start": 0.0, "end": 1.0, "seconds": 1.0, "reads": None, "writes": None,
        "fingerprint_seconds": 0.0, "bytes_moved": 0, "num_tokens": 0, "peak_extra_bytes": 0, "device_bytes": {"0": 7},
        "resident_bytes": {}, "store_bytes": {}, "metrics": {"loss": 0.5}, "metric_rows": {}, "predicted_seconds": None,
        "depends_on": [], "gpu": {},
    }  # fmt: skip
