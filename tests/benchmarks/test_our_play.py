"""Our side of `play_step.py` compares the tool's seconds, which are a mean over rows in floating point."""

import json
from dataclasses import asdict

import pytest

from benchmarks.beside_trl.our_play import measured
from benchmarks.beside_trl.play_work import PlayWork
from prefect_rlhf.tasks.running.journal import TaskRunSpan

pytestmark = pytest.mark.quick


@pytest.fixture
def write(tmp_path):
    """Write a run of the work whose tool took the seconds of a function of those asked."""

    def write(work, seconds):
        where = ("", "generate", "actor_generate")
        memory = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
        counts = {"seconds": 2.0} | {
            f"actor_generate.{name}": 4.0 for name in ("turns", "own_tokens", "observed_tokens")
        }
        steps, spans = [], []
        for step, asked in enumerate(work.seconds_of_step, start=1):
            steps.append({"step": step, "actor_generate.play/tool_seconds": seconds(asked), **counts})
            spans.append(
                asdict(TaskRunSpan("actor_generate", *where, step, "", "", (), 1.0, 2.0, seconds=1.0, **memory))
            )
        for name, lines in (("metrics.jsonl", steps), ("task_runs.jsonl", spans)):
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return write


def test_a_mean_over_rows_is_the_tools_seconds(write):
    work = PlayWork(batch_size=2)
    assert sum([0.05] * work.rows) / work.rows != 0.05
    found = measured(work, write(work, lambda asked: sum([asked] * work.rows) / work.rows))
    assert found.seconds_per_call == {f"generate {name}ms": 1.0 for name in (0, 50, 500)}


def test_another_tool_is_refused(write):
    work = PlayWork()
    with pytest.raises(SystemExit, match="our_play: step 1 had a tool of 0.01 s, expected 0.0"):
        measured(work, write(work, lambda asked: asked + 0.01))
