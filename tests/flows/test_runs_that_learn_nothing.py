"""Runs without a gradient: an author's flow, real Prefect and Megatron-core, a tiny model."""

import logging
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.artifacts import Artifact

import prefect_rlhf
from prefect_rlhf.tasks.run_log import RUN_LOG
from tests.flows.learns_some import learns_some
from tests.support.runs import completed, end, read_lines
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
THIRD = "step 3: 3 steps in a row without a gradient (no gradient): nothing is learnt; use a loss that"
FOURTH = "NothingLearnt: step 4: 4 steps in a row without a gradient (no gradient); use a loss that"


def parameters_in(folder):
    chats = [{"prompt": "what is it", "completion": text} for text in ("the best film", "a good film")]
    return {
        "chats": {"path": json_lines(folder / "chats.jsonl", *chats), "split_column": None},
        "actor": {"path": make_model(folder / "actor"), "dtype": "float32"},
        "output_dir": str(folder / "runs"),
        "steps": 10,
        "most_empty_steps": 4,
        "checkpoint_every": 2,
        "steps_per_group": 1,
    }


@pytest.fixture
def parameters(tmp_path):
    return parameters_in(tmp_path)


@contextmanager
def logged():
    """The run's own records, as a terminal and Prefect's server get them."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger(RUN_LOG).addHandler(handler)
    yield records
    logging.getLogger(RUN_LOG).removeHandler(handler)


@pytest.fixture(scope="module")
def ended(prefect, tmp_path_factory):
    """The parameters of a run that no gradient reaches, its final state, and its own records."""
    given = parameters_in(tmp_path_factory.mktemp("learns nothing"))
    with pytest.MonkeyPatch.context() as patch, logged() as records:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return given, end(learns_some, given), records


def test_a_run_without_a_gradient_ends_with_a_checkpoint(ended):
    """Line, log, UI and error have the cause."""
    parameters, state, records = ended
    assert state.is_failed() and state.message.startswith(FOURTH) and "\n" not in state.message
    assert "most_empty_steps" in state.message
    (run_dir,) = Path(parameters["output_dir"]).glob("learns_some-*")
    assert (run_dir / "checkpoints" / "step-000004").is_dir() and not (run_dir / "result.json").exists()
    progress = (run_dir / "progress.log").read_text()
    assert "step 4 of 10" in progress and progress.count("no gradient: nothing learnt") == 4
    warnings = [each.getMessage() for each in records if each.levelno == logging.WARNING]
    assert sum(text.startswith(THIRD) for text in warnings) == 1
    assert Artifact.get("warnings").data.startswith(f"- {THIRD}")


@pytest.mark.all
def test_a_run_without_a_gradient_resumes_as_if_it_had_not_been_killed(ended):
    """From an earlier checkpoint, a run ends at the same step with the same words; from the last, it goes on for as
    many steps again, and fails even if these are the last steps of all."""
    parameters, state, _ = ended
    (run_dir,) = Path(parameters["output_dir"]).glob("learns_some-*")
    killed = end(learns_some, parameters | {"resume_from": str(run_dir / "checkpoints" / "step-000002")})
    assert killed.message == state.message
    last = {"resume_from": str(run_dir / "checkpoints" / "step-000004"), "steps": 8}
    later = end(learns_some, parameters | last)
    assert later.is_failed() and "step 8: 8 steps in a row without a gradient" in later.message


@pytest.mark.all  # the first test has the warning
def test_a_run_that_stops_learning_completes_if_a_setting_says_so_and_its_result_has_the_warning(parameters):
    """Through the public door; a run's folder gives the same result."""
    changed = {"most_empty_steps": None, "algo": {"steps": 2}}
    result = prefect_rlhf.run(learns_some, devices=1, **(parameters | changed))
    (warning,) = result.warnings
    assert warning.startswith("step 5: 3 steps in a row without a gradient (no gradient): nothing is learnt")
    assert prefect_rlhf.RunResult.read(result.run_dir) == result
    assert [step.get("actor_train.empty_updates", 0) for step in result.metrics] == [0] * 2 + [1] * 8


@pytest.mark.all
def test_a_slowly_learning_run_gets_no_warning(parameters):
    """In its warm-up, too."""
    run_dir = completed(learns_some, parameters | {"algo": {"steps": 10}})
    assert prefect_rlhf.RunResult.read(run_dir).warnings == ()
    assert all(step["actor_train.grad_norm"] > 0 for step in read_lines(run_dir / "metrics.jsonl"))
    assert "nothing learnt" not in (run_dir / "progress.log").read_text()
