"""The journal: what a step's lines say, and where its time went, by hand."""

import json

import pytest

from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan, covered_seconds, time_shares


def span(kind, start, end, seconds=None, step=0, **more):
    worked = end - start if seconds is None else seconds
    return TaskRunSpan(f"{kind}@{step}", kind, kind, kind, step, "pool", "lease", ("n0:0",), start, end, worked, **more)


def test_time_outside_of_model_function_calls_is_orchestration():
    """10 s of wall time; calls work 4 s and 3 s; the rest, a transfer included, is orchestration."""
    spans = [span("generate", 0.0, 5.0, 4.0), span("transfer", 5.0, 6.0), span("train_step", 6.0, 10.0, 3.0)]
    assert time_shares(spans)["orchestration_share"] == pytest.approx(0.3)


def test_calls_that_overlap_count_once():
    assert covered_seconds([(0.0, 4.0), (1.0, 3.0), (3.5, 5.0)]) == 5.0


def test_metrics_are_written_under_the_name_of_their_call(tmp_path):
    journal = Journal(tmp_path)
    journal.record(span("train_step", 0.0, 2.0, metrics={"loss": 0.5}, fingerprint_seconds=0.1))
    journal.record(span("generate", 2.0, 4.0, step=1))
    journal.finish_step(0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 0.0,
        "train_step.loss": 0.5,
        "seconds": 2.0,
        "orchestration_share": 0.0,
        "fingerprint_share": 0.05,
    }
    assert len((tmp_path / "task_runs.jsonl").read_text().splitlines()) == 2
    assert [s.step for s in journal.last_steps(1)] == [1]
