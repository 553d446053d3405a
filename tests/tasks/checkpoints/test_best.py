"""The best evaluation of a run's record, the checkpoint that goes with it, and when to look no further."""

import json
import math
from dataclasses import replace

import pytest
import torch

from prefect_rlhf.engines.engine import StatePart
from prefect_rlhf.engines.files.checkpoint_files import write_shard
from prefect_rlhf.engines.files.peft_export import trained_parameters
from prefect_rlhf.engines.files.peft_folder import open_adapter
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.tasks.checkpoints.best import EVALUATIONS, BestModel, Evaluation, carry_over_best, export_stored
from prefect_rlhf.tasks.checkpoints.folders import folder_of, keep_newest
from prefect_rlhf.tasks.data.vocabulary import have_same_files
from prefect_rlhf.tasks.model_shape import read_model_spec
from tests.support.tiny import make_model
from tests.tasks.small_tokenizer import save_bpe_tokenizer

pytestmark = pytest.mark.quick

METRIC = "record_evaluation.score"


def recorded(run_dir, *values, name=METRIC):
    """A run's folder whose evaluations, every 2 steps from the start, found these."""
    run_dir.mkdir(exist_ok=True)
    lines = (json.dumps({"step": 2 * place, name: value}) + "\n" for place, value in enumerate(values))
    (run_dir / EVALUATIONS).write_text("".join(lines))
    return run_dir


@pytest.mark.parametrize(
    ("highest", "values", "step"),
    [
        (True, [9.0, 1.0, 3.0, 2.0], 4),
        (False, [0.0, 1.0, 3.0, 2.0], 2),
        (True, [0.0, 3.0, 3.0], 2),
        (True, [0.0, math.nan, 1.0], 4),
    ],
)
def test_best_is_the_first_of_equal_best_values_excluding_the_start(tmp_path, highest, values, step):
    best = BestModel(METRIC, highest)
    assert best.best(recorded(tmp_path / "run", *values)).step == step
    assert best.spared(tmp_path / "run") == folder_of(tmp_path / "run", step)
    assert best.enough(tmp_path / "run") is None, "without a patience it goes on"


def test_without_evaluations_there_is_no_best(tmp_path):
    assert BestModel(METRIC, patience=1).best(tmp_path) is None
    assert BestModel(METRIC, patience=1).enough(recorded(tmp_path / "run", 5.0)) is None


def test_patience_counts_evaluations_since_the_best(tmp_path):
    best = BestModel(METRIC, patience=2)
    assert best.enough(recorded(tmp_path / "run", 0.0, 3.0, 1.0)) is None
    why = best.enough(recorded(tmp_path / "run", 0.0, 3.0, 1.0, 3.0))
    assert why == "no better record_evaluation.score than 3 after 2 steps in 2 evaluations"
    assert best.enough(recorded(tmp_path / "run", 0.0, 3.0, 1.0, 4.0)) is None


def test_an_incomplete_line_is_not_read(tmp_path):
    run_dir = recorded(tmp_path / "run", 0.0, 3.0)
    with (run_dir / EVALUATIONS).open("a") as file:
        file.write('{"step": 4, "record_ev')
    assert BestModel(METRIC).evaluations(run_dir) == [Evaluation(2, 3.0)]


def without_score(run_dir, *places):
    """Record that no response of these evaluations had a score: they have no mean."""
    lines = [json.loads(line) for line in (run_dir / EVALUATIONS).read_text().splitlines()]
    for place in places:
        lines[place] = {"step": lines[place]["step"], "record_evaluation.unscored": 1.0}
    (run_dir / EVALUATIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_an_evaluation_without_a_score_is_not_the_best_and_counts_for_patience(tmp_path):
    best = BestModel(METRIC, patience=2)
    run_dir = without_score(recorded(tmp_path / "run", 0.0, 3.0, 5.0, 5.0), 2, 3)
    assert best.best(run_dir).step == 2
    assert best.enough(run_dir) == "no better record_evaluation.score than 3 after 2 steps in 2 evaluations"
    assert best.enough(without_score(recorded(tmp_path / "run", 0.0, 3.0, 5.0, 4.0), 2)) is None


@pytest.mark.parametrize("places", [(0,), (0, 1)])
def test_first_evaluations_without_scores_do_not_stop_a_run(tmp_path, places):
    best = BestModel(METRIC, patience=1)
    run_dir = without_score(recorded(tmp_path / "run", 0.0, 3.0), *places)
    assert best.best(run_dir) == (Evaluation(2, 3.0) if places == (0,) else None)
    assert best.enough(run_dir) is None


def test_evaluations_of_other_calls_do_not_count(tmp_path):
    """Each call may evaluate at its own interval."""
    run_dir = recorded(tmp_path / "run", 0.0, 3.0)
    with (run_dir / EVALUATIONS).open("a") as file:
        file.write('{"step": 3, "other.score": 1.0}\n')
    assert BestModel(METRIC, patience=1).enough(run_dir) is None


def test_an_unevaluated_metric_is_refused_with_a_list_of_evaluated_metrics(tmp_path):
    run_dir = recorded(tmp_path / "run", 0.0, name="record_evaluation.response_tokens")
    with pytest.raises(InvalidInput, match="expected an evaluated metric: record_evaluation.response_tokens"):
        BestModel(METRIC).best(run_dir)


def test_a_best_model_is_exported_with_the_tokenizer_of_its_own_folder(tmp_path):
    """It need not be that of the role that generates."""
    judge = make_model(tmp_path / "judge", vocab=320)
    save_bpe_tokenizer(tmp_path / "judge", ["good bad"])
    spec = read_model_spec("judge", judge, "lm")
    parts = [
        StatePart("main", one.name, tuple((0, size) for size in one.shape), torch.zeros(one.shape).flatten())
        for one in parameters(spec)
    ]
    write_shard(tmp_path / "checkpoint" / "judge.trunk", 0, 0, parts)
    export_stored(tmp_path / "checkpoint", spec, tmp_path / "best")
    assert have_same_files(tmp_path / "judge", tmp_path / "best", "judge.path")


def test_a_best_model_with_an_adapter_is_its_checkpoints_adapter(tmp_path):
    judge = make_model(tmp_path / "judge")
    spec = replace(read_model_spec("judge", judge, "lm", dtype="float32"), adapter=AdapterSpec(4, 8.0, ("o_proj",)))
    values = [torch.full(one.shape, float(place)) for place, one in enumerate(trained_parameters(spec))]
    parts = [
        StatePart("main", one.name, tuple((0, size) for size in one.shape), whole.flatten())
        for one, whole in zip(trained_parameters(spec), values, strict=True)
    ]
    write_shard(tmp_path / "checkpoint" / "judge.adapter", 0, 0, parts)
    export_stored(tmp_path / "checkpoint", spec, tmp_path / "best")
    with open_adapter(tmp_path / "best", "judge.adapter.path") as tensors:
        for one, whole in zip(trained_parameters(spec), values, strict=True):
            assert torch.equal(tensors.read(one.name, tuple((0, size) for size in one.shape)), whole)


def test_the_best_checkpoint_is_kept_and_carried_into_a_resumed_run(tmp_path):
    run_dir, later = recorded(tmp_path / "run", 0.0, 3.0, 1.0, 1.0), recorded(tmp_path / "later", 0.0, 3.0, 1.0, 1.0)
    for step in (2, 4, 6):
        folder_of(run_dir, step).mkdir(parents=True)
        (folder_of(run_dir, step) / "checkpoint.json").write_text("{}")
    best = BestModel(METRIC)
    keep_newest(run_dir, 1, best.spared(run_dir))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000006"]
    carry_over_best(best, run_dir, later)
    assert [path.name for path in (later / "checkpoints").iterdir()] == ["step-000002"]


def test_an_evaluation_without_any_score_is_no_candidate_and_does_not_end_the_run(tmp_path):
    """Its metric of scores is absent; a metric that is not of scores counts nevertheless."""
    scored = {"record_evaluation.unscored": 0.0, "record_evaluation.response_tokens": 5.0}
    lines = [{METRIC: -1.0, **scored}, {METRIC: -2.0, **scored}, {**scored, "record_evaluation.unscored": 1.0}]
    text = "".join(json.dumps({"step": 2 * place, **line}) + "\n" for place, line in enumerate(lines))
    (tmp_path / EVALUATIONS).write_text(text)
    assert BestModel(METRIC).best(tmp_path) == Evaluation(2, -2.0)
    assert len(BestModel("record_evaluation.response_tokens").evaluations(tmp_path)) == 2
    with pytest.raises(InvalidInput, match="best_metric: got 'record_evaluation.scor', expected an evaluated metric"):
        (tmp_path / EVALUATIONS).write_text(text.rpartition("{")[0])
        BestModel("record_evaluation.scor").best(tmp_path)
